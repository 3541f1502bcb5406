/* SPDX-License-Identifier: Apache-2.0 */
/* What a peer sends. Everything here comes from a peer: each message is checked against the region, its key, its access bits,
 * the revocations and the range before a byte of it is taken (contract 10); what does not fit is answered by a status and
 * its payload thrown away; what is not the protocol ends the connection. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "crc32c.h"
#include "tcp.h"

#define STAGE (64u << 10)
#define BEHIND 4096
#define IOV 64
#define OWED_MAX 32768           /* answers, */
#define UNSENT_MAX (32ull << 20) /* and bytes of them, that a peer has not taken: several times its window */
#define TURN (4u << 20)          /* of one connection, before the others have their turn */

bool hx_tcp_rx_init(hx_trx_t *rx, const uint8_t *early, size_t n)
{
    rx->stage = malloc(STAGE);
    rx->rows = malloc(HX_TCP_ROWS_MAX * sizeof *rx->rows);
    rx->iov = malloc(HX_TCP_ROWS_MAX * sizeof *rx->iov);
    if (!rx->stage || !rx->rows || !rx->iov || n > STAGE)
        return false;
    if (n)
        memcpy(rx->stage, early, n);
    rx->len = n;
    return true;
}

void hx_tcp_rx_free(hx_trx_t *rx)
{
    if (rx->region)
        hx_region_release(rx->region);
    free(rx->stage);
    free(rx->rows);
    free(rx->iov);
}

static bool broken(hx_tconn_t *c, const char *what)
{
    snprintf(c->rx.why, sizeof c->rx.why, "the peer broke the data protocol: %s", what);
    return false;
}

/* The region that a peer names, held; or why it may not. Under t->mu, as all that lists what is being touched. */
static hx_status_t admit(hx_tconn_t *c, const hx_tcp_head_t *h, const hx_tcp_row_t *rows, uint32_t need,
                         hx_region_t **region_p)
{
    hx_endpoint_t *ep = c->peer->ep;
    hx_engine_t *engine = ep->engine;
    hx_region_t *region = NULL;
    pthread_mutex_lock(&engine->regions_mu);
    for (hx_region_t *r = engine->regions; r && !region; r = r->next)
        if (r->id == h->region && atomic_load(&r->announced) && atomic_load(&r->state) == HX_REGION_READY &&
            r->kind != HX_KIND_LAYOUT && r->kind != HX_KIND_DEVICE && hx_region_acquire(r))
            region = r;
    pthread_mutex_unlock(&engine->regions_mu);
    hx_status_t status = region && region->rkey == h->rkey && region->access & need ? HX_OK : HX_ERR_REMOTE_ACCESS;
    for (uint32_t i = 0; i < h->nrows && status == HX_OK; i++) {
        if (rows[i].off > region->nbytes || rows[i].nbytes > region->nbytes - rows[i].off)
            status = HX_ERR_BOUNDS;
        else if (hx_revoked_hits(&ep->denied, region->id, rows[i].off, rows[i].off + rows[i].nbytes, h->epoch))
            status = HX_ERR_REMOTE_ACCESS;
    }
    if (atomic_load(&ep->state) != HX_EP_UP)
        status = HX_ERR_PEER_LOST;
    if (status != HX_OK && region) {
        hx_region_release(region);
        region = NULL;
    }
    *region_p = region;
    return status;
}

static hx_treq_t *find_req(hx_tconn_t *c, uint64_t id)
{
    hx_tcp_t *t = c->peer->t;
    uint32_t index = (uint32_t)id;
    hx_treq_t *r = index < HX_TCP_REQUESTS ? &t->reqs[index] : NULL;
    return r && r->op && !r->answered && r->gen == (uint32_t)(id >> 32) && r->conn == c ? r : NULL;
}

static const char *check_head(const hx_tcp_head_t *h)
{
    bool rows = h->type == HX_TCP_WRITE || h->type == HX_TCP_READ;
    if (h->magic != HX_TCP_MAGIC || h->type < HX_TCP_WRITE || h->type > HX_TCP_DONE)
        return "not a message";
    if (h->nrows > HX_TCP_ROWS_MAX || (h->nrows && !rows))
        return "too many rows";
    if (h->nbytes > HX_TCP_MESSAGE_MAX || (h->nbytes && h->type == HX_TCP_DONE) || h->flags & ~HX_TCP_CHECKSUM)
        return "an impossible head";
    return NULL;
}

