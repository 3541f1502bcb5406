# SPDX-License-Identifier: Apache-2.0
"""RDMA: what the peer's device refuses, whatever the writer believes; and whom it keeps out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import wirepeer as wire
from conftest import Start
from processes import child, until
from rdma import needs_device, own_machine
from tcpproxy import BEHIND, Pipe, Proxy

import aiohixl

pytestmark = needs_device

MIB = 1 << 20
FIELDS = ("ident", "rkey", "nbytes", "addr", "direct", "kind", "access", "name_len", "blob_len")
Change = Callable[[dict[str, int]], None]


class Misleader:
    """A test double: a control link on which what is announced of the region "wrong" is not true."""

    def __init__(self, change: Change) -> None:
        self._change = change
        self._held = bytearray()

    def __call__(self, pipe: Pipe, way: int, data: bytes) -> bytes:
        if not way:
            return data
        self._held += data
        whole = 0
        while whole + wire.FRAME.size <= len(self._held):
            length, kind, *_ = wire.FRAME.unpack_from(self._held, whole)
            if whole + length > len(self._held):
                break
            if kind == wire.REGION_ADD:
                self._rewrite(whole + wire.FRAME.size, whole + length)
            whole += length
        out = bytes(self._held[:whole])
        del self._held[:whole]
        return out

    def _rewrite(self, at: int, end: int) -> None:
        while at < end:
            entry = dict(zip(FIELDS, wire.ENTRY.unpack_from(self._held, at), strict=True))
            name_at = at + wire.ENTRY.size
            if self._held[name_at : name_at + entry["name_len"]] == b"wrong":
                self._change(entry)
                wire.ENTRY.pack_into(self._held, at, *entry.values())
            at = name_at + entry["name_len"] + entry["blob_len"]


@contextlib.asynccontextmanager
async def misled(start: Start, change: Change, access: str) -> AsyncIterator[tuple[aiohixl.Engine, aiohixl.Peer, Any]]:
    """Engine a, its peer b, and the bytes of b's region "wrong", which a takes for another than it is."""
    a = await start("a", transports=["verbs"])
    proxy = Proxy()
    proxy.tamper_control = Misleader(change)
    try:
        b = await start("b", transports=["verbs"], address=f"{BEHIND}:{proxy.port}")
        wrong = await b.allocate(MIB, "wrong", access=access)
        await b.allocate(MIB, "target")
        yield a, await a.connect(proxy.address), np.frombuffer(memoryview(wrong), np.uint8)
    finally:
        await proxy.close()


async def good(engine: aiohixl.Engine, peer: aiohixl.Peer, value: int) -> None:
    """There and back again."""
    remote = await peer.region("target")
    there, back = await engine.allocate(4096), await engine.allocate(4096)
    np.frombuffer(memoryview(there), np.uint8)[:] = value
    await peer.write(there, remote[:4096])
    await peer.read(back, remote[:4096])
    assert set(bytes(back)) == {value}


def another_key(entry: dict[str, int]) -> None:
    entry["direct"] ^= 0x55


def further_in(entry: dict[str, int]) -> None:
    entry["direct"] += 4095 << 32  # what is mapped begins at a page, so that there is no carry


def more_bytes(entry: dict[str, int]) -> None:
    entry["nbytes"] += 1


def more_rights(entry: dict[str, int]) -> None:
    entry["access"] = 3


@pytest.mark.parametrize(
    ("change", "access", "kinds"),
    [
        (another_key, "rw", ("write", "read")),
        (further_in, "rw", ("write", "read")),
        (more_bytes, "rw", ("write", "read")),
        (more_rights, "r", ("write",)),
        (more_rights, "w", ("read",)),
    ],
    ids=["another key", "past the end", "more bytes", "write to r", "read of w"],
)
async def test_contract_09_the_device_refuses_and_the_peer_recovers(
    start: Start, change: Change, access: str, kinds: tuple[str, ...]
) -> None:
    async with misled(start, change, access) as (a, peer, there):
        there[:] = 1
        await good(a, peer, 1)
        remote = await peer.region("wrong")
        local = await a.allocate(remote.nbytes)
        np.frombuffer(memoryview(local), np.uint8)[:] = 9
        for value, kind in enumerate(kinds * 2, 2):
            with pytest.raises(aiohixl.RemoteAccessError, match="the device reported"):
                await getattr(peer, kind)(local[remote.nbytes - 4096 :], remote[remote.nbytes - 4096 :])
            await good(a, peer, value)
        assert set(there.tobytes()) == {1}
        assert not peer.is_lost


