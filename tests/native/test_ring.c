/* SPDX-License-Identifier: Apache-2.0 */
/* The ring, the bell, and the doorbell protocol of engine.c in miniature. */
#include "ring.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "check.h"

static void test_one_thread(void)
{
    static const uint32_t capacities[] = {2, 4, 64, 1024};
    for (size_t c = 0; c < sizeof capacities / sizeof *capacities; c++) {
        uint32_t n = capacities[c], value = 77;
        hx_ring_t ring;
        CHECK(hx_ring_init(&ring, n));
        CHECK(hx_ring_empty(&ring));
        CHECK(!hx_ring_pop(&ring, &value));
        CHECK_EQ(value, 77); /* nothing is written when there is nothing */
        for (uint32_t lap = 0; lap < 5; lap++) {
            for (uint32_t i = 0; i < n; i++)
                CHECK(hx_ring_push(&ring, lap * n + i));
            CHECK(!hx_ring_push(&ring, 0));
            CHECK(!hx_ring_empty(&ring));
            for (uint32_t i = 0; i < n; i++)
                CHECK(hx_ring_pop(&ring, &value) && value == lap * n + i);
            CHECK(hx_ring_empty(&ring) && !hx_ring_pop(&ring, &value));
            /* Shifts the laps against the cells. */
            CHECK(hx_ring_push(&ring, 1) && hx_ring_pop(&ring, &value) && value == 1);
        }
        hx_ring_free(&ring);
    }
}

/* ---- many producers and consumers ---- */

enum { PRODUCERS = 3, CONSUMERS = 3, EACH = 40000, SMALL = 8 };

static struct {
    hx_ring_t ring;
    _Atomic uint32_t taken;
    _Atomic uint8_t seen[PRODUCERS * EACH];
} crowd;

static void *produce(void *arg)
{
    uint32_t first = (uint32_t)(uintptr_t)arg * EACH;
    for (uint32_t i = 0; i < EACH; i++)
        while (!hx_ring_push(&crowd.ring, first + i))
            sched_yield();
    return NULL;
}

static void *consume(void *arg)
{
    /* What one producer pushed, one consumer sees in that order. */
    int64_t last[PRODUCERS];
    bool ordered = true;
    (void)arg;
    memset(last, 0xff, sizeof last);
    while (atomic_load(&crowd.taken) < PRODUCERS * EACH) {
        uint32_t value;
        if (!hx_ring_pop(&crowd.ring, &value)) {
            sched_yield();
            continue;
        }
        atomic_fetch_add(&crowd.taken, 1);
        if (!CHECK(value < PRODUCERS * EACH))
            continue;
        ordered &= last[value / EACH] < (int64_t)value;
        last[value / EACH] = value;
        atomic_fetch_add(&crowd.seen[value], 1);
    }
    CHECK(ordered);
    return NULL;
}

static void test_crowd(void)
{
    pthread_t threads[PRODUCERS + CONSUMERS];
    CHECK(hx_ring_init(&crowd.ring, SMALL)); /* small: it is full and empty all the time, and wraps often */
    for (uintptr_t i = 0; i < PRODUCERS; i++)
        pthread_create(&threads[i], NULL, produce, (void *)i);
    for (size_t i = 0; i < CONSUMERS; i++)
        pthread_create(&threads[PRODUCERS + i], NULL, consume, NULL);
    for (size_t i = 0; i < PRODUCERS + CONSUMERS; i++)
        pthread_join(threads[i], NULL);
    uint32_t wrong = 0, value;
    for (size_t i = 0; i < PRODUCERS * EACH; i++)
        wrong += crowd.seen[i] != 1;
    CHECK_EQ(wrong, 0);
    CHECK(!hx_ring_pop(&crowd.ring, &value));
    hx_ring_free(&crowd.ring);
}

/* ---- the engine's stack and rings over one pool: a number stands in one of them at a time ---- */

enum { POOL = 16, LIVES = 60000 };

