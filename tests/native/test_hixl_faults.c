/* SPDX-License-Identifier: Apache-2.0 */
/* The hixl provider when its library stands still, refuses, fails half-way or answers late: memory that is called free is
 * not written any more, what stands still holds up nothing else, and nothing turns in circles. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/wait.h>

#include "hixl_double.h"

#include "hixl_core.h"
#include "link.h"

/* Two engines with a region each, and a link of the library's between them. */
typedef struct {
    side_t a, b;
    hx_region_t *local, *target;
    hx_rregion_t *t;
} pair_t;

static void write_once(side_t *s, hx_endpoint_t *ep, uint64_t token, hx_region_t *local, hx_rregion_t *remote)
{
    hx_segment_t seg = {.local = local,
                        .remote = remote,
                        .rkey = hx_rregion_rkey(remote),
                        .local_off = (uint64_t[]){0},
                        .remote_off = (uint64_t[]){0},
                        .each = 64,
                        .n = 1};
    CHECK_EQ(post_rows(s, ep, HX_WRITE, token, HX_EPOCH_NOW, &seg, 1, NULL, NULL), HX_OK);
}

static void open_up(pair_t *p, hx_config_t a)
{
    hx_config_t b = hixl_config("fault-b");
    b.cancel_grace_ns = 2000 * MS; /* a takes back what stands still, for a revocation, in half of its own */
    open_hixl_as(&p->a, a, 0);
    open_hixl_as(&p->b, b, 1);
    link_up(&p->a, &p->b);
    p->local = lend_and_wait(&p->a, here, NBYTES, NULL);
    p->target = lend_and_wait(&p->b, there, NBYTES, "t");
    WAIT(remote(&p->a, "t") != NULL);
    p->t = remote(&p->a, "t");
    write_once(&p->a, p->a.ep, 1, p->local, p->t);
    WAIT_FINAL(&p->a, 1, HX_OK);
}

static void close_down(pair_t *p)
{
    hx_region_unref(p->local);
    hx_region_unref(p->target);
    side_close(&p->a);
    side_close(&p->b);
    CHECK_EQ(stat_of("stale_polls"), 0);
    CHECK_EQ(stat_of("after_finalize"), 0);
}

/* Lets the device go on, and waits for a write behind whatever it had to do for the peer: a link works in order, so that
 * earlier writes have landed by now, if there were any. */
static void go_on(pair_t *p, uint64_t token)
{
    knob("hang_device", "0");
    CHECK_EQ(post_one(&p->a, HX_WRITE, token, p->local, 0, p->t, NBYTES / 2, 64, NULL), HX_OK);
    WAIT_FINAL(&p->a, token, HX_OK);
}

static uint32_t take_back(pair_t *p, const uint64_t *spans, size_t n, uint64_t token)
{
    CHECK_EQ(hx_region_revoke(p->target, NULL, spans, n, token), HX_OK);
    WAIT(p->b.done[token].count == 1);
    return p->b.done[token].status;
}

/* ---- what is called free is left alone ---- */

