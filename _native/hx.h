/* SPDX-License-Identifier: Apache-2.0 */
/* The native core as Cython sees it: opaque handles, numbers, and nothing of Python.
 *
 * Threads: hx_post, hx_cancel and the getters may be called from any thread. hx_engine_drain and
 * hx_engine_next_event belong to one consumer (the event loop). hx_engine_stop joins native threads, none of
 * which ever calls back into the caller, so it cannot deadlock.
 *
 * A call that fails sets no output. A post that fails has no completion; one that succeeds has exactly one. */
#ifndef HX_H
#define HX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HX_NAME_MAX 128          /* bytes of an engine's or region's name (UTF-8, no NUL) */
#define HX_NOTE_MAX (64u << 10)  /* bytes of a note's payload */
#define HX_TOPIC_MAX 256         /* bytes of a note's topic */
#define HX_RAW_NOTE_MAX 1024     /* of either, to a raw peer */
#define HX_BLOB_MAX (512u << 10) /* bytes of a layout document */
#define HX_TEXT_MAX 1024         /* bytes of an error text, terminator included */
#define HX_EPOCH_NOW UINT64_MAX  /* hx_post_t.epoch: permission as of this post */
#define HX_INCARNATION_LEN 16

/* Grouped by what becomes unusable. errors.py holds the only table from these to exceptions. */
typedef enum {
    HX_OK = 0,
    /* this transfer */
    HX_ERR_REMOTE_ACCESS = 10, /* key, access bits, revoked or deregistered at the owner */
    HX_ERR_BOUNDS = 11,        /* a row outside its region; nothing moved */
    HX_ERR_OVERLAP = 12,       /* two rows of one call write the same bytes; nothing moved */
    HX_ERR_NO_PATH = 13,       /* no provider reaches this memory over this peer */
    HX_ERR_REGION_CLOSED = 14, /* the local region is being deregistered, or could not be set up */
    HX_ERR_PINNED = 15,        /* cannot be shown to be out of a peer's hands */
    HX_ERR_TIMEOUT = 16,       /* no progress for stall_timeout */
    HX_ERR_ABORTED = 17,       /* flushed by close or abort on this side */
    HX_ERR_CANCELLED = 18,     /* hx_cancel */
    HX_ERR_FAULT = 19,         /* the kernel refused the copy: see sys_errno */
    HX_ERR_PROVIDER = 20,      /* the transport's own library reported an error: see `code` and the detail */
    HX_ERR_CONNECTION = 21,    /* the data connection dropped, or could not be made: a part may have landed */
    HX_ERR_CHECKSUM = 22,      /* what arrived is not what was sent */
    /* this peer */
    HX_ERR_UNREACHABLE = 40,
    HX_ERR_PEER_LOST = 41,
    HX_ERR_MISMATCH = 42, /* protocol or name */
    HX_ERR_AUTH = 43,     /* secret or uid */
    HX_ERR_STALE = 44,    /* an older incarnation */
    /* this engine */
    HX_ERR_QUEUE_FULL = 60,
    HX_ERR_CLOSED = 61,
    HX_ERR_CONFIG = 62,
    HX_ERR_NO_MEMORY = 63,
    HX_ERR_SYSTEM = 64, /* see errno */
    HX_ERR_INTERNAL = 65,
} hx_status_t;

typedef enum { HX_WRITE = 1, HX_READ = 2, HX_NOTE = 3 } hx_op_kind_t;
typedef enum { HX_ACCESS_READ = 1, HX_ACCESS_WRITE = 2 } hx_access_t; /* what peers may do */
typedef enum { HX_KIND_MEMFD = 1, HX_KIND_FOREIGN = 2, HX_KIND_LAYOUT = 3, HX_KIND_DEVICE = 4 } hx_kind_t;
typedef enum {
    HX_EV_PEER_UP = 1,    /* endpoint; value: 1 when we connected, 0 when they did; token of hx_connect or 0 */
    HX_EV_PEER_READY,     /* its region table has arrived; token as above */
    HX_EV_PEER_LOST,      /* endpoint, status, text */
    HX_EV_CONNECT_FAILED, /* token, status, sys_errno, text */
    HX_EV_REGION_ADD,     /* endpoint, remote region; name, blob */
    HX_EV_REGION_DEL,     /* endpoint, remote region */
    HX_EV_NOTE,           /* endpoint, name = topic, blob = payload, value = flags (1: aborted) */
    HX_EV_REGION_READY,   /* token = region id, status, sys_errno; blob = why not */
    HX_EV_DONE,           /* token of a revoke or deregister, status, text, value = bytes still pinned */
    HX_EV_REFUSED,        /* a stranger was turned away: status, text */
    HX_EV_COPIED,         /* token of hx_region_copy, status, text */
    HX_EV_NOTIFY,         /* HIXL's own notification, of no known sender: name, blob = message */
    HX_EV_WARNING,        /* something that works and should not be relied on: text */
} hx_event_kind_t;

