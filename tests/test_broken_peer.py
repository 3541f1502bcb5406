# SPDX-License-Identifier: Apache-2.0
"""A peer that knows the secret and breaks the protocol: its link ends, nothing else does."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import wirepeer as wire
from conftest import Start
from ground import Ground, noise
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wirepeer import WirePeer

import aiohixl
from aiohixl.notes import Inbox

FUZZ = settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
TOO_MUCH = (1 << 63, (1 << 64) - 1)


class House:
    """An engine with a good peer, and room for bad ones."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.engine = ground.b
        self.unix, self.tcp = ground.b.address.split(",")
        self.events: Inbox[aiohixl.Event] = ground.b.events()

    async def event(self, kind: str) -> aiohixl.Event:
        async with asyncio.timeout(20):
            while (event := await self.events.get()).kind != kind:
                pass
        return event

    async def breaks(self, data: bytes, why: str, fds: tuple[int, ...] = ()) -> None:
        """After a good handshake, `data` ends the link, and the reason is told."""
        for address in (self.unix,) if fds else (self.unix, self.tcp):
            with WirePeer(address).handshake() as peer:
                peer.alive()
                peer.send_bytes(data, fds)
                peer.rest()
            while (lost := await self.event("lost")).peer.incarnation != peer.incarnation:
                pass
            assert why in lost.detail, lost.detail
            assert lost.peer.is_lost

    async def meet(self, peer: WirePeer) -> aiohixl.Peer:
        """The engine's side of a wire peer."""
        joined: aiohixl.Peer = (await self.event("joined")).peer
        assert joined.name == "wire"
        return joined


@pytest_asyncio.fixture
async def house(start: Start) -> AsyncIterator[House]:
    a, b = await start("a"), await start("b", address="127.0.0.1:0")
    ground = await Ground(a, b, await a.connect(b.address)).prepare()
    yield House(ground)
    await ground.still_good()
    ground.forget()


# ---- the double itself ----


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_a_good_wire_peer(house: House, kind: str) -> None:
    with WirePeer(getattr(house, kind)).handshake() as wirepeer:
        peer = await house.meet(wirepeer)
        assert list(wirepeer.regions()) == [b"ground"]
        wirepeer.send(wire.NOTE, 1, wire.note(b"a\0b", b"topic"))
        assert wirepeer.expect(wire.NOTE_ACK).arg == 1
        note = await house.engine.notes("topic").get()
        assert (note.payload, note.peer) == (b"a\0b", peer)
        await asyncio.sleep(0)  # credit goes back once in a turn of the loop, which the double blocks while it reads
        assert wirepeer.expect(wire.CREDIT).arg == 1
        sent = peer.notify(b"back", topic="t")
        frame = wirepeer.expect(wire.NOTE)
        assert (frame.arg, frame.body) == (1, wire.note(b"back", b"t"))
        assert not sent.done()
        wirepeer.send(wire.NOTE_ACK, 1)
        await sent
        wirepeer.send(wire.REGION_ADD, 0, wire.entry(77, b"mine", nbytes=8192))
        assert (await peer.region("mine")).nbytes == 8192
        wirepeer.send(wire.BYE)
        assert "the peer closed" in (await house.event("lost")).detail


async def test_a_wire_peer_that_owns_memory(house: House) -> None:
    engine = house.engine
    source = await engine.allocate(8192)
    memoryview(source)[:] = noise(8192).tobytes()
    fd = wire.memfd(12288)
    with WirePeer(house.unix).handshake() as wirepeer, mmap.mmap(fd, 12288) as memory:
        peer = await house.meet(wirepeer)
        wirepeer.send(wire.REGION_ADD, 0, wire.entry(9, b"mine", nbytes=8192, addr=1000))
        transfer = peer.write(source, await peer.region("mine"))
        assert wirepeer.expect(wire.MAP_ASK).arg == 9
        wirepeer.send(wire.MAP_ANSWER, 9, struct.pack("<I", 0), fd=fd)
        await transfer
        assert memory[1000:9192] == bytes(source)
        assert not any(memory[:1000])
        assert not any(memory[9192:])
        wirepeer.revoke(1, wire.spans(9, (0, 100)))
        wirepeer.alive()
        with pytest.raises(aiohixl.RemoteAccessError):
            await peer.write(source, (await peer.region("mine")))
        wirepeer.send(wire.REGION_DEL, 9)
        wirepeer.alive()
        while "mine" in peer.regions:
            await asyncio.sleep(0)


