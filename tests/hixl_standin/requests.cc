// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: the requests of an engine.
#include "requests.h"

namespace standin
{
namespace
{
// One pool for the process, last in first out, whatever the allocator (or a sanitizer's) would do: handles are
// reused at once. Never destroyed.
struct Handles {
    std::mutex mutex;
    std::vector<void *> spare;
    std::unordered_set<void *> issued;

    void *take()
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (spare.empty()) {
            spare.push_back(new char[16]);
            issued.insert(spare.back());
        }
        void *const handle = spare.back();
        spare.pop_back();
        return handle;
    }

    void give(void *handle)
    {
        std::lock_guard<std::mutex> lock(mutex);
        spare.push_back(handle);
    }

    bool knows(void *handle)
    {
        std::lock_guard<std::mutex> lock(mutex);
        return issued.count(handle) != 0;
    }
};

Handles &handles()
{
    static Handles *const one = new Handles;
    return *one;
}
} // namespace

Requests::~Requests()
{
    if (flavour_ == FLAVOUR_HIXL)
        for (const auto &one : by_handle_)
            handles().give(one.first);
    hixl_standin_count(STAT_OUTSTANDING, -static_cast<int64_t>(by_handle_.size()));
}

void Requests::add(const std::shared_ptr<Request> &request)
{
    std::lock_guard<std::mutex> lock(mutex);
    request->sequence = ++next_;
    request->handle = flavour_ == FLAVOUR_HIXL ? handles().take() : reinterpret_cast<void *>(request->sequence);
    by_handle_[request->handle] = request;
    by_sequence_[request->sequence] = request;
    hixl_standin_count(STAT_OUTSTANDING, 1);
}

std::shared_ptr<Request> Requests::find(void *handle)
{
    std::lock_guard<std::mutex> lock(mutex);
    return find_locked(handle);
}

std::shared_ptr<Request> Requests::find_locked(void *handle)
{
    const auto found = by_handle_.find(handle);
    if (found != by_handle_.end())
        return found->second;
    const auto number = reinterpret_cast<uint64_t>(handle);
    if (flavour_ == FLAVOUR_HIXL ? handles().knows(handle) : number && number <= next_)
        hixl_standin_count(STAT_STALE_POLLS, 1);
    return nullptr;
}

void Requests::remove(Request &request)
{
    std::lock_guard<std::mutex> lock(mutex);
    remove_locked(request);
}

void Requests::remove_locked(Request &request)
{
    request.freed = true;
    if (!by_sequence_.erase(request.sequence))
        return;
    by_handle_.erase(request.handle);
    hixl_standin_count(STAT_OUTSTANDING, -1);
    if (flavour_ == FLAVOUR_HIXL)
        handles().give(request.handle);
}

void Requests::remove_of(const Link &link)
{
    const auto ended = all(SIZE_MAX);
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto &one : ended) {
        if (one->link.get() != &link)
            continue;
        remove_locked(*one);
        if (flavour_ == FLAVOUR_COMM)
            retired_.insert(one->handle);
    }
}

std::vector<std::shared_ptr<Request>> Requests::all(size_t limit)
{
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<std::shared_ptr<Request>> found;
    for (const auto &one : by_sequence_) {
        if (found.size() >= limit)
            break;
        found.push_back(one.second);
    }
    return found;
}
} // namespace standin
