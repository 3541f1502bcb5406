/* SPDX-License-Identifier: Apache-2.0 */
/* Two engines in one process, through hx.h only. A post that fails has no completion; one that succeeds has exactly
 * one: pair.h checks it at every record, and side_close at the end. */
#include <sched.h>
#include <sys/resource.h>

#include "pair.h"

enum { RW = HX_ACCESS_READ | HX_ACCESS_WRITE, MB = 1 << 20 };
#define MS 1000000ull

static side_t a, b;

static void open_pair(hx_config_t *ca, hx_config_t *cb)
{
    hx_config_t da = config_of("alice"), db = config_of("bob");
    side_open(&a, ca ? ca : &da);
    side_open(&b, cb ? cb : &db);
}

static hx_segment_t rows(hx_region_t *local, hx_rregion_t *rregion, const uint64_t *local_off,
                         const uint64_t *remote_off, const uint64_t *nbytes, size_t n)
{
    return (hx_segment_t){.local = local,
                          .remote = rregion,
                          .rkey = hx_rregion_rkey(rregion),
                          .local_off = local_off,
                          .remote_off = remote_off,
                          .nbytes = nbytes,
                          .n = n};
}

static hx_status_t post(uint32_t kind, uint64_t token, const hx_segment_t *segments, size_t n)
{
    return post_rows(&a, a.ep, kind, token, HX_EPOCH_NOW, segments, n, NULL, NULL);
}

static uint64_t completed(uint64_t first, uint64_t n)
{
    uint64_t count = 0;
    for (uint64_t i = first; i < first + n; i++)
        count += atomic_load(&a.of[i].finals);
    return count;
}

/* ---- opening ---- */

static void refused_config(hx_config_t c)
{
    hx_engine_t *engine = NULL;
    char text[HX_TEXT_MAX];
    CHECK_EQ(hx_engine_open(&c, &engine, text), HX_ERR_CONFIG);
    CHECK(engine == NULL && text[0]);
}

static void test_open(void)
{
    census_t before = census();
    hx_engine_t *engine = NULL;
    char text[HX_TEXT_MAX], name[HX_NAME_MAX + 2];
    hx_config_t c = config_of("x");
    memset(name, 'n', sizeof name);
    name[sizeof name - 1] = 0;

#define BAD(field, value)    \
    do {                     \
        hx_config_t bad = c; \
        bad.field = value;   \
        refused_config(bad); \
    } while (0)
    BAD(name, NULL);
    BAD(name, "");
    BAD(name, name);
    BAD(copy_threads, 0);
    BAD(copy_threads, 17);
    BAD(queue_depth, 0);
    BAD(queue_depth, 1);
    BAD(queue_depth, 48);
    BAD(peer_depth, 0);
    BAD(chunk, 0);
    BAD(stall_timeout_ns, UINT64_MAX);
#undef BAD

    c.unix_path = "/nonexistent/folder/socket";
    CHECK_EQ(hx_engine_open(&c, &engine, text), HX_ERR_SYSTEM);
    CHECK(text[0]);
    char longer[300];
    memset(longer, 'p', sizeof longer);
    longer[sizeof longer - 1] = 0;
    c.unix_path = longer;
    CHECK_EQ(hx_engine_open(&c, &engine, text), HX_ERR_SYSTEM);
    c.unix_path = NULL;
    c.tcp_host = "not an address";
    CHECK_EQ(hx_engine_open(&c, &engine, text), HX_ERR_SYSTEM);

    /* Out of descriptors at each of them. */
    struct rlimit limit, low;
    getrlimit(RLIMIT_NOFILE, &limit);
    c.tcp_host = "127.0.0.1";
    bool opened = false;
    for (int extra = 0; extra < 16 && !opened; extra++) {
        low = limit;
        low.rlim_cur = (rlim_t)before.descriptors - 3 + (rlim_t)extra; /* ".", ".." and the folder itself */
        setrlimit(RLIMIT_NOFILE, &low);
        hx_status_t status = hx_engine_open(&c, &engine, text);
        opened = status == HX_OK;
        setrlimit(RLIMIT_NOFILE, &limit);
        if (!opened)
            CHECK_EQ(status, HX_ERR_SYSTEM);
    }
    if (CHECK(opened)) {
        CHECK(hx_engine_tcp_port(engine) > 0);
        hx_engine_stop(engine);
        hx_engine_stop(engine); /* closing twice is closing once */
        hx_engine_close_fds(engine);
        hx_engine_free(engine);
    }
    census_unchanged(before);
}

static void test_connect_errors(void)
{
    census_t before = census();
    open_pair(NULL, NULL);
    hx_target_t t = {.path = "/nonexistent/socket", .token = 1};
    CHECK_EQ(hx_connect(a.engine, &t), HX_OK);
    WAIT(a.failed == 1);
    CHECK_EQ(a.failed_status, HX_ERR_UNREACHABLE);
    t = (hx_target_t){.path = b.path, .name = "carol"};
    CHECK_EQ(hx_connect(a.engine, &t), HX_OK);
    WAIT(a.failed == 2 && b.refused == 1);
    CHECK_EQ(a.failed_status, HX_ERR_MISMATCH);
    uint8_t other[HX_INCARNATION_LEN] = {9};
    t = (hx_target_t){.path = b.path, .incarnation = other};
    CHECK_EQ(hx_connect(a.engine, &t), HX_OK);
    WAIT(a.failed == 3 && b.refused == 2);
    CHECK_EQ(a.failed_status, HX_ERR_STALE);
    t = (hx_target_t){.path = a.path}; /* itself */
    CHECK_EQ(hx_connect(a.engine, &t), HX_OK);
    WAIT(a.failed == 4 && a.refused == 1);
    t = (hx_target_t){.tcp_host = "127.0.0.1", .tcp_port = 1};
    CHECK_EQ(hx_connect(a.engine, &t), HX_OK);
    WAIT(a.failed == 5);
    t = (hx_target_t){.tcp_host = "example.org", .tcp_port = 1}; /* names are resolved elsewhere */
    CHECK_EQ(hx_connect(a.engine, &t), HX_OK);
    WAIT(a.failed == 6);
    t = (hx_target_t){0};
    CHECK_EQ(hx_connect(a.engine, &t), HX_ERR_CONFIG);

    /* A secret on one side, then different ones. */
    hx_config_t cc = config_of("carol"), cd = config_of("dave");
    side_t c, d;
    cc.secret = "one";
    cc.secret_len = 3;
    cd.secret = "two";
    cd.secret_len = 3;
    side_open(&c, &cc);
    side_open(&d, &cd);
    CHECK_EQ(dial(&a, &c, 0), HX_OK);
    WAIT(a.failed == 7 && c.refused == 1);
    CHECK_EQ(a.failed_status, HX_ERR_AUTH);
    CHECK_EQ(dial(&c, &d, 0), HX_OK);
    WAIT(c.failed == 1 && d.refused == 1);
    CHECK_EQ(c.failed_status, HX_ERR_AUTH);
    CHECK_EQ(d.refused_status, HX_ERR_AUTH);

    /* After all that, a good one; then an older incarnation of its name. */
    hx_engine_set_epoch(b.engine, 5);
    link_up(&a, &b);
    CHECK(!strcmp(hx_endpoint_name(a.ep), "bob") && hx_endpoint_peer_epoch(a.ep) == 5);
    CHECK_EQ(hx_supersede(a.engine, "bob", 5), HX_OK);
    CHECK_EQ(hx_supersede(a.engine, "bob", 6), HX_OK);
    WAIT(a.lost == 1 && b.lost == 1);
    CHECK_EQ(dial(&a, &b, 0), HX_OK);
    WAIT(a.failed == 8);
    CHECK_EQ(a.failed_status, HX_ERR_STALE);
    side_close(&a);
    side_close(&b);
    side_close(&c);
    side_close(&d);
    census_unchanged(before);
}

