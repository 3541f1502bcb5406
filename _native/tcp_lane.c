/* SPDX-License-Identifier: Apache-2.0 */
/* The short way back: who waits for a small transfer reads the answer itself.
 *
 * An answer that comes to the progress thread wakes two threads, one after the other: that one, and then the event loop. While
 * small posts follow each other, their connection is in a lane instead: the engine's descriptor, which the loop watches,
 * becomes readable with the socket, and hx_engine_drain reads it on the loop's thread. The progress thread does not listen
 * there meanwhile. It looks each millisecond, and takes the connection back when posts cease, when there is more to move than
 * small things, or when the loop is late: what a peer sends never waits for a program that computes. */
#define _GNU_SOURCE
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include "tcp.h"

#define LOOK_NS 1000000ull   /* between looks at whether the loop keeps up */
#define IDLE_NS 10000000ull  /* two small posts within this make a lane, and it lasts so long after the last */
#define PAUSE_NS 50000000ull /* no lane for a loop that was late, or beside a large message */
#define BYTES_MAX (256u << 10)

static void leave(hx_tcp_t *t, hx_tconn_t *c, uint64_t not_before_ns)
{
    unsigned n = atomic_load(&t->nlanes);
    for (unsigned i = 0; i < n; i++)
        if (t->lanes[i] == c)
            t->lanes[i] = t->lanes[n - 1];
    atomic_store(&t->nlanes, n - 1);
    epoll_ctl(t->engine->epoll_fd, EPOLL_CTL_DEL, c->fd, NULL);
    c->in_lane = false;
    c->lane_after_ns = not_before_ns;
    hx_tcp_watch(c); /* what is there already wakes the thread */
}

void hx_tcp_lane_leave(hx_tconn_t *c)
{
    if (c->in_lane)
        leave(c->peer->t, c, 0);
}

static void enter(hx_tcp_t *t, hx_tconn_t *c, uint64_t now)
{
    struct epoll_event ev = {.events = EPOLLIN};
    unsigned n = atomic_load(&t->nlanes);
    if (n == HX_TCP_LANES || t->stopping || epoll_ctl(t->engine->epoll_fd, EPOLL_CTL_ADD, c->fd, &ev) < 0)
        return;
    t->lanes[n] = c;
    atomic_store(&t->nlanes, n + 1);
    c->in_lane = true;
    c->look_ns = now + LOOK_NS;
    c->seen = UINT64_MAX;
    hx_tcp_watch(c);
    hx_tcp_wake(t); /* it begins to look */
}

void hx_tcp_lane_posted(hx_tconn_t *c)
{
    uint64_t now = hx_now_ns();
    if (!c->in_lane && now - c->small_ns < IDLE_NS && now >= c->lane_after_ns && c->unanswered <= BYTES_MAX &&
        !c->reading && !hx_tcp_rx_large(&c->rx))
        enter(c->peer->t, c, now);
    c->small_ns = now;
}

/* Bytes that have been there for a whole look, and nobody has read any. */
static bool is_late(hx_tconn_t *c, uint64_t now)
{
    int pending = 0;
    if (now < c->look_ns || c->reading)
        return false;
    c->look_ns = now + LOOK_NS;
    ioctl(c->fd, FIONREAD, &pending);
    bool late = pending && c->seen == c->received;
    c->seen = pending ? c->received : UINT64_MAX;
    return late;
}

uint64_t hx_tcp_lane_look(hx_tcp_t *t, uint64_t now)
{
    for (unsigned i = atomic_load(&t->nlanes); i-- > 0;) {
        hx_tconn_t *c = t->lanes[i];
        if ((int64_t)(now - c->small_ns) > (int64_t)IDLE_NS || c->unanswered > BYTES_MAX || c->want_write ||
            c->peer->runq.head)
            leave(t, c, 0);
        else if (is_late(c, now))
            leave(t, c, now + PAUSE_NS);
    }
    return atomic_load(&t->nlanes) ? now + LOOK_NS : 0;
}

static bool read_lane(hx_tcp_t *t, hx_tconn_t *c, hx_done_t *done)
{
    uint64_t before = c->received;
    bool ok = hx_tcp_read(c, true, done);
    if (ok && c->out_head && !c->sending && c->unsent <= HX_TCP_INLINE)
        ok = hx_tcp_flush(c, true);
    bool large = hx_tcp_rx_large(&c->rx);
    if (large && c->in_lane)
        leave(t, c, hx_now_ns() + PAUSE_NS);
    c->fresh |= large; /* what has been read of it already wakes nobody */
    if (!ok || c->broken || c->out_head || c->peer->runq.head || large)
        hx_tcp_wake(t);
    return c->received != before;
}

bool hx_tcp_assist(hx_engine_t *engine, void *state)
{
    hx_tcp_t *t = state;
    hx_done_t done = {NULL};
    bool any = false;
    (void)engine;
    if (!atomic_load(&t->nlanes) || pthread_mutex_trylock(&t->mu) != 0)
        return false; /* the descriptor stays readable */
    t->assisting = true;
    for (unsigned i = 0; i < atomic_load(&t->nlanes); i++) {
        hx_tconn_t *c = t->lanes[i];
        if (!c->reading && !c->broken)
            any |= read_lane(t, c, &done);
    }
    t->assisting = false;
    pthread_mutex_unlock(&t->mu);
    hx_done_finish(&done);
    return any;
}
