// SPDX-License-Identifier: Apache-2.0
// Smoke test of the stand-in: faults, limits and what each kind of engine makes of them.
#include <thread>

#include "smoke_sender.h"

namespace
{
void one_fails(Fixture &f)
{
    TransferReq request = nullptr, next = nullptr;
    TransferStatus status;
    set("fail_nth", "0");
    if (f.host) {
        CHECK_EQ(f.post(request), FAILED);
        CHECK_EQ(f.post(request), FAILED);
    } else if (f.comm) {
        CHECK_EQ(f.post(request), SUCCESS);
        CHECK_EQ(f.good(), SUCCESS);
        CHECK_EQ(f.status(request), TransferStatus::WAITING);
    } else {
        set("hang_device", "1");
        CHECK_EQ(f.post(request), SUCCESS);
        CHECK_EQ(f.post(next), SUCCESS);
        CHECK_EQ(f.status(next), TransferStatus::WAITING);
        set("err_msg", "the words of the runtime");
        set("hang_device", "0");
        CHECK_EQ(f.until_terminal(request, &status), SUCCESS);
        CHECK_EQ(status, TransferStatus::FAILED);
        CHECK_EQ(std::string(aclGetRecentErrMsg()) == "the words of the runtime", true);
        CHECK_EQ(f.status(next), TransferStatus::FAILED);
        CHECK_EQ(f.post(next), FAILED);
    }
    f.reconnect();
    set("fail_nth", "0");
    set("fail_code", "507018");
    CHECK_EQ(f.post(request), 507018);
    CHECK_EQ(f.good(), SUCCESS);
    set("fail_code", "0");
}

void disconnect_under_way(Fixture &f)
{
    TransferReq request = nullptr;
    TransferStatus status;
    if (f.host)
        return;
    set("hang_device", "1");
    CHECK_EQ(f.post(request), SUCCESS);
    CHECK_EQ(f.status(request), TransferStatus::WAITING);
    CHECK_EQ(f.sender.hixl.Disconnect(f.to), SUCCESS);
    set("hang_device", "0");
    CHECK_EQ(f.sender.hixl.GetTransferStatus(request, status), f.comm ? NOT_CONNECTED : PARAM_INVALID);
    CHECK_EQ(status, TransferStatus::FAILED);
    CHECK_EQ(f.sender.hixl.Connect(f.to, 1000), SUCCESS);
    CHECK_EQ(f.sender.hixl.GetTransferStatus(request, status), f.comm ? NOT_CONNECTED : PARAM_INVALID);
    CHECK_EQ(f.good(), SUCCESS);
    CHECK_EQ(hixl_standin_stat("outstanding"), 0);
}

void handles_and_limits(Fixture &f, bool pointers)
{
    TransferReq first = nullptr, second = nullptr;
    TransferStatus status;
    CHECK_EQ(f.post(first), SUCCESS);
    CHECK_EQ(f.until_terminal(first, &status), SUCCESS);
    CHECK_EQ(f.post(second), SUCCESS);
    CHECK_EQ(first == second, pointers);
    CHECK_EQ(f.until_terminal(second, &status), SUCCESS);
    set("max_unpolled", "2");
    CHECK_EQ(f.post(first), SUCCESS);
    CHECK_EQ(f.post(second), SUCCESS);
    TransferReq third = nullptr;
    CHECK_EQ(f.post(third), RESOURCE_EXHAUSTED);
    CHECK_EQ(f.until_terminal(first, &status), SUCCESS);
    CHECK_EQ(f.until_terminal(second, &status), SUCCESS);
    set("max_unpolled", "0");
    set("instant", "1");
    CHECK_EQ(f.post(first), SUCCESS);
    CHECK_EQ(f.status(first), TransferStatus::COMPLETED);
    set("instant", "0");
}

void blocked_post(Fixture &f)
{
    TransferReq request = nullptr;
    TransferStatus status;
    CHECK_EQ(f.post(request), SUCCESS);
    set("block_post_ms", "10000");
    const auto polls = hixl_standin_stat("polls_during_post");
    std::thread poster([&] { CHECK_EQ(f.good(), SUCCESS); });
    while (!hixl_standin_stat("posting"))
        std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::thread poller([&] { CHECK_EQ(f.until_terminal(request, &status), SUCCESS); });
    while (hixl_standin_stat("polls_during_post") == polls)
        std::this_thread::yield();
    set("block_post_ms", "0");
    poster.join();
    poller.join();
}

void late_registration(Fixture &f)
{
    static char late[64];
    MemHandle handle = nullptr;
    TransferReq request = nullptr;
    CHECK_EQ(f.sender.add(late, sizeof late, MemType::HOST, handle), SUCCESS);
    CHECK_EQ(f.sender.hixl.TransferAsync(f.to, TransferOp::WRITE,
                                         {{reinterpret_cast<uintptr_t>(late), f.peer.address[0], 64}}, TransferArgs{},
                                         request),
             f.comm ? SUCCESS : PARAM_INVALID);
    f.reconnect();
    CHECK_EQ(f.sender.hixl.TransferAsync(f.to, TransferOp::WRITE,
                                         {{reinterpret_cast<uintptr_t>(late), f.peer.address[0], 64}}, TransferArgs{},
                                         request),
             SUCCESS);
    f.reconnect();
}

void blocking_call(Fixture &f)
{
    const std::vector<TransferOpDesc> one = {f.sender.desc(0, f.peer.address[0], 64)};
    CHECK_EQ(f.sender.hixl.TransferSync(f.to, TransferOp::WRITE, one, 1000), SUCCESS);
    set("latency_us", "50000");
    CHECK_EQ(f.sender.hixl.TransferSync(f.to, TransferOp::WRITE, one, 5), TIMEOUT);
    set("latency_us", "0");
    CHECK_EQ(f.sender.hixl.TransferSync(f.to, TransferOp::WRITE, one, 1000), FAILED);
    f.reconnect();
}

void peer_ends(Fixture &f)
{
    TransferReq request = nullptr;
    TransferStatus status;
    f.peer.send_signal(SIGKILL);
    CHECK_EQ(f.post(request), SUCCESS);
    if (f.comm || f.host) {
        for (int i = 0; i < 100; i++) {
            CHECK_EQ(f.status(request), TransferStatus::WAITING);
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
    } else {
        CHECK_EQ(f.until_terminal(request, &status), SUCCESS);
        CHECK_EQ(status, TransferStatus::FAILED);
    }
    CHECK_EQ(f.sender.hixl.Connect(f.to, 100), ALREADY_CONNECTED);
    CHECK_EQ(f.sender.hixl.Disconnect(f.to), SUCCESS);
    CHECK_EQ(f.sender.hixl.Connect(f.to, 100), FAILED);
}

// A finalized engine is out of reach even while its process lives.
void peer_finalizes(const char *program, bool comm, bool host)
{
    Fixture f(program, comm, host);
    TransferReq request = nullptr;
    TransferStatus status;
    CHECK_EQ(f.peer.ask("finalize") == "done", true);
    const unsigned long before = f.peer.sum(0, 0, 4096);
    CHECK_EQ(f.post(request, 4096), SUCCESS);
    if (!comm && !host)
        CHECK_EQ(f.until_terminal(request, &status), SUCCESS);
    else
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK_EQ(f.peer.sum(0, 0, 4096), before);
}
} // namespace

void smoke_faults(const char *program, const std::string &flavour, bool host)
{
    {
        Fixture f(program, flavour == "comm", host);
        one_fails(f);
        disconnect_under_way(f);
        handles_and_limits(f, flavour == "hixl");
        blocked_post(f);
        late_registration(f);
        blocking_call(f);
        peer_ends(f);
    }
    peer_finalizes(program, flavour == "comm", host);
    CHECK_EQ(hixl_standin_stat("outstanding"), 0);
    CHECK_EQ(hixl_standin_stat("links"), 0);
    CHECK_EQ(hixl_standin_stat("registered"), 0);
}
