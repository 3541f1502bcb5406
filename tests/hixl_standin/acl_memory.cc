// SPDX-License-Identifier: Apache-2.0
// Stand-in for libacl_rt.so, a test double: device memory that the CPU cannot touch, and pinned host memory.
//
// A device allocation is two mappings: the one whose address the caller gets has no access at all, and a shadow
// with the bytes. Only aclrtMemcpy and the stand-in engine, which moves shadows, reach them.
#include <cstring>
#include <map>
#include <mutex>

#include <sys/mman.h>

#include "acl.h"
#include "knobs.h"

namespace
{
constexpr size_t kPage = 4096;

struct Allocation {
    size_t size;
    size_t mapped;
    char *base;
    char *shadow; // NULL: pinned host memory
    int32_t device;
};

// Never destroyed: threads may still run when the process's static objects go.
struct Memory {
    std::mutex mutex;
    std::map<uint64_t, Allocation> allocations;
    size_t device_bytes = 0;
};

Memory &memory()
{
    static Memory *const one = new Memory;
    return *one;
}

char *map_pages(size_t size, int protection)
{
    void *at = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? nullptr : static_cast<char *>(at);
}

int fail(int code, const char *text)
{
    hixl_standin_error(text);
    return code;
}

int allocate(void **address, size_t size, bool device)
{
    if (!address || !size)
        return fail(ACL_INVALID_PARAM, "no address or no size");
    void *const context = hixl_standin_context_current();
    if (!context)
        return fail(ACL_RT_CONTEXT_NULL, "no context is current on this thread");
    const size_t offset = device ? static_cast<size_t>(hixl_standin_knob(KNOB_MALLOC_OFFSET)) : 0;
    const size_t mapped = (size + offset + kPage - 1) / kPage * kPage;
    const size_t limit = static_cast<size_t>(hixl_standin_knob(KNOB_DEVICE_MEM_MB)) << 20;
    if (mapped < size)
        return fail(ACL_RT_NO_MEMORY, "no address range of that size");
    std::lock_guard<std::mutex> lock(memory().mutex);
    if (device && (mapped > limit || memory().device_bytes > limit - mapped))
        return fail(ACL_RT_NO_MEMORY, "device memory is used up (knob device_mem_mb)");
    char *const base = map_pages(mapped, device ? PROT_NONE : PROT_READ | PROT_WRITE);
    char *const shadow = device && base ? map_pages(mapped, PROT_READ | PROT_WRITE) : nullptr;
    if (!base || (device && !shadow)) {
        if (base)
            munmap(base, mapped);
        return fail(ACL_RT_NO_MEMORY, "no memory");
    }
    memory().allocations[reinterpret_cast<uint64_t>(base + offset)] = {
        size, mapped, base, shadow ? shadow + offset : nullptr, hixl_standin_context_device(context)};
    if (device)
        memory().device_bytes += mapped;
    hixl_standin_count(STAT_ALLOCATIONS, 1);
    *address = base + offset;
    return 0;
}

int release(void *address, bool device)
{
    if (!hixl_standin_context_current())
        return fail(ACL_RT_CONTEXT_NULL, "no context is current on this thread");
    std::lock_guard<std::mutex> lock(memory().mutex);
    const auto found = memory().allocations.find(reinterpret_cast<uint64_t>(address));
    if (found == memory().allocations.end() || (found->second.shadow != nullptr) != device)
        return fail(ACL_RT_PARAM_INVALID, "not an address that was allocated this way");
    const Allocation gone = found->second;
    memory().allocations.erase(found);
    if (device) {
        memory().device_bytes -= gone.mapped;
        munmap(gone.shadow - (static_cast<char *>(address) - gone.base), gone.mapped);
    }
    munmap(gone.base, gone.mapped);
    hixl_standin_count(STAT_ALLOCATIONS, -1);
    return 0;
}
} // namespace

int aclrtMalloc(void **address, size_t size, int)
{
    return allocate(address, size, true);
}

int aclrtFree(void *address)
{
    return release(address, true);
}

int aclrtMallocHost(void **address, size_t size)
{
    return allocate(address, size, false);
}

int aclrtFreeHost(void *address)
{
    return release(address, false);
}

int hixl_standin_shadow(uint64_t address, uint64_t size, uint64_t *shadow, int32_t *device)
{
    *shadow = address;
    std::lock_guard<std::mutex> lock(memory().mutex);
    auto next = memory().allocations.upper_bound(address);
    if (next == memory().allocations.begin())
        return STANDIN_PLAIN;
    const auto &[start, held] = *std::prev(next);
    if (address - start >= held.size)
        return STANDIN_PLAIN;
    if (size > held.size - (address - start))
        return -1;
    if (!held.shadow)
        return STANDIN_PINNED;
    *shadow = reinterpret_cast<uint64_t>(held.shadow) + (address - start);
    *device = held.device;
    return STANDIN_DEVICE;
}

int aclrtMemcpy(void *target, size_t target_max, const void *source, size_t count, int kind)
{
    if (!target || !source || kind < ACL_HOST_TO_HOST || kind > ACL_DEVICE_TO_DEVICE)
        return fail(ACL_INVALID_PARAM, "no address, or a kind of copy that there is not");
    if (!hixl_standin_context_current())
        return fail(ACL_RT_CONTEXT_NULL, "no context is current on this thread");
    if (count > target_max)
        return fail(ACL_RT_PARAM_INVALID, "count is over the target's size");
    uint64_t to = 0, from = 0;
    int32_t device = 0;
    const int to_kind = hixl_standin_shadow(reinterpret_cast<uint64_t>(target), count, &to, &device);
    const int from_kind = hixl_standin_shadow(reinterpret_cast<uint64_t>(source), count, &from, &device);
    const bool to_device = kind == ACL_HOST_TO_DEVICE || kind == ACL_DEVICE_TO_DEVICE;
    const bool from_device = kind == ACL_DEVICE_TO_HOST || kind == ACL_DEVICE_TO_DEVICE;
    if (to_kind < 0 || from_kind < 0)
        return fail(ACL_RT_PARAM_INVALID, "the copy leaves its allocation");
    if ((to_kind == STANDIN_DEVICE) != to_device || (from_kind == STANDIN_DEVICE) != from_device)
        return fail(ACL_RT_PARAM_INVALID, "the addresses are not of the kind of memory that the copy says");
    std::memmove(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), count);
    return 0;
}