typedef struct hx_engine hx_engine_t;
typedef struct hx_endpoint hx_endpoint_t;
typedef struct hx_region hx_region_t;   /* registered local memory */
typedef struct hx_rregion hx_rregion_t; /* a peer's region as announced to us */

/* One rule of a fault plan (provider_fault.c): what happens to the nth transfer of this engine. */
typedef struct {
    uint64_t nth;
    uint32_t action;   /* hx_fault_action_t */
    uint32_t status;   /* for HX_FAULT_FAIL */
    uint64_t delay_ns; /* for HX_FAULT_DELAY */
} hx_fault_t;
typedef enum { HX_FAULT_DELAY = 1, HX_FAULT_FAIL, HX_FAULT_STALL, HX_FAULT_WEDGE, HX_FAULT_DIE } hx_fault_action_t;

/* What the hixl transport needs (hixl_*.c). Strings are copied. */
typedef struct {
    const char *binding; /* path of the binding's shared object */
    const char *library; /* a directory, or libcann_hixl.so itself; NULL: ASCEND_HOME_PATH and the loader's path */
    const char *local;   /* "ip:port" to listen on */
    const char *link;    /* what was asked for: "auto", "hccs", "roce" */
    int32_t device;
    const char *const *keys, *const *values; /* HIXL's options */
    size_t noptions;
    uint64_t busy_poll_ns; /* how long a poster spins for a completion, and for the next post, before it sleeps */
} hx_hixl_config_t;

typedef enum {
    HX_TRANSPORT_SHM = 1,
    HX_TRANSPORT_HIXL = 2,
    HX_TRANSPORT_TCP = 4,
    HX_TRANSPORT_VERBS = 8
} hx_transport_t;

/* What the verbs transport needs (verbs_*.c). Strings are copied. */
typedef struct {
    const char *binding;     /* path of the binding's shared object */
    const char *device;      /* NULL: the first with an active port */
    int32_t port, gid_index; /* 0, -1: to be chosen */
    uint8_t timeout;         /* an attempt is given 4.096 us x 2^timeout */
    uint8_t service_level, traffic_class;
} hx_verbs_config_t;

typedef struct {
    char device[64], state[32], gid[64]; /* gid: the one that would be chosen, or "" */
    int32_t port, gid_index;
    uint32_t mtu, max_mtu; /* bytes */
    bool usable;
} hx_verbs_port_t;

typedef struct {
    const char *name;
    uint8_t incarnation[HX_INCARNATION_LEN];
    const void *secret; /* NULL: no challenge */
    size_t secret_len;
    const char *unix_path; /* NULL: no unix listener */
    const char *tcp_host;  /* numeric address; NULL: no TCP listener */
    uint16_t tcp_port;
    uint32_t copy_threads;
    uint32_t queue_depth;  /* transfers in flight per engine, a power of two */
    uint32_t peer_depth;   /* transfers in flight per peer */
    uint32_t max_mappings; /* of peers' regions; idle ones beyond it are unmapped */
    uint64_t chunk;        /* bytes a copy thread moves before it looks at the other transfers */
    uint64_t inline_limit;
    uint64_t peer_timeout_ns;
    uint64_t stall_timeout_ns;
    uint64_t handshake_timeout_ns;
    uint64_t cancel_grace_ns;
    const hx_fault_t *faults;
    size_t nfaults;
    uint32_t transports;            /* hx_transport_t bits that may be used */
    const hx_hixl_config_t *hixl;   /* NULL: without */
    const hx_verbs_config_t *verbs; /* NULL: without; used during hx_engine_open only */
    uint32_t streams;               /* tcp: connections to a peer; 0: the measured default */
    bool checksum;                  /* tcp: CRC-32C of each message */
    bool zerocopy;                  /* tcp: MSG_ZEROCOPY */
} hx_config_t;

typedef struct {
    const char *path;     /* unix socket, or NULL */
    const char *tcp_host; /* numeric address, or NULL */
    uint16_t tcp_port;
    const char *name;           /* expected name; NULL: whoever answers */
    const uint8_t *incarnation; /* expected incarnation; NULL: any */
    uint64_t token;
} hx_target_t;

typedef struct {
    uint64_t token;
    uint32_t status;
    int32_t sys_errno;
    uint64_t nbytes;     /* bytes that landed */
    uint64_t elapsed_ns; /* from the post */
    uint64_t index;      /* row of the call that is to blame, or UINT64_MAX */
    uint32_t quiesced;   /* 0: the provider may still touch the buffers; a second record follows when not */
    uint32_t code;       /* HX_ERR_PROVIDER: the number that the library answered */
    char *detail;        /* what it said, or NULL; the consumer frees it */
} hx_completion_t;

