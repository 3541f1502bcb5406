# SPDX-License-Identifier: Apache-2.0
"""HIXL's own notifications, which engines that are not ours send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohixl.notes import Inbox

__all__ = ["Notifies", "Notify"]


@dataclass(frozen=True, slots=True)
class Notify:
    """One of HIXL's notifications. HIXL does not say who sent it."""

    name: str
    message: str


class Notifies(Inbox[Notify]):
    """HIXL has to be asked for them, again and again: that is done while somebody waits here, and only then."""

    def __init__(self, expect: Callable[[int], None]) -> None:
        super().__init__()
        self._expect = expect

    async def get(self) -> Notify:
        """The oldest one. Cancelling this loses none; `ClosedError` once the engine is closed and all are taken."""
        if self:
            return await super().get()
        self._expect(1)
        try:
            return await super().get()
        finally:
            self._expect(-1)
