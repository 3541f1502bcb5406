# SPDX-License-Identifier: Apache-2.0
"""Contract 3, the owner's side: memory that was taken back is the owner's, or an exception says that it is not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from owned import NEW, make, pinned, view
from processes import Child, child, until

import aiohixl
from aiohixl.testing import FaultPlan

Start = Callable[..., Coroutine[Any, Any, aiohixl.Engine]]
Pair = tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]

KIB = 1024


# ---- what is refused, and what is not ----


@pytest.mark.parametrize("memory", ["allocated", "foreign"])
async def test_contract_03_revoked_spans_are_refused_until_granted(pair: Pair, memory: str) -> None:
    a, b, peer = pair
    target = await make(b, memory, 64 * KIB, "target")
    other = await make(b, memory, 4 * KIB, "other")
    model = np.zeros(64 * KIB, np.uint8)
    source = a.allocate(64 * KIB)
    view(source)[:] = np.random.default_rng(1).integers(1, 200, 64 * KIB)
    here = view(source).copy()
    remote = await peer.region("target")

    async def write(lo: int, hi: int) -> None:
        await peer.write(source[lo:hi], remote[lo:hi])
        model[lo:hi] = here[lo:hi]

    await write(0, 4096)
    await target.revoke(spans=[(8192, 100), target[20000:30000]])
    for lo, hi in ((8192, 8292), (8291, 9000), (0, 64 * KIB), (8000, 8193), (29999, 30001), (20000, 20001)):
        with pytest.raises(aiohixl.RemoteAccessError, match="revoked"):
            await peer.write(source[lo:hi], remote[lo:hi])
        with pytest.raises(aiohixl.RemoteAccessError):
            await peer.read(source[lo:hi], remote[lo:hi])
        assert (view(source) == here).all()
    rows = np.array([0, 4096, 8192])
    with pytest.raises(aiohixl.RemoteAccessError):
        await peer.write_many(source, rows, remote, rows, 4096)
    # Rows that are allowed may have been written before the one that is not was met.
    assert set(np.unique(np.flatnonzero(view(target) != model) // 4096)) <= {0, 1, 2}
    assert not view(target)[8192:8292].any()
    model[:8192] = view(target)[:8192]
    model[8292:12288] = view(target)[8292:12288]
    for lo, hi in ((0, 8192), (8292, 20000), (30000, 64 * KIB), (8192, 8192)):
        await write(lo, hi)
    await peer.write(source[: 4 * KIB], await peer.region("other"))
    assert (view(other) == here[: 4 * KIB]).all()
    assert (view(target) == model).all()

    target.grant(spans=[(8192, 100)])
    await b.peers["a"].notify(b"granted")  # by the same link, so it arrives after the grant
    await a.notes().get()
    await write(8192, 8292)
    with pytest.raises(aiohixl.RemoteAccessError):
        await peer.write(source[20000:20001], remote[20000:20001])
    target.grant()
    await b.peers["a"].notify(b"granted")
    await a.notes().get()
    await write(0, 64 * KIB)
    assert (view(target) == model).all()


async def test_contract_03_a_note_does_not_overtake_the_grant_that_it_tells_of(pair: Pair) -> None:
    """Nor the region that was registered before it was sent."""
    a, b, peer = pair
    target = b.register(np.zeros(KIB, np.uint8), "target")
    remote, source = await peer.region("target"), await a.allocate(KIB)
    notes, back = a.notes(), b.peers["a"]
    for number in range(150):
        await target.revoke()
        view(source)[:] = 1 + number
        with pytest.raises(aiohixl.RemoteAccessError):
            await peer.write(source, remote)
        target.grant()
        b.register(np.zeros(8, np.uint8), f"region {number}")
        back.notify(b"granted").detach()
        await notes.get()
        await peer.write(source, remote)
        assert set(view(target)) == {1 + number}
        await peer.read(source[:8], peer.regions[f"region {number}"])


async def test_contract_03_revoke_from_one_peer_leaves_the_others(start: Start) -> None:
    owner, first, second = await start("owner"), await start("first"), await start("second")
    target = await owner.allocate(64 * KIB, "target")
    peers = [await engine.connect(owner.address) for engine in (first, second)]
    regions = [await peer.region("target") for peer in peers]
    sources = [e.register(np.full(64 * KIB, i + 1, np.uint8)) for i, e in enumerate((first, second))]
    await target.revoke("first")
    with pytest.raises(aiohixl.RemoteAccessError):
        await peers[0].write(sources[0], regions[0])
    await peers[1].write(sources[1], regions[1])
    assert set(bytes(target)) == {2}
    await target.revoke(owner.peers["second"], spans=[(0, 10)])
    with pytest.raises(aiohixl.RemoteAccessError):
        await peers[1].write(sources[1], regions[1])
    target.grant("first")
    await owner.peers["first"].notify(b"")
    await first.notes().get()
    await peers[0].write(sources[0], regions[0])
    assert set(bytes(target)) == {1}
    with pytest.raises(aiohixl.RemoteAccessError):
        await peers[1].read(sources[1], regions[1])
    with pytest.raises(aiohixl.RegionError, match="no peer 'third'"):
        await target.revoke("third")
    with pytest.raises(aiohixl.RegionError, match="outside"):
        await target.revoke(spans=[(64 * KIB - 1, 2)])
    with pytest.raises(aiohixl.RegionError, match="not a span of"):
        await target.revoke(spans=[sources[0][0:1]])


async def test_contract_03_a_peer_that_connects_later_finds_it_revoked(start: Start) -> None:
    """A new link is no way around a revocation: neither for the peer that was meant, nor, if all were, for any."""
    owner, writer, other = await start("owner"), await start("writer"), await start("other")
    target, theirs = await owner.allocate(4 * KIB, "target"), await owner.allocate(4 * KIB, "theirs")
    source = writer.register(np.full(4 * KIB, 5, np.uint8))
    peer = await writer.connect(owner.address)
    await target.revoke(spans=[(0, 100)])
    await theirs.revoke("writer")
    await peer.close()
    peer = await writer.connect(owner.address)
    with pytest.raises(aiohixl.RemoteAccessError):
        await peer.write(source, await peer.region("target"))
    with pytest.raises(aiohixl.RemoteAccessError):
        await peer.write(source, await peer.region("theirs"))
    third = await other.connect(owner.address)
    mine = other.register(np.full(4 * KIB, 6, np.uint8))
    with pytest.raises(aiohixl.RemoteAccessError):
        await third.write(mine, await third.region("target"))
    assert not any(bytes(target))
    await third.write(mine, await third.region("theirs"))
    await third.write(mine[100:], (await third.region("target"))[100:])
    target.grant()
    await owner.peers["writer"].notify(b"granted")
    await writer.notes().get()
    await peer.write(source, await peer.region("target"))
    assert set(bytes(target)) == {5}
    assert set(bytes(theirs)) == {6}


async def test_contract_03_revoked_blocks_of_a_cache(pair: Pair) -> None:
    """A stream that is older than the revocation stays refused after the grant; a new one works."""
    a, b, peer = pair
    there = [np.zeros((8, 512), np.uint8) for _ in range(3)]
    target = b.register_kv(there)
    cache = a.register_kv([np.full((8, 512), layer + 1, np.uint8) for layer in range(3)])
    await peer.kv()
    async with peer.stream_kv(cache, [0, 1], [2, 3]) as stream:
        await stream.post(0)
        for layer in (1, 2):
            stream.post(layer)
    assert all((there[layer][[2, 3]] == layer + 1).all() for layer in range(3))

    async def stale() -> None:
        async with peer.stream_kv(cache, [0, 1], [2, 3], note=b"stale") as stream:
            await stream.post(0)
            await target.revoke(blocks=[3])
            for layer in there:
                layer[3] = NEW
            target.grant(blocks=[3])
            await b.peers["a"].notify(b"granted")
            await a.notes().get()
            stream.post(1)
            stream.post(2)

    with pytest.raises(ExceptionGroup) as caught:
        await stale()
    assert caught.value.split(aiohixl.RemoteAccessError)[1] is None
    note = await b.notes().get()
    assert (note.payload, note.aborted) == (b"stale", True)
    assert all((layer[3] == NEW).all() for layer in there)
    assert not any(layer[[0, 1, 4, 5, 6, 7]].any() for layer in there)

    await peer.write_kv(cache, [7], [3])
    async with peer.stream_kv(cache, [5], [4]) as stream:
        for layer in range(3):
            stream.post(layer)
    assert all((there[layer][[3, 4]] == layer + 1).all() for layer in range(3))


@pytest.mark.parametrize("memory", ["allocated", "foreign"])
async def test_contract_03_transfers_of_other_spans_go_on(start: Start, memory: str) -> None:
    """Those held back until after the revocation meet it; their neighbours do not notice."""
    plan = FaultPlan()
    for nth in range(64):
        plan.delay(nth, 0.05)
    a, b = await start("a", faults=plan), await start("b")
    target = await make(b, memory, 64 * KIB, "target")
    peer = await a.connect(b.address)
    remote, source = await peer.region("target"), a.register(np.full(64 * KIB, 7, np.uint8))
    spans = [slice(i * KIB, (i + 1) * KIB) for i in range(64)]
    posted = [peer.write(source[span], remote[span], note=b"%d" % i) for i, span in enumerate(spans)]
    await target.revoke(spans=[(10 * KIB, 20 * KIB)])
    with pytest.raises(ExceptionGroup) as caught:
        await aiohixl.wait_all(posted)
    assert len(caught.value.exceptions) == 20
    assert caught.value.split(aiohixl.RemoteAccessError)[1] is None
    expected = np.full(64 * KIB, 7, np.uint8)
    expected[10 * KIB : 30 * KIB] = 0
    assert (view(target) == expected).all()
    notes = [await b.notes().get() for _ in range(64)]
    assert {int(n.payload) for n in notes if n.aborted} == set(range(10, 30))
    await peer.write(source[:KIB], remote[:KIB])


# ---- a peer that is stopped in mid-copy ----


async def take_back(region: aiohixl.Region, events: Any, peer: Child) -> bool:
    """Stop the peer, revoke, and let it go on; by then the memory is ours and holds NEW. Was it pinned first?"""
    peer.stop()
    pin = await pinned(region.revoke())
    if pin is not None:
        assert pin.spans
        assert region.quarantined == pin.spans
        told = await events.get()
        assert (told.kind, told.region, told.spans) == ("quarantined", region, pin.spans)
        peer.go_on()
        told = await events.get()
        assert (told.kind, told.region, told.spans) == ("released", region, pin.spans)
        assert region.quarantined == ()
        view(region)[:] = NEW
        return True
    assert region.quarantined == ()
    view(region)[:] = NEW
    peer.go_on()
    return False


@pytest.mark.parametrize("memory", ["allocated", "foreign"])
@pytest.mark.parametrize("kind", ["read", "write"])
async def test_contract_03_stopped_in_mid_copy_then_revoked(start: Start, kind: str, memory: str) -> None:
    """Pinned, or not one new byte: at many points of a transfer that repeats without end."""
    dice = random.Random(3)
    nbytes, pins = 16 << 20, 0
    engine = await start("owner", cancel_grace=0.05)
    region = await make(engine, memory, nbytes, "target")
    events = engine.events()
    async with child("peer") as peer:
        await peer.ask("allocate", name="local", nbytes=nbytes)
        await peer.ask("connect", address=engine.address)
        assert (await events.get()).kind == "joined"
        for attempt in range(200):
            if pins and attempt >= 12:
                break
            view(region)[:] = 0x11
            await peer.ask("loop", kind=kind, local="local", remote="target")
            await asyncio.sleep(dice.uniform(0, 0.02))  # where in the copy it is met is left to chance
            pins += await take_back(region, events, peer)
            report = await peer.ask("looped")
            assert report["error"] == "RemoteAccessError"
            assert report["rounds"] > 0
            assert (view(region) == NEW).all(), "written after it was taken back"
            if kind == "read":
                assert NEW not in await peer.ask("values", name="local"), "read after it was taken back"
            region.grant()
        await peer.ask("loop", kind=kind, local="local", remote="target")
        assert (await peer.ask("looped", stop=True))["error"] == ""
    assert pins, "not once was it met in mid-copy"


async def test_contract_03_stopped_and_then_killed(start: Start) -> None:
    """A process that has ended touches nothing: revocations that waited for it succeed, quarantines are lifted."""
    engine = await start("owner", cancel_grace=0.5)
    region = await engine.allocate(16 << 20, "target")
    events = engine.events()
    async with child("peer") as peer:
        await peer.ask("allocate", name="local", nbytes=16 << 20)
        await peer.ask("connect", address=engine.address)
        while True:
            await peer.ask("loop", kind="write", local="local", remote="target")
            peer.stop()
            if await pinned(region.revoke()) is not None:
                break
            peer.go_on()  # it stood between two copies
            await peer.ask("looped")
            region.grant()
        again = asyncio.create_task(region.revoke(spans=[(0, region.nbytes)]))
        peer.kill()
        async with asyncio.timeout(1):
            await again
            await until(lambda: region.quarantined == (), "the quarantine is lifted")
    kinds = []
    while "released" not in kinds:
        kinds.append((await events.get()).kind)
    view(region)[:] = NEW
    region.grant()
    other = await start("next")
    link = await other.connect(engine.address)
    await link.write(other.register(np.full(16 << 20, 1, np.uint8)), await link.region("target"))
    assert set(np.unique(view(region))) == {1}


async def test_the_peer_of_another_engine_is_refused(pair: Pair) -> None:
    """Two engines of one process are peers of each other: to give the wrong one's would revoke nothing."""
    a, b, peer = pair
    region = await b.allocate(4096, "target")
    with pytest.raises(aiohixl.ConfigError, match="peer of another engine"):
        await region.revoke(peer)
    await region.revoke(a.name)
