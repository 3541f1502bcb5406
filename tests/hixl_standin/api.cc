// SPDX-License-Identifier: Apache-2.0
// Stand-in for libcann_hixl.so, a test double: the exported class. Each call takes the engine's own context and leaves
// it current on a thread that had none. Finalize must not meet any other call; here that is fatal.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "acl.h"
#include "engine.h"

using namespace standin;

namespace hixl
{
class HixlShell
{
  public:
    std::atomic<int> inside{0};
    std::atomic<const char *> last{"nothing"};
    std::atomic<bool> finalizing{false};
    std::atomic<bool> finalized{false};
    std::unique_ptr<Engine> engine;
    void *context = nullptr;
};

namespace
{
[[noreturn]] void misuse(const char *what, const char *other)
{
    std::fprintf(stderr, "hixl stand-in: MISUSE: %s while %s is inside the same engine\n", what, other);
    std::abort();
}

class Inside
{
  public:
    Inside(HixlShell &shell, const char *call) : shell_(shell)
    {
        shell.last.store(call, std::memory_order_relaxed);
        shell.inside++;
        if (shell.finalizing)
            misuse(call, "Finalize");
    }
    ~Inside()
    {
        shell_.inside--;
    }

  private:
    HixlShell &shell_;
};

class ContextGuard
{
  public:
    explicit ContextGuard(void *context) : before_(hixl_standin_context_current())
    {
        hixl_standin_context_swap(context);
    }
    ~ContextGuard()
    {
        if (before_)
            hixl_standin_context_swap(before_);
    }