/* ---- moving bytes ---- */

static void test_transfers(void)
{
    census_t before = census();
    open_pair(NULL, NULL);
    uint8_t *lent_a = malloc(MB), *lent_b = malloc(MB);
    hx_region_t *ours[2] = {allocate(&a, MB, RW, NULL), lend(&a, lent_a, MB, RW, NULL)};
    hx_region_t *theirs[2] = {allocate(&b, MB, RW, "mem"), lend(&b, lent_b, MB, RW, "lent")};
    link_up(&a, &b);
    WAIT(a.nremote == 2);
    hx_rregion_t *targets[2] = {remote(&a, "mem"), remote(&a, "lent")};
    uint64_t token = 1;
    for (int i = 0; i < 4; i++) {
        hx_region_t *local = ours[i / 2], *owner = theirs[i % 2];
        hx_rregion_t *target = targets[i % 2];
        uint8_t *x = hx_region_addr(local), *y = hx_region_addr(owner);
        const char *provider = NULL;
        char text[HX_TEXT_MAX];
        CHECK_EQ(hx_endpoint_route(a.ep, local, target, &provider, text), HX_OK);
        CHECK(provider && !strcmp(provider, "shm"));
        fill(x, MB, token);
        memset(y, 0, MB);
        CHECK_EQ(post_one(&a, HX_WRITE, token, local, 0, target, 0, MB, NULL), HX_OK);
        WAIT_FINAL(&a, token, HX_OK);
        CHECK(!memcmp(x, y, MB));
        token++;
        fill(y, MB, token);
        CHECK_EQ(post_one(&a, HX_READ, token, local, 1, target, 3, MB - 3, NULL), HX_OK);
        WAIT_FINAL(&a, token, HX_OK);
        CHECK(!memcmp(x + 1, y + 3, MB - 3));
        token++;

        /* Rows of odd sizes at odd places, backwards, some of them empty, in two segments. */
        enum { ROWS = 700 };
        static uint64_t lo[2 * ROWS], ro[2 * ROWS], n[2 * ROWS], at_l, at_r, total;
        uint64_t random = 1 + (uint64_t)i;
        at_l = at_r = total = 0;
        for (size_t r = 2 * ROWS; r-- > 0;) {
            n[r] = draw_below(&random, 5) ? draw_below(&random, 600) : 0;
            lo[r] = at_l + draw_below(&random, 7);
            ro[r] = at_r + draw_below(&random, 9);
            at_l = lo[r] + n[r];
            at_r = ro[r] + n[r];
            total += n[r];
        }
        CHECK(at_l < MB && at_r < MB);
        fill(x, MB, 77 + token);
        memset(y, 0xee, MB);
        hx_segment_t segments[2] = {rows(local, target, lo, ro, n, ROWS),
                                    rows(local, target, lo + ROWS, ro + ROWS, n + ROWS, ROWS)};
        CHECK_EQ(post(HX_WRITE, token, segments, 2), HX_OK);
        WAIT_FINAL(&a, token, HX_OK);
        CHECK_EQ(a.of[token].nbytes, total);
        uint64_t same = 0;
        for (size_t r = 0; r < 2 * ROWS; r++)
            if (n[r])
                same += memcmp(x + lo[r], y + ro[r], n[r]) == 0 ? n[r] : 0;
        CHECK_EQ(same, total);
        uint64_t touched = 0; /* at most what was asked for: the rest is as it was */
        for (size_t k = 0; k < MB; k++)
            touched += y[k] != 0xee;
        CHECK(touched <= total);
        token++;
    }
    /* Nothing at all, in three ways. */
    uint64_t zero = 0;
    hx_segment_t none = rows(ours[0], targets[0], NULL, NULL, NULL, 0),
                 empty = rows(ours[0], targets[0], &zero, &zero, &zero, 1);
    for (int i = 0; i < 3; i++, token++) {
        CHECK_EQ(post(HX_WRITE, token, i ? (i == 1 ? &none : &empty) : NULL, i ? 1 : 0), HX_OK);
        WAIT_FINAL(&a, token, HX_OK);
    }
    /* Small ones between populated mappings are done inside the call. */
    hx_stats_t stats = {0};
    for (; !stats.inlined && token < 5000; token++) {
        CHECK_EQ(post_one(&a, HX_WRITE, token, ours[0], 0, targets[0], 0, 64, NULL), HX_OK);
        WAIT_FINAL(&a, token, HX_OK);
        hx_engine_stats(a.engine, &stats);
    }
    CHECK(stats.inlined > 0);
    uint8_t *x = hx_region_addr(ours[0]), *y = hx_region_addr(theirs[0]);
    fill(x, 64, 9);
    CHECK_EQ(post_one(&a, HX_WRITE, token, ours[0], 0, targets[0], 100, 64, NULL), HX_OK);
    WAIT_FINAL(&a, token, HX_OK);
    CHECK(!memcmp(x, y + 100, 64));

    for (int i = 0; i < 2; i++) {
        hx_region_unref(ours[i]);
        CHECK_EQ(hx_region_deregister(theirs[i], (uint64_t)i), HX_OK);
        WAIT(b.done[i].count == 1);
        hx_region_unref(theirs[i]);
    }
    side_close(&a);
    side_close(&b);
    free(lent_a);
    free(lent_b);
    census_unchanged(before);
}

