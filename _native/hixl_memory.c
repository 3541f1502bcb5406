/* SPDX-License-Identifier: Apache-2.0 */
/* Which memory HIXL knows. All of it runs on the provider's main thread, in the order in which it was asked for.
 *
 * The library refuses memory that overlaps what it knows (in part; a second time the same, it answers with the first handle
 * and does not count), and takes none back while a link is up. So registrations are kept here as disjoint intervals that
 * several regions can share: a new region registers the gaps between those that stand already (the library joins what lies
 * side by side), and when the last region of an interval goes, every link is let run empty and taken down, the interval is
 * dropped, and the links come back. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hixl_core.h"

#define ALIGN 4096ull
#define DROP_TRIES 3
#define QUIESCE_NS 100000000ull /* a call of the library that has lasted so long may last longer */
#define STILL_NS 300000000ull   /* how long a link may take to run empty, if nothing on it comes to an end */
#define MOVING_NS 2000000000ull /* and if something does */
#define GIVE_UP_NS 5000000000ull
#define AGAIN_NS 200000000ull

typedef struct {
    hx_hjob_t job;
    hx_region_t *region; /* owned reference; of a LEAVE without one, the region is gone */
    uint64_t start, end;
    int32_t kind;
    const void *identity; /* of what owns device memory of ours */
    hx_job_t *then;
} hx_mjob_t;

static int32_t kind_of(const hx_region_t *region)
{
    return region->kind == HX_KIND_DEVICE ? HX_HIXL_DEVICE : HX_HIXL_HOST;
}

/* Of memory that was allocated here, whole pages. */
static uint64_t extent(const hx_region_t *region)
{
    return region->map_len && !region->parent ? region->map_len : region->nbytes;
}

/* The first interval that ends past `start`. */
static size_t first_past(const hx_hixl_t *h, uint64_t start)
{
    size_t i = 0;
    while (i < h->nintervals && h->intervals[i].end <= start)
        i++;
    return i;
}

static void insert(hx_hixl_t *h, size_t at, hx_interval_t interval)
{
    if (h->nintervals == h->cap) {
        h->cap = h->cap ? h->cap * 2 : 64;
        h->intervals = realloc(h->intervals, h->cap * sizeof *h->intervals);
        if (!h->intervals)
            abort();
    }
    memmove(&h->intervals[at + 1], &h->intervals[at], (h->nintervals - at) * sizeof *h->intervals);
    h->intervals[at] = interval;
    h->nintervals++;
}

static void explain(const hx_hixl_t *h, char text[HX_TEXT_MAX], uint64_t start, uint64_t end, int32_t kind,
                    uint32_t code)
{
    char detail[HX_TEXT_MAX];
    bool unaligned = start % ALIGN || (end - start) % ALIGN;
    hx_hixl_recent_error(h, detail);
    snprintf(
        text, HX_TEXT_MAX,
        "HIXL does not register %llu bytes at 0x%llx of %s memory: it answered %u (%s)%s%.200s. %s%s",
        (unsigned long long)(end - start), (unsigned long long)start, kind == HX_HIXL_DEVICE ? "NPU" : "host", code,
        hx_hixl_code_name(code), detail[0] ? ": " : "", detail,
        unaligned
            ? "Address or length is not a multiple of 4096, which some links need: engine.allocate() gives memory that "
              "is aligned. "
            : "",
        kind == HX_HIXL_DEVICE
            ? "The memory must belong to the engine's own NPU (npu_id)"
            : "On A2 and A3 machines host memory must come from aclrtMallocHost (torch: pin_memory on an NPU "
              "build)");
}

static uint32_t add(hx_hixl_t *h, size_t at, uint64_t start, uint64_t end, int32_t kind)
{
    void *handle = NULL;
    uint32_t code = h->lib->add(h->object, start, end - start, kind, &handle);
    if (code == HX_HIXL_SUCCESS)
        insert(h, at, (hx_interval_t){start, end, kind, handle, 0});
    return code;
}

