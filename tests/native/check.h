/* SPDX-License-Identifier: Apache-2.0 */
/* What every C test needs: counted checks, a deadline for waits, a seeded generator, and a census of what leaks. */
#ifndef CHECK_H
#define CHECK_H

#include <dirent.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static _Atomic int checks, failures;

static inline bool check_at(bool ok, const char *file, int line, const char *what)
{
    atomic_fetch_add(&checks, 1);
    if (!ok) {
        atomic_fetch_add(&failures, 1);
        fprintf(stderr, "%s:%d: FAILED: %s\n", file, line, what);
    }
    return ok;
}

#define CHECK(condition) check_at((condition), __FILE__, __LINE__, #condition)

#define CHECK_EQ(got, expected)                                                      \
    do {                                                                             \
        long long got_ = (long long)(got), expected_ = (long long)(expected);        \
        if (!check_at(got_ == expected_, __FILE__, __LINE__, #got " == " #expected)) \
            fprintf(stderr, "  %lld, not %lld\n", got_, expected_);                  \
    } while (0)

/* In a process of its own, for what leaves behind what cannot be freed. Before there are threads. */
static inline void in_a_process(void (*run)(void))
{
    fflush(NULL);
    pid_t pid = fork();
    if (!pid) {
        run();
        _exit(atomic_load(&failures) ? 1 : 0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static inline int report(const char *name)
{
    printf("%s: %d checks, %d failures\n", name, atomic_load(&checks), atomic_load(&failures));
    return atomic_load(&failures) ? EXIT_FAILURE : EXIT_SUCCESS;
}

static inline double seconds(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

/* xorshift64*: the same sequence everywhere. */
static inline uint64_t draw(uint64_t *state)
{
    uint64_t x = *state;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    return x * 0x2545f4914f6cdd1dull;
}

static inline uint64_t draw_below(uint64_t *state, uint64_t n)
{
    return (draw(state) >> 11) % n;
}

static inline int entries_of(const char *folder)
{
    int n = 0;
    DIR *dir = opendir(folder);
    if (!dir)
        return -1;
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

static inline int open_descriptors(void)
{
    return entries_of("/proc/self/fd");
}

static inline int live_threads(void)
{
    return entries_of("/proc/self/task");
}

#endif
