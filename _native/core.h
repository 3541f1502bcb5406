/* SPDX-License-Identifier: Apache-2.0 */
/* Private structures of the native core.
 *
 * Threads and who owns what:
 *   posting threads   any; validate, try the inline path, push to the submission ring. Never wait.
 *   copy threads      sched.c; claim a batch of one operation at a time and move its bytes.
 *   control thread    link.c, control.c; sockets, handshakes, region tables, notes, revocation, liveness.
 *   setup thread      setup.c; slow kernel work: population of pages, unmapping.
 * Lock order: engine->regions_mu, endpoint->note_mu, sched->mu, endpoint->rv_mu are never held together, and none
 * is held across a system call that can wait.
 *
 * Lifetime: engine > {region, endpoint} > operation. Endpoints, regions and remote regions are counted; an operation
 * holds a reference to each of its own from post to finish. The engine outlives them all (Python keeps it). */
#ifndef HX_CORE_H
#define HX_CORE_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "hx.h"
#include "ring.h"
#include "spanmap.h"

#define HX_MAX_WORKERS 16
#define HX_NONCE_LEN 32
#define HX_NS 1000000000ull

typedef struct hx_op hx_op_t;
typedef struct hx_page hx_page_t;
typedef struct hx_link hx_link_t;
typedef struct hx_note hx_note_t;
typedef struct hx_revoke hx_revoke_t;
typedef struct hx_command hx_command_t;
typedef struct hx_job hx_job_t;
typedef struct hx_standing hx_standing_t;
typedef struct hx_provider hx_provider_t;
typedef struct hx_hpeer hx_hpeer_t;
typedef struct hx_tpeer hx_tpeer_t;
typedef struct hx_vpeer hx_vpeer_t;
typedef struct hx_ack hx_ack_t;

/* ---- operations (op.c) ---- */

typedef struct {
    uint64_t local_off, remote_off, nbytes;
} hx_desc_t;

typedef struct {
    hx_region_t *local;
    hx_rregion_t *remote;
    size_t end; /* index past its last descriptor */
} hx_part_t;

/* A run of descriptors that one thread copies: from byte `first_off` of `first`, to byte `last_end` (0: its end) of the
 * one before `last`. */
typedef struct {
    size_t first, last;
    uint64_t first_off, last_end;
} hx_batch_t;

typedef enum {
    HX_STAGE_FREE,
    HX_STAGE_QUEUED,
    HX_STAGE_ACTIVE,
    HX_STAGE_HELD,
    HX_STAGE_NOTE,
    HX_STAGE_DONE
} hx_stage_t;

struct hx_op {
    uint32_t index; /* in the pool; constant */
    uint32_t kind;
    _Atomic uint32_t gen;
    _Atomic uint32_t stage;
    /* (generation << 8 | status) of a cancel. A late cancel of an earlier life of this slot has another generation
     * and so does nothing. */
    _Atomic uint64_t cancel;
    _Atomic uint64_t cancel_ns;
    _Atomic uint64_t progress_ns; /* 0: not started */
    _Atomic uint64_t moved;
    _Atomic uint32_t failed; /* first status of a copy that failed */
    _Atomic uint32_t code;   /* HX_ERR_PROVIDER: what the library answered */
    _Atomic(char *) detail;  /* and said; owned */
    void *after;             /* the NPU's event to wait for */
    _Atomic uint64_t report; /* generation << 2 | hx_report_t */
    int32_t sys_errno;
    uint64_t token, epoch, nbytes, posted_ns, done_ns, bad_index;
    uint32_t status;
    hx_endpoint_t *ep;
    const hx_provider_t *provider;
    hx_part_t *parts;
    hx_desc_t *descs;
    size_t nparts, ndescs;
    hx_part_t one_part; /* storage of the common case */
    hx_desc_t one_desc;
    hx_note_t *note;
    uint64_t heap_bytes;
    /* under sched->mu */
    hx_op_t *next;
    size_t cursor;
    uint64_t cursor_off;
    hx_batch_t retry[HX_MAX_WORKERS]; /* batches given back because a revocation was on its way */
    uint32_t nretry, running;
    bool prepared, checked, queued, blocked; /* checked: by hixl_peer.c, for overlap */
    bool again; /* gave a batch back when `kicks` was again_kicks: not before the next kick */
    uint32_t again_kicks;
    uint32_t requests, again_requests; /* hixl_*.c: with the library, and to be posted again; under its lock */
    uint64_t hold_until_ns;            /* provider_fault.c */
    uint32_t hold_action;
};