static struct {
    hx_stack_t free;
    hx_ring_t submitted, completed;
    pthread_mutex_t mu; /* as in sched.c: one consumer of `submitted` at a time */
    hx_bell_t bell;
    _Atomic uint32_t owner[POOL]; /* 0: free, or in a ring */
    _Atomic bool stopping;
} pool = {.mu = PTHREAD_MUTEX_INITIALIZER};

static void own(uint32_t value)
{
    uint32_t nobody = 0;
    CHECK(value < POOL && atomic_compare_exchange_strong(&pool.owner[value], &nobody, 1));
}

static void disown(uint32_t value)
{
    CHECK_EQ(atomic_exchange(&pool.owner[value], 0), 1);
}

static void *post(void *arg)
{
    uint64_t random = 1 + (uint64_t)(uintptr_t)arg;
    for (uint32_t value; !atomic_load(&pool.stopping);) {
        if (!hx_stack_pop(&pool.free, &value)) {
            sched_yield();
            continue;
        }
        own(value);
        disown(value);
        if (draw_below(&random, 4)) { /* done inline */
            hx_stack_push(&pool.free, value);
            continue;
        }
        CHECK(hx_ring_push(&pool.submitted, value)); /* it cannot be full */
        hx_bell_ring(&pool.bell, 1);
    }
    return NULL;
}

static void *copy(void *arg)
{
    (void)arg;
    for (uint32_t value; !atomic_load(&pool.stopping);) {
        uint32_t seen = hx_bell_read(&pool.bell);
        pthread_mutex_lock(&pool.mu);
        bool got = hx_ring_pop(&pool.submitted, &value);
        pthread_mutex_unlock(&pool.mu);
        if (!got) {
            if (!atomic_load(&pool.stopping))
                hx_bell_wait(&pool.bell, seen);
            continue;
        }
        own(value);
        disown(value);
        CHECK(hx_ring_push(&pool.completed, value));
    }
    return NULL;
}

