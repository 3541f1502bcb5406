# SPDX-License-Identifier: Apache-2.0
"""What awaiting a transfer by HIXL costs over the stand-in, beside plain C and C++ in the same run.

The stand-in completes at once (``instant=1``), so that what is measured is aiohixl, the loop and the kernel, and says
nothing about an NPU. Every way of doing it is a process that waits for its turn; the turns go round, so that noise of
the machine meets all. Figures are medians over the rounds, of each round's median.

To wake a thread on another core can cost ten times what it costs on the same one, and the scheduler's choice changes
from one moment to the next. So threads are pinned, those of the baseline likewise: ``1core``, all on one; ``2cores``,
the loop on one and the native threads on another. There, a core that has gone to sleep takes long to wake, the longer
the longer it has slept, which would measure the pauses between two wakes; so idle-class spinners keep the cores awake,
unless ``--asleep`` is given.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from figures import show
from hixl_player import AWAITS, WARM

HERE = Path(__file__).resolve().parent
STANDIN = HERE.parent / "tests" / "hixl_standin"
BUILT = HERE.parent / "build" / "hixl_standin" / "lib64"
BUSY = 200e-6
FLIGHT = 64
IDLE_SECONDS = 3.0
LOOPS = ("uvloop", "asyncio")
#: What each figure should reach: name -> (bound, whether more is better).
TARGETS = {
    "idle_cpu_percent": (1.0, False),
    **{
        name: bound
        for loop in LOOPS
        for name, bound in {
            f"{loop}_1core_minus_two_hops_us": (10.0, False),
            f"{loop}_2cores_minus_two_hops_us": (10.0, False),
            f"{loop}_2cores_busy_minus_call_and_poll_us": (15.0, False),
            f"{loop}_1core_one_at_a_time_per_s": (10_000.0, True),
            f"{loop}_1core_{FLIGHT}_in_flight_per_s": (10_000.0, True),
            f"{loop}_2cores_one_at_a_time_per_s": (10_000.0, True),
            f"{loop}_2cores_{FLIGHT}_in_flight_per_s": (10_000.0, True),
        }.items()
    },
}


def layouts() -> dict[str, tuple[int, int]]:
    """Names, and the cores of the loop and of the native threads."""
    cores = sorted(os.sched_getaffinity(0))
    return {"1core": (cores[0], cores[0]), **({"2cores": (cores[0], cores[1])} if len(cores) > 1 else {})}


class Player:
    """A process that does its part for each line it is sent, and answers with a line."""

    def __init__(
        self, stack: ExitStack, command: list[str], *, spins: bool = False, pass_fds: Sequence[int] = ()
    ) -> None:
        self.spins = spins
        self.process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=pass_fds)
        )
        stack.callback(self.end)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.spins:
            self.process.kill()
        self.process.wait(20)

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} ended ({self.process.wait()})")
        return line

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return json.loads(self.hear())

    def cpu_seconds(self) -> float:
        return time.clock_gettime((~self.process.pid << 3) | 2)  # the processor time of a process, by Linux's encoding


def build(folder: str) -> tuple[Any, str]:
    hops, poll = Path(folder, "hops.so"), Path(folder, "call_and_poll")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", hops, HERE / "hops.c"], check=True)
    libraries = [BUILT / f"lib{name}.so" for name in ("cann_hixl", "metadef", "acl_rt")]
    flags = ["-std=c++17", "-O2", "-pthread", f"-I{STANDIN}", f"-Wl,-rpath,{BUILT}"]
    subprocess.run(["c++", *flags, HERE / "call_and_poll.cc", *libraries, "-o", poll], check=True)
    return ctypes.CDLL(str(hops)), str(poll)


def two_hops_us(lib: Any, loop_core: int, native_core: int) -> float:
    samples = np.zeros(AWAITS, np.uint64)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {loop_core})
    for n in (WARM, AWAITS):
        if lib.hops(ctypes.c_uint64(n), ctypes.c_void_p(samples.ctypes.data), native_core):
            raise RuntimeError("eventfd, epoll or threads are refused here")
    os.sched_setaffinity(0, before)
    return float(np.median(samples)) / 1e3


@contextmanager
def kept_awake(spinners: list[Player]) -> Iterator[None]:
    for spinner in spinners:
        spinner.process.send_signal(signal.SIGCONT)
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.process.send_signal(signal.SIGSTOP)


def measure(layout: str, lib: Any, senders: dict[str, Player]) -> dict[str, float]:
    """One turn of everybody with this layout."""
    turn = {f"two_hops_{layout}_us": two_hops_us(lib, *layouts()[layout])}
    for name, sender in senders.items():
        if layout in name:
            turn[f"{name}_us"] = sender.ask("median")
            turn[f"{name}_one_at_a_time_per_s"] = sender.ask("rate 1")
            turn[f"{name}_{FLIGHT}_in_flight_per_s"] = sender.ask(f"rate {FLIGHT}")
    return turn


def bench(rounds: int, flavour: str, asleep: bool) -> dict[str, Any]:
    # placement and finalize_ms of the stand-in say nothing about the cost of an await
    os.environ["HIXL_STANDIN"] = f"flavour={flavour},instant=1,finalize_ms=0"
    seen: dict[str, list[float]] = {}
    me, library = [sys.executable, str(HERE / "hixl_player.py")], ["--library", str(BUILT)]
    with ExitStack() as stack:
        lib, program = build(stack.enter_context(tempfile.TemporaryDirectory()))
        peer = Player(stack, [*me, "peer", *library])
        address = peer.hear().strip()
        plain = Player(stack, [program])
        senders: dict[str, Player] = {}
        for loop, (layout, cores), busy in itertools.product(LOOPS, layouts().items(), (0.0, BUSY)):
            if busy and layout == "1core":
                continue  # a thread that spins takes a core
            name = f"{loop}_{layout}_busy" if busy else f"{loop}_{layout}"
            args = ["--loop", loop, "--cores", *map(str, cores), "--address", address, "--busy-poll", str(busy)]
            senders[name] = Player(stack, [*me, "sender", *library, *args])
            senders[name].hear()
        plain.ask(str(WARM))
        spinners = []
        for core in () if asleep else layouts().get("2cores", ()):
            spinners.append(Player(stack, [*me, "awake", "--cores", str(core), str(core)], spins=True))
            spinners[-1].hear()
        with kept_awake(spinners):
            pass  # from here on they stand still
        for _ in range(rounds):
            turn = {"call_and_poll_us": plain.ask(str(AWAITS))}
            for layout in layouts():
                with kept_awake(spinners if layout == "2cores" else []):
                    turn.update(measure(layout, lib, senders))
            for key, value in turn.items():
                seen.setdefault(key, []).append(value)
        everyone = [peer, *senders.values()]
        before = [player.cpu_seconds() for player in everyone]
        time.sleep(IDLE_SECONDS)
        used = [player.cpu_seconds() - b for player, b in zip(everyone, before, strict=True)]
    figures: dict[str, Any] = {key: statistics.median(values) for key, values in seen.items()}
    for loop in LOOPS:
        for layout in layouts():
            name = f"{loop}_{layout}"
            figures[f"{name}_minus_two_hops_us"] = figures[f"{name}_us"] - figures[f"two_hops_{layout}_us"]
            if f"{name}_busy" in senders:
                figures[f"{name}_busy_minus_call_and_poll_us"] = (
                    figures[f"{name}_busy_us"] - figures["call_and_poll_us"]
                )
    # One sender and the peer, of which the peer serves all of them.
    figures["idle_cpu_percent"] = (used[0] + max(used[1:])) / IDLE_SECONDS * 100
    return figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--flavour", default="hixl", help="the stand-in's kind of engine: hixl, comm or fabric")
    parser.add_argument("--asleep", action="store_true", help="let cores go to sleep between two wakes")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 if a goal is missed."""
    if not (BUILT / "libcann_hixl.so").exists():
        print(f"the stand-in is not built at {BUILT}: make hixl-standin", file=sys.stderr)
        return 2
    figures = bench(args.rounds, args.flavour, args.asleep)
    note = f"over the stand-in (no NPU): flavour {args.flavour}, instant=1{', cores may sleep' * args.asleep}"
    return show(figures, TARGETS, as_json=args.json, note=note, flavour=args.flavour, asleep=args.asleep)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
