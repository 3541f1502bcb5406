/* SPDX-License-Identifier: Apache-2.0 */
/* The queue pair to a peer, from the first to the last of them.
 *
 * Both ends make one and tell the other (PATH). One that has failed, or with which something must be taken back, is destroyed,
 * which is when its device touches no memory of ours any more; then another is made, of the next generation, and the peer is
 * told. A peer that hears of a newer generation than its own does the same, and answers with it: what was still on its way to
 * the old one arrives nowhere, and until that answer we count its bytes as on their way. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "link.h"
#include "verbs_core.h"

/* ---- aborted notes ---- */

void hx_verbs_free_notes(hx_vpeer_t *p)
{
    for (hx_note_t *note; (note = p->held);) {
        p->held = note->next;
        free(note);
    }
}

static void release_notes(hx_vpeer_t *p)
{
    for (hx_note_t *note; (note = p->held);) {
        p->held = note->next;
        note->next = NULL;
        if (!hx_endpoint_push_note(p->ep, note))
            free(note);
    }
}

/* ---- up and down: the provider's thread, but for the first of them ---- */

#define AGAIN_NS 1000000000ull /* between attempts at what was refused */

/* Under mu. */
static bool make(hx_vpeer_t *p)
{
    hx_verbs_t *v = p->v;
    int error = v->gone ? ENODEV : 0;
    p->depth = v->info.max_wr < HX_VERBS_DEPTH ? v->info.max_wr : HX_VERBS_DEPTH;
    p->used = 0;
    p->failed = p->met = false;
    p->mine.flush_rkey = v->flush_rkey;
    if (!error)
        error = v->lib->create(v->device, p->depth, p, &p->qp, &p->mine.address, &p->inline_max);
    if (error) {
        p->qp = NULL;
        snprintf(p->why, sizeof p->why, "no queue pair can be made: %.80s", strerror(error));
    }
    return !error;
}

/* Under mu, which it drops: the queue pair goes, and with it what was on it. */
static void down(hx_vpeer_t *p, const char *why, bool gone, hx_vdone_t *done)
{
    hx_verbs_t *v = p->v;
    hx_verbs_qp_t *qp = p->qp;
    char text[128];
    snprintf(text, sizeof text, "%s", why);
    p->usable = false;
    p->since_ns = hx_now_ns();
    p->qp = NULL; /* nobody posts or polls from here on */
    pthread_mutex_unlock(&v->mu);
    int error = qp ? v->lib->destroy(qp) : 0;
    pthread_mutex_lock(&v->mu);
    if (error) { /* its device may touch our memory still: nobody is told that it does not */
        snprintf(p->why, sizeof p->why, "the queue pair cannot be destroyed: %.80s", strerror(error));
        p->stuck = v->engine->abandoned = true;
        return;
    }
    while (p->reqs_head) {
        hx_vreq_t *r = p->reqs_head;
        hx_note_t *note = r->op->note;
        p->limbo = !gone;
        if (!gone && note && r->op->kind == HX_WRITE) {
            r->op->note = NULL;
            note->aborted = true;
            note->next = NULL;
            *(p->held ? &p->held_tail->next : &p->held) = note;
            p->held_tail = note;
        }
        hx_verbs_over(r, HX_ERR_CONNECTION, 0, text, done);
    }
}

static void anew(hx_vpeer_t *p, uint64_t now)
{
    p->mine.generation++;
    hx_command_t *cmd = make(p) ? hx_command_new(HX_CMD_PATH, NULL, 0) : NULL;
    if (!cmd) {
        p->next_ns = now + AGAIN_NS;
        p->failed = true;
        return;
    }
    hx_endpoint_ref(p->ep);
    cmd->ep = p->ep;
    hx_command_push(p->v->engine, cmd);
}