/* Registers what of [start, end) is not registered, and counts on all of it. False, with the reason: nothing has changed. */
static bool cover(hx_hixl_t *h, uint64_t start, uint64_t end, int32_t kind, char text[HX_TEXT_MAX])
{
    size_t i = first_past(h, start);
    for (size_t k = i; k < h->nintervals && h->intervals[k].start < end; k++)
        if (!h->intervals[k].refs) {
            /* What stood at this address may be other pages by now, and the library knows the old ones. */
            snprintf(text, HX_TEXT_MAX,
                     "%llu bytes at 0x%llx were registered before, and HIXL has not let go of them: a transfer is "
                     "stuck; try again "
                     "when it has ended",
                     (unsigned long long)(end - start), (unsigned long long)start);
            return false;
        } else if (h->intervals[k].kind != kind) {
            snprintf(text, HX_TEXT_MAX,
                     "%llu bytes at 0x%llx are registered as the other kind of memory (host, NPU) already",
                     (unsigned long long)(end - start), (unsigned long long)start);
            return false;
        }
    uint64_t at = start;
    for (size_t k = i; at < end; k++) {
        bool gap = k >= h->nintervals || h->intervals[k].start > at;
        if (gap) {
            uint64_t to = k < h->nintervals && h->intervals[k].start < end ? h->intervals[k].start : end;
            uint32_t code =
                h->nintervals < HX_HIXL_REGISTRATIONS ? add(h, k, at, to, kind) : HX_HIXL_RESOURCE_EXHAUSTED;
            if (code != HX_HIXL_SUCCESS) {
                if (h->nintervals >= HX_HIXL_REGISTRATIONS)
                    snprintf(text, HX_TEXT_MAX,
                             "HIXL knows %d pieces of memory already, and takes no more: register fewer, larger ones "
                             "(one tensor "
                             "for all layers)",
                             HX_HIXL_REGISTRATIONS);
                else
                    explain(h, text, at, to, kind, code);
                hx_hixl_drop_unused(h); /* the gaps before this one: they count nobody */
                return false;
            }
        }
        at = h->intervals[k].end;
    }
    for (size_t k = first_past(h, start); k < h->nintervals && h->intervals[k].start < end; k++)
        h->intervals[k].refs++;
    return true;
}

/* ---- taking back ---- */

static void uncount(hx_hixl_t *h, uint64_t start, uint64_t end)
{
    for (size_t k = first_past(h, start); k < h->nintervals && h->intervals[k].start < end; k++)
        if (h->intervals[k].refs)
            h->intervals[k].refs--;
}

/* A poster that has been inside the library for long is not waited for; when it comes out it posts nothing more, and this is
 * tried again. Under mu. */
static bool somebody_stuck(hx_hixl_t *h, uint64_t now)
{
    bool stuck = false;
    for (hx_hpeer_t *p = h->peers; p; p = p->next)
        if (p->busy && p->entered_ns && now > p->entered_ns + QUIESCE_NS)
            stuck = p->hold = true;
    return stuck;
}

/* Links that do not run empty in time are taken down as they are: what they carried goes again over the next ones. */
static void hurry(hx_hixl_t *h, uint64_t since, uint64_t now)
{
    for (hx_hpeer_t *p = h->peers; p; p = p->next) {
        bool moves = p->done_ns > since;
        if (!p->connected || p->recall || now < since + (moves ? MOVING_NS : STILL_NS))
            continue;
        p->recall = true;
        hx_hixl_wake_poster(p);
    }
}