/* Of several chunks the library has begun some when a later one is refused: the post has failed, and yet writes. */
static void test_failed_post_that_had_begun(void)
{
    pair_t p;
    open_up(&p, hixl_config("begun-a"));
    memset(here, 0x11, 4096);
    memset(there, 0, 4096);
    knob("hang_device", "1");
    atomic_store(&begun_code, 507018);
    CHECK_EQ(post_one(&p.a, HX_WRITE, 2, p.local, 0, p.t, 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&p.a, 2, HX_ERR_PROVIDER);
    CHECK_EQ(p.a.of[2].code, 507018);
    CHECK_EQ(take_back(&p, (uint64_t[]){0, 4096}, 1, 3), HX_OK);
    memset(there, 0x55, 4096);
    go_on(&p, 4);
    CHECK(all_are(there, 4096, 0x55));
    close_down(&p);
}

/* A span without bytes stands for nothing, and hides nothing. */
static void test_revoked_with_empty_span(void)
{
    static const uint64_t spans[][6] = {
        {0, 4096, 0, 0, 0, 0},
        {0, 0, 0, 4096, 0, 0},
        {8192, 0, 0, 4096, 4096, 0},
        {8192, 4096, 0, 4096, 4096, 0}, /* and in any order */
    };
    for (size_t i = 0; i < sizeof spans / sizeof spans[0]; i++) {
        pair_t p;
        open_up(&p, hixl_config("span-a"));
        memset(here, 0x11, 4096);
        memset(there, 0, 4096);
        knob("hang_device", "1");
        uint64_t posts = stat_of("posts");
        CHECK_EQ(post_one(&p.a, HX_WRITE, 2, p.local, 0, p.t, 0, 4096, NULL), HX_OK);
        SOON(stat_of("posts") > posts && !stat_of("posting"));
        CHECK_EQ(take_back(&p, spans[i], 3, 3), HX_OK);
        memset(there, 0x55, 4096);
        go_on(&p, 4);
        CHECK(all_are(there, 4096, 0x55));
        WAIT_FINAL(&p.a, 2, HX_ERR_REMOTE_ACCESS);
        close_down(&p);
    }
}

static gate_t at_goodbye = GATE;
static ssize_t (*next_sendmsg)(int, const struct msghdr *, int);

/* In place of libc's, so that a control thread can be stopped when it has decided what its goodbye says. */
ssize_t sendmsg(int fd, const struct msghdr *msg, int flags)
{
    hx_frame_t head;
    if (msg->msg_iovlen && msg->msg_iov[0].iov_len == sizeof head) {
        memcpy(&head, msg->msg_iov[0].iov_base, sizeof head);
        if (head.length == sizeof head && head.type == HX_F_BYE)
            pass(&at_goodbye);
    }
    return next_sendmsg(fd, msg, flags);
}

/* The goodbye says that nothing is on its way: then nothing may set out after it was written. */
static void test_nothing_after_goodbye(void)
{
    pair_t p;
    hx_config_t c = patient_config("bye-a");
    c.cancel_grace_ns = c.stall_timeout_ns; /* what has set out is not taken back */
    open_up(&p, c);
    memset(here, 0x11, 4096);
    memset(there, 0, 4096);
    hold(&at_event, 1);
    hold(&at_goodbye, 1);
    hx_segment_t seg = {.local = p.local,
                        .remote = p.t,
                        .rkey = hx_rregion_rkey(p.t),
                        .local_off = (uint64_t[]){0},
                        .remote_off = (uint64_t[]){0},
                        .each = 4096,
                        .n = 1};
    hx_post_t post = {
        .kind = HX_WRITE, .token = 2, .epoch = HX_EPOCH_NOW, .segments = &seg, .nsegments = 1, .after = &seg};
    uint64_t handle, index, posts = stat_of("posts");
    bool done;
    CHECK_EQ(hx_post(p.a.ep, &post, &handle, &index, &done), HX_OK);
    SOON(held(&at_event) == 1); /* the poster is about to post it */
    CHECK_EQ(hx_endpoint_close(p.a.ep), HX_OK);
    SOON(held(&at_goodbye) == 1);
    knob("hang_device", "1");
    let(&at_event);
    SOON(atomic_load(&p.a.of[2].finals) == 1 || stat_of("posts") > posts);
    let(&at_goodbye);
    WAIT(p.b.lost == 1 && p.a.lost == 1);
    CHECK_EQ(take_back(&p, (uint64_t[]){0, 4096}, 1, 3), HX_OK);
    memset(there, 0x55, 4096);
    knob("hang_device", "0");
    WAIT_FINAL(&p.a, 2, HX_ERR_ABORTED);
    CHECK(all_are(there, 4096, 0x55));
    CHECK_EQ(stat_of("posts"), posts);
    close_down(&p);
}

/* A call that never comes back holds memory of ours for ever, and keeps the library from forgetting any: nobody is told
 * that it is free, and it stays mapped. */
static void abandon(void)
{
    side_t a, b;
    open_pair(&a, &b);
    hx_region_t *own = allocate(&a, 4096, HX_ACCESS_READ, NULL), *lent = lend_and_wait(&a, here, NBYTES, NULL);
    hx_region_t *unused = allocate(&a, 4096, HX_ACCESS_READ, NULL), *late = allocate(&a, 4096, HX_ACCESS_READ, NULL);
    hx_region_t *target = lend_and_wait(&b, there, NBYTES, "t");
    WAIT(remote(&a, "t") != NULL);
    uint8_t *memory[] = {here, hx_region_addr(own), hx_region_addr(unused), hx_region_addr(late)};
    hold(&at_post, 1);
    static const uint64_t offsets[] = {0, 4096};
    hx_segment_t segs[2];
    for (size_t i = 0; i < 2; i++)
        segs[i] = (hx_segment_t){.local = i ? lent : own,
                                 .remote = remote(&a, "t"),
                                 .rkey = hx_rregion_rkey(remote(&a, "t")),
                                 .local_off = &offsets[0],
                                 .remote_off = &offsets[i],
                                 .each = 4096,
                                 .n = 1};
    CHECK_EQ(post_rows(&a, a.ep, HX_WRITE, 2, HX_EPOCH_NOW, segs, 2, NULL, NULL), HX_OK);
    SOON(held(&at_post) == 1);
    CHECK_EQ(hx_region_deregister(lent, 3), HX_OK);
    CHECK_EQ(hx_region_deregister(own, 4), HX_OK);
    CHECK_EQ(hx_region_deregister(unused, 5), HX_OK);
    uint64_t finalizes = stat_of("finalizes");
    CHECK(hx_engine_stop(a.engine) > 0);
    pump(&a);
    CHECK_EQ(a.of[2].finals, 0);
    CHECK_EQ(a.of[2].earlies, 1);
    CHECK_EQ(a.of[2].early_status, HX_ERR_ABORTED);
    for (uint64_t token = 3; token <= 5; token++) {
        CHECK_EQ(a.done[token].count, 1);
        CHECK_EQ(a.done[token].status, HX_ERR_PINNED);
    }
    CHECK_EQ(stat_of("finalizes"), finalizes); /* it must not meet another call */
    hx_region_unref(lent);
    hx_region_unref(own);
    hx_region_unref(unused);
    hx_region_unref(late);
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++)
        memset(memory[i], 1, 4096);
    side_drop(&a);
    hx_region_unref(target);
    side_close(&b);
    CHECK_EQ(stat_of("after_finalize"), 0);
    end_folder();
}

