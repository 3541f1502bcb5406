# SPDX-License-Identifier: Apache-2.0
"""Contract 13: close always closes, whatever is under way, however often it is asked, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import ctypes
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import native_threads
from processes import child

import aiohixl
from aiohixl.registry import _stuck_memory
from aiohixl.testing import FaultPlan

Start = Callable[..., Coroutine[Any, Any, aiohixl.Engine]]

MIB = 1 << 20


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this test's sockets, and nobody else's."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "aiohixl"


async def works(engine: aiohixl.Engine, start: Start) -> None:
    """The other side of what was closed is in order: it serves a new peer."""
    target = await engine.allocate(MIB, "after")
    other = await start("other")
    peer = await other.connect(engine.address)
    await peer.write(other.register(np.full(MIB, 8, np.uint8)), await peer.region("after"), note=b"after")
    inbox = engine.notes()
    while (await inbox.get()).payload != b"after":
        pass
    assert set(bytes(target)) == {8}


@pytest.mark.parametrize("how", ["close", "impatient", "abort"])
async def test_contract_13_with_everything_under_way(start: Start, how: str) -> None:
    """Held by faults, parked, being copied, waiting for notes, for names, for a connection."""
    plan = FaultPlan().stall(0).wedge(1, 60.0).delay(2, 60.0)
    a, b = await start("a", faults=plan, peer_depth=4, cancel_grace=0.1), await start("b")
    await b.allocate(64 * MIB, "target")
    there = np.zeros(MIB, np.uint8)
    b.register(there, "foreign")
    peer = await a.connect(b.address)
    remote, foreign = await peer.region("target"), await peer.region("foreign")
    source = a.register(np.ones(64 * MIB, np.uint8))
    held = a.register(np.ones(MIB, np.uint8), "held")
    pending = [peer.write(held, remote[:MIB]) for _ in range(3)]
    pending += [peer.write(source, remote), peer.read(source[:MIB], foreign)]
    pending += [peer.notify(b"n") for _ in range(290)]
    pending += [peer.write(source[:MIB], remote[:MIB], note=b"parked") for _ in range(20)]
    coroutines: list[Coroutine[Any, Any, Any]] = [peer.region("never"), peer.kv("never"), held.deregister()]
    coroutines += [a.notes().get(), a.events().get()]
    waits = [asyncio.create_task(coroutine) for coroutine in coroutines]
    await asyncio.sleep(0)
    assert a.stats()["parked"] > 0
    if how == "abort":
        a.abort()
    else:
        await a.close(timeout=0.05 if how == "close" else 0.0)
    assert sum("hx-control" in name for name in native_threads()) == 1  # b's
    async with asyncio.timeout(10):
        results = await asyncio.gather(*pending, *waits, return_exceptions=True)
    kinds = {type(r) for r in results}
    assert kinds <= {
        aiohixl.Transfer,
        aiohixl.TransferAbortedError,
        aiohixl.ClosedError,
        aiohixl.RegionPinnedError,  # the region that was being deregistered
        aiohixl.Event,  # told of it
        type(None),
    }, kinds
    assert aiohixl.TransferAbortedError in kinds or aiohixl.ClosedError in kinds
    assert not isinstance(results[0], aiohixl.Transfer)
    await works(b, start)


async def test_contract_13_patience_lets_transfers_end(start: Start) -> None:
    a, b = await start("a", faults=FaultPlan().delay(0, 0.2)), await start("b")
    target = await b.allocate(MIB, "target")
    peer = await a.connect(b.address)
    transfer = peer.write(a.register(np.full(MIB, 6, np.uint8)), await peer.region("target"), note=b"last")
    await a.close(timeout=60)
    assert transfer.done()
    await transfer
    assert (await b.notes().get()).payload == b"last"
    assert set(bytes(target)) == {6}


async def stalled(start: Start, **options: Any) -> tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Transfer]:
    a, b = await start("a", faults=FaultPlan().stall(0), **options), await start("b")
    await b.allocate(MIB, "target")
    peer = await a.connect(b.address)
    transfer = peer.write(a.allocate(MIB), await peer.region("target"))
    return a, b, transfer


async def test_contract_13_closers_share_one_close(start: Start) -> None:
    a, b, transfer = await stalled(start)
    async with asyncio.TaskGroup() as group:
        closers = [group.create_task(a.close(timeout=0.05)) for _ in range(3)]
        assert not any(c.done() for c in closers)
    await a.close()
    a.abort()
    with pytest.raises(aiohixl.TransferAbortedError):
        await transfer
    await works(b, start)


async def test_contract_13_abort_cuts_a_close_short(start: Start) -> None:
    a, b, transfer = await stalled(start)
    closing = asyncio.create_task(a.close(timeout=600))
    await asyncio.sleep(0)
    a.abort()
    assert "closed" in repr(a)
    with pytest.raises(aiohixl.TransferAbortedError):
        await transfer
    async with asyncio.timeout(10):
        await closing
    await works(b, start)


async def test_contract_13_abort_while_close_joins(start: Start) -> None:
    """Both end the same native threads."""
    for _ in range(20):
        a, b, transfer = await stalled(start)
        closing = asyncio.create_task(a.close(timeout=0.0))
        for _ in range(2):
            await asyncio.sleep(0)
        a.abort()
        with pytest.raises(aiohixl.TransferAbortedError):
            await transfer
        async with asyncio.timeout(10):
            await closing
        await b.close()


@pytest.mark.parametrize("times", [1, 3])
async def test_contract_13_close_cancelled(start: Start, times: int) -> None:
    a, b, transfer = await stalled(start)
    closing = asyncio.create_task(a.close(timeout=0.1))
    for _ in range(times):
        await asyncio.sleep(0)
        closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert "closed" in repr(a)
    with pytest.raises(aiohixl.TransferAbortedError):
        await transfer
    await works(b, start)


def test_contract_13_cancelled_with_every_task_of_its_loop(home: Path) -> None:
    """What `asyncio.run` does at its end reaches the task that closes, too."""
    engines: list[aiohixl.Engine] = []

    async def main() -> None:
        a = await aiohixl.Engine("a", faults=FaultPlan().stall(0)).start()
        b = await aiohixl.Engine("b").start()
        engines.extend((a, b))
        await b.allocate(MIB, "target")
        peer = await a.connect(b.address)
        peer.write(a.allocate(MIB), await peer.region("target")).detach()
        closing = [asyncio.create_task(engine.close(timeout=60)) for engine in engines]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not closing[0].done()

    asyncio.run(main())
    assert all("closed" in repr(engine) for engine in engines)
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("kind", ["read", "write"])
async def test_contract_13_close_with_a_stopped_peer(start: Start, kind: str) -> None:
    """It ends, and says so if the peer may still touch what it had access to."""
    owner = await aiohixl.Engine("owner", cancel_grace=0.05).start()
    await owner.allocate(16 * MIB, "target")
    async with child("peer") as peer:
        await peer.ask("allocate", name="local", nbytes=16 * MIB)
        await peer.ask("connect", address=owner.address)
        await peer.ask("loop", kind=kind, local="local", remote="target")
        note = owner.peers["peer"].notify(b"never read")
        peer.stop()
        async with asyncio.timeout(20):
            (error,) = await asyncio.gather(owner.close(timeout=0.05), return_exceptions=True)
        assert error is None or isinstance(error, aiohixl.RegionPinnedError)
        assert error is None or "stand still" in str(error)
        assert "closed" in repr(owner)
        peer.go_on()
        assert (await peer.ask("looped"))["error"] == "PeerLostError"
        note.detach()
    while _stuck_memory:  # kept for the life of the process otherwise; this peer has gone
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(_stuck_memory.pop()))
    again = await start("again")
    await works(again, start)


async def test_contract_13_an_exception_inside_the_block_comes_out(start: Start) -> None:
    b = await start("b")
    await b.allocate(MIB, "target")
    transfers: list[aiohixl.Transfer] = []

    async def block() -> None:
        async with aiohixl.Engine("a") as a:
            peer = await a.connect(b.address)
            remote = await peer.region("target")
            transfers.extend(peer.write(a.register(np.ones(MIB, np.uint8)), remote) for _ in range(10))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await block()
    for transfer in transfers:
        assert transfer.done()
        await transfer  # the block's end was patient
    await works(b, start)


# ---- before the start and after the end ----


async def test_contract_13_used_before_the_start_and_after_the_end(start: Start) -> None:
    engine, b = aiohixl.Engine("a"), await start("b")
    calls: list[Callable[[], Any]] = [
        lambda: engine.allocate(10),
        lambda: engine.register(bytearray(10)),
        lambda: engine.register_many({"x": bytearray(10)}),
        lambda: engine.register_kv([np.zeros((2, 8), np.uint8)]),
        lambda: engine.connect(b.address),
        engine.notes,
        engine.events,
        engine.stats,
    ]

    async def made(call: Callable[[], Any]) -> None:
        result = call()
        if asyncio.iscoroutine(result):
            await result

    async def all_raise(message: str) -> None:
        for call in calls:
            with pytest.raises(aiohixl.ClosedError, match=message):
                await made(call)

    await all_raise("not started: use `async with`")
    with pytest.raises(aiohixl.ClosedError, match="no address yet"):
        _ = engine.address
    await engine.start()
    with pytest.raises(aiohixl.ClosedError, match="make a new Engine"):
        await engine.start()
    await b.allocate(4096, "target")
    peer = await engine.connect(b.address)
    remote, region = await peer.region("target"), await engine.allocate(4096, "mine")
    await peer.write(region, remote)
    await engine.close()
    await all_raise("is closed")
    with pytest.raises(aiohixl.ClosedError):
        await engine.start()
    with pytest.raises((aiohixl.ClosedError, aiohixl.TransferAbortedError), match="closed"):
        peer.write(region, remote)
    with pytest.raises((aiohixl.ClosedError, aiohixl.TransferAbortedError), match="closed"):
        peer.notify(b"")
    coroutines = (peer.region("target"), peer.close(), region.revoke(), region.deregister(), peer.window())
    for coroutine in coroutines:
        with pytest.raises(aiohixl.ClosedError):
            await coroutine
    assert bytes(region) == bytes(4096)  # its memory is there as long as its handle
    never = aiohixl.Engine("never")
    await never.close()
    with pytest.raises(aiohixl.ClosedError):
        await never.start()
    await works(b, start)


async def test_contract_13_a_start_that_fails_leaves_nothing(start: Start, home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = aiohixl.Engine("a", address=f"127.0.0.1:{port}")
        with pytest.raises(aiohixl.ConfigError, match=f"port {port}.*in use"):
            await engine.start()
        with pytest.raises(aiohixl.ClosedError):
            engine.stats()
        await engine.close()
    for host, message in (("nowhere.invalid", "resolved"), ("192.0.2.1", "192.0.2.1")):
        engine = aiohixl.Engine("a", address=f"{host}:0")
        with pytest.raises(aiohixl.ConfigError, match=message):
            await engine.start()
        with pytest.raises(aiohixl.ClosedError):
            engine.stats()
        await engine.close()
    engine = aiohixl.Engine("a", rendezvous="http://127.0.0.1:1", join_timeout=0.1)
    with pytest.raises(aiohixl.RendezvousError):
        await engine.start()
    assert "closed" in repr(engine)
    assert not home.exists() or list(home.iterdir()) == []
    await works(await start("good", address=f"127.0.0.1:{port}"), start)
