/* SPDX-License-Identifier: Apache-2.0 */
/* What a peer may send on a data connection of the tcp transport: a whole engine, with its progress thread and regions of
 * every kind of access, is given one end of a socket pair as if the handshake had just ended, and the input by the other.
 *
 * Byte 0 of an input: bits 0-1, how much of it comes with the handshake; bit 2, in small pieces; bit 3, with zeros
 * behind it, as many as the rows of no message. Messages follow (tcp_wire.h). What no input can know is written in symbols: a region below 8 is the one of that number here, a key of 0
 * its key, an id below 2 of an answer the question of that number, 2 and 3 the same of an
 * earlier time, and a checksum of 0 the right one.
 *
 * Checked, beside what the sanitizers see: memory that the peer may not write keeps its bytes; what it may not read never
 * leaves; answers are messages themselves; a connection whose messages were in order goes on, any other ends; an
 * operation that waits for an answer completes once, well only if the answer was one, and touches its own bytes alone. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include "crc32c.h"
#include "mutate.h"
#include "rawpeer.h"
#include "tcp.h"

enum { N = 64 << 10, GUARD = 4096, REVOKED = 8192, REVOKED_END = 12288, QUESTIONS = 2, OUTPUT = 8 << 20 };
enum {
    WINDOW = 8 << 20,
    WINDOW_MESSAGES = 1000,
    READ_NBYTES = 300,
    ZEROS = (HX_TCP_ROWS_MAX + 100) * sizeof(hx_tcp_row_t)
};
enum { RW, RO, WO, HIDDEN, MINE, REGIONS }; /* HIDDEN is announced to nobody; MINE is the local end of our operations */

static const uint64_t SENTINEL = 0xfeedfacecafef00dull;
static const hx_tcp_head_t question_for_life = {
    .magic = HX_TCP_MAGIC, .type = HX_TCP_READ, .nrows = 1, .id = 0xfeedfacecafef00dull, .nbytes = 1};

static uint8_t *arena; /* guard, region, guard, ... guard */
static hx_region_t *regions[REGIONS];
static uint64_t secret; /* stands where no peer may read, over and over */
static int control = -1;
static uint64_t questions[QUESTIONS];
static bool answered[QUESTIONS]; /* the input holds what it asked for */

/* ---- the grammar ---- */

static size_t length_of(const uint8_t *at, size_t have)
{
    hx_tcp_head_t h;
    if (have < sizeof h)
        return have;
    memcpy(&h, at, sizeof h);
    bool payload = h.type == HX_TCP_WRITE || h.type == HX_TCP_DATA;
    uint64_t n = sizeof h + (uint64_t)h.nrows * sizeof(hx_tcp_row_t);
    if (payload)
        n = h.nbytes > have ? have : n + h.nbytes;
    return n < have ? (size_t)n : have;
}

static size_t make_message(uint8_t *out, size_t room, uint64_t *random)
{
    hx_tcp_head_t h = {.magic = HX_TCP_MAGIC, .type = (uint16_t)(1 + draw_below(random, 4))};
    hx_tcp_row_t rows[8];
    bool asks = h.type <= HX_TCP_READ;
    h.flags = (uint16_t)draw_below(random, 2);
    h.region = draw_below(random, 5);
    h.id = asks ? draw(random) : draw_below(random, 3);
    if (h.type == HX_TCP_DONE)
        h.status = (uint32_t)draw_below(random, 12);
    else if (h.type == HX_TCP_DATA)
        h.nbytes = draw_below(random, 2) ? 300 : draw_below(random, 600);
    h.nrows = asks ? (uint32_t)draw_below(random, 8) : 0;
    for (uint32_t i = 0; i < h.nrows; i++) {
        rows[i].nbytes = draw_below(random, 4) ? draw_below(random, 200) : draw_below(random, 20000);
        rows[i].off = draw_below(random, N - rows[i].nbytes + (draw_below(random, 4) ? 0 : 64));
        h.nbytes += rows[i].nbytes;
    }
    size_t n = sizeof h + h.nrows * sizeof *rows,
           payload = h.type == HX_TCP_WRITE || h.type == HX_TCP_DATA ? h.nbytes : 0;
    if (n + payload > room)
        return 0;
    memcpy(out, &h, sizeof h);
    memcpy(out + sizeof h, rows, h.nrows * sizeof *rows);
    for (size_t i = 0; i < payload; i++)
        out[n + i] = (uint8_t)i;
    return n + payload;
}

