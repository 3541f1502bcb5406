/* SPDX-License-Identifier: Apache-2.0 */
/* Local memory: allocated here (a sealed memfd that peers can map) or somebody else's (foreign). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "provider.h"
#include "sys.h"

static hx_region_t *region_new(hx_engine_t *engine, uint32_t kind, uint64_t nbytes, uint32_t access)
{
    hx_region_t *region = calloc(1, sizeof *region);
    if (!region)
        return NULL;
    region->engine = engine;
    region->kind = kind;
    region->nbytes = nbytes;
    region->access = access;
    region->memfd = -1;
    atomic_init(&region->refs, 1);
    if (getrandom(&region->rkey, sizeof region->rkey, 0) != sizeof region->rkey) {
        free(region);
        return NULL;
    }
    atomic_fetch_add(&engine->nregions, 1);
    pthread_mutex_lock(&engine->regions_mu);
    region->id = ++engine->next_region_id; /* never reused within an incarnation */
    region->next = engine->regions;
    atomic_signal_fence(memory_order_release); /* a fork between the two leaves a whole list: hx_regions_forked */
    engine->regions = region;
    pthread_mutex_unlock(&engine->regions_mu);
    return region;
}

/* False: its last reference is being dropped right now. */
static bool try_ref(hx_region_t *region)
{
    uint32_t refs = atomic_load(&region->refs);
    while (refs)
        if (atomic_compare_exchange_weak(&region->refs, &refs, refs + 1))
            return true;
    return false;
}

typedef struct {
    hx_job_t job;
    hx_region_t *region;
} hx_populate_t;

void hx_region_settle(hx_region_t *region, int err, const char *why)
{
    hx_engine_t *engine = region->engine;
    uint32_t pending = HX_REGION_PENDING;
    region->sys_errno = err;
    atomic_compare_exchange_strong(&region->state, &pending, err ? HX_REGION_FAILED : HX_REGION_READY);
    hx_event_t ev = {.kind = HX_EV_REGION_READY,
                     .token = region->id,
                     .status = err ? HX_ERR_REGION_CLOSED : HX_OK,
                     .sys_errno = err};
    hx_event_emit(engine, ev, NULL, 0, why, why ? strlen(why) : 0);
    atomic_store(&engine->control.rescan, true);
    hx_control_wake(engine); /* it announces regions that have become ready */
    hx_sched_kick(engine);
}

/* Its memory is there; a provider's library may have to hear of it first. */
static void memory_ready(hx_region_t *region)
{
    if (!hx_providers_adopt(region))
        hx_region_settle(region, 0, NULL);
}

void hx_region_adopted(hx_region_t *region, uint64_t when, const char *obstacle)
{
    hx_engine_t *engine = region->engine;
    /* Without its provider this memory is of no use; other memory may have another path. */
    uint32_t others = HX_TRANSPORT_SHM | HX_TRANSPORT_TCP;
    bool fatal = obstacle && (region->kind == HX_KIND_DEVICE || !(engine->config.transports & others));
    region->obstacle = obstacle ? strdup(obstacle) : NULL;
    atomic_store(&region->adopted, obstacle ? 0 : when);
    atomic_store(&region->adoption, obstacle ? HX_ADOPT_NONE : HX_ADOPT_HELD);
    hx_region_settle(region, fatal ? EINVAL : 0, obstacle);
    hx_region_unref(region);
}

/* A view is either found here, or finds its parent populated; never both. */
static void settle_family(hx_region_t *region, int err)
{
    hx_engine_t *engine = region->engine;
    hx_region_t **views = NULL;
    size_t n = 0, count = 0;
    pthread_mutex_lock(&engine->regions_mu);
    region->populated = err ? -1 : 1;
    for (hx_region_t *r = engine->regions; r; r = r->next)
        count += r->parent == region;
    if (count)
        views = hx_alloc(count * sizeof *views);
    for (hx_region_t *r = engine->regions; r; r = r->next)
        if (r->parent == region && try_ref(r))
            views[n++] = r;
    pthread_mutex_unlock(&engine->regions_mu);
    if (err)
        hx_region_settle(region, err, NULL);
    else
        memory_ready(region);
    for (size_t i = 0; i < n; i++) {
        if (err)
            hx_region_settle(views[i], err, NULL);
        else
            memory_ready(views[i]);
        hx_region_unref(views[i]);
    }
    free(views);
}

