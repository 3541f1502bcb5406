/* SPDX-License-Identifier: Apache-2.0 */
/* Requests: what of an operation is with the library, and what becomes of it. All of it under mu, unless it says otherwise.
 *
 * An operation is cut into requests. It ends when none of them is left: neither with the library, nor to be posted (again).
 * What is with the library cannot be recalled; to take one back, the whole link is taken down (`recall`), and the requests
 * of other operations that went with it are posted again over the next one, which their owners do not notice: nobody was
 * told that they had landed. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hixl_core.h"

#define STALLS 2             /* links of a peer's that stall one after the other, until all that is on them fails */
#define LOST_NS 300000000ull /* a lost peer's operations are reported after so long, whatever the library does */

/* ---- lists ---- */

void hx_hreqq_push(hx_hreqq_t *q, hx_hreq_t *r)
{
    r->next = NULL;
    r->prev = q->tail;
    *(q->tail ? &q->tail->next : &q->head) = r;
    q->tail = r;
}

void hx_hreqq_remove(hx_hreqq_t *q, hx_hreq_t *r)
{
    *(r->prev ? &r->prev->next : &q->head) = r->next;
    *(r->next ? &r->next->prev : &q->tail) = r->prev;
    r->next = r->prev = NULL;
}

hx_hreq_t *hx_hixl_new_request(hx_hixl_t *h, hx_op_t *op)
{
    hx_hreq_t *r = h->free_requests;
    if (!r)
        return NULL;
    h->free_requests = r->next;
    r->op = op;
    r->tries = 0;
    r->failed = r->blamed = r->posted = false;
    return r;
}

void hx_hixl_free_request(hx_hixl_t *h, hx_hreq_t *r)
{
    r->gen++; /* what the library still says of its number is about nobody */
    r->op = NULL;
    r->next = h->free_requests;
    h->free_requests = r;
}

/* The library works on a peer's requests in the order of their posts, so only the oldest can stall: the clock runs for its
 * operation alone, from when it became the oldest. */
static void start_clock(hx_hpeer_t *p)
{
    hx_hreq_t *oldest = p->with_library.head;
    if (oldest && !atomic_load(&oldest->op->progress_ns))
        atomic_store(&oldest->op->progress_ns, hx_now_ns());
}

void hx_hixl_into_library(hx_hpeer_t *p, hx_hreq_t *r)
{
    hx_hreqq_push(&p->with_library, r);
    start_clock(p);
    p->outstanding++;
    p->outstanding_bytes += r->nbytes;
    p->h->outstanding++;
    r->op->requests++;
    r->with_library = true;
}

void hx_hixl_out_of_library(hx_hpeer_t *p, hx_hreq_t *r)
{
    hx_hreqq_remove(&p->with_library, r);
    p->outstanding--;
    p->outstanding_bytes -= r->nbytes;
    p->h->outstanding--;
    r->op->requests--;
    r->posted = r->with_library = false;
    atomic_store(&r->op->progress_ns, 0);
    start_clock(p);
}

void hx_hixl_post_again(hx_hpeer_t *p, hx_hreq_t *r)
{
    r->failed = r->blamed = false;
    hx_hreqq_push(&p->again, r);
    r->op->again_requests++;
}

void hx_hixl_take_again(hx_hpeer_t *p, hx_hreq_t *r)
{
    hx_hreqq_remove(&p->again, r);
    r->op->again_requests--;
}

void hx_hixl_queue_op(hx_hpeer_t *p, hx_op_t *op)
{
    op->queued = true;
    hx_opq_push(&p->runq, op);
}

hx_op_t *hx_hixl_unqueue_op(hx_hpeer_t *p)
{
    hx_op_t *op = hx_opq_pop(&p->runq);
    if (op)
        op->queued = false;
    return op;
}

/* ---- ends ---- */

void hx_hixl_maybe_done(hx_op_t *op, hx_hdone_t *done)
{
    if (op->requests || op->again_requests || op->queued || op == op->ep->hixl->current)
        return;
    op->next = done->head;
    done->head = op;
}

void hx_hixl_finish(hx_hdone_t *done)
{
    while (done->head) {
        hx_op_t *op = done->head;
        done->head = op->next;
        op->next = NULL;
        hx_op_finish(op, hx_op_verdict(op));
    }
    while (done->notes) {
        hx_op_t *op = done->notes;
        hx_status_t status = hx_op_verdict(op);
        done->notes = op->next;
        free(op->note);
        op->note = NULL;
        hx_op_complete(op, status == HX_OK ? HX_ERR_ABORTED : status);
    }
}

