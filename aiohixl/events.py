# SPDX-License-Identifier: Apache-2.0
"""What happens to an engine beside its transfers, for whoever wants to know."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from aiohixl.notes import Inbox

__all__ = ["Event", "EventFan"]

LIMIT = 1024


@dataclass(frozen=True, slots=True)
class Event:
    """``kind``: ``joined`` or ``lost`` (a peer), ``quarantined`` or ``released`` (memory), ``refused`` (a stranger),
    ``displaced`` (another engine took this one's name), ``rejoined`` (the rendezvous had forgotten this engine),
    ``warning`` (something works and should not be relied on: a poor link, for instance)."""

    kind: str
    #: The `Peer`, where one is concerned.
    peer: Any = None
    #: The `Region`, where one is concerned.
    region: Any = None
    #: ``(offset, nbytes)`` pairs of that region.
    spans: tuple[tuple[int, int], ...] = ()
    detail: str = ""


class EventFan:
    """Every subscriber gets every event from its subscription on; one that does not read loses its oldest."""

    def __init__(self) -> None:
        self._inboxes: weakref.WeakSet[Inbox[Event]] = weakref.WeakSet()
        self._closed = False

    def subscribe(self) -> Inbox[Event]:
        inbox: Inbox[Event] = Inbox(limit=LIMIT)
        self._inboxes.add(inbox)
        if self._closed:
            inbox.close()
        return inbox

    def emit(self, event: Event) -> None:
        for inbox in list(self._inboxes):
            inbox.put(event)

    def close(self) -> None:
        self._closed = True
        for inbox in list(self._inboxes):
            inbox.close()
