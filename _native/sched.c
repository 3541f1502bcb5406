/* SPDX-License-Identifier: Apache-2.0 */
/* The copy threads: one queue of endpoints, each with a queue of operations, both served in turn by chunks. A long
 * transfer shares its copy among all threads; a short one behind it waits for one chunk at most.
 *
 * An operation is in its endpoint's run queue, or in its blocked list, or (while prepared, or when its last bytes
 * are being copied) in neither, held by the threads that work on it. The thread that finds nothing left to do
 * finishes it. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "provider.h"

#define BATCH_DESCS 4096

void hx_opq_push(hx_opq_t *q, hx_op_t *op)
{
    op->next = NULL;
    if (q->tail)
        q->tail->next = op;
    else
        q->head = op;
    q->tail = op;
}

hx_op_t *hx_opq_pop(hx_opq_t *q)
{
    hx_op_t *op = q->head;
    if (op) {
        q->head = op->next;
        if (!q->head)
            q->tail = NULL;
    }
    return op;
}

/* ---- under sched->mu ---- */

static void activate(hx_sched_t *s, hx_endpoint_t *ep)
{
    if (ep->active)
        return;
    ep->active = true;
    ep->active_next = NULL;
    if (s->active_tail)
        s->active_tail->active_next = ep;
    else
        s->active_head = ep;
    s->active_tail = ep;
}

static hx_endpoint_t *next_active(hx_sched_t *s)
{
    hx_endpoint_t *ep = s->active_head;
    if (!ep)
        return NULL;
    s->active_head = ep->active_next;
    if (!s->active_head)
        s->active_tail = NULL;
    ep->active = false;
    return ep;
}

static void enqueue(hx_sched_t *s, hx_op_t *op)
{
    op->queued = true;
    hx_opq_push(&op->ep->runq, op);
    activate(s, op->ep);
}

static void block(hx_sched_t *s, hx_op_t *op, uint32_t kicks)
{
    hx_endpoint_t *ep = op->ep;
    if (atomic_load(&s->kicks) != kicks) {
        enqueue(s, op); /* what it waits for may have happened since it looked */
        return;
    }
    op->blocked = true;
    if (!ep->blocked.head) {
        ep->blocked_next = s->blocked_head;
        s->blocked_head = ep;
    }
    hx_opq_push(&ep->blocked, op);
}

/* Moves every blocked operation back; they are few, and each looks again at what it waits for. */
static void unblock_all(hx_sched_t *s)
{
    hx_endpoint_t *ep;
    while ((ep = s->blocked_head)) {
        s->blocked_head = ep->blocked_next;
        for (hx_op_t *op; (op = hx_opq_pop(&ep->blocked));) {
            op->blocked = false;
            enqueue(s, op);
        }
    }
}

static bool exhausted(const hx_op_t *op)
{
    return op->cursor >= op->ndescs && !op->nretry;
}

hx_batch_t hx_op_claim(hx_op_t *op, uint64_t nbytes)
{
    hx_batch_t b = {.first = op->cursor, .first_off = op->cursor_off};
    uint64_t budget = nbytes;
    size_t limit = op->cursor + BATCH_DESCS;
    while (op->cursor < op->ndescs && budget && op->cursor < limit) {
        uint64_t left = op->descs[op->cursor].nbytes - op->cursor_off;
        if (left > budget) {
            op->cursor_off += budget;
            b.last = op->cursor + 1;
            b.last_end = op->cursor_off;
            return b;
        }
        budget -= left;
        op->cursor++;
        op->cursor_off = 0;
    }
    b.last = op->cursor;
    b.last_end = 0;
    return b;
}

typedef enum { DO_NOTHING, DO_PREPARE, DO_COPY, DO_FINISH } hx_step_t;

static hx_step_t pick(hx_engine_t *engine, hx_op_t **op_p, hx_batch_t *batch)
{
    hx_sched_t *s = &engine->sched;
    hx_endpoint_t *ep;
    uint32_t index, kicks = atomic_load(&s->kicks);

    while (hx_ring_pop(&engine->submitted, &index))
        enqueue(s, &engine->ops[index]);
    if (kicks != s->kicks_seen) {
        s->kicks_seen = kicks;
        unblock_all(s);
    }
    while ((ep = next_active(s))) {
        hx_op_t *op = hx_opq_pop(&ep->runq);
        if (!op)
            continue;
        if (ep->runq.head)
            activate(s, ep);
        op->queued = false;
        *op_p = op;
        if (hx_op_verdict(op) != HX_OK) {
            if (op->running)
                continue; /* the last thread that still copies finishes it */
            return DO_FINISH;
        }
        if (!op->prepared)
            return DO_PREPARE;
        if (exhausted(op)) {
            if (op->running)
                continue;
            return DO_FINISH;
        }
        if (op->again && op->again_kicks == kicks && !op->running) {
            block(s, op, kicks);
            continue;
        }
        op->again = false;
        *batch = op->nretry ? op->retry[--op->nretry] : hx_op_claim(op, engine->config.chunk);
        op->running++;
        if (!exhausted(op))
            enqueue(s, op);
        return DO_COPY;
    }
    return DO_NOTHING;
}

/* ---- not under the lock ---- */

