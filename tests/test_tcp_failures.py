# SPDX-License-Identifier: Apache-2.0
"""Processes that die, freeze or run out of descriptors, on the tcp transport; and cancellations."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from conftest import Start
from faults import missing
from ground import Ground, noise
from owned import NEW, view
from processes import Child, child, until

import aiohixl

BIG = 64 << 20
WITHIN = 1.0  # seconds after a SIGKILL: a requirement


def by_tcp(address: str) -> str:
    return next(a for a in address.split(",") if a.startswith("tcp://"))


@contextlib.asynccontextmanager
async def forked(other: Child) -> AsyncIterator[None]:
    """A fork of the child holds what it inherited."""
    pid = await other.ask("fork")
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)


async def good_again(start: Start, engine: aiohixl.Engine) -> None:
    """The engine goes on with another peer."""
    again = await start("again", transports=["tcp"])
    target = await again.allocate(1 << 20, "t")
    peer = await engine.connect(again.address)
    source = engine.register(noise(1 << 20))
    await peer.write(source, await peer.region("t"), note=b"n")
    assert (await again.notes().get()).payload == b"n"
    assert bytes(target) == bytes(source)


async def test_contract_03_what_a_dead_peer_has_sent_is_waited_for(start: Start) -> None:
    """Its process is gone; its last message is in our kernel, and on its way into the memory."""
    engine = await start("here", transports=["tcp"], cancel_grace=0.3)
    with missing(1 << 20) as page:
        target = await engine.register(page.memory, "target")
        async with child(script="tcp_peer.py") as other:
            await other.ask("make", kind="allocated", name="source", nbytes=1 << 20, fill=3)
            await other.ask("connect", address=engine.address.split(",")[0])  # by the unix socket: its process is known
            await other.ask("begin", kind="write", local="source", remote="target")
            await until(page.touched, "its bytes arrive")
            other.kill()
            other.process.wait()
        with pytest.raises(aiohixl.RegionPinnedError):
            await target.revoke()
        page.bring()
        await target.revoke()
        page.memory[:] = 9
        await until(lambda: not engine.peers, "the loss is noticed")
        assert (page.memory == 9).all()
        await target.deregister()
        del target


# ---- what waits ----


def seconds_of(name: str) -> float:
    """Processor time of a native thread of ours, so far."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith(name):
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    raise AssertionError(f"there is no thread {name!r}")


@pytest.mark.parametrize("turn", range(3))
async def test_what_waits_for_its_memory_sleeps(start: Start, turn: int) -> None:
    """Also when what it waits beside has failed meanwhile: the thread does not look for that one's turn for ever."""
    a = await start("a", transports=["tcp"])
    async with child(script="tcp_peer.py") as other:
        for name in ("kept", "gone"):
            await other.ask("make", kind="allocated", name=name, nbytes=4096)
        peer = await a.connect(by_tcp(other.address))
        kept, gone = await peer.region("kept"), await peer.region("gone")
        await peer.write(await a.allocate(4096), kept)
        spent, begun = seconds_of("hx-tcp"), time.monotonic()
        local = a.allocate(1 << 30)  # a while, for a native thread
        failing, waiting = peer.write(local[:4096], gone), peer.write(local[:4096], kept)
        await other.ask("deregister", name="gone")
        with contextlib.suppress(aiohixl.RemoteAccessError):  # the memory may have been quicker
            await failing
        await waiting
        assert seconds_of("hx-tcp") - spent < 0.5 * (time.monotonic() - begun) + 0.05


# ---- death ----


@pytest.mark.parametrize("dialler", ["here", "there"])
@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with-forked-child"])
async def test_contract_08_the_peer_is_killed_in_mid_transfer(start: Start, dialler: str, fork: bool) -> None:
    engine = await start("here", transports=["tcp"])
    async with contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(child(script="tcp_peer.py"))
        await other.ask("make", kind="allocated", name="target", nbytes=BIG, fill=3)
        if dialler == "here":
            peer = await engine.connect(by_tcp(other.address))
        else:
            await other.ask("connect", address=by_tcp(engine.address))
            (found,) = engine.peers.values()
            assert isinstance(found, aiohixl.Peer)
            peer = found
        if fork:
            await stack.enter_async_context(forked(other))
        remote = await peer.region("target")
        source, back = engine.register(np.ones(BIG, np.uint8)), engine.register(np.zeros(BIG, np.uint8))
        await peer.write(source[:4096], remote[:4096])
        transfers = [
            post(local, remote) for _ in range(10) for post, local in ((peer.write, source), (peer.read, back))
        ]
        await transfers[0]
        other.stop()  # the last ones cannot end before the kill: they are more than all buffers hold
        transfers += [peer.write(source, remote), peer.read(back, remote)]
        other.kill()
        async with asyncio.timeout(WITHIN):
            await asyncio.gather(*transfers, return_exceptions=True)
        error = transfers[-1].exception()
        assert type(error) is aiohixl.PeerLostError, repr(error)
        assert all(transfer.quiesced for transfer in transfers)
        view(source)[:] = NEW  # nobody reads it any more
        before = bytes(back)
        await source.deregister()
        await back.deregister()
        assert bytes(back) == before
        await good_again(start, engine)