typedef struct hx_event {
    struct hx_event *next;
    uint32_t kind;
    uint32_t status;
    int32_t sys_errno;
    uint64_t token;
    uint64_t value;
    hx_endpoint_t *ep;     /* a reference that the event owns, or NULL */
    hx_rregion_t *rregion; /* likewise */
    uint32_t name_len;
    uint32_t blob_len;
    char *name; /* inside the event's own allocation */
    char *blob;
} hx_event_t;

/* n rows that share one pair of regions. A NULL nbytes means `each` bytes in every row. */
typedef struct {
    hx_region_t *local;
    hx_rregion_t *remote;
    uint64_t rkey;
    const uint64_t *local_off;
    const uint64_t *remote_off;
    const uint64_t *nbytes;
    uint64_t each;
    size_t n;
} hx_segment_t;

typedef struct {
    uint32_t kind;
    uint64_t token;
    uint64_t epoch; /* hx_endpoint_epoch() at the time the permission was given, or HX_EPOCH_NOW */
    const hx_segment_t *segments;
    size_t nsegments;
    void *after; /* an event of the NPU to wait for, before the first byte is read; it must live until quiesced */
    bool has_note;
    bool aborted; /* HX_NOTE only: tells the receiver that the bytes it waits for will not come */
    const void *note;
    size_t note_len;
    const char *topic;
    size_t topic_len;
} hx_post_t;

typedef struct {
    uint64_t posted, completed, inlined, nbytes, notes_in, notes_out, refused, zerocopied, zerocopy_copied, live_ops,
        live_regions, peers, mappings;
} hx_stats_t;

/* status.c */
const char *hx_status_name(hx_status_t status);
size_t hx_status_count(void);
hx_status_t hx_status_at(size_t i);

/* engine.c */
void hx_config_defaults(hx_config_t *config);
hx_status_t hx_engine_open(const hx_config_t *config, hx_engine_t **engine_p, char text[HX_TEXT_MAX]);
int hx_engine_fileno(const hx_engine_t *engine);
uint16_t hx_engine_tcp_port(const hx_engine_t *engine);
void hx_engine_set_epoch(hx_engine_t *engine, uint64_t epoch);
size_t hx_engine_drain(hx_engine_t *engine, hx_completion_t *out, size_t max, bool *more_p);
hx_event_t *hx_engine_next_event(hx_engine_t *engine);
void hx_event_free(hx_event_t *event);
/* Answers how many peers stood still in mid-copy for cancel_grace: memory that they could reach must not be reused. */
uint32_t hx_engine_stop(hx_engine_t *engine);
void hx_engine_close_fds(hx_engine_t *engine); /* after hx_engine_stop, once nobody watches the descriptor any more */
void hx_engine_free(hx_engine_t *engine);
/* Around fork(): lock, then unlock in the parent, or let go of the descriptors in the child. */
void hx_engine_before_fork(hx_engine_t *engine);
void hx_engine_after_fork(hx_engine_t *engine);
void hx_engine_forked(hx_engine_t *engine);
void hx_engine_stats(hx_engine_t *engine, hx_stats_t *out);
void hx_cancel(hx_engine_t *engine, uint64_t handle);
hx_status_t hx_connect(hx_engine_t *engine, const hx_target_t *target);
/* An engine of HIXL's that is not ours, at "ip:port": no control link, regions as agreed beforehand. */
typedef struct {
    const char *name;
    uint64_t addr, nbytes;
    bool device;
} hx_raw_region_t;
hx_status_t hx_connect_raw(hx_engine_t *engine, const char *address, const hx_raw_region_t *regions, size_t n,
                           uint64_t token);
/* HIXL's notifications are fetched while somebody waits for them: count those who do. */
void hx_engine_expect_notifies(hx_engine_t *engine, int change);
/* Every live endpoint of `name` whose epoch is below `epoch` is lost: its successor has been seen. */
hx_status_t hx_supersede(hx_engine_t *engine, const char *name, uint64_t epoch);

/* region.c */
hx_status_t hx_region_allocate(hx_engine_t *engine, uint64_t nbytes, uint32_t access, hx_region_t **region_p);
/* Part of an allocated region as a region of its own, usable when the parent is. */
hx_status_t hx_region_view(hx_region_t *parent, uint64_t offset, uint64_t nbytes, uint32_t access,
                           hx_region_t **region_p);
hx_status_t hx_region_register(hx_engine_t *engine, void *addr, uint64_t nbytes, uint32_t access,
                               hx_region_t **region_p);
