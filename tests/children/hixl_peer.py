# SPDX-License-Identifier: Apache-2.0
"""`peer.py` with an NPU: its memory is filled and read by copies, and its stand-in for HIXL can be told what to do."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import mmap
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peer

import aiohixl

MAP_FIXED_NOREPLACE = 0x100000


def mapped_at(addr: int, nbytes: int) -> Any:
    """Memory at that address."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    found = libc.mmap(ctypes.c_void_p(addr), ctypes.c_size_t(nbytes), 3, flags, -1, ctypes.c_long(0))
    assert found == addr, f"mmap: errno {ctypes.get_errno()}"
    return (ctypes.c_uint8 * nbytes).from_address(addr)


class NpuPeer(peer.Peer):
    def __init__(self, engine: aiohixl.Engine, library: ctypes.CDLL) -> None:
        super().__init__(engine)
        self.library = library
        self.begun: list[aiohixl.Transfer] = []
        library.hixl_standin_stat.restype = ctypes.c_uint64

    # ---- the stand-in ----

    async def knobs(self, knobs: dict[str, Any]) -> None:
        for key, value in knobs.items():
            assert self.library.hixl_standin_set(key.encode(), str(value).encode()) == 0, key

    async def stat(self, key: str) -> int:
        return int(self.library.hixl_standin_stat(key.encode()))

    async def hixl_address(self) -> str | None:
        return self.engine.hixl_address

    # ---- memory ----

    async def make(
        self, kind: str, name: str, nbytes: int, access: str = "rw", fill: int = 0, addr: int = 0
    ) -> dict[str, Any]:
        filled = np.full(nbytes, fill, np.uint8)
        if kind == "foreign":
            region = self.engine.register(mapped_at(addr, nbytes) if addr else filled, name, access=access)
            if addr:
                np.frombuffer(memoryview(region), np.uint8)[:] = fill
        else:
            region = self.engine.allocate(nbytes, name, access=access, device=kind)
        self.regions[name] = await region
        if kind != "foreign":
            await region.upload(filled)
        return {"addr": region.addr}

    async def load(self, name: str, path: str) -> None:
        await self.regions[name].upload(await asyncio.to_thread(Path(path).read_bytes))

    async def dump(self, name: str, path: str) -> None:
        await asyncio.to_thread(Path(path).write_bytes, await self.regions[name].download())

    async def values(self, name: str) -> list[int]:
        return [int(v) for v in np.unique(np.frombuffer(await self.regions[name].download(), np.uint8))]

    # ---- transfers ----

    async def loop(self, kind: str, local: str, remote: str, top: int = 100) -> None:
        """Repeat, without touching the memory."""
        there = await self.the_peer().region(remote)
        region = self.regions[local]
        self.worker = peer.Worker(lambda _: getattr(self.the_peer(), kind)(region, there))
        await self.worker.first.wait()

    async def begin(self, kind: str, local: str, remote: str) -> None:
        """A transfer; `ended` tells how it went, of each in turn."""
        there = await self.the_peer().region(remote)
        self.begun.append(getattr(self.the_peer(), kind)(self.regions[local], there))

    async def ended(self) -> str:
        """The name of the error, or nothing."""
        return await peer.outcome(self.begun.pop(0))

    async def moved(self, nbytes: int) -> None:
        while await self.stat("bytes") < nbytes:
            await asyncio.sleep(0.001)

    async def posted(self, posts: int) -> None:
        while await self.stat("posts") < posts:
            await asyncio.sleep(0.001)

    async def noted(self, local: str, remote: str, nbytes: int, together: bool) -> None:
        """One write after the other, each with its number as a note; awaited in between, unless `together`."""
        there, here = await self.the_peer().region(remote), self.regions[local]
        posted = []
        for number in range(there.nbytes // nbytes):
            span = slice(number * nbytes, (number + 1) * nbytes)
            posted.append(self.the_peer().write(here[span], there[span], note=b"%d" % number))
            if not together:
                await posted[-1]
        await aiohixl.wait_all(posted)

    async def hixl_notify(self) -> list[str]:
        got = await self.engine.notifies().get()
        return [got.name, got.message]

    async def note(self, topic: str = "") -> dict[str, Any]:
        note = await self.engine.notes(topic).get()
        return {"payload": note.payload.hex(), "aborted": note.aborted}


async def main() -> None:
    options = json.loads(sys.argv[2])
    knobs = options.pop("knobs", {})
    library = ctypes.CDLL(options["hixl_library"] + "/libcann_hixl.so")
    for key, value in knobs.items():
        assert library.hixl_standin_set(key.encode(), str(value).encode()) == 0, key
    engine = await aiohixl.Engine(sys.argv[1], transports=["hixl"], **options).start()
    with contextlib.suppress(aiohixl.ClosedError):
        await peer.serve(NpuPeer(engine, library))
        await engine.close(timeout=0.1)


if __name__ == "__main__":
    signal.alarm(120)  # whatever happens to the test, this process ends
    asyncio.run(main())
