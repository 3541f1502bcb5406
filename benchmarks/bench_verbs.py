# SPDX-License-Identifier: Apache-2.0
"""The verbs transport beside perftest's ``ib_write_bw``, and beside plain C with libibverbs (`verbs_baseline.c`), on
the same RDMA device in one run.

A bare await is the least that a program with a loop can do: the same C, called to post and when its descriptor is
readable, and a future in between. What it takes more than plain C is Python's and the loop's, whatever is awaited.

Every side is two processes of one machine. Turns go round, so that noise of the machine meets all; figures are medians,
ratios are of medians. Where RDMA is in software, as in ``make bench-rdma``, and its machine is emulated too, the ratios
say something, and seconds nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import ctypes
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from bench_hixl import Player
from figures import show

import aiohixl
from aiohixl import _core
from aiohixl.verbs import BINDING

MIB = 1 << 20
HERE = Path(__file__).resolve().parent
#: Writes of 1 MiB in flight, as many as ib_write_bw keeps in its queue (``--tx-depth``), and of a turn.
DEPTH, WRITES = 16, 96
SMALL, IN_A_ROW = 4096, 200
PATIENCE = 20.0
#: What each figure should reach: name -> (bound, whether more is better).
TARGETS = {
    "write_1MiB_vs_ib_write_bw": (0.9, True),
    "await_4KiB_vs_c": (1.3, False),
}


class Device(NamedTuple):
    """What the engine would choose; everybody is told to use it."""

    name: str
    port: int
    gid_index: int

    @classmethod
    def find(cls) -> Device:
        usable, says = _core.verbs_probe(os.fsencode(BINDING)) if BINDING.exists() else (False, "no binding is built")
        found = re.fullmatch(r"device (\S+), port (\d+), GID (\d+)", says)
        if not usable or not found:
            raise SystemExit(f"{says}: `make bench-rdma` runs this in a virtual machine with RDMA in software")
        return cls(found[1], int(found[2]), int(found[3]))

    def options(self) -> dict[str, Any]:
        return {"transports": ["verbs"], "verbs_device": self.name, "verbs_gid_index": self.gid_index}


class Perftest:
    """``ib_write_bw``, both ends; they find each other over the loopback."""

    def __init__(self, device: Device) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        sizes = ["-s", str(MIB), "-n", str(WRITES), "-t", str(DEPTH)]
        where = ["-d", device.name, "-i", str(device.port), "-x", str(device.gid_index), "-p", str(port)]
        self.command = ["ib_write_bw", "-F", *where, *sizes]

    def bandwidth(self) -> float:
        """MiB per second."""
        end = time.monotonic() + PATIENCE
        with subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                while server.poll() is None and time.monotonic() < end:
                    # It fails until the server listens.
                    run = subprocess.run([*self.command, "127.0.0.1"], capture_output=True, text=True, timeout=PATIENCE)
                    if found := re.search(rf"^ *{MIB} +{WRITES} +[\d.]+ +([\d.]+)", run.stdout, re.MULTILINE):
                        server.wait(PATIENCE)
                        return float(found[1])
                raise RuntimeError(f"{' '.join(self.command)} says no figure: {run.stdout}{run.stderr}")
            finally:
                server.kill()


# ---- the other process ----


async def receiver(device: Device) -> None:
    async with aiohixl.Engine("bench-receiver", **device.options()) as engine:
        await engine.allocate(MIB, "target")
        print(engine.address, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextmanager
def receiver_process() -> Iterator[str]:
    """Its address."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--receiver"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield child.stdout.readline().strip()
    finally:
        child.stdin.close()
        child.stdout.close()
        child.wait(10)


# ---- this one ----


class Sender:
    def __init__(self, peer: aiohixl.Peer, source: aiohixl.Region, remote: aiohixl.RemoteRegion) -> None:
        self.peer, self.source, self.remote = peer, source, remote

    async def bandwidth(self) -> float:
        """MiB per second of awaited writes, as ib_write_bw does it: always the same MiB, and the queue kept full."""
        flight: collections.deque[aiohixl.Transfer] = collections.deque()
        start = time.perf_counter()
        for _ in range(WRITES):
            if len(flight) == DEPTH:
                await flight.popleft()
            flight.append(self.peer.write(self.source, self.remote))
        while flight:
            await flight.popleft()
        return WRITES / (time.perf_counter() - start)

    async def small(self) -> float:
        """Microseconds of one awaited write of 4 KiB."""
        here, there = self.source[:SMALL], self.remote[:SMALL]
        samples = []
        for _ in range(IN_A_ROW):
            start = time.perf_counter_ns()
            await self.peer.write(here, there)
            samples.append(time.perf_counter_ns() - start)
        return statistics.median(samples) / 1e3


