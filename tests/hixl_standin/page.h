// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: a page that an engine shares with those who write into its process.
//
// It stands for the queue pairs of real hardware: once the owner has closed it, no peer writes or reads any more. A
// peer marks its slot while it copies; closing waits for copies that have begun.
#ifndef HIXL_STANDIN_PAGE_H
#define HIXL_STANDIN_PAGE_H

#include <atomic>
#include <cstdint>

#include "wire.h"

namespace standin
{
struct PageData;

class OwnPage
{
  public:
    OwnPage();
    ~OwnPage();
    OwnPage(const OwnPage &) = delete;
    OwnPage &operator=(const OwnPage &) = delete;
    int fd() const
    {
        return fd_.get();
    }
    // No copy by a peer is under way afterwards, save one whose process is stopped in its middle for a second.
    void close();

  private:
    Descriptor fd_;
    PageData *data_ = nullptr;
};

class PeerPage
{
  public:
    PeerPage() = default;
    ~PeerPage();
    PeerPage(const PeerPage &) = delete;
    PeerPage &operator=(const PeerPage &) = delete;
    bool open(int32_t pid, int32_t fd);
    // True: may copy until leave(). False: the owner has closed.
    bool enter();
    void leave();

  private:
    PageData *data_ = nullptr;
    uint32_t slot_ = 0;
};
} // namespace standin

#endif