void hx_hixl_blame(hx_op_t *op, uint32_t code, const char *detail)
{
    hx_op_fail(op, HX_ERR_PROVIDER, 0, code, detail);
}

void hx_hixl_request_failed(hx_hpeer_t *p, hx_hreq_t *r, uint32_t code, const char *detail)
{
    r->posted = false;
    r->failed = true;
    r->code = code;
    snprintf(r->detail, sizeof r->detail, "%s", detail ? detail : "");
    r->blamed = !p->latched; /* those that fail after it fail because of it */
    p->latched = p->recall = true;
    if (r->blamed) { /* the caller is not to wait for ever, should the link not come down */
        hx_hixl_blame(r->op, code, detail);
        hx_op_cancel_as(r->op, atomic_load(&r->op->gen), HX_ERR_PROVIDER);
    }
    hx_hixl_wake_poster(p);
}

void hx_hixl_request_over(hx_hpeer_t *p, hx_hreq_t *r, uint32_t code, const char *detail, hx_hdone_t *done)
{
    hx_op_t *op = r->op;
    if (code != HX_HIXL_SUCCESS) {
        hx_hixl_request_failed(p, r, code, detail);
        return;
    }
    atomic_fetch_add_explicit(&op->moved, r->nbytes, memory_order_relaxed);
    p->stalls = 0;
    p->done_ns = p->h->last_done_ns = hx_now_ns();
    hx_hixl_out_of_library(p, r);
    hx_hixl_free_request(p->h, r);
    hx_hixl_maybe_done(op, done);
    if (p->runq.head || p->again.head || p->h->quiesce || p->recall || !p->outstanding)
        hx_hixl_wake_poster(p);
}

void hx_hixl_swept_away(hx_hpeer_t *p, hx_hdone_t *done)
{
    hx_hreq_t *r;
    while ((r = p->with_library.head)) {
        hx_op_t *op = r->op;
        bool blamed = r->blamed;
        hx_hixl_out_of_library(p, r);
        if (blamed)
            hx_hixl_blame(op, r->code, r->detail);
        if (p->stalls >= STALLS && hx_op_verdict(op) == HX_OK)
            hx_op_fail(op, HX_ERR_TIMEOUT, 0, 0, NULL); /* its turn would be the next to stall */
        if (!blamed && hx_op_verdict(op) == HX_OK) {
            hx_hixl_post_again(p, r);
            continue;
        }
        hx_hixl_free_request(p->h, r);
        hx_hixl_maybe_done(op, done);
    }
}

void hx_hixl_fail_queued(hx_hpeer_t *p, hx_hdone_t *done)
{
    for (hx_op_t *op; (op = hx_hixl_unqueue_op(p));) {
        hx_hixl_blame(op, p->last_code, p->last_detail);
        hx_hixl_maybe_done(op, done);
    }
    for (hx_hreq_t *r; (r = p->again.head);) {
        hx_op_t *op = r->op;
        hx_hixl_take_again(p, r);
        hx_hixl_free_request(p->h, r);
        hx_hixl_blame(op, p->last_code, p->last_detail);
        hx_hixl_maybe_done(op, done);
    }
    for (hx_op_t *op; (op = hx_opq_pop(&p->notes));) {
        hx_hixl_blame(op, p->last_code, p->last_detail);
        op->next = done->notes;
        done->notes = op;
    }
}

/* ---- what has been told to end ---- */

static void drop_dead_again(hx_hpeer_t *p, hx_hdone_t *done)
{
    for (hx_hreq_t *r = p->again.head, *next; r; r = next) {
        hx_op_t *op = r->op;
        next = r->next;
        if (hx_op_verdict(op) == HX_OK || op == p->current)
            continue;
        hx_hixl_take_again(p, r);
        hx_hixl_free_request(p->h, r);
        hx_hixl_maybe_done(op, done);
    }
}

static void drop_dead_ops(hx_hpeer_t *p, hx_hdone_t *done)
{
    hx_opq_t alive = {NULL, NULL};
    for (hx_op_t *op; (op = hx_opq_pop(&p->runq));) {
        if (hx_op_verdict(op) == HX_OK || op == p->current) {
            hx_opq_push(&alive, op);
            continue;
        }
        op->queued = false;
        hx_hixl_maybe_done(op, done);
    }
    p->runq = alive;
    alive = (hx_opq_t){NULL, NULL};
    for (hx_op_t *op; (op = hx_opq_pop(&p->notes));) {
        if (hx_op_verdict(op) == HX_OK || op == p->current) {
            hx_opq_push(&alive, op);
            continue;
        }
        op->next = done->notes;
        done->notes = op;
    }
    p->notes = alive;
}

