/* SPDX-License-Identifier: Apache-2.0 */
/* Where a test can hold up whoever comes by. */
#ifndef GATE_H
#define GATE_H

#include <pthread.h>

/* The next `to_hold` calls that come here stand still until the gate is opened. */
typedef struct {
    pthread_mutex_t mu;
    pthread_cond_t opened;
    unsigned to_hold, held, openings;
} gate_t;

#define GATE {.mu = PTHREAD_MUTEX_INITIALIZER, .opened = PTHREAD_COND_INITIALIZER}

static inline void hold(gate_t *g, unsigned calls)
{
    pthread_mutex_lock(&g->mu);
    g->to_hold = calls;
    pthread_mutex_unlock(&g->mu);
}

static inline void let(gate_t *g)
{
    pthread_mutex_lock(&g->mu);
    g->to_hold = 0;
    g->openings++;
    pthread_cond_broadcast(&g->opened);
    pthread_mutex_unlock(&g->mu);
}

static inline unsigned held(gate_t *g)
{
    pthread_mutex_lock(&g->mu);
    unsigned n = g->held;
    pthread_mutex_unlock(&g->mu);
    return n;
}

static inline void pass(gate_t *g)
{
    pthread_mutex_lock(&g->mu);
    if (g->to_hold) {
        unsigned openings = g->openings;
        g->to_hold--;
        g->held++;
        while (g->openings == openings)
            pthread_cond_wait(&g->opened, &g->mu);
        g->held--;
    }
    pthread_mutex_unlock(&g->mu);
}

#endif