static void populate(hx_job_t *job)
{
    hx_region_t *region = ((hx_populate_t *)job)->region;
    hx_engine_t *engine = region->engine;
    int err = 0;
    free(job);
    /* fallocate first: where memory is short it answers ENOSPC, and a peer that touches the pages later cannot be
     * killed by SIGBUS. Populating alone warms our own page table; fallocate alone does not. */
    for (uint64_t off = 0; off < region->map_len && !err && !atomic_load(&engine->stopping); off += HX_POPULATE_STEP) {
        uint64_t left = region->map_len - off, n = left < HX_POPULATE_STEP ? left : HX_POPULATE_STEP;
        while (fallocate(region->memfd, 0, (off_t)off, (off_t)n) < 0)
            if (errno != EINTR) {
                err = errno;
                break;
            }
        /* EINVAL: a kernel before 5.14, where the first touch pays. */
        if (!err && madvise(region->base + off, n, MADV_POPULATE_WRITE) < 0 && errno != EINVAL && errno != EINTR)
            err = errno;
        hx_sched_kick(engine);
    }
    if (atomic_load(&engine->stopping) && !err)
        err = ECANCELED;
    settle_family(region, err);
    hx_region_unref(region);
}

hx_status_t hx_region_allocate(hx_engine_t *engine, uint64_t nbytes, uint32_t access, hx_region_t **region_p)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (!nbytes || nbytes > (uint64_t)INT64_MAX - page)
        return HX_ERR_CONFIG;
    if (atomic_load(&engine->stopping))
        return HX_ERR_CLOSED;
    size_t len = (nbytes + page - 1) / page * page;
    hx_populate_t *job = malloc(sizeof *job);
    int fd = hx_memfd("aiohixl-region");
    void *base = MAP_FAILED;
    if (!job || fd < 0 || ftruncate(fd, (off_t)len) < 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        goto fail;
    base = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        goto fail;
    hx_region_t *region = region_new(engine, HX_KIND_MEMFD, nbytes, access);
    if (!region)
        goto fail;
    region->base = base;
    region->map_len = len;
    region->memfd = fd;
    job->job.run = populate;
    job->region = region;
    hx_region_ref(region);
    hx_setup_push(engine, &job->job);
    *region_p = region;
    return HX_OK;
fail:;
    int err = errno;
    if (base != MAP_FAILED)
        munmap(base, len);
    if (fd >= 0)
        close(fd);
    free(job);
    errno = err;
    return HX_ERR_SYSTEM;
}

hx_status_t hx_region_view(hx_region_t *parent, uint64_t offset, uint64_t nbytes, uint32_t access,
                           hx_region_t **region_p)
{
    hx_engine_t *engine = parent->engine;
    if (parent->kind != HX_KIND_MEMFD || !nbytes || offset > parent->nbytes || nbytes > parent->nbytes - offset)
        return HX_ERR_BOUNDS;
    if (atomic_load(&engine->stopping))
        return HX_ERR_CLOSED;
    if (parent->parent) {
        offset += parent->file_off;
        parent = parent->parent;
    }
    hx_region_t *region = region_new(engine, HX_KIND_MEMFD, nbytes, access);
    if (!region)
        return HX_ERR_NO_MEMORY;
    hx_region_ref(parent);
    region->base = parent->base + offset;
    region->file_off = offset;
    region->memfd = parent->memfd;
    pthread_mutex_lock(&engine->regions_mu);
    region->parent = parent;
    int populated = parent->populated;
    pthread_mutex_unlock(&engine->regions_mu);
    uint32_t state = atomic_load(&parent->state);
    if (populated < 0 || (populated && (state == HX_REGION_FAILED || state == HX_REGION_CLOSING)))
        hx_region_settle(region, ECANCELED, NULL);
    else if (populated)
        memory_ready(region);
    *region_p = region;
    return HX_OK;
}

