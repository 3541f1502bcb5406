/* SPDX-License-Identifier: Apache-2.0 */
/* The hixl provider's life, its main thread, and its entries in the provider table. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hixl_core.h"

#define SWEEP_NS 50000000ull      /* between looks at what has been told to end, without a kick */
#define JOIN_NS (10 * HX_NS)      /* a close waits no longer than this for a call of the library */
#define MAIN_NS (60 * HX_NS)      /* nor, with all else at rest, than this for a copy, a registration, or Finalize */
#define DISCONNECT_NS (5 * HX_NS) /* how long a Disconnect may take: part of what we promise to peers */
#define PEERS_MAX 4096

const char *hx_hixl_code_name(uint32_t code)
{
    switch (code) {
    case HX_HIXL_SUCCESS:
        return "SUCCESS";
    case HX_HIXL_PARAM_INVALID:
        return "PARAM_INVALID";
    case HX_HIXL_TIMEOUT:
        return "TIMEOUT";
    case HX_HIXL_NOT_CONNECTED:
        return "NOT_CONNECTED";
    case HX_HIXL_ALREADY_CONNECTED:
        return "ALREADY_CONNECTED";
    case HX_HIXL_UNSUPPORTED:
        return "UNSUPPORTED";
    case HX_HIXL_RESOURCE_EXHAUSTED:
        return "RESOURCE_EXHAUSTED";
    case HX_HIXL_FAILED:
        return "FAILED";
    case HX_HIXL_THREW:
        return "a C++ exception, or an error of a lower layer";
    default:
        return "an error of a lower layer";
    }
}

void hx_hixl_recent_error(const hx_hixl_t *h, char text[HX_TEXT_MAX])
{
    const char *message = h->vendor->acl.recent_error ? h->vendor->acl.recent_error() : NULL;
    size_t at = 0;
    for (; message && *message && at + 1 < HX_TEXT_MAX; message++)
        text[at++] = (unsigned char)*message < ' ' ? ' ' : *message;
    text[at] = 0;
}

/* ---- the main thread ---- */

void hx_hixl_push_job(hx_hixl_t *h, hx_hjob_t *job)
{
    pthread_mutex_lock(&h->mu);
    /* After the thread has gone (a handle that outlives its engine), the caller does the work itself. */
    bool here = h->main_gone;
    if (!here) {
        job->next = NULL;
        if (h->jobs_tail)
            h->jobs_tail->next = job;
        else
            h->jobs_head = job;
        h->jobs_tail = job;
    }
    pthread_mutex_unlock(&h->mu);
    if (here)
        job->run(h, job);
    else
        hx_bell_ring(&h->main_bell, 1);
}

static hx_hjob_t *take_job(hx_hixl_t *h)
{
    hx_hjob_t *job = h->jobs_head;
    if (job) {
        h->jobs_head = job->next;
        if (!h->jobs_head)
            h->jobs_tail = NULL;
    }
    return job;
}

static hx_status_t initialize(hx_hixl_t *h, char text[HX_TEXT_MAX])
{
    const hx_acl_t *acl = &h->vendor->acl;
    char detail[HX_TEXT_MAX];
    int code = acl->set_device(h->device);
    if (!code)
        code = acl->get_context(&h->context);
    if (code) {
        hx_hixl_recent_error(h, detail);
        snprintf(text, HX_TEXT_MAX,
                 "NPU %d (npu_id) cannot be used: the runtime answered %d%s%.300s; `npu-smi info` lists the NPUs",
                 h->device, code, detail[0] ? ": " : "", detail);
        return HX_ERR_CONFIG;
    }
    h->object = h->lib->create();
    hx_hixl_name_t *local = h->lib->name(h->local);
    uint32_t status = HX_HIXL_THREW;
    if (h->object && local)
        status = h->lib->initialize(h->object, local, (const char *const *)h->keys, (const char *const *)h->values,
                                    h->noptions);
    h->lib->free_name(local);
    if (status == HX_HIXL_SUCCESS)
        return HX_OK;
    hx_hixl_recent_error(h, detail);
    snprintf(text, HX_TEXT_MAX,
             "HIXL's Initialize(\"%s\") answered %u (%s)%s%.300s; 503900 mostly means that the port is in use, 103900 "
             "an option or "
             "address that this version does not take; CANN's log stands in ~/ascend/log",
             h->local, status, hx_hixl_code_name(status), detail[0] ? ": " : "", detail);
    return HX_ERR_CONFIG;
}

