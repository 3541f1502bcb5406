// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: ConnectAsync and DisconnectAsync, done by a few threads from one bounded queue.
#ifndef HIXL_STANDIN_CONNECT_POOL_H
#define HIXL_STANDIN_CONNECT_POOL_H

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "hixl_api.h"

namespace standin
{
using hixl::AsyncConnectStatus;
using hixl::Status;

class ConnectPool
{
  public:
    using Call = std::function<Status(const std::string &peer, int32_t timeout_ms)>;

    ConnectPool(Call connect, Call disconnect, int threads, int capacity);
    ~ConnectPool();
    ConnectPool(const ConnectPool &) = delete;
    ConnectPool &operator=(const ConnectPool &) = delete;

    // Waits for calls that have begun and drops the others.
    void stop();
    Status submit(const std::string &peer, bool connect, int32_t timeout_ms);
    AsyncConnectStatus status(const std::string &peer) const;
    std::map<std::string, AsyncConnectStatus> statuses() const;
    // What a blocking call did.
    void note(const std::string &peer, AsyncConnectStatus status);

  private:
    struct Task {
        std::string peer;
        bool connect;
        int32_t timeout_ms;
    };
    void run();

    const Call connect_, disconnect_;
    const size_t threads_wanted_, capacity_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Task> tasks_;
    std::map<std::string, AsyncConnectStatus> statuses_;
    std::vector<std::thread> threads_;
    bool stop_ = false;
};
} // namespace standin

#endif
