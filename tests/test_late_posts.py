# SPDX-License-Identifier: Apache-2.0
"""Posts that are half made, or parked, when what they belong to ends."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import aiohixl
from aiohixl.scope import scoped
from aiohixl.testing import FaultPlan

Pair = tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]
Start = Callable[..., Coroutine[Any, Any, aiohixl.Engine]]


class SlowThread:
    """A thread that has begun a post, and ends it when told."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run, call))

    async def begin(self) -> None:
        self._thread.start()
        async with asyncio.timeout(20):
            while not self.begun.is_set():
                await asyncio.sleep(0)

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as exc:
            self.error = exc

    def wait(self) -> None:
        self.begun.set()
        assert self.go_on.wait(20)

    def join(self) -> None:
        self._thread.join(20)


async def test_contract_03_a_stream_waits_for_the_post_that_a_thread_has_begun(pair: Pair) -> None:
    a, b, peer = pair
    there = np.zeros((4, 64), np.uint8)
    await b.register_kv([there])
    cache = await a.register_kv([np.full((4, 64), 7, np.uint8)])
    await peer.kv()
    stream = peer.stream_kv(cache, [0], [0], note=b"req")
    post_layer = stream._post_layer

    def slowly(layer: int, after: object) -> aiohixl.Transfer:
        thread.wait()
        return post_layer(layer, after)

    stream._post_layer = slowly
    thread = SlowThread(lambda: stream.post(0))

    async def leave_while_it_posts() -> None:
        async with stream:
            await thread.begin()
            asyncio.get_running_loop().call_later(0.01, thread.go_on.set)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await leave_while_it_posts()
    assert thread.error is None
    assert stream.transfers[0].done(), "the post was not waited for"
    assert (await b.notes().get()).aborted
    there[:] = 9  # the receiver reuses the block
    await peer.notify(b"fence", topic="fence")
    assert (there == 9).all()
    with pytest.raises(aiohixl.ConfigError, match="has ended"):
        stream.post(0)
    with pytest.raises(aiohixl.ConfigError, match="entered once"):
        async with stream:
            pass
    thread.join()


async def test_contract_14_a_scope_waits_for_the_post_that_a_thread_has_begun(pair: Pair) -> None:
    a, b, peer = pair
    target = await b.allocate(64, "target")
    source = await a.allocate(64)
    remote = await peer.region("target")

    def slowly() -> aiohixl.Transfer:
        thread.wait()
        return peer.write(source, remote)

    async with peer.scope() as scope:
        thread = SlowThread(lambda: scoped(peer, slowly))
        await thread.begin()
        asyncio.get_running_loop().call_later(0.01, thread.go_on.set)
    assert thread.error is None
    assert scope.transfers
    assert all(transfer.done() for transfer in scope.transfers)
    assert bytes(target) == bytes(source)
    thread.join()


async def test_contract_03_a_parked_write_has_the_permission_of_its_post(start: Start) -> None:
    a, b = await start("a", peer_depth=1, faults=FaultPlan().stall(0)), await start("b")
    peer = await a.connect(b.address)
    target = await b.allocate(4096, "target")
    source = await a.allocate(4096)
    np.frombuffer(memoryview(source), np.uint8)[:] = 5
    remote = await peer.region("target")
    first = peer.write(source, remote)
    parked = peer.write(source, remote)
    assert a.stats()["parked"] == 1
    await target.revoke()
    target.grant()
    await b.peers["a"].notify(b"granted")
    await a.notes().get()
    first.cancel()
    with pytest.raises(aiohixl.TransferAbortedError):
        await first
    with pytest.raises(aiohixl.RemoteAccessError):
        await parked
    assert not np.frombuffer(memoryview(target), np.uint8).any()
    await peer.write(source, remote)
    assert bytes(target) == bytes(source)


async def test_contract_07_after_window_nothing_parks(start: Start) -> None:
    a, b = await start("a", queue_depth=16, peer_depth=4), await start("b")
    peer = await a.connect(b.address)
    await b.allocate(1 << 20, "target")
    source, remote = await a.allocate(1 << 20), await peer.region("target")
    transfers = []
    for _ in range(200):
        await peer.window()
        transfers.append(peer.write(source, remote))
        assert a.stats()["parked"] == 0
    await aiohixl.wait_all(transfers)


async def test_a_transfer_is_awaited_on_its_own_loop(start: Start) -> None:
    a, b = await start("a", faults=FaultPlan().stall(0)), await start("b")
    peer = await a.connect(b.address)
    await b.allocate(64, "target")
    transfer = peer.write(await a.allocate(64), await peer.region("target"))
    seen: list[BaseException] = []

    async def elsewhere() -> None:
        await transfer

    def run() -> None:
        try:
            asyncio.run(elsewhere())
        except BaseException as exc:
            seen.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        await asyncio.sleep(0)
    thread.join()
    assert isinstance(seen[0], aiohixl.ClosedError)
    transfer.cancel()
    with pytest.raises(aiohixl.TransferAbortedError):
        await transfer


async def test_contract_03_a_coroutine_thrown_away_leaves_the_others_in_charge(start: Start) -> None:
    a, b = await start("a", faults=FaultPlan().stall(0)), await start("b")
    peer = await a.connect(b.address)
    await b.allocate(64, "target")
    transfer = peer.write(await a.allocate(64), await peer.region("target"))

    async def waits() -> None:
        await transfer

    thrown = waits()
    thrown.send(None)
    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    thrown.close()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert transfer.done()
    assert transfer.quiesced


async def test_one_bad_callback_costs_no_completion(pair: Pair, quiet_loop: list[dict[str, Any]]) -> None:
    a, b, peer = pair
    await b.allocate(1 << 20, "target")
    source, remote = a.register(np.zeros(1 << 20, np.uint8)), await peer.region("target")
    transfers = [peer.write(source[:1000], remote[:1000]) for _ in range(50)]
    bad = transfers[20]

    class Broken:
        def settle(self, record: object) -> None:
            bad.settle(record)  # type: ignore[arg-type]
            raise ZeroDivisionError

    a.queue.sinks[bad.token] = Broken()
    await aiohixl.wait_all(transfers)
    assert isinstance(quiet_loop.pop()["exception"], ZeroDivisionError)
