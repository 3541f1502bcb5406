/* SPDX-License-Identifier: Apache-2.0 */
/* The control thread: one epoll over links, listeners and pidfds; commands from other threads; and a tick, which runs
 * only while something is pending, so that an idle engine is silent. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "link.h"
#include "provider.h"
#include "sys.h"

/* What an epoll entry points at, in the low bits of the pointer. */
enum { TAG_LINK, TAG_PID, TAG_WAKE, TAG_UNIX, TAG_TCP, TAG_MASK = 7 };

#define QUIET_TICKS 8 /* ticks with nothing pending before the tick stops */
#define MS 1000000ull

typedef struct hx_known {
    struct hx_known *next;
    uint64_t epoch;
    char name[HX_NAME_MAX + 1];
} hx_known_t;

#define KNOWN_MAX 4096

typedef struct {
    hx_engine_t *engine;
    uint64_t tick_ns, next_tick_ns, provider_due_ns;
    unsigned quiet;
} hx_clock_t;

/* ---- epochs ---- */

bool hx_control_epoch_ok(hx_engine_t *engine, const char *name, uint64_t epoch, bool remember)
{
    hx_known_t **head = &engine->known, *k;
    size_t n = 0;
    for (k = *head; k; k = k->next, n++)
        if (!strcmp(k->name, name))
            break;
    if (k && epoch && epoch < k->epoch)
        return false;
    if (!remember || !epoch)
        return true;
    if (!k && n < KNOWN_MAX) {
        k = hx_alloc(sizeof *k);
        snprintf(k->name, sizeof k->name, "%s", name);
        k->next = *head;
        *head = k;
    }
    if (k && epoch > k->epoch)
        k->epoch = epoch;
    return true;
}

void hx_control_supersede(hx_engine_t *engine, const char *name, uint64_t epoch)
{
    for (hx_endpoint_t *ep = engine->control.endpoints; ep; ep = ep->next)
        if (epoch && ep->epoch && ep->epoch < epoch && !strcmp(ep->name, name))
            hx_endpoint_lose(ep, HX_ERR_PEER_LOST, "a newer engine has taken its name");
}

static void free_known(hx_engine_t *engine)
{
    hx_known_t *k = engine->known;
    while (k) {
        hx_known_t *next = k->next;
        free(k);
        k = next;
    }
    engine->known = NULL;
}

/* ---- watching ---- */

static void watch(hx_engine_t *engine, int op, int fd, uint32_t events, void *ptr, unsigned tag)
{
    struct epoll_event ev = {.events = events, .data.u64 = (uintptr_t)ptr | tag};
    epoll_ctl(engine->control.epoll_fd, op, fd, &ev);
}

void hx_control_watch(hx_engine_t *engine, hx_link_t *link)
{
    uint32_t events = EPOLLIN | (link->want_write ? (uint32_t)EPOLLOUT : 0);
    struct epoll_event ev = {.events = events, .data.u64 = (uintptr_t)link | TAG_LINK};
    int fd = engine->control.epoll_fd;
    if (epoll_ctl(fd, EPOLL_CTL_MOD, link->fd, &ev) < 0 && errno == ENOENT)
        epoll_ctl(fd, EPOLL_CTL_ADD, link->fd, &ev);
}

void hx_control_watch_pid(hx_engine_t *engine, hx_endpoint_t *ep)
{
    watch(engine, EPOLL_CTL_ADD, ep->pidfd, EPOLLIN, ep, TAG_PID);
}

