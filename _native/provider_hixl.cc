// SPDX-License-Identifier: Apache-2.0
// The binding of HIXL's C++ interface to the C table of hixl.h, and nothing else: every decision is the core's.
//
// Built without CANN. What it needs of the interface is declared here, from its documented names, sizes and offsets; the
// symbols are found in libcann_hixl.so and libmetadef.so, which are opened (for all to see) before this object is.
//
// Vendor libraries are built with either ABI of std::string; this object runs with both, because it never touches the
// string: ge::AscendString is a std::shared_ptr to one, made and read by functions of the library, and copied and
// destroyed here by the pointer's own control block.
#include "hixl.h"

#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace ge
{
class AscendString
{
  public:
    AscendString(const char *text);
    AscendString(const char *text, size_t length);
    const char *GetString() const;
    size_t GetLength() const;
    bool operator<(const AscendString &other) const;

  private:
    std::shared_ptr<std::string> text_;
};
static_assert(sizeof(AscendString) == 16, "ABI");
} // namespace ge

namespace hixl
{
using Status = uint32_t;
using MemHandle = void *;
using TransferReq = void *;

enum MemType : int32_t { MEM_DEVICE = 0, MEM_HOST = 1 };
enum TransferOp : int32_t { READ = 0, WRITE = 1 };
enum class TransferStatus : int32_t { WAITING = 0, COMPLETED = 1, TIMEOUT = 2, FAILED = 3 };

struct MemDesc {
    uintptr_t addr;
    size_t len;
    uint8_t reserved[128];
};
static_assert(sizeof(MemDesc) == 144 && offsetof(MemDesc, addr) == 0 && offsetof(MemDesc, len) == 8, "ABI");

struct TransferOpDesc {
    uintptr_t local_addr;
    uintptr_t remote_addr;
    size_t len;
};
static_assert(sizeof(TransferOpDesc) == 24 && offsetof(TransferOpDesc, remote_addr) == 8 &&
                  offsetof(TransferOpDesc, len) == 16,
              "ABI");

struct TransferArgs {
    void *user_data;
    uint8_t reserved[120];
};
static_assert(sizeof(TransferArgs) == 128 && offsetof(TransferArgs, user_data) == 0, "ABI");

struct GetTransferStatusArgs {
    uint32_t max_query_count;
    uint32_t skip_waiting;
    uint8_t reserved[120];
};
static_assert(sizeof(GetTransferStatusArgs) == 128 && offsetof(GetTransferStatusArgs, max_query_count) == 0 &&
                  offsetof(GetTransferStatusArgs, skip_waiting) == 4,
              "ABI");

struct TransferResult {
    TransferReq req;
    void *user_data;
    TransferStatus status;
    uint8_t reserved[108];
};
static_assert(sizeof(TransferResult) == 128 && offsetof(TransferResult, req) == 0 &&
                  offsetof(TransferResult, user_data) == 8 && offsetof(TransferResult, status) == 16,
              "ABI");

struct NotifyDesc {
    ge::AscendString name;
    ge::AscendString notify_msg;
};
static_assert(sizeof(NotifyDesc) == 32, "ABI");

class Hixl
{
  public:
    Hixl();
    ~Hixl();
    Hixl(const Hixl &) = delete;
    Hixl &operator=(const Hixl &) = delete;
    Status Initialize(const ge::AscendString &local_engine,
                      const std::map<ge::AscendString, ge::AscendString> &options);
    void Finalize();
    Status RegisterMem(const MemDesc &mem, MemType type, MemHandle &mem_handle);
    Status DeregisterMem(MemHandle mem_handle);
    Status Connect(const ge::AscendString &remote_engine, int32_t timeout_in_millis);
    Status Disconnect(const ge::AscendString &remote_engine, int32_t timeout_in_millis);
    Status TransferAsync(const ge::AscendString &remote_engine, TransferOp operation,
                         const std::vector<TransferOpDesc> &op_descs, const TransferArgs &optional_args,
                         TransferReq &req);
    Status GetTransferStatus(const TransferReq &req, TransferStatus &status);
    Status GetTransferStatus(const GetTransferStatusArgs &args, std::vector<TransferResult> &results);
    Status SendNotify(const ge::AscendString &remote_engine, const NotifyDesc &notify, int32_t timeout_in_millis);
    Status GetNotifies(std::vector<NotifyDesc> &notifies);

  private:
    std::unique_ptr<char> impl_; // the library's; made and destroyed by its own constructor and destructor
};
static_assert(sizeof(Hixl) == 8, "ABI");
} // namespace hixl

struct hx_hixl_name {
    ge::AscendString text;
};

static_assert(sizeof(hx_hixl_desc_t) == sizeof(hixl::TransferOpDesc), "copied as they are");

