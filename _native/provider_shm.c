/* SPDX-License-Identifier: Apache-2.0 */
/* One host. Memory that its owner allocated here is a memfd: we map it and a transfer is one memcpy. Foreign memory is
 * reached by process_vm_readv/writev, once the peer has proved its pid and address space (hello.c), with its pidfd
 * looked at before every call, since a pid can be reused.
 *
 * Both kinds announce what they touch in the page shared with the owner (page.c) before they touch it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "copy.h"
#include "provider.h"
#include "sys.h"

#define GROUP_DESCS 64
#define GROUP_BYTES (64u << 10) /* small rows are announced together: a fence each would cost as much as their copy */
#define FAULT_AHEAD (64u << 10) /* populate at once what a copy of at least this size is about to touch */

static hx_status_t probe(char text[HX_TEXT_MAX])
{
    int fd = hx_memfd("aiohixl-probe");
    if (fd < 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0) {
        snprintf(text, HX_TEXT_MAX, "memfd_create with sealing failed: %s", strerror(errno));
        if (fd >= 0)
            close(fd);
        return HX_ERR_SYSTEM;
    }
    close(fd);
    snprintf(text, HX_TEXT_MAX, "memfd with seals works");
    return HX_OK;
}

static hx_status_t route(hx_endpoint_t *ep, const hx_region_t *local, const hx_rregion_t *remote,
                         char text[HX_TEXT_MAX])
{
    (void)local;
    const char *why = NULL;
    if (remote->kind == HX_KIND_DEVICE || (local && local->kind == HX_KIND_DEVICE))
        why = "NPU memory cannot be reached by the CPU";
    else if (!ep->local || !ep->mine || !ep->theirs)
        why = "the control link is TCP: the peer may be on another host";
    else if (!(ep->features & HX_FEATURE_SHM))
        why = "the peer's engine has no shm transport";
    else if (remote->kind == HX_KIND_LAYOUT)
        why = "a layout is a description, not memory";
    else if (remote->kind == HX_KIND_FOREIGN && !ep->vm_ok) {
        if (text)
            snprintf(text, HX_TEXT_MAX,
                     "the peer's memory was not allocated by its engine, and process_vm access to it was "
                     "refused (%s): let the "
                     "peer use engine.allocate(), or allow ptrace between the two (same user, "
                     "kernel.yama.ptrace_scope=0)",
                     strerror(ep->vm_errno));
        return HX_ERR_NO_PATH;
    }
    if (why) {
        if (text)
            snprintf(text, HX_TEXT_MAX, "%s", why);
        return HX_ERR_NO_PATH;
    }
    if (text)
        snprintf(text, HX_TEXT_MAX, "%s",
                 remote->kind == HX_KIND_MEMFD ? "same host, memory allocated by the peer's engine: mapped, one memcpy"
                                               : "same host, foreign memory: process_vm_readv/writev");
    return HX_OK;
}

static hx_status_t ask_for_mapping(hx_op_t *op, hx_rregion_t *r)
{
    hx_command_t *cmd = hx_command_new(HX_CMD_ASK_MAP, NULL, 0);
    if (!cmd) {
        atomic_store(&r->map_state, HX_MAP_NONE);
        hx_sched_kick(op->ep->engine);
        return HX_ERR_NO_MEMORY;
    }
    hx_endpoint_ref(op->ep);
    hx_rregion_ref(r);
    cmd->ep = op->ep;
    cmd->rregion = r;
    hx_command_push(op->ep->engine, cmd);
    return HX_AGAIN;
}

static hx_status_t prepare_remote(hx_op_t *op, hx_rregion_t *r)
{
    if (atomic_load(&r->dead))
        return HX_ERR_REMOTE_ACCESS;
    if (r->kind != HX_KIND_MEMFD)
        return HX_OK;
    for (;;) {
        uint32_t state = HX_MAP_NONE;
        if (atomic_compare_exchange_strong(&r->map_state, &state, HX_MAP_ASKED))
            return ask_for_mapping(op, r);
        if (state == HX_MAP_MAPPED)
            return HX_OK;
        if (state != HX_MAP_FAILED)
            return HX_AGAIN; /* asked for, or being unmapped: a kick follows */
        int err = r->sys_errno;
        /* The next operation asks again: what was short (descriptors, memory) may be there then. Whoever loses this race
         * looks again. */
        if (!atomic_compare_exchange_strong(&r->map_state, &state, HX_MAP_NONE))
            continue;
        hx_sched_kick(op->ep->engine);
        op->sys_errno = err == ENOENT ? 0 : err;
        return err == ENOENT ? HX_ERR_REMOTE_ACCESS : HX_ERR_FAULT; /* ENOENT: deregistered meanwhile */
    }
}

