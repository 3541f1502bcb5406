# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed or stopped in mid-transfer over HIXL: contracts 2, 3, 8 and 9 between two processes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from far import npu_child
from owned import NEW, pinned
from standin import FLAVOURS, PairNpu, Standin, StartNpu, bytes_of, npu_region

import aiohixl
from aiohixl import PeerLostError, ProviderError, RegionPinnedError, RemoteAccessError

MIB = 1 << 20
WITHIN = 1.0  # seconds after a SIGKILL: a requirement
FIXED = 0x5200_0000_0000  # an address that nothing else is at
SLOW = {"bandwidth_mbs": 100}


async def under_way(standin: Standin, before: int = 0) -> None:
    """Some bytes have moved."""
    async with asyncio.timeout(20):
        while standin.stat("bytes") <= before:
            await asyncio.sleep(0.001)


async def next_good_write(engine: aiohixl.Engine, source: aiohixl.Region, flavour: str) -> None:
    """To another process under the same name."""
    async with npu_child(knobs=FLAVOURS[flavour]) as other:
        await other.ask("make", kind="npu", name="target", nbytes=MIB)
        peer = await engine.connect(other.address)
        await source.upload(np.full(MIB, 77, np.uint8))
        await peer.write(source[:MIB], await peer.region("target"), note=b"again")
        assert await other.ask("notes", count=1) == ["again"]
        assert await other.ask("values", name="target") == [77]


@pytest.mark.parametrize(("flavour", "kind"), [*((f, "write") for f in FLAVOURS), ("device", "read"), ("host", "read")])
async def test_contract_08_the_receiver_is_killed(
    standin: Standin, start_npu: StartNpu, flavour: str, kind: str
) -> None:
    standin.set(**FLAVOURS[flavour])
    engine = await start_npu("here")
    source = await npu_region(engine, 100 * MIB, fill=3)
    async with npu_child(knobs=FLAVOURS[flavour]) as other:
        await other.ask("make", kind="npu", name="target", nbytes=100 * MIB)
        peer = await engine.connect(other.address)
        remote = await peer.region("target")
        standin.set(**SLOW)
        first = getattr(peer, kind)(source[: 50 * MIB], remote[: 50 * MIB])
        second = getattr(peer, kind)(source[50 * MIB :], remote[50 * MIB :])
        await under_way(standin)
        other.kill()
        async with asyncio.timeout(WITHIN):
            for transfer in (first, second):
                with pytest.raises(PeerLostError, match="'child'"):
                    await transfer
        assert peer.is_lost
        with pytest.raises(PeerLostError):
            peer.write(source, remote)
        for transfer in (first, second):
            await transfer.wait_quiesced()
            assert transfer.quiesced
        assert source.quarantined == ()
    standin.set(bandwidth_mbs=0)
    await next_good_write(engine, source, flavour)
    await source.deregister()


@pytest.mark.parametrize(("flavour", "kind"), [*((f, "write") for f in FLAVOURS), ("device", "read"), ("host", "read")])
async def test_contract_03_the_sender_is_killed(standin: Standin, start_npu: StartNpu, flavour: str, kind: str) -> None:
    """The owner takes its memory back, and it is its own."""
    standin.set(**FLAVOURS[flavour])
    engine = await start_npu("here")
    target, second = await npu_region(engine, 64 * MIB, "target"), await npu_region(engine, 64 * MIB, "second")
    events = engine.events()
    async with npu_child(knobs={**FLAVOURS[flavour], **SLOW}) as other:
        await other.ask("make", kind="npu", name="source", nbytes=64 * MIB, fill=5)
        await other.ask("connect", address=engine.address)
        await other.ask("begin", kind=kind, local="source", remote="target")
        await other.ask("begin", kind=kind, local="source", remote="second")
        await other.ask("moved", nbytes=1)
        other.kill()
        async with asyncio.timeout(WITHIN):
            while (await events.get()).kind != "lost":
                pass
            await target.revoke()
            await second.deregister()
        await target.upload(np.full(64 * MIB, NEW, np.uint8))
    assert ((await bytes_of(target)) == NEW).all()
    target.grant()
    async with npu_child(knobs=FLAVOURS[flavour]) as other:
        await other.ask("make", kind="npu", name="source", nbytes=64 * MIB, fill=6)
        await other.ask("connect", address=engine.address)
        assert await other.ask("transfer", kind="write", local="source", remote="target") == ""
    assert ((await bytes_of(target)) == 6).all()


