/* SPDX-License-Identifier: Apache-2.0 */
/* The handshake: who are you, do we speak the same protocol, do we share the secret.
 *
 *   initiator                         acceptor
 *   HELLO  name, incarnation, challenge ->
 *                                  <- ANSWER  the same about itself, or REJECT with the reason
 *   AUTH   HMAC(secret, "i" HELLO ANSWER) ->
 *                                  <- READY   HMAC(secret, "a" HELLO ANSWER), or REJECT
 *   both: PAGE, and once the other's has come: REVOKE..., REGION_ADD..., TABLE_END
 *
 * Each proof covers both greetings whole (names, incarnations, challenges) and the role, so it can be neither replayed
 * nor reflected. Without a secret both proofs are zeros and the socket's own protection is all there is. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "link.h"
#include "provider.h"
#include "sha256.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

bool hx_hello_admit(hx_link_t *link)
{
    struct ucred cred;
    socklen_t len = sizeof cred;
    if (link->tcp)
        return true;
    if (getsockopt(link->fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) < 0) {
        hx_link_fail(link, HX_ERR_AUTH, errno, "the other side of the unix socket cannot be identified: %s",
                     strerror(errno));
        return false;
    }
    if (cred.uid != geteuid()) {
        hx_link_fail(link, HX_ERR_AUTH, 0, "the other side of the unix socket runs as uid %u, this engine as uid %u",
                     cred.uid, geteuid());
        return false;
    }
    link->ep->pid = cred.pid; /* as seen from here; 0 when it is invisible in our pid namespace */
    return true;
}

static void reject(hx_link_t *link, hx_status_t status, const char *text)
{
    struct iovec part = {(void *)(uintptr_t)text, strlen(text)};
    hx_link_send(link, HX_F_REJECT, status, &part, 1, -1);
    hx_link_fail(link, status, 0, "%s", text);
}

static size_t greet(hx_link_t *link, uint8_t out[HX_HELLO_MAX])
{
    hx_engine_t *engine = link->engine;
    hx_hello_t h = {
        .magic = HX_MAGIC,
        .version_min = HX_WIRE_VERSION,
        .version_max = HX_WIRE_VERSION,
        .features = hx_providers_features(engine),
        .epoch = atomic_load(&engine->epoch),
        .vm_addr = (uintptr_t)engine->nonce,
        .secret = engine->secret != NULL,
        .name_len = (uint32_t)strlen(engine->name),
        .want_name_len = link->outgoing ? (uint32_t)strlen(link->want_name) : 0,
        .want_incarnation = link->outgoing && link->want_incarnation,
    };
    memcpy(h.incarnation, engine->config.incarnation, sizeof h.incarnation);
    memcpy(h.wanted, link->wanted, sizeof h.wanted);
    memcpy(h.vm_nonce, engine->nonce, sizeof h.vm_nonce);
    if (!hx_random(h.challenge, sizeof h.challenge))
        abort(); /* no randomness, no authentication */
    memcpy(out, &h, sizeof h);
    memcpy(out + sizeof h, engine->name, h.name_len);
    memcpy(out + sizeof h + h.name_len, link->want_name, h.want_name_len);
    return sizeof h + h.name_len + h.want_name_len;
}

/* Checks a greeting's form and remembers who it is. False: the link has failed. */
static bool read_greeting(hx_link_t *link, const uint8_t *body, size_t n, hx_hello_t *h, char want[HX_NAME_MAX + 1])
{
    hx_endpoint_t *ep = link->ep;
    if (n < sizeof *h) {
        hx_link_fail(link, HX_ERR_MISMATCH, 0, "truncated greeting: %zu bytes", n);
        return false;
    }
    memcpy(h, body, sizeof *h);
    if (h->magic != HX_MAGIC || h->name_len == 0 || h->name_len > HX_NAME_MAX || h->want_name_len > HX_NAME_MAX ||
        n != sizeof *h + h->name_len + h->want_name_len || memchr(body + sizeof *h, 0, n - sizeof *h)) {
        hx_link_fail(link, HX_ERR_MISMATCH, 0, "not a greeting of aiohixl");
        return false;
    }
    memcpy(ep->name, body + sizeof *h, h->name_len);
    ep->name[h->name_len] = 0;
    memcpy(want, body + sizeof *h + h->name_len, h->want_name_len);
    want[h->want_name_len] = 0;
    memcpy(ep->incarnation, h->incarnation, sizeof ep->incarnation);
    ep->epoch = h->epoch;
    return true;
}

