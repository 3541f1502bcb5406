/* SPDX-License-Identifier: Apache-2.0 */
/* A test double of the binding of libibverbs: RDMA devices that are a list in this process. Bytes are copied between
 * registered memory when a work request is posted, or when the test lets a held one go; and a test can make any call
 * slow, or fail. What a real device would punish by corruption, or not at all, ends the program: see break_off().
 *
 * A work request that was held when its queue pair was shut, or destroyed, is on the wire from then on: its bytes land when
 * the test says so, if the other end still takes them. That is what limbo and keeping a peer out are about. */
#ifndef VERBS_DOUBLE_H
#define VERBS_DOUBLE_H

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>

#include "check.h"
#include "gate.h"
#include "verbs.h"

enum { INLINE_ROOM = 64, SGES = 16, ASYNCS = 16, ALWAYS = 1000000 };
/* As libibverbs numbers them. */
enum { DOUBLE_FLUSHED = 5, DOUBLE_ACCESS = 10, DOUBLE_RETRIES = 12 };

typedef struct flight {
    struct flight *next;
    hx_verbs_wr_t wr;
    hx_verbs_sge_t sges[SGES];
    uint8_t carried[INLINE_ROOM];
} flight_t;

typedef struct wire {
    struct wire *next;
    uint32_t from, to, rkey;
    uint64_t remote, nbytes;
    uint8_t bytes[];
} wire_t;

struct hx_verbs_mr {
    hx_verbs_mr_t *next;
    hx_verbs_device_t *device;
    uint8_t *base;
    uint64_t nbytes;
    uint32_t key;
    bool lwrite, rread, rwrite, gone;
};

struct hx_verbs_qp {
    hx_verbs_qp_t *next, *event_next;
    hx_verbs_device_t *device;
    void *owner;
    hx_verbs_address_t mine, theirs;
    uint32_t depth;
    bool connecting, connected, failed, shut, ending, destroyed;
    bool armed, has_event;
    flight_t *head, *tail; /* not carried out yet */
    hx_verbs_wc_t *wcs;
    uint64_t *numbers;         /* of the work requests that they are of */
    uint64_t wc_head, wc_tail; /* completions taken, and made */
    uint64_t posted, carried,
        reclaimed; /* work requests; a place in the send queue is free when a later one is polled */
};

/* What a test may set; under net.mu but for the gates. */
typedef struct {
    bool keeps; /* what is held when a queue pair fails, or is shut, is not given back before it is destroyed */
    bool held;  /* work requests wait for let_go() */
    uint64_t destroy_us, connect_us; /* at most; drawn anew for each */
    unsigned create_fails, connect_fails, shut_fails, destroy_fails, dereg_fails, reg_fails; /* so many, from now on */
    uint64_t refuse_in; /* 1: the next work request is refused, and so on; 0: none */
    uint64_t fail_in;   /* likewise, of those carried out: with fail_status */
    uint32_t fail_status;
    gate_t at_create, at_connect, at_destroy, at_dereg;
} double_knobs_t;

typedef struct {
    unsigned creates, connects, destroys, posts, wrs, accesses, retries, looks; /* looks: for events */
} double_counts_t;

struct hx_verbs_device {
    hx_verbs_device_t *next;
    char name[HX_VERBS_NAME];
    int fd, async_fd, cmd_fd;
    bool closed, gone;
    hx_verbs_qp_t *events, *events_tail;
    struct {
        void *owner;
        char text[32];
    } asyncs[ASYNCS];
    unsigned async_head, async_tail;
    double_knobs_t knobs;
    double_counts_t counts;
};

static struct {
    pthread_mutex_t mu;
    hx_verbs_device_t *devices;
    hx_verbs_qp_t *qps; /* also those that are destroyed: whoever uses one is found out */
    hx_verbs_mr_t *mrs;
    wire_t *wires, **wires_end;
    uint32_t last;
    uint64_t dice;
    uint32_t max_wr, max_sge, max_sge_read;
    uint64_t max_message;
} net = {.mu = PTHREAD_MUTEX_INITIALIZER,
         .last = 0x100,
         .dice = 1,
         .max_wr = 1024,
         .max_sge = 16,
         .max_sge_read = 16,
         .max_message = 1ull << 31};

