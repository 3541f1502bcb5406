# SPDX-License-Identifier: Apache-2.0
"""Which event loop to run on, and how to end it when a signal asks."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["Stopped", "loop_factory", "run_async"]

T = TypeVar("T")


class Stopped(Exception):
    """A signal asked the process to end, and the main coroutine has ended. ``args`` holds its number."""


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's where it is installed, else asyncio's."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` on the best loop there is. SIGINT and SIGTERM cancel it; then `Stopped` is raised."""
    received: list[int] = []

    async def guarded() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(main)

        def on_signal(signum: int) -> None:
            received.append(signum)
            task.cancel()

        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, on_signal, signum)
        return await task

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            return runner.run(guarded())
        except asyncio.CancelledError:
            if not received:
                raise
            raise Stopped(received[0]) from None