static void tweak_rows(uint8_t *at, size_t n, uint64_t *random)
{
    size_t words = (n - sizeof(hx_tcp_head_t)) / sizeof(uint64_t);
    uint64_t v = interesting(random), k = words ? draw_below(random, words < 16 ? words : 16) : 0;
    if (words)
        memcpy(at + sizeof(hx_tcp_head_t) + k * sizeof v, &v, sizeof v);
}

#define FIELD(name) {offsetof(hx_tcp_head_t, name), sizeof(((hx_tcp_head_t *)0)->name)}
static const field_t fields[] = {FIELD(magic),  FIELD(type),  FIELD(flags),  FIELD(nrows),   FIELD(status),
                                 FIELD(id),     FIELD(id),    FIELD(region), FIELD(rkey),    FIELD(nbytes),
                                 FIELD(nbytes), FIELD(epoch), FIELD(crc),    FIELD(head_crc)};
const grammar_t grammar = {.preamble = 1,
                           .head = sizeof(hx_tcp_head_t),
                           .fields = fields,
                           .nfields = sizeof fields / sizeof *fields,
                           .length = length_of,
                           .make = make_message,
                           .tweak = tweak_rows};

/* Is that a head after which a connection goes on, as far as it can be said from the bytes alone? */
static bool in_order(const hx_tcp_head_t *h, const uint8_t *rows)
{
    uint64_t sum = 0;
    if (h->magic != HX_TCP_MAGIC || (h->type != HX_TCP_WRITE && h->type != HX_TCP_READ) || h->nrows > HX_TCP_ROWS_MAX ||
        h->nbytes > HX_TCP_MESSAGE_MAX || h->flags & ~HX_TCP_CHECKSUM || h->epoch)
        return false;
    for (uint32_t i = 0; i < h->nrows; i++) {
        hx_tcp_row_t row;
        memcpy(&row, rows + i * sizeof row, sizeof row);
        if (row.nbytes > h->nbytes - sum)
            return false;
        sum += row.nbytes;
    }
    return sum == h->nbytes;
}

/* Puts what the symbols stand for in their place. True: all of it are questions, whole and in order. */
static bool resolve(uint8_t *bytes, size_t n, bool *answers_p)
{
    bool good = true;
    uint64_t asked = 0, messages = 0;
    *answers_p = false;
    for (size_t at = 0, len; at < n; at += len) {
        hx_tcp_head_t h;
        len = length_of(bytes + at, n - at);
        if (len < sizeof h)
            return false;
        memcpy(&h, bytes + at, sizeof h);
        size_t rows = sizeof h + (size_t)h.nrows * sizeof(hx_tcp_row_t);
        bool payload = h.type == HX_TCP_WRITE || h.type == HX_TCP_DATA;
        bool whole = h.nrows <= HX_TCP_ROWS_MAX && h.nbytes <= HX_TCP_MESSAGE_MAX &&
                     len == rows + (payload ? h.nbytes : 0) && (payload || len == rows);
        if (h.region < REGIONS) {
            uint64_t key = regions[h.region]->rkey;
            h.region = hx_region_id(regions[h.region]);
            h.rkey = h.rkey ? h.rkey : key;
        }
        if (h.type == HX_TCP_DATA || h.type == HX_TCP_DONE) {
            *answers_p = true;
            if (h.id < QUESTIONS) {
                answered[h.id] |=
                    h.id ? h.type == HX_TCP_DONE && !h.status : h.type == HX_TCP_DATA && h.nbytes == READ_NBYTES;
                h.id = questions[h.id];
            } else if (h.id < 2 * QUESTIONS) {
                h.id = questions[h.id - QUESTIONS] - (1ull << 32);
            }
        }
        bool right = !h.head_crc;
        if (whole && h.flags == HX_TCP_CHECKSUM) {
            static hx_tcp_row_t aligned[HX_TCP_ROWS_MAX];
            memcpy(aligned, bytes + at + sizeof h, rows - sizeof h);
            h.crc = payload && !h.crc ? hx_crc32c(0, bytes + at + rows, h.nbytes) : h.crc;
            h.head_crc = right ? hx_tcp_head_crc(&h, aligned) : h.head_crc;
        } else {
            right = right && !h.crc;
        }
        good = good && whole && right && in_order(&h, bytes + at + sizeof h);
        asked += whole ? h.nbytes : 0;
        messages++;
        memcpy(bytes + at, &h, sizeof h);
    }
    return good && asked <= WINDOW && messages <= WINDOW_MESSAGES; /* nobody owes a peer more */
}