hx_status_t hx_region_register(hx_engine_t *engine, void *addr, uint64_t nbytes, uint32_t access,
                               hx_region_t **region_p)
{
    if (!addr || !nbytes || nbytes > INT64_MAX || (uintptr_t)addr > UINTPTR_MAX - nbytes)
        return HX_ERR_CONFIG;
    if (atomic_load(&engine->stopping))
        return HX_ERR_CLOSED;
    hx_region_t *region = region_new(engine, HX_KIND_FOREIGN, nbytes, access);
    if (!region)
        return HX_ERR_NO_MEMORY;
    region->base = addr;
    if (!hx_providers_adopt(region))
        atomic_store(&region->state, HX_REGION_READY);
    *region_p = region;
    return HX_OK;
}

hx_status_t hx_region_device(hx_engine_t *engine, uint64_t addr, uint64_t nbytes, uint32_t access,
                             hx_region_t **region_p)
{
    if (!nbytes || nbytes > INT64_MAX || addr > UINT64_MAX - nbytes)
        return HX_ERR_CONFIG;
    if (atomic_load(&engine->stopping))
        return HX_ERR_CLOSED;
    hx_region_t *region = region_new(engine, HX_KIND_DEVICE, nbytes, access);
    if (!region)
        return HX_ERR_NO_MEMORY;
    region->base = (uint8_t *)(uintptr_t)addr; /* NULL: whoever adopts it brings the memory */
    if (!hx_providers_adopt(region)) {
        hx_region_unref(region);
        return HX_ERR_NO_PATH;
    }
    *region_p = region;
    return HX_OK;
}

hx_status_t hx_region_layout(hx_engine_t *engine, hx_region_t **region_p)
{
    if (atomic_load(&engine->stopping))
        return HX_ERR_CLOSED;
    hx_region_t *region = region_new(engine, HX_KIND_LAYOUT, 0, HX_ACCESS_READ);
    if (!region)
        return HX_ERR_NO_MEMORY;
    atomic_store(&region->state, HX_REGION_READY);
    *region_p = region;
    return HX_OK;
}

hx_status_t hx_region_announce(hx_region_t *region, const char *name, size_t name_len, const void *blob,
                               size_t blob_len)
{
    if (!name_len || name_len > HX_NAME_MAX || blob_len > HX_BLOB_MAX || region->name)
        return HX_ERR_CONFIG;
    char *copy = malloc(name_len);
    char *doc = malloc(blob_len ? blob_len : 1);
    hx_command_t *cmd = hx_command_new(HX_CMD_ANNOUNCE, NULL, 0);
    if (!copy || !doc || !cmd) {
        free(copy);
        free(doc);
        free(cmd);
        return HX_ERR_NO_MEMORY;
    }
    memcpy(copy, name, name_len);
    if (blob_len)
        memcpy(doc, blob, blob_len);
    region->name = copy;
    region->name_len = (uint32_t)name_len;
    region->blob = doc;
    region->blob_len = (uint32_t)blob_len;
    hx_region_ref(region);
    cmd->region = region;
    return hx_command_push(region->engine, cmd);
}

void *hx_region_addr(const hx_region_t *region)
{
    return region->base;
}

bool hx_region_is_ready(const hx_region_t *region)
{
    return atomic_load(&region->state) == HX_REGION_READY;
}

uint32_t hx_region_kind(const hx_region_t *region)
{
    return region->kind;
}

uint64_t hx_region_id(const hx_region_t *region)
{
    return region->id;
}

uint64_t hx_region_nbytes(const hx_region_t *region)
{
    return region->nbytes;
}

void hx_region_ref(hx_region_t *region)
{
    atomic_fetch_add(&region->refs, 1);
}

static void unlink_region(hx_region_t *region)
{
    hx_engine_t *engine = region->engine;
    pthread_mutex_lock(&engine->regions_mu);
    for (hx_region_t **p = &engine->regions; *p; p = &(*p)->next)
        if (*p == region) {
            *p = region->next;
            break;
        }
    pthread_mutex_unlock(&engine->regions_mu);
    atomic_fetch_sub(&engine->nregions, 1);
}

typedef struct {
    hx_job_t job;
    void *base;
    size_t len;
} hx_unmap_t;

static void unmap(hx_job_t *job)
{
    hx_unmap_t *u = (hx_unmap_t *)job;
    munmap(u->base, u->len);
    free(u);
}

