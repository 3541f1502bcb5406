# SPDX-License-Identifier: Apache-2.0
"""An engine that does what its parent asks, one JSON line each, and answers each with one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import aiohixl
from aiohixl.testing import Fault


def view(region: Any) -> npt.NDArray[np.uint8]:
    return np.frombuffer(region, np.uint8)


async def outcome(call: Awaitable[Any]) -> str:
    """The name of the error that it ends with, or nothing."""
    try:
        await call
    except aiohixl.HixlError as exc:
        return type(exc).__name__
    return ""


class Worker:
    """Repeats one transfer until it fails or is told to stop."""

    def __init__(self, post: Callable[[int], aiohixl.Transfer]) -> None:
        self._post = post
        self._stopping = False
        self.rounds = 0
        self.refused = 0
        self.error = ""
        self.first = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    await self._post(self.rounds)
                except aiohixl.RemoteAccessError:
                    if self.rounds:
                        raise
                    await asyncio.sleep(0.001)  # a grant may be on its way yet
                    continue
                self.rounds += 1
                self.first.set()
        except aiohixl.HixlError as exc:
            self.error = type(exc).__name__
        self.first.set()

    async def stop(self) -> None:
        self._stopping = True
        await self.task


class Peer:
    def __init__(self, engine: aiohixl.Engine) -> None:
        self.engine = engine
        self.regions: dict[str, aiohixl.Region] = {}
        self.peer: aiohixl.Peer | None = None
        self.worker: Worker | None = None
        self.hammer: Hammer | None = None

    def the_peer(self) -> aiohixl.Peer:
        assert self.peer is not None
        return self.peer

    async def allocate(self, name: str, nbytes: int, fill: int = 0) -> None:
        region = self.regions[name] = await self.engine.allocate(nbytes, name)
        view(region)[:] = fill

    async def register(self, name: str, nbytes: int, fill: int = 0) -> None:
        self.regions[name] = self.engine.register(np.full(nbytes, fill, np.uint8), name)

    async def cache(self, layers: int, blocks: int, nbytes: int) -> None:
        self.engine.register_kv([np.zeros((blocks, nbytes), np.uint8) for _ in range(layers)], "kv")

    async def connect(self, address: str) -> None:
        self.peer = await self.engine.connect(address)

    async def values(self, name: str) -> list[int]:
        """Which byte values stand in the region."""
        return [int(v) for v in np.unique(view(self.regions[name]))]

    async def revoke(self, name: str, spans: list[tuple[int, int]] | None = None) -> str:
        return await outcome(self.regions[name].revoke(spans=spans))

    async def grant(self, name: str, spans: list[tuple[int, int]] | None = None) -> None:
        self.regions[name].grant(spans=spans)

    async def deregister(self, name: str) -> str:
        return await outcome(self.regions[name].deregister())

    async def transfer(self, kind: str, local: str, remote: str, span: list[int] | None = None) -> str:
        there: Any = await self.the_peer().region(remote)
        here: Any = self.regions[local]
        if span is not None:
            here, there = here[span[0] : span[1]], there[span[0] : span[1]]
        return await outcome(getattr(self.the_peer(), kind)(here, there))

    async def loop(self, kind: str, local: str, remote: str, top: int = 100) -> None:
        """Begin to repeat; answered when one round is done. Writes carry the values 1 to `top` in turn."""
        there = await self.the_peer().region(remote)
        region = self.regions[local]
        bytes_here = view(region)

        def post(i: int) -> aiohixl.Transfer:
            if kind == "write":
                bytes_here[:] = 1 + i % top
            return getattr(self.the_peer(), kind)(region, there)  # type: ignore[no-any-return]

        self.worker = Worker(post)
        await self.worker.first.wait()

    async def looped(self, stop: bool = False) -> dict[str, Any]:
        """Wait until the repetition has ended, by itself unless `stop`."""
        assert self.worker is not None
        await (self.worker.stop() if stop else self.worker.task)
        return {"rounds": self.worker.rounds, "error": self.worker.error}

    async def hammering(self, local: str, remote: str, nbytes: int) -> None:
        there = await self.the_peer().region(remote)
        self.hammer = Hammer(self.the_peer(), self.regions[local], there, nbytes)
        await self.hammer.reached(0, 2000)

    async def until_new(self, name: str, old: int) -> str:
        """Wait until a region of that name other than the old one is announced."""
        while (found := self.the_peer().regions.get(name)) is None or found.id == old:
            await asyncio.sleep(0.001)
        return ""

    async def refused(self, more: int) -> int:
        """Answered when so many more posts have been refused, while the others went on."""
        assert self.hammer is not None
        await self.hammer.reached(self.hammer.refused + more, 0)
        return self.hammer.refused

    async def hammered(self) -> int:
        assert self.hammer is not None
        await self.hammer.stop()
        return self.hammer.done

    async def notify(self, payload: str) -> None:
        await self.the_peer().notify(payload.encode())

    async def notes(self, count: int) -> list[str]:
        inbox = self.engine.notes()
        return [(await inbox.get()).payload.decode() for _ in range(count)]

    async def fork(self) -> int:
        """A child of this process that holds whatever it inherited, until its process group is killed."""
        pid = os.fork()
        if not pid:
            while True:
                signal.pause()
        return pid

    async def close_peer(self) -> None:
        for peer in list(self.engine.peers.values()):
            await peer.close()

    async def close(self) -> None:
        await self.engine.close(timeout=0.1)

    async def abort(self) -> None:
        self.engine.abort()

    async def end(self, how: str) -> None:
        """This process ends without closing anything."""
        if how == "_exit":
            os._exit(0)
        raise SystemExit(0)


class Hammer:
    """Small writes everywhere, by thousands in flight, for as long as it lives; those that are refused are counted."""

    def __init__(self, peer: aiohixl.Peer, local: aiohixl.Region, remote: aiohixl.RemoteRegion, nbytes: int) -> None:
        self.done = self.refused = 0
        self._peer, self._local, self._remote, self._nbytes = peer, local, remote, nbytes
        self._stopping = False
        self._dice = np.random.default_rng(7)
        self._moved = asyncio.Condition()
        self._tasks = [asyncio.create_task(self._run()) for _ in range(4)]

    async def _run(self) -> None:
        slots = self._local.nbytes // self._nbytes
        source = view(self._local)
        while not self._stopping:
            source[:] = self._dice.integers(1, 256, source.nbytes, dtype=np.uint8)
            posted = []
            for slot in self._dice.integers(0, slots, 500):
                span = slice(int(slot) * self._nbytes, (int(slot) + 1) * self._nbytes)
                try:
                    posted.append(self._peer.write(self._local[span], self._remote[span]))
                except aiohixl.RemoteAccessError:
                    self.refused += 1
            for transfer in posted:
                try:
                    await transfer
                    self.done += 1
                except aiohixl.RemoteAccessError:
                    self.refused += 1
            async with self._moved:
                self._moved.notify_all()
            await asyncio.sleep(0)

    async def reached(self, refused: int, done: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self.refused >= refused and self.done >= done)

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def serve(peer: Peer) -> None:
    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    say({"answer": peer.engine.address})
    while line := await reader.readline():
        request = json.loads(line)
        try:
            say({"answer": await getattr(peer, request.pop("do"))(**request)})
        except Exception:
            say({"failed": traceback.format_exc()})


async def main() -> None:
    options = json.loads(sys.argv[2])
    options["faults"] = [Fault(**fault) for fault in options.get("faults", ())]
    engine = await aiohixl.Engine(sys.argv[1], **options).start()
    with contextlib.suppress(aiohixl.ClosedError):
        await serve(Peer(engine))
        await engine.close(timeout=0.1)


if __name__ == "__main__":
    signal.alarm(120)  # whatever happens to the test, this process ends
    asyncio.run(main())
