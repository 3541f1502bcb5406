/* SPDX-License-Identifier: Apache-2.0 */
/* From an operation's rows to a post of the library's, on a peer's poster. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hixl_core.h"

#define FULL_MIN_NS 100000ull  /* until a post that found the library's queues full is tried again */
#define FULL_MAX_NS 5000000ull /* the library logs each refusal */
#define CHUNK_ROWS 128         /* the library starts as many at a time, the other engine flavour twice as many */
#define POLL_NS 50000ull       /* a poster that has more to post looks so often whether something has ended */
#define HX_POST_AGAIN HX_AGAIN /* of permit(): a revocation is on its way, what it says is not known yet */

static bool on_device(const hx_op_t *op, size_t part, bool local)
{
    return local ? op->parts[part].local->kind == HX_KIND_DEVICE : op->parts[part].remote->kind == HX_KIND_DEVICE;
}

bool hx_hixl_cut(hx_op_t *op, hx_hreq_t *r)
{
    r->batch = hx_op_claim(op, HX_HIXL_REQUEST_BYTES);
    size_t first = hx_op_part_of(op, r->batch.first);
    for (size_t part = first; part < op->nparts && op->parts[part].end < r->batch.last; part++) {
        if (on_device(op, part + 1, true) == on_device(op, first, true) &&
            on_device(op, part + 1, false) == on_device(op, first, false))
            continue;
        op->cursor = r->batch.last = op->parts[part].end; /* one kind of memory at each end in one call */
        op->cursor_off = r->batch.last_end = 0;
        break;
    }
    r->nbytes = 0;
    for (size_t i = r->batch.first; i < r->batch.last; i++) {
        uint64_t from, to;
        hx_op_row(op, &r->batch, i, &from, &to);
        r->nbytes += to - from;
    }
    return r->nbytes > 0;
}

/* The rows in the library's form, and the last check of each: is its memory still the peer's to be written (contracts 3, 9, 10)?
 * The request is listed by now, so that a revocation sees it, or is seen here. */
static hx_status_t describe(hx_op_t *op, const hx_hreq_t *r, hx_hdescs_t *d)
{
    const hx_batch_t *b = &r->batch;
    size_t part = hx_op_part_of(op, b->first);
    d->n = 0;
    if (d->cap < b->last - b->first) {
        free(d->list);
        d->cap = b->last - b->first;
        d->list = malloc(d->cap * sizeof *d->list);
        if (!d->list) {
            d->cap = 0;
            return HX_ERR_NO_MEMORY;
        }
    }
    for (size_t i = b->first; i < b->last; i++) {
        while (op->parts[part].end <= i)
            part++;
        const hx_desc_t *row = &op->descs[i];
        hx_rregion_t *remote = op->parts[part].remote;
        uint64_t from, to;
        hx_op_row(op, b, i, &from, &to);
        if (from == to)
            continue; /* the library refuses rows without bytes */
        if (hx_revoked_hits(&op->ep->revoked, remote->id, row->remote_off + from, row->remote_off + to, op->epoch))
            return HX_ERR_REMOTE_ACCESS;
        d->list[d->n++] = (hx_hixl_desc_t){
            .local = (uintptr_t)op->parts[part].local->base + row->local_off + from,
            .remote = remote->direct + row->remote_off + from,
            .nbytes = to - from,
        };
    }
    for (part = hx_op_part_of(op, b->first); part < op->nparts; part++) {
        /* Last: what is known of a region is forgotten after this is set. */
        if (atomic_load(&op->parts[part].remote->dead))
            return HX_ERR_REMOTE_ACCESS;
        if (op->parts[part].end >= b->last)
            break;
    }
    return HX_OK;
}

/* On one host the owner can see a poster that was stopped between the last check and the library's call: what the call
 * touches stands in the slots of the page that both map (page.c), from before the check until the call has returned. On two
 * hosts there is no such page (docs/contracts.md, assumptions). */
static void publish(hx_op_t *op, const hx_batch_t *b)
{
    hx_page_t *page = op->ep->mine;
    size_t first = hx_op_part_of(op, b->first), last = hx_op_part_of(op, b->last - 1);
    if (last - first >= HX_LIBRARY_SLOTS) {
        hx_page_publish(page, HX_FIRST_LIBRARY_SLOT, HX_ANY_REGION, 0, UINT64_MAX);
        return;
    }
    for (size_t part = first; part <= last; part++) {
        size_t from = part == first ? b->first : op->parts[part - 1].end;
        size_t to = part == last ? b->last : op->parts[part].end;
        uint64_t lo = UINT64_MAX, hi = 0;
        for (size_t i = from; i < to; i++) {
            const hx_desc_t *row = &op->descs[i];
            lo = row->remote_off < lo ? row->remote_off : lo;
            hi = row->remote_off + row->nbytes > hi ? row->remote_off + row->nbytes : hi;
        }
        hx_page_publish(page, HX_FIRST_LIBRARY_SLOT + (unsigned)(part - first), op->parts[part].remote->id, lo, hi);
    }
}

