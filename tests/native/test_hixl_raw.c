/* SPDX-License-Identifier: Apache-2.0 */
/* Raw peers of the hixl provider, found by their address alone: what goes wrong before, during and after Connect, and notes
 * that find no room. The other end is an engine of ours that knows nothing of it. */
#define _GNU_SOURCE
#include <sched.h>

#include "hixl_pair.h"

static void open_far(side_t *b, char address[64])
{
    free_address(address);
    open_hixl_at(b, hixl_config("raw-b"), 1, address);
}

/* The address has its place in a command and in a peer: one that does not fit is refused, and one that just fits leads
 * nowhere. */
static void test_addresses(void)
{
    static const size_t lengths[] = {HX_NAME_MAX - 1, HX_NAME_MAX, HX_NAME_MAX + 1, 200, 4000};
    side_t a;
    open_hixl(&a, "raw-a", 0);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        char *address = malloc(lengths[i] + 1);
        memset(address, '1', lengths[i]);
        address[lengths[i]] = 0;
        CHECK_EQ(hx_connect_raw(a.engine, address, NULL, 0, 7), i ? HX_ERR_CONFIG : HX_OK);
        free(address);
    }
    CHECK_EQ(hx_connect_raw(a.engine, "", NULL, 0, 7), HX_OK);
    WAIT(a.failed == 2);
    CHECK_EQ(a.up, 0);
    side_close(&a);
}

/* An engine is closed before the answer has come: it comes once all the same, and the peer was never one. */
static void test_closed_before_connected(bool inside)
{
    side_t a;
    open_hixl(&a, "raw-a", 0);
    uint64_t connects = stat_of("connects");
    if (inside)
        knob("connect_ms", "100");
    CHECK_EQ(hx_connect_raw(a.engine, "127.0.0.1:1", NULL, 0, 7), HX_OK);
    SOON(stat_of("connects") > connects); /* inside the call; or after it, before the next attempt */
    side_close(&a);
    CHECK_EQ(a.failed, 1);
    CHECK_EQ(a.up + a.lost, 0);
    knob("connect_ms", "0");
}

/* A second time to the same address while the first is being made: both are answered. */
static void test_twice_at_once(void)
{
    side_t a, b;
    char address[64];
    open_hixl(&a, "raw-a", 0);
    open_far(&b, address);
    uint64_t connects = stat_of("connects");
    knob("connect_ms", "100");
    CHECK_EQ(hx_connect_raw(a.engine, address, NULL, 0, 7), HX_OK);
    SOON(stat_of("connects") > connects);
    CHECK_EQ(hx_connect_raw(a.engine, address, NULL, 0, 8), HX_OK);
    WAIT(a.ready + a.failed == 2);
    CHECK_EQ(a.ready, 2);
    knob("connect_ms", "0");
    CHECK_EQ(post_note(&a, 1, "text", NULL, 0, NULL), HX_OK);
    WAIT_FINAL(&a, 1, HX_OK);
    side_close(&a);
    side_close(&b);
}

typedef struct {
    side_t a, b;
    hx_region_t *local, *target;
} raw_t;

static void open_raw(raw_t *r, hx_config_t a)
{
    char address[64];
    hx_raw_region_t kv = {"kv", (uintptr_t)there, NBYTES, false};
    open_hixl_as(&r->a, a, 0);
    open_far(&r->b, address);
    r->local = lend_and_wait(&r->a, here, NBYTES, NULL);
    r->target = lend_and_wait(&r->b, there, NBYTES, NULL);
    CHECK_EQ(hx_connect_raw(r->a.engine, address, &kv, 1, 7), HX_OK);
    WAIT(r->a.ready == 1 && remote(&r->a, "kv") != NULL);
}

static void close_raw(raw_t *r)
{
    hx_region_unref(r->local);
    hx_region_unref(r->target);
    side_close(&r->a);
    side_close(&r->b);
}

static void write_kv(raw_t *r, uint64_t token)
{
    CHECK_EQ(post_one(&r->a, HX_WRITE, token, r->local, 0, remote(&r->a, "kv"), 0, 64, NULL), HX_OK);
}

