// SPDX-License-Identifier: Apache-2.0
// Stand-in for libacl_rt.so, a test double: devices, contexts and the recent error message.
#include "acl.h"

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <unordered_set>

#include "knobs.h"

namespace
{
// Never freed, so that a thread which still has a destroyed one current can be told so.
struct Context {
    const int32_t device;
    std::atomic<bool> alive{true};
};

struct Devices {
    std::mutex mutex;
    std::unordered_set<void *> contexts;
    std::map<int32_t, std::pair<Context *, int>> primary; // and how often it was set
    bool initialized = false;
};

Devices &devices()
{
    static Devices *const one = new Devices;
    return *one;
}

thread_local Context *current = nullptr;

struct Message {
    std::string pending, read;
    bool set = false;
};

Message &message()
{
    thread_local Message one;
    return one;
}

Context *make_context(int32_t device)
{
    auto *const context = new Context{device};
    devices().contexts.insert(context);
    return context;
}

int no_context()
{
    hixl_standin_error("no context is current on this thread");
    return ACL_RT_CONTEXT_NULL;
}
} // namespace

int aclInit(const char *)
{
    std::lock_guard<std::mutex> lock(devices().mutex);
    if (devices().initialized)
        return ACL_REPEAT_INITIALIZE;
    devices().initialized = true;
    return 0;
}

int aclFinalize()
{
    std::lock_guard<std::mutex> lock(devices().mutex);
    devices().initialized = false;
    return 0;
}

int aclrtGetDeviceCount(uint32_t *count)
{
    if (!count)
        return ACL_INVALID_PARAM;
    *count = static_cast<uint32_t>(hixl_standin_knob(KNOB_DEVICES));
    return 0;
}

int aclrtSetDevice(int32_t device)
{
    if (device < 0 || device >= hixl_standin_knob(KNOB_DEVICES)) {
        hixl_standin_error("there is no device of that number (knob devices)");
        return ACL_RT_INVALID_DEVICE;
    }
    std::lock_guard<std::mutex> lock(devices().mutex);
    auto &[context, set] = devices().primary[device];
    if (!context)
        context = make_context(device);
    set++;
    current = context;
    return 0;
}

int aclrtResetDevice(int32_t device)
{
    std::lock_guard<std::mutex> lock(devices().mutex);
    const auto found = devices().primary.find(device);
    if (found == devices().primary.end())
        return ACL_RT_INVALID_DEVICE;
    if (--found->second.second == 0) {
        found->second.first->alive = false;
        devices().primary.erase(found);
    }
    return 0;
}

int aclrtGetDevice(int32_t *device)
{
    if (!device)
        return ACL_INVALID_PARAM;
    if (!hixl_standin_context_current())
        return no_context();
    *device = current->device;
    return 0;
}

int aclrtGetCurrentContext(void **context)
{
    if (!context)
        return ACL_INVALID_PARAM;
    void *const mine = hixl_standin_context_current();
    if (!mine)
        return no_context();
    *context = mine;
    return 0;
}

int aclrtSetCurrentContext(void *context)
{
    if (!context)
        return ACL_INVALID_PARAM;
    std::lock_guard<std::mutex> lock(devices().mutex);
    if (!devices().contexts.count(context) || !static_cast<Context *>(context)->alive) {
        hixl_standin_error("not a context, or one that was destroyed");
        return ACL_RT_CONTEXT_NULL;
    }
    current = static_cast<Context *>(context);
    return 0;
}

const char *aclrtGetSocName()
{
    // Callers may keep the pointer, so every name that ever was stays.
    static std::mutex *const mutex = new std::mutex;
    static auto *const names = new std::unordered_set<std::string>;
    char name[256];
    hixl_standin_text(TEXT_SOC, name, sizeof name);
    std::lock_guard<std::mutex> lock(*mutex);
    return names->insert(name).first->c_str();
}

const char *aclGetRecentErrMsg()
{
    Message &mine = message();
    if (!mine.set)
        return nullptr;
    mine.set = false;
    mine.read.swap(mine.pending);
    return mine.read.c_str();
}

void hixl_standin_error(const char *text)
{
    char given[1024];
    message().pending = hixl_standin_text_take(TEXT_ERR_MSG, given, sizeof given) ? given : text;
    message().set = true;
}

void *hixl_standin_context_new(int32_t device)
{
    std::lock_guard<std::mutex> lock(devices().mutex);
    return make_context(device);
}

void hixl_standin_context_destroy(void *context)
{
    static_cast<Context *>(context)->alive = false;
}

int32_t hixl_standin_context_device(void *context)
{
    return static_cast<Context *>(context)->device;
}

void *hixl_standin_context_current()
{
    return current && current->alive.load(std::memory_order_relaxed) ? current : nullptr;
}

void hixl_standin_context_swap(void *context)
{
    current = static_cast<Context *>(context);
}
