// SPDX-License-Identifier: Apache-2.0
// A stand-in, a test double and development aid, not Huawei's library: the declarations of the interface it offers.
// Written from a table of symbols, sizes and numbers; every size and offset that matters is asserted below.
#ifndef HIXL_STANDIN_API_H
#define HIXL_STANDIN_API_H

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#define HIXL_STANDIN_EXPORT __attribute__((visibility("default")))

namespace ge
{
class HIXL_STANDIN_EXPORT AscendString
{
  public:
    AscendString() = default;
    AscendString(const char *text);
    AscendString(const char *text, size_t length);
    const char *GetString() const;
    size_t GetLength() const;
    bool operator<(const AscendString &other) const;

  private:
    // Of the library's string ABI: nothing inline may look inside.
    std::shared_ptr<std::string> text_;
};
} // namespace ge

namespace hixl
{
using ge::AscendString;

using Status = uint32_t;
constexpr Status SUCCESS = 0;
constexpr Status PARAM_INVALID = 103900;
constexpr Status TIMEOUT = 103901;
constexpr Status NOT_CONNECTED = 103902;
constexpr Status ALREADY_CONNECTED = 103903;
constexpr Status NOTIFY_FAILED = 103904;
constexpr Status UNSUPPORTED = 103905;
constexpr Status FAILED = 503900;
constexpr Status RESOURCE_EXHAUSTED = 203900;

enum class MemType : int32_t { DEVICE = 0, HOST = 1 };
enum class TransferOp : int32_t { READ = 0, WRITE = 1 };
enum class TransferStatus : int32_t { WAITING = 0, COMPLETED = 1, TIMEOUT = 2, FAILED = 3 };
enum class FeatureType : int32_t { AUTO_CONNECT = 0, CLIENT_SERVER_COMM = 1 };
enum class AsyncConnectStatus : int32_t {
    NOT_CONNECT = 0,
    CONNECT_PENDING = 1,
    CONNECTING = 2,
    CONNECTED = 3,
    CONNECT_FAILED = 4,
    DISCONNECT_PENDING = 5,
    DISCONNECTING = 6,
};

using MemHandle = void *;
using TransferReq = void *;

struct MemDesc {
    uintptr_t addr = 0;
    size_t len = 0;
    uint8_t reserved[128] = {};
};

struct TransferOpDesc {
    uintptr_t local_addr;
    uintptr_t remote_addr;
    size_t len;
};

struct TransferArgs {
    void *user_data = nullptr;
    uint8_t reserved[120] = {};
};

struct GetTransferStatusArgs {
    uint32_t max_query_count = UINT32_MAX;
    bool skip_waiting = false;
    uint8_t reserved[123] = {};
};

struct TransferResult {
    TransferReq req = nullptr;
    void *user_data = nullptr;
    TransferStatus status = TransferStatus::WAITING;
    uint8_t reserved[108] = {};
};

struct NotifyDesc {
    AscendString name;
    AscendString notify_msg;
};

class HixlShell;

class HIXL_STANDIN_EXPORT Hixl
{
  public:
    Hixl();
    ~Hixl();
    Hixl(const Hixl &) = delete;
    Hixl &operator=(const Hixl &) = delete;

    Status Initialize(const AscendString &local_engine, const std::map<AscendString, AscendString> &options);
    void Finalize();
    Status RegisterMem(const MemDesc &mem, MemType type, MemHandle &handle);
    Status DeregisterMem(MemHandle handle);
    Status Connect(const AscendString &remote_engine, int32_t timeout_ms = 1000);
    Status Disconnect(const AscendString &remote_engine, int32_t timeout_ms = 1000);
    Status ConnectAsync(const AscendString &remote_engine, int32_t timeout_ms = 1000);
    Status DisconnectAsync(const AscendString &remote_engine, int32_t timeout_ms = 1000);
    Status GetAsyncConnectStatus(const AscendString &remote_engine, AsyncConnectStatus &status);
    Status GetAsyncConnectStatus(std::map<AscendString, AsyncConnectStatus> &statuses);
    Status TransferSync(const AscendString &remote_engine, TransferOp operation,
                        const std::vector<TransferOpDesc> &descs, int32_t timeout_ms = 1000);
    Status TransferAsync(const AscendString &remote_engine, TransferOp operation,
                         const std::vector<TransferOpDesc> &descs, const TransferArgs &args, TransferReq &req);
    Status GetTransferStatus(const TransferReq &req, TransferStatus &status);
    Status GetTransferStatus(const GetTransferStatusArgs &args, std::vector<TransferResult> &results);
    Status SendNotify(const AscendString &remote_engine, const NotifyDesc &notify, int32_t timeout_ms = 1000);
    Status GetNotifies(std::vector<NotifyDesc> &notifies);
    Status GetCapability(FeatureType feature, int32_t &value);

  private:
    std::unique_ptr<HixlShell> shell_;
};

static_assert(sizeof(AscendString) == 16);
static_assert(sizeof(Hixl) == 8);
static_assert(sizeof(MemDesc) == 144 && offsetof(MemDesc, addr) == 0 && offsetof(MemDesc, len) == 8);
static_assert(sizeof(TransferOpDesc) == 24 && offsetof(TransferOpDesc, local_addr) == 0 &&
              offsetof(TransferOpDesc, remote_addr) == 8 && offsetof(TransferOpDesc, len) == 16);
static_assert(sizeof(TransferArgs) == 128 && offsetof(TransferArgs, user_data) == 0);
static_assert(sizeof(GetTransferStatusArgs) == 128 && offsetof(GetTransferStatusArgs, max_query_count) == 0 &&
              offsetof(GetTransferStatusArgs, skip_waiting) == 4);
static_assert(sizeof(TransferResult) == 128 && offsetof(TransferResult, req) == 0 &&
              offsetof(TransferResult, user_data) == 8 && offsetof(TransferResult, status) == 16);
static_assert(sizeof(NotifyDesc) == 32);
} // namespace hixl

#pragma GCC visibility push(default)
extern "C" {
// The stand-in's own controls, in libcann_hixl.so (README.md lists keys). set: 0, or -1 for a key or value it does
// not know. stat: UINT64_MAX for a key it does not know. Both from any thread.
int hixl_standin_set(const char *key, const char *value);
uint64_t hixl_standin_stat(const char *key);
}
#pragma GCC visibility pop

#endif