@pytest.mark.parametrize(("flavour", "how"), [*((f, "revoke") for f in FLAVOURS), ("device", "deregister")])
async def test_contract_03_the_sender_stands_still(
    standin: Standin, start_npu: StartNpu, flavour: str, how: str
) -> None:
    standin.set(**FLAVOURS[flavour])
    engine = await start_npu("here", cancel_grace=0.2)
    target = await npu_region(engine, 32 * MIB, "target")
    events = engine.events()
    async with npu_child(knobs={**FLAVOURS[flavour], **SLOW}, cancel_grace=0.2) as other:
        await other.ask("make", kind="npu", name="source", nbytes=32 * MIB, fill=5)
        await other.ask("connect", address=engine.address)
        await other.ask("begin", kind="write", local="source", remote="target")
        await other.ask("moved", nbytes=1)
        other.stop()
        error = await pinned(getattr(target, how)())
        assert type(error) is RegionPinnedError
        assert error.spans == target.quarantined == ((0, 32 * MIB),)
        other.go_on()
        async with asyncio.timeout(20):
            while (event := await events.get()).kind != "released":
                pass
        assert event.region is target
        assert not target.quarantined
        if how == "revoke":
            await target.upload(np.full(32 * MIB, NEW, np.uint8))
        assert await other.ask("ended") in ("RemoteAccessError", "")  # either it was refused, or it had landed
        await other.ask("knobs", knobs={"bandwidth_mbs": 0})
        if how == "revoke":
            assert await other.ask("transfer", kind="write", local="source", remote="target") == "RemoteAccessError"
            assert ((await bytes_of(target)) == NEW).all()


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_contract_03_revoke_in_mid_transfer(standin: Standin, start_npu: StartNpu, flavour: str) -> None:
    """What is under way lands before it returns; what is behind it in the queue does not notice."""
    standin.set(**FLAVOURS[flavour])
    engine = await start_npu("here", cancel_grace=10.0)
    target, second = await npu_region(engine, 16 * MIB, "target"), await npu_region(engine, 16 * MIB, "second")
    async with npu_child(knobs={**FLAVOURS[flavour], **SLOW}) as other:
        await other.ask("make", kind="npu", name="source", nbytes=16 * MIB, fill=5)
        await other.ask("connect", address=engine.address)
        await other.ask("begin", kind="write", local="source", remote="target")
        await other.ask("begin", kind="write", local="source", remote="second")
        await other.ask("moved", nbytes=1)
        await target.revoke()
        await target.upload(np.full(16 * MIB, NEW, np.uint8))
        await other.ask("knobs", knobs={"bandwidth_mbs": 0})
        assert await other.ask("ended") in ("RemoteAccessError", "")
        assert await other.ask("ended") == ""
        assert ((await bytes_of(target)) == NEW).all(), "written after the revocation"
        assert ((await bytes_of(second)) == 5).all()


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_contract_03_revoke_of_what_is_stuck(standin: Standin, start_npu: StartNpu, flavour: str) -> None:
    """The sender's NPU does nothing: not free within cancel_grace; free once the sender's link was taken down.

    On host endpoints the post itself hangs, and as long as it does, HIXL takes no link down.
    """
    standin.set(**FLAVOURS[flavour])
    engine = await start_npu("here", cancel_grace=0.2)
    events = engine.events()
    target, second = await npu_region(engine, MIB, "target"), await npu_region(engine, MIB, "second")
    async with npu_child(knobs=FLAVOURS[flavour], stall_timeout=1.0) as other:
        await other.ask("make", kind="npu", name="source", nbytes=MIB, fill=5)
        await other.ask("connect", address=engine.address)
        await other.ask("transfer", kind="write", local="source", remote="second")
        await second.upload(np.zeros(MIB, np.uint8))
        await other.ask("knobs", knobs={"hang_device": 1})
        await other.ask("begin", kind="write", local="source", remote="target")
        await other.ask("begin", kind="write", local="source", remote="second")
        error = await pinned(target.revoke())
        if error is not None:  # a sender may take its link down sooner than it has to
            assert error.spans == target.quarantined == ((0, MIB),)
            if flavour == "host":
                await other.ask("knobs", knobs={"hang_device": 0})
            async with asyncio.timeout(20):
                while (event := await events.get()).kind != "released":
                    pass
            assert event.region == target
        assert target.quarantined == ()
        await target.upload(np.full(MIB, NEW, np.uint8))
        await other.ask("knobs", knobs={"hang_device": 0})
        assert await other.ask("ended") in (
            "RemoteAccessError",
            "TransferTimeoutError",
            "" if flavour == "host" else None,
        )
        assert await other.ask("ended") == ""
        assert ((await bytes_of(target)) == NEW).all(), "written after the revocation"
        assert ((await bytes_of(second)) == 5).all()


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_contract_02_notes_follow_their_bytes_in_order(
    standin: Standin, start_npu: StartNpu, flavour: str
) -> None:
    standin.set(**FLAVOURS[flavour])
    engine = await start_npu("here")
    rounds, size = 100, 4096
    target = await npu_region(engine, rounds * size, "target")
    async with npu_child(knobs={**FLAVOURS[flavour], "latency_us": 100}) as other:
        await other.ask("make", kind="npu", name="source", nbytes=rounds * size, fill=9)
        await other.ask("connect", address=engine.address)
        for together in (False, True):
            await target.upload(np.zeros(rounds * size, np.uint8))
            other.send("noted", local="source", remote="target", nbytes=size, together=together)
            notes = []
            async for note in engine.notes():
                number = int(note.payload)
                assert set(await target.download(number * size, size)) == {9}, "the note came before its bytes"
                assert not note.aborted
                notes.append(number)
                if len(notes) == rounds:
                    break
            await other.answer()
            assert sorted(notes) == list(range(rounds))
            if not together:
                assert notes == list(range(rounds))


