/* SPDX-License-Identifier: Apache-2.0 */
/* Our side of one peer: its state, its announced regions, the notes on their way to it, and its loss. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "link.h"
#include "provider.h"
#include "sha256.h"

hx_endpoint_t *hx_endpoint_new(hx_engine_t *engine)
{
    hx_endpoint_t *ep = hx_alloc(sizeof *ep);
    ep->engine = engine;
    ep->serial = ++engine->control.next_serial;
    ep->pidfd = -1;
    ep->note_credit = HX_NOTE_WINDOW;
    ep->table = hx_alloc(HX_RTABLE * sizeof *ep->table);
    atomic_init(&ep->refs, 1);
    pthread_mutex_init(&ep->note_mu, NULL);
    hx_revoked_init(&ep->revoked);
    hx_revoked_init(&ep->denied);
    return ep;
}

void hx_endpoint_ref(hx_endpoint_t *ep)
{
    atomic_fetch_add(&ep->refs, 1);
}

void hx_endpoint_unref(hx_endpoint_t *ep)
{
    if (!ep || atomic_fetch_sub(&ep->refs, 1) != 1)
        return;
    for (size_t i = 0; i < HX_RTABLE; i++)
        for (hx_rregion_t *r; (r = ep->table[i]);) {
            ep->table[i] = r->hash_next;
            hx_rregion_unref(r);
        }
    free(ep->table);
    hx_acks_free(ep);
    if (!hx_in_child(ep->engine))
        hx_providers_forget(ep);
    if (!hx_in_child(ep->engine)) { /* in a child they were never mapped, and their place may be taken */
        hx_page_unmap(ep->mine);
        hx_page_unmap(ep->theirs);
    }
    if (ep->pidfd >= 0)
        close(ep->pidfd);
    pthread_mutex_destroy(&ep->note_mu);
    hx_revoked_free(&ep->revoked);
    hx_revoked_free(&ep->denied);
    free(ep);
}

bool hx_endpoint_process_gone(const hx_endpoint_t *ep)
{
    struct pollfd pfd = {.fd = ep->pidfd, .events = POLLIN};
    return ep->pidfd >= 0 && poll(&pfd, 1, 0) > 0;
}

int hx_endpoint_prove_vm(const hx_endpoint_t *ep)
{
    uint8_t seen[HX_NONCE_LEN];
    struct iovec local = {seen, sizeof seen}, remote = {(void *)(uintptr_t)ep->vm_addr, sizeof seen};
    ssize_t n = process_vm_readv(ep->pid, &local, 1, &remote, 1, 0);
    if (n < 0)
        return errno;
    return n == sizeof seen && hx_equal_ct(seen, ep->vm_nonce, sizeof seen) ? 0 : ESRCH;
}

bool hx_endpoint_same_host(const hx_endpoint_t *ep)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } a;
    socklen_t len = sizeof a;
    if (!ep->link || !ep->link->tcp)
        return true;
    if (getpeername(ep->link->fd, &a.any, &len) < 0)
        return false;
    if (a.any.sa_family == AF_INET)
        return ntohl(a.v4.sin_addr.s_addr) >> 24 == 127;
    return a.any.sa_family == AF_INET6 &&
           (IN6_IS_ADDR_LOOPBACK(&a.v6.sin6_addr) ||
            (IN6_IS_ADDR_V4MAPPED(&a.v6.sin6_addr) && a.v6.sin6_addr.s6_addr[12] == 127));
}

hx_rregion_t *hx_endpoint_find(hx_endpoint_t *ep, uint64_t id)
{
    hx_rregion_t *r = ep->table[id % HX_RTABLE];
    while (r && r->id != id)
        r = r->hash_next;
    return r;
}

hx_note_t *hx_note_new(const char *topic, size_t topic_len, const void *payload, size_t len)
{
    hx_note_t *note = calloc(1, sizeof *note + topic_len + len);
    if (!note)
        return NULL;
    note->topic_len = (uint32_t)topic_len;
    note->len = (uint32_t)len;
    if (topic_len)
        memcpy(note->data, topic, topic_len);
    if (len)
        memcpy(note->data + topic_len, payload, len);
    return note;
}