class Bare:
    """`verbs_baseline.c` within this process: posted to and awaited on the loop, with nothing around it."""

    def __init__(self, library: str, device: Device, other: int) -> None:
        self._lib = ctypes.CDLL(library)
        self._fd = self._lib.verbs_baseline_start(device.name.encode(), device.port, device.gid_index, other)

    async def small(self) -> float:
        """Microseconds of one write of 4 KiB."""
        loop = asyncio.get_running_loop()
        post, take = self._lib.verbs_baseline_post, self._lib.verbs_baseline_take
        future = loop.create_future()

        def readable() -> None:
            take()
            future.set_result(None)

        loop.add_reader(self._fd, readable)
        samples = []
        for _ in range(IN_A_ROW):
            start = time.perf_counter_ns()
            future = loop.create_future()
            post()
            await future
            samples.append(time.perf_counter_ns() - start)
        loop.remove_reader(self._fd)
        return statistics.median(samples) / 1e3


class Baseline:
    """The plain C program, and what it needs."""

    def __init__(self, stack: ExitStack, device: Device) -> None:
        self._stack, self._device = stack, device
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        self._program, library = str(Path(folder, "verbs_baseline")), str(Path(folder, "verbs_baseline.so"))
        for flags in (["-o", self._program], ["-shared", "-fPIC", "-o", library]):
            subprocess.run(["cc", "-O2", HERE / "verbs_baseline.c", *flags, "-libverbs"], check=True)
        here = self._target()
        self.plain = Player(stack, self._command(here), pass_fds=[here.fileno()])
        self.bare = Bare(library, device, self._target().fileno())

    def _command(self, end: socket.socket) -> list[str]:
        return [self._program, *map(str, self._device), str(end.fileno())]

    def _target(self) -> socket.socket:
        """A socket to a new process that can be written to, which ends when that is closed."""
        here, there = socket.socketpair()
        target = subprocess.Popen([*self._command(there), "target"], pass_fds=[there.fileno()])
        there.close()
        self._stack.callback(target.wait, PATIENCE)
        return self._stack.enter_context(here)


async def bench(device: Device, rounds: int) -> dict[str, float]:
    perftest = Perftest(device)
    seen: dict[str, list[float]] = {"c": [], "bare": [], "await": [], "perftest": [], "write": []}
    with ExitStack() as stack:
        baseline = Baseline(stack, device)
        address = stack.enter_context(receiver_process())
        async with aiohixl.Engine("bench", **device.options()) as engine:
            peer = await engine.connect(address)
            sender = Sender(peer, await engine.allocate(MIB), await peer.region("target"))
            for turn in range(rounds * 5 + 1):  # the first one is to warm up
                figures = {
                    "c": baseline.plain.ask(str(IN_A_ROW)),
                    "await": await sender.small(),
                    "bare": await baseline.bare.small(),
                }
                if turn % 5 == 0:
                    figures |= {"perftest": perftest.bandwidth(), "write": await sender.bandwidth()}
                for name, figure in figures.items() if turn else ():
                    seen[name].append(figure)
    medians = {name: statistics.median(values) for name, values in seen.items()}
    return {
        "write_1MiB_vs_ib_write_bw": medians["write"] / medians["perftest"],
        "write_1MiB_MiBps": medians["write"],
        "ib_write_bw_1MiB_MiBps": medians["perftest"],
        "await_4KiB_vs_c": medians["await"] / medians["c"],
        "bare_await_4KiB_vs_c": medians["bare"] / medians["c"],
        "await_4KiB_us": medians["await"],
        "bare_await_4KiB_us": medians["bare"],
        "c_4KiB_us": medians["c"],
    }


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 if a goal is missed."""
    device = Device.find()
    if not shutil.which("ib_write_bw"):
        raise SystemExit("ib_write_bw is missing: apt-get install perftest")
    figures = uvloop.run(bench(device, args.rounds))
    note = f"device {device.name}, {DEPTH} writes of 1 MiB in flight on either side"
    return show(figures, TARGETS, as_json=args.json, note=note, device=device.name, in_flight=DEPTH)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--receiver", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receiver:
        uvloop.run(receiver(Device.find()))
        return 0
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
