/* SPDX-License-Identifier: Apache-2.0 */
/* What a transport implements. Engine code never names a provider.
 *
 * submit() takes an operation and returns at once; the provider calls hx_op_finish exactly once, from any thread, when
 * neither buffer is touched any more. A provider whose bytes are moved by the CPU implements prepare() and copy() and
 * submits to the copy threads (hx_sched_submit). */
#ifndef HX_PROVIDER_H
#define HX_PROVIDER_H

#include <sys/socket.h>

#include "core.h"

#define HX_PROVIDER_ABI 3

/* Answers of prepare() and copy() beside hx_status_t: not now; hx_sched_kick() says when to try again. */
#define HX_AGAIN ((hx_status_t) - 1)

struct hx_provider {
    uint32_t abi;
    const char *name;
    uint32_t transport; /* hx_transport_t */
    uint64_t feature;   /* HX_FEATURE_: in a greeting; both sides must have it, or the path is not there */
    bool orders_after;  /* knows what hx_post_t.after means */
    bool renews;        /* says and hears PATH more than once */
    /* Can it work on this machine? `text`: one line, why not and what would bring it. */
    hx_status_t (*probe)(char text[HX_TEXT_MAX]);
    hx_status_t (*open)(hx_engine_t *engine, void **state_p, char text[HX_TEXT_MAX]);
    /* Joins its threads, once every operation has been told to end; then free. */
    void (*stop)(hx_engine_t *engine, void *state);
    void (*close)(hx_engine_t *engine, void *state);
    /* Does it reach this pair? HX_OK, or HX_ERR_NO_PATH with the reason. `local` may be NULL. */
    hx_status_t (*route)(hx_endpoint_t *ep, const hx_region_t *local, const hx_rregion_t *remote,
                         char text[HX_TEXT_MAX]);
    /* Completes it on the posting thread if that is small and cannot wait. False, or no such hook: submit it. */
    bool (*try_inline)(hx_op_t *op);
    /* As submit; true: it has ended well already, and nobody else knows. Without a note. */
    bool (*submit_now)(hx_op_t *op);
    void (*submit)(hx_op_t *op);
    /* Takes in, on the thread that drains, what can be had without waiting. True: there was something. */
    bool (*assist)(hx_engine_t *engine, void *state);
    /* Periodic, on the control thread while something is pending; answers when it wants to be called next (0:
     * whenever). */
    uint64_t (*tick)(hx_engine_t *engine, void *state, uint64_t now_ns);
    /* The caller of this operation is about to be told that it need not wait any longer: what it does from now on must not be
     * overtaken by what is left of it. The operation may be over meanwhile, and its slot another's: `gen`. */
    void (*overdue)(hx_engine_t *engine, void *state, const hx_op_t *op, uint32_t gen);
    /* ---- for a provider whose library works by itself; each may be NULL ---- */
    /* Something happened that an operation may wait for: a cancel, a loss, a region. */
    void (*kick)(hx_engine_t *engine, void *state);
    /* The library must know this region: answer with hx_region_adopted, from any thread. */
    void (*adopt)(hx_engine_t *engine, void *state, hx_region_t *region);
    /* Its adoption is over: set it to HX_ADOPT_NONE when the library has forgotten it, and wake the control thread. */
    void (*withdraw)(hx_engine_t *engine, void *state, hx_region_t *region);
    /* Likewise of a region that is going away now; `then` (may be NULL) runs after it. */
    void (*disown)(hx_engine_t *engine, void *state, hx_region_t *region, hx_job_t *then);
    /* Which operations of this endpoint, with the library now, touch one of these spans of the peer's region (n pairs (offset,
     * end), sorted, apart)? Their tags, to be freed; and whether one of them is still there. */
    size_t (*touching)(hx_endpoint_t *ep, uint64_t region, const uint64_t *spans, size_t n, uint64_t **tags_p);
    bool (*holds)(hx_endpoint_t *ep, uint64_t tag);
    void (*recall)(
        hx_endpoint_t *ep);          /* take back what is with the library; other peers' and permitted rows go again */
    bool (*idle)(hx_endpoint_t *ep); /* nothing of it is with the library */
    /* What the peer must be told, and what it told us (control thread). */
    size_t (*introduce)(hx_endpoint_t *ep, void *state, uint8_t *out, size_t max); /* 0: nothing to say */
    bool (*meet)(hx_endpoint_t *ep, void *state, const uint8_t *body, size_t n);
    void (*proven)(hx_endpoint_t *ep, uint64_t arg); /* the peer answered a ping that carried `arg` */
    void (*release)(hx_endpoint_t *ep);              /* nothing will be posted to it any more */
    void (*forget)(hx_endpoint_t *ep);               /* nobody has a handle to it any more */
    void (*send_raw)(hx_op_t *op);      /* the note of an operation whose bytes have landed, to a raw endpoint */
    bool (*settled)(hx_endpoint_t *ep); /* nothing of a lost peer's is arriving any more */
    bool (*make_room)(hx_endpoint_t *ep, unsigned stream);
    void (*before_fork)(void *state);
    void (*after_fork)(void *state);
    void (*forked)(void *state);
    uint64_t (*landing)(hx_endpoint_t *ep, uint64_t region, uint64_t off, uint64_t end);
    void (*evict)(hx_endpoint_t *ep);
    /* Of a peer that does not acknowledge: takes from it what it could write with; the last revocation that is kept so. */
    void (*keep_out)(hx_endpoint_t *ep);
    uint64_t (*kept_out)(hx_endpoint_t *ep);
    void (*take_socket)(hx_endpoint_t *ep, int fd, unsigned stream, const uint8_t *early, size_t n);
    void (*dial_failed)(hx_endpoint_t *ep);
    bool (*data_address)(hx_endpoint_t *ep, struct sockaddr_storage *ss, socklen_t *len_p, uint64_t *session_p);
    /* ---- copy threads only ---- */
    hx_status_t (*prepare)(hx_op_t *op);
    /* Moves batch->first forward as it goes; on HX_AGAIN the rest of the batch is tried later. */
    hx_status_t (*copy)(hx_op_t *op, hx_batch_t *batch, unsigned slot, int *errno_p);
};