#define TELL(device, statement)                \
    do {                                       \
        pthread_mutex_lock(&net.mu);           \
        double_knobs_t *to = &(device)->knobs; \
        (void)to;                              \
        statement;                             \
        pthread_mutex_unlock(&net.mu);         \
    } while (0)

_Noreturn static inline void break_off(const char *what, const char *device)
{
    fprintf(stderr, "the device %s was misused: %s\n", device, what);
    abort();
}

/* Under net.mu from here on, unless it says otherwise. */

static inline void live(const hx_verbs_device_t *d, const char *call)
{
    if (d->closed)
        break_off(call, "that is closed");
}

static inline void usable(const hx_verbs_qp_t *q, const char *call)
{
    live(q->device, call);
    if (q->destroyed)
        break_off(call, q->device->name);
}

static inline void in_use(const hx_verbs_qp_t *q, const char *call)
{
    usable(q, call);
    if (q->shut)
        break_off(call, q->device->name);
}

static inline bool one_fails(unsigned *count)
{
    bool fails = *count > 0;
    *count -= fails;
    return fails;
}

static inline void ring(int fd)
{
    uint64_t one = 1;
    if (write(fd, &one, sizeof one) < 0)
        break_off("no descriptor", "?");
}

static inline void silence(int fd)
{
    uint64_t count;
    if (read(fd, &count, sizeof count) < 0) {
        /* it was silent */
    }
}

/* ---- memory ---- */

static inline hx_verbs_mr_t *mr_of(const hx_verbs_device_t *d, uint32_t key)
{
    for (hx_verbs_mr_t *mr = net.mrs; mr; mr = mr->next)
        if (mr->key == key && mr->device == d && !mr->gone)
            return mr;
    return NULL;
}

/* NULL: not in it. Its addresses begin at its base's offset in a page. */
static inline uint8_t *memory_of(const hx_verbs_mr_t *mr, uint64_t addr, uint64_t nbytes)
{
    uint64_t first = (uintptr_t)mr->base % HX_VERBS_PAGE;
    if (addr < first || nbytes > mr->nbytes || addr - first > mr->nbytes - nbytes)
        return NULL;
    return mr->base + (addr - first);
}

static inline uint64_t size_of(const flight_t *f)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < f->wr.nsge; i++)
        n += f->sges[i].nbytes;
    return n;
}

/* Between the memory at this end and `there`, which is consecutive. */
static inline void move(const hx_verbs_qp_t *q, const flight_t *f, uint8_t *there)
{
    for (uint32_t i = 0; i < f->wr.nsge; i++) {
        const hx_verbs_sge_t *sge = &f->sges[i];
        const uint8_t *from = f->carried;
        if (!f->wr.inlined) {
            const hx_verbs_mr_t *mr = mr_of(q->device, sge->lkey);
            uint8_t *here = mr ? memory_of(mr, sge->addr, sge->nbytes) : NULL;
            if (!here || (f->wr.read && !mr->lwrite))
                break_off("local memory that is not registered so", q->device->name);
            if (f->wr.read)
                memcpy(here, there, sge->nbytes);
            from = here;
        }
        if (!f->wr.read)
            memcpy(there, from, sge->nbytes);
        there += sge->nbytes;
    }
}

/* ---- queue pairs ---- */

/* The one that this address belongs to, as long as it receives from `from`. */
static inline hx_verbs_qp_t *receiver(const hx_verbs_address_t *to, const hx_verbs_address_t *from)
{
    for (hx_verbs_qp_t *q = net.qps; q; q = q->next)
        if (q->mine.qpn == to->qpn && !q->destroyed && q->connected && !q->failed && !q->device->gone &&
            q->mine.psn == to->psn && q->theirs.qpn == from->qpn && q->theirs.psn == from->psn)
            return q;
    return NULL;
}

static inline void tell_async(hx_verbs_device_t *d, void *owner, const char *text)
{
    if (d->async_tail - d->async_head == ASYNCS)
        return;
    d->asyncs[d->async_tail % ASYNCS].owner = owner;
    snprintf(d->asyncs[d->async_tail++ % ASYNCS].text, sizeof d->asyncs[0].text, "%s", text);
    ring(d->async_fd);
}

static inline void add_event(hx_verbs_qp_t *q)
{
    hx_verbs_device_t *d = q->device;
    q->armed = false;
    q->has_event = true;
    q->event_next = NULL;
    *(d->events ? &d->events_tail->event_next : &d->events) = q;
    d->events_tail = q;
    ring(d->fd);
}

