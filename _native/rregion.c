/* SPDX-License-Identifier: Apache-2.0 */
/* A peer's region as announced to us, and our mapping of it where it is a memfd. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core.h"
#include "sys.h"

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW)

hx_rregion_t *hx_rregion_new(hx_endpoint_t *ep)
{
    hx_rregion_t *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    r->engine = ep->engine;
    r->ep_serial = ep->serial;
    atomic_init(&r->refs, 1);
    return r;
}

typedef struct {
    hx_job_t job;
    hx_rregion_t *r;
} hx_rjob_t;

static void push_job(hx_rregion_t *r, void (*run)(hx_job_t *))
{
    hx_rjob_t *job = hx_alloc(sizeof *job);
    job->job.run = run;
    job->r = r;
    hx_rregion_ref(r);
    hx_setup_push(r->engine, &job->job);
}

static void unmap(hx_job_t *job)
{
    hx_rregion_t *r = ((hx_rjob_t *)job)->r;
    free(job);
    munmap(r->map, r->map_len);
    atomic_fetch_sub(&r->engine->mappings, 1);
    atomic_store(&r->map_state, HX_MAP_NONE);
    hx_sched_kick(r->engine); /* an operation may have come while it was being unmapped */
    hx_rregion_unref(r);
}

/* Takes the mapping away if no operation uses it. An operation counts itself as a user first and looks at map_state
 * second; this changes map_state first and looks at the users second: one of the two sees the other. */
static bool take_mapping(hx_rregion_t *r)
{
    uint32_t mapped = HX_MAP_MAPPED;
    atomic_store(&r->populated, false); /* no inline copy from here on */
    if (!atomic_compare_exchange_strong(&r->map_state, &mapped, HX_MAP_UNMAPPING))
        return false;
    if (!atomic_load(&r->users)) {
        push_job(r, unmap);
        return true;
    }
    atomic_store(&r->map_state, HX_MAP_MAPPED);
    hx_sched_kick(r->engine); /* that user may have seen it in between, and wait */
    return false;
}

/* A dead region that nobody uses gives its mapping back at once, although handles to it may live on. The last user to
 * leave may have found the mapping being looked at by somebody else: hence the loop. */
static void unmap_if_idle(hx_rregion_t *r)
{
    while (atomic_load(&r->dead) && !atomic_load(&r->users) && atomic_load(&r->map_state) == HX_MAP_MAPPED)
        if (take_mapping(r))
            return;
}

static void populate(hx_job_t *job);

static int older(const void *pa, const void *pb)
{
    uint64_t a = atomic_load(&(*(hx_rregion_t *const *)pa)->used_ns),
             b = atomic_load(&(*(hx_rregion_t *const *)pb)->used_ns);
    return a < b ? -1 : a > b;
}

/* The kernel allows a process so many mappings (vm.max_map_count): beyond our share the idle ones go, oldest first.
 * They come back on their next use. */
static void evict(hx_engine_t *engine)
{
    uint32_t limit = engine->config.max_mappings, keep = limit - limit / 4;
    size_t n = 0, cap = atomic_load(&engine->mappings);
    if (cap <= limit)
        return;
    hx_rregion_t **list = hx_alloc(cap * sizeof *list);
    for (hx_endpoint_t *ep = engine->control.endpoints; ep; ep = ep->next)
        for (size_t i = 0; i < HX_RTABLE; i++)
            for (hx_rregion_t *r = ep->table[i]; r && n < cap; r = r->hash_next)
                if (atomic_load(&r->map_state) == HX_MAP_MAPPED && !atomic_load(&r->users))
                    list[n++] = r;
    qsort(list, n, sizeof *list, older);
    for (size_t i = 0; i < n && cap > keep; i++) {
        if (take_mapping(list[i]))
            cap--;
        else if (atomic_load(&list[i]->map_state) == HX_MAP_MAPPED)
            push_job(list[i], populate); /* in use after all: fit for inline copies again */
    }
    free(list);
}

bool hx_rregion_acquire(hx_rregion_t *r)
{
    atomic_fetch_add(&r->users, 1);
    if (atomic_load(&r->dead)) {
        atomic_fetch_sub(&r->users, 1);
        unmap_if_idle(r);
        return false;
    }
    hx_rregion_ref(r);
    return true;
}

