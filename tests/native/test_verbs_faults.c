/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs provider when queue pairs fail, calls are slow or fail, devices go away, and peers say what they may not:
 * what has failed is told, what was taken back lands nowhere, and the next transfers go well. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/socket.h>

#include "verbs_pair.h"

#include "verbs_core.h"

static hx_verbs_t *verbs_of(const side_t *s)
{
    return hx_provider_state(s->engine, &hx_provider_verbs);
}

/* Attempts follow each other more and more slowly; a test has no time for that. */
static void forgive(const side_t *s)
{
    hx_verbs_t *v = verbs_of(s);
    pthread_mutex_lock(&v->mu);
    for (hx_vpeer_t *p = v->peers; p; p = p->next)
        p->delay_ns = p->next_ns = 0;
    pthread_mutex_unlock(&v->mu);
    hx_verbs_wake(v);
}

/* Many rows at one go, each a work request of its own. */
static hx_status_t post_list(pair_t *p, uint64_t token, uint64_t rows)
{
    static uint64_t from[1024], to[1024];
    for (uint64_t i = 0; i < rows; i++) {
        from[i] = i * 128;
        to[i] = (rows - 1 - i) * 128;
    }
    hx_segment_t seg = {.local = p->local,
                        .remote = p->t,
                        .rkey = hx_rregion_rkey(p->t),
                        .local_off = from,
                        .remote_off = to,
                        .each = 64,
                        .n = rows};
    return post_rows(&p->a, p->a.ep, HX_WRITE, token, HX_EPOCH_NOW, &seg, 1, NULL, NULL);
}

static void write_note(pair_t *p, uint64_t token, uint64_t *handle_p)
{
    hx_segment_t seg = {.local = p->local,
                        .remote = p->t,
                        .rkey = hx_rregion_rkey(p->t),
                        .local_off = (uint64_t[]){0},
                        .remote_off = (uint64_t[]){0},
                        .each = 4096,
                        .n = 1};
    CHECK_EQ(post_note(&p->a, token, "note", &seg, 1, handle_p), HX_OK);
}

/* ---- queue pairs that fail ---- */

