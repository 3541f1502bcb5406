/* SPDX-License-Identifier: Apache-2.0 */
/* One peer of the hixl provider: a queue of operations, a link of the library's, and a thread, the poster, that may block in
 * it. What it does next is decided in one place, by next_step().
 *
 * The library finds a peer by "ip:port", and would connect to whoever listens there. Before anything is posted over a new
 * connection, the peer proves on its control link that it was alive after the connection was made: then it was the one that
 * listened, and what we know of its memory is true (contract 9). */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hixl_core.h"

#define EVENT_NS 50000ull  /* between looks at an event of the NPU that is not complete */
#define SLOTS_NS 200000ull /* until a request is asked for again when there is none left */

void hx_hixl_wake_poster(hx_hpeer_t *p)
{
    hx_bell_ring(&p->bell, 1);
}

/* The poster is woken when the lock that it takes is free. */
static void unlock_and_wake(hx_hpeer_t *p)
{
    _Atomic uint32_t *struck = hx_bell_strike(&p->bell); /* under the lock: then the peer is there still */
    pthread_mutex_unlock(&p->h->mu);
    hx_bell_wake(struck, 1);
}

void hx_hixl_submit(hx_op_t *op)
{
    hx_hpeer_t *p = op->ep->hixl;
    pthread_mutex_lock(&p->h->mu);
    hx_hixl_queue_op(p, op);
    unlock_and_wake(p);
}

void hx_hixl_send_raw(hx_op_t *op)
{
    hx_hpeer_t *p = op->ep->hixl;
    pthread_mutex_lock(&p->h->mu);
    hx_opq_push(&p->notes, op);
    unlock_and_wake(p);
}

/* ---- what to do next; under mu ---- */

typedef enum { DO_END, DO_SLEEP, DO_DISCONNECT, DO_CONNECT, DO_POST, DO_NOTE, DO_LOOK } hx_hstep_t;
typedef enum { FIT, DEAD, WAITS, STALE, UNLINKED } hx_fitness_t;

static bool exhausted(const hx_op_t *op)
{
    return op->cursor >= op->ndescs;
}

static bool proven(hx_hpeer_t *p, hx_endpoint_t *ep)
{
    if (ep->raw || atomic_load(&ep->hixl_proven) == p->connection)
        return true;
    if (ep->hixl_asked == p->connection)
        return false;
    ep->hixl_asked = p->connection;
    hx_command_t *cmd = hx_command_new(HX_CMD_PING, NULL, 0);
    if (!cmd)
        abort();
    hx_endpoint_ref(ep);
    cmd->ep = ep;
    cmd->value = p->connection;
    hx_command_push(p->h->engine, cmd);
    return false;
}

/* Can the operation be posted now? Are its regions ready, is the link younger than all of them, is it known where it leads? */
static hx_fitness_t fitness(hx_hpeer_t *p, hx_op_t *op)
{
    bool stale = false;
    if (hx_op_verdict(op) != HX_OK)
        return DEAD;
    for (size_t i = 0; i < op->nparts; i++) {
        const hx_region_t *local = op->parts[i].local;
        uint32_t state = atomic_load(&local->state);
        if (state == HX_REGION_PENDING)
            return WAITS; /* a kick follows */
        if (state == HX_REGION_FAILED || atomic_load(&local->adoption) != HX_ADOPT_HELD) {
            hx_op_fail(op, HX_ERR_REGION_CLOSED, 0, 0, NULL);
            return DEAD;
        }
        stale |= atomic_load(&local->adopted) > p->local_seen || op->parts[i].remote->seen > p->remote_seen;
    }
    if (!p->connected)
        return UNLINKED;
    if (stale)
        return STALE;
    return proven(p, op->ep) ? FIT : WAITS; /* its answer, or its loss, is a kick */
}

/* The first request to be posted again whose operation does not wait, or NULL. */
static hx_hreq_t *first_again(hx_hpeer_t *p, hx_fitness_t *fit_p)
{
    for (hx_hreq_t *r = p->again.head; r; r = r->next) {
        *fit_p = fitness(p, r->op);
        if (*fit_p != WAITS)
            return r;
    }
    return NULL;
}

