/* SPDX-License-Identifier: Apache-2.0 */
/* The tcp provider: two engines of one process that know nothing of each other but a port. */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "pair.h"
#include "tcp.h"

enum { MIB = 1 << 20, NBYTES = 8 * MIB, RW = HX_ACCESS_READ | HX_ACCESS_WRITE };

static void open_tcp(side_t *s, const char *name, bool checksum, uint32_t streams, bool zerocopy)
{
    hx_config_t c = config_of(name);
    c.transports = HX_TRANSPORT_TCP;
    c.tcp_host = "127.0.0.1";
    c.unix_path = s->path; /* side_open fills it */
    c.checksum = checksum;
    c.streams = streams;
    c.zerocopy = zerocopy;
    c.secret = "a secret";
    c.secret_len = 8;
    c.stall_timeout_ns = 2000000000;
    c.cancel_grace_ns = 300000000;
    side_open(s, &c);
}

static void link_tcp(side_t *a, side_t *b)
{
    uint32_t ra = a->ready, rb = b->ready;
    hx_target_t target = {.tcp_host = "127.0.0.1", .tcp_port = hx_engine_tcp_port(b->engine)};
    CHECK_EQ(hx_connect(a->engine, &target), HX_OK);
    WAIT(a->ready == ra + 1 && b->ready == rb + 1);
}

/* No bell announces it. */
#define SOON_EPOCH(side, before)                                              \
    do {                                                                      \
        double end_ = seconds() + PATIENCE;                                   \
        while (hx_endpoint_epoch((side)->ep) == (before) && seconds() < end_) \
            pump_all(1);                                                      \
        CHECK(hx_endpoint_epoch((side)->ep) != (before));                     \
    } while (0)

/* What one engine's thread has sent or received, and the other's answer, are ordered by a socket, which a sanitizer does not
 * see. A revocation is answered when that thread has let go of the bytes, which is an order that it does see. */
static void settle(side_t *owner, hx_region_t *region, side_t *writer)
{
    static uint64_t token = 1000;
    uint64_t all[2] = {0, NBYTES}, epoch = hx_endpoint_epoch(writer->ep);
    token++;
    CHECK_EQ(hx_region_revoke(region, NULL, all, 1, token), HX_OK);
    WAIT(owner->done[token].count == 1);
    CHECK_EQ(hx_region_grant(region, NULL, all, 1), HX_OK);
    SOON_EPOCH(writer, epoch);
}

static void close_both(side_t *a, side_t *b, hx_region_t *local, hx_region_t *target)
{
    hx_region_unref(local);
    hx_region_unref(target);
    side_close(a);
    side_close(b);
}

