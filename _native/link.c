/* SPDX-License-Identifier: Apache-2.0 */
/* Sockets of the control link, and its frames in and out. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "link.h"
#include "provider.h"

#define RX_STEP (64u << 10)
#define PLACE_NS 250000000ull /* of a stranger's time, before another may take its place */

hx_link_t *hx_link_new(hx_engine_t *engine, int fd, bool tcp, bool outgoing)
{
    hx_link_t *link = hx_alloc(sizeof *link);
    hx_control_t *c = &engine->control;
    link->engine = engine;
    link->fd = fd;
    link->tcp = tcp;
    link->outgoing = outgoing;
    link->deadline_ns = hx_now_ns() + engine->config.handshake_timeout_ns;
    link->ep = hx_endpoint_new(engine);
    link->ep->link = link;
    link->ep->local = !tcp;
    link->ep->outgoing = outgoing;
    link->next = c->links;
    c->links = link;
    if (!outgoing)
        c->shaking++;
    else
        link->known = true;
    return link;
}

void hx_link_close(hx_link_t *link)
{
    if (link->dead)
        return;
    link->dead = true;
    link->ep->link = NULL;
    if (!link->known)
        link->engine->control.shaking--;
    link->known = true;
    /* By hand: a process that is being started may hold the socket for a moment longer, and with it the
     * registration. */
    epoll_ctl(link->engine->control.epoll_fd, EPOLL_CTL_DEL, link->fd, NULL);
    close(link->fd);
}

int hx_link_detach(hx_link_t *link)
{
    int fd = link->fd;
    link->dead = true;
    link->ep->link = NULL;
    if (!link->known)
        link->engine->control.shaking--;
    link->known = true;
    epoll_ctl(link->engine->control.epoll_fd, EPOLL_CTL_DEL, fd, NULL);
    link->fd = -1;
    return fd;
}

void hx_link_free(hx_link_t *link)
{
    for (hx_out_t *out; (out = link->tx_head);) {
        link->tx_head = out->next;
        if (out->fd >= 0)
            close(out->fd);
        free(out);
    }
    for (unsigned i = 0; i < link->nfds; i++)
        close(link->fds[i]);
    free(link->rx);
    hx_endpoint_unref(link->data_ep);
    hx_endpoint_unref(link->ep);
    free(link);
}

void hx_link_fail(hx_link_t *link, hx_status_t status, int err, const char *format, ...)
{
    char text[HX_TEXT_MAX];
    va_list args;
    if (link->dead)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    hx_endpoint_t *ep = link->ep;
    hx_engine_t *engine = link->engine;
    hx_endpoint_ref(ep);
    bool up = link->state == HX_LINK_UP;
    hx_link_close(link);
    if (up) {
        hx_endpoint_lose(ep, HX_ERR_PEER_LOST, text);
    } else if (link->outgoing && link->data_ep) {
        hx_providers_dial_failed(link->data_ep); /* it tries again; the peer itself is not in question */
    } else if (link->outgoing) {
        hx_event_t ev = {.kind = HX_EV_CONNECT_FAILED, .status = status, .sys_errno = err, .token = ep->token};
        hx_event_emit(engine, ev, NULL, 0, text, strlen(text));
    } else {
        hx_event_t ev = {.kind = HX_EV_REFUSED, .status = status, .sys_errno = err};
        atomic_fetch_add(&engine->n_refused, 1);
        hx_event_emit(engine, ev, NULL, 0, text, strlen(text));
    }
    hx_endpoint_unref(ep);
}

/* ---- out ---- */

static bool send_some(hx_link_t *link, hx_out_t *out)
{
    struct iovec iov = {out->data + out->off, out->len - out->off};
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    if (out->fd >= 0) {
        memset(&control, 0, sizeof control);
        msg.msg_control = control.space;
        msg.msg_controllen = sizeof control.space;
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &out->fd, sizeof(int));
    }
    ssize_t n = sendmsg(link->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) {
        if (errno != EAGAIN && errno != EINTR && errno != ENOBUFS)
            hx_link_fail(link, link->state == HX_LINK_UP ? HX_ERR_PEER_LOST : HX_ERR_UNREACHABLE, errno,
                         "control link broke: %s", strerror(errno));
        return false;
    }
    if (out->fd >= 0) {
        close(out->fd);
        out->fd = -1;
        link->tx_fds--;
    }
    out->off += (size_t)n;
    link->tx_bytes -= (uint64_t)n;
    return out->off == out->len;
}