static void unpublish(const hx_op_t *op)
{
    for (unsigned i = 0; op->ep->mine && i < HX_LIBRARY_SLOTS; i++)
        hx_page_clear(op->ep->mine, HX_FIRST_LIBRARY_SLOT + i);
}

static hx_status_t permit(hx_op_t *op, const hx_hreq_t *r, hx_hdescs_t *descs)
{
    hx_endpoint_t *ep = op->ep;
    if (ep->mine) {
        publish(op, &r->batch);
        if (hx_page_revoke_seq(ep->mine) != atomic_load(&ep->revoked.applied))
            return HX_POST_AGAIN;
    }
    hx_status_t status = describe(op, r, descs);
    return status == HX_OK ? hx_op_verdict(op) : status;
}

/* A post that is refused as failed may be refused for an earlier request that has failed, and that nobody has asked about
 * yet. Under mu. */
static void hear_of_earlier(hx_hpeer_t *p, hx_hdone_t *done)
{
    bool more = true;
    p->busy = true;
    p->h->posting++;
    while (p->h->bulk || p->polling)
        pthread_cond_wait(&p->h->gate, &p->h->mu);
    while (more && !p->latched)
        more = hx_hixl_poll_own(p, 4, done);
    p->busy = false;
    p->h->posting--;
    pthread_cond_broadcast(&p->h->gate);
}

/* No room in the library: for this peer, or for one more peer. While one waits for that, peers that have requests there post
 * no more of them until theirs have ended. Under mu. */
static void no_room(hx_hpeer_t *p, hx_op_t *op, uint64_t since)
{
    hx_hixl_t *h = p->h;
    uint64_t now = hx_now_ns();
    if (!p->hungry && !p->outstanding)
        h->hungry++;
    p->hungry = p->hungry || !p->outstanding;
    p->full_ns = p->full_ns ? p->full_ns * 2 : FULL_MIN_NS;
    p->full_ns = p->full_ns < FULL_MAX_NS ? p->full_ns : FULL_MAX_NS;
    p->not_before_ns = now + p->full_ns;
    /* Its clock runs only while nothing at all comes to an end. */
    since = since ? since : now;
    atomic_store(&op->progress_ns, since > h->last_done_ns ? since : h->last_done_ns);
}

void hx_hixl_has_room(hx_hpeer_t *p)
{
    if (p->hungry)
        p->h->hungry--;
    p->hungry = false;
    p->full_ns = p->way_ns = 0;
}

/* The library would not take it. Under mu. With some of its answers it is certain that nothing has been started; with all
 * others, a part of the rows may be on its way, and only Disconnect ends that. */
static void refused(hx_hpeer_t *p, hx_hreq_t *r, uint32_t code, const char *detail, hx_hdone_t *done)
{
    hx_op_t *op = r->op;
    uint64_t since = atomic_load(&op->progress_ns);
    bool full = code == HX_HIXL_RESOURCE_EXHAUSTED, unlinked = code == HX_HIXL_NOT_CONNECTED;
    /* Rows are checked before the first of them is started; but a lower layer answers the same number, for a later chunk. Of
     * a raw peer, it can be memory that it registered after we connected. */
    bool unknown = code == HX_HIXL_PARAM_INVALID && r->batch.last - r->batch.first <= CHUNK_ROWS;
    if (!full && !unlinked && !unknown) {
        if (code == HX_HIXL_FAILED)
            hear_of_earlier(p, done);
        hx_hixl_request_failed(p, r, code, detail);
        return;
    }
    hx_hixl_out_of_library(p, r);
    bool alive = hx_op_verdict(op) == HX_OK;
    bool retry = (unlinked || (unknown && op->ep->raw)) && ++r->tries < HX_HIXL_TRIES;
    if (alive && full)
        no_room(p, op, since);
    else if (alive && retry)
        p->recall = true;
    if (alive && (full || retry)) {
        hx_hixl_post_again(p, r);
        return;
    }
    hx_hixl_blame(op, code, detail);
    hx_hixl_free_request(p->h, r);
    hx_hixl_maybe_done(op, done);
}

