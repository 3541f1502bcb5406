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
    for (size_t b = 0; b < HX_REVOKED_LISTS; b++)
        free(set->lists[b].entries);
}

static hx_revoked_list_t *list_of(hx_revoked_set_t *set, uint64_t region)
{
    return &set->lists[region % HX_REVOKED_LISTS];
}

static void count_sticky(hx_revoked_set_t *set, hx_revoked_list_t *list, int change)
{
    atomic_fetch_add(&set->n_sticky, (uint32_t)change);
    atomic_fetch_add(&list->n_sticky, (uint32_t)change);
}

static bool push(hx_revoked_set_t *set, hx_revoked_t entry)
{
    hx_revoked_list_t *list = list_of(set, entry.region);
    if (list->n == list->cap) {
        size_t cap = list->cap ? list->cap * 2 : 16;
        hx_revoked_t *entries = realloc(list->entries, cap * sizeof *entries);
        if (!entries)
            return false;
        list->entries = entries;
        list->cap = cap;
    }
    list->entries[list->n++] = entry;
    count_sticky(set, list, 1);
    return true;
}

/* Keeps the entries that `keep` wants. */
static void filter(hx_revoked_set_t *set, hx_revoked_list_t *list, bool (*keep)(const hx_revoked_t *, uint64_t),
                   uint64_t arg)
{
    size_t out = 0;
    for (size_t i = 0; i < list->n; i++) {
        hx_revoked_t e = list->entries[i];
        if (keep(&e, arg))
            list->entries[out++] = e;
        else if (e.sticky)
            count_sticky(set, list, -1);
        else
            set->n_loose--;
    }
    list->n = out;
}

static bool sticky_or_newer(const hx_revoked_t *e, uint64_t seq)
{
    return e->sticky || e->seq > seq;
}

static bool of_another_region(const hx_revoked_t *e, uint64_t region)
{
    return e->region != region;
}

/* Forgets the older half of the granted entries; operations that would need them are refused from then on. */
static void prune(hx_revoked_set_t *set)
{
    while (set->n_loose > KEEP) {
        uint64_t oldest = UINT64_MAX, newest = 0;
        for (size_t b = 0; b < HX_REVOKED_LISTS; b++)
            for (size_t i = 0; i < set->lists[b].n; i++) {
                const hx_revoked_t *e = &set->lists[b].entries[i];
                if (e->sticky)
                    continue;
                oldest = e->seq < oldest ? e->seq : oldest;
                newest = e->seq > newest ? e->seq : newest;
            }
        uint64_t middle = oldest + (newest - oldest) / 2;
        if (middle > atomic_load(&set->min_epoch))
            atomic_store(&set->min_epoch, middle);
        for (size_t b = 0; b < HX_REVOKED_LISTS; b++)
            filter(set, &set->lists[b], sticky_or_newer, middle);
    }
}

bool hx_revoked_add(hx_revoked_set_t *set, uint64_t region, const uint64_t *spans, size_t n, uint64_t seq)
{
    bool ok = true;
    pthread_mutex_lock(&set->mu);
    for (size_t i = 0; i < n && ok; i++)
        ok = push(set, (hx_revoked_t){region, spans[2 * i], spans[2 * i] + spans[2 * i + 1], seq, true});
    atomic_store(&set->newest, seq);
    pthread_mutex_unlock(&set->mu);
    if (ok)
        atomic_store(&set->applied, seq); /* last: whoever sees it sees the entries */
    return ok;
}

/* A granted part of an entry becomes loose; what is left on its sides stays sticky. */
void hx_revoked_grant(hx_revoked_set_t *set, uint64_t region, const uint64_t *spans, size_t n)
{
    hx_revoked_list_t *list = list_of(set, region);
    pthread_mutex_lock(&set->mu);
    for (size_t k = 0; k < n; k++) {
        uint64_t off = spans[2 * k], end = off + spans[2 * k + 1];
        for (size_t i = 0, stop = list->n; i < stop; i++) {
            hx_revoked_t e = list->entries[i];
            if (!e.sticky || e.region != region || e.end <= off || e.off >= end)
                continue;
            uint64_t lo = e.off > off ? e.off : off, hi = e.end < end ? e.end : end;
            if ((e.off < lo && !push(set, (hx_revoked_t){region, e.off, lo, e.seq, true})) ||
                (hi < e.end && !push(set, (hx_revoked_t){region, hi, e.end, e.seq, true})))
                continue; /* no memory: it stays revoked, which is safe */
            list->entries[i] = (hx_revoked_t){region, lo, hi, e.seq, false};
            count_sticky(set, list, -1);
            set->n_loose++;
        }
    }
    prune(set);
    pthread_mutex_unlock(&set->mu);
}

void hx_revoked_forget(hx_revoked_set_t *set, uint64_t region)
{
    pthread_mutex_lock(&set->mu);
    filter(set, list_of(set, region), of_another_region, region);
    pthread_mutex_unlock(&set->mu);
}

bool hx_revoked_quiet(hx_revoked_set_t *set, uint64_t region, uint64_t epoch)
{
    return !atomic_load(&list_of(set, region)->n_sticky) && epoch >= atomic_load(&set->newest) &&
           epoch >= atomic_load(&set->min_epoch);
}

bool hx_revoked_hits(hx_revoked_set_t *set, uint64_t region, uint64_t off, uint64_t end, uint64_t epoch)
{
    bool old = epoch < atomic_load(&set->newest);
    if (epoch < atomic_load(&set->min_epoch))
        return true;
    hx_revoked_list_t *list = list_of(set, region);
    if (!old && !atomic_load(&list->n_sticky))
        return false;
    bool hit = false;
    pthread_mutex_lock(&set->mu);
    for (size_t i = 0; i < list->n && !hit; i++) {
        const hx_revoked_t *e = &list->entries[i];
        hit = e->region == region && e->off < end && e->end > off && (e->sticky || e->seq > epoch);
    }
    pthread_mutex_unlock(&set->mu);
    return hit;
}
