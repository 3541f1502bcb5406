// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: posting transfers.
#include <array>
#include <atomic>

#include "acl.h"
#include "engine.h"

namespace standin
{
namespace
{
constexpr int32_t kAutoConnectMs = 3000;
constexpr int64_t kHostQueue = 4096;

// Peers with something outstanding, by device, of the whole process.
std::atomic<int64_t> busy_peers[64];

std::atomic<int64_t> &busy(int32_t device)
{
    return busy_peers[static_cast<size_t>(device) % 64];
}

bool latches(Status status)
{
    return status == hixl::FAILED || status == hixl::TIMEOUT;
}

class Posting
{
  public:
    Posting()
    {
        hixl_standin_high(STAT_MAX_CONCURRENT_POSTS, hixl_standin_count(STAT_POSTING, 1));
    }
    ~Posting()
    {
        hixl_standin_count(STAT_POSTING, -1);
    }
};

// Marks the link as held by a post for as long as the mutex is.
class PostLock
{
  public:
    explicit PostLock(Link &link) : link_(link), lock_(link.mutex)
    {
        link_.posting = true;
    }
    ~PostLock()
    {
        link_.posting = false;
    }

  private:
    Link &link_;
    std::unique_lock<std::mutex> lock_;
};

void pair_up(const std::vector<Span> &local, const std::vector<Span> &remote, std::vector<Piece> *pieces)
{
    size_t i = 0, j = 0;
    uint64_t from = 0, to = 0;
    while (i < local.size() && j < remote.size()) {
        const uint64_t part = std::min(local[i].length - from, remote[j].length - to);
        pieces->push_back({local[i].at + from, remote[j].at + to, part});
        from += part;
        to += part;
        if (from == local[i].length)
            i++, from = 0;
        if (to == remote[j].length)
            j++, to = 0;
    }
}
} // namespace

Status Engine::reach(const std::string &peer, int32_t timeout_ms, std::shared_ptr<Link> *link)
{
    *link = find(peer);
    if (!*link && settings.auto_connect) {
        const Status status = connect(peer, timeout_ms);
        if (status && status != hixl::ALREADY_CONNECTED)
            return status;
        *link = find(peer);
    }
    return *link ? hixl::SUCCESS : say(hixl::NOT_CONNECTED, "no link to " + peer);
}

Status Engine::after(const std::string &peer, Status status)
{
    if (status && settings.auto_connect)
        disconnect(peer);
    return status;
}

void Engine::block(const std::string &peer) const
{
    const int64_t delay = hixl_standin_knob(KNOB_BLOCK_POST_MS);
    char only[256];
    if (!delay)
        return;
    hixl_standin_text(TEXT_BLOCK_POST_PEER, only, sizeof only);
    if (*only && peer != only)
        return;
    const auto until = (Clock::now() + std::chrono::milliseconds(delay)).time_since_epoch();
    hixl_standin_wait_while(KNOB_BLOCK_POST_MS, std::chrono::duration_cast<std::chrono::nanoseconds>(until).count());
}

// Descriptors into pieces. The comm engine checks nothing and finds out on the device; its blocking call (`staged`)
// goes through its own buffers, so that the local side need not be registered.
Status Engine::prepare(Link &link, bool write, const Descs &descs, bool staged, Request *request) const
{
    const bool comm = settings.flavour == FLAVOUR_COMM;
    std::vector<Span> here, there;
    if (descs.empty())
        return say(hixl::PARAM_INVALID, "a transfer of nothing");
    request->write = write;
    request->pieces.reserve(descs.size());
    for (const auto &desc : descs) {
        if (!comm && (!desc.len || !desc.local_addr || !desc.remote_addr))
            return say(hixl::PARAM_INVALID, "a descriptor without length or address");
        if (!desc.len)
            continue;
        bool known = link.local.resolve(desc.local_addr, desc.len, &here);
        if (!known && staged) {
            here.assign(1, {0, desc.len});
            int32_t device = 0;
            known = hixl_standin_shadow(desc.local_addr, desc.len, &here[0].at, &device) >= 0;
        }
        if (known && link.remote.table.resolve(desc.remote_addr, desc.len, &there)) {
            pair_up(here, there, &request->pieces);
            continue;
        }
        if (!comm)
            return say(hixl::PARAM_INVALID, "a descriptor leaves what was registered, on both sides, before Connect");
        request->fails = true;
    }
    return hixl::SUCCESS;
}

// Limits on what was posted and not reported; counts the request.
Status Engine::admit(Link &link) const
{
    int64_t limit = hixl_standin_knob(KNOB_MAX_UNPOLLED);
    if (!limit && settings.placement == PLACEMENT_HOST)
        limit = kHostQueue;
    if (limit && link.outstanding >= limit)
        return say(hixl::RESOURCE_EXHAUSTED, "too many requests that were not polled");
    const bool counted = settings.flavour == FLAVOUR_HIXL && settings.placement == PLACEMENT_DEVICE;
    if (!link.outstanding && counted && busy(device_id_)++ >= hixl_standin_knob(KNOB_MAX_PEERS_OUTSTANDING)) {
        busy(device_id_)--;
        return say(hixl::RESOURCE_EXHAUSTED, "too many peers with requests that were not polled");
    }
    link.outstanding++;
    return hixl::SUCCESS;
}

// With the link's mutex: one outstanding request less.
void Engine::release(Link &link) const
{
    if (--link.outstanding == 0 && settings.flavour == FLAVOUR_HIXL && settings.placement == PLACEMENT_DEVICE)
        busy(device_id_)--;
}

Status Engine::transfer_async(const std::string &peer, bool write, const Descs &descs, void *user_data, void **handle)
{
    const Posting posting;
    hixl_standin_count(STAT_POSTS, 1);
    std::shared_ptr<Link> link;
    if (const Status status = reach(peer, kAutoConnectMs, &link))
        return after(peer, status);
    const auto request = std::make_shared<Request>();
    request->link = link;
    request->user_data = user_data;
    request->write = write;
    Status status;
    {
        const PostLock lock(*link);
        status = post(link, request, descs);
        if (!status && settings.flavour != FLAVOUR_COMM)
            requests_.add(request);
    }
    if (status)
        return after(peer, status);
    if (settings.flavour == FLAVOUR_COMM)
        requests_.add(request);
    *handle = request->handle;
    return hixl::SUCCESS;
}

Status Engine::post(const std::shared_ptr<Link> &link, const std::shared_ptr<Request> &request, const Descs &descs)
{
    if (!link->up)
        return say(hixl::NOT_CONNECTED, "TransferAsync: no link to " + link->name);
    block(link->name);
    if (link->device->latched())
        return say(hixl::FAILED, "TransferAsync: an earlier transfer on this link failed");
    if (const Status status = prepare(*link, request->write, descs, false, request.get()))
        return status;
    const bool nth = hixl_standin_nth(KNOB_FAIL_NTH);
    const auto wanted = static_cast<Status>(hixl_standin_knob(KNOB_FAIL_CODE));
    if (nth && wanted) {
        if (latches(wanted))
            link->device->latch();
        return say(wanted, "TransferAsync: as the knob fail_code says");
    }
    request->fails |= nth;
    request->forgotten = hixl_standin_nth(KNOB_WAIT_FOREVER_NTH);
    if (const Status status = admit(*link))
        return status;
    if (link->device->post(request))
        return hixl::SUCCESS;
    release(*link);
    return say(hixl::FAILED, "TransferAsync: the transfer failed at once");
}

Status Engine::transfer_sync(const std::string &peer, bool write, const Descs &descs, int32_t timeout_ms)
{
    hixl_standin_count(STAT_SYNC_CALLS, 1);
    if (timeout_ms <= 0)
        return say(hixl::PARAM_INVALID, "TransferSync: the time-out is not over 0");
    std::shared_ptr<Link> link;
    if (const Status status = reach(peer, timeout_ms, &link))
        return after(peer, status);
    Status status;
    {
        const PostLock lock(*link);
        status = transfer(*link, write, descs, timeout_ms);
    }
    return after(peer, status);
}

// A host transfer is waited for whatever the time-out, and timed out afterwards.
Status Engine::transfer(Link &link, bool write, const Descs &descs, int32_t timeout_ms)
{
    const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
    if (!link.up)
        return say(hixl::NOT_CONNECTED, "TransferSync: no link to " + link.name);
    if (link.device->latched())
        return say(hixl::FAILED, "TransferSync: an earlier transfer on this link failed");
    const auto request = std::make_shared<Request>();
    if (const Status status = prepare(link, write, descs, settings.flavour == FLAVOUR_COMM, request.get()))
        return status;
    const bool done = link.device->post(request) && link.device->wait(*request, deadline);
    if (done && request->state == TransferStatus::COMPLETED &&
        (settings.placement == PLACEMENT_DEVICE || Clock::now() < deadline))
        return hixl::SUCCESS;
    link.device->latch();
    return done && request->state == TransferStatus::FAILED ? say(hixl::FAILED, "TransferSync: failed")
                                                            : say(hixl::TIMEOUT, "TransferSync: timed out");
}
} // namespace standin
