/* SPDX-License-Identifier: Apache-2.0 */
/* The hixl provider: Huawei's library behind the provider table.
 *
 * No call of the library is made on a thread of the caller's, nor on the control thread:
 *   main thread     hixl_engine.c, hixl_memory.c: Initialize, registrations, copies to and from the device, Finalize.
 *   posters         hixl_peer.c: one for each peer: Connect, TransferAsync, SendNotify, Disconnect. A post can block for
 *                   seconds; it blocks its own peer only.
 *   poller          hixl_poll.c: turns finished requests into completions, for all peers.
 *
 * `mu` guards everything below and is never held across a call of the library, nor while an operation is finished.
 * Inside the library a poll of a peer waits for a post to that peer, so the two exclude each other here (`busy`, `polling`):
 * the bulk call, which waits for all peers, runs only while nobody posts; else peers that nobody posts to are polled one by
 * one. A poster waits for a poll, which takes microseconds; a poll never waits for a post. */
#ifndef HX_HIXL_CORE_H
#define HX_HIXL_CORE_H

#include "hixl_load.h"
#include "provider.h"

#define HX_HIXL_REQUEST_BYTES (64ull << 20) /* of one request: progress shows at least so often */
#define HX_HIXL_REQUESTS 16384              /* with the library, of one engine */
#define HX_HIXL_PEER_REQUESTS 256           /* and of one peer; HIXL itself refuses the 4,097th */
#define HX_HIXL_PEER_BYTES (256ull << 20)
#define HX_HIXL_TRIES 3 /* of a post that is refused because of the link, not of its rows */
#define HX_HIXL_ADDRESS_MAX 128
#define HX_HIXL_REGISTRATIONS 4096 /* the library's limit */

typedef struct hx_hixl hx_hixl_t;
typedef struct hx_hreq hx_hreq_t;

/* A part of an operation that is with the library, or will be again. */
struct hx_hreq {
    hx_hreq_t *next, *prev;
    hx_op_t *op;
    hx_batch_t batch;
    uint64_t nbytes;
    void *handle; /* the library's; reused by it at once, and so never a name of anything */
    uint32_t index, gen, tries;
    bool posted, with_library;
    /* It has failed, and waits for Disconnect: only then is it certain that its memory is left alone (the library calls all
     * requests of a peer failed when one of them is). */
    bool failed, blamed;
    uint32_t code;
    char detail[192];
};

typedef struct {
    hx_hreq_t *head, *tail;
} hx_hreqq_t;

struct hx_hpeer {
    hx_hpeer_t *next;
    hx_hixl_t *h;
    hx_hixl_name_t *name;
    char address[HX_HIXL_ADDRESS_MAX];
    pthread_t thread;
    hx_bell_t bell;
    bool ended, joined;
    unsigned users; /* endpoints */
    uint8_t incarnation[HX_INCARNATION_LEN];
    hx_opq_t runq;    /* operations with rows that were not posted yet, in turn */
    hx_op_t *noting;  /* whose note the library is sending */
    bool hold;        /* nothing more is posted: a registration waits for the call that it is in to return */
    hx_opq_t notes;   /* operations to a raw endpoint whose bytes have landed */
    hx_op_t *current; /* of runq or notes, looked at by the poster without the lock */
    hx_hreqq_t with_library, again;
    unsigned outstanding;
    uint64_t outstanding_bytes;
    bool busy, polling;
    bool connected;
    uint32_t connection;                 /* counts them; 0: none yet */
    uint64_t local_seen, remote_seen;    /* what was registered, and known of the peer's, when it connected */
    bool recall;                         /* disconnect: something must be taken back, or the link is latched */
    unsigned stalls;                     /* links in a row on which something stalled and nothing landed */
    bool stalled;                        /* why this one is taken down */
    bool latched;                        /* a request has failed: the library refuses all others of the peer */
    bool eager;                          /* connect without waiting for the next operation */
    uint64_t note_due_ns, notes_full_ns; /* when the next note is tried; since when there is no room for it */
    unsigned failures;                   /* of Connect, in a row */
    uint64_t not_before_ns;              /* the next attempt of what was refused */
    uint32_t last_code;
    char last_detail[HX_TEXT_MAX];
    hx_endpoint_t *answers; /* raw endpoints to be told of the outcome of Connect; referenced */
    unsigned refs;          /* endpoints that point here, forgotten ones included */
    bool hungry;            /* waits for its place among those that have requests with the library */
    uint64_t way_ns;        /* until when it gives way to a hungry one */
    uint64_t polled_ns, done_ns, full_ns,
        entered_ns; /* its pause while there is no room; when the poster went into the library */
};

