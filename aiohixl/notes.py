# SPDX-License-Identifier: Apache-2.0
"""Notes: short messages that follow their bytes, queued per topic until somebody takes them."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from aiohixl.errors import ClosedError

__all__ = ["Inbox", "Note", "NoteBoard"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Note:
    """What a peer sent. The bytes that it announces are in place when it is here."""

    #: The `Peer` it came from; it may be lost by now.
    peer: Any
    payload: bytes
    topic: str = ""
    #: True: the transfer or stream that would have carried it ended without success. Its bytes will not come, and
    #: nothing of it is still on its way: the blocks can be given to somebody else.
    aborted: bool = False


class Inbox(Generic[T]):
    """A queue that several consumers may iterate; each item goes to one, and a cancelled one loses none."""

    def __init__(self, on_take: Callable[[T], None] | None = None, limit: int | None = None) -> None:
        self._items: deque[T] = deque()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._on_take = on_take
        self._limit = limit
        self._closed = False
        #: Items dropped, oldest first, because nobody took them.
        self.dropped = 0

    def put(self, item: T) -> None:
        if self._limit is not None and len(self._items) >= self._limit:
            self._items.popleft()
            self.dropped += 1
        self._items.append(item)
        self._wake_one()

    def close(self) -> None:
        """Iteration ends once the items that are here have been taken."""
        self._closed = True
        while self._waiters:
            self._wake_one()

    def _wake_one(self) -> None:
        while self._waiters:
            future = self._waiters.popleft()
            if not future.done():
                future.set_result(None)
                return

    def __len__(self) -> int:
        return len(self._items)

    async def get(self) -> T:
        """The oldest item. Cancelling this loses none; `ClosedError` once the engine is closed and all are taken."""
        while not self._items:
            if self._closed:
                raise ClosedError("the engine is closed; nothing more will arrive")
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(future)
            try:
                await future
            except asyncio.CancelledError:
                if future in self._waiters:
                    self._waiters.remove(future)
                # It may have been woken for an item in the same round: pass the wake-up on.
                if future.done() and not future.cancelled() and self._items:
                    self._wake_one()
                raise
        item = self._items.popleft()
        if self._items:
            self._wake_one()
        if self._on_take is not None:
            self._on_take(item)
        return item

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.get()
        except ClosedError:
            raise StopAsyncIteration from None


class NoteBoard:
    """The inboxes of an engine, one a topic: each exists while somebody reads it, or while notes wait in it."""

    def __init__(self, on_take: Callable[[Note], None]) -> None:
        self._inboxes: weakref.WeakValueDictionary[str, Inbox[Note]] = weakref.WeakValueDictionary()
        self._filled: dict[str, Inbox[Note]] = {}
        self._on_take = on_take
        self._closed = False

    def inbox(self, topic: str) -> Inbox[Note]:
        inbox = self._inboxes.get(topic)
        if inbox is None:
            inbox = self._inboxes[topic] = Inbox(self._taken)
            if self._closed:
                inbox.close()
        return inbox

    def put(self, note: Note) -> None:
        inbox = self._filled[note.topic] = self.inbox(note.topic)
        inbox.put(note)

    def _taken(self, note: Note) -> None:
        if not self._filled.get(note.topic):
            self._filled.pop(note.topic, None)
        self._on_take(note)

    def waiting(self) -> dict[str, int]:
        return {topic: len(inbox) for topic, inbox in self._filled.items()}

    def close(self) -> None:
        self._closed = True
        for inbox in list(self._inboxes.values()):
            inbox.close()
