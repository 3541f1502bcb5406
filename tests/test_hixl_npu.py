# SPDX-License-Identifier: Apache-2.0
"""Work of the NPU that a transfer waits for, and NPU tensors. torch_npu is not here: a double has its tensors' face."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from standin import FLAVOURS, PairNpu, Standin, StartNpu, bytes_of, noise, npu_region

import aiohixl
from aiohixl import ConfigError, RegionError, TransferTimeoutError

MIB = 1 << 20


class TensorDouble:
    """What is asked of an NPU tensor of torch_npu's, over memory that some engine allocated."""

    __module__ = "torch"

    def __init__(self, memory: aiohixl.Region, shape: tuple[int, ...], offset: int = 0) -> None:
        self.memory, self.shape, self._offset = memory, shape, offset
        self.device, self.dtype, self.layout = memory.device, "torch.float16", "torch.strided"

    def data_ptr(self) -> int:
        return self.memory.addr + self._offset

    def element_size(self) -> int:
        return 2

    def stride(self) -> tuple[int, ...]:
        return tuple(int(np.prod(self.shape[i + 1 :])) for i in range(len(self.shape)))

    def storage_offset(self) -> int:
        return 0

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=self.data_ptr, nbytes=lambda: 2 * int(np.prod(self.shape)))

    def detach(self) -> TensorDouble:
        return self

    def numel(self) -> int:
        return int(np.prod(self.shape))


@pytest.fixture
def event(standin: Standin) -> Iterator[Callable[[int], int]]:
    """Events that are complete after so many milliseconds."""
    made: list[int] = []

    def make(delay_ms: int) -> int:
        made.append(standin.event(delay_ms))
        return made[-1]

    yield make
    for handle in made:
        standin.destroy_event(handle)


# ---- after= ----


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_what_has_landed_does_not_wait_for_what_waits(
    standin: Standin, pair_npu: PairNpu, event: Callable[[int], int], flavour: str
) -> None:
    """Somebody asks about posted transfers although the peer's queue holds one that cannot be posted."""
    standin.set(**FLAVOURS[flavour])
    a, b, peer = await pair_npu()
    source, _ = await npu_region(a, 65536, fill=1), await npu_region(b, 65536, "t")
    remote = await peer.region("t")
    for _ in range(30):
        posted = [peer.write(source, remote) for _ in range(2)]
        waits = peer.write(source[:64], remote[:64], after=event(60_000))
        async with asyncio.timeout(20):
            await aiohixl.wait_all(posted)
        assert not waits.done()
        waits.cancel()
        with pytest.raises(aiohixl.TransferAbortedError):
            await waits


@pytest.mark.parametrize("kind", ["write", "many", "read", "noted"])
@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_transfer_waits_for_the_npu(
    standin: Standin, pair_npu: PairNpu, event: Callable[[int], int], flavour: str, kind: str
) -> None:
    """The bytes are those that stand there when the event completes."""
    standin.set(**FLAVOURS[flavour])
    a, b, peer = await pair_npu()
    source, target = await npu_region(a, 8192, fill=1), await npu_region(b, 8192, "t")
    remote = await peer.region("t")
    await peer.write(source[:10], remote[:10])
    posts = standin.stat("posts")
    handle = event(200)
    rows = np.array([0, 4096])
    if kind == "many":
        transfer = peer.write_many(source, rows, remote, rows, 4096, after=handle)
    elif kind == "read":
        transfer = peer.read(source, remote, after=handle)
    else:
        transfer = peer.write(source, remote, note=b"n" if kind == "noted" else None, after=handle)
    before = await npu_region(a, 4096, "unhurried", fill=9)
    await peer.write(before, remote[:4096]) if kind == "read" else await peer.read(before, remote[4096:])
    assert standin.stat("posts") == posts + 1, "the others do not wait for it"
    assert not transfer.done()
    await (target if kind == "read" else source).upload(np.full(8192, 2, np.uint8))
    await transfer
    assert transfer.elapsed is not None
    assert transfer.elapsed > 0.15
    assert set(await (source if kind == "read" else target).download()) == {2}


