/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs provider with a driver that takes long to destroy a queue pair: a shut one is out of everybody's way. Only what was on
 * it waits. */
#define _GNU_SOURCE
#include "verbs_core.h"
#include "verbs_pair.h"

/* The next `n` that are destroyed stand still, shut. */
static void slow_ends(hx_verbs_device_t *d, unsigned n)
{
    TELL(d, to->keeps = true);
    hold(&d->knobs.at_destroy, n);
}

static size_t requests_of(const pair_t *p)
{
    hx_verbs_t *v = p->a.ep->verbs->v;
    pthread_mutex_lock(&v->mu);
    size_t n = v->nreqs;
    pthread_mutex_unlock(&v->mu);
    return n;
}

/* A transfer that was on it fails, in words and in time; whoever comes next has another queue pair. */
static void test_the_next_one_works(void)
{
    pair_t p;
    open_pair(&p);
    slow_ends(p.da, 1);
    write_held(&p, 1);
    spoil(p.da);
    SOON(held(&p.da->knobs.at_destroy) == 1);
    let_go(p.da);
    good(&p, 2);
    CHECK_EQ(requests_of(&p), 0); /* other peers' transfers need them */
    WAIT(atomic_load(&p.a.of[1].earlies) == 1);
    CHECK_EQ(p.a.of[1].early_status, HX_ERR_CONNECTION);
    CHECK(p.a.of[1].early_says);
    linger(50);
    CHECK_EQ(atomic_load(&p.a.of[1].finals), 0); /* its memory may be looked at still */
    CHECK_EQ(held(&p.da->knobs.at_destroy), 1);
    let(&p.da->knobs.at_destroy);
    WAIT_FINAL(&p.a, 1, HX_ERR_CONNECTION);
    CHECK(!memcmp(here, there, 4096));
    CHECK_EQ(arrive(NULL), 0);
    close_pair(&p);
}

/* What the device gives back when it is shut does not wait for it to be destroyed: whose memory it is can have it. */
static void given_back(bool read)
{
    pair_t p;
    open_pair(&p);
    slow_ends(p.da, 1);
    TELL(p.da, to->keeps = false);
    hold_back(p.da);
    for (uint64_t token = 1; token <= 3; token++)
        CHECK_EQ(post_at(&p, read ? HX_READ : HX_WRITE, token, 4096 * token, 4096, NULL), HX_OK);
    SOON(waiting(p.da) == (read ? 3 : 6));
    CHECK_EQ(hx_endpoint_close(p.a.ep), HX_OK);
    for (uint64_t token = 1; token <= 3; token++) {
        WAIT(atomic_load(&p.a.of[token].finals) == 1);
        CHECK(p.a.of[token].status != HX_OK);
    }
    CHECK_EQ(held(&p.da->knobs.at_destroy), 1);
    CHECK_EQ(hx_region_deregister(p.local, 1), HX_OK);
    CHECK_EQ(status_of(&p.a, 1), HX_OK);
    CHECK_EQ(held(&p.da->knobs.at_destroy), 1);
    let(&p.da->knobs.at_destroy);
    close_pair(&p);
}

static void test_given_back_at_the_shutting(void)
{
    given_back(false);
    given_back(true);
}