# ---- region tables ----


async def test_malformed_region_entries(house: House) -> None:
    good = wire.entry()
    for body in (
        good[: wire.ENTRY.size - 1],
        good[:-1],
        b"x",
        wire.entry(name=b""),
        wire.entry(name=b"x" * 129),
        wire.entry(name_len=7),
        wire.entry(name_len=(1 << 32) - 1),
        wire.entry(blob_len=1),
        wire.entry(blob_len=(1 << 32) - 1),
        wire.entry(blob=bytes((512 << 10) + 1)),
        wire.entry(kind=0),
        wire.entry(kind=5),
        wire.entry(nbytes=1 << 63),
        wire.entry(nbytes=4096, addr=(1 << 64) - 4095),
        wire.entry(nbytes=4096, direct=(1 << 64) - 4095),
        good + good,
        wire.entry(1) + wire.entry(2) + wire.entry(1),
        good + b"\0",
    ):
        await house.breaks(wire.frame(wire.REGION_ADD, 0, body), "region entry")
    await house.breaks(wire.frame(wire.REGION_ADD, 0, good) * 2, "impossible region entry")


async def test_regions_that_were_never_announced(house: House) -> None:
    for ident in (0, 1, (1 << 64) - 1):
        await house.breaks(wire.frame(wire.REGION_DEL, ident), "never announced")
    twice = wire.frame(wire.REGION_ADD, 0, wire.entry(5)) + wire.frame(wire.REGION_DEL, 5) * 2
    await house.breaks(twice, "never announced")
    await house.breaks(wire.frame(wire.TABLE_END), "ends twice")


async def test_more_regions_than_a_peer_may_announce(house: House) -> None:
    entries = [wire.entry(i, b"r") for i in range(65537)]
    frames = [wire.frame(wire.REGION_ADD, 0, b"".join(entries[i : i + 8192])) for i in range(0, 65537, 8192)]
    with WirePeer(house.unix).handshake() as peer:
        for data in frames:
            peer.send_bytes(data)
        peer.rest()
    assert "impossible region entry" in (await house.event("lost")).detail


async def test_layouts_that_are_none(house: House, quiet_loop: list[dict[str, Any]]) -> None:
    with WirePeer(house.unix).handshake() as wirepeer:
        peer = await house.meet(wirepeer)
        for i, blob in enumerate((b"", b"x", b"\xff" * 40, b"\x02\0\0\0{}", b"\x10\0\0\0" + b"[" * 16)):
            wirepeer.send(wire.REGION_ADD, 0, wire.entry(i, b"kv%d" % i, blob, kind=3))
        wirepeer.send(wire.REGION_ADD, 0, wire.entry(50, b"last"))
        await peer.region("last")
        assert peer.caches == {}
        assert len(quiet_loop) == 5
        assert all("announced a KV cache" in context["message"] for context in quiet_loop)
        quiet_loop.clear()
        wirepeer.alive()


# ---- notes ----


async def test_notes_out_of_order(house: House) -> None:
    for first in (0, 2, (1 << 64) - 1):
        await house.breaks(wire.frame(wire.NOTE, first, wire.note(b"x")), "impossible note")
    await house.breaks(wire.frame(wire.NOTE, 1, wire.note(b"once")) * 2, "impossible note")
    notes = [await house.engine.notes().get() for _ in range(2)]  # one from each kind of link, and not again
    assert [n.payload for n in notes] == [b"once"] * 2
    assert len(house.engine.notes()) == 0


