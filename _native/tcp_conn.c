/* SPDX-License-Identifier: Apache-2.0 */
/* The life of data connections: how they are opened, watched, replaced and ended, and what their end means for whatever
 * waits on them. The handshake is the control thread's work (data_hello.c); what comes here is authenticated. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "link.h"
#include "tcp.h"

#define RETRY_NS 100000000ull /* between attempts to open a data connection */
#define DIAL_TRIES 5
#define LIMBO_NS 300000000ull

void hx_tcp_watch(hx_tconn_t *c)
{
    uint32_t events = (c->in_lane ? 0 : (uint32_t)EPOLLIN) | (c->want_write ? (uint32_t)EPOLLOUT : 0);
    struct epoll_event ev = {.events = events, .data.ptr = c};
    if (events != c->watched)
        epoll_ctl(c->peer->t->epoll_fd, EPOLL_CTL_MOD, c->fd, &ev);
    c->watched = events;
}

bool hx_tcp_read(hx_tconn_t *c, bool brief, hx_done_t *done)
{
    hx_tcp_t *t = c->peer->t;
    c->reading = true;
    pthread_mutex_unlock(&t->mu);
    bool ok = hx_tcp_receive(c, brief, done);
    pthread_mutex_lock(&t->mu);
    c->reading = false;
    c->received = c->rx.received;
    if (!ok && !c->broken)
        memcpy(c->why, c->rx.why, sizeof c->why);
    c->broken |= !ok;
    return ok;
}

/* A peer that dies takes its data connections along, and the control thread hears of it a moment later: until then it is
 * not known whether a transfer has lost its connection or its peer. The source is left alone already. What a WRITE had on its
 * way may still be received, until the peer has ended the old connection, which it does before it takes a new one: only then
 * may its blocks be used again, which the aborted note tells, and so that note waits. */
static void resolve(hx_tconn_t *c, hx_done_t *done)
{
    hx_tpeer_t *p = c->peer;
    uint64_t now = hx_now_ns();
    bool gone = p->t->stopping || p->released || atomic_load(&p->ep->state) != HX_EP_UP;
    for (hx_treq_t *r = c->reqs_head, *next; r; r = next) {
        next = r->next;
        if (r->held)
            continue;
        r->unsent = false;
        if (!gone && now < c->limbo_ns && hx_op_verdict(r->op) == HX_OK)
            continue;
        if (p->dirty & 1u << c->stream && r->op->kind == HX_WRITE && r->op->note) {
            hx_note_t *note = r->op->note;
            r->op->note = NULL;
            note->aborted = true;
            note->next = NULL;
            *(p->held ? &p->held_tail->next : &p->held) = note;
            p->held_tail = note;
            p->held_ns = now + p->t->engine->config.handshake_timeout_ns;
        }
        hx_tcp_answered(r, HX_ERR_CONNECTION, done);
    }
}

void hx_tcp_free_notes(hx_tpeer_t *p)
{
    for (hx_note_t *note; (note = p->held);) {
        p->held = note->next;
        free(note);
    }
}

void hx_tcp_release_notes(hx_tpeer_t *p, uint64_t now)
{
    bool lost = atomic_load(&p->ep->state) != HX_EP_UP;
    if (!p->held || (p->dirty && !lost && now < p->held_ns))
        return;
    for (hx_note_t *note; (note = p->held);) {
        p->held = note->next;
        note->next = NULL;
        if (!hx_endpoint_push_note(p->ep, note))
            free(note);
    }
}

void hx_tcp_abort(int fd)
{
    struct sockaddr none = {.sa_family = AF_UNSPEC};
    if (connect(fd, &none, sizeof none) < 0)
        shutdown(fd, SHUT_RDWR);
}

