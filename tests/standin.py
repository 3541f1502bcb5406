# SPDX-License-Identifier: Apache-2.0
"""The stand-in for HIXL: opened, told what to do, asked what it counted; and engines that use it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

import aiohixl

HOME = Path(os.environ.get("AIOHIXL_STANDIN_HOME") or Path(__file__).parent.parent / "build" / "hixl_standin")
LIBRARY = HOME / "lib64"
ADVICE = f"the stand-in for HIXL is not built at {HOME}: `make hixl-standin` builds it (it needs g++)"

#: The kinds of engine that the library has: for each what to tell the stand-in before engines start.
FLAVOURS: dict[str, dict[str, Any]] = {
    "device": {"flavour": "hixl", "placement": "device"},
    "host": {"flavour": "hixl", "placement": "host"},
    "comm": {"flavour": "comm", "finalize_ms": 0},
    "fabric": {"flavour": "fabric"},
}
#: Calls that we never make; counted by the stand-in.
NEVER = ("stale_polls", "sync_calls", "after_finalize")
#: What is left when every engine has been closed.
NOTHING = ("outstanding", "links", "registered", "allocations")

Bytes = npt.NDArray[np.uint8]
StartNpu = Callable[..., Coroutine[Any, Any, aiohixl.Engine]]
PairNpu = Callable[..., Coroutine[Any, Any, tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]]]


class Standin:
    """The stand-in as this process has it."""

    def __init__(self) -> None:
        self.library = str(LIBRARY)
        self._hixl = ctypes.CDLL(str(LIBRARY / "libcann_hixl.so"))
        self._acl = ctypes.CDLL(str(LIBRARY / "libacl_rt.so"))
        self._hixl.hixl_standin_stat.restype = ctypes.c_uint64
        self._acl.hixl_standin_event.restype = ctypes.c_void_p

    def set(self, **knobs: Any) -> None:
        for key, value in knobs.items():
            assert self._hixl.hixl_standin_set(key.encode(), str(value).encode()) == 0, f"no such knob: {key}={value}"

    def stat(self, key: str) -> int:
        value = int(self._hixl.hixl_standin_stat(key.encode()))
        assert value != (1 << 64) - 1, f"no such counter: {key}"
        return value

    def event(self, delay_ms: int) -> int:
        """The handle of an event that is complete after so long."""
        return int(self._acl.hixl_standin_event(ctypes.c_uint32(delay_ms)))

    def destroy_event(self, handle: int) -> None:
        self._acl.aclrtDestroyEvent(ctypes.c_void_p(handle))


_opened: list[Standin] = []


def open_standin() -> Standin:
    """Skips the test where it is not built."""
    if not (LIBRARY / "libcann_hixl.so").exists():
        pytest.skip(ADVICE)
    if not _opened:
        _opened.append(Standin())
    return _opened[0]


@pytest.fixture
def standin() -> Iterator[Standin]:
    """As it is when it is loaded; afterwards nothing was called that must not be, and nothing is left in it."""
    one = open_standin()
    one.set(reset="", reset_stats="")
    yield one
    one.set(reset="")
    assert {key: one.stat(key) for key in NEVER} == dict.fromkeys(NEVER, 0)
    assert {key: one.stat(key) for key in NOTHING} == dict.fromkeys(NOTHING, 0)


@pytest_asyncio.fixture
async def start_npu(standin: Standin) -> AsyncIterator[StartNpu]:
    """``await start_npu("name", 0, **options)``: an engine on that NPU, by HIXL alone; closed after the test."""
    engines: list[aiohixl.Engine] = []

    async def start(name: str, npu_id: int = 0, **options: Any) -> aiohixl.Engine:
        options = {"transports": ["hixl"], "hixl_library": standin.library, "npu_id": npu_id, **options}
        engine = await aiohixl.Engine(name, **options).start()
        engines.append(engine)
        return engine

    yield start
    standin.set(reset="", finalize_ms=0)  # whatever hangs goes on
    for engine in engines:
        await engine.close()
        assert not engine.queue.sinks, "tokens outlived their engine"
        assert engine._core is not None
        assert engine._core.stats()["live_ops"] == 0


@pytest_asyncio.fixture
async def pair_npu(start_npu: StartNpu) -> AsyncIterator[PairNpu]:
    """``await pair_npu(**options)``: engine "a" on NPU 0, engine "b" on NPU 1, and a's peer for b."""

    async def start(**options: Any) -> tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]:
        a, b = await start_npu("a", 0, **options), await start_npu("b", 1, **options)
        return a, b, await a.connect(b.address)

    yield start


def noise(nbytes: int, seed: int = 1) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


async def npu_region(engine: aiohixl.Engine, nbytes: int, name: str = "", fill: Bytes | int = 0) -> aiohixl.Region:
    """NPU memory with these bytes in it."""
    region = await engine.allocate(nbytes, name, device="npu")
    await region.upload(fill if isinstance(fill, np.ndarray) else np.full(nbytes, fill, np.uint8))
    return region


async def bytes_of(region: aiohixl.Region) -> Bytes:
    return np.frombuffer(await region.download(), np.uint8)
