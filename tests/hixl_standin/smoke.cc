// SPDX-License-Identifier: Apache-2.0
// Smoke test of the stand-in, and an example of the plain call-and-poll loop over the interface: two processes, every
// kind of engine. `smoke` runs all, `smoke loop` times that loop; it starts itself again as
// `smoke peer <engine> <device>`.
#include <cstring>

#include "smoke_sender.h"

namespace
{
const char *program;

void registration()
{
    Sender sender;
    MemHandle handle = nullptr, again = nullptr;
    static char block[4096];
    CHECK_EQ(sender.add(nullptr, 10, MemType::HOST, handle), PARAM_INVALID);
    CHECK_EQ(sender.add(block, 1000, MemType::HOST, handle), SUCCESS);
    CHECK_EQ(sender.add(block, 1000, MemType::HOST, again), SUCCESS);
    CHECK_EQ(handle == again, true);
    CHECK_EQ(sender.add(block + 500, 1000, MemType::HOST, again), PARAM_INVALID);
    CHECK_EQ(sender.hixl.DeregisterMem(nullptr), PARAM_INVALID);
    CHECK_EQ(sender.hixl.DeregisterMem(handle), SUCCESS);
    CHECK_EQ(sender.hixl.DeregisterMem(handle), SUCCESS);

    Peer peer(program);
    CHECK_EQ(sender.add(block, 0, MemType::HOST, handle), SUCCESS);
    CHECK_EQ(sender.hixl.Connect(peer.engine.c_str(), 1000), PARAM_INVALID);
    CHECK_EQ(sender.hixl.DeregisterMem(handle), SUCCESS);
    CHECK_EQ(sender.add(sender.host.data(), 100, MemType::DEVICE, handle), SUCCESS);
    CHECK_EQ(sender.hixl.Connect(peer.engine.c_str(), 1000), PARAM_INVALID);
    CHECK_EQ(sender.hixl.DeregisterMem(handle), SUCCESS);
    CHECK_EQ(sender.hixl.Connect(peer.engine.c_str(), 1000), SUCCESS);
    CHECK_EQ(sender.hixl.DeregisterMem(sender.handles[0]), FAILED);
}

void links(bool comm)
{
    Sender sender;
    Peer peer(program);
    CHECK_EQ(sender.hixl.Connect(peer.engine.c_str(), 0), PARAM_INVALID);
    CHECK_EQ(sender.hixl.Connect("127.0.0.1", 1000), PARAM_INVALID);
    CHECK_EQ(sender.hixl.Connect(("127.0.0.1:" + std::to_string(free_port())).c_str(), 1000), FAILED);
    CHECK_EQ(aclGetRecentErrMsg() != nullptr, true);
    CHECK_EQ(aclGetRecentErrMsg() == nullptr, true);
    CHECK_EQ(sender.hixl.Disconnect(peer.engine.c_str()), NOT_CONNECTED);
    CHECK_EQ(sender.hixl.Connect(peer.engine.c_str(), 1000), SUCCESS);
    CHECK_EQ(sender.hixl.Connect(peer.engine.c_str(), 1000), ALREADY_CONNECTED);
    CHECK_EQ(sender.hixl.Disconnect(peer.engine.c_str()), SUCCESS);

    AsyncConnectStatus status = AsyncConnectStatus::NOT_CONNECT;
    CHECK_EQ(sender.hixl.ConnectAsync(peer.engine.c_str(), 1000), SUCCESS);
    while (status != AsyncConnectStatus::CONNECTED && status != AsyncConnectStatus::CONNECT_FAILED)
        CHECK_EQ(sender.hixl.GetAsyncConnectStatus(peer.engine.c_str(), status), SUCCESS);
    CHECK_EQ(status, AsyncConnectStatus::CONNECTED);
    if (comm) {
        Peer same(program, 0);
        CHECK_EQ(sender.hixl.Connect(same.engine.c_str(), 1000), FAILED);
    }

    // One after the other, in order; a name ends at its NUL; what is too long or not UTF-8 is refused.
    const AscendString to = peer.engine.c_str();
    CHECK_EQ(sender.hixl.SendNotify(to, {"a", "1"}), SUCCESS);
    CHECK_EQ(sender.hixl.SendNotify(to, {AscendString("b\0c", 3), "2"}), SUCCESS);
    CHECK_EQ(sender.hixl.SendNotify(to, {"a", std::string(1025, 'x').c_str()}), PARAM_INVALID);
    CHECK_EQ(sender.hixl.SendNotify(to, {"\xff", ""}), PARAM_INVALID);
    CHECK_EQ(sender.hixl.SendNotify("127.0.0.1:1", {"a", ""}), NOT_CONNECTED);
    CHECK_EQ(peer.ask("notifies") == "a=1;b=2;", true);
    peer.send_signal(SIGKILL);
    CHECK_EQ(sender.hixl.SendNotify(to, {"a", ""}, 500), comm ? 1 : FAILED);
    CHECK_EQ(sender.hixl.Connect(to, 1000), ALREADY_CONNECTED);
}

void bytes(bool comm)
{
    Sender sender;
    Peer peer(program);
    TransferStatus status;
    const AscendString to = peer.engine.c_str();
    CHECK_EQ(sender.hixl.Connect(to, 1000), SUCCESS);

    // Device to device in one piece, host to host in 1000, and back.
    CHECK_EQ(transfer(sender.hixl, to, TransferOp::WRITE, {sender.desc(0, peer.address[0], kSize)}, &status), SUCCESS);
    CHECK_EQ(status, TransferStatus::COMPLETED);
    CHECK_EQ(peer.sum(0, 0, kSize), sum_of(sender.host));
    std::vector<TransferOpDesc> rows;
    std::string expected(kSize, 0);
    for (size_t i = 0; i < 1000; i++) {
        rows.push_back({reinterpret_cast<uintptr_t>(sender.host.data()) + i * 3001, peer.address[1] + i * 7001, 2000});
        expected.replace(i * 7001, 2000, sender.host, i * 3001, 2000);
    }
    CHECK_EQ(transfer(sender.hixl, to, TransferOp::WRITE, rows, &status), SUCCESS);
    CHECK_EQ(status, TransferStatus::COMPLETED);
    CHECK_EQ(peer.sum(1, 0, kSize), sum_of(expected));
    CHECK_EQ(transfer(sender.hixl, to, TransferOp::READ, {sender.desc(0, peer.address[1], kSize)}, &status), SUCCESS);
    std::string back(kSize, 0);
    CHECK_EQ(aclrtMemcpy(back.data(), kSize, sender.device, kSize, ACL_DEVICE_TO_HOST), 0);
    CHECK_EQ(back == expected, true);

    // A stopped receiver does not stop the data.
    peer.send_signal(SIGSTOP);
    CHECK_EQ(transfer(sender.hixl, to, TransferOp::WRITE, {sender.desc(0, peer.address[0], 4096)}, &status), SUCCESS);
    CHECK_EQ(status, TransferStatus::COMPLETED);
    peer.send_signal(SIGCONT);

    TransferReq request = nullptr;
    const auto post = [&](const TransferOpDesc &desc) {
        return sender.hixl.TransferAsync(to, TransferOp::WRITE, {desc}, TransferArgs{}, request);
    };
    const Status bad = comm ? SUCCESS : PARAM_INVALID;
    CHECK_EQ(sender.hixl.TransferAsync(to, TransferOp::WRITE, {}, TransferArgs{}, request), PARAM_INVALID);
    CHECK_EQ(post(sender.desc(0, peer.address[0], 0)), bad);
    CHECK_EQ(post(sender.desc(0, peer.address[0] + 1, kSize)), bad);
    CHECK_EQ(sender.hixl.GetTransferStatus(TransferReq{}, status), FAILED);
}

// Two engines of one process: bytes, and notifies put in place of what a vector held, or after it.
void one_process(bool comm)
{
    Sender sender;
    Hixl receiver;
    const AscendString to = ("127.0.0.1:" + std::to_string(free_port())).c_str();
    std::string target(64, 0);
    MemDesc memory;
    MemHandle handle = nullptr;
    TransferStatus status;
    memory.addr = reinterpret_cast<uintptr_t>(target.data());
    memory.len = target.size();
    CHECK_EQ(aclrtSetDevice(1), 0);
    CHECK_EQ(receiver.Initialize(to, {}), SUCCESS);
    CHECK_EQ(aclrtSetDevice(0), 0);
    CHECK_EQ(receiver.RegisterMem(memory, MemType::HOST, handle), SUCCESS);
    CHECK_EQ(receiver.Connect(to), PARAM_INVALID);
    CHECK_EQ(sender.hixl.Connect(to), SUCCESS);
    CHECK_EQ(transfer(sender.hixl, to, TransferOp::WRITE, {sender.desc(100, memory.addr, 64)}, &status), SUCCESS);
    CHECK_EQ(target == sender.host.substr(100, 64), true);
    // With a peer attached the server's memory can go: nothing stops it.
    CHECK_EQ(receiver.DeregisterMem(handle), SUCCESS);
    std::vector<NotifyDesc> notifies(1);
    CHECK_EQ(sender.hixl.SendNotify(to, {"name", "message"}), SUCCESS);
    CHECK_EQ(receiver.GetNotifies(notifies), SUCCESS);
    CHECK_EQ(notifies.size(), comm ? 2 : 1);
    CHECK_EQ(std::strcmp(notifies.back().name.GetString(), "name"), 0);
}

void bulk(bool supported)
{
    Sender sender;
    Peer peer(program);
    const AscendString to = peer.engine.c_str();
    CHECK_EQ(sender.hixl.Connect(to, 1000), SUCCESS);
    std::vector<TransferReq> requests(10);
    std::vector<TransferResult> results;
    GetTransferStatusArgs all, nothing, finished;
    nothing.max_query_count = 0;
    finished.skip_waiting = true;
    TransferArgs args;
    for (size_t i = 0; i < requests.size(); i++) {
        args.user_data = &requests[i];
        CHECK_EQ(sender.hixl.TransferAsync(to, TransferOp::WRITE, {sender.desc(0, peer.address[0] + i * 64, 64)}, args,
                                           requests[i]),
                 SUCCESS);
    }
    if (!supported) {
        CHECK_EQ(sender.hixl.GetTransferStatus(all, results), UNSUPPORTED);
        CHECK_EQ(requests[9] == reinterpret_cast<void *>(10), true);
        return;
    }
    CHECK_EQ(sender.hixl.GetTransferStatus(nothing, results), SUCCESS);
    CHECK_EQ(results.size(), 0);
    size_t seen = 0;
    while (seen < requests.size()) {
        CHECK_EQ(sender.hixl.GetTransferStatus(finished, results), SUCCESS);
        for (size_t i = 0; i < results.size(); i++, seen++) {
            const auto *const posted = static_cast<TransferReq *>(results[i].user_data);
            CHECK_EQ(results[i].req == *posted, true);
            CHECK_EQ(results[i].status, TransferStatus::COMPLETED);
            CHECK_EQ(!i || results[i - 1].user_data < results[i].user_data, true);
        }
    }
    CHECK_EQ(sender.hixl.GetTransferStatus(all, results), SUCCESS);
    CHECK_EQ(results.size(), 0);
    TransferStatus status;
    const auto stale = hixl_standin_stat("stale_polls");
    CHECK_EQ(sender.hixl.GetTransferStatus(requests[0], status), PARAM_INVALID);
    CHECK_EQ(hixl_standin_stat("stale_polls"), stale + 1);
}

// What one call-and-poll of 4 KiB costs, with a device that takes no time of its own.
int loop()
{
    constexpr int kTimes = 20000;
    for (const char *instant : {"0", "1"}) {
        Sender sender;
        Peer peer(program);
        TransferStatus status;
        const AscendString to = peer.engine.c_str();
        set("instant", instant);
        CHECK_EQ(sender.hixl.Connect(to, 1000), SUCCESS);
        const auto start = Clock::now();
        for (int i = 0; i < kTimes; i++)
            CHECK_EQ(transfer(sender.hixl, to, TransferOp::WRITE, {sender.desc(0, peer.address[0], 4096)}, &status),
                     SUCCESS);
        const std::chrono::duration<double, std::micro> taken = Clock::now() - start;
        std::printf("instant=%s: %.2f us\n", instant, taken.count() / kTimes);
    }
    return failures != 0;
}
} // namespace

int main(int argc, char **argv)
{
    if (argc == 4 && !std::strcmp(argv[1], "peer"))
        return run_peer(argv[2], std::atoi(argv[3]));
    program = argv[0];
    if (argc == 2 && !std::strcmp(argv[1], "loop"))
        return loop();
    smoke_misuse();
    for (const std::string kind : {"hixl", "hixl host", "comm", "fabric"}) {
        const std::string flavour = kind.substr(0, kind.find(' '));
        const bool comm = flavour == "comm", host = kind == "hixl host";
        set("flavour", flavour);
        set("placement", host ? "host" : "device");
        setenv("HIXL_STANDIN", ("flavour=" + flavour + ",finalize_ms=0").c_str(), 1);
        set("finalize_ms", "0");
        const int before = failures.load();
        registration();
        links(comm);
        bytes(comm);
        one_process(comm);
        bulk(flavour == "hixl");
        smoke_faults(program, flavour, host);
        smoke_limits(program, flavour, host);
        std::printf("%-10s %s\n", kind.c_str(), failures == before ? "ok" : "FAILED");
    }
    std::printf("smoke: %d checks, %d failures\n", checks.load(), failures.load());
    return failures != 0;
}
