// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: an engine's life, memory, links and notifies.
#include "engine.h"

#include <csignal>

#include <sys/prctl.h>

#include "acl.h"

namespace standin
{
namespace
{
int64_t nanoseconds(Clock::time_point time)
{
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

constexpr auto kCommAbort = std::chrono::milliseconds(100);
} // namespace

Status say(Status status, const std::string &text)
{
    hixl_standin_error(("hixl stand-in: " + text + ": " + std::to_string(status)).c_str());
    return status;
}

Engine::Engine(std::string name, const Settings &given, int32_t device_id)
    : settings(given), pool([this](const std::string &peer, int32_t ms) { return connect(peer, ms); },
                            [this](const std::string &peer, int32_t) { return disconnect(peer); }, given.pool_threads,
                            given.pool_capacity),
      name_(std::move(name)), device_id_(device_id), registry_(device_id), requests_(given.flavour)
{
}

Status Engine::start()
{
    Address address;
    if (!parse_address(name_, &address))
        return say(hixl::PARAM_INVALID, "the local engine is not ip, ip:port or [ip]:port: " + name_);
    signal(SIGPIPE, SIG_IGN);
    if (address.port) {
        // Where a security module lets only parents touch their children's memory.
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
        server_ = std::make_unique<Server>(registry_, settings.flavour, device_id_);
        if (const Status status = server_->start(address)) {
            server_.reset();
            return say(status, "cannot listen on " + name_);
        }
    }
    if (settings.auto_connect)
        heartbeat_ = std::thread([this] { heartbeat(); });
    return hixl::SUCCESS;
}

// The pool has stopped before: Hixl::Finalize sees to it, since the pool's calls come back here.
Engine::~Engine()
{
    {
        std::lock_guard<std::mutex> lock(links_mutex_);
        stop_ = true;
    }
    stopped_.notify_all();
    if (heartbeat_.joinable())
        heartbeat_.join();
    for (const auto &link : links()) {
        std::lock_guard<std::mutex> lock(link->mutex);
        if (link->up)
            end(*link);
    }
    server_.reset();
    registry_.clear();
    const int64_t cost = hixl_standin_knob(KNOB_FINALIZE_MS);
    const int64_t usual = settings.flavour == FLAVOUR_COMM ? 800 : 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(cost < 0 ? usual : cost));
}

void Engine::heartbeat()
{
    std::unique_lock<std::mutex> lock(links_mutex_);
    for (;;) {
        const auto pause = std::chrono::milliseconds(hixl_standin_knob(KNOB_HEARTBEAT_MS));
        if (stopped_.wait_for(lock, pause, [this] { return stop_; }))
            return;
        lock.unlock();
        for (const auto &link : links()) {
            std::unique_lock<std::mutex> held(link->mutex);
            const bool dead = link->up && link->dead();
            held.unlock();
            if (dead)
                disconnect(link->name);
        }
        lock.lock();
    }
}

Status Engine::register_memory(const hixl::MemDesc &memory, hixl::MemType type, void **handle)
{
    hixl_standin_count(STAT_REGISTERS, 1);
    if (const auto wanted = static_cast<Status>(hixl_standin_knob(KNOB_REGISTER_FAIL)))
        return say(wanted, "RegisterMem: as the knob register_fail says");
    if (const Status status = registry_.add(memory.addr, memory.len, type, handle))
        return say(status, "RegisterMem: no address, overlap, alignment, or host memory that is not pinned");
    return hixl::SUCCESS;
}

Status Engine::deregister_memory(void *handle)
{
    if (!handle)
        return say(hixl::PARAM_INVALID, "DeregisterMem: no handle");
    for (const auto &link : links()) {
        std::lock_guard<std::mutex> lock(link->mutex);
        if (link->up)
            return say(hixl::FAILED, "DeregisterMem: connected to " + link->name);
    }
    registry_.remove(handle);
    return hixl::SUCCESS;
}

std::shared_ptr<Link> Engine::find(const std::string &peer) const
{
    std::lock_guard<std::mutex> lock(links_mutex_);
    const auto found = links_.find(peer);
    return found == links_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Link>> Engine::links() const
{
    std::lock_guard<std::mutex> lock(links_mutex_);
    std::vector<std::shared_ptr<Link>> all;
    for (const auto &one : links_)
        all.push_back(one.second);
    return all;
}

Status Engine::connect(const std::string &peer, int32_t timeout_ms)
{
    hixl_standin_count(STAT_CONNECTS, 1);
    if (timeout_ms <= 0)
        return say(hixl::PARAM_INVALID, "Connect: the time-out is not over 0");
    if (peer == name_)
        return say(hixl::PARAM_INVALID, "Connect: to itself");
    const auto link = std::make_shared<Link>(peer, settings, device_id_);
    std::lock_guard<std::mutex> lock(link->mutex);
    {
        std::lock_guard<std::mutex> links_lock(links_mutex_);
        if (!links_.emplace(peer, link).second)
            return say(hixl::ALREADY_CONNECTED, "Connect: there is a link to " + peer);
    }
    std::string why;
    const Status status = link->connect(registry_, timeout_ms, &why);
    if (!status) {
        pool.note(peer, AsyncConnectStatus::CONNECTED);
        return status;
    }
    std::lock_guard<std::mutex> links_lock(links_mutex_);
    links_.erase(peer);
    return say(status, "Connect to " + peer + ": " + why);
}

Status Engine::disconnect(const std::string &peer)
{
    hixl_standin_count(STAT_DISCONNECTS, 1);
    const auto link = find(peer);
    std::unique_lock<std::mutex> lock;
    if (link)
        lock = std::unique_lock<std::mutex>(link->mutex);
    if (!link || !link->up)
        return say(hixl::NOT_CONNECTED, "Disconnect: no link to " + peer);
    // What is in flight goes on moving until the call is about to return.
    if (const int64_t delay = hixl_standin_knob(KNOB_HANG_DISCONNECT_MS))
        hixl_standin_wait_while(KNOB_HANG_DISCONNECT_MS, nanoseconds(Clock::now() + std::chrono::milliseconds(delay)));
    if (settings.flavour == FLAVOUR_COMM && link->device->unfinished())
        std::this_thread::sleep_for(kCommAbort);
    end(*link);
    {
        std::lock_guard<std::mutex> links_lock(links_mutex_);
        links_.erase(peer);
    }
    pool.note(peer, AsyncConnectStatus::NOT_CONNECT);
    if (settings.flavour == FLAVOUR_COMM)
        lock.unlock();
    requests_.remove_of(*link);
    return hixl::SUCCESS;
}

void Engine::end(Link &link) const
{
    link.disconnect();
    while (link.outstanding)
        release(link);
}

Status Engine::connect_async(const std::string &peer, bool connect, int32_t timeout_ms)
{
    if (connect && timeout_ms <= 0)
        return say(hixl::PARAM_INVALID, "ConnectAsync: the time-out is not over 0");
    if (connect && peer == name_)
        return say(hixl::PARAM_INVALID, "ConnectAsync: to itself");
    if (!connect && !find(peer))
        return say(hixl::NOT_CONNECTED, "DisconnectAsync: no link to " + peer);
    const Status status = pool.submit(peer, connect, timeout_ms);
    return status ? say(status, "ConnectAsync or DisconnectAsync: " + peer) : status;
}

Status Engine::notify(const std::string &peer, const std::string &notify_name, const std::string &message,
                      int32_t timeout_ms)
{
    if (timeout_ms <= 0)
        return say(hixl::PARAM_INVALID, "SendNotify: the time-out is not over 0");
    const auto link = find(peer);
    std::unique_lock<std::mutex> lock;
    if (link)
        lock = std::unique_lock<std::mutex>(link->mutex);
    if (!link || !link->up)
        return say(hixl::NOT_CONNECTED, "SendNotify: no link to " + peer);
    hixl_standin_count(STAT_NOTIFIES, 1);
    if (const auto wanted = static_cast<Status>(hixl_standin_knob(KNOB_NOTIFY_FAIL)))
        return say(wanted, "SendNotify: as the knob notify_fail says");
    const Status status = link->notify(notify_name, message, timeout_ms);
    return status ? say(status, "SendNotify to " + peer) : status;
}

Status Engine::notifies(std::vector<hixl::NotifyDesc> *notifies)
{
    hixl_standin_count(STAT_GET_NOTIFIES, 1);
    if (settings.flavour != FLAVOUR_COMM)
        notifies->clear();
    if (!server_)
        return hixl::SUCCESS;
    for (const auto &one : server_->drain())
        notifies->push_back({one.name.c_str(), one.message.c_str()});
    return hixl::SUCCESS;
}
} // namespace standin