/* A receiver that does not read its notes holds up notes, and no transfers. */
static void test_full_of_notes(void)
{
    raw_t r;
    open_raw(&r, patient_config("raw-a"));
    knob("max_notifies", "1");
    CHECK_EQ(post_note(&r.a, 1, "first", NULL, 0, NULL), HX_OK);
    WAIT_FINAL(&r.a, 1, HX_OK);
    CHECK_EQ(post_note(&r.a, 2, "second", NULL, 0, NULL), HX_OK);
    for (uint64_t i = 0; i < 20; i++) {
        write_kv(&r, 10 + i);
        WAIT_FINAL(&r.a, 10 + i, HX_OK);
    }
    CHECK_EQ(atomic_load(&r.a.of[2].finals), 0);
    hx_engine_expect_notifies(r.b.engine, 1);
    WAIT_FINAL(&r.a, 2, HX_OK);
    WAIT(r.b.nnotifies == 2);
    CHECK(!strcmp(r.b.text, "second"));
    hx_engine_expect_notifies(r.b.engine, -1);
    close_raw(&r);
}

/* As soon as a note has been handed over its operation may be another's: the poller, which did that, looks at it no more. */
static void test_noted_writes(void)
{
    enum { TURNS = 3000 };
    uint64_t zero = 0;
    raw_t r;
    cpu_set_t all, one;
    CHECK_EQ(sched_getaffinity(0, sizeof all, &all), 0);
    CPU_ZERO(&one);
    for (int core = 0; core < CPU_SETSIZE && !CPU_COUNT(&one); core++)
        if (CPU_ISSET(core, &all))
            CPU_SET(core, &one);
    CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0); /* so that who is woken runs at once, and before who woke it */
    open_raw(&r, hixl_config("raw-a"));
    hx_rregion_t *kv = remote(&r.a, "kv");
    hx_segment_t seg = {.local = r.local,
                        .remote = kv,
                        .rkey = hx_rregion_rkey(kv),
                        .local_off = &zero,
                        .remote_off = &zero,
                        .each = 64,
                        .n = 1};
    hx_engine_expect_notifies(r.b.engine, 1);
    for (uint64_t i = 0; i < TURNS; i++) {
        CHECK_EQ(post_note(&r.a, 10 + i, "text", &seg, 1, NULL), HX_OK);
        WAIT_FINAL(&r.a, 10 + i, HX_OK);
    }
    WAIT(r.b.nnotifies == TURNS);
    hx_engine_expect_notifies(r.b.engine, -1);
    close_raw(&r);
    CHECK_EQ(sched_setaffinity(0, sizeof all, &all), 0);
}

/* Its patience is the time-out of what stands still. Cancelled, a note ends at once. */
static void test_note_times_out(void)
{
    raw_t r;
    uint64_t handle;
    open_raw(&r, hixl_config("raw-a"));
    knob("max_notifies", "1");
    CHECK_EQ(post_note(&r.a, 1, "first", NULL, 0, NULL), HX_OK);
    WAIT_FINAL(&r.a, 1, HX_OK);
    CHECK_EQ(post_note(&r.a, 2, "second", NULL, 0, NULL), HX_OK);
    CHECK_EQ(post_note(&r.a, 3, "third", NULL, 0, &handle), HX_OK);
    hx_cancel(r.a.engine, handle);
    WAIT_FINAL(&r.a, 3, HX_ERR_CANCELLED);
    WAIT_FINAL(&r.a, 2, HX_ERR_TIMEOUT);
    knob("max_notifies", "4096");
    CHECK_EQ(post_note(&r.a, 4, "fourth", NULL, 0, NULL), HX_OK);
    WAIT_FINAL(&r.a, 4, HX_OK);
    close_raw(&r);
}

/* To a peer that has gone, each note has its answer, after a few attempts. */
static void test_notes_to_nobody(void)
{
    enum { NOTES_TO_IT = 3, ATTEMPTS = 4 };
    raw_t r;
    open_raw(&r, hixl_config("raw-a"));
    hx_engine_stop(r.b.engine);
    uint64_t connects = stat_of("connects");
    for (uint64_t i = 0; i < NOTES_TO_IT; i++) {
        CHECK_EQ(post_note(&r.a, 10 + i, "text", NULL, 0, NULL), HX_OK);
        WAIT_FINAL(&r.a, 10 + i, HX_ERR_PROVIDER);
    }
    CHECK(stat_of("connects") <= connects + NOTES_TO_IT * ATTEMPTS);
    close_raw(&r);
}

int main(void)
{
    if (begin_hixl())
        for (size_t i = 0; i < FLAVOURS; i++) {
            fprintf(stderr, "%s engine, endpoints on the %s\n", flavours[i].engine, flavours[i].placement);
            be(&flavours[i]);
            test_addresses();
            test_closed_before_connected(false);
            test_closed_before_connected(true);
            test_twice_at_once();
            test_full_of_notes();
            knob("max_notifies", "4096");
            test_noted_writes();
            test_note_times_out();
            test_notes_to_nobody();
        }
    return end_hixl("test_hixl_raw");
}
