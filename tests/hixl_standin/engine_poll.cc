// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: asking after transfers. There is no other way to learn that one has ended.
#include "engine.h"

namespace standin
{
std::unique_lock<std::mutex> Engine::lock_for_poll(Link &link) const
{
    std::unique_lock<std::mutex> lock(link.mutex, std::try_to_lock);
    if (!lock) {
        hixl_standin_count(STAT_POLLS_BLOCKED, 1);
        if (link.posting)
            hixl_standin_count(STAT_POLLS_DURING_POST, 1);
        lock.lock();
    }
    return lock;
}

Status Engine::report(Link &link, Request &request, TransferStatus *status)
{
    *status = request.state;
    if (*status == TransferStatus::WAITING)
        return hixl::SUCCESS;
    release(link);
    if (*status == TransferStatus::COMPLETED)
        return hixl::SUCCESS;
    const auto code = static_cast<Status>(hixl_standin_knob(KNOB_FAIL_POLL_CODE));
    return say(code, "the transfer to " + link.name + " failed on the device");
}

Status Engine::status(void *handle, TransferStatus *status)
{
    hixl_standin_count(STAT_POLLS, 1);
    *status = TransferStatus::FAILED;
    if (!handle)
        return say(hixl::FAILED, "GetTransferStatus: no request");
    if (settings.flavour == FLAVOUR_COMM)
        return comm_status(handle, status);

    const auto request = requests_.find(handle);
    if (!request)
        return say(hixl::PARAM_INVALID, "GetTransferStatus: no such request");
    Status code;
    {
        const auto lock = lock_for_poll(*request->link);
        if (request->freed) {
            hixl_standin_count(STAT_STALE_POLLS, 1);
            return say(hixl::PARAM_INVALID, "GetTransferStatus: no such request any more");
        }
        code = report(*request->link, *request, status);
        if (*status != TransferStatus::WAITING)
            requests_.remove(*request);
    }
    if (*status == TransferStatus::FAILED)
        after(request->link->name, hixl::FAILED);
    return code;
}

Status Engine::comm_status(void *handle, TransferStatus *status)
{
    std::lock_guard<std::mutex> engine_lock(requests_.mutex);
    const auto request = requests_.find_locked(handle);
    if (!request)
        return requests_.retired_locked(handle) ? say(hixl::NOT_CONNECTED, "GetTransferStatus: disconnected")
                                                : say(hixl::PARAM_INVALID, "GetTransferStatus: no such request");
    const auto lock = lock_for_poll(*request->link);
    if (!request->link->up) {
        hixl_standin_count(STAT_STALE_POLLS, 1);
        return say(hixl::NOT_CONNECTED, "GetTransferStatus: disconnected");
    }
    const Status code = report(*request->link, *request, status);
    if (*status != TransferStatus::WAITING)
        requests_.remove_locked(*request);
    return code;
}

Status Engine::statuses(uint32_t limit, bool skip_waiting, std::vector<hixl::TransferResult> *results)
{
    hixl_standin_count(STAT_BULK_POLLS, 1);
    if (settings.flavour != FLAVOUR_HIXL)
        return say(hixl::UNSUPPORTED, "GetTransferStatus: this kind of engine has no call for all requests");
    results->clear();

    const auto requests = requests_.all(limit);
    std::map<const Link *, bool> erring; // the links whose requests are asked after
    std::vector<std::string> failed;
    std::map<const Request *, TransferStatus> found;
    for (const auto &request : requests)
        erring.emplace(request->link.get(), false);
    std::vector<std::shared_ptr<Link>> peers = links();
    for (const auto &link : peers) {
        // One peer after the other, also those without a request.
        const auto lock = lock_for_poll(*link);
        bool &error = erring[link.get()];
        for (const auto &request : requests) {
            if (request->link != link || request->freed || !link->up)
                continue;
            TransferStatus &status = found[request.get()];
            if (error) {
                // Said of requests that may still be under way, and that stay.
                status = TransferStatus::FAILED;
                continue;
            }
            error = report(*link, *request, &status) != hixl::SUCCESS;
            if (status != TransferStatus::WAITING)
                requests_.remove(*request);
            if (status == TransferStatus::FAILED)
                failed.push_back(link->name);
        }
    }
    for (const auto &request : requests) {
        const auto one = found.find(request.get());
        if (one == found.end() || (skip_waiting && one->second == TransferStatus::WAITING))
            continue;
        results->emplace_back();
        results->back().req = request->handle;
        results->back().user_data = request->user_data;
        results->back().status = one->second;
    }
    for (const auto &peer : failed)
        after(peer, hixl::FAILED);
    return hixl::SUCCESS;
}
} // namespace standin
