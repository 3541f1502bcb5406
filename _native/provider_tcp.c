/* SPDX-License-Identifier: Apache-2.0 */
/* The tcp provider's life, its progress thread, and its entries in the provider table. The handshake of a data connection
 * is the control thread's work (data_hello.c); what comes here is authenticated. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "link.h"
#include "sys.h"
#include "tcp.h"

#define SWEEP_NS 50000000ull
#define GHOST_NS 2000000ull      /* between looks at whether the kernel has let go of a closed connection's pages */
#define GIVE_UP_NS 5000000000ull /* after which an engine ends without that */
#define DEFAULT_STREAMS 1u       /* the default number of connections to a peer: benchmarks/README.md */

void hx_tcp_wake(hx_tcp_t *t)
{
    uint64_t one = 1;
    if (atomic_exchange(&t->awake, true))
        return;
    pthread_mutex_lock(&t->wake_mu); /* the descriptor goes with the thread, and whoever wakes it may come later */
    while (t->wake_fd >= 0 && write(t->wake_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
    pthread_mutex_unlock(&t->wake_mu);
}

/* ---- what has been told to end ---- */

static void sweep(hx_tpeer_t *p, uint64_t now, hx_done_t *done)
{
    uint64_t grace = p->t->engine->config.cancel_grace_ns;
    hx_opq_sweep(&p->runq, done);
    bool lost = atomic_load(&p->ep->state) == HX_EP_LOST;
    for (unsigned i = 0; i < p->streams; i++) {
        hx_tconn_t *c = p->conns[i];
        if (!c)
            continue;
        hx_tcp_drop_unsent(c, done);
        bool drop = lost || p->released;
        for (hx_treq_t *r = c->reqs_head; r && !drop; r = r->next) {
            hx_status_t verdict = hx_op_verdict(r->op);
            if (verdict == HX_OK)
                continue;
            hx_op_cancel_as(r->op, atomic_load(&r->op->gen), verdict);
            drop = verdict == HX_ERR_TIMEOUT || now > atomic_load(&r->op->cancel_ns) + grace;
        }
        if (drop) { /* what is on its way cannot be called back otherwise */
            snprintf(c->why, sizeof c->why, HX_TCP_TAKEN_BACK);
            hx_tcp_close_conn(c, done);
        }
    }
}

static bool take_posts(hx_tcp_t *t)
{
    pthread_mutex_lock(&t->inbox_mu);
    hx_opq_t posts = t->inbox;
    t->inbox = (hx_opq_t){NULL, NULL};
    pthread_mutex_unlock(&t->inbox_mu);
    bool any = posts.head != NULL;
    for (hx_op_t *op; (op = hx_opq_pop(&posts));)
        hx_opq_push(&op->ep->tcp->runq, op);
    return any;
}

/* Drops the references of peers that are not used any more; with the last one, forget() frees them. Not under mu. */
static void forget_released(hx_tcp_t *t, bool all)
{
    hx_endpoint_t *ep;
    do {
        ep = NULL;
        pthread_mutex_lock(&t->mu);
        take_posts(t); /* nothing is posted to a released peer, but something may have been */
        for (hx_tpeer_t *p = t->peers; p && !ep; p = p->next)
            if (p->ep && (all || (p->released && !p->open && !p->runq.head && !p->dialing && !p->ghosts))) {
                ep = p->ep;
                p->ep = NULL;
            }
        pthread_mutex_unlock(&t->mu);
        hx_endpoint_unref(ep);
    } while (ep);
}

/* ---- the thread ---- */

static void serve(hx_tconn_t *c, uint32_t events, hx_done_t *done)
{
    if (c->fd < 0 || c->reading)
        return;
    if (events & EPOLLERR)
        hx_tcp_zc_reap(c, done);
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        hx_tcp_read(c, false, done);
    if (c->broken)
        hx_tcp_close_conn(c, done);
}

static void flush_all(hx_tcp_t *t, hx_done_t *done)
{
    for (hx_tconn_t *c = t->conns; c; c = c->next) {
        if (c->fd < 0 || c->reading) /* the loop wakes us when it has read: an answer must not overtake its question */
            continue;
        if (c->out_head)
            hx_tcp_lane_leave(c);
        if (c->out_head && !hx_tcp_flush(c, false))
            hx_tcp_close_conn(c, done);
        else
            hx_tcp_watch(c);
    }
}

/* Nothing but ghosts are left, and they stay: so do the threads' memory and the regions. */
static bool give_up(hx_tcp_t *t, uint64_t now)
{
    if (!t->give_up_ns)
        t->give_up_ns = now + GIVE_UP_NS;
    if (!t->conns || now < t->give_up_ns)
        return false;
    for (hx_tconn_t *c = t->conns; c; c = c->next)
        if (c->ghost_fd < 0)
            return false;
    for (hx_tconn_t *c = t->conns; c; c = c->next)
        hx_tcp_zc_abandon(c);
    t->engine->stuck_peers++; /* read after this thread was joined */
    return true;
}

static void *run(void *arg)
{
    hx_tcp_t *t = arg;
    struct epoll_event events[64];
    int timeout = -1;
    for (;;) {
        int n = epoll_wait(t->epoll_fd, events, 64, timeout);
        hx_done_t done = {NULL};
        uint64_t count, now = hx_now_ns(), due = 0;
        /* The ring first, then the mark, then the queues: who comes after the mark rings again, and is not read away. */
        for (int i = 0; i < n; i++)
            if (!events[i].data.ptr && read(t->wake_fd, &count, sizeof count) < 0) {
                /* read away by an earlier look */
            }
        atomic_store(&t->awake, false);
        pthread_mutex_lock(&t->mu);
        take_posts(t);
        for (int i = 0; i < n; i++) {
            if (events[i].data.ptr)
                serve(events[i].data.ptr, events[i].events, &done);
        }
        for (hx_tconn_t *c = t->conns; c; c = c->next) {
            if (c->fd >= 0 && c->fresh) /* what came with the handshake waits for no event */
                serve(c, EPOLLIN, &done);
            c->fresh = false;
            if (c->fd >= 0 && (c->broken || t->stopping))
                hx_tcp_close_conn(c, &done);
        }
        bool swept = atomic_exchange(&t->kicked, false) || now >= t->sweep_ns;
        if (swept)
            t->sweep_ns = now + SWEEP_NS;
        bool live = false;
        for (hx_tpeer_t *p = t->peers; p; p = p->next) {
            if (!p->ep)
                continue; /* only its memory is left */
            if (swept)
                sweep(p, now, &done);
            hx_tcp_pump(p, &done);
            hx_tcp_release_notes(p, now);
            live |= p->held != NULL;
            uint64_t at = hx_tcp_dial(p, now, &done);
            due = at && (!due || at < due) ? at : due;
            live |= p->runq.head != NULL;
        }
        flush_all(t, &done);
        uint64_t look_at = hx_tcp_lane_look(t, now);
        due = look_at && (!due || look_at < due) ? look_at : due;
        bool more = false;
        for (hx_tconn_t *c = t->conns; c; c = c->next) {
            live |= c->reqs_head != NULL;
            uint64_t look = now < c->limbo_ns ? c->limbo_ns : now + SWEEP_NS;
            due = c->fd < 0 && c->reqs_head && (!due || look < due) ? look : due;
            look = now + GHOST_NS;
            due = c->ghost_fd >= 0 && (!due || look < due) ? look : due;
            more |= c->fd >= 0 && c->out_head && !c->want_write; /* its turn was over before its queue was */
        }
        hx_tcp_free_closed(t, &done);
        bool over = t->stopping && !t->conns && !live && !take_posts(t);
        if (t->stopping) {
            atomic_store(&t->kicked, true);
            due = now + 1000000;
            over = over || give_up(t, now);
        }
        if (live && (!due || t->sweep_ns < due))
            due = t->sweep_ns;
        pthread_mutex_unlock(&t->mu);
        hx_done_finish(&done);
        forget_released(t, false);
        if (over)
            return NULL;
        timeout = more ? 0 : !due ? -1 : due <= now ? 0 : (int)((due - now + 999999) / 1000000);
    }
}

/* ---- open, stop, close ---- */

static hx_status_t open_tcp(hx_engine_t *engine, void **state_p, char text[HX_TEXT_MAX])
{
    hx_tcp_t *t = calloc(1, sizeof *t);
    if (!t)
        return HX_ERR_NO_MEMORY;
    t->engine = engine;
    t->checksum = engine->config.checksum;
    t->zerocopy = engine->config.zerocopy;
    t->streams = engine->config.streams ? engine->config.streams : DEFAULT_STREAMS;
    pthread_mutex_init(&t->mu, NULL);
    pthread_mutex_init(&t->wake_mu, NULL);
    pthread_mutex_init(&t->inbox_mu, NULL);
    t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    t->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    t->reqs = calloc(HX_TCP_REQUESTS, sizeof *t->reqs);
    *state_p = t;
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = NULL};
    if (!t->reqs)
        return HX_ERR_NO_MEMORY;
    for (uint32_t i = HX_TCP_REQUESTS; i-- > 0;) {
        t->reqs[i].index = i;
        t->reqs[i].next = t->free_reqs;
        t->free_reqs = &t->reqs[i];
    }
    if (t->epoll_fd < 0 || t->wake_fd < 0 || epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, t->wake_fd, &ev) < 0) {
        snprintf(text, HX_TEXT_MAX, "cannot open the tcp transport's descriptors: %s", strerror(errno));
        return HX_ERR_SYSTEM;
    }
    t->started = hx_thread_start(&t->thread, run, t, "hx-tcp");
    return t->started ? HX_OK : HX_ERR_SYSTEM;
}

