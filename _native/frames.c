/* SPDX-License-Identifier: Apache-2.0 */
/* What travels on a control link after the handshake. Everything here comes from a peer: every length, id and sequence
 * number is checked, and what does not fit ends the link. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "link.h"
#include "provider.h"

static void broken(hx_link_t *link, const char *what)
{
    hx_link_fail(link, HX_ERR_MISMATCH, 0, "the peer broke the control protocol: %s", what);
}

static void say_path(void *to, const char *name, uint64_t feature, const uint8_t *body, size_t n)
{
    hx_link_t *link = to;
    uint32_t name_len = (uint32_t)strlen(name);
    struct iovec parts[] = {
        {&name_len, sizeof name_len}, {(void *)(uintptr_t)name, name_len}, {(void *)(uintptr_t)body, n}};
    if (link->ep->features & feature && n)
        hx_link_send(link, HX_F_PATH, 0, parts, 3, -1);
}

/* Only of transports that make theirs anew: the others said it once. */
static void say_anew(void *to, const char *name, uint64_t feature, const uint8_t *body, size_t n)
{
    if (feature & HX_FEATURE_VERBS)
        say_path(to, name, feature, body, n);
}

void hx_frames_say_paths_anew(hx_link_t *link)
{
    hx_providers_introduce(link->ep, say_anew, link);
}

static void on_path(hx_link_t *link, const uint8_t *body, size_t n)
{
    uint32_t name_len;
    if (n < sizeof name_len) {
        broken(link, "truncated path");
        return;
    }
    memcpy(&name_len, body, sizeof name_len);
    body += sizeof name_len;
    n -= sizeof name_len;
    if (!(link->ep->features & ~(uint64_t)HX_FEATURE_SHM) || name_len > n ||
        !hx_providers_meet(link->ep, (const char *)body, name_len, body + name_len, n - name_len, link->nregions > 0))
        broken(link, "impossible path");
}

static void come_up(hx_link_t *link)
{
    hx_endpoint_t *ep = link->ep;
    hx_engine_t *engine = link->engine;
    link->state = HX_LINK_UP;
    hx_endpoint_ref(ep);
    ep->next = engine->control.endpoints;
    engine->control.endpoints = ep;
    atomic_fetch_add(&engine->npeers, 1);
    atomic_store(&ep->state, HX_EP_UP);
    if (ep->pidfd >= 0)
        hx_control_watch_pid(engine, ep);
    hx_event_t ev = {.kind = HX_EV_PEER_UP, .ep = ep, .value = link->outgoing, .token = ep->token};
    hx_event_emit(engine, ev, NULL, 0, NULL, 0);
    hx_providers_introduce(ep, say_path, link); /* before the first region that could be reached that way */
    hx_frames_send_table(link);                 /* from here on it hears of every change, and of every revocation */
}

static void on_page(hx_link_t *link)
{
    if (!link->tcp) {
        int fd = hx_link_take_fd(link);
        link->ep->theirs = fd >= 0 ? hx_page_import(fd) : NULL;
        if (!link->ep->theirs) {
            broken(link, "its shared page is missing, unsealed or of the wrong size");
            return;
        }
    }
    come_up(link);
}

/* ---- region tables ---- */

static void on_region_add(hx_link_t *link, const uint8_t *body, size_t n)
{
    hx_endpoint_t *ep = link->ep;
    while (n) {
        hx_entry_t e;
        if (n < sizeof e) {
            broken(link, "truncated region entry");
            return;
        }
        memcpy(&e, body, sizeof e);
        body += sizeof e;
        n -= sizeof e;
        if (e.name_len == 0 || e.name_len > HX_NAME_MAX || e.blob_len > HX_BLOB_MAX || n < e.name_len ||
            n - e.name_len < e.blob_len || e.kind < HX_KIND_MEMFD || e.kind > HX_KIND_DEVICE || e.nbytes > INT64_MAX ||
            e.addr > UINT64_MAX - e.nbytes || e.direct > UINT64_MAX - e.nbytes || hx_endpoint_find(ep, e.id) ||
            ++link->nregions > HX_PEER_REGIONS_MAX) {
            broken(link, "impossible region entry");
            return;
        }
        hx_rregion_t *r = hx_rregion_new(ep);
        if (!r) {
            broken(link, "no memory for its region table");
            return;
        }
        r->id = e.id;
        r->rkey = e.rkey;
        r->nbytes = e.nbytes;
        r->addr = e.addr;
        r->direct = e.direct;
        r->seen = atomic_fetch_add(&link->engine->announcements, 1) + 1;
        r->kind = e.kind;
        r->access = e.access;
        r->hash_next = ep->table[e.id % HX_RTABLE];
        ep->table[e.id % HX_RTABLE] = r;
        hx_event_t ev = {.kind = HX_EV_REGION_ADD, .ep = ep, .rregion = r};
        hx_event_emit(link->engine, ev, (const char *)body, e.name_len, body + e.name_len, e.blob_len);
        body += e.name_len + e.blob_len;
        n -= e.name_len + e.blob_len;
    }
}

