/* SPDX-License-Identifier: Apache-2.0 */
/* The owner's side of taking memory back (contract 3).
 *
 * Moving revoke_seq stops every new touch at once; what may still run is what a peer had announced in its slots before.
 * The answer is given when no slot overlaps any more: at once in the common case, in one chunk's time when the peer was
 * copying, and as HX_ERR_PINNED after cancel_grace when it stands still in mid-copy. A pinned span is watched on, and a
 * second answer says when it is free. A peer whose process has ended touches nothing: its address space is gone. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "link.h"
#include "provider.h"

struct hx_revoke {
    hx_revoke_t *next;
    hx_region_t *region; /* owned reference */
    uint64_t token, deadline_ns, local_deadline_ns;
    bool deregister, one_peer, answered;
    bool told; /* peers knew of the region */
    uint8_t incarnation[HX_INCARNATION_LEN];
    size_t n;
    uint64_t spans[];
};

static bool concerns(const hx_endpoint_t *ep, bool one_peer, const uint8_t *incarnation)
{
    return !one_peer || !memcmp(ep->incarnation, incarnation, HX_INCARNATION_LEN);
}

static void send_spans(hx_endpoint_t *ep, hx_frame_type_t type, uint64_t region, const uint64_t *spans, size_t n)
{
    for (size_t at = 0; at < n; at += HX_SPANS_PER_FRAME) {
        size_t k = n - at < HX_SPANS_PER_FRAME ? n - at : HX_SPANS_PER_FRAME;
        struct iovec parts[] = {{&region, sizeof region}, {(void *)(uintptr_t)(spans + 2 * at), k * 16}};
        uint64_t seq = 0;
        if (ep->fenced)
            return; /* lost by the frame before: it is to stay fenced */
        if (type == HX_F_GRANT && ep->features & HX_FEATURE_TCP)
            hx_revoked_grant(&ep->denied, region, spans + 2 * at, k);
        if (type == HX_F_REVOKE) {
            seq = ++ep->revoke_seq;
            if (ep->features & HX_FEATURE_TCP && !hx_revoked_add(&ep->denied, region, spans + 2 * at, k, seq)) {
                hx_endpoint_lose(ep, HX_ERR_PEER_LOST, "no memory for what it may not touch");
                return;
            }
            if (ep->theirs)
                hx_page_set_revoke_seq(ep->theirs, seq);
            if (ep->acks && !hx_acks_expect(ep, seq, region, spans + 2 * at, k)) {
                hx_endpoint_lose(ep, HX_ERR_PEER_LOST, "it acknowledges no revocation");
                return;
            }
        }
        if (ep->link)
            hx_link_send(ep->link, type, seq, parts, 2, -1);
    }
}

static void withdraw(hx_engine_t *engine, hx_region_t *region)
{
    if (!region->announced)
        return;
    region->announced = false;
    for (hx_link_t *link = engine->control.links; link; link = link->next)
        if (!link->dead && link->state == HX_LINK_UP)
            hx_link_send(link, HX_F_REGION_DEL, region->id, NULL, 0, -1);
}

void hx_revoke_start(hx_engine_t *engine, hx_command_t *cmd)
{
    hx_revoke_t *rv = hx_alloc(sizeof *rv + cmd->n * 16);
    uint64_t now = hx_now_ns();
    rv->region = cmd->region;
    rv->token = cmd->token;
    rv->deregister = cmd->kind == HX_CMD_DEREGISTER;
    rv->deadline_ns = now + engine->config.cancel_grace_ns;
    rv->local_deadline_ns = rv->deadline_ns + engine->config.stall_timeout_ns;
    rv->one_peer = cmd->one_peer;
    memcpy(rv->incarnation, cmd->incarnation, sizeof rv->incarnation);
    rv->n = cmd->n;
    memcpy(rv->spans, cmd->spans, cmd->n * 16);
    if (!rv->deregister)
        hx_standing_add(cmd);
    cmd->region = NULL;
    hx_control_arm_tick(engine); /* heartbeats to those who may be frozen */
    /* Of a region that was not announced nobody knows, and nobody need remember that it is gone. */
    for (hx_endpoint_t *ep = engine->control.endpoints; ep && rv->region->announced; ep = ep->next)
        if (!ep->fenced && concerns(ep, rv->one_peer, rv->incarnation))
            send_spans(ep, HX_F_REVOKE, rv->region->id, rv->spans, rv->n);
    rv->told = rv->region->was_announced;
    if (rv->deregister)
        withdraw(engine, rv->region);
    rv->next = engine->control.revokes;
    engine->control.revokes = rv;
}