static inline void complete_flight(hx_verbs_qp_t *q, flight_t *f, uint32_t status)
{
    uint64_t number = ++q->carried;
    if (status || f->wr.signalled) {
        if (q->wc_tail - q->wc_head == q->depth)
            break_off("a completion queue is overrun", q->device->name);
        q->wcs[q->wc_tail % q->depth] = (hx_verbs_wc_t){.id = f->wr.id, .status = status};
        q->numbers[q->wc_tail++ % q->depth] = number;
        if (q->armed)
            add_event(q);
    }
    free(f);
}

static inline flight_t *take_flight(hx_verbs_qp_t *q)
{
    flight_t *f = q->head;
    q->head = f->next;
    if (!q->head)
        q->tail = NULL;
    return f;
}

/* It does nothing more, and what is on it is flushed. */
static inline void fail_qp(hx_verbs_qp_t *q)
{
    q->failed = true;
    while (q->head && !q->device->gone && !q->device->knobs.keeps)
        complete_flight(q, take_flight(q), DOUBLE_FLUSHED);
}

/* Its status. */
static inline uint32_t carry_out(hx_verbs_qp_t *q, flight_t *f)
{
    hx_verbs_device_t *d = q->device;
    if (d->knobs.fail_in && !--d->knobs.fail_in)
        return d->knobs.fail_status;
    hx_verbs_qp_t *other = receiver(&q->theirs, &q->mine);
    if (!other) {
        d->counts.retries++;
        return DOUBLE_RETRIES;
    }
    const hx_verbs_mr_t *mr = mr_of(other->device, f->wr.rkey);
    uint8_t *there = mr ? memory_of(mr, f->wr.remote, size_of(f)) : NULL;
    if (!there || !(f->wr.read ? mr->rread : mr->rwrite)) {
        d->counts.accesses++;
        fail_qp(other);
        tell_async(other->device, other->owner, "local access violation");
        return DOUBLE_ACCESS;
    }
    move(q, f, there);
    return 0;
}

/* So many of its work requests, from the oldest. Answers how many there were. */
static inline size_t advance(hx_verbs_qp_t *q, size_t n)
{
    size_t count = 0;
    for (; q->head && count < n && !q->destroyed && !q->device->gone; count++) {
        flight_t *f = take_flight(q);
        uint32_t status = q->failed ? DOUBLE_FLUSHED : carry_out(q, f);
        complete_flight(q, f, status);
        if (status)
            fail_qp(q);
    }
    return count;
}

static inline void put_on_the_wire(const hx_verbs_qp_t *q, const flight_t *f)
{
    uint64_t n = size_of(f);
    wire_t *w = malloc(sizeof *w + n);
    *w = (wire_t){.from = q->mine.qpn, .to = q->theirs.qpn, .rkey = f->wr.rkey, .remote = f->wr.remote, .nbytes = n};
    move(q, f, w->bytes);
    if (!net.wires)
        net.wires_end = &net.wires;
    *net.wires_end = w;
    net.wires_end = &w->next;
}

static inline bool land(const wire_t *w)
{
    for (const hx_verbs_qp_t *q = net.qps; q; q = q->next) {
        if (q->mine.qpn != w->to || q->theirs.qpn != w->from || !q->connected || q->destroyed || q->failed)
            continue;
        const hx_verbs_mr_t *mr = mr_of(q->device, w->rkey);
        uint8_t *there = mr && mr->rwrite ? memory_of(mr, w->remote, w->nbytes) : NULL;
        if (there)
            memcpy(there, w->bytes, w->nbytes);
        return there != NULL;
    }
    return false;
}

/* ---- the table; none of it under net.mu ---- */

