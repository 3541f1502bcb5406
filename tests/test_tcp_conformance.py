# SPDX-License-Identifier: Apache-2.0
"""The conformance suite on TCP: both kinds of memory, one connection and four, with and without checksums and
MSG_ZEROCOPY, one process and two."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from conftest import Start
from far import Far, conforms, far_memory
from processes import child

import aiohixl
from aiohixl.testing import CONFORMANCE, Bench, Check, Memory, allocated, foreign

KINDS: dict[str, tuple[Memory, Memory]] = {
    "allocated-allocated": (allocated, allocated),
    "allocated-foreign": (allocated, foreign),
    "foreign-allocated": (foreign, allocated),
    "foreign-foreign": (foreign, foreign),
}
LINKS: dict[str, dict[str, Any]] = {
    "1-plain": {"streams": 1},
    "4-plain": {"streams": 4},
    "1-checksum": {"streams": 1, "checksum": True},
    "4-checksum": {"streams": 4, "checksum": True},
    "1-zerocopy": {"streams": 1, "zerocopy": True},
    "4-all": {"streams": 4, "checksum": True, "zerocopy": True},
}
PLACES = ["unix", "tcp"]


def of_kind(address: str, kind: str) -> str:
    return next(a for a in address.split(",") if a.startswith(kind))


@pytest.mark.parametrize("check", CONFORMANCE.values(), ids=CONFORMANCE)
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
async def test_conformance(start: Start, link: dict[str, Any], kinds: tuple[Memory, Memory], check: Check) -> None:
    a, b = [await start(name, transports=["tcp"], **link) for name in "ab"]
    peer = await a.connect(b.address)
    await check(Bench(a, b, peer, *kinds))


@pytest.mark.parametrize("place", PLACES)
async def test_the_path_is_tcp(start: Start, place: str) -> None:
    """Whatever the control link is; in both directions over the connections that one side has made."""
    a, b = await start("a", transports=["tcp"]), await start("b", transports=["tcp"])
    peer = await a.connect(of_kind(b.address, place))
    there, here = await b.allocate(4096, "there"), await a.allocate(4096, "here")
    remote = await peer.region("there")
    assert peer.route(here, remote).provider == "tcp"
    memoryview(here)[:] = b"a" * 4096
    await peer.write(here, remote)
    assert bytes(there) == b"a" * 4096
    (back,) = b.peers.values()
    assert isinstance(back, aiohixl.Peer)
    memoryview(there)[:] = b"b" * 4096
    await back.write(there, await back.region("here"))
    assert bytes(here) == b"b" * 4096


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("kinds", ["allocated-allocated", "foreign-foreign"])
async def test_conformance_of_two_processes(start: Start, tmp_path: Path, link: dict[str, Any], kinds: str) -> None:
    """The whole suite between one pair of processes, over a control link of TCP."""
    here, there = KINDS[kinds]
    a = await start("a", transports=["tcp"], **link)
    async with child(script="tcp_peer.py", **link) as other:
        peer = await a.connect(of_kind(other.address, "tcp"))
        far = Far(other, tmp_path / "bytes")
        bench = Bench(
            a, cast(aiohixl.Engine, far), peer, here, far_memory("foreign" if there is foreign else "allocated")
        )
        await conforms(bench)