void hx_revoke_replay(hx_endpoint_t *ep, const hx_region_t *region)
{
    size_t n;
    uint64_t *spans = hx_standing_spans(region, ep->incarnation, &n);
    if (n)
        send_spans(ep, HX_F_REVOKE, region->id, spans, n);
    free(spans);
}

void hx_revoke_grant(hx_engine_t *engine, const hx_command_t *cmd)
{
    hx_standing_grant(cmd);
    for (hx_endpoint_t *ep = engine->control.endpoints; ep && cmd->region->announced; ep = ep->next)
        if (!ep->fenced && concerns(ep, cmd->one_peer, cmd->incarnation))
            send_spans(ep, HX_F_GRANT, cmd->region->id, cmd->spans, cmd->n);
}

/* What is arriving by tcp ends within a chunk's time, or its connection does. */
static uint64_t landing(hx_endpoint_t *ep, const hx_revoke_t *rv, uint64_t off, uint64_t end, uint64_t now)
{
    uint64_t n = hx_providers_landing(ep, rv->region->id, off, end);
    if (n && now + ep->engine->config.cancel_grace_ns / 2 > rv->deadline_ns)
        hx_providers_evict(ep);
    return n;
}

/* A peer that acknowledges in time does so in half of it (acks.c). */
static uint64_t writing(hx_endpoint_t *ep, const hx_revoke_t *rv, uint64_t off, uint64_t end, uint64_t now)
{
    uint64_t n = hx_acks_held(ep, rv->region->id, off, end, now);
    if (n && now + ep->engine->config.cancel_grace_ns / 4 > rv->deadline_ns)
        hx_providers_keep_out(ep);
    return n;
}

/* Bytes that some peer holds. `held`: room for the n spans concerned, whose number is answered in *nheld_p. */
static uint64_t pinned(hx_engine_t *engine, const hx_revoke_t *rv, uint64_t *held, size_t *nheld_p)
{
    uint64_t total = 0, now = hx_now_ns();
    *nheld_p = 0;
    for (hx_endpoint_t *ep = engine->control.endpoints; ep; ep = ep->next) {
        if (!concerns(ep, rv->one_peer, rv->incarnation))
            continue;
        bool gone =
            hx_endpoint_process_gone(ep); /* it does nothing any more; what it has sent may be on its way into memory */
        bool copying = !gone && ep->theirs && hx_page_busy(ep->theirs);
        /* What its device has sent goes on to ours for as long as ours takes it, whatever has become of the process. */
        bool one_sided = (!gone || ep->verbs) && ep->acks && rv->told;
        if (!copying && !one_sided && !ep->tcp)
            continue;
        for (size_t i = 0; i < rv->n; i++) {
            uint64_t off = rv->spans[2 * i], end = off + rv->spans[2 * i + 1];
            uint64_t n = copying ? hx_page_overlap(ep->theirs, rv->region->id, off, end) : 0;
            if (!n && ep->tcp)
                n = landing(ep, rv, off, end, now);
            if (!n && one_sided)
                n = writing(ep, rv, off, end, now);
            if (!n)
                continue;
            total += n;
            if (held && *nheld_p < rv->n) {
                held[2 * *nheld_p] = off;
                held[2 * *nheld_p + 1] = end - off;
                ++*nheld_p;
            }
        }
    }
    return total;
}

