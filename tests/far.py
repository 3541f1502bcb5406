# SPDX-License-Identifier: Apache-2.0
"""An engine of another process with an NPU, as the conformance suite wants to see it; and how to start one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from processes import Child, child
from standin import LIBRARY, Bytes

import aiohixl
from aiohixl.testing import CONFORMANCE, Bench, Memory


@contextlib.asynccontextmanager
async def npu_child(
    name: str = "child", *, knobs: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Child]:
    """An engine on NPU 1 in a new process; `knobs` are its stand-in's from the start."""
    options = {"hixl_library": str(LIBRARY), "npu_id": 1, "knobs": knobs or {}, **options}
    async with child(name, script="hixl_peer.py", **options) as running:
        yield running


class FarRegion:
    """A region of the other process: its bytes travel by a file."""

    device = "far"

    def __init__(self, far: Far, name: str, nbytes: int) -> None:
        self._far, self.name, self.nbytes = far, name, nbytes

    async def upload(self, data: Bytes) -> None:
        data.tofile(self._far.file)
        await self._far.ask("load", name=self.name, path=str(self._far.file))

    async def download_into(self, out: Bytes) -> None:
        await self._far.ask("dump", name=self.name, path=str(self._far.file))
        out[:] = np.fromfile(self._far.file, np.uint8)

    async def revoke(self, peer: Any = None, *, spans: Iterable[tuple[int, int]] | None = None) -> None:
        assert await self._far.ask("revoke", name=self.name, spans=None if spans is None else list(spans)) == ""

    def grant(self, peer: Any = None, *, spans: Iterable[tuple[int, int]] | None = None) -> None:
        self._far.later("grant", name=self.name, spans=None if spans is None else list(spans))

    async def deregister(self) -> None:
        assert await self._far.ask("deregister", name=self.name) == ""


class Far:
    """The part of an engine that the suite uses."""

    def __init__(self, child: Child, file: Path) -> None:
        self.child, self.file = child, file
        self._unanswered = 0

    def later(self, do: str, **arguments: Any) -> None:
        self.child.send(do, **arguments)
        self._unanswered += 1

    async def ask(self, do: str, **arguments: Any) -> Any:
        while self._unanswered:
            self._unanswered -= 1
            await self.child.answer()
        return await self.child.ask(do, **arguments)

    def notes(self, topic: str = "") -> Any:
        async def get() -> Any:
            note = await self.ask("note", topic=topic)
            return SimpleNamespace(payload=bytes.fromhex(note["payload"]), aborted=note["aborted"])

        return SimpleNamespace(get=get)


def far_memory(kind: str) -> Memory:
    """Memory of that kind (``npu``, ``cpu``, ``foreign``) of a `Far` engine."""

    async def make(engine: aiohixl.Engine, nbytes: int, name: str, access: str) -> aiohixl.Region:
        far = cast(Far, engine)
        await far.ask("make", kind=kind, name=name, nbytes=nbytes, access=access)
        return cast(aiohixl.Region, FarRegion(far, name, nbytes))

    return make


async def conforms(bench: Bench) -> None:
    """The whole suite, on one bench."""
    for name, check in CONFORMANCE.items():
        try:
            await check(bench)
        except BaseException as exc:
            exc.add_note(f"in the check {name}")
            raise