/* Bytes [*from, *to) of row i of the operation that belong to the batch. */
static inline void hx_op_row(const hx_op_t *op, const hx_batch_t *b, size_t i, uint64_t *from, uint64_t *to)
{
    *from = i == b->first ? b->first_off : 0;
    *to = i == b->last - 1 && b->last_end ? b->last_end : op->descs[i].nbytes;
}

typedef enum { HX_REPORT_NONE, HX_REPORT_EARLY, HX_REPORT_EARLY_TAKEN, HX_REPORT_FINAL } hx_report_t;

hx_status_t hx_op_pool_init(hx_engine_t *engine);
void hx_op_pool_free(hx_engine_t *engine);
/* HX_OK, or why the operation must stop: cancelled, endpoint lost, an earlier failure of its own. */
hx_status_t hx_op_verdict(const hx_op_t *op);
/* The provider has let go of both buffers. Exactly once for each operation that was submitted. */
void hx_op_finish(hx_op_t *op, hx_status_t status);
/* Its note has been delivered, or never will be. */
void hx_op_complete(hx_op_t *op, hx_status_t status);
/* The caller stops waiting although the provider has not let go (contract 3). */
void hx_op_report_early(hx_engine_t *engine, hx_op_t *op, uint32_t gen);
void hx_op_release(hx_op_t *op); /* back to the pool, after its last record was taken */
void hx_op_cancel_as(hx_op_t *op, uint32_t gen, hx_status_t status);
/* The first failure of a part of it decides. `detail` may be NULL. */
void hx_op_fail(hx_op_t *op, hx_status_t status, int sys_errno, uint32_t code, const char *detail);
size_t hx_op_part_of(const hx_op_t *op, size_t desc);
/* Of n spans (offset, end), which are sorted and apart, the first that ends past `off`; n: none. */
size_t hx_span_past(const uint64_t *spans, size_t n, uint64_t off);
hx_status_t hx_op_check_overlap(hx_op_t *op);

/* ---- copy threads (sched.c) ---- */

typedef struct {
    hx_op_t *head, *tail;
} hx_opq_t;

typedef struct {
    hx_engine_t *engine;
    pthread_mutex_t mu;
    hx_bell_t bell;
    hx_endpoint_t *active_head, *active_tail; /* endpoints with runnable operations, in turn */
    hx_endpoint_t *blocked_head;              /* endpoints with blocked ones */
    _Atomic uint32_t kicks;                   /* counts events that can unblock an operation */
    uint32_t kicks_seen;
    _Atomic bool stopping;
    pthread_t threads[HX_MAX_WORKERS];
    uint32_t nthreads;
} hx_sched_t;

void hx_opq_push(hx_opq_t *q, hx_op_t *op);
hx_op_t *hx_opq_pop(hx_opq_t *q);

/* Operations that have come to their end: collected under a provider's lock, and finished without it. */
typedef struct {
    hx_op_t *head;
} hx_done_t;

void hx_done_add(hx_op_t *op, hx_done_t *done); /* unless something of it is left */
void hx_done_finish(hx_done_t *done);
void hx_opq_sweep(hx_opq_t *q, hx_done_t *done); /* what has been told to end leaves the queue */

/* Takes the next rows of at most `nbytes` bytes off the operation. */
hx_batch_t hx_op_claim(hx_op_t *op, uint64_t nbytes);
/* Do these rows touch one of n such spans of the peer's region? */
bool hx_op_meets(const hx_op_t *op, const hx_batch_t *batch, uint64_t region, const uint64_t *spans, size_t n);
hx_status_t hx_sched_start(hx_engine_t *engine);
void hx_sched_stop(hx_engine_t *engine);
void hx_sched_submit(hx_op_t *op);
void hx_sched_kick(hx_engine_t *engine);

/* ---- setup thread (setup.c) ---- */

struct hx_job {
    hx_job_t *next;
    void (*run)(hx_job_t *job);
};

typedef struct {
    pthread_mutex_t mu;
    hx_bell_t bell;
    hx_job_t *head, *tail;
    _Atomic bool stopping;
    bool started;
    pthread_t thread;
} hx_setup_t;

hx_status_t hx_setup_start(hx_engine_t *engine);
void hx_setup_stop(hx_engine_t *engine); /* runs what is queued, then ends */
void hx_setup_push(hx_engine_t *engine, hx_job_t *job);

/* ---- regions (region.c, rregion.c) ---- */