static void prove(hx_link_t *link, const char *role, uint8_t out[HX_SHA256_NBYTES])
{
    hx_engine_t *engine = link->engine;
    struct iovec parts[] = {
        {(void *)(uintptr_t)role, 1}, {link->hello, link->hello_len}, {link->answer, link->answer_len}};
    memset(out, 0, HX_SHA256_NBYTES);
    if (engine->secret)
        hx_hmac_sha256(engine->secret, engine->config.secret_len, parts, 3, out);
}

static bool check_proof(hx_link_t *link, const char *role, const uint8_t *body, size_t n)
{
    uint8_t want[HX_SHA256_NBYTES];
    prove(link, role, want);
    return n == sizeof want && hx_equal_ct(want, body, n);
}

/* ---- the peer's process ---- */

static int open_pidfd(hx_link_t *link)
{
    int fd = -1;
    socklen_t len = sizeof fd;
    if (getsockopt(link->fd, SOL_SOCKET, SO_PEERPIDFD, &fd, &len) == 0)
        return fd;
    /* Before Linux 6.5. */
    return link->ep->pid > 0 ? (int)syscall(SYS_pidfd_open, link->ep->pid, 0) : -1;
}

static void try_vm(hx_endpoint_t *ep, const hx_hello_t *h)
{
    ep->vm_addr = h->vm_addr;
    memcpy(ep->vm_nonce, h->vm_nonce, sizeof ep->vm_nonce);
    ep->vm_errno = ep->pid > 0 && ep->pidfd >= 0 ? hx_endpoint_prove_vm(ep) : ESRCH;
    ep->vm_ok = !ep->vm_errno;
}

/* Authenticated. `theirs`: the peer's greeting. */
static void bring_up(hx_link_t *link, const uint8_t *theirs)
{
    hx_endpoint_t *ep = link->ep;
    hx_hello_t h;
    memcpy(&h, theirs, sizeof h);
    ep->features = h.features & hx_providers_features(link->engine);
    ep->acks = ep->features & HX_FEATURE_ACKS;
    hx_data_key(link, ep->data_key);
    hx_control_epoch_ok(link->engine, ep->name, ep->epoch, true);
    hx_control_supersede(link->engine, ep->name, ep->epoch);
    if (!link->known)
        link->engine->control.shaking--;
    link->known = true;
    link->note_expected = 1;
    link->state = HX_LINK_WAIT_PAGE;
    if (!link->tcp) {
        int fd = -1;
        ep->pidfd = open_pidfd(link);
        try_vm(ep, &h);
        ep->mine = hx_page_create(&fd);
        if (!ep->mine) {
            hx_link_fail(link, HX_ERR_SYSTEM, errno, "cannot create the shared page: %s", strerror(errno));
            return;
        }
        hx_link_send(link, HX_F_PAGE, 0, NULL, 0, fd);
    } else {
        hx_link_send(link, HX_F_PAGE, 0, NULL, 0, -1);
    }
}

/* ---- states ---- */

void hx_hello_start(hx_link_t *link)
{
    if (!hx_hello_admit(link))
        return;
    link->hello_len = greet(link, link->hello);
    link->state = HX_LINK_WAIT_ANSWER;
    struct iovec part = {link->hello, link->hello_len};
    hx_link_send(link, HX_F_HELLO, 0, &part, 1, -1);
}

/* What both sides check about the other. The text, or NULL. */
static const char *objection(hx_link_t *link, const hx_hello_t *h, hx_status_t *status_p)
{
    hx_engine_t *engine = link->engine;
    *status_p = HX_ERR_MISMATCH;
    if (h->version_min > HX_WIRE_VERSION || h->version_max < HX_WIRE_VERSION)
        return "protocol versions do not meet: one side is much older; upgrade it";
    if (!memcmp(h->incarnation, engine->config.incarnation, sizeof h->incarnation))
        return "that is this engine itself";
    *status_p = HX_ERR_STALE;
    if (!hx_control_epoch_ok(engine, link->ep->name, h->epoch, false))
        return "an older incarnation: a newer engine of that name has been seen";
    *status_p = HX_ERR_AUTH;
    if (!!h->secret != !!engine->secret)
        return "one side has a secret, the other has none";
    return NULL;
}

