// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: ConnectAsync and DisconnectAsync.
#include "connect_pool.h"

namespace standin
{
ConnectPool::ConnectPool(Call connect, Call disconnect, int threads, int capacity)
    : connect_(std::move(connect)), disconnect_(std::move(disconnect)), threads_wanted_(static_cast<size_t>(threads)),
      capacity_(static_cast<size_t>(capacity))
{
}

ConnectPool::~ConnectPool()
{
    stop();
}

void ConnectPool::stop()
{
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    for (auto &thread : threads_)
        thread.join();
    threads_.clear();
}

Status ConnectPool::submit(const std::string &peer, bool connect, int32_t timeout_ms)
{
    std::lock_guard<std::mutex> lock(mutex_);
    if (tasks_.size() >= capacity_)
        return hixl::RESOURCE_EXHAUSTED;
    const auto found = statuses_.find(peer);
    const auto now = found == statuses_.end() ? AsyncConnectStatus::NOT_CONNECT : found->second;
    if (connect && (now == AsyncConnectStatus::CONNECT_PENDING || now == AsyncConnectStatus::CONNECTING ||
                    now == AsyncConnectStatus::CONNECTED))
        return hixl::ALREADY_CONNECTED;
    statuses_[peer] = connect ? AsyncConnectStatus::CONNECT_PENDING : AsyncConnectStatus::DISCONNECT_PENDING;
    tasks_.push_back({peer, connect, timeout_ms});
    if (threads_.size() < threads_wanted_)
        threads_.emplace_back([this] { run(); });
    changed_.notify_one();
    return hixl::SUCCESS;
}

void ConnectPool::run()
{
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return stop_ || !tasks_.empty(); });
        if (stop_)
            return;
        const Task task = tasks_.front();
        tasks_.pop_front();
        statuses_[task.peer] = task.connect ? AsyncConnectStatus::CONNECTING : AsyncConnectStatus::DISCONNECTING;
        lock.unlock();
        const Status status = (task.connect ? connect_ : disconnect_)(task.peer, task.timeout_ms);
        lock.lock();
        const bool up = task.connect && (!status || status == hixl::ALREADY_CONNECTED);
        statuses_[task.peer] = up             ? AsyncConnectStatus::CONNECTED
                               : task.connect ? AsyncConnectStatus::CONNECT_FAILED
                                              : AsyncConnectStatus::NOT_CONNECT;
    }
}

AsyncConnectStatus ConnectPool::status(const std::string &peer) const
{
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = statuses_.find(peer);
    return found == statuses_.end() ? AsyncConnectStatus::NOT_CONNECT : found->second;
}

std::map<std::string, AsyncConnectStatus> ConnectPool::statuses() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return statuses_;
}

void ConnectPool::note(const std::string &peer, AsyncConnectStatus status)
{
    std::lock_guard<std::mutex> lock(mutex_);
    statuses_[peer] = status;
}
} // namespace standin
