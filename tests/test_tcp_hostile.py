# SPDX-License-Identifier: Apache-2.0
"""Contract 10 on TCP: a peer that has proved itself, and then says on its data connection what no engine would. What it
may not is refused and lands nowhere; what is not the protocol costs it the connection, and nobody else anything."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
import pytest_asyncio
import wirepeer as wire
from conftest import Start
from datapeer import (
    CHECKSUM,
    DATA,
    DONE,
    HEAD,
    MAGIC,
    MESSAGE_MAX,
    READ,
    ROWS_MAX,
    STATUS,
    WRITE,
    DataLink,
    DataPeer,
    Remote,
    message,
)
from ground import NBYTES, Ground, noise
from owned import NEW
from processes import until

import aiohixl

Spoil = Callable[[Remote], bytes]
DENIED, BOUNDS = STATUS["REMOTE_ACCESS"], STATUS["BOUNDS"]
HUGE = (1 << 63, (1 << 64) - 1)


class Siege:
    """A ground whose engine ``b`` has a hostile peer beside the good one."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.engine = ground.b
        self.enemy = DataPeer(next(a for a in ground.b.address.split(",") if a.startswith("tcp://"))).meet()
        self.target = self.enemy.remotes()[b"ground"]

    def open(self, stream: int = 0) -> DataLink:
        return self.enemy.open(stream)

    async def settle(self) -> None:
        """The enemy's peer is still one, and nothing has changed that should not have."""
        self.enemy.alive()
        await self.ground.still_good()

    def at_home(self) -> aiohixl.Peer:
        """The engine's peer for the enemy."""
        (peer,) = (p for p in self.engine.peers.values() if p.name == "wire")
        assert isinstance(peer, aiohixl.Peer)
        return peer


@pytest_asyncio.fixture
async def siege(start: Start) -> AsyncIterator[Siege]:
    a = await start("a", transports=["tcp"], streams=4)
    b = await start("b", transports=["tcp"], streams=4, cancel_grace=0.5)
    ground = await Ground(a, b, await a.connect(b.address)).prepare()
    siege = Siege(ground)
    yield siege
    await siege.settle()
    siege.enemy.close()
    await until(lambda: b.stats()["peers"] == 1, "the enemy is lost")
    await ground.still_good()
    ground.forget()


async def test_a_good_data_peer(siege: Siege) -> None:
    with siege.open() as link:
        assert link.write(siege.target, 100, b"hello") == 0
        siege.ground.model[100:105] = np.frombuffer(b"hello", np.uint8)
        assert link.read(siege.target, [(98, 4), (103, 3)]) == (
            siege.ground.model[98:102].tobytes() + siege.ground.model[103:106].tobytes()
        )
        assert link.read(siege.target, []) == b""
        assert link.write(siege.target, 0, b"") == 0
        remote = wire.entry(77, b"theirs", nbytes=4096)
        siege.enemy.send(wire.REGION_ADD, 0, remote)
        peer = siege.at_home()
        transfer = peer.write(siege.ground.target[:4096], await peer.region("theirs"))
        head = link.head()
        assert (head.type, head.region, head.rkey, link.rows(head)) == (WRITE, 77, 5, [(0, 4096)])
        assert link.payload(head) == siege.ground.model[:4096].tobytes()
        link.send(message(DONE, head.id))
        await transfer


# ---- what it may not ----


async def test_contract_10_rows_out_of_bounds(siege: Siege) -> None:
    remote = siege.target
    with siege.open() as link:
        for off in (NBYTES - 3, NBYTES, NBYTES + 1, (1 << 63) - 1, *HUGE, (1 << 64) - 3):
            assert link.write(remote, off, b"evil") == BOUNDS
            assert link.read(remote, [(off, 4)]) == BOUNDS
        # One bad row among good ones: none of them moves.
        for bad in (0, 7, 99):
            rows = [(i * 8, 8) for i in range(100)]
            rows[bad] = (NBYTES - 7, 8)
            link.send(message(WRITE, 9, rows, bytes(800), region=remote.id, rkey=remote.rkey))
            assert link.done().status == BOUNDS
            assert link.read(remote, rows) == BOUNDS
        siege.ground.check()