static void test_moves(bool by_unix, bool checksum, uint32_t streams, bool zerocopy)
{
    side_t a, b;
    open_tcp(&a, "tcp-a", checksum, streams, zerocopy);
    open_tcp(&b, "tcp-b", checksum, streams, zerocopy);
    by_unix ? link_up(&a, &b) : link_tcp(&a, &b);
    hx_region_t *local = allocate(&a, NBYTES, RW, "mine"), *target = allocate(&b, NBYTES, RW, "t");
    WAIT(remote(&a, "t") != NULL && remote(&b, "mine") != NULL);
    uint8_t *here = hx_region_addr(local), *there = hx_region_addr(target);
    hx_rregion_t *t = remote(&a, "t");
    fill(here, NBYTES, 1);
    CHECK_EQ(post_one(&a, HX_WRITE, 1, local, 0, t, 0, NBYTES, NULL), HX_OK);
    WAIT_FINAL(&a, 1, HX_OK);
    settle(&b, target, &a);
    CHECK(!memcmp(here, there, NBYTES));
    fill(there, NBYTES, 2);
    CHECK_EQ(post_one(&a, HX_READ, 2, local, 0, t, 0, NBYTES, NULL), HX_OK);
    WAIT_FINAL(&a, 2, HX_OK);
    settle(&b, target, &a);
    CHECK(!memcmp(here, there, NBYTES));
    /* The side that was dialled uses the same connections. */
    fill(there, NBYTES, 3);
    CHECK_EQ(post_one(&b, HX_WRITE, 3, target, 0, remote(&b, "mine"), 0, NBYTES, NULL), HX_OK);
    WAIT_FINAL(&b, 3, HX_OK);
    settle(&a, local, &b);
    CHECK(!memcmp(here, there, NBYTES));
    enum { ROWS = 10000 };
    static uint64_t lo[ROWS], ro[ROWS];
    fill(here, NBYTES, 4);
    for (uint64_t i = 0; i < ROWS; i++) {
        lo[i] = i * 512;
        ro[i] = (ROWS - 1 - i) * 512;
    }
    hx_segment_t seg = {.local = local,
                        .remote = t,
                        .rkey = hx_rregion_rkey(t),
                        .local_off = lo,
                        .remote_off = ro,
                        .each = 512,
                        .n = ROWS};
    CHECK_EQ(post_note(&a, 4, "rows", &seg, 1, NULL), HX_OK);
    WAIT(b.nnotes == 1);
    settle(&b, target, &a);
    bool same = true;
    for (uint64_t i = 0; i < ROWS; i++)
        same &= !memcmp(here + lo[i], there + ro[i], 512);
    CHECK(same);
    WAIT_FINAL(&a, 4, HX_OK);
    enum { MANY = 200 };
    fill(here, NBYTES, 5);
    for (uint64_t i = 0; i < MANY; i++)
        CHECK_EQ(post_one(&a, i % 2 ? HX_WRITE : HX_READ, 10 + i, local, i * 4096, t, i * 4096, 4096, NULL), HX_OK);
    for (uint64_t i = 0; i < MANY; i++)
        WAIT_FINAL(&a, 10 + i, HX_OK);
    settle(&b, target, &a);
    CHECK(!memcmp(here, there, MANY * 4096));
    /* The owner itself refuses what it has taken back. */
    uint64_t span[2] = {4096, 4096};
    CHECK_EQ(hx_region_revoke(target, NULL, span, 1, 2), HX_OK);
    WAIT(b.done[2].count == 1);
    CHECK_EQ(b.done[2].status, HX_OK);
    CHECK_EQ(post_one(&a, HX_WRITE, 300, local, 0, t, 4000, 200, NULL), HX_OK);
    WAIT_FINAL(&a, 300, HX_ERR_REMOTE_ACCESS);
    CHECK_EQ(post_one(&a, HX_READ, 301, local, 0, t, 8000, 400, NULL), HX_OK);
    WAIT_FINAL(&a, 301, HX_ERR_REMOTE_ACCESS);
    CHECK_EQ(post_one(&a, HX_WRITE, 302, local, 0, t, 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&a, 302, HX_OK);
    CHECK_EQ(hx_region_deregister(target, 3), HX_OK);
    WAIT(b.done[3].count == 1);
    CHECK_EQ(b.done[3].status, HX_OK);
    close_both(&a, &b, local, target);
}

static void test_cancel_and_loss(bool zerocopy)
{
    side_t a, b;
    uint64_t handle;
    open_tcp(&a, "tcp-a", false, 1, zerocopy);
    open_tcp(&b, "tcp-b", false, 1, zerocopy);
    link_tcp(&a, &b);
    hx_region_t *local = allocate(&a, NBYTES, RW, NULL), *target = allocate(&b, NBYTES, RW, "t");
    WAIT(remote(&a, "t") != NULL);
    for (uint64_t i = 0; i < 50; i++) {
        CHECK_EQ(post_one(&a, i % 2 ? HX_WRITE : HX_READ, 1 + i, local, 0, remote(&a, "t"), 0, NBYTES, &handle), HX_OK);
        hx_cancel(a.engine, handle);
    }
    for (uint64_t i = 0; i < 50; i++)
        WAIT(atomic_load(&a.of[1 + i].finals) == 1);
    CHECK_EQ(post_one(&a, HX_WRITE, 60, local, 0, remote(&a, "t"), 0, NBYTES, NULL), HX_OK);
    WAIT_FINAL(&a, 60, HX_OK);
    for (uint64_t i = 0; i < 20; i++)
        CHECK_EQ(post_one(&a, HX_WRITE, 70 + i, local, 0, remote(&a, "t"), 0, NBYTES, NULL), HX_OK);
    hx_engine_stop(b.engine);
    for (uint64_t i = 0; i < 20; i++)
        WAIT(atomic_load(&a.of[70 + i].finals) == 1);
    close_both(&a, &b, local, target);
}

/* Of one side only: the other's consumer is another thread, or does something else. */
static void wait_for(side_t *s, uint64_t token)
{
    double end = seconds() + PATIENCE;
    while (!atomic_load(&s->of[token].finals) && seconds() < end) {
        struct pollfd bell = {.fd = hx_engine_fileno(s->engine), .events = POLLIN};
        poll(&bell, 1, 1000);
        pump(s);
    }
    CHECK_EQ(atomic_load(&s->of[token].finals), 1);
    CHECK_EQ(s->of[token].status, HX_OK);
}

static unsigned lanes(const side_t *s)
{
    hx_tcp_t *tcp = hx_provider_state(s->engine, &hx_provider_tcp);
    return atomic_load(&tcp->nlanes);
}

/* Small posts that follow each other: who waits reads the answers itself. Nothing depends on that it does. */
static void test_lane(bool checksum)
{
    enum { TURNS = 600, SMALL = 4096 };
    side_t a, b;
    open_tcp(&a, "tcp-a", checksum, 1, false);
    open_tcp(&b, "tcp-b", checksum, 1, false);
    link_tcp(&a, &b);
    hx_region_t *local = allocate(&a, NBYTES, RW, "mine"), *target = allocate(&b, NBYTES, RW, "t");
    WAIT(remote(&a, "t") != NULL && remote(&b, "mine") != NULL);
    uint8_t *here = hx_region_addr(local), *there = hx_region_addr(target);
    static uint8_t expected[TURNS * SMALL];
    fill(here, NBYTES, 1);
    memcpy(expected, here, sizeof expected);
    for (uint64_t i = 0, at; i < TURNS; i++) {
        at = i * SMALL;
        CHECK_EQ(post_one(&a, HX_WRITE, 1 + i, local, at, remote(&a, "t"), at, SMALL, NULL), HX_OK);
        if (i % 7 == 0) /* the peer asks on the same connection, */
            CHECK_EQ(post_one(&b, HX_READ, 5000 + i, target, 7 * MIB, remote(&b, "mine"), 7 * MIB, SMALL, NULL), HX_OK);
        if (i % 100 == 50) /* and something large goes both ways */
            CHECK_EQ(post_one(&a, HX_WRITE, 6000 + i, local, 3 * MIB, remote(&a, "t"), 3 * MIB, 2 * MIB, NULL), HX_OK);
        if (i % 100 == 0)
            CHECK_EQ(post_one(&b, HX_WRITE, 6000 + i, target, 5 * MIB, remote(&b, "mine"), 5 * MIB, 2 * MIB, NULL),
                     HX_OK);
        WAIT_FINAL(&a, 1 + i, HX_OK);
    }
    for (uint64_t i = 0; i < TURNS; i++) {
        if (i % 7 == 0)
            WAIT_FINAL(&b, 5000 + i, HX_OK);
        if (i % 50 == 0)
            WAIT_FINAL(i % 100 ? &a : &b, 6000 + i, HX_OK);
    }
    /* Whose consumer does something else is served all the same. */
    for (uint64_t i = 0; i < 20; i++) {
        double end = seconds() + PATIENCE;
        while (!lanes(&a) && seconds() < end) {
            atomic_store(&a.of[7000].finals, 0);
            CHECK_EQ(post_one(&a, HX_WRITE, 7000, local, 0, remote(&a, "t"), 0, SMALL, NULL), HX_OK);
            WAIT_FINAL(&a, 7000, HX_OK);
        }
        CHECK(lanes(&a));
        uint64_t nbytes = i % 2 ? NBYTES / 2 : SMALL;
        CHECK_EQ(post_one(&b, HX_WRITE, 8000 + i, target, 0, remote(&b, "mine"), 0, nbytes, NULL), HX_OK);
        CHECK_EQ(post_one(&b, HX_READ, 8100 + i, target, NBYTES / 2, remote(&b, "mine"), NBYTES / 2, nbytes, NULL),
                 HX_OK);
        wait_for(&b, 8000 + i);
        wait_for(&b, 8100 + i);
    }
    /* It comes to nothing where there is nothing to do, and it may be open at the end. */
    double end = seconds() + PATIENCE;
    while (lanes(&a) && seconds() < end)
        poll(NULL, 0, 1);
    CHECK_EQ(lanes(&a), 0);
    settle(&b, target, &a);
    CHECK(!memcmp(expected, there, sizeof expected));
    for (uint64_t i = 0; i < 10; i++)
        CHECK_EQ(post_one(&a, HX_WRITE, 9000 + i, local, 0, remote(&a, "t"), 0, SMALL, NULL), HX_OK);
    hx_engine_stop(a.engine);
    for (uint64_t i = 0; i < 10; i++)
        WAIT(atomic_load(&a.of[9000 + i].finals) == 1);
    close_both(&a, &b, local, target);
}

/* The kernel reports nothing, as a network card might that hangs. */
static _Atomic bool deaf;

ssize_t recvmsg(int fd, struct msghdr *msg, int flags)
{
    if (atomic_load(&deaf) && flags & MSG_ERRQUEUE) {
        errno = EAGAIN;
        return -1;
    }
    return syscall(SYS_recvmsg, fd, msg, flags);
}

/* Pages of which no report comes: nobody may be told that they are free, and an engine that ends leaves them alone. */
static void test_no_report(void)
{
    side_t a, b;
    open_tcp(&a, "tcp-a", false, 1, true);
    open_tcp(&b, "tcp-b", false, 1, false);
    link_tcp(&a, &b);
    hx_region_t *local = allocate(&a, NBYTES, RW, NULL);
    allocate(&b, NBYTES, RW, "t");
    WAIT(remote(&a, "t") != NULL);
    atomic_store(&deaf, true);
    CHECK_EQ(post_one(&a, HX_WRITE, 1, local, 0, remote(&a, "t"), 0, NBYTES, NULL), HX_OK);
    for (double end = seconds() + 0.5; seconds() < end;)
        pump_all(10);
    CHECK_EQ(atomic_load(&a.of[1].finals), 0); /* the peer has answered by now */
    CHECK(hx_engine_stop(a.engine) > 0);
    pump(&a);
    CHECK_EQ(atomic_load(&a.of[1].finals), 0);
    CHECK_EQ(atomic_load(&a.of[1].earlies), 1);
    hx_engine_stop(b.engine);
    end_folder();
}

typedef struct {
    side_t *side;
    hx_region_t *local;
    _Atomic bool over;
} chatter_t;

static void *chatter(void *arg)
{
    chatter_t *c = arg;
    for (uint64_t token = 1; !atomic_load(&c->over) && token < TOKENS; token++) {
        CHECK_EQ(post_one(c->side, HX_WRITE, token, c->local, 0, remote(c->side, "mine"), 0, 64, NULL), HX_OK);
        wait_for(c->side, token);
    }
    return NULL;
}

/* A transfer of which a small part is sent, and answered, while the checksum of the rest is still being made. */
static void test_parts(void)
{
    enum { TURNS = 400, BIG = 2 << 20 };
    side_t a, b;
    pthread_t thread;
    open_tcp(&a, "tcp-a", true, 1, false);
    open_tcp(&b, "tcp-b", true, 1, false);
    link_tcp(&a, &b);
    hx_region_t *in = allocate(&a, 4096, RW, "mine"), *small = allocate(&a, 4096, RW, NULL);
    hx_region_t *large = allocate(&a, BIG, RW, NULL), *other = allocate(&b, 4096, RW, NULL);
    hx_region_t *t1 = allocate(&b, 4096, RW, "t1"), *t2 = allocate(&b, BIG, RW, "t2");
    WAIT(remote(&a, "t1") != NULL && remote(&a, "t2") != NULL && remote(&b, "mine") != NULL);
    hx_rregion_t *r1 = remote(&a, "t1"), *r2 = remote(&a, "t2");
    chatter_t c = {.side = &b, .local = other};
    CHECK_EQ(pthread_create(&thread, NULL, chatter, &c), 0);
    uint64_t zero = 0;
    hx_segment_t parts[2] = {
        {small, r1, hx_rregion_rkey(r1), &zero, &zero, NULL, 4096, 1},
        {large, r2, hx_rregion_rkey(r2), &zero, &zero, NULL, BIG, 1},
    };
    for (uint64_t i = 0; i < TURNS; i++) {
        for (uint64_t k = 0; k < 2; k++) { /* which makes a lane */
            CHECK_EQ(post_one(&a, HX_WRITE, 3 * i + k, small, 0, r1, 0, 64, NULL), HX_OK);
            wait_for(&a, 3 * i + k);
        }
        CHECK_EQ(post_rows(&a, a.ep, HX_WRITE, 3 * i + 2, HX_EPOCH_NOW, parts, 2, NULL, NULL), HX_OK);
        wait_for(&a, 3 * i + 2);
        CHECK_EQ(a.of[3 * i + 2].nbytes, 4096 + BIG);
    }
    atomic_store(&c.over, true);
    pthread_join(thread, NULL);
    hx_region_t *all[] = {in, small, large, other, t1, t2};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        hx_region_unref(all[i]);
    side_close(&a);
    side_close(&b);
}

int main(void)
{
    in_a_process(test_no_report);
    test_parts();
    test_lane(false);
    test_lane(true);
    test_moves(false, false, 1, false);
    test_moves(false, true, 3, true);
    test_moves(true, false, 2, false);
    test_cancel_and_loss(false);
    test_cancel_and_loss(true);
    end_folder();
    return report("test_tcp");
}
