/* SPDX-License-Identifier: Apache-2.0 */
/* Strangers and peers that do not keep to the protocol, over raw sockets. The engine under test goes on: between the cases
 * another engine makes a good transfer with it. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "link.h"
#include "pair.h"

enum { RW = HX_ACCESS_READ | HX_ACCESS_WRITE };

static side_t a, b; /* b is the one that suffers */
static hx_region_t *x, *y;
static uint64_t token;

static void good_transfer(void)
{
    fill(hx_region_addr(x), 4096, ++token);
    CHECK_EQ(post_one(&a, HX_WRITE, token, x, 0, remote(&a, "mem"), 0, 4096, NULL), HX_OK);
    WAIT_FINAL(&a, token, HX_OK);
    CHECK(!memcmp(hx_region_addr(x), hx_region_addr(y), 4096));
}

/* ---- a peer by hand ---- */

static int raw_socket(bool tcp)
{
    int fd = socket(tcp ? AF_INET : AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), err;
    struct timeval patience = {.tv_sec = PATIENCE};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (tcp) {
        struct sockaddr_in sa = {.sin_family = AF_INET, .sin_port = htons(hx_engine_tcp_port(b.engine))};
        inet_pton(AF_INET, "127.0.0.1", &sa.sin_addr);
        err = connect(fd, (struct sockaddr *)&sa, sizeof sa);
    } else {
        struct sockaddr_un sa = {.sun_family = AF_UNIX};
        strcpy(sa.sun_path, b.path);
        err = connect(fd, (struct sockaddr *)&sa, sizeof sa);
    }
    CHECK_EQ(err, 0);
    return fd;
}

static void say(int fd, const void *bytes, size_t n)
{
    const char *p = bytes;
    while (n) {
        ssize_t sent = send(fd, p, n, MSG_NOSIGNAL);
        if (sent <= 0)
            return; /* turned away already */
        p += sent;
        n -= (size_t)sent;
    }
}

static void say_frame(int fd, uint16_t type, uint64_t arg, const void *body, size_t n, uint8_t nfds, uint8_t flags)
{
    hx_frame_t head = {(uint32_t)(sizeof head + n), type, nfds, flags, arg};
    uint8_t *frame = malloc(sizeof head + n);
    memcpy(frame, &head, sizeof head);
    if (n)
        memcpy(frame + sizeof head, body, n);
    say(fd, frame, sizeof head + n);
    free(frame);
}

static void say_with_fds(int fd, const void *bytes, size_t n, const int *fds, size_t nfds)
{
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(32 * sizeof(int))];
    } control = {0};
    struct iovec iov = {(void *)(uintptr_t)bytes, n};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.space,
                         .msg_controllen = CMSG_SPACE(nfds * sizeof(int))};
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(nfds * sizeof(int));
    memcpy(CMSG_DATA(c), fds, nfds * sizeof(int));
    sendmsg(fd, &msg, MSG_NOSIGNAL);
}

/* The next frame, or false at the end. A descriptor that comes with it is closed. */
static bool hear(int fd, hx_frame_t *head, uint8_t *body, size_t room, unsigned *nfds)
{
    size_t have = 0, want = sizeof *head;
    uint8_t *to = (uint8_t *)head;
    for (int part = 0; part < 2; part++) {
        while (have < want) {
            union {
                struct cmsghdr head;
                char space[CMSG_SPACE(8 * sizeof(int))];
            } control;
            struct iovec iov = {to + have, want - have};
            struct msghdr msg = {
                .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control.space};
            ssize_t n = recvmsg(fd, &msg, MSG_CMSG_CLOEXEC);
            if (n <= 0) {
                CHECK(n == 0 || errno != EAGAIN); /* it neither answers nor hangs up */
                return false;
            }
            for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c))
                for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
                    int got;
                    memcpy(&got, CMSG_DATA(c) + i * sizeof got, sizeof got);
                    close(got);
                    if (nfds)
                        ++*nfds;
                }
            have += (size_t)n;
        }
        if (part == 0) {
            have = 0;
            want = head->length - sizeof *head;
            to = body;
            if (!CHECK(head->length >= sizeof *head && want <= room))
                return false;
        }
    }
    return true;
}

static uint8_t heard[HX_FRAME_MAX];

static bool hear_type(int fd, uint16_t type, hx_frame_t *head)
{
    while (hear(fd, head, heard, sizeof heard, NULL))
        if (head->type == type)
            return true;
    return false;
}

