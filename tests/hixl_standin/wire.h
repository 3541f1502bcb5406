// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: framed messages over TCP between two stand-in engines of one machine.
#ifndef HIXL_STANDIN_WIRE_H
#define HIXL_STANDIN_WIRE_H

#include <chrono>
#include <cstdint>
#include <string>

#include "hixl_api.h"

namespace standin
{
using Clock = std::chrono::steady_clock;
using hixl::Status;

enum class Frame : uint32_t { HELLO = 0x48584c01, HELLO_ACK, REGIONS, REGIONS_ACK, NOTIFY, NOTIFY_ACK };

struct FrameHeader {
    Frame frame;
    uint32_t length; // of what follows
};

constexpr uint32_t kBodyMax = 4u << 20;

struct Hello {
    int32_t pid;
    int32_t device;
    int32_t flavour;
    int32_t page_fd; // of the server's page, in its process
    Status status;
};

struct NotifyHead {
    uint32_t name_length;
};

class Descriptor
{
  public:
    explicit Descriptor(int fd = -1) : fd_(fd)
    {
    }
    ~Descriptor();
    Descriptor(Descriptor &&other) noexcept : fd_(other.fd_)
    {
        other.fd_ = -1;
    }
    Descriptor &operator=(Descriptor &&other) noexcept;
    int get() const
    {
        return fd_;
    }

  private:
    int fd_;
};

struct Address {
    std::string host;
    int port = 0; // 0: none
};

// "ip:port", "ip", "[v6]:port", IP literals only.
bool parse_address(const std::string &text, Address *address);

// -1 and errno.
int listen_on(const Address &address);
// FAILED if refused, TIMEOUT.
Status connect_to(const Address &address, Clock::time_point deadline, Descriptor *socket);

// Blocking up to the deadline; FAILED if the other end is gone or says something else, TIMEOUT.
Status send_frame(int fd, Frame frame, const void *body, size_t length, Clock::time_point deadline);
Status receive_frame(int fd, Frame expected, std::string *body, Clock::time_point deadline);

template <typename T> bool unpack(const std::string &body, T *value)
{
    if (body.size() < sizeof *value)
        return false;
    __builtin_memcpy(value, body.data(), sizeof *value);
    return true;
}
} // namespace standin

#endif
