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

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

#define POPULATE_STEP (32ull << 20)
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
    hx_rregion_unref(r);
}

/* A dead region that nobody uses gives its mapping back at once, although handles to it may live on. */
static void unmap_if_idle(hx_rregion_t *r)
{
    bool no = false;
    if (atomic_load(&r->dead) && !atomic_load(&r->users) && atomic_load(&r->map_state) == HX_MAP_MAPPED &&
        atomic_compare_exchange_strong(&r->unmapped, &no, true))
        push_job(r, unmap);
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
    bool ok = true;
    free(job);
    /* As a user: the mapping stays while we walk it. */
    atomic_fetch_add(&r->users, 1);
    for (uint64_t off = 0; off < r->map_len && ok; off += POPULATE_STEP) {
        uint64_t left = r->map_len - off;
        if (atomic_load(&r->dead) || atomic_load(&r->engine->stopping))
            break;
        ok = madvise(r->map + off, left < POPULATE_STEP ? left : POPULATE_STEP, advice) == 0;
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
    if (fstat(fd, &st) < 0 || start > (uint64_t)st.st_size || (uint64_t)st.st_size - start < len ||
        seals < 0 || (seals & SEALS) != SEALS) {
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
    atomic_store(&r->map_state, HX_MAP_MAPPED);
    if (atomic_load(&r->dead))
        unmap_if_idle(r);
    else
        push_job(r, populate);
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
    bool no = false;
    /* In a forked child it was never mapped, and its place may be taken. */
    if (!r->engine->forked && atomic_load(&r->map_state) == HX_MAP_MAPPED &&
        atomic_compare_exchange_strong(&r->unmapped, &no, true))
        munmap(r->map, r->map_len);
    free(r);
}