static size_t greeting(uint8_t out[HX_HELLO_MAX], const char *name)
{
    hx_hello_t h = {.magic = HX_MAGIC, .version_min = 1, .version_max = 1, .name_len = (uint32_t)strlen(name)};
    memset(h.incarnation, 0x5a, sizeof h.incarnation);
    memcpy(out, &h, sizeof h);
    memcpy(out + sizeof h, name, strlen(name));
    return sizeof h + strlen(name);
}

static int raw_peer(bool tcp)
{
    uint8_t hello[HX_HELLO_MAX], proof[32] = {0};
    hx_frame_t head;
    int fd = raw_socket(tcp);
    size_t n = greeting(hello, "mallory");
    say_frame(fd, HX_F_HELLO, 0, hello, n, 0, 0);
    CHECK(hear_type(fd, HX_F_ANSWER, &head));
    say_frame(fd, HX_F_AUTH, 0, proof, sizeof proof, 0, 0);
    CHECK(hear_type(fd, HX_F_READY, &head));
    return fd;
}

static int raw_peer_up(bool tcp)
{
    int fd = raw_peer(tcp), page_fd = -1;
    hx_frame_t head = {sizeof head, HX_F_PAGE, !tcp, 0, 0};
    if (tcp) {
        say(fd, &head, sizeof head);
        return fd;
    }
    hx_page_t *page = hx_page_create(&page_fd);
    CHECK(page != NULL);
    say_with_fds(fd, &head, sizeof head, &page_fd, 1);
    close(page_fd);
    hx_page_unmap(page);
    return fd;
}

static bool answers_ping(int fd)
{
    static uint64_t serial;
    hx_frame_t head;
    say_frame(fd, HX_F_PING, ++serial, NULL, 0, 0, 0);
    return hear_type(fd, HX_F_PONG, &head) && head.arg == serial;
}

static bool hung_up(int fd)
{
    hx_frame_t head;
    while (hear(fd, &head, heard, sizeof heard, NULL))
        ;
    close(fd);
    return true; /* hear() has checked that it was not a time-out */
}

/* ---- strangers ---- */

static void turned_away(int fd)
{
    uint32_t refused = b.refused;
    CHECK(hung_up(fd));
    WAIT(b.refused == refused + 1);
}

static void test_garbage(void)
{
    uint64_t random = 7;
    static uint8_t bytes[70000];
    for (int i = 0; i < 60; i++) {
        size_t n = 16 + draw_below(&random, i % 10 ? 600 : sizeof bytes - 16);
        fill(bytes, n, draw(&random));
        if (i % 3 == 0) { /* at first sight a frame */
            hx_frame_t head = {(uint32_t)(16 + draw_below(&random, 400)), (uint16_t)draw_below(&random, 25),
                               (uint8_t)draw_below(&random, 3), (uint8_t)draw_below(&random, 2), draw(&random)};
            memcpy(bytes, &head, sizeof head);
        }
        int fd = raw_socket(i & 1);
        say(fd, bytes, n);
        shutdown(fd, SHUT_WR);
        turned_away(fd);
    }
    static const uint32_t lengths[] = {0,        1,         15, 16 + HX_HELLO_MAX + 1, HX_FRAME_MAX, HX_FRAME_MAX + 1,
                                       1u << 31, UINT32_MAX};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        hx_frame_t head = {lengths[i], HX_F_HELLO, 0, 0, 0};
        int fd = raw_socket(i & 1);
        say(fd, &head, sizeof head);
        turned_away(fd);
    }
    good_transfer();
}

