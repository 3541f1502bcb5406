# SPDX-License-Identifier: Apache-2.0
"""Contract 9: stale means refused. Engines find each other by name, restart, take over, lose their rendezvous."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
from conftest import Start
from ground import Ground, noise
from processes import child, until
from restartable import Server, restartable

import aiohixl
from aiohixl.notes import Inbox


@pytest_asyncio.fixture
async def rendezvous(quiet_loop: object) -> AsyncIterator[Server]:
    async with restartable() as server:
        await server.start()
        yield server


TURNS = itertools.count()


async def event(inbox: Inbox[aiohixl.Event], kind: str) -> aiohixl.Event:
    async with asyncio.timeout(20):
        async for found in inbox:
            if found.kind == kind:
                return found
    raise AssertionError(f"the engine was closed before {kind!r}")


async def good(a: aiohixl.Engine, b: aiohixl.Engine, peer: aiohixl.Peer) -> None:
    """A transfer works, bytes and note."""
    turn = next(TURNS)
    name = f"good {turn}"
    target = await b.allocate(4096, name)
    data = noise(4096, turn)
    await peer.write(a.register(data), await peer.region(name), note=b"good", topic="good")
    note = await b.notes("good").get()
    assert (note.payload, note.peer.name) == (b"good", a.name)
    assert bytes(target) == data.tobytes()


# ---- finding each other ----


async def test_engines_find_each_other_by_name(rendezvous: Server, start: Start) -> None:
    a = await start("a", rendezvous=rendezvous.url)
    waiting = asyncio.create_task(a.connect("b"))  # a name that joins later
    b = await start("b", rendezvous=rendezvous.url)
    peer = await waiting
    assert (peer.name, peer.incarnation, peer.epoch) == ("b", b.incarnation, b.epoch)
    assert a.epoch > 0
    assert b.epoch > 0
    await good(a, b, peer)
    assert await a.connect("b") is peer
    back = await b.connect("a")
    await good(b, a, back)


async def test_a_name_that_does_not_come(rendezvous: Server, start: Start) -> None:
    a = await start("a", rendezvous=rendezvous.url)
    with pytest.raises(aiohixl.PeerUnreachableError, match="'nobody'"):
        await a.connect("nobody", timeout=0.1)
    b = await start("b", rendezvous=rendezvous.url)
    await good(a, b, await a.connect("b"))


async def test_concurrent_connects_share_one_connection(rendezvous: Server, start: Start) -> None:
    a, b = await start("a", rendezvous=rendezvous.url), await start("b", rendezvous=rendezvous.url)
    joined = b.events()
    peers = await asyncio.gather(*(a.connect("b") for _ in range(50)))
    assert len(set(peers)) == 1
    await until(lambda: b.stats()["peers"] == 1, "b knows of one link")
    first, *others = [await a.connect(b.address) for _ in range(3)]  # by address: a link of its own, and one only
    assert others == [first, first]
    await until(lambda: b.stats()["peers"] == 2, "b knows of two")
    assert [(await event(joined, "joined")).peer.name for _ in range(2)] == ["a", "a"]
    await good(a, b, peers[0])
    await good(a, b, first)


async def test_connect_cancelled(rendezvous: Server, start: Start) -> None:
    a = await start("a", rendezvous=rendezvous.url)
    alone = asyncio.create_task(a.connect("b"))
    await asyncio.sleep(0)
    alone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await alone
    one, two = asyncio.create_task(a.connect("b")), asyncio.create_task(a.connect("b"))
    await asyncio.sleep(0)
    one.cancel()  # the other one waits on
    with pytest.raises(asyncio.CancelledError):
        await one
    b = await start("b", rendezvous=rendezvous.url)
    await good(a, b, await two)


async def test_connect_cancelled_at_any_moment(start: Start) -> None:
    a, b = await start("a"), await start("b")
    for turns in range(12):
        task = asyncio.create_task(a.connect(b.address))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        try:
            peer = await task
        except asyncio.CancelledError:
            continue
        await peer.close()
    peer = await a.connect(b.address)
    await good(a, b, peer)


async def test_connect_ends_when_the_engine_closes(rendezvous: Server) -> None:
    a = await aiohixl.Engine("a", rendezvous=rendezvous.url).start()
    task = asyncio.create_task(a.connect("nobody"))
    await asyncio.sleep(0)
    await a.close()
    with pytest.raises(aiohixl.ClosedError, match="was closed"):
        await task


NAMES = ["a b", "it's", 'say "x"', "🦆 duck", "é" * 64, "x" * 128, "%2F?#&=+", "...", "名前", "tcp:", "-"]


async def test_names_with_odd_characters(rendezvous: Server, start: Start) -> None:
    a = await start("a", rendezvous=rendezvous.url)
    for name in NAMES:
        b = await start(name, rendezvous=rendezvous.url)
        peer = await a.connect(name)
        assert peer.name == name
        await good(a, b, peer)
        await b.close()


# ---- one engine a name ----


async def test_contract_09_a_second_live_engine_is_refused(rendezvous: Server, start: Start) -> None:
    a, b = await start("a", rendezvous=rendezvous.url), await start("b", rendezvous=rendezvous.url)
    second = aiohixl.Engine("b", rendezvous=rendezvous.url, join_timeout=0.1)
    with pytest.raises(aiohixl.RendezvousError) as refused:
        await second.start()
    assert refused.value.status == 409
    assert b.incarnation in str(refused.value)
    assert " s" in str(refused.value), "how long the holder has held it"
    await good(a, b, await a.connect("b"))


async def test_contract_09_a_crashed_worker_gets_its_name_back(rendezvous: Server, start: Start) -> None:
    a = await start("a", rendezvous=rendezvous.url)
    async with child("worker", rendezvous=rendezvous.url, ttl=1.0) as worker:
        await worker.ask("allocate", name="target", nbytes=4096)
        first = await a.connect("worker")
        old = await first.region("target")
        source = a.register(np.full(4096, 7, np.uint8))
        await first.write(source, old)
        lost = a.events()
        worker.kill()
        await event(lost, "lost")
        async with child("worker", rendezvous=rendezvous.url, ttl=1.0) as again:
            await again.ask("allocate", name="target", nbytes=4096)
            second = await a.connect("worker")
            assert second.incarnation != first.incarnation
            assert second.epoch > first.epoch
            with pytest.raises(aiohixl.PeerLostError):
                first.write(source, old)
            with pytest.raises(aiohixl.RemoteAccessError):  # never into the new one's memory
                await second.write(source, old)
            assert await again.ask("values", name="target") == [0]
            await second.write(source, await second.region("target"))
            assert await again.ask("values", name="target") == [7]


@pytest.mark.parametrize("how", ["replace", "force"])
async def test_contract_09_taking_over(rendezvous: Server, start: Start, how: str) -> None:
    a, old = await start("a", rendezvous=rendezvous.url), await start("b", rendezvous=rendezvous.url, ttl=1.0)
    target = await old.allocate(4096, "target")
    peer = await a.connect("b")
    remote = await peer.region("target")
    told, lost = old.events(), a.events()
    take = {"replace": old.incarnation} if how == "replace" else {"force": True}
    new = await start("b", rendezvous=rendezvous.url, **take)
    assert (await event(lost, "lost")).peer is peer
    with pytest.raises(aiohixl.PeerLostError, match="newer engine"):
        peer.write(a.register(noise(4096)), remote)
    assert (await event(told, "displaced")).detail
    assert not any(bytes(target))
    fresh = await a.connect("b")
    assert fresh.incarnation == new.incarnation
    await good(a, new, fresh)
    # The old one knows its epoch, and so do those who have seen the newer one: both ways refused.
    with pytest.raises(aiohixl.PeerMismatchError, match="older incarnation"):
        await a.connect(old.address)
    with pytest.raises(aiohixl.PeerMismatchError, match="older incarnation"):
        await old.connect(a.address)
    await good(a, new, fresh)


async def test_taking_over_needs_the_right_incarnation(rendezvous: Server, start: Start) -> None:
    a, b = await start("a", rendezvous=rendezvous.url), await start("b", rendezvous=rendezvous.url)
    wrong = aiohixl.Engine("b", rendezvous=rendezvous.url, replace="0" * 32, join_timeout=0.1)
    with pytest.raises(aiohixl.RendezvousError):
        await wrong.start()
    await good(a, b, await a.connect("b"))


async def test_contract_09_another_incarnation_at_the_address(rendezvous: Server, start: Start) -> None:
    """The rendezvous tells of the old incarnation and the new one answers: it is asked again, until it knows."""
    a = await start("a", rendezvous=rendezvous.url)
    b = await start("b", rendezvous=rendezvous.url)
    assert a._member is not None
    client = a._member.client
    true_record = await client.lookup("b")
    stale = replace(true_record, incarnation="f" * 32)
    answers = [stale, stale]

    async def lookup(name: str, **options: object) -> object:
        return answers.pop() if answers else true_record

    client.lookup = lookup
    peer = await a.connect("b")
    assert not answers
    assert peer.incarnation == b.incarnation
    await good(a, b, peer)


# ---- the rendezvous goes and comes ----


async def test_the_rendezvous_restarts(rendezvous: Server, start: Start) -> None:
    a, b = [await start(name, rendezvous=rendezvous.url, ttl=1.0) for name in "ab"]
    ground = await Ground(a, b, await a.connect("b")).prepare()
    again = [a.events(), b.events()]
    epochs = (a.epoch, b.epoch)
    await rendezvous.stop()
    await ground.still_good()  # transfers go on meanwhile
    with pytest.raises(aiohixl.HixlError):
        await a.connect("c", timeout=0.1)
    await rendezvous.start()
    for inbox in again:
        await event(inbox, "rejoined")
    assert a.epoch >= epochs[0]
    assert b.epoch >= epochs[1]
    assert ground.peer.regions.keys() == {"ground"}
    assert not ground.peer.is_lost
    await ground.still_good()
    c = await start("c", rendezvous=rendezvous.url)
    peer = await c.connect("b")
    assert (await peer.region("ground")).nbytes == ground.target.nbytes
    await good(c, b, peer)
    ground.forget()


async def test_the_rendezvous_comes_later(start: Start) -> None:
    async with restartable() as rendezvous:
        starting = asyncio.create_task(start("a", rendezvous=rendezvous.url))
        await asyncio.sleep(0)
        await rendezvous.start()
        a = await starting
        b = await start("b", rendezvous=rendezvous.url)
        await good(a, b, await a.connect("b"))
        await a.close()
        await b.close()


# ---- without one, and by TCP ----


async def test_direct_connection(start: Start) -> None:
    a, b = await start("a"), await start("b")
    assert a.epoch == 0
    peer = await a.connect(b.address)
    assert a.peers == {"b": peer}
    await good(a, b, peer)
    (back,) = b.peers.values()
    await good(b, a, back)
    await peer.close()
    assert peer.is_lost
    again = await a.connect(b.address)
    assert again is not peer
    await good(a, b, again)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
async def test_control_links_by_tcp(start: Start, address: str) -> None:
    a, b = await start("a", transports=["shm"]), await start("b", address=address, transports=["shm"])
    unix, tcp = b.address.split(",")
    assert tcp.startswith("tcp://")
    assert not tcp.endswith(":0")
    await b.allocate(64, "far")
    peer = await a.connect(tcp)
    await peer.notify(b"over tcp")
    note = await b.notes().get()
    await note.peer.notify(b"and back")
    assert (await a.notes().get()).payload == b"and back"
    source, remote = a.register(noise(64)), await peer.region("far")
    for post in (peer.write, peer.read, peer.route):
        with pytest.raises(aiohixl.RegionError, match=r"TCP|tcp"):
            post(source, remote)
    assert remote.handle.alive
    await peer.notify(b"still up")
    near = await a.connect(unix)
    await good(a, b, near)


async def test_addresses_are_tried_in_order(start: Start) -> None:
    a, b = await start("a"), await start("b", address="127.0.0.1:0")
    unix, tcp = b.address.split(",")
    peer = await a.connect(f"unix:///nowhere.sock,tcp://127.0.0.1:1,{tcp}")
    await peer.notify(b"found")
    assert (await b.notes().get()).payload == b"found"
    await good(a, b, await a.connect(f"tcp://127.0.0.1:1,{unix}"))