/* A region and a provider whose library must know it: PENDING until it does, LEAVING until it has forgotten it. */
typedef enum { HX_ADOPT_NONE, HX_ADOPT_PENDING, HX_ADOPT_HELD, HX_ADOPT_LEAVING } hx_adoption_t;
typedef enum { HX_REGION_PENDING, HX_REGION_READY, HX_REGION_FAILED, HX_REGION_CLOSING } hx_region_state_t;

struct hx_region {
    hx_engine_t *engine;
    hx_region_t *next; /* engine->regions, under regions_mu */
    _Atomic uint32_t refs;
    _Atomic uint32_t state;
    _Atomic uint32_t busy; /* operations that use it as their local end */
    uint32_t kind, access;
    uint64_t id, rkey, nbytes;
    uint8_t *base;
    size_t map_len;
    int memfd;
    hx_region_t *parent; /* of a view: owns the mapping and the memfd */
    uint64_t file_off;   /* where it begins in the memfd */
    int populated;       /* a memfd's pages: 1 there, -1 never will be; under regions_mu */
    int sys_errno;
    _Atomic uint32_t adoption; /* hx_adoption_t */
    _Atomic uint64_t adopted;  /* when, in the provider's count of adoptions; 0: not */
    uint64_t direct;           /* what peers name it by to that provider's library or device; 0: nothing */
    struct hx_verbs_mr *mr;    /* verbs_memory.c, under its lock */
    uint32_t lkey;
    bool lwrite;    /* by its own device */
    char *obstacle; /* why the provider did not take it; written before `adoption` says so */
    /* written once by hx_region_announce, read by the control thread after the command that carries it */
    char *name, *blob;
    uint32_t name_len, blob_len;
    /* control thread only */
    bool wanted;             /* to be announced; holds a reference until it is deregistered or the engine stops */
    _Atomic bool announced;  /* peers have been told */
    bool was_announced;      /* and may remember */
    hx_standing_t *standing; /* what is revoked now (standing.c) */
};

void hx_region_ref(hx_region_t *region);
/* It has become usable, or (`err`, `why`) never will be. */
void hx_region_settle(hx_region_t *region, int err, const char *why);
void hx_standing_free(hx_region_t *region);  /* standing.c */
bool hx_region_acquire(hx_region_t *region); /* for an operation: false once it is closing */
void hx_region_release(hx_region_t *region);

typedef enum { HX_MAP_NONE, HX_MAP_ASKED, HX_MAP_MAPPED, HX_MAP_UNMAPPING, HX_MAP_FAILED } hx_map_state_t;

struct hx_rregion {
    hx_engine_t *engine;
    uint64_t ep_serial;
    hx_rregion_t *hash_next; /* endpoint's table, control thread only */
    _Atomic uint32_t refs;
    _Atomic uint32_t users; /* operations */
    _Atomic bool dead;      /* deregistered, or its peer is lost */
    _Atomic uint32_t map_state;
    _Atomic bool populated;
    _Atomic uint64_t used_ns;
    uint32_t kind, access;
    uint64_t id, rkey, nbytes, addr;
    char *name;      /* of a raw peer's; else NULL */
    uint64_t direct; /* as the owner's library or device knows it (hixl: its address; verbs: its key); 0: it does not */
    uint64_t seen;   /* when it was announced, in the engine's count of announcements */
    uint8_t *map;    /* valid while map_state is MAPPED */
    uint8_t *base;   /* the region's first byte in it */
    size_t map_len;
    int sys_errno;
};

hx_rregion_t *hx_rregion_new(hx_endpoint_t *ep);
bool hx_rregion_acquire(hx_rregion_t *r);
void hx_rregion_release(hx_rregion_t *r);
void hx_rregion_kill(hx_rregion_t *r);
hx_status_t hx_rregion_map(hx_rregion_t *r, int fd); /* takes the fd */

/* ---- the page a writer shares with the owner of the memory it writes (page.c) ---- */

#define HX_SLOTS 62
#define HX_INLINE_SLOTS 32 /* the last ones, for posting threads */
#define HX_REVOKE_ALL UINT64_MAX
/* The first HX_MAX_WORKERS are the copy threads'; between them and the posting threads', those of a library's poster. */
#define HX_FIRST_LIBRARY_SLOT HX_MAX_WORKERS
#define HX_LIBRARY_SLOTS (HX_SLOTS - HX_INLINE_SLOTS - HX_MAX_WORKERS)
#define HX_ANY_REGION UINT64_MAX /* in a slot: more regions than there are slots */