static void test_greetings(void)
{
    uint8_t hello[HX_HELLO_MAX + 8];
    hx_frame_t head;
    size_t n = greeting(hello, "mallory");
    for (size_t cut = 0; cut < n; cut += 3) {
        int fd = raw_socket(false);
        say_frame(fd, HX_F_HELLO, 0, hello, cut, 0, 0);
        turned_away(fd);
    }
#define ALTERED(statement, rejected)                                            \
    do {                                                                        \
        uint8_t bytes[HX_HELLO_MAX + 8];                                        \
        hx_hello_t h;                                                           \
        memcpy(bytes, hello, n);                                                \
        memcpy(&h, bytes, sizeof h);                                            \
        statement;                                                              \
        memcpy(bytes, &h, sizeof h);                                            \
        int fd = raw_socket(false);                                             \
        say_frame(fd, HX_F_HELLO, 0, bytes, n, 0, 0);                           \
        if (rejected)                                                           \
            CHECK(hear_type(fd, HX_F_REJECT, &head) && head.arg == (rejected)); \
        turned_away(fd);                                                        \
    } while (0)
    ALTERED(h.magic++, 0);
    ALTERED(h.name_len = 0, 0);
    ALTERED(h.name_len = HX_NAME_MAX + 1, 0);
    ALTERED(h.name_len = UINT32_MAX, 0);
    ALTERED(h.want_name_len = UINT32_MAX, 0);
    ALTERED((h.name_len = UINT32_MAX - 3, h.want_name_len = (uint32_t)(n - sizeof h) + 4), 0);
    ALTERED((h.name_len--, bytes[sizeof h + 2] = 0), 0);
    ALTERED(bytes[sizeof h + 2] = 0, 0);
    ALTERED((h.name_len -= 2, h.want_name_len = 2), HX_ERR_MISMATCH);
    ALTERED(h.version_min = h.version_max = 2, HX_ERR_MISMATCH);
    ALTERED((h.version_min = 0, h.version_max = 0), HX_ERR_MISMATCH);
    ALTERED(h.secret = 1, HX_ERR_AUTH);
    ALTERED(h.want_incarnation = 1, HX_ERR_STALE);
    ALTERED(memcpy(h.incarnation, hx_endpoint_incarnation(a.ep), sizeof h.incarnation), HX_ERR_MISMATCH);
#undef ALTERED

    /* Frames of the handshake at the wrong time. */
    for (uint16_t type = 0; type < 24; type++) {
        if (type == HX_F_HELLO)
            continue;
        int fd = raw_socket(false);
        say_frame(fd, type, 0, hello, n, 0, HX_FRAME_OPTIONAL);
        turned_away(fd);
        fd = raw_socket(false);
        say_frame(fd, HX_F_HELLO, 0, hello, n, 0, 0);
        CHECK(hear_type(fd, HX_F_ANSWER, &head));
        say_frame(fd, type, 0, hello, type == HX_F_AUTH ? 31 : n, 0, 0);
        turned_away(fd);
    }
    uint8_t proof[32] = {1};
    int fd = raw_socket(true);
    say_frame(fd, HX_F_HELLO, 0, hello, n, 0, 0);
    CHECK(hear_type(fd, HX_F_ANSWER, &head));
    say_frame(fd, HX_F_AUTH, 0, proof, sizeof proof, 0, 0);
    CHECK(hear_type(fd, HX_F_REJECT, &head) && head.arg == HX_ERR_AUTH);
    turned_away(fd);

    /* One byte at a time is slow, not wrong. */
    fd = raw_socket(false);
    hx_frame_t frame = {(uint32_t)(sizeof frame + n), HX_F_HELLO, 0, 0, 0};
    for (size_t i = 0; i < sizeof frame; i++)
        say(fd, (uint8_t *)&frame + i, 1);
    for (size_t i = 0; i < n; i++)
        say(fd, hello + i, 1);
    CHECK(hear_type(fd, HX_F_ANSWER, &head));
    shutdown(fd, SHUT_WR);
    turned_away(fd);
    good_transfer();
}

static void test_descriptors(void)
{
    uint8_t frame[sizeof(hx_frame_t) + HX_HELLO_MAX];
    int before, fds[32];
    good_transfer();
    before = open_descriptors();
    for (int i = 0; i < 32; i++)
        fds[i] = dup(0);
    for (int claimed = 0; claimed < 2; claimed++)
        for (size_t nfds = 1; nfds <= 32; nfds += 1 + nfds / 2) {
            size_t n = greeting(frame + sizeof(hx_frame_t), "mallory");
            hx_frame_t head = {(uint32_t)(sizeof head + n), HX_F_HELLO, (uint8_t)claimed, 0, 0};
            memcpy(frame, &head, sizeof head);
            int fd = raw_socket(false);
            say_with_fds(fd, frame, sizeof head + n, fds, nfds);
            shutdown(fd, SHUT_WR);
            turned_away(fd);
        }
    for (int i = 0; i < 32; i++)
        close(fds[i]);
    double end = seconds() + 5;
    while (open_descriptors() != before && seconds() < end) /* links are freed after their round */
        pump_all(1);
    CHECK_EQ(open_descriptors(), before);
}

