# SPDX-License-Identifier: Apache-2.0
"""Contract 8: a peer that dies, leaves or freezes is an exception, for everything that waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
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


async def next_good_transfer(engine: aiohixl.Engine, start: Start) -> None:
    """Another engine under the lost one's name."""
    again = await start("child")
    target, foreign = await again.allocate(1 << 16, "target"), np.zeros(1 << 16, np.uint8)
    again.register(foreign, "foreign")
    peer = await engine.connect(again.address)
    source = np.full(1 << 16, 77, np.uint8)
    for name in ("target", "foreign"):
        await peer.write(engine.register(source), await peer.region(name), note=name.encode())
        assert (await again.notes().get()).payload == name.encode()
    assert bytes(target) == foreign.tobytes() == source.tobytes()


@contextlib.asynccontextmanager
async def grandchild(of: Child) -> AsyncIterator[int]:
    """A fork of the child, alive, with whatever it inherited."""
    pid = await of.ask("fork")
    try:
        yield pid
        os.kill(pid, 0)  # it outlived all of it
    finally:
        os.kill(pid, signal.SIGKILL)


def foreign_mappings() -> list[str]:
    """Memory of other engines that is mapped here."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:aiohixl-region" in line]


async def repeat(post: Callable[[], aiohixl.Transfer], rounds: list[int], index: int) -> None:
    while True:
        await post()
        rounds[index] += 1


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with-forked-child"])
async def test_contract_08_killed_in_mid_transfer(start: Start, forked: bool) -> None:
    """Writes and reads, of memory that it allocated and of foreign memory, all under way."""
    engine = await start("child-of-none")
    mappings = foreign_mappings()
    async with contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(child())
        await other.ask("allocate", name="allocated", nbytes=BIG)
        await other.ask("register", name="foreign", nbytes=BIG)
        if forked:
            await stack.enter_async_context(grandchild(other))
        peer = await engine.connect(other.address)
        rounds = [0] * 4
        tasks: list[asyncio.Task[None]] = []
        handles = peer.regions.values()
        for name, post in [(n, p) for n in ("allocated", "foreign") for p in (peer.write, peer.read)]:
            remote, local = await peer.region(name), engine.register(np.ones(BIG, np.uint8))
            again = functools.partial(post, local, remote)
            tasks.append(asyncio.create_task(repeat(again, rounds, len(tasks))))
        await until(lambda: min(rounds) > 0, "a first transfer of each kind")
        assert len(foreign_mappings()) > len(mappings)
        other.kill()
        async with asyncio.timeout(WITHIN):
            await asyncio.wait(tasks)
        for task in tasks:
            error = task.exception()
            assert type(error) is aiohixl.PeerLostError, repr(error)
            assert "'child'" in str(error)
        assert peer.is_lost
        for handle in handles:
            with pytest.raises(aiohixl.PeerLostError):
                peer.write(local, handle)
        await until(lambda: foreign_mappings() == mappings, "its memory is not mapped any more")
        await next_good_transfer(engine, start)


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with-forked-child"])
async def test_contract_08_killed_over_tcp_with_notes_pending(start: Start, forked: bool) -> None:
    """No descriptor of the process is to be had there: its sockets tell, so no forked child may hold them."""
    engine = await start("here")
    async with contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(child(address="127.0.0.1:0"))
        if forked:
            await stack.enter_async_context(grandchild(other))
        peer = await engine.connect(other.address.split(",")[1])
        notes = [peer.notify(b"n") for _ in range(300)]  # nobody takes them: more than the credit
        await notes[0]
        other.kill()
        async with asyncio.timeout(WITHIN):
            with pytest.raises(aiohixl.PeerLostError):
                await notes[-1]
            with pytest.raises(aiohixl.PeerLostError):
                await notes[256]
        for note in notes:
            note.detach()
        await next_good_transfer(engine, start)


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


@pytest.mark.parametrize("how", ["kill", "kill-forked", "exit", "_exit", "close_peer", "close", "abort"])
async def test_contract_08_every_pending_await(start: Start, how: str) -> None:
    """Held by faults, by a reader that does not read, or by what is never announced."""
    plan = FaultPlan().stall(0).stall(1).stall(2).stall(3).stall(4)
    engine = await start("here", faults=plan, peer_depth=306)
    events = engine.events()
    async with child() as other:
        await other.ask("allocate", name="target", nbytes=1 << 20)
        await other.ask("cache", layers=1, blocks=4, nbytes=256)
        peer = await engine.connect(other.address)
        joined = await events.get()
        assert (joined.kind, joined.peer) == ("joined", peer)
        remote, local = await peer.region("target"), engine.allocate(1 << 20)
        await peer.kv()
        cache = engine.register_kv([np.zeros((4, 256), np.uint8)])
        rows = np.arange(4) * 4096
        left = asyncio.Event()

        async def in_stream() -> None:
            async with peer.stream_kv(cache, [1], [2], note=b"streamed") as stream:
                stream.post(0)
                left.set()

        async def in_scope() -> None:
            async with peer.scope():
                peer.notify(b"n")

        tasks: dict[str, asyncio.Future[Any]] = {"stream": asyncio.create_task(in_stream())}
        await left.wait()
        tasks["write"] = asyncio.ensure_future(peer.write(local, remote))
        tasks["read"] = asyncio.ensure_future(peer.read(local, remote))
        tasks["noted"] = asyncio.ensure_future(peer.write(local[:100], remote[:100], note=b"with it"))
        tasks["many"] = asyncio.ensure_future(peer.write_many(local, rows, remote, rows, 4096))
        notes = [peer.notify(b"n") for _ in range(301)]
        await notes[0]
        tasks["note"] = asyncio.ensure_future(notes[300])
        tasks["all of them"] = asyncio.ensure_future(aiohixl.wait_all(notes[290:]))
        extra = [peer.notify(b"n") for _ in range(300)]  # those that have arrived made room
        tasks["parked"] = asyncio.ensure_future(peer.write(local, remote))
        tasks["scope"] = asyncio.create_task(in_scope())
        tasks["region"] = asyncio.create_task(peer.region("never", wait=60))
        tasks["cache"] = asyncio.create_task(peer.kv("never", wait=60))
        tasks["window"] = asyncio.create_task(peer.window())
        tasks["close"] = asyncio.create_task(peer.close())
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks.values())
        assert engine.stats()["parked"] > 2
        async with ended(other, how), asyncio.timeout(WITHIN):
            await asyncio.wait(tasks.values())
        for name, task in tasks.items():
            error = task.exception()
            if name in ("window", "close"):
                assert error is None, f"{name}: {error!r}"
            elif name == "all of them":
                assert isinstance(error, ExceptionGroup)
                assert error.split(aiohixl.PeerLostError)[1] is None
            else:
                assert type(error) is aiohixl.PeerLostError, f"{name}: {error!r}"
                assert "'child'" in str(error)
        for note in notes + extra:
            note.detach()
        lost = await events.get()
        assert (lost.kind, lost.peer) == ("lost", peer)
        with pytest.raises(aiohixl.PeerLostError):
            peer.write(local, remote)
        with pytest.raises(aiohixl.PeerLostError):
            peer.notify(b"")
        with pytest.raises(aiohixl.PeerLostError):
            await peer.region("never")
        await peer.close()
    await next_good_transfer(engine, start)


async def test_contract_08_a_process_that_dies_while_it_posts(start: Start) -> None:
    """`FaultPlan.die`: the owner of the memory sees it go, and a new process takes the name."""
    engine = await start("here")
    events = engine.events()
    target = await engine.allocate(1 << 20, "target")
    for fault in ([{"nth": 1, "action": "die"}], []):
        async with child("child", faults=fault) as other:
            await other.ask("allocate", name="source", nbytes=1 << 20, fill=9)
            await other.ask("connect", address=engine.address)
            joined = await events.get()
            assert (joined.kind, joined.peer.name) == ("joined", "child")
            assert await other.ask("transfer", kind="write", local="source", remote="target") == ""
            assert set(bytes(target)) == {9}
            other.send("transfer", kind="write", local="source", remote="target")
            if not fault:
                assert await other.answer() == ""
                continue
            async with asyncio.timeout(WITHIN):
                lost = await events.get()
            assert (lost.kind, lost.peer) == ("lost", joined.peer)
            assert other.process.wait(5) == -signal.SIGKILL
            np.frombuffer(memoryview(target), np.uint8)[:] = 0
    assert joined.peer is not lost.peer


async def test_contract_08_frozen_peer_is_lost_after_peer_timeout(start: Start) -> None:
    engine = await start("here", peer_timeout=0.3)
    async with child() as other:
        await other.ask("allocate", name="target", nbytes=1 << 16)
        peer = await engine.connect(other.address)
        await peer.region("target")
        other.stop()
        note = peer.notify(b"are you there")
        events = engine.events()
        with pytest.raises(aiohixl.PeerLostError):
            async with asyncio.timeout(30):
                await note
        assert peer.is_lost
        lost = await events.get()
        assert lost.peer is peer
        assert "no sign of life for 0.3 s" in lost.detail
        other.go_on()
        again = await engine.connect(other.address)  # it lives, and was only late
        assert again is not peer
        source = engine.register(np.full(1 << 16, 3, np.uint8))
        await again.write(source, await again.region("target"))
        assert await other.ask("values", name="target") == [3]


async def test_contract_08_a_short_freeze_is_no_loss(start: Start) -> None:
    engine = await start("here", peer_timeout=20.0)
    async with child() as other:
        await other.ask("allocate", name="target", nbytes=1 << 16)
        peer = await engine.connect(other.address)
        remote = await peer.region("target")
        other.stop()
        note = asyncio.ensure_future(peer.notify(b"are you there"))
        _, waiting = await asyncio.wait([note], timeout=0.2)
        assert waiting == {note}
        other.go_on()
        await note
        assert await other.ask("notes", count=1) == ["are you there"]
        await peer.write(engine.register(np.full(1 << 16, 4, np.uint8)), remote)
        assert await other.ask("values", name="target") == [4]


def switches(pid: int | str = "self") -> int:
    """How often the native threads of a process have gone to sleep."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().startswith("hx-"):
            status = (task / "status").read_text()
            total += sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)
    return total