/* It ends with a thread in the library. */
static void test_abandoned(void)
{
    in_a_process(abandon);
}

/* ---- what stands still holds up nothing else ---- */

/* What is with the library holds only the spans it touches, however many they are. */
static void test_revoked_beside_rows(void)
{
    enum { ROWS = 512, OPS = 20, SPANS = 1000 };
    static uint64_t offsets[ROWS], spans[2 * SPANS];
    pair_t p;
    open_up(&p, patient_config("rows-a"));
    for (uint64_t i = 0; i < ROWS; i++)
        offsets[i] = i * 128;
    for (uint64_t i = 0; i < SPANS; i++) {
        spans[2 * i] = NBYTES / 2 + i * 128;
        spans[2 * i + 1] = 64;
    }
    hx_segment_t seg = {.local = p.local,
                        .remote = p.t,
                        .rkey = hx_rregion_rkey(p.t),
                        .local_off = offsets,
                        .remote_off = offsets,
                        .each = 64,
                        .n = ROWS};
    uint64_t posts = stat_of("posts"), disconnects = stat_of("disconnects");
    knob("hang_device", "1");
    for (uint64_t i = 0; i < OPS; i++)
        CHECK_EQ(post_rows(&p.a, p.a.ep, HX_WRITE, 10 + i, HX_EPOCH_NOW, &seg, 1, NULL, NULL), HX_OK);
    SOON(stat_of("posts") > posts);
    CHECK_EQ(take_back(&p, spans, SPANS, 3), HX_OK);
    for (uint64_t i = 0; i < OPS; i++)
        CHECK_EQ(atomic_load(&p.a.of[10 + i].finals), 0);
    CHECK_EQ(stat_of("disconnects"), disconnects);
    knob("hang_device", "0");
    for (uint64_t i = 0; i < OPS; i++)
        WAIT_FINAL(&p.a, 10 + i, HX_OK);
    close_down(&p);
}

/* Another peer of a's. */
typedef struct {
    side_t side;
    hx_endpoint_t *ep;
    hx_region_t *target;
    hx_rregion_t *u;
} third_t;

static void bring_third(pair_t *p, third_t *c)
{
    hx_endpoint_ref(p->a.ep);
    c->ep = p->a.ep; /* b's, until c is there */
    open_hixl(&c->side, "fault-c", 1);
    link_up(&p->a, &c->side);
    hx_endpoint_t *b = c->ep;
    c->ep = p->a.ep;
    p->a.ep = b;
    c->target = lend_and_wait(&c->side, there + NBYTES, NBYTES, "u");
    WAIT(remote(&p->a, "u") != NULL);
    c->u = remote(&p->a, "u");
    write_once(&p->a, c->ep, 5, p->local, c->u);
    WAIT_FINAL(&p->a, 5, HX_OK);
}