static void test_access_error(void)
{
    pair_t p;
    open_pair(&p);
    uint64_t token = 10;
    lock_out(p.db);
    CHECK_EQ(post_at(&p, HX_WRITE, 1, 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&p.a, 1, HX_ERR_REMOTE_ACCESS);
    CHECK_EQ(p.a.of[1].code, DOUBLE_ACCESS);
    CHECK(all_are(there, 4096, 0));
    let_in(p.db);
    CHECK(good_again(&p, &token));
    CHECK_EQ(p.a.lost + p.b.lost, 0);
    close_pair(&p);
}

/* Both ends fail at once, and tell each other of new ones while they still destroy the old ones: in every order, they
 * come to belong together. */
static void test_both_ends_fail_at_once(void)
{
    enum { TIMES = 150 };
    uint64_t dice = 11, token = 1;
    pair_t p;
    open_pair(&p);
    for (int i = 0; i < TIMES; i++) {
        hx_verbs_device_t *devices[] = {p.da, p.db};
        for (int k = 0; k < 2; k++)
            TELL(devices[k], {
                to->destroy_us = draw_below(&dice, 4) ? draw_below(&dice, 8000) : 0;
                to->connect_us = draw_below(&dice, 4) ? draw_below(&dice, 8000) : 0;
            });
        uint64_t what = draw_below(&dice, 4);
        if (what == 0) {
            lock_out(p.db);
            CHECK_EQ(post_at(&p, HX_WRITE, token, 0, 4096, NULL), HX_OK);
            WAIT(atomic_load(&p.a.of[token].finals) == 1);
            token++;
            let_in(p.db);
        }
        if (what & 1)
            spoil(p.da);
        if (what & 2)
            spoil(p.db);
        usleep((useconds_t)draw_below(&dice, 6000));
        if (draw_below(&dice, 3) == 0)
            spoil(draw_below(&dice, 2) ? p.da : p.db); /* and again, perhaps while it is joined */
        forgive(&p.a);
        forgive(&p.b);
        if (!CHECK(good_again(&p, &token)))
            break;
    }
    CHECK_EQ(p.a.lost + p.b.lost, 0);
    close_pair(&p);
}

/* What the library says of a failure that is none of ours. */
static void test_other_errors(void)
{
    pair_t p;
    open_pair(&p);
    uint64_t token = 10;
    TELL(p.da, {
        to->fail_in = 1;
        to->fail_status = 4;
    });
    CHECK_EQ(post_at(&p, HX_WRITE, 1, 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&p.a, 1, HX_ERR_CONNECTION);
    CHECK_EQ(p.a.of[1].code, 4);
    CHECK(good_again(&p, &token));
    say_async(p.da, "port error");
    say_async(p.da, ""); /* which nobody need know */
    WAIT(p.a.warnings == 1);
    linger(20);
    CHECK_EQ(p.a.warnings, 1);
    CHECK(good_again(&p, &token));
    close_pair(&p);
}

/* Those behind one that fails are flushed, and those of other operations with them; none is lost. */
static void test_neighbours_of_a_failure(void)
{
    enum { OPS = 30 };
    pair_t p;
    open_pair(&p);
    uint64_t token = 100;
    hold_back(p.da);
    for (uint64_t i = 1; i <= OPS; i++)
        CHECK_EQ(post_at(&p, HX_WRITE, i, i * 4096, 4096, NULL), HX_OK);
    TELL(p.da, {
        to->fail_in = 21;
        to->fail_status = 4;
    });
    let_go(p.da);
    for (uint64_t i = 1; i <= OPS; i++) {
        WAIT(atomic_load(&p.a.of[i].finals) == 1);
        CHECK_EQ(p.a.of[i].status, i <= 10 ? HX_OK : HX_ERR_CONNECTION);
        CHECK_EQ(p.a.of[i].code, i == 11 ? 4 : 0);
    }
    CHECK(good_again(&p, &token));
    close_pair(&p);
}

/* ---- calls that fail ---- */

static void refused(uint64_t nth, bool while_held)
{
    pair_t p;
    open_pair(&p);
    uint64_t token = 10;
    memset(here, 0x11, NBYTES);
    if (while_held)
        hold_back(p.da);
    TELL(p.da, to->refuse_in = nth);
    CHECK_EQ(post_list(&p, 1, 64), HX_OK);
    WAIT_FINAL(&p.a, 1, HX_ERR_CONNECTION);
    let_go(p.da);
    CHECK(good_again(&p, &token));
    memset(there, 0x55, NBYTES);
    size_t sent;
    CHECK_EQ(arrive(&sent), 0);
    CHECK_EQ(sent, while_held ? nth - 1 : 0);
    CHECK(all_are(there, NBYTES, 0x55));
    close_pair(&p);
}

static void test_post_refused(void)
{
    refused(1, false);
    refused(1, true);
    refused(20, false);
    refused(20, true);
    refused(65, true); /* the one that would have told the end */
}

static void test_calls_that_fail_for_a_while(void)
{
    pair_t p;
    open_pair(&p);
    uint64_t token = 10;
    TELL(p.da, {
        to->create_fails = 2;
        to->connect_fails = 2;
    });
    TELL(p.db, to->connect_fails = 1);
    spoil(p.da);
    CHECK(good_again(&p, &token));
    TELL(p.da, CHECK_EQ(to->create_fails + to->connect_fails, 0));
    TELL(p.db, CHECK_EQ(to->connect_fails, 0));
    close_pair(&p);
}

/* Not for ever: what waits for a queue pair that does not come is told. */
static void test_calls_that_fail_for_long(void)
{
    pair_t p;
    hx_config_t c = verbs_config("verbs-a");
    c.handshake_timeout_ns = 300 * MS;
    open_pair_of(&p, c, verbs_config("verbs-b"), NBYTES);
    uint64_t token = 10;
    TELL(p.da, to->create_fails = 1000000);
    spoil(p.da);
    linger(10);
    CHECK_EQ(post_at(&p, HX_WRITE, 1, 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&p.a, 1, HX_ERR_CONNECTION);
    TELL(p.da, to->create_fails = 0);
    CHECK(good_again(&p, &token));
    close_pair(&p);
}

/* ---- taking back ---- */

/* The record that says that nothing is touched any more waits for the queue pair's end; the one that lets the await end
 * does not. What was on the wire lands before the next write, or nowhere. */
static void test_cancelled_while_held(void)
{
    pair_t p;
    uint64_t handle;
    open_pair(&p);
    hold_back(p.da);
    memset(here, 0x11, 4096);
    CHECK_EQ(post_at(&p, HX_WRITE, 1, 0, 4096, &handle), HX_OK);
    SOON(waiting(p.da) == 2);
    hold_ends(p.da);
    hx_cancel(p.a.engine, handle);
    WAIT(atomic_load(&p.a.of[1].earlies) == 1);
    CHECK_EQ(p.a.of[1].early_status, HX_ERR_CANCELLED);
    SOON(held(&p.da->knobs.at_destroy) == 1);
    linger(50);
    CHECK_EQ(atomic_load(&p.a.of[1].finals), 0);
    let(&p.da->knobs.at_destroy);
    WAIT_FINAL(&p.a, 1, HX_ERR_CANCELLED);
    let_go(p.da);
    memset(here, 0x22, 4096);
    CHECK_EQ(post_at(&p, HX_WRITE, 2, 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&p.a, 2, HX_OK);
    size_t sent;
    CHECK_EQ(arrive(&sent), 0);
    CHECK_EQ(sent, 1);
    CHECK(all_are(there, 4096, 0x22));
    close_pair(&p);
}

/* "The bytes will not come" is not said while they still may. */
static void test_aborted_note_waits(void)
{
    pair_t p;
    uint64_t handle;
    open_pair(&p);
    hold_back(p.da);
    hold_ends(p.db);
    memset(here, 0x11, 4096);
    write_note(&p, 1, &handle);
    SOON(waiting(p.da) == 2);
    hx_cancel(p.a.engine, handle);
    WAIT_FINAL(&p.a, 1, HX_ERR_CANCELLED);
    SOON(held(&p.db->knobs.at_destroy) == 1);
    linger(100);
    CHECK_EQ(p.b.nnotes, 0);
    let(&p.db->knobs.at_destroy);
    WAIT(p.b.nnotes == 1);
    CHECK_EQ(p.b.notes[0].flags, 1);
    CHECK_EQ(arrive(NULL), 0);
    CHECK(all_are(there, 4096, 0));
    let_go(p.da);
    good(&p, 2);
    close_pair(&p);
}

/* Attempts that fail, one after the other, do not put off the end of what waits for one that does not. */
static void test_no_way_at_all(void)
{
    pair_t p;
    hx_config_t c = verbs_config("verbs-a");
    c.handshake_timeout_ns = 500 * MS;
    open_pair_of(&p, c, verbs_config("verbs-b"), NBYTES);
    good(&p, 1);
    TELL(p.da, to->connect_fails = ALWAYS);
    spoil(p.da);
    SOON(counts_of(p.da).connects > 1);
    for (uint64_t token = 2; token <= 3; token++) { /* the second is posted when it has been so for longer than that */
        CHECK_EQ(post_at(&p, HX_WRITE, token, 0, 4096, NULL), HX_OK);
        linger(100);
        CHECK_EQ(atomic_load(&p.a.of[token].finals), 0);
        WAIT_FINAL(&p.a, token, HX_ERR_CONNECTION);
        CHECK(p.a.of[token].says_connect);
    }
    CHECK(counts_of(p.da).connects > 3);
    TELL(p.da, to->connect_fails = 0);
    good(&p, 4);
    close_pair(&p);
}

/* A write that stands still is given up, and its neighbours with it; the next one is not. */
static void test_stalled(void)
{
    pair_t p;
    hx_config_t c = verbs_config("verbs-a");
    c.stall_timeout_ns = 300 * MS;
    open_pair_of(&p, c, verbs_config("verbs-b"), NBYTES);
    hold_back(p.da);
    CHECK_EQ(post_at(&p, HX_WRITE, 1, 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&p.a, 1, HX_ERR_TIMEOUT);
    let_go(p.da);
    uint64_t token = 10;
    CHECK(good_again(&p, &token));
    CHECK_EQ(arrive(NULL), 0);
    close_pair(&p);
}

/* ---- another peer ---- */

typedef struct {
    side_t side;
    hx_verbs_device_t *d;
    hx_endpoint_t *ep; /* to it, of a's */
    hx_region_t *target;
    hx_rregion_t *u;
} third_t;

static void bring_third(pair_t *p, third_t *c)
{
    memset(c, 0, sizeof *c);
    hx_endpoint_ref(p->a.ep);
    c->ep = p->a.ep; /* b's, until c is there */
    c->d = open_verbs(&c->side, verbs_config("verbs-c"));
    link_up(&p->a, &c->side);
    hx_endpoint_t *b = c->ep;
    c->ep = p->a.ep;
    p->a.ep = b;
    c->target = lend_and_wait(&c->side, there + NBYTES, NBYTES, "u");
    WAIT(remote(&p->a, "u") != NULL);
    c->u = remote(&p->a, "u");
}

static void dismiss(third_t *c)
{
    hx_endpoint_unref(c->ep);
    hx_region_unref(c->target);
    side_close(&c->side);
}

static hx_status_t post_third(pair_t *p, third_t *c, uint64_t token, uint64_t off, uint64_t n)
{
    hx_segment_t seg = {.local = p->local,
                        .remote = c->u,
                        .rkey = hx_rregion_rkey(c->u),
                        .local_off = &off,
                        .remote_off = &off,
                        .each = n,
                        .n = 1};
    return post_rows(&p->a, c->ep, HX_WRITE, token, HX_EPOCH_NOW, &seg, 1, NULL, NULL);
}

/* Connecting finds the way to an address, which takes as long as it takes. */
static void test_slow_connect_holds_up_nobody_else(void)
{
    pair_t p;
    third_t c;
    uint64_t handle;
    open_pair(&p);
    good(&p, 1);
    hold(&p.da->knobs.at_connect, 1);
    bring_third(&p, &c);
    SOON(held(&p.da->knobs.at_connect) == 1);
    CHECK_EQ(post_third(&p, &c, 2, 0, 4096), HX_OK);
    hold_back(p.da);
    CHECK_EQ(post_at(&p, HX_WRITE, 3, 0, 4096, &handle), HX_OK);
    SOON(waiting(p.da) == 2);
    hx_cancel(p.a.engine, handle);
    WAIT_FINAL(&p.a, 3, HX_ERR_CANCELLED);
    let_go(p.da);
    good(&p, 4);
    CHECK_EQ(held(&p.da->knobs.at_connect), 1);
    CHECK_EQ(atomic_load(&p.a.of[2].finals), 0);
    let(&p.da->knobs.at_connect);
    WAIT_FINAL(&p.a, 2, HX_OK);
    CHECK(!memcmp(here, there + NBYTES, 4096));
    dismiss(&c);
    close_pair(&p);
}

/* ---- devices that go away ---- */

/* Everything ends, the program is told once, and the engines can be closed. The device is let go at once, since whoever
 * takes it away waits for that. */
static void gone_under_load(bool held_back)
{
    enum { OPS = 40 };
    pair_t p;
    third_t c;
    hx_config_t config = verbs_config("verbs-a");
    config.handshake_timeout_ns = 300 * MS;
    open_pair_of(&p, config, verbs_config("verbs-b"), NBYTES);
    bring_third(&p, &c);
    good(&p, 1);
    if (held_back)
        hold_back(p.da);
    uint64_t posted = 0;
    for (; posted < OPS; posted++) {
        if (posted == OPS / 2)
            take_away(p.da);
        hx_status_t status = posted % 2 ? post_list(&p, 100 + posted, 64) : post_third(&p, &c, 100 + posted, 0, 4096);
        if (status != HX_OK) { /* it was let go already */
            CHECK_EQ(status, HX_ERR_NO_PATH);
            break;
        }
    }
    CHECK(posted >= OPS / 2);
    for (uint64_t i = 0; i < posted; i++) {
        WAIT(atomic_load(&p.a.of[100 + i].finals) == 1);
        CHECK(!held_back || p.a.of[100 + i].status == HX_ERR_CONNECTION);
    }
    WAIT(p.a.warnings == 1);
    SOON(p.da->closed);
    hx_status_t status = post_at(&p, HX_WRITE, 2, 0, 4096, NULL); /* nobody waits for ever for what is posted now */
    if (status == HX_OK) {
        WAIT_FINAL(&p.a, 2, HX_ERR_CONNECTION);
    } else {
        CHECK_EQ(status, HX_ERR_NO_PATH);
    }
    deregister(&p.a, p.local, 3, HX_OK);
    p.local = NULL;
    CHECK_EQ(p.a.lost, 0);
    dismiss(&c);
    close_pair(&p);
}

static void test_device_gone_under_load(void)
{
    gone_under_load(true);
    gone_under_load(false);
}

/* Memory that is being given back when its device goes: the last that is, closes it. */
static void test_device_gone_while_memory_leaves(void)
{
    pair_t p;
    open_pair(&p);
    hx_region_t *one = lend_and_wait(&p.a, here + NBYTES, 4096, NULL);
    hx_region_t *two = lend_and_wait(&p.a, here + NBYTES + 4096, 4096, NULL);
    hold(&p.da->knobs.at_dereg, 2);
    hx_region_unref(one);
    hx_region_unref(two);
    SOON(held(&p.da->knobs.at_dereg) == 1);
    take_away(p.da);
    WAIT(p.a.warnings == 1);
    linger(20);
    let(&p.da->knobs.at_dereg);
    for (int i = 0; i < 20; i++) {
        linger(1);
        let(&p.da->knobs.at_dereg);
    }
    close_pair(&p);
}

/* ---- peers that do not keep to what was agreed ---- */

typedef enum { TRUE_PATH, GOES_BACK, OTHER_QPN, OTHER_KEY, JOINED_2, MTU_9, NO_READS, TOO_SHORT, TOO_NEW } forgery_t;
static _Atomic uint32_t forgery;
static ssize_t (*next_sendmsg)(int, const struct msghdr *, int);

typedef struct {
    hx_frame_t head;
    uint32_t name_len;
    char name[5];
    hx_verbs_intro_t intro;
} __attribute__((packed)) path_t;

static void forge(path_t *path, forgery_t what)
{
    hx_verbs_intro_t intro = path->intro;
    switch (what) {
    case GOES_BACK:
        intro.generation = intro.generation > 2 ? 1 : intro.generation; /* the peer has heard of the second */
        break;
    case OTHER_QPN:
        intro.address.qpn += intro.joined;
        break;
    case OTHER_KEY:
        intro.flush_rkey += intro.joined;
        break;
    case JOINED_2:
        intro.joined *= 2;
        break;
    case MTU_9:
        intro.address.mtu = 9;
        break;
    case NO_READS:
        intro.address.reads = 0;
        break;
    case TOO_NEW:
        intro.generation = UINT32_MAX - 1;
        break;
    default:
        break;
    }
    path->intro = intro;
}

/* In place of libc's: what an engine says of its queue pairs, changed on the way. */
ssize_t sendmsg(int fd, const struct msghdr *msg, int flags)
{
    uint32_t what = atomic_load(&forgery);
    path_t path;
    if (what == TRUE_PATH || msg->msg_iovlen != 1 || msg->msg_iov[0].iov_len != sizeof path)
        return next_sendmsg(fd, msg, flags);
    memcpy(&path, msg->msg_iov[0].iov_base, sizeof path);
    if (path.head.type != HX_F_PATH || memcmp(path.name, "verbs", 5))
        return next_sendmsg(fd, msg, flags);
    forge(&path, what);
    struct iovec iov = {&path, sizeof path};
    struct msghdr forged = {.msg_iov = &iov, .msg_iovlen = 1};
    if (what != TOO_SHORT)
        return next_sendmsg(fd, &forged, flags);
    iov.iov_len = path.head.length = sizeof path - 4;
    return next_sendmsg(fd, &forged, flags) == (ssize_t)iov.iov_len ? (ssize_t)sizeof path : -1;
}

static void false_path(forgery_t what)
{
    pair_t p;
    uint64_t token = 1;
    open_pair(&p);
    spoil(p.db);
    CHECK(good_again(&p, &token)); /* each has made a second one, and has said so */
    CHECK_EQ(p.a.lost + p.b.lost, 0);
    atomic_store(&forgery, what);
    spoil(p.db);
    WAIT(p.a.lost == 1 && p.b.lost == 1);
    CHECK(p.a.lost_status == HX_ERR_PEER_LOST && p.b.lost_status == HX_ERR_PEER_LOST);
    CHECK(strstr(p.a.text, "impossible path") || strstr(p.b.text, "impossible path"));
    atomic_store(&forgery, TRUE_PATH);
    close_pair(&p);
}

static void test_false_paths(void)
{
    for (forgery_t what = GOES_BACK; what <= TOO_NEW; what++)
        false_path(what);
}

/* ---- the end ---- */

/* Whatever state the queue pairs are in: all that was posted ends, and the device is closed with nothing on it. */
static void test_closed_with_everything_in_flight(void)
{
    uint64_t dice = 3;
    for (int i = 0; i < 24; i++) {
        pair_t p;
        open_pair(&p);
        if (i % 2)
            hold_back(p.da);
        TELL(p.da, to->destroy_us = to->connect_us = draw_below(&dice, 30000));
        TELL(p.db, to->destroy_us = to->connect_us = draw_below(&dice, 30000));
        for (uint64_t t = 1; t < 30; t++)
            CHECK_EQ(post_list(&p, t, 200), HX_OK);
        for (uint64_t t = 30; t < 40; t++)
            write_note(&p, t, NULL);
        if (i % 3 == 1)
            spoil(p.da);
        if (i % 3 == 2)
            spoil(p.db);
        usleep((useconds_t)draw_below(&dice, 20000));
        hx_region_unref(p.local);
        side_close(&p.a);
        hx_region_unref(p.target);
        side_close(&p.b);
        clear_net();
    }
}

int main(void)
{
    static const case_t cases[] = {
        {"access error", test_access_error},
        {"both ends fail at once", test_both_ends_fail_at_once},
        {"other errors", test_other_errors},
        {"neighbours of a failure", test_neighbours_of_a_failure},
        {"post refused", test_post_refused},
        {"calls that fail for a while", test_calls_that_fail_for_a_while},
        {"calls that fail for long", test_calls_that_fail_for_long},
        {"cancelled while held", test_cancelled_while_held},
        {"aborted note waits", test_aborted_note_waits},
        {"no way at all", test_no_way_at_all},
        {"stalled", test_stalled},
        {"slow connect holds up nobody else", test_slow_connect_holds_up_nobody_else},
        {"device gone under load", test_device_gone_under_load},
        {"device gone while memory leaves", test_device_gone_while_memory_leaves},
        {"false paths", test_false_paths},
        {"closed with everything in flight", test_closed_with_everything_in_flight},
    };
    next_sendmsg = (ssize_t (*)(int, const struct msghdr *, int))dlsym(RTLD_NEXT, "sendmsg");
    return run_cases("test_verbs_faults", cases, sizeof cases / sizeof cases[0]);
}
