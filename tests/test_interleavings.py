# SPDX-License-Identifier: Apache-2.0
"""Random interleavings of writes, reads and cancels in both directions, against a model of both memories.

In one round every destination is written by one transfer at most and read by none, so the outcome is determined: a
completed transfer has moved all its bytes, a cancelled one any of them, and nothing else has changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest_asyncio
from ground import noise
from hypothesis import HealthCheck, given, settings

import aiohixl

Pair = tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]
SLOT = 40_000  # above the inline limit, so that both ways of copying take part
SLOTS = 8


class Move(NamedTuple):
    """One transfer: from one slot to another, by whom, and what becomes of it."""

    by: int
    kind: str
    memory: tuple[int, int]
    slots: tuple[int, int]
    skip: int
    nbytes: int
    rows: int
    fate: str


@dataclass
class Side:
    """One engine, its peer for the other, and its memories: allocated and foreign."""

    engine: aiohixl.Engine
    peer: aiohixl.Peer
    views: list[npt.NDArray[np.uint8]]
    regions: list[aiohixl.Region]
    remotes: list[aiohixl.RemoteRegion]


@pytest_asyncio.fixture
async def sides(pair: Pair) -> AsyncIterator[list[Side]]:
    a, b, peer = pair
    out = []
    for engine, to in ((a, peer), (b, await b.connect(a.address))):
        allocated, foreign = await engine.allocate(SLOT * SLOTS, "0"), np.zeros(SLOT * SLOTS, np.uint8)
        views = [np.frombuffer(memoryview(allocated), np.uint8), foreign]
        out.append(Side(engine, to, views, [allocated, engine.register(foreign, "1")], []))
    for side in out:
        side.remotes = [await side.peer.region(name) for name in ("0", "1")]
    yield out
    out.clear()


@st.composite
def rounds(draw: st.DrawFn) -> list[Move]:
    # Slots of all four memories in one list, dealt out without repetition: a source is never a destination.
    free = draw(
        st.permutations([(side, memory, slot) for side in (0, 1) for memory in (0, 1) for slot in range(SLOTS)])
    )
    moves = []
    by_side: dict[int, list[tuple[int, int, int]]] = {0: [], 1: []}
    for place in free:
        by_side[place[0]].append(place)
    for _ in range(draw(st.integers(1, 2 * SLOTS))):
        here, there = by_side[0].pop(), by_side[1].pop()
        by = draw(st.sampled_from((0, 1)))
        mine, theirs = (here, there) if by == 0 else (there, here)
        rows = draw(st.sampled_from((1, 1, 1, 7)))
        nbytes = draw(st.sampled_from((0, 1, 63, 4096, 5000, 33_000, SLOT))) // rows
        skip = draw(st.integers(0, SLOT - nbytes * rows))
        fate = draw(st.sampled_from(("await", "await", "cancel", "task", "late")))
        kind = draw(st.sampled_from(("write", "read")))
        moves.append(Move(by, kind, (mine[1], theirs[1]), (mine[2], theirs[2]), skip, nbytes, rows, fate))
    return moves


def post(sides: list[Side], move: Move) -> aiohixl.Transfer:
    side = sides[move.by]
    local, remote = side.regions[move.memory[0]], side.remotes[move.memory[1]]
    lo, ro = (slot * SLOT + move.skip for slot in move.slots)
    if move.rows == 1:
        call = side.peer.write if move.kind == "write" else side.peer.read
        return call(local[lo : lo + move.nbytes], remote[ro : ro + move.nbytes])
    many = side.peer.write_many if move.kind == "write" else side.peer.read_many
    steps = np.arange(move.rows) * move.nbytes
    return many(local, lo + steps, remote, ro + steps[::-1], move.nbytes)


def effect(move: Move) -> tuple[tuple[int, int, int], tuple[int, int, int], list[tuple[int, int]]]:
    """Source and destination as (side, memory, slot), and (source, destination) offsets of each row in its slot."""
    mine = (move.by, move.memory[0], move.slots[0])
    theirs = (1 - move.by, move.memory[1], move.slots[1])
    forth = [move.skip + i * move.nbytes for i in range(move.rows)]
    back = forth[::-1] if move.rows > 1 else forth
    if move.kind == "write":
        return mine, theirs, list(zip(forth, back, strict=True))
    return theirs, mine, list(zip(back, forth, strict=True))


async def play(sides: list[Side], moves: list[Move]) -> None:
    before = [[view.copy() for view in side.views] for side in sides]
    posted = [post(sides, move) for move in moves]
    late: list[asyncio.Task[Any]] = []
    for move, transfer in zip(moves, posted, strict=True):
        if move.fate == "cancel":
            transfer.cancel()
        elif move.fate in ("task", "late"):
            task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(transfer)
            if move.fate == "task":
                task.cancel()
            else:
                await asyncio.sleep(0)
            late.append(task)
    for task in late[::2]:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    await asyncio.gather(*posted, return_exceptions=True)

    for move, transfer in zip(moves, posted, strict=True):
        assert transfer.done()
        assert transfer.quiesced
        assert transfer.exception() is None or isinstance(transfer.exception(), aiohixl.TransferAbortedError)
        if move.fate == "await":
            assert transfer.exception() is None
        source, target, rows = effect(move)
        for from_, to in rows:
            data = before[source[0]][source[1]][source[2] * SLOT + from_ :][: move.nbytes]
            at = slice(target[2] * SLOT + to, target[2] * SLOT + to + move.nbytes)
            actual, model = sides[target[0]].views[target[1]][at], before[target[0]][target[1]][at]
            if transfer.exception() is None:
                model[:] = data
            else:
                assert ((actual == data) | (actual == model)).all()
                model[:] = actual
    for side, models in zip(sides, before, strict=True):
        for view, model in zip(side.views, models, strict=True):
            assert np.array_equal(view, model), "bytes changed that no transfer was asked to change"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plays=st.lists(rounds(), min_size=1, max_size=4), seed=st.integers(0, 1 << 30))
async def test_contract_03_and_07_memory_equals_its_model(
    sides: list[Side], plays: list[list[Move]], seed: int
) -> None:
    for i, side in enumerate(sides):
        for j, view in enumerate(side.views):
            view[:] = noise(view.nbytes, seed + 2 * i + j)
    for moves in plays:
        await play(sides, moves)
    for side in sides:
        assert side.engine.stats()["live_ops"] == side.engine.stats()["pending"] == 0
