# SPDX-License-Identifier: Apache-2.0
"""Does a loop go on? A ticker on it, and how late its ticks are."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

P99 = 0.005  # seconds: a requirement


def queued() -> float:
    """Seconds for which this thread could have run and had no core: what other work on the machine costs it."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[list[float]]:
    """A 1 ms ticker; afterwards, 99 of 100 ticks came within 5 ms, not counting waits for a core: seconds late."""
    late: list[float] = []
    over = False

    async def tick() -> None:
        while not over:
            waited, begin = queued(), time.perf_counter()
            await asyncio.sleep(0.001)
            late.append(time.perf_counter() - begin - 0.001 - (queued() - waited))

    task = asyncio.create_task(tick())
    try:
        yield late
    finally:
        over = True
        await task
    late.sort()
    p99 = late[int(len(late) * 0.99)]
    print(f"{len(late)} ticks, late by p50 {late[len(late) // 2] * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms")
    assert p99 <= P99
