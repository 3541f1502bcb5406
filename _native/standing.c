/* SPDX-License-Identifier: Apache-2.0 */
/* Spans of a region that are revoked now, for every peer or for one incarnation: what a peer that connects later, or
 * again, is told before it hears of the region. Control thread only; freed with the region. */
#include <stdlib.h>
#include <string.h>

#include "link.h"

typedef struct hx_standing {
    uint64_t off, end;
    bool one_peer;
    uint8_t incarnation[HX_INCARNATION_LEN];
} hx_standing_t;

static void push(hx_region_t *region, hx_standing_t entry)
{
    if (region->nstanding == region->standing_cap) {
        region->standing_cap = region->standing_cap ? 2 * region->standing_cap : 16;
        region->standing = realloc(region->standing, region->standing_cap * sizeof *region->standing);
        if (!region->standing)
            abort(); /* forgetting a revocation is not an option */
    }
    region->standing[region->nstanding++] = entry;
}

/* Takes [off, end) out of the entries of that peer, or of all; what is left on the sides stays. */
static void subtract(const hx_command_t *cmd, bool of_all, uint64_t off, uint64_t end)
{
    hx_region_t *region = cmd->region;
    for (size_t i = 0; i < region->nstanding;) {
        hx_standing_t e = region->standing[i];
        bool same = e.one_peer == cmd->one_peer && !memcmp(e.incarnation, cmd->incarnation, sizeof e.incarnation);
        if (e.end <= off || e.off >= end || !(of_all || same)) {
            i++;
            continue;
        }
        region->standing[i] = region->standing[--region->nstanding]; /* what moved here is looked at next */
        if (e.off < off) {
            hx_standing_t left = e;
            left.end = off;
            push(region, left);
        }
        if (e.end > end) {
            hx_standing_t right = e;
            right.off = end;
            push(region, right);
        }
    }
}

void hx_standing_add(const hx_command_t *cmd)
{
    for (size_t i = 0; i < cmd->n; i++) {
        hx_standing_t entry = {
            .off = cmd->spans[2 * i], .end = cmd->spans[2 * i] + cmd->spans[2 * i + 1], .one_peer = cmd->one_peer};
        memcpy(entry.incarnation, cmd->incarnation, sizeof entry.incarnation);
        subtract(cmd, false, entry.off, entry.end); /* the same span again and again keeps one entry */
        push(cmd->region, entry);
    }
}

/* A grant to every peer undoes those to single ones as well. One to a single peer leaves what is revoked for all as it is
 * for connections to come: its own link has been told, and a new one asks for a new grant. */
void hx_standing_grant(const hx_command_t *cmd)
{
    for (size_t i = 0; i < cmd->n; i++)
        subtract(cmd, !cmd->one_peer, cmd->spans[2 * i], cmd->spans[2 * i] + cmd->spans[2 * i + 1]);
}

uint64_t *hx_standing_spans(const hx_region_t *region, const uint8_t *incarnation, size_t *n_p)
{
    *n_p = 0;
    if (!region->nstanding)
        return NULL;
    uint64_t *spans = hx_alloc(region->nstanding * 16);
    for (size_t i = 0; i < region->nstanding; i++) {
        const hx_standing_t *e = &region->standing[i];
        if (e->one_peer && memcmp(e->incarnation, incarnation, sizeof e->incarnation))
            continue;
        spans[2 * *n_p] = e->off;
        spans[2 * *n_p + 1] = e->end - e->off;
        ++*n_p;
    }
    return spans;
}