/* Under mu, which it drops: finding the way to an address may take a second. */
static void join(hx_vpeer_t *p, uint64_t now)
{
    hx_verbs_t *v = p->v;
    hx_verbs_address_t address = p->theirs.address;
    hx_verbs_qp_t *qp = p->qp;
    p->met = false;
    pthread_mutex_unlock(&v->mu);
    int error = v->lib->connect(qp, &address);
    pthread_mutex_lock(&v->mu);
    if (error) {
        snprintf(p->why, sizeof p->why, "the queue pair cannot be connected: %.80s", strerror(error));
        p->failed = true;
        p->next_ns = now + AGAIN_NS;
        return;
    }
    p->usable = !p->failed;
    p->limbo = false; /* the peer's old end is gone */
    release_notes(p);
    hx_control_wake(v->engine); /* acknowledgements may wait for it */
}

/* What is queued and has been told to end leaves; what is with the device is waited for, and then taken back. */
static uint64_t sweep(hx_vpeer_t *p, uint64_t now, hx_vdone_t *done)
{
    uint64_t grace = p->v->engine->config.cancel_grace_ns, due = 0;
    hx_opq_t alive = {NULL, NULL};
    for (hx_op_t *op; (op = hx_opq_pop(&p->runq));) {
        if (hx_op_verdict(op) == HX_OK) {
            hx_opq_push(&alive, op);
            continue;
        }
        op->queued = false;
        hx_verbs_maybe_done(op, done);
    }
    p->runq = alive;
    for (const hx_vreq_t *r = p->reqs_head; r; r = r->next) {
        hx_status_t verdict = hx_op_verdict(r->op);
        if (verdict == HX_OK)
            continue;
        hx_op_cancel_as(r->op, atomic_load(&r->op->gen), verdict);
        uint64_t at = atomic_load(&r->op->cancel_ns) + grace;
        if (verdict == HX_ERR_TIMEOUT || now >= at) {
            snprintf(p->why, sizeof p->why, "the queue pair was given up to take a transfer back");
            p->failed = true;
            p->usable = false;
        } else {
            due = !due || at < due ? at : due;
        }
    }
    return due;
}

static void fail_queued(hx_vpeer_t *p, hx_vdone_t *done)
{
    for (hx_op_t *op; (op = hx_opq_pop(&p->runq));) {
        op->queued = false;
        hx_op_fail(op, HX_ERR_CONNECTION, ECONNREFUSED, 0, p->why);
        hx_verbs_maybe_done(op, done);
    }
}

static uint64_t sooner(uint64_t a, uint64_t b)
{
    return !a || (b && b < a) ? b : a;
}

uint64_t hx_verbs_tend(hx_vpeer_t *p, uint64_t now, hx_vdone_t *done)
{
    uint64_t patience = p->v->engine->config.handshake_timeout_ns;
    bool gone = p->v->stopping || p->released || atomic_load(&p->ep->state) != HX_EP_UP;
    uint64_t due = sweep(p, now, done);
    if (gone || p->stuck) {
        if (p->qp)
            down(p, "the peer is gone", gone, done);
        p->limbo &= !gone;
        release_notes(p);
        fail_queued(p, done);
        return 0;
    }
    bool newer = p->met && p->theirs.generation > p->mine.generation;
    hx_verbs_intro_t theirs = p->theirs;
    if (p->qp && (p->failed || newer))
        down(p, newer ? "the peer has made its end anew" : p->why, false, done);
    if (p->stuck)
        return 0;
    if (newer)
        p->mine.generation = theirs.generation - 1;
    if (!p->qp && (newer || now >= p->next_ns)) {
        anew(p, now);
        p->theirs = theirs;
        p->met = newer;
    }
    if (p->met && p->qp && !p->failed && p->theirs.generation == p->mine.generation)
        join(p, now);
    if (p->failed || !p->qp)
        due = sooner(due, p->next_ns > now ? p->next_ns : now + AGAIN_NS);
    if (!p->usable && (p->runq.head || p->limbo)) {
        if (now > p->since_ns + patience) {
            if (p->qp && !p->failed)
                snprintf(p->why, sizeof p->why, "the peer does not make its end of the queue pair");
            fail_queued(p, done);
            p->limbo = false; /* as long as anything can be on its way */
            release_notes(p);
        } else {
            due = sooner(due, p->since_ns + patience + 1);
        }
    }
    hx_verbs_pump(p, false, done);
    return due;
}

