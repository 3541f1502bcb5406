/* SPDX-License-Identifier: Apache-2.0 */
/* The hixl provider over the stand-in of Huawei's library (tests/hixl_standin): two engines of one process, every path of
 * the posters, the poller and the registrations, with the library's bad habits switched on one after the other. */
#define _GNU_SOURCE
#include "hixl_pair.h"

static void test_moves(void)
{
    side_t a, b;
    open_pair(&a, &b);
    hx_region_t *local = lend_and_wait(&a, here, NBYTES, NULL), *target = lend_and_wait(&b, there, NBYTES, "t");
    WAIT(remote(&a, "t") != NULL);
    fill(here, NBYTES, 1);
    memset(there, 0, NBYTES);
    CHECK_EQ(post_one(&a, HX_WRITE, 1, local, 0, remote(&a, "t"), 0, NBYTES, NULL), HX_OK);
    WAIT_FINAL(&a, 1, HX_OK);
    CHECK(!memcmp(here, there, NBYTES));
    fill(there, NBYTES, 2);
    CHECK_EQ(post_one(&a, HX_READ, 2, local, 0, remote(&a, "t"), 0, NBYTES, NULL), HX_OK);
    WAIT_FINAL(&a, 2, HX_OK);
    CHECK(!memcmp(here, there, NBYTES));
    enum { MANY = 200 };
    for (uint64_t i = 0; i < MANY; i++)
        CHECK_EQ(post_one(&a, HX_WRITE, 10 + i, local, i * 64, remote(&a, "t"), NBYTES - (i + 1) * 64, 64, NULL),
                 HX_OK);
    for (uint64_t i = 0; i < MANY; i++)
        WAIT_FINAL(&a, 10 + i, HX_OK);
    for (uint64_t i = 0; i < MANY; i++)
        CHECK(!memcmp(here + i * 64, there + NBYTES - (i + 1) * 64, 64));
    /* A note goes over the control link, after the bytes. */
    hx_segment_t seg = {.local = local,
                        .remote = remote(&a, "t"),
                        .rkey = hx_rregion_rkey(remote(&a, "t")),
                        .local_off = (uint64_t[]){0},
                        .remote_off = (uint64_t[]){0},
                        .each = NBYTES,
                        .n = 1};
    fill(here, NBYTES, 3);
    CHECK_EQ(post_note(&a, 500, "here", &seg, 1, NULL), HX_OK);
    WAIT(b.nnotes == 1);
    CHECK(!memcmp(here, there, NBYTES));
    WAIT_FINAL(&a, 500, HX_OK);
    /* Memory that is registered after Connect is reached over a new link. */
    hx_region_t *late = lend_and_wait(&b, there + 2 * NBYTES, 4096, "late");
    WAIT(remote(&a, "late") != NULL);
    CHECK_EQ(post_one(&a, HX_WRITE, 501, local, 0, remote(&a, "late"), 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&a, 501, HX_OK);
    CHECK(!memcmp(here, there + 2 * NBYTES, 4096));
    CHECK(stat_of("disconnects") > 0);
    deregister(&b, late, 1, HX_OK);
    hx_region_t *own = lend_and_wait(&a, here + 2 * NBYTES, 4096, NULL);
    CHECK_EQ(post_one(&a, HX_WRITE, 502, own, 0, remote(&a, "t"), 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&a, 502, HX_OK);
    /* Revocation without a page: acknowledged by the writer. */
    uint64_t span[2] = {0, 4096};
    CHECK_EQ(hx_region_revoke(target, NULL, span, 1, 2), HX_OK);
    WAIT(b.done[2].count == 1);
    CHECK_EQ(b.done[2].status, HX_OK);
    CHECK_EQ(post_one(&a, HX_WRITE, 503, local, 0, remote(&a, "t"), 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&a, 503, HX_ERR_REMOTE_ACCESS);
    deregister(&a, own, 3, HX_OK);
    deregister(&a, local, 4, HX_OK);
    deregister(&b, target, 5, HX_OK);
    CHECK_EQ(stat_of("registered"), 0);
    side_close(&a);
    side_close(&b);
}

static void test_failure_and_stall(bool host, bool tells)
{
    side_t a, b;
    open_pair(&a, &b);
    hx_region_t *local = lend_and_wait(&a, here, NBYTES, NULL), *target = lend_and_wait(&b, there, NBYTES, "t");
    WAIT(remote(&a, "t") != NULL);
    hx_rregion_t *t = remote(&a, "t");
    CHECK_EQ(post_one(&a, HX_WRITE, 1, local, 0, t, 0, 64, NULL), HX_OK);
    WAIT_FINAL(&a, 1, HX_OK);
    /* One fails; those behind it are swept away by the latch, and land all the same. */
    knob("latency_us", "2000");
    knob("fail_nth", "2");
    for (uint64_t i = 0; i < 8; i++)
        CHECK_EQ(post_one(&a, HX_WRITE, 10 + i, local, i * 64, t, i * 64, 64, NULL), HX_OK);
    uint32_t failed = 0;
    for (uint64_t i = 0; i < 8; i++) {
        WAIT(atomic_load(&a.of[10 + i].finals) == 1);
        failed += a.of[10 + i].status != HX_OK;
        if (a.of[10 + i].status != HX_OK)
            CHECK_EQ(a.of[10 + i].status, tells ? HX_ERR_PROVIDER : HX_ERR_TIMEOUT);
    }
    CHECK_EQ(failed, 1);
    CHECK_EQ(post_one(&a, HX_WRITE, 30, local, 0, t, 0, 64, NULL), HX_OK);
    WAIT_FINAL(&a, 30, HX_OK);
    /* One waits for ever. */
    knob("wait_forever_nth", "0");
    CHECK_EQ(post_one(&a, HX_WRITE, 40, local, 0, t, 0, 64, NULL), HX_OK);
    WAIT_FINAL(&a, 40, HX_ERR_TIMEOUT);
    CHECK_EQ(post_one(&a, HX_WRITE, 41, local, 0, t, 0, 64, NULL), HX_OK);
    WAIT_FINAL(&a, 41, HX_OK);
    /* Cancelled with the library: drained, or taken back with the link after cancel_grace. */
    uint64_t handle;
    knob("hang_device", "1");
    CHECK_EQ(post_one(&a, HX_WRITE, 50, local, 0, t, 0, 64, &handle), HX_OK);
    usleep(20000);
    hx_cancel(a.engine, handle);
    if (host) { /* the call itself does not return: nothing can be taken back, and the caller is told so */
        WAIT(atomic_load(&a.of[50].earlies) == 1);
        CHECK_EQ(a.of[50].early_status, HX_ERR_CANCELLED);
        knob("hang_device", "0");
    }
    WAIT(atomic_load(&a.of[50].finals) == 1);
    CHECK_EQ(a.of[50].status, HX_ERR_CANCELLED);
    knob("hang_device", "0");
    CHECK_EQ(post_one(&a, HX_WRITE, 51, local, 0, t, 0, 64, NULL), HX_OK);
    WAIT_FINAL(&a, 51, HX_OK);
    /* A post that blocks: the caller is told after cancel_grace, the memory stays quarantined until it returns. */
    knob("block_post_ms", "800");
    CHECK_EQ(post_one(&a, HX_WRITE, 60, local, 0, t, 0, 64, &handle), HX_OK);
    usleep(20000);
    hx_cancel(a.engine, handle);
    WAIT(atomic_load(&a.of[60].finals) == 1);
    CHECK_EQ(a.of[60].earlies, 1);
    knob("block_post_ms", "0");
    knob("latency_us", "0");
    hx_region_unref(local);
    hx_region_unref(target);
    CHECK_EQ(stat_of("stale_polls"), 0);
    side_close(&a);
    side_close(&b);
}

static void test_close_with_work(void)
{
    side_t a, b;
    open_pair(&a, &b);
    hx_region_t *local = lend_and_wait(&a, here, NBYTES, NULL), *target = lend_and_wait(&b, there, NBYTES, "t");
    WAIT(remote(&a, "t") != NULL);
    knob("latency_us", "20000");
    for (uint64_t i = 0; i < 50; i++)
        CHECK_EQ(post_one(&a, HX_WRITE, 1 + i, local, i * 64, remote(&a, "t"), i * 64, 64, NULL), HX_OK);
    hx_region_unref(local);
    hx_region_unref(target);
    hx_engine_stop(b.engine);
    side_close(&a);
    side_close(&b);
    knob("latency_us", "0");
}

static void test_raw(void)
{
    side_t a, b;
    open_hixl(&a, "raw-a", 0);
    char address[64];
    /* The other is an engine of the library's own, as a C++ program has it; here one of ours, found by its address only. */
    free_address(address);
    hx_config_t with_tcp = hixl_config("raw-b"); /* whose state must not be taken for hixl's */
    with_tcp.transports |= HX_TRANSPORT_TCP;
    open_hixl_at(&b, with_tcp, 1, address);
    hx_region_t *local = lend_and_wait(&a, here, NBYTES, NULL), *target = lend_and_wait(&b, there, NBYTES, NULL);
    hx_raw_region_t regions[] = {{"kv", (uintptr_t)there, NBYTES, false}};
    CHECK_EQ(hx_connect_raw(a.engine, address, regions, 1, 7), HX_OK);
    WAIT(a.ready == 1 && remote(&a, "kv") != NULL);
    fill(here, NBYTES, 9);
    CHECK_EQ(post_one(&a, HX_WRITE, 1, local, 0, remote(&a, "kv"), 0, NBYTES, NULL), HX_OK);
    WAIT_FINAL(&a, 1, HX_OK);
    CHECK(!memcmp(here, there, NBYTES));
    CHECK_EQ(post_note(&a, 2, "text", NULL, 0, NULL), HX_OK);
    WAIT_FINAL(&a, 2, HX_OK);
    hx_engine_expect_notifies(b.engine, 1);
    WAIT(b.nnotifies == 1);
    CHECK(!strcmp(b.text, "text"));
    hx_engine_expect_notifies(b.engine, -1);
    CHECK_EQ(hx_connect_raw(a.engine, "127.0.0.1:1", NULL, 0, 8), HX_OK);
    WAIT(a.failed == 1);
    CHECK_EQ(a.failed_status, HX_ERR_UNREACHABLE);
    CHECK(strstr(a.text, "503900") != NULL);
    hx_region_unref(local);
    hx_region_unref(target);
    side_close(&a);
    side_close(&b);
}

int main(void)
{
    if (begin_hixl())
        for (size_t i = 0; i < FLAVOURS; i++) {
            const flavour_t *f = &flavours[i];
            fprintf(stderr, "%s engine, endpoints on the %s\n", f->engine, f->placement);
            be(f);
            test_moves();
            test_failure_and_stall(on_host(f), !strcmp(f->engine, "hixl"));
            test_close_with_work();
            test_raw();
        }
    return end_hixl("test_hixl");
}
