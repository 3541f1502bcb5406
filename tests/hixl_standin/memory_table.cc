// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: registered memory.
#include "memory_table.h"

#include <algorithm>

#include "acl.h"
#include "knobs.h"

namespace standin
{
bool MemoryTable::resolve(uint64_t address, uint64_t length, std::vector<Span> *spans) const
{
    spans->clear();
    if (address + length < address)
        return false;
    auto region = std::upper_bound(regions_.begin(), regions_.end(), address,
                                   [](uint64_t wanted, const Region &one) { return wanted < one.address; });
    if (region == regions_.begin())
        return false;
    --region;
    const int32_t type = region->type;
    while (length) {
        if (region == regions_.end() || region->type != type || address < region->address ||
            address - region->address >= region->length)
            return false;
        const uint64_t offset = address - region->address;
        const uint64_t part = std::min(length, region->length - offset);
        spans->push_back({region->shadow + offset, part});
        address += part;
        length -= part;
        ++region;
    }
    return true;
}

Status Registry::add(uint64_t address, uint64_t length, hixl::MemType type, void **handle)
{
    const int index = static_cast<int>(type);
    if (!address || (index != 0 && index != 1) || address + length < address)
        return hixl::PARAM_INVALID;
    Region region = {address, length, 0, index, 0};
    int32_t device = device_;
    const int kind = hixl_standin_shadow(address, length, &region.shadow, &device);
    if (type == hixl::MemType::HOST && kind != STANDIN_PINNED && hixl_standin_knob(KNOB_HOST_NEEDS_PINNED))
        return hixl::PARAM_INVALID;
    region.misfit = kind < 0 || (kind == STANDIN_DEVICE) != (type == hixl::MemType::DEVICE) || device != device_;
    const auto align = static_cast<uint64_t>(hixl_standin_knob(KNOB_ALIGN));
    if (align && (address % align || length % align))
        return hixl::PARAM_INVALID;

    std::lock_guard<std::mutex> lock(mutex_);
    auto &held = held_[index];
    const Key key(address, length);
    auto next = held.lower_bound(key);
    if (next != held.end() && next->first == key) {
        *handle = next->second.handle;
        return hixl::SUCCESS;
    }
    // Empty regions overlap nothing here, so look past them.
    auto after = next;
    while (after != held.end() && !after->first.second)
        ++after;
    auto before = next;
    while (before != held.begin() && !std::prev(before)->first.second)
        --before;
    if (length && after != held.end() && after->first.first < address + length)
        return hixl::PARAM_INVALID;
    if (length && before != held.begin()) {
        const Key &last = std::prev(before)->first;
        if (last.first + last.second > address)
            return hixl::PARAM_INVALID;
    }
    *handle = new char;
    held[key] = {region, *handle};
    hixl_standin_count(STAT_REGISTERED, 1);
    return hixl::SUCCESS;
}

bool Registry::remove(void *handle)
{
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto &held : held_) {
        const auto found =
            std::find_if(held.begin(), held.end(), [&](const auto &one) { return one.second.handle == handle; });
        if (found == held.end())
            continue;
        delete static_cast<char *>(handle);
        held.erase(found);
        hixl_standin_count(STAT_REGISTERED, -1);
        return true;
    }
    return false;
}

Status Registry::snapshot(std::vector<Region> *regions) const
{
    std::lock_guard<std::mutex> lock(mutex_);
    regions->clear();
    for (const auto &held : held_)
        for (const auto &one : held)
            regions->push_back(one.second.region);
    std::sort(regions->begin(), regions->end(), [](const Region &a, const Region &b) { return a.address < b.address; });
    Status status = hixl::SUCCESS;
    for (size_t i = 0; i < regions->size(); i++) {
        const Region &one = (*regions)[i];
        if (!one.length || (i && (*regions)[i - 1].address + (*regions)[i - 1].length > one.address))
            return hixl::PARAM_INVALID;
        if (one.misfit)
            status = hixl::FAILED;
    }
    return status;
}

void Registry::clear()
{
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto &held : held_) {
        for (const auto &one : held)
            delete static_cast<char *>(one.second.handle);
        hixl_standin_count(STAT_REGISTERED, -static_cast<int64_t>(held.size()));
        held.clear();
    }
}
} // namespace standin
