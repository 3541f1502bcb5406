/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs provider over a double of its library: what travels, how it is cut, and what waits for what. */
#define _GNU_SOURCE
#include "verbs_pair.h"

static void test_there_and_back(void)
{
    pair_t p;
    open_pair(&p);
    good(&p, 1);
    memset(here, 0, 4096);
    CHECK_EQ(post_at(&p, HX_READ, 2, 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&p.a, 2, HX_OK);
    CHECK(!memcmp(here, there, 4096));
    close_pair(&p);
}

/* ---- rows ---- */

enum { ROWS = 3000, STEP = 256 };

typedef struct {
    uint64_t from[ROWS], to[ROWS], size[ROWS];
} rows_t;

/* Places in another order at each end, a few of them next to each other, and some rows without bytes. */
static void draw_rows(rows_t *r, uint64_t *dice)
{
    for (uint64_t i = 0; i < ROWS; i++) {
        r->from[i] = r->to[i] = i * STEP;
        r->size[i] = draw_below(dice, 4) ? STEP : draw_below(dice, STEP);
    }
    for (uint64_t i = ROWS - 1; i > 0; i -= 1 + draw_below(dice, 3)) {
        uint64_t k = draw_below(dice, i), x = r->from[i];
        r->from[i] = r->from[k];
        r->from[k] = x;
        if (i < 3)
            break;
    }
}

static void expect_rows(const rows_t *r, const uint8_t *from, const uint8_t *to)
{
    uint8_t *expected = calloc(1, ROWS * STEP);
    for (size_t i = 0; i < ROWS; i++)
        memcpy(expected + r->to[i], from + r->from[i], r->size[i]);
    CHECK(!memcmp(expected, to, ROWS * STEP));
    free(expected);
}

static void transfer_rows(pair_t *p, const rows_t *r, uint32_t kind, uint64_t token)
{
    hx_segment_t seg = {.local = p->local,
                        .remote = p->t,
                        .rkey = hx_rregion_rkey(p->t),
                        .local_off = kind == HX_WRITE ? r->from : r->to,
                        .remote_off = kind == HX_WRITE ? r->to : r->from,
                        .nbytes = r->size,
                        .n = ROWS};
    CHECK_EQ(post_rows(&p->a, p->a.ep, kind, token, HX_EPOCH_NOW, &seg, 1, NULL, NULL), HX_OK);
    WAIT_FINAL(&p->a, token, HX_OK);
}

static void scatter(uint32_t max_sge, uint32_t max_sge_read, uint32_t max_wr)
{
    static rows_t rows;
    uint64_t dice = 7;
    pair_t p;
    net.max_sge = max_sge;
    net.max_sge_read = max_sge_read;
    net.max_wr = max_wr;
    open_pair(&p);
    for (uint64_t token = 1; token < 6; token += 2) {
        draw_rows(&rows, &dice);
        fill(here, NBYTES, token);
        memset(there, 0, NBYTES);
        transfer_rows(&p, &rows, HX_WRITE, token);
        expect_rows(&rows, here, there);
        fill(there, NBYTES, token + 1);
        memset(here, 0, NBYTES);
        transfer_rows(&p, &rows, HX_READ, token + 1);
        expect_rows(&rows, there, here);
    }
    close_pair(&p);
    net.max_sge = net.max_sge_read = 16;
    net.max_wr = 1024;
}

static void test_scattered_rows(void)
{
    scatter(16, 16, 1024);
    scatter(3, 1, 256); /* the least of a device that will do */
}

/* Neither memory begins at a page, nor at the same place in one. */
static void test_odd_memory(void)
{
    pair_t p;
    open_pair(&p);
    hx_region_t *from = lend_and_wait(&p.a, here + 12345, 5000, NULL);
    hx_region_t *to = lend_and_wait(&p.b, there + 70001, 5000, "odd");
    WAIT(remote(&p.a, "odd") != NULL);
    fill(here, 20000, 1);
    CHECK_EQ(post_one(&p.a, HX_WRITE, 1, from, 7, remote(&p.a, "odd"), 11, 4001, NULL), HX_OK);
    WAIT_FINAL(&p.a, 1, HX_OK);
    CHECK(!memcmp(here + 12345 + 7, there + 70001 + 11, 4001));
    CHECK(all_are(there, 70001 + 11, 0) && all_are(there + 70001 + 11 + 4001, 5000, 0));
    hx_region_unref(from);
    hx_region_unref(to);
    close_pair(&p);
}

/* A row of several requests, where a message is no longer than a request, and where it may be much longer. */
static void long_row(uint64_t max_message)
{
    enum { LONG = 20 * NBYTES + 12345 };
    pair_t p;
    net.max_message = max_message;
    open_pair_of(&p, verbs_config("verbs-a"), verbs_config("verbs-b"), LONG + 64);
    fill(here, LONG + 64, 3);
    CHECK_EQ(post_at(&p, HX_WRITE, 1, 3, LONG, NULL), HX_OK);
    WAIT_FINAL(&p.a, 1, HX_OK);
    CHECK_EQ(p.a.of[1].nbytes, LONG);
    CHECK(all_are(there, 3, 0) && !memcmp(here + 3, there + 3, LONG) && all_are(there + 3 + LONG, 61, 0));
    CHECK(counts_of(p.da).wrs >= 3);
    memset(here, 0, LONG);
    CHECK_EQ(post_at(&p, HX_READ, 2, 3, LONG, NULL), HX_OK);
    WAIT_FINAL(&p.a, 2, HX_OK);
    CHECK(!memcmp(here + 3, there + 3, LONG));
    close_pair(&p);
    net.max_message = 1ull << 31;
}

static void test_rows_longer_than_a_request(void)
{
    long_row(1ull << 31);
    long_row(8 << 20);
}

/* ---- what waits ---- */

static void test_note_after_bytes(void)
{
    pair_t p;
    open_pair(&p);
    hold_back(p.da);
    memset(here, 0x11, 4096);
    hx_segment_t seg = {.local = p.local,
                        .remote = p.t,
                        .rkey = hx_rregion_rkey(p.t),
                        .local_off = (uint64_t[]){0},
                        .remote_off = (uint64_t[]){0},
                        .each = 4096,
                        .n = 1};
    CHECK_EQ(post_note(&p.a, 1, "landed", &seg, 1, NULL), HX_OK);
    SOON(waiting(p.da) == 2);
    for (int i = 0; i < 20; i++)
        pump_all(1);
    CHECK_EQ(p.b.nnotes, 0);
    carry(p.da, 1); /* the bytes, but not what tells that they are there */
    for (int i = 0; i < 20; i++)
        pump_all(1);
    CHECK_EQ(p.b.nnotes, 0);
    let_go(p.da);
    WAIT(p.b.nnotes == 1);
    CHECK(all_are(there, 4096, 0x11));
    CHECK_EQ(p.b.notes[0].flags, 0);
    WAIT_FINAL(&p.a, 1, HX_OK);
    close_pair(&p);
}

/* The double counts places in the queue; what does not fit goes on when there is room, and in turn. */
static void test_full_queue(void)
{
    enum { OPS = 200, LIST = 40 };
    static uint64_t from[LIST], to[LIST];
    pair_t p;
    open_pair(&p);
    unsigned before = counts_of(p.da).wrs;
    hold_back(p.da);
    fill(here, NBYTES, 5);
    for (uint64_t i = 0; i < OPS; i++) {
        for (uint64_t k = 0; k < LIST; k++) {
            from[k] = (i * LIST + k) * 128;
            to[k] = (i * LIST + LIST - 1 - k) * 128;
        }
        hx_segment_t seg = {.local = p.local,
                            .remote = p.t,
                            .rkey = hx_rregion_rkey(p.t),
                            .local_off = from,
                            .remote_off = to,
                            .each = 64,
                            .n = LIST};
        CHECK_EQ(post_rows(&p.a, p.a.ep, HX_WRITE, 1 + i, HX_EPOCH_NOW, &seg, 1, NULL, NULL), HX_OK);
    }
    size_t most = waiting(p.da), rounds = 0;
    CHECK(most > 350 && most <= 512);
    for (double end = seconds() + PATIENCE; seconds() < end && !atomic_load(&p.a.of[OPS].finals); rounds++) {
        carry(p.da, 50);
        pump_all(1);
    }
    CHECK(rounds > OPS * LIST / 512);
    for (uint64_t i = 0; i < OPS; i++)
        WAIT_FINAL(&p.a, 1 + i, HX_OK);
    CHECK_EQ(counts_of(p.da).wrs - before, OPS * (LIST + 1));
    bool whole = true;
    for (uint64_t i = 0; i < OPS; i++)
        for (uint64_t k = 0; k < LIST; k++)
            whole &= !memcmp(there + (i * LIST + LIST - 1 - k) * 128, here + (i * LIST + k) * 128, 64);
    CHECK(whole);
    close_pair(&p);
}

/* Its memory is the device's until the last work request that names it; the double ends the program if it is not. */
static void test_deregistered_in_flight(void)
{
    pair_t p;
    open_pair(&p);
    hold_back(p.da);
    memset(here, 0x11, 4096);
    CHECK_EQ(post_at(&p, HX_WRITE, 1, 0, 4096, NULL), HX_OK);
    SOON(waiting(p.da) == 2);
    CHECK_EQ(hx_region_deregister(p.local, 7), HX_OK);
    for (int i = 0; i < 50; i++)
        pump_all(1);
    CHECK_EQ(p.a.done[7].count, 0);
    CHECK_EQ(post_at(&p, HX_WRITE, 2, 0, 4096, NULL), HX_ERR_REGION_CLOSED);
    let_go(p.da);
    WAIT_FINAL(&p.a, 1, HX_OK);
    WAIT(p.a.done[7].count == 1);
    CHECK_EQ(p.a.done[7].status, HX_OK);
    CHECK(all_are(there, 4096, 0x11));
    close_pair(&p);
}

/* It says why, and nothing else of the engine suffers. */
static void test_memory_that_is_not_taken(void)
{
    pair_t p;
    open_pair(&p);
    TELL(p.da, to->reg_fails = 1);
    hx_region_t *bad = lend(&p.a, here + NBYTES, 4096, RW, NULL);
    WAIT(p.a.unusable == 1);
    CHECK_EQ(post_one(&p.a, HX_WRITE, 1, bad, 0, p.t, 0, 64, NULL), HX_ERR_REGION_CLOSED);
    hx_region_unref(bad);
    good(&p, 2);
    close_pair(&p);
}

/* What has ended when the device has been told has no record: its poster hears of it. Held, it has one. */
static void test_ended_within_the_post(void)
{
    pair_t p;
    uint64_t handle = 1;
    open_pair(&p);
    good(&p, 2);
    fill(here, NBYTES, 5);
    CHECK_EQ(post_at(&p, HX_WRITE, 1, 0, 4096, &handle), HX_OK);
    CHECK_EQ(atomic_load(&p.a.of[1].finals), 1);
    CHECK_EQ(handle, 0);
    CHECK(!memcmp(here, there, 4096));
    hold_back(p.da);
    CHECK_EQ(post_at(&p, HX_WRITE, 3, 0, 4096, &handle), HX_OK);
    CHECK_EQ(atomic_load(&p.a.of[3].finals), 0);
    CHECK(handle != 0);
    let_go(p.da);
    WAIT_FINAL(&p.a, 3, HX_OK);
    close_pair(&p); /* which looks for records that nobody waits for */
}

int main(void)
{
    static const case_t cases[] = {
        {"there and back", test_there_and_back},
        {"ended within the post", test_ended_within_the_post},
        {"scattered rows", test_scattered_rows},
        {"odd memory", test_odd_memory},
        {"rows longer than a request", test_rows_longer_than_a_request},
        {"note after bytes", test_note_after_bytes},
        {"full queue", test_full_queue},
        {"deregistered in flight", test_deregistered_in_flight},
        {"memory that is not taken", test_memory_that_is_not_taken},
    };
    return run_cases("test_verbs", cases, sizeof cases / sizeof cases[0]);
}
