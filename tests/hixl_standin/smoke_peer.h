// SPDX-License-Identifier: Apache-2.0
// The smoke program's other process: an engine with one piece of device and one of host memory, told what to do by
// lines over pipes.
#ifndef HIXL_STANDIN_SMOKE_PEER_H
#define HIXL_STANDIN_SMOKE_PEER_H

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>

#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "acl.h"
#include "hixl_api.h"

inline std::atomic<int> checks, failures;

#define CHECK_EQ(got, wanted)                                                                               \
    do {                                                                                                    \
        const auto got_ = static_cast<long long>(got), wanted_ = static_cast<long long>(wanted);            \
        checks++;                                                                                           \
        if (got_ != wanted_) {                                                                              \
            failures++;                                                                                     \
            std::fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", __FILE__, __LINE__, #got, got_, wanted_); \
        }                                                                                                   \
    } while (0)

constexpr size_t kSize = 8 << 20;

// Nobody else's: the socket that found it stays bound to it, and who listens there sets SO_REUSEADDR, as we do.
inline int free_port()
{
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int on = 1;
    sockaddr_in address = {};
    socklen_t size = sizeof address;
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) ||
        bind(fd, reinterpret_cast<sockaddr *>(&address), size) ||
        getsockname(fd, reinterpret_cast<sockaddr *>(&address), &size))
        std::abort();
    return ntohs(address.sin_port);
}

// What `peer <engine> <device>` does.
inline int run_peer(const char *engine, int device)
{
    hixl::Hixl hixl;
    hixl::MemDesc memory;
    hixl::MemHandle handles[2];
    void *at[2] = {};
    if (aclrtSetDevice(device) || hixl.Initialize(engine, {}) || aclrtMalloc(&at[0], kSize, 0) ||
        aclrtMallocHost(&at[1], kSize))
        return 1;
    for (int i = 0; i < 2; i++) {
        memory.addr = reinterpret_cast<uintptr_t>(at[i]);
        memory.len = kSize;
        if (hixl.RegisterMem(memory, static_cast<hixl::MemType>(i), handles[i]))
            return 1;
    }
    std::printf("%lu %lu\n", reinterpret_cast<unsigned long>(at[0]), reinterpret_cast<unsigned long>(at[1]));
    std::fflush(stdout);

    char line[256];
    while (std::fgets(line, sizeof line, stdin)) {
        std::istringstream words(line);
        std::string command;
        size_t which = 0, offset = 0, length = 0;
        words >> command >> which >> offset >> length;
        if (command == "sum") {
            std::string bytes(length, 0);
            unsigned long sum = 0;
            if (aclrtMemcpy(bytes.data(), length, static_cast<char *>(at[which]) + offset, length,
                            which ? ACL_HOST_TO_HOST : ACL_DEVICE_TO_HOST))
                return 1;
            for (const char byte : bytes)
                sum = sum * 131 + static_cast<unsigned char>(byte);
            std::printf("%lu\n", sum);
        } else if (command == "notifies") {
            std::vector<hixl::NotifyDesc> notifies;
            hixl.GetNotifies(notifies);
            std::string all;
            for (const auto &one : notifies)
                all += std::string(one.name.GetString()) + "=" + one.notify_msg.GetString() + ";";
            std::printf("%s\n", all.c_str());
        } else if (command == "finalize") {
            hixl.Finalize();
            std::printf("done\n");
        } else {
            break;
        }
        std::fflush(stdout);
    }
    return 0;
}

class Peer
{
  public:
    explicit Peer(const char *program, int device = 1) : engine("127.0.0.1:" + std::to_string(free_port()))
    {
        int to[2], from[2];
        if (pipe(to) || pipe(from) || (pid_ = fork()) < 0)
            std::abort();
        if (!pid_) {
            dup2(to[0], 0);
            dup2(from[1], 1);
            for (const int fd : {to[0], to[1], from[0], from[1]})
                close(fd);
            execl(program, program, "peer", engine.c_str(), std::to_string(device).c_str(), nullptr);
            _exit(127);
        }
        close(to[0]);
        close(from[1]);
        in_ = fdopen(to[1], "w");
        out_ = fdopen(from[0], "r");
        std::istringstream(answer()) >> address[0] >> address[1];
    }

    ~Peer()
    {
        std::fclose(in_);
        std::fclose(out_);
        if (pid_ > 0)
            waitpid(pid_, nullptr, 0);
    }

    std::string ask(const std::string &line)
    {
        std::fprintf(in_, "%s\n", line.c_str());
        std::fflush(in_);
        return answer();
    }

    unsigned long sum(int which, size_t offset, size_t length)
    {
        return std::stoul(
            ask("sum " + std::to_string(which) + " " + std::to_string(offset) + " " + std::to_string(length)));
    }

    void send_signal(int number)
    {
        kill(pid_, number);
        // It stops when it next leaves the kernel, not when told.
        if (number == SIGSTOP)
            waitpid(pid_, nullptr, WUNTRACED);
        if (number == SIGKILL) {
            waitpid(pid_, nullptr, 0);
            pid_ = -1;
        }
    }

    const std::string engine;
    uintptr_t address[2] = {}; // device, host

  private:
    std::string answer()
    {
        char *line = nullptr;
        size_t size = 0;
        const ssize_t length = getline(&line, &size, out_);
        const std::string text(line ? line : "", length > 0 ? static_cast<size_t>(length) - 1 : 0);
        std::free(line);
        if (length <= 0) {
            std::fprintf(stderr, "the peer process ended\n");
            std::exit(1);
        }
        return text;
    }

    pid_t pid_ = -1;
    FILE *in_ = nullptr;
    FILE *out_ = nullptr;
};

#endif
