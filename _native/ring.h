/* SPDX-License-Identifier: Apache-2.0 */
/* A bounded ring of small numbers, many producers and many consumers, without locks.
 *
 * The engine keeps two of them over one pool of operations: submitted and completed. A number stands in at most one at
 * a time and each ring is as large as the pool. With one consumer at a time none can overflow: the slot that an
 * operation needs to complete is reserved by taking it from the free ones at post time. With several consumers a push
 * can find its cell still held by one that was preempted while the others went once round; so the free numbers, which
 * every posting thread takes, stand on a stack. */
#ifndef HX_RING_H
#define HX_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    _Atomic uint64_t turn; /* position it is good for, +1 once filled */
    uint32_t value;
} hx_ring_cell_t;

typedef struct {
    _Alignas(64) _Atomic uint64_t tail; /* next position to fill */
    _Alignas(64) _Atomic uint64_t head; /* next position to take */
    hx_ring_cell_t *cells;
    uint64_t mask;
} hx_ring_t;

bool hx_ring_init(hx_ring_t *ring, uint32_t capacity); /* a power of two */
void hx_ring_free(hx_ring_t *ring);
bool hx_ring_push(hx_ring_t *ring, uint32_t value);
/* False when empty, or when the producer of the oldest entry has not finished: it rings its bell after. */
bool hx_ring_pop(hx_ring_t *ring, uint32_t *value_p);
bool hx_ring_empty(hx_ring_t *ring);

/* Numbers below a capacity, each at most once; many threads. Neither call waits for or fails because of another
 * thread. */
typedef struct {
    _Alignas(64) _Atomic uint64_t top; /* count of changes << 32 | number + 1; 0 in the low half: empty */
    _Alignas(64) _Atomic uint32_t *below;
} hx_stack_t;

bool hx_stack_init(hx_stack_t *stack, uint32_t capacity);
void hx_stack_free(hx_stack_t *stack);
void hx_stack_push(hx_stack_t *stack, uint32_t value);
bool hx_stack_pop(hx_stack_t *stack, uint32_t *value_p);

/* Sleeping until a producer has published. Read the bell, look for work, and sleep only if the bell still
 * reads the same: nothing published in between is missed. */
typedef struct {
    _Atomic uint32_t count;
    _Atomic uint32_t sleepers;
} hx_bell_t;

uint32_t hx_bell_read(hx_bell_t *bell);
void hx_bell_ring(hx_bell_t *bell, int wake); /* wakes at most `wake` sleepers */
/* In two steps, for who rings under a lock that the sleeper takes next: the bell is rung under it, whoever sleeps is woken
 * behind it. The bell may be gone by then; what is at its address wakes for nothing, as all sleepers may. */
_Atomic uint32_t *hx_bell_strike(hx_bell_t *bell); /* NULL: nobody sleeps */
void hx_bell_wake(_Atomic uint32_t *struck, int wake);
void hx_bell_wait(hx_bell_t *bell, uint32_t seen);
void hx_bell_wait_ns(hx_bell_t *bell, uint32_t seen, uint64_t ns); /* at most so long */

#endif
