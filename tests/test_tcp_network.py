# SPDX-License-Identifier: Apache-2.0
"""What the network does to the tcp transport: connections that end, with nothing lost and in mid-transfer, that stand
still, and that carry other bytes than were sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from conftest import Start
from ground import Ground
from owned import NEW, view
from processes import until
from tcpproxy import Pipe, Proxy, between

import aiohixl

BIG = 32 << 20
LANDED = r"a part .*may have landed"


class Line:
    """A ground with a network in between, and a large region at both ends."""

    def __init__(self, ground: Ground, proxy: Proxy, streams: int) -> None:
        self.ground, self.proxy, self.streams = ground, proxy, streams

    async def prepare(self, nbytes: int) -> Line:
        self.target = await self.ground.b.allocate(nbytes, "big")
        self.remote = await self.ground.peer.region("big")
        self.source = self.ground.a.register(np.ones(nbytes, np.uint8))
        return self

    async def all_there(self) -> None:
        await until(lambda: len(self.proxy.data_pipes) == self.streams, "every data connection is there")

    def post(self, kind: str) -> aiohixl.Transfer:
        transfer: aiohixl.Transfer = getattr(self.ground.peer, kind)(self.source, self.remote)
        return transfer


@contextlib.asynccontextmanager
async def line(start: Start, streams: int = 1, nbytes: int = BIG, **options: object) -> AsyncIterator[Line]:
    async with between(start, streams=streams, **options) as (a, b, peer, proxy):
        ground = await Ground(a, b, peer).prepare()
        wire = await Line(ground, proxy, streams).prepare(nbytes)
        yield wire
        assert not peer.is_lost
        await ground.still_good()
        ground.forget()
        wire.__dict__.clear()  # pytest holds a fixture's value until after the check for leaks


@pytest_asyncio.fixture(params=[(1, False), (4, False), (1, True)], ids=["1-stream", "4-streams", "zerocopy"])
async def wire(start: Start, request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    streams, zerocopy = request.param
    async with line(start, streams, zerocopy=zerocopy) as wire:
        await wire.all_there()
        yield wire


# ---- connections that end ----


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
async def test_a_cut_with_nothing_lost(wire: Line, reset: bool) -> None:
    """Nobody hears of it: the connections come back by themselves."""
    for _ in range(5):
        wire.proxy.cut_data(reset=reset)
        await wire.all_there()  # nothing has to be posted for it
        await wire.ground.still_good()
    (back,) = wire.ground.b.peers.values()
    assert isinstance(back, aiohixl.Peer)
    here = await wire.ground.a.allocate(BIG, "here")
    wire.proxy.cut_data(reset=reset)
    await wire.all_there()
    await back.write(wire.target, await back.region("here"))
    assert bytes(here) == bytes(wire.target)


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
async def test_what_is_posted_meanwhile_waits(start: Start, reset: bool) -> None:
    async with line(start) as wire:
        await wire.all_there()
        wire.proxy.refusing = True
        wire.proxy.cut_data(reset=reset)
        await until(lambda: wire.proxy.refused > 0, "the engine has seen that it has ended")
        transfer = wire.post("write")
        wire.proxy.refusing = False
        await transfer
        assert bytes(wire.target) == bytes(wire.source)


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("kind", ["write", "read"])
@pytest.mark.parametrize("after", [250, 300, 70_000, 5 << 20])
async def test_a_cut_in_mid_transfer(wire: Line, reset: bool, kind: str, after: int) -> None:
    """It fails and says that a part may have landed; the peer stays, and so do other transfers' bytes."""
    wire.proxy.reset = reset
    wire.proxy.cut_after = max(after, max(max(pipe.passed) for pipe in wire.proxy.data_pipes) + 50)
    transfer = wire.post(kind)
    with pytest.raises(aiohixl.TransferError, match=LANDED) as caught:
        await transfer
    assert wire.proxy.cuts == 1
    assert type(caught.value) is aiohixl.TransferError
    assert transfer.quiesced
    if kind == "write":
        view(wire.source)[:] = NEW
    wire.ground.check()
    again = wire.post(kind)
    await again
    assert bytes(wire.source) == bytes(wire.target), "a later write is not undone by an earlier one"
    await wire.all_there()
    if kind == "write":
        assert (view(wire.target) == NEW).all()