/* More strangers than there are places for, all silent: they are gone after the handshake's time. */
static void test_idlers(void)
{
    enum { N = HX_SHAKING_MAX + 40 };
    int fds[N];
    uint32_t refused = b.refused;
    for (int i = 0; i < N; i++)
        fds[i] = raw_socket(i & 1);
    good_transfer(); /* whoever is in stays in */
    for (int i = 0; i < N; i++)
        CHECK(hung_up(fds[i]));
    WAIT(b.refused >= refused + HX_SHAKING_MAX);
    uint32_t ready = a.ready, lost = a.lost; /* and there is room for others again */
    CHECK_EQ(hx_endpoint_close(a.ep), HX_OK);
    WAIT(a.lost == lost + 1);
    CHECK_EQ(dial(&a, &b, 0), HX_OK);
    WAIT(a.ready == ready + 1);
    good_transfer();
}

/* ---- authenticated, and wrong ---- */

static void test_pages(void)
{
    hx_frame_t head = {sizeof head, HX_F_PAGE, 1, 0, 0};
    int wrong[3] = {memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING),
                    memfd_create("short", MFD_CLOEXEC | MFD_ALLOW_SEALING), open("/dev/null", O_RDWR | O_CLOEXEC)};
    CHECK(ftruncate(wrong[0], 4096) == 0 && ftruncate(wrong[1], 100) == 0);
    fcntl(wrong[1], F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    for (int i = 0; i < 3; i++) {
        int fd = raw_peer(false);
        say_with_fds(fd, &head, sizeof head, &wrong[i], 1);
        turned_away(fd);
        close(wrong[i]);
    }
    int fd = raw_peer(false);
    say(fd, &head, sizeof head); /* claims one and sends none */
    turned_away(fd);
    fd = raw_peer(false);
    say_frame(fd, HX_F_PING, 0, NULL, 0, 0, 0);
    turned_away(fd);
    good_transfer();
}

static size_t entry(uint8_t *out, uint64_t id, const char *name)
{
    hx_entry_t e = {.id = id, .nbytes = 100, .kind = HX_KIND_MEMFD, .access = RW, .name_len = (uint32_t)strlen(name)};
    memcpy(out, &e, sizeof e);
    memcpy(out + sizeof e, name, strlen(name));
    return sizeof e + strlen(name);
}

static void ends_link(bool tcp, uint16_t type, uint64_t arg, const void *body, size_t n, uint8_t nfds)
{
    int fd = raw_peer_up(tcp);
    CHECK(answers_ping(fd));
    say_frame(fd, type, arg, body, n, nfds, 0);
    CHECK(hung_up(fd));
}

