/* SPDX-License-Identifier: Apache-2.0 */
/* Operations: from a post to its one completion.
 *
 * free -> queued -> active (or held) -> [note] -> done -> free. The provider calls hx_op_finish when it has let go of
 * both buffers; an operation with a note then waits for the note's acknowledgement; hx_op_complete publishes the
 * record. Where a provider cannot let go within cancel_grace, a first record (quiesced = 0) tells the caller and the
 * ordinary one follows later. */
#include <stdlib.h>
#include <string.h>

#include "provider.h"

#define HEAP_LIMIT (512ull << 20) /* bytes of descriptors in flight per engine; one operation may pass it alone */

hx_status_t hx_op_pool_init(hx_engine_t *engine)
{
    uint32_t n = engine->config.queue_depth;
    if (!hx_stack_init(&engine->free_ops, n) || !hx_ring_init(&engine->submitted, n) ||
        !hx_ring_init(&engine->completed, n))
        return HX_ERR_NO_MEMORY;
    engine->ops = calloc(n, sizeof *engine->ops);
    if (!engine->ops)
        return HX_ERR_NO_MEMORY;
    for (uint32_t i = n; i-- > 0;) {
        engine->ops[i].index = i;
        atomic_store(&engine->ops[i].gen, 1);
        hx_stack_push(&engine->free_ops, i);
    }
    return HX_OK;
}

void hx_op_pool_free(hx_engine_t *engine)
{
    hx_stack_free(&engine->free_ops);
    hx_ring_free(&engine->submitted);
    hx_ring_free(&engine->completed);
    free(engine->ops);
}

/* From here a late cancel or early report of this life does nothing. Never 0: that is what an unused cancel word says. */
static void next_life(hx_op_t *op)
{
    if (atomic_fetch_add(&op->gen, 1) == UINT32_MAX)
        atomic_store(&op->gen, 1);
}

static uint64_t report_word(uint32_t gen, hx_report_t report)
{
    return (uint64_t)gen << 2 | report;
}

hx_status_t hx_op_verdict(const hx_op_t *op)
{
    uint64_t cancel = atomic_load(&op->cancel);
    if (cancel >> 8 == atomic_load(&op->gen))
        return (hx_status_t)(cancel & 0xff);
    if (atomic_load(&op->ep->state) == HX_EP_LOST)
        return atomic_load(&op->ep->lost_status);
    if (atomic_load(&op->ep->closing))
        return HX_ERR_ABORTED;
    return atomic_load(&op->failed);
}

void hx_op_cancel_as(hx_op_t *op, uint32_t gen, hx_status_t status)
{
    uint64_t old = atomic_load(&op->cancel);
    do {
        if (atomic_load(&op->gen) != gen || old >> 8 >= gen)
            return;
        atomic_store(&op->cancel_ns, hx_now_ns());
    } while (!atomic_compare_exchange_weak(&op->cancel, &old, (uint64_t)gen << 8 | (uint32_t)status));
}

void hx_op_fail(hx_op_t *op, hx_status_t status, int sys_errno, uint32_t code, const char *detail)
{
    uint32_t ok = HX_OK;
    if (!atomic_compare_exchange_strong(&op->failed, &ok, status))
        return;
    op->sys_errno = sys_errno;
    atomic_store(&op->code, code);
    if (detail && detail[0])
        atomic_store(&op->detail, strndup(detail, HX_TEXT_MAX));
}

void hx_cancel(hx_engine_t *engine, uint64_t handle)
{
    uint32_t index = (uint32_t)handle;
    if (hx_in_child(engine))
        return;
    if (index >= engine->config.queue_depth)
        return;
    hx_op_cancel_as(&engine->ops[index], (uint32_t)(handle >> 32), HX_ERR_CANCELLED);
    hx_sched_kick(engine);
    hx_control_arm_tick(engine);
    hx_control_wake(engine);
}

static void let_go(hx_op_t *op, size_t nparts)
{
    for (size_t i = 0; i < nparts; i++) {
        hx_region_release(op->parts[i].local);
        hx_rregion_release(op->parts[i].remote);
    }
    if (op->parts != &op->one_part)
        free(op->parts);
    if (op->descs != &op->one_desc)
        free(op->descs);
    op->parts = NULL;
    op->descs = NULL;
    op->nparts = op->ndescs = 0;
    atomic_fetch_sub(&op->ep->engine->heap_bytes, op->heap_bytes);
    op->heap_bytes = 0;
}

