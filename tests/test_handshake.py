# SPDX-License-Identifier: Apache-2.0
"""Strangers at the door: whatever they send, they are refused, and the engine goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import wirepeer as wire
from conftest import Start
from ground import Ground, noise
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import until
from wirepeer import WirePeer

import aiohixl
from aiohixl.notes import Inbox

FUZZ = settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
GARBAGE = {
    "zeros": bytes(64),
    "ones": b"\xff" * 64,
    "noise": noise(4096).tobytes(),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c40303") + noise(200).tobytes(),
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "shorter than its own head": wire.frame(wire.HELLO, length=15),
    "too long": wire.frame(wire.HELLO, length=wire.FRAME.size + wire.HELLO_MAX + 1),
    "as long as an established link may": wire.frame(wire.HELLO, length=wire.FRAME_MAX),
    "4 GiB": wire.frame(wire.HELLO, length=(1 << 32) - 1),
    "two descriptors announced": wire.frame(wire.HELLO, 0, wire.greeting(), nfds=2),
}


class Door:
    """An engine with a good peer, its addresses, and its count of strangers refused."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.engine = ground.b
        self.unix, self.tcp = ground.b.address.split(",")
        self.events: Inbox[aiohixl.Event] = ground.b.events()
        self.refused = 0

    async def turned_away(self, why: str = "") -> str:
        """One more stranger was refused; the reason."""
        async with asyncio.timeout(20):
            while (event := await self.events.get()).kind != "refused":
                pass
        self.refused += 1
        assert why in event.detail, event.detail
        assert self.engine.stats()["refused"] == self.refused
        return event.detail

    async def still_good(self) -> None:
        """The good peer, a new one of each kind, and no stranger left."""
        await self.ground.still_good()
        for address in (self.unix, self.tcp):
            with WirePeer(address).handshake() as peer:
                peer.alive()


@pytest_asyncio.fixture
async def door(start: Start) -> AsyncIterator[Door]:
    a, b = await start("a"), await start("b", address="127.0.0.1:0")
    ground = await Ground(a, b, await a.connect(b.address)).prepare()
    yield Door(ground)
    ground.forget()


@pytest.mark.parametrize("what", GARBAGE)
async def test_garbage(door: Door, what: str) -> None:
    for address in (door.unix, door.tcp):
        with WirePeer(address) as stranger:
            stranger.send_bytes(GARBAGE[what])
            assert not stranger.rest(), "nothing is said to who does not speak the protocol"
        await door.turned_away("not a control link")
    await door.still_good()


async def test_greetings_cut_short_at_every_length(door: Door) -> None:
    hello = wire.frame(wire.HELLO, 0, wire.greeting(b"cut"))
    for address in (door.unix, door.tcp):
        for length in range(len(hello)):
            with WirePeer(address) as stranger:
                stranger.send_bytes(hello[:length])
            await door.turned_away("handshake ended early")
    await door.still_good()


async def test_greetings_of_every_wrong_size(door: Door) -> None:
    hello = wire.greeting(b"short")
    for length in [*range(len(hello)), len(hello) + 1, wire.HELLO_MAX]:
        body = hello[:length].ljust(length, b"x")
        with WirePeer(door.unix) as stranger:
            stranger.send(wire.HELLO, 0, body)
            assert not stranger.rest()
        await door.turned_away("truncated greeting" if length < wire.GREETING.size else "not a greeting")
    await door.still_good()


