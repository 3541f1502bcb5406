/* SPDX-License-Identifier: Apache-2.0 */
/* The tcp provider. One progress thread of an engine drives every data connection: it gathers from the caller's memory
 * (sendmsg) and scatters into the region (readv), and no byte is copied anywhere else. Small posts are sent by the posting
 * thread itself, if it gets the lock and the connection at once.
 *
 * `mu` guards all but what is marked as the progress thread's. It is not held across a system call of more than
 * HX_TCP_INLINE bytes: a connection is then marked `sending`, and nobody else touches its queue's head. Who may hold
 * Python's lock never waits for `mu`: a fork holds `mu` while it waits for that lock. */
#ifndef HX_TCP_H
#define HX_TCP_H

#include "link.h"
#include "provider.h"
#include "tcp_wire.h"

#define HX_TCP_STREAMS_MAX HX_STREAMS_MAX
#define HX_TCP_INLINE (32u << 10)
#define HX_TCP_WINDOW (8ull << 20) /* bytes of one connection that are not answered */
#define HX_TCP_QUEUE (2ull << 20)  /* and of those that are not sent: what a small transfer waits for */
#define HX_TCP_REQUESTS 16384
#define HX_TCP_LANES 8
#define HX_TCP_TAKEN_BACK "the data connection was given up to take a transfer back"

typedef struct hx_tcp hx_tcp_t;
typedef struct hx_treq hx_treq_t;
typedef struct hx_tconn hx_tconn_t;

/* A part of an operation that the peer has not answered. */
struct hx_treq {
    hx_treq_t *next, *prev; /* conn->reqs, oldest first */
    hx_op_t *op;            /* NULL: free */
    hx_tconn_t *conn;
    hx_batch_t batch;
    uint32_t index, gen;
    uint64_t nbytes;
    bool unsent;   /* of a WRITE: some of its bytes still have to be read from the source */
    bool held;     /* likewise: the kernel sends from the source (tcp_zerocopy.c), and may read it still; */
    bool answered; /* meanwhile the peer has said this */
    hx_status_t status;
};

/* Something to be sent: a head with its rows, and the memory of the payload. */
typedef struct hx_tout {
    struct hx_tout *next;
    uint8_t *head;
    size_t head_len, head_off;
    struct iovec *iov; /* NULL: no payload */
    size_t niov, at;
    hx_treq_t *req;      /* of a WRITE */
    hx_region_t *region; /* of DATA: read for the peer; acquired */
    uint64_t region_id;
    hx_tcp_row_t *rows; /* likewise, in it */
    size_t nrows;
    bool zc; /* sent from its memory, last by the call of this number */
    uint32_t zc_last;
} hx_tout_t;

/* What is being received; of whoever has set `reading`, but for what landing() looks at under mu. */
typedef struct {
    uint8_t *stage; /* bytes that were read and not looked at yet */
    size_t len, off;
    hx_tcp_head_t head;
    hx_tcp_row_t *rows; /* HX_TCP_ROWS_MAX */
    enum { RX_HEAD, RX_ROWS, RX_PAYLOAD } state;
    size_t rows_have;  /* bytes of rows */
    struct iovec *iov; /* where the payload goes; with HX_TCP_ROWS_MAX entries */
    size_t niov, at;
    uint64_t left;
    uint32_t crc;
    uint32_t status;     /* of a WRITE that is refused: its payload is thrown away */
    hx_region_t *region; /* of a WRITE: acquired */
    hx_treq_t *req;      /* of DATA; NULL: nobody wants it any more */
    bool brief;          /* a large message is left alone for now */
    bool active;         /* region and rows are valid: under mu */
    uint64_t received;   /* how often bytes came */
    char why[128];       /* it failed; the connection's own is under mu */
} hx_trx_t;

