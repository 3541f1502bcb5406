// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: the listening half of an engine. It tells peers what is registered and takes notifies;
// data never passes here.
#ifndef HIXL_STANDIN_SERVER_H
#define HIXL_STANDIN_SERVER_H

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "knobs.h"
#include "memory_table.h"
#include "page.h"
#include "wire.h"

namespace standin
{
struct Notify {
    std::string name, message;
};

class Server
{
  public:
    Server(const Registry &registry, Flavour flavour, int32_t device);
    ~Server();
    Server(const Server &) = delete;
    Server &operator=(const Server &) = delete;

    Status start(const Address &address);
    // All that arrived, in order of arrival.
    std::deque<Notify> drain();

  private:
    struct Channel {
        Descriptor fd;
        std::string input;
        int64_t queued = 0; // of its notifies; under mutex_
    };
    struct Queued {
        Notify notify;
        std::shared_ptr<Channel> channel;
    };

    void run();
    bool readable(const std::shared_ptr<Channel> &channel);
    bool handle(const std::shared_ptr<Channel> &channel, Frame frame, const std::string &body);
    bool greet(Channel &channel, const std::string &body);
    bool list_regions(Channel &channel);
    Status take_notify(const std::shared_ptr<Channel> &channel, const std::string &body);

    const Registry &registry_;
    const Flavour flavour_;
    const int32_t device_;
    OwnPage page_;
    Descriptor listener_, wake_;
    std::thread thread_;
    std::mutex mutex_;
    std::deque<Queued> notifies_;
};
} // namespace standin

#endif
