# SPDX-License-Identifier: Apache-2.0
"""Contracts 4 and 7: one completion for each post; a full queue parks, in order, and nobody starves."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from conftest import Start
from ground import Ground, noise
from test_cancellation import faulty, parked_on

import aiohixl
from aiohixl.testing import FaultPlan

Pair = tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]


@pytest_asyncio.fixture
async def ground(pair: Pair) -> AsyncIterator[Ground]:
    ground = await Ground(*pair).prepare()
    yield ground
    ground.forget()


def resident_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024


class Counting:
    """Stands before an engine's native core and counts the records that each token gets."""

    def __init__(self, engine: aiohixl.Engine) -> None:
        self.core: Any = engine.queue.core
        self.records: Counter[int] = Counter()
        self.rounds: list[int] = []
        engine.queue.core = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    def drain(self) -> tuple[list[Any], bool]:
        records, more = self.core.drain()
        self.rounds.append(len(records))
        self.records.update(record[0] for record in records)
        return records, more


async def test_contract_07_a_hundred_thousand_descriptors_in_one_call(pair: Pair) -> None:
    a, b, peer = pair
    rows, size = 100_000, 96
    order = np.random.default_rng(1).permutation(rows)
    sizes = np.random.default_rng(2).integers(0, size + 1, rows)
    here, there = noise(rows * size, 1), np.zeros(rows * size, np.uint8)
    b.register(there, "there")
    local, remote = a.register(here), await peer.region("there")
    moved = np.arange(size)[None, :] < sizes[:, None]
    expected = np.where(moved, here.reshape(rows, size)[order], 0).ravel()
    await peer.write_many(local, order * size, remote, np.arange(rows) * size, sizes)
    assert np.array_equal(there, expected)
    before = resident_mib()
    for _ in range(10):
        await peer.write_many(local, order * size, remote, np.arange(rows) * size, sizes)
    assert resident_mib() - before < 64
    back = np.zeros_like(there)
    await peer.read_many(a.register(back), np.arange(rows) * size, remote, np.arange(rows) * size, size)
    assert np.array_equal(back, expected)


async def test_contract_07_ten_thousand_transfers_at_once(start: Start) -> None:
    count, size = 10_000, 1024
    plan = FaultPlan([aiohixl.Fault(nth, "delay", delay=1.0) for nth in range(count)])
    a, b = await start("a", faults=plan, peer_depth=count - 1000), await start("b")
    peer = await a.connect(b.address)
    here, there = noise(count * size, 1), np.zeros(count * size, np.uint8)
    b.register(there, "there")
    local, remote = a.register(here), await peer.region("there")
    counting = Counting(a)
    before = resident_mib()
    for round_ in range(3):
        there[:] = 0
        transfers = [
            peer.write(local[i * size : (i + 1) * size], remote[i * size : (i + 1) * size]) for i in range(count)
        ]
        if round_ == 0:  # the plan holds them all
            assert (a.stats()["live_ops"], a.stats()["parked"]) == (count - 1000, 1000)
        tokens = {t.token for t in transfers}
        assert await aiohixl.wait_all(transfers) == transfers
        assert np.array_equal(there, here)
        assert {counting.records[token] for token in tokens} == {1}
        if round_ == 0:
            assert resident_mib() - before < 128
            before = resident_mib()
    assert resident_mib() - before < 64
    stats = a.stats()
    assert stats["posted"] == stats["completed"] == 3 * count
    assert stats["live_ops"] == stats["pending"] == stats["parked"] == 0


@pytest.mark.parametrize("depth", [1, 2, 16])
async def test_contract_07_parked_transfers_go_in_order(start: Start, depth: int) -> None:
    ground = await faulty(start, FaultPlan().stall(0), peer_depth=depth, queue_depth=16)
    held = ground.peer.write(ground.source, ground.remote)
    values = noise(200, 5)
    sources = [ground.a.register(values[i : i + 1]) for i in range(200)]
    # All into the same byte, and each with a note: with a depth of one, the order of completion is the order of posts.
    posted = [
        ground.peer.write(source, ground.remote[7:8], note=i.to_bytes(2, "little")) for i, source in enumerate(sources)
    ]
    # One that has completed in a native thread meanwhile makes room for another before the first one parks.
    assert 0 < ground.a.stats()["parked"] <= 200 - (depth - 1)
    held.cancel()
    await aiohixl.wait_all(posted)
    held.detach()
    inbox = ground.b.notes()
    arrived = [int.from_bytes((await inbox.get()).payload, "little") for _ in range(200)]
    assert sorted(arrived) == list(range(200))
    if depth == 1:
        assert arrived == list(range(200))
        assert ground.memory[7] == values[-1]
    # No transfer overtakes another by more than what was in flight beside it.
    assert all(abs(at - i) < max(2 * depth, 1) for at, i in enumerate(arrived))
    ground.model[7] = ground.memory[7]
    await ground.still_good()