/* ---- what the control thread hears and says ---- */

/* Queue pairs of earlier links to this engine, which are lost: what was on them must not land behind what is written from now on.
 * False: one is there still. */
static bool predecessors_gone(hx_verbs_t *v, const hx_endpoint_t *ep)
{
    for (int i = 0; i < 1000; i++) {
        bool any = false;
        pthread_mutex_lock(&v->mu);
        for (hx_vpeer_t *p = v->peers; p; p = p->next)
            any |= p->ep && p->qp && atomic_load(&p->ep->state) != HX_EP_UP &&
                   !memcmp(p->ep->incarnation, ep->incarnation, sizeof ep->incarnation);
        pthread_mutex_unlock(&v->mu);
        if (!any)
            return true;
        hx_verbs_wake(v);
        poll(NULL, 0, 1);
    }
    return false;
}

size_t hx_verbs_introduce(hx_endpoint_t *ep, void *state, uint8_t *out, size_t max)
{
    hx_verbs_t *v = state;
    hx_vpeer_t *p = ep->verbs;
    if (!(ep->features & HX_FEATURE_VERBS) || sizeof p->mine > max || (!p && !predecessors_gone(v, ep)))
        return 0;
    pthread_mutex_lock(&v->mu);
    if (!p && !v->stopping) {
        p = hx_alloc(sizeof *p);
        p->v = v;
        p->mine.generation = 1;
        p->since_ns = hx_now_ns();
        if (make(p)) {
            p->ep = ep;
            hx_endpoint_ref(ep);
            p->next = v->peers;
            v->peers = p;
            ep->verbs = p;
        } else {
            free(p); /* no path by verbs to it */
            p = NULL;
        }
    }
    bool there = p && p->qp && !p->released;
    if (there)
        memcpy(out, &p->mine, sizeof p->mine);
    pthread_mutex_unlock(&v->mu);
    return there ? sizeof p->mine : 0;
}

bool hx_verbs_meet(hx_endpoint_t *ep, void *state, const uint8_t *body, size_t n)
{
    hx_verbs_t *v = state;
    hx_vpeer_t *p = ep->verbs;
    hx_verbs_intro_t intro;
    if (n != sizeof intro)
        return false;
    memcpy(&intro, body, sizeof intro);
    if (!intro.generation || intro.generation == UINT32_MAX || !intro.address.mtu || intro.address.mtu > 5 ||
        !intro.address.reads || intro.address.qpn > 0xffffff || intro.address.psn > 0xffffff ||
        intro.address.lid > 0xffff)
        return false;
    if (!p)
        return true; /* no path by verbs to it */
    pthread_mutex_lock(&v->mu);
    p->theirs = intro;
    p->met = true;
    pthread_mutex_unlock(&v->mu);
    hx_verbs_wake(v);
    return true;
}

void hx_verbs_overdue(hx_engine_t *engine, void *state, const hx_op_t *op, uint32_t gen)
{
    hx_verbs_t *v = state;
    (void)engine;
    pthread_mutex_lock(&v->mu);
    for (hx_vpeer_t *p = v->peers; p; p = p->next)
        for (const hx_vreq_t *r = p->reqs_head; r; r = r->next)
            if (r->op == op && atomic_load(&op->gen) == gen) {
                p->usable = false;
                p->failed = true;
                break;
            }
    pthread_mutex_unlock(&v->mu);
    hx_verbs_wake(v);
}

/* ---- revocation: what of ours touches the owner's spans (acks.c) ---- */

#define IN_LIMBO (1ull << 63)

