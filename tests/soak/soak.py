# SPDX-License-Identifier: Apache-2.0
"""Engines in several processes transfer with each other at random while some of them are killed, stopped and started
again. Each byte is compared with a model; at the end nothing may be left.

    python tests/soak/soak.py [SECONDS] [SEED]
"""

from __future__ import annotations

import asyncio
import collections
import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("soak_worker.py")
# cancel_grace is short, so that cancels beside a stopped process give connections up.
COMMON = {"cancel_grace": 0.1, "secret": "soak"}
OPTIONS: dict[str, dict[str, Any]] = {
    "rock": {"transports": ["tcp"], "uvloop": True, "zerocopy": True},
    "tree": {"transports": ["shm", "tcp"], "address": "127.0.0.1:0"},
    "wave": {"transports": ["tcp"], "streams": 3, "checksum": True, "zerocopy": True},
    "wind": {"transports": ["shm", "tcp"], "address": "127.0.0.1:0", "uvloop": True},
}
STEADY = ("rock", "tree")  # never killed: a leak would show in them
CALM = 4.0  # seconds at the end in which nobody is disturbed, and so nothing may fail
RSS_MAX = 64 << 20  # bytes by which a steady process may grow between a quarter of the time and the end
PATIENCE = 60.0


class Process:
    def __init__(self, name: str, process: asyncio.subprocess.Process, totals: Totals) -> None:
        self.name, self.process, self.totals = name, process, totals
        self.answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.tally: collections.Counter[str] = collections.Counter()
        self.address = ""
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            message = json.loads(line)
            if "tally" in message:
                self.tally = collections.Counter(message["tally"])
            elif "wrong" in message:
                self.totals.wrong.append(message["wrong"])
            else:
                self.answers.put_nowait(message)

    def send(self, **message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")

    async def answer(self, key: str) -> Any:
        try:
            async with asyncio.timeout(PATIENCE):
                return (await self.answers.get())[key]
        except TimeoutError:
            raise AssertionError(f"{self.name} does not answer: {key}") from None

    async def end(self) -> None:
        """It takes everything down by itself, and says what is left."""
        self.send(end=True)
        left = await self.answer("left")
        if left:
            self.totals.wrong.append(f"{self.name}: left at its end: {left}")
        await self.gone(0)

    async def gone(self, code: int) -> None:
        async with asyncio.timeout(PATIENCE):
            got = await self.process.wait()
            await self.reading
        if got != code:
            self.totals.wrong.append(f"{self.name}: exit status {got}")
        self.totals.tally += self.tally


class Totals:
    def __init__(self) -> None:
        self.tally: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []


class Soak:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.totals = Totals()
        self.running: dict[str, Process] = {}
        self.disturbed: collections.Counter[str] = collections.Counter()

    async def start(self, name: str) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(WORKER),
            name,
            json.dumps(COMMON | OPTIONS[name]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        running = self.running[name] = Process(name, process, self.totals)
        running.address = await running.answer("address")
        self.tell_addresses()

    def tell_addresses(self) -> None:
        for each in self.running.values():
            each.send(peers={other.name: other.address for other in self.running.values()})

    async def disturb(self) -> None:
        victim = self.running[self.dice.choice([name for name in OPTIONS if name not in STEADY])]
        what = self.dice.choice(["kill", "kill", "freeze", "end"])
        self.disturbed[what] += 1
        if what == "freeze":
            victim.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(self.dice.random())
            victim.process.send_signal(signal.SIGCONT)
            return
        del self.running[victim.name]
        if what == "kill":
            victim.process.kill()
            await victim.gone(-signal.SIGKILL)
        else:
            self.tell_addresses()
            await victim.end()
        await self.start(victim.name)

    async def calm(self) -> None:
        """Undisturbed, everybody transfers with everybody, and nothing fails."""
        await asyncio.sleep(CALM / 2)
        before = {name: process.tally.copy() for name, process in self.running.items()}
        await asyncio.sleep(CALM / 2)
        for name, process in self.running.items():
            now = process.tally
            if now["errors"] != before[name]["errors"]:
                self.totals.wrong.append(f"{name}: undisturbed, it had errors: {now - before[name]}")
            if now["bytes"] == before[name]["bytes"]:
                self.totals.wrong.append(f"{name}: undisturbed, it moved nothing")

    async def run(self, duration: float) -> None:
        begin = time.monotonic()
        early: dict[str, dict[str, int]] = {}
        for name in OPTIONS:
            await self.start(name)
        while (passed := time.monotonic() - begin) < duration - CALM and not self.totals.wrong:
            if not early and passed > duration / 4:
                early = {name: await self.census(name) for name in STEADY}
            await asyncio.sleep(0.5 + self.dice.random())
            await self.disturb()
        await self.calm()
        grown = {}
        for name in STEADY:
            late = (await self.census(name))["rss"]
            grown[name] = late - early.get(name, {"rss": late})["rss"]
            if grown[name] > RSS_MAX:
                self.totals.wrong.append(f"{name}: its memory grew by {grown[name] >> 20} MiB")
        for name in [name for name in OPTIONS if name not in STEADY] + list(STEADY):
            process = self.running.pop(name)
            self.tell_addresses()
            await process.end()
        self.report(time.monotonic() - begin, grown)

    async def census(self, name: str) -> dict[str, int]:
        self.running[name].send(census=True)
        found: dict[str, int] = await self.running[name].answer("census")
        return found

    def report(self, took: float, grown: dict[str, int]) -> None:
        tally = self.totals.tally
        kinds = ("write", "scatter", "read", "note", "cancelled_write", "cancelled_read")
        print(
            f"soak: {took:.0f} s, {len(OPTIONS)} processes; "
            + ", ".join(f"{tally[kind]} {kind.replace('_', ' ')}s" for kind in kinds)
            + f" ({tally['cancelled']} in time), {tally['bytes'] / 1e9:.1f} GB; "
            + ", ".join(f"{count} x {what}" for what, count in sorted(self.disturbed.items()))
            + f"; {tally['lost']} peers lost, {tally['errors']} transfers failed, "
            + f"{tally['quarantined']} quarantined, {tally['pinned']} pinned; memory "
            + ", ".join(f"{name} {nbytes / 2**20:+.0f} MiB" for name, nbytes in grown.items())
        )
        print(
            "soak: errors: " + ", ".join(f"{n} x {k[6:]}" for k, n in sorted(tally.items()) if k.startswith("error "))
        )

    async def clean_up(self) -> None:
        for process in self.running.values():
            if process.process.returncode is None:
                process.process.kill()
            await process.process.wait()


async def main(duration: float, seed: int) -> int:
    soak = Soak(seed)
    print(f"soak: {duration:.0f} s, seed {seed}", flush=True)
    try:
        await soak.run(duration)
    except (AssertionError, TimeoutError) as exc:
        soak.totals.wrong.append(f"{type(exc).__name__}: {exc}")
    finally:
        await soak.clean_up()
    for line in soak.totals.wrong[:20]:
        print(f"soak: WRONG: {line}")
    return 1 if soak.totals.wrong else 0


if __name__ == "__main__":
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 600.0
    sys.exit(asyncio.run(main(seconds, int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**6))))
