/* SPDX-License-Identifier: Apache-2.0 */
/* Engines with the verbs provider over the double of its library. */
#ifndef VERBS_PAIR_H
#define VERBS_PAIR_H

#include <sys/socket.h>

#include "pair.h"
#include "verbs_double.h"

#include "link.h"
#include "provider.h"

#define MS 1000000ull
#define NEVER (4 * PATIENCE * 1000 * MS) /* for what a test does not want to happen */

enum { NBYTES = 1 << 20, RW = HX_ACCESS_READ | HX_ACCESS_WRITE };
static uint8_t *here, *there; /* 32 * NBYTES each */

/* A writer and an owner, with a region each. */
typedef struct {
    side_t a, b;
    hx_verbs_device_t *da, *db;
    hx_region_t *local, *target;
    hx_rregion_t *t;
} pair_t;

static inline hx_config_t verbs_config(const char *name)
{
    hx_config_t c = config_of(name);
    c.transports = HX_TRANSPORT_VERBS;
    c.stall_timeout_ns = NEVER;
    c.peer_timeout_ns = NEVER;
    c.cancel_grace_ns = 200 * MS;
    return c;
}

/* Nothing is taken back but what is cancelled, and that late. */
static inline hx_config_t patient_config(const char *name)
{
    hx_config_t c = verbs_config(name);
    c.cancel_grace_ns = NEVER;
    return c;
}

static inline hx_verbs_device_t *open_verbs(side_t *s, hx_config_t c)
{
    hx_verbs_config_t verbs = {.binding = VERBS_BINDING, .device = c.name, .gid_index = -1};
    c.verbs = &verbs;
    side_open(s, &c);
    return device_called(c.name);
}

/* With regions of n bytes; and a queue pair at each end, so that what is posted goes to the device at once. */
static inline void open_pair_of(pair_t *p, hx_config_t a, hx_config_t b, uint64_t n)
{
    memset(p, 0, sizeof *p);
    memset(here, 0, n);
    memset(there, 0, n);
    p->da = open_verbs(&p->a, a);
    p->db = open_verbs(&p->b, b);
    link_up(&p->a, &p->b);
    p->local = lend_and_wait(&p->a, here, n, "l");
    p->target = lend_and_wait(&p->b, there, n, "t");
    WAIT(remote(&p->a, "t") != NULL);
    p->t = remote(&p->a, "t");
    CHECK_EQ(post_one(&p->a, HX_WRITE, 0, p->local, 0, p->t, 0, 1, NULL), HX_OK);
    WAIT_FINAL(&p->a, 0, HX_OK);
}

static inline void open_pair(pair_t *p)
{
    open_pair_of(p, verbs_config("verbs-a"), verbs_config("verbs-b"), NBYTES);
}

static inline void close_pair(pair_t *p)
{
    hx_region_unref(p->local);
    hx_region_unref(p->target);
    side_close(&p->a);
    side_close(&p->b);
    clear_net();
}

static inline hx_status_t post_at(pair_t *p, uint32_t kind, uint64_t token, uint64_t off, uint64_t n,
                                  uint64_t *handle_p)
{
    return post_one(&p->a, kind, token, p->local, off, p->t, off, n, handle_p);
}

/* There and back: the path works. Its token is used once. */
static inline void good(pair_t *p, uint64_t token)
{
    fill(here, 4096, token);
    CHECK_EQ(post_at(p, HX_WRITE, token, 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&p->a, token, HX_OK);
    CHECK(!memcmp(here, there, 4096));
}

/* Transfers may fail for a while, as those do that are posted when a queue pair fails; not for ever. */
static inline bool good_again(pair_t *p, uint64_t *token_p)
{
    for (double end = seconds() + PATIENCE; seconds() < end && CHECK(*token_p < TOKENS);) {
        uint64_t token = (*token_p)++;
        fill(here, 4096, token);
        if (post_at(p, HX_WRITE, token, 0, 4096, NULL) != HX_OK)
            return false;
        WAIT(atomic_load(&p->a.of[token].finals) == 1);
        if (p->a.of[token].status == HX_OK)
            return CHECK(!memcmp(here, there, 4096));
        CHECK(p->a.of[token].status == HX_ERR_CONNECTION || p->a.of[token].status == HX_ERR_REMOTE_ACCESS);
    }
    return false;
}

static inline void linger(int ms)
{
    for (double end = seconds() + ms / 1e3; seconds() < end;)
        pump_all(1);
}

/* A write that its device has not carried out. */
static inline void write_held(pair_t *p, uint64_t token)
{
    hold_back(p->da);
    memset(here, 0x11, 4096);
    CHECK_EQ(post_at(p, HX_WRITE, token, 0, 4096, NULL), HX_OK);
    SOON(waiting(p->da) == 2);
}

static inline void take_back(pair_t *p, uint64_t off, uint64_t n, uint64_t token)
{
    CHECK_EQ(hx_region_revoke(p->target, NULL, (uint64_t[]){off, n}, 1, token), HX_OK);
}

static inline uint32_t status_of(side_t *s, uint64_t token)
{
    WAIT(s->done[token].count >= 1);
    return s->done[token].status;
}

/* Its socket ends, without a goodbye. */
static inline void cut(side_t *s)
{
    pthread_mutex_lock(&s->engine->control.fork_mu); /* which the thread holds that closes it */
    shutdown(s->ep->link->fd, SHUT_RDWR);
    pthread_mutex_unlock(&s->engine->control.fork_mu);
}

/* The owner has it in its hands from here on: nothing lands, neither what is held nor what is on the wire. */
static inline void untouched(pair_t *p, size_t *sent_p)
{
    memset(there, 0x55, 4096);
    let_go(p->da);
    CHECK_EQ(arrive(sent_p), 0);
    linger(20);
    CHECK(all_are(there, 4096, 0x55));
}

static inline void begin_verbs(void)
{
    here = aligned_alloc(4096, 32 * NBYTES);
    there = aligned_alloc(4096, 32 * NBYTES);
}

static inline int end_verbs(const char *name)
{
    free(here);
    free(there);
    end_folder();
    return report(name);
}

typedef struct {
    const char *name;
    void (*run)(void);
} case_t;

static inline int run_cases(const char *name, const case_t *cases, size_t n)
{
    const char *only = getenv("TEST_ONLY");
    begin_verbs();
    for (size_t i = 0; i < n; i++) {
        int before = atomic_load(&failures);
        double start = seconds();
        if (only && strcmp(only, cases[i].name))
            continue;
        cases[i].run();
        if (atomic_load(&failures) > before)
            fprintf(stderr, "  in case: %s\n", cases[i].name);
        if (getenv("TEST_TIMES"))
            fprintf(stderr, "%-44s %.2f s\n", cases[i].name, seconds() - start);
    }
    return end_verbs(name);
}

#endif
