# SPDX-License-Identifier: Apache-2.0
"""Contract 10 and buffers: whose memory it is, who may use it, how long it lives, and what it costs."""

from __future__ import annotations

import array
import asyncio
import ctypes
import gc
import mmap
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Start
from ground import Ground, noise
from processes import until

import aiohixl

Pair = tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]


def mappings() -> int:
    """How many mappings of allocated memory this process has, at both ends."""
    return sum("memfd:aiohixl-region" in line for line in Path("/proc/self/maps").read_text().splitlines())


# ---- allocated memory ----


async def test_views_share_the_memory(pair: Pair) -> None:
    import torch

    a, b, peer = pair
    region = await b.allocate(4096, "shared")
    array_view = np.frombuffer(memoryview(region), np.float32)
    tensor = torch.frombuffer(region, dtype=torch.float32)
    view = memoryview(region)
    assert (array_view.nbytes, tensor.nbytes, view.nbytes, len(region)) == (4096,) * 4
    assert not view.readonly
    array_view[3] = 1.5
    assert tensor[3] == 1.5
    tensor[4] = 2.5
    assert array_view[4] == 2.5
    source = a.register(np.arange(1024, dtype=np.float32))
    await peer.write(source, await peer.region("shared"))
    assert (tensor.numpy() == np.arange(1024)).all()
    view.release()


@pytest.mark.parametrize("nbytes", [1, 63, 4095, 4096, 4097, (1 << 20) + 1])
async def test_allocations_are_page_aligned_zeroed_and_of_their_size(pair: Pair, nbytes: int) -> None:
    a, b, peer = pair
    region = await b.allocate(nbytes, "sized")
    assert region.addr % mmap.PAGESIZE == 0
    assert region.nbytes == len(bytes(region)) == nbytes
    assert not any(bytes(region))
    remote = await peer.region("sized")
    assert remote.nbytes == nbytes
    await peer.write(a.register(noise(nbytes)), remote)
    assert bytes(region) == noise(nbytes).tobytes()
    with pytest.raises(aiohixl.RegionError):
        remote[0 : nbytes + 1]


async def test_a_region_without_a_name_goes_with_its_last_user(pair: Pair) -> None:
    a, _, _ = pair
    before, live = mappings(), a.stats()["live_regions"]
    region = await a.allocate(1 << 20)
    view = np.frombuffer(memoryview(region), np.uint8)
    view[:] = 7
    del region
    gc.collect()
    assert a.stats()["live_regions"] == live + 1, "a view keeps it"
    assert view.min() == 7
    del view
    gc.collect()
    await until(lambda: a.stats()["live_regions"] == live and mappings() == before, "the memory is given back")


async def test_a_region_with_a_name_stays_until_it_is_deregistered(pair: Pair) -> None:
    a, b, peer = pair
    before = mappings()
    handle = weakref.ref(await b.allocate(1 << 20, "kept"))
    gc.collect()
    remote = await peer.region("kept")
    await peer.write(a.register(noise(64)), remote[0:64])
    back = a.register(bytearray(64))
    await peer.read(back, remote[0:64])
    assert bytes(back) == noise(64).tobytes()
    assert mappings() == before + 2  # its own, and the peer's
    kept = handle()
    assert kept is not None, "its engine keeps it"
    await kept.deregister()
    del kept
    gc.collect()
    await until(lambda: mappings() == before, "both ends have unmapped it")
    with pytest.raises(aiohixl.RemoteAccessError):
        await peer.write(a.register(noise(64)), remote[0:64])
    again = await b.allocate(64, "kept")
    while (fresh := await peer.region("kept")).id == remote.id:
        await asyncio.sleep(0)
    await peer.write(a.register(noise(64)), fresh)
    assert bytes(again) == noise(64).tobytes()


async def test_mappings_come_back_after_many_allocations(pair: Pair) -> None:
    a, b, peer = pair
    before = mappings()
    source = a.register(noise(8192))
    for i in range(40):
        region = await b.allocate(8192, f"r{i}")
        await peer.write(source, await peer.region(f"r{i}"))
        assert bytes(region) == noise(8192).tobytes()
        await region.deregister()
        del region
    gc.collect()
    await until(lambda: mappings() == before, "every mapping is gone")
    await until(lambda: not peer.regions, "every region is gone")


# ---- memory of others ----


