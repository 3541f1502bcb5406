/* SPDX-License-Identifier: Apache-2.0 */
/* Engines as a test drives them: through hx.h alone, each with the books of what it was told. A side belongs to the
 * thread that pumps it; posts may come from any thread. */
#ifndef PAIR_H
#define PAIR_H

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "hx.h"

enum { TOKENS = 1 << 17, REMOTES = 64, DONES = 4096, NOTES = 1024, PATIENCE = 30 };

typedef struct {
    _Atomic uint32_t finals, earlies; /* records with quiesced 1, and 0 */
    uint32_t status, early_status, code;
    int32_t sys_errno;
    uint64_t nbytes, index;
    bool early_says;   /* in words */
    bool says_connect; /* that it could not be connected */
} outcome_t;

typedef struct {
    uint32_t count, status;
    uint64_t value;
    uint64_t span[2]; /* the first that is pinned */
} answer_t;

typedef struct {
    uint64_t flags;
    uint32_t len, topic_len;
    char topic[16], payload[48];
} seen_note_t;

typedef struct {
    hx_engine_t *engine;
    char path[96];
    hx_endpoint_t *ep; /* of the newest peer */
    hx_rregion_t *remote[REMOTES];
    char names[REMOTES][24];
    size_t nremote;
    uint32_t up, ready, lost, refused, failed, deleted, nnotes, usable, unusable, nnotifies, warnings;
    uint32_t lost_status, failed_status, refused_status;
    char text[HX_TEXT_MAX];
    outcome_t *of;
    answer_t *done;
    seen_note_t *notes;
    bool keep_notes;   /* do not give credit for them */
    bool skip_regions; /* do not keep handles to what peers announce */
} side_t;

static side_t *sides[8];
static size_t nsides;
static char folder[64];

static inline void take_event(side_t *s, hx_event_t *ev)
{
    switch (ev->kind) {
    case HX_EV_PEER_UP:
        s->up++;
        hx_endpoint_unref(s->ep);
        s->ep = ev->ep;
        hx_endpoint_ref(s->ep);
        break;
    case HX_EV_PEER_READY:
        s->ready++;
        break;
    case HX_EV_PEER_LOST:
        s->lost++;
        s->lost_status = ev->status;
        break;
    case HX_EV_CONNECT_FAILED:
        s->failed++;
        s->failed_status = ev->status;
        break;
    case HX_EV_REFUSED:
        s->refused++;
        s->refused_status = ev->status;
        break;
    case HX_EV_REGION_ADD:
        if (!s->skip_regions && CHECK(s->nremote < REMOTES && ev->name_len < sizeof s->names[0])) {
            s->remote[s->nremote] = ev->rregion;
            hx_rregion_ref(ev->rregion);
            memset(s->names[s->nremote], 0, sizeof s->names[0]);
            memcpy(s->names[s->nremote++], ev->name, ev->name_len);
        }
        break;
    case HX_EV_REGION_DEL:
        s->deleted++;
        for (size_t i = 0; i < s->nremote; i++)
            if (s->remote[i] == ev->rregion) {
                hx_rregion_unref(s->remote[i]);
                s->remote[i] = s->remote[--s->nremote];
                memcpy(s->names[i], s->names[s->nremote], sizeof s->names[0]);
            }
        break;
    case HX_EV_NOTE: {
        seen_note_t *note = &s->notes[s->nnotes % NOTES];
        *note = (seen_note_t){.flags = ev->value, .len = ev->blob_len, .topic_len = ev->name_len};
        memcpy(note->topic, ev->name, ev->name_len < sizeof note->topic ? ev->name_len : sizeof note->topic);
        memcpy(note->payload, ev->blob, ev->blob_len < sizeof note->payload ? ev->blob_len : sizeof note->payload);
        s->nnotes++;
        if (!s->keep_notes)
            hx_endpoint_credit(ev->ep, 1);
        break;
    }
    case HX_EV_REGION_READY:
        ev->status == HX_OK ? s->usable++ : s->unusable++;
        break;
    case HX_EV_DONE: {
        answer_t *done = &s->done[ev->token % DONES];
        done->count++;
        done->status = ev->status;
        done->value = ev->value;
        if (ev->blob_len >= sizeof done->span)
            memcpy(done->span, ev->blob, sizeof done->span);
        break;
    }
    case HX_EV_NOTIFY:
        s->nnotifies++;
        snprintf(s->text, sizeof s->text, "%.*s", (int)ev->blob_len, ev->blob);
        break;
    case HX_EV_WARNING:
        s->warnings++;
        break;
    default:
        CHECK(!"an event of a kind that does not exist");
    }
    if (ev->kind == HX_EV_PEER_LOST || ev->kind == HX_EV_CONNECT_FAILED || ev->kind == HX_EV_REFUSED)
        snprintf(s->text, sizeof s->text, "%.*s", (int)ev->blob_len, ev->blob);
    hx_event_free(ev);
}

