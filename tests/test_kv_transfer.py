# SPDX-License-Identifier: Apache-2.0
"""Paged KV caches between two engines: write_kv, read_kv, stream_kv."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import aiohixl
from aiohixl.testing import FaultPlan, engine_pair

Array = npt.NDArray[Any]
Pair = tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]
LAYERS, BLOCKS, BLOCK = 4, 24, (16, 2, 8)


def make_cache(seed: int, *, axis: int = 0, dtype: str = "float16", layers: int = LAYERS) -> list[tuple[Array, Array]]:
    """(k, v) of each layer, filled with noise; `axis` counts the blocks."""
    dice = np.random.default_rng(seed)
    shape = [*BLOCK]
    shape.insert(axis, BLOCKS)

    def part() -> Array:
        return dice.integers(0, 200, shape).astype(dtype)

    return [(part(), part()) for _ in range(layers)]


def block(array: Array, index: int, axis: int) -> Array:
    taken: Array = np.take(array, index, axis)
    return taken


async def both(
    pair: Pair, here: list[tuple[Array, Array]], there: list[tuple[Array, Array]], *, axes: tuple[int, int] = (0, 0)
) -> tuple[aiohixl.KVCache, aiohixl.RemoteKV, aiohixl.KVCache]:
    a, b, peer = pair
    owner = await b.register_kv(there, "kv", block_axis=axes[1])
    cache = await a.register_kv(here, "kv", block_axis=axes[0])
    return cache, await peer.kv("kv"), owner


@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (0, 2), (3, 1)])
async def test_write_kv_moves_the_named_blocks_and_no_others(pair: Pair, axes: tuple[int, int]) -> None:
    here, there = make_cache(1, axis=axes[0]), make_cache(2, axis=axes[1])
    before = [(k.copy(), v.copy()) for k, v in there]
    cache, _, _ = await both(pair, here, there, axes=axes)
    blocks, remote_blocks = [3, 9, 10, 0], np.array([17, 4, 5, 23], np.int32)
    transfer = await pair[2].write_kv(cache, blocks, remote_blocks, note=b"req-1")
    assert transfer.nbytes == 4 * cache.layout.block_nbytes
    assert (await pair[1].notes().get()).payload == b"req-1"
    for layer in range(LAYERS):
        for part in range(2):
            for i in range(BLOCKS):
                got = block(there[layer][part], i, axes[1])
                if i in remote_blocks:
                    source = blocks[int(np.flatnonzero(remote_blocks == i)[0])]
                    assert (got == block(here[layer][part], source, axes[0])).all()
                else:
                    assert (got == block(before[layer][part], i, axes[1])).all()


async def test_read_kv(pair: Pair) -> None:
    here, there = make_cache(3), make_cache(4)
    cache, _, _ = await both(pair, here, there)
    await pair[2].read_kv(cache, [1, 2, 5], [7, 8, 0], layers=[0, 2])
    for layer in range(LAYERS):
        for part in range(2):
            same = (here[layer][part][[1, 2, 5]] == there[layer][part][[7, 8, 0]]).all()
            assert bool(same) == (layer in (0, 2))


async def test_mla_one_tensor_a_layer_in_allocated_memory(pair: Pair) -> None:
    a, b, peer = pair
    shape = (BLOCKS, 16, 576)
    nbytes = int(np.prod(shape)) * 2
    memories = [await b.allocate(nbytes) for _ in range(2)]
    there = [np.frombuffer(memoryview(memory), np.float16).reshape(shape) for memory in memories]
    await b.register_kv(there, "mla")
    here = [np.random.default_rng(i).random(shape).astype(np.float16) for i in range(2)]
    cache = await a.register_kv(here, "mla")
    remote = await peer.kv("mla")
    assert "mapped" in peer.route(cache.regions[0], remote.regions[0]).reason
    await peer.write_kv(cache, range(BLOCKS), range(BLOCKS))
    for mine, theirs in zip(here, there, strict=True):
        assert (mine == theirs).all()


async def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch", reason="needs the packages of requirements/torch.txt")
    async with engine_pair() as pair:
        here = [tuple(torch.randn(BLOCKS, *BLOCK, dtype=torch.bfloat16) for _ in "kv") for _ in range(LAYERS)]
        there = [tuple(torch.zeros(BLOCKS, *BLOCK, dtype=torch.bfloat16) for _ in "kv") for _ in range(LAYERS)]
        cache = await pair[0].register_kv(here)
        await pair[1].register_kv(there)
        await pair[2].kv()
        await pair[2].write_kv(cache, [0, 1, 2], [5, 6, 7])
        for mine, theirs in zip(here, there, strict=True):
            for part in range(2):
                assert torch.equal(mine[part][:3], theirs[part][5:8])
                assert not theirs[part][8:].any()


# ---- streams ----


def post_all(stream: aiohixl.KVStream) -> None:
    for layer in range(stream.num_layers):
        stream.post(layer)


async def in_thread(stream: aiohixl.KVStream, call: Callable[[aiohixl.KVStream], None]) -> None:
    """`asyncio.to_thread` leaves its pool's thread behind, which the leak check would find."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        call(stream)
        loop.call_soon_threadsafe(done.set)

    thread = threading.Thread(target=run)
    thread.start()
    await done.wait()
    thread.join()


