# SPDX-License-Identifier: Apache-2.0
"""The receiving side: register a KV cache, wait for the note that some blocks are full.

Run it after `aiohixl rendezvous`, and before prefill.py in another terminal.

python examples/decode.py [http://127.0.0.1:7700]
"""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np

import aiohixl

LAYERS, NBLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM = 4, 64, 16, 8, 64


async def main(rendezvous: str) -> None:
    shape = (NBLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM)
    layers = [(np.zeros(shape, np.float32), np.zeros(shape, np.float32)) for _ in range(LAYERS)]
    async with aiohixl.Engine("decode-0", rendezvous=rendezvous) as engine:
        await engine.register_kv(layers, name="kv")
        print("waiting for a note", flush=True)
        async for note in engine.notes():
            request = json.loads(bytes(note.payload))
            # Its bytes are in place already: nothing had to be received.
            total = sum(float(half[request["blocks"]].sum()) for layer in layers for half in layer)
            print(f"{request['id']}: blocks {request['blocks']}, sum {total:.0f}", flush=True)
            break


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7700"))