/* ---- memory ---- */

static uint8_t *memory_of(int region)
{
    return arena + GUARD + (size_t)region * (N + GUARD);
}

static void fill_secret(uint8_t *at, size_t n)
{
    for (size_t i = 0; i < n; i += sizeof secret)
        memcpy(at + i, &secret, sizeof secret);
}

static void must_be_secret(const uint8_t *at, size_t n)
{
    uint64_t differs = 0, word;
    for (size_t i = 0; i < n; i += sizeof word) {
        memcpy(&word, at + i, sizeof word);
        differs |= word ^ secret;
    }
    MUST(differs == 0);
}

static void check_memory(void)
{
    for (int i = 0; i <= REGIONS; i++) {
        uint8_t *guard = memory_of(i) - GUARD;
        ASAN_UNPOISON_MEMORY_REGION(guard, GUARD);
        must_be_secret(guard, GUARD);
        ASAN_POISON_MEMORY_REGION(guard, GUARD);
    }
    must_be_secret(memory_of(HIDDEN), N);
    must_be_secret(memory_of(RW) + REVOKED, REVOKED_END - REVOKED);
    uint8_t differs = 0;
    for (size_t i = 0; i < N; i++)
        differs |= memory_of(RO)[i] ^ 0x11;
    MUST(differs == 0);
    differs = 0;
    for (size_t i = 0; i < N; i++)
        differs |= i / 100 == 0 || i / 100 == 10 || i / 100 == 50 ? 0 : memory_of(MINE)[i] ^ 0x22;
    MUST(differs == 0); /* but where our read puts what it gets */
}

/* ---- what the engine says ---- */

static uint8_t *output;
static size_t output_len;
static unsigned nquestions;
static bool alive;

static void take_output(void)
{
    size_t at = 0, len;
    for (; output_len - at >= sizeof(hx_tcp_head_t); at += len) {
        hx_tcp_head_t h;
        memcpy(&h, output + at, sizeof h);
        MUST(h.magic == HX_TCP_MAGIC && h.type >= HX_TCP_WRITE && h.type <= HX_TCP_DONE);
        MUST(h.nrows <= HX_TCP_ROWS_MAX && h.nbytes <= HX_TCP_MESSAGE_MAX);
        bool payload = h.type == HX_TCP_WRITE || h.type == HX_TCP_DATA;
        len = sizeof h + h.nrows * sizeof(hx_tcp_row_t) + (payload ? h.nbytes : 0);
        if (len > output_len - at)
            break;
        if (h.type <= HX_TCP_READ && nquestions < QUESTIONS)
            questions[nquestions++] = h.id;
        alive |= h.type >= HX_TCP_DATA && h.id == SENTINEL;
        for (size_t i = 0; payload && h.type == HX_TCP_DATA && i + sizeof secret <= h.nbytes; i++) {
            uint64_t word;
            memcpy(&word, output + at + sizeof h + i, sizeof word);
            MUST(word != secret);
        }
    }
    memmove(output, output + at, output_len - at);
    output_len -= at;
}

/* False: the connection has ended. */
static bool hear(int fd)
{
    ssize_t n = recv(fd, output + output_len, OUTPUT - output_len, MSG_DONTWAIT);
    if (n > 0) {
        output_len += (size_t)n;
        take_output();
        return true;
    }
    return n < 0 && (errno == EAGAIN || errno == EINTR);
}

