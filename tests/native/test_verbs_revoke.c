/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs provider when memory is taken back, peers are lost, and queue pairs cannot be destroyed: what is called
 * free is not written any more, whatever is still on the wire; and what cannot be shown to be free is not called so. */
#define _GNU_SOURCE
#include "verbs_pair.h"

/* ---- with peers that are there ---- */

/* The writer takes back what stands still, and says so when the owner's end is another, too. */
static void test_revoked_from_a_writer_that_helps(void)
{
    pair_t p;
    size_t sent;
    hx_config_t b = verbs_config("verbs-b");
    b.cancel_grace_ns = NEVER; /* it does nothing by itself */
    open_pair_of(&p, verbs_config("verbs-a"), b, NBYTES);
    write_held(&p, 1);
    hold_ends(p.db);
    take_back(&p, 0, 4096, 1);
    SOON(held(&p.db->knobs.at_destroy) == 1); /* it was told that the other end is new */
    WAIT_FINAL(&p.a, 1, HX_ERR_CONNECTION);
    linger(50);
    CHECK_EQ(p.b.done[1].count, 0); /* what is on the wire would land still */
    let(&p.db->knobs.at_destroy);
    CHECK_EQ(status_of(&p.b, 1), HX_OK);
    untouched(&p, &sent);
    CHECK_EQ(sent, 1);
    CHECK_EQ(post_at(&p, HX_WRITE, 2, 4096, 4096, NULL), HX_OK);
    WAIT_FINAL(&p.a, 2, HX_OK);
    close_pair(&p);
}