/* The consumer's half of the doorbell protocol. True: something had come. */
static inline bool pump(side_t *s)
{
    hx_completion_t records[16];
    bool more, any = false;
    do {
        size_t n = hx_engine_drain(s->engine, records, 16, &more);
        for (size_t i = 0; i < n; i++) {
            if (records[i].detail && getenv("HX_TEST_SAY"))
                fprintf(stderr, "  detail: %s\n", records[i].detail);
            bool says = records[i].detail != NULL;
            bool says_connect = says && strstr(records[i].detail, "cannot be connected");
            free(records[i].detail);
            if (!CHECK(records[i].token < TOKENS))
                continue;
            outcome_t *o = &s->of[records[i].token];
            if (records[i].quiesced) {
                o->status = records[i].status;
                o->sys_errno = records[i].sys_errno;
                o->code = records[i].code;
                o->says_connect = says_connect;
                o->nbytes = records[i].nbytes;
                o->index = records[i].index;
                CHECK_EQ(atomic_fetch_add(&o->finals, 1), 0);
            } else {
                o->early_status = records[i].status;
                o->early_says = says;
                CHECK_EQ(atomic_load(&o->finals), 0);
                CHECK_EQ(atomic_fetch_add(&o->earlies, 1), 0);
            }
        }
        any |= n > 0;
    } while (more);
    for (hx_event_t *ev; (ev = hx_engine_next_event(s->engine));) {
        take_event(s, ev);
        any = true;
    }
    return any;
}

/* Sleeps on the descriptors, which is what proves the doorbells. */
static inline void pump_all(int ms)
{
    struct pollfd pfds[8];
    for (size_t i = 0; i < nsides; i++)
        pfds[i] = (struct pollfd){.fd = hx_engine_fileno(sides[i]->engine), .events = POLLIN};
    poll(pfds, nsides, ms);
    for (size_t i = 0; i < nsides; i++)
        pump(sides[i]);
}

/* A lost wake-up shows as a condition that comes true without a bell, or never. */
#define WAIT(condition)                          \
    do {                                         \
        double end_ = seconds() + PATIENCE;      \
        while (!(condition) && seconds() < end_) \
            pump_all(1000);                      \
        CHECK(condition);                        \
    } while (0)

/* As WAIT, for what no bell announces. */
#define SOON(condition)                          \
    do {                                         \
        double end_ = seconds() + PATIENCE;      \
        while (!(condition) && seconds() < end_) \
            pump_all(1);                         \
        CHECK(condition);                        \
    } while (0)

static inline hx_config_t config_of(const char *name)
{
    static uint8_t serial;
    hx_config_t c;
    hx_config_defaults(&c);
    c.name = name;
    memset(c.incarnation, ++serial, sizeof c.incarnation);
    c.incarnation[0] = (uint8_t)getpid();
    c.copy_threads = 2;
    c.queue_depth = 256;
    c.peer_depth = 256;
    return c;
}

