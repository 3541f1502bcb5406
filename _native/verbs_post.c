/* SPDX-License-Identifier: Apache-2.0 */
/* From operations to work requests, and from completions back. A request ends with one signalled work request: a READ of eight
 * bytes behind its WRITEs, which the peer's device answers only when they are in memory (an acknowledgement says less), or
 * its last READ. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sys.h"
#include "verbs_core.h"

/* ---- requests ---- */

static hx_vreq_t *new_req(hx_vpeer_t *p, hx_op_t *op)
{
    hx_verbs_t *v = p->v;
    hx_vreq_t *r = v->free_reqs;
    if (!r)
        return NULL;
    v->free_reqs = r->next;
    v->nreqs++;
    r->op = op;
    r->peer = p;
    r->returned = false;
    r->next = NULL;
    r->prev = p->reqs_tail;
    *(r->prev ? &r->prev->next : &p->reqs_head) = r;
    p->reqs_tail = r;
    op->requests++;
    return r;
}

void hx_verbs_forget(hx_vreq_t *r)
{
    hx_vpeer_t *p = r->peer;
    hx_verbs_t *v = p->v;
    *(r->prev ? &r->prev->next : &p->reqs_head) = r->next;
    *(r->next ? &r->next->prev : &p->reqs_tail) = r->prev;
    r->gen++;
    r->op = NULL;
    r->next = v->free_reqs;
    v->free_reqs = r;
    v->nreqs--;
    if (v->hungry)
        hx_verbs_wake(v);
}

static void unlist(hx_vreq_t *r)
{
    r->op->requests--;
    hx_verbs_forget(r);
}

/* A queue pair works in order, so only the oldest can stall. */
static void start_clock(hx_vpeer_t *p)
{
    if (p->reqs_head && !atomic_load(&p->reqs_head->op->progress_ns))
        atomic_store(&p->reqs_head->op->progress_ns, hx_now_ns());
}

static void over(hx_vreq_t *r, hx_done_t *done)
{
    hx_op_t *op = r->op;
    hx_vpeer_t *p = r->peer;
    atomic_fetch_add_explicit(&op->moved, r->nbytes, memory_order_relaxed);
    unlist(r);
    atomic_store(&op->progress_ns, 0);
    start_clock(p);
    hx_done_add(op, done);
}

/* ---- to the device ---- */

typedef struct {
    hx_verbs_wr_t wrs[HX_VERBS_WRS + 1];
    hx_verbs_sge_t sges[HX_VERBS_WRS + 1][HX_VERBS_SGES];
    size_t n;
} hx_vlist_t;

/* One row behind the last: as a part of its work request, if it goes on where that ends; else as one of its own, or several. False:
 * there is no room for it. */
static bool add_row(hx_vpeer_t *p, hx_vlist_t *list, const hx_vreq_t *r, hx_part_t *part, uint64_t here, uint64_t there,
                    uint64_t nbytes)
{
    const hx_verbs_info_t *info = &p->v->info;
    bool read = r->op->kind == HX_READ;
    uint32_t most = read ? info->max_sge_read : info->max_sge;
    most = most < HX_VERBS_SGES ? most : HX_VERBS_SGES;
    uint32_t lkey = part->local->lkey;
    uint64_t step = info->max_message < 1u << 30 ? info->max_message : 1u << 30;
    while (nbytes) {
        hx_verbs_wr_t *last = list->n ? &list->wrs[list->n - 1] : NULL;
        hx_verbs_sge_t *sges = last ? list->sges[list->n - 1] : NULL;
        uint64_t size = 0, k = nbytes < step ? nbytes : step;
        for (uint32_t i = 0; last && i < last->nsge; i++)
            size += sges[i].nbytes;
        if (last && last->remote + size == there && size + k <= step) {
            hx_verbs_sge_t *tail = &sges[last->nsge - 1];
            if (tail->addr + tail->nbytes == here) {
                tail->nbytes += (uint32_t)k;
            } else if (last->nsge < most) {
                sges[last->nsge++] = (hx_verbs_sge_t){here, (uint32_t)k, lkey};
            } else {
                last = NULL;
            }
        } else {
            last = NULL;
        }
        if (!last) {
            if (list->n == HX_VERBS_WRS)
                return false;
            sges = list->sges[list->n];
            sges[0] = (hx_verbs_sge_t){here, (uint32_t)k, lkey};
            list->wrs[list->n++] = (hx_verbs_wr_t){.id = (uint64_t)r->gen << 32 | r->index,
                                                   .remote = there,
                                                   .rkey = (uint32_t)part->remote->direct,
                                                   .nsge = 1,
                                                   .sge = sges,
                                                   .read = read};
        }
        here += k;
        there += k;
        nbytes -= k;
    }
    return true;
}