/* Links run empty and are taken down; posters stand still until resume(), and so not for long. False: not all are down. */
static bool quiesce(hx_hixl_t *h)
{
    uint64_t since = hx_now_ns(), now = since;
    pthread_mutex_lock(&h->mu);
    if (somebody_stuck(h, now)) {
        pthread_mutex_unlock(&h->mu);
        return false;
    }
    h->quiesce = true;
    for (hx_hpeer_t *p = h->peers; p; p = p->next)
        hx_hixl_wake_poster(p);
    while ((h->connected || h->connecting) && !h->stopping && now < since + GIVE_UP_NS) {
        struct timespec at;
        clock_gettime(CLOCK_REALTIME, &at);
        at.tv_nsec += 20000000;
        at.tv_sec += at.tv_nsec / 1000000000;
        at.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&h->gate, &h->mu, &at);
        now = hx_now_ns();
        if (somebody_stuck(h, now))
            break; /* the others have waited enough */
        hurry(h, since, now);
    }
    bool empty = !h->connected && !h->connecting;
    pthread_mutex_unlock(&h->mu);
    return empty;
}

static void resume(hx_hixl_t *h, bool all)
{
    pthread_mutex_lock(&h->mu);
    h->quiesce = false;
    for (hx_hpeer_t *p = h->peers; p; p = p->next) {
        p->hold = p->hold && !all; /* until it has worked once */
        hx_hixl_wake_poster(p);
    }
    pthread_mutex_unlock(&h->mu);
}

bool hx_hixl_drop_unused(hx_hixl_t *h)
{
    size_t unused = 0;
    for (size_t k = 0; k < h->nintervals; k++)
        unused += !h->intervals[k].refs;
    h->unused = unused > 0;
    if (!unused)
        return true;
    bool all = quiesce(h);
    for (size_t k = 0; k < h->nintervals && all; k++) {
        hx_interval_t *v = &h->intervals[k];
        if (v->refs)
            continue;
        uint32_t code = HX_HIXL_FAILED;
        for (int i = 0; i < DROP_TRIES && code != HX_HIXL_SUCCESS; i++) {
            if (i)
                nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
            code = h->lib->drop(h->object, v->handle);
        }
        if (code != HX_HIXL_SUCCESS) {
            all = false;
            break;
        }
        memmove(v, v + 1, (h->nintervals - k - 1) * sizeof *v);
        h->nintervals--;
        k--;
    }
    resume(h, all);
    h->unused = !all;
    return all;
}

static void free_owned(hx_hixl_t *h, const void *identity)
{
    for (hx_owned_t **at = &h->owned; *at; at = &(*at)->next)
        if ((*at)->region == identity) {
            hx_owned_t *gone = *at;
            *at = gone->next;
            h->vendor->acl.free_device(gone->base);
            free(gone);
            return;
        }
}

/* The library has forgotten it: the memory goes back to its owner. */
static void let_go(hx_hixl_t *h, hx_mjob_t *m)
{
    if (m->identity)
        free_owned(h, m->identity);
    if (m->then)
        hx_setup_push(h->engine, m->then);
    if (m->region) {
        atomic_store(&m->region->adoption, HX_ADOPT_NONE);
        hx_control_wake(h->engine); /* a deregistration waits for this */
        hx_region_unref(m->region);
    }
    free(m);
}

/* While it is not certain that the library has let go, memory stays where it is, and its owner waits. */
void hx_hixl_settle_leaving(hx_hixl_t *h)
{
    bool gone = hx_hixl_drop_unused(h);
    h->leave_due_ns = hx_now_ns() + AGAIN_NS;
    while (gone && h->leaving) {
        hx_mjob_t *m = (hx_mjob_t *)h->leaving;
        h->leaving = m->job.next;
        let_go(h, m);
    }
}

static void run_leave(hx_hixl_t *h, hx_hjob_t *job)
{
    hx_mjob_t *m = (hx_mjob_t *)job;
    if (h->engine->abandoned)
        return;         /* nobody knows what the library still does: the memory stays for the life of the process */
    if (h->finalized) { /* any thread */
        let_go(h, m);
        return;
    }
    uncount(h, m->start, m->end);
    job->next = h->leaving;
    h->leaving = job;
    if (!h->more_alike) /* those that leave together need one quiet moment */
        hx_hixl_settle_leaving(h);
}

/* ---- adopting ---- */