/* Cards whose NPUs meet over PCIe only have neither HCCS nor RoCE ports of their own. */
static void warn_of_poor_link(hx_hixl_t *h)
{
    char text[HX_TEXT_MAX];
    const char *soc = h->vendor->acl.soc_name ? h->vendor->acl.soc_name() : NULL;
    if (!soc || strncmp(soc, "Ascend310", 9))
        return;
    int n = snprintf(text, sizeof text,
                     "%.60s is a PCIe card without HCCS or RoCE ports: transfers between its NPUs go through the "
                     "host's PCIe switch, "
                     "at some GB/s shared with everything else, so that moving a KV cache can take longer than "
                     "computing it; measure "
                     "before you split prefill from decode on it",
                     soc);
    hx_event_t ev = {.kind = HX_EV_WARNING};
    hx_event_emit(h->engine, ev, NULL, 0, text, (size_t)n);
}

static void *run_main(void *arg)
{
    hx_hixl_t *h = arg;
    char text[HX_TEXT_MAX] = "";
    hx_status_t status = initialize(h, text);
    bool over = false;
    if (status == HX_OK)
        warn_of_poor_link(h);
    pthread_mutex_lock(&h->mu);
    h->init_status = status;
    memcpy(h->init_text, text, sizeof text);
    h->ready = true;
    pthread_cond_broadcast(&h->gate);
    while (status == HX_OK && !over) {
        uint32_t seen = hx_bell_read(&h->main_bell);
        hx_hjob_t *job = take_job(h);
        h->more_alike = job && h->jobs_head && h->jobs_head->run == job->run;
        over = !job && h->main_stop;
        pthread_mutex_unlock(&h->mu);
        if (job)
            job->run(h, job);
        else if (!over && (h->unused || h->leaving) && hx_now_ns() >= h->leave_due_ns)
            hx_hixl_settle_leaving(h);
        else if (!over && (h->unused || h->leaving))
            hx_bell_wait_ns(&h->main_bell, seen, h->leave_due_ns - hx_now_ns() + 1000);
        else if (!over)
            hx_bell_wait(&h->main_bell, seen);
        pthread_mutex_lock(&h->mu);
    }
    bool abandoned = h->engine->abandoned;
    pthread_mutex_unlock(&h->mu);
    if (h->object && !abandoned) { /* Finalize must not meet any other call */
        if (status == HX_OK)
            h->lib->finalize(h->object);
        h->lib->destroy(h->object);
        h->object = NULL;
        h->vendor->acl.set_context(h->context); /* Finalize has ended the one that was current */
        hx_hixl_forget_all(h);
    }
    pthread_mutex_lock(&h->mu);
    h->main_gone = true;
    hx_hjob_t *late = h->jobs_head;
    h->jobs_head = h->jobs_tail = NULL;
    pthread_mutex_unlock(&h->mu);
    while (late) {
        hx_hjob_t *job = late;
        late = job->next;
        job->run(h, job);
    }
    pthread_mutex_lock(&h->mu);
    h->main_left = true;
    pthread_mutex_unlock(&h->mu);
    return NULL;
}

/* ---- open, stop, close ---- */

static bool copy_options(hx_hixl_t *h, const hx_hixl_config_t *c)
{
    h->keys = calloc(c->noptions + 1, sizeof *h->keys);
    h->values = calloc(c->noptions + 1, sizeof *h->values);
    if (!h->keys || !h->values)
        return false;
    for (h->noptions = 0; h->noptions < c->noptions; h->noptions++) {
        h->keys[h->noptions] = strdup(c->keys[h->noptions]);
        h->values[h->noptions] = strdup(c->values[h->noptions]);
        if (!h->keys[h->noptions] || !h->values[h->noptions])
            return false;
    }
    return true;
}

