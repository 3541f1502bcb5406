# SPDX-License-Identifier: Apache-2.0
"""Misfortune on demand."""

from __future__ import annotations

import random
from collections.abc import Iterator

from aiohixl import Fault
from aiohixl.config import FAULT_ACTIONS

__all__ = ["FaultPlan"]


class FaultPlan:
    """What shall happen to which transfer of an engine: ``Engine(..., faults=FaultPlan().fail(3).delay(5, 0.2))``.

    Transfers are counted from 0 as they reach the native side; small ones between allocated regions count too, since an
    engine with a plan does nothing inline. The same plan on the same posts does the same each time.
    """

    def __init__(self, faults: list[Fault] | None = None) -> None:
        self._faults = list(faults or [])

    @classmethod
    def seeded(
        cls,
        seed: int,
        transfers: int,
        rate: float = 0.1,
        actions: tuple[str, ...] = ("delay", "fail", "stall"),
    ) -> FaultPlan:
        """A plan for the first `transfers` transfers, of which about `rate` meet one of `actions`."""
        dice = random.Random(seed)
        plan = cls()
        for nth in range(transfers):
            if dice.random() < rate:
                plan._faults.append(Fault(nth, dice.choice(actions), delay=dice.uniform(0.0, 0.02)))
        return plan

    def delay(self, nth: int, seconds: float) -> FaultPlan:
        """Held for so long, then done as usual."""
        return self._add(Fault(nth, "delay", delay=seconds))

    def fail(self, nth: int, status: str = "FAULT") -> FaultPlan:
        """Fails with a native status; nothing moves."""
        return self._add(Fault(nth, "fail", status=status))

    def stall(self, nth: int) -> FaultPlan:
        """Makes no progress until it is cancelled; then it lets go at once."""
        return self._add(Fault(nth, "stall"))

    def wedge(self, nth: int, seconds: float) -> FaultPlan:
        """Makes no progress, and lets go only `seconds` after its cancel: hardware that cannot recall an operation."""
        return self._add(Fault(nth, "wedge", delay=seconds))

    def die(self, nth: int) -> FaultPlan:
        """The process kills itself (SIGKILL) when that transfer is posted."""
        return self._add(Fault(nth, "die"))

    def _add(self, fault: Fault) -> FaultPlan:
        assert fault.action in FAULT_ACTIONS
        self._faults.append(fault)
        return self

    def __iter__(self) -> Iterator[Fault]:
        return iter(self._faults)

    def __repr__(self) -> str:
        return f"<FaultPlan of {len(self._faults)} faults>"