void hx_op_release(hx_op_t *op)
{
    hx_engine_t *engine = op->ep->engine;
    hx_endpoint_t *ep = op->ep;
    free(atomic_exchange(&op->detail, NULL));
    op->ep = NULL;
    atomic_store(&op->stage, HX_STAGE_FREE);
    next_life(op);
    hx_stack_push(&engine->free_ops, op->index);
    hx_endpoint_unref(ep);
}

static void count_out(hx_op_t *op)
{
    hx_engine_t *engine = op->ep->engine;
    atomic_fetch_sub(&op->ep->inflight, 1);
    atomic_fetch_sub(&engine->live_ops, 1);
    atomic_fetch_add(&engine->n_completed, 1);
    atomic_fetch_add(&engine->n_bytes, atomic_load(&op->moved));
}

/* False: its number is in the ring already, where the consumer will read the final record. */
static bool conclude(hx_op_t *op, hx_status_t status)
{
    uint32_t gen = atomic_load(&op->gen);
    op->status = status;
    atomic_store(&op->stage, HX_STAGE_DONE);
    count_out(op);
    uint64_t before = atomic_exchange(&op->report, report_word(gen, HX_REPORT_FINAL));
    return (before & 3) != HX_REPORT_EARLY;
}

void hx_op_complete(hx_op_t *op, hx_status_t status)
{
    hx_engine_t *engine = op->ep->engine;
    if (!conclude(op, status))
        return;
    hx_ring_push(&engine->completed, op->index);
    hx_doorbell(engine);
}

/* It has ended well within its post: instead of a record, its poster hears how long it took. */
static bool end_within_post(hx_op_t *op, uint64_t *elapsed_ns_p)
{
    hx_engine_t *engine = op->ep->engine;
    op->done_ns = hx_now_ns();
    *elapsed_ns_p = op->done_ns - op->posted_ns;
    let_go(op, op->nparts);
    if (!conclude(op, HX_OK))
        return false;
    atomic_fetch_add_explicit(&engine->n_inlined, 1, memory_order_relaxed);
    hx_op_release(op);
    return true;
}

void hx_op_report_early(hx_engine_t *engine, hx_op_t *op, uint32_t gen)
{
    uint64_t none = report_word(gen, HX_REPORT_NONE); /* fails when the slot has begun another life */
    if (!atomic_compare_exchange_strong(&op->report, &none, report_word(gen, HX_REPORT_EARLY)))
        return;
    hx_ring_push(&engine->completed, op->index);
    hx_doorbell(engine);
}

void hx_op_finish(hx_op_t *op, hx_status_t status)
{
    hx_note_t *note = op->note;
    op->done_ns = hx_now_ns();
    op->note = NULL;
    let_go(op, op->nparts);
    uint64_t cancel = atomic_load(&op->cancel);
    if (status == HX_OK && (atomic_load(&op->report) & 3) != HX_REPORT_NONE)
        status = (hx_status_t)(cancel & 0xff); /* the caller was told so already */
    if (!note) {
        hx_op_complete(op, status);
        return;
    }
    if (status == HX_OK) {
        note->op = op;
        note->gen = atomic_load(&op->gen);
        atomic_store(&op->stage, HX_STAGE_NOTE);
        if (op->ep->raw) { /* no control link: the library itself carries it */
            op->note = note;
            hx_providers_send_raw(op);
            return;
        }
        if (hx_endpoint_push_note(op->ep, note))
            return;
        status = atomic_load(&op->ep->lost_status);
        free(note);
    } else {
        note->aborted = true;
        if (op->ep->raw || !hx_endpoint_push_note(op->ep, note)) /* HIXL's notifications know no aborted ones */
            free(note);
    }
    hx_op_complete(op, status);
}