static int double_open(hx_verbs_info_t *info, hx_verbs_device_t **device_p, char *text, size_t room)
{
    hx_verbs_device_t *d = calloc(1, sizeof *d);
    snprintf(d->name, sizeof d->name, "%s", info->device);
    d->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    d->async_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    d->cmd_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    gate_t gate = GATE;
    d->knobs.at_create = d->knobs.at_connect = d->knobs.at_destroy = d->knobs.at_dereg = gate;
    pthread_mutex_lock(&net.mu);
    d->next = net.devices;
    net.devices = d;
    info->port = info->port ? info->port : 1;
    info->gid_index = info->gid_index < 0 ? 0 : info->gid_index;
    info->max_wr = net.max_wr;
    info->max_sge = net.max_sge;
    info->max_sge_read = net.max_sge_read;
    info->max_message = net.max_message;
    pthread_mutex_unlock(&net.mu);
    info->max_reads = 16;
    info->fd = d->fd;
    info->async_fd = d->async_fd;
    info->cmd_fd = d->cmd_fd;
    *device_p = d;
    (void)text;
    (void)room;
    return 0;
}

static void double_close(hx_verbs_device_t *d)
{
    pthread_mutex_lock(&net.mu);
    live(d, "close");
    for (const hx_verbs_qp_t *q = net.qps; q; q = q->next)
        if (q->device == d && !q->destroyed)
            break_off("it is closed with a queue pair", d->name);
    for (const hx_verbs_mr_t *mr = net.mrs; mr; mr = mr->next)
        if (mr->device == d && !mr->gone)
            break_off("it is closed with memory", d->name);
    d->closed = true;
    pthread_mutex_unlock(&net.mu);
    close(d->fd);
    close(d->async_fd);
    close(d->cmd_fd);
}

static int double_reg(hx_verbs_device_t *d, void *addr, uint64_t nbytes, bool local_write, bool remote_read,
                      bool remote_write, hx_verbs_mr_t **mr_p, uint32_t *lkey_p, uint32_t *rkey_p)
{
    pthread_mutex_lock(&net.mu);
    live(d, "reg");
    bool fails = one_fails(&d->knobs.reg_fails);
    if (!fails) {
        hx_verbs_mr_t *mr = calloc(1, sizeof *mr);
        *mr = (hx_verbs_mr_t){net.mrs, d, addr, nbytes, ++net.last, local_write, remote_read, remote_write, false};
        net.mrs = mr;
        *mr_p = mr;
        *lkey_p = *rkey_p = mr->key;
    }
    pthread_mutex_unlock(&net.mu);
    return fails ? ENOMEM : 0;
}

static int double_dereg(hx_verbs_mr_t *mr)
{
    hx_verbs_device_t *d = mr->device;
    pass(&d->knobs.at_dereg);
    pthread_mutex_lock(&net.mu);
    live(d, "dereg");
    if (mr->gone)
        break_off("memory is forgotten twice", d->name);
    bool fails = one_fails(&d->knobs.dereg_fails);
    for (const hx_verbs_qp_t *q = net.qps; q && !fails; q = q->next)
        for (const flight_t *f = q->device == d && !q->destroyed && !d->gone ? q->head : NULL; f; f = f->next)
            for (uint32_t i = 0; i < f->wr.nsge && !f->wr.inlined; i++)
                if (f->sges[i].lkey == mr->key)
                    break_off("memory is forgotten that a work request uses", d->name);
    mr->gone = !fails;
    pthread_mutex_unlock(&net.mu);
    return fails ? EBUSY : 0;
}

static int double_create(hx_verbs_device_t *d, uint32_t depth, void *owner, hx_verbs_qp_t **qp_p,
                         hx_verbs_address_t *address, uint32_t *inline_p)
{
    pass(&d->knobs.at_create);
    pthread_mutex_lock(&net.mu);
    live(d, "create");
    bool fails = d->gone || one_fails(&d->knobs.create_fails);
    if (!fails) {
        hx_verbs_qp_t *q = calloc(1, sizeof *q);
        q->next = net.qps;
        net.qps = q;
        q->device = d;
        q->owner = owner;
        q->depth = depth;
        q->wcs = calloc(depth, sizeof *q->wcs);
        q->numbers = calloc(depth, sizeof *q->numbers);
        uint32_t qpn = ++net.last, psn = (uint32_t)draw_below(&net.dice, 1 << 24);
        q->mine = (hx_verbs_address_t){.gid = {1}, .qpn = qpn, .psn = psn, .mtu = 3, .reads = 16, .lid = 1};
        d->counts.creates++;
        *qp_p = q;
        *address = q->mine;
        *inline_p = INLINE_ROOM;
    }
    pthread_mutex_unlock(&net.mu);
    return fails ? ENOMEM : 0;
}

