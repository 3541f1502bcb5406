// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: its settings and counters, of the whole process. They live in libacl_rt.so, which both
// other users have loaded; README.md has the table.
#ifndef HIXL_STANDIN_KNOBS_H
#define HIXL_STANDIN_KNOBS_H

#include <cstddef>
#include <cstdint>

// name, key, default
#define STANDIN_KNOBS(X)                                   \
    X(FLAVOUR, "flavour", FLAVOUR_HIXL)                    \
    X(PLACEMENT, "placement", PLACEMENT_DEVICE)            \
    X(LATENCY_US, "latency_us", 0)                         \
    X(BANDWIDTH_MBS, "bandwidth_mbs", 0)                   \
    X(INSTANT, "instant", 0)                               \
    X(BLOCK_POST_MS, "block_post_ms", 0)                   \
    X(FAIL_NTH, "fail_nth", -1)                            \
    X(FAIL_CODE, "fail_code", 0)                           \
    X(FAIL_POLL_CODE, "fail_poll_code", 0)                 \
    X(LATCH, "latch", 1)                                   \
    X(WAIT_FOREVER_NTH, "wait_forever_nth", -1)            \
    X(HANG_DEVICE, "hang_device", 0)                       \
    X(HANG_DISCONNECT_MS, "hang_disconnect_ms", 0)         \
    X(HANG_REINIT, "hang_reinit", 1)                       \
    X(CONNECT_FAIL, "connect_fail", 0)                     \
    X(CONNECT_FAIL_N, "connect_fail_n", -1)                \
    X(CONNECT_MS, "connect_ms", 0)                         \
    X(REGISTER_FAIL, "register_fail", 0)                   \
    X(MAX_REGIONS, "max_regions", 4096)                    \
    X(MAX_UNPOLLED, "max_unpolled", 0)                     \
    X(MAX_PEERS_OUTSTANDING, "max_peers_outstanding", 128) \
    X(MAX_NOTIFIES, "max_notifies", 4096)                  \
    X(NOTIFY_FAIL, "notify_fail", 0)                       \
    X(NOTIFY_ACK_MS, "notify_ack_ms", 0)                   \
    X(DEVICES, "devices", 2)                               \
    X(DEVICE_MEM_MB, "device_mem_mb", 65536)               \
    X(MALLOC_OFFSET, "malloc_offset", 0)                   \
    X(EVENT_MS, "event_ms", 0)                             \
    X(ALIGN, "align", 0)                                   \
    X(HOST_NEEDS_PINNED, "host_needs_pinned", 0)           \
    X(SAME_DEVICE, "same_device", 0)                       \
    X(FINALIZE_MS, "finalize_ms", -1)                      \
    X(HEARTBEAT_MS, "heartbeat_ms", 10000)

#define STANDIN_TEXTS(X)                      \
    X(BLOCK_POST_PEER, "block_post_peer", "") \
    X(SOC, "soc", "Ascend910B4")              \
    X(ERR_MSG, "err_msg", "")

#define STANDIN_STATS(X)                            \
    X(POSTS, "posts")                               \
    X(BYTES, "bytes")                               \
    X(POLLS, "polls")                               \
    X(BULK_POLLS, "bulk_polls")                     \
    X(POLLS_DURING_POST, "polls_during_post")       \
    X(POLLS_BLOCKED, "polls_blocked")               \
    X(STALE_POLLS, "stale_polls")                   \
    X(SYNC_CALLS, "sync_calls")                     \
    X(POSTING, "posting")                           \
    X(MAX_CONCURRENT_POSTS, "max_concurrent_posts") \
    X(OUTSTANDING, "outstanding")                   \
    X(CONNECTS, "connects")                         \
    X(DISCONNECTS, "disconnects")                   \
    X(LINKS, "links")                               \
    X(REGISTERS, "registers")                       \
    X(REGISTERED, "registered")                     \
    X(NOTIFIES, "notifies")                         \
    X(GET_NOTIFIES, "get_notifies")                 \
    X(INITIALIZES, "initializes")                   \
    X(FINALIZES, "finalizes")                       \
    X(AFTER_FINALIZE, "after_finalize")             \
    X(ALLOCATIONS, "allocations")

enum Flavour { FLAVOUR_HIXL, FLAVOUR_COMM, FLAVOUR_FABRIC };
enum Placement { PLACEMENT_DEVICE, PLACEMENT_HOST };

#define STANDIN_KNOB(name, key, value) KNOB_##name,
enum Knob { STANDIN_KNOBS(STANDIN_KNOB) KNOB_COUNT };
#undef STANDIN_KNOB
#define STANDIN_TEXT(name, key, value) TEXT_##name,
enum Text { STANDIN_TEXTS(STANDIN_TEXT) TEXT_COUNT };
#undef STANDIN_TEXT
#define STANDIN_STAT(name, key) STAT_##name,
enum Stat { STANDIN_STATS(STANDIN_STAT) STAT_COUNT };
#undef STANDIN_STAT

#pragma GCC visibility push(default)
extern "C" {
int hixl_standin_knob_set(const char *key, const char *value);
uint64_t hixl_standin_stat_read(const char *key);

int64_t hixl_standin_knob(int knob);
// For knobs that name the nth call: true for that call, once. Counts from the last setting.
bool hixl_standin_nth(int knob);
// For knobs that say how often: true while the knob is not 0, counting it down unless it is negative.
bool hixl_standin_take(int knob);
// Waits until the knob is 0, or a time (CLOCK_MONOTONIC nanoseconds).
void hixl_standin_wait_while(int knob, int64_t until);

void hixl_standin_text(int text, char *buffer, size_t size);
// The text if it is not empty, which it then becomes.
bool hixl_standin_text_take(int text, char *buffer, size_t size);

// Adds and returns the new value.
int64_t hixl_standin_count(int stat, int64_t delta);
void hixl_standin_high(int stat, int64_t value);
}
#pragma GCC visibility pop

#endif
