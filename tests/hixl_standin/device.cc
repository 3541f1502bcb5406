// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: the "device" of one link.
#include "device.h"

#include <cerrno>

#include <poll.h>
#include <sys/prctl.h>
#include <sys/uio.h>

namespace standin
{
namespace
{
constexpr size_t kBatchBytes = 4u << 20; // of one system call: a stop is seen this soon
constexpr size_t kBatchPieces = 128;
constexpr auto kHangCheck = std::chrono::milliseconds(2);

bool alive(const Remote &remote)
{
    pollfd one = {remote.pidfd.get(), POLLIN, 0};
    return poll(&one, 1, 0) == 0;
}

// Only what takes no time is done in the caller's thread.
bool instant()
{
    return hixl_standin_knob(KNOB_INSTANT) && !hixl_standin_knob(KNOB_HANG_DEVICE) &&
           !hixl_standin_knob(KNOB_LATENCY_US) && !hixl_standin_knob(KNOB_BANDWIDTH_MBS);
}

// Raw codes of the runtime do not latch.
bool failures_latch()
{
    const auto code = static_cast<Status>(hixl_standin_knob(KNOB_FAIL_POLL_CODE));
    return hixl_standin_knob(KNOB_LATCH) && (!code || code == hixl::FAILED || code == hixl::TIMEOUT);
}
} // namespace

Device::Device(Remote &remote, const Settings &settings)
    : remote_(remote), settings_(settings), chunk_(settings.flavour == FLAVOUR_COMM ? 256 : 128)
{
}

Device::~Device()
{
    abort();
}

bool Device::post(const std::shared_ptr<Request> &request)
{
    const bool here = settings_.placement == PLACEMENT_HOST;
    request->ready = Clock::now() + std::chrono::microseconds(hixl_standin_knob(KNOB_LATENCY_US));
    std::unique_lock<std::mutex> lock(mutex_);
    unfinished_++;
    if (here || (instant() && queue_.empty() && !running_)) {
        running_ = request;
        lock.unlock();
        const Ending ending = execute(*request);
        lock.lock();
        running_.reset();
        return finish(*request, ending) || !here;
    }
    if (!thread_.joinable())
        thread_ = std::thread([this] { run(); });
    queue_.push_back(request);
    lock.unlock();
    changed_.notify_all();
    return true;
}

void Device::run()
{
    prctl(PR_SET_TIMERSLACK, 1000);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return stop_ || (!queue_.empty() && !running_); });
        if (stop_)
            return;
        running_ = queue_.front();
        queue_.pop_front();
        lock.unlock();
        const Ending ending = execute(*running_);
        lock.lock();
        const std::shared_ptr<Request> done = std::move(running_);
        running_.reset();
        finish(*done, ending);
    }
}

// With the lock. False if the request failed.
bool Device::finish(Request &request, Ending ending)
{
    const bool comm = settings_.flavour == FLAVOUR_COMM, host = settings_.placement == PLACEMENT_HOST;
    if (request.state != TransferStatus::WAITING || ending == Ending::STOPPED || request.forgotten)
        return true;
    if (ending == Ending::DONE) {
        unfinished_--;
        request.state = TransferStatus::COMPLETED;
    } else if (comm || (host && ending == Ending::LOST)) {
        // The flag that status calls read is never written.
        return true;
    } else {
        unfinished_--;
        request.state = TransferStatus::FAILED;
        if (failures_latch()) {
            latched_ = true;
            fail_all();
        }
    }
    changed_.notify_all();
    return ending == Ending::DONE;
}

// With the lock.
void Device::fail_all()
{
    for (const auto &one : queue_) {
        unfinished_--;
        one->state = TransferStatus::FAILED;
    }
    queue_.clear();
}

bool Device::wait(const Request &request, Clock::time_point deadline)
{
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] { return request.state != TransferStatus::WAITING; });
}

void Device::abort()
{
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        if (settings_.flavour != FLAVOUR_COMM)
            fail_all();
    }
    changed_.notify_all();
    if (thread_.joinable())
        thread_.join();
    // They keep the link that keeps this.
    queue_.clear();
}