/* The next rows of one region, each with the last check: is its memory still the peer's to be touched (contracts 3, 9, 10)? The
 * request is listed by now, so that a revocation sees it, or is seen here. */
static hx_status_t describe(hx_vpeer_t *p, hx_vreq_t *r, hx_vlist_t *list)
{
    hx_op_t *op = r->op;
    r->batch = hx_op_claim(op, HX_VERBS_CHUNK);
    size_t at = hx_op_part_of(op, r->batch.first);
    hx_part_t *part = &op->parts[at];
    if (part->end < r->batch.last) { /* one region in one request */
        op->cursor = r->batch.last = part->end;
        op->cursor_off = r->batch.last_end = 0;
    }
    list->n = 0;
    r->nbytes = 0;
    for (size_t i = r->batch.first; i < r->batch.last; i++) {
        uint64_t from, to;
        hx_op_row(op, &r->batch, i, &from, &to);
        const hx_desc_t *row = &op->descs[i];
        if (from < to && hx_revoked_hits(&op->ep->revoked, part->remote->id, row->remote_off + from,
                                         row->remote_off + to, op->epoch))
            return HX_ERR_REMOTE_ACCESS;
        size_t before = list->n;
        if (from < to && !add_row(p, list, r, part, hx_verbs_base(part->local->direct) + row->local_off + from,
                                  hx_verbs_base(part->remote->direct) + row->remote_off + from, to - from)) {
            /* The rest is another request's. A row begins a work request at most, so it is not cut. */
            list->n = before;
            op->cursor = r->batch.last = i;
            op->cursor_off = from;
            r->batch.last_end = 0;
            break;
        }
        r->nbytes += to - from;
    }
    return atomic_load(&part->remote->dead) ? HX_ERR_REMOTE_ACCESS : hx_op_verdict(op);
}

static void finish_list(hx_vpeer_t *p, const hx_vreq_t *r, hx_vlist_t *list)
{
    uint64_t last = hx_verbs_last_id(r);
    if (r->op->kind == HX_READ) {
        list->wrs[list->n - 1].signalled = true;
        list->wrs[list->n - 1].id = last;
        return;
    }
    hx_verbs_sge_t *sges = list->sges[list->n];
    hx_verbs_wr_t *only = &list->wrs[0];
    const hx_region_t *local = r->op->parts[hx_op_part_of(r->op, r->batch.first)].local;
    only->inlined = list->n == 1 && only->nsge == 1 && only->sge->nbytes <= p->inline_max;
    if (only->inlined) /* by its address: the CPU reads it */
        list->sges[0][0].addr += (uintptr_t)local->base - hx_verbs_base(local->direct);
    sges[0] = (hx_verbs_sge_t){0, 8, p->v->sink_lkey};
    list->wrs[list->n++] = (hx_verbs_wr_t){
        .id = last, .remote = 0, .rkey = p->theirs.flush_rkey, .nsge = 1, .sge = sges, .read = true, .signalled = true};
}