static bool wait_on(int fd, short events)
{
    struct pollfd pfd = {.fd = fd, .events = events};
    int n = poll(&pfd, 1, PATIENCE * 1000);
    MUST(n > 0); /* it neither goes on nor ends */
    return true;
}

static bool say(int fd, const uint8_t *bytes, size_t n, size_t piece)
{
    while (n) {
        ssize_t sent = send(fd, bytes, n < piece ? n : piece, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno != EAGAIN)
            return false;
        if (sent < 0)
            wait_on(fd, POLLIN | POLLOUT);
        else
            bytes += sent, n -= (size_t)sent;
        if (!hear(fd))
            return false;
    }
    return true;
}

/* ---- the peer's control link ---- */

static void link_again(void)
{
    uint8_t body[sizeof(hx_entry_t) + 6];
    hx_entry_t e = {.id = 1, .rkey = 7, .nbytes = N, .kind = HX_KIND_FOREIGN, .access = 3, .name_len = 6};
    if (control >= 0)
        close(control);
    control = raw_link(true, "fuzzer");
    memcpy(body, &e, sizeof e);
    memcpy(body + sizeof e, "theirs", 6);
    say_frame(control, HX_F_REGION_ADD, 0, body, sizeof body, -1);
    say_frame(control, HX_F_TABLE_END, 0, NULL, 0, -1);
    WAIT(remote(&b, "theirs") != NULL && b.ready == b.up && b.up > 0);
    MUST(!failures);
}