async def test_contract_10_wrong_keys_and_regions(siege: Siege) -> None:
    remote = siege.target
    unnamed = siege.engine.register(np.zeros(4096, np.uint8))
    await unnamed
    gone = await siege.engine.allocate(4096, "gone")
    old = siege.enemy.await_region(b"gone")
    await gone.deregister()
    with siege.open() as link:
        for rkey in (0, remote.rkey ^ 1, remote.rkey ^ (1 << 63), (1 << 64) - 1):
            assert link.write(remote, 0, b"evil", rkey=rkey) == DENIED
            assert link.read(remote, [(0, 4)], rkey=rkey) == DENIED
        for region in (0, remote.id + 1, remote.id + 2, 1 << 32, (1 << 64) - 1):
            assert link.write(remote, 0, b"evil", region=region) == DENIED
            assert link.read(remote, [(0, 4)], region=region) == DENIED
        assert link.write(old, 0, b"evil") == DENIED
        assert link.read(old, [(0, 4)]) == DENIED
        assert not any(bytes(unnamed))
        siege.ground.check()


async def test_contract_10_access_bits(siege: Siege) -> None:
    fixed = await siege.engine.allocate(4096, "fixed", access="r")
    letterbox = await siege.engine.allocate(4096, "letterbox", access="w")
    readable, writable = siege.enemy.await_region(b"fixed"), siege.enemy.await_region(b"letterbox")
    with siege.open() as link:
        assert link.write(readable, 0, b"evil") == DENIED
        assert link.read(readable, [(0, 4)]) == bytes(4)
        assert link.read(writable, [(0, 4)]) == DENIED
        assert link.write(writable, 0, b"mail") == 0
        assert bytes(fixed) == bytes(4096)
        assert bytes(letterbox)[:4] == b"mail"


async def test_contract_03_revoked_spans(siege: Siege) -> None:
    ground, remote = siege.ground, siege.target
    with siege.open() as link:
        await ground.target.revoke(siege.at_home(), spans=[(4096, 4096)])
        for off, size in ((4096, 4096), (4095, 2), (8191, 2), (5000, 1), (0, 65536)):
            assert link.write(remote, off, bytes(size)) == DENIED
            assert link.read(remote, [(0, 1), (off, size)]) == DENIED
        assert link.write(remote, 0, b"x") == 0
        ground.model[0] = ord("x")
        assert link.read(remote, [(4095, 1), (8192, 1)]) == ground.model[[4095, 8192]].tobytes()
        ground.target.grant(siege.at_home(), spans=[(4096, 4096)])
        siege.enemy.expect(wire.GRANT)
        assert link.write(remote, 4096, b"stale") == DENIED, "a permission from before the revocation"
        assert link.write(remote, 4096, b"again", epoch=1) == 0
        ground.model[4096:4101] = np.frombuffer(b"again", np.uint8)
        link.send(message(WRITE, 1, [(4096, 4)], b"evil", region=remote.id, rkey=remote.rkey, epoch=2))
        assert link.ended(), "nobody has heard of a revocation that is still to come"


# ---- what is not the protocol ----

FORGED: dict[str, Spoil] = {
    "another magic": lambda r: message(WRITE, 1, [(0, 4)], b"evil", region=r.id, rkey=r.rkey, magic=MAGIC ^ 1),
    "no magic": lambda r: bytes(HEAD.size),
    "type 0": lambda r: message(0, 1),
    "type 5": lambda r: message(5, 1),
    "type 65535": lambda r: message(65535, 1),
    "an unknown flag": lambda r: message(WRITE, 1, [(0, 4)], b"evil", region=r.id, rkey=r.rkey, flags=1 << 15),
    "a permission from the future": lambda r: message(WRITE, 1, [(0, 4)], b"evil", region=r.id, rkey=r.rkey, epoch=1),
    "a head that does not fit its checksum": lambda r: message(
        WRITE, 1, [(0, 4)], b"evil", region=r.id, rkey=r.rkey, flags=CHECKSUM, head_crc=1
    ),
    "too many rows": lambda r: message(READ, 1, [(0, 1)] * (ROWS_MAX + 1), region=r.id, rkey=r.rkey),
    "far too many rows": lambda r: message(READ, 1, region=r.id, rkey=r.rkey, nrows=(1 << 32) - 1),
    "rows of a DONE": lambda r: message(DONE, 1, [(0, 0)]),
    "rows of a DATA": lambda r: message(DATA, 1, [(0, 4)], b"evil"),
    "payload of a DONE": lambda r: message(DONE, 1, nbytes=1),
    "too much payload": lambda r: message(
        WRITE, 1, [(0, MESSAGE_MAX + 1)], nbytes=MESSAGE_MAX + 1, region=r.id, rkey=r.rkey
    ),
    "far too much payload": lambda r: message(WRITE, 1, nbytes=(1 << 64) - 1, region=r.id, rkey=r.rkey),
    "too much asked for": lambda r: message(
        READ, 1, [(0, MESSAGE_MAX + 1)], nbytes=MESSAGE_MAX + 1, region=r.id, rkey=r.rkey
    ),
    "rows of more than it says": lambda r: message(
        WRITE, 1, [(0, 3), (8, 2)], b"evil", nbytes=4, region=r.id, rkey=r.rkey
    ),
    "rows of less than it says": lambda r: message(WRITE, 1, [(0, 3)], b"evil", region=r.id, rkey=r.rkey),
    "payload without a row": lambda r: message(WRITE, 1, [], b"evil", region=r.id, rkey=r.rkey),
    "rows whose sum goes round": lambda r: message(
        WRITE, 1, [(0, (1 << 64) - 4), (0, 8)], b"evil", region=r.id, rkey=r.rkey
    ),
    "bytes asked for without a row": lambda r: message(READ, 1, nbytes=4, region=r.id, rkey=r.rkey),
    "DONE to no question": lambda r: message(DONE, 0),
    "DONE to a question of another table": lambda r: message(DONE, (1 << 64) - 1),
    "DATA to no question": lambda r: message(DATA, 1, payload=b"evil"),
    "a frame of the control link": lambda r: wire.frame(wire.PING, 1, bytes(64)),
}


