// SPDX-License-Identifier: Apache-2.0
// The smoke program's own side: an engine without a port, one piece of device and one of host memory.
#ifndef HIXL_STANDIN_SMOKE_SENDER_H
#define HIXL_STANDIN_SMOKE_SENDER_H

#include <chrono>

#include "smoke_peer.h"

using namespace hixl;
using Clock = std::chrono::steady_clock;

void smoke_faults(const char *program, const std::string &flavour, bool host);
void smoke_limits(const char *program, const std::string &flavour, bool host);
void smoke_misuse();

// The C++ call-and-poll loop.
inline Status transfer(Hixl &hixl, const AscendString &peer, TransferOp operation,
                       const std::vector<TransferOpDesc> &descs, TransferStatus *status)
{
    TransferReq request = nullptr;
    *status = TransferStatus::WAITING;
    if (const Status code = hixl.TransferAsync(peer, operation, descs, TransferArgs{}, request))
        return code;
    const auto end = Clock::now() + std::chrono::seconds(10);
    while (Clock::now() < end)
        if (const Status code = hixl.GetTransferStatus(request, *status); code || *status != TransferStatus::WAITING)
            return code;
    return TIMEOUT;
}

inline unsigned long sum_of(const std::string &bytes)
{
    unsigned long sum = 0;
    for (const char byte : bytes)
        sum = sum * 131 + static_cast<unsigned char>(byte);
    return sum;
}

inline void set(const char *key, const std::string &value)
{
    CHECK_EQ(hixl_standin_set(key, value.c_str()), 0);
}

struct Sender {
    Hixl hixl;
    char *device = nullptr;
    std::string host = std::string(kSize, 0);
    MemHandle handles[2] = {};

    Sender()
    {
        void *at = nullptr;
        CHECK_EQ(aclrtSetDevice(0), 0);
        CHECK_EQ(hixl.Initialize("127.0.0.1", {}), SUCCESS);
        CHECK_EQ(aclrtMalloc(&at, kSize, 0), 0);
        device = static_cast<char *>(at);
        for (size_t i = 0; i < kSize; i++)
            host[i] = static_cast<char>(i * 2654435761u >> 13);
        CHECK_EQ(aclrtMemcpy(device, kSize, host.data(), kSize, ACL_HOST_TO_DEVICE), 0);
        CHECK_EQ(add(device, kSize, MemType::DEVICE, handles[0]), SUCCESS);
        CHECK_EQ(add(host.data(), kSize, MemType::HOST, handles[1]), SUCCESS);
    }
    ~Sender()
    {
        hixl.Finalize();
        CHECK_EQ(aclrtFree(device), 0);
    }
    Status add(const void *at, size_t length, MemType type, MemHandle &handle)
    {
        MemDesc memory;
        memory.addr = reinterpret_cast<uintptr_t>(at);
        memory.len = length;
        return hixl.RegisterMem(memory, type, handle);
    }
    TransferOpDesc desc(size_t from, uintptr_t to, size_t length) const
    {
        return {reinterpret_cast<uintptr_t>(device) + from, to, length};
    }
};

// A sender that is connected to a peer process.
struct Fixture {
    Sender sender;
    Peer peer;
    const AscendString to;
    const bool comm, host;

    Fixture(const char *program, bool comm_, bool host_)
        : peer(program), to(peer.engine.c_str()), comm(comm_), host(host_)
    {
        CHECK_EQ(sender.hixl.Connect(to, 1000), SUCCESS);
    }
    Status post(TransferReq &request, size_t length = 64)
    {
        return sender.hixl.TransferAsync(to, TransferOp::WRITE, {sender.desc(0, peer.address[0], length)},
                                         TransferArgs{}, request);
    }
    Status good()
    {
        TransferStatus status;
        const Status code =
            transfer(sender.hixl, to, TransferOp::WRITE, {sender.desc(0, peer.address[0], 4096)}, &status);
        return code ? code : status == TransferStatus::COMPLETED ? SUCCESS : FAILED;
    }
    TransferStatus status(const TransferReq &request)
    {
        TransferStatus status;
        CHECK_EQ(sender.hixl.GetTransferStatus(request, status), SUCCESS);
        return status;
    }
    void reconnect()
    {
        CHECK_EQ(sender.hixl.Disconnect(to), SUCCESS);
        CHECK_EQ(sender.hixl.Connect(to, 1000), SUCCESS);
        CHECK_EQ(good(), SUCCESS);
    }
    Status until_terminal(const TransferReq &request, TransferStatus *status)
    {
        for (;;)
            if (const Status code = sender.hixl.GetTransferStatus(request, *status);
                code || *status != TransferStatus::WAITING)
                return code;
    }
};

#endif