@pytest.mark.parametrize("kind", ["write", "read"])
@pytest.mark.parametrize("how", ["kill", "close", "abort"])
async def test_contract_08_the_one_that_transfers_ends(start: Start, kind: str, how: str) -> None:
    """What it was writing or reading is its owner's again at once."""
    engine = await start("here", transports=["tcp"])
    target = await engine.allocate(BIG, "target")
    events = engine.events()
    async with child(script="tcp_peer.py") as other:
        await other.ask("make", kind="foreign", name="source", nbytes=BIG, fill=1)
        await other.ask("connect", address=by_tcp(engine.address))
        await other.ask("begin", kind=kind, local="source", remote="target", count=50)
        if kind == "write":
            await until(lambda: bool(view(target)[0] == 1), "its bytes arrive")
        if how == "kill":
            other.kill()
        else:
            other.send(how)
        async with asyncio.timeout(20):
            while (await events.get()).kind != "lost":
                pass
        await target.revoke()  # raises what is pinned
        view(target)[:] = NEW
        await target.deregister()
        assert (view(target) == NEW).all()
    await good_again(start, engine)


@pytest.mark.parametrize("kind", ["write", "read"])
async def test_contract_08_a_frozen_peer(start: Start, kind: str) -> None:
    engine = await start("here", transports=["tcp"], peer_timeout=0.5)
    async with child(script="tcp_peer.py") as other:
        await other.ask("make", kind="allocated", name="target", nbytes=BIG)
        peer = await engine.connect(by_tcp(other.address))
        remote, source = await peer.region("target"), engine.register(np.ones(BIG, np.uint8))
        await peer.write(source[:4096], remote[:4096])
        other.stop()
        transfers = [getattr(peer, kind)(source, remote) for _ in range(4)]
        for transfer in transfers:
            with pytest.raises(aiohixl.PeerLostError):
                await transfer
            assert transfer.quiesced
        await source.deregister()
        await good_again(start, engine)


async def test_contract_03_a_writer_that_freezes(start: Start) -> None:
    """The owner takes its memory back all the same; and when the writer goes on, nothing lands."""
    engine = await start("here", transports=["tcp"], cancel_grace=0.5)
    target = await engine.allocate(BIG, "target")
    async with child(script="tcp_peer.py") as other:
        await other.ask("make", kind="foreign", name="source", nbytes=BIG, fill=1)
        await other.ask("connect", address=by_tcp(engine.address))
        await other.ask("begin", kind="write", local="source", remote="target", count=200)
        await until(lambda: bool(view(target)[0] == 1), "its bytes arrive")
        other.stop()
        await target.revoke()
        view(target)[:] = NEW
        other.go_on()
        outcomes = await other.ask("ended")
        assert set(outcomes) <= {"", "RemoteAccessError", "TransferError"}
        assert outcomes[-1] != ""
        assert (view(target) == NEW).all()


# ---- notes ----


