# SPDX-License-Identifier: Apache-2.0
"""`peer.py` with what the conformance suite asks of the other process, and transfers whose end is asked for later."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peer

import aiohixl


class TcpPeer(peer.Peer):
    def __init__(self, engine: aiohixl.Engine) -> None:
        super().__init__(engine)
        self.begun: list[aiohixl.Transfer] = []

    # ---- memory ----

    async def make(self, kind: str, name: str, nbytes: int, access: str = "rw", fill: int = 0) -> None:
        if kind == "foreign":
            region = self.engine.register(np.zeros(nbytes, np.uint8), name, access=access)
        else:
            region = self.engine.allocate(nbytes, name, access=access)
        self.regions[name] = await region
        peer.view(region)[:] = fill

    async def load(self, name: str, path: str) -> None:
        peer.view(self.regions[name])[:] = np.fromfile(path, np.uint8)

    async def dump(self, name: str, path: str) -> None:
        await asyncio.to_thread(Path(path).write_bytes, peer.view(self.regions[name]).tobytes())

    # ---- its process ----

    async def descriptors(self, more: int | None) -> None:
        """From now on it can open so many more; None: as many as ever."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = hard
        if more is not None:
            used = {int(name) for name in os.listdir("/proc/self/fd")}
            free = (number for number in itertools.count() if number not in used)
            limit = next(itertools.islice(free, more, None))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

    # ---- transfers ----

    async def begin(self, kind: str, local: str, remote: str, count: int = 1, note: bool = False) -> None:
        """Transfers that `ended` tells of, in their order."""
        there = await self.the_peer().region(remote)
        for number in range(count):
            options = {"note": b"%d" % number} if note else {}
            self.begun.append(getattr(self.the_peer(), kind)(self.regions[local], there, **options))

    async def ended(self) -> list[str]:
        """The names of the errors, or nothing, of all that were begun."""
        out = [await peer.outcome(transfer) for transfer in self.begun]
        self.begun.clear()
        return out

    async def note(self, topic: str = "") -> dict[str, Any]:
        note = await self.engine.notes(topic).get()
        return {"payload": note.payload.hex(), "aborted": note.aborted}


async def main() -> None:
    options = json.loads(sys.argv[2])
    engine = await aiohixl.Engine(sys.argv[1], **{"transports": ["tcp"], **options}).start()
    with contextlib.suppress(aiohixl.ClosedError):
        await peer.serve(TcpPeer(engine))
        await engine.close(timeout=0.1)


if __name__ == "__main__":
    signal.alarm(120)  # whatever happens to the test, this process ends
    asyncio.run(main())
