# SPDX-License-Identifier: Apache-2.0
"""Memory that HIXL has to know: when it may be told, what it refuses, and how it is made to forget."""

from __future__ import annotations

import asyncio
import ctypes

import numpy as np
import pytest
from standin import FLAVOURS, PairNpu, Standin, StartNpu, bytes_of, noise, npu_region

import aiohixl
from aiohixl import RegionError, RemoteAccessError

MIB = 1 << 20
PAGE = 4096


@pytest.mark.parametrize("side", ["here", "there", "both"])
@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_memory_registered_after_connect(standin: Standin, pair_npu: PairNpu, flavour: str, side: str) -> None:
    """HIXL would accept it and refuse each transfer that uses it: the link is made anew."""
    standin.set(**FLAVOURS[flavour])
    a, b, peer = await pair_npu()
    source, target = await npu_region(a, MIB, fill=1), await npu_region(b, MIB, "old")
    old = await peer.region("old")
    await peer.write(source, old)
    assert standin.stat("connects") == 1
    new = source if side == "there" else await npu_region(a, MIB, fill=2)
    if side != "here":
        target = await npu_region(b, MIB, "new")
    remote = await peer.region("old" if side == "here" else "new")
    await peer.write(new, remote)
    assert ((await bytes_of(target)) == (1 if side == "there" else 2)).all()
    assert standin.stat("connects") == 2
    await peer.write(source, old)
    await peer.read(new, remote)
    assert standin.stat("connects") == 2, "once is enough"


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_memory_registered_while_transfers_run(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    """Those under way land first; those that are posted meanwhile wait; none is lost."""
    standin.set(**FLAVOURS[flavour], latency_us=500)
    a, b, peer = await pair_npu()
    source, target = await npu_region(a, 64 * PAGE), await npu_region(b, 64 * PAGE, "t")
    await source.upload(noise(64 * PAGE))
    remote = await peer.region("t")
    transfers, models = [], []
    for number in range(8):
        for i in range(8):
            span = slice((8 * number + i) * PAGE, (8 * number + i + 1) * PAGE)
            transfers.append(peer.write(source[span], remote[span]))
        mine, theirs = a.allocate(PAGE, device="npu"), b.allocate(PAGE, f"n{number}", device="npu")
        await mine.upload(noise(PAGE, number))
        transfers.append(peer.write(mine, await peer.region(f"n{number}")))
        models.append((theirs, noise(PAGE, number)))
    await aiohixl.wait_all(transfers)
    assert ((await bytes_of(target)) == noise(64 * PAGE)).all()
    for region, model in models:
        assert ((await bytes_of(region)) == model).all()


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_deregistered_with_links_up(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    """HIXL refuses that: links run empty, go, and come back; nobody's transfers notice."""
    standin.set(**FLAVOURS[flavour])
    a, b, peer = await pair_npu()
    source, target = await npu_region(a, 256 * PAGE), await npu_region(b, 256 * PAGE, "t")
    await source.upload(noise(256 * PAGE))
    extra_a, extra_b = await npu_region(a, MIB, fill=3), await npu_region(b, MIB, "extra")
    remote, extra = await peer.region("t"), await peer.region("extra")
    await peer.write(extra_a, extra)
    standin.set(latency_us=2000)
    connects, registered = standin.stat("connects"), standin.stat("registered")
    transfers = [peer.write(source[i * PAGE : (i + 1) * PAGE], remote[i * PAGE : (i + 1) * PAGE]) for i in range(128)]
    gone = asyncio.ensure_future(extra_a.deregister())
    transfers += [
        peer.write(source[i * PAGE : (i + 1) * PAGE], remote[i * PAGE : (i + 1) * PAGE]) for i in range(128, 256)
    ]
    await aiohixl.wait_all(transfers)
    await gone
    assert ((await bytes_of(target)) == noise(256 * PAGE)).all()
    assert standin.stat("registered") == registered - 1
    async with asyncio.timeout(10):
        while not standin.stat("links"):
            await asyncio.sleep(0.001)
    assert standin.stat("connects") > connects
    with pytest.raises(RegionError):
        peer.write(extra_a, extra)
    await extra_b.deregister()
    with pytest.raises(RemoteAccessError):
        await peer.write(source[:PAGE], extra[:PAGE])
    await peer.write(source, remote)


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_registrations_that_overlap(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    """HIXL takes no overlap in part, and does not count the same memory twice. Here each registration stands alone."""
    standin.set(**FLAVOURS[flavour])
    a, b, peer = await pair_npu()
    memory = noise(12 * PAGE)
    there = np.zeros(12 * PAGE, np.uint8)
    spans = {"first": (0, 8), "second": (4, 12), "same": (4, 12), "inner": (5, 6), "all": (0, 12)}
    here = {n: a.register(memory[lo * PAGE : hi * PAGE]) for n, (lo, hi) in spans.items()}
    far = {n: b.register(there[lo * PAGE : hi * PAGE], n) for n, (lo, hi) in spans.items()}
    for name, (lo, hi) in spans.items():
        there[:] = 0
        await peer.write(await here[name], await peer.region(name))
        assert (there[lo * PAGE : hi * PAGE] == memory[lo * PAGE : hi * PAGE]).all()
        assert not there[: lo * PAGE].any()
        assert not there[hi * PAGE :].any()
    for gone in ("second", "all", "first", "inner"):
        await here.pop(gone).deregister()
        await far.pop(gone).deregister()
        there[:] = 0
        for name in here:
            lo, hi = spans[name]
            await peer.write(here[name], await peer.region(name))
            assert (there[lo * PAGE : hi * PAGE] == memory[lo * PAGE : hi * PAGE]).all()
    assert list(here) == ["same"]
    await here["same"].deregister()
    await far["same"].deregister()
    assert standin.stat("registered") == 0


async def test_one_address_cannot_be_both_kinds_of_memory(standin: Standin, start_npu: StartNpu) -> None:
    a = await start_npu("a")
    npu = await npu_region(a, MIB)
    pretender = (ctypes.c_uint8 * PAGE).from_address(npu.addr)
    with pytest.raises(RegionError, match="other kind of memory"):
        await a.register(pretender)


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_more_registrations_than_hixl_takes(standin: Standin, start_npu: StartNpu, flavour: str) -> None:
    standin.set(**FLAVOURS[flavour])
    a = await start_npu("a")
    memory = np.zeros(4200 * 128, np.uint8)
    regions = [a.register(memory[i * 128 : i * 128 + 64]) for i in range(4096)]
    for region in regions:
        await region
    for _ in range(2):
        with pytest.raises(RegionError, match=r"4096 pieces of memory already.*register fewer, larger ones"):
            await a.register(memory[4100 * 128 : 4101 * 128])
    inside = await a.register(memory[10 * 128 : 10 * 128 + 64])  # what it knows already costs nothing
    await inside.deregister()
    await regions.pop().deregister()
    regions.append(await a.register(memory[4100 * 128 : 4101 * 128]))
    assert standin.stat("registered") == 4096


async def test_a_peer_with_too_many_regions(standin: Standin, pair_npu: PairNpu) -> None:
    """As Connect sees it; with fewer it works again."""
    standin.set(max_regions=2)
    a, b, peer = await pair_npu()
    source, _ = await npu_region(a, PAGE, fill=1), await npu_region(b, PAGE, "t")
    extra = [await npu_region(a, PAGE) for _ in range(2)]
    with pytest.raises(aiohixl.ProviderError) as failed:
        await peer.write(source, await peer.region("t"))
    assert failed.value.code == 103900
    await extra[0].deregister()
    await peer.write(source, await peer.region("t"))


async def test_memory_that_hixl_refuses(standin: Standin, start_npu: StartNpu) -> None:
    a = await start_npu("a")
    standin.set(register_fail=103900, err_msg="the MR is not to its liking")
    with pytest.raises(RegionError, match=r"answered 103900.*the MR is not to its liking.*aclrtMallocHost"):
        await a.register(np.zeros(PAGE, np.uint8))
    with pytest.raises(RegionError, match=r"answered 103900.*own NPU"):
        await a.allocate(PAGE, device="npu")
    standin.set(register_fail=0)
    await a.register(np.zeros(PAGE, np.uint8))
    await a.allocate(PAGE, device="npu")


async def test_memory_that_is_not_aligned(standin: Standin, pair_npu: PairNpu) -> None:
    """Where the library does not mind, it works; where it does, the error says what is needed."""
    memory = np.zeros(4 * PAGE, np.uint8)
    at = PAGE - memory.ctypes.data % PAGE + 64
    odd = memory[at : at + 1000]
    a, b, peer = await pair_npu()
    target = await b.allocate(1000, "t")
    odd[:] = 5
    await peer.write(await a.register(odd), await peer.region("t"))
    assert set(bytes(target)) == {5}
    standin.set(align=PAGE)
    other = memory[at + 1000 : at + 2000]
    with pytest.raises(RegionError) as failed:
        await a.register(other)
    for part in (hex(other.ctypes.data), "1000 bytes", "multiple of 4096", "engine.allocate()"):
        assert part in str(failed.value)
    for device in ("cpu", "npu", "npu:0"):  # whatever the length, what is allocated here is aligned
        region = await a.allocate(1000, device=device)
        assert region.addr % PAGE == 0
        await peer.write(region, await peer.region("t"))


async def test_host_memory_that_must_be_pinned(standin: Standin, start_npu: StartNpu) -> None:
    a = await start_npu("a")
    standin.set(host_needs_pinned=1)
    with pytest.raises(RegionError, match="host memory must come from aclrtMallocHost"):
        await a.register(np.zeros(PAGE, np.uint8))


async def test_an_npu_without_memory(standin: Standin, start_npu: StartNpu) -> None:
    standin.set(device_mem_mb=8)
    a = await start_npu("a")
    with pytest.raises(RegionError, match=r"NPU 0 has no 16777216 bytes to give"):
        await a.allocate(16 * MIB, device="npu")
    await (await a.allocate(4 * MIB, device="npu")).deregister()
    await a.allocate(8 * MIB, device="npu")


async def test_npu_memory_is_the_npus(standin: Standin, start_npu: StartNpu) -> None:
    a = await start_npu("a")
    region = await npu_region(a, MIB, fill=7)
    with pytest.raises(BufferError):
        memoryview(region)
    assert set(await region.download(10, 20)) == {7}
    await region.upload(b"abc", 5)
    out = bytearray(5)
    await region.download_into(out, 4)
    assert out == b"\7abc\7"
    assert await region.download(MIB) == b""
    for call in (region.upload(b"abc", MIB - 2), region.download(1, MIB), region.download_into(out, -1)):
        with pytest.raises(RegionError, match="outside of its"):
            await call
    with pytest.raises(RegionError, match="npu:1"):
        a.allocate(PAGE, device="npu:1")
    await region.deregister()
    with pytest.raises(RegionError, match="deregistered"):
        await region.download()
    assert standin.stat("allocations") == 0


@pytest.mark.parametrize("transports", [["auto"], ["hixl", "tcp"], ["shm", "hixl", "tcp"]])
async def test_npu_memory_beside_other_transports(start_npu: StartNpu, transports: list[str]) -> None:
    """What only HIXL knows is asked of HIXL, whatever else the engine has opened."""
    a, b = [await start_npu(name, npu, transports=transports) for npu, name in enumerate("ab")]
    source, target = await npu_region(a, MIB, fill=5), await npu_region(b, MIB, "t")
    peer = await a.connect(b.address)
    await peer.write(source, await peer.region("t"))
    assert ((await bytes_of(target)) == 5).all()