static void test_pool(void)
{
    pthread_t threads[4];
    uint32_t value;
    CHECK(hx_stack_init(&pool.free, POOL) && hx_ring_init(&pool.submitted, POOL) &&
          hx_ring_init(&pool.completed, POOL));
    CHECK(!hx_stack_pop(&pool.free, &value));
    for (uint32_t i = 0; i < POOL; i++)
        hx_stack_push(&pool.free, i);
    for (uintptr_t i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, i < 2 ? post : copy, (void *)i);
    double deadline = seconds() + 60;
    uint32_t lives = 0;
    while (lives < LIVES && seconds() < deadline) {
        if (!hx_ring_pop(&pool.completed, &value)) {
            sched_yield();
            continue;
        }
        own(value);
        disown(value);
        hx_stack_push(&pool.free, value);
        lives++;
    }
    CHECK_EQ(lives, LIVES);
    atomic_store(&pool.stopping, true);
    hx_bell_ring(&pool.bell, 16);
    for (size_t i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    uint32_t found = 0;
    bool seen[POOL] = {false};
    while (hx_stack_pop(&pool.free, &value) || hx_ring_pop(&pool.submitted, &value) ||
           hx_ring_pop(&pool.completed, &value)) {
        CHECK(value < POOL && !seen[value]);
        seen[value % POOL] = true;
        found++;
    }
    CHECK_EQ(found, POOL); /* none is lost */
    hx_stack_free(&pool.free);
    hx_ring_free(&pool.submitted);
    hx_ring_free(&pool.completed);
}

/* ---- the bell: two threads that hand a number to and fro, asleep in between ---- */

enum { VOLLEYS = 60000 };

static struct {
    hx_bell_t bell[2];
    _Atomic uint32_t ball; /* even: the first player's turn */
} court;

static void *play(void *arg)
{
    uint32_t me = (uint32_t)(uintptr_t)arg;
    for (;;) {
        uint32_t seen = hx_bell_read(&court.bell[me]);
        uint32_t ball = atomic_load(&court.ball);
        if (ball >= VOLLEYS)
            break;
        if ((ball & 1) != me) {
            hx_bell_wait(&court.bell[me], seen);
            continue;
        }
        atomic_store(&court.ball, ball + 1);
        hx_bell_ring(&court.bell[!me], 1);
    }
    hx_bell_ring(&court.bell[!me], 1);
    return NULL;
}

static void test_bell(void)
{
    pthread_t other;
    pthread_create(&other, NULL, play, (void *)(uintptr_t)1);
    play((void *)(uintptr_t)0);
    pthread_join(other, NULL);
    CHECK_EQ(atomic_load(&court.ball), VOLLEYS);
    CHECK_EQ(atomic_load(&court.bell[0].sleepers), 0);
    CHECK_EQ(atomic_load(&court.bell[1].sleepers), 0);
}

/* ---- the doorbell: hx_doorbell and hx_engine_drain, with a consumer that truly sleeps ---- */

enum { RINGERS = 2, MESSAGES = 100000, BUDGET = 3 };

static struct {
    hx_ring_t ring;
    _Atomic uint32_t armed;
    int fd;
    /* How far the producers may run ahead: one, so that each message arrives just when the consumer goes to sleep. */
    _Atomic uint32_t credit;
} door;

static void ring_doorbell(void)
{
    if (atomic_load(&door.armed) && atomic_exchange(&door.armed, 0)) {
        uint64_t one = 1;
        while (write(door.fd, &one, sizeof one) < 0 && errno == EINTR)
            ;
    }
}

static void *ringer(void *arg)
{
    uint64_t random = 1 + (uint64_t)(uintptr_t)arg;
    for (uint32_t i = 0; i < MESSAGES / RINGERS; i++) {
        uint32_t credit;
        uint32_t tries = 0;
        do {
            credit = atomic_load(&door.credit);
            if (!credit && ++tries % 4096 == 0)
                sched_yield();
        } while (!credit || !atomic_compare_exchange_weak(&door.credit, &credit, credit - 1));
        for (volatile uint64_t spin = draw_below(&random, 128); spin; spin--)
            ;
        CHECK(hx_ring_push(&door.ring, i));
        ring_doorbell();
    }
    return NULL;
}

static void test_doorbell(void)
{
    pthread_t threads[RINGERS];
    uint32_t got = 0, sleeps = 0, value;
    uint64_t random = 99;
    bool more = false, stuck = false;
    CHECK(hx_ring_init(&door.ring, 16));
    door.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    atomic_store(&door.armed, 1);
    atomic_store(&door.credit, 1);
    for (uintptr_t i = 0; i < RINGERS; i++)
        pthread_create(&threads[i], NULL, ringer, (void *)i);
    while (got < MESSAGES && !stuck) {
        if (!more) {
            struct pollfd pfd = {.fd = door.fd, .events = POLLIN};
            sleeps++;
            stuck = !CHECK(poll(&pfd, 1, 10000) == 1); /* a lost wake-up ends here */
        }
        uint64_t count;
        uint32_t n = 0;
        if (read(door.fd, &count, sizeof count) < 0) {
            /* come back for the rest of a budget */
        }
        atomic_store(&door.armed, 0);
        while (n < BUDGET && hx_ring_pop(&door.ring, &value))
            n++;
        got += n;
        atomic_fetch_add(&door.credit, n);
        for (volatile uint64_t spin = draw_below(&random, 512); spin; spin--)
            ;
        more = n == BUDGET;
        if (!more) {
            atomic_store(&door.armed, 1);
            if (!hx_ring_empty(&door.ring)) {
                atomic_store(&door.armed, 0);
                more = true;
            }
        }
    }
    if (stuck)
        atomic_fetch_add(&door.credit, MESSAGES);
    for (size_t i = 0; i < RINGERS && !stuck; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(got, MESSAGES);
    CHECK(sleeps > 0);
    if (stuck)
        return;
    close(door.fd);
    hx_ring_free(&door.ring);
}

int main(void)
{
    test_one_thread();
    test_crowd();
    test_pool();
    test_bell();
    test_doorbell();
    return report("test_ring");
}