bool hx_endpoint_push_note(hx_endpoint_t *ep, hx_note_t *note)
{
    hx_engine_t *engine = ep->engine;
    pthread_mutex_lock(&ep->note_mu);
    bool up = atomic_load(&ep->state) == HX_EP_UP;
    if (up) {
        atomic_fetch_add(&ep->notes_pending, 1);
        note->next = NULL;
        if (ep->note_tail)
            ep->note_tail->next = note;
        else
            ep->note_head = note;
        ep->note_tail = note;
        ep->note_pushed++;
    }
    pthread_mutex_unlock(&ep->note_mu);
    if (up)
        hx_control_wake(engine);
    return up;
}

static void drop_notes(hx_endpoint_t *ep, hx_note_t *note, hx_status_t status)
{
    while (note) {
        hx_note_t *next = note->next;
        if (note->op)
            hx_op_complete(note->op, status);
        atomic_fetch_sub(&ep->notes_pending, 1);
        free(note);
        note = next;
    }
}

void hx_endpoint_lose(hx_endpoint_t *ep, hx_status_t status, const char *text)
{
    hx_engine_t *engine = ep->engine;
    if (atomic_load(&ep->state) == HX_EP_LOST)
        return;
    if (ep->raw && atomic_load(&ep->state) == HX_EP_SHAKING) {
        hx_raw_fail(ep, status, text);
        return;
    }
    atomic_store(&ep->lost_status, status);
    pthread_mutex_lock(&ep->note_mu); /* no note is queued after this */
    atomic_store(&ep->state, HX_EP_LOST);
    hx_note_t *queued = ep->note_head, *sent = ep->unacked_head;
    ep->note_head = ep->note_tail = ep->unacked_head = ep->unacked_tail = NULL;
    pthread_mutex_unlock(&ep->note_mu);
    atomic_fetch_sub(&engine->npeers, 1);
    ep->lost_ns = hx_now_ns();
    /* From here it starts nothing more in our memory; revoke.c waits for what it had started. */
    if (ep->theirs)
        hx_page_set_revoke_seq(ep->theirs, HX_REVOKE_ALL);
    ep->fenced = true;
    if (ep->link)
        hx_link_close(ep->link);
    drop_notes(ep, sent, status);
    drop_notes(ep, queued, status);
    for (size_t i = 0; i < HX_RTABLE; i++)
        for (hx_rregion_t *r = ep->table[i]; r; r = r->hash_next)
            hx_rregion_kill(r);
    hx_sched_kick(engine); /* its operations are finished by the copy threads */
    hx_event_t ev = {.kind = HX_EV_PEER_LOST, .ep = ep, .status = status};
    hx_event_emit(engine, ev, NULL, 0, text, strlen(text));
}

/* ---- getters ---- */

const char *hx_endpoint_name(const hx_endpoint_t *ep)
{
    return ep->name;
}

const uint8_t *hx_endpoint_incarnation(const hx_endpoint_t *ep)
{
    return ep->incarnation;
}

uint64_t hx_endpoint_peer_epoch(const hx_endpoint_t *ep)
{
    return ep->epoch;
}

uint64_t hx_endpoint_serial(const hx_endpoint_t *ep)
{
    return ep->serial;
}

bool hx_endpoint_is_up(const hx_endpoint_t *ep)
{
    return atomic_load(&ep->state) == HX_EP_UP;
}

bool hx_endpoint_is_raw(const hx_endpoint_t *ep)
{
    return ep->raw;
}

bool hx_endpoint_is_local(const hx_endpoint_t *ep)
{
    return ep->local;
}

uint32_t hx_endpoint_inflight(const hx_endpoint_t *ep)
{
    return atomic_load(&ep->inflight);
}

uint64_t hx_endpoint_epoch(const hx_endpoint_t *ep)
{
    /* The owner's own counter where we share its page: a permission given after a revocation is judged as such even
     * while the revocation is still on its way to us. */
    return ep->mine && !ep->engine->forked ? hx_page_revoke_seq(ep->mine) : atomic_load(&ep->revoked.applied);
}