static void want_write(hx_link_t *link, bool want)
{
    if (link->dead || link->want_write == want)
        return;
    link->want_write = want;
    hx_control_watch(link->engine, link);
}

void hx_link_flush(hx_link_t *link)
{
    while (!link->dead && link->tx_head) {
        hx_out_t *out = link->tx_head;
        if (!send_some(link, out))
            break;
        link->tx_head = out->next;
        if (!link->tx_head)
            link->tx_tail = NULL;
        free(out);
    }
    want_write(link, link->tx_head != NULL);
}

void hx_link_send(hx_link_t *link, hx_frame_type_t type, uint64_t arg, const struct iovec *parts, int nparts, int fd)
{
    size_t len = sizeof(hx_frame_t);
    for (int i = 0; i < nparts; i++)
        len += parts[i].iov_len;
    if (link->dead || len > HX_FRAME_MAX) {
        if (fd >= 0)
            close(fd);
        return;
    }
    hx_out_t *out = hx_alloc(sizeof *out + len);
    hx_frame_t head = {(uint32_t)len, (uint16_t)type, fd >= 0, 0, arg};
    out->len = len;
    out->fd = fd;
    memcpy(out->data, &head, sizeof head);
    size_t at = sizeof head;
    for (int i = 0; i < nparts; i++) {
        if (parts[i].iov_len)
            memcpy(out->data + at, parts[i].iov_base, parts[i].iov_len);
        at += parts[i].iov_len;
    }
    if (link->tx_tail)
        link->tx_tail->next = out;
    else
        link->tx_head = out;
    link->tx_tail = out;
    link->tx_bytes += len;
    link->tx_fds += fd >= 0;
    if (link->tx_bytes > HX_TX_MAX || link->tx_fds > HX_TX_FDS_MAX)
        hx_link_fail(link, HX_ERR_PEER_LOST, 0, "peer does not read its control link: %llu bytes are waiting",
                     (unsigned long long)link->tx_bytes);
    else if (!link->want_write)
        hx_link_flush(link);
}

/* ---- in ---- */

int hx_link_take_fd(hx_link_t *link)
{
    if (!link->nfds)
        return -1;
    int fd = link->fds[0];
    memmove(link->fds, link->fds + 1, --link->nfds * sizeof link->fds[0]);
    return fd;
}

static bool keep_fds(hx_link_t *link, struct msghdr *msg)
{
    bool ok = !(msg->msg_flags & MSG_CTRUNC);
    for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
            if (link->nfds < HX_LINK_FDS) {
                link->fds[link->nfds++] = fd;
            } else {
                close(fd);
                ok = false;
            }
        }
    }
    return ok;
}

/* Takes the complete frames off the buffer. */
static void parse(hx_link_t *link)
{
    size_t at = 0;
    while (!link->dead && link->rx_len - at >= sizeof(hx_frame_t)) {
        hx_frame_t frame;
        memcpy(&frame, link->rx + at, sizeof frame);
        /* A stranger has no business with long frames: bounded before anything grows. */
        size_t max =
            link->state == HX_LINK_UP || link->state == HX_LINK_WAIT_PAGE ? HX_FRAME_MAX : sizeof frame + HX_HELLO_MAX;
        if (frame.length < sizeof frame || frame.length > max || frame.nfds > 1) {
            hx_link_fail(link, HX_ERR_MISMATCH, 0, "not a control link of aiohixl: frame of %u bytes, type %u",
                         frame.length, frame.type);
            return;
        }
        if (link->rx_len - at < frame.length) {
            if (frame.length > link->rx_cap) {
                uint8_t *rx = realloc(link->rx, frame.length + RX_STEP);
                if (!rx) {
                    hx_link_fail(link, HX_ERR_NO_MEMORY, ENOMEM, "no memory for a frame of %u bytes", frame.length);
                    return;
                }
                link->rx = rx;
                link->rx_cap = frame.length + RX_STEP;
            }
            break;
        }
        const uint8_t *body = link->rx + at + sizeof frame;
        size_t n = frame.length - sizeof frame;
        link->rx_at = at + frame.length;
        if (link->state == HX_LINK_UP || link->state == HX_LINK_WAIT_PAGE)
            hx_frames_handle(link, &frame, body, n);
        else
            hx_hello_frame(link, &frame, body, n);
        at += frame.length;
    }
    if (!link->dead && at) {
        memmove(link->rx, link->rx + at, link->rx_len - at);
        link->rx_len -= at;
    }
}

