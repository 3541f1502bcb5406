/* SPDX-License-Identifier: Apache-2.0 */
/* The queue pair to a peer, from the first to the last of them.
 *
 * Both ends make one and tell the other (PATH). One that has failed, or with which something must be taken back, is given up: a
 * thread of its own shuts it, and then destroys it. Another is made as soon as it is shut, of the next generation, and the peer
 * is told. A peer that hears of a newer generation than its own does the same, and answers with it: what was still on its way to
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

/* Between two attempts: none at first, then twice as long each time, until one has held for a while. */
#define DELAY_MIN_NS 10000000ull
#define DELAY_MAX_NS 2000000000ull
#define HELD_NS 10000000000ull
#define PREDECESSOR_NS 100000000ull /* until another look at a queue pair of an earlier link; its end wakes us, too */

void hx_verbs_fail(hx_vpeer_t *p, const char *why)
{
    if (!p->failed)
        snprintf(p->why, sizeof p->why, "%s", why);
    p->failed = true;
    hx_verbs_unusable(p);
}

void hx_verbs_unusable(hx_vpeer_t *p)
{
    if (p->usable)
        p->since_ns = hx_now_ns();
    p->usable = false;
}

static bool lost(const hx_vpeer_t *p)
{
    return atomic_load(&p->ep->state) != HX_EP_UP;
}

/* A queue pair of an earlier link to this engine, which is lost, may work still: what was on it must not land behind what is
 * written from now on. */
static bool predecessor(const hx_verbs_t *v, const hx_endpoint_t *ep)
{
    for (const hx_vpeer_t *p = v->peers; p; p = p->next)
        if (p->ep && p->ep != ep && lost(p) && !hx_verbs_harmless(p) &&
            !memcmp(p->ep->incarnation, ep->incarnation, sizeof ep->incarnation))
            return true;
    return false;
}

static void say(hx_vpeer_t *p)
{
    hx_command_t *cmd = hx_command_new(HX_CMD_PATH, NULL, 0);
    if (!cmd) {
        hx_verbs_fail(p, "out of memory");
        return;
    }
    hx_endpoint_ref(p->ep);
    cmd->ep = p->ep;
    hx_command_push(p->v->engine, cmd);
}

/* Under mu: of the generation that the peer has, if that is newer. */
static bool make(hx_vpeer_t *p, uint64_t now)
{
    hx_verbs_t *v = p->v;
    uint32_t generation = p->mine.generation + 1;
    int error = v->gone ? ENODEV : 0;
    if (now > p->made_ns + HELD_NS)
        p->delay_ns = 0;
    p->made_ns = now;
    p->next_ns = now + p->delay_ns;
    p->delay_ns = !p->delay_ns ? DELAY_MIN_NS : p->delay_ns < DELAY_MAX_NS ? 2 * p->delay_ns : DELAY_MAX_NS;
    p->depth = v->info.max_wr < HX_VERBS_DEPTH ? v->info.max_wr : HX_VERBS_DEPTH;
    p->used = 0;
    p->failed = false;
    p->why[0] = 0;
    p->mine.joined = 0;
    p->mine.flush_rkey = v->flush_rkey;
    if (!error)
        error = v->lib->create(v->device, p->depth, p, &p->qp, &p->mine.address, &p->inline_max);
    if (error) {
        p->qp = NULL;
        snprintf(p->obstacle, sizeof p->obstacle, "no queue pair can be made: %.80s", strerror(error));
        return false;
    }
    p->mine.generation = generation < p->theirs.generation ? p->theirs.generation : generation;
    return true;
}

/* The queue pair stays where it is meanwhile: `join` says so. */
static void *connect_it(void *arg)
{
    hx_vpeer_t *p = arg;
    hx_verbs_t *v = p->v;
    int error = v->lib->connect(p->qp, &p->join_to);
    pthread_mutex_lock(&v->mu);
    p->join_error = error;
    p->join = HX_VJOIN_OVER;
    pthread_mutex_unlock(&v->mu);
    hx_verbs_wake(v);
    return NULL;
}

static void begin_join(hx_vpeer_t *p)
{
    p->join_to = p->theirs.address;
    p->join = HX_VJOIN_RUNNING;
    if (!hx_thread_start(&p->joiner, connect_it, p, "hx-verbs-join")) {
        p->join = HX_VJOIN_NONE;
        hx_verbs_fail(p, "no thread can be started");
    }
}

