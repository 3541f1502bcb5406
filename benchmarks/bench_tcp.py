# SPDX-License-Identifier: Apache-2.0
"""The tcp transport beside plain C on the same kind of sockets (`tcp_baseline.c`), into the same memory, in one run.

Two processes. Over the loopback; with ``--netns`` over a wire between two network namespaces, with its rate limited
(root only). Turns go round, so that noise of the machine meets all; figures are medians, ratios are of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from figures import show

import aiohixl

MIB = 1 << 20
HERE = Path(__file__).resolve().parent
BULK = 512 * MIB
BLOCKS, BLOCK = 8192, 16384
SMALL, ANSWER = 4096, 64  # bytes there, and of aiohixl's answer
IN_A_ROW = 200
STREAMS = (1, 2, 4)
RATES = (1.0, 5.0)  # Gbit/s
#: What each figure should reach: name -> (bound, whether more is better).
TARGETS = {
    "write_512MiB_vs_c": (0.95, True),
    "await_4KiB_1core_vs_allowance": (1.0, False),
    "await_4KiB_free_vs_allowance": (1.0, False),
    "scattered_vs_contiguous": (0.9, True),
    **{
        f"{rate:g}Gbit_mtu{mtu}_{what}": (bound, True)
        for rate, mtu in itertools.product(RATES, (1500, 9000))
        for what, bound in (("vs_c", 0.98), ("of_rate", 0.94))
    },
}


class Baseline:
    """The C side of it."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "tcp_baseline.so")
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", out, HERE / "tcp_baseline.c"], check=True)
            self._lib = ctypes.CDLL(str(out))
        self._lib.tcp_baseline_send.restype = ctypes.c_double

    def serve(self, listener: socket.socket, memory: Any) -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._lib.tcp_baseline_serve(connection.fileno(), _pointer(memory))

    def send(self, connection: socket.socket, memory: Any, nbytes: int) -> float:
        seconds = float(self._lib.tcp_baseline_send(connection.fileno(), _pointer(memory), ctypes.c_uint64(nbytes)))
        if seconds < 0:
            raise RuntimeError("the baseline's connection broke")
        return seconds

    def ping(self, connection: socket.socket, memory: Any, count: int) -> list[float]:
        """Microseconds of each round trip."""
        samples = np.zeros(count, np.uint64)
        sizes = (ctypes.c_uint64(n) for n in (SMALL, ANSWER, count))
        if self._lib.tcp_baseline_ping(connection.fileno(), _pointer(memory), *sizes, _pointer(samples)):
            raise RuntimeError("the baseline's connection broke")
        return [float(s) / 1e3 for s in samples]