static void stop(hx_engine_t *engine, void *state)
{
    hx_tcp_t *t = state;
    (void)engine;
    if (t->stopped)
        return;
    t->stopped = true;
    pthread_mutex_lock(&t->mu);
    t->stopping = true;
    pthread_mutex_unlock(&t->mu);
    hx_tcp_wake(t);
    if (t->started)
        pthread_join(t->thread, NULL);
    forget_released(t, true);
    pthread_mutex_lock(&t->wake_mu);
    hx_close_fd(&t->epoll_fd);
    hx_close_fd(&t->wake_fd);
    pthread_mutex_unlock(&t->wake_mu);
}

static void close_tcp(hx_engine_t *engine, void *state)
{
    hx_tcp_t *t = state;
    (void)engine;
    for (hx_tpeer_t *p; (p = t->peers);) {
        t->peers = p->next;
        hx_tcp_free_notes(p);
        free(p);
    }
    free(t->reqs);
    pthread_mutex_destroy(&t->inbox_mu);
    pthread_mutex_destroy(&t->wake_mu);
    pthread_mutex_destroy(&t->mu);
    free(t);
}

/* ---- what the core asks ---- */

static hx_status_t probe(char text[HX_TEXT_MAX])
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        snprintf(text, HX_TEXT_MAX, "no TCP sockets: %s", strerror(errno));
        return HX_ERR_SYSTEM;
    }
    close(fd);
    snprintf(text, HX_TEXT_MAX, "TCP sockets work");
    return HX_OK;
}

