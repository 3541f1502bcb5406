# SPDX-License-Identifier: Apache-2.0
"""The conformance suite on RDMA: both kinds of memory, one process and two."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from conftest import Start
from far import Far, conforms, far_memory
from processes import child
from rdma import needs_device

import aiohixl
from aiohixl.testing import CONFORMANCE, Bench, Check, Memory, allocated, foreign

pytestmark = needs_device

KINDS: dict[str, tuple[Memory, Memory]] = {
    "allocated-allocated": (allocated, allocated),
    "foreign-foreign": (foreign, foreign),
}


@pytest.mark.parametrize("check", CONFORMANCE.values(), ids=CONFORMANCE)
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
async def test_conformance(start: Start, kinds: tuple[Memory, Memory], check: Check) -> None:
    a, b = [await start(name, transports=["verbs"]) for name in "ab"]
    await check(Bench(a, b, await a.connect(b.address), *kinds))


async def test_the_path_is_verbs(start: Start) -> None:
    a, b = [await start(name, transports=["verbs"]) for name in "ab"]
    peer = await a.connect(b.address)
    there, here = await b.allocate(4096, "there"), await a.allocate(4096, "here")
    remote = await peer.region("there")
    assert peer.route(here, remote).provider == "verbs"
    np.frombuffer(memoryview(here), np.uint8)[:] = 5
    await peer.write(here, remote)
    assert set(bytes(there)) == {5}


@pytest.mark.parametrize("kinds", ["allocated-allocated", "foreign-foreign"])
async def test_conformance_of_two_processes(start: Start, tmp_path: Path, kinds: str) -> None:
    here, there = KINDS[kinds]
    a = await start("a", transports=["verbs"])
    async with child(script="tcp_peer.py", transports=["verbs"]) as other:
        peer = await a.connect(other.address)
        far = Far(other, tmp_path / "bytes")
        bench = Bench(
            a, cast(aiohixl.Engine, far), peer, here, far_memory("foreign" if there is foreign else "allocated")
        )
        await conforms(bench)
