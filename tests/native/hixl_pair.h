/* SPDX-License-Identifier: Apache-2.0 */
/* Engines with the hixl provider over the stand-in of Huawei's library (tests/hixl_standin), and the stand-in's knobs. */
#ifndef HIXL_PAIR_H
#define HIXL_PAIR_H

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "pair.h"

#define STANDIN (getenv("HIXL_STANDIN_LIB") ? getenv("HIXL_STANDIN_LIB") : "build/hixl_standin/lib64")
#define BINDING "build/native/provider_hixl.so"
#define MS 1000000ull

enum { NBYTES = 1 << 20 };
static uint8_t *here, *there; /* 4 * NBYTES each */

/* ---- the stand-in ---- */

typedef struct {
    const char *engine, *placement;
} flavour_t;

static const flavour_t flavours[] = {{"hixl", "device"}, {"hixl", "host"}, {"comm", "device"}};
enum { FLAVOURS = sizeof flavours / sizeof flavours[0] };

static inline bool on_host(const flavour_t *f)
{
    return !strcmp(f->placement, "host");
}

static int (*set_knob)(const char *, const char *);
static uint64_t (*stat_of)(const char *);

static inline void knob(const char *key, const char *value)
{
    if (!set_knob) {
        set_knob = (int (*)(const char *, const char *))dlsym(RTLD_DEFAULT, "hixl_standin_set");
        stat_of = (uint64_t (*)(const char *))dlsym(RTLD_DEFAULT, "hixl_standin_stat");
    }
    if (CHECK(set_knob != NULL))
        CHECK_EQ(set_knob(key, value), 0);
}

/* The library as the next test wants it. */
static inline void be(const flavour_t *f)
{
    knob("reset", "1");
    knob("finalize_ms", "20");
    knob("flavour", f->engine);
    knob("placement", f->placement);
}

/* False: the library cannot be loaded, and a check has failed. */
static inline bool begin_hixl(void)
{
    char text[HX_TEXT_MAX];
    here = aligned_alloc(4096, 4 * NBYTES);
    there = aligned_alloc(4096, 4 * NBYTES);
    memset(here, 0, 4 * NBYTES);
    memset(there, 0, 4 * NBYTES);
    bool ok = CHECK(hx_hixl_probe(BINDING, STANDIN, text) == HX_OK);
    if (!ok)
        fprintf(stderr, "%s\n", text);
    return ok;
}

static inline int end_hixl(const char *name)
{
    free(here);
    free(there);
    end_folder();
    return report(name);
}

/* ---- engines ---- */

static inline void free_address(char address[64])
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    /* It stays bound, or the port might be somebody else's by the time it is listened on, which takes SO_REUSEADDR. */
    CHECK(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
    CHECK(bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && getsockname(fd, (struct sockaddr *)&a, &len) == 0);
    snprintf(address, 64, "127.0.0.1:%d", ntohs(a.sin_port));
}

static inline hx_config_t hixl_config(const char *name)
{
    hx_config_t c = config_of(name);
    c.transports = HX_TRANSPORT_HIXL;
    c.stall_timeout_ns = 400 * MS;
    c.cancel_grace_ns = 200 * MS;
    return c;
}

/* For tests of what must not wait: whatever stands still there stands longer than a WAIT. */
static inline hx_config_t patient_config(const char *name)
{
    hx_config_t c = hixl_config(name);
    c.stall_timeout_ns = 2 * PATIENCE * 1000 * MS;
    return c;
}

static inline void open_hixl_at(side_t *s, hx_config_t c, int32_t device, const char *address)
{
    hx_hixl_config_t hixl = {
        .binding = BINDING, .library = STANDIN, .local = address, .link = "auto", .device = device};
    c.hixl = &hixl;
    side_open(s, &c);
}

static inline void open_hixl_as(side_t *s, hx_config_t c, int32_t device)
{
    char address[64];
    free_address(address);
    open_hixl_at(s, c, device, address);
}

static inline void open_hixl(side_t *s, const char *name, int32_t device)
{
    open_hixl_as(s, hixl_config(name), device);
}

static inline void open_pair(side_t *a, side_t *b)
{
    open_hixl(a, "hixl-a", 0);
    open_hixl(b, "hixl-b", 1);
    link_up(a, b);
}

#endif