def _pointer(memory: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(np.frombuffer(memoryview(memory).cast("B"), np.uint8).ctypes.data)


# ---- the other process ----


async def receiver(host: str) -> None:
    baseline = Baseline()
    options: dict[str, Any] = {"transports": ["tcp"], "address": f"{host}:0", "streams": max(STREAMS)}
    async with aiohixl.Engine("bench-receiver", **options) as engine:
        memory = await engine.allocate(BULK, "bulk")
        listener = socket.create_server((host, 0))
        threading.Thread(target=baseline.serve, args=(listener, memory), daemon=True).start()
        print(engine.address.rsplit(",", 1)[-1], listener.getsockname()[1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        os._exit(0)  # the thread is in C, for ever


@contextmanager
def receiver_process(host: str) -> Iterator[tuple[str, int, int]]:
    """Where its engine and its baseline listen, and its pid."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--receiver", host], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        address, port = child.stdout.readline().split()
        yield address, int(port), child.pid
    finally:
        child.stdin.close()
        child.stdout.close()
        child.wait(10)


# ---- this one ----


#: Of the sender's engines.
Options = dict[str, Any]


class Sender:
    """Engines with 1, 2 and 4 connections to the receiver, and the baseline's one."""

    def __init__(self, baseline: Baseline, connection: socket.socket, pid: int) -> None:
        self.baseline, self.connection, self.pid = baseline, connection, pid
        self.source: dict[int, aiohixl.Region] = {}
        self.remote: dict[int, aiohixl.RemoteRegion] = {}
        self.peer: dict[int, aiohixl.Peer] = {}

    async def join(self, stack: AsyncExitStack, address: str, streams: int, memory: Any, options: Options) -> None:
        name = f"bench-{streams}"
        engine = await stack.enter_async_context(aiohixl.Engine(name, transports=["tcp"], streams=streams, **options))
        self.peer[streams] = peer = await engine.connect(address)
        self.remote[streams] = await peer.region("bulk")
        self.source[streams] = await engine.register(memory)

    async def write(self, streams: int, nbytes: int) -> None:
        await self.peer[streams].write(self.source[streams][:nbytes], self.remote[streams][:nbytes])

    async def bulk(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of 512 MiB: of C, and of each engine."""
        seen: dict[str, list[float]] = {"c": [], **{str(n): [] for n in self.peer}}
        for turn in range(rounds + 1):  # the first one is to warm up
            for name, samples in seen.items():
                took = await (self._plain() if name == "c" else timed(self.write(int(name), BULK)))
                if turn:
                    samples.append(took)
        return seen

    async def _plain(self) -> float:
        # Off the loop's thread, as a program with a loop would do it; the engine's threads do as they do otherwise.
        return await asyncio.to_thread(self.baseline.send, self.connection, self.source[STREAMS[0]], BULK)

    async def small(self, rounds: int) -> dict[str, float]:
        """Microseconds of one awaited 4 KiB write, and of C's round trip by epoll."""
        out: dict[str, float] = {}
        cores = sorted(os.sched_getaffinity(0))
        for layout, where in (("1core", cores[:1]), ("free", cores)):
            for pid in (os.getpid(), self.pid):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), where)
            pings: list[float] = []
            awaits: list[float] = []
            for turn in range(rounds * 5 + 1):
                ping = self.baseline.ping(self.connection, self.source[1], IN_A_ROW)
                mine = []
                for _ in range(IN_A_ROW):
                    start = time.perf_counter_ns()
                    await self.write(1, SMALL)
                    mine.append((time.perf_counter_ns() - start) / 1e3)
                if turn:
                    pings.append(statistics.median(ping))
                    awaits.append(statistics.median(mine))
            ping_us, await_us = statistics.median(pings), statistics.median(awaits)
            out |= {
                f"await_4KiB_{layout}_vs_allowance": await_us / (1.5 * ping_us + 10),
                f"await_4KiB_{layout}_us": await_us,
                f"c_round_trip_4KiB_{layout}_us": ping_us,
            }
        return out

    async def scattered(self, rounds: int, streams: int) -> dict[str, float]:
        dice = np.random.default_rng(3)
        here, there = (dice.permutation(BLOCKS).astype(np.uint64) * BLOCK for _ in range(2))
        peer, source, remote = self.peer[streams], self.source[streams], self.remote[streams]
        whole, parts = [], []
        for turn in range(rounds * 4 + 1):
            one = await timed(self.write(streams, BLOCKS * BLOCK))
            many = await timed(peer.write_many(source, here, remote, there, BLOCK))
            if turn:
                whole.append(one)
                parts.append(many)
        contiguous, scattered = statistics.median(whole), statistics.median(parts)
        return {
            "scattered_vs_contiguous": contiguous / scattered,
            "scattered_8192x16KiB_GBps": BLOCKS * BLOCK / scattered / 1e9,
            "contiguous_128MiB_GBps": BLOCKS * BLOCK / contiguous / 1e9,
        }


async def timed(work: Awaitable[Any]) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


def ratios(seen: dict[str, list[float]]) -> tuple[float, dict[str, float]]:
    """Median seconds of C, and of each engine."""
    medians = {name: statistics.median(values) for name, values in seen.items()}
    return medians.pop("c"), medians


async def with_sender(
    host: str,
    streams: tuple[int, ...],
    options: Options,
    run: Callable[[Sender], Awaitable[dict[str, float]]],
    there: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, float]:
    """What `run` measures; the receiver is started within `there`."""
    baseline = Baseline()
    memory = np.full(BULK, 7, np.uint8)
    async with AsyncExitStack() as stack:
        with there():
            address, port, pid = stack.enter_context(receiver_process(host))
        connection = stack.enter_context(socket.create_connection((host, port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sender = Sender(baseline, connection, pid)
        for n in streams:
            await sender.join(stack, address, n, memory, options)
        return await run(sender)


async def loopback(rounds: int, options: Options) -> dict[str, float]:
    async def run(sender: Sender) -> dict[str, float]:
        plain, mine = ratios(await sender.bulk(rounds))
        figures = {"write_512MiB_vs_c": plain / mine["1"], "c_512MiB_GBps": BULK / plain / 1e9}
        figures |= {f"write_512MiB_{n}_streams_GBps": BULK / seconds / 1e9 for n, seconds in mine.items()}
        return {**figures, **await sender.small(rounds), **await sender.scattered(rounds, 1)}

    return await with_sender("127.0.0.1", STREAMS, options, run)


async def between_namespaces(rounds: int, mtu: int, options: Options) -> dict[str, float]:
    sys.path.insert(0, str(HERE.parent / "tests"))
    import netns

    if reason := netns.why_not():
        raise SystemExit(reason)
    with netns.wire(mtu) as wire, wire.inside("a"):

        async def run(sender: Sender) -> dict[str, float]:
            figures: dict[str, float] = {}
            for rate in RATES:
                wire.limit(rate)
                plain, mine = ratios(await sender.bulk(rounds))
                name, bits = f"{rate:g}Gbit_mtu{mtu}", BULK * 8 / rate / 1e9
                figures |= {
                    f"{name}_vs_c": plain / mine["1"],
                    f"{name}_of_rate": bits / mine["1"],
                    f"{name}_c_of_rate": bits / plain,
                }
            return figures

        return await with_sender(wire.address("b", 4), (1,), options, run, lambda: wire.inside("b"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--netns", action="store_true", help="over a wire of limited rate (root only)")
    parser.add_argument("--mtu", type=int, default=1500, help="of that wire: 1500 or 9000")
    parser.add_argument("--checksum", action="store_true")
    parser.add_argument("--zerocopy", action="store_true", help="at the sender (the kernel copies on loopback)")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 if a goal is missed."""
    options = {"checksum": args.checksum, "zerocopy": args.zerocopy}
    if args.netns:
        figures = asyncio.run(between_namespaces(args.rounds, args.mtu, options))
    else:
        figures = uvloop.run(loopback(args.rounds, options))
    return show(figures, TARGETS, as_json=args.json)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--receiver", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receiver:
        uvloop.run(receiver(args.receiver))
        return 0
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
