// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: what an engine has registered, and the frozen copies of it that a link works with.
#ifndef HIXL_STANDIN_MEMORY_TABLE_H
#define HIXL_STANDIN_MEMORY_TABLE_H

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "hixl_api.h"

namespace standin
{
using hixl::Status;

// Goes over the wire as it is.
struct Region {
    uint64_t address;
    uint64_t length;
    uint64_t shadow; // where the bytes are
    int32_t type;    // hixl::MemType
    uint32_t misfit; // not of that type of memory, or of another device: found out by Connect
};

struct Span {
    uint64_t at;
    uint64_t length;
};

// As of one Connect: sorted by address, without overlaps.
class MemoryTable
{
  public:
    explicit MemoryTable(std::vector<Region> regions = {}) : regions_(std::move(regions))
    {
    }
    // Where the bytes of [address, address + length) are; regions of one type that touch count as one. False if any
    // byte is unregistered.
    bool resolve(uint64_t address, uint64_t length, std::vector<Span> *spans) const;

  private:
    std::vector<Region> regions_;
};

class Registry
{
  public:
    explicit Registry(int32_t device) : device_(device)
    {
    }
    Status add(uint64_t address, uint64_t length, hixl::MemType type, void **handle);
    // False: no such handle.
    bool remove(void *handle);
    // Not SUCCESS: what every Connect from or to this engine fails with.
    Status snapshot(std::vector<Region> *regions) const;
    void clear();

  private:
    using Key = std::pair<uint64_t, uint64_t>; // address, length
    struct Held {
        Region region;
        void *handle;
    };
    const int32_t device_;
    mutable std::mutex mutex_;
    std::map<Key, Held> held_[2]; // by type
};
} // namespace standin

#endif
