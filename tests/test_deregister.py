# SPDX-License-Identifier: Apache-2.0
"""Contract 3: a region that was deregistered is touched by nobody, neither a peer nor a transfer of our own."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from owned import NEW, make, pinned, view
from processes import child, until

import aiohixl
from aiohixl.testing import FaultPlan

Start = Callable[..., Coroutine[Any, Any, aiohixl.Engine]]

KIB = 1024


@pytest.mark.parametrize("memory", ["allocated", "foreign"])
async def test_contract_03_deregister_with_small_writes_in_flight(start: Start, memory: str) -> None:
    """And revoke, before it: a peer keeps posting by thousands, and not one byte changes once the call has returned."""
    engine = await start("owner")
    region = await make(engine, memory, 1 << 20, "target")
    async with child("peer") as peer:
        await peer.ask("allocate", name="local", nbytes=1 << 20)
        await peer.ask("connect", address=engine.address)
        await peer.ask("hammering", local="local", remote="target", nbytes=4 * KIB)
        assert view(region).any()
        for _ in range(5):
            await region.revoke()
            view(region)[:] = NEW
            before = await peer.ask("refused", more=2000)
            assert await peer.ask("refused", more=2000) > before
            assert (view(region) == NEW).all()
            region.grant()
            await until(lambda: not (view(region) == NEW).all(), "writes land again")
        await region.deregister()
        view(region)[:] = NEW
        await peer.ask("hammered")
        assert (view(region) == NEW).all()
        fresh = await make(engine, memory, 1 << 20, "target")
        assert await peer.ask("until_new", name="target", old=region.id) == ""
        assert await peer.ask("transfer", kind="write", local="local", remote="target") == ""
        assert view(fresh).any()
        assert (view(region) == NEW).all()


async def test_contract_03_deregister_waits_for_our_own_transfers(start: Start) -> None:
    a, b = await start("a", faults=FaultPlan().stall(0).delay(1, 0.05)), await start("b")
    target = await b.allocate(KIB, "target")
    peer = await a.connect(b.address)
    remote = await peer.region("target")
    source = a.register(np.full(KIB, 3, np.uint8), "source")
    stalled, delayed = peer.write(source[:512], remote[:512]), peer.write(source[512:], remote[512:])
    leaving = asyncio.create_task(source.deregister())
    again = asyncio.create_task(source.deregister())
    await delayed
    assert not leaving.done()
    assert not again.done(), "the second call returned while the memory was still in use"
    with pytest.raises(aiohixl.RegionError, match="deregistered"):
        peer.write(source[:1], remote[:1])
    stalled.cancel()
    with pytest.raises(aiohixl.TransferAbortedError):
        await stalled
    await leaving
    await again
    await source.deregister()
    assert bytes(target) == bytes(512) + b"\3" * 512
    renamed = a.register(np.full(KIB, 4, np.uint8), "source")
    await peer.write(renamed, remote)
    assert set(bytes(target)) == {4}


async def test_contract_03_deregister_cancelled_then_called_again(start: Start) -> None:
    """A cancelled call only stops waiting: the next one waits for the same end."""
    a, b = await start("a", faults=FaultPlan().stall(0)), await start("b")
    await b.allocate(KIB, "target")
    peer = await a.connect(b.address)
    source = a.register(np.full(KIB, 3, np.uint8), "source")
    stalled = peer.write(source, await peer.region("target"))
    leaving = asyncio.create_task(source.deregister())
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    again = asyncio.create_task(source.deregister())
    await asyncio.sleep(0)
    assert not again.done()
    stalled.cancel()
    with pytest.raises(aiohixl.TransferAbortedError):
        await stalled
    async with asyncio.timeout(10):
        await again


async def test_contract_03_deregistered_at_the_owner_in_flight(start: Start) -> None:
    a, b = await start("a", faults=FaultPlan().delay(0, 0.1).delay(1, 0.1)), await start("b")
    there = {name: await make(b, name, KIB, name) for name in ("allocated", "foreign")}
    peer = await a.connect(b.address)
    handles = {name: await peer.region(name) for name in there}
    source = a.register(np.full(KIB, 3, np.uint8))
    held = [peer.write(source, handle) for handle in handles.values()]
    for region in there.values():
        await region.deregister()
    for transfer in held:
        with pytest.raises(aiohixl.RemoteAccessError, match="deregistered"):
            await transfer
    for name, region in there.items():
        assert not view(region).any()
        await region.deregister()
        fresh = await make(b, name, KIB, name)
        await until(lambda name=name: name in peer.regions, "announced anew")  # type: ignore[misc]
        with pytest.raises(aiohixl.RemoteAccessError):
            await peer.write(source, handles[name])
        await peer.write(source, peer.regions[name])
        assert set(view(fresh)) == {3}
        assert not view(region).any()


@pytest.mark.parametrize("memory", ["allocated", "foreign"])
async def test_contract_03_deregister_pinned_by_a_stopped_peer(start: Start, memory: str) -> None:
    """The name is free at once, the memory only when it was released; a later call says the same as the first."""
    engine = await start("owner", cancel_grace=0.05)
    events = engine.events()
    async with child("peer") as peer:
        await peer.ask("allocate", name="local", nbytes=16 << 20)
        await peer.ask("connect", address=engine.address)
        for number in itertools.count():
            region = await make(engine, memory, 16 << 20, f"target {number}")
            await peer.ask("loop", kind="write", local="local", remote=region.name)
            peer.stop()
            if (pin := await pinned(region.deregister())) is not None:
                break
            peer.go_on()  # it stood between two copies
            await peer.ask("looped")
        assert pin is not None
        assert region.quarantined == pin.spans
        with pytest.raises(aiohixl.RegionPinnedError):
            await region.deregister()
        engine.allocate(4096, region.name)
        peer.go_on()
        while (await events.get()).kind != "released":
            pass
        assert region.quarantined == ()
        await region.deregister()
        view(region)[:] = NEW
        assert (await peer.ask("looped"))["error"] == "RemoteAccessError"
        assert (view(region) == NEW).all()
        kept = weakref.ref(region)
        del region, pin
        gc.collect()
        assert kept() is None, "kept for ever"
