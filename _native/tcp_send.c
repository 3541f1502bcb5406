/* SPDX-License-Identifier: Apache-2.0 */
/* From operations to messages, and from messages to the socket. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "crc32c.h"
#include "tcp.h"

#define CHUNK (1ull << 20) /* of one message: what others wait for */
#define IOV 256            /* of one call */
#define FLUSH (4u << 20)   /* of one connection, before the others have their turn */

/* ---- requests ---- */

static hx_treq_t *new_req(hx_tcp_t *t, hx_op_t *op)
{
    hx_treq_t *r = t->free_reqs;
    if (!r)
        return NULL;
    t->free_reqs = r->next;
    r->op = op;
    r->conn = NULL; /* nobody finds it before it is listed */
    r->unsent = r->held = r->answered = false;
    r->next = NULL;
    return r;
}

static void free_req(hx_tcp_t *t, hx_treq_t *r)
{
    r->gen++;
    r->op = NULL;
    r->next = t->free_reqs;
    t->free_reqs = r;
}

/* Answers come in the order of the requests of a connection, so only the oldest can stall. */
static void start_clock(hx_tconn_t *c)
{
    if (c->reqs_head && !atomic_load(&c->reqs_head->op->progress_ns))
        atomic_store(&c->reqs_head->op->progress_ns, hx_now_ns());
}

static void list_req(hx_tconn_t *c, hx_treq_t *r)
{
    r->conn = c;
    r->next = NULL;
    r->prev = c->reqs_tail;
    *(c->reqs_tail ? &c->reqs_tail->next : &c->reqs_head) = r;
    c->reqs_tail = r;
    c->unanswered += r->nbytes;
    r->op->requests++;
    start_clock(c);
}

void hx_tcp_answered(hx_treq_t *r, hx_status_t status, hx_done_t *done)
{
    hx_op_t *op = r->op;
    hx_tconn_t *c = r->conn;
    if (r->held) { /* not over before the kernel says so, too */
        r->answered = true;
        r->status = status;
        return;
    }
    *(r->prev ? &r->prev->next : &c->reqs_head) = r->next;
    *(r->next ? &r->next->prev : &c->reqs_tail) = r->prev;
    c->unanswered -= r->nbytes;
    op->requests--;
    if (status == HX_OK)
        atomic_fetch_add_explicit(&op->moved, r->nbytes, memory_order_relaxed);
    else
        hx_op_fail(op, status, status == HX_ERR_CONNECTION ? ECONNRESET : 0, 0, c->why);
    atomic_store(&op->progress_ns, 0);
    free_req(c->peer->t, r);
    start_clock(c);
    hx_done_add(op, done);
}

/* ---- messages ---- */

void hx_tcp_free_out(hx_tout_t *out)
{
    if (out->region)
        hx_region_release(out->region);
    free(out->iov);
    free(out->rows);
    free(out->head);
    free(out);
}

void hx_tcp_queue(hx_tconn_t *c, hx_tout_t *out)
{
    out->next = NULL;
    *(c->out_tail ? &c->out_tail->next : &c->out_head) = out;
    c->out_tail = out;
    for (size_t i = 0; i < out->niov; i++)
        c->unsent += out->iov[i].iov_len;
}

static hx_tout_t *new_out(const hx_tcp_head_t *head, const hx_tcp_row_t *rows, size_t niov)
{
    hx_tout_t *out = hx_alloc(sizeof *out);
    out->head_len = sizeof *head + (rows ? head->nrows * sizeof *rows : 0);
    out->head = hx_alloc(out->head_len);
    memcpy(out->head, head, sizeof *head);
    if (rows)
        memcpy(out->head + sizeof *head, rows, head->nrows * sizeof *rows);
    if (niov)
        out->iov = hx_alloc(niov * sizeof *out->iov);
    out->niov = niov;
    return out;
}

uint32_t hx_tcp_head_crc(const hx_tcp_head_t *head, const hx_tcp_row_t *rows)
{
    hx_tcp_head_t bare = *head;
    bare.head_crc = 0;
    uint32_t crc = hx_crc32c(0, &bare, sizeof bare);
    return head->nrows ? hx_crc32c(crc, rows, head->nrows * sizeof *rows) : crc;
}

