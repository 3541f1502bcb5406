/* SPDX-License-Identifier: Apache-2.0 */
/* Spans that an owner has taken back from us, as its control link told us.
 *
 * Each revocation has a sequence number; each operation carries the number that was current when its permission was
 * given (its epoch). A span is refused while it is revoked and not granted again, and for ever to operations older
 * than its revocation: a stream that was opened before its blocks were revoked cannot write into them after they
 * were granted to somebody else. */
#include <stdlib.h>

#include "core.h"

#define SPANS_MAX (1u << 22) /* of one peer: more is a flood, not a revocation */

typedef struct hx_revoked_map {
    struct hx_revoked_map *next;
    uint64_t region;
    hx_spanmap_t spans;
} hx_revoked_map_t;

void hx_revoked_init(hx_revoked_set_t *set)
{
    pthread_mutex_init(&set->mu, NULL);
}

static hx_revoked_list_t *list_of(hx_revoked_set_t *set, uint64_t region)
{
    return &set->lists[region % HX_REVOKED_LISTS];
}

static hx_revoked_map_t **find(hx_revoked_set_t *set, uint64_t region)
{
    hx_revoked_map_t **p = &list_of(set, region)->maps;
    while (*p && (*p)->region != region)
        p = &(*p)->next;
    return p;
}

static void count(hx_revoked_set_t *set, hx_revoked_list_t *list, const hx_spanmap_t *before, const hx_spanmap_t *after)
{
    set->n_spans += after->n - before->n;
    atomic_fetch_add(&list->n_sticky, (uint32_t)(after->n_sticky - before->n_sticky));
}

static void drop(hx_revoked_set_t *set, hx_revoked_map_t **p)
{
    hx_revoked_map_t *map = *p;
    *p = map->next;
    count(set, list_of(set, map->region), &map->spans, &(hx_spanmap_t){0});
    hx_spanmap_free(&map->spans);
    free(map);
}

void hx_revoked_free(hx_revoked_set_t *set)
{
    for (size_t b = 0; b < HX_REVOKED_LISTS; b++)
        while (set->lists[b].maps)
            drop(set, &set->lists[b].maps);
    pthread_mutex_destroy(&set->mu);
}

bool hx_revoked_add(hx_revoked_set_t *set, uint64_t region, const uint64_t *spans, size_t n, uint64_t seq)
{
    hx_revoked_list_t *list = list_of(set, region);
    pthread_mutex_lock(&set->mu);
    hx_revoked_map_t **p = find(set, region);
    if (!*p && (*p = calloc(1, sizeof **p)))
        (*p)->region = region;
    bool ok = *p && set->n_spans + n <= SPANS_MAX;
    if (ok) {
        hx_spanmap_t before = (*p)->spans;
        ok = hx_spanmap_revoke(&(*p)->spans, spans, n, seq);
        if (ok)
            count(set, list, &before, &(*p)->spans);
    }
    atomic_store(&set->newest, seq);
    pthread_mutex_unlock(&set->mu);
    if (ok)
        atomic_store(&set->applied, seq); /* last: whoever sees it sees the spans */
    return ok;
}

/* Out of memory, the spans stay revoked, which is safe. */
void hx_revoked_grant(hx_revoked_set_t *set, uint64_t region, const uint64_t *spans, size_t n)
{
    pthread_mutex_lock(&set->mu);
    hx_revoked_map_t *map = *find(set, region);
    if (map) {
        hx_spanmap_t before = map->spans;
        if (hx_spanmap_grant(&map->spans, spans, n))
            count(set, list_of(set, region), &before, &map->spans);
    }
    pthread_mutex_unlock(&set->mu);
}

void hx_revoked_forget(hx_revoked_set_t *set, uint64_t region)
{
    pthread_mutex_lock(&set->mu);
    hx_revoked_map_t **p = find(set, region);
    if (*p)
        drop(set, p);
    pthread_mutex_unlock(&set->mu);
}

bool hx_revoked_quiet(hx_revoked_set_t *set, uint64_t region, uint64_t epoch)
{
    return !atomic_load(&list_of(set, region)->n_sticky) && epoch >= atomic_load(&set->newest);
}

bool hx_revoked_hits(hx_revoked_set_t *set, uint64_t region, uint64_t off, uint64_t end, uint64_t epoch)
{
    if (hx_revoked_quiet(set, region, epoch))
        return false;
    pthread_mutex_lock(&set->mu);
    const hx_revoked_map_t *map = *find(set, region);
    bool hit = map && hx_spanmap_hits(&map->spans, off, end, epoch);
    pthread_mutex_unlock(&set->mu);
    return hit;
}