static inline void side_open(side_t *s, hx_config_t *c)
{
    char text[HX_TEXT_MAX];
    memset(s, 0, sizeof *s);
    if (!folder[0]) {
        strcpy(folder, "/tmp/hx-test-XXXXXX");
        CHECK(mkdtemp(folder) != NULL);
    }
    snprintf(s->path, sizeof s->path, "%s/%.20s-%d", folder, c->name, getpid());
    if (!c->tcp_host || c->unix_path)
        c->unix_path = s->path;
    s->of = calloc(TOKENS, sizeof *s->of);
    s->done = calloc(DONES, sizeof *s->done);
    s->notes = calloc(NOTES, sizeof *s->notes);
    hx_status_t status = hx_engine_open(c, &s->engine, text);
    if (!CHECK(status == HX_OK)) {
        fprintf(stderr, "  %s: %s\n", hx_status_name(status), text);
        exit(EXIT_FAILURE);
    }
    sides[nsides++] = s;
}

static inline void side_drop(side_t *s)
{
    for (size_t i = 0; i < nsides; i++)
        if (sides[i] == s)
            sides[i] = sides[--nsides];
    for (size_t i = 0; i < s->nremote; i++)
        hx_rregion_unref(s->remote[i]);
    hx_endpoint_unref(s->ep);
    s->nremote = 0;
    s->ep = NULL;
}

/* Everything that was posted has completed; nothing is left. */
static inline void side_close(side_t *s)
{
    hx_stats_t stats;
    hx_engine_stop(s->engine);
    pump(s);
    CHECK(!pump(s));
    hx_engine_stats(s->engine, &stats);
    CHECK_EQ(stats.live_ops, 0);
    CHECK_EQ(stats.peers, 0);
    CHECK_EQ(stats.live_regions, 0);
    CHECK_EQ(stats.posted, stats.completed);
    hx_engine_close_fds(s->engine);
    side_drop(s);
    hx_engine_free(s->engine);
    free(s->of);
    free(s->done);
    free(s->notes);
}

static inline void end_folder(void)
{
    if (folder[0])
        CHECK_EQ(rmdir(folder), 0); /* the sockets are gone */
}

static inline hx_status_t dial(side_t *a, const side_t *b, uint64_t token)
{
    hx_target_t target = {.path = b->path, .token = token};
    return hx_connect(a->engine, &target);
}

static inline void link_up(side_t *a, side_t *b)
{
    uint32_t ra = a->ready, rb = b->ready;
    CHECK_EQ(dial(a, b, 0), HX_OK);
    WAIT(a->ready == ra + 1 && b->ready == rb + 1);
}

/* ---- memory ---- */

static inline hx_region_t *allocate(side_t *s, uint64_t nbytes, uint32_t access, const char *name)
{
    hx_region_t *region = NULL;
    uint32_t usable = s->usable;
    CHECK_EQ(hx_region_allocate(s->engine, nbytes, access, &region), HX_OK);
    if (name)
        CHECK_EQ(hx_region_announce(region, name, strlen(name), "doc", 3), HX_OK);
    WAIT(s->usable > usable);
    return region;
}

static inline hx_region_t *lend(side_t *s, void *memory, uint64_t nbytes, uint32_t access, const char *name)
{
    hx_region_t *region = NULL;
    CHECK_EQ(hx_region_register(s->engine, memory, nbytes, access, &region), HX_OK);
    if (name)
        CHECK_EQ(hx_region_announce(region, name, strlen(name), NULL, 0), HX_OK);
    return region;
}

static inline hx_rregion_t *remote(side_t *s, const char *name)
{
    for (size_t i = 0; i < s->nremote; i++)
        if (!strcmp(s->names[i], name) && hx_rregion_alive(s->remote[i]))
            return s->remote[i];
    return NULL;
}

static inline void fill(void *memory, size_t n, uint64_t seed)
{
    uint64_t state = seed | 1;
    for (size_t i = 0; i < n; i++)
        ((uint8_t *)memory)[i] = (uint8_t)(draw(&state) >> 32);
}

static inline hx_region_t *lend_and_wait(side_t *s, void *memory, uint64_t nbytes, const char *name)
{
    uint32_t usable = s->usable;
    hx_region_t *r = lend(s, memory, nbytes, HX_ACCESS_READ | HX_ACCESS_WRITE, name);
    WAIT(s->usable > usable);
    return r;
}

