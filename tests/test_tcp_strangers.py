# SPDX-License-Identifier: Apache-2.0
"""Contract 11 on the port of the tcp transport: strangers are refused, told of once, and disturb nobody."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import wirepeer as wire
from conftest import Start
from datapeer import HELLO_DATA, PROOF_DATA, DataLink, DataPeer
from ground import Ground
from processes import until
from wirepeer import WirePeer

import aiohixl
from aiohixl.notes import Inbox

SECRET = "a secret of two"
KEY = SECRET.encode()
SOON = 1.0  # seconds; of the handshake: two tests wait for its end


class House:
    """Engine ``b`` of a pair that shares a secret, and what it says of those who come to its door."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.engine = ground.b
        self.address = next(a for a in ground.b.address.split(",") if a.startswith("tcp://"))
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        self.place = (host, int(port))
        self.events: Inbox[aiohixl.Event] = ground.b.events()
        self.expected = 0

    async def refused(self, *texts: str) -> None:
        """Exactly one more refusal for each text, which is part of it."""
        for text in texts:
            async with asyncio.timeout(20):
                while (event := await self.events.get()).kind != "refused":
                    pass
            assert text in event.detail, event.detail
        self.expected += len(texts)
        assert self.engine.stats()["refused"] == self.expected
        assert len(self.events) == 0

    def dial(self) -> socket.socket:
        return socket.create_connection(self.place, wire.PATIENCE)

    def says(self, data: bytes) -> bytes:
        """What a stranger hears who says that, and leaves when the engine does."""
        with self.dial() as sock:
            sock.sendall(data)
            heard = b""
            try:
                while piece := sock.recv(4096):
                    heard += piece
            except ConnectionResetError:
                pass
            return heard


@pytest_asyncio.fixture
async def house(start: Start) -> AsyncIterator[House]:
    a = await start("a", transports=["tcp"], secret=SECRET)
    b = await start("b", transports=["tcp"], secret=SECRET, streams=4, handshake_timeout=SOON)
    ground = await Ground(a, b, await a.connect(b.address)).prepare()
    await ground.still_good()  # the data connection has shaken hands: it is counted with the strangers until then
    yield House(ground)
    await ground.still_good()
    assert b.stats()["peers"] == 1
    ground.forget()


# ---- control links ----


@pytest.mark.parametrize("secret", [None, KEY + b"x", KEY[:-1]], ids=["none", "wrong", "prefix"])
async def test_contract_11_without_the_secret(house: House, start: Start, secret: bytes | None) -> None:
    with WirePeer(house.address, secret=secret) as stranger:
        found = stranger.greet()
        if secret is not None:
            assert found.type == wire.ANSWER
            stranger.send(wire.AUTH, 0, stranger.proof(b"i"))
            found = stranger.receive()
        assert found.type == wire.REJECT
        assert stranger.rest() == []
    await house.refused("secret")
    engine = await start("c", transports=["tcp"], **({} if secret is None else {"secret": secret}))
    with pytest.raises(aiohixl.PeerMismatchError, match="secret"):
        await engine.connect(house.address)
    await house.refused("secret")


async def test_contract_11_a_replayed_control_handshake(house: House) -> None:
    with DataPeer(house.address, secret=KEY).meet() as friend:
        friend.alive()
        recorded = [wire.frame(wire.HELLO, 0, friend.hello), wire.frame(wire.AUTH, 0, friend.proof(b"i"))]
    heard = house.says(b"".join(recorded))
    assert b"the secrets differ" in heard
    assert heard.count(b"secrets") == 1
    await house.refused("the secrets differ")


# ---- passers-by ----


async def test_contract_11_a_port_scanner(house: House) -> None:
    """Connects and leaves: at once, by FIN and by RST, or after it has waited to be greeted in vain."""
    with house.dial():
        pass
    await house.refused("handshake ended early")
    link = DataLink(house.place)
    link.reset()
    await house.refused("handshake ended early")
    assert house.says(b"") == b"", "a silent stranger is not spoken to, and put out in the end"
    await house.refused("no handshake within")
    house.ground.check()