static void dismiss(third_t *c)
{
    hx_endpoint_unref(c->ep);
    hx_region_unref(c->target);
    side_close(&c->side);
}

/* A registration is taken back while one peer's post stands in the library: the other peers go on meanwhile, and it is
 * taken back when that is possible. */
static void test_withdrawn_beside_stuck_post(void)
{
    pair_t p;
    third_t c;
    open_up(&p, patient_config("stuck-a"));
    bring_third(&p, &c);
    hx_region_t *other = lend_and_wait(&p.a, here + 2 * NBYTES, 4096, NULL);
    uint64_t registered = stat_of("registered"), token = 100;
    hold(&at_post, 1);
    write_once(&p.a, p.a.ep, 2, p.local, p.t);
    SOON(held(&at_post) == 1);
    hx_region_unref(other);
    double longest = 0;
    /* Long enough for many attempts to take it back. */
    for (double start = seconds(), end = start + 0.5; seconds() < end; token++) {
        start = seconds();
        write_once(&p.a, c.ep, token, p.local, c.u);
        WAIT_FINAL(&p.a, token, HX_OK);
        longest = seconds() - start > longest ? seconds() - start : longest;
    }
    CHECK(longest < PATIENCE / 10); /* each attempt holds everybody up, for a tenth of a second */
    CHECK_EQ(stat_of("registered"), registered);
    CHECK_EQ(atomic_load(&p.a.of[2].finals), 0);
    let(&at_post);
    WAIT_FINAL(&p.a, 2, HX_OK);
    SOON(stat_of("registered") == registered - 1);
    dismiss(&c);
    close_down(&p);
}

/* Writes that follow each other so closely that their link is never empty. */
typedef struct {
    side_t *side;
    hx_endpoint_t *ep;
    hx_region_t *local;
    hx_rregion_t *target;
    uint64_t posted, ended;
} load_t;

enum { LOAD_DEPTH = 16, LOAD_TOKEN = 10000, LOAD_LIMIT = 1500, OVERTAKEN = 10 * LOAD_DEPTH };

static void carry_on(load_t *l)
{
    pump_all(1);
    while (l->ended < l->posted && atomic_load(&l->side->of[LOAD_TOKEN + l->ended].finals)) {
        CHECK_EQ(l->side->of[LOAD_TOKEN + l->ended].status, HX_OK);
        l->ended++;
    }
    if (l->posted - l->ended < LOAD_DEPTH) /* one at a time: they are to end one at a time, too */
        write_once(l->side, l->ep, LOAD_TOKEN + l->posted++, l->local, l->target);
}

/* The load goes on until the operation has ended, or far too many have overtaken it. */
static void under_load(load_t *l, uint64_t token, uint32_t status)
{
    uint64_t limit = l->ended + OVERTAKEN;
    while (!atomic_load(&l->side->of[token].finals) && l->ended < limit)
        carry_on(l);
    CHECK_EQ(atomic_load(&l->side->of[token].finals), 1);
    CHECK_EQ(l->side->of[token].status, status);
}

static void end_load(load_t *l)
{
    for (; l->ended < l->posted; l->ended++)
        WAIT_FINAL(l->side, LOAD_TOKEN + l->ended, HX_OK);
}

/* Memory that the peer registers after Connect needs a new link: a busy old one runs empty for it. */
static void test_late_memory_under_load(void)
{
    pair_t p;
    open_up(&p, hixl_config("late-a"));
    load_t load = {.side = &p.a, .ep = p.a.ep, .local = p.local, .target = p.t};
    knob("latency_us", "20000");
    while (load.ended < LOAD_DEPTH)
        carry_on(&load);
    hx_region_t *late = lend(&p.b, there + 2 * NBYTES, 4096, HX_ACCESS_READ | HX_ACCESS_WRITE, "late");
    while (!remote(&p.a, "late") && load.ended < LOAD_LIMIT)
        carry_on(&load);
    if (CHECK(remote(&p.a, "late") != NULL)) {
        write_once(&p.a, p.a.ep, 2, p.local, remote(&p.a, "late"));
        under_load(&load, 2, HX_OK);
    }
    end_load(&load);
    hx_region_unref(late);
    close_down(&p);
}

/* The library serves so many peers at a time (hixl engines with endpoints on the device): that is back-pressure, and one
 * busy peer does not keep its place for ever. */