static void on_region_del(hx_link_t *link, uint64_t id)
{
    hx_endpoint_t *ep = link->ep;
    for (hx_rregion_t **p = &ep->table[id % HX_RTABLE]; *p; p = &(*p)->hash_next) {
        hx_rregion_t *r = *p;
        if (r->id != id)
            continue;
        *p = r->hash_next;
        link->nregions--;
        hx_rregion_kill(r);
        hx_revoked_forget(&ep->revoked, id);
        hx_sched_kick(link->engine); /* operations may wait for its mapping */
        hx_event_t ev = {.kind = HX_EV_REGION_DEL, .ep = ep, .rregion = r};
        hx_event_emit(link->engine, ev, NULL, 0, NULL, 0);
        hx_rregion_unref(r);
        return;
    }
    broken(link, "it withdraws a region that it never announced");
}

#define TABLE_FRAME (64u << 10) /* entries of one frame, unless a single one is larger */

/* Announces the regions in their order, many to a frame. */
static void send_entries(hx_link_t *link, hx_region_t *const *list, size_t n)
{
    size_t cap = TABLE_FRAME + sizeof(hx_entry_t) + HX_NAME_MAX + HX_BLOB_MAX, at = 0;
    uint8_t *frame = n ? hx_alloc(cap) : NULL;
    /* What is revoked comes ahead of the regions: there is no moment at which the peer could use a span that it may not. */
    for (size_t i = 0; i < n; i++)
        hx_revoke_replay(link->ep, list[i]);
    for (size_t i = 0; i < n; i++) {
        const hx_region_t *region = list[i];
        hx_entry_t e = {
            .id = region->id,
            .rkey = region->rkey,
            .nbytes = region->nbytes,
            /* An address is for process_vm_* on foreign memory only; nobody else learns one. */
            .addr = region->kind == HX_KIND_MEMFD                 ? region->file_off
                    : link->tcp || region->kind == HX_KIND_DEVICE ? 0
                                                                  : (uintptr_t)region->base,
            .direct = link->ep->acks && atomic_load(&region->adoption) == HX_ADOPT_HELD ? region->direct : 0,
            .kind = region->kind,
            .access = region->access,
            .name_len = region->name_len,
            .blob_len = region->blob_len,
        };
        memcpy(frame + at, &e, sizeof e);
        memcpy(frame + at + sizeof e, region->name, e.name_len);
        memcpy(frame + at + sizeof e + e.name_len, region->blob, e.blob_len);
        at += sizeof e + e.name_len + e.blob_len;
        if (at >= TABLE_FRAME || i + 1 == n) {
            struct iovec part = {frame, at};
            hx_link_send(link, HX_F_REGION_ADD, 0, &part, 1, -1);
            at = 0;
        }
    }
    free(frame);
}

void hx_frames_send_table(hx_link_t *link)
{
    hx_engine_t *engine = link->engine;
    pthread_mutex_lock(&engine->regions_mu);
    size_t n = 0, count = 0;
    for (hx_region_t *r = engine->regions; r; r = r->next)
        count += r->announced;
    hx_region_t **list = hx_alloc((count + 1) * sizeof *list);
    for (hx_region_t *r = engine->regions; r; r = r->next)
        if (r->announced)          /* which holds a reference that only this thread drops */
            list[count - ++n] = r; /* the engine's list has the newest first; peers see the order of registration */
    pthread_mutex_unlock(&engine->regions_mu);
    send_entries(link, list, n);
    free(list);
    hx_link_send(link, HX_F_TABLE_END, 0, NULL, 0, -1);
}

void hx_frames_announce(hx_engine_t *engine, hx_region_t *const *list, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        list[i]->was_announced = true;
        list[i]->announced = true;
    }
    for (hx_link_t *link = engine->control.links; link; link = link->next)
        if (!link->dead && link->state == HX_LINK_UP)
            send_entries(link, list, n);
}

/* ---- mappings ---- */