async def test_a_layer_of_a_stream_waits_for_its_event(
    standin: Standin, pair_npu: PairNpu, event: Callable[[int], int]
) -> None:
    a, b, peer = await pair_npu()
    here, there = await npu_region(a, 3 * 4096, fill=1), await npu_region(b, 3 * 4096)
    cache = a.register_kv([TensorDouble(here, (4, 512), i * 4096) for i in range(3)])
    b.register_kv([TensorDouble(there, (4, 512), i * 4096) for i in range(3)])
    await peer.kv()
    late = event(100)
    async with peer.stream_kv(cache, [0, 1], [2, 3], note=b"streamed") as stream:
        first = stream.post(0, after=late)
        await asyncio.to_thread(stream.post, 1)
        stream.post(2, after=0)
        await here.upload(np.full(4096, 2, np.uint8))
        await first
    assert (await b.notes().get()).payload == b"streamed"
    model = np.zeros((3, 4, 1024), np.uint8)
    model[:, 2:] = 1
    model[0, 2:] = 2
    assert (await bytes_of(there) == model.reshape(-1)).all()


async def test_cancelled_while_the_npu_computes(
    standin: Standin, pair_npu: PairNpu, event: Callable[[int], int]
) -> None:
    a, b, peer = await pair_npu()
    source, target = await npu_region(a, MIB, fill=1), await npu_region(b, MIB, "t")
    remote = await peer.region("t")
    task = asyncio.ensure_future(peer.write(source, remote, note=b"n", after=event(60_000)))
    await asyncio.sleep(0.01)
    task.cancel()
    async with asyncio.timeout(5):
        await asyncio.wait([task])
    assert task.cancelled()
    assert (await b.notes().get()).aborted
    assert (standin.stat("posts"), source.quarantined) == (0, ())
    assert not (await bytes_of(target)).any()
    await peer.write(source, remote)


async def test_an_event_that_never_comes(standin: Standin, pair_npu: PairNpu, event: Callable[[int], int]) -> None:
    a, b, peer = await pair_npu(stall_timeout=0.3)
    source, _ = await npu_region(a, MIB, fill=1), await npu_region(b, MIB, "t")
    remote = await peer.region("t")
    stuck = peer.write(source, remote, after=event(60_000))
    others = [peer.write(source, remote) for _ in range(20)]
    await aiohixl.wait_all(others)
    with pytest.raises(TransferTimeoutError):
        await stuck
    assert stuck.quiesced


async def test_an_event_that_is_none(standin: Standin, pair_npu: PairNpu) -> None:
    a, b, peer = await pair_npu()
    source, _ = await npu_region(a, MIB, fill=1), await npu_region(b, MIB, "t")
    remote = await peer.region("t")
    with pytest.raises(aiohixl.ProviderError, match="after="):
        await peer.write(source, remote, after=0x5000)
    for bad in ("soon", 1.5, -1, object()):
        with pytest.raises(ConfigError, match="after"):
            peer.write(source, remote, after=bad)
    assert standin.stat("posts") == 0
    await peer.write(source, remote)


