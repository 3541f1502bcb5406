// SPDX-License-Identifier: Apache-2.0
// Stand-in, a test double: the page that an engine shares with those who write into its process.
#include "page.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace standin
{
constexpr uint32_t kSlots = 2047;

struct PageData {
    std::atomic<uint32_t> open;
    std::atomic<uint32_t> unused;
    struct {
        std::atomic<int32_t> pid; // 0: free
        std::atomic<uint32_t> busy;
    } slots[kSlots];
};

namespace
{
PageData *map(int fd)
{
    void *at = mmap(nullptr, sizeof(PageData), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? nullptr : static_cast<PageData *>(at);
}

bool gone(int32_t pid)
{
    return kill(pid, 0) && errno == ESRCH;
}
} // namespace

OwnPage::OwnPage() : fd_(memfd_create("hixl-standin", MFD_CLOEXEC))
{
    if (fd_.get() < 0 || ftruncate(fd_.get(), sizeof(PageData)) || !(data_ = map(fd_.get()))) {
        std::perror("hixl stand-in: the shared page");
        std::abort();
    }
    data_->open = 1;
}

OwnPage::~OwnPage()
{
    close();
    munmap(data_, sizeof *data_);
}

void OwnPage::close()
{
    data_->open = 0;
    const Clock::time_point end = Clock::now() + std::chrono::seconds(1);
    for (const auto &slot : data_->slots)
        while (slot.busy && !gone(slot.pid) && Clock::now() < end)
            std::this_thread::sleep_for(std::chrono::microseconds(50));
}

bool PeerPage::open(int32_t pid, int32_t fd)
{
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    const Descriptor file(::open(path, O_RDWR | O_CLOEXEC));
    if (file.get() < 0 || !(data_ = map(file.get())))
        return false;
    for (slot_ = 0; slot_ < kSlots; slot_++) {
        int32_t holder = data_->slots[slot_].pid;
        if (holder && !gone(holder))
            continue;
        if (data_->slots[slot_].pid.compare_exchange_strong(holder, getpid())) {
            data_->slots[slot_].busy = 0;
            return true;
        }
    }
    munmap(data_, sizeof *data_);
    data_ = nullptr;
    return false;
}

PeerPage::~PeerPage()
{
    if (!data_)
        return;
    data_->slots[slot_].pid = 0;
    munmap(data_, sizeof *data_);
}

bool PeerPage::enter()
{
    data_->slots[slot_].busy = 1;
    if (data_->open)
        return true;
    leave();
    return false;
}

void PeerPage::leave()
{
    data_->slots[slot_].busy = 0;
}
} // namespace standin
