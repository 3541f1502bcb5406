# SPDX-License-Identifier: Apache-2.0
"""Random interleavings of writes, reads, cancellations and disconnections on TCP, against a model of both memories.

As in test_interleavings, every destination is written by one transfer at most in a round, and read by none: a completed
transfer has moved all its bytes, one that was cancelled or lost its connection any of them, and nothing else changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import pytest_asyncio
from conftest import Start
from ground import noise
from hypothesis import HealthCheck, given, settings
from processes import until
from tcpproxy import Proxy, between
from test_interleavings import SLOT, SLOTS, Move, Side, effect, post, rounds

import aiohixl


class Cut(NamedTuple):
    """Of all data connections: after so many turns of the loop, or of one that has carried so many bytes more."""

    turns: int
    nbytes: int
    reset: bool


class Play(NamedTuple):
    moves: list[Move]
    cut: Cut | None


class Field:
    def __init__(self, sides: list[Side], proxy: Proxy) -> None:
        self.sides, self.proxy = sides, proxy


CUTS = st.builds(Cut, st.integers(0, 4), st.sampled_from((0, 0, 1, 70, 5000, 100_000)), st.booleans())
PLAYS = st.lists(st.builds(Play, rounds(), st.none() | CUTS), min_size=1, max_size=4)


@pytest_asyncio.fixture(params=[(1, False), (3, True)], ids=["1-plain", "3-checksum-zerocopy"])
async def field(start: Start, request: pytest.FixtureRequest) -> AsyncIterator[Field]:
    streams, full = request.param
    async with between(start, streams=streams, checksum=full, zerocopy=full) as (a, b, to_b, proxy):
        (to_a,) = b.peers.values()
        assert isinstance(to_a, aiohixl.Peer)
        sides = []
        for engine, peer in ((a, to_b), (b, to_a)):
            allocated, foreign = await engine.allocate(SLOT * SLOTS, "0"), np.zeros(SLOT * SLOTS, np.uint8)
            views = [np.frombuffer(memoryview(allocated), np.uint8), foreign]
            sides.append(Side(engine, peer, views, [allocated, engine.register(foreign, "1")], []))
        for side in sides:
            side.remotes = [await side.peer.region(name) for name in ("0", "1")]
        field = Field(sides, proxy)
        yield field
        sides.clear()
        field.__dict__.clear()  # pytest holds a fixture's value until after the check for leaks


async def settle(sides: list[Side]) -> None:
    """Nothing of what has failed is on its way any more: owners take their memory back, and grant it again."""
    for side, other in ((sides[0], sides[1]), (sides[1], sides[0])):
        for region in side.regions:
            await region.revoke()
            region.grant()
        await side.peer.notify(b"", topic="granted")  # it does not overtake the grant
        await other.engine.notes("granted").get()


async def play(field: Field, moves: list[Move], cut: Cut | None) -> None:
    sides = field.sides
    before = [[view.copy() for view in side.views] for side in sides]
    if cut is not None:
        field.proxy.reset = cut.reset
        if cut.nbytes:
            carried = max((max(pipe.passed) for pipe in field.proxy.data_pipes), default=0)
            field.proxy.cut_after = carried + cut.nbytes
    posted = [post(sides, move) for move in moves]
    for move, transfer in zip(moves, posted, strict=True):
        if move.fate == "cancel":
            transfer.cancel()
    for _ in range(cut.turns if cut else 1):
        await asyncio.sleep(0)
    if cut is not None and not cut.nbytes:
        field.proxy.cut_data(reset=cut.reset)
    for move, transfer in zip(moves, posted, strict=True):
        if move.fate in ("task", "late"):
            transfer.cancel()
    await asyncio.gather(*posted, return_exceptions=True)
    field.proxy.cut_after = None
    if cut is not None:
        for transfer in posted:
            await transfer.wait_quiesced()
        await settle(sides)

    for move, transfer in zip(moves, posted, strict=True):
        assert transfer.done()
        assert transfer.quiesced
        error = transfer.exception()
        assert error is None or isinstance(error, aiohixl.TransferError)
        if move.fate == "await" and cut is None:
            assert error is None
        source, target, rows = effect(move)
        for from_, to in rows:
            data = before[source[0]][source[1]][source[2] * SLOT + from_ :][: move.nbytes]
            at = slice(target[2] * SLOT + to, target[2] * SLOT + to + move.nbytes)
            actual, model = sides[target[0]].views[target[1]][at], before[target[0]][target[1]][at]
            if error is None:
                model[:] = data
            else:
                assert ((actual == data) | (actual == model)).all()
                model[:] = actual
    for side, models in zip(sides, before, strict=True):
        for view, model in zip(side.views, models, strict=True):
            assert np.array_equal(view, model), "bytes changed that no transfer was asked to change"


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(plays=PLAYS, seed=st.integers(0, 1 << 30))
async def test_contract_03_memory_equals_its_model(field: Field, plays: list[Play], seed: int) -> None:
    for i, side in enumerate(field.sides):
        for j, view in enumerate(side.views):
            view[:] = noise(view.nbytes, seed + 2 * i + j)
    for moves, cut in plays:
        await play(field, moves, cut)
    for side in field.sides:
        assert not side.peer.is_lost
        assert side.engine.stats()["live_ops"] == side.engine.stats()["pending"] == 0
    await until(lambda: bool(field.proxy.data_pipes), "a data connection is there")
