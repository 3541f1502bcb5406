// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: its settings and counters.
#include "knobs.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace
{
using Clock = std::chrono::steady_clock;

#define STANDIN_KEY(name, key, ...) key,
const char *const knob_keys[] = {STANDIN_KNOBS(STANDIN_KEY)};
const char *const text_keys[] = {STANDIN_TEXTS(STANDIN_KEY)};
const char *const stat_keys[] = {STANDIN_STATS(STANDIN_KEY)};
#undef STANDIN_KEY
#define STANDIN_DEFAULT(name, key, value) value,
const int64_t knob_defaults[] = {STANDIN_KNOBS(STANDIN_DEFAULT)};
const char *const text_defaults[] = {STANDIN_TEXTS(STANDIN_DEFAULT)};
#undef STANDIN_DEFAULT

struct Knobs {
    std::atomic<int64_t> values[KNOB_COUNT];
    std::atomic<int64_t> calls[KNOB_COUNT];
    std::atomic<int64_t> stats[STAT_COUNT];
    std::mutex mutex;
    std::condition_variable changed;
    std::string texts[TEXT_COUNT];

    Knobs()
    {
        for (auto &stat : stats)
            stat = 0;
        to_defaults();
    }

    void to_defaults()
    {
        for (int i = 0; i < KNOB_COUNT; i++) {
            values[i] = knob_defaults[i];
            calls[i] = 0;
        }
        for (int i = 0; i < TEXT_COUNT; i++)
            texts[i] = text_defaults[i];
    }
};

Knobs &knobs()
{
    static Knobs *const one = new Knobs;
    return *one;
}

int find(const char *const *keys, int count, const char *key)
{
    for (int i = 0; i < count; i++)
        if (!std::strcmp(keys[i], key))
            return i;
    return -1;
}

// How many there are now: nothing that a test may set to 0.
bool gauge(int stat)
{
    return stat == STAT_POSTING || stat == STAT_OUTSTANDING || stat == STAT_LINKS || stat == STAT_REGISTERED ||
           stat == STAT_ALLOCATIONS;
}

bool parse(int knob, const char *text, int64_t *value)
{
    const char *const flavours[] = {"hixl", "comm", "fabric"};
    const char *const placements[] = {"device", "host"};
    if (knob == KNOB_FLAVOUR || knob == KNOB_PLACEMENT) {
        const int found = knob == KNOB_FLAVOUR ? find(flavours, 3, text) : find(placements, 2, text);
        *value = found;
        return found >= 0;
    }
    char *end;
    *value = std::strtoll(text, &end, 10);
    return end != text && !*end;
}

// HIXL_STANDIN="key=value,key=value". A mistake in it is fatal: a test that runs without its fault proves nothing.
void from_environment()
{
    const char *const given = std::getenv("HIXL_STANDIN");
    const std::string all = given ? given : "";
    for (size_t at = 0; at < all.size();) {
        const size_t end = std::min(all.find(',', at), all.size());
        const std::string one = all.substr(at, end - at);
        const size_t equals = one.find('=');
        at = end + 1;
        if (one.empty())
            continue;
        if (equals == std::string::npos ||
            hixl_standin_knob_set(one.substr(0, equals).c_str(), one.substr(equals + 1).c_str())) {
            std::fprintf(stderr, "hixl stand-in: HIXL_STANDIN: no such key or value: %s\n", one.c_str());
            std::abort();
        }
    }
}

__attribute__((constructor)) void loaded()
{
    from_environment();
}
} // namespace

int hixl_standin_knob_set(const char *key, const char *value)
{
    if (!key || !value)
        return -1;
    Knobs &all = knobs();
    if (!std::strcmp(key, "reset")) {
        {
            std::lock_guard<std::mutex> lock(all.mutex);
            all.to_defaults();
        }
        from_environment();
        all.changed.notify_all();
        return 0;
    }
    if (!std::strcmp(key, "reset_stats")) {
        for (int i = 0; i < STAT_COUNT; i++)
            if (!gauge(i))
                all.stats[i] = 0;
        return 0;
    }
    const int text = find(text_keys, TEXT_COUNT, key), knob = find(knob_keys, KNOB_COUNT, key);
    int64_t number = 0;
    if (text < 0 && (knob < 0 || !parse(knob, value, &number)))
        return -1;
    {
        std::lock_guard<std::mutex> lock(all.mutex);
        if (text >= 0) {
            all.texts[text] = value;
        } else {
            all.calls[knob] = 0;
            all.values[knob] = number;
        }
    }
    all.changed.notify_all();
    return 0;
}

uint64_t hixl_standin_stat_read(const char *key)
{
    const int stat = key ? find(stat_keys, STAT_COUNT, key) : -1;
    return stat < 0 ? UINT64_MAX : static_cast<uint64_t>(knobs().stats[stat].load());
}

int64_t hixl_standin_knob(int knob)
{
    return knobs().values[knob].load(std::memory_order_relaxed);
}

bool hixl_standin_nth(int knob)
{
    if (hixl_standin_knob(knob) < 0)
        return false;
    std::lock_guard<std::mutex> lock(knobs().mutex);
    if (knobs().calls[knob]++ != knobs().values[knob])
        return false;
    knobs().values[knob] = -1;
    return true;
}

bool hixl_standin_take(int knob)
{
    if (!hixl_standin_knob(knob))
        return false;
    std::lock_guard<std::mutex> lock(knobs().mutex);
    if (knobs().values[knob] > 0)
        return knobs().values[knob]-- > 0;
    return knobs().values[knob] != 0;
}

void hixl_standin_wait_while(int knob, int64_t until)
{
    const Clock::time_point end{std::chrono::nanoseconds(until)};
    std::unique_lock<std::mutex> lock(knobs().mutex);
    while (knobs().values[knob] != 0 && Clock::now() < end)
        knobs().changed.wait_until(lock, std::min(end, Clock::now() + std::chrono::hours(1)));
}

void hixl_standin_text(int text, char *buffer, size_t size)
{
    std::lock_guard<std::mutex> lock(knobs().mutex);
    std::snprintf(buffer, size, "%s", knobs().texts[text].c_str());
}

bool hixl_standin_text_take(int text, char *buffer, size_t size)
{
    std::lock_guard<std::mutex> lock(knobs().mutex);
    if (knobs().texts[text].empty())
        return false;
    std::snprintf(buffer, size, "%s", knobs().texts[text].c_str());
    knobs().texts[text].clear();
    return true;
}

int64_t hixl_standin_count(int stat, int64_t delta)
{
    return knobs().stats[stat].fetch_add(delta) + delta;
}

void hixl_standin_high(int stat, int64_t value)
{
    int64_t seen = knobs().stats[stat].load();
    while (seen < value && !knobs().stats[stat].compare_exchange_weak(seen, value)) {
    }
}