static void close_hixl(hx_engine_t *engine, void *state)
{
    hx_hixl_t *h = state;
    (void)engine;
    if (!h)
        return;
    for (hx_hpeer_t *p; (p = h->peers);) {
        h->peers = p->next;
        hx_hixl_free_peer(p);
    }
    for (size_t i = 0; h->keys && h->values && i < h->noptions; i++) {
        free(h->keys[i]);
        free(h->values[i]);
    }
    free(h->keys);
    free(h->values);
    free(h->requests);
    pthread_mutex_destroy(&h->mu);
    pthread_cond_destroy(&h->gate);
    free(h);
}

/* Joins a thread that says when it is about to end. */
static bool join_until(hx_hixl_t *h, pthread_t thread, const bool *ending, uint64_t deadline_ns)
{
    for (;;) {
        pthread_mutex_lock(&h->mu);
        bool over = *ending;
        pthread_mutex_unlock(&h->mu);
        if (over)
            return pthread_join(thread, NULL) == 0;
        if (hx_now_ns() >= deadline_ns)
            return false;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

static void stop(hx_engine_t *engine, void *state)
{
    hx_hixl_t *h = state;
    if (!h || h->stopped)
        return;
    h->stopped = true;
    uint64_t patience = engine->config.stall_timeout_ns < JOIN_NS ? engine->config.stall_timeout_ns : JOIN_NS;
    uint64_t deadline = hx_now_ns() + patience + engine->config.cancel_grace_ns;
    pthread_mutex_lock(&h->mu);
    h->stopping = true;
    pthread_cond_broadcast(&h->gate);
    bool joined = hx_hixl_join_posters(h, deadline);
    h->poller_stop = true;
    pthread_mutex_unlock(&h->mu);
    hx_bell_ring(&h->poll_bell, 1);
    if (h->poller_started)
        joined &= join_until(h, h->poller, &h->poller_gone, deadline + HX_NS);
    pthread_mutex_lock(&h->mu);
    if (!joined) {
        /* A call of the library that does not return holds our memory, and the caller's. Leaking is safe. */
        engine->abandoned = true;
        engine->stuck_peers++;
    }
    h->main_stop = true;
    pthread_mutex_unlock(&h->mu);
    hx_bell_ring(&h->main_bell, 1);
    if (h->main_started && !join_until(h, h->main, &h->main_left, hx_now_ns() + MAIN_NS) && joined) {
        pthread_mutex_lock(&h->mu);
        engine->abandoned = true;
        engine->stuck_peers++;
        pthread_mutex_unlock(&h->mu);
    }
}

static hx_status_t open_hixl(hx_engine_t *engine, void **state_p, char text[HX_TEXT_MAX])
{
    const hx_hixl_config_t *c = engine->config.hixl;
    const hx_vendor_t *vendor;
    if (!c)
        return HX_OK;
    hx_status_t status = hx_vendor_load(c->binding, c->library, &vendor, text);
    if (status != HX_OK)
        return status;
    hx_hixl_t *h = calloc(1, sizeof *h);
    if (!h)
        return HX_ERR_NO_MEMORY;
    h->engine = engine;
    h->vendor = vendor;
    h->lib = vendor->hixl;
    h->device = c->device;
    h->busy_poll_ns = c->busy_poll_ns;
    h->bulk_works = -1;
    /* The longest from our last word to a peer until nothing of ours is on its way to it: heartbeats notice a loss within
     * 1.25 peer_timeout and a tick. */
    h->fence_ns = engine->config.peer_timeout_ns * 3 / 2 + engine->config.cancel_grace_ns + DISCONNECT_NS;
    uint64_t ms = engine->config.handshake_timeout_ns / 1000000u;
    h->timeout_ms = ms < 1 ? 1 : ms > 600000 ? 600000 : (int32_t)ms;
    snprintf(h->local, sizeof h->local, "%s", c->local);
    snprintf(h->link, sizeof h->link, "%s", c->link ? c->link : "auto");
    pthread_mutex_init(&h->mu, NULL);
    pthread_cond_init(&h->gate, NULL);
    h->requests = calloc(HX_HIXL_REQUESTS, sizeof *h->requests);
    for (uint32_t i = HX_HIXL_REQUESTS; h->requests && i-- > 0;) {
        h->requests[i].index = i;
        h->requests[i].next = h->free_requests;
        h->free_requests = &h->requests[i];
    }
    *state_p = h; /* whatever fails from here, stop() and close() find it */
    if (!h->requests || !copy_options(h, c))
        return HX_ERR_NO_MEMORY;
    h->main_started = hx_thread_start(&h->main, run_main, h, "hx-hixl");
    if (!h->main_started)
        return HX_ERR_SYSTEM;
    pthread_mutex_lock(&h->mu);
    while (!h->ready)
        pthread_cond_wait(&h->gate, &h->mu);
    pthread_mutex_unlock(&h->mu);
    if (h->init_status != HX_OK) {
        memcpy(text, h->init_text, HX_TEXT_MAX);
        return h->init_status;
    }
    h->poller_started = hx_thread_start(&h->poller, hx_hixl_poll_thread, h, "hx-hixl-poll");
    return h->poller_started ? HX_OK : HX_ERR_SYSTEM;
}

/* ---- what the core asks ---- */

static hx_status_t probe(char text[HX_TEXT_MAX])
{
    snprintf(text, HX_TEXT_MAX, "asked for with a binding and a place: hx_hixl_probe");
    return HX_ERR_CONFIG;
}

static hx_status_t route(hx_endpoint_t *ep, const hx_region_t *local, const hx_rregion_t *remote,
                         char text[HX_TEXT_MAX])
{
    const char *why = NULL, *obstacle = NULL;
    if (remote->kind == HX_KIND_LAYOUT)
        why = "a layout is a description, not memory";
    else if (!ep->hixl)
        why = "the peer's engine has no hixl transport";
    else if (!remote->direct)
        why = "the peer's memory is not registered with HIXL on its side";
    else if (local && atomic_load(&local->state) == HX_REGION_READY && atomic_load(&local->adoption) == HX_ADOPT_NONE) {
        why = "the local memory is not registered with HIXL";
        obstacle = local->obstacle;
    }
    if (text && why)
        snprintf(text, HX_TEXT_MAX, "%s%s%.800s", why, obstacle ? ": " : "", obstacle ? obstacle : "");
    else if (text)
        snprintf(text, HX_TEXT_MAX, "one-sided, by HIXL to %s", ep->hixl->address);
    return why ? HX_ERR_NO_PATH : HX_OK;
}

static uint64_t tick(hx_engine_t *engine, void *state, uint64_t now)
{
    hx_hixl_t *h = state;
    hx_hdone_t done = {NULL, NULL};
    uint64_t due = 0;
    (void)engine;
    pthread_mutex_lock(&h->mu);
    bool live = false;
    for (hx_hpeer_t *p = h->peers; p; p = p->next)
        live |= p->outstanding || p->runq.head || p->again.head || p->notes.head || p->noting;
    if (atomic_exchange(&h->kicked, false) || now >= h->sweep_ns) {
        h->sweep_ns = now + SWEEP_NS;
        for (hx_hpeer_t *p = h->peers; p && live; p = p->next)
            hx_hixl_sweep(h, p, now, &done);
        if (!h->stopping)
            hx_hixl_reap(h);
    }
    due = live ? h->sweep_ns : 0;
    pthread_mutex_unlock(&h->mu);
    hx_hixl_finish(&done);
    return due;
}

static void kick(hx_engine_t *engine, void *state)
{
    hx_hixl_t *h = state;
    if (hx_in_child(engine))
        return; /* whoever held the lock is not here */
    atomic_store(&h->kicked, true);
    pthread_mutex_lock(&h->mu);
    for (hx_hpeer_t *p = h->peers; p; p = p->next)
        if (p->runq.head || p->again.head || p->notes.head)
            hx_hixl_wake_poster(p);
    pthread_mutex_unlock(&h->mu);
}

static void recall(hx_endpoint_t *ep)
{
    hx_hpeer_t *p = ep->hixl;
    if (!p)
        return;
    pthread_mutex_lock(&p->h->mu);
    p->recall = true;
    hx_hixl_wake_poster(p);
    pthread_mutex_unlock(&p->h->mu);
}

static bool idle(hx_endpoint_t *ep)
{
    hx_hpeer_t *p = ep->hixl;
    bool idle = true;
    if (!p)
        return true;
    pthread_mutex_lock(&p->h->mu);
    for (hx_hreq_t *r = p->with_library.head; r && idle; r = r->next)
        idle = r->op->ep != ep;
    pthread_mutex_unlock(&p->h->mu);
    return idle;
}

static size_t introduce(hx_endpoint_t *ep, void *state, uint8_t *out, size_t max)
{
    hx_hixl_t *h = state;
    size_t n = strlen(h->local);
    (void)ep;
    if (sizeof h->fence_ns + n > max)
        return 0;
    memcpy(out, &h->fence_ns, sizeof h->fence_ns);
    memcpy(out + sizeof h->fence_ns, h->local, n);
    return sizeof h->fence_ns + n;
}

static bool attach(hx_hixl_t *h, hx_endpoint_t *ep, const char *address)
{
    size_t count = 0;
    pthread_mutex_lock(&h->mu);
    for (hx_hpeer_t *p = h->peers; p; p = p->next)
        count++;
    hx_hpeer_t *p = count < PEERS_MAX && !h->stopping && strcmp(address, h->local) ? hx_hixl_peer(h, address) : NULL;
    if (p) {
        if (memcmp(p->incarnation, ep->incarnation, sizeof p->incarnation)) {
            memcpy(p->incarnation, ep->incarnation, sizeof p->incarnation);
            p->recall = p->recall || p->connected; /* that link led to another engine */
        }
        p->users++;
        p->refs++;
        ep->hixl = p;
        if (ep->raw) {
            hx_endpoint_ref(ep);
            ep->answer_next = p->answers;
            p->answers = ep;
            p->recall = p->recall || p->connected; /* who it asks for may have begun anew at that address */
        }
        hx_hixl_wake_poster(p);
    }
    pthread_mutex_unlock(&h->mu);
    return p != NULL;
}

/* An address that means another machine on each machine: a peer elsewhere would be looked for here. */
static bool leads_here(const char *address)
{
    return !strncmp(address, "127.", 4) || !strncmp(address, "[::1]", 5) || !strncmp(address, "0.", 2) ||
           !strncmp(address, "[::]", 4) || !strncmp(address, "[::ffff:127.", 12);
}

static bool meet(hx_endpoint_t *ep, void *state, const uint8_t *body, size_t n)
{
    hx_hixl_t *h = state;
    char address[HX_HIXL_ADDRESS_MAX];
    if (ep->raw)
        return attach(h, ep, (const char *)body);
    if (ep->hixl || n <= sizeof ep->fence_ns || n - sizeof ep->fence_ns >= sizeof address)
        return false;
    memcpy(&ep->fence_ns, body, sizeof ep->fence_ns);
    if (ep->fence_ns >
        3600 * HX_NS) /* its word: with a longer peer_timeout it takes longer to see that it has lost us */
        ep->fence_ns = 3600 * HX_NS;
    n -= sizeof ep->fence_ns;
    memcpy(address, body + sizeof ep->fence_ns, n);
    address[n] = 0;
    for (size_t i = 0; i < n; i++)
        if (!strchr("0123456789abcdefABCDEF.:[]", address[i]) || !address[i])
            return false;
    if (!leads_here(address) || hx_endpoint_same_host(ep))
        attach(h, ep, address); /* if not (itself, too many): no hixl path to it */
    return true;
}

static void proven(hx_endpoint_t *ep, uint64_t arg)
{
    if (!ep->hixl)
        return;
    atomic_store(&ep->hixl_proven, (uint32_t)arg);
    hx_hixl_wake_poster(ep->hixl);
}

static void release(hx_endpoint_t *ep)
{
    hx_hpeer_t *p = ep->hixl;
    hx_endpoint_t *waiting = NULL;
    if (!p)
        return;
    pthread_mutex_lock(&p->h->mu);
    for (hx_endpoint_t **at = &p->answers; *at; at = &(*at)->answer_next)
        if (*at == ep) {
            waiting = ep;
            *at = ep->answer_next;
            break;
        }
    p->users--;
    hx_hixl_wake_poster(p);
    pthread_mutex_unlock(&p->h->mu);
    hx_endpoint_unref(waiting);
}

static void forget(hx_endpoint_t *ep)
{
    hx_hpeer_t *p = ep->hixl;
    if (!p)
        return;
    pthread_mutex_lock(&p->h->mu);
    p->refs--;
    pthread_mutex_unlock(&p->h->mu);
}

const char *hx_endpoint_link(const hx_endpoint_t *ep)
{
    return ep->hixl ? ep->hixl->h->link : "";
}

void hx_engine_expect_notifies(hx_engine_t *engine, int change)
{
    hx_hixl_t *h = hx_provider_state(engine, &hx_provider_hixl);
    if (!h || hx_in_child(engine))
        return;
    pthread_mutex_lock(&h->mu);
    h->notify_wanted += (uint32_t)change;
    pthread_mutex_unlock(&h->mu);
    hx_bell_ring(&h->poll_bell, 1);
}

/* ---- copies to and from the device ---- */

typedef struct {
    hx_hjob_t job;
    hx_region_t *region; /* owned reference */
    uint8_t *device, *host;
    uint64_t nbytes, token;
    bool upload;
} hx_copy_job_t;

static void run_copy(hx_hixl_t *h, hx_hjob_t *job)
{
    hx_copy_job_t *c = (hx_copy_job_t *)job;
    hx_event_t ev = {.kind = HX_EV_COPIED, .token = c->token, .status = HX_ERR_CLOSED};
    char text[HX_TEXT_MAX] = "the engine is closed", detail[HX_TEXT_MAX];
    uint32_t state = atomic_load(&c->region->state);
    if (!h->main_gone && state == HX_REGION_READY) {
        int code = c->upload ? h->vendor->acl.copy(c->device, c->nbytes, c->host, c->nbytes, HX_ACL_TO_DEVICE)
                             : h->vendor->acl.copy(c->host, c->nbytes, c->device, c->nbytes, HX_ACL_TO_HOST);
        ev.status = code ? HX_ERR_PROVIDER : HX_OK;
        hx_hixl_recent_error(h, detail);
        snprintf(text, sizeof text, code ? "aclrtMemcpy answered %d: %.300s" : "", code, detail);
    } else if (!h->main_gone) {
        ev.status = HX_ERR_REGION_CLOSED;
        snprintf(text, sizeof text, "the region is deregistered, or could not be set up");
    }
    hx_event_emit(h->engine, ev, NULL, 0, text, strlen(text));
    hx_region_unref(c->region);
    free(c);
}

hx_status_t hx_region_copy(hx_region_t *region, uint64_t offset, void *host, uint64_t nbytes, bool upload,
                           uint64_t token)
{
    hx_hixl_t *h = hx_provider_state(region->engine, &hx_provider_hixl);
    if (region->kind != HX_KIND_DEVICE || offset > region->nbytes || nbytes > region->nbytes - offset)
        return HX_ERR_BOUNDS;
    if (!h || atomic_load(&region->engine->stopping))
        return HX_ERR_CLOSED;
    if (atomic_load(&region->state) != HX_REGION_READY)
        return HX_ERR_REGION_CLOSED;
    hx_copy_job_t *c = hx_alloc(sizeof *c);
    hx_region_ref(region);
    *c = (hx_copy_job_t){{NULL, run_copy}, region, region->base + offset, host, nbytes, token, upload};
    hx_hixl_push_job(h, &c->job);
    return HX_OK;
}

const hx_provider_t hx_provider_hixl = {
    .abi = HX_PROVIDER_ABI,
    .name = "hixl",
    .transport = HX_TRANSPORT_HIXL,
    .feature = HX_FEATURE_ACKS,
    .orders_after = true,
    .probe = probe,
    .open = open_hixl,
    .stop = stop,
    .close = close_hixl,
    .route = route,
    .submit = hx_hixl_submit,
    .tick = tick,
    .kick = kick,
    .adopt = hx_hixl_adopt,
    .withdraw = hx_hixl_withdraw,
    .disown = hx_hixl_disown,
    .touching = hx_hixl_touching,
    .holds = hx_hixl_holds,
    .recall = recall,
    .idle = idle,
    .introduce = introduce,
    .meet = meet,
    .proven = proven,
    .release = release,
    .forget = forget,
    .send_raw = hx_hixl_send_raw,
};
