/* SPDX-License-Identifier: Apache-2.0 */
/* Peers that are processes: killed, stopped and forked at bad moments. Each case runs in a process of its own, and the
 * peer is forked off it before any engine, and so any thread, exists. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "pair.h"

enum { RW = HX_ACCESS_READ | HX_ACCESS_WRITE, MB = 1 << 20, BIG = 40 * MB };
#define MS 1000000ull

/* ---- the child: an engine that does what it is told ---- */

typedef struct {
    pid_t pid;
    int to, from;
} child_t;

typedef struct {
    char what; /* c: connect, w: write for ever, r: read for ever, o: one write, f: fork, q: quit */
    char target[24];
} order_t;

static void reply(int fd, int64_t value)
{
    if (write(fd, &value, sizeof value) != sizeof value)
        _exit(2);
}

static int64_t listen_to(child_t *child)
{
    int64_t value = -1;
    CHECK(read(child->from, &value, sizeof value) == sizeof value);
    return value;
}

/* Transfers that never end, one behind the other, in huge chunks: it is nearly always in mid-copy. Answers the status that
 * ended it. */
static int64_t hammer(side_t *s, const order_t *order, hx_region_t *local)
{
    hx_rregion_t *target = remote(s, order->target);
    int64_t answer = HX_OK;
    hx_rregion_ref(target); /* it may be withdrawn meanwhile */
    for (uint64_t token = 1; token < TOKENS && answer == HX_OK; token++) {
        answer = post_one(s, order->what == 'w' ? HX_WRITE : HX_READ, token, local, 0, target, 0,
                          hx_rregion_nbytes(target), NULL);
        if (answer != HX_OK)
            break;
        WAIT(atomic_load(&s->of[token].finals) == 1);
        answer = s->of[token].status;
        memset(&s->of[token], 0, sizeof s->of[token]); /* the next round counts from one again */
    }
    hx_rregion_unref(target);
    return answer;
}

static void be_child(const char *parent_path, int in, int out)
{
    side_t s;
    hx_config_t c = config_of("child");
    order_t order;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    c.chunk = BIG;
    c.copy_threads = 1;
    side_open(&s, &c);
    hx_region_t *local = allocate(&s, BIG, RW, "theirs");
    memset(hx_region_addr(local), 0xcc, BIG);
    uint64_t token = TOKENS / 2;
    for (;;) {
        struct pollfd pfds[2] = {{.fd = in, .events = POLLIN}, {.fd = hx_engine_fileno(s.engine), .events = POLLIN}};
        poll(pfds, 2, -1);
        pump(&s);
        if (!pfds[0].revents)
            continue;
        if (read(in, &order, sizeof order) != sizeof order)
            _exit(0);
        switch (order.what) {
        case 'c': {
            hx_target_t t = {.path = parent_path};
            CHECK_EQ(hx_connect(s.engine, &t), HX_OK);
            WAIT(s.ready == 1);
            reply(out, s.ready);
            break;
        }
        case 'w':
        case 'r':
            WAIT(remote(&s, order.target) != NULL);
            reply(out, 0);
            reply(out, hammer(&s, &order, local));
            break;
        case 'o':
            WAIT(remote(&s, order.target) != NULL);
            memset(hx_region_addr(local), 0xcc, 4096);
            CHECK_EQ(post_one(&s, HX_WRITE, ++token, local, 0, remote(&s, order.target), 0, 4096, NULL), HX_OK);
            WAIT(atomic_load(&s.of[token].finals) == 1);
            reply(out, s.of[token].status);
            break;
        case 'f': { /* a child of its own that holds whatever it holds, and outlives it */
            pid_t pid = fork();
            if (!pid) {
                alarm(PATIENCE);
                for (;;)
                    pause();
            }
            reply(out, pid);
            break;
        }
        case 'q':
            hx_region_unref(local);
            side_close(&s);
            reply(out, atomic_load(&failures));
            _exit(0);
        }
    }
}

static child_t spawn(const char *parent_path)
{
    int down[2], up[2];
    CHECK(pipe2(down, O_CLOEXEC) == 0 && pipe2(up, O_CLOEXEC) == 0);
    pid_t pid = fork();
    if (!pid) {
        close(down[1]);
        close(up[0]);
        be_child(parent_path, down[0], up[1]);
    }
    close(down[0]);
    close(up[1]);
    return (child_t){pid, down[1], up[0]};
}

static void tell(child_t *child, char what, const char *target)
{
    order_t order = {.what = what};
    snprintf(order.target, sizeof order.target, "%s", target);
    CHECK(write(child->to, &order, sizeof order) == sizeof order);
}