typedef struct hx_hjob {
    struct hx_hjob *next;
    void (*run)(hx_hixl_t *h, struct hx_hjob *job);
} hx_hjob_t;

typedef struct {
    uint64_t start, end;
    int32_t kind;
    void *handle;
    uint32_t refs;
} hx_interval_t;

typedef struct hx_owned {
    struct hx_owned *next;
    void *base;
    const hx_region_t *region; /* for its identity only */
} hx_owned_t;

struct hx_hixl {
    hx_engine_t *engine;
    const hx_vendor_t *vendor;
    const hx_hixl_table_t *lib;
    hx_hixl_object_t *object;
    void *context; /* of the device; made current in every thread of ours */
    char local[HX_HIXL_ADDRESS_MAX], link[16];
    char **keys, **values;
    size_t noptions;
    int32_t device;
    uint64_t busy_poll_ns, fence_ns;
    int32_t timeout_ms;
    pthread_mutex_t mu;
    pthread_cond_t gate; /* busy, polling, bulk, connected: somebody may go on */
    pthread_t main, poller;
    bool main_started, poller_started, ready, stopping, stopped, poller_stop, poller_gone, main_stop;
    bool main_gone; /* it takes no jobs any more */
    bool main_left;
    hx_status_t init_status;
    char init_text[HX_TEXT_MAX];
    hx_bell_t main_bell, poll_bell;
    hx_hjob_t *jobs_head, *jobs_tail;
    hx_hpeer_t *peers;
    hx_hreq_t *requests;
    hx_hreq_t *free_requests;
    /* sums over peers: requests; posters inside the library; links; links being made */
    unsigned outstanding, posting, connected, connecting;
    bool bulk;      /* the poller is inside the bulk call */
    int bulk_works; /* -1: not known yet */
    bool quiesce;   /* no link may be up: a registration is being taken back */
    unsigned hungry;
    uint64_t last_post_ns, last_done_ns, sweep_ns;
    _Atomic bool kicked;
    uint64_t adoptions;
    uint32_t notify_wanted;
    uint64_t notify_ns;
    /* main thread only */
    hx_interval_t *intervals;
    size_t nintervals, cap;
    hx_owned_t *owned;
    hx_hjob_t *leaving; /* regions that the library could not be made to forget so far */
    uint64_t leave_due_ns;
    bool unused;     /* there are intervals without a region */
    bool more_alike; /* the next job does the same as this one */
    bool finalized;  /* set by the main thread before it is gone */
};

/* Operations that have come to their end, collected under mu and finished without it. */
typedef struct {
    hx_op_t *head;
    hx_op_t *notes; /* those whose bytes had landed, and whose note to a raw peer will not be sent */
} hx_hdone_t;

/* Rows in the library's form; a poster keeps one. */
typedef struct {
    hx_hixl_desc_t *list;
    size_t n, cap;
} hx_hdescs_t;

void hx_hixl_push_job(hx_hixl_t *h, hx_hjob_t *job);
const char *hx_hixl_code_name(uint32_t code);
/* aclGetRecentErrMsg of this thread, on one line; "" if there is none. */
void hx_hixl_recent_error(const hx_hixl_t *h, char text[HX_TEXT_MAX]);