static void test_more_peers_than_places(void)
{
    pair_t p;
    third_t c;
    open_up(&p, hixl_config("many-a"));
    bring_third(&p, &c);
    load_t load = {.side = &p.a, .ep = p.a.ep, .local = p.local, .target = p.t};
    knob("max_peers_outstanding", "1");
    knob("latency_us", "20000");
    while (load.ended < LOAD_DEPTH)
        carry_on(&load);
    write_once(&p.a, c.ep, 2, p.local, c.u);
    under_load(&load, 2, HX_OK);
    end_load(&load);
    dismiss(&c);
    close_down(&p);
}

/* The place of a peer that stands still is free when what stands still was cancelled. */
static void test_place_of_a_stuck_peer(void)
{
    pair_t p;
    third_t c;
    uint64_t handle;
    open_up(&p, patient_config("place-a"));
    bring_third(&p, &c);
    knob("max_peers_outstanding", "1");
    knob("wait_forever_nth", "0");
    CHECK_EQ(post_one(&p.a, HX_WRITE, 2, p.local, 0, p.t, 0, 64, &handle), HX_OK);
    uint64_t posts = stat_of("posts");
    SOON(stat_of("outstanding") == 1);
    write_once(&p.a, c.ep, 3, p.local, c.u);
    SOON(stat_of("posts") > posts + 2); /* refused, and asked for again */
    CHECK_EQ(atomic_load(&p.a.of[3].finals), 0);
    hx_cancel(p.a.engine, handle);
    WAIT_FINAL(&p.a, 2, HX_ERR_CANCELLED);
    WAIT_FINAL(&p.a, 3, HX_OK);
    dismiss(&c);
    close_down(&p);
}

/* To take one operation back, the link comes down under all of them, again and again: the others are posted again each time
 * and do not suffer for it. */
static void test_bystander_of_cancels(void)
{
    pair_t p;
    hx_config_t config = patient_config("by-a");
    config.cancel_grace_ns = 20 * MS;
    open_up(&p, config);
    knob("hang_device", "1");
    write_once(&p.a, p.a.ep, 2, p.local, p.t);
    uint64_t disconnects = stat_of("disconnects");
    enum { CANCELS = 6 };
    for (uint64_t i = 0; i < CANCELS; i++) {
        uint64_t handle;
        CHECK_EQ(post_one(&p.a, HX_WRITE, 10 + i, p.local, 0, p.t, 128, 64, &handle), HX_OK);
        SOON(stat_of("outstanding") == 2);
        hx_cancel(p.a.engine, handle);
        WAIT_FINAL(&p.a, 10 + i, HX_ERR_CANCELLED);
    }
    CHECK_EQ(atomic_load(&p.a.of[2].finals), 0);
    CHECK_EQ(stat_of("disconnects"), disconnects + CANCELS);
    knob("hang_device", "0");
    WAIT_FINAL(&p.a, 2, HX_OK);
    close_down(&p);
}

/* ---- a peer's end ---- */

/* A control thread that has nothing to do goes round. */
static void nudge(side_t *s)
{
    CHECK_EQ(hx_supersede(s->engine, "nobody", 1), HX_OK);
    pump_all(5);
}

/* A handle outlives the peer, and can still be asked. */
static void test_handle_outlives_peer(void)
{
    side_t a, b;
    open_pair(&a, &b);
    CHECK_EQ(atomic_load(&names), 2); /* each other's */
    side_close(&b);
    WAIT(a.lost == 1);
    for (int i = 0; i < 60; i++) { /* a few times as long as between two looks at peers that are gone */
        nudge(&a);
        CHECK(!strcmp(hx_endpoint_link(a.ep), "auto"));
    }
    CHECK_EQ(atomic_load(&names), 1);
    hx_endpoint_unref(a.ep);
    a.ep = NULL;
    SOON((nudge(&a), atomic_load(&names) == 0));
    side_close(&a);
}

/* While Disconnect fails, it is tried again, at its own pace. */
static void test_disconnect_that_fails(void)
{
    pair_t p;
    open_up(&p, hixl_config("disc-a"));
    atomic_store(&stuck_code, HX_HIXL_FAILED);
    atomic_store(&stuck_disconnects, 0);
    hx_region_unref(p.target);
    side_close(&p.b);
    WAIT(p.a.lost == 1);
    double since = seconds();
    SOON(atomic_load(&stuck_disconnects) >= 4);
    /* One in 50 ms, and one at once; a loop without a pause makes a thousand times as many. */
    CHECK(atomic_load(&stuck_disconnects) <= 2 + (seconds() - since) / 0.010);
    CHECK_EQ(stat_of("links"), 1);
    atomic_store(&stuck_code, 0);
    SOON(stat_of("links") == 0);
    hx_region_unref(p.local);
    side_close(&p.a);
}

