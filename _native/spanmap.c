/* SPDX-License-Identifier: Apache-2.0 */
#include "spanmap.h"

#include <stdlib.h>

typedef enum { REVOKE, GRANT, REMOVE } hx_change_t;

static int by_offset(const void *pa, const void *pb)
{
    const hx_span_t *a = pa, *b = pb;
    return a->off < b->off ? -1 : a->off > b->off;
}

/* Pairs as sorted, disjoint, non-empty spans. */
static hx_span_t *normalise(const uint64_t *pairs, size_t *n_p, uint64_t seq)
{
    size_t n = 0, out = 0;
    hx_span_t *list = malloc((*n_p + 1) * sizeof *list);
    if (!list)
        return NULL;
    for (size_t i = 0; i < *n_p; i++)
        if (pairs[2 * i + 1])
            list[n++] = (hx_span_t){pairs[2 * i], pairs[2 * i] + pairs[2 * i + 1], seq, true};
    qsort(list, n, sizeof *list, by_offset);
    for (size_t i = 0; i < n; i++) {
        if (out && list[i].off <= list[out - 1].end)
            list[out - 1].end = list[i].end > list[out - 1].end ? list[i].end : list[out - 1].end;
        else
            list[out++] = list[i];
    }
    *n_p = out;
    return list;
}

static void emit(hx_spanmap_t *map, hx_span_t span)
{
    hx_span_t *last = map->n ? &map->list[map->n - 1] : NULL;
    if (last && last->end == span.off && last->seq == span.seq && last->sticky == span.sticky) {
        last->end = span.end; /* what belongs together grows together again */
        return;
    }
    map->list[map->n++] = span;
    map->n_sticky += span.sticky;
}

static bool change(hx_spanmap_t *map, const uint64_t *pairs, size_t n, uint64_t seq, hx_change_t how)
{
    hx_span_t *spans = normalise(pairs, &n, seq);
    hx_spanmap_t out = {.list = malloc((map->n + 2 * n + 1) * sizeof *out.list)};
    if (!spans || !out.list) {
        free(spans);
        free(out.list);
        return false;
    }
    size_t s = 0, put = 0; /* the span that may still overlap; the span to be put in next */
    for (size_t i = 0; i < map->n; i++) {
        hx_span_t e = map->list[i];
        while (e.off < e.end) {
            while (s < n && spans[s].end <= e.off)
                s++;
            for (; how == REVOKE && put < n && spans[put].off <= e.off; put++)
                emit(&out, spans[put]);
            hx_span_t piece = e;
            if (s == n || spans[s].off >= e.end) {
                emit(&out, piece);
                break;
            }
            if (spans[s].off > e.off) { /* before the span: as it was */
                piece.end = spans[s].off;
                emit(&out, piece);
            } else { /* inside it */
                piece.end = e.end < spans[s].end ? e.end : spans[s].end;
                piece.sticky = false;
                if (how == GRANT)
                    emit(&out, piece);
            }
            e.off = piece.end;
        }
    }
    for (; how == REVOKE && put < n; put++)
        emit(&out, spans[put]);
    free(spans);
    free(map->list);
    *map = out;
    return true;
}

bool hx_spanmap_revoke(hx_spanmap_t *map, const uint64_t *spans, size_t n, uint64_t seq)
{
    return change(map, spans, n, seq, REVOKE);
}

bool hx_spanmap_grant(hx_spanmap_t *map, const uint64_t *spans, size_t n)
{
    return change(map, spans, n, 0, GRANT);
}

bool hx_spanmap_remove(hx_spanmap_t *map, const uint64_t *spans, size_t n)
{
    return change(map, spans, n, 0, REMOVE);
}

bool hx_spanmap_hits(const hx_spanmap_t *map, uint64_t off, uint64_t end, uint64_t epoch)
{
    size_t lo = 0, hi = map->n;
    while (lo < hi) { /* the first that ends after off */
        size_t mid = (lo + hi) / 2;
        if (map->list[mid].end <= off)
            lo = mid + 1;
        else
            hi = mid;
    }
    for (; lo < map->n && map->list[lo].off < end; lo++)
        if (map->list[lo].sticky || map->list[lo].seq > epoch)
            return true;
    return false;
}

void hx_spanmap_free(hx_spanmap_t *map)
{
    free(map->list);
    *map = (hx_spanmap_t){0};
}