  private:
    void *before_;
};

template <typename Call> Status inside(HixlShell &shell, const char *name, Call call)
{
    const Inside mark(shell, name);
    if (!shell.engine) {
        if (shell.finalized)
            hixl_standin_count(STAT_AFTER_FINALIZE, 1);
        return say(FAILED, std::string(name) + ": not initialized");
    }
    const ContextGuard guard(shell.context);
    return call(*shell.engine);
}

// Strict: no overlong forms, no surrogates, nothing over U+10FFFF.
bool utf8(const char *text)
{
    const auto *at = reinterpret_cast<const unsigned char *>(text);
    while (*at) {
        const int extra = *at < 0x80             ? 0
                          : (*at & 0xe0) == 0xc0 ? 1
                          : (*at & 0xf0) == 0xe0 ? 2
                          : (*at & 0xf8) == 0xf0 ? 3
                                                 : -1;
        if (extra < 0)
            return false;
        uint32_t point = extra ? *at & (0x3fu >> extra) : *at;
        at++;
        for (int i = 0; i < extra; i++, at++) {
            if ((*at & 0xc0) != 0x80)
                return false;
            point = point << 6 | (*at & 0x3fu);
        }
        const uint32_t least[] = {0, 0x80, 0x800, 0x10000};
        if (point < least[extra] || point > 0x10ffff || (point >= 0xd800 && point < 0xe000))
            return false;
    }
    return true;
}

// A second Initialize makes a second engine; the first stays, out of reach, with its threads and port.
std::vector<std::unique_ptr<Engine>> &leaked()
{
    static auto *const engines = new std::vector<std::unique_ptr<Engine>>;
    return *engines;
}
} // namespace

Hixl::Hixl() : shell_(std::make_unique<HixlShell>())
{
}

Hixl::~Hixl()
{
    Finalize();
}

Status Hixl::Initialize(const AscendString &local_engine, const std::map<AscendString, AscendString> &options)
{
    const Inside mark(*shell_, "Initialize");
    hixl_standin_count(STAT_INITIALIZES, 1);
    void *const context = hixl_standin_context_current();
    if (!context)
        return say(ACL_RT_CONTEXT_NULL, "Initialize: no context is current on this thread");
    std::map<std::string, std::string> given;
    for (const auto &[key, value] : options)
        given[key.GetString()] = value.GetString();
    Settings settings;
    std::string why;
    if (const Status status = parse_options(given, &settings, &why))
        return say(status, "Initialize: " + why);
    if (shell_->engine) {
        if (shell_->engine->settings.auto_connect)
            hixl_standin_wait_while(KNOB_HANG_REINIT, INT64_MAX);
        leaked().push_back(std::move(shell_->engine));
    }
    const int32_t device = hixl_standin_context_device(context);
    auto engine = std::make_unique<Engine>(local_engine.GetString(), settings, device);
    if (const Status status = engine->start())
        return status;
    shell_->context = hixl_standin_context_new(device);
    shell_->engine = std::move(engine);
    shell_->finalized = false;
    return SUCCESS;
}

void Hixl::Finalize()
{
    if (shell_->finalizing.exchange(true))
        misuse("Finalize", "Finalize");
    if (shell_->inside)
        misuse("Finalize", shell_->last);
    if (shell_->engine) {
        hixl_standin_count(STAT_FINALIZES, 1);
        shell_->engine->pool.stop();
        shell_->engine.reset();
        hixl_standin_context_destroy(shell_->context);
        shell_->finalized = true;
    }
    if (shell_->inside)
        misuse("Finalize", shell_->last);
    shell_->finalizing = false;
}

Status Hixl::RegisterMem(const MemDesc &mem, MemType type, MemHandle &handle)
{
    return inside(*shell_, "RegisterMem", [&](Engine &e) { return e.register_memory(mem, type, &handle); });
}

Status Hixl::DeregisterMem(MemHandle handle)
{
    return inside(*shell_, "DeregisterMem", [&](Engine &e) { return e.deregister_memory(handle); });
}

Status Hixl::Connect(const AscendString &remote, int32_t timeout_ms)
{
    return inside(*shell_, "Connect", [&](Engine &e) { return e.connect(remote.GetString(), timeout_ms); });
}

Status Hixl::Disconnect(const AscendString &remote, int32_t)
{
    return inside(*shell_, "Disconnect", [&](Engine &e) { return e.disconnect(remote.GetString()); });
}

Status Hixl::ConnectAsync(const AscendString &remote, int32_t timeout_ms)
{
    return inside(*shell_, "ConnectAsync",
                  [&](Engine &e) { return e.connect_async(remote.GetString(), true, timeout_ms); });
}

Status Hixl::DisconnectAsync(const AscendString &remote, int32_t timeout_ms)
{
    return inside(*shell_, "DisconnectAsync",
                  [&](Engine &e) { return e.connect_async(remote.GetString(), false, timeout_ms); });
}

Status Hixl::GetAsyncConnectStatus(const AscendString &remote, AsyncConnectStatus &status)
{
    return inside(*shell_, "GetAsyncConnectStatus", [&](Engine &e) {
        status = e.pool.status(remote.GetString());
        return SUCCESS;
    });
}

Status Hixl::GetAsyncConnectStatus(std::map<AscendString, AsyncConnectStatus> &statuses)
{
    return inside(*shell_, "GetAsyncConnectStatus", [&](Engine &e) {
        statuses.clear();
        for (const auto &[peer, status] : e.pool.statuses())
            statuses[peer.c_str()] = status;
        return SUCCESS;
    });
}

Status Hixl::TransferSync(const AscendString &remote, TransferOp operation, const std::vector<TransferOpDesc> &descs,
                          int32_t timeout_ms)
{
    return inside(*shell_, "TransferSync", [&](Engine &e) {
        return e.transfer_sync(remote.GetString(), operation == TransferOp::WRITE, descs, timeout_ms);
    });
}

Status Hixl::TransferAsync(const AscendString &remote, TransferOp operation, const std::vector<TransferOpDesc> &descs,
                           const TransferArgs &args, TransferReq &req)
{
    return inside(*shell_, "TransferAsync", [&](Engine &e) {
        return e.transfer_async(remote.GetString(), operation == TransferOp::WRITE, descs, args.user_data, &req);
    });
}

Status Hixl::GetTransferStatus(const TransferReq &req, TransferStatus &status)
{
    return inside(*shell_, "GetTransferStatus", [&](Engine &e) { return e.status(req, &status); });
}

Status Hixl::GetTransferStatus(const GetTransferStatusArgs &args, std::vector<TransferResult> &results)
{
    return inside(*shell_, "GetTransferStatus",
                  [&](Engine &e) { return e.statuses(args.max_query_count, args.skip_waiting, &results); });
}

Status Hixl::SendNotify(const AscendString &remote, const NotifyDesc &notify, int32_t timeout_ms)
{
    return inside(*shell_, "SendNotify", [&](Engine &e) {
        const char *const name = notify.name.GetString(), *const message = notify.notify_msg.GetString();
        if (std::strlen(name) > 1024 || std::strlen(message) > 1024 || !utf8(name) || !utf8(message))
            return say(PARAM_INVALID, "SendNotify: name or message over 1024 bytes, or not UTF-8");
        return e.notify(remote.GetString(), name, message, timeout_ms);
    });
}

Status Hixl::GetNotifies(std::vector<NotifyDesc> &notifies)
{
    return inside(*shell_, "GetNotifies", [&](Engine &e) { return e.notifies(&notifies); });
}

Status Hixl::GetCapability(FeatureType feature, int32_t &value)
{
    return inside(*shell_, "GetCapability", [&](Engine &e) {
        value = feature == FeatureType::AUTO_CONNECT || e.settings.flavour == FLAVOUR_HIXL;
        return SUCCESS;
    });
}
} // namespace hixl

int hixl_standin_set(const char *key, const char *value)
{
    return hixl_standin_knob_set(key, value);
}

uint64_t hixl_standin_stat(const char *key)
{
    return hixl_standin_stat_read(key);
}
