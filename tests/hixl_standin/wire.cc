// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: framed messages over TCP.
#include "wire.h"

#include <cerrno>
#include <cstring>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

namespace standin
{
namespace
{
socklen_t to_sockaddr(const Address &address, sockaddr_storage *storage)
{
    std::memset(storage, 0, sizeof *storage);
    auto *const v4 = reinterpret_cast<sockaddr_in *>(storage);
    if (inet_pton(AF_INET, address.host.c_str(), &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons(static_cast<uint16_t>(address.port));
        return sizeof *v4;
    }
    auto *const v6 = reinterpret_cast<sockaddr_in6 *>(storage);
    if (inet_pton(AF_INET6, address.host.c_str(), &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons(static_cast<uint16_t>(address.port));
        return sizeof *v6;
    }
    return 0;
}

Status wait_for(int fd, short what, Clock::time_point deadline)
{
    for (;;) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
        pollfd one = {fd, what, 0};
        const int ready = poll(&one, 1, left < 0 ? 0 : static_cast<int>(std::min<long>(left + 1, 1 << 30)));
        if (ready > 0)
            return hixl::SUCCESS;
        if (ready < 0 && errno != EINTR)
            return hixl::FAILED;
        if (ready == 0 && Clock::now() >= deadline)
            return hixl::TIMEOUT;
    }
}

Status send_all(int fd, const char *data, size_t length, Clock::time_point deadline)
{
    while (length) {
        const ssize_t sent = send(fd, data, length, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            data += sent;
            length -= static_cast<size_t>(sent);
        } else if (errno == EAGAIN || errno == EINTR) {
            if (const Status status = wait_for(fd, POLLOUT, deadline))
                return status;
        } else {
            return hixl::FAILED;
        }
    }
    return hixl::SUCCESS;
}

Status receive_all(int fd, char *data, size_t length, Clock::time_point deadline)
{
    while (length) {
        const ssize_t got = recv(fd, data, length, MSG_DONTWAIT);
        if (got > 0) {
            data += got;
            length -= static_cast<size_t>(got);
        } else if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
            if (const Status status = wait_for(fd, POLLIN, deadline))
                return status;
        } else {
            return hixl::FAILED;
        }
    }
    return hixl::SUCCESS;
}
} // namespace

Descriptor::~Descriptor()
{
    if (fd_ >= 0)
        close(fd_);
}

Descriptor &Descriptor::operator=(Descriptor &&other) noexcept
{
    std::swap(fd_, other.fd_);
    return *this;
}

bool parse_address(const std::string &text, Address *address)
{
    std::string port;
    const bool bracketed = !text.empty() && text[0] == '[';
    const size_t close = text.find(']'), colon = text.rfind(':');
    address->host = text;
    if (bracketed) {
        if (close == std::string::npos)
            return false;
        address->host = text.substr(1, close - 1);
        if (close + 1 < text.size()) {
            if (text[close + 1] != ':')
                return false;
            port = text.substr(close + 2);
            if (port.empty())
                return false;
        }
    } else if (colon != std::string::npos && text.find(':') == colon) {
        address->host = text.substr(0, colon);
        port = text.substr(colon + 1);
        if (port.empty())
            return false;
    }
    address->port = 0;
    if (port.size() > 5 || port.find_first_not_of("0123456789") != std::string::npos)
        return false;
    if (!port.empty()) {
        address->port = std::stoi(port);
        if (address->port < 1 || address->port > 65535)
            return false;
    }
    sockaddr_storage storage;
    return to_sockaddr(*address, &storage) != 0;
}

int listen_on(const Address &address)
{
    sockaddr_storage storage;
    const socklen_t size = to_sockaddr(address, &storage);
    const int fd = socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, reinterpret_cast<sockaddr *>(&storage), size) || listen(fd, 512)) {
        const int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

Status connect_to(const Address &address, Clock::time_point deadline, Descriptor *made)
{
    sockaddr_storage storage;
    const socklen_t size = to_sockaddr(address, &storage);
    Descriptor fd(socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (fd.get() < 0)
        return hixl::FAILED;
    const int on = 1;
    setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(fd.get(), reinterpret_cast<sockaddr *>(&storage), size)) {
        if (errno != EINPROGRESS)
            return hixl::FAILED;
        if (const Status status = wait_for(fd.get(), POLLOUT, deadline))
            return status;
        int error = 0;
        socklen_t error_size = sizeof error;
        if (getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &error_size) || error)
            return hixl::FAILED;
    }
    *made = std::move(fd);
    return hixl::SUCCESS;
}

Status send_frame(int fd, Frame frame, const void *body, size_t length, Clock::time_point deadline)
{
    const FrameHeader header = {frame, static_cast<uint32_t>(length)};
    std::string all(reinterpret_cast<const char *>(&header), sizeof header);
    all.append(static_cast<const char *>(body), length);
    return send_all(fd, all.data(), all.size(), deadline);
}

Status receive_frame(int fd, Frame expected, std::string *body, Clock::time_point deadline)
{
    FrameHeader header;
    if (const Status status = receive_all(fd, reinterpret_cast<char *>(&header), sizeof header, deadline))
        return status;
    if (header.frame != expected || header.length > kBodyMax)
        return hixl::FAILED;
    body->resize(header.length);
    return receive_all(fd, body->data(), header.length, deadline);
}
} // namespace standin