static hx_status_t prepare(hx_op_t *op)
{
    for (size_t i = 0; i < op->nparts; i++) {
        uint32_t state = atomic_load(&op->parts[i].local->state);
        if (state == HX_REGION_PENDING) {
            atomic_store(&op->progress_ns, hx_now_ns()); /* its population goes on, and kicks us at each step */
            return HX_AGAIN;
        }
        if (state == HX_REGION_FAILED)
            return HX_ERR_REGION_CLOSED;
        hx_status_t status = prepare_remote(op, op->parts[i].remote);
        if (status != HX_OK)
            return status;
    }
    return HX_OK;
}

static void populate_ahead(hx_rregion_t *r, uint64_t off, uint64_t n)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    off += (uint64_t)(r->base - r->map);
    uint64_t lo = off / page * page, hi = (off + n + page - 1) / page * page;
    if (n >= FAULT_AHEAD && !atomic_load_explicit(&r->populated, memory_order_relaxed))
        madvise(r->map + lo, hi - lo, r->access & HX_ACCESS_WRITE ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
}

typedef struct {
    struct iovec local[GROUP_DESCS], remote[GROUP_DESCS]; /* remote: offsets until the kind of memory is known */
    size_t n;
    uint64_t lo, hi, nbytes;
} hx_group_t;

/* The check that every touch of a peer's bytes passes, between publishing its slot and the first byte (page.c). */
static hx_status_t permit(hx_op_t *op, const hx_rregion_t *r, const hx_group_t *g)
{
    hx_revoked_set_t *revoked = &op->ep->revoked;
    if (hx_page_revoke_seq(op->ep->mine) != atomic_load(&revoked->applied))
        return HX_AGAIN; /* a revocation is on its way over the control link: what it says is not known yet */
    /* What is revoked may lie between the rows: then each is asked about. */
    bool hit = hx_revoked_hits(revoked, r->id, g->lo, g->hi, op->epoch);
    for (size_t i = 0; hit && i < g->n; i++) {
        uint64_t off = (uintptr_t)g->remote[i].iov_base, n = g->remote[i].iov_len;
        if (n && hx_revoked_hits(revoked, r->id, off, off + n, op->epoch))
            return HX_ERR_REMOTE_ACCESS;
    }
    /* Last: what is known of a region is forgotten after it has been marked dead. */
    return atomic_load(&r->dead) ? HX_ERR_REMOTE_ACCESS : HX_OK;
}

static hx_status_t copy_mapped(const hx_op_t *op, hx_rregion_t *r, const hx_group_t *g)
{
    bool stream = op->nbytes >= HX_STREAM_FROM;
    populate_ahead(r, g->lo, g->nbytes);
    for (size_t i = 0; i < g->n; i++) {
        uint8_t *remote = r->base + (uintptr_t)g->remote[i].iov_base, *local = g->local[i].iov_base;
        uint8_t *to = op->kind == HX_WRITE ? remote : local, *from = op->kind == HX_WRITE ? local : remote;
        if (stream)
            hx_copy_stream(to, from, g->local[i].iov_len);
        else
            memcpy(to, from, g->local[i].iov_len);
    }
    return HX_OK;
}

static hx_status_t copy_foreign(const hx_op_t *op, const hx_rregion_t *r, hx_group_t *g, int *errno_p)
{
    struct pollfd pfd = {.fd = op->ep->pidfd, .events = POLLIN};
    struct iovec *l = g->local, *rm = g->remote;
    size_t n = g->n;
    for (size_t i = 0; i < n; i++)
        rm[i].iov_base = (void *)(uintptr_t)(r->addr + (uintptr_t)rm[i].iov_base);
    while (n) {
        /* Its process has ended, or its memory is another program's by now: the control thread is about to say so, to
         * everybody at once. */
        if (poll(&pfd, 1, 0) != 0 || hx_endpoint_prove_vm(op->ep))
            return HX_AGAIN;
        ssize_t done = op->kind == HX_WRITE ? process_vm_writev(op->ep->pid, l, n, rm, n, 0)
                                            : process_vm_readv(op->ep->pid, l, n, rm, n, 0);
        if (done <= 0) {
            *errno_p = done < 0 ? errno : EFAULT;
            return *errno_p == ESRCH ? HX_AGAIN : HX_ERR_FAULT; /* ESRCH: it is ending, as above */
        }
        for (; n && (size_t)done >= l->iov_len; l++, rm++, n--)
            done -= (ssize_t)l->iov_len;
        if (n) {
            l->iov_base = (uint8_t *)l->iov_base + done;
            l->iov_len -= (size_t)done;
            rm->iov_base = (uint8_t *)rm->iov_base + done;
            rm->iov_len -= (size_t)done;
        }
    }
    return HX_OK;
}

/* Gathers rows of one part, from batch->first on, that are announced and copied together; answers the row after
 * them. */
