# SPDX-License-Identifier: Apache-2.0
"""Roles of the demo without a model: a cache in the shape of Llama-2-7B, compared by checksum.

``python -m aiohixl.demo.synthetic prefill`` and ``… decode``. Filling a layer
at random takes the place of computing it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiohixl.demo.child import Child, run_role
from aiohixl.demo.handoff import (
    CACHE,
    ask_again,
    joined,
    next_note,
    pick_blocks,
    route_to,
    send_again,
    spare_blocks,
    stream_layers,
)
from aiohixl.demo.memory import CacheMemory
from aiohixl.demo.transport import loaded_library

__all__ = ["LLAMA_2_7B", "Pages", "Shape", "decode", "prefill"]

#: Byte that blocks hold before anything arrives.
BLANK = 0xA5


@dataclass(frozen=True)
class Shape:
    """A float16 cache of ``tokens`` tokens in blocks of ``block_size``."""

    layers: int
    heads: int
    head_dim: int
    block_size: int
    tokens: int

    @property
    def blocks(self) -> int:
        return -(-self.tokens // self.block_size)

    def array(self, nblocks: int) -> tuple[int, ...]:
        return (self.layers, 2, nblocks, self.block_size, self.heads, self.head_dim)

    def nbytes(self, nblocks: int) -> int:
        return int(np.prod(self.array(nblocks))) * 2


#: 512 tokens are 256 MiB.
LLAMA_2_7B = Shape(layers=32, heads=32, head_dim=128, block_size=16, tokens=512)


class Pages:
    """Views of ``buffer``, which holds ``shape.nbytes(nblocks)`` bytes; every byte starts as `BLANK`."""

    def __init__(self, shape: Shape, nblocks: int, buffer: Any) -> None:
        self.shape = shape
        self.nblocks = nblocks
        raw: NDArray[np.uint8] = np.frombuffer(buffer, dtype=np.uint8, count=shape.nbytes(nblocks))
        raw[:] = BLANK
        #: [layer, keys or values, block, byte]
        self.bytes = raw.reshape(shape.layers, 2, nblocks, -1)
        cache = raw.view(np.float16).reshape(shape.array(nblocks))
        self.layers = [(layer[0], layer[1]) for layer in cache]

    def fill(self, layer: int, blocks: Sequence[int]) -> None:
        """Random bytes that depend on the layer, so that no two blocks of a run are alike."""
        random = np.random.default_rng([2023, layer])
        words = self.bytes.shape[-1] // 8
        for half in self.bytes[layer]:
            half.view(np.uint64)[list(blocks)] = random.integers(0, 1 << 64, (len(blocks), words), dtype=np.uint64)

    def blank(self, blocks: Sequence[int]) -> None:
        """As if nothing had ever arrived in ``blocks``."""
        self.bytes[:, :, list(blocks)] = BLANK

    def checksum(self, layer: int, blocks: Sequence[int]) -> str:
        """SHA-256 over the layer's keys, then its values, in the order of ``blocks``."""
        digest = hashlib.sha256()
        for half in self.bytes[layer]:
            for block in blocks:
                digest.update(half[block])
        return digest.hexdigest()

    def checksums(self, blocks: Sequence[int]) -> list[str]:
        return [self.checksum(layer, blocks) for layer in range(self.shape.layers)]

    def written_outside(self, blocks: Sequence[int]) -> list[int]:
        """Blocks beyond ``blocks`` in which any byte changed."""
        others = sorted(set(range(self.nblocks)) - set(blocks))
        return [block for block in others if not (self.bytes[:, :, block] == BLANK).all()]


async def prefill(child: Child, shape: Shape = LLAMA_2_7B) -> None:
    """Fill each layer and post it at once; then answer with checksums of what was filled."""
    nblocks = spare_blocks(shape.blocks)
    async with joined(child) as engine:
        memory = await CacheMemory.allocate(engine, shape.nbytes(nblocks), shape.layers, child.config["device"])
        pages = Pages(shape, nblocks, memory.host)
        cache = await engine.register_kv(memory.tensors(pages.layers, 2, "float16"), name=CACHE)
        child.send("ready")
        peer, request = await next_note(engine)
        blocks = pick_blocks(nblocks, shape.blocks, seed=1)
        child.say(f"{shape.layers} layers of {shape.nbytes(shape.blocks) / shape.layers / 2**20:g} MiB")

        def compute(post: Callable[[int], None]) -> None:
            for layer in range(shape.layers):
                pages.fill(layer, blocks)
                memory.push_layer(layer)
                post(layer)

        summary = await stream_layers(peer, cache, blocks, request["blocks"], {"id": request["id"]}, compute)
        child.say(f"{summary.nbytes / 2**20:g} MiB landed, {summary.hidden_share:.0%} while filling")
        sums = await asyncio.to_thread(pages.checksums, blocks)
        alone = await send_again(engine, peer, cache, blocks, request["blocks"])
        child.send(
            "result",
            **asdict(summary),
            alone_seconds=alone,
            hidden_share=summary.hidden_share,
            checksums=sums,
            shape=asdict(shape),
            **await route_to(peer, cache),
            **loaded_library(),
        )
        await child.stop.wait()


async def decode(child: Child, shape: Shape = LLAMA_2_7B) -> None:
    """Offer scattered blocks, wait for the note, answer with checksums of what arrived."""
    nblocks = spare_blocks(shape.blocks)
    async with joined(child) as engine:
        memory = await CacheMemory.allocate(engine, shape.nbytes(nblocks), shape.layers, child.config["device"])
        pages = Pages(shape, nblocks, memory.host)
        await memory.push()
        await engine.register_kv(memory.tensors(pages.layers, 2, "float16"), name=CACHE)
        child.send("ready")
        await child.go.wait()
        blocks = pick_blocks(nblocks, shape.blocks, seed=2)
        peer = await engine.connect(child.config["prefill"])
        asked_at = time.monotonic()
        await peer.notify(json.dumps({"id": "req-1", "blocks": blocks}).encode())
        await next_note(engine)
        noted_at = time.monotonic()
        child.say("note received, checking")
        await memory.pull()
        sums = await asyncio.to_thread(pages.checksums, blocks)
        await asyncio.to_thread(pages.blank, blocks)
        await memory.push()
        await ask_again(engine, peer)
        await memory.pull()
        child.send(
            "result",
            checksums=sums,
            checksums_again=await asyncio.to_thread(pages.checksums, blocks),
            asked_at=asked_at,
            noted_at=noted_at,
            written_outside=pages.written_outside(blocks),
        )


if __name__ == "__main__":
    run_role(sys.argv[1], {"prefill": prefill, "decode": decode}[sys.argv[1]])