/* Brings the first operation that does not wait to the head of the queue; NULL: there is none. */
static hx_op_t *first_op(hx_hpeer_t *p, hx_fitness_t *fit_p)
{
    const hx_op_t *turned = NULL;
    for (hx_op_t *op; (op = p->runq.head) && op != turned;) {
        *fit_p = fitness(p, op);
        if (*fit_p != WAITS)
            return op;
        turned = turned ? turned : op;
        hx_hixl_queue_op(p, hx_hixl_unqueue_op(p));
    }
    return NULL;
}

/* Back-pressure: of the library, or because another peer waits for its place in it. */
static bool full(const hx_hpeer_t *p)
{
    return p->outstanding >= HX_HIXL_PEER_REQUESTS || p->outstanding_bytes >= HX_HIXL_PEER_BYTES ||
           (p->h->hungry && !p->hungry && p->outstanding);
}

#define WAY_NS 5000000ull

/* A peer whose requests have ended leaves its place to those that wait for one, who try at once, before it takes the place
 * again. */
static bool gives_way(hx_hpeer_t *p, uint64_t *wait_p)
{
    hx_hixl_t *h = p->h;
    uint64_t now = hx_now_ns();
    if (!h->hungry || p->hungry)
        return false;
    for (hx_hpeer_t *q = h->peers; q && !p->way_ns; q = q->next)
        if (q->hungry) {
            q->not_before_ns = 0;
            hx_hixl_wake_poster(q);
        }
    p->way_ns = p->way_ns ? p->way_ns : now + WAY_NS;
    if (now < p->way_ns)
        *wait_p = p->way_ns - now;
    return now < p->way_ns;
}

static hx_hstep_t next_request(hx_hpeer_t *p, hx_hreq_t **r_p, uint64_t *wait_p)
{
    hx_hixl_t *h = p->h;
    hx_fitness_t fit = WAITS;
    hx_op_t *op = NULL;
    hx_hreq_t *r = first_again(p, &fit);
    if (!r)
        op = first_op(p, &fit);
    if (!r && !op) {
        hx_hixl_has_room(p); /* whoever waited for it is gone */
        return DO_SLEEP;
    }
    switch (fit) {
    case DEAD:
        return DO_LOOK;
    case UNLINKED:
        return DO_CONNECT;
    case STALE:
        /* What was registered after Connect is unknown to the link. A new one knows it; nothing is posted until this one is
         * empty and can go. */
        return p->outstanding ? DO_SLEEP : DO_DISCONNECT;
    default:
        break;
    }
    if (full(p) || gives_way(p, wait_p))
        return DO_SLEEP;
    if (r) {
        hx_hixl_take_again(p, r);
        *r_p = r;
        return DO_POST;
    }
    if (!op->prepared || exhausted(op))
        return DO_LOOK;
    r = hx_hixl_new_request(h, op);
    if (!r) {
        *wait_p = SLOTS_NS; /* other peers have them */
        return DO_SLEEP;
    }
    hx_hixl_unqueue_op(p);
    bool bytes = hx_hixl_cut(op, r);
    if (!bytes)
        hx_hixl_free_request(h, r);
    if (!exhausted(op) || !bytes) /* with rows without bytes only, it is finished when its turn comes again */
        hx_hixl_queue_op(p, op);
    *r_p = r;
    return bytes ? DO_POST : DO_LOOK;
}