static void test_bad_rows(void)
{
    census_t before = census();
    open_pair(NULL, NULL);
    hx_region_t *x = allocate(&a, 4096, RW, NULL), *y = allocate(&b, 4096, RW, "mem"),
                *ro = allocate(&b, 64, HX_ACCESS_READ, "ro");
    hx_region_t *layout, *view, *wrong;
    CHECK_EQ(hx_region_layout(b.engine, &layout), HX_OK);
    CHECK_EQ(hx_region_announce(layout, "layout", 6, "{}", 2), HX_OK);
    CHECK_EQ(hx_region_announce(layout, "again", 5, NULL, 0), HX_ERR_CONFIG);
    CHECK_EQ(hx_region_view(y, 4000, 97, RW, &view), HX_ERR_BOUNDS);
    CHECK_EQ(hx_region_view(y, 4097, 1, RW, &view), HX_ERR_BOUNDS);
    CHECK_EQ(hx_region_view(y, 0, 0, RW, &view), HX_ERR_BOUNDS);
    CHECK_EQ(hx_region_view(y, 1000, 96, RW, &view), HX_OK);
    CHECK_EQ(hx_region_announce(view, "view", 4, NULL, 0), HX_OK);
    CHECK_EQ(hx_region_allocate(a.engine, 0, RW, &wrong), HX_ERR_CONFIG);
    CHECK_EQ(hx_region_register(a.engine, NULL, 1, RW, &wrong), HX_ERR_CONFIG);
    CHECK_EQ(hx_region_register(a.engine, (void *)(UINTPTR_MAX - 10), 100, RW, &wrong), HX_ERR_CONFIG);
    link_up(&a, &b);
    WAIT(a.nremote == 4);
    hx_rregion_t *mem = remote(&a, "mem");
    memset(hx_region_addr(y), 7, 4096);

    uint64_t lo[4] = {0, 10, 20, 30}, off[4] = {0, 10, 20, 30}, n[4] = {10, 10, 10, 10}, index;
    static const struct {
        size_t row;
        uint64_t lo, ro, n;
    } outside[] = {
        {3, 4087, 0, 10},      {0, 0, 4087, 10},    {1, 4097, 0, 0}, {2, 0, UINT64_MAX, 1},     {2, UINT64_MAX, 0, 2},
        {3, 0, 0, UINT64_MAX}, {0, 4000, 4000, 97}, {1, 1, 0, 4096}, {2, 0, 1, UINT64_MAX - 1},
    };
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) {
        uint64_t l[4], r[4], k[4];
        memcpy(l, lo, sizeof l), memcpy(r, off, sizeof r), memcpy(k, n, sizeof k);
        l[outside[i].row] = outside[i].lo, r[outside[i].row] = outside[i].ro, k[outside[i].row] = outside[i].n;
        hx_segment_t segments[2] = {rows(x, mem, lo, off, n, 4), rows(x, mem, l, r, k, 4)};
        CHECK_EQ(post_rows(&a, a.ep, HX_WRITE, 1, HX_EPOCH_NOW, segments, 2, NULL, &index), HX_ERR_BOUNDS);
        CHECK_EQ(index, 4 + outside[i].row);
    }
    hx_segment_t seg = rows(x, mem, lo, off, n, 4);
    seg.rkey ^= 1;
    CHECK_EQ(post(HX_WRITE, 1, &seg, 1), HX_ERR_REMOTE_ACCESS);
    seg = rows(x, remote(&a, "ro"), lo, off, n, 4);
    CHECK_EQ(post(HX_WRITE, 1, &seg, 1), HX_ERR_REMOTE_ACCESS);
    uint64_t zero = 0;
    seg = rows(x, remote(&a, "layout"), &zero, &zero, &zero, 1);
    CHECK_EQ(post(HX_READ, 1, &seg, 1), HX_ERR_NO_PATH);
    seg = rows(y, mem, lo, off, n, 4); /* another engine's memory as ours */
    CHECK_EQ(post(HX_WRITE, 1, &seg, 1), HX_ERR_REGION_CLOSED);
    seg = rows(y, mem, lo, off, n, 4); /* another engine's view of the peer */
    CHECK_EQ(post_rows(&b, b.ep, HX_WRITE, 1, HX_EPOCH_NOW, &seg, 1, NULL, NULL), HX_ERR_REMOTE_ACCESS);
    char note[HX_NOTE_MAX + 1] = {0};
    hx_post_t big = {.kind = HX_NOTE, .token = 1, .has_note = true, .note = note, .note_len = sizeof note};
    uint64_t handle;
    bool done;
    CHECK_EQ(hx_post(a.ep, &big, &handle, &index, &done), HX_ERR_CONFIG);
    for (size_t i = 0; i < 4096; i++)
        if (((uint8_t *)hx_region_addr(y))[i] != 7) {
            CHECK(!"a refused call moved bytes");
            break;
        }

    /* Overlap is found before a byte moves, and names the later row; for a read it is the local side that counts. */
    uint64_t over[4] = {100, 120, 109, 140};
    seg = rows(x, mem, lo, over, n, 4);
    CHECK_EQ(post(HX_WRITE, 2, &seg, 1), HX_OK);
    WAIT_FINAL(&a, 2, HX_ERR_OVERLAP);
    CHECK_EQ(a.of[2].index, 2);
    CHECK_EQ(a.of[2].nbytes, 0);
    CHECK_EQ(post(HX_READ, 3, &seg, 1), HX_OK);
    WAIT_FINAL(&a, 3, HX_OK);
    seg = rows(x, mem, over, lo, n, 4);
    CHECK_EQ(post(HX_READ, 4, &seg, 1), HX_OK);
    WAIT_FINAL(&a, 4, HX_ERR_OVERLAP);
    CHECK_EQ(post(HX_WRITE, 5, &seg, 1), HX_OK);
    WAIT_FINAL(&a, 5, HX_OK);
    uint64_t twice[2] = {0, 0}, none[2] = {0, 0};
    seg = rows(x, mem, twice, twice, none, 2);
    CHECK_EQ(post(HX_WRITE, 6, &seg, 1), HX_OK);
    WAIT_FINAL(&a, 6, HX_OK);

    /* The view lands inside its parent. */
    fill(hx_region_addr(x), 96, 4);
    CHECK_EQ(post_one(&a, HX_WRITE, 7, x, 0, remote(&a, "view"), 0, 96, NULL), HX_OK);
    WAIT_FINAL(&a, 7, HX_OK);
    CHECK(!memcmp(hx_region_addr(x), (uint8_t *)hx_region_addr(y) + 1000, 96));

    hx_region_unref(x);
    hx_region_t *mine[] = {view, y, ro, layout};
    for (uint64_t i = 0; i < 4; i++) {
        CHECK_EQ(hx_region_deregister(mine[i], i), HX_OK);
        WAIT(b.done[i].count == 1);
        hx_region_unref(mine[i]);
    }
    WAIT(a.deleted == 4);
    side_close(&a);
    side_close(&b);
    census_unchanged(before);
}

/* Views are settled once, whether they are made before, while or after their parent becomes usable. */
static void test_views(void)
{
    census_t before = census();
    open_pair(NULL, NULL);
    enum { PARENTS = 60, VIEWS = 6 };
    static hx_region_t *parents[PARENTS], *views[PARENTS][VIEWS];
    for (int i = 0; i < PARENTS; i++) {
        CHECK_EQ(hx_region_allocate(a.engine, 64 << 10, RW, &parents[i]), HX_OK);
        for (int k = 0; k < VIEWS; k++)
            CHECK_EQ(hx_region_view(parents[i], (uint64_t)k * 100, 100, RW, &views[i][k]), HX_OK);
    }
    WAIT(a.usable >= PARENTS * (1 + VIEWS));
    hx_region_t *late = allocate(&a, 1, RW, NULL); /* queued behind them all */
    CHECK_EQ(a.usable, PARENTS * (1 + VIEWS) + 1);
    hx_region_unref(late);
    for (int i = 0; i < PARENTS; i++) {
        hx_region_unref(parents[i]); /* its views keep the memory */
        memset(hx_region_addr(views[i][5]), 1, 100);
        for (int k = 0; k < VIEWS; k++)
            hx_region_unref(views[i][k]);
    }
    side_close(&a);
    side_close(&b);
    census_unchanged(before);
}

/* ---- notes ---- */