@pytest.mark.parametrize("spoil", FORGED.values(), ids=FORGED)
async def test_contract_10_what_is_not_the_protocol(siege: Siege, spoil: Spoil) -> None:
    with siege.open() as link, siege.open(1) as other:
        link.send(spoil(siege.target))
        assert link.ended()
        siege.ground.check()
        # Its other connections, and its peer, are as they were; and the same stream can be opened again.
        assert other.read(siege.target, [(0, 4)]) == siege.ground.model[:4].tobytes()
    with siege.open() as again:
        assert again.read(siege.target, [(0, 4)]) == siege.ground.model[:4].tobytes()


@pytest.mark.parametrize("size", [1, 63, 64, 65, 79, 80, 100, 4096])
async def test_contract_10_noise(siege: Siege, size: int) -> None:
    data = noise(size, size).tobytes()
    with siege.open() as link:
        link.send(data)
        link.sock.shutdown(socket.SHUT_WR)
        assert link.ended()


async def test_contract_10_bytes_of_many_messages_in_any_pieces(siege: Siege) -> None:
    """Good ones, cut everywhere: not the piece is the message."""
    remote, ground = siege.target, siege.ground
    data, dice = b"", np.random.default_rng(3)
    for ident in range(40):
        off, size = int(dice.integers(0, NBYTES - 300)), int(dice.integers(0, 300))
        payload = noise(size, ident).tobytes()
        data += message(WRITE, ident, [(off, size)], payload, region=remote.id, rkey=remote.rkey)
        ground.model[off : off + size] = np.frombuffer(payload, np.uint8)
    with siege.open() as link:
        at = 0
        while at < len(data):
            step = int(dice.choice([1, 2, 7, 63, 64, 65, 200]))
            link.send(data[at : at + step])
            at += step
        assert [link.done().id for _ in range(40)] == list(range(40))


# ---- answers to what it was asked ----


class Asked:
    """The engine has a write or a read under way to the enemy, and waits."""

    def __init__(self, siege: Siege, link: DataLink, transfer: aiohixl.Transfer, back: aiohixl.Region) -> None:
        self.siege, self.link, self.transfer, self.back = siege, link, transfer, back
        self.head = link.head()
        self.rows = link.rows(self.head)


async def asked(siege: Siege, link: DataLink, kind: str) -> Asked:
    siege.enemy.send(wire.REGION_ADD, 0, wire.entry(77, b"theirs", nbytes=4096))
    peer = siege.at_home()
    remote = await peer.region("theirs")
    back = await siege.engine.allocate(4096)
    transfer = peer.write(siege.ground.target[:4096], remote) if kind == "write" else peer.read(back, remote)
    return Asked(siege, link, transfer, back)


Answer = Callable[[int], bytes]
WRONG: dict[str, tuple[str, Answer]] = {
    "another's answer": ("write", lambda ident: message(DONE, ident + 1)),
    "an answer of another generation": ("write", lambda ident: message(DONE, ident ^ (1 << 32))),
    "an answer from beyond the table": ("write", lambda ident: message(DONE, ident | 0xFFFFFFFF)),
    "data for a write": ("write", lambda ident: message(DATA, ident, payload=bytes(4096))),
    "done without data": ("read", lambda ident: message(DONE, ident)),
    "more data": ("read", lambda ident: message(DATA, ident, payload=bytes(4097))),
    "less data": ("read", lambda ident: message(DATA, ident, payload=bytes(4095))),
    "no data": ("read", lambda ident: message(DATA, ident)),
    "a flag of its own": ("read", lambda ident: message(DATA, ident, payload=bytes(4096), flags=2)),
}
TWICE: dict[str, tuple[str, Answer]] = {
    "done": ("write", lambda ident: message(DONE, ident) * 2),
    "data": ("read", lambda ident: message(DATA, ident, payload=bytes([NEW]) * 4096) * 2),
    "done after data": ("read", lambda i: message(DATA, i, payload=bytes([NEW]) * 4096) + message(DONE, i)),
}


