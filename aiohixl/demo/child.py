# SPDX-License-Identifier: Apache-2.0
"""The life of one process of the demo: told what to do on stdin, answers on stdout.

Lines of JSON out (``ready``, ``result``, ``failed``), one line of JSON and
then single words in. Standard input that ends means "stop": it also ends when
the parent is killed, so that no role outlives it. People read stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO

from aiohixl.demo.loops import loop_factory
from aiohixl.errors import ConfigError

__all__ = ["Child", "run_role"]

#: Seconds that a role has to finish by itself once its stdin has ended.
GRACE = 5.0
#: Longest line; the logits of one step are about 260 kB in base 64.
LINE_LIMIT = 16 << 20


class Child:
    """What a role sees of its parent."""

    def __init__(self, name: str, config: dict[str, Any], out: BinaryIO) -> None:
        self.name = name
        self.config = config
        self.go = asyncio.Event()
        self.stop = asyncio.Event()
        self._out = out

    def say(self, text: str) -> None:
        """Progress, for people. Callable from any thread."""
        print(f"[{self.name}] {text}", file=sys.stderr, flush=True)

    def send(self, event: str, **data: Any) -> None:
        """One event for the parent."""
        self._out.write(json.dumps({"event": event, **data}).encode() + b"\n")
        self._out.flush()

    async def listen(self, commands: asyncio.StreamReader) -> None:
        """Turn the parent's words into events until stdin ends."""
        while line := await commands.readline():
            if line.strip() == b"go":
                self.go.set()
        self.stop.set()


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def _live(role: Callable[[Child], Awaitable[None]], name: str, out: BinaryIO) -> int:
    commands = await _stdin()
    child = Child(name, json.loads(await commands.readline() or b"{}"), out)

    async def work() -> None:
        await role(child)

    working = asyncio.create_task(work())
    listening = asyncio.create_task(child.listen(commands))
    await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        await asyncio.wait({working}, timeout=GRACE)
        if not working.done():
            # The parent has gone or given up; a forward pass in a thread cannot be interrupted otherwise.
            os._exit(1)
    listening.cancel()
    try:
        await working
    except Exception as exc:
        error = f"{type(exc).__name__}: {exc}"
        with contextlib.suppress(BrokenPipeError):
            # A wish that cannot be met here says all by itself; anything else may be a bug.
            trace = "" if isinstance(exc, ConfigError) else traceback.format_exc()
            child.send("failed", error=error, traceback=trace)
        return 1
    return 0


def run_role(name: str, role: Callable[[Child], Awaitable[None]]) -> None:
    """Run ``role`` to its end and leave the process.

    Whatever a library prints to stdout goes to stderr, so that it cannot
    damage the lines meant for the parent.
    """
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        code = runner.run(_live(role, name, out))
    sys.exit(code)