static void test_offences(void)
{
    uint8_t add[512];
    size_t n = entry(add, 1, "r");
    hx_entry_t e;
    uint64_t id_span[3] = {1, UINT64_MAX, 1}, whole[3] = {1, 0, 10};
    hx_note_head_t note = {.topic_len = HX_TOPIC_MAX + 1}, longer = {.topic_len = UINT32_MAX};
    uint8_t big_note[sizeof note + HX_NOTE_MAX + 1] = {0};
    uint32_t lost = b.lost, count = 0;
#define ENDS_FDS(type, arg, body, n, nfds) (ends_link(count & 1, type, arg, body, n, nfds), count++)
#define ENDS(type, arg, body, n) ENDS_FDS(type, arg, body, n, 0)
    ENDS(HX_F_REGION_ADD, 0, add, 10);
    ENDS(HX_F_REGION_ADD, 0, add, n - 1);
#define ENTRY(statement)                  \
    do {                                  \
        memcpy(&e, add, sizeof e);        \
        statement;                        \
        uint8_t bad[512];                 \
        memcpy(bad, add, n);              \
        memcpy(bad, &e, sizeof e);        \
        ENDS(HX_F_REGION_ADD, 0, bad, n); \
    } while (0)
    ENTRY(e.name_len = 0);
    ENTRY(e.name_len = UINT32_MAX);
    ENTRY(e.name_len = HX_NAME_MAX + 1);
    ENTRY(e.blob_len = UINT32_MAX);
    ENTRY(e.blob_len = 1);
    ENTRY(e.kind = 0);
    ENTRY(e.kind = HX_KIND_DEVICE + 1);
    ENTRY(e.nbytes = UINT64_MAX);
    ENTRY((e.addr = UINT64_MAX, e.nbytes = 1));
    ENTRY((e.direct = UINT64_MAX, e.nbytes = 1));
    uint8_t twice[1024];
    memcpy(twice, add, n);
    memcpy(twice + n, add, n);
    ENDS(HX_F_REGION_ADD, 0, twice, 2 * n);
    ENDS(HX_F_REGION_DEL, 12345, NULL, 0);
    ENDS(HX_F_MAP_ANSWER, 1, NULL, 0);
    ENDS_FDS(HX_F_MAP_ANSWER, 1, add, 4, 1);
    ENDS(HX_F_NOTE, 1, &note, 7);
    ENDS(HX_F_NOTE, 1, &note, sizeof note);
    ENDS(HX_F_NOTE, 1, &longer, sizeof longer);
    ENDS(HX_F_NOTE, 2, big_note, sizeof note);
    ENDS(HX_F_NOTE, 1, big_note, sizeof big_note);
    ENDS(HX_F_NOTE_ACK, 1, NULL, 0);
    ENDS(HX_F_CREDIT, 1, NULL, 0);
    ENDS(HX_F_CREDIT, UINT64_MAX, NULL, 0);
    ENDS(HX_F_REVOKE, 1, id_span, 7);
    ENDS(HX_F_REVOKE, 1, id_span, 8 + 15);
    ENDS(HX_F_REVOKE, 1, id_span, sizeof id_span);
    ENDS(HX_F_GRANT, 0, id_span, sizeof id_span);
    ENDS(HX_F_REVOKE, 2, whole, sizeof whole);
    ENDS(HX_F_REVOKE, 0, whole, sizeof whole);
    ENDS(HX_F_HELLO, 0, add, n);
    ENDS(HX_F_PAGE, 0, NULL, 0);
    ENDS(0, 0, NULL, 0);
    ENDS(999, 0, NULL, 0);
    ENDS_FDS(HX_F_PING, 0, NULL, 0, 1);
    ENDS_FDS(HX_F_PING, 0, NULL, 0, 2);
    ENDS(HX_F_PATH, 0, add, 3);
    ENDS(HX_F_PATH, 0, add, n); /* neither side has such a path */
    ENDS(HX_F_REVOKE_ACK, 1, NULL, 0);
    ENDS(HX_F_BYE, 0, NULL, 0);
#undef ENTRY
#undef ENDS
#undef ENDS_FDS
    WAIT(b.lost == lost + count);
    good_transfer();
}

/* Odd, but allowed. */
static void test_tolerance(void)
{
    for (int tcp = 0; tcp < 2; tcp++) {
        int fd = raw_peer_up(tcp), before;
        uint32_t lost = b.lost, notes = b.nnotes;
        uint64_t whole[3] = {1, 0, 10}, nothing_at_all = 1;
        static uint8_t large[HX_FRAME_MAX - sizeof(hx_frame_t)];
        hx_frame_t head;
        say_frame(fd, 999, 1, large, sizeof large, 0, HX_FRAME_OPTIONAL);
        say_frame(fd, HX_F_PONG, 1, NULL, 0, 0, 0);
        say_frame(fd, HX_F_REVOKE, 1, whole, sizeof whole, 0, 0);
        say_frame(fd, HX_F_REVOKE, 2, &nothing_at_all, sizeof nothing_at_all, 0, 0);
        say_frame(fd, HX_F_GRANT, 0, whole, sizeof whole, 0, 0);
        say_frame(fd, HX_F_CREDIT, 0, NULL, 0, 0, 0);
        hx_note_head_t note = {0};
        for (uint64_t i = 1; i <= 200; i++)
            say_frame(fd, HX_F_NOTE, i, &note, sizeof note, 0, 0);
        uint8_t add[512], answer[4] = {0};
        size_t n = entry(add, 9, "r");
        say_frame(fd, HX_F_REGION_ADD, 0, add, n, 0, 0);
        say_frame(fd, HX_F_MAP_ANSWER, 9, answer, 4, 0, 0); /* nobody asked */
        say_frame(fd, HX_F_TABLE_END, 0, NULL, 0, 0, 0);
        CHECK(answers_ping(fd));
        WAIT(b.nnotes == notes + 200);
        /* Mappings: of what is announced, and without a descriptor where none can travel. None is left behind. */
        before = open_descriptors();
        for (uint64_t i = 0; i < 40; i++) {
            unsigned nfds = 0;
            bool known = i & 1;
            say_frame(fd, HX_F_MAP_ASK, known ? hx_region_id(y) : 1u << 20, NULL, 0, 0, 0);
            do
                CHECK(hear(fd, &head, heard, sizeof heard, &nfds));
            while (head.type != HX_F_MAP_ANSWER);
            uint32_t err;
            memcpy(&err, heard, sizeof err);
            CHECK_EQ(nfds, known && !tcp);
            CHECK_EQ(err != 0, !known || tcp);
        }
        double end = seconds() + 5; /* the last one is closed after it was sent */
        while (open_descriptors() != before && seconds() < end)
            pump_all(1);
        CHECK_EQ(open_descriptors(), before);
        CHECK_EQ(b.lost, lost);
        say_frame(fd, HX_F_TABLE_END, 0, NULL, 0, 0, 0); /* twice is once too many */
        CHECK(hung_up(fd));
        WAIT(b.lost == lost + 1);
        CHECK_EQ(post_note(&b, 1000 + (uint64_t)tcp, "", NULL, 0, NULL), HX_ERR_PEER_LOST);
    }
    /* More notes than the window holds. */
    b.keep_notes = true;
    int fd = raw_peer_up(false);
    hx_note_head_t note = {0};
    for (uint64_t i = 1; i <= HX_NOTE_WINDOW + 1; i++)
        say_frame(fd, HX_F_NOTE, i, &note, sizeof note, 0, 0);
    CHECK(hung_up(fd));
    b.keep_notes = false;
    good_transfer();
}