static uint64_t tag_of(const hx_vreq_t *r)
{
    return (uint64_t)(r->gen & 0x7fffffff) << 32 | r->index;
}

static bool meets(const hx_vreq_t *r, uint64_t region, const uint64_t *spans, size_t n)
{
    const hx_op_t *op = r->op;
    size_t part = hx_op_part_of(op, r->batch.first);
    if (op->parts[part].remote->id != region)
        return false;
    for (size_t i = r->batch.first; i < r->batch.last; i++) {
        const hx_desc_t *row = &op->descs[i];
        uint64_t from = row->remote_off, to = from + row->nbytes;
        size_t lo = 0, hi = n; /* the first span that ends past `from` */
        while (lo < hi) {
            size_t mid = (lo + hi) / 2;
            if (spans[2 * mid + 1] <= from)
                lo = mid + 1;
            else
                hi = mid;
        }
        if (lo < n && spans[2 * lo] < to)
            return true;
    }
    return false;
}

size_t hx_verbs_touching(hx_endpoint_t *ep, uint64_t region, const uint64_t *spans, size_t n, uint64_t **tags_p)
{
    hx_vpeer_t *p = ep->verbs;
    size_t count = 0, found = 0;
    *tags_p = NULL;
    if (!p || !n)
        return 0;
    hx_vdone_t done = {NULL};
    pthread_mutex_lock(&p->v->mu);
    hx_verbs_drain(p->v, true, &done); /* what has completed is not there any more, whether the loop knows or not */
    for (hx_vreq_t *r = p->reqs_head; r; r = r->next)
        count++;
    uint64_t *tags = hx_alloc((count + 1) * sizeof *tags);
    for (hx_vreq_t *r = p->reqs_head; r; r = r->next)
        if (meets(r, region, spans, n))
            tags[found++] = tag_of(r);
    if (p->limbo)
        tags[found++] = IN_LIMBO;
    pthread_mutex_unlock(&p->v->mu);
    hx_verbs_finish(&done);
    if (found)
        *tags_p = tags;
    else
        free(tags);
    return found;
}

bool hx_verbs_holds(hx_endpoint_t *ep, uint64_t tag)
{
    hx_vpeer_t *p = ep->verbs;
    if (!p)
        return false;
    hx_vdone_t done = {NULL};
    pthread_mutex_lock(&p->v->mu);
    hx_verbs_drain(p->v, true, &done); /* what has completed is not there any more, whether the loop knows or not */
    const hx_vreq_t *r = &p->v->reqs[(uint32_t)tag % HX_VERBS_REQUESTS];
    bool holds = p->limbo || (!(tag & IN_LIMBO) && r->op && tag_of(r) == tag);
    pthread_mutex_unlock(&p->v->mu);
    hx_verbs_finish(&done);
    return holds;
}

void hx_verbs_recall(hx_endpoint_t *ep)
{
    hx_vpeer_t *p = ep->verbs;
    if (!p)
        return;
    hx_vdone_t done = {NULL};
    pthread_mutex_lock(&p->v->mu);
    hx_verbs_drain(p->v, true, &done); /* what has completed is not there any more, whether the loop knows or not */
    if (p->reqs_head) {
        p->usable = false;
        p->failed = true;
    }
    pthread_mutex_unlock(&p->v->mu);
    hx_verbs_finish(&done);
    hx_verbs_wake(p->v);
}

bool hx_verbs_idle(hx_endpoint_t *ep)
{
    hx_vpeer_t *p = ep->verbs;
    if (!p)
        return true;
    hx_vdone_t done = {NULL};
    pthread_mutex_lock(&p->v->mu);
    hx_verbs_drain(p->v, true, &done); /* what has completed is not there any more, whether the loop knows or not */
    bool idle = !p->reqs_head && !p->limbo;
    pthread_mutex_unlock(&p->v->mu);
    hx_verbs_finish(&done);
    return idle;
}
