/* SPDX-License-Identifier: Apache-2.0 */
/* The control link: one stream socket to a peer, driven by the control thread only.
 *
 * Frames are little-endian, fixed-width, length first; the length is bounded before anything is allocated. A type
 * with the optional bit set that is not known is skipped; any other surprise ends the link. docs/control-link.md
 * describes the frames byte by byte. */
#ifndef HX_LINK_H
#define HX_LINK_H

#include "core.h"

#define HX_WIRE_VERSION 1u
#define HX_MAGIC 0x314c584948304941ull /* "AI0HIXL1" */
#define HX_FRAME_MAX (1u << 20)
#define HX_LINK_FDS 4                    /* descriptors received and not yet claimed by a frame */
#define HX_TX_FDS_MAX 64                 /* descriptors queued for it: likewise */
#define HX_TX_MAX (64ull << 20)          /* bytes queued for a peer that does not read: then it is lost */
#define HX_SHAKING_MAX 64                /* strangers in their handshake at the same time */
#define HX_NOTE_WINDOW 256               /* notes a peer may have in our queue that nobody has taken */
#define HX_PEER_REGIONS_MAX 65536        /* regions one peer may announce */
#define HX_EVENT_BYTES_MAX (64ull << 20) /* of one peer, that our consumer has not taken */
#define HX_SPANS_PER_FRAME 32768
#define HX_STREAMS_MAX 16 /* data connections to a peer */

typedef enum {
    HX_F_HELLO = 1,
    HX_F_ANSWER = 2,
    HX_F_AUTH = 3,
    HX_F_READY = 4,
    HX_F_REJECT = 5,
    HX_F_PAGE = 6,
    HX_F_REGION_ADD = 7,
    HX_F_REGION_DEL = 8,
    HX_F_TABLE_END = 9,
    HX_F_MAP_ASK = 10,
    HX_F_MAP_ANSWER = 11,
    HX_F_NOTE = 12,
    HX_F_NOTE_ACK = 13,
    HX_F_CREDIT = 14,
    HX_F_REVOKE = 15,
    HX_F_GRANT = 16,
    HX_F_PING = 17,
    HX_F_PONG = 18,
    HX_F_BYE = 19,
    HX_F_PATH = 20,
    HX_F_REVOKE_ACK = 21,
    HX_F_DATA = 22,
    HX_F_DATA_ANSWER = 23,
    HX_F_DATA_PROOF = 24,
    HX_F_DATA_READY = 25,
} hx_frame_type_t;

#define HX_FRAME_OPTIONAL 1u

typedef struct {
    uint32_t length; /* of the whole frame */
    uint16_t type;
    uint8_t nfds;
    uint8_t flags;
    uint64_t arg;
} hx_frame_t;

_Static_assert(sizeof(hx_frame_t) == 16, "wire format");

typedef struct {
    uint64_t magic;
    uint32_t version_min, version_max;
    uint64_t features;
    uint64_t epoch;
    uint64_t vm_addr; /* where our vm_nonce stands in our memory */
    uint32_t secret;  /* 1: we insist on the challenge */
    uint32_t name_len;
    uint32_t want_name_len;
    uint32_t want_incarnation;
    uint8_t incarnation[HX_INCARNATION_LEN];
    uint8_t wanted[HX_INCARNATION_LEN];
    uint8_t challenge[HX_NONCE_LEN];
    uint8_t vm_nonce[HX_NONCE_LEN];
    /* name, wanted name */
} hx_hello_t;

_Static_assert(sizeof(hx_hello_t) == 152, "wire format");

#define HX_HELLO_MAX (sizeof(hx_hello_t) + 2 * HX_NAME_MAX)

typedef struct {
    uint64_t id, rkey, nbytes, addr;
    uint64_t direct; /* the address, where both sides have a transport whose writer names it; else 0 */
    uint32_t kind, access, name_len, blob_len;
    /* name, blob */
} hx_entry_t;

_Static_assert(sizeof(hx_entry_t) == 56, "wire format");

typedef struct {
    uint32_t topic_len, flags;
    /* topic, payload */
} hx_note_head_t;