async def test_contract_04_full_queue_off_the_loop(start: Start) -> None:
    ground = await faulty(start, FaultPlan().stall(0).stall(1), peer_depth=2)
    held = [ground.peer.write(ground.source, ground.remote) for _ in range(2)]

    def post() -> aiohixl.Transfer:
        return ground.peer.post_write(ground.source[0:1], ground.remote[0:1], note=b"n", topic="t")

    counting = Counting(ground.a)
    with pytest.raises(aiohixl.QueueFullError, match="2 transfers are in flight") as caught:
        await asyncio.to_thread(post)
    assert isinstance(caught.value, BlockingIOError)
    assert ground.a.stats()["parked"] == 0
    for transfer in held:
        transfer.cancel()
        with pytest.raises(aiohixl.TransferAbortedError):
            await transfer
    await (await asyncio.to_thread(post))
    assert set(counting.records.values()) == {1}
    assert len(counting.records) == 3  # the refused post had no completion
    assert (await ground.b.notes("t").get()).payload == b"n"
    assert len(ground.b.notes("t")) == 0
    ground.model[0] = ground.here[0]
    await asyncio.get_running_loop().shutdown_default_executor()
    await ground.still_good()


async def test_contract_07_window(start: Start) -> None:
    ground = await faulty(start, FaultPlan().stall(0), peer_depth=1)
    await ground.peer.window()  # at once: nothing is parked
    held = ground.peer.write(ground.source, ground.remote)
    await ground.peer.window()
    parked = [ground.peer.write(ground.source[i : i + 1], ground.remote[i : i + 1]) for i in range(5)]
    waiting = await parked_on(ground.peer.window())
    held.cancel()
    await waiting
    assert ground.a.stats()["parked"] == 0
    assert all(t.done() for t in parked[:-1])
    await aiohixl.wait_all(parked)
    held.detach()
    ground.model[0:5] = ground.here[0:5]
    await ground.still_good()


async def test_contract_07_a_short_transfer_does_not_wait_for_a_long_one(pair: Pair) -> None:
    a, b, peer = pair
    big, small = 256 << 20, 64 << 10
    there = await b.allocate(big + small, "there")
    here = await a.allocate(big + small)
    remote = await peer.region("there")
    np.frombuffer(memoryview(here), np.uint8)[:] = 7
    await peer.write(here, remote)
    long = peer.write(here[0:big], remote[0:big])
    short = peer.write(here[big:], remote[big:])
    await aiohixl.wait_all([long, short])
    assert short.elapsed is not None
    assert long.elapsed is not None
    assert short.elapsed < long.elapsed  # both were posted at the same time
    assert (np.frombuffer(memoryview(there), np.uint8) == 7).all()


async def test_contract_07_no_peer_starves_another(start: Start) -> None:
    a, b, c = await start("a"), await start("b"), await start("c")
    busy, other = await a.connect(b.address), await a.connect(c.address)
    size, count = 4 << 20, 64
    for engine in (b, c):
        engine.register(np.zeros(size, np.uint8), "there")
    local = a.register(noise(size))
    crowd_target, target = await busy.region("there"), await other.region("there")
    order: list[str] = []

    async def wait(transfer: aiohixl.Transfer, name: str) -> None:
        await transfer
        order.append(name)

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(wait(busy.write(local, crowd_target), "crowd"))
        group.create_task(wait(other.write(local, target), "other"))
    assert len(order) == count + 1
    # It has its half of the copying from the start, so it cannot be among the last of the crowd.
    assert order.index("other") < count // 2


async def test_contract_07_one_bad_row_moves_nothing(ground: Ground) -> None:
    offsets = np.arange(0, 4096, 64)
    for index, bad in ((5, 1 << 40), (63, 65536 - 63), (0, 65536), (17, (1 << 63) - 1)):
        for side in ("here", "there"):
            wrong = offsets.copy()
            wrong[index] = bad
            here, there = (wrong, offsets) if side == "here" else (offsets, wrong)
            for many in (ground.peer.write_many, ground.peer.read_many):
                with pytest.raises(aiohixl.RegionError, match=rf"row {index}: 64 bytes at offset .*{bad}"):
                    many(ground.source, here, ground.remote, there, 64)
    assert ground.a.stats()["pending"] == 0
    await ground.still_good()


async def test_contract_07_overlapping_rows_move_nothing(ground: Ground) -> None:
    apart, overlapping = [0, 100, 200, 300], [1000, 1050, 3000, 1149]
    with pytest.raises(aiohixl.RegionError, match=r"the same destination bytes.*row 3"):
        await ground.peer.write_many(ground.source, apart, ground.remote, overlapping, [50, 100, 100, 100])
    with pytest.raises(aiohixl.RegionError, match=r"the same destination bytes.*row 3"):
        await ground.peer.read_many(ground.source, overlapping, ground.remote, apart, [50, 100, 100, 100])
    ground.check()
    # Sources may overlap, and rows may touch.
    await ground.peer.write_many(ground.source, overlapping, ground.remote, apart, 100)
    for source, target in zip(overlapping, apart, strict=True):
        ground.model[target : target + 100] = ground.here[source : source + 100]
    await ground.still_good()
