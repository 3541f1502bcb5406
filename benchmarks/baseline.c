/* SPDX-License-Identifier: Apache-2.0 */
/* What the machine can do without us: plain memcpy into a mapped memfd, by as many threads. bench.py compiles this. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

typedef struct {
    uint8_t *dst;
    const uint8_t *src;
    const uint64_t *dst_off, *src_off;
    uint64_t nbytes, n, first, last;
} job_t;

static void *run_plain(void *arg)
{
    job_t *j = arg;
    memcpy(j->dst, j->src, j->nbytes);
    return NULL;
}

static void *run_blocks(void *arg)
{
    job_t *j = arg;
    for (uint64_t i = j->first; i < j->last; i++)
        memcpy(j->dst + j->dst_off[i], j->src + j->src_off[i], j->nbytes);
    return NULL;
}

static double timed(void *(*run)(void *), job_t *jobs, int threads)
{
    pthread_t id[64];
    double start = now();
    for (int i = 1; i < threads; i++)
        pthread_create(&id[i], NULL, run, &jobs[i]);
    run(&jobs[0]);
    for (int i = 1; i < threads; i++)
        pthread_join(id[i], NULL);
    return now() - start;
}

/* Seconds for one copy of nbytes, split among the threads. */
double baseline_copy(uint8_t *dst, const uint8_t *src, uint64_t nbytes, int threads)
{
    job_t jobs[64];
    uint64_t share = nbytes / (uint64_t)threads;
    for (int i = 0; i < threads; i++) {
        uint64_t at = share * (uint64_t)i;
        jobs[i] = (job_t){.dst = dst + at, .src = src + at, .nbytes = i == threads - 1 ? nbytes - at : share};
    }
    return timed(run_plain, jobs, threads);
}

/* Seconds for n copies of nbytes each, from src + src_off[i] to dst + dst_off[i]. */
double baseline_blocks(uint8_t *dst, const uint64_t *dst_off, const uint8_t *src, const uint64_t *src_off, uint64_t nbytes,
                       uint64_t n, int threads)
{
    job_t jobs[64];
    for (int i = 0; i < threads; i++)
        jobs[i] = (job_t){dst, src, dst_off, src_off, nbytes, n, n * (uint64_t)i / (uint64_t)threads,
                          n * (uint64_t)(i + 1) / (uint64_t)threads};
    return timed(run_blocks, jobs, threads);
}