typedef struct hx_out {
    struct hx_out *next;
    size_t len, off;
    int fd; /* sent with the first byte, then closed; -1: none */
    uint8_t data[];
} hx_out_t;

typedef enum {
    HX_LINK_CONNECTING,
    HX_LINK_WAIT_HELLO,
    HX_LINK_WAIT_ANSWER,
    HX_LINK_WAIT_AUTH,
    HX_LINK_WAIT_READY,
    HX_LINK_WAIT_DATA_ANSWER,
    HX_LINK_WAIT_DATA_PROOF,
    HX_LINK_WAIT_DATA_READY,
    HX_LINK_WAIT_PAGE,
    HX_LINK_UP,
} hx_link_state_t;

struct hx_link {
    hx_link_t *next;
    hx_engine_t *engine;
    hx_endpoint_t *ep; /* owned reference */
    int fd;
    bool tcp, outgoing, dead, want_write, known; /* known: counted out of control.shaking */
    hx_link_state_t state;
    uint64_t deadline_ns; /* of the handshake */
    /* what hx_connect asked for */
    char want_name[HX_NAME_MAX + 1];
    bool want_incarnation;
    uint8_t wanted[HX_INCARNATION_LEN];
    /* the two greetings, as sent: what the challenge signs */
    uint8_t hello[HX_HELLO_MAX], answer[HX_HELLO_MAX];
    size_t hello_len, answer_len;
    /* of a data connection, until it is handed over */
    hx_endpoint_t *data_ep; /* the peer's; owned reference */
    uint64_t session;
    uint32_t stream;
    uint8_t nonces[2][HX_NONCE_LEN];
    uint8_t *rx;
    size_t rx_len, rx_cap;
    size_t rx_at; /* behind the frame that is being handled */
    int fds[HX_LINK_FDS];
    unsigned nfds;
    hx_out_t *tx_head, *tx_tail;
    uint64_t tx_bytes;
    unsigned tx_fds;        /* of them, descriptors */
    uint64_t note_expected; /* sequence number of the next note */
    uint32_t notes_held;    /* received, not yet taken by a consumer */
    uint32_t nregions;
};