/* One whose last completion has been read when it fails is shut like another. */
static void test_nothing_left_to_give_back(void)
{
    pair_t p;
    open_pair(&p);
    slow_ends(p.da, 1);
    TELL(p.da, to->keeps = false; to->fail_in = 2; to->fail_status = DOUBLE_RETRIES); /* of two: the last */
    CHECK_EQ(post_at(&p, HX_WRITE, 1, 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&p.a, 1, HX_ERR_CONNECTION);
    CHECK_EQ(held(&p.da->knobs.at_destroy), 1);
    good(&p, 2);
    let(&p.da->knobs.at_destroy);
    close_pair(&p);
}

/* A device in software may be in the middle of a packet when it says that it is shut. */
static void test_it_settles_first(void)
{
    pair_t p;
    open_pair(&p);
    slow_ends(p.db, 1);
    write_held(&p, 1);
    cut(&p.a);
    SOON(held(&p.db->knobs.at_destroy) == 1);
    double start = seconds();
    WAIT(p.b.lost == 1);
    WAIT(hx_providers_settled(p.b.ep));
    CHECK(seconds() - start > 0.05); /* of 0.1: it was held before we looked at the time */
    CHECK_EQ(held(&p.db->knobs.at_destroy), 1);
    let(&p.db->knobs.at_destroy);
    WAIT(atomic_load(&p.a.of[1].finals) == 1);
    close_pair(&p);
}

/* Neither a revocation nor the next link waits for the end of a peer's old queue pair. */
static void test_the_owner_has_its_memory(void)
{
    pair_t p;
    size_t sent;
    hx_config_t b = verbs_config("verbs-b");
    b.cancel_grace_ns = 1000 * MS; /* a peer is kept out after three quarters, and then it settles */
    open_pair_of(&p, patient_config("verbs-a"), b, NBYTES);
    write_held(&p, 1);
    slow_ends(p.db, 1);
    slow_ends(p.da, 1);
    take_back(&p, 0, 4096, 1);
    CHECK_EQ(status_of(&p.b, 1), HX_OK);
    CHECK_EQ(held(&p.db->knobs.at_destroy), 1);
    SOON(held(&p.da->knobs.at_destroy) == 1);
    untouched(&p, &sent);
    CHECK_EQ(sent, 1);
    CHECK_EQ(post_at(&p, HX_WRITE, 2, 4096, 4096, NULL), HX_OK);
    WAIT_FINAL(&p.a, 2, HX_OK);
    CHECK_EQ(atomic_load(&p.a.of[1].finals), 0);
    cut(&p.a);
    WAIT(p.a.lost == 1 && p.b.lost == 1);
    link_up(&p.a, &p.b);
    WAIT(remote(&p.a, "t") != NULL);
    p.t = remote(&p.a, "t");
    CHECK_EQ(post_at(&p, HX_WRITE, 3, 8192, 4096, NULL), HX_OK);
    WAIT_FINAL(&p.a, 3, HX_OK);
    CHECK_EQ(held(&p.db->knobs.at_destroy), 1);
    CHECK_EQ(held(&p.da->knobs.at_destroy), 1);
    let(&p.db->knobs.at_destroy);
    let(&p.da->knobs.at_destroy);
    WAIT(atomic_load(&p.a.of[1].finals) == 1);
    close_pair(&p);
}

/* A queue pair that fails again and again does not leave any number of them behind. */
static void test_no_more_than_a_few(void)
{
    enum { MOST = 8 }; /* HX_VERBS_ENDS */
    pair_t p;
    uint64_t token = 1;
    open_pair(&p);
    slow_ends(p.da, ALWAYS);
    for (unsigned n = 1; n <= MOST; n++) {
        CHECK(good_again(&p, &token));
        spoil(p.da);
        SOON(held(&p.da->knobs.at_destroy) == n);
    }
    linger(300);
    unsigned looks = counts_of(p.da).looks;
    usleep(100000);
    CHECK(counts_of(p.da).looks - looks < 50); /* it sleeps meanwhile */
    CHECK_EQ(counts_of(p.da).creates, MOST);
    CHECK_EQ(post_at(&p, HX_WRITE, token, 0, 4096, NULL), HX_OK); /* waits */
    linger(50);
    CHECK_EQ(atomic_load(&p.a.of[token].finals), 0);
    let(&p.da->knobs.at_destroy);
    WAIT_FINAL(&p.a, token, HX_OK);
    SOON(held(&p.da->knobs.at_destroy) == 0);
    CHECK_EQ(counts_of(p.da).creates, MOST + 1);
    close_pair(&p);
}

/* One that is shut and cannot be destroyed: nobody else is in its way, but its memory is never given back. */
static void shut_for_ever(void)
{
    pair_t p;
    begin_verbs();
    open_pair(&p);
    write_held(&p, 1);
    TELL(p.da, to->keeps = true; to->destroy_fails = 1);
    spoil(p.da);
    WAIT(atomic_load(&p.a.of[1].earlies) == 1);
    let_go(p.da);
    good(&p, 2);
    CHECK(hx_engine_stop(p.a.engine) > 0);
    pump(&p.a);
    CHECK_EQ(atomic_load(&p.a.of[1].finals), 0);
    CHECK(!p.da->closed);
    hx_region_unref(p.local);
    memset(here, 1, 4096);
    side_drop(&p.a);
    hx_engine_free(p.a.engine);
    hx_region_unref(p.target);
    side_close(&p.b);
    end_folder();
}

/* A driver that does not come back does not keep anybody from closing the engine. */
static void stopped_meanwhile(void)
{
    pair_t p;
    begin_verbs();
    open_pair(&p);
    write_held(&p, 1);
    slow_ends(p.da, 1);
    spoil(p.da);
    SOON(held(&p.da->knobs.at_destroy) == 1);
    double start = seconds();
    CHECK(hx_engine_stop(p.a.engine) > 0);
    CHECK(seconds() - start < PATIENCE);
    pump(&p.a);
    CHECK_EQ(atomic_load(&p.a.of[1].finals), 0);
    CHECK_EQ(atomic_load(&p.a.of[1].earlies), 1);
    CHECK(!p.da->closed);
    hx_region_unref(p.local);
    memset(here, 1, 4096);
    side_drop(&p.a);
    hx_engine_free(p.a.engine);
    let(&p.da->knobs.at_destroy); /* at last; what it finds is all there */
    SOON(counts_of(p.da).destroys == 1);
    usleep(10000);
    hx_region_unref(p.target);
    side_close(&p.b);
    end_folder();
}

static void test_for_ever(void)
{
    in_a_process(shut_for_ever);
    in_a_process(stopped_meanwhile);
}

int main(void)
{
    static const case_t cases[] = {
        /* first: a process that has had threads cannot be forked into one that has, under TSan */
        {"for ever", test_for_ever},
        {"the next one works", test_the_next_one_works},
        {"given back at the shutting", test_given_back_at_the_shutting},
        {"nothing left to give back", test_nothing_left_to_give_back},
        {"it settles first", test_it_settles_first},
        {"the owner has its memory", test_the_owner_has_its_memory},
        {"no more than a few", test_no_more_than_a_few},
    };
    return run_cases("test_verbs_ends", cases, sizeof cases / sizeof cases[0]);
}
