// SPDX-License-Identifier: Apache-2.0
// The plain C++ program: post 4 KiB, ask until it has ended. For each line with a number on stdin, so many times; answers
// with the median in microseconds. bench_hixl.py compiles this against the stand-in and its headers.
#include <algorithm>
#include <cstring>

#include "smoke_sender.h"

int main(int argc, char **argv)
{
    if (argc == 4 && !std::strcmp(argv[1], "peer"))
        return run_peer(argv[2], std::atoi(argv[3]));
    Sender sender;
    Peer peer(argv[0]);
    TransferStatus status;
    const AscendString to = peer.engine.c_str();
    CHECK_EQ(sender.hixl.Connect(to, 1000), SUCCESS);
    size_t times;
    while (std::scanf("%zu", &times) == 1 && times) {
        std::vector<double> samples;
        for (size_t i = 0; i < times; i++) {
            const auto start = Clock::now();
            CHECK_EQ(transfer(sender.hixl, to, TransferOp::WRITE, {sender.desc(0, peer.address[0], 4096)}, &status),
                     SUCCESS);
            CHECK_EQ(status, TransferStatus::COMPLETED);
            samples.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
        }
        std::sort(samples.begin(), samples.end());
        std::printf("%.3f\n", samples[times / 2]);
        std::fflush(stdout);
    }
    return failures != 0;
}
