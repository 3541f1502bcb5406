/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs provider's life, its thread, and its entries in the provider table. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "link.h"
#include "sys.h"
#include "verbs_core.h"

#define PACKAGE "it needs libibverbs and a driver (Debian: libibverbs1 ibverbs-providers)"

void hx_verbs_wake(hx_verbs_t *v)
{
    uint64_t one = 1;
    if (atomic_exchange(&v->awake, true))
        return;
    pthread_mutex_lock(&v->wake_mu); /* the descriptor goes with the thread, and whoever wakes it may come later */
    while (v->wake_fd >= 0 && write(v->wake_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
    pthread_mutex_unlock(&v->wake_mu);
}

void hx_verbs_gone(hx_verbs_t *v)
{
    if (v->gone)
        return;
    v->gone = true;
    epoll_ctl(v->engine->epoll_fd, EPOLL_CTL_DEL, v->info.fd, NULL); /* it would be readable for ever */
    hx_verbs_wake(v);
}

static bool assist(hx_engine_t *engine, void *state)
{
    hx_verbs_t *v = state;
    hx_done_t done = {NULL};
    (void)engine;
    if (pthread_mutex_trylock(&v->mu) != 0)
        return false; /* the descriptor stays readable */
    bool any = !v->stopping && hx_verbs_drain(v, true, &done);
    pthread_mutex_unlock(&v->mu);
    hx_done_finish(&done);
    return any;
}

/* ---- the thread ---- */

static void free_forgotten(hx_verbs_t *v)
{
    for (hx_vpeer_t **at = &v->peers; *at;) {
        hx_vpeer_t *p = *at;
        if (p->ep || p->ends || !atomic_load(&p->forgotten)) { /* the library names it, as long as there is one */
            at = &p->next;
            continue;
        }
        *at = p->next;
        hx_verbs_free_notes(p);
        free(p);
    }
}

static void forget_released(hx_verbs_t *v, bool all)
{
    hx_endpoint_t *ep;
    do {
        ep = NULL;
        pthread_mutex_lock(&v->mu);
        hx_verbs_take_posts(v); /* nothing is posted to a released peer, but something may have been */
        for (hx_vpeer_t *p = v->peers; p && !ep; p = p->next)
            if (p->ep && (all || (p->released && hx_verbs_quiet(p) && !p->runq.head))) {
                ep = p->ep;
                p->ep = NULL;
            }
        pthread_mutex_unlock(&v->mu);
        hx_endpoint_unref(ep);
    } while (ep);
}

static void warn(hx_verbs_t *v, const char *what)
{
    char text[HX_TEXT_MAX];
    hx_event_t ev = {.kind = HX_EV_WARNING, .status = HX_ERR_PROVIDER};
    snprintf(text, sizeof text, "RDMA device %.64s, port %d: %.200s", v->info.device, v->info.port, what);
    hx_event_emit(v->engine, ev, NULL, 0, text, strlen(text));
}

/* What a driver has for its queue pairs when the engine is closed, at least. */
#define STOP_NS 2000000000ull

/* Under mu. */
static bool too_late(const hx_verbs_t *v, uint64_t now)
{
    uint64_t grace = 2 * v->engine->config.cancel_grace_ns;
    return v->stopping && now > v->stopping_ns + (grace > STOP_NS ? grace : STOP_NS);
}

static void *run(void *arg)
{
    hx_verbs_t *v = arg;
    bool refill = false, forgot = false;
    bool gone = false, stopping; /* as they were under mu: others set them */
    int timeout = -1;
    for (;;) {
        /* Completions are the draining thread's, unless there is more to post than fits. */
        struct pollfd fds[3] = {{v->wake_fd, POLLIN, 0}, {v->info.async_fd, POLLIN, 0}, {v->info.fd, POLLIN, 0}};
        poll(fds, gone ? 1 : refill ? 3 : 2, timeout);
        hx_done_t done = {NULL};
        uint64_t count, now = hx_now_ns(), due = 0;
        char text[128];
        if (fds[0].revents && read(v->wake_fd, &count, sizeof count) < 0) {
            /* read away by an earlier look */
        }
        atomic_store(&v->awake, false);
        pthread_mutex_lock(&v->mu);
        void *owner = NULL;
        for (int got = fds[1].revents ? 1 : 0; got > 0 && !v->gone;) {
            got = v->lib->async(v->device, &owner, text, sizeof text);
            if (got < 0)
                hx_verbs_gone(v);
            else if (got && owner)
                hx_verbs_fail(owner, text);
            else if (got && text[0])
                warn(v, text);
        }
        if (v->gone && !v->told_gone) {
            v->told_gone = true;
            warn(v, "the device is gone");
        }
        free_forgotten(v);
        v->hungry = false;
        hx_verbs_take_posts(v);
        hx_verbs_drain(v, false, &done);
        bool live = false, standing = false;
        refill = false;
        for (hx_vpeer_t *p = v->peers; p; p = p->next) {
            if (!p->ep)
                continue; /* only its memory is left */
            if (v->gone)
                hx_verbs_fail(p, "the device is gone");
            uint64_t at = hx_verbs_tend(p, now, &done);
            due = at && (!due || at < due) ? at : due;
            bool standing_still = (p->qp || hx_verbs_ending(p)) && too_late(v, now);
            if (standing_still) {
                v->engine->abandoned = true;
                hx_verbs_leave(p);
            }
            live |= p->runq.head || ((p->qp || hx_verbs_ending(p)) && !standing_still);
            standing |= !hx_verbs_quiet(p);
            refill |= p->usable && p->runq.head && p->reqs_head;
        }
        gone = v->gone;
        stopping = v->stopping;
        bool let_go = gone && !forgot && !standing; /* or whoever takes the device away waits for us */
        bool over = stopping && !live && !hx_verbs_take_posts(v);
        pthread_mutex_unlock(&v->mu);
        hx_done_finish(&done);
        forget_released(v, false);
        if (let_go)
            hx_verbs_forget_all(v);
        forgot |= let_go;
        if (over)
            return NULL;
        timeout = stopping ? 1 : !due ? -1 : due <= now ? 0 : (int)((due - now + 999999) / 1000000);
    }
}

/* ---- open, stop, close ---- */

static const hx_verbs_table_t *load(const char *binding, char text[HX_TEXT_MAX])
{
    void *shim = dlopen(binding, RTLD_NOW | RTLD_LOCAL);
    void *symbol = shim ? dlsym(shim, "hx_verbs_binding") : NULL;
    const hx_verbs_table_t *(*table)(void) = NULL;
    memcpy(&table, &symbol, sizeof symbol);
    if (table && table()->abi == HX_VERBS_ABI)
        return table();
    snprintf(text, HX_TEXT_MAX, "%.300s cannot be used: %.400s; %s", binding, shim ? "another version" : dlerror(),
             PACKAGE);
    return NULL;
}

hx_status_t hx_verbs_probe(const char *binding, char text[HX_TEXT_MAX])
{
    const hx_verbs_table_t *lib = load(binding, text);
    hx_verbs_info_t info = {.gid_index = -1};
    hx_verbs_device_t *device;
    if (!lib)
        return HX_ERR_CONFIG;
    if (lib->open(&info, &device, text, HX_TEXT_MAX))
        return HX_ERR_SYSTEM;
    lib->close(device);
    snprintf(text, HX_TEXT_MAX, "device %s, port %d, GID %d", info.device, info.port, info.gid_index);
    return HX_OK;
}

size_t hx_verbs_ports(const char *binding, hx_verbs_port_t *out, size_t max)
{
    char text[HX_TEXT_MAX];
    const hx_verbs_table_t *lib = load(binding, text);
    return lib ? lib->ports(out, max) : 0;
}

static hx_status_t open_verbs(hx_engine_t *engine, void **state_p, char text[HX_TEXT_MAX])
{
    const hx_verbs_config_t *c = engine->config.verbs;
    if (!c)
        return HX_OK;
    const hx_verbs_table_t *lib = load(c->binding, text);
    if (!lib)
        return HX_ERR_CONFIG;
    hx_verbs_t *v = calloc(1, sizeof *v);
    if (!v)
        return HX_ERR_NO_MEMORY;
    v->engine = engine;
    v->lib = lib;
    pthread_mutex_init(&v->mu, NULL);
    pthread_mutex_init(&v->inbox_mu, NULL);
    pthread_mutex_init(&v->reg_mu, NULL);
    pthread_mutex_init(&v->wake_mu, NULL);
    v->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    v->reqs = calloc(HX_VERBS_REQUESTS, sizeof *v->reqs);
    v->scratch = aligned_alloc(HX_VERBS_PAGE, 2 * HX_VERBS_PAGE);
    if (v->scratch)
        memset(v->scratch, 0, 2 * HX_VERBS_PAGE);
    v->info = (hx_verbs_info_t){.port = c->port,
                                .gid_index = c->gid_index,
                                .timeout = c->timeout,
                                .service_level = c->service_level,
                                .traffic_class = c->traffic_class};
    snprintf(v->info.device, sizeof v->info.device, "%s", c->device ? c->device : "");
    *state_p = v; /* whatever fails from here, stop() and close() find it */
    if (!v->reqs || !v->scratch || v->wake_fd < 0)
        return HX_ERR_NO_MEMORY;
    for (uint32_t i = HX_VERBS_REQUESTS; i-- > 0;) {
        v->reqs[i].index = i;
        v->reqs[i].next = v->free_reqs;
        v->free_reqs = &v->reqs[i];
    }
    if (lib->open(&v->info, &v->device, text, HX_TEXT_MAX))
        return HX_ERR_CONFIG;
    if (v->info.max_message < HX_VERBS_CHUNK || v->info.max_wr < 2 * HX_VERBS_WRS) {
        snprintf(text, HX_TEXT_MAX, "RDMA device %s is too small: %u work requests of %llu bytes", v->info.device,
                 v->info.max_wr, (unsigned long long)v->info.max_message);
        return HX_ERR_CONFIG;
    }
    uint32_t key;
    int error = lib->reg(v->device, v->scratch, 8, true, true, false, &v->scratch_mr[0], &key, &v->flush_rkey);
    if (!error)
        error = lib->reg(v->device, v->scratch + HX_VERBS_PAGE, 8, true, false, false, &v->scratch_mr[1], &v->sink_lkey,
                         &key);
    struct epoll_event ev = {.events = EPOLLIN};
    if (!error && epoll_ctl(engine->epoll_fd, EPOLL_CTL_ADD, v->info.fd, &ev) < 0)
        error = errno;
    if (error) {
        snprintf(text, HX_TEXT_MAX, "RDMA device %s cannot be used: %s", v->info.device, strerror(error));
        return HX_ERR_SYSTEM;
    }
    v->started = hx_thread_start(&v->thread, run, v, "hx-verbs");
    return v->started ? HX_OK : HX_ERR_SYSTEM;
}

static void stop(hx_engine_t *engine, void *state)
{
    hx_verbs_t *v = state;
    if (v->stopped)
        return;
    v->stopped = true;
    pthread_mutex_lock(&v->mu);
    v->stopping = true;
    v->stopping_ns = hx_now_ns();
    pthread_mutex_unlock(&v->mu);
    if (v->started) {
        hx_verbs_wake(v);
        pthread_join(v->thread, NULL);
    }
    forget_released(v, true);
    if (!v->gone && v->device) /* if it is gone, the setup thread may be closing it */
        epoll_ctl(engine->epoll_fd, EPOLL_CTL_DEL, v->info.fd, NULL);
    for (const hx_vpeer_t *p = v->peers; p; p = p->next)
        engine->stuck_peers += !hx_verbs_quiet(p);
    if (!engine->abandoned)
        hx_verbs_forget_all(v);
    pthread_mutex_lock(&v->wake_mu);
    hx_close_fd(&v->wake_fd);
    pthread_mutex_unlock(&v->wake_mu);
}

static void close_verbs(hx_engine_t *engine, void *state)
{
    hx_verbs_t *v = state;
    (void)engine;
    for (hx_vpeer_t *p; (p = v->peers);) {
        v->peers = p->next;
        hx_verbs_free_notes(p);
        free(p);
    }
    free(v->scratch);
    free(v->reqs);
    pthread_mutex_destroy(&v->wake_mu);
    pthread_mutex_destroy(&v->reg_mu);
    pthread_mutex_destroy(&v->inbox_mu);
    pthread_mutex_destroy(&v->mu);
    free(v);
}

/* ---- what the core asks ---- */

static hx_status_t probe(char text[HX_TEXT_MAX])
{
    snprintf(text, HX_TEXT_MAX, "asked for with a binding: hx_verbs_probe");
    return HX_ERR_CONFIG;
}

static hx_status_t route(hx_endpoint_t *ep, const hx_region_t *local, const hx_rregion_t *remote,
                         char text[HX_TEXT_MAX])
{
    const char *why = NULL, *obstacle = NULL;
    if (remote->kind == HX_KIND_LAYOUT)
        why = "a layout is a description, not memory";
    else if (remote->kind == HX_KIND_DEVICE || (local && local->kind == HX_KIND_DEVICE))
        why = "NPU memory is not registered with RDMA devices";
    else if (!(ep->features & HX_FEATURE_VERBS) || !ep->verbs)
        why = "the peer's engine has no verbs transport";
    else if (!atomic_load(&ep->verbs->heard))
        why = "the peer's RDMA device has no queue pair for us";
    else if (!remote->direct)
        why = "the peer's memory is not registered with its RDMA device";
    else if (local && atomic_load(&local->state) == HX_REGION_READY && atomic_load(&local->adoption) == HX_ADOPT_NONE) {
        why = "the local memory is not registered";
        obstacle = local->obstacle;
    }
    if (text && why)
        snprintf(text, HX_TEXT_MAX, "%s%s%.800s", why, obstacle ? ": " : "", obstacle ? obstacle : "");
    else if (text)
        snprintf(text, HX_TEXT_MAX, "one-sided, by the RDMA device %s", ep->verbs->v->info.device);
    return why ? HX_ERR_NO_PATH : HX_OK;
}

/* The control thread is at work anyway: what has completed should not look as if it stood still, if the loop is busy. */
static uint64_t tick(hx_engine_t *engine, void *state, uint64_t now)
{
    hx_verbs_t *v = state;
    hx_done_t done = {NULL};
    (void)engine;
    (void)now;
    if (pthread_mutex_trylock(&v->mu) != 0)
        return 0;
    if (!v->stopping)
        hx_verbs_drain(v, false, &done);
    pthread_mutex_unlock(&v->mu);
    hx_done_finish(&done);
    return 0;
}

static void kick(hx_engine_t *engine, void *state)
{
    if (!hx_in_child(engine))
        hx_verbs_wake(state);
}

static void release(hx_endpoint_t *ep)
{
    hx_vpeer_t *p = ep->verbs;
    if (!p)
        return;
    pthread_mutex_lock(&p->v->mu);
    p->released = true;
    pthread_mutex_unlock(&p->v->mu);
    hx_verbs_wake(p->v);
}

/* Whoever drops the last handle may hold Python's lock: the thread frees it. */
static void forget(hx_endpoint_t *ep)
{
    hx_vpeer_t *p = ep->verbs;
    if (!p)
        return;
    hx_verbs_t *v = p->v;
    atomic_store(&p->forgotten, true);
    hx_verbs_wake(v);
}

static bool settled(hx_endpoint_t *ep)
{
    hx_vpeer_t *p = ep->verbs;
    if (!p)
        return true;
    pthread_mutex_lock(&p->v->mu);
    bool settled = hx_verbs_harmless(p);
    pthread_mutex_unlock(&p->v->mu);
    return settled;
}

static void around_fork(void *state)
{
    (void)state;
}

/* In the child: a device that it holds open would outlive its parent, with its parent's queue pairs. */
static void forked(void *state)
{
    hx_verbs_t *v = state;
    if (!v->device)
        return;
    close(v->info.fd);
    close(v->info.async_fd);
    close(v->info.cmd_fd);
    hx_close_fd(&v->wake_fd);
}

const hx_provider_t hx_provider_verbs = {
    .abi = HX_PROVIDER_ABI,
    .name = "verbs",
    .transport = HX_TRANSPORT_VERBS,
    .feature = HX_FEATURE_ACKS | HX_FEATURE_VERBS,
    .probe = probe,
    .open = open_verbs,
    .stop = stop,
    .close = close_verbs,
    .route = route,
    .submit = hx_verbs_submit,
    .submit_now = hx_verbs_submit_now,
    .assist = assist,
    .overdue = hx_verbs_overdue,
    .tick = tick,
    .kick = kick,
    .renews = true,
    .adopt = hx_verbs_adopt,
    .withdraw = hx_verbs_withdraw,
    .disown = hx_verbs_disown,
    .touching = hx_verbs_touching,
    .holds = hx_verbs_holds,
    .recall = hx_verbs_recall,
    .idle = hx_verbs_idle,
    .introduce = hx_verbs_introduce,
    .meet = hx_verbs_meet,
    .release = release,
    .forget = forget,
    .settled = settled,
    .keep_out = hx_verbs_keep_out,
    .kept_out = hx_verbs_kept_out,
    .before_fork = around_fork,
    .after_fork = around_fork,
    .forked = forked,
};
