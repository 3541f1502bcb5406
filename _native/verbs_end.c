/* SPDX-License-Identifier: Apache-2.0 */
/* Queue pairs that have been given up: each is shut and destroyed in a thread of its own, and others learn here what is not in
 * their way any more. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "link.h"
#include "sys.h"
#include "verbs_core.h"

/* A queue pair that is shut takes nothing in (InfiniBand Architecture Specification, volume 1, 10.3.1: the error state), and a card
 * says so when it is true. A device in software may be in the middle of a packet: it has so long to end with that. */
#define SETTLE_NS 100000000ull

bool hx_verbs_harmless(const hx_vpeer_t *p)
{
    bool harmless = !p->qp;
    for (const hx_vend_t *end = p->ends; end; end = end->next)
        harmless &= end->harmless;
    return harmless;
}

bool hx_verbs_quiet(const hx_vpeer_t *p)
{
    return !p->qp && !p->ends;
}

bool hx_verbs_ending(const hx_vpeer_t *p)
{
    bool ending = false;
    for (const hx_vend_t *end = p->ends; end; end = end->next)
        ending |= !end->stands;
    return ending;
}

bool hx_verbs_crowded(const hx_vpeer_t *p)
{
    size_t n = 0;
    for (const hx_vend_t *end = p->ends; end; end = end->next)
        n++;
    return n >= HX_VERBS_ENDS;
}

/* What was on the queue pair is `end`'s from here on. Until the peer's end has gone as well, notes that say that bytes will not come
 * are held. */
static void take_along(hx_vpeer_t *p, hx_vend_t *end, bool gone)
{
    size_t n = 0;
    for (const hx_vreq_t *r = p->reqs_head; r; r = r->next)
        n++;
    end->ops = hx_alloc((n + 1) * sizeof *end->ops);
    end->last_id = n && !p->reqs_tail->returned ? hx_verbs_last_id(p->reqs_tail) : 0;
    for (hx_vreq_t *r; (r = p->reqs_head);) {
        hx_op_t *op = r->op;
        hx_note_t *note = op->note;
        end->ops[end->nops++] = op;
        hx_verbs_forget(r);
        hx_op_fail(op, HX_ERR_CONNECTION, 0, 0, end->why);
        hx_op_cancel_as(op, atomic_load(&op->gen), hx_op_verdict(op)); /* who waits is told in cancel_grace */
        atomic_store(&op->progress_ns, 0);
        if (gone)
            continue;
        p->limbo = true;
        p->limbo_generation = p->mine.generation;
        p->limbo_ns = 0;
        if (note && op->kind == HX_WRITE) {
            op->note = NULL;
            note->aborted = true;
            note->next = NULL;
            *(p->held ? &p->held_tail->next : &p->held) = note;
            p->held_tail = note;
        }
    }
}

/* Whether the device gives back all that was on it. A send queue works in order, also where it fails. */
static bool flush(const hx_vend_t *end)
{
    bool flushed = !end->last_id;
    for (uint64_t until = hx_now_ns() + SETTLE_NS; !flushed && hx_now_ns() < until;) {
        hx_verbs_wc_t list[32];
        int n = end->v->lib->poll(end->qp, list, 32);
        for (int i = 0; i < n; i++)
            flushed |= list[i].id == end->last_id;
        if (n < 0)
            break;
        if (!n)
            usleep(100);
    }
    return flushed;
}

/* Not under mu. Shut, a queue pair takes nothing in and sends nothing; and what its device has given back, it does not look at any
 * more. Without these, it has to be destroyed first. */
static void *end_it(void *arg)
{
    hx_vend_t *end = arg;
    hx_verbs_t *v = end->v;
    bool shut = v->lib->shut(end->qp) == 0;
    uint64_t now = hx_now_ns();
    bool flushed = shut && flush(end);
    pthread_mutex_lock(&v->mu);
    end->shut_ns = shut ? now : 0;
    end->flushed = flushed;
    pthread_mutex_unlock(&v->mu);
    hx_verbs_wake(v);
    int error = v->lib->destroy(end->qp);
    pthread_mutex_lock(&v->mu);
    end->error = error;
    end->over = true;
    pthread_mutex_unlock(&v->mu);
    hx_verbs_wake(v);
    return NULL;
}

void hx_verbs_down(hx_vpeer_t *p, const char *why, bool gone)
{
    hx_vend_t *end = hx_alloc(sizeof *end);
    end->v = p->v;
    end->qp = p->qp;
    snprintf(end->why, sizeof end->why, "%s", why);
    hx_verbs_unusable(p);
    p->qp = NULL; /* nobody posts or polls from here on */
    take_along(p, end, gone);
    end->next = p->ends;
    p->ends = end;
    end->threaded = hx_thread_start(&end->thread, end_it, end, "hx-verbs-end");
    if (!end->threaded) {
        pthread_mutex_unlock(&p->v->mu);
        end_it(end);
        pthread_mutex_lock(&p->v->mu);
    }
}

/* The device may touch our memory for ever: nobody is told that it does not, nor is anybody to wait for it for ever. */
static void leave(hx_vpeer_t *p, hx_vend_t *end)
{
    hx_engine_t *engine = p->v->engine;
    end->stands = true;
    engine->abandoned = true;
    p->stuck |= !end->shut_ns;
    snprintf(p->why, sizeof p->why, "the queue pair cannot be destroyed: %.80s",
             end->over ? strerror(end->error) : "its driver does not answer");
    for (size_t i = 0; i < end->nops; i++)
        hx_op_report_early(engine, end->ops[i], atomic_load(&end->ops[i]->gen));
}

void hx_verbs_leave(hx_vpeer_t *p)
{
    for (hx_vend_t *end = p->ends; end; end = end->next) {
        if (end->threaded)
            pthread_detach(end->thread);
        end->threaded = false;
        if (!end->stands)
            leave(p, end);
    }
    if (p->join == HX_VJOIN_RUNNING)
        pthread_detach(p->joiner);
}

/* The device is done with what was on it. */
static void give_back(hx_vend_t *end, hx_done_t *done)
{
    for (size_t i = 0; i < end->nops; i++) {
        end->ops[i]->requests--;
        hx_done_add(end->ops[i], done);
    }
    end->nops = 0;
}

static void now_harmless(hx_vpeer_t *p, hx_vend_t *end, uint64_t now)
{
    end->harmless = true;
    if (p->keep_seq > atomic_load(&p->kept_seq)) /* there is no other end that it could write to */
        atomic_store(&p->kept_seq, p->keep_seq);
    p->limbo_ns = now;
    hx_control_wake(p->v->engine); /* revocations may wait for it */
}

uint64_t hx_verbs_tend_ends(hx_vpeer_t *p, uint64_t now, hx_done_t *done)
{
    uint64_t due = 0;
    for (hx_vend_t **at = &p->ends; *at;) {
        hx_vend_t *end = *at;
        if (end->over && end->threaded) {
            pthread_join(end->thread, NULL);
            end->threaded = false;
        }
        if (end->over && end->error && !end->stands)
            leave(p, end);
        bool destroyed = end->over && !end->error;
        uint64_t settled = end->shut_ns + SETTLE_NS;
        if (!end->harmless && (destroyed || (end->shut_ns && now >= settled)))
            now_harmless(p, end, now);
        if (!end->harmless && end->shut_ns)
            due = hx_verbs_sooner(due, settled);
        if (destroyed || (end->harmless && end->flushed))
            give_back(end, done);
        if (destroyed) {
            *at = end->next;
            free(end->ops);
            free(end);
        } else {
            at = &end->next;
        }
    }
    return due;
}