@pytest.mark.parametrize(("kind", "answer"), WRONG.values(), ids=WRONG)
async def test_contract_10_wrong_answers(siege: Siege, kind: str, answer: Answer) -> None:
    with siege.open() as link:
        question = await asked(siege, link, kind)
        if kind == "write":
            link.payload(question.head)
        link.send(answer(question.head.id))
        assert link.ended()
        with pytest.raises(aiohixl.TransferError, match=r"a part .*may have landed") as caught:
            await question.transfer
        assert type(caught.value) is aiohixl.TransferError
        assert bytes(question.back) == bytes(4096)
        assert question.transfer.quiesced


@pytest.mark.parametrize(("kind", "answer"), TWICE.values(), ids=TWICE)
async def test_contract_10_a_second_answer(siege: Siege, kind: str, answer: Answer) -> None:
    """The first is good, and the transfer complete."""
    with siege.open() as link:
        question = await asked(siege, link, kind)
        if kind == "write":
            link.payload(question.head)
        link.send(answer(question.head.id))
        assert link.ended()
        await question.transfer
        if kind == "read":
            assert bytes(question.back) == bytes([NEW]) * 4096


async def test_contract_10_an_answer_before_the_end_of_the_question(siege: Siege) -> None:
    """It has not read what it claims to have stored."""
    size = 32 << 20
    source = siege.engine.register(np.ones(size, np.uint8))
    with siege.open() as link:
        siege.enemy.send(wire.REGION_ADD, 0, wire.entry(78, b"big", nbytes=size))
        peer = siege.at_home()
        transfer = peer.write(source, await peer.region("big"))
        head = link.head()
        ident = head.id
        for _ in range(8):  # what is asked next is not known to it, but may be guessed
            link.send(message(DONE, ident))
            ident += 1
        assert link.ended()
        with pytest.raises(aiohixl.TransferError):
            await transfer
    await source.deregister()


async def test_contract_10_a_refusal_is_an_error_of_the_transfer(siege: Siege) -> None:
    """Whatever number it gives as the reason."""
    with siege.open() as link:
        for kind in ("write", "read"):
            for status in (DENIED, BOUNDS, STATUS["CHECKSUM"], 1, 12, 99, (1 << 32) - 1):
                siege.enemy.send(wire.REGION_ADD, 0, wire.entry(100 + status % 97, b"r", nbytes=4096))
                question = await asked_again(siege, link, kind, 100 + status % 97)
                if kind == "write":
                    link.payload(question.head)
                link.send(message(DONE, question.head.id, status=status))
                with pytest.raises((aiohixl.TransferError, aiohixl.RegionError)):
                    await question.transfer
                siege.enemy.send(wire.REGION_DEL, 100 + status % 97)
                siege.enemy.alive()
                await until(lambda: "r" not in siege.at_home().regions, "it is withdrawn")


async def asked_again(siege: Siege, link: DataLink, kind: str, ident: int) -> Asked:
    peer = siege.at_home()
    remote = await peer.region("r")
    assert remote.id == ident
    back = await siege.engine.allocate(4096)
    transfer = peer.write(siege.ground.target[:4096], remote) if kind == "write" else peer.read(back, remote)
    return Asked(siege, link, transfer, back)


async def test_contract_10_data_with_a_wrong_checksum(siege: Siege) -> None:
    with siege.open() as link:
        question = await asked(siege, link, "read")
        link.send(message(DATA, question.head.id, payload=bytes(4096), flags=CHECKSUM, crc=1))
        with pytest.raises(aiohixl.TransferError):
            await question.transfer


# ---- it ends in the middle ----