/* link.c: sockets and frames */
hx_link_t *hx_link_new(hx_engine_t *engine, int fd, bool tcp, bool outgoing);
void hx_link_close(hx_link_t *link); /* marks it dead; control.c frees dead links after each round of events */
void hx_link_free(hx_link_t *link);
void hx_link_send(hx_link_t *link, hx_frame_type_t type, uint64_t arg, const struct iovec *parts, int nparts, int fd);
void hx_link_flush(hx_link_t *link);
void hx_link_receive(hx_link_t *link);
int hx_link_take_fd(hx_link_t *link); /* -1: the peer sent none */
/* Ends the link because of what the peer sent or did; loses its endpoint, or fails the connect. */
void hx_link_fail(hx_link_t *link, hx_status_t status, int err, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
int hx_listen_unix(const char *path, char text[HX_TEXT_MAX]);
int hx_listen_tcp(const char *host, uint16_t port, uint16_t *port_p, char text[HX_TEXT_MAX]);
void hx_links_accept(hx_engine_t *engine, int listen_fd, bool tcp);
void hx_link_connect(hx_engine_t *engine, const hx_command_t *cmd);

void hx_link_dial(hx_endpoint_t *ep, uint32_t stream); /* a data connection */
int hx_link_detach(hx_link_t *link); /* its descriptor, which is not watched any more; the link is dead */

/* data_hello.c */
void hx_data_key(hx_link_t *link, uint8_t key[32]);
void hx_data_start(hx_link_t *link);
bool hx_data_frame(hx_link_t *link, const hx_frame_t *frame, const uint8_t *body,
                   size_t n); /* false: not one of these */

/* hello.c: the handshake */
bool hx_hello_admit(hx_link_t *link); /* uid check of a unix socket */
void hx_hello_start(hx_link_t *link);
void hx_hello_frame(hx_link_t *link, const hx_frame_t *frame, const uint8_t *body, size_t n);

/* frames.c: everything after the handshake */
void hx_frames_handle(hx_link_t *link, const hx_frame_t *frame, const uint8_t *body, size_t n);
void hx_frames_send_table(hx_link_t *link);
void hx_frames_announce(hx_engine_t *engine, hx_region_t *const *list, size_t n);
void hx_frames_pump_notes(hx_endpoint_t *ep);
void hx_frames_say_paths_anew(hx_link_t *link);

/* revoke.c: the owner's side of taking memory back */
void hx_revoke_start(hx_engine_t *engine, hx_command_t *cmd); /* takes the region reference */
/* What a peer that has just connected must not touch of a region that it will hear of. */
void hx_revoke_replay(hx_endpoint_t *ep, const hx_region_t *region);
void hx_revoke_grant(hx_engine_t *engine, const hx_command_t *cmd);
void hx_revoke_poll(hx_engine_t *engine, uint64_t now_ns);
int hx_revoke_timeout_ms(hx_engine_t *engine); /* -1: nothing pending */
void hx_revoke_abort(hx_engine_t *engine);

/* standing.c: revocations that have not been granted again, for peers that connect later */
void hx_standing_add(const hx_command_t *cmd);
void hx_standing_grant(const hx_command_t *cmd);
/* Pairs (offset, nbytes) that the engine of this incarnation must not touch, to be freed; NULL: none. */
uint64_t *hx_standing_spans(const hx_region_t *region, const uint8_t *incarnation, size_t *n_p);

/* acks.c: revocation on paths where the writer's library writes. Control thread only. */
/* These two: false when a peer that is one of ours cannot have got there. */
bool hx_acks_expect(hx_endpoint_t *ep, uint64_t seq, uint64_t region, const uint64_t *spans, size_t n);
bool hx_acks_received(hx_endpoint_t *ep, uint64_t seq); /* false: it was not expected */
bool hx_acks_haunting(const hx_endpoint_t *ep, uint64_t now);
uint64_t hx_acks_held(hx_endpoint_t *ep, uint64_t region, uint64_t off, uint64_t end, uint64_t now);
bool hx_acks_owe(hx_endpoint_t *ep, uint64_t seq, uint64_t region, const uint64_t *spans, size_t n);
void hx_acks_pay(hx_endpoint_t *ep);
void hx_acks_free(hx_endpoint_t *ep);

/* raw.c: engines that are not ours */
void hx_raw_run(hx_engine_t *engine, hx_command_t *cmd);
void hx_raw_fail(hx_endpoint_t *ep, hx_status_t status, const char *text); /* it never came up */

/* commands.c */
void hx_commands_run(hx_engine_t *engine);

/* liveness.c: control thread only */
void hx_live_check_operations(hx_engine_t *engine,
                              uint64_t now_ns);              /* stalls, and cancels that were not obeyed in time */
void hx_live_check_peer(hx_endpoint_t *ep, uint64_t now_ns); /* heartbeats while we wait for something */
void hx_live_cancel_notes(hx_endpoint_t *ep);
/* Nothing more is started; the goodbye, which says whether something is still on its way, waits a little for what is. */
void hx_live_say_goodbye_to(hx_endpoint_t *ep);
bool hx_live_goodbye(hx_endpoint_t *ep, uint64_t now, const char *text); /* true: said */
void hx_live_forget_lost(hx_engine_t *engine);
void hx_live_let_go(hx_endpoint_t *ep);
bool hx_live_anything_pending(hx_engine_t *engine);
uint32_t hx_live_count_stuck(hx_engine_t *engine);

/* control.c */
void hx_control_watch(hx_engine_t *engine, hx_link_t *link);
void hx_control_watch_pid(hx_engine_t *engine, hx_endpoint_t *ep);
/* Is this greeting from an incarnation older than one we have seen under its name? Remembers it if not. */
bool hx_control_epoch_ok(hx_engine_t *engine, const char *name, uint64_t epoch, bool remember);
void hx_control_supersede(hx_engine_t *engine, const char *name, uint64_t epoch);

#endif
