/* SPDX-License-Identifier: Apache-2.0 */
/* Revoked spans of one region: sorted and disjoint, so that every change is one pass and every question a binary search.
 * Of a byte that was revoked several times only the newest sequence number is kept: it refuses all that the older ones
 * would. */
#ifndef HX_SPANMAP_H
#define HX_SPANMAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint64_t off, end, seq;
    bool sticky; /* not granted again */
} hx_span_t;

typedef struct {
    hx_span_t *list;
    size_t n, n_sticky;
} hx_spanmap_t;

/* `spans`: n pairs (offset, nbytes), in any order, overlapping or not. False: no memory, and nothing has changed. */
bool hx_spanmap_revoke(hx_spanmap_t *map, const uint64_t *spans, size_t n, uint64_t seq);
bool hx_spanmap_grant(hx_spanmap_t *map, const uint64_t *spans, size_t n);  /* no longer sticky */
bool hx_spanmap_remove(hx_spanmap_t *map, const uint64_t *spans, size_t n); /* forgotten */
bool hx_spanmap_hits(const hx_spanmap_t *map, uint64_t off, uint64_t end, uint64_t epoch);
void hx_spanmap_free(hx_spanmap_t *map);

#endif
