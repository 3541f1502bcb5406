# SPDX-License-Identifier: Apache-2.0
"""What an await of a transfer waits on.

To the task it is a future (by asyncio's own protocol: ``_asyncio_future_blocking``, ``add_done_callback``). A future
hands its task to the loop, which goes on with it in its next turn: one more look at all descriptors between the
completion and the code that waits for it. A waiter's task goes on in the turn in which the completion was drained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any

__all__ = ["Waiter"]


class Waiter:
    """For one await, on one loop. Whoever ends it with `end` calls `run` afterwards, as a callback of that loop."""

    __slots__ = ("_asyncio_future_blocking", "_callbacks", "_cancelled", "_done", "_loop", "_message")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asyncio_future_blocking = False
        self._loop = loop
        self._done = self._cancelled = False
        self._callbacks: tuple[tuple[Callable[[Waiter], object], Context | None], ...] = ()

    def __repr__(self) -> str:
        state = "cancelled" if self._cancelled else "done" if self._done else "pending"
        return f"<Waiter of a transfer, {state}>"

    def __await__(self) -> Generator[Any, Any, None]:
        if not self._done:
            self._asyncio_future_blocking = True
            yield self
        self.result()

    # ---- what a task asks of it ----

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, callback: Callable[[Waiter], object], *, context: Context | None = None) -> None:
        if self._done:
            self._loop.call_soon(callback, self, context=context)
        else:
            self._callbacks += ((callback, context),)

    def remove_done_callback(self, callback: Callable[[Waiter], object]) -> int:
        before = len(self._callbacks)
        self._callbacks = tuple(entry for entry in self._callbacks if entry[0] != callback)
        return before - len(self._callbacks)

    def done(self) -> bool:
        return self._done

    def cancelled(self) -> bool:
        return self._cancelled

    def result(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError() if self._message is None else asyncio.CancelledError(self._message)
        if not self._done:
            raise asyncio.InvalidStateError("the transfer has not ended")

    def cancel(self, msg: Any = None) -> bool:
        if self._done:
            return False
        self._done = self._cancelled = True
        self._message = msg
        self.run_soon()
        return True

    # ---- who ends it ----

    def end(self) -> bool:
        """False: it had ended."""
        ended = not self._done
        self._done = True
        return ended

    def run_soon(self) -> None:
        """In the loop's next turn, as a future does."""
        callbacks, self._callbacks = self._callbacks, ()
        for callback, context in callbacks:
            self._loop.call_soon(callback, self, context=context)

    def run(self) -> None:
        """Now; no task may be running."""
        callbacks, self._callbacks = self._callbacks, ()
        for callback, context in callbacks:
            if context is None:
                callback(self)
            else:
                context.run(callback, self)