static void test_fuzz(void)
{
    uint64_t random = 2024;
    static uint8_t body[5000];
    for (int life = 0; life < 150; life++) {
        bool tcp = life % 3 == 0;
        int fd = life % 7 ? raw_peer_up(tcp) : raw_peer(tcp);
        uint64_t note = 1, seq = 1;
        for (int i = 0; i < 30; i++) {
            uint16_t type = (uint16_t)(HX_F_PAGE + draw_below(&random, 15));
            uint64_t arg = draw_below(&random, 4);
            size_t n = draw_below(&random, 20) ? draw_below(&random, 80) : draw_below(&random, sizeof body);
            fill(body, n, draw(&random));
            if (draw_below(&random, 3)) { /* nearly right */
                if (type == HX_F_REGION_ADD) {
                    n = entry(body, draw_below(&random, 8), "r");
                } else if (type == HX_F_NOTE) {
                    memset(body, 0, sizeof(hx_note_head_t));
                    n += sizeof(hx_note_head_t);
                    arg = note++;
                } else if (type == HX_F_REVOKE || type == HX_F_GRANT) {
                    uint64_t spans[5] = {draw_below(&random, 4), draw_below(&random, 100), 10, 5, 9};
                    memcpy(body, spans, sizeof spans);
                    n = sizeof spans;
                    arg = type == HX_F_REVOKE ? seq++ : 0;
                } else if (type == HX_F_MAP_ANSWER) {
                    n = 4;
                } else if (type == HX_F_BYE) {
                    type = HX_F_MAP_ASK;
                }
            }
            say_frame(fd, type, arg, body, n, !draw_below(&random, 30), (uint8_t)draw_below(&random, 2));
        }
        if (draw_below(&random, 2))
            say(fd, body, draw_below(&random, 30)); /* and goes in the middle of something */
        close(fd);
        pump_all(0);
        if (life % 30 == 0)
            good_transfer();
    }
    good_transfer();
}

int main(void)
{
    census_t before = census();
    hx_config_t ca = config_of("alice"), cb = config_of("bob");
    cb.handshake_timeout_ns = HX_NS / 2;
    cb.tcp_host = "127.0.0.1";
    cb.unix_path = ""; /* as well */
    side_open(&a, &ca);
    side_open(&b, &cb);
    b.skip_regions = true;
    x = allocate(&a, 4096, RW, NULL);
    y = allocate(&b, 4096, RW, "mem");
    link_up(&a, &b);
    WAIT(a.nremote == 1);
    good_transfer();
    test_garbage();
    test_greetings();
    test_descriptors();
    test_pages();
    test_offences();
    test_tolerance();
    test_idlers();
    test_fuzz();
    hx_region_unref(x);
    hx_region_unref(y);
    side_close(&a);
    side_close(&b);
    census_unchanged(before);
    end_folder();
    return report("test_control");
}