static hx_hstep_t decide(hx_hpeer_t *p, uint64_t now, hx_hreq_t **r_p, uint64_t *wait_p)
{
    hx_hixl_t *h = p->h;
    if (p->recall)
        return DO_DISCONNECT;
    if (!p->users || h->stopping) {
        if (p->runq.head || p->again.head || p->notes.head)
            return DO_LOOK;
        if (p->outstanding)
            return DO_SLEEP;
        return p->connected ? DO_DISCONNECT : DO_END;
    }
    if (p->hold)
        return DO_SLEEP;
    if (h->quiesce) {
        p->eager |= p->connected;
        return p->connected && !p->outstanding ? DO_DISCONNECT : DO_SLEEP;
    }
    if (p->notes.head && hx_op_verdict(p->notes.head) != HX_OK)
        return DO_NOTE;
    if (p->notes.head && now >= p->note_due_ns)
        return p->connected ? DO_NOTE : DO_CONNECT;
    hx_hstep_t step = next_request(p, r_p, wait_p);
    if (step == DO_SLEEP && p->notes.head && (!*wait_p || *wait_p > p->note_due_ns - now))
        *wait_p = p->note_due_ns - now;
    return step == DO_SLEEP && !p->connected && (p->eager || p->answers) ? DO_CONNECT : step;
}

static hx_hstep_t next_step(hx_hpeer_t *p, hx_hreq_t **r_p, uint64_t *wait_p)
{
    uint64_t now = hx_now_ns();
    hx_hreq_t *r = NULL;
    hx_hstep_t step = decide(p, now, &r, wait_p);
    bool up = step == DO_CONNECT, down = step == DO_DISCONNECT && p->connected;
    if ((up || down || step == DO_POST) && now < p->not_before_ns) {
        /* What was refused a moment ago is not asked for again at once. */
        if (r)
            hx_hixl_post_again(p, r);
        *wait_p = p->not_before_ns - now;
        return DO_SLEEP;
    }
    *r_p = r;
    return step;
}

/* ---- doing it ---- */

/* Is the operation at the head fit to be cut? Looks that take time, without the lock. True: not yet. */
static bool examine(hx_hixl_t *h, hx_op_t *op)
{
    int32_t state = HX_ACL_EVENT_COMPLETE;
    if (op->prepared || hx_op_verdict(op) != HX_OK)
        return false;
    atomic_store(&op->stage, HX_STAGE_ACTIVE);
    if (!op->checked) {
        op->checked = true;
        hx_status_t status = hx_op_check_overlap(op);
        if (status != HX_OK)
            hx_op_fail(op, status, 0, 0, NULL);
    }
    if (op->after) {
        int code = h->vendor->acl.query_event(op->after, &state);
        if (code)
            hx_hixl_blame(op, (uint32_t)code, "aclrtQueryEventStatus of after=");
    }
    bool waits = state != HX_ACL_EVENT_COMPLETE && hx_op_verdict(op) == HX_OK;
    op->prepared = !waits;
    if (!waits) /* a wait for the NPU is the operation's own, and has its limit */
        atomic_store(&op->progress_ns, 0);
    else if (!atomic_load(&op->progress_ns))
        atomic_store(&op->progress_ns, hx_now_ns());
    return waits;
}

/* The head of the queue needs a look that takes time, or has come to its end. */
static void look(hx_hpeer_t *p, uint64_t *wait_p)
{
    hx_hixl_t *h = p->h;
    hx_hdone_t done = {NULL, NULL};
    hx_op_t *op = p->runq.head;
    if (op) {
        p->current = op;
        pthread_mutex_unlock(&h->mu);
        bool waits = examine(h, op);
        pthread_mutex_lock(&h->mu);
        p->current = NULL;
        if (waits) {
            hx_hixl_queue_op(p, hx_hixl_unqueue_op(p)); /* the others' data may be there */
            bool alone = p->runq.head == op || (p->runq.head->after && !p->runq.head->prepared);
            *wait_p = alone ? EVENT_NS : 0;
        } else if (exhausted(op) && op->prepared) { /* it had no bytes */
            hx_hixl_maybe_done(hx_hixl_unqueue_op(p), &done);
        }
    }
    if (!op || hx_op_verdict(op) != HX_OK || p->again.head || !p->users || h->stopping)
        hx_hixl_drop_dead(p, &done);
    pthread_mutex_unlock(&h->mu);
    hx_hixl_finish(&done);
    pthread_mutex_lock(&h->mu);
}

