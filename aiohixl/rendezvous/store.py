# SPDX-License-Identifier: Apache-2.0
"""Who is joined: leases, incarnations and epochs. No I/O, no loop, an injected clock.

The epoch of a name never goes down, whatever the store forgets: a new one is at least
the wall clock in milliseconds, and names dropped from memory leave their highest epoch
behind as a floor for every name the store does not know.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from aiohixl.rendezvous.refusal import refuse
from aiohixl.wire import Holder, JoinRequest, Record, WatchEvent

__all__ = ["MemoryStore", "Store"]


class Store(Protocol):
    """What the application needs from a store. Calls are synchronous: they must not block.

    Refusals are raised as `RefusedError`; every change is told to the subscribers before
    the call that caused or noticed it returns.
    """

    def join(self, name: str, request: JoinRequest) -> Record: ...
    def renew(self, name: str, incarnation: str) -> Record: ...
    def leave(self, name: str, incarnation: str) -> None: ...
    def get(self, name: str) -> Record | None: ...
    def records(self) -> tuple[Record, ...]: ...
    def expire(self) -> float:
        """Drop what has expired; seconds until the next lease can end, inf if there is none."""

    def subscribe(self, listener: Callable[[WatchEvent], None]) -> Callable[[], None]:
        """Call `listener` with each change from now on; the result unsubscribes."""


@dataclass(slots=True)
class _Lease:
    request: JoinRequest
    epoch: int
    joined: float
    renewed: float

    @property
    def ends(self) -> float:
        return self.renewed + self.request.ttl


class MemoryStore:
    """The store that lives and dies with its process.

    At most `max_engines` are joined at a time, and the epochs of at most `max_remembered`
    names that went are kept; the oldest are forgotten first.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        max_engines: int = 10_000,
        max_remembered: int = 100_000,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._max_engines = max_engines
        self._max_remembered = max_remembered
        self._live: dict[str, _Lease] = {}
        self._past: OrderedDict[str, tuple[int, str]] = OrderedDict()  # name -> its last epoch, incarnation
        self._floor = 0
        self._first_end = math.inf  # no lease ends before this; renewals make it earlier than the truth
        self._listeners: list[Callable[[WatchEvent], None]] = []

    def join(self, name: str, request: JoinRequest) -> Record:
        now = self._sweep()
        lease = self._live.get(name)
        if lease is not None and lease.request.incarnation != request.incarnation:
            if not self._may_replace(lease, request):
                raise self._taken(name, lease, request, now)
            self._tell(self._remove(name, "replaced", now))
            lease = None
        if lease is not None:
            record, changed = self._join_again(name, lease, request, now)
            if changed:
                self._tell(WatchEvent("updated", (record,)))
            return record
        if len(self._live) >= self._max_engines:
            raise refuse(
                503,
                "full",
                f"{self._max_engines} engines are joined, the most this server takes",
            )
        lease = _Lease(request, self._next_epoch(name, request), joined=now, renewed=now)
        self._past.pop(name, None)
        self._live[name] = lease
        self._first_end = min(self._first_end, lease.ends)
        record = self._record(name, lease, now)
        self._tell(WatchEvent("joined", (record,)))
        return record

    def renew(self, name: str, incarnation: str) -> Record:
        now = self._sweep()
        lease = self._own(name, incarnation, now, "renew")
        lease.renewed = now
        return self._record(name, lease, now)

    def leave(self, name: str, incarnation: str) -> None:
        now = self._sweep()
        self._own(name, incarnation, now, "leave")
        self._tell(self._remove(name, "left", now))

    def get(self, name: str) -> Record | None:
        now = self._sweep()
        lease = self._live.get(name)
        return None if lease is None else self._record(name, lease, now)

    def records(self) -> tuple[Record, ...]:
        now = self._sweep()
        return tuple(self._record(name, self._live[name], now) for name in sorted(self._live))

    def expire(self) -> float:
        return self._first_end - self._sweep()

    def subscribe(self, listener: Callable[[WatchEvent], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    @staticmethod
    def _may_replace(lease: _Lease, request: JoinRequest) -> bool:
        # An epoch above the holder's was granted after it: the holder is a left-over that came
        # back first after this server had lost its memory.
        superseded = request.epoch is not None and request.epoch > lease.epoch
        return request.force or request.replace == lease.request.incarnation or superseded

    def _join_again(self, name: str, lease: _Lease, request: JoinRequest, now: float) -> tuple[Record, bool]:
        before = (lease.epoch, lease.request.addresses, lease.request.capabilities, lease.request.ttl)
        lease.epoch = max(lease.epoch, request.epoch or 0)
        lease.request, lease.renewed = request, now
        self._first_end = min(self._first_end, lease.ends)
        after = (lease.epoch, request.addresses, request.capabilities, request.ttl)
        return self._record(name, lease, now), before != after

    def _next_epoch(self, name: str, request: JoinRequest) -> int:
        last, incarnation = self._past.get(name, (self._floor, ""))
        hint = request.epoch or 0
        if incarnation == request.incarnation:
            return max(last, hint)
        if hint > last:
            return hint
        return max(last + 1, int(self._wall_clock() * 1000))

    def _own(self, name: str, incarnation: str, now: float, verb: str) -> _Lease:
        lease = self._live.get(name)
        if lease is None:
            raise refuse(
                404,
                "not_joined",
                f"cannot {verb} {name!r}: it is not joined (its lease ended, or this server was restarted); join again",
                field="name",
            )
        if lease.request.incarnation != incarnation:
            holder = self._holder(lease, now)
            raise refuse(
                409,
                "wrong_incarnation",
                f"cannot {verb} {name!r} as {incarnation}: it is held by {holder.describe()}",
                field="incarnation",
                holder=holder,
            )
        return lease

    def _taken(self, name: str, lease: _Lease, request: JoinRequest, now: float) -> Exception:
        holder = self._holder(lease, now)
        instead = "" if request.replace is None else f", not by {request.replace} whom you would replace"
        return refuse(
            409,
            "name_taken",
            f"{name!r} is held by {holder.describe()}{instead}; wait for it to go, choose another name, "
            "or take over with replace=<that incarnation> or force",
            field="name" if request.replace is None else "replace",
            holder=holder,
        )

    def _sweep(self) -> float:
        now = self._clock()
        if now >= self._first_end:
            gone = [name for name, lease in self._live.items() if lease.ends <= now]
            events = [self._remove(name, "expired", now) for name in gone]
            self._first_end = min((lease.ends for lease in self._live.values()), default=math.inf)
            for event in events:  # only now: a listener may call the store
                self._tell(event)
        return now

    def _remove(self, name: str, reason: Literal["left", "expired", "replaced"], now: float) -> WatchEvent:
        lease = self._live.pop(name)
        self._past[name] = (lease.epoch, lease.request.incarnation)
        while len(self._past) > self._max_remembered:
            _, (epoch, _) = self._past.popitem(last=False)
            self._floor = max(self._floor, epoch)
        return WatchEvent("left", (self._record(name, lease, now),), reason)

    def _tell(self, event: WatchEvent) -> None:
        for listener in tuple(self._listeners):
            listener(event)

    @staticmethod
    def _record(name: str, lease: _Lease, now: float) -> Record:
        r = lease.request
        age = max(0.0, now - lease.joined)
        return Record(name, r.incarnation, lease.epoch, r.addresses, r.capabilities, r.ttl, age)

    @staticmethod
    def _holder(lease: _Lease, now: float) -> Holder:
        return Holder(
            incarnation=lease.request.incarnation,
            epoch=lease.epoch,
            age=max(0.0, now - lease.joined),
            since_renew=max(0.0, now - lease.renewed),
            expires_in=max(0.0, lease.ends - now),
        )
