/* SPDX-License-Identifier: Apache-2.0 */
/* MSG_ZEROCOPY: the kernel sends from the caller's pages, and says on the socket's error queue when it reads them no more.
 * Each sending call has a number, which the kernel counts along; it reports them in ranges, in no certain order (Linux,
 * Documentation/networking/msg_zerocopy.rst). Until then a message is held, with its head, its region or its request: the
 * source of a transfer has quiesced when the kernel says so, whatever the peer has answered by then.
 *
 * A connection that is closed takes its error queue along. So one with pages out is disconnected instead, which drops what
 * it had not sent, and the socket is kept until the last number has come. */
#define _GNU_SOURCE
#include <time.h> /* which errqueue.h needs and does not ask for */

#include <errno.h>
#include <linux/errqueue.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "sys.h"
#include "tcp.h"

#define WINDOW 4096u /* numbers that are out at most */
#define NBYTES_MIN (64u << 10)
#define COPIED_MAX 64 /* reports in a row that it was copied after all: it costs more then than it saves */

void hx_tcp_zc_enable(hx_tconn_t *c)
{
    int one = 1;
    c->zc_seen = calloc(WINDOW / 64, sizeof *c->zc_seen);
    c->zc = c->zc_seen && setsockopt(c->fd, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one) == 0;
}

bool hx_tcp_zc_fits(const hx_tconn_t *c, size_t nbytes)
{
    return c->zc && nbytes >= NBYTES_MIN && c->zc_next - c->zc_low < WINDOW;
}

/* There are pages out. */
static bool pages_out(const hx_tconn_t *c)
{
    return c->zc_next != c->zc_low;
}

void hx_tcp_zc_hold(hx_tconn_t *c, hx_tout_t *out)
{
    out->next = NULL;
    *(c->held_tail ? &c->held_tail->next : &c->held_head) = out;
    c->held_tail = out;
    if (out->req) {
        out->req->unsent = false;
        out->req->held = true;
    }
}

static void release(hx_tconn_t *c, hx_done_t *done)
{
    for (hx_tout_t *out; (out = c->held_head) && (int32_t)(out->zc_last - c->zc_low) < 0;) {
        hx_treq_t *r = out->req;
        c->held_head = out->next;
        if (!c->held_head)
            c->held_tail = NULL;
        hx_tcp_free_out(out);
        if (!r)
            continue;
        r->held = false;
        if (r->answered)
            hx_tcp_answered(r, r->status, done);
    }
}

static void confirmed(hx_tconn_t *c, uint32_t from, uint32_t to)
{
    uint64_t *seen = c->zc_seen;
    if (from - c->zc_low >= WINDOW || to - from >= WINDOW)
        return; /* no number of ours */
    for (uint32_t id = from; id != to + 1; id++)
        seen[id % WINDOW / 64] |= 1ull << id % 64;
    while (c->zc_low != c->zc_next && seen[c->zc_low % WINDOW / 64] & 1ull << c->zc_low % 64) {
        seen[c->zc_low % WINDOW / 64] &= ~(1ull << c->zc_low % 64);
        c->zc_low++;
    }
}

static void take_report(hx_tconn_t *c, const struct sock_extended_err *report)
{
    hx_tcp_t *t = c->peer->t;
    if (report->ee_origin != SO_EE_ORIGIN_ZEROCOPY || report->ee_errno)
        return;
    uint32_t n = report->ee_data - report->ee_info + 1;
    bool copied = report->ee_code & SO_EE_CODE_ZEROCOPY_COPIED;
    atomic_fetch_add_explicit(copied ? &t->engine->n_zc_copied : &t->engine->n_zc, n, memory_order_relaxed);
    c->zc_copied = copied ? c->zc_copied + n : 0;
    if (c->zc_copied >= COPIED_MAX)
        c->zc = false;
    confirmed(c, report->ee_info, report->ee_data);
}

void hx_tcp_zc_reap(hx_tconn_t *c, hx_done_t *done)
{
    if (!pages_out(c))
        return;
    for (;;) {
        union {
            struct cmsghdr head;
            char space[256];
        } control;
        struct msghdr msg = {.msg_control = &control, .msg_controllen = sizeof control};
        if (recvmsg(c->fd >= 0 ? c->fd : c->ghost_fd, &msg, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) {
            if (errno == EINTR)
                continue;
            break;
        }
        for (struct cmsghdr *at = CMSG_FIRSTHDR(&msg); at; at = CMSG_NXTHDR(&msg, at)) {
            struct sock_extended_err report;
            bool v4 = at->cmsg_level == IPPROTO_IP && at->cmsg_type == IP_RECVERR;
            bool v6 = at->cmsg_level == IPPROTO_IPV6 && at->cmsg_type == IPV6_RECVERR;
            if (!(v4 || v6) || at->cmsg_len < CMSG_LEN(sizeof report))
                continue;
            memcpy(&report, CMSG_DATA(at), sizeof report);
            take_report(c, &report);
        }
    }
    release(c, done);
    if (c->fd < 0 && !pages_out(c))
        hx_close_fd(&c->ghost_fd);
}

bool hx_tcp_zc_part(hx_tconn_t *c, hx_done_t *done)
{
    if (!pages_out(c))
        return false;
    hx_tout_t *out = c->out_head;
    if (out && out->zc) { /* a part of it has been sent so */
        c->out_head = out->next;
        hx_tcp_zc_hold(c, out);
    }
    hx_tcp_abort(c->fd);
    c->ghost_fd = c->fd;
    c->fd = -1;
    hx_tcp_zc_reap(c, done);
    return true;
}

void hx_tcp_zc_abandon(hx_tconn_t *c)
{
    hx_engine_t *engine = c->peer->t->engine;
    engine->abandoned = true;
    for (const hx_treq_t *r = c->reqs_head; r; r = r->next)
        hx_op_report_early(engine, r->op, atomic_load(&r->op->gen));
}
