# SPDX-License-Identifier: Apache-2.0
"""Cancelling what is awaited beside transfers: the wait ends, nothing is lost, and the same call works afterwards."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from conftest import Start
from ground import Ground, noise
from processes import until
from test_cancellation import cancelled, faulty, parked_on

import aiohixl
import aiohixl.remote
from aiohixl.notes import Inbox
from aiohixl.testing import FaultPlan

Pair = tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]
WINDOW = 256  # notes of one peer that may stand unread


@pytest_asyncio.fixture
async def ground(pair: Pair) -> AsyncIterator[Ground]:
    ground = await Ground(*pair).prepare()
    yield ground
    ground.forget()


@pytest_asyncio.fixture
async def stalled(start: Start) -> AsyncIterator[Ground]:
    """The first transfer makes no progress."""
    ground = await faulty(start, FaultPlan().stall(0), peer_depth=1)
    yield ground
    ground.forget()


async def fill_window(ground: Ground) -> None:
    await aiohixl.wait_all([ground.peer.notify(str(i).encode()) for i in range(WINDOW)])


async def test_contract_02_cancelled_notify(ground: Ground) -> None:
    await fill_window(ground)
    await cancelled(await parked_on(ground.peer.notify(b"cancelled")))
    inbox = ground.b.notes()
    assert [(await inbox.get()).payload for _ in range(WINDOW)] == [str(i).encode() for i in range(WINDOW)]
    await ground.peer.notify(b"last")
    note = await inbox.get()
    if note.aborted:  # at most once, and never as if it had been sent
        assert note.payload == b"cancelled"
        note = await inbox.get()
    assert (note.payload, note.aborted) == (b"last", False)
    assert len(inbox) == 0
    await ground.still_good()


async def test_contract_02_cancelled_write_whose_note_waits_for_credit(ground: Ground) -> None:
    await fill_window(ground)
    write = ground.peer.write(ground.source, ground.remote, note=b"n", topic="t")
    task = await parked_on(write)
    async with asyncio.timeout(20):
        while not np.array_equal(ground.memory, ground.here):
            await asyncio.sleep(0)
    await cancelled(task)  # its bytes are there, its note is not
    ground.model[:] = ground.here
    for _ in range(WINDOW):
        await ground.b.notes().get()
    note = await ground.b.notes("t").get()
    assert (note.payload, note.aborted) == (b"n", True)
    await ground.still_good()


async def test_contract_02_cancelled_reader_of_notes_loses_none(ground: Ground) -> None:
    inbox = ground.b.notes("t")
    first, second = await parked_on(inbox.get()), await parked_on(inbox.get())
    await cancelled(first)
    await ground.peer.notify(b"1", topic="t")
    assert (await second).payload == b"1"
    await ground.still_good()


async def test_contract_02_reader_cancelled_in_the_round_that_woke_it_loses_none() -> None:
    inbox: Inbox[int] = Inbox()
    first, second = await parked_on(inbox.get()), await parked_on(inbox.get())
    inbox.put(1)
    await cancelled(first)
    assert await second == 1
    assert len(inbox) == 0


@pytest.mark.parametrize("when", ["inside", "while leaving", "while the note waits"])
async def test_contract_02_cancelled_stream(start: Start, when: str) -> None:
    plan = FaultPlan() if when == "while the note waits" else FaultPlan().stall(1)
    ground = await faulty(start, plan)
    here = [noise(4096, seed).reshape(4, 1024) for seed in (1, 2)]
    there = [noise(4096, seed).reshape(4, 1024) for seed in (3, 4)]
    models = [array.copy() for array in there]
    await ground.b.register_kv(there)
    cache = await ground.a.register_kv(here)
    await ground.peer.kv()
    if when == "while the note waits":
        await fill_window(ground)
    reached, never = asyncio.Event(), asyncio.Event()

    async def send() -> None:
        async with ground.peer.stream_kv(cache, [0, 1], [2, 3], note=b"n", topic="t") as stream:
            await stream.post(0)
            transfer = stream.post(1)
            if when == "while the note waits":
                await transfer
            reached.set()
            if when == "inside":
                await never.wait()

    task = asyncio.create_task(send())
    await reached.wait()
    await asyncio.sleep(0)
    await cancelled(task)
    if when == "while the note waits":
        for _ in range(WINDOW):
            await ground.b.notes().get()
        models[1][[2, 3]] = here[1][[0, 1]]
    note = await ground.b.notes("t").get()
    assert (note.payload, note.aborted) == (b"n", True)
    models[0][[2, 3]] = here[0][[0, 1]]
    for array, model in zip(there, models, strict=True):
        assert np.array_equal(array, model)
    await ground.peer.write_kv(cache, [0, 1], [2, 3])
    assert all(np.array_equal(h[[0, 1]], t[[2, 3]]) for h, t in zip(here, there, strict=True))
    await ground.still_good()


async def test_cancelled_connect(ground: Ground, tmp_path: Path) -> None:
    mute = socket.socket(socket.AF_UNIX)
    mute.bind(str(tmp_path / "mute"))
    mute.listen()
    with mute:
        address = f"unix://{tmp_path / 'mute'}"
        await cancelled(await parked_on(ground.a.connect(address)))
        one, other = await parked_on(ground.a.connect(address)), await parked_on(ground.a.connect(address))
        await cancelled(one)
        assert not other.done()  # it waits on for the attempt that they shared
        await cancelled(other)
        # At once again: that is a new attempt, which ends by its own time and not by their cancellation.
        with pytest.raises(aiohixl.PeerUnreachableError):
            await ground.a.connect(address, timeout=0.05)
    assert await ground.a.connect(ground.b.address) is ground.peer
    await ground.still_good()


async def test_an_answer_that_comes_with_the_deadline(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection that nobody owns is given back."""
    a, b = await start("a"), await start("b")
    connector = a._connector_()
    scopes: list[asyncio.Timeout] = []
    timeout_at, answered = asyncio.timeout_at, connector.answered

    def noted(when: float | None) -> asyncio.Timeout:
        scopes.append(timeout_at(when))
        return scopes[-1]

    def answered_late(token: int, peer: aiohixl.remote.RemoteEngine) -> bool:
        scopes[0].reschedule(0)
        return answered(token, peer)

    monkeypatch.setattr(asyncio, "timeout_at", noted)
    monkeypatch.setattr(connector, "answered", answered_late)
    with pytest.raises(aiohixl.PeerUnreachableError, match="no answer in time"):
        await a.connect(b.address.split(",")[0])
    monkeypatch.undo()
    await until(lambda: b.stats()["peers"] == 0, "the peer has heard of it")
    assert a.peers == b.peers == {}


