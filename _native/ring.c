/* SPDX-License-Identifier: Apache-2.0 */
/* The ring is D. Vyukov's bounded queue (cells that carry a turn number). The turn is published with a
 * sequentially consistent store because the doorbell (engine.c) depends on store-then-load order across two
 * words: publish an entry, then look whether the consumer sleeps. Release/acquire alone loses wake-ups. */
#include "ring.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

bool hx_ring_init(hx_ring_t *ring, uint32_t capacity)
{
    ring->cells = calloc(capacity, sizeof *ring->cells);
    if (!ring->cells)
        return false;
    for (uint32_t i = 0; i < capacity; i++)
        atomic_init(&ring->cells[i].turn, i);
    ring->mask = capacity - 1;
    atomic_init(&ring->head, 0);
    atomic_init(&ring->tail, 0);
    return true;
}

void hx_ring_free(hx_ring_t *ring)
{
    free(ring->cells);
    ring->cells = NULL;
}

bool hx_ring_push(hx_ring_t *ring, uint32_t value)
{
    uint64_t pos = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    for (;;) {
        hx_ring_cell_t *cell = &ring->cells[pos & ring->mask];
        int64_t gap = (int64_t)(atomic_load_explicit(&cell->turn, memory_order_acquire) - pos);
        if (gap == 0) {
            if (atomic_compare_exchange_weak_explicit(&ring->tail, &pos, pos + 1, memory_order_relaxed,
                                                      memory_order_relaxed)) {
                cell->value = value;
                atomic_store(&cell->turn, pos + 1);
                return true;
            }
        } else if (gap < 0) {
            return false;
        } else {
            pos = atomic_load_explicit(&ring->tail, memory_order_relaxed);
        }
    }
}

bool hx_ring_pop(hx_ring_t *ring, uint32_t *value_p)
{
    uint64_t pos = atomic_load_explicit(&ring->head, memory_order_relaxed);
    for (;;) {
        hx_ring_cell_t *cell = &ring->cells[pos & ring->mask];
        int64_t gap = (int64_t)(atomic_load(&cell->turn) - (pos + 1));
        if (gap == 0) {
            if (atomic_compare_exchange_weak_explicit(&ring->head, &pos, pos + 1, memory_order_relaxed,
                                                      memory_order_relaxed)) {
                *value_p = cell->value;
                atomic_store_explicit(&cell->turn, pos + ring->mask + 1, memory_order_release);
                return true;
            }
        } else if (gap < 0) {
            return false;
        } else {
            pos = atomic_load_explicit(&ring->head, memory_order_relaxed);
        }
    }
}

bool hx_ring_empty(hx_ring_t *ring)
{
    uint64_t pos = atomic_load_explicit(&ring->head, memory_order_relaxed);
    return (int64_t)(atomic_load(&ring->cells[pos & ring->mask].turn) - (pos + 1)) < 0;
}

bool hx_stack_init(hx_stack_t *stack, uint32_t capacity)
{
    atomic_init(&stack->top, 0);
    stack->below = calloc(capacity, sizeof *stack->below);
    return stack->below != NULL;
}

void hx_stack_free(hx_stack_t *stack)
{
    free((void *)stack->below);
    stack->below = NULL;
}

/* The count makes a top that was taken and put back in between another one. */
static uint64_t next_top(uint64_t top, uint32_t low)
{
    return ((top >> 32) + 1) << 32 | low;
}

void hx_stack_push(hx_stack_t *stack, uint32_t value)
{
    uint64_t top = atomic_load(&stack->top);
    do {
        atomic_store_explicit(&stack->below[value], (uint32_t)top, memory_order_relaxed);
    } while (!atomic_compare_exchange_weak(&stack->top, &top, next_top(top, value + 1)));
}

bool hx_stack_pop(hx_stack_t *stack, uint32_t *value_p)
{
    uint64_t top = atomic_load(&stack->top);
    uint32_t below;
    do {
        if (!(uint32_t)top)
            return false;
        below = atomic_load_explicit(&stack->below[(uint32_t)top - 1], memory_order_relaxed);
    } while (!atomic_compare_exchange_weak(&stack->top, &top, next_top(top, below)));
    *value_p = (uint32_t)top - 1;
    return true;
}

uint32_t hx_bell_read(hx_bell_t *bell)
{
    return atomic_load(&bell->count);
}

_Atomic uint32_t *hx_bell_strike(hx_bell_t *bell)
{
    atomic_fetch_add(&bell->count, 1);
    return atomic_load(&bell->sleepers) > 0 ? &bell->count : NULL;
}

void hx_bell_wake(_Atomic uint32_t *struck, int wake)
{
    if (struck)
        syscall(SYS_futex, struck, FUTEX_WAKE_PRIVATE, wake, NULL, NULL, 0);
}

void hx_bell_ring(hx_bell_t *bell, int wake)
{
    hx_bell_wake(hx_bell_strike(bell), wake);
}

static void wait_for(hx_bell_t *bell, uint32_t seen, const struct timespec *patience)
{
    atomic_fetch_add(&bell->sleepers, 1);
    syscall(SYS_futex, &bell->count, FUTEX_WAIT_PRIVATE, seen, patience, NULL, 0);
    atomic_fetch_sub(&bell->sleepers, 1);
}

void hx_bell_wait(hx_bell_t *bell, uint32_t seen)
{
    wait_for(bell, seen, NULL);
}

void hx_bell_wait_ns(hx_bell_t *bell, uint32_t seen, uint64_t ns)
{
    struct timespec patience = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    wait_for(bell, seen, &patience);
}
