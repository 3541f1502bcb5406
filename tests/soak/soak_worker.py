# SPDX-License-Identifier: Apache-2.0
"""One process of the soak: an engine that transfers with every other, until it is told to stop, or killed.

soak_worker.py NAME OPTIONS    lines of JSON: on stdin {"peers": {name: address}} and {"end": true}
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from soak_lane import CHECK_TOPIC, OK_TOPIC, SIZE, Answers, Lane, WrongByteError, compare, pattern, view

import aiohixl

LANES = 2
HELLO_TOPIC = "hello"


def say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def census() -> dict[str, int]:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    rss = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rss": int(rss.split()[1]) * 1024,
    }


class Worker:
    def __init__(self, engine: aiohixl.Engine) -> None:
        self.engine = engine
        self.tally: collections.Counter[str] = collections.Counter()
        self.addresses: dict[str, str] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.servants: list[asyncio.Task[None]] = []
        self.lent: dict[str, tuple[str, aiohixl.Region]] = {}  # by incarnation: the peer's name, what it writes to
        self.scratch: dict[str, aiohixl.Region] = {}
        self.answers = Answers()

    def start(self) -> None:
        for serve in (self.lend, self.check_notes, self.take_answers, self.take_back, self.report):
            self.servants.append(asyncio.create_task(self.guarded(serve)))

    async def guarded(self, serve: Callable[[], Any]) -> None:
        try:
            await serve()
        except Exception as exc:
            say(wrong=f"{self.engine.name}: {type(exc).__name__}: {exc}")

    # ---- what others ask of us ----

    async def lend(self) -> None:
        """Each incarnation of a peer gets memory of its own; that of an earlier one is taken back first."""
        async for note in self.engine.notes(HELLO_TOPIC):
            name, incarnation = note.peer.name, note.peer.incarnation
            for other in [i for i, (owner, _) in self.lent.items() if owner == name and i != incarnation]:
                await self.withdraw(other)
            if incarnation not in self.lent:
                region = await self.engine.allocate(LANES * SIZE, f"for-{incarnation}")
                self.lent[incarnation] = name, region

    async def take_back(self) -> None:
        async for event in self.engine.events():
            if event.kind == "lost":
                self.tally["lost"] += 1
                await self.withdraw(event.peer.incarnation)

    async def withdraw(self, incarnation: str) -> None:
        """Nobody writes there from now on."""
        _, region = self.lent.pop(incarnation, ("", None))
        if region is None:
            return
        for _ in range(20):
            try:
                await region.deregister()
                break
            except aiohixl.RegionPinnedError:  # a peer that stands still
                self.tally["pinned"] += 1
                await asyncio.sleep(0.2)
        memory = view(region)
        memory[:] = 0xAB
        await asyncio.sleep(0.01)
        compare(memory, np.full(memory.nbytes, 0xAB, np.uint8), f"{self.engine.name}: memory that was taken back")

    async def check_notes(self) -> None:
        async for note in self.engine.notes(CHECK_TOPIC):
            _, region = self.lent.get(note.peer.incarnation, ("", None))
            if note.aborted:
                continue
            said = json.loads(bytes(note.payload))
            if region is None:  # taken back meanwhile
                self.tally["unchecked"] += 1
            else:
                got = view(region)[said["at"] : said["at"] + said["nbytes"]]
                expected = pattern(said["ident"], said["offset"], said["nbytes"])
                compare(got, expected, f"{self.engine.name}: at the note of {note.peer.name}")
            with contextlib.suppress(aiohixl.HixlError):
                await note.peer.notify(str(said["ident"]).encode(), topic=OK_TOPIC)

    async def take_answers(self) -> None:
        async for note in self.engine.notes(OK_TOPIC):
            self.answers.came(int(bytes(note.payload)))

    async def report(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            say(tally=self.tally)

    # ---- what we ask of others ----

    def meet(self, peers: dict[str, str]) -> None:
        self.addresses = {name: address for name, address in peers.items() if name != self.engine.name}
        for name in self.addresses:
            if name not in self.tasks:
                self.tasks[name] = asyncio.create_task(self.talk(name))

    async def talk(self, name: str) -> None:
        self.scratch[name] = await self.engine.allocate(LANES * 2 * SIZE)
        while True:
            if name not in self.addresses:  # it is about to end
                await asyncio.sleep(0.05)
                continue
            try:
                await self.transfer_with(name)
            except WrongByteError as exc:
                say(wrong=f"{self.engine.name} -> {name}: {exc}")
                return
            except aiohixl.HixlError as exc:
                self.tally[f"error {type(exc).__name__}"] += 1
                self.tally["errors"] += 1
                await asyncio.sleep(0.05)
            except Exception as exc:
                say(wrong=f"{self.engine.name} -> {name}: {type(exc).__name__}: {exc}")
                return

    async def transfer_with(self, name: str) -> None:
        peer = await self.engine.connect(self.addresses[name], timeout=5)
        await peer.notify(b"", topic=HELLO_TOPIC)
        remote = await peer.region(f"for-{self.engine.incarnation}")
        tasks = []
        for i in range(LANES):
            lane = Lane(peer, remote, i * SIZE, self.scratch[name], i * 2 * SIZE, self.tally, self.answers)
            tasks.append(asyncio.create_task(lane.run()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [r for r in results if isinstance(r, Exception)]
        failures.sort(key=lambda failure: isinstance(failure, aiohixl.HixlError))  # a wrong byte comes first
        raise failures[0]

    # ---- the end ----

    async def stop(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        while peers := list(self.engine.peers.values()):  # the newest link to each name
            await asyncio.gather(*(peer.close() for peer in peers))
        for incarnation in list(self.lent):
            await self.withdraw(incarnation)
        for region in self.scratch.values():
            await region.deregister()
        for task in self.servants:
            task.cancel()
        await asyncio.gather(*self.servants, return_exceptions=True)
        self.tasks.clear()
        self.servants.clear()
        self.lent.clear()
        self.scratch.clear()


async def settled(worker: Worker, before: dict[str, int]) -> dict[str, Any]:
    """What is left once all is taken down: the same descriptors and threads as before, and nothing pending."""
    left: dict[str, Any] = {}
    for _ in range(100):
        await asyncio.sleep(0.05)
        stats = worker.engine.stats()
        left = {key: stats[key] for key in ("live_ops", "pending", "parked", "peers") if stats[key]}
        now = census()
        left |= {k: f"{before[k]} -> {now[k]}" for k in ("descriptors", "threads") if now[k] > before[k]}
        if not left:
            break
    return left


async def main(name: str, options: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    loop.set_exception_handler(lambda _, context: say(wrong=f"{name}: the loop was told of {context}"))
    async with aiohixl.Engine(name, **options) as engine:
        worker = Worker(engine)
        await (await engine.allocate(SIZE)).deregister()  # what the first one starts is no leak
        before = census()
        worker.start()
        say(address=engine.address)
        while line := await reader.readline():
            message = json.loads(line)
            if "peers" in message:
                worker.meet(message["peers"])
            elif "census" in message:
                say(census=census())
            elif "end" in message:
                await worker.stop()
                say(tally=worker.tally)
                say(left=await settled(worker, before))
                break
    transport.close()


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    if given.pop("uvloop", False):
        import uvloop

        uvloop.run(main(sys.argv[1], given))
    else:
        asyncio.run(main(sys.argv[1], given))