namespace
{

hixl::Hixl *engine_of(hx_hixl_object_t *object)
{
    return reinterpret_cast<hixl::Hixl *>(object);
}

constexpr uint32_t OUT_OF_MEMORY = HX_HIXL_THREW - 1;

// The library documents no exceptions and throws some.
template <typename Call> uint32_t guarded(Call call) noexcept
{
    try {
        return call();
    } catch (const std::bad_alloc &) {
        return OUT_OF_MEMORY;
    } catch (...) {
        return HX_HIXL_THREW;
    }
}

hx_hixl_object_t *create()
{
    try {
        return reinterpret_cast<hx_hixl_object_t *>(new hixl::Hixl());
    } catch (...) {
        return nullptr;
    }
}

void destroy(hx_hixl_object_t *object)
{
    try {
        delete engine_of(object);
    } catch (...) { // a destructor that throws terminates; this is for those that are declared to
    }
}

hx_hixl_name_t *make_name(const char *text)
{
    try {
        return new hx_hixl_name{ge::AscendString(text)};
    } catch (...) {
        return nullptr;
    }
}

void free_name(hx_hixl_name_t *name)
{
    delete name;
}

uint32_t initialize(hx_hixl_object_t *object, const hx_hixl_name_t *local, const char *const *keys,
                    const char *const *values, size_t n)
{
    return guarded([&] {
        std::map<ge::AscendString, ge::AscendString> options;
        for (size_t i = 0; i < n; i++)
            options.emplace(ge::AscendString(keys[i]), ge::AscendString(values[i]));
        return engine_of(object)->Initialize(local->text, options);
    });
}

void finalize(hx_hixl_object_t *object)
{
    guarded([&] {
        engine_of(object)->Finalize();
        return 0u;
    });
}

uint32_t add(hx_hixl_object_t *object, uint64_t addr, uint64_t nbytes, int32_t kind, void **handle_p)
{
    return guarded([&] {
        hixl::MemDesc mem{};
        mem.addr = static_cast<uintptr_t>(addr);
        mem.len = nbytes;
        hixl::MemHandle handle = nullptr;
        auto status = engine_of(object)->RegisterMem(mem, static_cast<hixl::MemType>(kind), handle);
        *handle_p = handle;
        return status;
    });
}

uint32_t drop(hx_hixl_object_t *object, void *handle)
{
    return guarded([&] { return engine_of(object)->DeregisterMem(handle); });
}

uint32_t connect_to(hx_hixl_object_t *object, const hx_hixl_name_t *peer, int32_t timeout_ms)
{
    return guarded([&] { return engine_of(object)->Connect(peer->text, timeout_ms); });
}

uint32_t disconnect_from(hx_hixl_object_t *object, const hx_hixl_name_t *peer, int32_t timeout_ms)
{
    return guarded([&] { return engine_of(object)->Disconnect(peer->text, timeout_ms); });
}

uint32_t post(hx_hixl_object_t *object, const hx_hixl_name_t *peer, int32_t direction, const hx_hixl_desc_t *descs,
              size_t n, uint64_t user_data, void **request_p)
{
    uint32_t code = guarded([&] {
        static thread_local std::vector<hixl::TransferOpDesc> list; // a post costs no allocation after the first
        auto *first = reinterpret_cast<const hixl::TransferOpDesc *>(descs);
        list.assign(first, first + n);
        hixl::TransferArgs args{};
        args.user_data = reinterpret_cast<void *>(static_cast<uintptr_t>(user_data));
        hixl::TransferReq request = nullptr;
        auto status =
            engine_of(object)->TransferAsync(peer->text, static_cast<hixl::TransferOp>(direction), list, args, request);
        *request_p = request;
        return status;
    });
    return code == OUT_OF_MEMORY ? HX_HIXL_THREW : code; // how far it came is not known
}

uint32_t poll_one(hx_hixl_object_t *object, void *request, int32_t *status_p)
{
    return guarded([&] {
        hixl::TransferReq req = request;
        auto state = hixl::TransferStatus::WAITING;
        auto status = engine_of(object)->GetTransferStatus(req, state);
        *status_p = static_cast<int32_t>(state);
        return status;
    });
}

uint32_t poll_all(hx_hixl_object_t *object, hx_hixl_result_t *out, size_t max, size_t *n_p)
{
    *n_p = 0;
    return guarded([&] {
        static thread_local std::vector<hixl::TransferResult> results;
        hixl::GetTransferStatusArgs args{};
        args.max_query_count = UINT32_MAX; // a limit might count those that wait, and hide the others behind them
        args.skip_waiting = 1;
        results.clear();
        auto status = engine_of(object)->GetTransferStatus(args, results);
        for (const auto &result : results) {
            if (*n_p == max)
                break;
            out[(*n_p)++] = {reinterpret_cast<uintptr_t>(result.user_data), static_cast<int32_t>(result.status)};
        }
        return status;
    });
}

uint32_t notify(hx_hixl_object_t *object, const hx_hixl_name_t *peer, const char *name, size_t name_len,
                const char *text, size_t text_len, int32_t timeout_ms)
{
    return guarded([&] {
        hixl::NotifyDesc desc{ge::AscendString(name, name_len), ge::AscendString(text, text_len)};
        return engine_of(object)->SendNotify(peer->text, desc, timeout_ms);
    });
}

uint32_t notifies(hx_hixl_object_t *object, hx_hixl_notify_fn each, void *to)
{
    return guarded([&] {
        std::vector<hixl::NotifyDesc> list; // one engine flavour appends, another overwrites: always a new one
        auto status = engine_of(object)->GetNotifies(list);
        for (const auto &desc : list)
            each(to, desc.name.GetString(), desc.name.GetLength(), desc.notify_msg.GetString(),
                 desc.notify_msg.GetLength());
        return status;
    });
}

} // namespace

extern "C" __attribute__((visibility("default"))) const hx_hixl_table_t *hx_hixl_binding(void)
{
    static const hx_hixl_table_t table = {
        HX_HIXL_ABI, create,     destroy,         make_name, free_name, initialize, finalize, add,
        drop,        connect_to, disconnect_from, post,      poll_one,  poll_all,   notify,   notifies,
    };
    return &table;
}