static inline void deregister(side_t *s, hx_region_t *region, uint64_t token, uint32_t status)
{
    CHECK_EQ(hx_region_deregister(region, token), HX_OK);
    WAIT(s->done[token].count == 1);
    CHECK_EQ(s->done[token].status, status);
    hx_region_unref(region);
}

static inline bool all_are(const uint8_t *memory, size_t n, uint8_t value)
{
    size_t i = 0;
    while (i < n && memory[i] == value)
        i++;
    return i == n;
}

/* ---- posting ---- */

static inline hx_status_t post_rows(side_t *s, hx_endpoint_t *ep, uint32_t kind, uint64_t token, uint64_t epoch,
                                    const hx_segment_t *segments, size_t n, uint64_t *handle_p, uint64_t *index_p)
{
    uint64_t handle = 0, index = UINT64_MAX;
    bool done = false;
    hx_post_t post = {.kind = kind, .token = token, .epoch = epoch, .segments = segments, .nsegments = n};
    hx_status_t status = hx_post(ep, &post, &handle, &index, &done);
    if (status == HX_OK && done) {
        s->of[token].nbytes = 0;
        for (size_t i = 0; i < n; i++)
            for (size_t row = 0; row < segments[i].n; row++)
                s->of[token].nbytes += segments[i].nbytes ? segments[i].nbytes[row] : segments[i].each;
        CHECK_EQ(atomic_fetch_add(&s->of[token].finals, 1), 0);
    }
    if (handle_p)
        *handle_p = done ? 0 : handle;
    if (index_p)
        *index_p = index;
    return status;
}

static inline hx_status_t post_one(side_t *s, uint32_t kind, uint64_t token, hx_region_t *local, uint64_t local_off,
                                   hx_rregion_t *rregion, uint64_t remote_off, uint64_t n, uint64_t *handle_p)
{
    hx_segment_t seg = {.local = local,
                        .remote = rregion,
                        .rkey = hx_rregion_rkey(rregion),
                        .local_off = &local_off,
                        .remote_off = &remote_off,
                        .each = n,
                        .n = 1};
    return post_rows(s, s->ep, kind, token, HX_EPOCH_NOW, &seg, 1, handle_p, NULL);
}

static inline hx_status_t post_note(side_t *s, uint64_t token, const char *payload, const hx_segment_t *segments,
                                    size_t n, uint64_t *handle_p)
{
    uint64_t handle = 0, index;
    bool done = false;
    hx_post_t post = {.kind = n ? HX_WRITE : HX_NOTE,
                      .token = token,
                      .epoch = HX_EPOCH_NOW,
                      .segments = segments,
                      .nsegments = n,
                      .has_note = true,
                      .note = payload,
                      .note_len = strlen(payload),
                      .topic = "t",
                      .topic_len = 1};
    hx_status_t status = hx_post(s->ep, &post, &handle, &index, &done);
    CHECK(!done);
    if (handle_p)
        *handle_p = handle;
    return status;
}

#define WAIT_FINAL(side, token, expected)                  \
    do {                                                   \
        WAIT(atomic_load(&(side)->of[token].finals) == 1); \
        CHECK_EQ((side)->of[token].status, expected);      \
    } while (0)

/* ---- what leaks ---- */

typedef struct {
    int descriptors, threads;
} census_t;

static inline void *nothing(void *arg)
{
    return arg;
}

static inline census_t census(void)
{
    pthread_t thread; /* a sanitizer may start a thread of its own with the first one */
    if (pthread_create(&thread, NULL, nothing, NULL) == 0)
        pthread_join(thread, NULL);
    usleep(1000);
    return (census_t){open_descriptors(), live_threads()};
}

static inline void census_unchanged(census_t before)
{
    double end = seconds() + 5; /* a joined thread stands in /proc for a moment longer */
    while (seconds() < end && (open_descriptors() != before.descriptors || live_threads() != before.threads))
        usleep(1000);
    CHECK_EQ(open_descriptors(), before.descriptors);
    CHECK_EQ(live_threads(), before.threads);
}

#endif
