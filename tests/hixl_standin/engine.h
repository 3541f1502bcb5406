// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: one initialized engine, client and (with a port) server.
//
// Locks, in this order: a link's mutex, links_mutex_. Then, for the hixl and fabric kinds, the requests' mutex after
// the link's; for comm before it, held by polls while they wait, so that one blocked peer stalls all polling.
#ifndef HIXL_STANDIN_ENGINE_H
#define HIXL_STANDIN_ENGINE_H

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "connect_pool.h"
#include "link.h"
#include "requests.h"
#include "server.h"

namespace standin
{
using Descs = std::vector<hixl::TransferOpDesc>;

class Engine
{
  public:
    Engine(std::string name, const Settings &settings, int32_t device_id);
    ~Engine();
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;

    Status start();

    Status register_memory(const hixl::MemDesc &memory, hixl::MemType type, void **handle);
    Status deregister_memory(void *handle);

    Status connect(const std::string &peer, int32_t timeout_ms);
    Status disconnect(const std::string &peer);
    Status connect_async(const std::string &peer, bool connect, int32_t timeout_ms);

    Status transfer_async(const std::string &peer, bool write, const Descs &descs, void *user_data, void **handle);
    Status transfer_sync(const std::string &peer, bool write, const Descs &descs, int32_t timeout_ms);
    Status status(void *handle, TransferStatus *status);
    Status statuses(uint32_t limit, bool skip_waiting, std::vector<hixl::TransferResult> *results);

    Status notify(const std::string &peer, const std::string &name, const std::string &message, int32_t timeout_ms);
    Status notifies(std::vector<hixl::NotifyDesc> *notifies);

    const Settings settings;
    ConnectPool pool;

  private:
    std::shared_ptr<Link> find(const std::string &peer) const;
    std::vector<std::shared_ptr<Link>> links() const;
    // The link of a transfer; with AutoConnect it is made.
    Status reach(const std::string &peer, int32_t timeout_ms, std::shared_ptr<Link> *link);
    Status prepare(Link &link, bool write, const Descs &descs, bool staged, Request *request) const;
    Status admit(Link &link) const;
    Status post(const std::shared_ptr<Link> &link, const std::shared_ptr<Request> &request, const Descs &descs);
    Status transfer(Link &link, bool write, const Descs &descs, int32_t timeout_ms);
    void block(const std::string &peer) const;
    // With the link's mutex. What a poll of the request says; terminal ones are removed.
    Status report(Link &link, Request &request, TransferStatus *status);
    Status comm_status(void *handle, TransferStatus *status);
    std::unique_lock<std::mutex> lock_for_poll(Link &link) const;
    void release(Link &link) const;
    void end(Link &link) const;
    // With AutoConnect any error of a transfer ends the link.
    Status after(const std::string &peer, Status status);
    void heartbeat();

    const std::string name_;
    const int32_t device_id_;
    Registry registry_;
    std::unique_ptr<Server> server_;
    Requests requests_;
    mutable std::mutex links_mutex_;
    std::map<std::string, std::shared_ptr<Link>> links_;
    std::condition_variable stopped_;
    bool stop_ = false;
    std::thread heartbeat_;
};

// The text for aclGetRecentErrMsg; returns the status.
Status say(Status status, const std::string &text);
} // namespace standin

#endif