async def test_contract_11_a_hundred_scanners_at_once(house: House) -> None:
    """More than may shake hands at a time: the peers that are there do not feel it."""
    scanners = [house.dial() for _ in range(100)]
    for _ in range(20):
        await house.ground.still_good()
    for scanner in scanners:
        scanner.close()
    # Those that found no room left no trace; each of the others one.
    await until(lambda: house.engine.stats()["refused"] >= 64, "the scanners that had room were told of")
    assert house.engine.stats()["refused"] <= 100


async def test_contract_11_those_who_say_nothing_keep_nobody_out(start: Start) -> None:
    """More than may shake hands at a time, for longer than a peer is patient."""
    b = await start("b", transports=["tcp"], secret=SECRET, handshake_timeout=600.0)
    await b.allocate(4096, "target")
    address = next(a for a in b.address.split(",") if a.startswith("tcp://"))
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with contextlib.ExitStack() as silent:
        for _ in range(100):
            silent.enter_context(socket.create_connection((host, int(port)), wire.PATIENCE))
        for name in ("a", "c"):
            engine = await start(name, transports=["tcp"], secret=SECRET)
            peer = await engine.connect(address)
            await peer.write(await engine.allocate(4096), await peer.region("target"))


async def test_contract_11_a_tls_client(house: House) -> None:
    context = ssl.create_default_context()
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(into, out, server_hostname="decode-0")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    assert house.says(out.read()) == b""
    await house.refused("not a control link of aiohixl")


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nHost: decode-0:7700\r\nUser-Agent: curl/8\r\nAccept: */*\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00" * 64,
        b"\xff" * 64,
        b"SSH-2.0-OpenSSH_9.2\r\n" * 4,
    ],
    ids=["http", "http2", "zeros", "ones", "ssh"],
)
async def test_contract_11_another_protocol(house: House, request_: bytes) -> None:
    assert house.says(request_) == b""
    await house.refused("not a control link of aiohixl")


# ---- data connections ----


def data_hello(session: int, stream: int = 0, nonce: bytes | None = None, zero: int = 0) -> bytes:
    body = stream.to_bytes(4, "little") + zero.to_bytes(4, "little") + (nonce or secrets.token_bytes(32))
    return wire.frame(HELLO_DATA, session, body)


async def test_contract_11_a_data_connection_of_no_peer(house: House) -> None:
    for session in (0, 1 << 32, (1 << 64) - 1):
        assert house.says(data_hello(session)) == b""
        await house.refused("belongs to no peer")
    for length in (0, 39, 41, 200):
        assert house.says(wire.frame(HELLO_DATA, 1, bytes(length))) == b""
        await house.refused("")
    for kind in (HELLO_DATA + 1, PROOF_DATA, PROOF_DATA + 1):
        assert house.says(wire.frame(kind, 1, bytes(64))) == b""
        await house.refused("")


async def test_contract_11_a_data_connection_without_the_secret(house: House) -> None:
    """The session of a peer is no secret; to know it is not enough."""
    with DataPeer(house.address, secret=KEY).meet() as friend:
        for proof in (bytes(32), secrets.token_bytes(32), bytes(31), bytes(33), b""):
            with DataLink(house.place) as thief:
                assert thief.hello(friend.session, 0, secrets.token_bytes(32)) is not None
                thief.send(wire.frame(PROOF_DATA, 0, proof))
                assert thief.frame() is None
            await house.refused("without the secret")
        with DataLink(house.place) as thief:  # what the engine has proved, sent back
            answer = thief.hello(friend.session, 0, secrets.token_bytes(32))
            assert answer is not None
            thief.send(wire.frame(PROOF_DATA, 0, answer[32:]))
            assert thief.frame() is None
        await house.refused("without the secret")
        with friend.open() as link:
            assert link.read(friend.remotes()[b"ground"], [(0, 16)]) == house.ground.model[:16].tobytes()
        friend.alive()


async def test_contract_11_a_replayed_data_handshake(house: House) -> None:
    with DataPeer(house.address, secret=KEY).meet() as friend:
        nonce = secrets.token_bytes(32)
        with DataLink(house.place) as link:
            answer = link.hello(friend.session, 1, nonce)
            assert answer is not None
            proof = friend.prove(b"i", friend.session, 1, nonce + answer[:32])
            link.send(wire.frame(PROOF_DATA, 0, proof))
            assert link.frame() is not None
        heard = house.says(data_hello(friend.session, 1, nonce) + wire.frame(PROOF_DATA, 0, proof))
        assert len(heard) == wire.FRAME.size + 64, "an answer with another nonce, and nothing else"
        assert answer[:32] not in heard
        await house.refused("without the secret")
        friend.alive()
        # A proof for one stream is none for another.
        with DataLink(house.place) as thief:
            again = thief.hello(friend.session, 2, nonce)
            assert again is not None
            thief.send(wire.frame(PROOF_DATA, 0, friend.prove(b"i", friend.session, 1, nonce + again[:32])))
            assert thief.frame() is None
        await house.refused("without the secret")


async def test_contract_11_a_data_connection_of_a_peer_that_is_lost(house: House) -> None:
    friend = DataPeer(house.address, secret=KEY).meet()
    with friend.open() as link:
        friend.close()
        assert link.ended(), "its data connections go with it"
    await until(lambda: house.engine.stats()["peers"] == 1, "the peer is lost")
    assert house.says(data_hello(friend.session)) == b""
    await house.refused("belongs to no peer")


async def test_contract_11_a_peer_that_is_lost_in_the_handshake(house: House) -> None:
    friend = DataPeer(house.address, secret=KEY).meet()
    with DataLink(house.place) as link:
        nonce = secrets.token_bytes(32)
        answer = link.hello(friend.session, 0, nonce)
        assert answer is not None
        friend.close()
        await until(lambda: house.engine.stats()["peers"] == 1, "the peer is lost")
        link.send(wire.frame(PROOF_DATA, 0, friend.prove(b"i", friend.session, 0, nonce + answer[:32])))
        assert link.ended()
    await house.refused("not wanted any more")


async def test_contract_11_a_data_handshake_that_does_not_end(house: House) -> None:
    """Slowly, byte by byte, or not at all: the deadline is that of all handshakes."""
    with DataPeer(house.address, secret=KEY).meet() as friend:
        with DataLink(house.place) as link:
            assert link.hello(friend.session, 0, bytes(32)) is not None
            assert link.frame() is None
        await house.refused("no handshake within")
        with house.dial() as sock:
            sock.settimeout(0.02)
            try:
                for byte in data_hello(friend.session) * 1000:
                    sock.sendall(bytes([byte]))
                    try:
                        assert sock.recv(1) == b""
                        break
                    except TimeoutError:
                        continue
                else:
                    raise AssertionError("it may take all the time in the world")
            except (BrokenPipeError, ConnectionResetError):
                pass
        await house.refused("no handshake within")
        friend.alive()


async def test_contract_11_streams_beyond_those_agreed(house: House) -> None:
    with DataPeer(house.address, secret=KEY).meet(streams=1) as friend:
        for stream in (1, 15, 16, 1 << 31, (1 << 32) - 1):
            with DataLink(house.place) as link:
                nonce = secrets.token_bytes(32)
                answer = link.hello(friend.session, stream, nonce)
                if answer is not None:
                    link.send(
                        wire.frame(PROOF_DATA, 0, friend.prove(b"i", friend.session, stream, nonce + answer[:32]))
                    )
                assert link.ended()
        friend.alive()
