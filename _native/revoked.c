/* SPDX-License-Identifier: Apache-2.0 */
/* Spans that an owner has taken back from us, as its control link told us.
 *
 * Each revocation has a sequence number; each operation carries the number that was current when its permission was
 * given (its epoch). A span is refused while it is revoked and not granted again, and for ever to operations older
 * than its revocation: a stream that was opened before its blocks were revoked cannot write into them after they
 * were granted to somebody else. */
#include <stdlib.h>

#include "core.h"

#define KEEP 1024 /* entries that were granted again and matter only to old operations */

void hx_revoked_init(hx_revoked_set_t *set)
{
    pthread_mutex_init(&set->mu, NULL);
}

void hx_revoked_free(hx_revoked_set_t *set)
{
    pthread_mutex_destroy(&set->mu);
    free(set->list);
}

static bool push(hx_revoked_set_t *set, hx_revoked_t entry)
{
    if (set->n == set->cap) {
        size_t cap = set->cap ? set->cap * 2 : 16;
        hx_revoked_t *list = realloc(set->list, cap * sizeof *list);
        if (!list)
            return false;
        set->list = list;
        set->cap = cap;
    }
    set->list[set->n++] = entry;
    return true;
}

/* Forgets the oldest granted entries; operations that would need them are refused from then on. */
static void prune(hx_revoked_set_t *set)
{
    size_t loose = set->n - atomic_load(&set->n_sticky);
    if (loose <= KEEP)
        return;
    size_t drop = loose - KEEP / 2, out = 0;
    for (size_t i = 0; i < set->n; i++) {
        if (!set->list[i].sticky && drop) {
            drop--;
            if (set->list[i].seq > atomic_load(&set->min_epoch))
                atomic_store(&set->min_epoch, set->list[i].seq);
        } else {
            set->list[out++] = set->list[i];
        }
    }
    set->n = out;
}

bool hx_revoked_add(hx_revoked_set_t *set, uint64_t region, const uint64_t *spans, size_t n, uint64_t seq)
{
    bool ok = true;
    pthread_mutex_lock(&set->mu);
    for (size_t i = 0; i < n && ok; i++) {
        ok = push(set, (hx_revoked_t){region, spans[2 * i], spans[2 * i] + spans[2 * i + 1], seq, true});
        if (ok)
            atomic_fetch_add(&set->n_sticky, 1);
    }
    prune(set);
    atomic_store(&set->newest, seq);
    pthread_mutex_unlock(&set->mu);
    if (ok)
        atomic_store(&set->applied, seq); /* last: whoever sees it sees the entries */
    return ok;
}

/* A granted part of an entry becomes loose; what is left on its sides stays sticky. */
void hx_revoked_grant(hx_revoked_set_t *set, uint64_t region, const uint64_t *spans, size_t n)
{
    pthread_mutex_lock(&set->mu);
    for (size_t k = 0; k < n; k++) {
        uint64_t off = spans[2 * k], end = off + spans[2 * k + 1];
        for (size_t i = 0, stop = set->n; i < stop; i++) {
            hx_revoked_t e = set->list[i];
            if (!e.sticky || e.region != region || e.end <= off || e.off >= end)
                continue;
            uint64_t lo = e.off > off ? e.off : off, hi = e.end < end ? e.end : end;
            hx_revoked_t before = {region, e.off, lo, e.seq, true}, after = {region, hi, e.end, e.seq, true};
            bool ok = true;
            if (before.off < before.end && (ok = push(set, before)))
                atomic_fetch_add(&set->n_sticky, 1);
            if (ok && after.off < after.end && (ok = push(set, after)))
                atomic_fetch_add(&set->n_sticky, 1);
            if (!ok)
                continue; /* no memory: it stays revoked, which is safe */
            set->list[i] = (hx_revoked_t){region, lo, hi, e.seq, false};
            atomic_fetch_sub(&set->n_sticky, 1);
        }
    }
    prune(set);
    pthread_mutex_unlock(&set->mu);
}

void hx_revoked_forget(hx_revoked_set_t *set, uint64_t region)
{
    size_t out = 0;
    uint32_t sticky = 0;
    pthread_mutex_lock(&set->mu);
    for (size_t i = 0; i < set->n; i++)
        if (set->list[i].region != region)
            set->list[out++] = set->list[i];
        else
            sticky += set->list[i].sticky;
    set->n = out;
    atomic_fetch_sub(&set->n_sticky, sticky);
    pthread_mutex_unlock(&set->mu);
}

bool hx_revoked_hits(hx_revoked_set_t *set, uint64_t region, uint64_t off, uint64_t end, uint64_t epoch)
{
    bool old = epoch < atomic_load(&set->newest);
    if (epoch < atomic_load(&set->min_epoch))
        return true;
    if (!old && !atomic_load(&set->n_sticky))
        return false;
    bool hit = false;
    pthread_mutex_lock(&set->mu);
    for (size_t i = 0; i < set->n && !hit; i++) {
        const hx_revoked_t *e = &set->list[i];
        hit = e->region == region && e->off < end && e->end > off && (e->sticky || e->seq > epoch);
    }
    pthread_mutex_unlock(&set->mu);
    return hit;
}