async def test_contract_02_a_cut_in_mid_transfer_aborts_its_note(wire: Line) -> None:
    inbox = wire.ground.b.notes()
    wire.proxy.cut_after = 3 << 20
    transfer = wire.ground.peer.write(wire.source, wire.remote, note=b"lost")
    with pytest.raises(aiohixl.TransferError, match=LANDED):
        await transfer
    note = await inbox.get()
    assert (note.payload, note.aborted) == (b"lost", True)
    await wire.ground.peer.write(wire.source, wire.remote, note=b"found")
    note = await inbox.get()
    assert (note.payload, note.aborted) == (b"found", False)
    assert bytes(wire.source) == bytes(wire.target)


async def test_connections_that_cannot_be_made(start: Start) -> None:
    """Transfers fail, and say so; when the network is back, so are they."""
    async with line(start) as wire:
        await wire.all_there()
        wire.proxy.refusing = True
        wire.proxy.cut_data()
        with pytest.raises(aiohixl.TransferError, match="data connection"):
            await wire.post("write")
        wire.proxy.refusing = False
        async with asyncio.timeout(30):
            while True:  # it may need another attempt
                with contextlib.suppress(aiohixl.TransferError):
                    await wire.post("write")
                    break
        assert bytes(wire.source) == bytes(wire.target)
        await wire.all_there()


async def test_contract_08_the_control_link_is_cut(start: Start) -> None:
    """Then the peer is lost, whatever its data connections do."""
    async with between(start) as (a, b, peer, proxy):
        region = await b.allocate(BIG, "big")
        remote = await peer.region("big")
        source = a.register(np.ones(BIG, np.uint8))
        await peer.write(source[:4096], remote[:4096])
        transfers = [peer.write(source, remote) for _ in range(10)]
        for pipe in proxy.pipes:
            if not pipe.data:
                pipe.cut(reset=True)
        for transfer in transfers[5:]:
            with pytest.raises(aiohixl.PeerLostError):
                await transfer
        await asyncio.gather(*transfers, return_exceptions=True)
        await region.revoke()
        view(region)[:] = NEW
        await until(lambda: not proxy.data_pipes, "its data connections have ended")
        assert (view(region) == NEW).all()


# ---- connections that stand still ----


async def test_contract_08_a_silent_network(start: Start) -> None:
    """No FIN, no RST, nothing: both ends lose the peer after peer_timeout."""
    async with between(start, peer_timeout=0.5) as (a, b, peer, proxy):
        region = await b.allocate(BIG, "big")
        remote = await peer.region("big")
        source = a.register(np.ones(BIG, np.uint8))
        await peer.write(source[:4096], remote[:4096])
        (back,) = b.peers.values()
        proxy.going.clear()
        transfer = peer.write(source, remote)
        with pytest.raises(aiohixl.PeerLostError):
            await transfer
        assert transfer.quiesced
        with contextlib.suppress(aiohixl.PeerLostError):
            assert isinstance(back, aiohixl.Peer)
            await back.notify(b"anybody there?")
        assert back.is_lost
        view(source)[:] = NEW
        view(region)[:] = NEW
        proxy.going.set()
        await until(lambda: not proxy.data_pipes, "its data connections have ended")
        assert (view(region) == NEW).all(), "what the network held back landed in the end"


@pytest.mark.parametrize("zerocopy", [False, True], ids=["copied", "zerocopy"])
async def test_contract_03_cancelled_while_the_network_stands_still(start: Start, zerocopy: bool) -> None:
    """The connection is given up for it; what is written once the transfer has quiesced never leaves."""
    async with line(start, cancel_grace=0.3, zerocopy=zerocopy) as wire:
        await wire.all_there()
        wire.proxy.going.clear()
        transfer = wire.post("write")
        waiting = asyncio.create_task(asyncio.wait_for(transfer, 0.05))
        with pytest.raises(TimeoutError):
            await waiting
        wire.proxy.going.set()
        await transfer.wait_quiesced()
        view(wire.source)[:] = NEW
        await wire.ground.still_good()
        assert not (view(wire.target) == NEW).any()
        await wire.post("write")
        assert (view(wire.target) == NEW).all()


