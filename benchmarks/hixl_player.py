# SPDX-License-Identifier: Apache-2.0
"""The processes that bench_hixl.py starts: the peer, senders, and what keeps a core awake.

Each answers a line on stdin with a line on stdout, and ends with its stdin.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import statistics
import sys
import threading
import time

import uvloop

import aiohixl

SIZE, WARM, AWAITS = 4096, 200, 2000
PR_SET_PDEATHSIG = 1


def pin(loop_core: int, native_core: int) -> None:
    """All threads there are by now; the loop's is the caller."""
    here = threading.get_native_id()
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), {loop_core if int(task) == here else native_core})


def engine(name: str, npu_id: int, library: str, busy_poll: float = 0.0) -> aiohixl.Engine:
    return aiohixl.Engine(name, transports=["hixl"], npu_id=npu_id, hixl_library=library, busy_poll=busy_poll)


async def lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def peer(library: str) -> None:
    async with engine("bench-peer", 1, library) as one:
        await one.allocate(1 << 20, "target", device="npu")
        print(one.address, flush=True)
        await (await lines()).read()


async def sender(library: str, address: str, busy_poll: float, cores: list[int]) -> None:
    """``median``: microseconds of one await. ``rate N``: transfers a second, N in flight."""
    async with engine("bench", 0, library, busy_poll) as one:
        there = await one.connect(address)
        span, remote = (await one.allocate(1 << 20, device="npu"))[:SIZE], (await there.region("target"))[:SIZE]
        commands = await lines()

        async def in_turn(count: int) -> None:
            for _ in range(count):
                await there.write(span, remote)

        await in_turn(WARM)
        pin(*cores)
        print(flush=True)
        while line := (await commands.readline()).split():
            await in_turn(WARM)
            if line[0] == b"median":
                samples = []
                for _ in range(AWAITS):
                    start = time.perf_counter_ns()
                    await there.write(span, remote)
                    samples.append(time.perf_counter_ns() - start)
                print(statistics.median(samples) / 1e3, flush=True)
            else:
                width = int(line[1])
                start = time.perf_counter_ns()
                await asyncio.gather(*(in_turn(2 * AWAITS // width) for _ in range(width)))
                print(2 * AWAITS // width * width / (time.perf_counter_ns() - start) * 1e9, flush=True)


def stay_awake(core: int) -> None:
    """Give way to any other thread, and keep the core from going to sleep; until killed, or the parent has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {core})
    print(flush=True)
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("peer", "sender", "awake"))
    parser.add_argument("--library", help="directory of libcann_hixl.so")
    parser.add_argument("--loop", default="uvloop")
    parser.add_argument("--cores", type=int, nargs=2, metavar=("LOOP", "NATIVE"), help="where threads run")
    parser.add_argument("--address", help="the peer's")
    parser.add_argument("--busy-poll", type=float, default=0.0)
    args = parser.parse_args()
    if args.role == "awake":
        stay_awake(args.cores[0])
    role = peer(args.library) if args.role == "peer" else sender(args.library, args.address, args.busy_poll, args.cores)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if args.loop == "uvloop" else None) as runner:
        runner.run(role)


if __name__ == "__main__":
    main()