static void on_map_ask(hx_link_t *link, uint64_t id)
{
    hx_engine_t *engine = link->engine;
    uint32_t err = ENOENT;
    int fd = -1;
    pthread_mutex_lock(&engine->regions_mu);
    for (hx_region_t *r = engine->regions; r; r = r->next) {
        if (link->tcp || r->id != id || !r->announced || r->kind != HX_KIND_MEMFD ||
            atomic_load(&r->state) != HX_REGION_READY)
            continue;
        if (r->access & HX_ACCESS_WRITE) {
            fd = fcntl(r->memfd, F_DUPFD_CLOEXEC, 0);
        } else {
            /* The kernel itself holds a peer to reading: a descriptor opened read-only cannot be mapped writable. */
            char path[32];
            snprintf(path, sizeof path, "/proc/self/fd/%d", r->memfd);
            fd = open(path, O_RDONLY | O_CLOEXEC);
        }
        err = fd < 0 ? (uint32_t)errno : 0;
        break;
    }
    pthread_mutex_unlock(&engine->regions_mu);
    struct iovec part = {&err, sizeof err};
    hx_link_send(link, HX_F_MAP_ANSWER, id, &part, 1, fd);
}

static void on_map_answer(hx_link_t *link, uint64_t id, bool has_fd, const uint8_t *body, size_t n)
{
    uint32_t err;
    int fd = has_fd ? hx_link_take_fd(link) : -1;
    hx_rregion_t *r = hx_endpoint_find(link->ep, id);
    if (n != sizeof err || (has_fd && fd < 0)) {
        if (fd >= 0)
            close(fd);
        broken(link, "malformed answer to a map request");
        return;
    }
    memcpy(&err, body, sizeof err);
    if (!r || atomic_load(&r->map_state) != HX_MAP_ASKED) {
        if (fd >= 0)
            close(fd); /* withdrawn meanwhile */
        return;
    }
    if (fd < 0) {
        r->sys_errno = err ? (int)err : EPROTO;
        atomic_store(&r->map_state, HX_MAP_FAILED);
    } else {
        hx_rregion_map(r, fd);
    }
    hx_sched_kick(link->engine);
}

/* ---- notes ---- */

void hx_frames_pump_notes(hx_endpoint_t *ep)
{
    while (ep->link && !ep->link->dead) {
        hx_note_t *note = NULL;
        pthread_mutex_lock(&ep->note_mu);
        if (ep->note_head && ep->note_credit && ep->note_seq < ep->note_due) {
            note = ep->note_head;
            ep->note_head = note->next;
            if (!ep->note_head)
                ep->note_tail = NULL;
            note->next = NULL;
            note->seq = ++ep->note_seq;
            ep->note_credit--;
            if (ep->unacked_tail)
                ep->unacked_tail->next = note;
            else
                ep->unacked_head = note;
            ep->unacked_tail = note;
        }
        pthread_mutex_unlock(&ep->note_mu);
        if (!note)
            return;
        /* Only this thread takes notes off the unacknowledged list, so the note stays while it is sent. */
        hx_note_head_t head = {note->topic_len, note->aborted};
        struct iovec parts[] = {{&head, sizeof head}, {note->data, note->topic_len + note->len}};
        hx_link_send(ep->link, HX_F_NOTE, note->seq, parts, 2, -1);
    }
}

static void on_note(hx_link_t *link, uint64_t seq, const uint8_t *body, size_t n)
{
    hx_note_head_t head;
    if (n < sizeof head) {
        broken(link, "truncated note");
        return;
    }
    memcpy(&head, body, sizeof head);
    body += sizeof head;
    n -= sizeof head;
    if (head.topic_len > HX_TOPIC_MAX || head.topic_len > n || n - head.topic_len > HX_NOTE_MAX ||
        seq != link->note_expected || link->notes_held >= HX_NOTE_WINDOW) {
        broken(link, "impossible note");
        return;
    }
    link->note_expected++;
    link->notes_held++;
    atomic_fetch_add(&link->engine->n_notes_in, 1);
    hx_event_t ev = {.kind = HX_EV_NOTE, .ep = link->ep, .value = head.flags & 1};
    hx_event_emit(link->engine, ev, (const char *)body, head.topic_len, body + head.topic_len, n - head.topic_len);
    hx_link_send(link, HX_F_NOTE_ACK, seq, NULL, 0, -1); /* after it stands in the queue */
}

static void on_note_ack(hx_link_t *link, uint64_t seq)
{
    hx_endpoint_t *ep = link->ep;
    pthread_mutex_lock(&ep->note_mu);
    hx_note_t *note = ep->unacked_head;
    bool ok = note && note->seq == seq;
    hx_op_t *op = NULL;
    if (ok) {
        ep->unacked_head = note->next;
        if (!ep->unacked_head)
            ep->unacked_tail = NULL;
        op = note->op;
    }
    pthread_mutex_unlock(&ep->note_mu);
    if (!ok) {
        broken(link, "it acknowledges a note out of order");
        return;
    }
    atomic_fetch_add(&link->engine->n_notes_out, 1);
    atomic_fetch_sub(&ep->notes_pending, 1);
    free(note);
    if (op)
        hx_op_complete(op, HX_OK);
}