async def test_contract_08_an_idle_engine_is_silent(start: Start) -> None:
    """Connected, having worked, with nothing pending: no native thread wakes up, here or there, frozen peer or not."""
    engine = await start("here", peer_timeout=0.16, cancel_grace=0.16)
    async with child(peer_timeout=0.16, cancel_grace=0.16) as other:
        await other.ask("allocate", name="target", nbytes=1 << 20)
        peer = await engine.connect(other.address)
        remote = await peer.region("target")
        await peer.write(engine.register(np.ones(1 << 20, np.uint8)), remote, note=b"done")
        assert await other.ask("notes", count=1) == ["done"]
        for pid in ("self", other.pid):
            last = -1
            while last != (last := switches(pid)):
                await asyncio.sleep(0.5)  # the tick goes on for some turns after the last work
        other.stop()
        before = switches()
        await asyncio.sleep(1.0)  # six times the peer timeout
        assert switches() == before
        assert not peer.is_lost
        other.go_on()
        before_there = switches(other.pid)
        await asyncio.sleep(0.5)
        assert switches() == before
        # Going on wakes each sleeping thread once by itself, which the kernel counts.
        assert switches(other.pid) - before_there <= 8
        await peer.notify(b"still")
        assert await other.ask("notes", count=1) == ["still"]
