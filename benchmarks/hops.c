/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernel asks for a transfer that native threads make for a loop: loop -> poster -> poller -> loop, each woken by
 * an eventfd, the loop by epoll. The loop is the caller, which stays where it is; the others share a core. bench_hixl.py
 * compiles this. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    int from, to;
} hop_t;

static uint64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Passes on what it reads, until that is more than one. */
static void *pass_on(void *arg)
{
    const hop_t *hop = arg;
    uint64_t n = 0;
    while (n <= 1)
        if (read(hop->from, &n, sizeof n) != sizeof n || write(hop->to, &n, sizeof n) != sizeof n)
            break;
    return NULL;
}

/* Nanoseconds of n round trips; 0, or -1 where the kernel refused something. */
int hops(uint64_t n, uint64_t *samples, int cpu)
{
    int fd[3], ep = epoll_create1(EPOLL_CLOEXEC);
    pthread_t id[2];
    pthread_attr_t attr;
    cpu_set_t cpus;
    struct epoll_event ev = {.events = EPOLLIN};
    uint64_t one = 1, last = 2, got;
    for (int i = 0; i < 3; i++)
        fd[i] = eventfd(0, EFD_CLOEXEC | (i == 2 ? EFD_NONBLOCK : 0));
    hop_t hop[2] = {{fd[0], fd[1]}, {fd[1], fd[2]}};
    int bad = ep < 0 || fd[2] < 0 || epoll_ctl(ep, EPOLL_CTL_ADD, fd[2], &ev) < 0;
    CPU_ZERO(&cpus);
    CPU_SET(cpu, &cpus);
    bad |= pthread_attr_init(&attr) || pthread_attr_setaffinity_np(&attr, sizeof cpus, &cpus);
    for (int i = 0; i < 2 && !bad; i++)
        bad = pthread_create(&id[i], &attr, pass_on, &hop[i]);
    for (uint64_t i = 0; i < n && !bad; i++) {
        uint64_t start = now_ns();
        bad = write(fd[0], &one, sizeof one) != sizeof one || epoll_wait(ep, &ev, 1, -1) != 1 ||
              read(fd[2], &got, sizeof got) != sizeof got;
        samples[i] = now_ns() - start;
    }
    if (bad)
        return -1; /* threads and descriptors go with the process */
    bad = write(fd[0], &last, sizeof last) != sizeof last;
    for (int i = 0; i < 2; i++)
        pthread_join(id[i], NULL);
    pthread_attr_destroy(&attr);
    for (int i = 0; i < 3; i++)
        close(fd[i]);
    close(ep);
    return bad ? -1 : 0;
}
