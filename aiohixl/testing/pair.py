# SPDX-License-Identifier: Apache-2.0
"""Two engines that know each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohixl import Engine, Peer
from aiohixl.testing.faults import FaultPlan

__all__ = ["engine_pair"]


@asynccontextmanager
async def engine_pair(faults: FaultPlan | None = None, **options: Any) -> AsyncIterator[tuple[Engine, Engine, Peer]]:
    """Two engines in this process, and the first one's peer for the second. `faults` are the first one's."""
    async with (
        Engine("first", faults=faults or (), **options) as first,
        Engine("second", **options) as second,
    ):
        yield first, second, await first.connect(second.address)
