# SPDX-License-Identifier: Apache-2.0
"""Two engines that know each other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohixl import Engine, Peer
from aiohixl.testing.faults import FaultPlan

__all__ = ["engine_pair"]


@asynccontextmanager
async def engine_pair(
    faults: FaultPlan | None = None,
    *,
    first: Mapping[str, Any] | None = None,
    second: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Engine, Engine, Peer]]:
    """Two engines in this process, and the first one's peer for the second. `faults` are the first one's.

    `options` are those of both, `first` and `second` those of one, as in ``first={"npu_id": 0}, second={"npu_id": 1}``.
    """
    async with (
        Engine("first", **{"faults": faults or (), **options, **(first or {})}) as one,
        Engine("second", **{**options, **(second or {})}) as other,
    ):
        yield one, other, await one.connect(other.address)