struct hx_tconn {
    hx_tconn_t *next; /* t->conns */
    hx_tpeer_t *peer; /* NULL: it is closed, and about to be freed */
    int fd;
    unsigned stream;
    bool want_write, sending, broken, fresh;
    bool reading;     /* somebody is in hx_tcp_receive: nobody else, and it is not closed meanwhile */
    uint32_t watched; /* what the progress thread's epoll was asked for */
    bool in_lane;     /* the loop reads it: tcp_lane.c */
    uint64_t small_ns, lane_after_ns, look_ns;
    uint64_t received, seen; /* how often bytes have come; and at the last look, if some were waiting */
    hx_tout_t *out_head, *out_tail;
    hx_treq_t *reqs_head, *reqs_tail;
    uint64_t unanswered, unsent; /* bytes: of requests; of what is queued */
    uint64_t limbo_ns;           /* closed, with requests: until then the peer's loss may still be the reason */
    hx_trx_t rx;
    uint32_t owed;                       /* answers that the peer has not taken */
    bool zc;                             /* MSG_ZEROCOPY: tcp_zerocopy.c */
    uint32_t zc_next, zc_low, zc_copied; /* number of the next call; all below this are reported; so many were copied */
    uint64_t *zc_seen;
    hx_tout_t *held_head, *held_tail;
    int ghost_fd;  /* of a closed connection: its socket, until the last report */
    char why[128]; /* all of it under mu, but for rx */
};

struct hx_tpeer {
    hx_tpeer_t *next; /* t->peers */
    hx_tcp_t *t;
    hx_endpoint_t *ep; /* referenced until it is released */
    bool released;
    uint64_t session; /* the acceptor's name of this link */
    bool dials;       /* we open the connections */
    struct sockaddr_storage address;
    socklen_t address_len;
    unsigned streams, open, dialing, failures, ghosts; /* ghosts: closed ones that the kernel still sends for */
    /* Bit set: that stream's last connection went with messages that were not answered, and may be received still. Nothing is
     * sent to the peer before the stream is open again: the peer ends the old one before it takes the new one. */
    uint32_t dirty;
    uint64_t not_before_ns, idle_ns; /* idle: since when there is no connection */
    hx_note_t *held, *held_tail;     /* aborted ones, until the bytes that they speak of can come no more; */
    uint64_t held_ns;                /* at the latest then */
    hx_tconn_t *conns[HX_TCP_STREAMS_MAX];
    unsigned turn;
    hx_opq_t runq;
};

struct hx_tcp {
    hx_engine_t *engine;
    pthread_mutex_t mu;
    pthread_t thread;
    bool started, stopping, stopped;
    int epoll_fd, wake_fd;
    pthread_mutex_t wake_mu;
    _Atomic bool awake; /* the thread will look at the queues before it sleeps */
    _Atomic bool kicked;
    hx_tpeer_t *peers;
    hx_tconn_t *conns;
    hx_treq_t *reqs, *free_reqs;
    uint64_t sweep_ns;
    hx_tconn_t *lanes[HX_TCP_LANES];
    _Atomic unsigned nlanes;  /* changed under mu */
    bool assisting;           /* the loop's thread is in hx_tcp_assist: under mu, which it drops meanwhile */
    pthread_mutex_t inbox_mu; /* held for a push or a take: unlike mu, also while a fork waits for Python's lock */
    hx_opq_t inbox;           /* posts that found mu taken */
    bool checksum, zerocopy;
    unsigned streams;
    uint64_t give_up_ns; /* while it stops */
};

void hx_tcp_wake(hx_tcp_t *t);

/* tcp_send.c; under mu */
void hx_tcp_submit(hx_op_t *op);                    /* not under mu */
void hx_tcp_pump(hx_tpeer_t *p, hx_done_t *done);   /* from operations to messages */
bool hx_tcp_flush(hx_tconn_t *c, bool inline_only); /* false: the connection has failed; may drop mu */
void hx_tcp_queue(hx_tconn_t *c, hx_tout_t *out);
/* Adds memory to a list; what follows the last entry extends it: fewer entries are fewer system calls. The new length. */
static inline size_t hx_tcp_span(struct iovec *iov, size_t n, uint8_t *base, uint64_t nbytes)
{
    if (n && (uint8_t *)iov[n - 1].iov_base + iov[n - 1].iov_len == base) {
        iov[n - 1].iov_len += nbytes;
        return n;
    }
    iov[n] = (struct iovec){base, nbytes};
    return n + 1;
}
void hx_tcp_say_done(hx_tconn_t *c, const hx_tcp_head_t *ask, uint32_t status);
void hx_tcp_say_data(hx_tconn_t *c, const hx_tcp_head_t *ask, hx_region_t *region, const hx_tcp_row_t *rows,
                     uint32_t crc);
