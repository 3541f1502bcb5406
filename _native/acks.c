/* SPDX-License-Identifier: Apache-2.0 */
/* Revocation where the writer shares no page with the owner, because it does not copy by itself: its library or its device
 * writes, and the owner sees nothing of it. The writer then acknowledges each REVOKE by its number, as soon as nothing that
 * it had posted touches those bytes any more, in any order: one span that stands still does not hold up the others.
 *
 * Writer: (1) adds the span to the revoked set, (2) looks at what is with the library. Its poster: (1) lists the request,
 * (2) looks at the revoked set. Whichever comes second sees the other (both lists are under locks). */
#include <stdlib.h>
#include <string.h>

#include "link.h"
#include "provider.h"

#define OWED_MAX 4096     /* revocations that wait for what is with our library: an owner that sends more is not ours */
#define UNACKED_MAX 65536 /* that a peer has not acknowledged */

struct hx_ack {
    hx_ack_t *next;
    uint64_t seq, region, since_ns;
    /* The owner's: pairs (offset, end), by offset, apart. The writer's: tags of what holds the span. */
    size_t n;
    uint64_t *words;
};

static void append(hx_acks_t *list, hx_ack_t *ack)
{
    *(list->tail ? &list->tail->next : &list->head) = ack;
    list->tail = ack;
    list->n++;
}

static hx_ack_t *new_ack(uint64_t seq, uint64_t region, uint64_t *words, size_t n)
{
    hx_ack_t *ack = hx_alloc(sizeof *ack);
    *ack = (hx_ack_t){NULL, seq, region, hx_now_ns(), n, words};
    return ack;
}

/* Takes the one after `before` (NULL: the first) off its list. */
static void drop(hx_acks_t *list, hx_ack_t *before)
{
    hx_ack_t *ack = before ? before->next : list->head;
    *(before ? &before->next : &list->head) = ack->next;
    if (list->tail == ack)
        list->tail = before;
    list->n--;
    free(ack->words);
    free(ack);
}

static int span_order(const void *pa, const void *pb)
{
    uint64_t a = *(const uint64_t *)pa, b = *(const uint64_t *)pb;
    return a < b ? -1 : a > b;
}

/* From pairs (offset, nbytes) to pairs (offset, end): sorted, merged, without the empty ones. To be freed. */
static uint64_t *merge(const uint64_t *spans, size_t n, size_t *n_p)
{
    uint64_t *out = hx_alloc(n * 16 + 1);
    size_t count = 0, last = 0;
    for (size_t i = 0; i < n; i++)
        if (spans[2 * i + 1]) {
            out[2 * count] = spans[2 * i];
            out[2 * count++ + 1] = spans[2 * i] + spans[2 * i + 1];
        }
    qsort(out, count, 16, span_order);
    for (size_t i = 1; i < count; i++) {
        if (out[2 * i] <= out[2 * last + 1]) {
            if (out[2 * i + 1] > out[2 * last + 1])
                out[2 * last + 1] = out[2 * i + 1];
        } else {
            last++;
            out[2 * last] = out[2 * i];
            out[2 * last + 1] = out[2 * i + 1];
        }
    }
    *n_p = count ? last + 1 : 0;
    return out;
}

/* ---- the owner's side ---- */

bool hx_acks_expect(hx_endpoint_t *ep, uint64_t seq, uint64_t region, const uint64_t *spans, size_t n)
{
    size_t count;
    uint64_t *merged = merge(spans, n, &count);
    append(&ep->unacked, new_ack(seq, region, merged, count));
    return ep->unacked.n <= UNACKED_MAX;
}

bool hx_acks_received(hx_endpoint_t *ep, uint64_t seq)
{
    hx_ack_t *before = NULL;
    for (hx_ack_t *ack = ep->unacked.head; ack; before = ack, ack = ack->next)
        if (ack->seq == seq) {
            drop(&ep->unacked, before);
            return true;
        }
    return false;
}

/* Lost, and by its own clock it may still be writing: a peer that posts nothing more needs this long to see that it has
 * lost us, and to take back what it had posted. A process that has ended, or said that it was done, needs no time. */
bool hx_acks_haunting(const hx_endpoint_t *ep, uint64_t now)
{
    return ep->acks && atomic_load(&ep->state) == HX_EP_LOST && !ep->quiet && !hx_endpoint_process_gone(ep) &&
           now < ep->lost_ns + ep->fence_ns;
}

uint64_t hx_acks_held(hx_endpoint_t *ep, uint64_t region, uint64_t off, uint64_t end, uint64_t now)
{
    if (!ep->acks)
        return 0;
    if (atomic_load(&ep->state) == HX_EP_LOST)
        return hx_acks_haunting(ep, now) || !hx_providers_settled(ep) ? end - off : 0;
    uint64_t held = 0, kept = hx_providers_kept_out(ep);
    for (const hx_ack_t *ack = ep->unacked.head; ack && held < end - off; ack = ack->next) {
        if (ack->region != region || ack->seq <= kept)
            continue;
        for (size_t i = hx_span_past(ack->words, ack->n, off); i < ack->n && ack->words[2 * i] < end; i++) {
            uint64_t from = ack->words[2 * i] > off ? ack->words[2 * i] : off;
            uint64_t to = ack->words[2 * i + 1] < end ? ack->words[2 * i + 1] : end;
            held += to > from ? to - from : 0;
        }
    }
    return held < end - off ? held : end - off;
}

/* ---- the writer's side ---- */

static void acknowledge(hx_endpoint_t *ep, uint64_t seq)
{
    if (ep->link && !ep->link->dead)
        hx_link_send(ep->link, HX_F_REVOKE_ACK, seq, NULL, 0, -1);
}

bool hx_acks_owe(hx_endpoint_t *ep, uint64_t seq, uint64_t region, const uint64_t *spans, size_t n)
{
    size_t count;
    uint64_t *merged = merge(spans, n, &count), *tags;
    size_t held = hx_providers_touching(ep, region, merged, count, &tags);
    free(merged);
    if (!held) {
        acknowledge(ep, seq);
        return true;
    }
    append(&ep->owed, new_ack(seq, region, tags, held));
    return ep->owed.n <= OWED_MAX;
}

void hx_acks_pay(hx_endpoint_t *ep)
{
    /* In half of what the owner waits, what is with the library ends by itself, or is taken back. */
    uint64_t patience = ep->engine->config.cancel_grace_ns / 2, now = ep->owed.head ? hx_now_ns() : 0;
    if (atomic_load(&ep->state) == HX_EP_LOST)
        hx_acks_free(ep);
    for (hx_ack_t *before = NULL, *ack = ep->owed.head; ack;) {
        while (ack->n && !hx_providers_hold(ep, ack->words[ack->n - 1]))
            ack->n--;
        if (ack->n) {
            if (now > ack->since_ns + patience)
                hx_providers_recall(ep);
            before = ack;
            ack = ack->next;
            continue;
        }
        acknowledge(ep, ack->seq);
        drop(&ep->owed, before);
        ack = before ? before->next : ep->owed.head;
    }
}

void hx_acks_free(hx_endpoint_t *ep)
{
    while (ep->owed.head)
        drop(&ep->owed, NULL);
    while (ep->unacked.head)
        drop(&ep->unacked, NULL);
}