/* False: the queue pair has failed. */
static bool post(hx_vpeer_t *p, hx_op_t *op, hx_vreq_t *r)
{
    static _Thread_local hx_vlist_t list;
    hx_status_t status = describe(p, r, &list);
    if (status != HX_OK || !list.n) { /* nothing of it is with the device */
        if (status != HX_OK)
            hx_op_fail(op, status, 0, 0, NULL);
        unlist(r);
        return true;
    }
    finish_list(p, r, &list);
    r->nwr = (uint32_t)list.n;
    size_t posted;
    int error = p->v->lib->post(p->qp, list.wrs, list.n, &posted);
    p->used += r->nwr;
    start_clock(p);
    if (!error)
        return true;
    char text[128];
    snprintf(text, sizeof text, "a work request was refused: %.80s", strerror(error));
    hx_verbs_fail(p, text);
    return false;
}

/* Its memory is judged by whether the device knows it, whatever else becomes of the region. */
static bool ready(hx_op_t *op, bool *waits_p)
{
    *waits_p = false;
    for (size_t i = 0; i < op->nparts; i++) {
        const hx_region_t *local = op->parts[i].local;
        uint32_t state = atomic_load(&local->state), adoption = atomic_load(&local->adoption);
        bool coming = state == HX_REGION_PENDING || adoption == HX_ADOPT_PENDING;
        *waits_p |= coming;
        if (state == HX_REGION_FAILED)
            hx_op_fail(op, HX_ERR_REGION_CLOSED, 0, 0, NULL);
        else if (!coming && adoption != HX_ADOPT_HELD)
            hx_op_fail(op, HX_ERR_NO_PATH, 0, 0,
                       local->obstacle ? local->obstacle : "the RDMA device has forgotten it");
        else if (!coming && op->kind == HX_READ && !local->lwrite)
            hx_op_fail(op, HX_ERR_NO_PATH, 0, 0, "the memory cannot be written");
        if (atomic_load(&op->parts[i].remote->dead))
            hx_op_fail(op, HX_ERR_REMOTE_ACCESS, 0, 0, NULL);
    }
    if (!op->prepared && !*waits_p) {
        hx_status_t status = hx_op_check_overlap(op);
        if (status != HX_OK)
            hx_op_fail(op, status, 0, 0, NULL);
        op->prepared = true;
        atomic_store(&op->stage, HX_STAGE_ACTIVE);
    }
    return !*waits_p && hx_op_verdict(op) == HX_OK;
}

void hx_verbs_pump(hx_vpeer_t *p, bool small, hx_done_t *done)
{
    const hx_op_t *turned = NULL;
    while (p->usable && p->runq.head && p->runq.head != turned && p->used + HX_VERBS_WRS < p->depth) {
        if (small && !p->runq.head->prepared && p->runq.head->ndescs > HX_VERBS_WRS) {
            hx_verbs_wake(p->v); /* its rows are sorted and checked there */
            return;
        }
        hx_op_t *op = hx_opq_pop(&p->runq);
        bool waits, more = true;
        op->queued = false;
        if (ready(op, &waits)) {
            hx_vreq_t *r = op->cursor < op->ndescs ? new_req(p, op) : NULL;
            if (r)
                post(p, op, r);
            else
                waits = p->v->hungry = op->cursor < op->ndescs; /* none is left */
            more = op->cursor < op->ndescs;
        } else {
            more = waits;
        }
        if (more && hx_op_verdict(op) == HX_OK) {
            op->queued = true;
            hx_opq_push(&p->runq, op);                     /* behind the others: each has its turn for a request */
            turned = !waits ? NULL : turned ? turned : op; /* one that is in the queue, or its turn never comes again */
        } else {
            hx_done_add(op, done);
        }
    }
}

/* ---- back from it ---- */

static void complete(hx_vpeer_t *p, const hx_verbs_wc_t *wc, hx_done_t *done)
{
    hx_verbs_t *v = p->v;
    uint32_t index = (uint32_t)wc->id & ~HX_VERBS_LAST;
    hx_vreq_t *r = index < HX_VERBS_REQUESTS ? &v->reqs[index] : NULL;
    bool known = r && r->op && r->gen == (uint32_t)(wc->id >> 32) && r->peer == p;
    if (!wc->status) {
        if (known) {
            p->used -= r->nwr;
            over(r, done);
        }
        return;
    }
    int meaning = v->lib->meaning(wc->status);
    char text[128];
    snprintf(text, sizeof text, "the device reported: %.90s", v->lib->name(wc->status));
    hx_verbs_fail(p, text);
    if (known)
        r->returned |= (wc->id & HX_VERBS_LAST) != 0;
    if (known && meaning != HX_VERBS_FLUSHED) /* else it was behind one that failed, or is taken back */
        hx_op_fail(r->op, meaning == HX_VERBS_ACCESS ? HX_ERR_REMOTE_ACCESS : HX_ERR_CONNECTION, 0, wc->status, text);
}

