# SPDX-License-Identifier: Apache-2.0
"""The sending side: compute a KV cache layer by layer, and send each layer while the next is computed.

Run it after decode.py.

python examples/prefill.py [http://127.0.0.1:7700]
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable

import numpy as np

import aiohixl

LAYERS, NBLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM = 4, 64, 16, 8, 64


async def main(rendezvous: str) -> None:
    shape = (NBLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM)
    layers = [(np.zeros(shape, np.float32), np.zeros(shape, np.float32)) for _ in range(LAYERS)]
    blocks, remote_blocks = [3, 9, 5], [17, 4, 40]  # a scheduler would choose these

    def run_model(on_layer: Callable[[int], object]) -> None:
        for number, (keys, values) in enumerate(layers):
            keys[blocks] = number + 1
            values[blocks] = number + 2
            on_layer(number)

    async with aiohixl.Engine("prefill-0", rendezvous=rendezvous) as engine:
        cache = await engine.register_kv(layers, name="kv")
        peer = await engine.connect("decode-0")
        await peer.kv("kv")  # waits for a cache that is not announced yet
        note = json.dumps({"id": "req-42", "blocks": remote_blocks}).encode()
        async with peer.stream_kv(cache, blocks, remote_blocks, note=note) as stream:
            await asyncio.to_thread(run_model, stream.post)  # post may be called from any thread
        # Every layer has landed, and the note is delivered.
        total = sum(float(half[blocks].sum()) for layer in layers for half in layer)
        print(f"req-42: sent, sum {total:.0f}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7700"))
