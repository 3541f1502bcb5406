# SPDX-License-Identifier: Apache-2.0
"""Posts of one row: the short way through C, and the long one that takes over, do the same."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import threading
import weakref
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest

import aiohixl
from aiohixl import _core
from aiohixl.npu import moment

Pair = tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]
SMALL = 4096  # ends within its post


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way each post went."""
    seen: list[str] = []
    plain = aiohixl.Peer._post_now

    def post_now(self: aiohixl.Peer, *args: Any, **options: Any) -> aiohixl.Transfer:
        seen.append("long")
        return plain(self, *args, **options)

    monkeypatch.setattr(aiohixl.Peer, "_post_now", post_now)
    return seen


async def spans(pair: Pair, nbytes: int) -> tuple[aiohixl.Region, aiohixl.RemoteRegion]:
    a, b, peer = pair
    await b.allocate(nbytes, "target")
    return await a.allocate(nbytes), await peer.region("target")


@pytest.mark.parametrize("nbytes", [SMALL, 1 << 20])
async def test_both_ways_do_the_same(pair: Pair, ways: list[str], nbytes: int) -> None:
    peer = pair[2]
    here, there = await spans(pair, nbytes)
    seen = []
    scopes: list[contextlib.AbstractAsyncContextManager[Any]] = [contextlib.nullcontext(), peer.scope()]
    for number, scope in enumerate(scopes):
        np.frombuffer(memoryview(here), np.uint8)[:] = number + 1
        async with scope:
            transfer = peer.write(here[8:], there[8:])
            assert await transfer is transfer
            await peer.read(here[:8], there[8:16])
        assert bytes(memoryview(here)[:8]) == bytes([number + 1] * 8)
        assert len(ways) == 2 * number
        assert (transfer.done(), transfer.exception(), transfer.quiesced) == (True, None, True)
        assert (transfer.cancel(), transfer.keep) == (False, None)
        assert transfer.elapsed is not None
        assert 0 < transfer.elapsed < 60
        seen.append((repr(transfer), transfer.nbytes, transfer.kind))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("nbytes", [SMALL, 1 << 20])
async def test_one_transfer_awaited_in_every_manner(pair: Pair, ways: list[str], nbytes: int) -> None:
    peer = pair[2]
    here, there = await spans(pair, nbytes)
    transfer = peer.write(here, there)
    assert asyncio.iscoroutine(transfer)
    assert inspect.isawaitable(transfer)
    for _ in range(200):  # some of them give others a turn
        assert await transfer is transfer
    answers = await asyncio.gather(transfer, asyncio.ensure_future(transfer), asyncio.create_task(transfer))
    assert all(answer is transfer for answer in answers)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        tasks = [group.create_task(peer.write(here, there)) for _ in range(3)]
    assert all(task.result().done() for task in tasks)
    step = transfer.__await__()
    assert iter(step) is step
    with pytest.raises(StopIteration) as end:
        next(step)
    assert end.value.value is transfer
    assert ways == []


async def test_others_get_their_turn(pair: Pair) -> None:
    """Awaits that never wait do not keep the loop for themselves."""
    peer = pair[2]
    here, there = await spans(pair, SMALL)
    while not (first := peer.write(here, there)).done():  # its memory is mapped first
        await first
    turns: list[None] = []

    async def others() -> None:
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    for _ in range(6400):
        await peer.write(here, there)
    task.cancel()
    assert 50 <= len(turns) <= 200


