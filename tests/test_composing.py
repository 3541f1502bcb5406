# SPDX-License-Identifier: Apache-2.0
"""Contract 14: a Transfer goes wherever an awaitable goes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from conftest import Start
from ground import NBYTES, Ground
from test_cancellation import cancelled, faulty, parked_on

import aiohixl
from aiohixl.testing import FaultPlan

Pair = tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]
PIECE = 4096
DELAYED = FaultPlan([aiohixl.Fault(nth, "delay", delay=0.25) for nth in range(4)])


@pytest_asyncio.fixture
async def ground(start: Start) -> AsyncIterator[Ground]:
    """Its first four transfers take a little while."""
    ground = await faulty(start, DELAYED)
    yield ground
    ground.forget()


def pieces(ground: Ground, count: int) -> list[aiohixl.Transfer]:
    """As many writes of one piece each, from the ends of the source to the beginning of the target."""
    posted = []
    for i in range(count):
        here, there = slice(NBYTES - (i + 1) * PIECE, NBYTES - i * PIECE), slice(i * PIECE, (i + 1) * PIECE)
        posted.append(ground.peer.write(ground.source[here], ground.remote[there]))
        ground.model[there] = ground.here[here]
    return posted


def task_of(transfer: aiohixl.Transfer) -> asyncio.Task[aiohixl.Transfer]:
    return asyncio.get_running_loop().create_task(transfer)


async def test_contract_14_awaited_more_than_once(ground: Ground) -> None:
    (transfer,) = pieces(ground, 1)
    waiters = [await parked_on(transfer) for _ in range(3)]
    assert await transfer is transfer
    assert await asyncio.gather(*waiters) == [transfer] * 3
    assert await transfer is transfer
    assert await transfer is transfer
    await ground.still_good()


async def test_contract_14_a_failure_is_everybodys(start: Start) -> None:
    ground = await faulty(start, FaultPlan().stall(0), stall_timeout=0.1)
    transfer = ground.peer.write(ground.source, ground.remote)
    waiters = [await parked_on(transfer) for _ in range(3)]
    results = await asyncio.gather(*waiters, transfer, return_exceptions=True)
    assert results == [transfer.exception()] * 4
    for _ in range(2):
        with pytest.raises(aiohixl.TransferTimeoutError, match="write of 65536 bytes to peer 'b'"):
            await transfer
    await ground.still_good()


async def test_contract_14_cancelling_one_of_several_ends_only_that(ground: Ground) -> None:
    (transfer,) = pieces(ground, 1)
    one, other, third = await parked_on(transfer), await parked_on(transfer), task_of(transfer)
    await asyncio.sleep(0)
    await cancelled(one)
    await cancelled(third)
    assert not transfer.done()
    assert await other is transfer
    await ground.still_good()


async def test_contract_14_the_last_cancel_cancels_the_transfer(start: Start) -> None:
    ground = await faulty(start, FaultPlan().stall(0))
    transfer = ground.peer.write(ground.source, ground.remote)
    waiters = [await parked_on(transfer), task_of(transfer), await parked_on(transfer)]
    await asyncio.sleep(0)
    for waiter in waiters:
        waiter.cancel()  # all in one round
    ends = await asyncio.gather(*waiters, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    assert transfer.done()
    assert transfer.quiesced
    with pytest.raises(aiohixl.TransferAbortedError):
        await transfer
    await ground.still_good()


async def test_contract_14_whoever_joins_a_cancelled_transfer_hears_of_it(start: Start) -> None:
    ground = await faulty(start, FaultPlan().wedge(0, 0.1), cancel_grace=10.0)
    transfer = ground.peer.write(ground.source, ground.remote)
    first = await parked_on(transfer)
    first.cancel()
    await asyncio.sleep(0)
    with pytest.raises(aiohixl.TransferAbortedError, match="cancelled"):
        await transfer
    with pytest.raises(asyncio.CancelledError):
        await first
    await ground.still_good()


@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
async def test_contract_14_gather_group_wait_and_the_rest(ground: Ground, debug: bool) -> None:
    asyncio.get_running_loop().set_debug(debug)
    a, b, c, d, e, f = pieces(ground, 6)
    assert list(await asyncio.gather(a, b, a)) == [a, b, a]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(t) for t in (c, d)]
    assert [task.result() for task in tasks] == [c, d]
    done, pending = await asyncio.wait([asyncio.ensure_future(e), asyncio.ensure_future(a)])
    assert {task.result() for task in done} == {e, a}
    assert not pending
    assert await asyncio.wait_for(f, 20) is f
    assert await asyncio.shield(f) is f
    assert {await one for one in asyncio.as_completed([a, b, c])} == {a, b, c}
    await ground.still_good()


async def test_contract_14_shield_keeps_it_going(ground: Ground) -> None:
    (transfer,) = pieces(ground, 1)
    await cancelled(await parked_on(asyncio.shield(transfer)))
    assert not transfer.done()
    assert await transfer is transfer
    await ground.still_good()


async def test_contract_14_debug_output_names_the_transfer(ground: Ground) -> None:
    asyncio.get_running_loop().set_debug(True)
    (transfer,) = pieces(ground, 1)
    task = task_of(transfer)
    for text in (repr(transfer), repr(task)):
        assert "write of 4096 bytes to peer 'b'" in text
    assert "pending" in repr(transfer)
    task.get_stack()
    await task
    assert "done" in repr(transfer)
    assert "write of 4096 bytes to peer 'b'" in repr(task)
    await ground.still_good()


async def test_contract_14_wait_all(ground: Ground) -> None:
    transfers = pieces(ground, 6)
    assert await aiohixl.wait_all(iter(transfers)) == transfers
    assert await aiohixl.wait_all([]) == []
    await ground.still_good()


async def test_contract_14_wait_all_raises_the_one_error(start: Start) -> None:
    ground = await faulty(start, FaultPlan().fail(1).delay(2, 0.05))
    transfers = pieces(ground, 3)
    ground.model[PIECE : 2 * PIECE] = ground.memory[PIECE : 2 * PIECE]
    with pytest.raises(aiohixl.TransferError) as caught:
        await aiohixl.wait_all([*transfers, transfers[1]])
    assert caught.value is transfers[1].exception()
    assert all(t.done() for t in transfers), "it ended before all had"
    await ground.still_good()


async def test_contract_14_wait_all_raises_several_as_a_group(start: Start) -> None:
    plan = FaultPlan().fail(0).fail(1, "REMOTE_ACCESS").delay(2, 0.05).wedge(3, 0.3)
    ground = await faulty(start, plan, cancel_grace=0.05)
    transfers = pieces(ground, 4)
    for i in (0, 1, 3):
        ground.model[i * PIECE : (i + 1) * PIECE] = ground.memory[i * PIECE : (i + 1) * PIECE]
    transfers[3].cancel()
    with pytest.raises(ExceptionGroup) as caught:
        await aiohixl.wait_all(transfers)
    assert {type(e) for e in caught.value.exceptions} == {
        aiohixl.TransferError,
        aiohixl.RemoteAccessError,
        aiohixl.TransferAbortedError,
    }
    assert all(t.quiesced for t in transfers), "it ended while one was wedged"
    assert ground.source.quarantined == ()
    await ground.still_good()


async def test_contract_14_wait_all_cancelled_cancels_them_all(start: Start) -> None:
    ground = await faulty(start, FaultPlan().stall(0).stall(1).stall(2))
    transfers = [ground.peer.write(ground.source, ground.remote) for _ in range(3)]
    await cancelled(await parked_on(aiohixl.wait_all(transfers)))
    assert all(t.done() and t.quiesced for t in transfers)
    await ground.still_good()


async def test_contract_14_unseen_failure_is_reported(start: Start, quiet_loop: list[dict[str, Any]]) -> None:
    ground = await faulty(start, FaultPlan([aiohixl.Fault(nth, "fail") for nth in range(5)]))
    ground.peer.write(ground.source, ground.remote)  # nobody awaits it
    awaited = ground.peer.write(ground.source, ground.remote)
    looked_at = ground.peer.write(ground.source, ground.remote)
    collected = ground.peer.write(ground.source, ground.remote)
    ground.peer.write(ground.source, ground.remote).detach()
    with pytest.raises(aiohixl.TransferError):
        await awaited
    with pytest.raises(aiohixl.TransferError):
        await aiohixl.wait_all([collected])
    while ground.a.stats()["pending"]:
        await asyncio.sleep(0)
    assert looked_at.exception() is not None
    del awaited, looked_at, collected
    gc.collect()
    assert [context["message"] for context in quiet_loop] == ["a failed Transfer was never awaited"]
    assert isinstance(quiet_loop[0]["exception"], aiohixl.TransferError)
    assert "write of " in quiet_loop[0]["transfer"]
    quiet_loop.clear()
    await ground.still_good()


async def test_contract_14_scope_waits_for_everything_posted_inside(ground: Ground) -> None:
    async with ground.peer.scope() as scope:
        posted = pieces(ground, 3)
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(pieces, ground, 2))
    assert len(scope.transfers) == 5
    assert all(t.done() and t.quiesced for t in scope.transfers)
    assert posted == scope.transfers[:3]
    pieces(ground, 1)
    assert len(scope.transfers) == 5
    await asyncio.get_running_loop().shutdown_default_executor()
    await ground.peer.notify(b"behind")
    while ground.peer.inflight:
        await asyncio.sleep(0)
    await ground.still_good()


async def test_contract_14_scope_raises_what_failed_inside(start: Start) -> None:
    ground = await faulty(start, FaultPlan().fail(0).delay(1, 0.05))
    with pytest.raises(aiohixl.TransferError):
        async with ground.peer.scope():
            first, second = pieces(ground, 2)
    assert first.exception() is not None
    assert second.exception() is None
    ground.model[0:PIECE] = ground.memory[0:PIECE]
    await ground.still_good()


@pytest.mark.parametrize("how", ["exception", "cancelled inside", "cancelled while leaving"])
async def test_contract_14_scope_left_otherwise_recalls(start: Start, how: str) -> None:
    ground = await faulty(start, FaultPlan().stall(0).stall(1))
    inside, never = asyncio.Event(), asyncio.Event()
    posted: list[aiohixl.Transfer] = []

    async def work() -> None:
        async with ground.peer.scope():
            posted.append(ground.peer.write(ground.source, ground.remote))
            async with ground.peer.scope():
                posted.append(ground.peer.read(ground.source, ground.remote))
                inside.set()
                if how == "exception":
                    raise KeyError("mine")
                if how == "cancelled inside":
                    await never.wait()

    task = asyncio.create_task(work())
    await inside.wait()
    await asyncio.sleep(0)
    if how == "exception":
        with pytest.raises(KeyError, match="mine"):
            await task
    else:
        await cancelled(task)
    assert all(t.done() and t.quiesced for t in posted)
    await ground.still_good()


async def test_contract_14_scope_is_of_one_peer_and_one_task(start: Start, pair: Pair) -> None:
    ground = await Ground(*pair).prepare()
    other = await ground.a.connect((await start("c")).address)
    begun, go = asyncio.Event(), asyncio.Event()

    async def outsider() -> aiohixl.Transfer:
        begun.set()
        await go.wait()
        return ground.peer.notify(b"outside")

    outside = asyncio.create_task(outsider())
    await begun.wait()
    async with ground.peer.scope() as outer, other.scope() as mine:
        async with ground.peer.scope() as inner:
            note = ground.peer.notify(b"inside")
        assert note.done()
        assert mine.transfers == []
        elsewhere = other.notify(b"elsewhere")
        go.set()
        await (await outside)
    assert [*inner.transfers] == [*outer.transfers] == [note]
    assert mine.transfers == [elsewhere]
    await ground.still_good()


async def test_transfers_posted_from_threads(ground: Ground) -> None:
    def work(first: int) -> list[aiohixl.Transfer]:
        spans = [slice(i * PIECE, (i + 1) * PIECE) for i in range(first, first + 4)]
        return [ground.peer.post_write(ground.source[s], ground.remote[s]) for s in spans]

    lists = await asyncio.gather(*(asyncio.to_thread(work, first) for first in (0, 4, 8)))
    one_read = await asyncio.to_thread(ground.peer.post_read, ground.source[60000:60100], ground.remote[60000:60100])
    await aiohixl.wait_all([t for posted in lists for t in posted])
    await one_read
    ground.model[0 : 12 * PIECE] = ground.here[0 : 12 * PIECE]
    ground.here_model[60000:60100] = ground.model[60000:60100]
    assert np.array_equal(ground.memory, ground.model)
    await asyncio.get_running_loop().shutdown_default_executor()
    await ground.still_good()