size_t hx_op_part_of(const hx_op_t *op, size_t desc)
{
    size_t lo = 0, hi = op->nparts;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (op->parts[mid].end <= desc)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

size_t hx_span_past(const uint64_t *spans, size_t n, uint64_t off)
{
    size_t lo = 0, hi = n;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (spans[2 * mid + 1] <= off)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

bool hx_op_meets(const hx_op_t *op, const hx_batch_t *batch, uint64_t region, const uint64_t *spans, size_t n)
{
    size_t part = hx_op_part_of(op, batch->first);
    for (size_t i = batch->first; i < batch->last; i++) {
        while (op->parts[part].end <= i)
            part++;
        if (op->parts[part].remote->id != region) {
            i = op->parts[part].end - 1; /* the rows of another region */
            continue;
        }
        uint64_t from, to, off = op->descs[i].remote_off;
        hx_op_row(op, batch, i, &from, &to);
        size_t at = from < to ? hx_span_past(spans, n, off + from) : n;
        if (at < n && spans[2 * at] < off + to)
            return true;
    }
    return false;
}

/* ---- those that have ended ---- */

void hx_done_add(hx_op_t *op, hx_done_t *done)
{
    if (op->requests || op->queued)
        return;
    op->next = done->head;
    done->head = op;
}

void hx_done_finish(hx_done_t *done)
{
    while (done->head) {
        hx_op_t *op = done->head;
        done->head = op->next;
        op->next = NULL;
        hx_op_finish(op, hx_op_verdict(op));
    }
}

void hx_opq_sweep(hx_opq_t *q, hx_done_t *done)
{
    hx_opq_t alive = {NULL, NULL};
    for (hx_op_t *op; (op = hx_opq_pop(q));) {
        if (hx_op_verdict(op) == HX_OK) {
            hx_opq_push(&alive, op);
            continue;
        }
        op->queued = false;
        hx_done_add(op, done);
    }
    *q = alive;
}

/* ---- overlap: two rows of one call must not write the same bytes ---- */

typedef struct {
    uintptr_t region;
    uint64_t off, end;
    size_t index;
} hx_extent_t;

static int extent_order(const void *pa, const void *pb)
{
    const hx_extent_t *a = pa, *b = pb;
    if (a->region != b->region)
        return a->region < b->region ? -1 : 1;
    if (a->off != b->off)
        return a->off < b->off ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

hx_status_t hx_op_check_overlap(hx_op_t *op)
{
    hx_status_t status = HX_OK;
    if (op->ndescs < 2)
        return HX_OK;
    hx_extent_t *list = malloc(op->ndescs * sizeof *list);
    if (!list)
        return HX_ERR_NO_MEMORY;
    bool sorted = true;
    size_t n = 0;
    for (size_t i = 0, part = 0; i < op->ndescs; i++) {
        while (op->parts[part].end <= i)
            part++;
        const hx_desc_t *d = &op->descs[i];
        if (!d->nbytes)
            continue;
        bool writes = op->kind == HX_WRITE;
        uintptr_t region = writes ? (uintptr_t)op->parts[part].remote : (uintptr_t)op->parts[part].local;
        uint64_t off = writes ? d->remote_off : d->local_off;
        list[n] = (hx_extent_t){region, off, off + d->nbytes, i};
        if (n && extent_order(&list[n - 1], &list[n]) > 0)
            sorted = false;
        n++;
    }
    if (!sorted)
        qsort(list, n, sizeof *list, extent_order);
    for (size_t i = 1; i < n; i++) {
        if (list[i].region == list[i - 1].region && list[i].off < list[i - 1].end) {
            op->bad_index = list[i].index > list[i - 1].index ? list[i].index : list[i - 1].index;
            status = HX_ERR_OVERLAP;
            break;
        }
    }
    free(list);
    return status;
}

/* ---- posting ---- */

static bool in_bounds(uint64_t off, uint64_t n, uint64_t nbytes)
{
    return off <= nbytes && n <= nbytes - off;
}

static hx_status_t check_segment(const hx_endpoint_t *ep, const hx_post_t *post, const hx_segment_t *seg, size_t base,
                                 uint64_t *index_p)
{
    const hx_region_t *local = seg->local;
    const hx_rregion_t *remote = seg->remote;
    uint32_t need = post->kind == HX_WRITE ? HX_ACCESS_WRITE : HX_ACCESS_READ;
    if (local->engine != ep->engine || local->kind == HX_KIND_LAYOUT)
        return HX_ERR_REGION_CLOSED;
    uint32_t state = atomic_load(&local->state);
    if (state == HX_REGION_FAILED || state == HX_REGION_CLOSING)
        return HX_ERR_REGION_CLOSED;
    /* Serials are per engine: another engine's peer may have the same one. */
    if (remote->engine != ep->engine || remote->ep_serial != ep->serial || atomic_load(&remote->dead) ||
        remote->rkey != seg->rkey || !(remote->access & need))
        return HX_ERR_REMOTE_ACCESS;
    for (size_t i = 0; i < seg->n; i++) {
        uint64_t n = seg->nbytes ? seg->nbytes[i] : seg->each;
        if (!in_bounds(seg->local_off[i], n, local->nbytes) || !in_bounds(seg->remote_off[i], n, remote->nbytes)) {
            *index_p = base + i;
            return HX_ERR_BOUNDS;
        }
    }
    return HX_OK;
}

/* Fills parts and descriptors. On failure nothing is held. */
static hx_status_t load(hx_op_t *op, const hx_post_t *post, size_t ndescs)
{
    hx_engine_t *engine = op->ep->engine;
    op->parts = &op->one_part;
    op->descs = &op->one_desc;
    op->nparts = op->ndescs = 0;
    op->heap_bytes = 0;
    op->nbytes = 0;
    uint64_t heap =
        (post->nsegments > 1 ? post->nsegments * sizeof(hx_part_t) : 0) + (ndescs > 1 ? ndescs * sizeof(hx_desc_t) : 0);
    if (heap) {
        uint64_t in_use = atomic_fetch_add(&engine->heap_bytes, heap);
        op->heap_bytes = heap;
        if (in_use && in_use + heap > HEAP_LIMIT) {
            let_go(op, 0);
            return HX_ERR_QUEUE_FULL;
        }
        if (post->nsegments > 1)
            op->parts = malloc(post->nsegments * sizeof *op->parts);
        if (ndescs > 1)
            op->descs = malloc(ndescs * sizeof *op->descs);
        if (!op->parts || !op->descs) {
            let_go(op, 0);
            return HX_ERR_NO_MEMORY;
        }
    }
    for (size_t s = 0; s < post->nsegments; s++) {
        const hx_segment_t *seg = &post->segments[s];
        if (!hx_region_acquire(seg->local)) {
            let_go(op, op->nparts);
            return HX_ERR_REGION_CLOSED;
        }
        if (!hx_rregion_acquire(seg->remote)) {
            hx_region_release(seg->local);
            let_go(op, op->nparts);
            return HX_ERR_REMOTE_ACCESS;
        }
        bool inside = true;
        for (size_t i = 0; i < seg->n; i++) {
            uint64_t n = seg->nbytes ? seg->nbytes[i] : seg->each;
            hx_desc_t d = {seg->local_off[i], seg->remote_off[i], n};
            inside &= in_bounds(d.local_off, n, seg->local->nbytes) && in_bounds(d.remote_off, n, seg->remote->nbytes);
            op->descs[op->ndescs++] = d;
            op->nbytes += n;
        }
        op->parts[op->nparts++] = (hx_part_t){seg->local, seg->remote, op->ndescs};
        if (!inside) { /* the caller's arrays were changed since they were checked */
            let_go(op, op->nparts);
            return HX_ERR_BOUNDS;
        }
    }
    return HX_OK;
}

static void reset(hx_op_t *op, hx_endpoint_t *ep, const hx_post_t *post)
{
    uint32_t gen = atomic_load(&op->gen);
    op->kind = post->kind;
    op->token = post->token;
    op->ep = ep;
    op->provider = NULL;
    op->note = NULL;
    op->next = NULL;
    op->epoch = post->epoch == HX_EPOCH_NOW ? hx_endpoint_epoch(ep) : post->epoch;
    op->posted_ns = hx_now_ns();
    op->done_ns = 0;
    op->bad_index = UINT64_MAX;
    op->sys_errno = 0;
    op->status = HX_OK;
    op->cursor = 0;
    op->cursor_off = 0;
    op->nretry = op->running = 0;
    op->prepared = op->checked = op->queued = op->blocked = op->again = false;
    op->hold_action = 0;
    op->hold_until_ns = 0;
    op->requests = op->again_requests = 0;
    op->after = post->after;
    atomic_store_explicit(&op->code, 0, memory_order_relaxed);
    atomic_store_explicit(&op->failed, HX_OK, memory_order_relaxed);
    atomic_store_explicit(&op->moved, 0, memory_order_relaxed);
    atomic_store_explicit(&op->progress_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&op->cancel, 0, memory_order_relaxed);
    atomic_store(&op->report, report_word(gen, HX_REPORT_NONE));
    atomic_store(&op->stage, HX_STAGE_QUEUED);
}

/* Gives back an operation that was never submitted. The endpoint's reference is the caller's. */
static void unpost(hx_op_t *op)
{
    hx_engine_t *engine = op->ep->engine;
    free(op->note);
    op->note = NULL;
    op->ep = NULL;
    atomic_store(&op->stage, HX_STAGE_FREE);
    next_life(op);
    hx_stack_push(&engine->free_ops, op->index);
}

static hx_status_t choose_provider(hx_op_t *op)
{
    if (!op->nparts)
        return HX_OK;
    op->provider = hx_provider_choose(op);
    if (!op->provider)
        return HX_ERR_NO_PATH;
    return op->after && !op->provider->orders_after ? HX_ERR_CONFIG : HX_OK;
}

/* True: no record will follow. */
static bool submit(hx_op_t *op, uint64_t *elapsed_ns_p)
{
    if (!op->note && op->provider->submit_now)
        return op->provider->submit_now(op) && end_within_post(op, elapsed_ns_p);
    op->provider->submit(op);
    return false;
}

static hx_status_t post_open(hx_endpoint_t *ep, const hx_post_t *post, uint64_t *handle_p, uint64_t *index_p,
                             bool *done_p)
{
    hx_engine_t *engine = ep->engine;
    size_t ndescs = 0;
    uint64_t elapsed_ns;
    uint32_t index;
    hx_status_t status;

    if (atomic_load(&ep->state) != HX_EP_UP)
        return atomic_load(&ep->state) == HX_EP_LOST ? (hx_status_t)atomic_load(&ep->lost_status) : HX_ERR_PEER_LOST;
    size_t note_max = ep->raw ? HX_RAW_NOTE_MAX : HX_NOTE_MAX, topic_max = ep->raw ? HX_RAW_NOTE_MAX : HX_TOPIC_MAX;
    if (post->has_note && (post->note_len > note_max || post->topic_len > topic_max))
        return HX_ERR_CONFIG;
    if (post->nsegments && post->kind != HX_WRITE && post->kind != HX_READ)
        return HX_ERR_CONFIG;
    for (size_t s = 0; s < post->nsegments; s++) {
        status = check_segment(ep, post, &post->segments[s], ndescs, index_p);
        if (status != HX_OK)
            return status;
        ndescs += post->segments[s].n;
    }
    if (atomic_load(&ep->inflight) >= engine->config.peer_depth || !hx_stack_pop(&engine->free_ops, &index))
        return HX_ERR_QUEUE_FULL;

    hx_op_t *op = &engine->ops[index];
    reset(op, ep, post);
    if (post->has_note) {
        op->note = hx_note_new(post->topic, post->topic_len, post->note, post->note_len);
        if (!op->note) {
            unpost(op);
            return HX_ERR_NO_MEMORY;
        }
        op->note->aborted = post->aborted;
    }
    status = load(op, post, ndescs);
    if (status != HX_OK) {
        unpost(op);
        return status;
    }
    status = choose_provider(op);
    if (status != HX_OK) {
        let_go(op, op->nparts);
        unpost(op);
        return status;
    }

    atomic_fetch_add(&engine->n_posted, 1);
    if (op->provider && !op->note && !engine->config.nfaults && op->provider->try_inline &&
        op->provider->try_inline(op)) {
        atomic_fetch_add_explicit(&engine->n_inlined, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&engine->n_completed, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&engine->n_bytes, op->nbytes, memory_order_relaxed);
        *done_p = true;
        *handle_p = hx_now_ns() - op->posted_ns;
        let_go(op, op->nparts);
        unpost(op);
        return HX_OK;
    }

    hx_endpoint_ref(ep); /* released in hx_op_release */
    atomic_fetch_add(&engine->live_ops, 1);
    atomic_fetch_add(&ep->inflight, 1);
    *done_p = false;
    *handle_p = (uint64_t)atomic_load(&op->gen) << 32 | index;
    hx_control_arm_tick(engine);
    if (!op->provider)
        hx_op_finish(op, HX_OK); /* no bytes: a note, or an empty list */
    else if (!hx_fault_submit(op) && submit(op, &elapsed_ns)) {
        *done_p = true;
        *handle_p = elapsed_ns;
    }
    return HX_OK;
}

hx_status_t hx_post(hx_endpoint_t *ep, const hx_post_t *post, uint64_t *handle_p, uint64_t *index_p, bool *done_p)
{
    hx_engine_t *engine = ep->engine;
    /* hx_engine_stop sets `stopping` and then waits for this count: no post is half done when the threads go. */
    atomic_fetch_add(&engine->posting, 1);
    atomic_fetch_add(&ep->posters, 1); /* and no endpoint is forgotten meanwhile: hx_live_forget_lost */
    hx_status_t status =
        atomic_load(&engine->stopping) ? HX_ERR_CLOSED : post_open(ep, post, handle_p, index_p, done_p);
    atomic_fetch_sub(&ep->posters, 1);
    atomic_fetch_sub(&engine->posting, 1);
    return status;
}