@pytest.mark.parametrize("nbytes", [SMALL, 1 << 20])
async def test_posts_from_threads(pair: Pair, ways: list[str], nbytes: int) -> None:
    peer = pair[2]
    here, there = await spans(pair, nbytes)
    made: list[aiohixl.Transfer] = []

    def post() -> None:
        for _ in range(50):
            made.append(peer.post_write(here, there))

    threads = [threading.Thread(target=post) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        await asyncio.sleep(0)
    for transfer in made:
        await transfer
    assert len(made) == 100
    assert ways == []


async def test_whoever_waits_hears_of_posts_from_threads(pair: Pair) -> None:
    """One that ends within its post leaves no record; meanwhile, somebody may have begun to wait for one."""
    a, _, peer = pair
    here, there = await spans(pair, SMALL)
    while not (first := peer.write(here, there)).done():
        await first
    heard: list[None] = []
    after_drain, a.queue.after_drain = a.queue.after_drain, lambda: heard.append(None)
    try:
        thread = threading.Thread(target=lambda: made.append(peer.write_many(here, [0], there, [0], 8)))
        made: list[aiohixl.Transfer] = []
        thread.start()
        thread.join()
        assert made[0].done()
        assert heard == []
        for _ in range(3):
            await asyncio.sleep(0.001)
        assert heard
    finally:
        a.queue.after_drain = after_drain
    await made[0]


async def test_what_somebody_wrote_to_is_refused(pair: Pair) -> None:
    peer = pair[2]
    here, there = await spans(pair, SMALL)
    for offset in (-5, 1 << 70, None, "x"):
        span = there[:8]
        with pytest.raises((OverflowError, TypeError)):
            span.offset = offset  # type: ignore[assignment]
    transfer = peer.write(here, there)
    with pytest.raises((AttributeError, TypeError)):
        transfer._queue = ([],)  # type: ignore[assignment]
    await transfer
    assert peer.inflight == 0


async def test_what_is_special_goes_the_long_way(pair: Pair, ways: list[str]) -> None:
    a, _, peer = pair
    here, there = await spans(pair, SMALL)
    await peer.write(here, there, note=b"it")
    async with peer.scope():
        peer.write(here, there)
    assert len(ways) == 2
    fixed = a.register(bytes(SMALL), access="r")
    await peer.write(fixed, there)
    assert len(ways) == 2
    with pytest.raises(aiohixl.RegionError, match="read-only"):
        peer.read(fixed, there)
    with pytest.raises(aiohixl.RegionError, match="unequal"):
        peer.write(here[1:], there)
    with pytest.raises(aiohixl.RegionError, match="one of the peer second"):
        peer.write(here, here)  # type: ignore[arg-type]
    with pytest.raises(aiohixl.RegionError, match="one of the peer second"):
        peer.write(there, there)  # type: ignore[arg-type]
    for bad in (None, 7, b"x", object(), "nbytes", SMALL, [here]):
        with pytest.raises(aiohixl.RegionError, match="one of the peer second"):
            peer.write(bad, there)  # type: ignore[arg-type]
        with pytest.raises(aiohixl.RegionError, match="one of the peer second"):
            peer.write(here, bad)  # type: ignore[arg-type]


async def test_what_was_posted_is_let_go(pair: Pair) -> None:
    """Neither the peer nor a transfer that has ended keeps memory, or waits for a collection."""
    a, b, peer = pair
    there = await spans(pair, SMALL)
    gc.disable()
    try:
        here = a.register(np.zeros(SMALL, np.uint8))
        await peer.write(here, there[1])
        transfer = peer.write(here, there[1])
        gone, over = weakref.ref(here), weakref.ref(transfer)
        await here.deregister()
        del here
        assert gone() is None
        del transfer
        assert over() is None
    finally:
        gc.enable()
    assert b is not a


async def test_a_failure_that_nobody_saw(pair: Pair, quiet_loop: list[dict[str, Any]]) -> None:
    peer = pair[2]
    here, there = await spans(pair, SMALL)
    transfer = peer.write_many(here, [0, 0], there, [0, 0], 8)  # two rows for the same bytes
    while not transfer.done():
        await asyncio.sleep(0.001)
    text = repr(transfer)
    del transfer
    (context,) = quiet_loop
    quiet_loop.clear()
    assert context["message"] == "a failed Transfer was never awaited"
    assert context["transfer"] == text
    assert isinstance(context["exception"], aiohixl.RegionError)
    for early in (True, False):
        transfer = peer.write_many(here, [0, 0], there, [0, 0], 8)
        if early:
            transfer.detach()
        while not transfer.done():
            await asyncio.sleep(0.001)
        if not early:
            transfer.exception()
        del transfer
    assert quiet_loop == []


async def test_only_transfers_are_posted(pair: Pair) -> None:
    queue, endpoint, scopes = pair[0].queue, pair[2]._endpoint, ContextVar[tuple[()]]("scopes")
    with pytest.raises(TypeError, match="TransferState"):
        _core.Poster(endpoint, queue, scopes, (), object, object, moment, max)  # type: ignore[type-var]