@pytest.mark.parametrize("first", [0, 1])
async def test_contract_03_what_was_recalled_lands_behind_nothing(start: Start, first: int) -> None:
    """What is posted as soon as the cancellation is over does not overtake it, on whichever connection it goes."""
    nbytes = 1 << 20  # one message, and so one connection
    async with line(start, streams=2, nbytes=nbytes, cancel_grace=0.06) as wire:
        fresh = wire.ground.a.register(np.zeros(nbytes, np.uint8))
        for value in range(1, 21, 2):
            await wire.all_there()
            view(wire.source)[:], view(fresh)[:] = value, value + 1
            pipes = wire.proxy.data_pipes
            for pipe in pipes:
                pipe.going.clear()
            transfer = wire.post("write")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(transfer, 0.01)
            again = asyncio.ensure_future(wire.ground.peer.write(fresh, wire.remote))
            pipes[first].going.set()
            await asyncio.wait([again], timeout=0.02)
            pipes[1 - first].going.set()
            await again
            await transfer.wait_quiesced()
            await wire.ground.still_good()
            assert (view(wire.target) == value + 1).all()


async def test_a_stalled_transfer_fails(start: Start) -> None:
    """The control link answers, the data connection does not: after stall_timeout that is the transfer's failure."""
    async with line(start, stall_timeout=0.5, cancel_grace=0.3) as wire:
        await wire.all_there()
        held = asyncio.Event()
        wire.proxy.hold = held
        transfer = wire.post("write")
        with pytest.raises(aiohixl.TransferTimeoutError):
            await transfer
        held.set()
        wire.proxy.hold = None
        await transfer.wait_quiesced()
        await wire.post("write")
        assert bytes(wire.source) == bytes(wire.target)


# ---- other bytes than were sent ----


class Falsifier:
    """Changes one bit of a data connection: of the byte so far behind where its direction stands now."""

    def __init__(self, proxy: Proxy, way: int, skip: int) -> None:
        (self.pipe,) = proxy.data_pipes
        self.way, self.at = way, self.pipe.passed[way] + skip
        self.done = False
        proxy.tamper = self

    def __call__(self, pipe: Pipe, way: int, data: bytes) -> bytes:
        index = self.at - pipe.passed[way]
        if self.done or pipe is not self.pipe or way != self.way or not 0 <= index < len(data):
            return data
        self.done = True
        return data[:index] + bytes([data[index] ^ 1 << index % 8]) + data[index + 1 :]


HEAD = range(64)
ROWS = range(64, 80)


@pytest.mark.parametrize("kind", ["write", "read"])
async def test_checksums_find_every_changed_bit(start: Start, kind: str) -> None:
    """Of the question's head and rows, of the payload, of the answer: never a success, and nothing beside the span."""
    whole, size = 1 << 19, 200_000
    pattern = (np.arange(whole) % 251).astype(np.uint8)
    async with line(start, nbytes=whole, checksum=True, stall_timeout=1.0) as wire:
        memory, here = view(wire.target), view(wire.source)
        question = [*HEAD[::9], *ROWS[::5], *([80, 81, 100_000, 80 + size - 1] if kind == "write" else [])]
        answer = [*HEAD[::9], *([64, 65, 100_000, 64 + size - 1] if kind == "read" else [])]
        for way, skips in ((0, question), (1, answer)):
            for skip in skips:
                await wire.all_there()
                await wire.ground.peer.write(wire.source[:16], wire.remote[:16])  # the handshake is over
                here[:] = pattern
                memory[:] = NEW
                falsifier = Falsifier(wire.proxy, way, skip)
                span = slice(4096, 4096 + size)
                transfer = getattr(wire.ground.peer, kind)(wire.source[span], wire.remote[span])
                with pytest.raises((aiohixl.TransferError, aiohixl.RegionError)):
                    await transfer
                assert falsifier.done
                wire.proxy.tamper = None
                outside = np.ones(whole, bool)
                outside[span] = False
                assert (memory[outside] == NEW).all()
                assert (here[outside] == pattern[outside]).all()
                await getattr(wire.ground.peer, kind)(wire.source[span], wire.remote[span])
                assert np.array_equal(memory[span], here[span])


async def test_contract_02_a_note_of_changed_bytes_is_aborted(start: Start) -> None:
    async with line(start, checksum=True) as wire:
        await wire.all_there()
        await wire.ground.peer.write(wire.source[:16], wire.remote[:16])
        inbox = wire.ground.b.notes()
        falsifier = Falsifier(wire.proxy, 0, 500_000)
        with pytest.raises(aiohixl.TransferError):
            await wire.ground.peer.write(wire.source, wire.remote, note=b"wrong")
        assert falsifier.done
        note = await inbox.get()
        assert (note.payload, note.aborted) == (b"wrong", True)