/* May an operation with this end drain, or must its link come down? What waits for ever has no end of its own; with a lost
 * peer nobody can tell. */
static bool may_drain(const hx_op_t *op, hx_status_t verdict)
{
    bool lost = atomic_load(&op->ep->state) == HX_EP_LOST && verdict != HX_ERR_ABORTED;
    return verdict != HX_ERR_TIMEOUT && verdict != HX_ERR_PROVIDER && !lost;
}

void hx_hixl_drop_dead(hx_hpeer_t *p, hx_hdone_t *done)
{
    drop_dead_again(p, done);
    drop_dead_ops(p, done);
    if (p->hungry)
        hx_hixl_wake_poster(p); /* does it still wait for room? */
}

/* A note that the library is sending: what becomes of it does not interest anybody any more. */
static void let_note_go(hx_hpeer_t *p, uint64_t now, hx_hdone_t *done)
{
    hx_op_t *op = p->noting;
    if (!op || hx_op_verdict(op) == HX_OK)
        return;
    hx_op_cancel_as(op, atomic_load(&op->gen), hx_op_verdict(op));
    if (now <= atomic_load(&op->cancel_ns) + p->h->engine->config.cancel_grace_ns && !p->h->stopping)
        return;
    p->noting = NULL; /* its poster finds it gone */
    op->next = done->notes;
    done->notes = op;
}

/* Ends what can be ended although the poster may be stuck in the library, and asks for the link to be taken down where it
 * holds what must come back. */
void hx_hixl_sweep(hx_hixl_t *h, hx_hpeer_t *p, uint64_t now, hx_hdone_t *done)
{
    uint64_t grace = h->engine->config.cancel_grace_ns;
    hx_hixl_drop_dead(p, done);
    let_note_go(p, now, done);
    for (hx_hreq_t *r = p->with_library.head; r; r = r->next) {
        hx_op_t *op = r->op;
        uint32_t gen = atomic_load(&op->gen);
        hx_status_t verdict = hx_op_verdict(op);
        if (verdict == HX_OK)
            continue;
        hx_op_cancel_as(op, gen, verdict); /* a lost peer, too: the caller is not to wait for the library for ever */
        uint64_t since = atomic_load(&op->cancel_ns);
        if (!may_drain(op, verdict) || now > since + grace || h->stopping) {
            if (!p->recall)
                hx_hixl_wake_poster(p);
            p->recall = true;
            p->stalled |= verdict == HX_ERR_TIMEOUT;
        }
        if (atomic_load(&op->ep->state) == HX_EP_LOST && (now > since + LOST_NS || h->stopping))
            hx_op_report_early(h->engine, op, gen);
    }
}

/* ---- what touches which bytes (not under mu) ---- */

static uint64_t tag_of(const hx_hreq_t *r)
{
    return (uint64_t)r->gen << 32 | r->index;
}

size_t hx_hixl_touching(hx_endpoint_t *ep, uint64_t region, const uint64_t *spans, size_t n, uint64_t **tags_p)
{
    hx_hpeer_t *p = ep->hixl;
    size_t count = 0, found = 0;
    *tags_p = NULL;
    if (!p || !n)
        return 0;
    hx_hixl_t *h = p->h;
    pthread_mutex_lock(&h->mu);
    uint64_t *tags = hx_alloc((p->outstanding + 1) * sizeof *tags);
    for (hx_hreq_t *r = p->with_library.head; r; r = r->next)
        if (r->op->ep == ep)
            tags[count++] = tag_of(r);
    pthread_mutex_unlock(&h->mu);
    /* One at a time: rows can be many, and others wait for the lock. A request that has gone touches nothing. */
    for (size_t i = 0; i < count; i++) {
        hx_hreq_t *r = &h->requests[(uint32_t)tags[i]];
        pthread_mutex_lock(&h->mu);
        bool touches = r->op && tag_of(r) == tags[i] && hx_op_meets(r->op, &r->batch, region, spans, n);
        pthread_mutex_unlock(&h->mu);
        if (touches)
            tags[found++] = tags[i];
    }
    if (found)
        *tags_p = tags;
    else
        free(tags);
    return found;
}

bool hx_hixl_holds(hx_endpoint_t *ep, uint64_t tag)
{
    hx_hpeer_t *p = ep->hixl;
    if (!p)
        return false;
    pthread_mutex_lock(&p->h->mu);
    const hx_hreq_t *r = &p->h->requests[(uint32_t)tag];
    /* One that waits to be posted again is checked against the revocation then. */
    bool holds = r->op && tag_of(r) == tag && r->with_library;
    pthread_mutex_unlock(&p->h->mu);
    return holds;
}
