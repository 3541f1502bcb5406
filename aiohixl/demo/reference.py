# SPDX-License-Identifier: Apache-2.0
"""Role: the whole job in a single process, to compare with."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

from aiohixl.demo.child import Child, run_role
from aiohixl.demo.prompt import PROMPT, chat

__all__ = ["main", "pack", "solve"]


def pack(logits: Any) -> str:
    """Float32 logits as base 64, for a line of JSON."""
    return base64.b64encode(logits.float().numpy().tobytes()).decode()


def solve(child: Child) -> dict[str, Any]:
    """Load, warm up, run once the ordinary way and once by the steps of the split run."""
    from aiohixl.demo import generate, model

    model.quiet_libraries()
    folder = model.converted(child.say)
    lm = model.load_model(folder, child.config["threads"])
    tokenizer = model.load_tokenizer(folder)
    tokens: list[int] = tokenizer(chat(PROMPT))["input_ids"]
    generate.warm_up(lm, tokens)
    child.say(f"prompt of {len(tokens)} tokens, single process")
    started = time.monotonic()
    plain_logits, first_at = generate.one_forward(lm, tokens)
    cache = generate.prefill(lm, tokens)
    answer = generate.decode(lm, cache, tokens[-1], child.config["tokens"], frozenset([tokenizer.eos_token_id]))
    child.say(f"first token after {first_at - started:.2f} s, {len(answer.tokens)} tokens in all")
    return {
        "prompt": tokens,
        "tokens": answer.tokens,
        "logits": pack(answer.first_logits),
        "one_forward_logits": pack(plain_logits),
        "ttft": first_at - started,
        "text": tokenizer.decode(answer.tokens, skip_special_tokens=True),
    }


async def main(child: Child) -> None:
    child.send("result", **await asyncio.to_thread(solve, child))


if __name__ == "__main__":
    run_role("reference", main)
