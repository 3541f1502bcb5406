# SPDX-License-Identifier: Apache-2.0
"""How long to wait before the next try."""

from __future__ import annotations

import random

__all__ = ["Backoff"]


class Backoff:
    """Doubling delays with jitter, so that a crowd that failed together does not return together."""

    def __init__(self, first: float = 0.1, limit: float = 2.0) -> None:
        self._first = first
        self._limit = limit
        self._next = first

    def reset(self) -> None:
        self._next = self._first

    def next(self) -> float:
        """Seconds: between a half and the whole of the current step."""
        step, self._next = self._next, min(self._next * 2, self._limit)
        return step * random.uniform(0.5, 1.0)
