# SPDX-License-Identifier: Apache-2.0
"""Contract 2: a note follows its bytes, once, in order, and its reader stops nobody but note senders."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import numpy as np
import pytest
from conftest import Start
from ground import noise
from processes import child, until

import aiohixl
from aiohixl.testing import FaultPlan

Pair = tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]
WINDOW = 256  # notes of one peer that nobody has taken


async def drain(engine: aiohixl.Engine, topic: str = "") -> list[aiohixl.Note]:
    """The notes that are there."""
    inbox = engine.notes(topic)
    return [await inbox.get() for _ in range(len(inbox))]


# ---- after its bytes ----


@pytest.mark.parametrize("kind", ["allocated", "foreign"])
@pytest.mark.parametrize("nbytes", [1, 4096, 32 << 10, (24 << 20) + 1])
async def test_contract_02_the_bytes_are_there_when_the_note_is(pair: Pair, kind: str, nbytes: int) -> None:
    a, b, peer = pair
    if kind == "allocated":
        target, source = await b.allocate(nbytes, "t"), await a.allocate(nbytes)
    else:
        target, source = b.register(np.zeros(nbytes, np.uint8), "t"), a.register(np.zeros(nbytes, np.uint8))
    here, there = np.frombuffer(memoryview(source), np.uint8), np.frombuffer(memoryview(target), np.uint8)
    remote = await peer.region("t")
    seen = []

    async def receive() -> None:
        async for note in b.notes():
            seen.append(bool((there == note.payload[0]).all()))  # no await between the two
            if len(seen) == 5:
                return

    receiver = asyncio.create_task(receive())
    for i in range(1, 6):
        here[:] = i
        await peer.write(source, remote, note=bytes([i]))
        while len(seen) < i:  # the next round would overwrite what this one's reader looks at
            await asyncio.sleep(0)
    await receiver
    assert seen == [True] * 5


async def test_contract_02_a_streams_note_follows_every_layer(pair: Pair) -> None:
    a, b, peer = pair
    there = [np.zeros((4, 1 << 18), np.uint8) for _ in range(6)]
    b.register_kv(there, "kv")
    cache = a.register_kv([np.full((4, 1 << 18), i + 1, np.uint8) for i in range(6)], "kv")
    await peer.kv("kv")
    async with peer.stream_kv(cache, [0, 1], [3, 0], note=b"all", topic="s") as stream:
        for layer in (5, 0, 3, 1, 2, 4):
            await asyncio.to_thread(stream.post, layer)
        assert len(b.notes("s")) == 0
    note = await b.notes("s").get()
    assert (note.payload, note.aborted) == (b"all", False)
    for i, layer_there in enumerate(there):
        assert (layer_there[[0, 3]] == i + 1).all()
        assert not layer_there[[1, 2]].any()


async def test_contract_02_order_of_awaited_transfers(pair: Pair) -> None:
    a, b, peer = pair
    target = await b.allocate(4 << 20, "t")
    source, remote = a.register(noise(4 << 20)), await peer.region("t")
    dice = random.Random(3)
    for i in range(60):
        size = dice.choice([0, 1, 4096, 100_000, 4 << 20])
        if i % 7 == 3:
            await peer.notify(b"%d" % i)
        else:
            await peer.write(source[0:size], remote[0:size], note=b"%d" % i)
    assert [int(n.payload) for n in await drain(b)] == list(range(60))
    assert bytes(target) == bytes(source)


async def test_contract_02_each_exactly_once(pair: Pair) -> None:
    a, b, peer = pair
    await b.allocate(1 << 16, "t")
    source, remote = a.register(noise(1 << 16)), await peer.region("t")
    back = await b.connect(a.address)
    got: Counter[bytes] = Counter()

    async def receive() -> None:
        async for note in b.notes():
            got[note.payload] += 1
            if note.payload == b"end":
                return

    receiver = asyncio.create_task(receive())
    posts = [peer.write(source[0:i], remote[0:i], note=b"w%d" % i) for i in range(1000)]
    posts += [peer.notify(b"n%d" % i) for i in range(1000)]
    echo = [back.notify(b"r%d" % i) for i in range(200)]
    await aiohixl.wait_all(posts)
    await aiohixl.wait_all(echo)
    await peer.notify(b"end")
    await receiver
    assert set(got.values()) == {1}
    assert len(got) == 2001
    assert a.stats()["notes_out"] == b.stats()["notes_in"] == 2001
    assert sorted(n.payload for n in await drain(a)) == sorted(b"r%d" % i for i in range(200))


async def test_contract_02_payloads_and_topics_are_bytes_as_they_are(pair: Pair) -> None:
    _, b, peer = pair
    payloads = [b"", b"\0", b"a\0b\0", bytes(range(256)), noise(64 << 10).tobytes(), bytes(64 << 10)]
    for topic in ("", "kv", "é\0ü", "x" * 256, "🦆"):
        for payload in payloads:
            await peer.notify(payload, topic=topic)
        await peer.notify(bytearray(b"array"), topic=topic)
        await peer.notify(memoryview(b"view"), topic=topic)
        notes = await drain(b, topic)
        assert [n.payload for n in notes] == [*payloads, b"array", b"view"]
        assert {n.topic for n in notes} == {topic}
        assert {n.peer.name for n in notes} == {"a"}
    with pytest.raises(aiohixl.ConfigError, match="at most 65536 bytes, not 65537"):
        peer.notify(bytes((64 << 10) + 1))
    await peer.notify(b"on")
    assert [n.payload for n in await drain(b)] == [b"on"]


# ---- readers ----


async def test_contract_02_topics_are_independent(pair: Pair) -> None:
    """A topic that nobody reads does not stand in the way of another one, as long as the window has room for both."""
    _, b, peer = pair
    unread = WINDOW - 2
    for i in range(unread):
        await peer.notify(b"%d" % i, topic="unread")
    for i in range(200):
        async with asyncio.timeout(20):
            await peer.notify(b"%d" % i, topic="read")
            await peer.notify(b"%d" % i)
            assert (await b.notes("read").get()).payload == b"%d" % i
            assert (await b.notes().get()).payload == b"%d" % i
    assert b.stats()["notes_waiting"] == {"unread": unread}
    assert [int(n.payload) for n in await drain(b, "unread")] == list(range(unread))


async def test_contract_02_each_note_goes_to_one_consumer(pair: Pair) -> None:
    _, b, peer = pair
    taken: list[tuple[int, bytes]] = []

    async def consume(who: int) -> None:
        async for note in b.notes():
            taken.append((who, note.payload))
            await asyncio.sleep(0)

    consumers = [asyncio.create_task(consume(i)) for i in range(5)]
    await aiohixl.wait_all([peer.notify(b"%d" % i) for i in range(500)])
    await until(lambda: len(taken) >= 500, "every note is taken")
    for task in consumers:
        task.cancel()
    await asyncio.gather(*consumers, return_exceptions=True)
    assert Counter(payload for _, payload in taken) == Counter(b"%d" % i for i in range(500))
    assert len({who for who, _ in taken}) == 5


async def test_contract_02_cancelled_consumers_lose_none(pair: Pair) -> None:
    _, b, peer = pair
    dice, taken = random.Random(5), []

    async def take() -> None:
        taken.append((await b.notes().get()).payload)

    posts = []
    for i in range(300):
        consumers = [asyncio.create_task(take()) for _ in range(dice.randrange(1, 4))]
        posts.append(peer.notify(b"%d" % i))
        for _ in range(dice.randrange(0, 6)):
            await asyncio.sleep(0)
        dice.shuffle(consumers)
        for task in consumers:
            task.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
    inbox = b.notes()
    while len(taken) < 300:
        async with asyncio.timeout(20):
            taken.append((await inbox.get()).payload)
    await aiohixl.wait_all(posts)
    assert Counter(taken) == Counter(b"%d" % i for i in range(300))
    assert len(inbox) == 0


async def test_a_cancelled_reader_wakes_the_next(pair: Pair) -> None:
    _, b, peer = pair
    first, second = asyncio.create_task(b.notes().get()), asyncio.create_task(b.notes().get())
    await asyncio.sleep(0)
    b._notes.put(aiohixl.Note(peer, b"x"))  # wakes the first
    first.cancel()
    async with asyncio.timeout(20):
        assert (await second).payload == b"x"
    with pytest.raises(asyncio.CancelledError):
        await first


# ---- credits ----


async def test_contract_02_a_reader_that_does_not_read_stops_note_senders_only(start: Start) -> None:
    a = await start("a", peer_timeout=0.1, faults=FaultPlan().delay(WINDOW + 3, 0.4))
    b = await start("b", peer_timeout=0.1)
    peer = await a.connect(b.address)
    target = await b.allocate(1 << 16, "t")
    taken_back = await b.allocate(1 << 16, "revoked")
    source, remote = a.register(noise(1 << 16)), await peer.region("t")
    revoked = await peer.region("revoked")
    for i in range(WINDOW):
        await peer.notify(b"%d" % i)  # transfers 0 to 255
    pending = peer.notify(b"%d" % WINDOW)
    carried = peer.write(source, remote, note=b"%d" % (WINDOW + 1))
    # Writes go on, and so do revocation and liveness.
    await peer.write(source, revoked)
    await taken_back.revoke(a.name)
    with pytest.raises(aiohixl.RemoteAccessError):
        await peer.write(source, revoked)  # transfer 259, held for four times peer_timeout
    with pytest.raises(aiohixl.RemoteAccessError):
        await peer.write(source, revoked)
    assert not peer.is_lost
    assert not pending.done()
    assert not carried.done()
    assert bytes(target) == bytes(source), "its bytes do not wait for its note"
    inbox = b.notes()
    assert len(inbox) == WINDOW
    assert [int((await inbox.get()).payload) for _ in range(WINDOW + 2)] == list(range(WINDOW + 2))
    await pending
    await carried
    await peer.write(source, remote, note=b"on")
    assert (await inbox.get()).payload == b"on"


async def test_contract_02_windows_are_a_peers_own(start: Start) -> None:
    a, b, c = await start("a"), await start("b"), await start("c")
    full, free = await a.connect(c.address), await b.connect(c.address)
    await aiohixl.wait_all([full.notify(b"a") for _ in range(WINDOW)])
    stuck = full.notify(b"a")
    for _ in range(10):
        await free.notify(b"b", topic="b")
        await c.notes("b").get()
    assert not stuck.done()
    await drain(c)
    await stuck


async def test_contract_02_thousands_of_notes_through_a_slow_reader(pair: Pair) -> None:
    _, b, peer = pair
    posts = [peer.notify(b"%d" % i) for i in range(3000)]
    inbox = b.notes()
    got: list[int] = []
    while len(got) < 3000:
        got.append(int((await inbox.get()).payload))
        assert len(inbox) <= WINDOW
    await aiohixl.wait_all(posts)
    assert got == list(range(3000))


# ---- loss and closing ----


async def test_contract_02_notes_to_a_lost_peer_fail(start: Start) -> None:
    a = await start("a")
    async with child("b") as b:
        peer = await a.connect(b.address)
        await aiohixl.wait_all([peer.notify(b"x") for _ in range(WINDOW)])
        pending = [peer.notify(b"never") for _ in range(3)]
        b.kill()
        for transfer in pending:
            with pytest.raises(aiohixl.PeerLostError):
                await transfer
        with pytest.raises(aiohixl.PeerLostError):
            peer.notify(b"late")
    c = await start("c")
    await (await a.connect(c.address)).notify(b"good")
    assert (await c.notes().get()).payload == b"good"


async def test_notes_of_a_lost_peer_stay(start: Start) -> None:
    """What was acknowledged is delivered, although its sender has gone."""
    b = await start("b")
    async with child("a") as a:
        await a.ask("connect", address=b.address)
        for i in range(10):
            await a.ask("notify", payload=str(i))
        lost = b.events()
        a.kill()
        while (await lost.get()).kind != "lost":
            pass
    notes = await drain(b)
    assert [n.payload for n in notes] == [b"%d" % i for i in range(10)]
    assert all(n.peer.is_lost for n in notes)


async def test_notes_that_wait_at_close(start: Start) -> None:
    a = await start("a")
    b = await start("b")
    peer = await a.connect(b.address)
    await aiohixl.wait_all([peer.notify(b"%d" % i) for i in range(WINDOW)])
    pending = peer.notify(b"too many")
    inbox, reader = b.notes(), b.notes("never")
    waiting = asyncio.create_task(reader.get())
    await asyncio.sleep(0)
    await b.close()
    with pytest.raises(aiohixl.PeerLostError):
        await pending
    assert [int(n.payload) async for n in inbox] == list(range(WINDOW))
    with pytest.raises(aiohixl.ClosedError):
        await inbox.get()
    with pytest.raises(aiohixl.ClosedError):
        await waiting


async def test_notes_that_are_not_delivered_when_their_sender_closes(start: Start) -> None:
    a, b = await start("a"), await start("b")
    peer = await a.connect(b.address)
    await aiohixl.wait_all([peer.notify(b"%d" % i) for i in range(WINDOW)])
    pending = peer.notify(b"never")
    await a.close(timeout=0.05)
    with pytest.raises(aiohixl.HixlError):
        await pending
    assert [int(n.payload) for n in await drain(b)] == list(range(WINDOW))