uint32_t hx_tcp_payload_crc(const struct iovec *iov, size_t n)
{
    uint32_t crc = 0;
    for (size_t i = 0; i < n; i++)
        crc = hx_crc32c(crc, iov[i].iov_base, iov[i].iov_len);
    return crc;
}

void hx_tcp_say_done(hx_tconn_t *c, const hx_tcp_head_t *ask, uint32_t status)
{
    hx_tcp_head_t head = {
        .magic = HX_TCP_MAGIC, .type = HX_TCP_DONE, .flags = ask->flags, .status = status, .id = ask->id};
    if (head.flags & HX_TCP_CHECKSUM)
        head.head_crc = hx_tcp_head_crc(&head, NULL);
    c->owed++;
    hx_tcp_queue(c, new_out(&head, NULL, 0));
}

void hx_tcp_say_data(hx_tconn_t *c, const hx_tcp_head_t *ask, hx_region_t *region, const hx_tcp_row_t *rows,
                     uint32_t crc)
{
    hx_tcp_head_t head = {.magic = HX_TCP_MAGIC,
                          .type = HX_TCP_DATA,
                          .flags = ask->flags,
                          .id = ask->id,
                          .nbytes = ask->nbytes,
                          .crc = crc};
    if (head.flags & HX_TCP_CHECKSUM)
        head.head_crc = hx_tcp_head_crc(&head, NULL);
    hx_tout_t *out = new_out(&head, NULL, ask->nrows);
    out->niov = 0;
    for (uint32_t i = 0; i < ask->nrows; i++)
        out->niov = hx_tcp_span(out->iov, out->niov, region->base + rows[i].off, rows[i].nbytes);
    out->region = region;
    out->region_id = region->id;
    out->nrows = ask->nrows;
    out->rows = hx_alloc(ask->nrows * sizeof *rows + 1);
    if (ask->nrows)
        memcpy(out->rows, rows, ask->nrows * sizeof *rows);
    c->owed++;
    hx_tcp_queue(c, out);
}

/* Cuts the next rows of one region off the operation, as one message. */
static void cut(hx_tcp_t *t, hx_op_t *op, hx_tconn_t *c, hx_treq_t *r)
{
    hx_tcp_row_t rows[HX_TCP_ROWS_MAX];
    r->batch = hx_op_claim(op, CHUNK);
    size_t part = hx_op_part_of(op, r->batch.first), n = 0;
    if (op->parts[part].end < r->batch.last) { /* one region in one message */
        op->cursor = r->batch.last = op->parts[part].end;
        op->cursor_off = r->batch.last_end = 0;
    }
    const hx_rregion_t *remote = op->parts[part].remote;
    uint8_t *base = op->parts[part].local->base;
    hx_tcp_head_t head = {.magic = HX_TCP_MAGIC,
                          .type = op->kind == HX_WRITE ? HX_TCP_WRITE : HX_TCP_READ,
                          .flags = t->checksum ? HX_TCP_CHECKSUM : 0,
                          .id = (uint64_t)r->gen << 32 | r->index,
                          .region = remote->id,
                          .rkey = remote->rkey,
                          .epoch = op->epoch};
    struct iovec iov[HX_TCP_ROWS_MAX];
    for (size_t i = r->batch.first; i < r->batch.last; i++) {
        uint64_t from, to;
        hx_op_row(op, &r->batch, i, &from, &to);
        if (from == to)
            continue;
        rows[head.nrows++] = (hx_tcp_row_t){op->descs[i].remote_off + from, to - from};
        n = hx_tcp_span(iov, n, base + op->descs[i].local_off + from, to - from);
        head.nbytes += to - from;
    }
    r->nbytes = head.nbytes;
    bool write = op->kind == HX_WRITE;
    if (t->checksum) {
        if (write && head.nbytes > HX_TCP_INLINE) { /* the progress thread, which keeps hold of the operation */
            pthread_mutex_unlock(&t->mu);
            head.crc = hx_tcp_payload_crc(iov, n);
            pthread_mutex_lock(&t->mu);
        } else if (write) {
            head.crc = hx_tcp_payload_crc(iov, n);
        }
        head.head_crc = hx_tcp_head_crc(&head, rows);
    }
    hx_tout_t *out = new_out(&head, rows, write ? n : 0);
    if (write && n)
        memcpy(out->iov, iov, n * sizeof *iov);
    out->req = write ? r : NULL;
    r->unsent = write;
    list_req(c, r);
    hx_tcp_queue(c, out);
}

