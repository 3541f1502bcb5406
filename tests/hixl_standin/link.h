// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: one client link, that is a connection which this engine made.
#ifndef HIXL_STANDIN_LINK_H
#define HIXL_STANDIN_LINK_H

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "device.h"
#include "memory_table.h"
#include "options.h"
#include "wire.h"

namespace standin
{
class Link
{
  public:
    Link(std::string name, const Settings &settings, int32_t device_id);

    // All with the mutex held. connect tries up to `timeout_ms` in each of its phases.
    Status connect(const Registry &registry, int32_t timeout_ms, std::string *why);
    Status notify(const std::string &name, const std::string &message, int32_t timeout_ms);
    void disconnect();
    // The socket at the other end is closed.
    bool dead() const;

    const std::string name;
    // Held through every call that names this peer, and taken by polls of its requests.
    std::mutex mutex;
    std::atomic<bool> posting{false};
    // The rest under the mutex.
    bool up = false;
    MemoryTable local;
    Remote remote;
    std::unique_ptr<Device> device;
    int64_t outstanding = 0; // posted and not yet reported terminal

  private:
    Status exchange(const Registry &registry, int32_t timeout_ms, std::string *why);

    const Settings settings_;
    const int32_t device_id_;
    Descriptor socket_;
};
} // namespace standin

#endif