/* ---- fork ---- */

static hx_hixl_t *hixl_of(const side_t *s)
{
    for (size_t i = 0; i < hx_provider_count(); i++)
        if (!strcmp(hx_provider_name(i), "hixl"))
            return s->engine->provider_state[i];
    return NULL;
}

/* A lock that some thread had at the fork is never free in the child: nothing there waits for it. */
static void test_forked_under_lock(void)
{
    pair_t p;
    open_up(&p, hixl_config("fork-a"));
    hx_hixl_t *h = hixl_of(&p.a);
    knob("hang_device", "1");
    uint64_t handle, disconnects = stat_of("disconnects");
    CHECK_EQ(post_one(&p.a, HX_WRITE, 2, p.local, 0, p.t, 0, 64, &handle), HX_OK);
    hx_engine_before_fork(p.a.engine);
    pthread_mutex_lock(&h->mu);
    pid_t pid = fork();
    if (!pid) {
        alarm(PATIENCE);
        hx_engine_forked(p.a.engine);
        hx_cancel(p.a.engine, handle);
        hx_engine_expect_notifies(p.a.engine, 1);
        bool refused = hx_region_copy(p.local, 0, here, 64, true, 3) != HX_OK;
        hx_region_unref(p.local);
        hx_rregion_unref(p.t);
        hx_endpoint_unref(p.a.ep);
        hx_engine_stop(p.a.engine);
        hx_engine_free(p.a.engine);
        _exit(refused ? 0 : 3);
    }
    pthread_mutex_unlock(&h->mu);
    hx_engine_after_fork(p.a.engine);
    int status = 0;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_EQ(stat_of("disconnects"), disconnects);
    knob("hang_device", "0");
    WAIT_FINAL(&p.a, 2, HX_OK);
    close_down(&p);
}

int main(void)
{
    enum { DEVICE = 1, HOST = 2, HIXL_DEVICE = 4, ALL = DEVICE | HOST };
    /* Where TransferAsync blocks until the bytes have landed (on the host), some of it cannot happen. */
    static const struct {
        const char *name;
        void (*run)(void);
        unsigned where;
    } cases[] = {
        /* first: a process that has had threads cannot be forked into one that has, under TSan */
        {"abandoned", test_abandoned, ALL},
        {"failed post that had begun", test_failed_post_that_had_begun, DEVICE},
        {"revoked with an empty span", test_revoked_with_empty_span, DEVICE},
        {"nothing after goodbye", test_nothing_after_goodbye, DEVICE},
        {"revoked beside rows", test_revoked_beside_rows, ALL},
        {"withdrawn beside a stuck post", test_withdrawn_beside_stuck_post, ALL},
        {"late memory under load", test_late_memory_under_load, ALL},
        {"more peers than places", test_more_peers_than_places, HIXL_DEVICE},
        {"place of a stuck peer", test_place_of_a_stuck_peer, HIXL_DEVICE},
        {"bystander of cancels", test_bystander_of_cancels, DEVICE},
        {"handle outlives peer", test_handle_outlives_peer, ALL},
        {"disconnect that fails", test_disconnect_that_fails, ALL},
        {"forked under lock", test_forked_under_lock, ALL},
    };
    next_sendmsg = (ssize_t (*)(int, const struct msghdr *, int))dlsym(RTLD_NEXT, "sendmsg");
    bool ready = begin_double();
    for (size_t i = 0; ready && i < sizeof cases / sizeof cases[0]; i++)
        for (size_t k = 0; k < FLAVOURS; k++) {
            const flavour_t *f = &flavours[k];
            unsigned here_it_is = on_host(f) ? HOST : strcmp(f->engine, "hixl") ? DEVICE : DEVICE | HIXL_DEVICE;
            if (!(cases[i].where & here_it_is))
                continue;
            int before = atomic_load(&failures);
            double start = seconds();
            be(f);
            cases[i].run();
            if (atomic_load(&failures) > before)
                fprintf(stderr, "  in case: %s, %s engine, endpoints on the %s\n", cases[i].name, f->engine,
                        f->placement);
            if (getenv("TEST_TIMES"))
                fprintf(stderr, "%-32s %-5s %-7s %.2f s\n", cases[i].name, f->engine, f->placement, seconds() - start);
        }
    return end_hixl("test_hixl_faults");
}