/* A connection with room, in turn; NULL: none. */
static hx_tconn_t *with_room(hx_tpeer_t *p)
{
    for (unsigned i = 0; i < p->streams && !p->dirty; i++) {
        hx_tconn_t *c = p->conns[(p->turn + i) % p->streams];
        if (c && !c->broken && c->unanswered < HX_TCP_WINDOW && c->unsent < HX_TCP_QUEUE) {
            p->turn = (p->turn + i + 1) % p->streams;
            return c;
        }
    }
    return NULL;
}

static bool revoked(const hx_op_t *op)
{
    for (size_t i = 0; i < op->nparts; i++)
        if (atomic_load(&op->parts[i].remote->dead))
            return true;
    return false; /* the rest is the owner's to say, and it says it for each message */
}

static uint64_t destination(const hx_op_t *op, const hx_desc_t *d)
{
    return op->kind == HX_WRITE ? d->remote_off : d->local_off;
}

/* Rows have no order, and bytes are scattered fastest in that of the memory. By those bytes of the offset that differ at
 * all: qsort() takes a tenth of the time that the rows take on the way. */
static void sort_rows(const hx_op_t *op, hx_desc_t *rows, size_t n)
{
    uint64_t differ = 0;
    bool sorted = true;
    for (size_t i = 1; i < n; i++) {
        differ |= destination(op, &rows[i]) ^ destination(op, &rows[0]);
        sorted &= destination(op, &rows[i - 1]) <= destination(op, &rows[i]);
    }
    hx_desc_t *from = rows, *to = sorted ? NULL : malloc(n * sizeof *to), *spare = to;
    if (!to)
        return; /* which only costs time */
    for (unsigned shift = 0; shift < 64; shift += 8) {
        size_t at[256] = {0}, sum = 0;
        if (!(differ >> shift & 255))
            continue;
        for (size_t i = 0; i < n; i++)
            at[destination(op, &from[i]) >> shift & 255]++;
        for (size_t i = 0; i < 256; i++) {
            size_t count = at[i];
            at[i] = sum;
            sum += count;
        }
        for (size_t i = 0; i < n; i++)
            to[at[destination(op, &from[i]) >> shift & 255]++] = from[i];
        hx_desc_t *was = from;
        from = to;
        to = was;
    }
    if (from != rows)
        memcpy(rows, from, n * sizeof *rows);
    free(spare);
}

static void check_rows(hx_op_t *op)
{
    size_t nbytes = op->ndescs * sizeof *op->descs;
    hx_desc_t *asked = op->ndescs > 1 ? malloc(nbytes) : NULL;
    if (asked) {
        memcpy(asked, op->descs, nbytes);
        for (size_t part = 0, first = 0; part < op->nparts; first = op->parts[part++].end)
            sort_rows(op, op->descs + first, op->parts[part].end - first);
    }
    hx_status_t status = hx_op_check_overlap(op); /* which need not sort any more */
    if (status == HX_ERR_OVERLAP && asked) {
        memcpy(op->descs, asked, nbytes); /* of which row is it, as they were given? */
        status = hx_op_check_overlap(op);
    }
    free(asked);
    if (status != HX_OK)
        hx_op_fail(op, status, 0, 0, NULL);
    op->prepared = true;
    atomic_store(&op->stage, HX_STAGE_ACTIVE);
}

