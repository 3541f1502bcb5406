# SPDX-License-Identifier: Apache-2.0
"""The tcp transport between two network namespaces: addresses of two families, routes, two sizes of packets, and a wire
that can be pulled out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import Start
from far import Far, conforms, far_memory
from netns import Side, Wire, why_not, wire
from processes import Child, child, until

import aiohixl
from aiohixl.testing import Bench, Memory, allocated, foreign

MISSING = why_not()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

BIG = 64 << 20
PATIENCE = 2.0  # peer_timeout
SLACK = 1.0  # seconds more, in which a peer that is gone must have been noticed: a requirement

#: Name -> family of addresses, and the largest packet.
WIRES = {"ipv4-mtu1500": (4, 1500), "ipv6-mtu1500": (6, 1500), "ipv4-mtu9000": (4, 9000), "ipv6-mtu9000": (6, 9000)}
#: Every kind of wire and every pair of kinds of memory, once.
SUITES: dict[str, tuple[Memory, str]] = {
    "ipv4-mtu1500": (allocated, "allocated"),
    "ipv6-mtu1500": (allocated, "foreign"),
    "ipv4-mtu9000": (foreign, "allocated"),
    "ipv6-mtu9000": (foreign, "foreign"),
}
PULLED: list[tuple[str, str, Side]] = [
    ("ipv4-mtu1500", "write", "a"),
    ("ipv4-mtu1500", "write", "b"),
    ("ipv4-mtu1500", "read", "a"),
    ("ipv4-mtu1500", "read", "b"),
    ("ipv6-mtu9000", "write", "a"),
    ("ipv6-mtu9000", "read", "b"),
]
one_loop = pytest.mark.asyncio(loop_factories=["uvloop"])


class Ends:
    """The two ends of a wire, by addresses of one family."""

    def __init__(self, made: Wire, family: int) -> None:
        self.wire, self.family = made, family

    def options(self, side: Side, **more: Any) -> dict[str, Any]:
        return {"address": f"{self.wire.address(side, self.family)}:0", "secret": "of both", **more}

    @contextlib.asynccontextmanager
    async def far(self, **more: Any) -> AsyncIterator[Child]:
        """An engine in the namespace ``b``."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.wire.inside("b"))
            async with child("far", script="tcp_peer.py", **self.options("b", **more)) as other:
                stack.close()  # it is there, and this thread is back
                assert self.wire.address("b", self.family) in other.address
                yield other


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Of the wire that the parameter names. This process is in the namespace ``a``."""
    family, mtu = WIRES[request.param]
    with wire(mtu) as made, made.inside("a"):
        yield Ends(made, family)


def over_the_wire(address: str) -> str:
    """The unix socket is in a file system that both share, as two containers may; without it, only the wire is left."""
    return next(a for a in address.split(",") if a.startswith("tcp:"))


class Repeated:
    """One transfer, again and again, until it fails or is cancelled."""

    def __init__(self, post: Any, local: aiohixl.Region, remote: aiohixl.RemoteRegion) -> None:
        self._post, self._local, self._remote = post, local, remote
        self.rounds = 0
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await self._post(self._local, self._remote)
            self.rounds += 1

    async def more(self, rounds: int) -> None:
        goal = self.rounds + rounds
        await until(lambda: self.rounds >= goal or self.task.done(), f"{rounds} more transfers")
        assert not self.task.done(), self.task.exception()

    async def stop(self) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task


async def arrives(peer: aiohixl.Peer, source: aiohixl.Region, other: Child, value: int) -> None:
    """A transfer of those bytes to its memory named "target"."""
    np.frombuffer(memoryview(source), np.uint8)[:] = value
    await peer.write(source, await peer.region("target"))
    assert await other.ask("values", name="target") == [value]


@pytest.mark.parametrize(("ends", "kinds"), SUITES.items(), ids=SUITES, indirect=["ends"])
async def test_conformance_across_namespaces(
    ends: Ends, start: Start, tmp_path: Path, kinds: tuple[Memory, str]
) -> None:
    """The whole suite between one pair of engines."""
    here, there = kinds
    a = await start("near", transports=["tcp"], **ends.options("a"))
    async with ends.far() as other:
        peer = await a.connect(over_the_wire(other.address))
        bench = Bench(a, cast(aiohixl.Engine, Far(other, tmp_path / "bytes")), peer, here, far_memory(there))
        await conforms(bench)


@one_loop
@pytest.mark.parametrize(("ends", "kind", "side"), PULLED, indirect=["ends"])
async def test_contract_08_wire_pulled_in_mid_transfer(ends: Ends, start: Start, kind: str, side: Side) -> None:
    """No FIN, no RST: silence. The peer is lost in time; with the wire in again, `connect` works as before."""
    a = await start("near", transports=["tcp"], **ends.options("a", peer_timeout=PATIENCE))
    async with ends.far(peer_timeout=PATIENCE) as other:
        await other.ask("allocate", name="target", nbytes=BIG)
        peer = await a.connect(over_the_wire(other.address))
        source = await a.allocate(BIG)
        repeated = Repeated(getattr(peer, kind), source, await peer.region("target"))
        await repeated.more(1)
        ends.wire.down(side)
        pulled = time.monotonic()
        with pytest.raises(aiohixl.PeerLostError):
            await repeated.task
        assert time.monotonic() - pulled < PATIENCE + SLACK
        assert peer.is_lost
        ends.wire.up(side)
        again = await a.connect(over_the_wire(other.address))
        assert again is not peer
        await arrives(again, source, other, 7)


@one_loop
@pytest.mark.parametrize("ends", ["ipv4-mtu1500"], indirect=True)
async def test_both_ends_notice(ends: Ends, start: Start) -> None:
    """Both transfer when the wire is pulled: both lose the other."""
    a = await start("near", transports=["tcp"], **ends.options("a", peer_timeout=PATIENCE))
    async with ends.far(peer_timeout=PATIENCE) as other:
        await a.allocate(BIG, "mine")
        for name in ("target", "source"):
            await other.ask("allocate", name=name, nbytes=BIG)
        peer = await a.connect(over_the_wire(other.address))
        await other.ask("connect", address=over_the_wire(a.address))
        await other.ask("loop", kind="write", local="source", remote="mine")
        repeated = Repeated(peer.write, await a.allocate(BIG), await peer.region("target"))
        await repeated.more(1)
        ends.wire.down("b")
        pulled = time.monotonic()
        with pytest.raises(aiohixl.PeerLostError):
            await repeated.task
        assert (await other.ask("looped"))["error"] == "PeerLostError"
        assert time.monotonic() - pulled < PATIENCE + SLACK


@one_loop
@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("ends", ["ipv4-mtu9000", "ipv6-mtu1500"], indirect=True)
async def test_a_short_break_is_only_a_delay(ends: Ends, start: Start, side: Side) -> None:
    """The wire is out for less than `peer_timeout`: transfers go on where they were, and nothing fails."""
    a = await start("near", transports=["tcp"], **ends.options("a"))
    async with ends.far() as other:
        for name in ("target", "source"):
            await other.ask("allocate", name=name, nbytes=BIG)
        await a.allocate(BIG, "mine")
        peer = await a.connect(over_the_wire(other.address))
        await other.ask("connect", address=over_the_wire(a.address))
        await other.ask("loop", kind="write", local="source", remote="mine")
        source = await a.allocate(BIG)
        repeated = Repeated(peer.write, source, await peer.region("target"))
        for _ in range(3):
            await repeated.more(2)
            ends.wire.down(side)
            ends.wire.up(side)
        await repeated.more(2)
        await repeated.stop()
        looped = await other.ask("looped", stop=True)
        assert (looped["error"], looped["rounds"] > 0) == ("", True)
        await arrives(peer, source, other, 9)


@pytest.mark.parametrize("ends", ["ipv4-mtu1500", "ipv6-mtu1500"], indirect=True)
async def test_a_unix_socket_leads_to_another_network(ends: Ends, start: Start) -> None:
    """Two containers with one file system: the control link is local, the loopback is not the peer's."""
    a = await start("near", transports=["tcp"], **ends.options("a"))
    async with ends.far() as other:
        await other.ask("allocate", name="target", nbytes=1 << 20)
        peer = await a.connect(other.address)
        source = await a.allocate(1 << 20)
        assert peer.route(source, await peer.region("target")).provider == "tcp"
        await arrives(peer, source, other, 5)


@pytest.mark.parametrize("ends", ["ipv4-mtu1500", "ipv6-mtu1500"], indirect=True)
async def test_an_address_that_no_route_reaches(ends: Ends, start: Start) -> None:
    a = await start("near", transports=["tcp"], **ends.options("a"))
    nowhere = "198.51.100.1" if ends.family == 4 else "2001:db8::1"
    with pytest.raises(aiohixl.PeerUnreachableError, match=nowhere):
        await a.connect(f"tcp://{nowhere}:7" if ends.family == 4 else f"tcp://[{nowhere}]:7", timeout=PATIENCE)