async def test_the_current_stream_by_default(
    standin: Standin, pair_npu: PairNpu, event: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch_npu in the process: an event is recorded on the stream that is current where the post is made."""
    a, b, peer = await pair_npu()
    source, target = await npu_region(a, 4096, fill=1), await npu_region(b, 4096, "t")
    remote = await peer.region("t")
    alive: list[weakref.ref[Any]] = []

    class EventDouble:
        def __init__(self) -> None:
            self.npu_event = 0
            alive.append(weakref.ref(self))

        def record(self, stream: Any) -> None:
            assert stream == "the stream of 0"
            self.npu_event = event(150)

    npu = SimpleNamespace(Event=EventDouble, current_stream=lambda index: f"the stream of {index}")
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu))
    transfer = peer.write(source, remote)
    gc.collect()
    assert alive[0]() is not None, "the event must outlive the wait for it"
    await source.upload(np.full(4096, 2, np.uint8))
    assert not transfer.done()
    await transfer
    assert set(await target.download()) == {2}
    await peer.write(source, remote, after=0)
    assert len(alive) == 1, "zero: wait for nothing"
    mine = EventDouble()
    mine.record("the stream of 0")
    waits = peer.write(source, remote, after=mine)
    await source.upload(np.full(4096, 3, np.uint8))
    await waits
    assert set(await target.download()) == {3}
    del mine, waits, transfer
    gc.collect()
    assert [ref() for ref in alive] == [None, None], "events are not kept for longer"


# ---- tensors ----


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_tensors_of_the_npu(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    standin.set(**FLAVOURS[flavour])
    a, b, peer = await pair_npu()
    layers, blocks = 4, 16
    size = blocks * 2 * 256 * 2
    here, there = await npu_region(a, layers * size, fill=noise(layers * size)), await npu_region(b, layers * size)
    mine = a.register_kv([TensorDouble(here, (blocks, 2, 256), i * size) for i in range(layers)])
    b.register_kv([TensorDouble(there, (blocks, 2, 256), i * size) for i in range(layers)])
    await peer.kv()
    await peer.write_kv(mine, [1, 5, 6], [9, 0, 15], note=b"blocks")
    assert (await b.notes().get()).payload == b"blocks"
    sent = noise(layers * size).reshape(layers, blocks, -1)
    model = np.zeros_like(sent)
    model[:, [9, 0, 15]] = sent[:, [1, 5, 6]]
    assert ((await bytes_of(there)).reshape(model.shape) == model).all()
    await peer.read_kv(mine, [2, 3], [9, 8])
    sent[:, [2, 3]] = model[:, [9, 8]]
    assert ((await bytes_of(here)).reshape(sent.shape) == sent).all()

    tensor = TensorDouble(here, (10, 128), 3 * 256)  # at an address that is nobody's page
    region = await a.register(tensor)
    assert (region.device, region.addr, region.nbytes) == ("npu:0", here.addr + 768, 2560)
    await npu_region(b, 2560, "one")
    await peer.write(region, await peer.region("one"))
    back = await npu_region(a, 2560)
    await peer.read(back, await peer.region("one"))
    assert await back.download() == sent.reshape(-1)[768 : 768 + 2560].tobytes()
    assert await region.download() == await back.download()


async def test_a_tensor_is_kept(standin: Standin, start_npu: StartNpu) -> None:
    a = await start_npu("a")
    memory = await npu_region(a, MIB)
    tensor = TensorDouble(memory, (1024,))
    kept = weakref.ref(tensor)
    region = await a.register(tensor, "named")
    del tensor
    gc.collect()
    assert kept() is not None
    await region.deregister()
    del region
    gc.collect()
    assert kept() is None


async def test_tensors_of_other_devices(standin: Standin, start_npu: StartNpu) -> None:
    a, b = await start_npu("a"), await start_npu("b", 1)
    theirs = TensorDouble(await npu_region(b, 4096), (16,))
    with pytest.raises(RegionError, match="npu:1"):
        a.register(theirs)
    async with aiohixl.Engine("plain") as plain:
        with pytest.raises(RegionError, match="npu:1"):
            plain.register(theirs)
        with pytest.raises(RegionError, match="npu"):
            plain.allocate(4096, device="npu")


async def test_a_path_for_each_pair_of_kinds(standin: Standin, start_npu: StartNpu) -> None:
    """Between hosts of one machine by shm; wherever an NPU has a part in it, by HIXL."""
    a, b = await start_npu("a", transports=["shm", "hixl"]), await start_npu("b", 1, transports=["shm", "hixl"])
    peer = await a.connect(b.address)
    mine = {"npu": await npu_region(a, MIB, fill=1), "cpu": await a.allocate(MIB)}
    await npu_region(b, MIB, "npu")
    await b.allocate(MIB, "cpu")
    for here, local in mine.items():
        for there in ("npu", "cpu"):
            remote = await peer.region(there)
            posts = standin.stat("posts")
            assert peer.route(local, remote).provider == ("shm" if here == there == "cpu" else "hixl")
            await peer.write(local, remote)
            await peer.read(local, remote)
            assert standin.stat("posts") - posts == (0 if here == there == "cpu" else 2)
    plain_b = await start_npu("c", 1)
    async with aiohixl.Engine("plain") as plain:
        await npu_region(plain_b, MIB, "npu")
        peer = await plain.connect(plain_b.address)
        with pytest.raises(RegionError, match="no path"):
            peer.route(await plain.allocate(MIB), await peer.region("npu"))