/* hixl_request.c; under mu, but for the last three */
void hx_hreqq_push(hx_hreqq_t *q, hx_hreq_t *r);
void hx_hreqq_remove(hx_hreqq_t *q, hx_hreq_t *r);
hx_hreq_t *hx_hixl_new_request(hx_hixl_t *h, hx_op_t *op); /* NULL: none is left */
void hx_hixl_free_request(hx_hixl_t *h, hx_hreq_t *r);
void hx_hixl_into_library(hx_hpeer_t *p, hx_hreq_t *r);
void hx_hixl_out_of_library(hx_hpeer_t *p, hx_hreq_t *r);
void hx_hixl_post_again(hx_hpeer_t *p, hx_hreq_t *r);
void hx_hixl_take_again(hx_hpeer_t *p, hx_hreq_t *r);
void hx_hixl_queue_op(hx_hpeer_t *p, hx_op_t *op);
hx_op_t *hx_hixl_unqueue_op(hx_hpeer_t *p);
void hx_hixl_blame(hx_op_t *op, uint32_t code, const char *detail);
void hx_hixl_maybe_done(hx_op_t *op, hx_hdone_t *done); /* collects it if nothing of it is left */
/* What the library says of a request: it has landed (HX_HIXL_SUCCESS), or why it failed. */
void hx_hixl_request_over(hx_hpeer_t *p, hx_hreq_t *r, uint32_t code, const char *detail, hx_hdone_t *done);
/* It has failed, and its link must come down before its memory is known to be left alone. */
void hx_hixl_request_failed(hx_hpeer_t *p, hx_hreq_t *r, uint32_t code, const char *detail);
void hx_hixl_swept_away(hx_hpeer_t *p, hx_hdone_t *done); /* Disconnect has returned: nothing is with the library */
void hx_hixl_fail_queued(hx_hpeer_t *p, hx_hdone_t *done);
void hx_hixl_drop_dead(hx_hpeer_t *p, hx_hdone_t *done); /* of what is queued, what has been told to end */
void hx_hixl_sweep(hx_hixl_t *h, hx_hpeer_t *p, uint64_t now, hx_hdone_t *done); /* and of what is with the library */
void hx_hixl_finish(hx_hdone_t *done);
size_t hx_hixl_touching(hx_endpoint_t *ep, uint64_t region, const uint64_t *spans, size_t n, uint64_t **tags_p);
bool hx_hixl_holds(hx_endpoint_t *ep, uint64_t tag);

/* hixl_post.c; under mu, dropped meanwhile */
bool hx_hixl_cut(hx_op_t *op, hx_hreq_t *r); /* takes its next rows; false: they have no bytes */
void hx_hixl_post(hx_hpeer_t *p, hx_hreq_t *r, hx_hdescs_t *descs);
/* The poller cannot ask about a peer whose poster is inside the library, so the poster asks as well: after each post (some
 * posts are complete when they return); with nothing more to post for busy_poll_ns. Then it is the poller's to ask. */
void hx_hixl_poll_after_post(hx_hpeer_t *p, bool more);
void hx_hixl_has_room(hx_hpeer_t *p); /* it does not wait for its place any more */
void hx_hixl_send_note(hx_hpeer_t *p);

/* hixl_link.c; under mu, dropped meanwhile */
void hx_hixl_enter(hx_hpeer_t *p); /* before a call of the library for this peer: unlocks mu */
void hx_hixl_leave(hx_hpeer_t *p); /* after it: locks mu */
void hx_hixl_connect(hx_hpeer_t *p);
void hx_hixl_disconnect(hx_hpeer_t *p);

/* hixl_peer.c; the first three need no lock */
void hx_hixl_submit(hx_op_t *op);
void hx_hixl_send_raw(hx_op_t *op);
void hx_hixl_wake_poster(hx_hpeer_t *p);
hx_hpeer_t *hx_hixl_peer(hx_hixl_t *h, const char *address);
void hx_hixl_reap(hx_hixl_t *h); /* frees peers that nobody uses any more */
void hx_hixl_free_peer(hx_hpeer_t *p);
bool hx_hixl_join_posters(hx_hixl_t *h, uint64_t deadline_ns); /* false: a call of the library does not return */

/* hixl_poll.c */
void *hx_hixl_poll_thread(void *arg);
/* Under mu, which it drops in between; the caller is the peer's poster and it is busy: up to n of its requests. True: some
 * were over. */
bool hx_hixl_poll_own(hx_hpeer_t *p, unsigned n, hx_hdone_t *done);

/* hixl_memory.c */
void hx_hixl_adopt(hx_engine_t *engine, void *state, hx_region_t *region);
void hx_hixl_withdraw(hx_engine_t *engine, void *state, hx_region_t *region);
void hx_hixl_disown(hx_engine_t *engine, void *state, hx_region_t *region, hx_job_t *then);
bool hx_hixl_drop_unused(hx_hixl_t *h); /* false: some of it is still known to the library */
void hx_hixl_settle_leaving(hx_hixl_t *h);
void hx_hixl_forget_all(hx_hixl_t *h); /* after Finalize */

#endif