void Device::latch()
{
    std::lock_guard<std::mutex> lock(mutex_);
    latched_ = hixl_standin_knob(KNOB_LATCH) != 0;
}

bool Device::latched() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return latched_;
}

int64_t Device::unfinished() const
{
    std::lock_guard<std::mutex> lock(mutex_);
    return unfinished_;
}

// False if stopped meanwhile.
bool Device::rest_until(Clock::time_point time)
{
    if (Clock::now() >= time)
        return !stop_;
    std::unique_lock<std::mutex> lock(mutex_);
    return !changed_.wait_until(lock, time, [&] { return stop_.load(); });
}

Device::Ending Device::execute(const Request &request)
{
    if (request.forgotten)
        return Ending::DONE;
    if (!rest_until(request.ready))
        return Ending::STOPPED;
    busy_until_ = std::max(busy_until_, request.ready);
    for (size_t first = 0; first <= request.pieces.size(); first += chunk_) {
        while (hixl_standin_knob(KNOB_HANG_DEVICE))
            if (!rest_until(Clock::now() + kHangCheck))
                return Ending::STOPPED;
        // The failure is met at the end, with all but the last chunk moved.
        const size_t last = std::min(first + chunk_, request.pieces.size());
        if (request.fails && last == request.pieces.size())
            return Ending::FAILED;
        const Ending ending = copy(request, first, last);
        if (ending != Ending::DONE)
            return ending;
        if (last == request.pieces.size())
            break;
    }
    return Ending::DONE;
}

Device::Ending Device::copy(const Request &request, size_t first, size_t last)
{
    const int64_t bandwidth = hixl_standin_knob(KNOB_BANDWIDTH_MBS);
    std::vector<Piece> batch;
    size_t bytes = 0;
    const auto flush = [&] {
        const Ending ending = copy_some(request, batch.data(), batch.size());
        if (bandwidth > 0 && ending == Ending::DONE) {
            busy_until_ += std::chrono::nanoseconds(bytes * 1000 / static_cast<size_t>(bandwidth));
            if (!rest_until(busy_until_))
                return Ending::STOPPED;
        }
        batch.clear();
        bytes = 0;
        return stop_ ? Ending::STOPPED : ending;
    };
    for (size_t i = first; i < last; i++) {
        Piece rest = request.pieces[i];
        while (rest.length) {
            const uint64_t part = std::min(rest.length, kBatchBytes - bytes);
            batch.push_back({rest.local, rest.remote, part});
            bytes += part;
            rest = {rest.local + part, rest.remote + part, rest.length - part};
            if (bytes < kBatchBytes && batch.size() < kBatchPieces)
                continue;
            const Ending ending = flush();
            if (ending != Ending::DONE)
                return ending;
        }
    }
    return flush();
}

Device::Ending Device::copy_some(const Request &request, const Piece *pieces, size_t count)
{
    iovec local[kBatchPieces], remote[kBatchPieces];
    for (size_t i = 0; i < count; i++) {
        local[i] = {reinterpret_cast<void *>(pieces[i].local), pieces[i].length};
        remote[i] = {reinterpret_cast<void *>(pieces[i].remote), pieces[i].length};
    }
    for (size_t at = 0; at < count;) {
        if (!alive(remote_) || !remote_.page.enter())
            return Ending::LOST;
        const ssize_t moved = request.write
                                  ? process_vm_writev(remote_.pid, local + at, count - at, remote + at, count - at, 0)
                                  : process_vm_readv(remote_.pid, local + at, count - at, remote + at, count - at, 0);
        const int error = errno;
        remote_.page.leave();
        if (moved <= 0)
            return moved < 0 && error == ESRCH ? Ending::LOST : Ending::FAILED;
        hixl_standin_count(STAT_BYTES, moved);
        for (size_t left = static_cast<size_t>(moved); left;) {
            const size_t part = std::min(left, local[at].iov_len);
            local[at] = {static_cast<char *>(local[at].iov_base) + part, local[at].iov_len - part};
            remote[at] = {static_cast<char *>(remote[at].iov_base) + part, remote[at].iov_len - part};
            left -= part;
            if (!local[at].iov_len)
                at++;
        }
    }
    return Ending::DONE;
}
} // namespace standin