void hx_hixl_post(hx_hpeer_t *p, hx_hreq_t *r, hx_hdescs_t *descs)
{
    hx_hixl_t *h = p->h;
    hx_op_t *op = r->op;
    hx_hdone_t done = {NULL, NULL};
    char detail[HX_TEXT_MAX] = "";
    uint32_t code = HX_HIXL_SUCCESS;
    void *handle = NULL;
    hx_hixl_into_library(p, r);
    p->current = op;
    hx_hixl_enter(p);
    hx_status_t status = permit(op, r, descs);
    if (status == HX_OK) {
        code = h->lib->post(h->object, p->name, op->kind == HX_WRITE ? HX_HIXL_WRITE : HX_HIXL_READ, descs->list,
                            descs->n, (uint64_t)r->gen << 32 | r->index, &handle);
        if (code != HX_HIXL_SUCCESS)
            hx_hixl_recent_error(h, detail);
    }
    unpublish(op);
    hx_hixl_leave(p);
    p->current = NULL;
    if (status == HX_POST_AGAIN) {
        hx_hixl_out_of_library(p, r);
        hx_hixl_post_again(p, r);
        p->not_before_ns = hx_now_ns() + FULL_MIN_NS; /* the frame that tells follows; so does a kick */
    } else if (status != HX_OK) {
        hx_hixl_out_of_library(p, r);
        hx_hixl_free_request(h, r);
        hx_op_fail(op, status, 0, 0, NULL);
        hx_hixl_maybe_done(op, &done);
    } else if (code == HX_HIXL_SUCCESS) {
        r->handle = handle;
        r->posted = true;
        h->last_post_ns = hx_now_ns();
        hx_hixl_has_room(p);
        if (p->with_library.head == r) /* however long it waited for room, its time begins now */
            atomic_store(&op->progress_ns, hx_now_ns());
        else if (p->with_library.head->op != op)
            atomic_store(&op->progress_ns, 0);
    } else {
        refused(p, r, code, detail, &done);
    }
    if (hx_op_verdict(op) != HX_OK)
        hx_hixl_drop_dead(p, &done); /* while it was looked at here, nobody else ended it */
    pthread_mutex_unlock(&h->mu);
    hx_hixl_finish(&done);
    pthread_mutex_lock(&h->mu);
}

void hx_hixl_poll_after_post(hx_hpeer_t *p, bool more)
{
    hx_hixl_t *h = p->h;
    uint64_t now = hx_now_ns(), until = more ? 0 : now + h->busy_poll_ns;
    uint32_t seen = hx_bell_read(&p->bell);
    if (more && now - p->polled_ns < POLL_NS)
        return;
    do {
        hx_hdone_t done = {NULL, NULL};
        if (p->recall || h->bulk || p->polling)
            break; /* the poller is at it */
        p->busy = true;
        h->posting++;
        hx_hixl_poll_own(p, 4, &done);
        p->busy = false;
        h->posting--;
        pthread_cond_broadcast(&h->gate);
        pthread_mutex_unlock(&h->mu);
        hx_hixl_finish(&done);
        pthread_mutex_lock(&h->mu);
        p->polled_ns = hx_now_ns();
    } while (p->outstanding && hx_bell_read(&p->bell) == seen && p->polled_ns < until);
    if (p->outstanding)
        hx_bell_ring(&h->poll_bell, 1);
}

/* ---- notes to a raw peer: HIXL's own notifications ---- */

#define NOTE_NS 2000000ull /* until a note that found the receiver's queue full is tried again */

void hx_hixl_send_note(hx_hpeer_t *p)
{
    hx_hixl_t *h = p->h;
    hx_op_t *op = hx_opq_pop(&p->notes);
    hx_note_t *note = op->note;
    hx_status_t status = hx_op_verdict(op);
    op->note = NULL;
    if (status == HX_OK) {
        char detail[HX_TEXT_MAX] = "";
        p->noting = op;
        hx_hixl_enter(p);
        uint32_t code = h->lib->notify(h->object, p->name, note->data, note->topic_len, note->data + note->topic_len,
                                       note->len, h->timeout_ms);
        if (code != HX_HIXL_SUCCESS)
            hx_hixl_recent_error(h, detail);
        hx_hixl_leave(p);
        bool gone = p->noting != op; /* it was told to end, and has */
        uint64_t now = hx_now_ns();
        bool full = code == HX_HIXL_RESOURCE_EXHAUSTED;
        p->noting = NULL;
        p->notes_full_ns = !full ? 0 : p->notes_full_ns ? p->notes_full_ns : now;
        /* A dead link says so for ever; and a late acknowledgement would be taken for the next note's. */
        p->recall |= !full && code != HX_HIXL_SUCCESS && code != HX_HIXL_PARAM_INVALID;
        if (!gone && full && now < p->notes_full_ns + h->engine->config.stall_timeout_ns &&
            hx_op_verdict(op) == HX_OK) {
            op->note = note;
            op->next = p->notes.head; /* the receiver's queue is full: back-pressure, to its notes only */
            p->notes.head = op;
            p->notes.tail = p->notes.tail ? p->notes.tail : op;
            p->note_due_ns = now + NOTE_NS;
            return;
        }
        if (gone) {
            op = NULL;
        } else if (full) {
            p->notes_full_ns = 0;
            hx_op_fail(op, HX_ERR_TIMEOUT, 0, 0, NULL);
        } else if (code != HX_HIXL_SUCCESS) {
            hx_hixl_blame(op, code, detail);
        }
        status = full ? HX_ERR_TIMEOUT : code == HX_HIXL_SUCCESS ? HX_OK : HX_ERR_PROVIDER;
    }
    pthread_mutex_unlock(&h->mu);
    free(note);
    if (op)
        hx_op_complete(op, status);
    pthread_mutex_lock(&h->mu);
}