/* Is the operation fit to be cut? False: it waits, or it has failed. */
static bool ready(hx_op_t *op, bool *waits_p)
{
    *waits_p = false;
    for (size_t i = 0; i < op->nparts; i++) {
        uint32_t state = atomic_load(&op->parts[i].local->state);
        *waits_p |= state == HX_REGION_PENDING;
        if (state == HX_REGION_FAILED)
            hx_op_fail(op, HX_ERR_REGION_CLOSED, 0, 0, NULL);
    }
    if (!op->prepared)
        check_rows(op);
    if (revoked(op))
        hx_op_fail(op, HX_ERR_REMOTE_ACCESS, 0, 0, NULL);
    return !*waits_p && hx_op_verdict(op) == HX_OK;
}

void hx_tcp_pump(hx_tpeer_t *p, hx_done_t *done)
{
    const hx_op_t *turned = NULL;
    hx_tconn_t *c;
    while (p->runq.head && p->runq.head != turned && (c = with_room(p))) {
        hx_op_t *op = hx_opq_pop(&p->runq);
        bool waits, more = true;
        op->queued = false;
        op->requests++;                        /* ours: answers to its first messages may come while mu is dropped */
        if (!op->prepared && op->ndescs > 1) { /* sorting: posting threads need not wait for that */
            pthread_mutex_unlock(&p->t->mu);
            check_rows(op);
            pthread_mutex_lock(&p->t->mu);
        }
        if (ready(op, &waits)) {
            hx_treq_t *r = op->cursor < op->ndescs ? new_req(p->t, op) : NULL;
            if (r)
                cut(p->t, op, c, r);
            else
                waits = op->cursor < op->ndescs; /* none is left */
            more = op->cursor < op->ndescs;
        } else {
            more = waits;
        }
        op->requests--;
        if (more && hx_op_verdict(op) == HX_OK) {
            op->queued = true;
            hx_opq_push(&p->runq, op);                     /* behind the others: each has its turn for a chunk */
            turned = !waits ? NULL : turned ? turned : op; /* one that is in the queue, or its turn never comes again */
        } else {
            hx_done_add(op, done);
        }
    }
}

/* What is told to end, and has not begun to be sent, leaves. */
void hx_tcp_drop_unsent(hx_tconn_t *c, hx_done_t *done)
{
    hx_tout_t *before = NULL;
    for (hx_tout_t *out = c->out_head; out;) {
        hx_tout_t *next = out->next;
        hx_treq_t *r = out->req;
        hx_status_t verdict = r ? hx_op_verdict(r->op) : HX_OK;
        if (verdict == HX_OK || out->head_off) {
            before = out;
            out = next;
            continue;
        }
        *(before ? &before->next : &c->out_head) = next;
        if (c->out_tail == out)
            c->out_tail = before;
        for (size_t i = 0; i < out->niov; i++)
            c->unsent -= out->iov[i].iov_len;
        hx_tcp_answered(r, verdict, done); /* not a byte of it was sent */
        hx_tcp_free_out(out);
        out = next;
    }
}

/* ---- the socket ---- */

static size_t gather(hx_tout_t *out, struct iovec *iov, size_t room, size_t *nbytes_p)
{
    size_t n = 0;
    for (; out && n < room; out = out->next) {
        if (out->head_off < out->head_len) {
            iov[n] = (struct iovec){out->head + out->head_off, out->head_len - out->head_off};
            *nbytes_p += iov[n++].iov_len;
        }
        for (size_t i = out->at; i < out->niov && n < room; i++) {
            iov[n] = out->iov[i];
            *nbytes_p += iov[n++].iov_len;
        }
        if (*nbytes_p >= FLUSH)
            break;
    }
    return n;
}