/* Under t->mu, which is dropped for the checksum; the span is listed as touched meanwhile. */
static void answer_read(hx_tconn_t *c, hx_region_t *region)
{
    hx_trx_t *rx = &c->rx;
    hx_tcp_t *t = c->peer->t;
    uint32_t crc = 0;
    if (rx->head.flags & HX_TCP_CHECKSUM) {
        for (uint32_t i = 0; i < rx->head.nrows; i++)
            rx->iov[i] = (struct iovec){region->base + rx->rows[i].off, rx->rows[i].nbytes};
        rx->active = true;
        pthread_mutex_unlock(&t->mu);
        crc = hx_tcp_payload_crc(rx->iov, rx->head.nrows);
        pthread_mutex_lock(&t->mu);
        rx->active = false;
    }
    hx_tcp_say_data(c, &rx->head, region, rx->rows, crc);
}

/* All of the head and the rows is here: where does the payload go, or what is the answer? */
static bool begin(hx_tconn_t *c, hx_done_t *done)
{
    hx_trx_t *rx = &c->rx;
    hx_tcp_head_t *h = &rx->head;
    hx_tcp_t *t = c->peer->t;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < h->nrows; i++) {
        if (rx->rows[i].nbytes > h->nbytes - sum)
            return broken(c, "rows of more bytes than it says");
        sum += rx->rows[i].nbytes;
    }
    if ((h->type == HX_TCP_WRITE || h->type == HX_TCP_READ) && sum != h->nbytes)
        return broken(c, "rows of fewer bytes than it says");
    if (h->flags & HX_TCP_CHECKSUM && h->head_crc != hx_tcp_head_crc(h, rx->rows))
        return broken(c, "a head that is not what was sent");
    /* It may know of no revocation that we have not made; one from the future would pass them all. */
    if (h->epoch > atomic_load(&c->peer->ep->denied.newest))
        return broken(c, "a permission from the future");
    rx->niov = rx->at = 0;
    rx->left = h->type == HX_TCP_READ ? 0 : h->nbytes;
    rx->crc = 0;
    rx->status = HX_OK;
    bool ok = true;
    pthread_mutex_lock(&t->mu);
    if (c->owed > OWED_MAX || c->unsent > UNSENT_MAX) {
        ok = broken(c, "it asks for more than it reads");
    } else if (h->type == HX_TCP_WRITE) {
        rx->status = admit(c, h, rx->rows, HX_ACCESS_WRITE, &rx->region);
        rx->active = rx->region != NULL;
        for (uint32_t i = 0; i < h->nrows && rx->region; i++)
            rx->niov = hx_tcp_span(rx->iov, rx->niov, rx->region->base + rx->rows[i].off, rx->rows[i].nbytes);
    } else if (h->type == HX_TCP_READ) {
        hx_region_t *region;
        hx_status_t status = admit(c, h, rx->rows, HX_ACCESS_READ, &region);
        if (status == HX_OK)
            answer_read(c, region);
        else
            hx_tcp_say_done(c, h, status);
    } else {
        hx_treq_t *r = find_req(c, h->id);
        if (!r || (h->type == HX_TCP_DATA && (r->op->kind != HX_READ || r->nbytes != h->nbytes)) ||
            (h->type == HX_TCP_DONE && r->op->kind == HX_READ && h->status == HX_OK) ||
            (t->checksum && !(h->flags & HX_TCP_CHECKSUM))) {
            ok = broken(c, "an answer to what was not asked");
        } else if (h->type == HX_TCP_DONE) {
            bool sane = h->status == HX_OK || h->status == HX_ERR_REMOTE_ACCESS || h->status == HX_ERR_BOUNDS ||
                        h->status == HX_ERR_CHECKSUM || h->status == HX_ERR_PEER_LOST;
            if (r->unsent)
                ok = broken(c, "an answer before the end of the question");
            else
                hx_tcp_answered(r, sane ? (hx_status_t)h->status : HX_ERR_REMOTE_ACCESS, done);
        } else {
            size_t part = hx_op_part_of(r->op, r->batch.first);
            for (size_t i = r->batch.first; i < r->batch.last; i++) {
                uint64_t from, to;
                hx_op_row(r->op, &r->batch, i, &from, &to);
                if (from < to)
                    rx->niov =
                        hx_tcp_span(rx->iov, rx->niov,
                                    r->op->parts[part].local->base + r->op->descs[i].local_off + from, to - from);
            }
            rx->req = r;
        }
    }
    pthread_mutex_unlock(&t->mu);
    rx->state = RX_PAYLOAD;
    return ok;
}

/* The payload is here: tell the peer, or whoever waits. */
static void end(hx_tconn_t *c, hx_done_t *done)
{
    hx_trx_t *rx = &c->rx;
    hx_tcp_head_t *h = &rx->head;
    hx_tcp_t *t = c->peer->t;
    bool wrong = h->flags & HX_TCP_CHECKSUM && h->type != HX_TCP_READ && rx->status == HX_OK && rx->crc != h->crc;
    hx_region_t *region = rx->region;
    pthread_mutex_lock(&t->mu);
    if (h->type == HX_TCP_WRITE) {
        hx_tcp_say_done(c, h, wrong ? HX_ERR_CHECKSUM : rx->status);
    } else if (h->type == HX_TCP_DATA && rx->req) {
        hx_tcp_answered(rx->req, wrong ? HX_ERR_CHECKSUM : HX_OK, done);
    }
    rx->region = NULL;
    rx->req = NULL;
    rx->active = false;
    pthread_mutex_unlock(&t->mu);
    if (region)
        hx_region_release(region);
    rx->state = RX_HEAD;
}

