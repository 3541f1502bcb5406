/* SPDX-License-Identifier: Apache-2.0 */
/* Spans of a region that are revoked now, for every peer or for one incarnation: what a peer that connects later, or
 * again, is told before it hears of the region. Control thread only; freed with the region. */
#include <stdlib.h>
#include <string.h>

#include "link.h"

struct hx_standing {
    hx_standing_t *next;
    bool one_peer;
    uint8_t incarnation[HX_INCARNATION_LEN];
    hx_spanmap_t spans;
};

static bool meant(const hx_standing_t *s, bool one_peer, const uint8_t *incarnation)
{
    return s->one_peer == one_peer && (!one_peer || !memcmp(s->incarnation, incarnation, HX_INCARNATION_LEN));
}

void hx_standing_add(const hx_command_t *cmd)
{
    hx_standing_t *s = cmd->region->standing;
    while (s && !meant(s, cmd->one_peer, cmd->incarnation))
        s = s->next;
    if (!s) {
        s = hx_alloc(sizeof *s);
        s->one_peer = cmd->one_peer;
        memcpy(s->incarnation, cmd->incarnation, sizeof s->incarnation);
        s->next = cmd->region->standing;
        cmd->region->standing = s;
    }
    if (!hx_spanmap_revoke(&s->spans, cmd->spans, cmd->n, 0))
        abort(); /* forgetting a revocation is not an option */
}

/* A grant to every peer undoes those to single ones as well. One to a single peer leaves what is revoked for all as it is
 * for connections to come: its own link has been told, and a new one asks for a new grant. */
void hx_standing_grant(const hx_command_t *cmd)
{
    for (hx_standing_t **p = &cmd->region->standing, *s; (s = *p);) {
        if (!cmd->one_peer || meant(s, true, cmd->incarnation))
            hx_spanmap_remove(&s->spans, cmd->spans, cmd->n); /* out of memory it stays revoked, which is safe */
        if (s->spans.n) {
            p = &s->next;
            continue;
        }
        *p = s->next;
        hx_spanmap_free(&s->spans);
        free(s);
    }
}

uint64_t *hx_standing_spans(const hx_region_t *region, const uint8_t *incarnation, size_t *n_p)
{
    size_t n = 0;
    *n_p = 0;
    for (const hx_standing_t *s = region->standing; s; s = s->next)
        n += meant(s, false, NULL) || meant(s, true, incarnation) ? s->spans.n : 0;
    if (!n)
        return NULL;
    uint64_t *pairs = hx_alloc(n * 16);
    for (const hx_standing_t *s = region->standing; s; s = s->next)
        for (size_t i = 0; (meant(s, false, NULL) || meant(s, true, incarnation)) && i < s->spans.n; i++) {
            pairs[2 * *n_p] = s->spans.list[i].off;
            pairs[2 * *n_p + 1] = s->spans.list[i].end - s->spans.list[i].off;
            ++*n_p;
        }
    return pairs;
}

void hx_standing_free(hx_region_t *region)
{
    for (hx_standing_t *s; (s = region->standing);) {
        region->standing = s->next;
        hx_spanmap_free(&s->spans);
        free(s);
    }
}