async def test_transfers_beside_one_that_is_refused(start: Start) -> None:
    """They end, some with the queue pair that they shared; the next ones go."""
    async with misled(start, another_key, "rw") as (a, peer, _):
        wrong, right = await peer.region("wrong"), await peer.region("target")
        local = await a.allocate(MIB)
        posts = [peer.write(local, right) for _ in range(6)]
        refused = peer.write(local, wrong)
        posts += [peer.write(local, right) for _ in range(6)]
        async with asyncio.timeout(30):
            ended = await asyncio.gather(*posts, return_exceptions=True)
        with pytest.raises(aiohixl.RemoteAccessError):
            await refused
        assert all(isinstance(one, aiohixl.Transfer | aiohixl.TransferError) for one in ended), ended
        assert not any(isinstance(one, aiohixl.RemoteAccessError) for one in ended), ended
        await good(a, peer, 7)


# ---- whom the owner keeps out ----


async def test_contract_03_a_peer_that_stands_still_loses_its_way_in(start: Start) -> None:
    """Its device goes on by itself; the owner's takes nothing of it any more, and the peer may come again."""
    a = await start("a", transports=["verbs"], cancel_grace=1.0)
    region = await a.allocate(8 * MIB, "target")
    there = np.frombuffer(memoryview(region), np.uint8)
    async with child(script="tcp_peer.py", transports=["verbs"]) as other:
        await other.ask("make", kind="allocated", name="source", nbytes=8 * MIB, fill=5)
        await other.ask("connect", address=a.address)
        await other.ask("begin", kind="write", local="source", remote="target", count=40)
        await until(lambda: bytes(memoryview(region)[:1]) == b"\x05", "it writes")
        other.stop()
        began = time.monotonic()
        await region.revoke()
        assert time.monotonic() - began < 5
        there[:] = 1
        await asyncio.sleep(1)
        assert set(there.tobytes()) == {1}
        other.go_on()
        assert set(await other.ask("ended")) - {""} <= {"RemoteAccessError", "TransferError"}
        assert set(there.tobytes()) == {1}
        region.grant()
        async with asyncio.timeout(30):
            while (await begin_one(other)) != [""]:
                await asyncio.sleep(0.05)
        assert set(there.tobytes()) == {5}
    del there


async def begin_one(other: Any) -> list[str]:
    await other.ask("begin", kind="write", local="source", remote="target")
    return list(await other.ask("ended"))


async def test_contract_03_what_a_killed_peers_device_had_sent(start: Start) -> None:
    """The answer to a revocation waits for our end of the queue pair."""
    a = await start("a", transports=["verbs"])
    region = await a.allocate(8 * MIB, "target")
    there = np.frombuffer(memoryview(region), np.uint8)
    async with child(script="tcp_peer.py", transports=["verbs"]) as other:
        await other.ask("make", kind="allocated", name="source", nbytes=8 * MIB, fill=5)
        await other.ask("connect", address=a.address)
        await other.ask("begin", kind="write", local="source", remote="target", count=40)
        await until(lambda: bytes(memoryview(region)[:1]) == b"\x05", "it writes")
        other.kill()
        await region.revoke()
        there[:] = 1
        await asyncio.sleep(0.3)
        assert set(there.tobytes()) == {1}
    del there


# ---- who has any rights ----


def registrations() -> dict[int, int]:
    """The key that peers could use, by the length of the registration; 0 where there is none."""
    told = subprocess.run(["rdma", "-j", "-d", "resource", "show", "mr"], check=True, capture_output=True, text=True)
    return {entry["mrlen"]: int(entry["rkey"], 16) for entry in json.loads(told.stdout)}


@own_machine
async def test_contract_09_a_region_without_a_name_gives_nobody_any_right(start: Start) -> None:
    a = await start("a", transports=["verbs"])
    kept = [
        await a.allocate(3 * MIB),
        await a.register(np.zeros(5 * MIB, np.uint8)),
        await a.allocate(4 * MIB, "named", access="r"),
    ]
    known = registrations()
    assert [known[region.nbytes] != 0 for region in kept] == [False, False, True]