static inline void doze(const uint64_t *most_us)
{
    pthread_mutex_lock(&net.mu);
    uint64_t us = *most_us ? draw_below(&net.dice, *most_us) : 0;
    pthread_mutex_unlock(&net.mu);
    if (us)
        usleep((useconds_t)us);
}

static int double_connect(hx_verbs_qp_t *q, const hx_verbs_address_t *peer)
{
    hx_verbs_device_t *d = q->device;
    hx_verbs_address_t theirs = *peer;
    pthread_mutex_lock(&net.mu);
    usable(q, "connect after destroy");
    if (q->connected || q->connecting)
        break_off("a queue pair is connected twice", d->name);
    q->connecting = true;
    d->counts.connects++;
    pthread_mutex_unlock(&net.mu);
    pass(&d->knobs.at_connect);
    doze(&d->knobs.connect_us);
    pthread_mutex_lock(&net.mu);
    bool fails = d->gone || one_fails(&d->knobs.connect_fails);
    q->connecting = false;
    q->connected = q->armed = !fails;
    q->theirs = theirs;
    pthread_mutex_unlock(&net.mu);
    return fails ? ETIMEDOUT : 0;
}

static inline void drop_event(hx_verbs_qp_t *q)
{
    hx_verbs_device_t *d = q->device;
    for (hx_verbs_qp_t **at = &d->events; *at; at = &(*at)->event_next)
        if (*at == q) {
            *at = q->event_next;
            break;
        }
    d->events_tail = d->events;
    while (d->events_tail && d->events_tail->event_next)
        d->events_tail = d->events_tail->event_next;
}

static int double_shut(hx_verbs_qp_t *q)
{
    hx_verbs_device_t *d = q->device;
    pthread_mutex_lock(&net.mu);
    in_use(q, "a queue pair is shut twice");
    q->shut = true;
    bool fails = d->gone || one_fails(&d->knobs.shut_fails);
    for (const flight_t *f = fails || q->failed ? NULL : q->head; f; f = f->next)
        if (!f->wr.read)
            put_on_the_wire(q, f);
    if (!fails)
        fail_qp(q);
    pthread_mutex_unlock(&net.mu);
    return fails ? EIO : 0;
}

static int double_destroy(hx_verbs_qp_t *q)
{
    hx_verbs_device_t *d = q->device;
    TELL(d, q->ending = true);
    pass(&d->knobs.at_destroy);
    doze(&d->knobs.destroy_us);
    pthread_mutex_lock(&net.mu);
    usable(q, "a queue pair is destroyed twice");
    if (q->connecting)
        break_off("a queue pair is destroyed while it is connected", d->name);
    bool fails = one_fails(&d->knobs.destroy_fails);
    if (!fails) {
        while (q->head) {
            flight_t *f = take_flight(q);
            if (!f->wr.read && !q->failed && !d->gone)
                put_on_the_wire(q, f);
            free(f);
        }
        drop_event(q);
        q->destroyed = true;
        d->counts.destroys++;
    }
    pthread_mutex_unlock(&net.mu);
    return fails ? EBUSY : 0;
}

static inline void check_wr(const hx_verbs_qp_t *q, const hx_verbs_wr_t *wr)
{
    const char *name = q->device->name;
    uint64_t n = 0;
    for (uint32_t i = 0; i < wr->nsge; i++)
        n += wr->sge[i].nbytes;
    if (!wr->nsge || wr->nsge > (wr->read ? net.max_sge_read : net.max_sge))
        break_off("a work request of too many places", name);
    if (!n || n > net.max_message || (wr->inlined && (wr->read || wr->nsge > 1 || n > INLINE_ROOM)))
        break_off("a work request that is too long", name);
    if (q->posted - q->reclaimed >= q->depth)
        break_off("more work requests than its queue has places", name);
}