/* The provider that carries a transfer of this endpoint between the two regions, or NULL with the reason. */
const hx_provider_t *hx_provider_route(hx_endpoint_t *ep, const hx_region_t *local, const hx_rregion_t *remote,
                                       char text[HX_TEXT_MAX]);
/* The first provider that carries all parts of an operation, or NULL. */
const hx_provider_t *hx_provider_choose(const hx_op_t *op);
/* What that provider keeps of this engine, or NULL: not open. Every provider has its own; never take another's for it. */
void *hx_provider_state(const hx_engine_t *engine, const hx_provider_t *provider);
hx_status_t hx_providers_open(hx_engine_t *engine, char text[HX_TEXT_MAX]);
void hx_providers_stop(hx_engine_t *engine);
void hx_providers_close(hx_engine_t *engine);
void hx_providers_kick(hx_engine_t *engine);
/* True: somebody has taken it, and hx_region_adopted will follow. */
bool hx_providers_adopt(hx_region_t *region);
void hx_region_adopted(hx_region_t *region, uint64_t when, const char *obstacle);
void hx_providers_withdraw(hx_region_t *region);
void hx_providers_disown(hx_region_t *region, hx_job_t *then);
size_t hx_providers_touching(hx_endpoint_t *ep, uint64_t region, const uint64_t *spans, size_t n, uint64_t **tags_p);
bool hx_providers_hold(hx_endpoint_t *ep, uint64_t tag);
bool hx_providers_idle(hx_endpoint_t *ep);
void hx_providers_recall(hx_endpoint_t *ep);
void hx_providers_release(hx_endpoint_t *ep);
void hx_providers_forget(hx_endpoint_t *ep);
void hx_providers_send_raw(hx_op_t *op);
/* What each has to say to peers, one call for each that has something: name and bytes. */
void hx_providers_introduce(hx_endpoint_t *ep,
                            void (*say)(void *to, const char *name, uint64_t feature, const uint8_t *body, size_t n),
                            void *to);
uint64_t hx_providers_features(const hx_engine_t *engine);
/* Of ours that a peer is touching by itself right now, in messages that it has sent (tcp). */
uint64_t hx_providers_landing(hx_endpoint_t *ep, uint64_t region, uint64_t off, uint64_t end);
void hx_providers_evict(hx_endpoint_t *ep); /* ends that, whatever it costs the peer */
void hx_providers_keep_out(hx_endpoint_t *ep);
uint64_t hx_providers_kept_out(hx_endpoint_t *ep);
/* Data connections, for the control thread. */
void hx_providers_take_socket(hx_endpoint_t *ep, int fd, unsigned stream, const uint8_t *early, size_t n);
bool hx_providers_settled(hx_endpoint_t *ep);
bool hx_providers_make_room(hx_endpoint_t *ep, unsigned stream);
typedef enum { HX_FORK_BEFORE, HX_FORK_PARENT, HX_FORK_CHILD } hx_fork_t;
void hx_providers_fork(hx_engine_t *engine, hx_fork_t where);
void hx_providers_dial_failed(hx_endpoint_t *ep);
bool hx_providers_data_address(hx_endpoint_t *ep, struct sockaddr_storage *ss, socklen_t *len_p, uint64_t *session_p);
/* False: malformed. A provider that this engine has not opened is not interested. */
bool hx_providers_meet(hx_endpoint_t *ep, const char *name, size_t name_len, const uint8_t *body, size_t n, bool late);
void hx_providers_proven(hx_endpoint_t *ep, uint64_t arg);
/* Can a peer write our memory over one of them without our help? */
bool hx_providers_one_sided(const hx_engine_t *engine);
bool hx_providers_assist(hx_engine_t *engine);
void hx_providers_overdue(hx_engine_t *engine, const hx_op_t *op, uint32_t gen);
uint64_t hx_providers_tick(hx_engine_t *engine, uint64_t now_ns);

/* provider_fault.c stands in front of whichever provider was chosen when the engine has a fault plan.
 * True: it took the operation. */
bool hx_fault_submit(hx_op_t *op);
uint64_t hx_fault_tick(hx_engine_t *engine, uint64_t now_ns);

extern const hx_provider_t hx_provider_shm;
extern const hx_provider_t hx_provider_hixl;
extern const hx_provider_t hx_provider_tcp;
extern const hx_provider_t hx_provider_verbs;

#define HX_FEATURE_ACKS 1u /* a path of ours lets peers write without our help */
#define HX_FEATURE_TCP 2u
#define HX_FEATURE_SHM 4u
#define HX_FEATURE_VERBS 8u

#endif