static hx_status_t route(hx_endpoint_t *ep, const hx_region_t *local, const hx_rregion_t *remote,
                         char text[HX_TEXT_MAX])
{
    const char *why = NULL;
    if (remote->kind == HX_KIND_LAYOUT)
        why = "a layout is a description, not memory";
    else if (remote->kind == HX_KIND_DEVICE || (local && local->kind == HX_KIND_DEVICE))
        why = "NPU memory cannot be reached by the CPU";
    else if (!(ep->features & HX_FEATURE_TCP))
        why = "the peer's engine has no tcp transport";
    else if (!ep->tcp)
        why = "the side that was connected to has no TCP address to listen on: give it Engine(address='host:port')";
    if (text)
        snprintf(text, HX_TEXT_MAX, "%s", why ? why : "by TCP, straight into the peer's memory");
    return why ? HX_ERR_NO_PATH : HX_OK;
}

static void kick(hx_engine_t *engine, void *state)
{
    hx_tcp_t *t = state;
    if (hx_in_child(engine))
        return;
    atomic_store(&t->kicked, true);
    hx_tcp_wake(t);
}

/* Our port for data connections, and our name of the link: whoever dials needs both. */
typedef struct {
    uint64_t session;
    uint16_t port;
    uint16_t streams;
    uint32_t host_len;
    /* the address we listen on: for a peer that found us by a unix socket */
} hx_tcp_intro_t;