static bool bring_memory(hx_hixl_t *h, hx_region_t *region, char text[HX_TEXT_MAX])
{
    void *base = NULL;
    uint64_t nbytes = (region->nbytes + ALIGN - 1) / ALIGN * ALIGN;
    int code = h->vendor->acl.malloc_device(&base, nbytes, HX_ACL_HUGE_FIRST);
    if (code || !base) {
        char detail[HX_TEXT_MAX];
        hx_hixl_recent_error(h, detail);
        snprintf(text, HX_TEXT_MAX, "the NPU %d has no %llu bytes to give: aclrtMalloc answered %d%s%.300s", h->device,
                 (unsigned long long)nbytes, code, detail[0] ? ": " : "", detail);
        return false;
    }
    hx_owned_t *own = hx_alloc(sizeof *own);
    *own = (hx_owned_t){h->owned, base, region};
    h->owned = own;
    region->base = base;
    region->map_len = nbytes;
    return true;
}

static void run_adopt(hx_hixl_t *h, hx_hjob_t *job)
{
    hx_region_t *region = ((hx_mjob_t *)job)->region;
    char text[HX_TEXT_MAX] = "the engine is being closed";
    free(job);
    bool brought = region->kind == HX_KIND_DEVICE && !region->base;
    /* Dropped while it waited: its memory may be somebody else's already. */
    bool wanted = !h->main_stop && atomic_load(&region->refs) > 1;
    bool ok = wanted && (!brought || bring_memory(h, region, text));
    if (ok) {
        uint64_t start = (uintptr_t)region->base;
        ok = cover(h, start, start + extent(region), kind_of(region), text);
        if (!ok && brought)
            free_owned(h, region);
    }
    uint64_t when = 0;
    if (ok) {
        region->direct = (uintptr_t)region->base;
        pthread_mutex_lock(&h->mu);
        when = ++h->adoptions;
        pthread_mutex_unlock(&h->mu);
    }
    hx_region_adopted(region, when, ok ? NULL : text);
}

void hx_hixl_adopt(hx_engine_t *engine, void *state, hx_region_t *region)
{
    (void)engine;
    hx_mjob_t *m = hx_alloc(sizeof *m);
    m->job.run = run_adopt;
    m->region = region; /* with the caller's reference */
    hx_hixl_push_job(state, &m->job);
}

static hx_mjob_t *leave_of(hx_region_t *region)
{
    hx_mjob_t *m = hx_alloc(sizeof *m);
    m->job.run = run_leave;
    m->start = (uintptr_t)region->base;
    m->end = m->start + extent(region);
    m->kind = kind_of(region);
    m->identity = region->kind == HX_KIND_DEVICE ? region : NULL;
    return m;
}

void hx_hixl_withdraw(hx_engine_t *engine, void *state, hx_region_t *region)
{
    (void)engine;
    hx_mjob_t *m = leave_of(region);
    hx_region_ref(region);
    m->region = region;
    hx_hixl_push_job(state, &m->job);
}

void hx_hixl_disown(hx_engine_t *engine, void *state, hx_region_t *region, hx_job_t *then)
{
    (void)engine;
    hx_mjob_t *m = leave_of(region);
    m->then = then;
    hx_hixl_push_job(state, &m->job);
}

void hx_hixl_forget_all(hx_hixl_t *h)
{
    hx_engine_t *engine = h->engine;
    pthread_mutex_lock(&engine->regions_mu);
    for (hx_region_t *r = engine->regions; r; r = r->next) {
        uint32_t held = HX_ADOPT_HELD;
        atomic_compare_exchange_strong(&r->adoption, &held, HX_ADOPT_NONE);
    }
    pthread_mutex_unlock(&engine->regions_mu);
    h->finalized = true;
    for (hx_hjob_t *job; (job = h->leaving);) {
        h->leaving = job->next;
        let_go(h, (hx_mjob_t *)job);
    }
    for (hx_owned_t *own; (own = h->owned);) {
        h->owned = own->next;
        h->vendor->acl.free_device(own->base);
        free(own);
    }
    free(h->intervals);
    h->intervals = NULL;
    h->nintervals = h->cap = 0;
}