async def test_stream_posted_from_a_thread_then_the_note(pair: Pair) -> None:
    here, there = make_cache(5), make_cache(6)
    cache, _, _ = await both(pair, here, there)
    async with pair[2].stream_kv(cache, [0, 1], [2, 3], note=b"req-43") as stream:
        await in_thread(stream, post_all)
    note = await pair[1].notes().get()
    assert (note.payload, note.aborted) == (b"req-43", False)
    for layer in range(LAYERS):
        for part in range(2):
            assert (there[layer][part][[2, 3]] == here[layer][part][[0, 1]]).all()


async def test_stream_left_by_an_exception_tells_the_receiver(pair: Pair) -> None:
    cache, _, _ = await both(pair, make_cache(7), make_cache(8))

    async def fail() -> None:
        async with pair[2].stream_kv(cache, [0], [0], note=b"req") as stream:
            stream.post(0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    note = await pair[1].notes().get()
    assert (note.payload, note.aborted) == (b"req", True)


async def test_stream_with_a_layer_missing(pair: Pair) -> None:
    cache, _, _ = await both(pair, make_cache(9), make_cache(10))
    with pytest.raises(aiohixl.TransferAbortedError, match=r"missing 3 of 4, first layer 1"):
        async with pair[2].stream_kv(cache, [0], [0], note=b"req") as stream:
            stream.post(0)
    assert (await pair[1].notes().get()).aborted


async def test_stream_with_a_layer_that_fails() -> None:
    async with engine_pair(FaultPlan().fail(2)) as pair:
        here, there = make_cache(11), make_cache(12)
        cache, _, _ = await both(pair, here, there)
        with pytest.raises(aiohixl.TransferError):
            async with pair[2].stream_kv(cache, [0], [0], note=b"req") as stream:
                post_all(stream)
        assert (await pair[1].notes().get()).aborted
        await pair[2].write_kv(cache, [1], [1])
        assert (there[0][0][1] == here[0][0][1]).all()


async def test_stream_cancelled_in_mid_flight() -> None:
    async with engine_pair(FaultPlan().stall(1)) as pair:
        here, there = make_cache(13), make_cache(14)
        cache, _, _ = await both(pair, here, there)
        before = there[1][0].copy()

        async def send() -> None:
            async with pair[2].stream_kv(cache, [0], [0], note=b"req") as stream:
                post_all(stream)

        task = asyncio.create_task(send())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        here[1][0][:] = -1  # the memory is ours again
        assert (await pair[1].notes().get()).aborted
        assert (there[1][0] == before).all()


async def test_misuse_of_a_stream(pair: Pair) -> None:
    cache, _, _ = await both(pair, make_cache(15), make_cache(16))
    stream = pair[2].stream_kv(cache, [0], [0])
    with pytest.raises(aiohixl.ConfigError, match="inside"):
        stream.post(0)
    async with stream:
        post_all(stream)
        with pytest.raises(aiohixl.ConfigError, match="posted already"):
            stream.post(1)
        with pytest.raises(aiohixl.ConfigError, match="layers 0 to 3"):
            stream.post(4)


# ---- layouts that do not match ----


async def test_layouts_that_differ_are_named(pair: Pair) -> None:
    a, b, peer = pair
    await b.register_kv(make_cache(17), "kv")
    await peer.kv("kv")
    for name, other in {
        "dtype": make_cache(18, dtype="float32"),
        "layer": make_cache(18, layers=LAYERS - 1),
        "shape": [(k[:, :8], v[:, :8]) for k, v in make_cache(18)],
    }.items():
        cache = await a.register_kv(other, f"kv-{name}")
        with pytest.raises(aiohixl.PeerMismatchError, match=name):
            peer.write_kv(cache, [0], [0], remote="kv")
    with pytest.raises(aiohixl.RegionError, match="no KV cache 'absent'"):
        peer.write_kv(cache, [0], [0], remote="absent")


async def test_a_withdrawn_cache_is_gone(pair: Pair) -> None:
    a, b, peer = pair
    owner = await b.register_kv(make_cache(19), "kv")
    cache = await a.register_kv(make_cache(20), "kv")
    remote = await peer.kv("kv")
    await owner.deregister()
    with pytest.raises(aiohixl.RemoteAccessError):
        await peer.write_kv(cache, [0], [0], remote=remote)
    again = make_cache(21)
    await b.register_kv(again, "kv")
    while (found := await peer.kv("kv")) is remote:
        await asyncio.sleep(0)
    await peer.write_kv(cache, [0], [0], remote=found)