/* The writer does nothing: the owner takes its way in from it, in time. Afterwards it writes what it may. */
static void test_revoked_from_a_writer_that_does_not(void)
{
    pair_t p;
    open_pair_of(&p, patient_config("verbs-a"), verbs_config("verbs-b"), NBYTES);
    write_held(&p, 1);
    hold_ends(p.da); /* it hears of the new end, and does not get to acknowledge anything */
    double start = seconds();
    take_back(&p, 0, 4096, 1);
    CHECK_EQ(status_of(&p.b, 1), HX_OK);
    CHECK_EQ(p.b.done[1].count, 1);
    CHECK(seconds() - start < PATIENCE / 2);
    SOON(held(&p.da->knobs.at_destroy) == 1);
    memset(there, 0x55, 4096);
    CHECK(carry(p.da, SIZE_MAX) > 0); /* what is held at the old end goes nowhere */
    CHECK(all_are(there, 4096, 0x55));
    let(&p.da->knobs.at_destroy);
    WAIT(atomic_load(&p.a.of[1].finals) == 1);
    CHECK(p.a.of[1].status == HX_ERR_CONNECTION);
    untouched(&p, NULL);
    CHECK_EQ(post_at(&p, HX_WRITE, 2, 4096, 4096, NULL), HX_OK);
    WAIT_FINAL(&p.a, 2, HX_OK);
    CHECK_EQ(post_at(&p, HX_WRITE, 3, 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&p.a, 3, HX_ERR_REMOTE_ACCESS);
    close_pair(&p);
}

/* As long as the owner's end is there, the answer is that it cannot be had. */
static void test_kept_out_slowly(void)
{
    pair_t p;
    open_pair_of(&p, patient_config("verbs-a"), verbs_config("verbs-b"), NBYTES);
    write_held(&p, 1);
    hold_ends(p.db);
    take_back(&p, 0, 4096, 1);
    CHECK_EQ(status_of(&p.b, 1), HX_ERR_PINNED);
    CHECK_EQ(p.b.done[1].value, 4096);
    CHECK_EQ(held(&p.db->knobs.at_destroy), 1);
    let(&p.db->knobs.at_destroy);
    WAIT(p.b.done[1].count == 2);
    CHECK_EQ(p.b.done[1].status, HX_OK);
    untouched(&p, NULL);
    WAIT_FINAL(&p.a, 1, HX_ERR_CONNECTION);
    close_pair(&p);
}

/* What has completed holds nothing, whether the writer's loop has looked or not. */
static void test_revoked_from_a_loop_that_is_busy(void)
{
    pair_t p;
    open_pair_of(&p, patient_config("verbs-a"), patient_config("verbs-b"), NBYTES);
    good(&p, 2);
    memset(here, 0x11, 4096);
    hold_back(p.da); /* or it ends within the post */
    CHECK_EQ(post_at(&p, HX_WRITE, 1, 0, 4096, NULL), HX_OK);
    let_go(p.da);
    take_back(&p, 0, 4096, 1);
    for (double end = seconds() + PATIENCE; seconds() < end && !p.b.done[1].count;) {
        pump(&p.b);
        usleep(1000);
    }
    CHECK_EQ(p.b.done[1].status, HX_OK);
    CHECK_EQ(atomic_load(&p.a.of[1].finals), 0);
    CHECK(all_are(there, 4096, 0x11));
    WAIT_FINAL(&p.a, 1, HX_OK);
    CHECK_EQ(counts_of(p.da).creates, 1);
    close_pair(&p);
}

/* What stands still holds the spans that it touches, and no others. */
static void test_revoked_beside_what_stands_still(void)
{
    pair_t p;
    open_pair_of(&p, patient_config("verbs-a"), patient_config("verbs-b"), NBYTES);
    write_held(&p, 1);
    take_back(&p, 4096, 4096, 1);
    CHECK_EQ(status_of(&p.b, 1), HX_OK);
    CHECK_EQ(waiting(p.da), 2);
    let_go(p.da);
    WAIT_FINAL(&p.a, 1, HX_OK);
    CHECK(all_are(there, 4096, 0x11));
    close_pair(&p);
}

/* Its peers lose it, and what they had begun is waited for, before the device forgets it. */
static void test_owner_deregisters_in_flight(void)
{
    pair_t p;
    open_pair(&p);
    write_held(&p, 1);
    CHECK_EQ(hx_region_deregister(p.target, 1), HX_OK);
    CHECK_EQ(status_of(&p.b, 1), HX_OK);
    WAIT(atomic_load(&p.a.of[1].finals) == 1);
    CHECK(p.a.of[1].status != HX_OK);
    untouched(&p, NULL);
    close_pair(&p);
}

/* ---- with peers that are lost ---- */

/* A lost peer's queue pair is there until it is destroyed: so long, no memory that it could write is free. */
static void lost_while_destroy_is_slow(bool killed)
{
    pair_t p;
    open_pair(&p);
    write_held(&p, 1);
    hold_ends(p.db);
    if (killed)
        cut(&p.a);
    else
        CHECK_EQ(hx_endpoint_close(p.a.ep), HX_OK);
    WAIT(p.b.lost == 1);
    SOON(held(&p.db->knobs.at_destroy) == 1);
    CHECK(!hx_providers_settled(p.b.ep));
    take_back(&p, 0, 4096, 1);
    CHECK_EQ(status_of(&p.b, 1), HX_ERR_PINNED);
    CHECK(!hx_providers_settled(p.b.ep));
    CHECK_EQ(p.b.done[1].count, 1);
    let(&p.db->knobs.at_destroy);
    WAIT(p.b.done[1].count == 2);
    CHECK_EQ(p.b.done[1].status, HX_OK);
    CHECK(hx_providers_settled(p.b.ep));
    WAIT(atomic_load(&p.a.of[1].finals) == 1);
    untouched(&p, NULL);
    close_pair(&p);
}

static void test_lost_while_destroy_is_slow(void)
{
    lost_while_destroy_is_slow(true);
    lost_while_destroy_is_slow(false);
}

/* What was on the wire of a link that is lost does not land behind what is written over the next one. */
static void test_linked_again_while_destroy_is_slow(void)
{
    pair_t p;
    size_t sent;
    open_pair(&p);
    write_held(&p, 1);
    hold_ends(p.db);
    cut(&p.a);
    WAIT(p.a.lost == 1 && p.b.lost == 1);
    WAIT(atomic_load(&p.a.of[1].finals) == 1);
    SOON(held(&p.db->knobs.at_destroy) == 1);
    let_go(p.da);
    link_up(&p.a, &p.b);
    WAIT(remote(&p.a, "t") != NULL);
    p.t = remote(&p.a, "t");
    memset(here, 0x22, 4096);
    CHECK_EQ(post_at(&p, HX_WRITE, 2, 0, 4096, NULL), HX_OK);
    linger(100);
    CHECK_EQ(atomic_load(&p.a.of[2].finals), 0);
    CHECK_EQ(counts_of(p.db).creates, 1);
    let(&p.db->knobs.at_destroy);
    WAIT_FINAL(&p.a, 2, HX_OK);
    CHECK_EQ(arrive(&sent), 0);
    CHECK_EQ(sent, 1);
    CHECK(all_are(there, 4096, 0x22));
    close_pair(&p);
}

/* A peer that is lost and found many times, while both ends are slow at everything. */
static void test_lost_and_found(void)
{
    enum { TIMES = 30 };
    uint64_t dice = 5;
    pair_t p;
    open_pair(&p);
    for (uint64_t i = 1; i <= TIMES; i++) {
        TELL(p.da, to->destroy_us = to->connect_us = 5000);
        TELL(p.db, to->destroy_us = to->connect_us = 5000);
        good(&p, 2 * i);
        hold_back(p.da);
        memset(here, 0x11, 4096);
        CHECK_EQ(post_at(&p, HX_WRITE, 2 * i + 1, 0, 4096, NULL), HX_OK);
        usleep((useconds_t)draw_below(&dice, 3000));
        cut(i % 2 ? &p.a : &p.b);
        WAIT(p.a.lost == i && p.b.lost == i);
        let_go(p.da);
        link_up(&p.a, &p.b);
        WAIT(remote(&p.a, "t") != NULL);
        p.t = remote(&p.a, "t");
        good(&p, 1000 + i);
        CHECK_EQ(arrive(NULL), 0);
        CHECK(!memcmp(here, there, 4096));
    }
    close_pair(&p);
}

/* ---- queue pairs that cannot be destroyed: in processes of their own, since all of it is left behind ---- */

/* The writer's: its own memory is never called free, and what was written from it has no end; the peer's is, since the
 * peer has destroyed its own end. */
static void stuck_writer(void)
{
    pair_t p;
    uint64_t handle;
    begin_verbs();
    open_pair(&p);
    hx_region_t *own = allocate(&p.a, 4096, HX_ACCESS_READ, NULL);
    uint8_t *memory = hx_region_addr(own);
    hold_back(p.da);
    CHECK_EQ(post_one(&p.a, HX_WRITE, 1, own, 0, p.t, 0, 4096, &handle), HX_OK);
    CHECK_EQ(post_at(&p, HX_WRITE, 2, 4096, 4096, NULL), HX_OK);
    SOON(waiting(p.da) == 4);
    TELL(p.da, to->shut_fails = to->destroy_fails = ALWAYS);
    hx_cancel(p.a.engine, handle);
    WAIT(atomic_load(&p.a.of[1].earlies) == 1);
    CHECK_EQ(hx_region_deregister(own, 1), HX_OK);
    CHECK_EQ(post_at(&p, HX_WRITE, 3, 8192, 4096, NULL), HX_OK);
    WAIT_FINAL(&p.a, 3, HX_ERR_CONNECTION); /* there is no way to it any more */
    take_back(&p, 0, 8192, 1);
    CHECK_EQ(status_of(&p.b, 1), HX_OK);
    memset(there, 0x55, 8192);
    carry(p.da, SIZE_MAX);
    CHECK(all_are(there, 8192, 0x55));
    WAIT(atomic_load(&p.a.of[2].earlies) == 1); /* nobody waits for ever for what has no end */
    CHECK_EQ(p.a.of[2].early_status, HX_ERR_CONNECTION);
    CHECK(hx_engine_stop(p.a.engine) > 0);
    pump(&p.a);
    CHECK_EQ(p.a.done[1].count, 1);
    CHECK_EQ(p.a.done[1].status, HX_ERR_PINNED);
    for (uint64_t token = 1; token <= 2; token++) {
        CHECK_EQ(atomic_load(&p.a.of[token].finals), 0);
        CHECK_EQ(atomic_load(&p.a.of[token].earlies), 1);
    }
    CHECK(!p.da->closed);
    hx_region_unref(own);
    hx_region_unref(p.local);
    memset(memory, 1, 4096); /* it is mapped still: the device may touch it */
    memset(here, 1, 8192);
    side_drop(&p.a);
    hx_engine_free(p.a.engine);
    hx_region_unref(p.target);
    side_close(&p.b);
    end_folder();
}

/* The owner's: what could still land there is never said to be free. */
static void stuck_owner(void)
{
    pair_t p;
    begin_verbs();
    open_pair_of(&p, patient_config("verbs-a"), verbs_config("verbs-b"), NBYTES);
    write_held(&p, 1);
    TELL(p.db, to->shut_fails = to->destroy_fails = ALWAYS);
    take_back(&p, 0, 4096, 1);
    CHECK_EQ(status_of(&p.b, 1), HX_ERR_PINNED);
    CHECK_EQ(counts_of(p.db).destroys, 0);
    linger(300);
    CHECK_EQ(p.b.done[1].count, 1);
    CHECK_EQ(p.b.done[1].status, HX_ERR_PINNED);
    CHECK(!hx_providers_settled(p.b.ep));
    CHECK(hx_engine_stop(p.b.engine) > 0);
    pump(&p.b);
    CHECK_EQ(p.b.done[1].count, 1);
    CHECK(!p.db->closed);
    side_drop(&p.b);
    hx_region_unref(p.target);
    WAIT(p.a.lost == 1);
    WAIT(atomic_load(&p.a.of[1].finals) == 1);
    hx_region_unref(p.local);
    side_close(&p.a);
    end_folder();
}

/* Memory that the device does not forget is not given back. */
static void stuck_memory(void)
{
    pair_t p;
    begin_verbs();
    open_pair(&p);
    good(&p, 1);
    hx_region_t *own = allocate(&p.a, 4096, HX_ACCESS_READ, NULL), *other = allocate(&p.a, 4096, HX_ACCESS_READ, NULL);
    uint8_t *memory = hx_region_addr(own), *others = hx_region_addr(other);
    TELL(p.da, to->dereg_fails = 2);
    hx_region_unref(other);
    SOON(({
        unsigned left;
        TELL(p.da, left = to->dereg_fails);
        left == 1;
    }));
    CHECK_EQ(hx_region_deregister(own, 1), HX_OK);
    linger(100);
    CHECK(p.a.done[1].count == 0 || p.a.done[1].status == HX_ERR_PINNED);
    good(&p, 2);
    hx_engine_stop(p.a.engine);
    pump(&p.a);
    CHECK_EQ(p.a.done[1].count, 1);
    CHECK_EQ(p.a.done[1].status, HX_ERR_PINNED);
    hx_region_unref(own);
    memset(memory, 1, 4096);
    memset(others, 1, 4096);
    side_drop(&p.a);
    hx_region_unref(p.target);
    side_close(&p.b);
    end_folder();
}

static void test_stuck(void)
{
    in_a_process(stuck_writer);
    in_a_process(stuck_owner);
    in_a_process(stuck_memory);
}

int main(void)
{
    static const case_t cases[] = {
        /* first: a process that has had threads cannot be forked into one that has, under TSan */
        {"stuck", test_stuck},
        {"revoked from a writer that helps", test_revoked_from_a_writer_that_helps},
        {"revoked from a writer that does not", test_revoked_from_a_writer_that_does_not},
        {"kept out slowly", test_kept_out_slowly},
        {"revoked from a loop that is busy", test_revoked_from_a_loop_that_is_busy},
        {"revoked beside what stands still", test_revoked_beside_what_stands_still},
        {"owner deregisters in flight", test_owner_deregisters_in_flight},
        {"lost while destroy is slow", test_lost_while_destroy_is_slow},
        {"linked again while destroy is slow", test_linked_again_while_destroy_is_slow},
        {"lost and found", test_lost_and_found},
    };
    return run_cases("test_verbs_revoke", cases, sizeof cases / sizeof cases[0]);
}