static void answer(hx_engine_t *engine, const hx_revoke_t *rv, hx_status_t status, uint64_t nbytes,
                   const uint64_t *held, size_t nheld)
{
    hx_event_t ev = {.kind = HX_EV_DONE, .token = rv->token, .status = status, .value = nbytes};
    hx_event_emit(engine, ev, NULL, 0, held, nheld * 16);
}

/* Once nobody uses the memory, the provider's library has to forget it: only then may it go back to its owner. */
static bool leaving(const hx_revoke_t *rv)
{
    hx_region_t *region = rv->region;
    if (!rv->deregister)
        return false;
    if (atomic_load(&region->adoption) == HX_ADOPT_HELD)
        hx_providers_withdraw(region);
    return atomic_load(&region->adoption) != HX_ADOPT_NONE;
}

/* True when it is over. */
static bool step(hx_engine_t *engine, hx_revoke_t *rv, uint64_t now)
{
    size_t nheld;
    uint32_t busy = rv->deregister ? atomic_load(&rv->region->busy) : 0;
    uint64_t n = pinned(engine, rv, NULL, &nheld);
    if (!n && !busy && !leaving(rv)) {
        answer(engine, rv, HX_OK, 0, NULL, 0);
        return true;
    }
    if (!rv->answered && ((n && now >= rv->deadline_ns) || now >= rv->local_deadline_ns)) {
        uint64_t *held = hx_alloc(rv->n * 16 + 1);
        n = pinned(engine, rv, held, &nheld);
        if (!n) {
            nheld = rv->n; /* our own transfers: their spans are not told apart */
            memcpy(held, rv->spans, rv->n * 16);
            n = rv->region->nbytes;
        }
        rv->answered = true;
        answer(engine, rv, HX_ERR_PINNED, n, held, nheld);
        free(held);
    }
    return false;
}

static void end(hx_revoke_t *rv)
{
    if (rv->deregister && rv->region->wanted) {
        rv->region->wanted = false;
        hx_region_unref(rv->region); /* the announcement's reference */
    }
    hx_region_unref(rv->region);
    free(rv);
}

void hx_revoke_poll(hx_engine_t *engine, uint64_t now)
{
    for (hx_revoke_t **p = &engine->control.revokes; *p;) {
        hx_revoke_t *rv = *p;
        if (step(engine, rv, now)) {
            *p = rv->next;
            end(rv);
        } else {
            p = &rv->next;
        }
    }
}

int hx_revoke_timeout_ms(hx_engine_t *engine)
{
    int ms = -1;
    for (hx_endpoint_t *ep = engine->control.endpoints; ep; ep = ep->next)
        if (ep->owed.head && atomic_load(&ep->state) == HX_EP_UP)
            ms = 1; /* what it waits for is with a library, whose completion also wakes us */
    for (hx_revoke_t *rv = engine->control.revokes; rv; rv = rv->next) {
        int want = rv->answered ? 20 : 1;
        if (ms < 0 || want < ms)
            ms = want;
    }
    return ms;
}

void hx_revoke_abort(hx_engine_t *engine)
{
    for (hx_revoke_t *rv; (rv = engine->control.revokes);) {
        engine->control.revokes = rv->next;
        size_t nheld;
        uint64_t n = pinned(engine, rv, NULL, &nheld);
        /* A call of a library's that did not return: what it holds, it holds. */
        if (!n && engine->abandoned &&
            (atomic_load(&rv->region->busy) || atomic_load(&rv->region->adoption) != HX_ADOPT_NONE))
            n = rv->region->nbytes;
        if (!rv->answered || !n)
            answer(engine, rv, n ? HX_ERR_PINNED : HX_OK, n, rv->spans, n ? rv->n : 0);
        end(rv);
    }
}