async def test_greetings_that_are_none(door: Door) -> None:
    for hello in (
        wire.greeting(magic=wire.MAGIC ^ 1),
        wire.greeting(magic=0),
        wire.greeting(b""),
        wire.greeting(b"x" * 129),
        wire.greeting(b"a\0b"),
        wire.greeting(b"\0"),
        wire.greeting(b"x", b"b\0"),
        wire.greeting(b"xx", name_len=1),
        wire.greeting(b"xx", name_len=3),
        wire.greeting(b"xx", name_len=(1 << 32) - 1),
        wire.greeting(b"xx", want_len=1),
        wire.greeting(b"x", want_len=(1 << 32) - 2),
        wire.greeting(b"x", b"y" * 129),
    ):
        if len(hello) <= wire.HELLO_MAX:
            with WirePeer(door.tcp) as stranger:
                stranger.send(wire.HELLO, 0, hello)
                assert not stranger.rest()
            await door.turned_away("not a greeting")
    await door.still_good()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_strangers_who_speak_it_are_told_why(door: Door, kind: str) -> None:
    address = getattr(door, kind)
    own = bytes.fromhex(door.engine.incarnation)
    for hello, why in (
        (wire.greeting(versions=(2, 9)), "protocol versions"),
        (wire.greeting(versions=(0, 0)), "protocol versions"),
        (wire.greeting(versions=(2, 1)), "protocol versions"),
        (wire.greeting(incarnation=own), "this engine itself"),
        (wire.greeting(want=b"c"), "you asked for engine 'c', this is 'b'"),
        (wire.greeting(want=b"b", wanted=bytes(16)), "another incarnation"),
        (wire.greeting(secret=True), "secret"),
    ):
        with WirePeer(address) as stranger:
            answer = stranger.greet(hello)
            assert answer.type == wire.REJECT
            assert why in answer.body.decode()
            assert not stranger.rest()
        await door.turned_away(why)
    with WirePeer(address).handshake(wire.greeting("é🦆".encode(), b"b", wanted=own)) as friend:
        friend.alive()
    await door.still_good()


async def test_frames_that_do_not_begin_a_handshake(door: Door) -> None:
    kinds = [0, *(kind for kind in range(2, 30) if kind != 22), 255, 65535]  # 22 begins a data connection
    for flags in (0, wire.OPTIONAL):
        for kind in kinds:
            with WirePeer(door.unix) as stranger:
                stranger.send_bytes(wire.frame(kind, 0, b"x" * 32, flags=flags))
                assert not stranger.rest()
            await door.turned_away(f"frame type {kind} in the handshake")
    with WirePeer(door.unix) as stranger:
        stranger.send_bytes(wire.frame(22, 0, b"x" * 40))
        assert not stranger.rest()
    await door.turned_away("a data connection that belongs to no peer")
    await door.still_good()


async def test_frames_out_of_turn_in_the_handshake(door: Door) -> None:
    for kind in [0, *range(1, 30)]:
        if kind == wire.AUTH:
            continue
        with WirePeer(door.tcp) as stranger:
            assert stranger.greet().type == wire.ANSWER
            stranger.send(kind, 0, bytes(32))
            assert not stranger.rest()
        await door.turned_away("in the handshake")
    for proof in (b"", bytes(31), bytes(33), b"\1" + bytes(31)):
        with WirePeer(door.tcp) as stranger:
            stranger.greet()
            stranger.send(wire.AUTH, 0, proof)
            (reject,) = stranger.rest()
            assert reject.type == wire.REJECT
        await door.turned_away("secrets differ")
    await door.still_good()


async def test_descriptors_before_authentication(door: Door) -> None:
    with WirePeer(door.unix) as stranger:
        stranger.send(wire.HELLO, 0, wire.greeting(), fd=wire.memfd())
        assert not stranger.rest()
    await door.turned_away("descriptors before authentication")
    with WirePeer(door.unix) as stranger:
        stranger.greet()
        stranger.send(wire.AUTH, 0, bytes(32), fd=os.open("/dev/null", os.O_RDONLY))
        assert not stranger.rest()
    await door.turned_away("descriptors before authentication")
    with WirePeer(door.unix) as stranger:  # more than anybody would keep, and none announced
        stranger.send_bytes(wire.frame(wire.HELLO, 0, wire.greeting()), tuple(wire.memfd() for _ in range(40)))
        assert not stranger.rest()
    await door.turned_away("descriptor")
    with WirePeer(door.unix) as stranger:  # smuggled in beside a greeting: it stands in the page's place
        stranger.send_bytes(wire.frame(wire.HELLO, 0, wire.greeting()), (os.open("/dev/null", os.O_RDWR),))
        stranger.expect(wire.ANSWER)
    await door.turned_away("handshake ended early")
    await door.still_good()