static void test_notes(void)
{
    census_t before = census();
    open_pair(NULL, NULL);
    hx_region_t *x = allocate(&a, MB, RW, NULL), *y = allocate(&b, MB, RW, "mem");
    link_up(&a, &b);
    WAIT(a.nremote == 1);
    hx_rregion_t *mem = remote(&a, "mem");
    uint64_t zero = 0, all = MB;
    hx_segment_t seg = rows(x, mem, &zero, &zero, &all, 1);
    for (uint64_t i = 0; i < 20; i++) { /* each after its bytes */
        memset(hx_region_addr(x), (int)i + 1, MB);
        CHECK_EQ(post_note(&a, i, "bytes", &seg, 1, NULL), HX_OK);
        WAIT(b.nnotes == i + 1);
        CHECK(((uint8_t *)hx_region_addr(y))[0] == i + 1 && ((uint8_t *)hx_region_addr(y))[MB - 1] == i + 1);
        CHECK(b.notes[i].topic_len == 1 && b.notes[i].topic[0] == 't' && b.notes[i].len == 5);
        WAIT_FINAL(&a, i, HX_OK);
    }
    /* Nobody takes them: the window fills and the sender waits; a cancelled one is told as aborted, or not at all. */
    b.keep_notes = true;
    uint64_t handles[100];
    for (uint64_t i = 0; i < 100; i++) {
        char text[16];
        snprintf(text, sizeof text, "%llu", (unsigned long long)i);
        for (uint64_t k = 0; k < 3; k++)
            CHECK_EQ(post_note(&a, 100 + 3 * i + k, text, NULL, 0, k == 2 ? &handles[i] : NULL), HX_OK);
        if (i % 20 == 19)
            WAIT(b.nnotes >= 20 + (3 * i < 240 ? 3 * i : 240));
    }
    WAIT(b.nnotes == 20 + 256);
    WAIT(completed(100, 300) == 256);
    CHECK_EQ(hx_endpoint_inflight(a.ep), 44);
    hx_cancel(a.engine, handles[99]);
    WAIT_FINAL(&a, 100 + 299, HX_ERR_CANCELLED);
    b.keep_notes = false;
    CHECK_EQ(hx_endpoint_credit(b.ep, 256), HX_OK);
    WAIT(b.nnotes == 20 + 300);
    for (uint64_t i = 0; i < 299; i++)
        WAIT_FINAL(&a, 100 + i, HX_OK);
    CHECK_EQ(b.notes[319].flags, 1);
    for (uint64_t i = 0; i < 100; i++) /* in order */
        CHECK_EQ(atoi(b.notes[20 + 3 * i].payload), i);
    hx_region_unref(x);
    CHECK_EQ(hx_region_deregister(y, 0), HX_OK);
    WAIT(b.done[0].count == 1);
    hx_region_unref(y);
    side_close(&a);
    side_close(&b);
    census_unchanged(before);
}

/* ---- misfortunes ---- */