PAYLOAD = HEAD.size + 2 * 16  # where that of a message of two rows begins


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("cut", [1, 63, 64, 68, 95, PAYLOAD, PAYLOAD + 1, PAYLOAD + 2000, PAYLOAD + 4095])
async def test_contract_10_an_end_in_the_middle(siege: Siege, how: str, cut: int) -> None:
    """Of the head, of the rows, of the payload: bytes outside the message stay as they are."""
    ground, remote = siege.ground, siege.target
    rows = [(1000, 2048), (8000, 2048)]
    sent = bytes([NEW]) * 4096
    data = message(WRITE, 1, rows, sent, region=remote.id, rkey=remote.rkey)
    with siege.open() as link:
        link.send(data[:cut])
        if how == "fin":
            link.sock.shutdown(socket.SHUT_WR)
            assert link.ended()
        else:
            link.reset()
    with siege.open(1) as other:  # the engine has seen the end of the first, when that can be opened again
        assert other.read(remote, [(0, 1)]) == ground.model[:1].tobytes()
    await ground.target.revoke(siege.at_home())  # nothing of it is on its way any more
    ground.target.grant(siege.at_home())
    touched = np.zeros(NBYTES, bool)
    for off, size in rows:
        touched[off : off + size] = True
    new = ground.memory != ground.model
    assert not new[~touched].any(), "bytes outside the rows changed"
    assert (ground.memory[new] == NEW).all()
    assert new.sum() <= max(0, cut - PAYLOAD)
    ground.model[:] = ground.memory


# ---- it takes its time ----


@pytest.mark.parametrize("taking", ["revoke", "revoke-peer", "deregister"])
async def test_contract_03_a_message_that_stands_still(siege: Siege, taking: str) -> None:
    """Slow loris in the payload: the owner takes its memory back all the same, and nothing lands any more."""
    ground, remote = siege.ground, siege.target
    region = await siege.engine.allocate(4096, "slow")
    target = siege.enemy.await_region(b"slow")
    data = message(WRITE, 1, [(0, 4096)], b"\1" * 4096, region=target.id, rkey=target.rkey)
    with siege.open() as link, siege.open(1) as other:
        link.send(data[: HEAD.size + 16 + 100])
        memory = np.frombuffer(memoryview(region), np.uint8)
        await until(lambda: bool((memory[:100] == 1).all()), "the first bytes have landed")
        if taking == "deregister":
            await region.deregister()
        else:
            await region.revoke(siege.at_home() if taking == "revoke-peer" else None)  # raises what is pinned
        memory[:] = NEW
        link.send(data[HEAD.size + 16 + 100 :])
        assert link.ended(), "the connection has been given up"
        assert (memory == NEW).all()
        if other.exactly(0) is not None and taking != "deregister":
            with siege.open(2) as third:
                assert third.write(target, 0, b"evil") == DENIED
        assert (memory == NEW).all()
        with siege.open(3) as fourth:
            assert fourth.read(remote, [(0, 4)]) == ground.model[:4].tobytes()


async def test_contract_03_an_answer_that_is_not_read(siege: Siege) -> None:
    """Bytes of ours that leave slowly: they, too, are in use, and are taken back."""
    region = await siege.engine.allocate(32 << 20, "wide")
    target = siege.enemy.await_region(b"wide")
    with siege.open() as link:
        rows = [(0, MESSAGE_MAX)]
        for ident in range(6):  # more than sockets hold
            link.send(message(READ, ident, rows, region=target.id, rkey=target.rkey))
        assert link.head().type == DATA
        await region.revoke()
        memoryview(region)[:] = bytes([NEW]) * region.nbytes
        heard = b""
        with contextlib.suppress(OSError):
            link.sock.shutdown(socket.SHUT_WR)  # where all was on its way already, the connection is still there
        try:
            while piece := link.sock.recv(1 << 20):
                heard += piece
        except ConnectionResetError:
            pass
        assert NEW not in heard, "bytes that were written after the revocation left"


async def test_contract_07_questions_without_end(siege: Siege) -> None:
    """A peer that asks and does not listen: it is not read any more, or put out, before it is owed too much."""
    question = message(READ, 1, [(0, 1)], region=siege.target.id, rkey=siege.target.rkey) * 1000
    with siege.open() as link:
        link.sock.settimeout(1.0)
        sent, limit = 0, 256 << 20
        try:
            while sent < limit:
                sent += link.sock.send(question)
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            pass
        assert sent < limit, "it is heard for ever"


async def test_contract_08_silence_disturbs_nobody(siege: Siege) -> None:
    """Connections that say nothing, or half a head, for as long as they like."""
    links = [siege.open(stream) for stream in range(4)]
    try:
        links[0].send(message(WRITE, 1)[:30])
        links[1].send(message(READ, 1, [(0, 4)] * 100, region=siege.target.id, rkey=siege.target.rkey)[:500])
        await asyncio.sleep(0)
        for _ in range(10):
            await siege.ground.still_good()
        assert links[2].read(siege.target, [(0, 4)]) == siege.ground.model[:4].tobytes()
    finally:
        for link in links:
            link.sock.close()
