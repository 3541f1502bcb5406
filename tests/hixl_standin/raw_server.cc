// SPDX-License-Identifier: Apache-2.0
// A plain C++ program that uses HIXL as one would without anything else: `raw_server <ip:port> <device> <bytes>` listens,
// registers that much device and host memory, says where it is, and then does what lines on its standard input say,
// each answered by a line. It ends with its input.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <set>
#include <sstream>

#include "acl.h"
#include "hixl_api.h"

namespace
{
size_t size;
void *memory[2]; // of the device, of the host

std::string values(size_t which)
{
    std::string bytes(size, 0), text;
    if (aclrtMemcpy(&bytes[0], size, memory[which], size, which ? ACL_HOST_TO_HOST : ACL_DEVICE_TO_HOST))
        return "no memory";
    for (const unsigned char value : std::set<unsigned char>(bytes.begin(), bytes.end()))
        text += (text.empty() ? "" : " ") + std::to_string(value);
    return text;
}

int fill(size_t which, int value)
{
    const std::string bytes(size, static_cast<char>(value));
    return aclrtMemcpy(memory[which], size, bytes.data(), size, which ? ACL_HOST_TO_HOST : ACL_HOST_TO_DEVICE);
}

// Post, then ask until it has ended.
std::string transfer(hixl::Hixl &hixl, const std::string &peer, bool write, size_t which, uintptr_t remote, size_t n)
{
    hixl::TransferReq request = nullptr;
    const hixl::TransferOpDesc desc = {reinterpret_cast<uintptr_t>(memory[which]), remote, n};
    const auto operation = write ? hixl::TransferOp::WRITE : hixl::TransferOp::READ;
    hixl::Status code = hixl.TransferAsync(peer.c_str(), operation, {desc}, {}, request);
    hixl::TransferStatus status = hixl::TransferStatus::WAITING;
    while (!code && status == hixl::TransferStatus::WAITING)
        code = hixl.GetTransferStatus(request, status);
    return std::to_string(code) + " " + std::to_string(static_cast<int>(status));
}

std::string notifies(hixl::Hixl &hixl)
{
    std::vector<hixl::NotifyDesc> list;
    std::string text = std::to_string(hixl.GetNotifies(list));
    for (const auto &one : list)
        text += std::string(" ") + one.name.GetString() + "=" + one.notify_msg.GetString();
    return text;
}

std::string answer(hixl::Hixl &hixl, const std::string &line)
{
    std::istringstream words(line);
    std::string command, peer, first, second;
    size_t which = 0, n = 0;
    uintptr_t remote = 0;
    int value = 0;
    words >> command;
    if (command == "fill" && words >> which >> value)
        return std::to_string(fill(which % 2, value));
    if (command == "values" && words >> which)
        return values(which % 2);
    if (command == "notifies")
        return notifies(hixl);
    if (command == "set" && words >> first >> second)
        return std::to_string(hixl_standin_set(first.c_str(), second.c_str()));
    if (!(words >> peer))
        return "what?";
    if (command == "connect")
        return std::to_string(hixl.Connect(peer.c_str(), 1000));
    if (command == "disconnect")
        return std::to_string(hixl.Disconnect(peer.c_str(), 1000));
    if ((command == "write" || command == "read") && words >> which >> remote >> n)
        return transfer(hixl, peer, command == "write", which % 2, remote, n);
    if (command == "notify" && words >> first >> second) {
        hixl::NotifyDesc notify;
        notify.name = first.c_str();
        notify.notify_msg = second.c_str();
        return std::to_string(hixl.SendNotify(peer.c_str(), notify));
    }
    return "what?";
}
} // namespace

int main(int count, char **arguments)
{
    if (count != 4)
        return 2;
    hixl::Hixl hixl;
    size = std::strtoul(arguments[3], nullptr, 10);
    if (aclrtSetDevice(std::atoi(arguments[2])) || hixl.Initialize(arguments[1], {}) ||
        aclrtMalloc(&memory[0], size, 0) || aclrtMallocHost(&memory[1], size))
        return 1;
    for (const auto type : {hixl::MemType::DEVICE, hixl::MemType::HOST}) {
        hixl::MemDesc desc;
        hixl::MemHandle handle = nullptr;
        desc.addr = reinterpret_cast<uintptr_t>(memory[static_cast<int>(type)]);
        desc.len = size;
        if (hixl.RegisterMem(desc, type, handle))
            return 1;
    }
    std::cout << reinterpret_cast<uintptr_t>(memory[0]) << ' ' << reinterpret_cast<uintptr_t>(memory[1]) << std::endl;
    for (std::string line; std::getline(std::cin, line);)
        std::cout << answer(hixl, line) << std::endl;
    hixl.Finalize();
}
