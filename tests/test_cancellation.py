# SPDX-License-Identifier: Apache-2.0
"""Contract 3, the caller's side: when the await of a transfer ends, however, its memory is the caller's again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import Start
from ground import NBYTES, Ground, noise

import aiohixl
from aiohixl.testing import FaultPlan

Pair = tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]
OFFSETS = [0, 8192, 16384]


async def faulty(start: Start, plan: FaultPlan, **options: Any) -> Ground:
    """A ground whose sending engine plays `plan`."""
    a, b = await start("a", faults=plan, **options), await start("b")
    return await Ground(a, b, await a.connect(b.address)).prepare()


def overwrite(ground: Ground) -> None:
    """The caller reuses its memory: from here on, none of these bytes may reach the target, nor may any here change."""
    ground.here[:] = ground.here_model[:] = noise(NBYTES, 99)


Post = Callable[[Ground], aiohixl.Transfer]
POSTS: dict[str, Post] = {
    "write": lambda g: g.peer.write(g.source, g.remote),
    "write with note": lambda g: g.peer.write(g.source, g.remote, note=b"n", topic="t"),
    "read": lambda g: g.peer.read(g.source, g.remote),
    "write_many": lambda g: g.peer.write_many(g.source, OFFSETS, g.remote, OFFSETS[::-1], 4096),
    "read_many": lambda g: g.peer.read_many(g.source, OFFSETS, g.remote, OFFSETS[::-1], [1, 4096, 8192]),
}


async def parked_on(what: Any) -> asyncio.Task[Any]:
    """A task that awaits `what` and has begun to."""

    async def wait() -> Any:
        return await what

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def cancelled(task: asyncio.Task[Any]) -> None:
    assert task.cancel()
    async with asyncio.timeout(20):
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("post", POSTS.values(), ids=POSTS)
async def test_contract_03_cancelled_transfer_leaves_memory_alone(start: Start, post: Post) -> None:
    ground = await faulty(start, FaultPlan().stall(0))
    transfer = post(ground)
    await cancelled(await parked_on(transfer))
    overwrite(ground)
    assert transfer.done()
    assert transfer.quiesced
    assert isinstance(transfer.exception(), aiohixl.TransferAbortedError)
    assert transfer.nbytes == 0
    assert ground.source.quarantined == ()
    await ground.still_good()


@pytest.mark.parametrize("kind", ["write", "read"])
async def test_contract_03_cancelled_kv_transfer_leaves_memory_alone(start: Start, kind: str) -> None:
    ground = await faulty(start, FaultPlan().stall(0))
    there = [noise(8 * 512, seed).reshape(8, 512) for seed in (1, 2)]
    here = [noise(8 * 512, seed).reshape(8, 512) for seed in (3, 4)]
    before = [array.copy() for array in (*here, *there)]
    await ground.b.register_kv(there)
    cache = await ground.a.register_kv(here)
    await ground.peer.kv()
    call = ground.peer.write_kv if kind == "write" else ground.peer.read_kv
    await cancelled(await parked_on(call(cache, [1, 2], [5, 0])))
    for array, model in zip((*here, *there), before, strict=True):
        assert np.array_equal(array, model)
    await call(cache, [1, 2], [5, 0])
    for mine, theirs in zip(here, there, strict=True):
        assert np.array_equal(mine[[1, 2]], theirs[[5, 0]])
    await ground.still_good()


async def test_contract_02_cancelled_write_tells_the_receiver(start: Start) -> None:
    ground = await faulty(start, FaultPlan().stall(0))
    await cancelled(await parked_on(ground.peer.write(ground.source, ground.remote, note=b"n", topic="t")))
    note = await ground.b.notes("t").get()
    assert (note.payload, note.aborted) == (b"n", True)
    await ground.still_good()


@pytest.mark.parametrize("post", POSTS.values(), ids=POSTS)
async def test_contract_03_cancelled_before_its_first_step(start: Start, post: Post) -> None:
    ground = await faulty(start, FaultPlan().stall(0))
    transfer = post(ground)
    task = asyncio.get_running_loop().create_task(transfer)
    await cancelled(task)
    overwrite(ground)
    assert transfer.quiesced
    await ground.still_good()


async def test_contract_03_group_cancelled_before_its_first_step(start: Start) -> None:
    ground = await faulty(start, FaultPlan().stall(0).stall(1))
    transfers = [ground.peer.write(ground.source, ground.remote) for _ in range(2)]

    async def grouped() -> None:
        async with asyncio.TaskGroup() as group:
            for transfer in transfers:
                group.create_task(transfer)
            raise RuntimeError("before either has run")

    with pytest.raises(ExceptionGroup):
        await grouped()
    overwrite(ground)
    assert all(t.quiesced for t in transfers)
    await ground.still_good()


@pytest.mark.parametrize("ended", ["done", "failed"])
async def test_contract_03_task_of_an_ended_transfer_cancelled_before_its_first_step(start: Start, ended: str) -> None:
    ground = await faulty(start, FaultPlan().fail(0) if ended == "failed" else FaultPlan())
    transfer = ground.peer.write(ground.source, ground.remote)
    while not transfer.done():
        await asyncio.sleep(0)
    assert (transfer.exception() is not None) == (ended == "failed")
    for _ in range(200):  # a done transfer gives other tasks a turn now and then: meet that case as well
        task = asyncio.get_running_loop().create_task(transfer)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not transfer._drivers, "a task that has ended is still referenced"
    if ended == "done":
        ground.model[:] = ground.here
    await ground.still_good()


async def test_contract_03_cancelled_twice(start: Start) -> None:
    ground = await faulty(start, FaultPlan().wedge(0, 0.5), cancel_grace=10.0)
    transfer = ground.peer.write(ground.source, ground.remote)
    task = await parked_on(transfer)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()  # it waits until the native side has let go
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    await cancelled(task)
    overwrite(ground)
    assert transfer.quiesced
    await ground.still_good()


@pytest.mark.parametrize("how", ["timeout", "wait_for"])
async def test_contract_03_timeout_frees_the_memory(start: Start, how: str) -> None:
    ground = await faulty(start, FaultPlan().stall(0))
    transfer = ground.peer.write(ground.source, ground.remote)

    async def limited() -> None:
        async with asyncio.timeout(0.02):
            await transfer

    with pytest.raises(TimeoutError):
        await (limited() if how == "timeout" else asyncio.wait_for(transfer, 0.02))
    overwrite(ground)
    assert transfer.quiesced
    await ground.still_good()


async def test_contract_03_cancelled_while_parked(start: Start) -> None:
    ground = await faulty(start, FaultPlan().stall(0), peer_depth=1)
    held = ground.peer.write(ground.source, ground.remote)
    middle = ground.peer.write(ground.source[0:512], ground.remote[0:512], note=b"parked", topic="t")
    last = ground.peer.write(ground.source[0:64], ground.remote[64:128])
    assert ground.a.stats()["parked"] == 2
    await cancelled(await parked_on(middle))
    assert middle.quiesced
    await cancelled(await parked_on(held))
    note = await ground.b.notes("t").get()
    assert (note.payload, note.aborted) == (b"parked", True)
    await last
    ground.model[64:128] = ground.here[0:64]
    await ground.still_good()


async def test_contract_03_parked_transfer_recalled_by_another_thread(start: Start) -> None:
    ground = await faulty(start, FaultPlan().stall(0), peer_depth=1)
    held = ground.peer.write(ground.source, ground.remote)
    parked = ground.peer.write(ground.source, ground.remote)
    asyncio.get_running_loop().set_debug(True)  # calls from the wrong thread are errors then
    assert await asyncio.to_thread(parked.cancel)
    with pytest.raises(aiohixl.TransferAbortedError):
        await parked
    assert await asyncio.to_thread(held.cancel)
    with pytest.raises(aiohixl.TransferAbortedError):
        await held
    assert not held.cancel()
    await asyncio.get_running_loop().shutdown_default_executor()
    await ground.still_good()


async def test_contract_02_parked_write_that_cannot_be_posted_tells_the_receiver(start: Start) -> None:
    ground = await faulty(start, FaultPlan().stall(0), peer_depth=1)
    gone = ground.a.register(noise(512))
    held = ground.peer.write(ground.source, ground.remote)
    parked = ground.peer.write(gone, ground.remote[0:512], note=b"n", topic="t")
    await gone.deregister()
    held.cancel()
    with pytest.raises(aiohixl.RegionError):
        await parked
    with pytest.raises(aiohixl.TransferAbortedError):
        await held
    note = await ground.b.notes("t").get()
    assert (note.payload, note.aborted) == (b"n", True)
    await ground.still_good()


@pytest.mark.parametrize("memory", ["allocated", "foreign"])
@pytest.mark.parametrize("kind", ["write", "read"])
async def test_contract_03_cancelled_in_mid_copy(start: Start, memory: str, kind: str) -> None:
    # One thread copies, so that the loop has a core of its own to meet it half way.
    a, b = await start("a", copy_threads=1), await start("b")
    peer = await a.connect(b.address)
    nbytes = 128 << 20
    there: Any = b.allocate(nbytes) if memory == "allocated" else np.zeros(nbytes, np.uint8)
    here: Any = a.allocate(nbytes) if memory == "allocated" else np.zeros(nbytes, np.uint8)
    remote_memory, local_memory = np.frombuffer(memoryview(there), np.uint8), np.frombuffer(memoryview(here), np.uint8)
    b.register(remote_memory, "there")
    local, remote = a.register(local_memory), await peer.region("there")
    source, target = (local_memory, remote_memory) if kind == "write" else (remote_memory, local_memory)
    call = peer.write if kind == "write" else peer.read
    target[:] = 0xFF
    await call(local, remote)  # mapped and populated: from here on a copy begins at once
    half_way = 0
    for _ in range(50):
        source[:], target[:] = 1, 0
        task = await parked_on(call(local, remote))
        async with asyncio.timeout(20):
            while not target[0] and not task.done():
                await asyncio.sleep(0)
        if not task.cancel():
            continue  # it was faster than we were
        with pytest.raises(asyncio.CancelledError):
            await task
        if kind == "write":
            source[:] = 2  # it is ours again
        else:
            target[target == 0] = 3
        after = target.copy()
        half_way += 0 < int(np.count_nonzero(after == 1)) < nbytes
        await peer.write(local[0:1], remote[0:1])  # behind it on the same path
        after[0] = target[0] = source[0]
        assert np.array_equal(target, after), "bytes moved after the await had ended"
        assert not (target[1:] == 2).any()
        if half_way == 2:
            break
    assert half_way, "no copy could be met half way"
    source[:] = noise(nbytes, 5)
    await call(local, remote)
    assert np.array_equal(source, target)


async def test_contract_03_timeout_races_completion(pair: Pair) -> None:
    a, b, peer = pair
    nbytes = 1 << 20
    there, here = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    b.register(there, "there")
    local, remote = a.register(here), await peer.region("there")
    dice = random.Random(3)
    ends = {"done": 0, "timeout": 0}
    for value in range(1, 251):
        here[:] = value
        with_task = dice.random() < 0.5
        try:
            async with asyncio.timeout(dice.uniform(0.0, 0.0015)):
                transfer = peer.write(local, remote)
                await (asyncio.ensure_future(transfer) if with_task else transfer)
        except TimeoutError:
            ends["timeout"] += 1
        else:
            ends["done"] += 1
            assert (there == value).all()
        here[:] = 255
        await peer.write(local[0:1], remote[0:1])
        assert there[0] == 255
        assert not (there[1:] == 255).any(), "bytes written after the await had ended were sent"
        there[0] = 0
    assert ends["timeout"]
    await peer.write(local, remote)
    assert (there == 255).all()