void hx_rregion_release(hx_rregion_t *r)
{
    atomic_store_explicit(&r->used_ns, hx_now_ns(), memory_order_relaxed);
    if (atomic_fetch_sub(&r->users, 1) == 1)
        unmap_if_idle(r);
    hx_rregion_unref(r);
}

void hx_rregion_kill(hx_rregion_t *r)
{
    atomic_store(&r->dead, true);
    unmap_if_idle(r);
}

static void populate(hx_job_t *job)
{
    hx_rregion_t *r = ((hx_rjob_t *)job)->r;
    int advice = r->access & HX_ACCESS_WRITE ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    free(job);
    /* As a user: the mapping stays while we walk it. */
    atomic_fetch_add(&r->users, 1);
    bool ok = atomic_load(&r->map_state) == HX_MAP_MAPPED;
    for (uint64_t off = 0; ok && off < r->map_len; off += HX_POPULATE_STEP) {
        uint64_t left = r->map_len - off;
        if (atomic_load(&r->dead) || atomic_load(&r->engine->stopping))
            break;
        ok = madvise(r->map + off, left < HX_POPULATE_STEP ? left : HX_POPULATE_STEP, advice) == 0;
    }
    if (ok && !atomic_load(&r->dead))
        atomic_store(&r->populated, true);
    if (atomic_fetch_sub(&r->users, 1) == 1)
        unmap_if_idle(r);
    hx_rregion_unref(r);
}

hx_status_t hx_rregion_map(hx_rregion_t *r, int fd)
{
    struct stat st;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint64_t skip = r->addr % page, start = r->addr - skip; /* a view may begin inside a page */
    size_t len = (skip + r->nbytes + page - 1) / page * page;
    int seals = fcntl(fd, F_GET_SEALS);
    int prot = PROT_READ | (r->access & HX_ACCESS_WRITE ? PROT_WRITE : 0);
    /* An owner that could shrink the file could kill us by SIGBUS in mid-copy. */
    if (fstat(fd, &st) < 0 || start > (uint64_t)st.st_size || (uint64_t)st.st_size - start < len || seals < 0 ||
        (seals & SEALS) != SEALS) {
        r->sys_errno = EBADF;
        goto fail;
    }
    uint8_t *base = mmap(NULL, len, prot, MAP_SHARED, fd, (off_t)start);
    if (base == MAP_FAILED) {
        r->sys_errno = errno;
        goto fail;
    }
    madvise(base, len, MADV_DONTFORK);
    close(fd);
    r->map = base;
    r->base = base + skip;
    r->map_len = len;
    atomic_fetch_add(&r->engine->mappings, 1);
    atomic_store(&r->used_ns, hx_now_ns());
    atomic_store(&r->populated, false);
    atomic_store(&r->map_state, HX_MAP_MAPPED);
    if (atomic_load(&r->dead))
        unmap_if_idle(r);
    else
        push_job(r, populate);
    evict(r->engine);
    return HX_OK;
fail:
    close(fd);
    atomic_store(&r->map_state, HX_MAP_FAILED);
    return HX_ERR_FAULT;
}

uint64_t hx_rregion_id(const hx_rregion_t *r)
{
    return r->id;
}

uint64_t hx_rregion_nbytes(const hx_rregion_t *r)
{
    return r->nbytes;
}

uint64_t hx_rregion_rkey(const hx_rregion_t *r)
{
    return r->rkey;
}

uint32_t hx_rregion_access(const hx_rregion_t *r)
{
    return r->access;
}

uint32_t hx_rregion_kind(const hx_rregion_t *r)
{
    return r->kind;
}

bool hx_rregion_alive(const hx_rregion_t *r)
{
    return !atomic_load(&r->dead);
}

void hx_rregion_ref(hx_rregion_t *r)
{
    atomic_fetch_add(&r->refs, 1);
}

void hx_rregion_unref(hx_rregion_t *r)
{
    if (!r || atomic_fetch_sub(&r->refs, 1) != 1)
        return;
    /* In a forked child it was never mapped, and its place may be taken. */
    if (!hx_in_child(r->engine) && atomic_load(&r->map_state) == HX_MAP_MAPPED) {
        munmap(r->map, r->map_len);
        atomic_fetch_sub(&r->engine->mappings, 1);
    }
    free(r->name);
    free(r);
}