/* The socket is closed first: from then on nothing reads the source or writes the target. */
void hx_tcp_close_conn(hx_tconn_t *c, hx_done_t *done)
{
    hx_tpeer_t *p = c->peer;
    if (c->fd < 0)
        return;
    c->broken = true;
    if (c->reading)
        return; /* the thread is woken when that is over */
    hx_tcp_lane_leave(c);
    epoll_ctl(p->t->epoll_fd, EPOLL_CTL_DEL, c->fd, NULL);
    for (const hx_treq_t *r = c->reqs_head; r; r = r->next)
        if (r->op->kind == HX_WRITE)
            p->dirty |= 1u << c->stream;
    if (!hx_tcp_zc_part(c, done)) {
        /* Also where a process that is being started holds it for a moment longer. What has not left of a WRITE, and would be
         * sent in the background, never leaves. */
        if (p->dirty & 1u << c->stream)
            hx_tcp_abort(c->fd);
        else
            shutdown(c->fd, SHUT_RDWR);
        close(c->fd);
        c->fd = -1;
    }
    p->ghosts += c->ghost_fd >= 0;
    if (!c->why[0])
        snprintf(c->why, sizeof c->why, "the data connection was closed");
    p->conns[c->stream] = NULL;
    p->open--;
    p->idle_ns = hx_now_ns();
    c->limbo_ns = p->idle_ns + LIMBO_NS;
    for (hx_tout_t *out; (out = c->out_head);) {
        c->out_head = out->next;
        hx_tcp_free_out(out); /* which drops regions: their memory is not read any more */
    }
    c->out_tail = NULL;
    c->unsent = 0;
    c->rx.active = false;
    c->rx.req = NULL;
    if (c->rx.region)
        hx_region_release(c->rx.region);
    c->rx.region = NULL;
    resolve(c, done);
}

void hx_tcp_free_closed(hx_tcp_t *t, hx_done_t *done)
{
    for (hx_tconn_t **at = &t->conns; *at;) {
        hx_tconn_t *c = *at;
        if (c->fd < 0) {
            if (c->ghost_fd >= 0) {
                hx_tcp_zc_reap(c, done);
                c->peer->ghosts -= c->ghost_fd < 0;
            }
            resolve(c, done);
        }
        if (c->fd >= 0 || c->reqs_head || c->ghost_fd >= 0) {
            at = &c->next;
            continue;
        }
        *at = c->next;
        hx_tcp_rx_free(&c->rx);
        free(c->zc_seen);
        free(c);
    }
}

/* Control thread, after the handshake: takes the descriptor. */
void hx_tcp_take_socket(hx_endpoint_t *ep, int fd, unsigned stream, const uint8_t *early, size_t n)
{
    hx_tpeer_t *p = ep->tcp;
    hx_tcp_t *t = p->t;
    hx_tconn_t *c = hx_alloc(sizeof *c);
    c->fd = fd;
    c->ghost_fd = -1;
    c->stream = stream;
    c->peer = p;
    c->fresh = true;
    /* The control link, which is asked for signs of life, is the first to say that the peer is gone. */
    int ms = (int)(t->engine->config.peer_timeout_ns / 500000);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof ms);
    bool ok = hx_tcp_rx_init(&c->rx, early, n);
    if (t->zerocopy)
        hx_tcp_zc_enable(c);
    pthread_mutex_lock(&t->mu);
    p->dialing -= p->dialing ? 1 : 0;
    if (!ok || t->stopping || p->released || stream >= p->streams || p->conns[stream]) {
        pthread_mutex_unlock(&t->mu);
        close(fd);
        hx_tcp_rx_free(&c->rx);
        free(c->zc_seen);
        free(c);
        return;
    }
    p->conns[stream] = c;
    p->dirty &= ~(1u << stream);
    p->open++;
    p->failures = 0;
    c->next = t->conns;
    t->conns = c;
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = c};
    c->watched = ev.events;
    epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, fd, &ev);
    pthread_mutex_unlock(&t->mu);
    hx_tcp_wake(t); /* it looks at what came early, and at what waits to be sent */
}

/* Control thread: an attempt has come to nothing. */
void hx_tcp_dial_failed(hx_endpoint_t *ep)
{
    hx_tpeer_t *p = ep->tcp;
    pthread_mutex_lock(&p->t->mu);
    p->dialing -= p->dialing ? 1 : 0;
    p->failures++;
    unsigned doubled = p->failures < 7 ? p->failures - 1 : 6; /* so that an idle engine is nearly silent */
    p->not_before_ns = hx_now_ns() + (RETRY_NS << doubled);
    pthread_mutex_unlock(&p->t->mu);
    hx_tcp_wake(p->t);
}