async def test_a_silent_stranger(start: Start) -> None:
    a = await start("a", handshake_timeout=0.1)
    b = await start("b", handshake_timeout=0.1, address="127.0.0.1:0")
    ground = await Ground(a, b, await a.connect(b.address)).prepare()
    door = Door(ground)
    hello = wire.frame(wire.HELLO, 0, wire.greeting())
    for address in (door.unix, door.tcp):
        for said in (b"", hello[:20], hello):
            with WirePeer(address) as stranger:
                stranger.send_bytes(said)
                await door.turned_away("no handshake within 0.1 s")
                assert [f.type for f in stranger.rest()] == ([wire.ANSWER] if said is hello else [])
    # Nor does a listener that accepts and says nothing hold up a connect.
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with pytest.raises(aiohixl.PeerUnreachableError, match=r"no handshake within 0\.1 s"):
            await a.connect(f"tcp://127.0.0.1:{mute.getsockname()[1]}")
    await door.still_good()
    ground.forget()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_thousands_of_strangers_at_once(start: Start, kind: str) -> None:
    a, b = await start("a"), await start("b", address="127.0.0.1:0", handshake_timeout=0.3)
    door = Door(await Ground(a, b, await a.connect(b.address)).prepare())
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, limit[1]), limit[1]))
    address = getattr(door, kind)
    with contextlib.ExitStack() as crowd:
        crowd.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limit)
        for _ in range(2000):
            crowd.enter_context(wire.dial(address))
        await door.ground.still_good()  # who is known is served
        peer = await a.connect(address)  # and who is not finds room once the first strangers' time is up
        await peer.notify(b"here")
        assert (await door.engine.notes().get()).payload == b"here"
    await door.ground.still_good()
    door.ground.forget()


async def test_hundreds_of_friends_at_once(start: Start) -> None:
    b = await start("b")
    engines = [await start(f"a{i}", copy_threads=1) for i in range(8)]
    # A target of its own for each connect, since those to one target share a link.
    targets = [f"unix:///nowhere/{i},{b.address}" for i in range(40)]
    peers = await asyncio.gather(*(engine.connect(target) for engine in engines for target in targets))
    assert len({id(peer) for peer in peers}) == 320
    await until(lambda: b.stats()["peers"] == 320, "b knows of them all")
    await asyncio.gather(*(peer.notify(b"%d" % i) for i, peer in enumerate(peers)))
    inbox = b.notes()
    assert sorted([int((await inbox.get()).payload) for _ in peers]) == list(range(320))


# ---- whatever else they may say ----


async def test_random_bytes(door: Door) -> None:
    @FUZZ
    @given(st.binary(max_size=600), st.booleans())
    def send(data: bytes, tcp: bool) -> None:
        with WirePeer(door.tcp if tcp else door.unix) as stranger:
            stranger.send_bytes(data)
            with contextlib.suppress(OSError):
                stranger.sock.shutdown(socket.SHUT_WR)
            assert not stranger.rest()

    send()
    await door.still_good()


async def test_mutated_greetings(door: Door) -> None:
    @FUZZ
    @given(st.data(), st.booleans())
    def send(data: st.DataObject, tcp: bool) -> None:
        hello = bytearray(wire.frame(wire.HELLO, 0, wire.greeting(b"mutant", b"b")))
        for _ in range(data.draw(st.integers(1, 4))):
            hello[data.draw(st.integers(0, len(hello) - 1))] = data.draw(st.integers(0, 255))
        cut = data.draw(st.integers(0, len(hello)))
        with WirePeer(door.tcp if tcp else door.unix) as stranger:
            stranger.send_bytes(bytes(hello[: cut or None]) + wire.frame(wire.AUTH, 0, bytes(32)))
            with contextlib.suppress(OSError):
                stranger.sock.shutdown(socket.SHUT_WR)
            for found in stranger.rest():
                assert found.type in (wire.ANSWER, wire.REJECT, wire.READY, wire.PAGE, wire.REGION_ADD, wire.TABLE_END)

    send()
    await door.still_good()
