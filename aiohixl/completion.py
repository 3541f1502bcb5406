# SPDX-License-Identifier: Apache-2.0
"""Native completions become results on the event loop.

The engine's descriptor is a doorbell, the native rings are the truth: it says only that there may be something. The
reader clears it first and drains second (both inside `drain`); when the budget of one round is spent nothing will
ring again, so the reader calls itself. See the head of ``_native/engine.c`` for the other half.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from aiohixl import _core
from aiohixl.waiter import Waiter

__all__ = ["CompletionQueue", "NativeEvent", "Record", "Sink", "wake"]

#: token, status, errno, nbytes, elapsed_ns, index, quiesced, code, detail
Record = tuple[int, int, int, int, int, int, int, int, str | None]
#: kind, status, errno, token, value, endpoint, remote region, name, blob
NativeEvent = tuple[int, int, int, int, int, _core.Endpoint | None, _core.RemoteRegion | None, bytes, bytes]

EVENTS_PER_ROUND = 256
#: An await that finds its transfer complete gives other tasks a turn once in so many.
INLINE_AWAITS_PER_TURN = 64


class Sink(Protocol):
    """What waits for a token."""

    def settle(self, record: Record) -> None: ...


def wake(futures: list[asyncio.Future[None]]) -> None:
    """Whoever waits for one of them goes on; the list is empty then."""
    for future in futures:
        if not future.done():
            future.set_result(None)
    futures.clear()


class CompletionQueue(_core.QueueState):
    """One per engine. Everything but `new_token`, `expect` and `forget` belongs to the loop's thread."""

    def __init__(
        self, core: _core.Engine, loop: asyncio.AbstractEventLoop, on_event: Callable[[NativeEvent], None]
    ) -> None:
        super().__init__(INLINE_AWAITS_PER_TURN)
        self.core = core
        self.loop = loop
        self.thread_id = threading.get_ident()
        self.sinks: dict[int, Sink] = {}
        self.after_drain: Callable[[], None] | None = None
        self.closed = False
        self.statuses = _core.statuses()
        self._on_event = on_event
        #: Seconds for which an await keeps the loop from going to sleep: to wake it costs more than a short transfer.
        self.busy_poll = 0.0
        self._woken: collections.deque[Waiter] = collections.deque()
        self._waking = False  # `_run_woken` is running, or will
        self._reading = False
        self._turning = False
        self._turn_until = 0.0

    def start(self) -> None:
        self.loop.add_reader(self.core.fileno(), self._drain)
        self._reading = True

    def on_loop(self) -> bool:
        return threading.get_ident() == self.thread_id

    def expect(self, token: int, sink: Sink) -> None:
        self.sinks[token] = sink

    def forget(self, token: int) -> None:
        self.sinks.pop(token, None)

    def waiter(self, futures: list[asyncio.Future[None]]) -> asyncio.Future[None]:
        """A new future that stands in `futures` until `wake`, or until whoever waits for it is cancelled."""
        future = self.loop.create_future()
        futures.append(future)
        future.add_done_callback(lambda ended: futures.remove(ended) if ended in futures else None)
        return future

    def wake(self, waiters: Iterable[Waiter]) -> None:
        """Whoever waits on them goes on when the round is over: what has completed with it is seen by all of them."""
        self._woken.extend(waiter for waiter in waiters if waiter.end())
        if not self._waking:
            self._waking = True
            self.loop.call_soon(self._run_woken)

    def _run_woken(self) -> None:
        woken = self._woken
        # Where loops are nested a task is running already; and a debugged loop should see which task is slow.
        soon = self.loop.get_debug() or asyncio.current_task(self.loop) is not None
        run = Waiter.run_soon if soon else Waiter.run
        try:
            while woken:
                try:
                    run(woken.popleft())
                except Exception as exc:  # not a task's: those keep theirs
                    self._failed(exc)
        finally:
            self._waking = bool(woken)  # KeyboardInterrupt
            if woken:
                self.loop.call_soon(self._run_woken)

    def ended_within_its_post(self) -> None:
        """No record comes of it; while a thread was posting it, somebody on the loop may have begun to wait for one."""
        if self.after_drain is not None and not self.on_loop():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self.after_drain)

    def keep_turning(self) -> None:
        """Somebody begins to wait: look at every turn of the loop for `busy_poll`; other tasks run beside it."""
        if self.busy_poll:
            self._turn_until = time.monotonic() + self.busy_poll
            if not self._turning:
                self._turning = True
                self.loop.call_soon(self._look)

    def _look(self) -> None:
        if self.closed:
            return
        if not self._serve_round() and (not self.sinks or time.monotonic() >= self._turn_until):
            self._turning = False
            return
        os.sched_yield()  # the thread that completes it may be on this core
        self.loop.call_soon(self._look)

    def _drain(self) -> None:
        if self.closed:
            return
        if self._serve_round():
            self.loop.call_soon(self._drain)

    def _serve_round(self) -> bool:
        """A round as a callback of the loop; true when there may be more."""
        self._waking = True
        try:
            return self.drain_round()
        finally:
            self._run_woken()

    def drain_round(self) -> bool:
        """One round; true when there may be more."""
        records, more = self.core.drain()
        sinks = self.sinks
        for record in records:
            # A record that is not quiesced will be followed by one that is, under the same token.
            sink = sinks.pop(record[0], None) if record[6] else sinks.get(record[0])
            if sink is not None:
                try:
                    sink.settle(record)
                except Exception as exc:
                    self._failed(exc)
        budget = EVENTS_PER_ROUND
        while budget and (event := self.core.next_event()) is not None:
            budget -= 1
            try:
                self._on_event(event)
            except Exception as exc:
                self._failed(exc)
        if self.after_drain is not None:
            try:
                self.after_drain()
            except Exception as exc:
                self._failed(exc)
        return more or not budget

    def _failed(self, error: Exception) -> None:
        """What one record or event brings up must not cost the others of its batch, which are gone from the rings."""
        self.loop.call_exception_handler({"message": "a native completion could not be served", "exception": error})

    def stop(self) -> None:
        """Stop watching. The descriptor is open still: an epoll registration can outlive a closed one."""
        if self._reading:
            self._reading = False
            if not self.loop.is_closed():
                self.loop.remove_reader(self.core.fileno())

    def close(self) -> None:
        self.stop()
        while self.drain_round():
            pass
        self.closed = True
        self.core.close_fds()
