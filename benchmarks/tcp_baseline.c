/* SPDX-License-Identifier: Apache-2.0 */
/* What plain C does with a TCP socket, into the memory that the engine's transfers go to. bench_tcp.py compiles this and
 * calls it at both ends. */
#define _GNU_SOURCE
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* Of one call. Of 64 KiB, 256 KiB, 1 MiB and all at once, with and without larger socket buffers, the fastest. */
#define PIECE (1u << 20)

typedef struct {
    uint64_t count, there, back; /* rounds; bytes of each; count 0: one transfer of `there` bytes, answered by one */
} order_t;

static uint64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static int send_all(int fd, const void *from, uint64_t n)
{
    const uint8_t *at = from;
    while (n) {
        ssize_t sent = send(fd, at, n < PIECE ? n : PIECE, MSG_NOSIGNAL);
        if (sent <= 0)
            return -1;
        at += sent;
        n -= (uint64_t)sent;
    }
    return 0;
}

static int recv_all(int fd, void *to, uint64_t n)
{
    uint8_t *at = to;
    while (n) {
        ssize_t got = recv(fd, at, n < PIECE ? n : PIECE, 0);
        if (got <= 0)
            return -1;
        at += got;
        n -= (uint64_t)got;
    }
    return 0;
}

/* As a server does it that has other sockets too: wait for any, and take what is there. */
static int recv_polled(int epoll_fd, int fd, void *to, uint64_t n)
{
    uint8_t *at = to;
    struct epoll_event event;
    while (n) {
        if (epoll_wait(epoll_fd, &event, 1, -1) != 1)
            return -1;
        ssize_t got = recv(fd, at, n, MSG_DONTWAIT);
        if (got <= 0)
            return -1;
        at += got;
        n -= (uint64_t)got;
    }
    return 0;
}

static int polled(int fd)
{
    struct epoll_event event = {.events = EPOLLIN};
    int epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd >= 0)
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    return epoll_fd;
}

/* Does what it is told, until the other end closes. */
void tcp_baseline_serve(int fd, uint8_t *memory)
{
    order_t order;
    int epoll_fd = polled(fd), ok = epoll_fd >= 0;
    while (ok && recv_all(fd, &order, sizeof order) == 0) {
        if (!order.count)
            ok = recv_all(fd, memory, order.there) == 0 && send_all(fd, memory, 1) == 0;
        for (uint64_t i = 0; i < order.count && ok; i++)
            ok = recv_polled(epoll_fd, fd, memory, order.there) == 0 && send_all(fd, memory, order.back) == 0;
    }
    if (epoll_fd >= 0)
        close(epoll_fd);
}

/* Seconds until all of it is in the other end's memory, and that is known here; negative: it failed. */
double tcp_baseline_send(int fd, const uint8_t *memory, uint64_t nbytes)
{
    order_t order = {0, nbytes, 1};
    uint8_t answer;
    uint64_t start = now_ns();
    if (send_all(fd, &order, sizeof order) < 0 || send_all(fd, memory, nbytes) < 0 || recv_all(fd, &answer, 1) < 0)
        return -1;
    return (double)(now_ns() - start) * 1e-9;
}

/* `count` round trips: nanoseconds of each. */
int tcp_baseline_ping(int fd, uint8_t *memory, uint64_t there, uint64_t back, uint64_t count, uint64_t *samples_ns)
{
    order_t order = {count, there, back};
    int epoll_fd = polled(fd), ok = epoll_fd >= 0 && send_all(fd, &order, sizeof order) == 0;
    uint8_t answer[4096];
    for (uint64_t i = 0; i < count && ok; i++) {
        uint64_t start = now_ns();
        ok = send_all(fd, memory, there) == 0 && recv_polled(epoll_fd, fd, answer, back) == 0;
        samples_ns[i] = now_ns() - start;
    }
    if (epoll_fd >= 0)
        close(epoll_fd);
    return ok ? 0 : -1;
}
