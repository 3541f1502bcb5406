/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs provider: reliable queue pairs of RDMA devices behind the provider table.
 *
 * Posts go to the device on the posting thread, and completions come in on the thread that drains the engine: its descriptor
 * is readable when the device's completion channel is. What does not fit the send queue, what has to be taken back, and queue
 * pairs that have failed are the provider's thread's, which sleeps otherwise.
 *
 * `mu` guards all of it, but registrations (`reg_mu`). It is held across calls that post and poll, and, on the thread, across
 * those that make queue pairs; posting and draining threads only try to take it. */
#ifndef HX_VERBS_CORE_H
#define HX_VERBS_CORE_H

#include "provider.h"
#include "verbs.h"

#define HX_VERBS_REQUESTS 4096
#define HX_VERBS_DEPTH 512          /* work requests of a queue pair; no more than the device has */
#define HX_VERBS_WRS 128            /* of one request, beside its flush */
#define HX_VERBS_SGES 16            /* of one work request */
#define HX_VERBS_CHUNK (8ull << 20) /* bytes of one request: what others wait for, and how often progress shows */
#define HX_VERBS_ENDS 8 /* queue pairs of a peer that are being destroyed: no more are made beside so many */

typedef struct hx_verbs hx_verbs_t;
typedef struct hx_vreq hx_vreq_t;
typedef struct hx_vend hx_vend_t;

/* A part of an operation that the device works on. */
struct hx_vreq {
    hx_vreq_t *next, *prev; /* of its peer, oldest first */
    hx_op_t *op;            /* NULL: free */
    hx_vpeer_t *peer;
    hx_batch_t batch;
    uint64_t nbytes;
    uint32_t index, gen, nwr;
    bool returned; /* the device is done with its last work request, but not well */
};

/* A queue pair that has been given up. A thread of its own shuts it, and then destroys it, which may take as long as its driver
 * likes. Others go on meanwhile; what was on it has ended when it is destroyed. */
struct hx_vend {
    hx_vend_t *next; /* of its peer */
    hx_verbs_t *v;
    hx_verbs_qp_t *qp;
    hx_op_t **ops; /* for each request that was on it; they count it still */
    size_t nops;
    pthread_t thread;
    bool threaded;
    uint64_t last_id; /* of the last work request on it; 0: the device has returned it, or there is none */
    uint64_t shut_ns; /* shut since; 0: not yet */
    bool flushed;     /* the device has given all of them back */
    bool harmless;    /* nothing arrives there, or leaves from it, any more */
    bool over;        /* the thread has tried all, with this error: */
    int error;
    bool stands; /* and the queue pair cannot be destroyed, or was not in time when the engine was closed */
    char why[128];
};

/* Of PATH: the newest queue pair of this end. */
typedef struct {
    uint32_t generation; /* from 1; ends with the same one belong together; 0: it will be made */
    uint32_t joined;     /* 1: connected to the other end of that generation, so that it can be written to */
    uint32_t flush_rkey; /* eight bytes at 0 that may be read: behind writes, it tells that they have landed */
    hx_verbs_address_t address;
} hx_verbs_intro_t;

struct hx_vpeer {
    hx_vpeer_t *next;
    hx_verbs_t *v;
    hx_endpoint_t *ep; /* referenced until it is released */
    hx_verbs_qp_t *qp;
    hx_verbs_intro_t mine, theirs;
    _Atomic bool heard;         /* the peer has said that it has, or will have, an end */
    bool usable;                /* connected at both ends, and nothing must be taken back */
    bool failed;                /* it must be made anew */
    hx_vend_t *ends;            /* those before it, which are not destroyed yet */
    bool stuck;                 /* one of them cannot be destroyed, nor be shut: there is no way to the peer any more */
    bool released;              /* nothing is posted any more */
    _Atomic bool forgotten;     /* nobody has a handle to it any more */
    uint64_t since_ns, next_ns; /* unusable since; another attempt then */
    uint64_t made_ns, delay_ns; /* the last attempt; between two of them */
    /* Connecting finds a way to an address, which may take a second: in a thread for each. */
    pthread_t joiner;
    enum { HX_VJOIN_NONE, HX_VJOIN_RUNNING, HX_VJOIN_OVER } join;
    hx_verbs_address_t join_to;
    int join_error;
    /* A queue pair of generation limbo_generation or before went with requests that had not ended: until the peer has made its
     * end anew as well, their bytes may still arrive there. */
    bool limbo;
    uint32_t limbo_generation;
    uint64_t limbo_ns;                /* since no queue pair of ours sends them again; 0: one may */
    uint64_t keep_seq;                /* revocations up to here are kept by giving up this end */
    _Atomic uint64_t kept_seq;        /* and are kept by now */
    uint32_t used, depth, inline_max; /* work requests in the send queue; bytes */
    hx_opq_t runq;
    hx_vreq_t *reqs_head, *reqs_tail;
    hx_note_t *held, *held_tail; /* aborted ones, for as long as it is in limbo */
    char why[128];
    char obstacle[128]; /* to the last attempt; until it is usable */
};

