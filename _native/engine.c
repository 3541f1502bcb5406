/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's life, and its one descriptor.
 *
 * The doorbell. A completion or event is published first (with a sequentially consistent store), then the producer
 * looks at doorbell_armed, and writes the event fd only if the consumer is asleep. The consumer disarms, clears the fd,
 * drains to a budget, arms (sequentially consistent), and looks once more before it sleeps. One of the two sees the
 * other. A consumer whose budget is spent stays disarmed and comes back by itself.
 *
 * The descriptor is an epoll of that event fd and of whatever a provider lets the consumer's thread take in by itself
 * (hx_providers_assist). Where that is what woke it, and nobody has rung, the event fd need not be cleared. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "provider.h"
#include "sys.h"

uint64_t hx_now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * HX_NS + (uint64_t)ts.tv_nsec;
}

void *hx_alloc(size_t n)
{
    void *p = calloc(1, n);
    if (!p)
        abort();
    return p;
}

bool hx_thread_start(pthread_t *thread, void *(*run)(void *), void *arg, const char *name)
{
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        sigdelset(&blocked, own[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    int err = pthread_create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (err)
        errno = err;
    else
        pthread_setname_np(*thread, name);
    return !err;
}

/* Half of what the kernel allows a process, so that the rest of it has room. */
static uint32_t mapping_share(void)
{
    unsigned long allowed = 65530; /* the kernel's default */
    FILE *f = fopen("/proc/sys/vm/max_map_count", "re");
    if (f) {
        if (fscanf(f, "%lu", &allowed) != 1)
            allowed = 65530;
        fclose(f);
    }
    return allowed / 2 < 1u << 30 ? (uint32_t)(allowed / 2) : 1u << 30;
}

void hx_config_defaults(hx_config_t *c)
{
    memset(c, 0, sizeof *c);
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    c->copy_threads = cores < 2 ? 1 : cores > 4 ? 4 : (uint32_t)cores;
    c->queue_depth = 16384;
    c->peer_depth = 8192;
    c->max_mappings = mapping_share();
    c->chunk = 1u << 20;
    c->inline_limit = 32u << 10;
    c->peer_timeout_ns = 10 * HX_NS;
    c->stall_timeout_ns = 30 * HX_NS;
    c->handshake_timeout_ns = 5 * HX_NS;
    c->cancel_grace_ns = 1 * HX_NS;
    c->transports = HX_TRANSPORT_SHM;
}

/* ---- events ---- */

void hx_doorbell(hx_engine_t *engine)
{
    if (atomic_load(&engine->doorbell_armed) && atomic_exchange(&engine->doorbell_armed, 0)) {
        uint64_t one = 1;
        while (write(engine->event_fd, &one, sizeof one) < 0 && errno == EINTR)
            ;
    }
}

void hx_event_emit(hx_engine_t *engine, hx_event_t proto, const char *name, size_t name_len, const void *blob,
                   size_t blob_len)
{
    hx_event_t *ev = hx_alloc(sizeof *ev + name_len + blob_len);
    *ev = proto;
    ev->name = (char *)(ev + 1);
    ev->blob = ev->name + name_len;
    ev->name_len = (uint32_t)name_len;
    ev->blob_len = (uint32_t)blob_len;
    if (name_len)
        memcpy(ev->name, name, name_len);
    if (blob_len)
        memcpy(ev->blob, blob, blob_len);
    if (ev->ep) {
        hx_endpoint_ref(ev->ep);
        atomic_fetch_add(&ev->ep->event_bytes, sizeof *ev + name_len + blob_len);
    }
    if (ev->rregion)
        hx_rregion_ref(ev->rregion);
    pthread_mutex_lock(&engine->event_mu);
    if (engine->event_tail)
        engine->event_tail->next = ev;
    else
        engine->event_head = ev;
    engine->event_tail = ev;
    pthread_mutex_unlock(&engine->event_mu);
    atomic_fetch_add(&engine->nevents, 1);
    hx_doorbell(engine);
}

hx_event_t *hx_engine_next_event(hx_engine_t *engine)
{
    if (!atomic_load(&engine->nevents))
        return NULL;
    pthread_mutex_lock(&engine->event_mu);
    hx_event_t *ev = engine->event_head;
    if (ev) {
        engine->event_head = ev->next;
        if (!engine->event_head)
            engine->event_tail = NULL;
    }
    pthread_mutex_unlock(&engine->event_mu);
    if (ev) {
        atomic_fetch_sub(&engine->nevents, 1);
        ev->next = NULL;
    }
    return ev;
}

void hx_event_free(hx_event_t *ev)
{
    if (!ev)
        return;
    if (ev->ep)
        atomic_fetch_sub(&ev->ep->event_bytes, sizeof *ev + ev->name_len + ev->blob_len);
    hx_endpoint_unref(ev->ep);
    hx_rregion_unref(ev->rregion);
    free(ev);
}

/* ---- completions ---- */

/* Fills the record of a number taken from the ring; true when the operation is over and goes back to the pool. */
static bool take_record(hx_op_t *op, hx_completion_t *out)
{
    uint64_t gen = atomic_load(&op->gen);
    uint64_t early = gen << 2 | HX_REPORT_EARLY;
    uint64_t cancel = atomic_load(&op->cancel);
    bool first = atomic_compare_exchange_strong(&op->report, &early, gen << 2 | HX_REPORT_EARLY_TAKEN);
    const char *detail = atomic_load(&op->detail); /* freed by whoever takes the last record, which is us */
    bool known = first && detail && (cancel & 0xff) == atomic_load(&op->failed);
    *out = (hx_completion_t){
        .token = op->token,
        .status = first ? (uint32_t)(cancel & 0xff) : op->status,
        .sys_errno = first ? 0 : op->sys_errno,
        .nbytes = atomic_load(&op->moved),
        .elapsed_ns = (first ? hx_now_ns() : op->done_ns) - op->posted_ns,
        .index = first ? UINT64_MAX : op->bad_index,
        .quiesced = !first,
        .code = atomic_load(&op->code),
        .detail = !first  ? atomic_exchange(&op->detail, NULL)
                  : known ? strdup(detail)
                          : NULL, /* the consumer's now */
    };
    return !first;
}

size_t hx_engine_drain(hx_engine_t *engine, hx_completion_t *out, size_t max, bool *more_p)
{
    uint64_t count;
    uint32_t index;
    size_t n = 0;
    bool silent = atomic_exchange(&engine->doorbell_armed, 0);
    bool assisted = hx_providers_assist(engine);
    if (!(silent && assisted) && read(engine->event_fd, &count, sizeof count) < 0) {
        /* EAGAIN: woken by hand, or by a late ring. */
    }
    while (n < max && hx_ring_pop(&engine->completed, &index)) {
        hx_op_t *op = &engine->ops[index];
        if (take_record(op, &out[n++]))
            hx_op_release(op);
    }
    *more_p = n == max;
    if (*more_p)
        return n;
    atomic_store(&engine->doorbell_armed, 1);
    if (!hx_ring_empty(&engine->completed)) {
        atomic_store(&engine->doorbell_armed, 0);
        *more_p = true;
    }
    return n;
}

int hx_engine_fileno(const hx_engine_t *engine)
{
    return engine->epoll_fd;
}

/* ---- life ---- */

static char *copy_string(const char *s)
{
    return s ? strdup(s) : NULL;
}

static bool copy_config(hx_engine_t *engine, const hx_config_t *config)
{
    engine->config = *config;
    engine->name = copy_string(config->name);
    engine->unix_path = copy_string(config->unix_path);
    engine->tcp_host = copy_string(config->tcp_host);
    if (!engine->name || (config->unix_path && !engine->unix_path) || (config->tcp_host && !engine->tcp_host))
        return false;
    if (config->secret) {
        engine->secret = malloc(config->secret_len ? config->secret_len : 1);
        if (!engine->secret)
            return false;
        memcpy(engine->secret, config->secret, config->secret_len);
    }
    if (config->nfaults) {
        engine->faults = calloc(config->nfaults, sizeof *engine->faults);
        if (!engine->faults)
            return false;
        memcpy(engine->faults, config->faults, config->nfaults * sizeof *engine->faults);
    }
    engine->config.name = engine->name;
    engine->config.unix_path = engine->unix_path;
    engine->config.tcp_host = engine->tcp_host;
    engine->config.secret = engine->secret;
    engine->config.faults = engine->faults;
    return true;
}

static bool open_fds(hx_engine_t *engine)
{
    engine->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    engine->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event ev = {.events = EPOLLIN};
    return engine->event_fd >= 0 && engine->epoll_fd >= 0 &&
           epoll_ctl(engine->epoll_fd, EPOLL_CTL_ADD, engine->event_fd, &ev) == 0;
}

/* What is wrong with it, or NULL. Everything below relies on these limits. */
static const char *objection(const hx_config_t *c)
{
    const uint64_t longest = UINT64_MAX / 8; /* so that sums with the time of day do not wrap */
    if (!c->name || !c->name[0] || strlen(c->name) > HX_NAME_MAX)
        return "name: 1 to 128 bytes";
    if (c->copy_threads < 1 || c->copy_threads > HX_MAX_WORKERS)
        return "copy_threads: 1 to 16";
    if (c->queue_depth < 2 || c->queue_depth > 1u << 24 || c->queue_depth & (c->queue_depth - 1))
        return "queue_depth: a power of two, 2 to 16777216";
    if (!c->peer_depth)
        return "peer_depth: at least 1";
    if (!c->chunk)
        return "chunk: at least 1 byte";
    if (c->peer_timeout_ns > longest || c->stall_timeout_ns > longest || c->handshake_timeout_ns > longest ||
        c->cancel_grace_ns > longest)
        return "a timeout of more than 73 years";
    return NULL;
}

hx_status_t hx_engine_open(const hx_config_t *config, hx_engine_t **engine_p, char text[HX_TEXT_MAX])
{
    hx_status_t status = HX_ERR_NO_MEMORY;
    const char *why = objection(config);
    if (why) {
        snprintf(text, HX_TEXT_MAX, "%s", why);
        return HX_ERR_CONFIG;
    }
    hx_engine_t *engine = calloc(1, sizeof *engine);
    text[0] = 0;
    if (!engine)
        return HX_ERR_NO_MEMORY;
    engine->pid = getpid();
    engine->event_fd = engine->epoll_fd = -1;
    engine->control.wake_fd = engine->control.epoll_fd = engine->control.unix_fd = engine->control.tcp_fd = -1;
    pthread_mutex_init(&engine->event_mu, NULL);
    pthread_mutex_init(&engine->regions_mu, NULL);
    pthread_mutex_init(&engine->fault_mu, NULL);
    pthread_mutex_init(&engine->stop_mu, NULL);
    pthread_mutex_init(&engine->sched.mu, NULL);
    pthread_mutex_init(&engine->setup.mu, NULL);
    pthread_mutex_init(&engine->control.mu, NULL);
    pthread_mutex_init(&engine->control.fork_mu, NULL);
    atomic_store(&engine->doorbell_armed, 1);
    if (!copy_config(engine, config))
        goto fail;
    if (!open_fds(engine) || getrandom(engine->nonce, sizeof engine->nonce, 0) != sizeof engine->nonce) {
        status = HX_ERR_SYSTEM;
        snprintf(text, HX_TEXT_MAX, "cannot open the engine's descriptors: %s", strerror(errno));
        goto fail;
    }
    status = hx_op_pool_init(engine);
    if (status == HX_OK)
        status = hx_setup_start(engine);
    if (status == HX_OK)
        status = hx_sched_start(engine);
    if (status == HX_OK)
        status = hx_providers_open(engine, text);
    if (status == HX_OK)
        status = hx_control_start(engine, text);
    if (status != HX_OK)
        goto fail;
    *engine_p = engine;
    return HX_OK;
fail:
    hx_engine_stop(engine);
    hx_engine_free(engine);
    return status;
}

void hx_engine_set_epoch(hx_engine_t *engine, uint64_t epoch)
{
    atomic_store(&engine->epoch, epoch);
}

bool hx_in_child(const hx_engine_t *engine)
{
    return engine->forked || engine->pid != getpid();
}

uint32_t hx_engine_stop(hx_engine_t *engine)
{
    if (hx_in_child(engine))
        return 0;
    atomic_store(&engine->stopping, true);
    while (atomic_load(&engine->posting))
        sched_yield();
    pthread_mutex_lock(&engine->stop_mu); /* an abort may overtake a close: both join, one after the other */
    /* The control thread loses every endpoint, which makes the copy threads finish every operation. */
    hx_control_stop(engine); /* which stops the providers as well, once nobody posts any more */
    hx_providers_stop(engine);
    hx_sched_stop(engine);
    hx_setup_stop(engine);
    pthread_mutex_unlock(&engine->stop_mu);
    return engine->stuck_peers;
}

void hx_engine_close_fds(hx_engine_t *engine)
{
    hx_close_fd(&engine->event_fd);
    hx_close_fd(&engine->epoll_fd);
    hx_close_fd(&engine->control.wake_fd);
}

void hx_engine_free(hx_engine_t *engine)
{
    if (!engine || hx_in_child(engine) || engine->abandoned)
        return; /* in a forked child, locks and threads of the parent are in no state to be freed */
    for (hx_event_t *ev; (ev = hx_engine_next_event(engine));)
        hx_event_free(ev);
    if (engine->ops)
        for (uint32_t index; hx_ring_pop(&engine->completed, &index);)
            hx_op_release(&engine->ops[index]);
    hx_providers_close(engine); /* after the last endpoint */
    hx_op_pool_free(engine);
    hx_engine_close_fds(engine);
    free(engine->name);
    free(engine->unix_path);
    free(engine->tcp_host);
    free(engine->secret);
    free(engine->faults);
    free(engine);
}

/* In the child of a fork: lets go of the descriptors (a child that holds them would hide its parent's death from
 * peers), and touches nothing else. */
void hx_engine_forked(hx_engine_t *engine)
{
    engine->forked = true;
    atomic_store(&engine->stopping, true); /* posts are refused: the pages they would touch are not mapped here */
    hx_engine_close_fds(engine);
    hx_control_t *c = &engine->control;
    hx_close_fd(&c->epoll_fd);
    hx_close_fd(&c->unix_fd);
    hx_close_fd(&c->tcp_fd);
    hx_links_forked(engine);
    hx_providers_fork(engine, HX_FORK_CHILD);
    hx_regions_forked(engine);
}

void hx_engine_stats(hx_engine_t *engine, hx_stats_t *out)
{
    *out = (hx_stats_t){
        .posted = atomic_load(&engine->n_posted),
        .completed = atomic_load(&engine->n_completed),
        .inlined = atomic_load(&engine->n_inlined),
        .nbytes = atomic_load(&engine->n_bytes),
        .notes_in = atomic_load(&engine->n_notes_in),
        .notes_out = atomic_load(&engine->n_notes_out),
        .refused = atomic_load(&engine->n_refused),
        .zerocopied = atomic_load(&engine->n_zc),
        .zerocopy_copied = atomic_load(&engine->n_zc_copied),
        .live_ops = atomic_load(&engine->live_ops),
        .live_regions = atomic_load(&engine->nregions),
        .peers = atomic_load(&engine->npeers),
        .mappings = atomic_load(&engine->mappings),
    };
}