static void on_link(hx_link_t *link, uint32_t events)
{
    if (link->dead)
        return;
    if (link->state == HX_LINK_CONNECTING) {
        int err = 0;
        socklen_t len = sizeof err;
        getsockopt(link->fd, SOL_SOCKET, SO_ERROR, &err, &len);
        if (err) {
            hx_link_fail(link, HX_ERR_UNREACHABLE, err, "%s", strerror(err));
            return;
        }
        link->want_write = false;
        hx_control_watch(link->engine, link);
        if (link->data_ep)
            hx_data_start(link);
        else
            hx_hello_start(link);
        return;
    }
    if (events & EPOLLOUT)
        hx_link_flush(link);
    if (!link->dead && events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        hx_link_receive(link);
}

static void on_process_end(hx_engine_t *engine, hx_endpoint_t *ep)
{
    epoll_ctl(engine->control.epoll_fd, EPOLL_CTL_DEL, ep->pidfd, NULL);
    /* Its last words may stand in the socket: a note that was acknowledged, a goodbye. */
    if (ep->link)
        hx_link_receive(ep->link);
    hx_endpoint_lose(ep, HX_ERR_PEER_LOST, "its process ended");
}

/* ---- the tick ---- */

static void reap_links(hx_engine_t *engine)
{
    for (hx_link_t **p = &engine->control.links; *p;) {
        hx_link_t *link = *p;
        if (!link->dead) {
            p = &link->next;
            continue;
        }
        *p = link->next;
        hx_link_free(link);
    }
}

static void tick(hx_clock_t *clock, uint64_t now)
{
    hx_engine_t *engine = clock->engine;
    hx_control_t *c = &engine->control;
    clock->next_tick_ns = now + clock->tick_ns;
    hx_live_check_operations(engine, now);
    for (hx_endpoint_t *ep = c->endpoints; ep; ep = ep->next)
        hx_live_check_peer(ep, now);
    for (hx_link_t *link = c->links; link; link = link->next)
        if (!link->dead && link->state != HX_LINK_UP && now > link->deadline_ns)
            hx_link_fail(link, HX_ERR_UNREACHABLE, ETIMEDOUT, "no handshake within %.1f s",
                         (double)engine->config.handshake_timeout_ns / 1e9);
    clock->quiet = hx_live_anything_pending(engine) ? 0 : clock->quiet + 1;
    if (clock->quiet < QUIET_TICKS)
        return;
    clock->quiet = 0;
    atomic_store(&c->tick_armed, false);
    if (hx_live_anything_pending(engine)) /* posted between the look and the store: its poster saw the tick armed */
        atomic_store(&c->tick_armed, true);
}

static int timeout_ms(hx_clock_t *clock, uint64_t now)
{
    hx_control_t *c = &clock->engine->control;
    uint64_t due = UINT64_MAX;
    if (atomic_load(&c->tick_armed))
        due = clock->next_tick_ns;
    if (clock->provider_due_ns && clock->provider_due_ns < due)
        due = clock->provider_due_ns;
    int ms = due == UINT64_MAX ? -1 : due <= now ? 0 : (int)((due - now + MS - 1) / MS);
    int revoke = hx_revoke_timeout_ms(clock->engine);
    return revoke >= 0 && (ms < 0 || revoke < ms) ? revoke : ms;
}

/* ---- the thread ---- */

static void dispatch(hx_engine_t *engine, const struct epoll_event *ev)
{
    hx_control_t *c = &engine->control;
    void *ptr = (void *)(uintptr_t)(ev->data.u64 & ~(uint64_t)TAG_MASK);
    uint64_t count;
    switch (ev->data.u64 & TAG_MASK) {
    case TAG_LINK:
        on_link(ptr, ev->events);
        break;
    case TAG_PID:
        on_process_end(engine, ptr);
        break;
    case TAG_WAKE:
        if (read(c->wake_fd, &count, sizeof count) < 0) {
            /* somebody else's wake-up was merged into an earlier one */
        }
        break;
    case TAG_UNIX:
        hx_links_accept(engine, c->unix_fd, false);
        break;
    case TAG_TCP:
        hx_links_accept(engine, c->tcp_fd, true);
        break;
    }
}

static void round_of_work(hx_clock_t *clock)
{
    hx_engine_t *engine = clock->engine;
    hx_control_t *c = &engine->control;
    /* Only notes that were here before the commands go out after them: a note that says "granted", "registered" must not
     * overtake the grant or the announcement that was asked for before it. */
    for (hx_endpoint_t *ep = c->endpoints; ep; ep = ep->next) {
        pthread_mutex_lock(&ep->note_mu);
        ep->note_due = ep->note_pushed;
        pthread_mutex_unlock(&ep->note_mu);
    }
    hx_commands_run(engine);
    for (hx_endpoint_t *ep = c->endpoints; ep; ep = ep->next) {
        hx_live_cancel_notes(ep);
        hx_frames_pump_notes(ep);
        hx_acks_pay(ep);
        if (ep->bye_ns && atomic_load(&ep->state) == HX_EP_UP)
            hx_live_goodbye(ep, hx_now_ns(), "closed on this side");
    }
    uint64_t now = hx_now_ns();
    hx_revoke_poll(engine, now);
    clock->provider_due_ns = hx_providers_tick(engine, now);
    if (c->links || c->endpoints)
        for (hx_link_t *link = c->links; link; link = link->next)
            if (link->state != HX_LINK_UP && !atomic_exchange(&c->tick_armed, true))
                clock->next_tick_ns = now + clock->tick_ns;
    if (atomic_load(&c->tick_armed) && now >= clock->next_tick_ns)
        tick(clock, now);
    hx_live_forget_lost(engine);
    reap_links(engine);
}

/* What our libraries still have on its way to peers is taken back before the goodbye: then they need not wait for us. */
static void take_back(hx_engine_t *engine)
{
    uint64_t deadline = hx_now_ns() + 2 * engine->config.cancel_grace_ns;
    for (bool idle = false; !idle && hx_now_ns() < deadline;) {
        pthread_mutex_lock(&engine->control.fork_mu);
        idle = true;
        for (hx_endpoint_t *ep = engine->control.endpoints; ep; ep = ep->next) {
            if (!atomic_exchange(&ep->closing, true))
                hx_providers_kick(engine);
            idle &= atomic_load(&ep->state) != HX_EP_UP || hx_providers_idle(ep);
        }
        if (!idle)
            hx_providers_tick(engine, hx_now_ns());
        pthread_mutex_unlock(&engine->control.fork_mu);
        if (!idle)
            poll(NULL, 0, 1);
    }
}

static void say_goodbye(hx_engine_t *engine)
{
    hx_control_t *c = &engine->control;
    for (hx_endpoint_t *ep = c->endpoints; ep; ep = ep->next)
        hx_live_goodbye(ep, UINT64_MAX, "the engine was closed");
    for (hx_link_t *link = c->links; link; link = link->next)
        if (!link->dead)
            hx_link_fail(link, HX_ERR_CLOSED, 0, "the engine was closed");
    reap_links(engine);
}

/* Whatever peers had started in our memory gets its time to end, before that memory goes back to its owner. */
static void wait_for_peers(hx_clock_t *clock)
{
    hx_engine_t *engine = clock->engine;
    uint64_t deadline = hx_now_ns() + engine->config.cancel_grace_ns;
    for (;;) {
        pthread_mutex_lock(&engine->control.fork_mu);
        hx_providers_tick(engine, hx_now_ns()); /* lets go of what it held */
        hx_providers_tick(engine, hx_now_ns()); /* it may hold operations, which hold endpoints */
        hx_live_forget_lost(engine);
        bool over = !engine->control.endpoints || hx_now_ns() >= deadline;
        pthread_mutex_unlock(&engine->control.fork_mu);
        if (over)
            return;
        poll(NULL, 0, 1);
    }
}

static void shut_down(hx_clock_t *clock)
{
    hx_engine_t *engine = clock->engine;
    hx_control_t *c = &engine->control;
    pthread_mutex_lock(&c->mu);
    c->closed = true;
    pthread_mutex_unlock(&c->mu);
    pthread_mutex_lock(&c->fork_mu);
    hx_commands_run(engine);
    pthread_mutex_unlock(&c->fork_mu);
    take_back(engine);
    pthread_mutex_lock(&c->fork_mu);
    say_goodbye(engine);
    pthread_mutex_unlock(&c->fork_mu);
    wait_for_peers(clock);
    hx_providers_stop(engine); /* a library's listener is gone then, and with it what peers could write through it */
    engine->stuck_peers += hx_live_count_stuck(engine);
    while (atomic_load(&engine->live_ops) && !engine->abandoned) { /* held ones; the copy threads finish the rest */
        hx_providers_tick(engine, hx_now_ns());
        poll(NULL, 0, 1);
    }
    hx_revoke_abort(engine); /* after the last operation: it answers for them as well */
    pthread_mutex_lock(&c->fork_mu);
    for (hx_endpoint_t *ep; (ep = c->endpoints);) {
        c->endpoints = ep->next;
        hx_live_let_go(ep);
    }
    pthread_mutex_unlock(&c->fork_mu);
    for (;;) { /* announcements hold references */
        hx_region_t *r;
        pthread_mutex_lock(&engine->regions_mu);
        for (r = engine->regions; r && !r->wanted; r = r->next)
            ;
        if (r) {
            r->wanted = false;
            r->announced = false;
        }
        pthread_mutex_unlock(&engine->regions_mu);
        if (!r)
            break;
        hx_region_unref(r);
    }
    free_known(engine);
}

static void *run(void *arg)
{
    hx_engine_t *engine = arg;
    hx_control_t *c = &engine->control;
    const hx_config_t *config = &engine->config;
    hx_clock_t clock = {.engine = engine};
    uint64_t shortest = config->peer_timeout_ns;
    shortest = config->stall_timeout_ns < shortest ? config->stall_timeout_ns : shortest;
    shortest = config->cancel_grace_ns < shortest ? config->cancel_grace_ns : shortest;
    shortest = config->handshake_timeout_ns < shortest ? config->handshake_timeout_ns : shortest;
    clock.tick_ns = shortest / 8 < 5 * MS ? 5 * MS : shortest / 8 > 250 * MS ? 250 * MS : shortest / 8;
    while (!atomic_load(&c->stopping)) {
        struct epoll_event events[64];
        int n = epoll_wait(c->epoll_fd, events, 64, timeout_ms(&clock, hx_now_ns()));
        pthread_mutex_lock(&c->fork_mu);
        for (int i = 0; i < n; i++)
            dispatch(engine, &events[i]);
        round_of_work(&clock);
        pthread_mutex_unlock(&c->fork_mu);
    }
    shut_down(&clock);
    return NULL;
}

hx_status_t hx_control_start(hx_engine_t *engine, char text[HX_TEXT_MAX])
{
    hx_control_t *c = &engine->control;
    const hx_config_t *config = &engine->config;
    c->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    c->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (c->wake_fd < 0 || c->epoll_fd < 0) {
        snprintf(text, HX_TEXT_MAX, "cannot open the engine's descriptors: %s", strerror(errno));
        return HX_ERR_SYSTEM;
    }
    watch(engine, EPOLL_CTL_ADD, c->wake_fd, EPOLLIN, NULL, TAG_WAKE);
    if (config->unix_path) {
        c->unix_fd = hx_listen_unix(config->unix_path, text);
        if (c->unix_fd < 0)
            return HX_ERR_SYSTEM;
        watch(engine, EPOLL_CTL_ADD, c->unix_fd, EPOLLIN, NULL, TAG_UNIX);
    }
    if (config->tcp_host) {
        c->tcp_fd = hx_listen_tcp(config->tcp_host, config->tcp_port, &c->tcp_port, text);
        if (c->tcp_fd < 0)
            return HX_ERR_SYSTEM;
        watch(engine, EPOLL_CTL_ADD, c->tcp_fd, EPOLLIN, NULL, TAG_TCP);
    }
    if (!hx_thread_start(&c->thread, run, engine, "hx-control"))
        return HX_ERR_SYSTEM;
    c->started = true;
    return HX_OK;
}

uint16_t hx_engine_tcp_port(const hx_engine_t *engine)
{
    return engine->control.tcp_port;
}

void hx_control_stop(hx_engine_t *engine)
{
    hx_control_t *c = &engine->control;
    if (c->started) {
        atomic_store(&c->stopping, true);
        hx_control_wake(engine);
        pthread_join(c->thread, NULL);
        c->started = false;
    }
    if (c->unix_fd >= 0)
        unlink(engine->config.unix_path);
    pthread_mutex_lock(&c->fork_mu); /* a child must not close a number that stands for something else by then */
    hx_close_fd(&c->unix_fd);
    hx_close_fd(&c->tcp_fd);
    hx_close_fd(&c->epoll_fd);
    pthread_mutex_unlock(&c->fork_mu);
}

void hx_engine_before_fork(hx_engine_t *engine)
{
    pthread_mutex_lock(&engine->control.fork_mu);
    hx_providers_fork(engine, HX_FORK_BEFORE);
}

void hx_engine_after_fork(hx_engine_t *engine)
{
    hx_providers_fork(engine, HX_FORK_PARENT);
    pthread_mutex_unlock(&engine->control.fork_mu);
}

void hx_links_forked(hx_engine_t *engine)
{
    for (hx_link_t *link = engine->control.links; link; link = link->next) {
        if (!link->dead)
            close(link->fd);
        for (hx_out_t *out = link->tx_head; out; out = out->next)
            hx_close_fd(&out->fd);
        while (link->nfds)
            close(link->fds[--link->nfds]);
        hx_close_fd(&link->ep->pidfd);
    }
    for (hx_endpoint_t *ep = engine->control.endpoints; ep; ep = ep->next)
        hx_close_fd(&ep->pidfd);
}
