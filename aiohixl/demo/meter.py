# SPDX-License-Identifier: Apache-2.0
"""How long bytes were in flight, and how much of that the computation covered.

A layer is in flight from its post until its completion. Layers overlap, so
"transfer time" is the length of the union of those intervals, and the hidden
share is the part of that union before the forward pass returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Flight", "Meter", "Summary", "union_seconds"]


class Flight(Protocol):
    """What is needed of `aiohixl.Transfer`; ``elapsed``: seconds from post to completion, None before."""

    @property
    def nbytes(self) -> int: ...

    @property
    def elapsed(self) -> float | None: ...


@dataclass(frozen=True)
class Summary:
    nbytes: int
    transfer_seconds: float
    hidden_seconds: float
    compute_seconds: float
    started_at: float
    computed_at: float
    landed_at: float

    @property
    def hidden_share(self) -> float:
        return self.hidden_seconds / self.transfer_seconds if self.transfer_seconds else 1.0


def union_seconds(intervals: Iterable[tuple[float, float]], until: float = float("inf")) -> float:
    """Length of the union of ``intervals``, each cut off at ``until``."""
    total = 0.0
    covered = float("-inf")
    for start, end in sorted(intervals):
        start, end = max(start, covered), min(end, until)
        if end > start:
            total += end - start
            covered = end
    return total


class Meter:
    """Collects one streamed prefill. ``posted`` may be called from any one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._flights: list[tuple[float, Flight]] = []
        self._started = clock()
        self._computed = self._landed = self._started

    def posting(self) -> float:
        """The time; take it just before a post."""
        return self._clock()

    def posted(self, at: float, flight: Flight) -> None:
        self._flights.append((at, flight))

    def computed(self) -> None:
        self._computed = self._clock()

    def landed(self) -> None:
        self._landed = self._clock()

    def summary(self) -> Summary:
        """To be asked after every flight has completed."""
        intervals = []
        for at, flight in self._flights:
            if flight.elapsed is None:
                raise RuntimeError("a transfer has not completed yet, so that its time is not known")
            intervals.append((at, at + flight.elapsed))
        return Summary(
            nbytes=sum(flight.nbytes for _, flight in self._flights),
            transfer_seconds=union_seconds(intervals),
            hidden_seconds=union_seconds(intervals, until=self._computed),
            compute_seconds=self._computed - self._started,
            started_at=self._started,
            computed_at=self._computed,
            landed_at=self._landed,
        )
