# SPDX-License-Identifier: Apache-2.0
"""Who waits for what at the server: long-polls for a name, and watchers of everything."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohixl.rendezvous.refusal import RefusedError, refuse
from aiohixl.rendezvous.sse import Frame, encode_frame
from aiohixl.rendezvous.store import Store
from aiohixl.wire import VERSION, WatchEvent, dump_message

__all__ = ["Hub", "Watcher"]

HISTORY = 1024  # events that a watcher may have missed and still resume from
BACKLOG = 2048  # frames that a watcher may lag behind before it is cut off; above HISTORY
MAX_WAITING = 4096


class Watcher:
    """One server-sent event stream: the frames it has not been sent yet."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._frames: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self.ended = False
        self.writing = False

    def push(self, frame: bytes) -> None:
        if len(self._frames) >= BACKLOG:
            # It reconnects and gets a snapshot, which is shorter than what it missed.
            self._frames.clear()
            self.end()
        elif not self.ended:
            self._frames.append(frame)
            self._wake.set()

    def end(self) -> None:
        """End the stream now; a write stuck on a peer that does not read is cut off."""
        self.ended = True
        self._wake.set()
        if self.writing:
            self._abort()

    async def take(self, patience: float) -> bytes:
        """What is to be sent next; b"" after `patience` seconds of nothing, or when ended."""
        if not self._frames and not self.ended:
            self._wake.clear()
            try:
                async with asyncio.timeout(patience):
                    await self._wake.wait()
            except TimeoutError:
                return b""
        return self._frames.popleft() if self._frames else b""


class Hub:
    """Spreads the store's changes. Everything here runs on the loop that serves the requests."""

    def __init__(self, store: Store) -> None:
        self.instance = secrets.token_hex(16)
        self.closing = False
        self._store = store
        self._sequence = 0
        self._history: deque[tuple[int, bytes]] = deque(maxlen=HISTORY)
        self._polls: dict[str, set[asyncio.Event]] = {}
        self._npolls = 0
        self._watchers: set[Watcher] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._unsubscribe = store.subscribe(self._publish)

    def close(self) -> None:
        """Let every long-poll and watcher go at once."""
        self.closing = True
        self._unsubscribe()
        self._disarm()
        for events in self._polls.values():
            for event in events:
                event.set()
        for watcher in tuple(self._watchers):
            watcher.end()

    @contextmanager
    def poll(self, name: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever `name` may have changed; clear it before looking."""
        self._admit()
        event = asyncio.Event()
        self._polls.setdefault(name, set()).add(event)
        self._npolls += 1
        try:
            yield event
        finally:
            self._npolls -= 1
            events = self._polls[name]
            events.discard(event)
            if not events:
                del self._polls[name]

    @contextmanager
    def watch(self, abort: Callable[[], None], last_id: str) -> Iterator[Watcher]:
        """A watcher that first gets what it missed since `last_id`, or else a snapshot."""
        self._admit()
        watcher = Watcher(abort)
        records = self._store.records()  # may publish expiries, so before it joins the audience
        missed = self._missed(last_id)
        if missed is None:
            missed = [self._frame(WatchEvent("snapshot", records))]
        for frame in missed:
            watcher.push(frame)
        self._watchers.add(watcher)
        self._tick()
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._disarm()

    def stopping(self) -> RefusedError:
        return refuse(503, "shutting_down", "the rendezvous is shutting down; try again in a moment")

    def _admit(self) -> None:
        if self.closing:
            raise self.stopping()
        if self._npolls + len(self._watchers) >= MAX_WAITING:
            raise refuse(503, "full", f"{MAX_WAITING} requests are waiting, which is the limit; try again later")

    def _publish(self, event: WatchEvent) -> None:
        self._sequence += 1
        frame = self._frame(event)
        self._history.append((self._sequence, frame))
        for watcher in tuple(self._watchers):
            watcher.push(frame)
        for waiting in self._polls.get(event.record.name, ()):
            waiting.set()
        if self._watchers and not self.closing:
            self._arm(0.0)  # the next lease to end may be another one now

    def _frame(self, event: WatchEvent) -> bytes:
        data = dump_message({"version": VERSION, "instance": self.instance, **event.to_json()})
        return encode_frame(Frame(event.kind, data, f"{self.instance}-{self._sequence}"))

    def _missed(self, last_id: str) -> list[bytes] | None:
        instance, _, sequence = last_id.partition("-")
        if instance != self.instance or not re.fullmatch("[0-9]{1,19}", sequence):
            return None
        seen = int(sequence)
        oldest = self._history[0][0] if self._history else self._sequence + 1
        if not oldest - 1 <= seen <= self._sequence:
            return None
        return [frame for number, frame in self._history if number > seen]

    def _tick(self) -> None:
        # Only watchers need to hear of an expiry when it happens; everyone else looks, and sees it then.
        self._arm(min(max(self._store.expire(), 0.01), 60.0))

    def _arm(self, delay: float) -> None:
        self._disarm()
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