static void finish(hx_op_t *op)
{
    hx_status_t status = hx_op_verdict(op);
    hx_op_finish(op, status);
}

static void fail(hx_op_t *op, hx_status_t status, int err)
{
    uint32_t ok = HX_OK;
    if (atomic_compare_exchange_strong(&op->failed, &ok, status))
        op->sys_errno = err;
}

static void prepare(hx_engine_t *engine, hx_op_t *op)
{
    hx_sched_t *s = &engine->sched;
    uint32_t kicks = atomic_load(&s->kicks);
    if (!atomic_load(&op->progress_ns)) {
        atomic_store(&op->progress_ns, hx_now_ns());
        atomic_store(&op->stage, HX_STAGE_ACTIVE);
        hx_status_t status = hx_op_check_overlap(op);
        if (status != HX_OK)
            fail(op, status, 0);
    }
    hx_status_t status = atomic_load(&op->failed) ? HX_OK : op->provider->prepare(op);
    pthread_mutex_lock(&s->mu);
    if (status == HX_AGAIN) {
        block(s, op, kicks);
    } else {
        if (status != HX_OK)
            fail(op, status, op->sys_errno);
        op->prepared = true;
        enqueue(s, op);
    }
    pthread_mutex_unlock(&s->mu);
}

static void copy(hx_engine_t *engine, hx_op_t *op, hx_batch_t *batch, unsigned slot)
{
    hx_sched_t *s = &engine->sched;
    uint32_t kicks = atomic_load(&s->kicks);
    int err = 0;
    hx_status_t status = op->provider->copy(op, batch, slot, &err);
    if (status != HX_AGAIN)
        atomic_store(&op->progress_ns, hx_now_ns());
    if (status != HX_OK && status != HX_AGAIN)
        fail(op, status, err);

    pthread_mutex_lock(&s->mu);
    op->running--;
    if (status == HX_AGAIN) {
        op->retry[op->nretry++] = *batch; /* at most one for each thread */
        op->again = true;
        op->again_kicks = kicks;
    }
    bool over = hx_op_verdict(op) != HX_OK || exhausted(op);
    bool mine = !op->queued && !op->blocked && !op->running && over;
    if (status == HX_AGAIN && !mine && !op->queued && !op->blocked)
        block(s, op, kicks);
    pthread_mutex_unlock(&s->mu);
    if (mine)
        finish(op);
}

static void *work(void *arg)
{
    struct {
        hx_engine_t *engine;
        unsigned slot;
    } *start = arg;
    hx_engine_t *engine = start->engine;
    hx_sched_t *s = &engine->sched;
    unsigned slot = start->slot;
    free(arg);

    /* Long copies should not delay whoever wakes up for a completion. */
    struct sched_param param = {0};
    pthread_setschedparam(pthread_self(), SCHED_BATCH, &param);

    for (;;) {
        uint32_t seen = hx_bell_read(&s->bell);
        hx_op_t *op;
        hx_batch_t batch;
        pthread_mutex_lock(&s->mu);
        hx_step_t step = pick(engine, &op, &batch);
        bool more = s->active_head != NULL;
        pthread_mutex_unlock(&s->mu);
        if (more)
            hx_bell_ring(&s->bell, 1);
        switch (step) {
        case DO_PREPARE:
            prepare(engine, op);
            break;
        case DO_COPY:
            copy(engine, op, &batch, slot);
            break;
        case DO_FINISH:
            finish(op);
            break;
        case DO_NOTHING:
            if (atomic_load(&s->stopping))
                return NULL;
            hx_bell_wait(&s->bell, seen);
            break;
        }
    }
}

void hx_sched_submit(hx_op_t *op)
{
    hx_engine_t *engine = op->ep->engine;
    hx_ring_push(&engine->submitted, op->index);
    hx_bell_ring(&engine->sched.bell, 1);
}

void hx_sched_kick(hx_engine_t *engine)
{
    atomic_fetch_add(&engine->sched.kicks, 1);
    hx_bell_ring(&engine->sched.bell, 1);
    hx_providers_kick(engine);
}

hx_status_t hx_sched_start(hx_engine_t *engine)
{
    hx_sched_t *s = &engine->sched;
    s->engine = engine;
    for (unsigned i = 0; i < engine->config.copy_threads; i++) {
        struct {
            hx_engine_t *engine;
            unsigned slot;
        } *start = hx_alloc(sizeof *start);
        start->engine = engine;
        start->slot = i;
        char name[24];
        snprintf(name, sizeof name, "hx-copy-%u", i);
        if (!hx_thread_start(&s->threads[i], work, start, name)) {
            free(start);
            return HX_ERR_SYSTEM;
        }
        s->nthreads++;
    }
    return HX_OK;
}

void hx_sched_stop(hx_engine_t *engine)
{
    hx_sched_t *s = &engine->sched;
    atomic_store(&s->stopping, true);
    hx_bell_ring(&s->bell, HX_MAX_WORKERS);
    for (uint32_t i = 0; i < s->nthreads; i++)
        pthread_join(s->threads[i], NULL);
    s->nthreads = 0;
    if (!engine->ops)
        return; /* the engine could not be opened */
    for (uint32_t index; hx_ring_pop(&engine->submitted, &index);)
        hx_op_finish(&engine->ops[index], HX_ERR_ABORTED);
}