@pytest.mark.parametrize("flavour", ["device", "host"])
async def test_contract_02_a_note_that_will_not_come(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    """Its write fails in the device; its bytes have quiesced when the receiver hears of it."""
    standin.set(**FLAVOURS[flavour])
    a, b, peer = await pair_npu()
    source, target = await npu_region(a, MIB, fill=1), await npu_region(b, MIB, "target")
    remote = await peer.region("target")
    await peer.write(source, remote, note=b"good")
    standin.set(fail_nth=0)
    with pytest.raises(ProviderError):
        await peer.write(source, remote, note=b"bad")
    notes = [await b.notes().get() for _ in range(2)]
    assert [(n.payload, n.aborted) for n in notes] == [(b"good", False), (b"bad", True)]
    await target.upload(np.full(MIB, NEW, np.uint8))
    await peer.notify(b"")
    assert ((await bytes_of(target)) == NEW).all()
    await peer.write(source, remote, note=b"better")
    assert ((await bytes_of(target)) == 1).all()


async def restarted(other: Any, knobs: dict[str, Any]) -> dict[str, Any]:
    """How to start the child's successor: at the same place for HIXL too."""
    return {"knobs": knobs, "hixl_address": await other.ask("hixl_address")}


@pytest.mark.parametrize(("flavour", "memory"), [*((f, "foreign") for f in FLAVOURS), ("device", "npu")])
async def test_contract_09_a_transfer_for_the_dead_never_lands_in_its_successor(
    standin: Standin, start_npu: StartNpu, flavour: str, memory: str
) -> None:
    """The same name, the same port of HIXL's, memory at the same address."""
    standin.set(**FLAVOURS[flavour])
    knobs, make = FLAVOURS[flavour], {"kind": memory, "name": "target", "nbytes": MIB, "addr": FIXED}
    engine = await start_npu("here")
    source = await npu_region(engine, MIB, fill=66)
    async with npu_child(knobs=knobs) as other:
        at = await other.ask("make", **make, fill=1)
        options = await restarted(other, knobs)
        peer = await engine.connect(other.address)
        remote = await peer.region("target")
        await peer.write(source, remote)
        standin.set(hang_device=1)
        hung = peer.write(source, remote)
        other.kill()
        other.process.wait()
        async with asyncio.timeout(WITHIN):
            with pytest.raises(PeerLostError):
                await hung
    async with npu_child(**options) as other:
        again = await other.ask("make", **make, fill=2)
        if memory == "foreign":
            assert again == at, "else this shows little"
        standin.set(hang_device=0)
        await hung.wait_quiesced()
        with pytest.raises(PeerLostError):
            peer.write(source, remote)
        assert await other.ask("values", name="target") == [2]
        second = await engine.connect(other.address)
        assert second.incarnation != peer.incarnation
        await second.write(source, await second.region("target"))
        assert await other.ask("values", name="target") == [66]


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_contract_09_connected_to_the_successor_by_mistake(
    standin: Standin, start_npu: StartNpu, flavour: str
) -> None:
    """HIXL knows addresses only: a Connect that is under way reaches whoever listens there then."""
    standin.set(**FLAVOURS[flavour], connect_ms=30000)
    knobs, make = FLAVOURS[flavour], {"kind": "foreign", "name": "target", "nbytes": MIB, "addr": FIXED}
    engine = await start_npu("here")
    source = await npu_region(engine, MIB, fill=66)
    async with npu_child(knobs=knobs) as other:
        at = await other.ask("make", **make, fill=1)
        options = await restarted(other, knobs)
        peer = await engine.connect(other.address)
        aimed = peer.write(source, await peer.region("target"))
        connects = standin.stat("connects")
        async with asyncio.timeout(20):
            while not connects:
                await asyncio.sleep(0.001)
                connects = standin.stat("connects")
        other.stop()  # what it still had to say is not said; nobody is told that it goes
        async with npu_child("child", **{**options, "hixl_address": None}) as _:
            pass
        other.kill()
        other.process.wait()
    async with npu_child(**options) as other:
        assert await other.ask("make", **make, fill=2) == at
        standin.set(connect_ms=0)
        with pytest.raises(PeerLostError):
            await aimed
        await aimed.wait_quiesced()
        second = await engine.connect(other.address)
        remote = await second.region("target")
        assert await other.ask("values", name="target") == [2]
        await second.write(source, remote)
        assert await other.ask("values", name="target") == [66]


async def test_a_revoked_write_is_refused_before_hixl_sees_it(standin: Standin, pair_npu: PairNpu) -> None:
    a, b, peer = await pair_npu()
    source, target = await npu_region(a, MIB, fill=1), await npu_region(b, MIB, "target")
    remote = await peer.region("target")
    await peer.write(source, remote)
    await target.revoke()
    posts = standin.stat("posts")
    with pytest.raises(RemoteAccessError):
        await peer.write(source, remote)
    assert standin.stat("posts") == posts
