/* SPDX-License-Identifier: Apache-2.0 */
/* The poller: HIXL has no event and no callback, so one thread asks. Without outstanding requests it sleeps; just after a
 * post it asks again and again; then it waits longer and longer between two rounds, 200 us at most. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "hixl_core.h"

#define BULK_MAX HX_HIXL_REQUESTS /* what is reported once is forgotten by the library: there must be room */
#define SINGLE_MAX 16  /* requests of one peer that one round asks about; they end in the order of their posts */
#define EAGER_NS 30000 /* no pause between rounds for so long after a post */
#define PAUSE_MIN_NS 2000
#define PAUSE_MAX_NS 200000
#define NOTIFY_NS 2000000 /* the library writes a log line for each look at its notifications */

typedef struct {
    hx_hreq_t *req;
    uint32_t gen;
    void *handle;
    uint32_t code;
    int32_t status;
    char detail[256];
} hx_look_t;

static uint32_t outcome(uint32_t code, int32_t status)
{
    if (code != HX_HIXL_SUCCESS)
        return code;
    return status == HX_HIXL_COMPLETED ? HX_HIXL_SUCCESS : HX_HIXL_FAILED;
}

/* Asks about up to n of the peer's oldest requests. Under mu, dropped meanwhile; the peer is kept from posts (`polling`), or
 * the caller is its poster. */
static bool ask(hx_hpeer_t *p, hx_look_t *looks, unsigned n, hx_hdone_t *done)
{
    hx_hixl_t *h = p->h;
    unsigned count = 0, asked = 0;
    bool any = false;
    for (hx_hreq_t *r = p->with_library.head; r && count < n; r = r->next)
        if (r->posted)
            looks[count++] = (hx_look_t){.req = r, .gen = r->gen, .handle = r->handle};
    pthread_mutex_unlock(&h->mu);
    while (asked < count) {
        hx_look_t *k = &looks[asked++];
        k->status = HX_HIXL_WAITING;
        k->code = h->lib->poll(h->object, k->handle, &k->status);
        if (k->code == HX_HIXL_SUCCESS && k->status == HX_HIXL_WAITING)
            break; /* those behind it are waiting as well, nearly always; it will be asked about again soon */
        if (outcome(k->code, k->status) != HX_HIXL_SUCCESS) {
            char text[HX_TEXT_MAX];
            hx_hixl_recent_error(h, text);
            memcpy(k->detail, text, sizeof k->detail - 1);
            k->detail[sizeof k->detail - 1] = 0;
        }
    }
    pthread_mutex_lock(&h->mu);
    for (unsigned i = 0; i < asked; i++) {
        hx_look_t *k = &looks[i];
        if ((k->code == HX_HIXL_SUCCESS && k->status == HX_HIXL_WAITING) || k->req->gen != k->gen)
            continue;
        hx_hixl_request_over(p, k->req, outcome(k->code, k->status), k->detail, done);
        any = true;
    }
    return any;
}

bool hx_hixl_poll_own(hx_hpeer_t *p, unsigned n, hx_hdone_t *done)
{
    hx_look_t looks[4];
    return ask(p, looks, n < 4 ? n : 4, done);
}

static bool poll_singly(hx_hixl_t *h, hx_look_t *looks, hx_hdone_t *done)
{
    bool any = false;
    for (hx_hpeer_t *p = h->peers; p; p = p->next) { /* one that is being polled is not freed */
        if (!p->outstanding || p->busy || p->recall)
            continue;
        p->polling = true;
        any |= ask(p, looks, SINGLE_MAX, done);
        p->polling = false;
        pthread_cond_broadcast(&h->gate);
    }
    return any;
}