hx_page_t *hx_page_create(int *fd_p);
hx_page_t *hx_page_import(int fd); /* takes the fd; NULL if it is not a sealed page of the right size */
void hx_page_unmap(hx_page_t *page);
void hx_page_publish(hx_page_t *page, unsigned slot, uint64_t region, uint64_t off, uint64_t end);
void hx_page_clear(hx_page_t *page, unsigned slot);
uint64_t hx_page_revoke_seq(hx_page_t *page);
void hx_page_set_revoke_seq(hx_page_t *page, uint64_t seq);
/* Bytes of [off, end) of `region` that a slot holds right now, at most end - off. */
uint64_t hx_page_overlap(hx_page_t *page, uint64_t region, uint64_t off, uint64_t end);
bool hx_page_busy(hx_page_t *page);

/* ---- revoked spans as the writer knows them (revoked.c) ---- */

#define HX_REVOKED_LISTS 64

typedef struct {
    struct hx_revoked_map *maps; /* of the regions whose ids fall here */
    _Atomic uint32_t n_sticky;
} hx_revoked_list_t;

typedef struct {
    pthread_mutex_t mu;
    _Atomic uint64_t applied; /* sequence number up to which the set below is complete */
    _Atomic uint64_t newest;  /* seq of the newest revocation */
    size_t n_spans;
    hx_revoked_list_t lists[HX_REVOKED_LISTS];
} hx_revoked_set_t;

void hx_revoked_init(hx_revoked_set_t *set);
void hx_revoked_free(hx_revoked_set_t *set);
bool hx_revoked_add(hx_revoked_set_t *set, uint64_t region, const uint64_t *spans, size_t n, uint64_t seq);
void hx_revoked_grant(hx_revoked_set_t *set, uint64_t region, const uint64_t *spans, size_t n);
/* Of a region that is marked dead already: its id never comes back. */
void hx_revoked_forget(hx_revoked_set_t *set, uint64_t region);
/* Without a lock: nothing of this region is refused to a permission of this epoch. False: ask hx_revoked_hits. */
bool hx_revoked_quiet(hx_revoked_set_t *set, uint64_t region, uint64_t epoch);
bool hx_revoked_hits(hx_revoked_set_t *set, uint64_t region, uint64_t off, uint64_t end, uint64_t epoch);

/* ---- endpoints (endpoint.c) ---- */

/* acks.c */
typedef struct {
    hx_ack_t *head, *tail;
    size_t n;
} hx_acks_t;

struct hx_note {
    hx_note_t *next;
    hx_op_t *op;  /* completes when it is acknowledged; NULL: nobody waits */
    uint32_t gen; /* of op */
    uint64_t seq;
    bool aborted;
    uint32_t topic_len, len;
    char data[]; /* topic, payload */
};

typedef enum { HX_EP_SHAKING, HX_EP_UP, HX_EP_LOST } hx_ep_state_t;

#define HX_RTABLE 1024 /* buckets */

