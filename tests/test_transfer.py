# SPDX-License-Identifier: Apache-2.0
"""Reads and writes between two engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import aiohixl

Start = Callable[..., Coroutine[Any, Any, aiohixl.Engine]]

Pair = tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]


def fill(nbytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


async def test_write_into_allocated_memory(pair: Pair) -> None:
    a, b, peer = pair
    target = await b.allocate(1 << 20, "target")
    source = await a.allocate(1 << 20)
    np.frombuffer(memoryview(source), np.uint8)[:] = fill(1 << 20)
    transfer = peer.write(source, await peer.region("target"))
    assert await transfer is transfer
    assert transfer.done()
    assert transfer.nbytes == 1 << 20
    assert transfer.quiesced
    assert transfer.elapsed is not None
    assert bytes(target) == bytes(source)


async def test_foreign_memory_both_ways(pair: Pair) -> None:
    a, b, peer = pair
    there, here = fill(100_001, 2), np.zeros(100_001, np.uint8)
    b.register(there, "there")
    local = a.register(here)
    remote = await peer.region("there")
    await peer.read(local, remote)
    assert (here == there).all()
    here[::-1] = there
    await peer.write(local[1:], remote[1:])
    assert (there[1:] == here[1:]).all()
    assert there[0] == here[-1]


async def test_views_of_allocated_memory_stay_mapped(pair: Pair) -> None:
    a, b, peer = pair
    memory = await b.allocate(1 << 16)
    view = np.frombuffer(memoryview(memory), np.uint8)[4097:9001]
    b.register(view, "view")
    remote = await peer.region("view")
    assert "mapped" in peer.route(a.register(np.zeros(4)), remote).reason
    data = fill(view.nbytes)
    await peer.write(a.register(data), remote)
    assert (view == data).all()
    assert not np.frombuffer(memoryview(memory), np.uint8)[:4097].any()
    assert not np.frombuffer(memoryview(memory), np.uint8)[9001:].any()


async def test_a_note_follows_its_bytes(pair: Pair) -> None:
    a, b, peer = pair
    target = await b.allocate(8 << 20, "target")
    source = a.register(fill(8 << 20))
    await peer.write(source, await peer.region("target"), note=b"req", topic="kv")
    note = await b.notes("kv").get()
    assert (note.payload, note.topic, note.aborted, note.peer.name) == (b"req", "kv", False, "a")
    assert bytes(target) == bytes(source)


async def test_unequal_lengths(pair: Pair) -> None:
    a, b, peer = pair
    await b.allocate(64, "target")
    with pytest.raises(aiohixl.RegionError, match="32 bytes here, 64 bytes"):
        peer.write(a.register(fill(32)), await peer.region("target"))


async def test_idle_mappings_are_dropped_and_come_back(start: Start) -> None:
    a, b = await start("a", max_mappings=8), await start("b")
    peer = await a.connect(b.address)
    source = await a.allocate(4096)
    data = fill(4096)
    np.frombuffer(memoryview(source), np.uint8)[:] = data
    targets = [await b.allocate(4096, f"r{i}") for i in range(40)]
    remotes = [await peer.region(f"r{i}") for i in range(40)]
    for _ in range(3):
        for i, remote in enumerate(remotes):
            await peer.write(source[i:], remote[i:])
    async with asyncio.timeout(10):  # a native thread unmaps them
        while a.stats()["mappings"] > 8:
            await asyncio.sleep(0)
    for i, target in enumerate(targets):
        assert (np.frombuffer(memoryview(target), np.uint8)[i:] == data[i:]).all()
        assert not np.frombuffer(memoryview(target), np.uint8)[:i].any()
