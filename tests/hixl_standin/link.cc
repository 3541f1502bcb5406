// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: one client link.
#include "link.h"

#include <cerrno>

#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace standin
{
Link::Link(std::string name_, const Settings &settings, int32_t device_id)
    : name(std::move(name_)), settings_(settings), device_id_(device_id)
{
}

Status Link::connect(const Registry &registry, int32_t timeout_ms, std::string *why)
{
    if (const int64_t delay = hixl_standin_knob(KNOB_CONNECT_MS)) {
        const auto until = (Clock::now() + std::chrono::milliseconds(delay)).time_since_epoch();
        hixl_standin_wait_while(KNOB_CONNECT_MS, std::chrono::duration_cast<std::chrono::nanoseconds>(until).count());
    }
    const auto wanted = static_cast<Status>(hixl_standin_knob(KNOB_CONNECT_FAIL));
    if (wanted && hixl_standin_take(KNOB_CONNECT_FAIL_N)) {
        *why = "as the knob connect_fail says";
        return wanted;
    }
    const Status status = exchange(registry, timeout_ms, why);
    if (status) {
        socket_ = Descriptor();
        return status;
    }
    device = std::make_unique<Device>(remote, settings_);
    up = true;
    hixl_standin_count(STAT_LINKS, 1);
    return hixl::SUCCESS;
}

Status Link::exchange(const Registry &registry, int32_t timeout_ms, std::string *why)
{
    const auto phase = [&] { return Clock::now() + std::chrono::milliseconds(timeout_ms); };
    Address address;
    if (!parse_address(name, &address) || !address.port) {
        *why = "the remote engine is not ip:port";
        return hixl::PARAM_INVALID;
    }
    std::vector<Region> mine;
    if (const Status status = registry.snapshot(&mine)) {
        *why = "a region here is empty, overlaps one of the other type, or is not of its type of memory";
        return status;
    }
    if (const Status status = connect_to(address, phase(), &socket_)) {
        *why = status == hixl::TIMEOUT ? "no answer to the connection" : "connection refused";
        return status;
    }

    *why = "the peer's engine ended the exchange, or did not answer";
    Clock::time_point deadline = phase();
    Hello hello = {getpid(), device_id_, settings_.flavour, -1, hixl::SUCCESS};
    std::string body;
    Status status = send_frame(socket_.get(), Frame::HELLO, &hello, sizeof hello, deadline);
    if (!status)
        status = receive_frame(socket_.get(), Frame::HELLO_ACK, &body, deadline);
    if (status)
        return status;
    if (!unpack(body, &hello) || hello.status || hello.flavour != settings_.flavour) {
        *why = "the peer's engine is of another kind";
        return hixl::FAILED;
    }
    if (settings_.flavour == FLAVOUR_COMM && hello.device == device_id_ && !hixl_standin_knob(KNOB_SAME_DEVICE)) {
        *why = "both engines are on one device, which this kind of engine cannot (knob same_device)";
        return hixl::FAILED;
    }

    deadline = phase();
    status = send_frame(socket_.get(), Frame::REGIONS, nullptr, 0, deadline);
    if (!status)
        status = receive_frame(socket_.get(), Frame::REGIONS_ACK, &body, deadline);
    if (status)
        return status;
    if (!unpack(body, &status))
        return hixl::FAILED;
    if (status) {
        *why = "a region of the peer is empty, overlaps one of the other type, or is not of its type of memory";
        return status;
    }
    std::vector<Region> theirs((body.size() - sizeof status) / sizeof(Region));
    if (!theirs.empty())
        __builtin_memcpy(theirs.data(), body.data() + sizeof status, theirs.size() * sizeof(Region));
    const auto limit = static_cast<size_t>(hixl_standin_knob(KNOB_MAX_REGIONS));
    if (theirs.size() > limit || mine.size() > limit) {
        *why = "too many regions (knob max_regions)";
        return hixl::PARAM_INVALID;
    }

    remote.pid = hello.pid;
    remote.pidfd = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, hello.pid, 0)));
    if (remote.pidfd.get() < 0 || !remote.page.open(hello.pid, hello.page_fd)) {
        *why = "the peer's process cannot be reached: another user, another machine, or too many links";
        return hixl::FAILED;
    }
    local = MemoryTable(std::move(mine));
    remote.table = MemoryTable(std::move(theirs));
    return hixl::SUCCESS;
}

Status Link::notify(const std::string &notify_name, const std::string &message, int32_t timeout_ms)
{
    const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
    const NotifyHead head = {static_cast<uint32_t>(notify_name.size())};
    const std::string body = std::string(reinterpret_cast<const char *>(&head), sizeof head) + notify_name + message;
    std::string answer;
    Status status = send_frame(socket_.get(), Frame::NOTIFY, body.data(), body.size(), deadline);
    // An acknowledgement carries no number: after a time-out the next call takes the late one for its own.
    if (!status)
        status = receive_frame(socket_.get(), Frame::NOTIFY_ACK, &answer, deadline);
    if (!status && !unpack(answer, &status))
        status = hixl::FAILED;
    if (status == hixl::FAILED && settings_.flavour == FLAVOUR_COMM)
        return 1;
    return status;
}

void Link::disconnect()
{
    up = false;
    device->abort();
    shutdown(socket_.get(), SHUT_RDWR);
    socket_ = Descriptor();
    hixl_standin_count(STAT_LINKS, -1);
}

bool Link::dead() const
{
    char one;
    const ssize_t got = recv(socket_.get(), &one, 1, MSG_PEEK | MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}
} // namespace standin