async def test_malformed_notes(house: House) -> None:
    for body in (b"", bytes(7)):
        await house.breaks(wire.frame(wire.NOTE, 1, body), "truncated note")
    for body in (
        wire.note(topic_len=1),
        wire.note(b"x" * 100, topic_len=101),
        wire.note(b"x" * 300, topic_len=257),
        wire.note(topic_len=(1 << 32) - 1),
        wire.note(bytes((64 << 10) + 1)),
    ):
        await house.breaks(wire.frame(wire.NOTE, 1, body), "impossible note")
    assert house.engine.stats()["notes_waiting"] == {}


async def test_more_notes_than_there_is_credit_for(house: House) -> None:
    flood = b"".join(wire.frame(wire.NOTE, i, wire.note(b"%d" % i)) for i in range(1, 258))
    await house.breaks(flood, "impossible note")
    assert len(house.engine.notes()) == 2 * 256


async def test_acknowledgements_and_credit_that_are_none(house: House) -> None:
    for seq in (0, 1, 5):
        await house.breaks(wire.frame(wire.NOTE_ACK, seq), "acknowledges a note out of order")
    for credit in (1, 257, 1 << 32, (1 << 64) - 1):
        await house.breaks(wire.frame(wire.CREDIT, credit), "more note credit")
    with WirePeer(house.unix).handshake() as wirepeer:
        peer = await house.meet(wirepeer)
        sent = [peer.notify(b"%d" % i) for i in range(2)]
        wirepeer.expect(wire.NOTE)
        wirepeer.expect(wire.NOTE)
        wirepeer.send(wire.NOTE_ACK, 2)  # the second before the first
        for transfer in sent:
            with pytest.raises(aiohixl.PeerLostError, match="'wire'"):
                await transfer


# ---- revocations ----


async def test_malformed_revocations(house: House) -> None:
    for kind, seq in ((wire.REVOKE, 1), (wire.GRANT, 0)):
        for body in (b"", bytes(7), bytes(9), bytes(8 + 15), bytes(8 + 17)):
            await house.breaks(wire.frame(kind, seq, body), "malformed revocation")
        for value in TOO_MUCH:
            await house.breaks(wire.frame(kind, seq, wire.spans(1, (value, 1))), "malformed revocation")
            await house.breaks(wire.frame(kind, seq, wire.spans(1, (0, 1), (1, value))), "malformed revocation")
    for seq in (0, 2, (1 << 64) - 1):
        await house.breaks(wire.frame(wire.REVOKE, seq, wire.spans(1, (0, 1))), "malformed revocation")


async def test_revocations_of_what_does_not_exist_are_harmless(house: House) -> None:
    with WirePeer(house.unix).handshake() as peer:
        peer.send(wire.REVOKE, 1, wire.spans(12345, (0, 1 << 62)))
        peer.send(wire.GRANT, 0, wire.spans(54321, ((1 << 63) - 1, (1 << 63) - 1)))
        peer.send(wire.REVOKE, 2, wire.spans(0))
        peer.alive()


# ---- descriptors ----


async def test_pages_that_are_none(house: House) -> None:
    def pipe() -> int:
        ends = os.pipe()
        os.close(ends[1])
        return ends[0]

    makers: list[Callable[[], int]] = [
        lambda: wire.memfd(seals=0),
        lambda: wire.memfd(seals=fcntl.F_SEAL_SHRINK),
        lambda: wire.memfd(4095),
        lambda: wire.memfd(8192),
        lambda: wire.memfd(0),
        lambda: os.open("/dev/null", os.O_RDWR),
        lambda: os.open("/dev/zero", os.O_RDWR),
        lambda: os.open(__file__, os.O_RDONLY),
        pipe,
    ]
    for make in makers:
        with WirePeer(house.unix) as peer:
            peer.authenticate()
            peer.send(wire.PAGE, fd=make())
            peer.rest()
        assert "shared page is missing" in (await house.event("refused")).detail
    with WirePeer(house.unix) as peer:
        peer.authenticate()
        peer.send(wire.PAGE)
        peer.rest()
    assert "shared page is missing" in (await house.event("refused")).detail
    for kind in (wire.TABLE_END, wire.NOTE, wire.REGION_ADD, 999):
        with WirePeer(house.tcp) as peer:
            peer.authenticate()
            peer.send(kind)
            peer.rest()
        assert "page comes first" in (await house.event("refused")).detail
    await house.breaks(wire.frame(wire.PAGE, nfds=1), "descriptor where none", (wire.memfd(),))


