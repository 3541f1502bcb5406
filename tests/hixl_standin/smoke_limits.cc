// SPDX-License-Identifier: Apache-2.0
// Smoke test of the stand-in: locks, queues, limits and automatic connections.
#include <thread>

#include "smoke_sender.h"

namespace
{
using std::chrono::milliseconds;

void wait_for(const char *stat, uint64_t least)
{
    while (hixl_standin_stat(stat) < least)
        std::this_thread::sleep_for(milliseconds(1));
}

// Another peer's poll waits behind a blocked post only where one lock serves the whole engine.
void one_blocked_peer(Fixture &f, Peer &other)
{
    const AscendString to = other.engine.c_str();
    TransferReq blocked = nullptr, free = nullptr;
    TransferStatus status;
    std::atomic<bool> answered{false};
    CHECK_EQ(f.sender.hixl.TransferAsync(to, TransferOp::WRITE, {f.sender.desc(0, other.address[0], 64)},
                                         TransferArgs{}, free),
             SUCCESS);
    CHECK_EQ(f.post(blocked), SUCCESS);
    set("block_post_peer", f.peer.engine);
    set("block_post_ms", "10000");
    const auto polls = hixl_standin_stat("polls_during_post");
    std::thread poster([&] { CHECK_EQ(f.good(), SUCCESS); });
    wait_for("posting", 1);
    std::this_thread::sleep_for(milliseconds(20));
    std::thread poller([&] { CHECK_EQ(f.until_terminal(blocked, &status), SUCCESS); });
    wait_for("polls_during_post", polls + 1);
    std::thread bystander([&] {
        TransferStatus theirs;
        CHECK_EQ(f.until_terminal(free, &theirs), SUCCESS);
        answered = true;
    });
    if (f.comm) {
        std::this_thread::sleep_for(milliseconds(20));
        CHECK_EQ(answered, false);
    } else {
        bystander.join();
    }
    set("block_post_ms", "0");
    set("block_post_peer", "");
    if (f.comm)
        bystander.join();
    poster.join();
    poller.join();
}

// Of one peer, what follows an erring request is called FAILED for that call only.
void bulk_error(Fixture &f)
{
    TransferReq requests[3];
    std::vector<TransferResult> results;
    set("fail_poll_code", "507018");
    set("fail_nth", "1");
    for (auto &request : requests)
        CHECK_EQ(f.post(request), SUCCESS);
    std::this_thread::sleep_for(milliseconds(20));
    CHECK_EQ(f.sender.hixl.GetTransferStatus(GetTransferStatusArgs{}, results), SUCCESS);
    CHECK_EQ(results.size(), 3);
    CHECK_EQ(results[0].status, TransferStatus::COMPLETED);
    CHECK_EQ(results[1].status, TransferStatus::FAILED);
    CHECK_EQ(results[2].status, TransferStatus::FAILED);
    CHECK_EQ(f.sender.hixl.GetTransferStatus(GetTransferStatusArgs{}, results), SUCCESS);
    CHECK_EQ(results.size(), 1);
    CHECK_EQ(results[0].status, TransferStatus::COMPLETED);
    set("fail_poll_code", "0");
    CHECK_EQ(f.good(), SUCCESS);
}

void queues(Fixture &f, Peer &other)
{
    TransferReq request = nullptr, next = nullptr;
    TransferStatus status;
    const AscendString to = other.engine.c_str();
    const bool counted = !f.comm && !f.host;
    set("max_peers_outstanding", "1");
    CHECK_EQ(f.post(request), SUCCESS);
    const Status second = f.sender.hixl.TransferAsync(to, TransferOp::WRITE, {f.sender.desc(0, other.address[0], 64)},
                                                      TransferArgs{}, next);
    CHECK_EQ(second, counted ? RESOURCE_EXHAUSTED : SUCCESS);
    set("max_peers_outstanding", "128");
    CHECK_EQ(f.until_terminal(request, &status), SUCCESS);
    if (!second)
        CHECK_EQ(f.until_terminal(next, &status), SUCCESS);

    if (f.host) {
        std::vector<TransferReq> many(4096);
        for (auto &one : many)
            CHECK_EQ(f.post(one), SUCCESS);
        CHECK_EQ(f.post(request), RESOURCE_EXHAUSTED);
        for (const auto &one : many)
            CHECK_EQ(f.until_terminal(one, &status), SUCCESS);
    }

    // 4096 notifies, then no more until they are fetched.
    for (int i = 0; i < 4096; i++)
        CHECK_EQ(f.sender.hixl.SendNotify(f.to, {"a", ""}), SUCCESS);
    CHECK_EQ(f.sender.hixl.SendNotify(f.to, {"a", ""}), RESOURCE_EXHAUSTED);
}

// The acknowledgement that came too late (the queue was full) answers the next call.
void stopped_receiver(Fixture &f)
{
    f.peer.send_signal(SIGSTOP);
    CHECK_EQ(f.sender.hixl.SendNotify(f.to, {"late", ""}, 20), TIMEOUT);
    f.peer.send_signal(SIGCONT);
    std::this_thread::sleep_for(milliseconds(200));
    f.peer.ask("notifies");
    CHECK_EQ(f.sender.hixl.SendNotify(f.to, {"next", ""}), RESOURCE_EXHAUSTED);
}

void many_regions(const char *program)
{
    Sender sender;
    Peer peer(program);
    std::vector<MemHandle> handles(4094);
    for (size_t i = 0; i < handles.size(); i++)
        CHECK_EQ(sender.add(reinterpret_cast<void *>(0x1000 + i * 64), 32, MemType::HOST, handles[i]), SUCCESS);
    CHECK_EQ(sender.hixl.Connect(peer.engine.c_str(), 1000), SUCCESS);
    CHECK_EQ(sender.hixl.Disconnect(peer.engine.c_str()), SUCCESS);
    MemHandle more = nullptr;
    CHECK_EQ(sender.add(reinterpret_cast<void *>(0x800), 32, MemType::HOST, more), SUCCESS);
    CHECK_EQ(sender.hixl.Connect(peer.engine.c_str(), 1000), PARAM_INVALID);
}

// What is in flight moves on while Disconnect hangs, and not after.
void hanging_disconnect(Fixture &f)
{
    TransferReq request = nullptr;
    const unsigned long blank = f.peer.sum(0, 4096, 64);
    set("hang_device", "1");
    CHECK_EQ(f.sender.hixl.TransferAsync(f.to, TransferOp::WRITE, {f.sender.desc(0, f.peer.address[0] + 4096, 64)},
                                         TransferArgs{}, request),
             SUCCESS);
    set("hang_disconnect_ms", "10000");
    std::thread ender([&] { CHECK_EQ(f.sender.hixl.Disconnect(f.to), SUCCESS); });
    std::this_thread::sleep_for(milliseconds(10));
    CHECK_EQ(f.peer.sum(0, 4096, 64), blank);
    set("hang_device", "0");
    while (f.peer.sum(0, 4096, 64) == blank)
        std::this_thread::sleep_for(milliseconds(1));
    set("hang_disconnect_ms", "0");
    ender.join();
    CHECK_EQ(f.sender.hixl.Connect(f.to, 1000), SUCCESS);
}

void pacing(Fixture &f)
{
    set("bandwidth_mbs", "100");
    const auto start = Clock::now();
    TransferStatus status;
    CHECK_EQ(transfer(f.sender.hixl, f.to, TransferOp::WRITE, {f.sender.desc(0, f.peer.address[0], kSize)}, &status),
             SUCCESS);
    CHECK_EQ(Clock::now() - start > milliseconds(80), true);
    set("bandwidth_mbs", "0");
}

void automatic(const char *program)
{
    set("heartbeat_ms", "10");
    Hixl hixl;
    Peer peer(program);
    const AscendString to = peer.engine.c_str();
    std::string bytes(64, 'x');
    MemDesc memory;
    MemHandle handle = nullptr;
    TransferStatus status;
    memory.addr = reinterpret_cast<uintptr_t>(bytes.data());
    memory.len = bytes.size();
    CHECK_EQ(hixl.Initialize("127.0.0.1", {{"AutoConnect", "1"}}), SUCCESS);
    CHECK_EQ(hixl.RegisterMem(memory, MemType::HOST, handle), SUCCESS);
    CHECK_EQ(hixl.SendNotify(to, {"a", ""}), NOT_CONNECTED);
    const std::vector<TransferOpDesc> descs = {{memory.addr, peer.address[1], 64}};
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(transfer(hixl, to, TransferOp::WRITE, descs, &status), SUCCESS);
        CHECK_EQ(status, TransferStatus::COMPLETED);
        CHECK_EQ(hixl_standin_stat("links"), 1);
        TransferReq request = nullptr;
        CHECK_EQ(hixl.TransferAsync(to, TransferOp::WRITE, {}, TransferArgs{}, request), PARAM_INVALID);
        CHECK_EQ(hixl_standin_stat("links"), 0);
    }
    CHECK_EQ(transfer(hixl, to, TransferOp::WRITE, descs, &status), SUCCESS);
    peer.send_signal(SIGKILL);
    while (hixl_standin_stat("links"))
        std::this_thread::sleep_for(milliseconds(1));
    set("heartbeat_ms", "10000");
}
} // namespace

void smoke_limits(const char *program, const std::string &flavour, bool host)
{
    {
        Fixture f(program, flavour == "comm", host);
        Peer other(program);
        CHECK_EQ(f.sender.hixl.Connect(other.engine.c_str(), 1000), SUCCESS);
        one_blocked_peer(f, other);
        if (flavour == "hixl" && !host)
            bulk_error(f);
        pacing(f);
        if (!host)
            hanging_disconnect(f);
        if (flavour != "fabric") {
            queues(f, other);
            stopped_receiver(f);
        }
    }
    many_regions(program);
    automatic(program);
}