static void on_hello(hx_link_t *link, const uint8_t *body, size_t n)
{
    hx_engine_t *engine = link->engine;
    hx_hello_t h;
    hx_status_t status;
    char want[HX_NAME_MAX + 1], text[HX_TEXT_MAX];
    if (!read_greeting(link, body, n, &h, want))
        return;
    const char *why = objection(link, &h, &status);
    if (!why && want[0] && strcmp(want, engine->name)) {
        snprintf(text, sizeof text, "you asked for engine '%.100s', this is '%.100s'", want, engine->name);
        status = HX_ERR_MISMATCH;
        why = text;
    }
    if (!why && h.want_incarnation && memcmp(h.wanted, engine->config.incarnation, sizeof h.wanted)) {
        status = HX_ERR_STALE;
        why = "you asked for another incarnation of this engine: it has restarted since";
    }
    if (why) {
        reject(link, status, why);
        return;
    }
    memcpy(link->hello, body, n);
    link->hello_len = n;
    link->answer_len = greet(link, link->answer);
    link->state = HX_LINK_WAIT_AUTH;
    struct iovec part = {link->answer, link->answer_len};
    hx_link_send(link, HX_F_ANSWER, 0, &part, 1, -1);
}

static void on_answer(hx_link_t *link, const uint8_t *body, size_t n)
{
    hx_hello_t h;
    hx_status_t status;
    uint8_t proof[HX_SHA256_NBYTES];
    char want[HX_NAME_MAX + 1];
    if (!read_greeting(link, body, n, &h, want))
        return;
    const char *why = objection(link, &h, &status);
    if (!why && link->want_name[0] && strcmp(link->want_name, link->ep->name)) {
        status = HX_ERR_MISMATCH;
        why = "another engine answers at this address";
    }
    if (!why && link->want_incarnation && memcmp(h.incarnation, link->wanted, sizeof h.incarnation)) {
        status = HX_ERR_STALE;
        why = "another incarnation answers at this address";
    }
    if (why) {
        hx_link_fail(link, status, 0, "%s", why);
        return;
    }
    memcpy(link->answer, body, n);
    link->answer_len = n;
    prove(link, "i", proof);
    link->state = HX_LINK_WAIT_READY;
    struct iovec part = {proof, sizeof proof};
    hx_link_send(link, HX_F_AUTH, 0, &part, 1, -1);
}

static void on_auth(hx_link_t *link, const uint8_t *body, size_t n)
{
    uint8_t proof[HX_SHA256_NBYTES];
    if (!check_proof(link, "i", body, n)) {
        reject(link, HX_ERR_AUTH, "the secrets differ");
        return;
    }
    prove(link, "a", proof);
    struct iovec part = {proof, sizeof proof};
    hx_link_send(link, HX_F_READY, 0, &part, 1, -1);
    if (!link->dead)
        bring_up(link, link->hello);
}

void hx_hello_frame(hx_link_t *link, const hx_frame_t *frame, const uint8_t *body, size_t n)
{
    if (frame->nfds) {
        hx_link_fail(link, HX_ERR_MISMATCH, 0, "descriptors before authentication");
        return;
    }
    if (hx_data_frame(link, frame, body, n))
        return;
    if (frame->type == HX_F_REJECT && link->outgoing) {
        bool known = frame->arg == HX_ERR_AUTH || frame->arg == HX_ERR_STALE;
        hx_link_fail(link, known ? (hx_status_t)frame->arg : HX_ERR_MISMATCH, 0, "refused: %.*s",
                     (int)(n < 200 ? n : 200), (const char *)body);
    } else if (frame->type == HX_F_HELLO && link->state == HX_LINK_WAIT_HELLO) {
        on_hello(link, body, n);
    } else if (frame->type == HX_F_ANSWER && link->state == HX_LINK_WAIT_ANSWER) {
        on_answer(link, body, n);
    } else if (frame->type == HX_F_AUTH && link->state == HX_LINK_WAIT_AUTH) {
        on_auth(link, body, n);
    } else if (frame->type == HX_F_READY && link->state == HX_LINK_WAIT_READY) {
        if (check_proof(link, "a", body, n))
            bring_up(link, link->answer);
        else
            hx_link_fail(link, HX_ERR_AUTH, 0, "the secrets differ");
    } else {
        hx_link_fail(link, HX_ERR_MISMATCH, 0, "not a control link of aiohixl: frame type %u in the handshake",
                     frame->type);
    }
}
