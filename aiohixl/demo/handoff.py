# SPDX-License-Identifier: Apache-2.0
"""The transfer itself: everything in the demo that touches an engine is here or one line in a role."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from aiohixl.demo.child import Child
from aiohixl.demo.meter import Meter, Summary

__all__ = [
    "CACHE",
    "ask_again",
    "joined",
    "next_note",
    "pick_blocks",
    "route_to",
    "send_again",
    "spare_blocks",
    "stream_layers",
]

#: The name under which both sides register their cache.
CACHE = "kv"


@contextlib.asynccontextmanager
async def joined(child: Child) -> AsyncIterator[Any]:
    """An engine under the child's name, joined to the rendezvous that its configuration names."""
    from aiohixl import Engine

    config = child.config
    async with Engine(child.name, rendezvous=config["rendezvous"], token=config["token"], **config["engine"]) as engine:
        yield engine


async def next_note(engine: Any) -> tuple[Any, dict[str, Any]]:
    """The next note's sender and its decoded payload. An aborted one is a `RuntimeError`."""
    note = await anext(aiter(engine.notes()))
    if note.aborted:
        raise RuntimeError(f"{note.peer.name} gave up: its note arrived marked as aborted")
    return note.peer, json.loads(bytes(note.payload))


async def stream_layers(
    peer: Any,
    cache: Any,
    blocks: Sequence[int],
    remote_blocks: Sequence[int],
    note: dict[str, Any],
    compute: Callable[[Callable[[int], None]], object],
) -> Summary:
    """Run ``compute(post)`` in a thread; each ``post(layer)`` sends that layer's blocks while it goes on.

    Returns when every layer has landed in ``remote_blocks`` and the note is
    delivered. Cancelling leaves when the bytes have quiesced; the thread ends
    at its next post.
    """
    await peer.kv(CACHE)  # waits for one that is not announced yet
    meter = Meter()
    async with peer.stream_kv(cache, blocks, remote_blocks, note=json.dumps(note).encode()) as stream:

        def post(layer: int) -> None:
            at = meter.posting()
            meter.posted(at, stream.post(layer))

        await asyncio.to_thread(compute, post)
        meter.computed()
    meter.landed()
    return meter.summary()


async def route_to(peer: Any, cache: Any) -> dict[str, Any]:
    """The transport by which blocks of ``cache`` reach ``peer``; for HIXL the link too."""
    remote = await peer.kv(CACHE)
    provider = peer.route(cache.regions[0], remote.regions[0]).provider
    return {"provider": provider, "link": peer.link if provider == "hixl" else None}


async def send_again(engine: Any, peer: Any, cache: Any, blocks: Sequence[int], remote_blocks: Sequence[int]) -> float:
    """Wait for `ask_again`, write the same blocks in one transfer; seconds from the call to the end of its await.

    By the caller's clock, which `Transfer.elapsed` is not: that leaves out making the descriptors and waking up.
    While a model computes it has all the cores, and the copy waits for its share of them; here it does not.
    """
    await next_note(engine)
    started = time.monotonic()
    await peer.write_kv(cache, blocks, remote_blocks, note=b"{}")
    return time.monotonic() - started


async def ask_again(engine: Any, peer: Any) -> None:
    """Tell the other side that nothing is computing now, and wait until it has written once more."""
    await peer.notify(b"{}")
    await next_note(engine)


def spare_blocks(needed: int) -> int:
    """Size of a pool in which ``needed`` blocks are scattered: half as many again."""
    return needed + max(needed // 2, 2)


def pick_blocks(nblocks: int, needed: int, seed: int) -> list[int]:
    """``needed`` different blocks of a pool, in an order that nothing can take for contiguous."""
    return random.Random(seed).sample(range(nblocks), needed)