async def test_buffers_of_every_kind(pair: Pair) -> None:
    import torch

    a, b, peer = pair
    size = 4096
    anonymous = mmap.mmap(-1, size)
    buffers: dict[str, tuple[Any, Any]] = {
        "bytearray": (data := bytearray(size), lambda: bytes(data)),
        "mmap": (anonymous, lambda: anonymous[:]),
        "array": (ints := array.array("I", bytes(size)), ints.tobytes),
        "memoryview": (memoryview(inner := bytearray(size)), lambda: bytes(inner)),
        "ctypes": (raw := (ctypes.c_uint8 * size)(), lambda: bytes(raw)),
        "numpy": (grid := np.zeros((16, 64), np.float32), grid.tobytes),
        "fortran": (column := np.zeros((1, size), np.uint8, order="F"), column.tobytes),
        "slice": ((whole := np.zeros((3, size), np.uint8))[1], lambda: whole[1].tobytes()),
        "tensor": (tensor := torch.zeros(size // 2, dtype=torch.float16), lambda: tensor.numpy().tobytes()),
        "bfloat16": (
            wide := torch.zeros(size // 2, dtype=torch.bfloat16),
            lambda: wide.view(torch.uint8).numpy().tobytes(),
        ),
        "dlpack": (Dlpack(packed := np.zeros(size, np.uint8)), packed.tobytes),
        "interface": (Interface(faced := np.zeros(size, np.uint8)), faced.tobytes),
    }
    for i, (name, (buffer, content)) in enumerate(buffers.items()):
        region = b.register(buffer, name)
        assert region.nbytes == size
        assert region.ready
        source = a.register(noise(size, i))
        await peer.write(source, await peer.region(name))
        assert content() == noise(size, i).tobytes(), name
        await region.deregister()
        del region
    assert not whole[[0, 2]].any()
    del buffers, buffer
    gc.collect()
    anonymous.close()


class Dlpack:
    """Exports memory through DLPack and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.shape = array.shape

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class Interface:
    """Exports memory through ``__array_interface__`` and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._array.__array_interface__


async def test_tensors_that_cannot_be_registered(pair: Pair) -> None:
    import torch

    a, b, peer = pair
    for tensor, why in (
        (torch.zeros(8, 8)[:, :4], "not contiguous"),
        (torch.zeros(8, 8).T, "not contiguous"),
        (torch.zeros(4, 4, device="meta"), "'meta'"),
        (torch.zeros(4, 4).to_sparse(), "layout"),
        (torch.zeros(0), "empty"),
        (torch.zeros(4, dtype=torch.complex64).conj(), "lazy view"),
    ):
        with pytest.raises(aiohixl.RegionError, match=why):
            a.register(tensor)
    ground = await Ground(a, b, peer).prepare()
    await ground.still_good()
    ground.forget()


async def test_the_owner_lives_as_long_as_its_registration(pair: Pair) -> None:
    a, b, peer = pair

    class Owned(np.ndarray):
        pass

    memory = np.zeros(4096, np.uint8).view(Owned)
    alive = weakref.ref(memory)
    region = b.register(memory, "owned")
    handle = weakref.ref(region)
    del memory
    gc.collect()
    assert alive() is not None
    await peer.write(a.register(noise(4096)), await peer.region("owned"))
    assert bytes(region) == noise(4096).tobytes()
    del region
    gc.collect()
    assert alive() is not None, "peers may still write there"
    kept = handle()
    assert kept is not None, "its engine keeps it"
    await kept.deregister()
    del kept
    await until(lambda: gc.collect() >= 0 and alive() is None, "its owner is let go")


async def test_a_transfer_keeps_its_source(pair: Pair) -> None:
    a, b, peer = pair
    target = await b.allocate(8 << 20, "target")
    remote = await peer.region("target")
    transfer = peer.write(a.register(noise(8 << 20)), remote)
    gc.collect()
    await transfer
    assert bytes(target) == noise(8 << 20).tobytes()


async def test_a_registered_bytearray_cannot_be_resized(pair: Pair) -> None:
    a, _, _ = pair
    data = bytearray(64)
    region = a.register(data)
    with pytest.raises(BufferError):
        data.append(1)
    await region.deregister()
    del region
    gc.collect()
    data.append(1)


# ---- views ----


async def test_views_at_odd_offsets_stay_fast_and_inside(pair: Pair) -> None:
    a, b, peer = pair
    region = await b.allocate(1 << 16, "whole")
    whole = np.frombuffer(memoryview(region), np.uint8)
    model = np.zeros(1 << 16, np.uint8)
    source = await a.allocate(1 << 16)
    np.frombuffer(memoryview(source), np.uint8)[:] = noise(1 << 16)
    for i, (start, stop) in enumerate([(0, 1), (1, 2), (4095, 4097), (4096, 8192), (12345, 50001), (65535, 65536)]):
        view = whole[start:stop]
        b.register(view, f"view{i}")
        remote = await peer.region(f"view{i}")
        assert remote.nbytes == stop - start
        route = peer.route(source, remote)
        assert "mapped" in route.reason
        await peer.write(source[0 : stop - start], remote)
        model[start:stop] = noise(1 << 16)[: stop - start]
        assert (whole == model).all()
        with pytest.raises(aiohixl.RegionError):
            peer.write(source[0:2], remote[stop - start - 1 : stop - start + 1])
        await peer.read(source[0 : stop - start], remote)
    # As the near end, too: the view of our own allocation is read from where it stands.
    here = a.register(np.frombuffer(memoryview(source), np.uint8)[777:1777])
    await peer.write(here, (await peer.region("whole"))[0:1000])
    model[:1000] = np.frombuffer(memoryview(source), np.uint8)[777:1777]
    assert (whole == model).all()


async def test_contract_10_a_view_gives_its_own_access_only(pair: Pair) -> None:
    a, b, peer = pair
    region = await b.allocate(8192)
    whole = np.frombuffer(memoryview(region), np.uint8)
    b.register(whole[100:200], "reading", access="r")
    b.register(whole[300:400], "writing", access="w")
    source = a.register(np.full(100, 5, np.uint8))
    reading, writing = await peer.region("reading"), await peer.region("writing")
    with pytest.raises(aiohixl.RemoteAccessError):
        await peer.write(source, reading)
    with pytest.raises(aiohixl.RemoteAccessError):
        await peer.read(source, writing)
    await peer.write(source, writing)
    model = np.zeros(8192, np.uint8)
    model[300:400] = 5
    assert (whole == model).all()


async def test_a_view_outlives_its_parents_handle(pair: Pair) -> None:
    a, b, peer = pair
    region = await b.allocate(1 << 16)
    view = np.frombuffer(memoryview(region), np.uint8)[5:105]
    b.register(view, "view")
    del region
    gc.collect()
    await peer.write(a.register(noise(100)), await peer.region("view"))
    assert (view == noise(100)).all()


# ---- many ----


async def test_4096_regions_announced_and_used(pair: Pair) -> None:
    a, b, peer = pair
    memory = np.zeros((4096, 64), np.uint8)
    regions = b.register_many({f"r{i}": row for i, row in enumerate(memory)})
    assert len(regions) == 4096
    remote = {name: await peer.region(name) for name in regions}
    source = a.register(np.arange(64, dtype=np.uint8))
    await aiohixl.wait_all([peer.write(source[0 : i % 64 + 1], remote[f"r{i}"][0 : i % 64 + 1]) for i in range(4096)])
    want = np.where(np.arange(64) <= (np.arange(4096) % 64)[:, None], np.arange(64), 0)
    assert (memory == want).all()
    late = await a.connect(b.address)
    assert len(late.regions) == 4096
    for region in list(regions.values())[::2]:
        await region.deregister()
    await until(lambda: len(peer.regions) == 2048, "peers see half of them gone")
    with pytest.raises(aiohixl.RemoteAccessError):
        await peer.write(source[0:1], remote["r0"][0:1])
    await peer.write(source[0:1], remote["r1"][1:2])


async def test_thousands_of_allocated_regions_are_mapped_on_use(pair: Pair) -> None:
    a, b, peer = pair
    before = mappings()
    regions = [b.allocate(4096, f"r{i}") for i in range(512)]
    for region in regions:
        await region
    await peer.region("r511")
    assert mappings() == before + 512, "a peer maps what it uses, when it uses it"
    source = a.register(noise(4096))
    posts = [peer.write(source, await peer.region(f"r{i}")) for i in range(512)]
    await aiohixl.wait_all(posts)
    assert all(bytes(region) == noise(4096).tobytes() for region in regions)
    for region in regions:
        await region.deregister()
    regions.clear()
    posts.clear()
    del region
    gc.collect()
    await until(lambda: mappings() == before, "all are unmapped, at both ends")


async def test_register_many_is_seen_by_all_peers(start: Start) -> None:
    b = await start("b")
    others = [await start(f"a{i}", copy_threads=1) for i in range(3)]
    before = await others[0].connect(b.address)
    memory = np.zeros((3000, 16), np.uint8)
    b.register_many({f"t{i}": row for i, row in enumerate(memory)})
    peers = [before, *[await other.connect(b.address) for other in others[1:]]]
    for i, (engine, peer) in enumerate(zip(others, peers, strict=True)):
        await peer.region("t2999")
        await until(lambda peer=peer: len(peer.regions) == 3000, "all are announced")  # type: ignore[misc]
        await peer.write(engine.register(np.full(16, i + 1, np.uint8)), peer.regions[f"t{1000 * i}"])
    assert [int(memory[1000 * i, 0]) for i in range(3)] == [1, 2, 3]
    assert int((memory != 0).sum()) == 48