void hx_link_receive(hx_link_t *link)
{
    if (!link->rx_cap) {
        link->rx = hx_alloc(RX_STEP);
        link->rx_cap = RX_STEP;
    }
    /* A bounded number of rounds, so that one busy peer does not keep the others waiting. */
    for (int round = 0; round < 16 && !link->dead; round++) {
        union {
            struct cmsghdr head; /* for its alignment */
            char space[CMSG_SPACE(HX_LINK_FDS * sizeof(int))];
        } control;
        struct iovec iov = {link->rx + link->rx_len, link->rx_cap - link->rx_len};
        struct msghdr msg = {
            .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control.space};
        ssize_t n = recvmsg(link->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return;
        if (n <= 0) {
            int err = n < 0 ? errno : 0;
            hx_link_fail(link, HX_ERR_UNREACHABLE, err, "%s: %s",
                         link->state == HX_LINK_UP ? "control link ended" : "handshake ended early",
                         err ? strerror(err) : "the other side closed its socket");
            return;
        }
        if (!keep_fds(link, &msg)) {
            /* Going on without it could pair a later descriptor with the wrong frame. */
            bool short_of = msg.msg_flags & MSG_CTRUNC;
            hx_link_fail(link, HX_ERR_MISMATCH, short_of ? EMFILE : 0, "%s",
                         short_of
                             ? "the peer sent more descriptors than fit, or none was left here to take one (ulimit -n)"
                             : "more descriptors than a control link carries");
            return;
        }
        link->rx_len += (size_t)n;
        link->ep->last_rx_ns = hx_now_ns();
        parse(link);
    }
}

/* ---- sockets ---- */

static void tune_tcp(hx_engine_t *engine, int fd)
{
    int one = 1, idle = 1, ms = (int)(engine->config.peer_timeout_ns / 1000000);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &one, sizeof one);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof ms);
}

int hx_listen_unix(const char *path, char text[HX_TEXT_MAX])
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof sa.sun_path) {
        snprintf(text, HX_TEXT_MAX, "the unix socket path is longer than %zu bytes: %.120s", sizeof sa.sun_path - 1,
                 path);
        return -1;
    }
    strcpy(sa.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&sa, sizeof sa) < 0 || listen(fd, 128) < 0) {
        snprintf(text, HX_TEXT_MAX, "cannot listen on %.160s: %s", path, strerror(errno));
        if (fd >= 0)
            close(fd);
        return -1;
    }
    return fd;
}

static socklen_t parse_address(const char *host, uint16_t port, struct sockaddr_storage *ss)
{
    memset(ss, 0, sizeof *ss);
    struct sockaddr_in *v4 = (struct sockaddr_in *)ss;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)ss;
    if (inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons(port);
        return sizeof *v4;
    }
    if (inet_pton(AF_INET6, host, &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons(port);
        return sizeof *v6;
    }
    return 0;
}

int hx_listen_tcp(const char *host, uint16_t port, uint16_t *port_p, char text[HX_TEXT_MAX])
{
    struct sockaddr_storage ss;
    int one = 1;
    socklen_t len = parse_address(host, port, &ss);
    if (!len) {
        snprintf(text, HX_TEXT_MAX, "not a numeric address: %.128s", host);
        return -1;
    }
    int fd = socket(ss.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0) {
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (ss.ss_family == AF_INET6)
            setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one);
    }
    if (fd < 0 || bind(fd, (struct sockaddr *)&ss, len) < 0 || listen(fd, 128) < 0 ||
        getsockname(fd, (struct sockaddr *)&ss, &len) < 0) {
        snprintf(text, HX_TEXT_MAX, "cannot listen on %.128s port %u: %s", host, port, strerror(errno));
        if (fd >= 0)
            close(fd);
        return -1;
    }
    *port_p = ntohs(ss.ss_family == AF_INET ? ((struct sockaddr_in *)&ss)->sin_port
                                            : ((struct sockaddr_in6 *)&ss)->sin6_port);
    return fd;
}