static bool poll_bulk(hx_hixl_t *h, hx_hixl_result_t *results, hx_hdone_t *done)
{
    size_t n = 0;
    char detail[HX_TEXT_MAX] = "";
    h->bulk = true;
    pthread_mutex_unlock(&h->mu);
    uint32_t code = h->lib->poll_all(h->object, results, BULK_MAX, &n);
    for (size_t i = 0; i < n; i++)
        if (results[i].status != HX_HIXL_COMPLETED) {
            hx_hixl_recent_error(h, detail);
            break;
        }
    pthread_mutex_lock(&h->mu);
    h->bulk = false;
    pthread_cond_broadcast(&h->gate);
    if (code != HX_HIXL_SUCCESS && !n) {
        h->bulk_works = 0; /* one engine flavour has it, two do not; and what fails once is not relied upon */
        return true;
    }
    h->bulk_works = 1;
    for (size_t i = 0; i < n; i++) {
        uint32_t index = (uint32_t)results[i].user_data;
        hx_hreq_t *r = index < HX_HIXL_REQUESTS ? &h->requests[index] : NULL;
        if (results[i].status == HX_HIXL_WAITING || !r || !r->op || !r->posted ||
            r->gen != (uint32_t)(results[i].user_data >> 32))
            continue;
        hx_hixl_request_over(r->op->ep->hixl, r, outcome(HX_HIXL_SUCCESS, results[i].status), detail, done);
    }
    return n > 0;
}

static void on_notify(void *to, const char *name, size_t name_len, const char *text, size_t text_len)
{
    hx_event_t ev = {.kind = HX_EV_NOTIFY};
    hx_event_emit(to, ev, name, name_len, text, text_len);
}

/* Under mu, dropped meanwhile. */
static void look_for_notifies(hx_hixl_t *h, uint64_t now)
{
    if (!h->notify_wanted || now - h->notify_ns < NOTIFY_NS)
        return;
    h->notify_ns = now;
    pthread_mutex_unlock(&h->mu);
    h->lib->notifies(h->object, on_notify, h->engine);
    pthread_mutex_lock(&h->mu);
}

/* How long the next round can wait: 0, some nanoseconds, or until the bell rings. Under mu. */
static uint64_t patience(hx_hixl_t *h, bool any, uint64_t now, uint64_t *pause_p)
{
    uint64_t notify = h->notify_wanted ? NOTIFY_NS : UINT64_MAX;
    if (!h->outstanding)
        return any ? 0 : notify;
    if (any || now - h->last_post_ns < EAGER_NS) {
        *pause_p = PAUSE_MIN_NS;
        return 0;
    }
    uint64_t wait = *pause_p < notify ? *pause_p : notify;
    *pause_p = *pause_p * 2 < PAUSE_MAX_NS ? *pause_p * 2 : PAUSE_MAX_NS;
    return wait;
}

/* A request that waits for ever is nothing to this thread: the sweep recalls it when its operation has made no progress for
 * stall_timeout. */
void *hx_hixl_poll_thread(void *arg)
{
    hx_hixl_t *h = arg;
    hx_look_t *looks = hx_alloc(SINGLE_MAX * sizeof *looks);
    hx_hixl_result_t *results = hx_alloc(BULK_MAX * sizeof *results);
    uint64_t pause = PAUSE_MIN_NS;
    h->vendor->acl.set_context(h->context);
    prctl(PR_SET_TIMERSLACK, 1000ul); /* the default of 50 us would be most of a pause */
    pthread_mutex_lock(&h->mu);
    while (!h->poller_stop) {
        hx_hdone_t done = {NULL, NULL};
        uint32_t seen = hx_bell_read(&h->poll_bell);
        bool any = false;
        look_for_notifies(h, hx_now_ns());
        if (h->outstanding)
            any = h->bulk_works && !h->posting ? poll_bulk(h, results, &done) : poll_singly(h, looks, &done);
        uint64_t wait = patience(h, any, hx_now_ns(), &pause);
        pthread_mutex_unlock(&h->mu);
        hx_hixl_finish(&done);
        if (wait == UINT64_MAX)
            hx_bell_wait(&h->poll_bell, seen);
        else if (wait)
            hx_bell_wait_ns(&h->poll_bell, seen, wait);
        else
            sched_yield();
        pthread_mutex_lock(&h->mu);
    }
    free(results);
    free(looks);
    h->poller_gone = true;
    pthread_mutex_unlock(&h->mu);
    return NULL;
}