/* Memory of the NPU: somebody else's, or (addr 0) of its own. */
hx_status_t hx_region_device(hx_engine_t *engine, uint64_t addr, uint64_t nbytes, uint32_t access,
                             hx_region_t **region_p);
/* Between host memory and a device region, in a native thread; HX_EV_COPIED answers with `token`. `host` must stay. */
hx_status_t hx_region_copy(hx_region_t *region, uint64_t offset, void *host, uint64_t nbytes, bool upload,
                           uint64_t token);
bool hx_region_is_ready(const hx_region_t *region);
uint32_t hx_region_kind(const hx_region_t *region);
hx_status_t hx_region_layout(hx_engine_t *engine, hx_region_t **region_p);
hx_status_t hx_region_announce(hx_region_t *region, const char *name, size_t name_len, const void *blob,
                               size_t blob_len);
void *hx_region_addr(const hx_region_t *region);
uint64_t hx_region_id(const hx_region_t *region);
uint64_t hx_region_nbytes(const hx_region_t *region);
void hx_region_unref(hx_region_t *region);
/* Answered by HX_EV_DONE with `token`. `spans` are n pairs (offset, nbytes); `incarnation` NULL: every peer. */
hx_status_t hx_region_revoke(hx_region_t *region, const uint8_t *incarnation, const uint64_t *spans, size_t n,
                             uint64_t token);
hx_status_t hx_region_grant(hx_region_t *region, const uint8_t *incarnation, const uint64_t *spans, size_t n);
hx_status_t hx_region_deregister(hx_region_t *region, uint64_t token);

/* endpoint.c */
const char *hx_endpoint_name(const hx_endpoint_t *ep);
const uint8_t *hx_endpoint_incarnation(const hx_endpoint_t *ep);
uint64_t hx_endpoint_peer_epoch(const hx_endpoint_t *ep);
uint64_t hx_endpoint_serial(const hx_endpoint_t *ep);
bool hx_endpoint_is_up(const hx_endpoint_t *ep);
bool hx_endpoint_is_local(const hx_endpoint_t *ep);
uint32_t hx_endpoint_inflight(const hx_endpoint_t *ep);
uint64_t hx_endpoint_epoch(const hx_endpoint_t *ep); /* for hx_post_t.epoch */
/* Which path a transfer between the two takes and why; `text` gets one line. */
hx_status_t hx_endpoint_route(hx_endpoint_t *ep, const hx_region_t *local, const hx_rregion_t *remote,
                              const char **provider_p, char text[HX_TEXT_MAX]);
const char *hx_endpoint_link(const hx_endpoint_t *ep); /* of the hixl path: "hccs", "roce", "auto"; "" without one */
bool hx_endpoint_is_raw(const hx_endpoint_t *ep);
void hx_endpoint_expect(hx_endpoint_t *ep, int change); /* somebody waits for an announcement: is the peer alive? */
hx_status_t hx_endpoint_close(hx_endpoint_t *ep);
hx_status_t hx_endpoint_credit(hx_endpoint_t *ep, uint32_t notes); /* the consumer took this many */
void hx_endpoint_ref(hx_endpoint_t *ep);
void hx_endpoint_unref(hx_endpoint_t *ep);
uint64_t hx_rregion_id(const hx_rregion_t *rregion);
uint64_t hx_rregion_nbytes(const hx_rregion_t *rregion);
uint64_t hx_rregion_rkey(const hx_rregion_t *rregion);
uint32_t hx_rregion_access(const hx_rregion_t *rregion);
uint32_t hx_rregion_kind(const hx_rregion_t *rregion);
bool hx_rregion_alive(const hx_rregion_t *rregion);
void hx_rregion_ref(hx_rregion_t *rregion);
void hx_rregion_unref(hx_rregion_t *rregion);

/* op.c: *done_p true: it completed inside the call, this answer is its completion, and *handle_p the nanoseconds it
 * took. HX_ERR_BOUNDS sets *index_p to the row of the whole call that is to blame. */
hx_status_t hx_post(hx_endpoint_t *ep, const hx_post_t *post, uint64_t *handle_p, uint64_t *index_p, bool *done_p);

/* provider.c */
size_t hx_provider_count(void);
const char *hx_provider_name(size_t i);
hx_status_t hx_provider_probe(size_t i, char text[HX_TEXT_MAX]);

/* hixl_load.c: can the library be loaded? One line: the versions and places, or what is missing, where it was looked
 * for and what brings it. */
hx_status_t hx_hixl_probe(const char *binding, const char *library, char text[HX_TEXT_MAX]);
/* verbs_engine.c: the first device that would do; or what is missing. */
hx_status_t hx_verbs_probe(const char *binding, char text[HX_TEXT_MAX]);
size_t hx_verbs_ports(const char *binding, hx_verbs_port_t *out,
                      size_t max); /* how many there are; 0 without the library */

#endif