static void quit(child_t *child)
{
    int status;
    tell(child, 'q', "");
    CHECK_EQ(listen_to(child), 0);
    CHECK(waitpid(child->pid, &status, 0) == child->pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void end(child_t *child)
{
    kill(child->pid, SIGKILL);
    CHECK(waitpid(child->pid, NULL, 0) == child->pid);
}

/* ---- the parent's side of a case ---- */

static side_t s;
static child_t child;

static void begin(hx_config_t *config)
{
    hx_config_t c = config_of("parent");
    if (!folder[0]) {
        strcpy(folder, "/tmp/hx-test-XXXXXX");
        CHECK(mkdtemp(folder) != NULL);
    }
    char path[96];
    snprintf(path, sizeof path, "%s/parent-%d", folder, getpid());
    child = spawn(path);
    side_open(&s, config ? config : &c);
    CHECK(!strcmp(path, s.path));
    tell(&child, 'c', "");
    CHECK_EQ(listen_to(&child), 1);
    WAIT(s.ready == 1 && remote(&s, "theirs"));
}

static void wait_for_write(volatile uint8_t *byte)
{
    double until = seconds() + PATIENCE;
    while (*byte != 0xcc && seconds() < until)
        usleep(100);
    CHECK_EQ(*byte, 0xcc);
}

/* Everything that waits for a peer that is killed ends, and soon; and its memory holds nothing of ours. */
static void killed(bool with_child)
{
    int64_t grandchild = 0;
    begin(NULL);
    hx_region_t *x = allocate(&s, BIG, RW, NULL), *y = allocate(&s, BIG, RW, "mine");
    if (with_child) {
        tell(&child, 'f', "");
        grandchild = listen_to(&child);
    }
    tell(&child, 'w', "mine");
    CHECK_EQ(listen_to(&child), 0);
    wait_for_write(hx_region_addr(y));
    for (uint64_t i = 0; i < 40; i++) {
        CHECK_EQ(post_one(&s, i % 2 ? HX_READ : HX_WRITE, i, x, i * MB, remote(&s, "theirs"), i * MB, MB, NULL), HX_OK);
        CHECK_EQ(post_note(&s, 100 + i, "note", NULL, 0, NULL), HX_OK);
    }
    end(&child);
    WAIT(s.lost == 1);
    CHECK_EQ(s.lost_status, HX_ERR_PEER_LOST);
    uint32_t open = 0;
    for (uint64_t i = 0; i < 40; i++) {
        WAIT(atomic_load(&s.of[i].finals) == 1 && atomic_load(&s.of[100 + i].finals) == 1);
        open += s.of[i].status != HX_OK && s.of[i].status != HX_ERR_PEER_LOST;
        open += s.of[100 + i].status != HX_OK && s.of[100 + i].status != HX_ERR_PEER_LOST;
    }
    CHECK_EQ(open, 0);
    CHECK_EQ(post_one(&s, HX_WRITE, 999, x, 0, s.remote[0], 0, 1, NULL), HX_ERR_PEER_LOST);
    uint64_t all[2] = {0, BIG};
    CHECK_EQ(hx_region_revoke(y, NULL, all, 1, 1), HX_OK);
    WAIT(s.done[1].count == 1);
    CHECK_EQ(s.done[1].status, HX_OK); /* whatever it had begun, it is gone */
    CHECK_EQ(hx_region_deregister(y, 2), HX_OK);
    WAIT(s.done[2].count == 1);
    hx_region_unref(x);
    hx_region_unref(y);
    side_close(&s);
    if (grandchild > 0)
        kill((pid_t)grandchild, SIGKILL);
}

static void test_killed(void)
{
    killed(false);
}

static void test_killed_with_child(void)
{
    killed(true);
}

static bool same(const uint8_t *bytes, size_t n, uint8_t value)
{
    return bytes[0] == value && !memcmp(bytes, bytes + 1, n - 1);
}

/* Stopped in mid-copy and revoked: either it holds bytes, and we are told, or not one new byte arrives. */
static void stopped(bool foreign, bool reads, bool then_kill)
{
    hx_config_t c = config_of("parent");
    c.cancel_grace_ns = 30 * MS;
    begin(&c);
    uint8_t *memory = mmap(NULL, BIG, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(memory, 1, BIG);
    hx_region_t *y = foreign ? lend(&s, memory, BIG, RW, "mine") : allocate(&s, BIG, RW, "mine");
    uint8_t *bytes = hx_region_addr(y);
    uint64_t all[2] = {0, BIG}, ticket = 0;
    uint32_t pinned = 0, free_at_once = 0;
    for (int round = 0; round < 40 && !pinned; round++) {
        memset(bytes, 1, BIG);
        tell(&child, reads ? 'r' : 'w', "mine");
        CHECK_EQ(listen_to(&child), 0);
        if (reads)
            usleep(2000 + 300 * (unsigned)round);
        else
            wait_for_write(bytes);
        usleep(100 * (unsigned)round);
        kill(child.pid, SIGSTOP);
        int status;
        CHECK(waitpid(child.pid, &status, WUNTRACED) == child.pid && WIFSTOPPED(status));
        answer_t *done = &s.done[++ticket];
        CHECK_EQ(hx_region_revoke(y, NULL, all, 1, ticket), HX_OK);
        WAIT(done->count == 1);
        if (done->status == HX_OK) {
            free_at_once++;
            memset(bytes, 2, BIG);
        } else {
            pinned++;
            CHECK_EQ(done->status, HX_ERR_PINNED);
            CHECK(done->value > 0 && done->value <= BIG);
            CHECK(done->span[0] == 0 && done->span[1] == BIG);
            pump_all(100);
            CHECK_EQ(done->count, 1); /* it is watched on, and still held */
        }
        if (pinned && then_kill) {
            end(&child);
        } else {
            kill(child.pid, SIGCONT);
        }
        if (done->status == HX_ERR_PINNED) {
            WAIT(done->count == 2); /* released: by its end, or by its seeing the revocation */
            CHECK_EQ(done->status, HX_OK);
            CHECK_EQ(done->value, 0);
            memset(bytes, 2, BIG);
        }
        if (!(pinned && then_kill))
            CHECK_EQ(listen_to(&child), HX_ERR_REMOTE_ACCESS);
        CHECK(same(bytes, BIG, 2)); /* it has had its answer, and nothing came after ours */
        if (!(pinned && then_kill)) {
            CHECK_EQ(hx_region_grant(y, NULL, all, 1), HX_OK);
            int64_t answer;
            double until = seconds() + PATIENCE;
            do {
                tell(&child, 'o', "mine");
                answer = listen_to(&child);
            } while (answer == HX_ERR_REMOTE_ACCESS && seconds() < until);
            CHECK_EQ(answer, HX_OK);
            CHECK(same(bytes, 4096, 0xcc));
        }
    }
    CHECK_EQ(pinned, 1); /* one stop in mid-copy was met */
    if (then_kill)
        WAIT(s.lost == 1);
    CHECK_EQ(hx_region_deregister(y, ++ticket), HX_OK);
    WAIT(s.done[ticket].count == 1);
    hx_region_unref(y);
    if (!then_kill)
        quit(&child);
    side_close(&s);
    munmap(memory, BIG);
}

static void test_stopped_mapped(void)
{
    stopped(false, false, false);
}

static void test_stopped_reading(void)
{
    stopped(false, true, false);
}

static void test_stopped_foreign(void)
{
    stopped(true, false, false);
}

static void test_stopped_then_killed(void)
{
    stopped(false, false, true);
}

/* A frozen peer is lost after peer_timeout; closing while it stands in mid-copy says so. */
static void test_frozen(void)
{
    hx_config_t c = config_of("parent");
    c.peer_timeout_ns = 300 * MS;
    c.cancel_grace_ns = 30 * MS;
    begin(&c);
    hx_region_t *x = allocate(&s, 4096, RW, NULL), *y = allocate(&s, BIG, RW, "mine");
    tell(&child, 'w', "mine");
    CHECK_EQ(listen_to(&child), 0);
    wait_for_write(hx_region_addr(y));
    kill(child.pid, SIGSTOP);
    int status;
    CHECK(waitpid(child.pid, &status, WUNTRACED) == child.pid);
    CHECK_EQ(post_note(&s, 1, "anybody?", NULL, 0, NULL), HX_OK);
    WAIT(s.lost == 1);
    WAIT_FINAL(&s, 1, HX_ERR_PEER_LOST);
    hx_region_unref(x);
    hx_region_unref(y);
    CHECK(hx_engine_stop(s.engine) <= 1);
    side_close(&s);
    end(&child);
}

/* After a fork the child's engine is dead and closed, and the parent's is as it was. */
static void test_forked(void)
{
    begin(NULL);
    hx_region_t *x = allocate(&s, MB, RW, NULL), *y = allocate(&s, MB, RW, "mine");
    uint64_t token = 1;
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < 10; i++)
            CHECK_EQ(post_one(&s, HX_WRITE, token + (uint64_t)i, x, (uint64_t)i * 4096, remote(&s, "theirs"),
                              (uint64_t)i * 4096, 4096, NULL),
                     HX_OK);
        int before = open_descriptors();
        hx_engine_before_fork(s.engine);
        pid_t pid = fork();
        if (!pid) {
            alarm(PATIENCE);
            hx_engine_forked(s.engine);
            /* event, epoll and wake; the control thread's epoll and listener; a link, its pidfd, and memfds */
            bool closed = open_descriptors() <= before - 7;
            uint64_t zero = 0;
            hx_segment_t seg = {.local = x,
                                .remote = s.remote[0],
                                .rkey = hx_rregion_rkey(s.remote[0]),
                                .local_off = &zero,
                                .remote_off = &zero,
                                .each = 1,
                                .n = 1};
            hx_post_t post = {.kind = HX_WRITE, .token = 1, .epoch = HX_EPOCH_NOW, .segments = &seg, .nsegments = 1};
            uint64_t handle, index;
            bool done, refused = hx_post(s.ep, &post, &handle, &index, &done) == HX_ERR_CLOSED;
            hx_engine_stop(s.engine);
            hx_engine_free(s.engine);
            _exit(closed ? refused ? 0 : 4 : 3);
        }
        hx_engine_after_fork(s.engine);
        int status = 0;
        CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
        CHECK(WIFEXITED(status));
        CHECK_EQ(WEXITSTATUS(status), 0);
        for (int i = 0; i < 10; i++, token++)
            WAIT_FINAL(&s, token, HX_OK);
    }
    tell(&child, 'o', "mine");
    CHECK_EQ(listen_to(&child), HX_OK);
    CHECK_EQ(s.lost, 0);
    hx_region_unref(x);
    hx_region_unref(y);
    quit(&child);
    side_close(&s);
}

static void test_foreign(void)
{
    begin(NULL);
    uint8_t *memory = malloc(MB);
    memset(memory, 0, MB);
    hx_region_t *y = lend(&s, memory, MB, RW, "mine");
    tell(&child, 'o', "mine");
    int64_t answer = listen_to(&child);
    CHECK_EQ(answer, HX_OK);
    CHECK(same(memory, 4096, 0xcc) && memory[4096] == 0);
    tell(&child, 'w', "mine");
    CHECK_EQ(listen_to(&child), 0);
    wait_for_write(memory + MB - 1);
    CHECK_EQ(hx_region_deregister(y, 1), HX_OK);
    WAIT(s.done[1].count == 1);
    CHECK_EQ(s.done[1].status, HX_OK);
    memset(memory, 3, MB); /* ours again, although it still tries */
    CHECK_EQ(listen_to(&child), HX_ERR_REMOTE_ACCESS);
    CHECK(same(memory, MB, 3));
    hx_region_unref(y);
    free(memory);
    end(&child);
    WAIT(s.lost == 1);
    side_close(&s);
}

int main(void)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"killed", test_killed},
        {"killed, with a child of its own alive", test_killed_with_child},
        {"stopped while it writes", test_stopped_mapped},
        {"stopped while it reads", test_stopped_reading},
        {"stopped while it writes foreign memory", test_stopped_foreign},
        {"stopped, then killed", test_stopped_then_killed},
        {"frozen", test_frozen},
        {"forked", test_forked},
        {"foreign memory", test_foreign},
    };
    strcpy(folder, "/tmp/hx-test-XXXXXX");
    CHECK(mkdtemp(folder) != NULL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double start = seconds();
        fflush(NULL);
        pid_t pid = fork();
        if (!pid) {
            atomic_store(&failures, 0);
            cases[i].run();
            if (atomic_load(&failures))
                fprintf(stderr, "  in case: %s\n", cases[i].name);
            _exit(atomic_load(&failures) ? 1 : 0);
        }
        int status = 0;
        CHECK(waitpid(pid, &status, 0) == pid);
        if (!CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0))
            fprintf(stderr, "  case: %s (wait status %x)\n", cases[i].name, (unsigned)status);
        if (getenv("TEST_TIMES"))
            fprintf(stderr, "%-40s %.2f s\n", cases[i].name, seconds() - start);
    }
    DIR *dir = opendir(folder);
    for (struct dirent *d; dir && (d = readdir(dir));)
        unlinkat(dirfd(dir), d->d_name, 0); /* the sockets of those that were killed */
    closedir(dir);
    end_folder();
    return report("test_process");
}
