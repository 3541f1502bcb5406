/* SPDX-License-Identifier: Apache-2.0 */
/* What a stranger, or a peer whose handshake is over, may send on a control link: frames of every kind, and what is none.
 *
 * Byte 0 of an input: bit 0, by TCP instead of by a unix socket; bit 1, the handshake is over. Frames follow (link.h).
 *
 * Checked, beside what the sanitizers see: the link ends when we have said all; a second peer is answered by then; nothing of
 * the engine's memory changes, and no descriptor is left. */
#define _GNU_SOURCE
#include "mutate.h"
#include "rawpeer.h"

enum { N = 16384, FRIEND_EVERY = 16 };

static uint8_t memory[N];
static hx_region_t *region;
static int friend_fd = -1, descriptors;
static char friend_name[24];

static size_t length_of(const uint8_t *at, size_t have)
{
    hx_frame_t h;
    if (have < sizeof h)
        return have;
    memcpy(&h, at, sizeof h);
    return h.length < sizeof h ? sizeof h : h.length < have ? h.length : have;
}

static size_t body_of(uint16_t type, uint8_t *out, uint64_t *random)
{
    uint64_t words[5];
    size_t n = 0;
    for (size_t i = 0; i < 5; i++)
        words[i] = draw_below(random, 4) ? draw_below(random, 20) : interesting(random);
    switch (type) {
    case HX_F_HELLO:
    case HX_F_ANSWER:
        return raw_greeting(out, "mallory");
    case HX_F_AUTH:
    case HX_F_READY:
    case HX_F_DATA_PROOF:
        memset(out, 0, 32);
        return 32;
    case HX_F_REGION_ADD: {
        hx_entry_t e = {.id = words[0],
                        .nbytes = words[1],
                        .kind = 1 + (uint32_t)draw_below(random, 4),
                        .access = 3,
                        .name_len = 1 + (uint32_t)draw_below(random, 8),
                        .blob_len = (uint32_t)draw_below(random, 8)};
        memcpy(out, &e, sizeof e);
        memset(out + sizeof e, 'n', e.name_len + e.blob_len);
        return sizeof e + e.name_len + e.blob_len;
    }
    case HX_F_NOTE: {
        hx_note_head_t note = {.topic_len = (uint32_t)draw_below(random, 4)};
        memcpy(out, &note, sizeof note);
        memset(out + sizeof note, 't', 10);
        return sizeof note + 10;
    }
    case HX_F_PATH: {
        uint32_t len = 3;
        memcpy(out, &len, sizeof len);
        memcpy(out + sizeof len, "tcp", 3);
        memcpy(out + 7, words, 16);
        return 23;
    }
    case HX_F_REVOKE:
    case HX_F_GRANT:
        n = 3 * sizeof *words;
        break;
    case HX_F_MAP_ANSWER:
        n = 4;
        break;
    case HX_F_DATA:
        n = 40;
        break;
    default:
        n = draw_below(random, 3) ? 0 : sizeof words;
    }
    memcpy(out, words, n);
    return n;
}

static size_t make_frame(uint8_t *out, size_t room, uint64_t *random)
{
    hx_frame_t h = {.type = (uint16_t)(1 + draw_below(random, 26)), .arg = draw_below(random, 6)};
    if (room < sizeof h + HX_HELLO_MAX)
        return 0;
    h.flags = !draw_below(random, 8);
    h.length = (uint32_t)(sizeof h + body_of(h.type, out + sizeof h, random));
    memcpy(out, &h, sizeof h);
    return h.length;
}

/* A word of the body. Its length is made to fit, or not. */
static void tweak_body(uint8_t *at, size_t n, uint64_t *random)
{
    size_t words = (n - sizeof(hx_frame_t)) / 4;
    uint64_t v = interesting(random), k = words ? draw_below(random, words < 40 ? words : 40) : 0;
    uint32_t fits = (uint32_t)n;
    if (words)
        memcpy(at + sizeof(hx_frame_t) + k * 4, &v, k + 1 < words ? 8 : 4);
    if (draw_below(random, 2))
        memcpy(at, &fits, sizeof fits);
}

#define FIELD(name) {offsetof(hx_frame_t, name), sizeof(((hx_frame_t *)0)->name)}
static const field_t fields[] = {FIELD(length), FIELD(type), FIELD(type), FIELD(nfds),
                                 FIELD(flags),  FIELD(arg),  FIELD(arg)};
const grammar_t grammar = {.preamble = 1,
                           .head = sizeof(hx_frame_t),
                           .fields = fields,
                           .nfields = sizeof fields / sizeof *fields,
                           .length = length_of,
                           .make = make_frame,
                           .tweak = tweak_body};

/* Somebody else is served meanwhile. */
static void greet_friend(void)
{
    static uint8_t body[HX_FRAME_MAX];
    if (friend_fd < 0)
        friend_fd = raw_link(true, friend_name);
    say_frame(friend_fd, HX_F_PING, 1, NULL, 0, -1);
    hear_frame(friend_fd, HX_F_PONG, body, sizeof body);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    snprintf(friend_name, sizeof friend_name, "friend-%lld", (long long)ts.tv_nsec); /* no input takes it over */
    memset(memory, 0x44, sizeof memory);
    open_under_test("fuzz-link");
    b.skip_regions = true;
    region = lend(&b, memory, sizeof memory, HX_ACCESS_READ | HX_ACCESS_WRITE, "mem");
    greet_friend();
    descriptors = open_descriptors();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t heard[1 << 16];
    static unsigned runs;
    if (!size)
        return 0;
    bool tcp = data[0] & 1, known = data[0] & 2, open = true;
    uint32_t seen = b.lost + b.refused;
    int fd = known ? raw_link(tcp, "peer") : raw_socket(tcp);
    for (size_t at = 1; at < size && open;) {
        struct pollfd pfd = {.fd = fd, .events = POLLIN | POLLOUT};
        MUST(poll(&pfd, 1, PATIENCE * 1000) > 0);
        if (pfd.revents & POLLIN)
            open = recv(fd, heard, sizeof heard, MSG_DONTWAIT) > 0;
        ssize_t n = open ? send(fd, data + at, size - at, MSG_NOSIGNAL | MSG_DONTWAIT) : 0;
        open = open && (n >= 0 || errno == EAGAIN);
        at += n > 0 ? (size_t)n : 0;
        pump(&b);
    }
    shutdown(fd, SHUT_WR);
    ssize_t got;
    while ((got = recv(fd, heard, sizeof heard, 0)) > 0)
        ;
    MUST(got == 0 || errno != EAGAIN); /* it hangs up */
    close(fd);
    WAIT(b.lost + b.refused > seen);
    if (runs++ % FRIEND_EVERY == 0)
        greet_friend();
    uint8_t differs = 0;
    for (size_t i = 0; i < sizeof memory; i++)
        differs |= memory[i] ^ 0x44;
    MUST(differs == 0 && !failures);
    return 0;
}

void fuzz_end(void); /* of driver.c: what is left then has leaked */
void fuzz_end(void)
{
    WAIT(open_descriptors() == descriptors); /* links are freed after their round */
    close(friend_fd);
    WAIT(b.lost == b.up);
    hx_region_unref(region);
    side_close(&b);
    end_folder();
    MUST(!failures);
}
