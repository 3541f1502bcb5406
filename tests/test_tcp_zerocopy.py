# SPDX-License-Identifier: Apache-2.0
"""``zerocopy=True``: large messages leave from their own memory, and a transfer ends when the kernel has let go of it.
That everything else is as without it, test_tcp_conformance, test_tcp_network and test_tcp_property show."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os

import numpy as np
import pytest
from conftest import Start
from netns import why_not, wire
from processes import until
from tcpproxy import between

import aiohixl

MIB = 1 << 20
MEMFD_SECRET = 447  # its number, on every architecture


def reports(engine: aiohixl.Engine) -> int:
    """Calls that sent from the caller's memory, and that the kernel has reported on."""
    stats = engine.stats()
    return int(stats["zerocopied"] + stats["zerocopy_copied"])


async def arrived(memory: np.ndarray, value: int) -> None:
    await until(lambda: bool(memory[0] == value), "some of it has arrived")


async def pair(start: Start, **options: object) -> tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]:
    a, b = [await start(name, transports=["tcp"], **options) for name in "ab"]
    return a, b, await a.connect(b.address)


async def test_large_messages_are_sent_so(start: Start) -> None:
    a, b, peer = await pair(start, zerocopy=True)
    target, source = await b.allocate(8 * MIB, "target"), await a.register(np.full(8 * MIB, 7, np.uint8))
    remote = await peer.region("target")
    await peer.write(source[:4096], remote[:4096])
    await peer.read(source[:4096], remote[:4096])
    assert reports(a) == reports(b) == 0
    await peer.write(source, remote)
    assert reports(a) > 0, "it was reported on, or it would not be over"
    assert reports(b) == 0
    assert bytes(target) == bytes(source)
    await peer.read(source, remote)
    await until(lambda: reports(b) > 0, "the kernel of the one that answers reports, too")


async def test_it_is_off_unless_asked_for(start: Start) -> None:
    a, b, peer = await pair(start)
    await b.allocate(8 * MIB, "target")
    await peer.write(await a.allocate(8 * MIB), await peer.region("target"))
    assert reports(a) == 0


async def test_where_the_kernel_copies_all_the_same_it_is_given_up(start: Start) -> None:
    """As it does for a receiver on this host."""
    a, b, peer = await pair(start, zerocopy=True)
    await b.allocate(32 * MIB, "target")
    source, remote = await a.allocate(32 * MIB), await peer.region("target")
    before = -1
    for _ in range(200):
        await peer.write(source, remote)
        if reports(a) == before:
            break
        before = reports(a)
    stats = a.stats()
    assert reports(a) == before
    assert stats["zerocopy_copied"] >= 64


def unpinnable(nbytes: int) -> mmap.mmap | None:
    """Memory that a process can read, and that the kernel cannot send from; None where there is none (Linux 5.14)."""
    fd = ctypes.CDLL(None).syscall(MEMFD_SECRET, 0)
    if fd < 0:
        return None
    try:
        os.ftruncate(fd, nbytes)
        return mmap.mmap(fd, nbytes)
    except OSError:
        return None
    finally:
        os.close(fd)


async def test_memory_that_cannot_be_sent_from_is_copied(start: Start) -> None:
    memory = unpinnable(8 * MIB)
    if memory is None:
        pytest.skip("this kernel has no memfd_secret (boot it with secretmem.enable=1; Linux 5.14 or newer)")
    a, b, peer = await pair(start, zerocopy=True)
    target, bytes_ = await b.allocate(8 * MIB, "target"), np.frombuffer(memory, np.uint8)
    bytes_[:] = 5
    await peer.write(await a.register(bytes_), await peer.region("target"))
    assert (np.frombuffer(memoryview(target), np.uint8) == 5).all()


async def test_an_engine_that_ends_with_pages_out(start: Start) -> None:
    """The network stands still, and what was sent is in the kernel."""
    async with between(start, zerocopy=True, peer_timeout=1.0) as (a, b, peer, proxy):
        await b.allocate(32 * MIB, "target")
        source, remote = await a.allocate(32 * MIB), await peer.region("target")
        await peer.write(source[:MIB], remote[:MIB])
        proxy.going.clear()
        transfers = [peer.write(source, remote) for _ in range(8)]
        await asyncio.sleep(0.1)
        await a.close()
        for transfer in transfers:
            with pytest.raises(aiohixl.HixlError):
                await transfer
            assert transfer.quiesced


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_contract_03_what_a_slow_wire_still_holds(start: Start) -> None:
    """A cancelled write has quiesced when not even the queue of the network card refers to its source."""
    with wire() as made, made.inside("a"):
        made.limit(0.1)
        options = {"transports": ["tcp"], "zerocopy": True, "secret": "of both"}
        a = await start("a", address=f"{made.address('a', 4)}:0", **options)
        with made.inside("b"):
            b = await start("b", address=f"{made.address('b', 4)}:0", **options)
        peer = await a.connect(next(address for address in b.address.split(",") if address.startswith("tcp:")))
        target, source = await b.allocate(16 * MIB, "target"), await a.allocate(16 * MIB)
        there, here = (np.frombuffer(memoryview(region), np.uint8) for region in (target, source))
        remote = await peer.region("target")
        for value in range(1, 11, 2):
            here[:] = value
            transfer = peer.write(source, remote)
            await arrived(there, value)
            transfer.cancel()
            with pytest.raises(aiohixl.TransferAbortedError):
                await transfer
            await transfer.wait_quiesced()
            here[:] = value + 1
            await peer.read(source[:4096], remote[:4096])  # over what takes the broken connection's place
            assert not (there == value + 1).any()
        assert reports(a) > 0
        await peer.write(source, remote)
        assert bytes(target) == bytes(source)
        del there, here
