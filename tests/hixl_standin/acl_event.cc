// SPDX-License-Identifier: Apache-2.0
// Stand-in for libacl_rt.so, a test double: events, which are complete when their time has come.
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "acl.h"
#include "knobs.h"

namespace
{
using Clock = std::chrono::steady_clock;

struct Events {
    std::mutex mutex;
    std::map<void *, Clock::time_point> ready;
};

Events &events()
{
    static Events *const one = new Events;
    return *one;
}

void *make(Clock::duration delay)
{
    void *const event = new char;
    std::lock_guard<std::mutex> lock(events().mutex);
    events().ready[event] = Clock::now() + delay;
    return event;
}

int when(void *event, Clock::time_point *ready)
{
    if (!hixl_standin_context_current()) {
        hixl_standin_error("no context is current on this thread");
        return ACL_RT_CONTEXT_NULL;
    }
    std::lock_guard<std::mutex> lock(events().mutex);
    const auto found = events().ready.find(event);
    if (found == events().ready.end()) {
        hixl_standin_error("not an event, or one that was destroyed");
        return ACL_RT_PARAM_INVALID;
    }
    *ready = found->second;
    return 0;
}
} // namespace

void *hixl_standin_event(uint32_t delay_ms)
{
    return make(std::chrono::milliseconds(delay_ms));
}

int aclrtCreateEvent(void **event)
{
    if (!event)
        return ACL_INVALID_PARAM;
    if (!hixl_standin_context_current()) {
        hixl_standin_error("no context is current on this thread");
        return ACL_RT_CONTEXT_NULL;
    }
    *event = make(Clock::duration::zero());
    return 0;
}

int aclrtDestroyEvent(void *event)
{
    std::lock_guard<std::mutex> lock(events().mutex);
    if (!events().ready.erase(event))
        return ACL_RT_PARAM_INVALID;
    delete static_cast<char *>(event);
    return 0;
}

// The stream's work before the event takes as long as the knob event_ms says.
int aclrtRecordEvent(void *event, void *)
{
    Clock::time_point ready;
    if (const int code = when(event, &ready))
        return code;
    std::lock_guard<std::mutex> lock(events().mutex);
    events().ready[event] = Clock::now() + std::chrono::milliseconds(hixl_standin_knob(KNOB_EVENT_MS));
    return 0;
}

int aclrtQueryEventStatus(void *event, int *status)
{
    Clock::time_point ready;
    if (!status)
        return ACL_INVALID_PARAM;
    if (const int code = when(event, &ready))
        return code;
    *status = Clock::now() >= ready ? ACL_EVENT_COMPLETE : ACL_EVENT_NOT_READY;
    return 0;
}

int aclrtSynchronizeEvent(void *event)
{
    Clock::time_point ready;
    if (const int code = when(event, &ready))
        return code;
    std::this_thread::sleep_until(ready);
    return 0;
}
