// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: the "device" of one link, which moves bytes between the two processes.
#ifndef HIXL_STANDIN_DEVICE_H
#define HIXL_STANDIN_DEVICE_H

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "hixl_api.h"
#include "memory_table.h"
#include "options.h"
#include "page.h"

namespace standin
{
using hixl::TransferStatus;

class Link;

// The process at the other end, as Connect found it.
struct Remote {
    int32_t pid = 0;
    Descriptor pidfd;
    PeerPage page;
    MemoryTable table;
};

// Between two addresses with bytes behind them; at most one per pair of registered regions.
struct Piece {
    uint64_t local, remote, length;
};

struct Request {
    std::shared_ptr<Link> link;
    void *handle = nullptr;
    uint64_t sequence = 0;
    void *user_data = nullptr;
    bool write = false;
    std::vector<Piece> pieces;
    bool fails = false;     // on the device
    bool forgotten = false; // never done and never failed
    Clock::time_point ready;
    std::atomic<TransferStatus> state{TransferStatus::WAITING};
    bool freed = false; // reported terminal, or its client disconnected; under the link's mutex
};

class Device
{
  public:
    Device(Remote &remote, const Settings &settings);
    ~Device();
    Device(const Device &) = delete;
    Device &operator=(const Device &) = delete;

    // In the caller's thread if the placement is host (blocks until done), or the knob instant is set, no other knob
    // makes it take time and nothing is queued; otherwise in the device's own, in order. False: a host transfer failed.
    bool post(const std::shared_ptr<Request> &request);
    // Waits for a terminal state; false after the deadline.
    bool wait(const Request &request, Clock::time_point deadline);
    // Nothing is moved any more when this returns, and what is outstanding fails unless the engine is comm.
    void abort();
    void latch();
    bool latched() const;
    // Posted and neither done nor failed.
    int64_t unfinished() const;

  private:
    enum class Ending { DONE, FAILED, LOST, STOPPED };

    void run();
    void begin(const std::shared_ptr<Request> &request);
    bool finish(Request &request, Ending ending);
    Ending execute(const Request &request);
    Ending copy(const Request &request, size_t first, size_t last);
    Ending copy_some(const Request &request, const Piece *pieces, size_t count);
    bool rest_until(Clock::time_point time);
    void fail_all();

    Remote &remote_;
    const Settings settings_;
    const size_t chunk_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::shared_ptr<Request>> queue_;
    std::shared_ptr<Request> running_;
    Clock::time_point busy_until_; // of the pretended link; only of who executes
    int64_t unfinished_ = 0;
    bool latched_ = false;
    std::atomic<bool> stop_{false};
    std::thread thread_;
};
} // namespace standin

#endif
