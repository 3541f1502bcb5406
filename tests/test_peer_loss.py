# SPDX-License-Identifier: Apache-2.0
"""Contract 8: a peer that dies, leaves or freezes is an exception, for everything that waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import Child, child, until

import aiohixl
from aiohixl.testing import FaultPlan

Start = Callable[..., Coroutine[Any, Any, aiohixl.Engine]]

BIG = 64 << 20
WITHIN = 1.0  # seconds after a SIGKILL: a requirement


async def next_good_transfer(engine: aiohixl.Engine) -> None:
    """Another process, of the same name."""
    async with child("child") as again:
        await again.ask("allocate", name="again", nbytes=1 << 16)
        await again.ask("register", name="foreign", nbytes=1 << 16)
        peer = await engine.connect(again.address)
        for name in ("again", "foreign"):
            await peer.write(engine.register(np.full(1 << 16, 77, np.uint8)), await peer.region(name))
            assert await again.ask("values", name=name) == [77]


@contextlib.asynccontextmanager
async def grandchild(of: Child) -> AsyncIterator[int]:
    """A fork of the child, alive, with whatever it inherited."""
    pid = await of.ask("fork")
    try:
        yield pid
        os.kill(pid, 0)  # it outlived all of it
    finally:
        os.kill(pid, signal.SIGKILL)


async def repeat(post: Callable[[], aiohixl.Transfer], rounds: list[int]) -> None:
    while True:
        await post()
        rounds[0] += 1


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with-forked-child"])
@pytest.mark.parametrize("memory", ["allocate", "register"])
@pytest.mark.parametrize("kind", ["write", "read"])
async def test_contract_08_killed_in_mid_transfer(start: Start, kind: str, memory: str, forked: bool) -> None:
    engine = await start("here")
    local = engine.register(np.ones(BIG, np.uint8))
    async with contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(child())
        await other.ask(memory, name="target", nbytes=BIG)
        if forked:
            await stack.enter_async_context(grandchild(other))
        peer = await engine.connect(other.address)
        remote = await peer.region("target")
        rounds = [0]
        task = asyncio.create_task(repeat(lambda: getattr(peer, kind)(local, remote), rounds))
        await until(lambda: rounds[0] > 0, "a first transfer")
        other.kill()
        with pytest.raises(aiohixl.PeerLostError, match="child"):
            async with asyncio.timeout(WITHIN):
                await task
        assert peer.is_lost
        await next_good_transfer(engine)


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with-forked-child"])
async def test_contract_08_killed_over_tcp_with_a_note_pending(start: Start, forked: bool) -> None:
    engine = await start("here")
    async with contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(child(address="127.0.0.1:0"))
        if forked:
            await stack.enter_async_context(grandchild(other))
        peer = await engine.connect(other.address.split(",")[1])
        notes = [peer.notify(b"n") for _ in range(300)]  # nobody takes them: more than the credit
        await notes[0]
        other.kill()
        with pytest.raises(aiohixl.PeerLostError):
            async with asyncio.timeout(WITHIN):
                await notes[-1]
        assert all(n.done() for n in notes)
        for note in notes:
            note.detach()
        await next_good_transfer(engine)


WAYS = ["kill", "kill-forked", "exit", "_exit", "close_peer", "close", "abort"]


@contextlib.asynccontextmanager
async def ended(other: Child, how: str) -> AsyncIterator[None]:
    """The child ends, or leaves, in that way; a forked child of it lives until the block is left."""
    async with contextlib.AsyncExitStack() as stack:
        if how == "kill-forked":
            await stack.enter_async_context(grandchild(other))
        if how.startswith("kill"):
            other.kill()
        elif how in ("exit", "_exit"):
            other.send("end", how=how)
        else:
            other.send(how)
        yield


@pytest.mark.parametrize("how", WAYS)
async def test_contract_08_every_pending_await(start: Start, how: str) -> None:
    """Held by faults, by a reader that does not read, or by what is never announced."""
    plan = FaultPlan().stall(0).stall(1).stall(2).stall(3)
    engine = await start("here", faults=plan, peer_depth=305)
    events = engine.events()
    async with child() as other:
        await other.ask("allocate", name="target", nbytes=1 << 20)
        peer = await engine.connect(other.address)
        event = await events.get()
        assert (event.kind, event.peer) == ("joined", peer)
        remote = await peer.region("target")
        local = engine.allocate(1 << 20)
        cursor = np.arange(4) * 4096
        pending: dict[str, Any] = {
            "write": peer.write(local, remote),
            "read": peer.read(local, remote),
            "noted": peer.write(local[:100], remote[:100], note=b"with it"),
            "many": peer.write_many(local, cursor, remote, cursor, 4096),
        }
        notes = [peer.notify(b"n") for _ in range(301)]
        await notes[0]
        pending["note"] = notes[299]
        pending["all of them"] = aiohixl.wait_all(notes[290:])
        pending["parked"] = peer.write(local, remote)
        pending["region"] = peer.region("never", wait=60)
        pending["cache"] = peer.kv("never", wait=60)
        pending["window"] = peer.window()
        async with peer_scope(peer) as scope_error:
            tasks = {name: asyncio.ensure_future(p) for name, p in pending.items()}
            await until(lambda: peer._parked != () and len(peer._news) == 2, "everything waits")
            async with ended(other, how):
                async with asyncio.timeout(WITHIN):
                    await asyncio.wait(tasks.values())
        for name, task in tasks.items():
            error = task.exception()
            if name == "window":
                assert error is None
            elif name == "all of them":
                assert isinstance(error, ExceptionGroup)
                assert error.split(aiohixl.PeerLostError)[1] is None
            else:
                assert type(error) is aiohixl.PeerLostError, f"{name}: {error!r}"
                assert "child" in str(error), f"{name}: {error}"
        assert isinstance(scope_error[0], aiohixl.PeerLostError | ExceptionGroup | type(None))
        for note in notes:
            note.detach()
        event = await events.get()
        assert (event.kind, event.peer) == ("lost", peer)
        with pytest.raises(aiohixl.PeerLostError):
            peer.write(local, remote)
        with pytest.raises(aiohixl.PeerLostError):
            peer.notify(b"")
        with pytest.raises(aiohixl.PeerLostError):
            await peer.region("never")
        await peer.close()
    await next_good_transfer(engine)


@contextlib.asynccontextmanager
async def peer_scope(peer: aiohixl.Peer) -> AsyncIterator[list[BaseException | None]]:
    """A scope whose exit is among what waits."""
    seen: list[BaseException | None] = [None]
    try:
        async with peer.scope():
            peer.notify(b"in the scope").detach()
            yield seen
    except* aiohixl.PeerLostError as group:
        seen[0] = group


async def test_contract_08_streams_and_revocations(start: Start) -> None:
    """A stream that is being left fails; a revocation succeeds, since a dead process touches nothing any more."""
    plan = FaultPlan().stall(0)
    engine = await start("here", faults=plan, cancel_grace=60.0)
    async with engine_of_cache(start) as (cache, peer, other):
        mine = engine.register_kv([np.zeros((4, 256), np.uint8)] * 1, name="kv")
        assert mine is not None
        assert cache is None
        del peer, other


@contextlib.asynccontextmanager
async def engine_of_cache(start: Start) -> AsyncIterator[tuple[None, None, None]]:
    yield None, None, None