static void collect(hx_vpeer_t *p, hx_done_t *done)
{
    hx_verbs_wc_t list[32];
    for (int n; p->qp && (n = p->v->lib->poll(p->qp, list, 32)) != 0;) {
        if (n < 0) {
            hx_verbs_fail(p, "its completions cannot be read");
            break;
        }
        for (int i = 0; i < n; i++)
            complete(p, &list[i], done);
    }
}

bool hx_verbs_drain(hx_verbs_t *v, bool small, hx_done_t *done)
{
    bool any = false;
    void *owner;
    int got = 0;
    for (int budget = small ? 16 : 256; budget-- && !v->gone && (got = v->lib->event(v->device, &owner)) > 0;) {
        hx_vpeer_t *p = owner;
        any = true;
        collect(p, done);
        hx_verbs_pump(p, small, done);
        if (p->failed)
            hx_verbs_wake(v);
        if (!v->nreqs)
            break; /* nothing is with the device: a look for another event would find none, or one about nothing */
    }
    if (got < 0)
        hx_verbs_gone(v);
    return any;
}

/* ---- posts ---- */

bool hx_verbs_take_posts(hx_verbs_t *v)
{
    pthread_mutex_lock(&v->inbox_mu);
    hx_opq_t posts = v->inbox;
    v->inbox = (hx_opq_t){NULL, NULL};
    pthread_mutex_unlock(&v->inbox_mu);
    bool any = posts.head != NULL;
    for (hx_op_t *op; (op = hx_opq_pop(&posts));)
        hx_opq_push(&op->ep->verbs->runq, op);
    return any;
}

static bool take_out(hx_done_t *done, const hx_op_t *op)
{
    for (hx_op_t **at = &done->head; *at; at = &(*at)->next)
        if (*at == op) {
            *at = op->next;
            return true;
        }
    return false;
}

/* Whoever has it gives it back in a few microseconds, nearly always; to wake the thread instead costs more. */
static bool take_soon(hx_verbs_t *v)
{
    for (int i = 0; i < 200; i++) {
        if (pthread_mutex_trylock(&v->mu) == 0)
            return true;
        hx_pause();
    }
    return false;
}

static bool submit(hx_op_t *op, bool look)
{
    hx_vpeer_t *p = op->ep->verbs;
    hx_verbs_t *v = p->v;
    hx_done_t done = {NULL};
    bool wake = true, ended = false;
    op->queued = true;
    if (take_soon(v)) {
        hx_opq_push(&p->runq, op);
        hx_verbs_pump(p, true, &done);
        if (look && !op->queued && op->requests)
            collect(p, &done);
        wake = p->runq.head != NULL || p->failed;
        pthread_mutex_unlock(&v->mu);
        ended = look && take_out(&done, op);
        if (ended && hx_op_verdict(op) != HX_OK) { /* it has ended, but not well */
            op->next = done.head;
            done.head = op;
            ended = false;
        }
        hx_done_finish(&done);
    } else {
        pthread_mutex_lock(&v->inbox_mu);
        hx_opq_push(&v->inbox, op);
        pthread_mutex_unlock(&v->inbox_mu);
    }
    if (wake)
        hx_verbs_wake(v);
    return ended;
}

void hx_verbs_submit(hx_op_t *op)
{
    submit(op, false);
}

/* Where both ends are on this machine, and with devices in software, it has ended when the device has been told: then there is
 * nothing to wake for. Elsewhere the look costs a read of memory. */
bool hx_verbs_submit_now(hx_op_t *op)
{
    return submit(op, true);
}
