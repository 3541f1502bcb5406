// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: the requests of an engine that have not been reported terminal, by handle and in order.
#ifndef HIXL_STANDIN_REQUESTS_H
#define HIXL_STANDIN_REQUESTS_H

#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "device.h"
#include "options.h"

namespace standin
{
class Requests
{
  public:
    explicit Requests(Flavour flavour) : flavour_(flavour)
    {
    }
    ~Requests();
    Requests(const Requests &) = delete;
    Requests &operator=(const Requests &) = delete;

    // Gives it its handle: of the hixl engine a pointer, that which was given back last; of the others a counter.
    void add(const std::shared_ptr<Request> &request);
    // NULL if there is none; counts those that there once were as stale.
    std::shared_ptr<Request> find(void *handle);
    void remove(Request &request);
    // After Disconnect. The hixl engine forgets them, the comm engine keeps answering for them.
    void remove_of(const Link &link);
    // In order of submission, no more than `limit`.
    std::vector<std::shared_ptr<Request>> all(size_t limit);

    // The comm engine's polls hold this while they wait for a peer's mutex.
    std::mutex mutex;
    std::shared_ptr<Request> find_locked(void *handle);
    void remove_locked(Request &request);
    // Its link was disconnected (comm).
    bool retired_locked(void *handle) const
    {
        return retired_.count(handle) != 0;
    }

  private:
    const Flavour flavour_;
    uint64_t next_ = 0;
    std::unordered_map<void *, std::shared_ptr<Request>> by_handle_;
    std::map<uint64_t, std::shared_ptr<Request>> by_sequence_;
    std::unordered_set<void *> retired_;
};
} // namespace standin

#endif