static void fail_queued(hx_tpeer_t *p, hx_done_t *done)
{
    for (hx_op_t *op; (op = hx_opq_pop(&p->runq));) {
        op->queued = false;
        hx_op_fail(op, HX_ERR_CONNECTION, ECONNREFUSED, 0, "no data connection can be made");
        hx_done_add(op, done);
    }
}

/* Connections that are missing and wanted: opened anew, by the side that opened the first, with growing pauses. What waits for
 * them fails after a while. Answers when to look again; 0: no need. */
uint64_t hx_tcp_dial(hx_tpeer_t *p, uint64_t now, hx_done_t *done)
{
    bool wanted = !p->released && atomic_load(&p->ep->state) == HX_EP_UP;
    bool usable = p->open && !p->dirty;
    uint64_t patience = p->t->engine->config.handshake_timeout_ns;
    if (usable)
        p->failures = 0;
    if (p->runq.head && !usable && wanted) {
        if (p->dials ? p->failures >= DIAL_TRIES : now > p->idle_ns + patience)
            fail_queued(p, done);
    }
    if (!wanted || p->open >= p->streams)
        return 0;
    if (!p->dials)
        return p->runq.head ? p->idle_ns + patience + 1000000 : 0;
    if (p->dialing)
        return 0; /* the next one when this is there */
    if (now < p->not_before_ns)
        return p->not_before_ns;
    for (unsigned i = 0; i < p->streams; i++) {
        if (p->conns[i])
            continue;
        hx_command_t *cmd = hx_command_new(HX_CMD_DIAL, NULL, 0);
        if (!cmd)
            return now + RETRY_NS;
        hx_endpoint_ref(p->ep);
        cmd->ep = p->ep;
        cmd->value = i;
        p->dialing++;
        hx_command_push(p->t->engine, cmd);
        break;
    }
    return 0;
}

/* Nothing more goes in or out; the progress thread closes it. */
static void give_up(hx_tconn_t *c, const char *why)
{
    snprintf(c->why, sizeof c->why, "%s", why);
    c->broken = true;
    shutdown(c->fd, SHUT_RDWR);
}

/* Control thread: the connection that a newcomer replaces has been ended, so that what it still held can come no more. */
bool hx_tcp_make_room(hx_endpoint_t *ep, unsigned stream)
{
    hx_tpeer_t *p = ep->tcp;
    if (!p || stream >= p->streams)
        return false;
    for (int i = 0; i < 1000; i++) {
        pthread_mutex_lock(&p->t->mu);
        hx_tconn_t *old = p->conns[stream];
        if (old && !old->broken)
            give_up(old, "the peer has opened the data connection anew");
        pthread_mutex_unlock(&p->t->mu);
        if (!old)
            return true;
        hx_tcp_wake(p->t);
        poll(NULL, 0, 1);
    }
    return false; /* it tries again */
}

/* Connections with such a message, or with any, are dropped. */
void hx_tcp_evict(hx_endpoint_t *ep)
{
    hx_tpeer_t *p = ep->tcp;
    if (!p)
        return;
    pthread_mutex_lock(&p->t->mu);
    for (unsigned i = 0; i < p->streams; i++)
        if (p->conns[i])
            give_up(p->conns[i], "given up: a message of the peer's stands still in memory that its owner wants back");
    pthread_mutex_unlock(&p->t->mu);
    hx_tcp_wake(p->t);
}

/* The progress thread would drop its connections in its next sweep, but the caller may post before that. */
void hx_tcp_overdue(hx_engine_t *engine, void *state, const hx_op_t *op, uint32_t gen)
{
    hx_tcp_t *t = state;
    bool any = false;
    (void)engine;
    pthread_mutex_lock(&t->mu);
    for (hx_tconn_t *c = t->conns; c; c = c->next)
        for (const hx_treq_t *r = c->fd >= 0 && !c->broken ? c->reqs_head : NULL; r && !c->broken; r = r->next)
            if (r->op == op && atomic_load(&op->gen) == gen) { /* listed: it is not over, nor can it be before we are */
                if (op->kind == HX_WRITE)
                    c->peer->dirty |= 1u << c->stream;
                give_up(c, HX_TCP_TAKEN_BACK);
                any = true;
            }
    pthread_mutex_unlock(&t->mu);
    if (any)
        hx_tcp_wake(t);
}
