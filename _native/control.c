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

/* ---- commands ---- */

hx_command_t *hx_command_new(hx_cmd_kind_t kind, const uint64_t *spans, size_t n)
{
    hx_command_t *cmd = calloc(1, sizeof *cmd + n * 16);
    if (!cmd)
        return NULL;
    cmd->kind = kind;
    cmd->n = n;
    if (n)
        memcpy(cmd->spans, spans, n * 16);
    return cmd;
}

static void free_command(hx_command_t *cmd)
{
    hx_region_unref(cmd->region);
    hx_endpoint_unref(cmd->ep);
    hx_rregion_unref(cmd->rregion);
    free(cmd);
}

void hx_control_wake(hx_engine_t *engine)
{
    uint64_t one = 1;
    while (write(engine->control.wake_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

hx_status_t hx_command_push(hx_engine_t *engine, hx_command_t *cmd)
{
    hx_control_t *c = &engine->control;
    pthread_mutex_lock(&c->mu);
    bool closed = c->closed;
    if (!closed) {
        cmd->next = NULL;
        if (c->tail)
            c->tail->next = cmd;
        else
            c->head = cmd;
        c->tail = cmd;
    }
    pthread_mutex_unlock(&c->mu);
    if (closed) {
        free_command(cmd);
        return HX_ERR_CLOSED;
    }
    hx_control_wake(engine);
    return HX_OK;
}

void hx_control_arm_tick(hx_engine_t *engine)
{
    atomic_bool *armed = &engine->control.tick_armed;
    if (!atomic_load(armed) && !atomic_exchange(armed, true))
        hx_control_wake(engine);
}

hx_status_t hx_connect(hx_engine_t *engine, const hx_target_t *target)
{
    hx_command_t *cmd = hx_command_new(HX_CMD_CONNECT, NULL, 0);
    const char *address = target->path ? target->path : target->tcp_host;
    if (!cmd)
        return HX_ERR_NO_MEMORY;
    if (!address || strlen(address) >= sizeof cmd->address || (target->name && strlen(target->name) > HX_NAME_MAX)) {
        free(cmd);
        return HX_ERR_CONFIG;
    }
    strcpy(cmd->address, address);
    cmd->tcp = !target->path;
    cmd->port = target->tcp_port;
    cmd->token = target->token;
    if (target->name)
        strcpy(cmd->name, target->name);
    cmd->has_incarnation = target->incarnation != NULL;
    if (target->incarnation)
        memcpy(cmd->incarnation, target->incarnation, sizeof cmd->incarnation);
    return hx_command_push(engine, cmd);
}

hx_status_t hx_supersede(hx_engine_t *engine, const char *name, uint64_t epoch)
{
    hx_command_t *cmd = hx_command_new(HX_CMD_SUPERSEDE, NULL, 0);
    if (!cmd)
        return HX_ERR_NO_MEMORY;
    snprintf(cmd->name, sizeof cmd->name, "%s", name);
    cmd->value = epoch;
    return hx_command_push(engine, cmd);
}

static hx_status_t push_endpoint(hx_endpoint_t *ep, hx_cmd_kind_t kind, uint64_t value)
{
    hx_command_t *cmd = hx_command_new(kind, NULL, 0);
    if (!cmd)
        return HX_ERR_NO_MEMORY;
    hx_endpoint_ref(ep);
    cmd->ep = ep;
    cmd->value = value;
    return hx_command_push(ep->engine, cmd);
}

hx_status_t hx_endpoint_close(hx_endpoint_t *ep)
{
    return push_endpoint(ep, HX_CMD_CLOSE, 0);
}

hx_status_t hx_endpoint_credit(hx_endpoint_t *ep, uint32_t notes)
{
    return push_endpoint(ep, HX_CMD_CREDIT, notes);
}

hx_status_t hx_endpoint_route(hx_endpoint_t *ep, const hx_region_t *local, const hx_rregion_t *remote,
                              const char **provider_p, char text[HX_TEXT_MAX])
{
    const hx_provider_t *p = hx_provider_route(ep, local, remote, text);
    if (!p)
        return HX_ERR_NO_PATH;
    *provider_p = p->name;
    return HX_OK;
}

static bool announceable(const hx_region_t *r)
{
    return r->wanted && !r->announced && atomic_load(&r->state) == HX_REGION_READY;
}

/* All regions that have become ready, as one announcement. */
static void announce_ready(hx_engine_t *engine)
{
    hx_region_t **list = NULL;
    size_t n = 0, count = 0;
    pthread_mutex_lock(&engine->regions_mu);
    for (hx_region_t *r = engine->regions; r; r = r->next)
        count += announceable(r);
    if (count)
        list = hx_alloc(count * sizeof *list);
    for (hx_region_t *r = engine->regions; r && n < count; r = r->next)
        if (announceable(r))
            list[n++] = r; /* `wanted` holds a reference, which only this thread drops */
    pthread_mutex_unlock(&engine->regions_mu);
    for (size_t i = 0; i < n / 2; i++) { /* the engine's list has the newest first */
        hx_region_t *r = list[i];
        list[i] = list[n - 1 - i];
        list[n - 1 - i] = r;
    }
    if (n)
        hx_frames_announce(engine, list, n);
    free(list);
}

static void run_command(hx_engine_t *engine, hx_command_t *cmd)
{
    hx_endpoint_t *ep = cmd->ep;
    bool linked = ep && ep->link && !ep->link->dead;
    switch (cmd->kind) {
    case HX_CMD_WAKE:
        break;
    case HX_CMD_CONNECT:
        hx_link_connect(engine, cmd);
        break;
    case HX_CMD_ANNOUNCE:
        cmd->region->wanted = true;
        cmd->region = NULL; /* the reference goes with it */
        engine->control.rescan = true;
        break;
    case HX_CMD_REVOKE:
    case HX_CMD_DEREGISTER:
        hx_revoke_start(engine, cmd);
        break;
    case HX_CMD_GRANT:
        hx_revoke_grant(engine, cmd);
        break;
    case HX_CMD_ASK_MAP:
        if (linked)
            hx_link_send(ep->link, HX_F_MAP_ASK, cmd->rregion->id, NULL, 0, -1);
        break;
    case HX_CMD_CREDIT:
        if (linked) {
            uint32_t held = ep->link->notes_held;
            ep->link->notes_held = held > cmd->value ? held - (uint32_t)cmd->value : 0;
            hx_link_send(ep->link, HX_F_CREDIT, cmd->value, NULL, 0, -1);
        }
        break;
    case HX_CMD_CLOSE:
        if (linked)
            hx_link_send(ep->link, HX_F_BYE, 0, NULL, 0, -1);
        hx_endpoint_lose(ep, HX_ERR_ABORTED, "closed on this side");
        break;
    case HX_CMD_SUPERSEDE:
        hx_control_epoch_ok(engine, cmd->name, cmd->value, true);
        hx_control_supersede(engine, cmd->name, cmd->value);
        break;
    }
    free_command(cmd);
}

static void run_commands(hx_engine_t *engine)
{
    hx_control_t *c = &engine->control;
    pthread_mutex_lock(&c->mu);
    hx_command_t *cmd = c->head;
    c->head = c->tail = NULL;
    pthread_mutex_unlock(&c->mu);
    while (cmd) {
        hx_command_t *next = cmd->next;
        run_command(engine, cmd);
        cmd = next;
    }
    if (c->rescan) {
        c->rescan = false;
        announce_ready(engine);
    }
}

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

static void check_operations(hx_engine_t *engine, uint64_t now)
{
    bool kick = false;
    for (uint32_t i = 0; i < engine->config.queue_depth; i++) {
        hx_op_t *op = &engine->ops[i];
        uint32_t gen = atomic_load(&op->gen);
        uint32_t stage = atomic_load(&op->stage);
        if (stage == HX_STAGE_FREE || stage == HX_STAGE_DONE)
            continue;
        uint64_t progress = atomic_load(&op->progress_ns);
        if ((stage == HX_STAGE_ACTIVE || stage == HX_STAGE_HELD) && progress &&
            now > progress + engine->config.stall_timeout_ns) {
            hx_op_cancel_as(op, gen, HX_ERR_TIMEOUT);
            kick = true;
        }
        uint64_t cancel = atomic_load(&op->cancel), since = atomic_load(&op->cancel_ns);
        if (stage != HX_STAGE_NOTE && cancel >> 8 == gen && now > since + engine->config.cancel_grace_ns)
            hx_op_report_early(engine, op, gen);
    }
    if (kick)
        hx_sched_kick(engine);
}

/* A cancelled operation whose note has not been acknowledged: unsent, the note goes out as aborted; sent, the answer no
 * longer interests anybody. */
static void cancel_notes(hx_endpoint_t *ep)
{
    hx_op_t *ended = NULL;
    pthread_mutex_lock(&ep->note_mu);
    for (int list = 0; list < 2; list++)
        for (hx_note_t *note = list ? ep->unacked_head : ep->note_head; note; note = note->next) {
            hx_op_t *op = note->op;
            hx_status_t status = op ? hx_op_verdict(op) : HX_OK;
            if (status == HX_OK)
                continue;
            note->op = NULL;
            note->aborted = note->aborted || !list;
            op->status = status;
            op->next = ended;
            ended = op;
        }
    pthread_mutex_unlock(&ep->note_mu);
    while (ended) {
        hx_op_t *op = ended;
        ended = op->next; /* before it completes: then it may be another operation's */
        hx_op_complete(op, op->status);
    }
}

static bool pending(const hx_endpoint_t *ep)
{
    return atomic_load(&ep->inflight) || atomic_load(&ep->notes_pending);
}

/* Heartbeats only while we wait for something; they are answered by the peer's control thread. */
static void check_peer(hx_endpoint_t *ep, uint64_t now)
{
    uint64_t timeout = ep->engine->config.peer_timeout_ns;
    bool waiting = pending(ep) || ep->engine->control.revokes;
    if (!ep->link || ep->link->dead)
        return;
    if (!waiting) {
        ep->ping_ns = 0;
        return;
    }
    bool asked = ep->ping_ns > ep->last_rx_ns;
    if (asked && now - ep->ping_ns > timeout)
        hx_link_fail(ep->link, HX_ERR_PEER_LOST, 0, "no sign of life for %.1f s: frozen, or its host is gone",
                     (double)timeout / 1e9);
    else if (!asked && now - ep->last_rx_ns > timeout / 4) {
        ep->ping_ns = now;
        hx_link_send(ep->link, HX_F_PING, 0, NULL, 0, -1);
    }
}

/* Lost endpoints stay until nothing that their process had started can still touch our memory. */
static bool can_forget(const hx_endpoint_t *ep)
{
    struct pollfd pfd = {.fd = ep->pidfd, .events = POLLIN};
    if (atomic_load(&ep->state) != HX_EP_LOST || atomic_load(&ep->inflight))
        return false;
    return !ep->theirs || !hx_page_busy(ep->theirs) || (ep->pidfd >= 0 && poll(&pfd, 1, 0) > 0);
}

/* Handles to it may live on; its descriptor does not wait for them. Nothing is in flight, so nobody looks at it. */
static void let_go(hx_endpoint_t *ep)
{
    if (ep->pidfd >= 0) /* as in hx_link_close */
        epoll_ctl(ep->engine->control.epoll_fd, EPOLL_CTL_DEL, ep->pidfd, NULL);
    hx_close_fd(&ep->pidfd);
    hx_endpoint_unref(ep);
}

static void forget_lost(hx_engine_t *engine)
{
    for (hx_endpoint_t **p = &engine->control.endpoints; *p;) {
        hx_endpoint_t *ep = *p;
        if (!can_forget(ep)) {
            p = &ep->next;
            continue;
        }
        *p = ep->next;
        let_go(ep);
    }
}

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

static bool anything_pending(hx_engine_t *engine)
{
    hx_control_t *c = &engine->control;
    if (atomic_load(&engine->live_ops) || c->revokes)
        return true;
    for (hx_link_t *link = c->links; link; link = link->next)
        if (link->state != HX_LINK_UP)
            return true;
    for (hx_endpoint_t *ep = c->endpoints; ep; ep = ep->next)
        if (pending(ep) || atomic_load(&ep->state) == HX_EP_LOST)
            return true;
    return false;
}

static void tick(hx_clock_t *clock, uint64_t now)
{
    hx_engine_t *engine = clock->engine;
    hx_control_t *c = &engine->control;
    clock->next_tick_ns = now + clock->tick_ns;
    check_operations(engine, now);
    for (hx_endpoint_t *ep = c->endpoints; ep; ep = ep->next)
        check_peer(ep, now);
    for (hx_link_t *link = c->links; link; link = link->next)
        if (!link->dead && link->state != HX_LINK_UP && now > link->deadline_ns)
            hx_link_fail(link, HX_ERR_UNREACHABLE, ETIMEDOUT, "no handshake within %.1f s",
                         (double)engine->config.handshake_timeout_ns / 1e9);
    clock->quiet = anything_pending(engine) ? 0 : clock->quiet + 1;
    if (clock->quiet < QUIET_TICKS)
        return;
    clock->quiet = 0;
    atomic_store(&c->tick_armed, false);
    if (anything_pending(engine)) /* posted between the look and the store: its poster saw the tick armed */
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
        c->rescan = true;
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
    run_commands(engine);
    for (hx_endpoint_t *ep = c->endpoints; ep; ep = ep->next) {
        cancel_notes(ep);
        hx_frames_pump_notes(ep);
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
    forget_lost(engine);
    reap_links(engine);
}

static void say_goodbye(hx_engine_t *engine)
{
    hx_control_t *c = &engine->control;
    for (hx_endpoint_t *ep = c->endpoints; ep; ep = ep->next) {
        if (ep->link)
            hx_link_send(ep->link, HX_F_BYE, 0, NULL, 0, -1);
        hx_endpoint_lose(ep, HX_ERR_ABORTED, "the engine was closed");
    }
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
        forget_lost(engine);
        bool over = !engine->control.endpoints || hx_now_ns() >= deadline;
        pthread_mutex_unlock(&engine->control.fork_mu);
        if (over)
            return;
        poll(NULL, 0, 1);
    }
}

static uint32_t count_stuck(hx_engine_t *engine)
{
    uint32_t n = 0;
    for (hx_endpoint_t *ep = engine->control.endpoints; ep; ep = ep->next)
        n += ep->theirs && hx_page_busy(ep->theirs);
    return n;
}

static void shut_down(hx_clock_t *clock)
{
    hx_engine_t *engine = clock->engine;
    hx_control_t *c = &engine->control;
    pthread_mutex_lock(&c->mu);
    c->closed = true;
    pthread_mutex_unlock(&c->mu);
    pthread_mutex_lock(&c->fork_mu);
    run_commands(engine);
    say_goodbye(engine);
    pthread_mutex_unlock(&c->fork_mu);
    wait_for_peers(clock);
    engine->stuck_peers = count_stuck(engine);
    hx_revoke_abort(engine);
    while (atomic_load(&engine->live_ops)) { /* held ones; the copy threads finish the rest */
        hx_providers_tick(engine, hx_now_ns());
        poll(NULL, 0, 1);
    }
    pthread_mutex_lock(&c->fork_mu);
    for (hx_endpoint_t *ep; (ep = c->endpoints);) {
        c->endpoints = ep->next;
        let_go(ep);
    }
    pthread_mutex_unlock(&c->fork_mu);
    for (;;) { /* announcements hold references */
        hx_region_t *r;
        pthread_mutex_lock(&engine->regions_mu);
        for (r = engine->regions; r && !r->wanted; r = r->next)
            ;
        if (r)
            r->wanted = r->announced = false;
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
}

void hx_engine_after_fork(hx_engine_t *engine)
{
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
    }
    for (hx_endpoint_t *ep = engine->control.endpoints; ep; ep = ep->next)
        hx_close_fd(&ep->pidfd);
}