static size_t introduce(hx_endpoint_t *ep, void *state, uint8_t *out, size_t max)
{
    hx_tcp_t *t = state;
    const char *host = t->engine->tcp_host ? t->engine->tcp_host : "";
    hx_tcp_intro_t intro = {ep->serial, t->engine->control.tcp_port, (uint16_t)t->streams, (uint32_t)strlen(host)};
    if (sizeof intro + intro.host_len > max)
        return 0;
    memcpy(out, &intro, sizeof intro);
    memcpy(out + sizeof intro, host, intro.host_len);
    return sizeof intro + intro.host_len;
}

static void set_port(struct sockaddr_storage *ss, uint16_t port)
{
    if (ss->ss_family == AF_INET6)
        ((struct sockaddr_in6 *)ss)->sin6_port = htons(port);
    else
        ((struct sockaddr_in *)ss)->sin_port = htons(port);
}

/* Where the peer listens. By TCP we know the way to it already; by a unix socket it is this host, at the address it names. */
static bool address_of(hx_endpoint_t *ep, uint16_t port, const char *host, hx_tpeer_t *p)
{
    struct sockaddr_in *v4 = (struct sockaddr_in *)&p->address;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&p->address;
    p->address_len = sizeof p->address;
    if (ep->link->tcp) /* as it was reached: its own number of the port may be another, behind a forwarding one */
        return getpeername(ep->link->fd, (struct sockaddr *)&p->address, &p->address_len) == 0;
    if (inet_pton(AF_INET6, host, &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        p->address_len = sizeof *v6;
        if (IN6_IS_ADDR_UNSPECIFIED(&v6->sin6_addr))
            v6->sin6_addr = in6addr_loopback;
    } else if (inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        p->address_len = sizeof *v4;
        if (v4->sin_addr.s_addr == htonl(INADDR_ANY))
            v4->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    } else {
        return false;
    }
    set_port(&p->address, port);
    return true;
}

static bool meet(hx_endpoint_t *ep, void *state, const uint8_t *body, size_t n)
{
    hx_tcp_t *t = state;
    hx_tcp_intro_t intro;
    char host[64];
    if (ep->tcp || n < sizeof intro)
        return false;
    memcpy(&intro, body, sizeof intro);
    if (!intro.streams || intro.streams > HX_TCP_STREAMS_MAX || intro.host_len != n - sizeof intro ||
        intro.host_len >= sizeof host)
        return false;
    memcpy(host, body + sizeof intro, intro.host_len);
    host[intro.host_len] = 0;
    uint16_t port = ep->outgoing ? intro.port : t->engine->control.tcp_port;
    if (!port)
        return true; /* the side that was asked does not listen */
    hx_tpeer_t *p = hx_alloc(sizeof *p);
    p->t = t;
    p->session = intro.session;
    p->dials = ep->outgoing;
    p->streams = intro.streams < t->streams ? intro.streams : t->streams;
    if (p->dials && !address_of(ep, port, host, p)) {
        free(p);
        return true;
    }
    p->ep = ep;
    hx_endpoint_ref(ep);
    ep->tcp = p;
    p->idle_ns = hx_now_ns();
    pthread_mutex_lock(&t->mu);
    p->next = t->peers;
    t->peers = p;
    pthread_mutex_unlock(&t->mu);
    hx_tcp_wake(t); /* it dials ahead of the first transfer */
    return true;
}

static void release(hx_endpoint_t *ep)
{
    hx_tpeer_t *p = ep->tcp;
    if (!p)
        return;
    pthread_mutex_lock(&p->t->mu);
    p->released = true;
    atomic_store(&p->t->kicked, true);
    pthread_mutex_unlock(&p->t->mu);
    hx_tcp_wake(p->t);
}

static void forget(hx_endpoint_t *ep)
{
    hx_tpeer_t *p = ep->tcp;
    if (!p)
        return;
    hx_tcp_t *t = p->t;
    pthread_mutex_lock(&t->mu);
    for (hx_tpeer_t **at = &t->peers; *at; at = &(*at)->next)
        if (*at == p) {
            *at = p->next;
            break;
        }
    pthread_mutex_unlock(&t->mu);
    hx_tcp_free_notes(p);
    free(p);
}

/* Its connections are closed: nothing of it is arriving any more. */
static bool settled(hx_endpoint_t *ep)
{
    hx_tpeer_t *p = ep->tcp;
    if (!p)
        return true;
    pthread_mutex_lock(&p->t->mu);
    bool settled = !p->open && !p->ghosts;
    pthread_mutex_unlock(&p->t->mu);
    return settled;
}

/* The loop's thread may hold Python's lock in hx_tcp_assist, and want `mu`; whoever forks gets that lock again only then. */
static void before_fork(void *state)
{
    hx_tcp_t *t = state;
    pthread_mutex_lock(&t->mu);
    while (t->assisting) {
        pthread_mutex_unlock(&t->mu);
        poll(NULL, 0, 1);
        pthread_mutex_lock(&t->mu);
    }
}

static void after_fork(void *state)
{
    hx_tcp_t *t = state;
    pthread_mutex_unlock(&t->mu);
}

/* In the child: a descriptor that it holds would hide its parent's end from the peers. */
static void forked(void *state)
{
    hx_tcp_t *t = state;
    for (hx_tconn_t *c = t->conns; c; c = c->next) {
        hx_close_fd(&c->fd);
        hx_close_fd(&c->ghost_fd);
    }
    hx_close_fd(&t->epoll_fd);
    hx_close_fd(&t->wake_fd);
}

static bool data_address(hx_endpoint_t *ep, struct sockaddr_storage *ss, socklen_t *len_p, uint64_t *session_p)
{
    if (!ep->tcp)
        return false;
    *ss = ep->tcp->address;
    *len_p = ep->tcp->address_len;
    *session_p = ep->tcp->session;
    return true;
}

/* Does a message that is arriving, or an answer that is leaving, touch these bytes of ours? */
static uint64_t rows_in(const hx_tcp_row_t *rows, size_t n, uint64_t off, uint64_t end)
{
    uint64_t held = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t lo = rows[i].off > off ? rows[i].off : off;
        uint64_t hi = rows[i].off + rows[i].nbytes < end ? rows[i].off + rows[i].nbytes : end;
        held += hi > lo ? hi - lo : 0;
    }
    return held < end - off ? held : end - off;
}