static int double_post(hx_verbs_qp_t *q, const hx_verbs_wr_t *list, size_t n, size_t *posted_p)
{
    hx_verbs_device_t *d = q->device;
    int error = 0;
    pthread_mutex_lock(&net.mu);
    in_use(q, "post after the end");
    if (!q->connected)
        break_off("post before connect", d->name);
    *posted_p = 0;
    d->counts.posts++;
    for (size_t i = 0; i < n && !error; i++) {
        if (d->knobs.refuse_in && !--d->knobs.refuse_in) {
            error = ENOMEM;
            break;
        }
        check_wr(q, &list[i]);
        flight_t *f = calloc(1, sizeof *f);
        f->wr = list[i];
        memcpy(f->sges, list[i].sge, list[i].nsge * sizeof *f->sges);
        if (f->wr.inlined)
            memcpy(f->carried, (const void *)(uintptr_t)f->sges[0].addr, f->sges[0].nbytes);
        *(q->head ? &q->tail->next : &q->head) = f;
        q->tail = f;
        q->posted++;
        d->counts.wrs++;
        ++*posted_p;
    }
    if (!d->knobs.held)
        advance(q, SIZE_MAX);
    else if (q->failed)
        fail_qp(q);
    pthread_mutex_unlock(&net.mu);
    return error;
}

static int double_event(hx_verbs_device_t *d, void **owner_p)
{
    int got = 0;
    pthread_mutex_lock(&net.mu);
    live(d, "event");
    d->counts.looks++;
    hx_verbs_qp_t *q = d->events;
    if (d->gone) {
        got = -1;
    } else if (q) {
        d->events = q->event_next;
        q->has_event = false;
        q->armed = true;
        *owner_p = q->owner;
        got = 1;
    }
    if (!d->events && !d->gone)
        silence(d->fd);
    pthread_mutex_unlock(&net.mu);
    return got;
}

static int double_poll(hx_verbs_qp_t *q, hx_verbs_wc_t *out, int n)
{
    int found = 0;
    pthread_mutex_lock(&net.mu);
    usable(q, "poll after the end");
    if (q->ending)
        break_off("poll while it is destroyed", q->device->name);
    for (; found < n && q->wc_head < q->wc_tail; found++) {
        out[found] = q->wcs[q->wc_head % q->depth];
        q->reclaimed = q->numbers[q->wc_head++ % q->depth];
    }
    pthread_mutex_unlock(&net.mu);
    return found;
}

static int double_async(hx_verbs_device_t *d, void **owner_p, char *text, size_t room)
{
    int got = 0;
    pthread_mutex_lock(&net.mu);
    live(d, "async");
    if (d->gone) {
        got = -1;
    } else if (d->async_head < d->async_tail) {
        *owner_p = d->asyncs[d->async_head % ASYNCS].owner;
        snprintf(text, room, "%s", d->asyncs[d->async_head++ % ASYNCS].text);
        got = 1;
    } else {
        silence(d->async_fd);
    }
    pthread_mutex_unlock(&net.mu);
    return got;
}

static int double_meaning(uint32_t status)
{
    return status == DOUBLE_FLUSHED ? HX_VERBS_FLUSHED : status == DOUBLE_ACCESS ? HX_VERBS_ACCESS : HX_VERBS_OTHER;
}

static const char *double_name(uint32_t status)
{
    return status == DOUBLE_FLUSHED   ? "flushed"
           : status == DOUBLE_ACCESS  ? "remote access error"
           : status == DOUBLE_RETRIES ? "retry exceeded"
                                      : "something else";
}

/* The program exports it (-rdynamic), and is what the engines open as their binding: "" is glibc's name for it. */
#define VERBS_BINDING ""

const hx_verbs_table_t *hx_verbs_binding(void)
{
    static const hx_verbs_table_t table = {
        .abi = HX_VERBS_ABI,
        .open = double_open,
        .close = double_close,
        .reg = double_reg,
        .dereg = double_dereg,
        .create = double_create,
        .connect = double_connect,
        .shut = double_shut,
        .destroy = double_destroy,
        .post = double_post,
        .event = double_event,
        .poll = double_poll,
        .async = double_async,
        .meaning = double_meaning,
        .name = double_name,
    };
    return &table;
}

/* ---- what tests ask of it ---- */

/* The newest of that name. */
static inline hx_verbs_device_t *device_called(const char *name)
{
    pthread_mutex_lock(&net.mu);
    hx_verbs_device_t *d = net.devices;
    while (d && strcmp(d->name, name))
        d = d->next;
    pthread_mutex_unlock(&net.mu);
    return d;
}

static inline double_counts_t counts_of(const hx_verbs_device_t *d)
{
    pthread_mutex_lock(&net.mu);
    double_counts_t counts = d->counts;
    pthread_mutex_unlock(&net.mu);
    return counts;
}