void hx_region_unref(hx_region_t *region)
{
    if (!region || atomic_fetch_sub(&region->refs, 1) != 1)
        return;
    bool mapped = !region->parent && region->kind == HX_KIND_MEMFD;
    if (hx_in_child(region->engine)) {
        /* Its engine's locks may be held for ever here, and its thread is not there: only the memory is given back. */
        if (mapped)
            munmap(region->base, region->map_len);
        return;
    }
    unlink_region(region);
    hx_unmap_t *u = NULL;
    if (mapped) {
        close(region->memfd);
        /* Unmapping gigabytes takes a tenth of a second: not in whichever thread drops the last reference. */
        u = hx_alloc(sizeof *u);
        *u = (hx_unmap_t){{NULL, unmap}, region->base, region->map_len};
    }
    if (atomic_load(&region->adoption) == HX_ADOPT_HELD)
        hx_providers_disown(region, u ? &u->job : NULL);
    else if (u)
        hx_setup_push(region->engine, &u->job);
    if (region->parent)
        hx_region_unref(region->parent);
    hx_standing_free(region);
    free(region->obstacle);
    free(region->name);
    free(region->blob);
    free(region);
}

/* In a forked child, which may go on reading what it inherited, but has no use for the files. */
void hx_regions_forked(hx_engine_t *engine)
{
    /* Whoever held the lock is not here. It cannot be taken around a fork: it is taken with Python's lock held, and
     * Python runs its fork hooks without. A list that grows and shrinks by one store each is whole at any instant. */
    pthread_mutex_init(&engine->regions_mu, NULL);
    for (hx_region_t *r = engine->regions; r; r = r->next) {
        if (!r->parent && r->memfd >= 0)
            close(r->memfd);
        r->memfd = -1;
    }
}

/* Busy first, state second; deregistration sets the state first and looks at busy second: one of the two sees the
 * other, so no operation starts on a region whose deregistration has been answered. */
bool hx_region_acquire(hx_region_t *region)
{
    if (!try_ref(region))
        return false; /* found in a list at its very end */
    atomic_fetch_add(&region->busy, 1);
    uint32_t state = atomic_load(&region->state);
    if (state == HX_REGION_FAILED || state == HX_REGION_CLOSING) {
        hx_region_release(region);
        return false;
    }
    return true;
}

void hx_region_release(hx_region_t *region)
{
    bool last = atomic_fetch_sub(&region->busy, 1) == 1;
    if (last && atomic_load(&region->state) == HX_REGION_CLOSING)
        hx_control_wake(region->engine); /* a deregistration waits for this */
    hx_region_unref(region);
}

static hx_status_t push_spans(hx_region_t *region, hx_cmd_kind_t kind, const uint8_t *incarnation,
                              const uint64_t *spans, size_t n, uint64_t token)
{
    for (size_t i = 0; i < n; i++)
        if (spans[2 * i] > region->nbytes || spans[2 * i + 1] > region->nbytes - spans[2 * i])
            return HX_ERR_BOUNDS;
    hx_command_t *cmd = hx_command_new(kind, spans, n);
    if (!cmd)
        return HX_ERR_NO_MEMORY;
    if (incarnation) {
        cmd->one_peer = true;
        memcpy(cmd->incarnation, incarnation, HX_INCARNATION_LEN);
    }
    cmd->token = token;
    hx_region_ref(region);
    cmd->region = region;
    return hx_command_push(region->engine, cmd);
}

hx_status_t hx_region_revoke(hx_region_t *region, const uint8_t *incarnation, const uint64_t *spans, size_t n,
                             uint64_t token)
{
    return push_spans(region, HX_CMD_REVOKE, incarnation, spans, n, token);
}

hx_status_t hx_region_grant(hx_region_t *region, const uint8_t *incarnation, const uint64_t *spans, size_t n)
{
    return push_spans(region, HX_CMD_GRANT, incarnation, spans, n, 0);
}

hx_status_t hx_region_deregister(hx_region_t *region, uint64_t token)
{
    uint64_t all[2] = {0, region->nbytes};
    uint32_t state = atomic_load(&region->state);
    if (state != HX_REGION_FAILED)
        atomic_store(&region->state, HX_REGION_CLOSING);
    return push_spans(region, HX_CMD_DEREGISTER, NULL, all, 1, token);
}