static uint64_t read_in(const hx_tout_t *out, uint64_t region, uint64_t off, uint64_t end)
{
    uint64_t held = 0;
    for (; out; out = out->next)
        if (out->region && out->region_id == region)
            held += rows_in(out->rows, out->nrows, off, end);
    return held;
}

static uint64_t landing(hx_endpoint_t *ep, uint64_t region, uint64_t off, uint64_t end)
{
    hx_tpeer_t *p = ep->tcp;
    uint64_t held = 0;
    if (!p)
        return 0;
    pthread_mutex_lock(&p->t->mu);
    for (const hx_tconn_t *c = p->t->conns; c; c = c->next) {
        if (c->peer != p)
            continue;
        if (c->rx.active && c->rx.head.region == region)
            held += rows_in(c->rx.rows, c->rx.head.nrows, off, end);
        held += read_in(c->out_head, region, off, end) + read_in(c->held_head, region, off, end);
    }
    pthread_mutex_unlock(&p->t->mu);
    return held < end - off ? held : end - off;
}

const hx_provider_t hx_provider_tcp = {
    .abi = HX_PROVIDER_ABI,
    .name = "tcp",
    .transport = HX_TRANSPORT_TCP,
    .feature = HX_FEATURE_TCP,
    .probe = probe,
    .open = open_tcp,
    .stop = stop,
    .close = close_tcp,
    .route = route,
    .submit = hx_tcp_submit,
    .assist = hx_tcp_assist,
    .overdue = hx_tcp_overdue,
    .kick = kick,
    .introduce = introduce,
    .meet = meet,
    .release = release,
    .forget = forget,
    .take_socket = hx_tcp_take_socket,
    .dial_failed = hx_tcp_dial_failed,
    .data_address = data_address,
    .settled = settled,
    .make_room = hx_tcp_make_room,
    .before_fork = before_fork,
    .after_fork = after_fork,
    .forked = forked,
    .landing = landing,
    .evict = hx_tcp_evict,
};