/* Nothing to do: spins for busy_poll_ns, if that is wanted, and sleeps. */
static void rest(hx_hpeer_t *p, uint32_t seen, uint64_t wait)
{
    hx_hixl_t *h = p->h;
    bool spin = h->busy_poll_ns && hx_now_ns() - h->last_post_ns < h->busy_poll_ns;
    uint64_t until = h->last_post_ns + h->busy_poll_ns;
    if (p->outstanding) /* from here it is the poller's to ask */
        hx_bell_ring(&h->poll_bell, 1);
    pthread_mutex_unlock(&h->mu);
    while (spin && hx_bell_read(&p->bell) == seen) {
        sched_yield(); /* whoever is to ring may be on this core */
        spin = hx_now_ns() < until;
    }
    if (wait)
        hx_bell_wait_ns(&p->bell, seen, wait);
    else
        hx_bell_wait(&p->bell, seen);
    pthread_mutex_lock(&h->mu);
}

static void *run(void *arg)
{
    hx_hpeer_t *p = arg;
    hx_hixl_t *h = p->h;
    hx_hdescs_t descs = {NULL, 0, 0};
    h->vendor->acl.set_context(h->context);
    pthread_mutex_lock(&h->mu);
    for (;;) {
        uint32_t seen = hx_bell_read(&p->bell);
        hx_hreq_t *r = NULL;
        uint64_t wait = 0;
        hx_hstep_t step = next_step(p, &r, &wait);
        if (step == DO_END)
            break;
        switch (step) {
        case DO_DISCONNECT:
            hx_hixl_disconnect(p);
            break;
        case DO_CONNECT:
            hx_hixl_connect(p);
            break;
        case DO_POST:
            hx_hixl_post(p, r, &descs);
            if (p->outstanding)
                hx_hixl_poll_after_post(p, p->runq.head || p->again.head);
            break;
        case DO_NOTE:
            hx_hixl_send_note(p);
            break;
        case DO_LOOK:
            look(p, &wait);
            if (wait)
                rest(p, seen, wait);
            break;
        default:
            rest(p, seen, wait);
        }
    }
    hx_hixl_has_room(p);
    p->ended = true;
    pthread_mutex_unlock(&h->mu);
    free(descs.list);
    return NULL;
}

/* ---- life ---- */

hx_hpeer_t *hx_hixl_peer(hx_hixl_t *h, const char *address)
{
    for (hx_hpeer_t *p = h->peers; p; p = p->next)
        if (!p->ended && !strcmp(p->address, address))
            return p;
    hx_hpeer_t *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->h = h;
    snprintf(p->address, sizeof p->address, "%s", address);
    p->name = h->lib->name(address);
    if (!p->name || !hx_thread_start(&p->thread, run, p, "hx-hixl-post")) {
        if (p->name)
            h->lib->free_name(p->name);
        free(p);
        return NULL;
    }
    p->next = h->peers;
    h->peers = p;
    return p;
}

void hx_hixl_free_peer(hx_hpeer_t *p)
{
    p->h->lib->free_name(p->name);
    free(p);
}

void hx_hixl_reap(hx_hixl_t *h)
{
    for (hx_hpeer_t **at = &h->peers; *at;) {
        hx_hpeer_t *p = *at;
        if (p->ended && !p->joined) {
            pthread_join(p->thread, NULL); /* it has left the lock for good */
            p->joined = true;
        }
        if (!p->joined || p->users || p->refs || p->polling) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        hx_hixl_free_peer(p);
    }
}

bool hx_hixl_join_posters(hx_hixl_t *h, uint64_t deadline_ns)
{
    for (;;) {
        bool all = true;
        hx_hdone_t done = {NULL, NULL};
        hx_hixl_reap(h);
        for (hx_hpeer_t *p = h->peers; p; p = p->next) {
            all &= p->joined;
            hx_hixl_sweep(h, p, hx_now_ns(), &done);
            hx_hixl_wake_poster(p);
        }
        bool over = all || hx_now_ns() >= deadline_ns;
        pthread_mutex_unlock(&h->mu);
        hx_hixl_finish(&done);
        if (!over)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        pthread_mutex_lock(&h->mu);
        if (over)
            return all;
    }
}
