# SPDX-License-Identifier: Apache-2.0
"""Prefill and greedy decode, the same code in every process of the demo.

Prefill covers all of the prompt but its last token. Whoever decodes runs that
last token over the cache, so that the very first logits already depend on
every byte of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from aiohixl.demo.paged import PagedCache

__all__ = ["Generation", "decode", "from_pages", "one_forward", "prefill", "warm_up"]


@dataclass(frozen=True)
class Generation:
    """Token ids, the float32 logits of the first step, and `time.monotonic` of the first token."""

    tokens: list[int]
    first_logits: Any
    first_token_at: float


def prefill(model: Any, tokens: Sequence[int], on_layer: Callable[[int, Any, Any], None] | None = None) -> Any:
    """Run all ``tokens`` but the last; returns the cache.

    ``on_layer(layer, keys, values)`` is called from this thread as soon as a
    layer's keys and values exist, long before the later layers do. An
    exception from it ends the forward pass.
    """
    cache: Any = DynamicCache(config=model.config)
    if on_layer is not None:
        update = cache.update

        def reporting(keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            result = update(keys, values, layer_idx, *args, **kwargs)
            on_layer(layer_idx, keys, values)
            return result

        cache.update = reporting
    with torch.inference_mode():
        # The inner model: nobody needs logits for the prompt.
        model.model(input_ids=torch.tensor([list(tokens[:-1])]), cache=cache, use_cache=True)
    return cache


def from_pages(model: Any, pages: PagedCache, blocks: Sequence[int], ntokens: int) -> Any:
    """A cache whose first ``ntokens`` come from ``blocks``; nothing is recomputed."""
    layers = [pages.load(layer, blocks, ntokens) for layer in range(pages.geometry.layers)]
    cache: Any = DynamicCache(ddp_cache_data=layers, config=model.config)
    return cache


def decode(model: Any, cache: Any, last_token: int, limit: int, stop: frozenset[int]) -> Generation:
    """Up to ``limit`` greedy tokens after ``last_token``; a token of ``stop`` ends it and is included."""
    tokens: list[int] = []
    first_logits = None
    first_token_at = 0.0
    with torch.inference_mode():
        while len(tokens) < limit:
            step: Any = model(input_ids=torch.tensor([[last_token]]), cache=cache, use_cache=True)
            logits = step.logits[0, -1]
            last_token = int(logits.argmax())
            if first_logits is None:
                first_logits, first_token_at = logits, time.monotonic()
            tokens.append(last_token)
            if last_token in stop:
                break
    return Generation(tokens, first_logits, first_token_at)


def one_forward(model: Any, tokens: Sequence[int]) -> tuple[Any, float]:
    """Logits after the whole prompt in one forward pass, and `time.monotonic` when the first token is known.

    What a server without a split does; its time to first token is the fair one to compare with.
    """
    cache: Any = DynamicCache(config=model.config)
    with torch.inference_mode():
        step: Any = model(input_ids=torch.tensor([list(tokens)]), cache=cache, use_cache=True, logits_to_keep=1)
        logits = step.logits[0, -1]
        int(logits.argmax())
    return logits, time.monotonic()


def warm_up(model: Any, tokens: Sequence[int]) -> None:
    """One throw-away run of the same shape, so that no process pays for first use while it is timed."""
    decode(model, prefill(model, tokens), tokens[-1], 1, frozenset())