static void take_payload(hx_trx_t *rx, const uint8_t *from, size_t n)
{
    while (n && rx->at < rx->niov) {
        struct iovec *v = &rx->iov[rx->at];
        size_t k = v->iov_len < n ? v->iov_len : n;
        if (from) {
            memcpy(v->iov_base, from, k);
            from += k;
        }
        if (rx->head.flags & HX_TCP_CHECKSUM)
            rx->crc = hx_crc32c(rx->crc, v->iov_base, k);
        v->iov_base = (uint8_t *)v->iov_base + k;
        v->iov_len -= k;
        n -= k;
        if (!v->iov_len)
            rx->at++;
    }
}

/* Works off what is staged. False: the connection has failed. */
static bool digest(hx_tconn_t *c, hx_done_t *done)
{
    hx_trx_t *rx = &c->rx;
    for (;;) {
        size_t have = rx->len - rx->off;
        const uint8_t *at = rx->stage + rx->off;
        if (rx->state == RX_HEAD) {
            if (have < sizeof rx->head)
                break;
            memcpy(&rx->head, at, sizeof rx->head);
            rx->off += sizeof rx->head;
            const char *what = check_head(&rx->head);
            if (what)
                return broken(c, what);
            rx->rows_have = 0;
            rx->state = RX_ROWS;
        } else if (rx->brief && hx_tcp_rx_large(rx)) {
            break;
        } else if (rx->state == RX_ROWS) {
            size_t want = rx->head.nrows * sizeof *rx->rows - rx->rows_have;
            size_t n = have < want ? have : want;
            memcpy((uint8_t *)rx->rows + rx->rows_have, at, n);
            rx->rows_have += n;
            rx->off += n;
            if (n < want)
                break;
            if (!begin(c, done))
                return false;
        } else {
            size_t n = have < rx->left ? have : (size_t)rx->left;
            take_payload(rx, at, n);
            rx->off += n;
            rx->left -= n;
            if (rx->left)
                break;
            end(c, done);
        }
    }
    memmove(rx->stage, rx->stage + rx->off, rx->len - rx->off);
    rx->len -= rx->off;
    rx->off = 0;
    return true;
}

bool hx_tcp_rx_large(const hx_trx_t *rx)
{
    return rx->left > HX_TCP_INLINE || (rx->state == RX_ROWS && rx->head.nbytes > HX_TCP_INLINE);
}

bool hx_tcp_receive(hx_tconn_t *c, bool brief, hx_done_t *done)
{
    hx_trx_t *rx = &c->rx;
    size_t total = 0, turn = brief ? STAGE : TURN;
    rx->brief = brief;
    if (!digest(c, done)) /* what came with the handshake, or was left by a brief look */
        return false;
    while (total < turn && !(brief && hx_tcp_rx_large(rx))) {
        struct iovec iov[IOV + 1];
        size_t n = 0, direct = 0;
        /* The payload straight to where it belongs, what follows it to the stage. One that nobody wants goes by the stage. */
        if (rx->state == RX_PAYLOAD)
            for (size_t i = rx->at; i < rx->niov && n < IOV; i++) {
                iov[n] = rx->iov[i];
                direct += iov[n++].iov_len;
            }
        /* Behind a large payload only the next head and rows: more would be the next payload, and be copied twice. */
        size_t room = rx->left >= STAGE ? BEHIND : STAGE, want = direct;
        if (!direct || direct == rx->left) {
            room = room < STAGE - rx->len ? room : STAGE - rx->len;
            iov[n++] = (struct iovec){rx->stage + rx->len, room};
            want += room;
        }
        ssize_t got = readv(c->fd, iov, (int)n);
        if (got == 0) {
            snprintf(rx->why, sizeof rx->why, "the peer closed the data connection");
            return false;
        }
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return true;
        if (got < 0) {
            snprintf(rx->why, sizeof rx->why, "the data connection broke: %.80s", strerror(errno));
            return false;
        }
        if (rx->state == RX_PAYLOAD && rx->req)
            atomic_store(&rx->req->op->progress_ns, hx_now_ns());
        size_t payload = (size_t)got < direct ? (size_t)got : direct;
        take_payload(rx, NULL, payload);
        rx->left -= payload;
        rx->len += (size_t)got - payload;
        total += (size_t)got;
        rx->received++;
        if (!digest(c, done))
            return false;
        if ((size_t)got < want) /* it was empty; what comes now wakes us again */
            return true;
    }
    return true;
}