/* The thread has ended, or is about to: it does not take mu any more. */
static void end_join(hx_vpeer_t *p)
{
    pthread_join(p->joiner, NULL);
    p->join = HX_VJOIN_NONE;
    if (p->join_error) {
        snprintf(p->obstacle, sizeof p->obstacle, "the queue pair cannot be connected: %.80s", strerror(p->join_error));
        hx_verbs_fail(p, p->obstacle);
    } else {
        p->mine.joined = 1;
        say(p);
    }
}

/* What is queued and has been told to end leaves; what is with the device is waited for, and then taken back. */
static uint64_t sweep(hx_vpeer_t *p, uint64_t now, hx_done_t *done)
{
    uint64_t grace = p->v->engine->config.cancel_grace_ns, due = 0;
    hx_opq_sweep(&p->runq, done);
    for (const hx_vreq_t *r = p->reqs_head; r; r = r->next) {
        hx_status_t verdict = hx_op_verdict(r->op);
        if (verdict == HX_OK)
            continue;
        hx_op_cancel_as(r->op, atomic_load(&r->op->gen), verdict);
        uint64_t at = atomic_load(&r->op->cancel_ns) + grace;
        if (verdict == HX_ERR_TIMEOUT || now >= at) {
            hx_verbs_fail(p, "the queue pair was given up to take a transfer back");
        } else {
            due = !due || at < due ? at : due;
        }
    }
    return due;
}

static void fail_queued(hx_vpeer_t *p, const char *why, hx_done_t *done)
{
    for (hx_op_t *op; (op = hx_opq_pop(&p->runq));) {
        op->queued = false;
        hx_op_fail(op, HX_ERR_CONNECTION, 0, 0, why);
        hx_done_add(op, done);
    }
}

/* Those that have found no way for `patience`; when it is the next one's turn. */
static uint64_t fail_overdue(hx_vpeer_t *p, uint64_t now, uint64_t patience, hx_done_t *done)
{
    const char *why = p->obstacle[0]        ? p->obstacle
                      : p->qp && !p->failed ? "the peer does not make its end of the queue pair"
                                            : p->why;
    hx_opq_t waiting = {NULL, NULL};
    uint64_t due = 0;
    for (hx_op_t *op; (op = hx_opq_pop(&p->runq));) {
        uint64_t since = op->posted_ns > p->since_ns ? op->posted_ns : p->since_ns;
        if (now <= since + patience) {
            hx_opq_push(&waiting, op);
            due = hx_verbs_sooner(due, since + patience + 1);
            continue;
        }
        op->queued = false;
        hx_op_fail(op, HX_ERR_CONNECTION, 0, 0, why);
        hx_done_add(op, done);
    }
    p->runq = waiting;
    return due;
}

static void end_limbo(hx_vpeer_t *p)
{
    p->limbo = false;
    release_notes(p);
    hx_control_wake(p->v->engine); /* acknowledgements may wait for it */
}