/* Whoever has stood longest at the door without proving who it is goes, if it had time enough for that: a peer needs two round
 * trips. So connections that say nothing keep nobody out. */
static bool make_place(hx_engine_t *engine)
{
    hx_link_t *oldest = NULL;
    for (hx_link_t *link = engine->control.links; link; link = link->next)
        if (!link->known && !link->dead && (!oldest || link->deadline_ns < oldest->deadline_ns))
            oldest = link;
    if (!oldest || hx_now_ns() + engine->config.handshake_timeout_ns < oldest->deadline_ns + PLACE_NS)
        return false;
    hx_link_fail(oldest, HX_ERR_TIMEOUT, 0,
                 "it had not proven who it is, and others came: %u at most may shake hands at a time", HX_SHAKING_MAX);
    return true;
}

void hx_links_accept(hx_engine_t *engine, int listen_fd, bool tcp)
{
    for (int round = 0; round < 64; round++) {
        int fd = accept4(listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOMEM)
                poll(NULL, 0, 10); /* the listener stays readable: without a pause this thread would spin */
            return;
        }
        if (engine->control.shaking >= HX_SHAKING_MAX && !make_place(engine)) {
            close(fd);
            continue;
        }
        if (tcp)
            tune_tcp(engine, fd);
        hx_link_t *link = hx_link_new(engine, fd, tcp, false);
        link->state = HX_LINK_WAIT_HELLO;
        if (hx_hello_admit(link))
            hx_control_watch(engine, link);
    }
}

void hx_link_connect(hx_engine_t *engine, const hx_command_t *cmd)
{
    struct sockaddr_storage ss = {0};
    socklen_t len;
    if (cmd->tcp) {
        len = parse_address(cmd->address, cmd->port, &ss);
    } else {
        struct sockaddr_un *un = (struct sockaddr_un *)&ss;
        size_t n = strlen(cmd->address);
        un->sun_family = AF_UNIX;
        len = n < sizeof un->sun_path ? sizeof *un : 0;
        if (len)
            memcpy(un->sun_path, cmd->address, n + 1);
    }
    int fd = len ? socket(ss.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0) : -1;
    int err = len ? errno : EINVAL;
    if (fd >= 0) {
        if (cmd->tcp)
            tune_tcp(engine, fd);
        err = connect(fd, (struct sockaddr *)&ss, len) == 0 ? 0 : errno;
    }
    if (fd < 0 || (err && err != EINPROGRESS)) {
        char text[HX_TEXT_MAX];
        snprintf(text, sizeof text, "%s", strerror(err));
        hx_event_t ev = {
            .kind = HX_EV_CONNECT_FAILED, .status = HX_ERR_UNREACHABLE, .sys_errno = err, .token = cmd->token};
        hx_event_emit(engine, ev, NULL, 0, text, strlen(text));
        if (fd >= 0)
            close(fd);
        return;
    }
    hx_link_t *link = hx_link_new(engine, fd, cmd->tcp, true);
    link->ep->token = cmd->token;
    snprintf(link->want_name, sizeof link->want_name, "%s", cmd->name);
    link->want_incarnation = cmd->has_incarnation;
    memcpy(link->wanted, cmd->incarnation, sizeof link->wanted);
    link->state = HX_LINK_CONNECTING;
    link->want_write = true;
    hx_control_watch(engine, link);
}

void hx_link_dial(hx_endpoint_t *ep, uint32_t stream)
{
    hx_engine_t *engine = ep->engine;
    struct sockaddr_storage ss;
    socklen_t len = sizeof ss;
    uint64_t session;
    int fd = -1;
    bool begun = false;
    if (atomic_load(&ep->state) == HX_EP_UP && hx_providers_data_address(ep, &ss, &len, &session)) {
        fd = socket(ss.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (fd >= 0) {
            tune_tcp(engine, fd);
            begun = connect(fd, (struct sockaddr *)&ss, len) == 0 || errno == EINPROGRESS;
        }
    }
    if (!begun) {
        if (fd >= 0)
            close(fd);
        hx_providers_dial_failed(ep);
        return;
    }
    hx_link_t *link = hx_link_new(engine, fd, true, true);
    hx_endpoint_ref(ep);
    link->data_ep = ep;
    link->session = session;
    link->stream = stream;
    link->state = HX_LINK_CONNECTING;
    link->want_write = true;
    hx_control_watch(engine, link);
}
