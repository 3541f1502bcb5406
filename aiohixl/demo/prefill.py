# SPDX-License-Identifier: Apache-2.0
"""Role: computes the prompt and writes its KV cache, layer by layer, into the process that asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from aiohixl.demo.child import Child, run_role
from aiohixl.demo.handoff import (
    CACHE,
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

__all__ = ["main", "paged_prefill"]


def paged_prefill(lm: Any, tokens: list[int], pages: Any, blocks: list[int], post: Callable[[int], None]) -> None:
    """Prefill that puts each layer into ``pages`` and calls ``post(layer)`` as soon as it is computed."""
    from aiohixl.demo import generate

    def on_layer(layer: int, keys: Any, values: Any) -> None:
        pages.store(layer, keys, values, blocks)
        post(layer)

    generate.prefill(lm, tokens, on_layer)


def _load(child: Child) -> Any:
    from aiohixl.demo import generate, model

    model.quiet_libraries()
    lm = model.load_model(model.converted(child.say), child.config["threads"])
    generate.warm_up(lm, [1] * child.config["prompt_tokens"])
    return lm


async def main(child: Child) -> None:
    lm = await asyncio.to_thread(_load, child)
    from aiohixl.demo.paged import Geometry, PagedCache

    geometry = Geometry.of(lm.config)
    nblocks = spare_blocks(geometry.blocks_for(child.config["prompt_tokens"]))
    async with joined(child) as engine:
        memory = await CacheMemory.allocate(engine, geometry.nbytes(nblocks), geometry.layers, child.config["device"])
        pages = PagedCache(geometry, nblocks, memory.host)
        cache = await engine.register_kv(memory.tensors(pages.layers, 4, "float32"), name=CACHE)
        child.send("ready")
        peer, request = await next_note(engine)
        tokens: list[int] = request["tokens"]
        cached = len(tokens) - 1
        blocks = pick_blocks(nblocks, geometry.blocks_for(cached), seed=1)
        child.say(f"request {request['id']}: {cached} tokens, {len(blocks)} blocks, {geometry.layers} layers")
        done = 0

        def compute(post: Callable[[int], None]) -> None:
            def reporting(layer: int) -> None:
                nonlocal done
                memory.push_layer(layer)
                post(layer)
                done = layer + 1
                if done % 10 == 0 or done == geometry.layers:
                    child.say(f"{done} of {geometry.layers} layers computed and posted")

            paged_prefill(lm, tokens, pages, blocks, reporting)

        note = {"id": request["id"], "cached": cached, "last_token": tokens[-1], "blocks": request["blocks"]}
        summary = await stream_layers(peer, cache, blocks, request["blocks"], note, compute)
        child.say(f"{summary.nbytes / 1e6:.1f} MB landed, {summary.hidden_share:.0%} while computing")
        sums = await asyncio.to_thread(pages.checksums, blocks)
        alone = await send_again(engine, peer, cache, blocks, request["blocks"])
        child.send(
            "result",
            **asdict(summary),
            hidden_share=summary.hidden_share,
            layers=geometry.layers,
            checksums=sums,
            alone_seconds=alone,
            **await route_to(peer, cache),
            **loaded_library(),
        )
        await child.stop.wait()


if __name__ == "__main__":
    run_role("prefill", main)