async def test_cancelled_wait_for_a_region(ground: Ground) -> None:
    region = ground.b.allocate(64 << 20, "big")
    await cancelled(await parked_on(region))
    looking = await parked_on(ground.peer.region("late"))
    await cancelled(looking)
    assert await region is region
    late = ground.b.register(noise(100), "late")
    assert (await ground.peer.region("late")).nbytes == late.nbytes
    kv = await parked_on(ground.peer.kv("cache"))
    await cancelled(kv)
    await ground.still_good()


async def test_contract_03_cancelled_revoke_stands(ground: Ground) -> None:
    await cancelled(await parked_on(ground.target.revoke(spans=[(0, 4096)])))
    await ground.target.revoke(spans=[(0, 4096)])
    with pytest.raises(aiohixl.RemoteAccessError):
        await ground.peer.write(ground.source[0:1], ground.remote[4095:4096])
    ground.target.grant(spans=[(0, 4096)])
    async with asyncio.timeout(20):
        while True:  # until the grant has reached the peer
            try:
                await ground.peer.write(ground.source[0:1], ground.remote[4095:4096])
                break
            except aiohixl.RemoteAccessError:
                continue
    ground.model[4095] = ground.here[0]
    await ground.still_good()


async def test_contract_03_cancelled_deregister_can_be_waited_for_again(stalled: Ground) -> None:
    local = stalled.a.register(noise(512), "local")
    held = stalled.peer.write(local, stalled.remote[0:512])
    await cancelled(await parked_on(local.deregister()))
    one, other = await parked_on(local.deregister()), await parked_on(local.deregister())
    await stalled.b.connect(stalled.a.address)  # a round through both native engines
    assert not one.done(), "deregister() returned while a transfer held the memory"
    await cancelled(one)
    assert not other.done()
    held.cancel()
    with pytest.raises(aiohixl.TransferAbortedError):
        await held
    await other
    await local.deregister()
    stalled.a.register(noise(512), "local")  # the name is free again
    await stalled.still_good()


async def test_contract_03_name_reused_after_a_cancelled_deregister_stays_taken(stalled: Ground) -> None:
    local = stalled.a.register(noise(512), "local")
    held = stalled.peer.write(local, stalled.remote[0:512])
    await cancelled(await parked_on(local.deregister()))
    held.cancel()
    successor = stalled.a.register(noise(512), "local")
    await local.deregister()
    with pytest.raises(aiohixl.RegionError, match="registered already"):
        stalled.a.register(noise(512), "local")
    back = await stalled.b.connect(stalled.a.address)
    remote = await back.region("local")
    into = stalled.b.register(np.zeros(512, np.uint8))
    await back.read(into, remote)
    assert bytes(into) == bytes(successor)
    held.detach()
    await stalled.still_good()


async def test_cancelled_window(stalled: Ground) -> None:
    held = stalled.peer.write(stalled.source, stalled.remote)
    parked = stalled.peer.write(stalled.source, stalled.remote)
    await cancelled(await parked_on(stalled.peer.window()))
    waiting = await parked_on(stalled.peer.window())
    held.cancel()
    await waiting
    await parked
    held.detach()
    stalled.model[:] = stalled.here
    await stalled.still_good()


@pytest.mark.parametrize("what", ["peer", "engine"])
async def test_contract_13_cancelled_close_closes(stalled: Ground, what: str) -> None:
    held = stalled.peer.write(stalled.source, stalled.remote)
    parked = stalled.peer.write(stalled.source, stalled.remote)
    close = stalled.peer.close() if what == "peer" else stalled.a.close(timeout=0.1)
    await cancelled(await parked_on(close))
    if what == "peer":
        await stalled.peer.close()
    for transfer in (held, parked):
        with pytest.raises((aiohixl.TransferAbortedError, aiohixl.PeerError, aiohixl.ClosedError)):
            await transfer
        assert transfer.quiesced
    stalled.check()
    assert stalled.peer.is_lost
    with pytest.raises((aiohixl.PeerError, aiohixl.ClosedError, aiohixl.TransferAbortedError)):
        await stalled.peer.write(stalled.source, stalled.remote)
    if what == "peer":
        again = await stalled.a.connect(stalled.b.address)
        await again.write(stalled.source, await again.region("ground"))
        assert np.array_equal(stalled.memory, stalled.here)