async def test_mappings_that_cannot_be(house: House) -> None:
    engine = house.engine
    source = await engine.allocate(8192)
    with WirePeer(house.unix).handshake() as wirepeer:
        peer = await house.meet(wirepeer)
        answers: list[tuple[int, int | None]] = [
            (0, wire.memfd(8192, seals=0)),
            (0, wire.memfd(8192, seals=fcntl.F_SEAL_GROW)),
            (0, wire.memfd(4096)),
            (0, wire.memfd(0)),
            (0, os.open("/dev/zero", os.O_RDWR)),
            (0, os.open("/dev/null", os.O_RDWR)),
            (0, None),
            (13, None),
            ((1 << 32) - 1, None),
        ]
        for ident, (error, fd) in enumerate(answers):
            wirepeer.send(wire.REGION_ADD, 0, wire.entry(ident, b"r%d" % ident, nbytes=8192))
            transfer = peer.write(source, await peer.region(f"r{ident}"))
            assert wirepeer.expect(wire.MAP_ASK).arg == ident
            wirepeer.send(wire.MAP_ANSWER, ident, struct.pack("<I", error), fd=fd)
            with pytest.raises(aiohixl.TransferError):
                await transfer
            wirepeer.alive()
        wirepeer.send(wire.MAP_ANSWER, 999, struct.pack("<I", 0), fd=wire.memfd())  # nobody asked
        wirepeer.send(wire.MAP_ANSWER, 0, struct.pack("<I", 0), fd=wire.memfd())  # answered before
        wirepeer.alive()
        wirepeer.send(wire.MAP_ASK, 12345)
        assert struct.unpack("<I", wirepeer.expect(wire.MAP_ANSWER).body) == (2,)  # ENOENT
    await house.breaks(wire.frame(wire.MAP_ANSWER, 1, bytes(3)), "malformed answer to a map request")
    await house.breaks(wire.frame(wire.MAP_ANSWER, 1, bytes(4), nfds=1), "malformed answer to a map request")
    await house.breaks(wire.frame(wire.MAP_ANSWER, 1, bytes(5), nfds=1), "malformed answer", (wire.memfd(),))


async def test_contract_10_a_peer_cannot_map_read_only_memory_for_writing(house: House) -> None:
    await house.engine.allocate(4096, "fixed", access="r")
    await (await house.ground.a.connect(house.engine.address)).region("fixed")  # it has been announced
    with WirePeer(house.unix).handshake() as peer:
        ids = peer.regions()
        for name, writable in ((b"fixed", False), (b"ground", True)):
            peer.send(wire.MAP_ASK, ids[name])
            assert peer.expect(wire.MAP_ANSWER).nfds == 1
            fd = peer.fds[-1]
            mmap.mmap(fd, 4096, prot=mmap.PROT_READ).close()
            with contextlib.nullcontext() if writable else pytest.raises(PermissionError):
                mmap.mmap(fd, 4096).close()
            with pytest.raises(OSError, match=r"not permitted|Invalid"):
                os.ftruncate(fd, 0)


# ---- frames ----


async def test_frames_of_unknown_types(house: House) -> None:
    for kind in (0, wire.HELLO, wire.ANSWER, wire.AUTH, wire.READY, wire.REJECT, wire.PAGE, 22, 999, 65535):
        await house.breaks(wire.frame(kind, 7, b"future"), "unknown frame type")
    with WirePeer(house.tcp).handshake() as peer:
        for kind in (22, 999, 65535):
            peer.send_bytes(wire.frame(kind, 7, b"future", flags=wire.OPTIONAL))
        peer.alive()
    await house.breaks(wire.frame(22, flags=wire.OPTIONAL, nfds=1), "descriptor where none", (wire.memfd(),))
    await house.breaks(wire.frame(wire.PING, nfds=1), "descriptor where none")