static size_t gather(const hx_op_t *op, const hx_batch_t *b, const hx_part_t *part, hx_group_t *g)
{
    size_t i = b->first, stop = b->last < part->end ? b->last : part->end;
    g->n = 0;
    g->nbytes = 0;
    g->lo = UINT64_MAX;
    g->hi = 0;
    for (; i < stop && g->n < GROUP_DESCS; i++) {
        const hx_desc_t *d = &op->descs[i];
        uint64_t from, to;
        hx_op_row(op, b, i, &from, &to);
        uint64_t n = to - from, off = d->remote_off + from;
        if (g->n && g->nbytes + n > GROUP_BYTES)
            break;
        g->local[g->n] = (struct iovec){part->local->base + d->local_off + from, n};
        g->remote[g->n++] = (struct iovec){(void *)(uintptr_t)off, n};
        g->nbytes += n;
        g->lo = off < g->lo ? off : g->lo;
        g->hi = off + n > g->hi ? off + n : g->hi;
    }
    return i;
}

static hx_status_t copy(hx_op_t *op, hx_batch_t *b, unsigned slot, int *errno_p)
{
    hx_page_t *page = op->ep->mine;
    size_t part = hx_op_part_of(op, b->first);
    while (b->first < b->last) {
        hx_group_t g;
        if (hx_op_verdict(op) != HX_OK)
            return HX_OK; /* the scheduler knows why */
        while (op->parts[part].end <= b->first)
            part++;
        hx_rregion_t *r = op->parts[part].remote;
        size_t next = gather(op, b, &op->parts[part], &g);
        if (g.nbytes) {
            hx_page_publish(page, slot, r->id, g.lo, g.hi);
            hx_status_t status = permit(op, r, &g);
            if (status == HX_OK)
                status = r->kind == HX_KIND_MEMFD ? copy_mapped(op, r, &g) : copy_foreign(op, r, &g, errno_p);
            hx_page_clear(page, slot);
            if (status != HX_OK)
                return status;
            atomic_fetch_add_explicit(&op->moved, g.nbytes, memory_order_relaxed);
        }
        b->first = next;
        b->first_off = 0;
    }
    return HX_OK;
}

/* A free slot of those for posting threads, or -1. */
static int take_slot(hx_endpoint_t *ep)
{
    uint32_t taken = atomic_load(&ep->inline_slots);
    while (~taken) {
        uint32_t bit = (uint32_t)__builtin_ctz(~taken);
        if (atomic_compare_exchange_weak(&ep->inline_slots, &taken, taken | 1u << bit))
            return (int)bit;
    }
    return -1;
}

static bool try_inline(hx_op_t *op)
{
    hx_endpoint_t *ep = op->ep;
    if (op->nparts != 1 || op->ndescs != 1 || op->nbytes > ep->engine->config.inline_limit)
        return false;
    hx_region_t *local = op->parts[0].local;
    hx_rregion_t *r = op->parts[0].remote;
    /* Populated mappings on both sides only: a page fault, or a peer's foreign memory, can make the loop wait. */
    if (local->kind != HX_KIND_MEMFD || atomic_load(&local->state) != HX_REGION_READY || !atomic_load(&r->populated) ||
        atomic_load(&r->map_state) != HX_MAP_MAPPED)
        return false;
    hx_revoked_set_t *revoked = &ep->revoked;
    int bit = take_slot(ep);
    if (bit < 0)
        return false;
    unsigned slot = HX_SLOTS - HX_INLINE_SLOTS + (unsigned)bit;
    const hx_desc_t *d = op->descs;
    hx_page_publish(ep->mine, slot, r->id, d->remote_off, d->remote_off + d->nbytes);
    /* Anything that needs the lock of the revoked set goes to the copy threads. */
    bool ok = hx_page_revoke_seq(ep->mine) == atomic_load(&revoked->applied) &&
              hx_revoked_quiet(revoked, r->id, op->epoch) && !atomic_load(&r->dead) &&
              atomic_load(&ep->state) == HX_EP_UP;
    if (ok && op->kind == HX_WRITE)
        memcpy(r->base + d->remote_off, local->base + d->local_off, d->nbytes);
    else if (ok)
        memcpy(local->base + d->local_off, r->base + d->remote_off, d->nbytes);
    hx_page_clear(ep->mine, slot);
    atomic_fetch_and(&ep->inline_slots, ~(1u << bit));
    return ok;
}

const hx_provider_t hx_provider_shm = {
    .abi = HX_PROVIDER_ABI,
    .name = "shm",
    .transport = HX_TRANSPORT_SHM,
    .feature = HX_FEATURE_SHM,
    .probe = probe,
    .route = route,
    .try_inline = try_inline,
    .submit = hx_sched_submit,
    .prepare = prepare,
    .copy = copy,
};
