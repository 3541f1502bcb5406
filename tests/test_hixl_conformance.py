# SPDX-License-Identifier: Apache-2.0
"""The conformance suite on HIXL: every kind of engine of its, every pair of kinds of memory, one process and two."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from far import Far, far_memory, npu_child
from standin import FLAVOURS, PairNpu, Standin, StartNpu

import aiohixl
from aiohixl.testing import CONFORMANCE, Bench, Check, Memory, allocated, foreign, npu

KINDS: dict[str, tuple[Memory, Memory]] = {
    "host-host": (foreign, allocated),
    "npu-npu": (npu, npu),
    "npu-host": (npu, allocated),
    "host-npu": (allocated, npu),
}


@pytest.mark.parametrize("check", CONFORMANCE.values(), ids=CONFORMANCE)
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_conformance(
    standin: Standin, pair_npu: PairNpu, flavour: str, kinds: tuple[Memory, Memory], check: Check
) -> None:
    standin.set(**FLAVOURS[flavour])
    a, b, peer = await pair_npu()
    await check(Bench(a, b, peer, *kinds))
    assert standin.stat("posts") > 0


@pytest.mark.parametrize(
    ("flavour", "kinds"),
    [*((flavour, "npu-npu") for flavour in FLAVOURS), ("device", "npu-host"), ("host", "host-host")],
)
async def test_conformance_of_two_processes(
    standin: Standin, start_npu: StartNpu, tmp_path: Path, flavour: str, kinds: str
) -> None:
    """The whole suite between one pair of processes."""
    standin.set(**FLAVOURS[flavour])
    here, there = KINDS[kinds]
    a = await start_npu("a", 0)
    async with npu_child(knobs=FLAVOURS[flavour]) as other:
        peer = await a.connect(other.address)
        far = Far(other, tmp_path / "bytes")
        bench = Bench(a, cast(aiohixl.Engine, far), peer, here, far_memory("npu" if there is npu else "cpu"))
        for name, check in CONFORMANCE.items():
            posts = standin.stat("posts")
            try:
                await check(bench)
            except BaseException as exc:
                exc.add_note(f"in the check {name}")
                raise
            assert standin.stat("posts") > posts
        assert await far.ask("stat", key="posts") == 0, "the receiver does nothing"
        assert await far.ask("stat", key="stale_polls") == await far.ask("stat", key="sync_calls") == 0