async def test_frames_of_a_path_that_we_do_not_have(house: House) -> None:
    await house.breaks(wire.frame(wire.PATH, 0, b"\4\0\0\0hixl12345678127.0.0.1:1"), "impossible path")
    await house.breaks(wire.frame(wire.PATH, 0, b"\4"), "truncated path")
    await house.breaks(wire.frame(wire.REVOKE_ACK, 1), "acknowledges a revocation that it was not sent")


async def test_frames_of_every_size(house: House) -> None:
    most = wire.FRAME_MAX - wire.FRAME.size
    with WirePeer(house.unix).handshake() as peer:
        for size in (0, 1, 65535, 65536, most):
            peer.send_bytes(wire.frame(999, 0, bytes(size), flags=wire.OPTIONAL))
        peer.alive()
        for byte in wire.frame(wire.PING, 5):
            peer.send_bytes(bytes([byte]))
        assert peer.expect(wire.PONG).arg == 5
    for length in (0, 15, wire.FRAME_MAX + 1, (1 << 32) - 1):
        await house.breaks(wire.frame(999, flags=wire.OPTIONAL, length=length), f"frame of {length} bytes")
    await house.breaks(wire.frame(wire.PING, nfds=2), "frame of 16 bytes")


async def test_a_peer_that_does_not_read(start: Start) -> None:
    """What is queued for it is bounded; then it is lost."""
    a, b = await start("a"), await start("b")
    ground = await Ground(a, b, await a.connect(b.address)).prepare()
    house = House.__new__(House)
    house.ground, house.engine, house.events = ground, b, b.events()
    with WirePeer(b.address).handshake() as peer:
        ping = wire.frame(wire.PING) * 4096
        sent = 0
        peer.sock.settimeout(0.2)
        try:
            while sent < 1 << 30:
                peer.sock.sendall(ping)
                sent += len(ping)
        except OSError:
            pass
        assert sent < 1 << 30
    assert (await house.event("lost")).peer.name == "wire"
    await ground.still_good()
    ground.forget()


# ---- whatever else ----


def valid_frames() -> list[bytes]:
    return [
        wire.frame(wire.TABLE_END),
        wire.frame(wire.REGION_ADD, 0, wire.entry(1, b"one") + wire.entry(2, b"two", b"blob", kind=2)),
        wire.frame(wire.REGION_DEL, 1),
        wire.frame(wire.NOTE, 1, wire.note(b"payload", b"fuzz")),
        wire.frame(wire.NOTE, 2, wire.note(b"", b"fuzz", flags=1)),
        wire.frame(wire.MAP_ASK, 1),
        wire.frame(wire.MAP_ANSWER, 2, bytes(4)),
        wire.frame(wire.REVOKE, 1, wire.spans(1, (0, 10), (20, 30))),
        wire.frame(wire.GRANT, 0, wire.spans(1, (0, 10))),
        wire.frame(wire.PING, 3),
        wire.frame(wire.PONG, 3),
        wire.frame(wire.CREDIT, 0),
        wire.frame(wire.BYE),
    ]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_mutated_frames(house: House, kind: str, quiet_loop: list[dict[str, Any]]) -> None:
    @FUZZ
    @given(st.data())
    def send(data: st.DataObject) -> None:
        frames = data.draw(st.lists(st.sampled_from(valid_frames()), min_size=1, max_size=8))
        said = bytearray(b"".join(frames))
        for _ in range(data.draw(st.integers(0, 4))):
            said[data.draw(st.integers(0, len(said) - 1))] = data.draw(st.integers(0, 255))
        with WirePeer(getattr(house, kind)) as peer:
            peer.authenticate()
            peer.send(wire.PAGE, fd=wire.memfd() if peer.local else None)
            peer.send_bytes(bytes(said[: data.draw(st.integers(1, len(said)))]))
            with contextlib.suppress(OSError):
                peer.sock.shutdown(socket.SHUT_WR)
            peer.rest()

    send()
    # Layouts that make no sense are told to the loop, and nothing else is.
    await house.ground.still_good()
    assert all("announced a KV cache" in context["message"] for context in quiet_loop)
    quiet_loop.clear()