uint64_t hx_verbs_tend(hx_vpeer_t *p, uint64_t now, hx_done_t *done)
{
    uint64_t patience = p->v->engine->config.handshake_timeout_ns;
    bool gone = p->v->stopping || p->released || lost(p);
    uint64_t due = hx_verbs_sooner(sweep(p, now, done), hx_verbs_tend_ends(p, now, done));
    if (p->join == HX_VJOIN_OVER)
        end_join(p);
    bool joining = p->join == HX_VJOIN_RUNNING; /* its end wakes us; nothing is posted on that queue pair before */
    if (gone || p->stuck) {
        if (p->qp && !joining)
            hx_verbs_down(p, "the peer is gone", gone);
        if (p->limbo && (gone || p->theirs.generation > p->limbo_generation))
            end_limbo(p);
        fail_queued(p, p->why, done);
        return due;
    }
    if (p->qp && !joining && p->failed)
        hx_verbs_down(p, p->why, false);
    if (p->qp && !joining && p->theirs.generation > p->mine.generation)
        hx_verbs_down(p, "the peer has made its end anew", false);
    if (!p->qp && hx_verbs_harmless(p) && !hx_verbs_crowded(p)) { /* else that wakes us */
        if (now < p->next_ns)
            due = hx_verbs_sooner(due, p->next_ns);
        else if (predecessor(p->v, p->ep))
            due = hx_verbs_sooner(due, now + PREDECESSOR_NS);
        else if (make(p, now))
            say(p);
        else
            due = hx_verbs_sooner(due, p->next_ns);
    }
    bool both = p->qp && !p->failed && p->theirs.generation == p->mine.generation;
    if (both && !p->mine.joined && !joining)
        begin_join(p);
    if (!both || !p->mine.joined || !p->theirs.joined) {
        hx_verbs_unusable(p);
    } else {
        p->usable = true;
        p->obstacle[0] = 0;
    }
    if (p->limbo && p->theirs.generation > p->limbo_generation) /* the peer's old end is gone */
        end_limbo(p);
    if (!p->usable)
        due = hx_verbs_sooner(due, fail_overdue(p, now, patience, done));
    if (p->limbo && p->limbo_ns) {
        if (now > p->limbo_ns + patience) /* as long as anything can be on its way */
            end_limbo(p);
        else
            due = hx_verbs_sooner(due, p->limbo_ns + patience + 1);
    }
    hx_verbs_pump(p, false, done);
    return p->qp && p->failed && p->join != HX_VJOIN_RUNNING ? now : due;
}

/* ---- what the control thread hears and says ---- */

/* Under mu; NULL: no path by verbs to it. */
static hx_vpeer_t *begin(hx_verbs_t *v, hx_endpoint_t *ep)
{
    uint64_t now = hx_now_ns();
    hx_vpeer_t *p = hx_alloc(sizeof *p);
    p->v = v;
    p->since_ns = now;
    p->ep = ep;
    if (!predecessor(v, ep) && !make(p, now)) {
        free(p);
        return NULL;
    }
    hx_endpoint_ref(ep);
    p->next = v->peers;
    v->peers = p;
    ep->verbs = p;
    return p;
}

size_t hx_verbs_introduce(hx_endpoint_t *ep, void *state, uint8_t *out, size_t max)
{
    hx_verbs_t *v = state;
    size_t n = 0;
    if (!(ep->features & HX_FEATURE_VERBS) || sizeof ep->verbs->mine > max)
        return 0;
    pthread_mutex_lock(&v->mu);
    bool first = !ep->verbs && !v->stopping && !v->gone;
    hx_vpeer_t *p = first ? begin(v, ep) : ep->verbs;
    if (p && !p->released && (p->qp || first)) {
        n = sizeof p->mine;
        memcpy(out, &p->mine, n);
    }
    bool missing = p && !p->qp;
    pthread_mutex_unlock(&v->mu);
    if (missing)
        hx_verbs_wake(v);
    return n;
}

static bool plausible(const hx_verbs_intro_t *intro)
{
    const hx_verbs_address_t *a = &intro->address;
    return !intro->generation || (intro->generation < UINT32_MAX / 2 && intro->joined <= 1 && a->mtu && a->mtu <= 5 &&
                                  a->reads && a->qpn <= 0xffffff && a->psn <= 0xffffff && a->lid <= 0xffff);
}

/* What a peer says of an end does not change, but for its being joined; and no end comes back. */
static bool follows(const hx_verbs_intro_t *before, const hx_verbs_intro_t *intro)
{
    if (intro->generation != before->generation)
        return intro->generation > before->generation;
    return intro->joined >= before->joined && intro->flush_rkey == before->flush_rkey &&
           !memcmp(&intro->address, &before->address, sizeof before->address);
}

bool hx_verbs_meet(hx_endpoint_t *ep, void *state, const uint8_t *body, size_t n)
{
    hx_verbs_t *v = state;
    hx_vpeer_t *p = ep->verbs;
    hx_verbs_intro_t intro;
    if (n != sizeof intro)
        return false;
    memcpy(&intro, body, sizeof intro);
    if (!plausible(&intro))
        return false;
    if (!p)
        return true; /* no path by verbs to it */
    pthread_mutex_lock(&v->mu);
    bool first = !atomic_load(&p->heard), fits = first || follows(&p->theirs, &intro);
    if (fits && intro.generation)
        p->theirs = intro;
    atomic_store(&p->heard, true);
    pthread_mutex_unlock(&v->mu);
    hx_verbs_wake(v);
    return fits;
}