struct hx_verbs {
    hx_engine_t *engine;
    const hx_verbs_table_t *lib;
    hx_verbs_device_t *device;
    hx_verbs_info_t info;
    pthread_mutex_t mu, inbox_mu, reg_mu, wake_mu;
    hx_opq_t inbox; /* posts that found mu taken; under inbox_mu */
    pthread_t thread;
    uint64_t stopping_ns;                  /* since */
    bool started, stopping, stopped, over; /* over: no registrations any more; under reg_mu */
    bool gone, told_gone;                  /* the device */
    bool hungry;                           /* somebody waits for a request */
    int wake_fd;
    _Atomic bool awake;
    hx_vpeer_t *peers;
    hx_vreq_t *reqs, *free_reqs;
    size_t nreqs;     /* in use */
    uint8_t *scratch; /* two pages: what peers read to flush; where our flushes go */
    hx_verbs_mr_t *scratch_mr[2];
    uint32_t flush_rkey, sink_lkey;
    size_t nmrs; /* regions' registrations that stand; under reg_mu */
};

/* Of a work request's number: it is its request's last. */
#define HX_VERBS_LAST (1u << 31)

static inline uint64_t hx_verbs_last_id(const hx_vreq_t *r)
{
    return (uint64_t)r->gen << 32 | r->index | HX_VERBS_LAST;
}

/* What peers know a region by: its key, where it begins in its registration, and that it has one. */
static inline uint64_t hx_verbs_name(uint32_t rkey, const void *base)
{
    return 1ull << 48 | (uint64_t)((uintptr_t)base % HX_VERBS_PAGE) << 32 | rkey;
}

static inline uint64_t hx_verbs_base(uint64_t name)
{
    return name >> 32 & (HX_VERBS_PAGE - 1);
}

/* Of two times, where 0 is never. */
static inline uint64_t hx_verbs_sooner(uint64_t a, uint64_t b)
{
    return !a || (b && b < a) ? b : a;
}

/* verbs_engine.c */
void hx_verbs_wake(hx_verbs_t *v);
void hx_verbs_gone(hx_verbs_t *v); /* the device, of which nothing is asked any more; under mu */

/* verbs_post.c; under mu, but for submit */
void hx_verbs_submit(hx_op_t *op);
bool hx_verbs_submit_now(hx_op_t *op);
bool hx_verbs_take_posts(hx_verbs_t *v);
/* `small`: on a thread that others wait for; large lists are left to the provider's. */
void hx_verbs_pump(hx_vpeer_t *p, bool small, hx_done_t *done);
void hx_verbs_forget(hx_vreq_t *r); /* it is nobody's any more; its operation counts it still */
bool hx_verbs_drain(hx_verbs_t *v, bool small, hx_done_t *done); /* takes in what has completed; true: something */

/* verbs_peer.c */
size_t hx_verbs_introduce(hx_endpoint_t *ep, void *state, uint8_t *out, size_t max);
bool hx_verbs_meet(hx_endpoint_t *ep, void *state, const uint8_t *body, size_t n);
uint64_t hx_verbs_tend(hx_vpeer_t *p, uint64_t now,
                       hx_done_t *done); /* under mu, which it drops; when to look again, or 0 */
void hx_verbs_free_notes(hx_vpeer_t *p);
void hx_verbs_fail(hx_vpeer_t *p, const char *why); /* its queue pair must go; under mu */
void hx_verbs_unusable(hx_vpeer_t *p);
void hx_verbs_keep_out(hx_endpoint_t *ep);
uint64_t hx_verbs_kept_out(hx_endpoint_t *ep);
void hx_verbs_overdue(hx_engine_t *engine, void *state, const hx_op_t *op, uint32_t gen);
size_t hx_verbs_touching(hx_endpoint_t *ep, uint64_t region, const uint64_t *spans, size_t n, uint64_t **tags_p);
bool hx_verbs_holds(hx_endpoint_t *ep, uint64_t tag);
void hx_verbs_recall(hx_endpoint_t *ep);
bool hx_verbs_idle(hx_endpoint_t *ep);

/* verbs_end.c; under mu */
/* Nothing that was on a queue pair of it can arrive, or leave, any more; none of them is there; one is being destroyed; and,
 * there are so many that no more should be made. */
bool hx_verbs_harmless(const hx_vpeer_t *p);
bool hx_verbs_quiet(const hx_vpeer_t *p);
bool hx_verbs_ending(const hx_vpeer_t *p);
bool hx_verbs_crowded(const hx_vpeer_t *p);
void hx_verbs_down(hx_vpeer_t *p, const char *why, bool gone);             /* its queue pair is given up; may drop mu */
uint64_t hx_verbs_tend_ends(hx_vpeer_t *p, uint64_t now, hx_done_t *done); /* when to look again, or 0 */
void hx_verbs_leave(hx_vpeer_t *p); /* what a driver has not come back from by now: the engine is abandoned with it */

/* verbs_memory.c */
void hx_verbs_adopt(hx_engine_t *engine, void *state, hx_region_t *region);
void hx_verbs_withdraw(hx_engine_t *engine, void *state, hx_region_t *region);
void hx_verbs_disown(hx_engine_t *engine, void *state, hx_region_t *region, hx_job_t *then);
void hx_verbs_forget_all(hx_verbs_t *v); /* and close the device, with the last that is left */

#endif