/* Work requests that were posted and not carried out. */
static inline size_t waiting(const hx_verbs_device_t *d)
{
    size_t n = 0;
    pthread_mutex_lock(&net.mu);
    for (const hx_verbs_qp_t *q = net.qps; q; q = q->next)
        for (const flight_t *f = q->device == d && !q->destroyed ? q->head : NULL; f; f = f->next)
            n++;
    pthread_mutex_unlock(&net.mu);
    return n;
}

/* At most n of those of each queue pair. Answers how many there were. */
static inline size_t carry(hx_verbs_device_t *d, size_t n)
{
    size_t count = 0;
    pthread_mutex_lock(&net.mu);
    for (hx_verbs_qp_t *q = net.qps; q; q = q->next)
        if (q->device == d && !q->destroyed)
            count += advance(q, n);
    pthread_mutex_unlock(&net.mu);
    return count;
}

static inline void hold_back(hx_verbs_device_t *d)
{
    TELL(d, to->held = true);
}

/* All that was held, and what comes from now on. */
static inline void let_go(hx_verbs_device_t *d)
{
    TELL(d, to->held = false);
    carry(d, SIZE_MAX);
}

/* Queue pairs cannot be shut, and the first that is destroyed waits for let(&d->knobs.at_destroy). */
static inline void hold_ends(hx_verbs_device_t *d)
{
    TELL(d, to->shut_fails = ALWAYS);
    hold(&d->knobs.at_destroy, 1);
}

/* What was on the wire arrives. Answers how much of it landed in memory; *sent_p: of how many. */
static inline size_t arrive(size_t *sent_p)
{
    size_t landed = 0, sent = 0;
    pthread_mutex_lock(&net.mu);
    for (wire_t *w; (w = net.wires); sent++) {
        net.wires = w->next;
        landed += land(w);
        free(w);
    }
    pthread_mutex_unlock(&net.mu);
    if (sent_p)
        *sent_p = sent;
    return landed;
}

/* The queue pairs of the device fail by themselves, and it says so. */
static inline void spoil(hx_verbs_device_t *d)
{
    pthread_mutex_lock(&net.mu);
    for (hx_verbs_qp_t *q = net.qps; q; q = q->next)
        if (q->device == d && !q->destroyed && !q->failed) {
            fail_qp(q);
            tell_async(d, q->owner, "QP fatal");
        }
    pthread_mutex_unlock(&net.mu);
}

static inline void say_async(hx_verbs_device_t *d, const char *text)
{
    pthread_mutex_lock(&net.mu);
    tell_async(d, NULL, text);
    pthread_mutex_unlock(&net.mu);
}

/* It answers nothing any more, and completes nothing; what there is of it can be destroyed. */
static inline void take_away(hx_verbs_device_t *d)
{
    pthread_mutex_lock(&net.mu);
    d->gone = true;
    ring(d->fd);
    pthread_mutex_unlock(&net.mu);
}

/* Peers' rights to this device's memory vanish, as if its keys had changed. */
static inline void lock_out(hx_verbs_device_t *d)
{
    pthread_mutex_lock(&net.mu);
    for (hx_verbs_mr_t *mr = net.mrs; mr; mr = mr->next)
        if (mr->device == d && !mr->gone)
            mr->rwrite = false;
    pthread_mutex_unlock(&net.mu);
}

static inline void let_in(hx_verbs_device_t *d)
{
    pthread_mutex_lock(&net.mu);
    for (hx_verbs_mr_t *mr = net.mrs; mr; mr = mr->next)
        if (mr->device == d && !mr->gone)
            mr->rwrite = mr->nbytes > 8; /* not what is read to flush */
    pthread_mutex_unlock(&net.mu);
}

/* After a test: every device is closed, and nothing remains. */
static inline void clear_net(void)
{
    arrive(NULL);
    for (hx_verbs_qp_t *q; (q = net.qps);) {
        net.qps = q->next;
        while (q->head)
            free(take_flight(q));
        free(q->wcs);
        free(q->numbers);
        free(q);
    }
    for (hx_verbs_mr_t *mr; (mr = net.mrs);) {
        net.mrs = mr->next;
        free(mr);
    }
    for (hx_verbs_device_t *d; (d = net.devices);) {
        net.devices = d->next;
        CHECK(d->closed);
        free(d);
    }
}

#endif
