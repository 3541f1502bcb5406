// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: the listening half of an engine.
#include "server.h"

#include <cerrno>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

namespace standin
{
namespace
{
// A peer that does not read its answer must not stop the others for long.
Clock::time_point soon()
{
    return Clock::now() + std::chrono::seconds(2);
}
} // namespace

Server::Server(const Registry &registry, Flavour flavour, int32_t device)
    : registry_(registry), flavour_(flavour), device_(device), wake_(eventfd(0, EFD_CLOEXEC))
{
}

Server::~Server()
{
    page_.close();
    if (!thread_.joinable())
        return;
    const uint64_t one = 1;
    if (write(wake_.get(), &one, sizeof one) != sizeof one)
        std::abort();
    thread_.join();
    // For every holder of the descriptor: a forked child must not keep the port.
    shutdown(listener_.get(), SHUT_RDWR);
}

Status Server::start(const Address &address)
{
    const int fd = listen_on(address);
    if (fd < 0)
        return hixl::FAILED;
    listener_ = Descriptor(fd);
    thread_ = std::thread([this] { run(); });
    return hixl::SUCCESS;
}

std::deque<Notify> Server::drain()
{
    std::lock_guard<std::mutex> lock(mutex_);
    std::deque<Notify> all;
    for (auto &one : notifies_) {
        one.channel->queued--;
        all.push_back(std::move(one.notify));
    }
    notifies_.clear();
    return all;
}

void Server::run()
{
    std::map<int, std::shared_ptr<Channel>> channels;
    std::vector<pollfd> watched;
    for (;;) {
        watched = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
        for (const auto &one : channels)
            watched.push_back({one.first, POLLIN, 0});
        if (poll(watched.data(), watched.size(), -1) < 0)
            continue;
        if (watched[0].revents)
            break;
        for (size_t i = 2; i < watched.size(); i++)
            if (watched[i].revents && !readable(channels[watched[i].fd])) {
                shutdown(watched[i].fd, SHUT_RDWR);
                channels.erase(watched[i].fd);
            }
        if (!watched[1].revents)
            continue;
        const int fd = accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0)
            continue;
        const int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        channels[fd] = std::make_shared<Channel>();
        channels[fd]->fd = Descriptor(fd);
    }
    for (const auto &one : channels)
        shutdown(one.first, SHUT_RDWR);
}

bool Server::readable(const std::shared_ptr<Channel> &channel)
{
    char buffer[65536];
    const ssize_t got = recv(channel->fd.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (got <= 0)
        return got < 0 && (errno == EAGAIN || errno == EINTR);
    channel->input.append(buffer, static_cast<size_t>(got));
    for (;;) {
        FrameHeader header;
        if (!unpack(channel->input, &header))
            return true;
        if (header.length > kBodyMax)
            return false;
        if (channel->input.size() < sizeof header + header.length)
            return true;
        const std::string body = channel->input.substr(sizeof header, header.length);
        channel->input.erase(0, sizeof header + header.length);
        if (!handle(channel, header.frame, body))
            return false;
    }
}

bool Server::handle(const std::shared_ptr<Channel> &channel, Frame frame, const std::string &body)
{
    if (frame == Frame::HELLO)
        return greet(*channel, body);
    if (frame == Frame::REGIONS)
        return list_regions(*channel);
    if (frame != Frame::NOTIFY)
        return false;
    const Status status = take_notify(channel, body);
    if (const int64_t delay = hixl_standin_knob(KNOB_NOTIFY_ACK_MS))
        std::this_thread::sleep_for(std::chrono::milliseconds(delay));
    return !send_frame(channel->fd.get(), Frame::NOTIFY_ACK, &status, sizeof status, soon());
}

bool Server::greet(Channel &channel, const std::string &body)
{
    Hello theirs;
    if (!unpack(body, &theirs))
        return false;
    Hello mine = {getpid(), device_, flavour_, page_.fd(), hixl::SUCCESS};
    if (theirs.flavour != flavour_)
        mine.status = hixl::FAILED;
    return !send_frame(channel.fd.get(), Frame::HELLO_ACK, &mine, sizeof mine, soon());
}

bool Server::list_regions(Channel &channel)
{
    std::vector<Region> regions;
    const Status status = registry_.snapshot(&regions);
    std::string body(reinterpret_cast<const char *>(&status), sizeof status);
    if (!status)
        body.append(reinterpret_cast<const char *>(regions.data()), regions.size() * sizeof(Region));
    return !send_frame(channel.fd.get(), Frame::REGIONS_ACK, body.data(), body.size(), soon());
}

Status Server::take_notify(const std::shared_ptr<Channel> &channel, const std::string &body)
{
    NotifyHead head;
    if (!unpack(body, &head) || head.name_length > body.size() - sizeof head)
        return hixl::PARAM_INVALID;
    std::lock_guard<std::mutex> lock(mutex_);
    // One queue per engine; the comm engine has one per channel.
    const int64_t queued = flavour_ == FLAVOUR_COMM ? channel->queued : static_cast<int64_t>(notifies_.size());
    if (queued >= hixl_standin_knob(KNOB_MAX_NOTIFIES))
        return hixl::RESOURCE_EXHAUSTED;
    channel->queued++;
    notifies_.push_back(
        {{body.substr(sizeof head, head.name_length), body.substr(sizeof head + head.name_length)}, channel});
    return hixl::SUCCESS;
}
} // namespace standin