/* What the kernel has taken is not ours any more. */
static void advance(hx_tconn_t *c, size_t sent, bool zc)
{
    hx_tout_t *out;
    while ((out = c->out_head)) {
        size_t n = out->head_len - out->head_off;
        if (zc && sent) {
            out->zc = true;
            out->zc_last = c->zc_next - 1;
        }
        n = n < sent ? n : sent;
        out->head_off += n;
        sent -= n;
        while (out->at < out->niov && (sent || !out->iov[out->at].iov_len)) {
            struct iovec *v = &out->iov[out->at];
            n = v->iov_len < sent ? v->iov_len : sent;
            v->iov_base = (uint8_t *)v->iov_base + n;
            v->iov_len -= n;
            c->unsent -= n;
            sent -= n;
            if (!v->iov_len)
                out->at++;
        }
        if (out->head_off < out->head_len || out->at < out->niov)
            return;
        if (out->req)
            out->req->unsent = false;
        hx_tcp_head_t head;
        memcpy(&head, out->head, sizeof head);
        c->owed -= head.type == HX_TCP_DONE || head.type == HX_TCP_DATA;
        c->out_head = out->next;
        if (!c->out_head)
            c->out_tail = NULL;
        if (out->zc && (int32_t)(out->zc_last - c->zc_low) >= 0)
            hx_tcp_zc_hold(c, out);
        else
            hx_tcp_free_out(out);
    }
}

bool hx_tcp_flush(hx_tconn_t *c, bool inline_only)
{
    hx_tcp_t *t = c->peer->t;
    size_t total = 0;
    while (c->out_head && total < FLUSH) {
        struct iovec iov[IOV];
        size_t want = 0, n = gather(c->out_head, iov, IOV, &want);
        struct msghdr msg = {.msg_iov = iov, .msg_iovlen = n};
        bool zc = !inline_only && hx_tcp_zc_fits(c, want);
        c->sending = true;
        if (!inline_only)
            pthread_mutex_unlock(&t->mu);
        ssize_t sent = sendmsg(c->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT | (zc ? MSG_ZEROCOPY : 0));
        if (zc && sent < 0 && errno != EAGAIN && errno != EINTR) {
            zc = false; /* no room to list more pages, or some that cannot be pinned: by copying it may do */
            sent = sendmsg(c->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
        }
        int err = errno;
        if (!inline_only)
            pthread_mutex_lock(&t->mu);
        c->sending = false;
        if (sent < 0 && err == EINTR)
            continue;
        c->zc_next += zc && sent > 0; /* the kernel counts along */
        if (sent > 0 && c->reqs_head) /* a slow network is progress */
            atomic_store(&c->reqs_head->op->progress_ns, hx_now_ns());
        if (sent < 0 && err != EAGAIN && err != EWOULDBLOCK && err != ENOBUFS) {
            snprintf(c->why, sizeof c->why, "the data connection broke: %.80s", strerror(err));
            c->broken = true;
            return false;
        }
        if (sent < 0 || (size_t)sent < want) {
            if (sent > 0)
                advance(c, (size_t)sent, zc);
            c->want_write = true;
            return true;
        }
        advance(c, (size_t)sent, zc);
        total += (size_t)sent;
    }
    c->want_write = c->out_head != NULL;
    return true;
}

/* ---- posts ---- */

/* A small one goes out at once, if nobody is in the way. Under mu. */
static bool send_now(hx_tpeer_t *p, hx_op_t *op)
{
    bool waits;
    if (p->runq.head || op->nbytes > HX_TCP_INLINE || op->ndescs != 1 || !op->nbytes)
        return false;
    hx_tconn_t *c = with_room(p);
    if (!c || c->sending || c->out_head || c->want_write || !ready(op, &waits))
        return false;
    hx_treq_t *r = new_req(p->t, op);
    if (!r)
        return false;
    cut(p->t, op, c, r);
    if (!hx_tcp_flush(c, true) || c->out_head)
        hx_tcp_wake(p->t); /* the rest is the thread's */
    else
        hx_tcp_lane_posted(c);
    return true;
}

void hx_tcp_submit(hx_op_t *op)
{
    hx_tpeer_t *p = op->ep->tcp;
    hx_tcp_t *t = p->t;
    if (pthread_mutex_trylock(&t->mu) == 0) {
        bool sent = send_now(p, op);
        if (!sent) {
            op->queued = true;
            hx_opq_push(&p->runq, op);
        }
        pthread_mutex_unlock(&t->mu);
        if (sent)
            return;
    } else {
        op->queued = true;
        pthread_mutex_lock(&t->inbox_mu);
        hx_opq_push(&t->inbox, op);
        pthread_mutex_unlock(&t->inbox_mu);
    }
    hx_tcp_wake(t);
}
