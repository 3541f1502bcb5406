# SPDX-License-Identifier: Apache-2.0
"""Both event loops for every asynchronous test, and a check after each test that it left nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop
from standin import pair_npu, standin, start_npu

import aiohixl

__all__ = ["pair_npu", "standin", "start_npu"]  # fixtures

# The first uvloop of a process opens a pipe that stays.
_first = uvloop.new_event_loop()
_first.run_until_complete(asyncio.sleep(0))
_first.close()


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def open_descriptors() -> dict[int, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the one that listed the directory
    return found


def native_threads() -> set[str]:
    names = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except OSError:
            continue
        if name.startswith(("hx-", "aiohixl")):
            names.add(f"{name} {task.name}")
    return names


_modules = 0


def collect() -> None:
    """A full collection, of what tests made: with torch imported, the modules alone would take a tenth of a second."""
    global _modules
    gc.collect()
    if len(sys.modules) > _modules + 20:
        _modules = len(sys.modules)
        gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Descriptors, native threads and Python threads are afterwards what they were before."""
    collect()
    before, threads = set(open_descriptors()), set(threading.enumerate())
    assert not native_threads()
    yield
    collect()
    assert not native_threads(), "native threads outlived the test"
    left = {fd: what for fd, what in open_descriptors().items() if fd not in before}
    assert not left, f"descriptors outlived the test: {left}"
    assert set(threading.enumerate()) <= threads, "threads outlived the test"


@pytest_asyncio.fixture(autouse=True)
async def quiet_loop(request: pytest.FixtureRequest) -> AsyncIterator[list[dict[str, Any]]]:
    """The loop's exception handler is not called; a test that provokes it empties the list."""
    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    yield seen
    collect()
    await asyncio.sleep(0)
    assert seen == [], "the loop's exception handler was called"


Start = Callable[..., Coroutine[Any, Any, aiohixl.Engine]]


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    """``await start("name", **options)``: an engine that is closed after the test, with nothing pending left."""
    engines: list[aiohixl.Engine] = []

    async def start_engine(name: str, **options: Any) -> aiohixl.Engine:
        engine = await aiohixl.Engine(name, **options).start()
        engines.append(engine)
        return engine

    yield start_engine
    for engine in engines:
        await engine.close()
        assert not engine.queue.sinks, "tokens outlived their engine"
        assert engine._core is not None
        assert engine._core.stats()["live_ops"] == 0


@pytest_asyncio.fixture
async def pair(start: Start) -> tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]:
    """Engine "a", engine "b", and a's peer for b."""
    a, b = await start("a"), await start("b")
    return a, b, await a.connect(b.address)
