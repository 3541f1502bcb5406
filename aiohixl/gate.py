# SPDX-License-Identifier: Apache-2.0
"""Posts come from any thread; whoever waits for "everything posted so far" must not miss the one that is half made."""

from __future__ import annotations

import asyncio
import threading

from aiohixl.completion import wake

__all__ = ["PostGate"]


class PostGate:
    """Counts posts that have begun. Once it is closed none begins, and closing waits for those that have.

    The lock is held for a few steps only; a post takes microseconds and never waits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = False
        self._posting = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: asyncio.Future[None] | None = None

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open = True

    def begin(self) -> bool:
        """Whether the post may go on; then `end` must follow."""
        with self._lock:
            self._posting += self._open
            return self._open

    def end(self) -> None:
        with self._lock:
            self._posting -= 1
            idle = self._idle if not self._posting else None
        if idle is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(wake, [idle])

    async def close(self) -> asyncio.CancelledError | None:
        """Answers a cancellation that came meanwhile: the posts are waited for all the same."""
        with self._lock:
            self._open = False
            if self._posting and self._loop is not None:
                self._idle = self._loop.create_future()
        cancelled: asyncio.CancelledError | None = None
        while self._idle is not None and not self._idle.done():
            try:
                await asyncio.shield(self._idle)
            except asyncio.CancelledError as exc:
                cancelled = cancelled or exc
        return cancelled