void hx_verbs_overdue(hx_engine_t *engine, void *state, const hx_op_t *op, uint32_t gen)
{
    hx_verbs_t *v = state;
    (void)engine;
    pthread_mutex_lock(&v->mu);
    for (hx_vpeer_t *p = v->peers; p; p = p->next)
        for (const hx_vreq_t *r = p->reqs_head; r; r = r->next)
            if (r->op == op && atomic_load(&op->gen) == gen) {
                hx_verbs_fail(p, "a transfer made no progress for stall_timeout");
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

size_t hx_verbs_touching(hx_endpoint_t *ep, uint64_t region, const uint64_t *spans, size_t n, uint64_t **tags_p)
{
    hx_vpeer_t *p = ep->verbs;
    size_t count = 0, found = 0;
    *tags_p = NULL;
    if (!p || !n)
        return 0;
    hx_done_t done = {NULL};
    pthread_mutex_lock(&p->v->mu);
    hx_verbs_drain(p->v, true, &done); /* what has completed is not there any more, whether the loop knows or not */
    for (hx_vreq_t *r = p->reqs_head; r; r = r->next)
        count++;
    uint64_t *tags = hx_alloc((count + 1) * sizeof *tags);
    for (hx_vreq_t *r = p->reqs_head; r; r = r->next)
        if (hx_op_meets(r->op, &r->batch, region, spans, n))
            tags[found++] = tag_of(r);
    if (p->limbo)
        tags[found++] = IN_LIMBO;
    pthread_mutex_unlock(&p->v->mu);
    hx_done_finish(&done);
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
    hx_done_t done = {NULL};
    pthread_mutex_lock(&p->v->mu);
    hx_verbs_drain(p->v, true, &done); /* what has completed is not there any more, whether the loop knows or not */
    const hx_vreq_t *r = &p->v->reqs[(uint32_t)tag % HX_VERBS_REQUESTS];
    bool holds = p->limbo || (!(tag & IN_LIMBO) && r->op && tag_of(r) == tag);
    pthread_mutex_unlock(&p->v->mu);
    hx_done_finish(&done);
    return holds;
}

void hx_verbs_recall(hx_endpoint_t *ep)
{
    hx_vpeer_t *p = ep->verbs;
    if (!p)
        return;
    hx_done_t done = {NULL};
    pthread_mutex_lock(&p->v->mu);
    hx_verbs_drain(p->v, true, &done); /* what has completed is not there any more, whether the loop knows or not */
    if (p->reqs_head)
        hx_verbs_fail(p, "the queue pair was given up for its owner, who takes memory back");
    pthread_mutex_unlock(&p->v->mu);
    hx_done_finish(&done);
    hx_verbs_wake(p->v);
}

/* ---- revocation, the owner's side: a peer that does not acknowledge loses its way in ---- */

void hx_verbs_keep_out(hx_endpoint_t *ep)
{
    hx_vpeer_t *p = ep->verbs;
    if (!p)
        return;
    pthread_mutex_lock(&p->v->mu);
    bool wanted = atomic_load(&p->kept_seq) < ep->revoke_seq;
    p->keep_seq = ep->revoke_seq;
    if (wanted && p->qp)
        hx_verbs_fail(p, "the queue pair was given up to keep a peer out that acknowledges no revocation");
    else if (wanted && hx_verbs_harmless(p))
        atomic_store(&p->kept_seq, p->keep_seq); /* no end that it could write to; the next one is made after that */
    pthread_mutex_unlock(&p->v->mu);
    hx_verbs_wake(p->v);
}

uint64_t hx_verbs_kept_out(hx_endpoint_t *ep)
{
    return ep->verbs ? atomic_load(&ep->verbs->kept_seq) : 0;
}

bool hx_verbs_idle(hx_endpoint_t *ep)
{
    hx_vpeer_t *p = ep->verbs;
    if (!p)
        return true;
    hx_done_t done = {NULL};
    pthread_mutex_lock(&p->v->mu);
    hx_verbs_drain(p->v, true, &done); /* what has completed is not there any more, whether the loop knows or not */
    bool idle = !p->reqs_head && !p->limbo;
    pthread_mutex_unlock(&p->v->mu);
    hx_done_finish(&done);
    return idle;
}
