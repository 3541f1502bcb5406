# SPDX-License-Identifier: Apache-2.0
"""Role: offers blocks, waits for the note that they are full, and goes on from there."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from aiohixl.demo.child import Child, run_role
from aiohixl.demo.handoff import CACHE, ask_again, joined, next_note, pick_blocks, spare_blocks
from aiohixl.demo.memory import CacheMemory
from aiohixl.demo.prompt import PROMPT, chat
from aiohixl.demo.reference import pack

__all__ = ["main"]


def _load(child: Child) -> tuple[Any, Any, list[int]]:
    from aiohixl.demo import generate, model

    model.quiet_libraries()
    folder = model.converted(child.say)
    lm = model.load_model(folder, child.config["threads"])
    tokenizer = model.load_tokenizer(folder)
    tokens: list[int] = tokenizer(chat(PROMPT))["input_ids"]
    generate.warm_up(lm, tokens)
    return lm, tokenizer, tokens


async def main(child: Child) -> None:
    lm, tokenizer, tokens = await asyncio.to_thread(_load, child)
    from aiohixl.demo import generate
    from aiohixl.demo.paged import Geometry, PagedCache

    geometry = Geometry.of(lm.config)
    needed = geometry.blocks_for(len(tokens) - 1)
    nblocks = spare_blocks(needed)
    async with joined(child) as engine:
        memory = await CacheMemory.allocate(engine, geometry.nbytes(nblocks), geometry.layers, child.config["device"])
        pages = PagedCache(geometry, nblocks, memory.host)
        await memory.push()
        await engine.register_kv(memory.tensors(pages.layers, 4, "float32"), name=CACHE)
        child.send("ready")
        await child.go.wait()
        blocks = pick_blocks(nblocks, needed, seed=2)
        prefill = await engine.connect(child.config["prefill"])
        request = {"id": "req-1", "tokens": tokens, "blocks": blocks}
        asked_at = time.monotonic()
        await prefill.notify(json.dumps(request).encode())
        _, note = await next_note(engine)
        noted_at = time.monotonic()
        if note["id"] != request["id"]:
            raise RuntimeError(f"asked for {request['id']}, the note is about {note['id']}")
        child.say(f"note for {note['id']}: {note['cached']} tokens are in place, decoding")

        await memory.pull()

        def continue_from_note() -> Any:
            cache = generate.from_pages(lm, pages, note["blocks"], note["cached"])
            stop = frozenset([tokenizer.eos_token_id])
            return generate.decode(lm, cache, note["last_token"], child.config["tokens"], stop)

        answer = await asyncio.to_thread(continue_from_note)
        child.say(f"{len(answer.tokens)} tokens decoded")
        sums = await asyncio.to_thread(pages.checksums, blocks)
        await asyncio.to_thread(pages.blank, blocks)
        await memory.push()
        await ask_again(engine, prefill)
        await memory.pull()
        child.send(
            "result",
            tokens=answer.tokens,
            logits=pack(answer.first_logits),
            text=tokenizer.decode(answer.tokens, skip_special_tokens=True),
            ttft=answer.first_token_at - asked_at,
            asked_at=asked_at,
            noted_at=noted_at,
            first_token_at=answer.first_token_at,
            checksums=sums,
            checksums_again=await asyncio.to_thread(pages.checksums, blocks),
            written_outside=pages.written_outside(blocks),
        )


if __name__ == "__main__":
    run_role("decode", main)