uint32_t hx_tcp_head_crc(const hx_tcp_head_t *head, const hx_tcp_row_t *rows);
uint32_t hx_tcp_payload_crc(const struct iovec *iov, size_t n);
void hx_tcp_answered(hx_treq_t *r, hx_status_t status, hx_done_t *done);
void hx_tcp_free_out(hx_tout_t *out);
void hx_tcp_drop_unsent(hx_tconn_t *c, hx_done_t *done);

/* tcp_conn.c; under mu, but for those of the control thread */
void hx_tcp_watch(hx_tconn_t *c);
bool hx_tcp_read(hx_tconn_t *c, bool brief, hx_done_t *done); /* drops mu; false: it has failed, and is `broken` */
void hx_tcp_close_conn(hx_tconn_t *c, hx_done_t *done);       /* later, if it is being read */
void hx_tcp_abort(int fd);                                    /* resets the connection, and drops what was not sent */
void hx_tcp_free_closed(hx_tcp_t *t, hx_done_t *done);
void hx_tcp_free_notes(hx_tpeer_t *p);
void hx_tcp_release_notes(hx_tpeer_t *p, uint64_t now);
uint64_t hx_tcp_dial(hx_tpeer_t *p, uint64_t now, hx_done_t *done);
void hx_tcp_take_socket(hx_endpoint_t *ep, int fd, unsigned stream, const uint8_t *early, size_t n);
void hx_tcp_dial_failed(hx_endpoint_t *ep);
bool hx_tcp_make_room(hx_endpoint_t *ep, unsigned stream);
void hx_tcp_evict(hx_endpoint_t *ep);
void hx_tcp_overdue(hx_engine_t *engine, void *state, const hx_op_t *op, uint32_t gen);

/* tcp_zerocopy.c; under mu, progress thread */
void hx_tcp_zc_enable(hx_tconn_t *c);
bool hx_tcp_zc_fits(const hx_tconn_t *c, size_t nbytes); /* send this so? */
void hx_tcp_zc_hold(hx_tconn_t *c, hx_tout_t *out);      /* it has been sent */
void hx_tcp_zc_reap(hx_tconn_t *c, hx_done_t *done);     /* what the kernel reports */
bool hx_tcp_zc_part(hx_tconn_t *c, hx_done_t *done);     /* before it is closed; true: its socket is a ghost now */
void hx_tcp_zc_abandon(hx_tconn_t *c);                   /* the report does not come, and the engine ends */

/* tcp_lane.c; under mu */
void hx_tcp_lane_posted(hx_tconn_t *c);               /* a small message was sent by who posted it */
void hx_tcp_lane_leave(hx_tconn_t *c);                /* before it is closed */
uint64_t hx_tcp_lane_look(hx_tcp_t *t, uint64_t now); /* progress thread; when to look again, 0: no need */
bool hx_tcp_assist(hx_engine_t *engine, void *state); /* the loop's thread, not under mu; true: bytes have come */

/* tcp_receive.c; not under mu, with `reading` set */
/* `brief`: small messages only; a large one is left where it begins. False: it has failed, and rx.why says why. */
bool hx_tcp_receive(hx_tconn_t *c, bool brief, hx_done_t *done);
bool hx_tcp_rx_large(const hx_trx_t *rx); /* the message that is arriving is */
bool hx_tcp_rx_init(hx_trx_t *rx, const uint8_t *early, size_t n);
void hx_tcp_rx_free(hx_trx_t *rx);

#endif