static void test_faults(void)
{
    census_t before = census();
    hx_config_t ca = config_of("alice");
    static const hx_fault_t plan[] = {
        {.nth = 0, .action = HX_FAULT_DELAY, .delay_ns = 20 * MS},
        {.nth = 1, .action = HX_FAULT_FAIL, .status = HX_ERR_FAULT},
        {.nth = 2, .action = HX_FAULT_STALL},
        {.nth = 3, .action = HX_FAULT_WEDGE, .delay_ns = 300 * MS},
        {.nth = 4, .action = HX_FAULT_STALL}, /* nobody cancels it: stall_timeout does */
        {.nth = 5, .action = HX_FAULT_WEDGE, .delay_ns = 300 * MS},
        {.nth = 6, .action = HX_FAULT_WEDGE, .delay_ns = 60000 * MS},
        {.nth = 7, .action = HX_FAULT_STALL},
    };
    ca.faults = plan;
    ca.nfaults = sizeof plan / sizeof *plan;
    ca.cancel_grace_ns = 50 * MS;
    ca.stall_timeout_ns = 400 * MS;
    open_pair(&ca, NULL);
    hx_region_t *x = allocate(&a, 4096, RW, NULL), *y = allocate(&b, 4096, RW, "mem");
    link_up(&a, &b);
    WAIT(a.nremote == 1);
    hx_rregion_t *mem = remote(&a, "mem");
    uint64_t handle, n = 4096, zero = 0;

    fill(hx_region_addr(x), 4096, 3);
    CHECK_EQ(post_one(&a, HX_WRITE, 0, x, 0, mem, 0, 4096, NULL), HX_OK);
    CHECK(memcmp(hx_region_addr(x), hx_region_addr(y), 4096) != 0);
    WAIT_FINAL(&a, 0, HX_OK);
    CHECK(!memcmp(hx_region_addr(x), hx_region_addr(y), 4096));

    CHECK_EQ(post_one(&a, HX_WRITE, 1, x, 0, mem, 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&a, 1, HX_ERR_FAULT);
    CHECK_EQ(a.of[1].nbytes, 0);

    CHECK_EQ(post_one(&a, HX_WRITE, 2, x, 0, mem, 0, 4096, &handle), HX_OK);
    hx_cancel(a.engine, handle);
    hx_cancel(a.engine, handle);
    WAIT_FINAL(&a, 2, HX_ERR_CANCELLED);
    CHECK_EQ(atomic_load(&a.of[2].earlies), 0);
    hx_cancel(a.engine, handle); /* of a life that is over */
    hx_cancel(a.engine, UINT64_MAX);

    /* It cannot be recalled: a first record after cancel_grace, the ordinary one when it has let go. Its note is aborted. */
    hx_segment_t seg = rows(x, mem, &zero, &zero, &n, 1);
    CHECK_EQ(post_note(&a, 3, "late", &seg, 1, &handle), HX_OK);
    hx_cancel(a.engine, handle);
    WAIT(atomic_load(&a.of[3].earlies) == 1);
    CHECK_EQ(a.of[3].early_status, HX_ERR_CANCELLED);
    CHECK_EQ(atomic_load(&a.of[3].finals), 0);
    WAIT_FINAL(&a, 3, HX_ERR_CANCELLED);
    WAIT(b.nnotes == 1);
    CHECK_EQ(b.notes[0].flags, 1);

    CHECK_EQ(post_one(&a, HX_WRITE, 4, x, 0, mem, 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&a, 4, HX_ERR_TIMEOUT);

    /* A local region that an operation still holds is answered for when it is over. */
    CHECK_EQ(post_one(&a, HX_WRITE, 5, x, 0, mem, 0, 4096, &handle), HX_OK);
    CHECK_EQ(hx_region_deregister(x, 7), HX_OK);
    CHECK_EQ(post_one(&a, HX_WRITE, 8, x, 0, mem, 0, 4096, NULL), HX_ERR_REGION_CLOSED);
    hx_cancel(a.engine, handle);
    WAIT(atomic_load(&a.of[5].earlies) == 1);
    CHECK_EQ(a.done[7].count, 0);
    WAIT(a.done[7].count == 1);
    CHECK_EQ(a.done[7].status, HX_OK);
    WAIT_FINAL(&a, 5, HX_ERR_CANCELLED);
    hx_region_unref(x);

    /* Closing ends what is wedged and what is stalled. */
    x = allocate(&a, 4096, RW, NULL);
    CHECK_EQ(post_one(&a, HX_WRITE, 6, x, 0, mem, 0, 4096, &handle), HX_OK);
    hx_cancel(a.engine, handle);
    CHECK_EQ(post_one(&a, HX_READ, 7, x, 0, mem, 0, 4096, NULL), HX_OK);
    WAIT(atomic_load(&a.of[6].earlies) == 1);
    hx_region_unref(x);
    CHECK_EQ(hx_region_deregister(y, 0), HX_OK);
    WAIT(b.done[0].count == 1);
    hx_region_unref(y);
    outcome_t *outcomes = a.of;
    hx_engine_stop(a.engine);
    pump(&a);
    CHECK_EQ(atomic_load(&outcomes[6].finals), 1);
    CHECK_EQ(atomic_load(&outcomes[7].finals), 1);
    CHECK_EQ(outcomes[7].status, HX_ERR_ABORTED);
    side_close(&a);
    side_close(&b);
    census_unchanged(before);
}

static void test_queue_full(void)
{
    census_t before = census();
    enum { DEPTH = 16 };
    static hx_fault_t plan[DEPTH];
    for (uint64_t i = 0; i < DEPTH; i++)
        plan[i] = (hx_fault_t){.nth = i, .action = HX_FAULT_STALL};
    for (int by_peer = 0; by_peer < 2; by_peer++) {
        hx_config_t ca = config_of("alice");
        ca.faults = plan;
        ca.nfaults = DEPTH;
        (by_peer ? (ca.peer_depth = DEPTH) : (ca.queue_depth = DEPTH));
        open_pair(&ca, NULL);
        hx_region_t *x = allocate(&a, 4096, RW, NULL), *y = allocate(&b, 4096, RW, "mem");
        link_up(&a, &b);
        WAIT(a.nremote == 1);
        uint64_t handles[DEPTH];
        for (uint64_t i = 0; i < DEPTH; i++)
            CHECK_EQ(post_one(&a, HX_WRITE, i, x, 0, remote(&a, "mem"), 0, 8, &handles[i]), HX_OK);
        for (int i = 0; i < 3; i++)
            CHECK_EQ(post_one(&a, HX_WRITE, 99, x, 0, remote(&a, "mem"), 0, 8, NULL), HX_ERR_QUEUE_FULL);
        CHECK_EQ(hx_endpoint_inflight(a.ep), DEPTH);
        for (uint64_t i = 0; i < DEPTH; i++)
            hx_cancel(a.engine, handles[i]);
        for (uint64_t i = 0; i < DEPTH; i++)
            WAIT_FINAL(&a, i, HX_ERR_CANCELLED);
        for (uint64_t i = DEPTH; i < 4 * DEPTH; i++) { /* none of its places is lost */
            CHECK_EQ(post_one(&a, HX_WRITE, i, x, 0, remote(&a, "mem"), 0, 8, NULL), HX_OK);
            WAIT_FINAL(&a, i, HX_OK);
        }
        CHECK_EQ(atomic_load(&a.of[99].finals), 0);
        hx_region_unref(x);
        CHECK_EQ(hx_region_deregister(y, 0), HX_OK);
        WAIT(b.done[0].count == 1);
        hx_region_unref(y);
        side_close(&a);
        side_close(&b);
    }
    census_unchanged(before);
}

/* ---- taking memory back ---- */

static void test_revocation(void)
{
    census_t before = census();
    open_pair(NULL, NULL);
    uint8_t *lent = malloc(MB);
    hx_region_t *x = allocate(&a, MB, RW, NULL);
    hx_region_t *owners[2] = {allocate(&b, MB, RW, "mem"), lend(&b, lent, MB, RW, "lent")};
    link_up(&a, &b);
    WAIT(a.nremote == 2);
    uint64_t token = 1, ticket = 0;
    for (int kind = 0; kind < 2; kind++) {
        hx_region_t *y = owners[kind];
        hx_rregion_t *target = remote(&a, kind ? "lent" : "mem");
        uint64_t span[2] = {1000, 100}, outside[2] = {0, MB + 1};
        CHECK_EQ(hx_region_revoke(y, NULL, outside, 1, 99), HX_ERR_BOUNDS);
        uint64_t old = hx_endpoint_epoch(a.ep);
        CHECK_EQ(hx_region_revoke(y, kind ? hx_endpoint_incarnation(b.ep) : NULL, span, 1, ++ticket), HX_OK);
        WAIT(b.done[ticket].count == 1);
        CHECK_EQ(b.done[ticket].status, HX_OK);
        memset(hx_region_addr(y), 0, MB);
        memset(hx_region_addr(x), 1, MB);
        /* One byte of it, all of it, and around it. */
        CHECK_EQ(post_one(&a, HX_WRITE, token, x, 0, target, 999, 2, NULL), HX_OK);
        WAIT_FINAL(&a, token, HX_ERR_REMOTE_ACCESS);
        CHECK_EQ(post_one(&a, HX_READ, ++token, x, 0, target, 1099, 1, NULL), HX_OK);
        WAIT_FINAL(&a, token, HX_ERR_REMOTE_ACCESS);
        CHECK_EQ(post_one(&a, HX_WRITE, ++token, x, 0, target, 0, 1000, NULL), HX_OK);
        WAIT_FINAL(&a, token, HX_OK);
        CHECK_EQ(post_one(&a, HX_WRITE, ++token, x, 0, target, 1100, 5, NULL), HX_OK);
        WAIT_FINAL(&a, token, HX_OK);
        /* Rows on both sides of it are another matter, also when they are copied together. */
        uint64_t lo[3] = {0, 100, 200}, off[3] = {990, 1100, 2000}, n[3] = {10, 10, 10};
        hx_segment_t seg = rows(x, target, lo, off, n, 3);
        CHECK_EQ(post(HX_WRITE, ++token, &seg, 1), HX_OK);
        WAIT_FINAL(&a, token, HX_OK);
        uint64_t empty_off[3] = {990, 1050, 2000}, empty_n[3] = {10, 0, 10};
        seg = rows(x, target, lo, empty_off, empty_n, 3);
        CHECK_EQ(post(HX_WRITE, ++token, &seg, 1), HX_OK);
        WAIT_FINAL(&a, token, HX_OK);
        uint64_t in_off[3] = {990, 1050, 2000};
        seg = rows(x, target, lo, in_off, n, 3);
        CHECK_EQ(post(HX_WRITE, ++token, &seg, 1), HX_OK);
        WAIT_FINAL(&a, token, HX_ERR_REMOTE_ACCESS);
        uint32_t touched = 0;
        for (size_t i = 1000; i < 1100; i++)
            touched += ((uint8_t *)hx_region_addr(y))[i] != 0;
        CHECK_EQ(touched, 0);
        /* Granted again: to whoever asks now, not to a permission from before. */
        CHECK_EQ(hx_region_grant(y, NULL, span, 1), HX_OK);
        double end = seconds() + PATIENCE;
        do { /* a grant has no answer */
            CHECK_EQ(post_one(&a, HX_WRITE, ++token, x, 0, target, 1000, 100, NULL), HX_OK);
            WAIT(atomic_load(&a.of[token].finals) == 1);
        } while (a.of[token].status != HX_OK && seconds() < end);
        CHECK_EQ(a.of[token].status, HX_OK);
        uint64_t at = 1000, len = 1, zero = 0;
        seg = rows(x, target, &zero, &at, &len, 1);
        CHECK_EQ(post_rows(&a, a.ep, HX_WRITE, ++token, old, &seg, 1, NULL, NULL), HX_OK);
        WAIT_FINAL(&a, token, HX_ERR_REMOTE_ACCESS);
        at = 5000;
        CHECK_EQ(post_rows(&a, a.ep, HX_WRITE, ++token, old, &seg, 1, NULL, NULL), HX_OK);
        WAIT_FINAL(&a, token, HX_OK);
        /* Another peer's loss is not ours. */
        uint8_t nobody[HX_INCARNATION_LEN] = {1, 2, 3};
        CHECK_EQ(hx_region_revoke(y, nobody, span, 1, ++ticket), HX_OK);
        WAIT(b.done[ticket].count == 1);
        CHECK_EQ(post_one(&a, HX_WRITE, ++token, x, 0, target, 1000, 100, NULL), HX_OK);
        WAIT_FINAL(&a, token, HX_OK);

        CHECK_EQ(hx_region_deregister(y, ++ticket), HX_OK);
        WAIT(b.done[ticket].count == 1 && a.deleted == 1u + (uint32_t)kind);
        CHECK_EQ(b.done[ticket].status, HX_OK);
        hx_region_unref(y);
        token++;
    }
    /* A region that is gone does not slow down those that follow, whether it was announced or not: small writes are inline
     * again. */
    hx_region_t *own = allocate(&b, 4096, RW, NULL);
    CHECK_EQ(hx_region_deregister(own, ++ticket), HX_OK);
    WAIT(b.done[ticket].count == 1);
    hx_region_unref(own);
    hx_region_t *y = allocate(&b, 4096, RW, "next");
    WAIT(remote(&a, "next"));
    hx_stats_t stats, first;
    hx_engine_stats(a.engine, &first);
    do {
        CHECK_EQ(post_one(&a, HX_WRITE, ++token, x, 0, remote(&a, "next"), 0, 64, NULL), HX_OK);
        WAIT_FINAL(&a, token, HX_OK);
        hx_engine_stats(a.engine, &stats);
    } while (stats.inlined == first.inlined && token < 5000);
    CHECK(stats.inlined > first.inlined);
    CHECK_EQ(hx_region_deregister(y, ++ticket), HX_OK);
    WAIT(b.done[ticket].count == 1);
    hx_region_unref(y);
    hx_region_unref(x);
    free(lent);
    side_close(&a);
    side_close(&b);
    census_unchanged(before);
}

/* ---- losing each other ---- */

static void test_close_endpoint(void)
{
    census_t before = census();
    open_pair(NULL, NULL);
    hx_region_t *x = allocate(&a, MB, RW, NULL), *y = allocate(&b, MB, RW, "mem");
    for (uint32_t round = 1; round <= 5; round++) {
        link_up(&a, &b);
        WAIT(a.nremote == round);
        hx_rregion_t *mem = remote(&a, "mem");
        for (uint64_t i = 0; i < 8; i++)
            CHECK_EQ(post_one(&a, HX_WRITE, 8 * round + i, x, i * (MB / 8), mem, i * (MB / 8), MB / 8, NULL), HX_OK);
        CHECK_EQ(hx_endpoint_close(round % 2 ? a.ep : b.ep), HX_OK);
        WAIT(a.lost == round && b.lost == round);
        CHECK(!hx_endpoint_is_up(a.ep) && !hx_endpoint_is_up(b.ep));
        for (uint64_t i = 0; i < 8; i++) {
            WAIT(atomic_load(&a.of[8 * round + i].finals) == 1);
            uint32_t status = a.of[8 * round + i].status;
            CHECK(status == HX_OK || status == (round % 2 ? HX_ERR_ABORTED : HX_ERR_PEER_LOST));
        }
        hx_status_t late = post_one(&a, HX_WRITE, 9999, x, 0, mem, 0, 1, NULL);
        CHECK(late == (round % 2 ? HX_ERR_ABORTED : HX_ERR_PEER_LOST));
        CHECK(!hx_rregion_alive(mem));
    }
    CHECK_EQ(hx_endpoint_close(a.ep), HX_OK); /* again */
    hx_region_unref(x);
    CHECK_EQ(hx_region_deregister(y, 0), HX_OK);
    WAIT(b.done[0].count == 1);
    hx_region_unref(y);
    side_close(&a);
    side_close(&b);
    census_unchanged(before);
}

static void *stop(void *engine)
{
    hx_engine_stop(engine);
    return NULL;
}

/* One of the two, or both at once, in mid-transfer, with a revocation and a connect on their way. */
static void test_close_engines(void)
{
    enum { PART = 4 * MB / 40 };
    census_t before = census();
    for (int round = 0; round < 6; round++) {
        open_pair(NULL, NULL);
        uint8_t *lent = malloc(MB);
        hx_region_t *x = allocate(&a, 4 * MB, RW, NULL), *y = allocate(&b, 4 * MB, RW, "mem");
        hx_region_t *z = lend(&b, lent, MB, RW, "lent"), *late;
        link_up(&a, &b);
        WAIT(a.nremote == 2);
        for (uint64_t i = 0; i < 20; i++) {
            CHECK_EQ(post_one(&a, HX_WRITE, i, x, i * PART, remote(&a, "mem"), i * PART, PART, NULL), HX_OK);
            CHECK_EQ(post_one(&a, HX_READ, 100 + i, x, (20 + i) * PART, remote(&a, "lent"), 0, PART, NULL), HX_OK);
            CHECK_EQ(post_note(&a, 200 + i, "bye", NULL, 0, NULL), HX_OK);
        }
        uint64_t all[2] = {0, 4 * MB};
        CHECK_EQ(hx_region_allocate(b.engine, 16 * MB, RW, &late), HX_OK);
        CHECK_EQ(hx_region_revoke(y, NULL, all, 1, 1), HX_OK);
        CHECK_EQ(hx_region_deregister(z, 2), HX_OK);
        CHECK_EQ(dial(&b, &a, 3), HX_OK);
        pthread_t threads[2];
        if (round % 3 != 1)
            pthread_create(&threads[0], NULL, stop, a.engine);
        if (round % 3 != 0)
            pthread_create(&threads[1], NULL, stop, b.engine);
        if (round % 3 != 1)
            pthread_join(threads[0], NULL);
        if (round % 3 != 0)
            pthread_join(threads[1], NULL);
        WAIT(completed(0, 20) == 20 && completed(100, 20) == 20 && completed(200, 20) == 20);
        WAIT(b.done[1].count == 1 && b.done[2].count == 1);
        hx_region_unref(x);
        hx_region_unref(y);
        hx_region_unref(late);
        if (round % 3 == 0) { /* b lives on: its announcement still holds y */
            WAIT(b.lost >= 1);
        }
        hx_engine_stop(a.engine);
        hx_engine_stop(b.engine);
        CHECK_EQ(dial(&a, &b, 3), HX_ERR_CLOSED);
        hx_region_unref(z);
        side_close(&a);
        side_close(&b);
        free(lent);
    }
    census_unchanged(before);
}

static void test_tcp(void)
{
    census_t before = census();
    hx_config_t ca = config_of("alice"), cb = config_of("bob");
    ca.tcp_host = cb.tcp_host = "127.0.0.1";
    ca.secret = cb.secret = "the same";
    ca.secret_len = cb.secret_len = 8;
    open_pair(&ca, &cb);
    hx_region_t *x = allocate(&a, 4096, RW, NULL), *y = allocate(&b, 4096, RW, "mem");
    hx_target_t t = {.tcp_host = "127.0.0.1", .tcp_port = hx_engine_tcp_port(b.engine), .name = "bob"};
    CHECK_EQ(hx_connect(a.engine, &t), HX_OK);
    WAIT(a.ready == 1 && b.ready == 1 && a.nremote == 1);
    CHECK(!hx_endpoint_is_local(a.ep));
    for (uint64_t i = 0; i < 50; i++)
        CHECK_EQ(post_note(&a, i, "over tcp", NULL, 0, NULL), HX_OK);
    for (uint64_t i = 0; i < 50; i++)
        WAIT_FINAL(&a, i, HX_OK);
    CHECK_EQ(post_one(&a, HX_WRITE, 60, x, 0, remote(&a, "mem"), 0, 8, NULL), HX_ERR_NO_PATH);
    uint64_t span[2] = {0, 10};
    CHECK_EQ(hx_region_revoke(y, NULL, span, 1, 1), HX_OK);
    WAIT(b.done[1].count == 1);
    hx_region_unref(x);
    CHECK_EQ(hx_region_deregister(y, 2), HX_OK);
    WAIT(b.done[2].count == 1 && a.deleted == 1);
    hx_region_unref(y);
    side_close(&b);
    WAIT(a.lost == 1);
    side_close(&a);
    census_unchanged(before);
}

/* ---- everything at once ---- */

/* Each poster has PLACES, and each place its bytes on both sides: what two operations touch at once is the caller's
 * affair, and here it would hide the races that are not. */
enum { POSTERS = 3, PLACES = 24, ROWS = 8, ROW = 512, PLACE = ROWS * ROW, TARGETS = 3, SPAN = 4096 };
enum { NBYTES = POSTERS * PLACES * PLACE };

static struct {
    uint64_t posts; /* of each poster */
    hx_region_t *local[2];
    pthread_mutex_t mu;
    hx_rregion_t *target[TARGETS]; /* under mu; the last comes and goes */
    _Atomic uint8_t *accepted;
    _Atomic bool posted, over;
    _Atomic uint32_t posters;
    bool ends; /* an engine is closed meanwhile */
} storm = {.mu = PTHREAD_MUTEX_INITIALIZER};

static void *storm_post(void *arg)
{
    uint64_t me = (uint64_t)(uintptr_t)arg, random = 100 + me, handles[PLACES] = {0}, tokens = 0;
    uint64_t busy[PLACES]; /* the token that has the place */
    memset(busy, 0xff, sizeof busy);
    while (tokens < storm.posts && !atomic_load(&storm.over)) {
        uint64_t token = me * storm.posts + tokens, lo[ROWS], off[ROWS], n[ROWS], place = draw_below(&random, PLACES);
        if (busy[place] != UINT64_MAX && !atomic_load(&a.of[busy[place]].finals)) {
            if (!draw_below(&random, 4)) /* some never end by themselves */
                hx_cancel(a.engine, handles[place]);
            sched_yield();
            continue;
        }
        pthread_mutex_lock(&storm.mu);
        hx_rregion_t *target = storm.target[draw_below(&random, TARGETS)];
        if (target)
            hx_rregion_ref(target);
        pthread_mutex_unlock(&storm.mu);
        if (!target)
            continue;
        size_t count = draw_below(&random, 3) ? 1 : 1 + draw_below(&random, ROWS);
        for (size_t i = 0; i < count; i++) {
            n[i] = draw_below(&random, 12) ? draw_below(&random, ROW / (1 + draw_below(&random, 16)) + 1) : 0;
            lo[i] = off[i] = (me * PLACES + place) * PLACE + i * ROW;
            lo[i] += draw_below(&random, ROW - n[i] + 1);
            off[i] += draw_below(&random, ROW - n[i] + 1);
        }
        bool bad = !draw_below(&random, 20), overlap = !bad && count > 1 && !draw_below(&random, 20);
        if (bad)
            off[count - 1] = NBYTES + 1;
        if (overlap)
            lo[1] = lo[0], off[1] = off[0], n[0] = n[1] = 1;
        hx_segment_t seg = rows(storm.local[draw_below(&random, 2)], target, lo, off, n, count);
        uint64_t kind = draw_below(&random, 8), handle = 0, index = 0;
        hx_status_t status;
        if (kind == 0 && !bad)
            status = post_note(&a, token, "storm", &seg, 1, &handle);
        else if (kind == 1 && !bad)
            status = post_note(&a, token, "alone", NULL, 0, &handle);
        else
            status = post_rows(&a, a.ep, kind % 2 ? HX_READ : HX_WRITE, token, HX_EPOCH_NOW, &seg, 1, &handle, &index);
        hx_rregion_unref(target);
        if (status == HX_OK) {
            CHECK(!bad);
            atomic_store(&storm.accepted[token], 1);
            handles[place] = handle;
            busy[place] = token;
        } else if (bad) {
            CHECK(status == HX_ERR_BOUNDS || status == HX_ERR_REMOTE_ACCESS || storm.ends);
        } else if (status == HX_ERR_QUEUE_FULL) {
            sched_yield();
            continue; /* the same token again: it must still be free */
        } else {
            CHECK(status == HX_ERR_REMOTE_ACCESS || storm.ends);
        }
        tokens++;
        if (!draw_below(&random, 8)) /* often of a life that is over */
            hx_cancel(a.engine, handles[draw_below(&random, PLACES)]);
    }
    atomic_fetch_sub(&storm.posters, 1);
    return NULL;
}

static void *storm_drain(void *arg)
{
    side_t *s = arg;
    while (!atomic_load(&storm.over)) {
        struct pollfd pfd = {.fd = hx_engine_fileno(s->engine), .events = POLLIN};
        poll(&pfd, 1, 5);
        pump(s);
        pthread_mutex_lock(&storm.mu);
        hx_rregion_t *churn = remote(s, "churn");
        if (churn != storm.target[2]) {
            hx_rregion_unref(storm.target[2]);
            if (churn)
                hx_rregion_ref(churn);
            storm.target[2] = churn;
        }
        pthread_mutex_unlock(&storm.mu);
    }
    return NULL;
}

/* The owner takes a span back, uses it as its own, and gives it out again. */
static void use_span(hx_region_t *region, uint64_t off, uint64_t *ticket, double deadline)
{
    uint64_t span[2] = {off, SPAN};
    answer_t *done = &b.done[++*ticket % DONES];
    *done = (answer_t){0};
    if (hx_region_revoke(region, NULL, span, 1, *ticket) != HX_OK)
        return;
    while (!done->count && seconds() < deadline) {
        struct pollfd pfd = {.fd = hx_engine_fileno(b.engine), .events = POLLIN};
        poll(&pfd, 1, 1000);
        pump(&b);
    }
    if (!CHECK(done->count == 1 && done->status == HX_OK))
        return;
    uint8_t *bytes = (uint8_t *)hx_region_addr(region) + off;
    memset(bytes, (int)*ticket, SPAN);
    for (int i = 0; i < 20; i++)
        sched_yield();
    uint32_t foreign = 0;
    for (size_t i = 0; i < SPAN; i++)
        foreign += bytes[i] != (uint8_t)*ticket;
    CHECK_EQ(foreign, 0);
    CHECK_EQ(hx_region_grant(region, NULL, span, 1), HX_OK);
}

static void test_storm(bool faults, int ends, uint64_t posts)
{
    census_t before = census();
    hx_config_t ca = config_of("alice");
    uint64_t random = 42 + (uint64_t)ends, ticket = 0;
    static hx_fault_t plan[400];
    for (uint64_t i = 0; i < 400; i++)
        plan[i] = (hx_fault_t){.nth = i * 5 + draw_below(&random, 5),
                               .action = (uint32_t)(HX_FAULT_DELAY + draw_below(&random, 4)),
                               .status = HX_ERR_FAULT,
                               .delay_ns = draw_below(&random, 60 * MS)};
    if (faults) {
        ca.faults = plan;
        ca.nfaults = 400;
    }
    ca.queue_depth = 64;
    ca.chunk = 2048;
    ca.inline_limit = 1024;
    ca.cancel_grace_ns = 20 * MS;
    ca.stall_timeout_ns = 100 * MS;
    hx_config_t cb = config_of("bob");
    cb.cancel_grace_ns = 10000 * MS; /* the machine may be slow: that is not being pinned */
    open_pair(&ca, &cb);
    uint8_t *lent[2] = {malloc(NBYTES), malloc(NBYTES)};
    fill(lent[0], NBYTES, 5);
    memset(lent[1], 0, NBYTES);
    storm.local[0] = allocate(&a, NBYTES, RW, NULL);
    storm.local[1] = lend(&a, lent[0], NBYTES, RW, NULL);
    hx_region_t *owned[2] = {allocate(&b, NBYTES, RW, "mem"), lend(&b, lent[1], NBYTES, RW, "lent")}, *churn = NULL;
    link_up(&a, &b);
    WAIT(a.nremote == 2);
    storm.target[0] = remote(&a, "mem");
    storm.target[1] = remote(&a, "lent");
    hx_rregion_ref(storm.target[0]);
    hx_rregion_ref(storm.target[1]);
    storm.target[2] = NULL;
    storm.posts = posts;
    storm.accepted = calloc(POSTERS * posts, 1);
    storm.ends = ends;
    atomic_store(&storm.over, false);
    atomic_store(&storm.posters, POSTERS);

    pthread_t posters[POSTERS], drainer;
    for (uintptr_t i = 0; i < POSTERS; i++)
        pthread_create(&posters[i], NULL, storm_post, (void *)i);
    pthread_create(&drainer, NULL, storm_drain, &a);
    double deadline = seconds() + 2 * PATIENCE;
    uint64_t turns = 0, last = 5 + draw_below(&random, 20);
    while (atomic_load(&storm.posters) && seconds() < deadline) {
        use_span(owned[draw_below(&random, 2)], draw_below(&random, NBYTES / SPAN) * SPAN, &ticket, deadline);
        if (!churn) {
            CHECK_EQ(hx_region_allocate(b.engine, NBYTES, RW, &churn), HX_OK);
            CHECK_EQ(hx_region_announce(churn, "churn", 5, NULL, 0), HX_OK);
        } else if (turns % 4 == 3) {
            answer_t *done = &b.done[++ticket % DONES];
            *done = (answer_t){0};
            CHECK_EQ(hx_region_deregister(churn, ticket), HX_OK);
            while (!done->count && seconds() < deadline) {
                struct pollfd pfd = {.fd = hx_engine_fileno(b.engine), .events = POLLIN};
                poll(&pfd, 1, 1000);
                pump(&b);
            }
            CHECK(done->count == 1 && done->status == HX_OK);
            hx_region_unref(churn);
            churn = NULL;
        }
        pump(&b);
        if (ends && ++turns == last) {
            hx_engine_stop(ends == 1 ? a.engine : b.engine);
            break;
        }
        turns += !ends;
    }
    for (size_t i = 0; i < POSTERS; i++)
        pthread_join(posters[i], NULL);
    /* Exactly one for each that was accepted, none for the others. */
    uint64_t wrong = 1;
    while (wrong && seconds() < deadline) {
        pump(&b);
        usleep(2000);
        wrong = 0;
        for (uint64_t i = 0; i < POSTERS * posts; i++)
            wrong += atomic_load(&a.of[i].finals) != atomic_load(&storm.accepted[i]);
    }
    CHECK_EQ(wrong, 0);
    atomic_store(&storm.over, true);
    pthread_join(drainer, NULL);
    if (wrong)
        for (uint64_t i = 0; i < POSTERS * posts; i++)
            if (atomic_load(&a.of[i].finals) != atomic_load(&storm.accepted[i])) {
                fprintf(stderr, "  token %llu: accepted %d, finals %u, earlies %u\n", (unsigned long long)i,
                        atomic_load(&storm.accepted[i]), atomic_load(&a.of[i].finals), atomic_load(&a.of[i].earlies));
                break;
            }
    uint64_t early = 0, moved = 0;
    for (uint64_t i = 0; i < POSTERS * posts; i++) {
        early += atomic_load(&a.of[i].earlies);
        moved += a.of[i].nbytes > 0;
    }
    CHECK(ends || (moved > 0 && (!faults || early > 0))); /* it was a storm */
    hx_stats_t stats;
    hx_engine_stats(a.engine, &stats);
    CHECK_EQ(stats.live_ops, 0);
    CHECK_EQ(stats.posted, stats.completed);
    CHECK_EQ(hx_endpoint_inflight(a.ep), 0);
    CHECK(faults || ends || stats.inlined > 0);

    for (int i = 0; i < TARGETS; i++)
        hx_rregion_unref(storm.target[i]);
    for (int i = 0; i < 2; i++) {
        hx_region_unref(storm.local[i]);
        hx_region_unref(owned[i]);
    }
    hx_region_unref(churn);
    side_close(&a);
    side_close(&b);
    free(lent[0]);
    free(lent[1]);
    free((void *)storm.accepted);
    census_unchanged(before);
}

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    test_open();
    test_connect_errors();
    test_transfers();
    test_bad_rows();
    test_views();
    test_notes();
    test_faults();
    test_queue_full();
    test_revocation();
    test_close_endpoint();
    test_close_engines();
    test_tcp();
    test_storm(false, 0, 12000);
    test_storm(true, 0, 1500);
    for (int i = 0; i < 8; i++)
        test_storm(i % 3 == 0, 1 + i % 2, 20000);
    end_folder();
    return report("test_engine");
}