static void mind_control(void)
{
    static uint8_t bytes[HX_FRAME_MAX];
    struct pollfd pfd = {.fd = control, .events = POLLIN};
    while (poll(&pfd, 1, 0) > 0) {
        hx_frame_t head;
        if (recv(control, &head, sizeof head, MSG_WAITALL) != sizeof head)
            break; /* it holds this connection's offences against the peer: also an end */
        size_t n = head.length - sizeof head;
        MUST(n <= sizeof bytes && (!n || recv(control, bytes, n, MSG_WAITALL) == (ssize_t)n));
        if (head.type == HX_F_PING)
            say_frame(control, HX_F_PONG, head.arg, NULL, 0, -1);
    }
    pump(&b);
    if (b.lost == b.up)
        link_again();
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    static const uint32_t access[REGIONS] = {HX_ACCESS_READ | HX_ACCESS_WRITE, HX_ACCESS_READ, HX_ACCESS_WRITE,
                                             HX_ACCESS_READ | HX_ACCESS_WRITE, HX_ACCESS_READ | HX_ACCESS_WRITE};
    static const char *const names[REGIONS] = {"rw", "ro", "wo", NULL, NULL};
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    secret = ((uint64_t)ts.tv_nsec * 0x9e3779b97f4a7c15ull) ^ (uint64_t)ts.tv_sec << 32;
    output = malloc(OUTPUT);
    arena = mmap(NULL, REGIONS * (N + GUARD) + GUARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    fill_secret(arena, REGIONS * (N + GUARD) + GUARD);
    memset(memory_of(RW), 0x33, REVOKED);
    memset(memory_of(RW) + REVOKED_END, 0x33, N - REVOKED_END);
    memset(memory_of(RO), 0x11, N);
    memset(memory_of(MINE), 0x22, N);
    open_under_test("fuzz-receive");
    for (int i = 0; i < REGIONS; i++)
        regions[i] = lend(&b, memory_of(i), N, access[i], names[i]);
    link_again();
    uint64_t span[2] = {REVOKED, REVOKED_END - REVOKED};
    MUST(hx_region_revoke(regions[RW], NULL, span, 1, 1) == HX_OK);
    WAIT(b.done[1].count == 1);
    check_memory();
    return 0;
}

/* Our end of a new data connection. */
static int connection(const uint8_t *early, size_t n)
{
    int ends[2];
    MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    MUST(fcntl(ends[0], F_SETFL, O_NONBLOCK) == 0);
    hx_providers_take_socket(b.ep, ends[0], 0, early, n);
    return ends[1];
}

static void hang_up(int fd)
{
    shutdown(fd, SHUT_WR);
    while (hear(fd))
        wait_on(fd, POLLIN);
    close(fd);
}

/* The connection that they were asked on is gone. That nothing of a write is on its way any more shows when its stream is
 * connected again. */
static void settle_questions(const uint64_t handles[QUESTIONS])
{
    for (unsigned i = 0; i < QUESTIONS; i++)
        hx_cancel(b.engine, handles[i]);
    output_len = 0;
    int fd = connection(NULL, 0);
    for (unsigned i = 0; i < QUESTIONS; i++) {
        WAIT(atomic_load(&b.of[i].finals) == 1);
        MUST(b.of[i].status != HX_OK || answered[i]);
    }
    hang_up(fd);
}

/* Two operations whose answers the input may hold: a read of 300 bytes in three rows, a write of 100. */
static void ask(int fd, uint64_t handles[QUESTIONS])
{
    static const uint64_t here[3] = {0, 1000, 5000}, source = 20000, there[3] = {0, 200, 400};
    hx_segment_t seg = {.local = regions[MINE],
                        .remote = remote(&b, "theirs"),
                        .rkey = 7,
                        .local_off = here,
                        .remote_off = there,
                        .each = 100,
                        .n = 3};
    uint64_t index;
    for (unsigned i = 0; i < QUESTIONS; i++) {
        b.of[i].finals = b.of[i].earlies = 0;
        seg.n = i ? 1 : 3;
        seg.local_off = i ? &source : here;
        MUST(post_rows(&b, b.ep, i ? HX_WRITE : HX_READ, i, HX_EPOCH_NOW, &seg, 1, &handles[i], &index) == HX_OK);
        while (nquestions <= i)
            MUST(wait_on(fd, POLLIN) && hear(fd));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const size_t early_sizes[] = {0, 20, sizeof(hx_tcp_head_t) + 1, 600};
    bool answers, good = false;
    uint64_t handles[QUESTIONS];
    if (!size)
        return 0;
    size_t zeros = data[0] & 8 ? ZEROS : 0, n = size - 1 + zeros, early = early_sizes[data[0] & 3],
           piece = data[0] & 4 ? 61 : SIZE_MAX;
    uint8_t *bytes = calloc(n + 1, 1);
    memcpy(bytes, data + 1, n - zeros);
    resolve(bytes, n, &answers); /* are there any? */
    memcpy(bytes, data + 1, n - zeros);
    memset(answered, 0, sizeof answered);
    mind_control();
    output_len = nquestions = 0;
    alive = false;
    early = answers || early > n ? 0 : early; /* questions come first, so answers cannot come with the handshake */
    if (!answers)
        good = resolve(bytes, n, &answers);
    int fd = connection(bytes, early);
    if (answers) {
        ask(fd, handles);
        good = resolve(bytes, n, &answers);
    }
    bool up = say(fd, bytes + early, n - early, piece);
    if (good) { /* then it must have been understood to its end */
        uint8_t last[sizeof question_for_life + sizeof(hx_tcp_row_t)];
        hx_tcp_head_t h = question_for_life;
        hx_tcp_row_t row = {0, 1};
        h.region = hx_region_id(regions[RO]);
        h.rkey = regions[RO]->rkey;
        memcpy(last, &h, sizeof h);
        memcpy(last + sizeof h, &row, sizeof row);
        MUST(up && say(fd, last, sizeof last, SIZE_MAX));
        while (!alive)
            MUST(wait_on(fd, POLLIN) && hear(fd));
    }
    hang_up(fd);
    if (answers)
        settle_questions(handles);
    check_memory();
    MUST(!failures);
    free(bytes);
    return 0;
}

void fuzz_end(void); /* of driver.c: what is left then has leaked */
void fuzz_end(void)
{
    close(control);
    WAIT(b.lost == b.up);
    for (int i = 0; i < REGIONS; i++)
        hx_region_unref(regions[i]);
    side_close(&b);
    end_folder();
    free(output);
    MUST(!failures);
}