static void on_credit(hx_link_t *link, uint64_t n)
{
    hx_endpoint_t *ep = link->ep;
    pthread_mutex_lock(&ep->note_mu);
    bool ok = n <= HX_NOTE_WINDOW && ep->note_credit + n <= HX_NOTE_WINDOW;
    if (ok)
        ep->note_credit += (uint32_t)n;
    pthread_mutex_unlock(&ep->note_mu);
    if (!ok) /* what may go out now goes out in this round, after the commands */
        broken(link, "more note credit than there are notes");
}

/* ---- revocation, as the writer hears of it ---- */

static void on_revoke(hx_link_t *link, const hx_frame_t *frame, const uint8_t *body, size_t n)
{
    hx_endpoint_t *ep = link->ep;
    bool revoke = frame->type == HX_F_REVOKE;
    uint64_t region, *spans;
    if (n < sizeof region || (n - sizeof region) % 16 ||
        (revoke && frame->arg != atomic_load(&ep->revoked.applied) + 1)) {
        broken(link, "malformed revocation");
        return;
    }
    memcpy(&region, body, sizeof region);
    size_t count = (n - sizeof region) / 16;
    spans = malloc(count ? count * 16 : 1); /* the frame's body need not be aligned */
    if (!spans) {
        broken(link, "no memory for its revocation");
        return;
    }
    memcpy(spans, body + sizeof region, count * 16);
    for (size_t i = 0; i < count; i++)
        if (spans[2 * i] > INT64_MAX || spans[2 * i + 1] > INT64_MAX) {
            free(spans);
            broken(link, "malformed revocation");
            return;
        }
    if (!revoke)
        hx_revoked_grant(&ep->revoked, region, spans, count);
    else if (!hx_revoked_add(&ep->revoked, region, spans, count, frame->arg))
        broken(link, "no memory for its revocation"); /* losing the peer is the safe answer */
    if (revoke && ep->acks && !hx_acks_owe(ep, frame->arg, region, spans, count))
        broken(link, "it revokes faster than anybody can let go");
    free(spans);
    hx_sched_kick(link->engine);
}

void hx_frames_handle(hx_link_t *link, const hx_frame_t *frame, const uint8_t *body, size_t n)
{
    if (link->state == HX_LINK_WAIT_PAGE) {
        if (frame->type == HX_F_PAGE)
            on_page(link);
        else
            broken(link, "its shared page comes first");
        return;
    }
    if (frame->nfds && frame->type != HX_F_MAP_ANSWER) {
        broken(link, "a descriptor where none belongs");
        return;
    }
    if (atomic_load(&link->ep->event_bytes) > HX_EVENT_BYTES_MAX) {
        broken(link, "it announces faster than anybody can read");
        return;
    }
    switch (frame->type) {
    case HX_F_REGION_ADD:
        on_region_add(link, body, n);
        break;
    case HX_F_REGION_DEL:
        on_region_del(link, frame->arg);
        break;
    case HX_F_TABLE_END: {
        if (link->ep->ready) {
            broken(link, "its region table ends twice");
            break;
        }
        link->ep->ready = true;
        hx_event_t ev = {.kind = HX_EV_PEER_READY, .ep = link->ep, .value = link->outgoing, .token = link->ep->token};
        hx_event_emit(link->engine, ev, NULL, 0, NULL, 0);
        break;
    }
    case HX_F_MAP_ASK:
        on_map_ask(link, frame->arg);
        break;
    case HX_F_MAP_ANSWER:
        on_map_answer(link, frame->arg, frame->nfds, body, n);
        break;
    case HX_F_NOTE:
        on_note(link, frame->arg, body, n);
        break;
    case HX_F_NOTE_ACK:
        on_note_ack(link, frame->arg);
        break;
    case HX_F_CREDIT:
        on_credit(link, frame->arg);
        break;
    case HX_F_REVOKE:
    case HX_F_GRANT:
        on_revoke(link, frame, body, n);
        break;
    case HX_F_PING:
        hx_link_send(link, HX_F_PONG, frame->arg, NULL, 0, -1);
        break;
    case HX_F_PONG:
        if (frame->arg)
            hx_providers_proven(link->ep, frame->arg);
        break;
    case HX_F_PATH:
        on_path(link, body, n);
        break;
    case HX_F_REVOKE_ACK:
        if (!link->ep->acks || !hx_acks_received(link->ep, frame->arg))
            broken(link, "it acknowledges a revocation that it was not sent");
        break;
    case HX_F_BYE:
        link->ep->quiet = frame->arg == 1;
        hx_link_fail(link, HX_ERR_PEER_LOST, 0, "the peer closed");
        break;
    default:
        if (!(frame->flags & HX_FRAME_OPTIONAL))
            broken(link, "unknown frame type");
    }
}
