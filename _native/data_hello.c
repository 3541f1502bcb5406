/* SPDX-License-Identifier: Apache-2.0 */
/* The handshake of a data connection of the tcp transport. It runs on the control thread, as a link whose first frame is
 * DATA instead of HELLO, under the same bounds: deadline, frame length, number of strangers.
 *
 *   dialler                               acceptor
 *   DATA   session, stream, nonce ->
 *                                      <- DATA_ANSWER  nonce, HMAC(key, "a" session stream both nonces)
 *   DATA_PROOF  HMAC(key, "i" ...) ->
 *                                      <- DATA_READY
 *
 * The key is derived from the secret and from both greetings of the control link that the session belongs to, so it is new
 * for each link, and nothing that was recorded from another one can be replayed. */
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>

#include "link.h"
#include "provider.h"
#include "sha256.h"

typedef struct {
    uint32_t stream, zero;
    uint8_t nonce[HX_NONCE_LEN];
} hx_data_hello_t;

typedef struct {
    uint8_t nonce[HX_NONCE_LEN], proof[HX_SHA256_NBYTES];
} hx_data_answer_t;

_Static_assert(sizeof(hx_data_hello_t) == 40 && sizeof(hx_data_answer_t) == 64, "wire format");

void hx_data_key(hx_link_t *link, uint8_t key[HX_SHA256_NBYTES])
{
    const hx_engine_t *engine = link->engine;
    struct iovec parts[] = {
        {(void *)(uintptr_t)"d", 1}, {link->hello, link->hello_len}, {link->answer, link->answer_len}};
    hx_hmac_sha256(engine->secret ? engine->secret : (const uint8_t *)"",
                   engine->secret ? engine->config.secret_len : 0, parts, 3, key);
}

static void prove(const hx_link_t *link, const char *role, uint8_t out[HX_SHA256_NBYTES])
{
    uint64_t session = link->session;
    uint32_t stream = link->stream;
    struct iovec parts[] = {{(void *)(uintptr_t)role, 1},
                            {&session, sizeof session},
                            {&stream, sizeof stream},
                            {(void *)(uintptr_t)link->nonces[0], HX_NONCE_LEN},
                            {(void *)(uintptr_t)link->nonces[1], HX_NONCE_LEN}};
    hx_hmac_sha256(link->data_ep->data_key, sizeof link->data_ep->data_key, parts, 5, out);
}

static bool check(const hx_link_t *link, const char *role, const uint8_t *proof)
{
    uint8_t want[HX_SHA256_NBYTES];
    prove(link, role, want);
    return hx_equal_ct(want, proof, sizeof want);
}

/* The socket becomes the provider's, with what has arrived behind the last frame. */
static void hand_over(hx_link_t *link)
{
    if (link->dead)
        return;
    if (link->tx_head || atomic_load(&link->data_ep->state) != HX_EP_UP) {
        hx_link_fail(link, HX_ERR_UNREACHABLE, 0, "a data connection that was not wanted any more");
        return;
    }
    int fd = hx_link_detach(link);
    hx_providers_take_socket(link->data_ep, fd, link->stream, link->rx + link->rx_at, link->rx_len - link->rx_at);
}

/* ---- the dialler's side ---- */

void hx_data_start(hx_link_t *link)
{
    hx_data_hello_t hello = {.stream = link->stream};
    if (!hx_random(hello.nonce, sizeof hello.nonce)) {
        hx_link_fail(link, HX_ERR_SYSTEM, EIO, "no randomness, no authentication");
        return;
    }
    memcpy(link->nonces[0], hello.nonce, sizeof hello.nonce);
    link->state = HX_LINK_WAIT_DATA_ANSWER;
    struct iovec part = {&hello, sizeof hello};
    hx_link_send(link, HX_F_DATA, link->session, &part, 1, -1);
}

static void on_answer(hx_link_t *link, const uint8_t *body, size_t n)
{
    hx_data_answer_t answer;
    uint8_t proof[HX_SHA256_NBYTES];
    if (n != sizeof answer) {
        hx_link_fail(link, HX_ERR_MISMATCH, 0, "malformed answer to a data connection");
        return;
    }
    memcpy(&answer, body, sizeof answer);
    memcpy(link->nonces[1], answer.nonce, sizeof answer.nonce);
    if (!check(link, "a", answer.proof)) {
        hx_link_fail(link, HX_ERR_AUTH, 0, "the other side of a data connection is not the peer");
        return;
    }
    prove(link, "i", proof);
    link->state = HX_LINK_WAIT_DATA_READY;
    struct iovec part = {proof, sizeof proof};
    hx_link_send(link, HX_F_DATA_PROOF, 0, &part, 1, -1);
}

/* ---- the acceptor's side ---- */

static void on_data(hx_link_t *link, uint64_t session, const uint8_t *body, size_t n)
{
    hx_data_hello_t hello;
    hx_data_answer_t answer;
    hx_endpoint_t *ep = link->engine->control.endpoints;
    while (ep && (ep->serial != session || ep->outgoing || !ep->tcp || atomic_load(&ep->state) != HX_EP_UP))
        ep = ep->next;
    if (!link->tcp || n != sizeof hello || !ep) {
        hx_link_fail(link, HX_ERR_AUTH, 0, "a data connection that belongs to no peer");
        return;
    }
    memcpy(&hello, body, sizeof hello);
    if (hello.zero || hello.stream >= HX_STREAMS_MAX) {
        hx_link_fail(link, HX_ERR_MISMATCH, 0, "malformed greeting of a data connection");
        return;
    }
    hx_endpoint_ref(ep);
    link->data_ep = ep;
    link->session = session;
    link->stream = hello.stream;
    memcpy(link->nonces[0], hello.nonce, sizeof hello.nonce);
    if (!hx_random(answer.nonce, sizeof answer.nonce)) {
        hx_link_fail(link, HX_ERR_SYSTEM, EIO, "no randomness, no authentication");
        return;
    }
    memcpy(link->nonces[1], answer.nonce, sizeof answer.nonce);
    prove(link, "a", answer.proof);
    link->state = HX_LINK_WAIT_DATA_PROOF;
    struct iovec part = {&answer, sizeof answer};
    hx_link_send(link, HX_F_DATA_ANSWER, 0, &part, 1, -1);
}

static void on_proof(hx_link_t *link, const uint8_t *body, size_t n)
{
    if (n != HX_SHA256_NBYTES || !check(link, "i", body)) {
        hx_link_fail(link, HX_ERR_AUTH, 0, "a data connection without the secret");
        return;
    }
    if (!hx_providers_make_room(link->data_ep, link->stream)) {
        hx_link_fail(link, HX_ERR_MISMATCH, 0, "a data connection for which there is no room");
        return;
    }
    hx_link_send(link, HX_F_DATA_READY, 0, NULL, 0, -1);
    hand_over(link);
}

bool hx_data_frame(hx_link_t *link, const hx_frame_t *frame, const uint8_t *body, size_t n)
{
    if (frame->type == HX_F_DATA && link->state == HX_LINK_WAIT_HELLO)
        on_data(link, frame->arg, body, n);
    else if (frame->type == HX_F_DATA_ANSWER && link->state == HX_LINK_WAIT_DATA_ANSWER)
        on_answer(link, body, n);
    else if (frame->type == HX_F_DATA_PROOF && link->state == HX_LINK_WAIT_DATA_PROOF)
        on_proof(link, body, n);
    else if (frame->type == HX_F_DATA_READY && link->state == HX_LINK_WAIT_DATA_READY && !n)
        hand_over(link);
    else
        return false;
    return true;
}
