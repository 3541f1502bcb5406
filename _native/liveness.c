/* SPDX-License-Identifier: Apache-2.0 */
/* Is everybody still there, and does everything still move? Run by the control thread's tick, and by its every round for
 * what must not wait for a tick. */
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "link.h"
#include "provider.h"
#include "sys.h"

void hx_live_check_operations(hx_engine_t *engine, uint64_t now)
{
    bool kick = false;
    for (uint32_t i = 0; i < engine->config.queue_depth; i++) {
        hx_op_t *op = &engine->ops[i];
        uint32_t gen = atomic_load(&op->gen);
        uint32_t stage = atomic_load(&op->stage);
        if (stage == HX_STAGE_FREE || stage == HX_STAGE_DONE)
            continue;
        uint64_t progress = atomic_load(&op->progress_ns);
        if ((stage == HX_STAGE_ACTIVE || stage == HX_STAGE_HELD) && progress &&
            now > progress + engine->config.stall_timeout_ns) {
            hx_op_cancel_as(op, gen, HX_ERR_TIMEOUT);
            kick = true;
        }
        uint64_t cancel = atomic_load(&op->cancel), since = atomic_load(&op->cancel_ns);
        if (stage != HX_STAGE_NOTE && cancel >> 8 == gen && now > since + engine->config.cancel_grace_ns) {
            hx_providers_overdue(engine, op, gen);
            hx_op_report_early(engine, op, gen);
        }
    }
    if (kick)
        hx_sched_kick(engine);
}

/* A cancelled operation whose note has not been acknowledged: unsent, the note goes out as aborted; sent, the answer no
 * longer interests anybody. */
void hx_live_cancel_notes(hx_endpoint_t *ep)
{
    hx_op_t *ended = NULL;
    pthread_mutex_lock(&ep->note_mu);
    for (int list = 0; list < 2; list++)
        for (hx_note_t *note = list ? ep->unacked_head : ep->note_head; note; note = note->next) {
            hx_op_t *op = note->op;
            hx_status_t status = op ? hx_op_verdict(op) : HX_OK;
            if (status == HX_OK)
                continue;
            note->op = NULL;
            note->aborted = note->aborted || !list;
            op->status = status;
            op->next = ended;
            ended = op;
        }
    pthread_mutex_unlock(&ep->note_mu);
    while (ended) {
        hx_op_t *op = ended;
        ended = op->next; /* before it completes: then it may be another operation's */
        hx_op_complete(op, op->status);
    }
}

void hx_live_say_goodbye_to(hx_endpoint_t *ep)
{
    uint64_t now = hx_now_ns();
    /* First: what is posted from here on finds it, or is found by the question in hx_live_goodbye. */
    atomic_store(&ep->closing, true);
    if (!ep->bye_ns)
        ep->bye_ns = now + 2 * ep->engine->config.cancel_grace_ns;
    if (!hx_live_goodbye(ep, now, "closed on this side")) {
        hx_sched_kick(ep->engine); /* what is with a library is taken back */
        hx_control_arm_tick(ep->engine);
    }
}

bool hx_live_goodbye(hx_endpoint_t *ep, uint64_t now, const char *text)
{
    bool linked = ep->link && !ep->link->dead, idle = hx_providers_idle(ep);
    if (linked && !idle && now < ep->bye_ns)
        return false;
    if (linked)
        hx_link_send(ep->link, HX_F_BYE, idle, NULL, 0, -1);
    hx_endpoint_lose(ep, HX_ERR_ABORTED, text);
    return true;
}

static bool pending(const hx_endpoint_t *ep)
{
    return atomic_load(&ep->inflight) || atomic_load(&ep->notes_pending) || atomic_load(&ep->expecting);
}

/* Heartbeats only while we wait for something; they are answered by the peer's control thread. */
void hx_live_check_peer(hx_endpoint_t *ep, uint64_t now)
{
    uint64_t timeout = ep->engine->config.peer_timeout_ns;
    bool waiting = pending(ep) || ep->engine->control.revokes;
    if (!ep->link || ep->link->dead)
        return;
    if (!waiting) {
        ep->ping_ns = 0;
        return;
    }
    bool asked = ep->ping_ns > ep->last_rx_ns;
    if (asked && now - ep->ping_ns > timeout)
        hx_link_fail(ep->link, HX_ERR_PEER_LOST, 0, "no sign of life for %.1f s: frozen, or its host is gone",
                     (double)timeout / 1e9);
    else if (!asked && now - ep->last_rx_ns > timeout / 4) {
        ep->ping_ns = now;
        hx_link_send(ep->link, HX_F_PING, 0, NULL, 0, -1);
    }
}

/* Lost endpoints stay until nothing that their process had started can still touch our memory. */
static bool can_forget(hx_endpoint_t *ep)
{
    if (atomic_load(&ep->state) != HX_EP_LOST || atomic_load(&ep->inflight) || atomic_load(&ep->posters))
        return false;
    if (!atomic_load(&ep->engine->stopping) && hx_acks_haunting(ep, hx_now_ns()))
        return false;
    if (!hx_providers_settled(ep))
        return false;
    return !ep->theirs || !hx_page_busy(ep->theirs) || hx_endpoint_process_gone(ep);
}

/* Handles to it may live on; its descriptor does not wait for them. Nothing is in flight, so nobody looks at it. */
void hx_live_let_go(hx_endpoint_t *ep)
{
    if (ep->pidfd >= 0) /* as in hx_link_close */
        epoll_ctl(ep->engine->control.epoll_fd, EPOLL_CTL_DEL, ep->pidfd, NULL);
    hx_close_fd(&ep->pidfd);
    hx_providers_release(ep);
    hx_endpoint_unref(ep);
}

void hx_live_forget_lost(hx_engine_t *engine)
{
    for (hx_endpoint_t **p = &engine->control.endpoints; *p;) {
        hx_endpoint_t *ep = *p;
        if (!can_forget(ep)) {
            p = &ep->next;
            continue;
        }
        *p = ep->next;
        hx_live_let_go(ep);
    }
}

bool hx_live_anything_pending(hx_engine_t *engine)
{
    hx_control_t *c = &engine->control;
    if (atomic_load(&engine->live_ops) || c->revokes)
        return true;
    for (hx_link_t *link = c->links; link; link = link->next)
        if (link->state != HX_LINK_UP)
            return true;
    for (hx_endpoint_t *ep = c->endpoints; ep; ep = ep->next)
        if (pending(ep) || ep->bye_ns || atomic_load(&ep->state) == HX_EP_LOST) /* the goodbye has its time */
            return true;
    return false;
}

uint32_t hx_live_count_stuck(hx_engine_t *engine)
{
    uint32_t n = 0;
    for (hx_endpoint_t *ep = engine->control.endpoints; ep; ep = ep->next)
        n += ep->theirs && hx_page_busy(ep->theirs);
    return n;
}
