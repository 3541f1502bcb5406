/* SPDX-License-Identifier: Apache-2.0 */
/* A control link by hand, to the engine under test: a peer that says whatever a harness wants it to say. */
#ifndef FUZZ_RAWPEER_H
#define FUZZ_RAWPEER_H

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "link.h"
#include "pair.h"
#include "provider.h"

/* What a harness must not survive: the input at hand is kept by whoever runs it. */
#define MUST(condition)                                                                    \
    do {                                                                                   \
        if (!CHECK(condition)) {                                                           \
            fprintf(stderr, "fuzz: the engine last said: %s\n", b.text[0] ? b.text : "-"); \
            abort();                                                                       \
        }                                                                                  \
    } while (0)

static side_t b; /* the engine under test */

static inline int raw_socket(bool tcp)
{
    int fd = socket(tcp ? AF_INET : AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), err;
    struct timeval patience = {.tv_sec = PATIENCE};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (tcp) {
        struct sockaddr_in sa = {.sin_family = AF_INET, .sin_port = htons(hx_engine_tcp_port(b.engine))};
        sa.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        err = connect(fd, (struct sockaddr *)&sa, sizeof sa);
    } else {
        struct sockaddr_un sa = {.sun_family = AF_UNIX};
        memcpy(sa.sun_path, b.path, sizeof b.path);
        err = connect(fd, (struct sockaddr *)&sa, sizeof sa);
    }
    MUST(err == 0);
    return fd;
}

static inline void say_frame(int fd, uint16_t type, uint64_t arg, const void *body, size_t n, int pass_fd)
{
    hx_frame_t head = {(uint32_t)(sizeof head + n), type, pass_fd >= 0, 0, arg};
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)(uintptr_t)body, n}};
    struct msghdr msg = {.msg_iov = parts, .msg_iovlen = 2};
    if (pass_fd >= 0) {
        msg.msg_control = control.space;
        msg.msg_controllen = sizeof control.space;
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &pass_fd, sizeof pass_fd);
    }
    MUST(sendmsg(fd, &msg, MSG_NOSIGNAL) == (ssize_t)(sizeof head + n));
}

/* The body of the next frame of that type; a descriptor that comes with one is dropped by the kernel. */
static inline size_t hear_frame(int fd, uint16_t type, uint8_t *body, size_t room)
{
    hx_frame_t head;
    for (;;) {
        MUST(recv(fd, &head, sizeof head, MSG_WAITALL) == sizeof head);
        MUST(head.length >= sizeof head && head.length - sizeof head <= room);
        size_t n = head.length - sizeof head;
        MUST(!n || recv(fd, body, n, MSG_WAITALL) == (ssize_t)n);
        if (head.type == type)
            return n;
    }
}

static inline size_t raw_greeting(uint8_t out[HX_HELLO_MAX], const char *name)
{
    hx_hello_t h = {.magic = HX_MAGIC,
                    .version_min = HX_WIRE_VERSION,
                    .version_max = HX_WIRE_VERSION,
                    .features = HX_FEATURE_TCP,
                    .name_len = (uint32_t)strlen(name)};
    memset(h.incarnation, name[0], sizeof h.incarnation);
    memcpy(out, &h, sizeof h);
    memcpy(out + sizeof h, name, strlen(name));
    return sizeof h + strlen(name);
}

/* A link whose handshake is over. The engine's own path, which it says, is said back: it opens nothing by it, since it was
 * not the one that dialled. */
static inline int raw_link(bool tcp, const char *name)
{
    static uint8_t body[HX_FRAME_MAX];
    uint8_t hello[HX_HELLO_MAX], proof[32] = {0};
    int fd = raw_socket(tcp), page_fd = -1;
    size_t n = raw_greeting(hello, name);
    say_frame(fd, HX_F_HELLO, 0, hello, n, -1);
    hear_frame(fd, HX_F_ANSWER, body, sizeof body);
    say_frame(fd, HX_F_AUTH, 0, proof, sizeof proof, -1);
    hear_frame(fd, HX_F_READY, body, sizeof body);
    if (!tcp) {
        hx_page_t *page = hx_page_create(&page_fd);
        MUST(page != NULL);
        hx_page_unmap(page);
    }
    say_frame(fd, HX_F_PAGE, 0, NULL, 0, page_fd);
    if (page_fd >= 0)
        close(page_fd);
    n = hear_frame(fd, HX_F_PATH, body, sizeof body);
    say_frame(fd, HX_F_PATH, 0, body, n, -1);
    return fd;
}

static inline void open_under_test(const char *name)
{
    hx_config_t c = config_of(name);
    c.transports = HX_TRANSPORT_TCP;
    c.tcp_host = "127.0.0.1";
    c.unix_path = b.path; /* side_open fills it */
    c.cancel_grace_ns = 50000000;
    c.copy_threads = 1;
    side_open(&b, &c);
}

#endif
