// SPDX-License-Identifier: Apache-2.0
// Smoke test of the stand-in: what must be loud, each in a child process of its own; and contexts and options.
#include <thread>

#include "smoke_sender.h"

namespace
{
// The signal that ended the child, or 0.
template <typename Call> int signal_of(Call call)
{
    const pid_t pid = fork();
    if (!pid) {
        // Without a core, and without the message that is expected.
        std::fclose(stderr);
        signal(SIGSEGV, SIG_DFL);
        call();
        _exit(0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

void device_memory_is_not_for_the_cpu()
{
    void *at = nullptr;
    CHECK_EQ(aclrtSetDevice(0), 0);
    CHECK_EQ(aclrtMalloc(&at, 100, 0), 0);
    CHECK_EQ(reinterpret_cast<uintptr_t>(at) % 4096, 0);
    CHECK_EQ(signal_of([&] { *static_cast<volatile char *>(at) = 1; }), SIGSEGV);
    CHECK_EQ(aclrtFree(at), 0);
    CHECK_EQ(aclrtFree(at), ACL_RT_PARAM_INVALID);
}

void finalize_does_not_race()
{
    CHECK_EQ(signal_of([] {
                 Hixl hixl;
                 aclrtSetDevice(0);
                 hixl.Initialize("127.0.0.1", {});
                 hixl_standin_set("connect_ms", "100000");
                 std::thread([&] { hixl.Connect("127.0.0.1:1", 1000); }).detach();
                 std::this_thread::sleep_for(std::chrono::milliseconds(100));
                 hixl.Finalize();
             }),
             SIGABRT);
}

void contexts()
{
    std::thread([] {
        Hixl hixl;
        void *context = nullptr, *own = nullptr, *memory = nullptr;
        std::vector<NotifyDesc> none;
        CHECK_EQ(hixl.Initialize("127.0.0.1", {}), ACL_RT_CONTEXT_NULL);
        CHECK_EQ(aclrtGetCurrentContext(&context), ACL_RT_CONTEXT_NULL);
        CHECK_EQ(aclrtMalloc(&memory, 64, 0), ACL_RT_CONTEXT_NULL);
        CHECK_EQ(aclrtSetDevice(9), ACL_RT_INVALID_DEVICE);
        CHECK_EQ(aclrtSetDevice(1), 0);
        CHECK_EQ(aclrtGetCurrentContext(&own), 0);
        CHECK_EQ(hixl.Initialize("127.0.0.1", {}), SUCCESS);
        CHECK_EQ(aclrtGetCurrentContext(&context), 0);
        CHECK_EQ(context == own, true);
        std::thread([&] {
            // The engine's stays current on a thread that had none, and dies with the engine.
            CHECK_EQ(hixl.GetNotifies(none), SUCCESS);
            CHECK_EQ(aclrtGetCurrentContext(&context), 0);
            CHECK_EQ(context != own, true);
            hixl.Finalize();
            CHECK_EQ(aclrtGetCurrentContext(&context), ACL_RT_CONTEXT_NULL);
        }).join();
        CHECK_EQ(hixl.GetNotifies(none), FAILED);

        void *event = hixl_standin_event(10000);
        int ready = -1;
        CHECK_EQ(aclrtQueryEventStatus(event, &ready), 0);
        CHECK_EQ(ready, ACL_EVENT_NOT_READY);
        CHECK_EQ(aclrtDestroyEvent(event), 0);
        event = hixl_standin_event(1);
        CHECK_EQ(aclrtSynchronizeEvent(event), 0);
        CHECK_EQ(aclrtQueryEventStatus(event, &ready), 0);
        CHECK_EQ(ready, ACL_EVENT_COMPLETE);
        CHECK_EQ(aclrtDestroyEvent(event), 0);
    }).join();
}

Status initialize(const std::map<AscendString, AscendString> &options, const char *engine = "127.0.0.1")
{
    Hixl hixl;
    return hixl.Initialize(engine, options);
}

void options()
{
    const char *const resources = R"({"version": "1.3", "net_instance_id": "0", "endpoint_list":
        [{"protocol": "roce", "comm_id": "10.0.0.1", "placement": "host"}]})";
    CHECK_EQ(aclrtSetDevice(0), 0);
    CHECK_EQ(initialize({{"Nothing", "1"}}), PARAM_INVALID);
    CHECK_EQ(initialize({{"RdmaTrafficClass", "132"}, {"RdmaServiceLevel", "7"}, {"AutoConnect", "0"}}), SUCCESS);
    CHECK_EQ(initialize({{"RdmaTrafficClass", "133"}}), PARAM_INVALID);
    CHECK_EQ(initialize({{"RdmaServiceLevel", "8"}}), PARAM_INVALID);
    CHECK_EQ(initialize({{"AutoConnect", ""}}), PARAM_INVALID);
    CHECK_EQ(initialize({{"LocalCommRes", resources}, {"BufferPool", "0:0"}}), SUCCESS);
    CHECK_EQ(initialize({{"LocalCommRes", resources}, {"BufferPool", "4:8"}}), PARAM_INVALID);
    CHECK_EQ(initialize({{"LocalCommRes", R"({"version": "1.0"})"}, {"BufferPool", "4:8"}}), SUCCESS);
    CHECK_EQ(initialize({{"LocalCommRes", "{"}}), PARAM_INVALID);
    CHECK_EQ(initialize({{"GlobalResourceConfig", R"({"connect_pool": {"thread_num": 65}})"}}), PARAM_INVALID);
    CHECK_EQ(initialize({{"GlobalResourceConfig", R"({"connect_pool.thread_num": "64"})"}}), SUCCESS);
    CHECK_EQ(initialize({}, "localhost:1"), PARAM_INVALID);
    CHECK_EQ(initialize({}, "[::1]"), SUCCESS);
    Hixl first;
    const std::string engine = "127.0.0.1:" + std::to_string(free_port());
    CHECK_EQ(first.Initialize(engine.c_str(), {}), SUCCESS);
    CHECK_EQ(initialize({}, engine.c_str()), FAILED);
}
// Not refused: the first engine stays behind, with its port. With AutoConnect it never returns.
void initialize_again()
{
    CHECK_EQ(signal_of([] {
                 Hixl client, server, automatic;
                 const std::string engine = "127.0.0.1:" + std::to_string(free_port());
                 std::vector<NotifyDesc> none;
                 failures = 0;
                 aclrtSetDevice(0);
                 CHECK_EQ(client.Initialize("127.0.0.1", {}), SUCCESS);
                 CHECK_EQ(client.Initialize("127.0.0.1", {}), SUCCESS);
                 CHECK_EQ(server.Initialize(engine.c_str(), {}), SUCCESS);
                 CHECK_EQ(server.Initialize(engine.c_str(), {}), FAILED);
                 CHECK_EQ(server.GetNotifies(none), FAILED);
                 CHECK_EQ(automatic.Initialize("127.0.0.1", {{"AutoConnect", "1"}}), SUCCESS);
                 if (failures)
                     std::abort();
                 alarm(1);
                 automatic.Initialize("127.0.0.1", {{"AutoConnect", "1"}});
             }),
             SIGALRM);
}
} // namespace

void smoke_misuse()
{
    set("finalize_ms", "0");
    device_memory_is_not_for_the_cpu();
    finalize_does_not_race();
    initialize_again();
    contexts();
    options();
}