struct hx_endpoint {
    hx_engine_t *engine;
    hx_endpoint_t *next; /* engine->endpoints, control thread only */
    _Atomic uint32_t refs;
    _Atomic uint32_t state;
    _Atomic uint32_t lost_status;
    _Atomic uint32_t inflight;
    _Atomic uint32_t expecting; /* awaits for something that the peer may announce */
    uint64_t serial;
    char name[HX_NAME_MAX + 1];
    uint8_t incarnation[HX_INCARNATION_LEN];
    uint64_t epoch;
    bool local; /* over a unix socket: shared memory is possible */
    bool outgoing;
    uint64_t token; /* of hx_connect */
    hx_link_t *link;
    /* same host */
    int pidfd;
    pid_t pid;
    bool vm_ok; /* the nonce proof succeeded: process_vm_* reaches the peer */
    int vm_errno;
    /* A path on which the peer writes without our help or knowledge (hixl): it acknowledges each revocation when nothing
     * of its own touches the span any more (acks.c). */
    bool acks;
    bool quiet;        /* lost, and it said that nothing was on its way */
    uint64_t fence_ns; /* so long after its last sign of life, it has stopped by its own clock */
    uint64_t lost_ns;
    hx_acks_t unacked;            /* what it has not acknowledged; control thread only */
    hx_acks_t owed;               /* what we have not; control thread only */
    uint64_t features;            /* what both sides have */
    uint8_t data_key[32];         /* of its data connections (data_hello.c) */
    hx_revoked_set_t denied;      /* what it may not touch of ours: the owner's own check, where the owner makes one */
    hx_tpeer_t *tcp;              /* likewise */
    hx_vpeer_t *verbs;            /* likewise */
    hx_hpeer_t *hixl;             /* set before the first remote region is known */
    uint32_t hixl_asked;          /* the connection that it was asked for; its poster only */
    _Atomic uint32_t hixl_proven; /* the connection whose other end is known to be this peer (hixl_peer.c) */
    hx_endpoint_t *answer_next;   /* of a raw one that waits for the outcome of Connect */
    uint64_t bye_ns;              /* closing: when the goodbye is said at the latest; control thread only */
    _Atomic bool closing;         /* nothing more is started: its last words are being said */
    _Atomic uint32_t posters;     /* threads inside hx_post */
    bool raw;                     /* an engine of HIXL's own: no control link */
    uint64_t vm_addr;             /* where the peer's nonce stands in its memory */
    uint8_t vm_nonce[HX_NONCE_LEN];
    hx_page_t *mine;     /* our slots; the peer moves its revoke_seq */
    hx_page_t *theirs;   /* the peer's slots; we move its revoke_seq */
    uint64_t revoke_seq; /* control thread only */
    hx_revoked_set_t revoked;
    _Atomic uint32_t inline_slots; /* bit set: taken */
    /* remote regions, control thread only */
    hx_rregion_t **table;
    /* runnable operations, under sched->mu */
    hx_opq_t runq, blocked;
    hx_endpoint_t *active_next, *blocked_next;
    bool active;
    /* outgoing notes, under note_mu */
    pthread_mutex_t note_mu;
    hx_note_t *note_head, *note_tail, *unacked_head, *unacked_tail;
    uint64_t note_seq, note_pushed; /* how many were sent, and queued, so far */
    uint64_t note_due;              /* control thread only: those up to this one may be sent */
    uint32_t note_credit;
    _Atomic uint32_t notes_pending;
    _Atomic uint64_t event_bytes; /* of its events that nobody has taken yet */
    /* liveness, control thread only */
    uint64_t last_rx_ns, ping_ns;
    bool fenced; /* revoke_seq is HX_REVOKE_ALL: it can start nothing any more */
    bool ready;
};

hx_endpoint_t *hx_endpoint_new(hx_engine_t *engine);
bool hx_endpoint_push_note(hx_endpoint_t *ep, hx_note_t *note); /* false: lost */
hx_note_t *hx_note_new(const char *topic, size_t topic_len, const void *payload, size_t len);
bool hx_endpoint_process_gone(const hx_endpoint_t *ep); /* as its pidfd says, where there is one */
/* Does process_vm_readv with the peer's pid read the peer's nonce where it says that it stands? In another pid namespace
 * the number is somebody else's or nobody's; it can be used again after the peer; the peer can exec another program; Yama,
 * uid and capabilities decide the rest. 0, or the errno. */
int hx_endpoint_prove_vm(const hx_endpoint_t *ep);
bool hx_endpoint_same_host(const hx_endpoint_t *ep); /* by its control link's address: control thread, while linked */
hx_rregion_t *hx_endpoint_find(hx_endpoint_t *ep, uint64_t id);
void hx_endpoint_lose(hx_endpoint_t *ep, hx_status_t status, const char *text); /* control thread */

/* ---- commands to the control thread (control.c) ---- */

typedef enum {
    HX_CMD_CONNECT,
    HX_CMD_ANNOUNCE,
    HX_CMD_REVOKE,
    HX_CMD_GRANT,
    HX_CMD_DEREGISTER,
    HX_CMD_ASK_MAP,
    HX_CMD_CREDIT,
    HX_CMD_CLOSE,
    HX_CMD_SUPERSEDE,
    HX_CMD_PING,
    HX_CMD_DIAL,
    HX_CMD_PATH,
    HX_CMD_RAW,
    HX_CMD_RAW_ANSWER,
} hx_cmd_kind_t;

struct hx_command {
    hx_command_t *next;
    hx_cmd_kind_t kind;
    hx_region_t *region;   /* owned reference */
    hx_endpoint_t *ep;     /* owned reference */
    hx_rregion_t *rregion; /* owned reference */
    uint64_t token;
    uint64_t value;
    bool one_peer;
    uint8_t incarnation[HX_INCARNATION_LEN];
    uint16_t port;
    bool has_incarnation;
    char name[HX_NAME_MAX + 1];
    char address[256];
    bool tcp;
    hx_status_t status; /* HX_CMD_RAW_ANSWER */
    char *text;         /* likewise; owned */
    size_t n;
    uint64_t spans[]; /* n pairs */
};