@pytest.fixture(params=[1, 4], ids=["1-stream", "4-streams"])
def streams(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest_asyncio.fixture
async def ground(start: Start, streams: int) -> AsyncIterator[Ground]:
    a = await start("a", transports=["tcp"], streams=streams)
    b = await start("b", transports=["tcp"], streams=streams)
    ground = await Ground(a, b, await a.connect(by_tcp(b.address))).prepare()
    yield ground
    await ground.still_good()
    ground.forget()


async def test_contract_02_notes_follow_their_bytes_in_order(ground: Ground) -> None:
    count, size = 200, 32_000
    target = await ground.b.allocate(count * 64, "numbers")
    remote = await ground.peer.region("numbers")
    numbers = ground.a.register(np.repeat(np.arange(1, count + 1, dtype=np.uint8), 64))
    filler = ground.a.register(np.zeros(size, np.uint8))
    await ground.b.allocate(size, "filler")
    there = await ground.peer.region("filler")
    inbox = ground.b.notes()

    async def sender() -> None:
        for i in range(count):
            ground.peer.write(filler, there).detach()
            await ground.peer.write(numbers[i * 64 : i * 64 + 64], remote[i * 64 : i * 64 + 64], note=bytes([i]))

    task = asyncio.create_task(sender())
    for i in range(count):
        note = await inbox.get()
        assert (note.payload, note.aborted) == (bytes([i]), False), "in the order in which they were awaited"
        assert bytes(target)[i * 64 : i * 64 + 64] == bytes([i + 1]) * 64
    await task


async def test_contract_02_a_cancelled_write_delivers_its_note_as_aborted(ground: Ground) -> None:
    """After its bytes have come to rest."""
    target = await ground.b.allocate(BIG, "big")
    remote = await ground.peer.region("big")
    source = ground.a.register(np.ones(BIG, np.uint8))
    inbox = ground.b.notes()
    transfer = ground.peer.write(source, remote, note=b"gone")
    await until(lambda: bool(view(target)[0] == 1), "its bytes arrive")
    transfer.cancel()
    with pytest.raises(aiohixl.TransferAbortedError):
        await transfer
    note = await inbox.get()
    assert (note.payload, note.aborted) == (b"gone", True)
    view(target)[:] = NEW
    await ground.peer.notify(b"fence")
    assert (await inbox.get()).payload == b"fence"
    assert (view(target) == NEW).all(), "bytes arrived behind the note that said that none will"


# ---- cancellation ----


async def test_contract_03_a_storm_of_cancellations(ground: Ground) -> None:
    """Thousands, small and large, of all ages; each byte is old or new, and the memory is the caller's afterwards."""
    dice = np.random.default_rng(11)
    slot, slots = 1 << 19, 32
    target = await ground.b.allocate(slot * slots, "storm")
    remote = await ground.peer.region("storm")
    source = ground.a.register(np.zeros(slot * slots, np.uint8))
    for value in range(1, 7):
        view(source)[:] = value
        posted = []
        for i in range(500):
            at, size = int(dice.integers(slots)) * slot, int(dice.choice([1, 4096, 40_000, slot]))
            transfer = ground.peer.write(source[at : at + size], remote[at : at + size])
            posted.append(transfer)
            if i % 3 == 0:
                transfer.cancel()
            if i % 50 == 0:
                await asyncio.sleep(0)
                for late in posted[:: int(dice.integers(2, 5))]:
                    late.cancel()
        await asyncio.gather(*posted, return_exceptions=True)
        assert all(transfer.done() and transfer.quiesced for transfer in posted)
        assert {type(t.exception()) for t in posted} <= {type(None), aiohixl.TransferAbortedError}
        view(source)[:] = NEW
        await ground.peer.notify(b"", topic="fence")
        await ground.b.notes("fence").get()
        assert view(target).max() <= value, "bytes that were written after the end of the transfers arrived"
    assert ground.a.stats()["live_ops"] == 0


async def test_contract_07_a_hundred_thousand_rows(ground: Ground) -> None:
    rows, size = 100_000, 96
    order = np.random.default_rng(1).permutation(rows)
    sizes = np.random.default_rng(2).integers(0, size + 1, rows)
    here, there = noise(rows * size, 1), np.zeros(rows * size, np.uint8)
    ground.b.register(there, "rows")
    local, remote = ground.a.register(here), await ground.peer.region("rows")
    moved = np.arange(size)[None, :] < sizes[:, None]
    expected = np.where(moved, here.reshape(rows, size)[order], 0).ravel()
    await ground.peer.write_many(local, order * size, remote, np.arange(rows) * size, sizes)
    assert np.array_equal(there, expected)
    back = np.zeros_like(there)
    await ground.peer.read_many(ground.a.register(back), np.arange(rows) * size, remote, np.arange(rows) * size, size)
    assert np.array_equal(back, expected)


# ---- descriptors ----


@pytest.mark.parametrize("room", [0, 1], ids=["for-none", "for-the-control-link"])
async def test_no_descriptor_is_left_to_accept_with(start: Start, room: int) -> None:
    """Whoever knocks waits until there is one; those who are inside do not feel it."""
    a, c = await start("a", transports=["tcp"]), await start("c", transports=["tcp"])
    async with child(script="tcp_peer.py") as other:
        await other.ask("make", kind="allocated", name="target", nbytes=1 << 20)
        inside = await a.connect(by_tcp(other.address))
        source = a.register(np.ones(1 << 20, np.uint8))
        remote = await inside.region("target")
        await inside.write(source, remote)
        await other.ask("descriptors", more=room)
        knocking = asyncio.create_task(c.connect(by_tcp(other.address)))
        if room:
            peer = await knocking
            transfer = peer.write(c.register(np.full(1 << 20, 2, np.uint8)), await peer.region("target"))
        for _ in range(5):
            await inside.write(source, remote)
        assert not (transfer.done() if room else knocking.done())
        await other.ask("descriptors", more=None)
        if not room:
            peer = await knocking
            transfer = peer.write(c.register(np.full(1 << 20, 2, np.uint8)), await peer.region("target"))
        await transfer
        assert await other.ask("values", name="target") == [2]