hx_command_t *hx_command_new(hx_cmd_kind_t kind, const uint64_t *spans, size_t n);
hx_status_t hx_command_push(hx_engine_t *engine, hx_command_t *cmd); /* takes it, also on failure */
void hx_control_wake(hx_engine_t *engine);
void hx_control_arm_tick(hx_engine_t *engine);
hx_status_t hx_control_start(hx_engine_t *engine, char text[HX_TEXT_MAX]);
void hx_control_stop(hx_engine_t *engine);

/* ---- engine (engine.c) ---- */

typedef struct {
    pthread_mutex_t mu;
    /* Held by the control thread while it works, and by a thread that forks: the child finds whole lists to close
     * from. */
    pthread_mutex_t fork_mu;
    hx_command_t *head, *tail;
    bool closed; /* under mu */
    int wake_fd, epoll_fd;
    int unix_fd, tcp_fd;
    uint16_t tcp_port;
    _Atomic bool tick_armed;
    _Atomic bool stopping;
    bool started;
    pthread_t thread;
    hx_link_t *links;         /* control thread only */
    uint32_t shaking;         /* of them, strangers still in their handshake */
    hx_endpoint_t *endpoints; /* control thread only; owned references */
    hx_revoke_t *revokes;
    _Atomic bool rescan; /* a region may have become ready for its announcement */
    uint64_t next_serial;
} hx_control_t;

struct hx_engine {
    hx_config_t config;
    char *name, *unix_path, *tcp_host;
    uint8_t *secret;
    hx_fault_t *faults;
    _Atomic uint64_t epoch;
    _Atomic uint64_t announcements; /* of peers' regions, so far */
    uint8_t nonce[HX_NONCE_LEN];    /* what a peer reads out of our memory to prove that it reaches us */
    _Atomic bool stopping;
    pid_t pid; /* of the process that opened it */
    bool forked;
    uint32_t stuck_peers; /* at the end: those that may still touch our memory */
    /* completions */
    int event_fd, epoll_fd;
    _Atomic uint32_t doorbell_armed; /* 1: the consumer sleeps */
    hx_stack_t free_ops;
    hx_ring_t submitted, completed;
    hx_op_t *ops;
    pthread_mutex_t event_mu;
    hx_event_t *event_head, *event_tail;
    _Atomic uint32_t nevents;
    _Atomic uint64_t heap_bytes; /* descriptors of operations in flight */
    /* regions */
    pthread_mutex_t regions_mu;
    hx_region_t *regions;
    uint64_t next_region_id;
    _Atomic uint32_t nregions;
    hx_sched_t sched;
    hx_setup_t setup;
    hx_control_t control;
    struct hx_known *known; /* newest epoch seen under each name; control thread only */
    void *provider_state[4];
    uint32_t provider_open;  /* bit set: may be used */
    _Atomic bool abandoned;  /* a library's call does not return: nothing of this engine may be freed */
    pthread_mutex_t stop_mu; /* held while threads are joined */
    pthread_mutex_t fault_mu;
    hx_op_t *fault_held; /* under fault_mu */
    _Atomic uint64_t fault_count;
    _Atomic uint32_t posting; /* threads inside hx_post */
    _Atomic uint64_t n_posted, n_completed, n_inlined, n_bytes, n_notes_in, n_notes_out, n_refused;
    _Atomic uint64_t n_zc, n_zc_copied; /* calls that sent from the caller's pages; that the kernel copied after all */
    _Atomic uint32_t live_ops, npeers, mappings;
};

bool hx_in_child(const hx_engine_t *engine); /* also where no fork handler ran, since it was being closed */
void hx_links_forked(hx_engine_t *engine);
void hx_regions_forked(hx_engine_t *engine);
uint64_t hx_now_ns(void);
/* With every signal blocked but those of its own faults: handlers are for the host program's threads. */
bool hx_thread_start(pthread_t *thread, void *(*run)(void *), void *arg, const char *name);
void hx_doorbell(hx_engine_t *engine); /* after publishing a completion or an event */
/* Copies name and blob. ep and rregion are referenced. Out of memory loses nothing silently: the process aborts. */
void hx_event_emit(hx_engine_t *engine, hx_event_t proto, const char *name, size_t name_len, const void *blob,
                   size_t blob_len);
void *hx_alloc(size_t n); /* zeroed; aborts when there is no memory: for small control-plane records only */

#endif
