# SPDX-License-Identifier: Apache-2.0
"""What a caller can get wrong about memory and transfers: the documented exception, and nothing is written."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from conftest import Start
from ground import NBYTES, Ground, noise
from processes import forked

import aiohixl
from aiohixl.testing import FaultPlan


@pytest_asyncio.fixture
async def ground(pair: tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]) -> AsyncIterator[Ground]:
    ground = await Ground(*pair).prepare()
    yield ground
    ground.forget()


# ---- spans ----


NOT_INSIDE: list[Any] = [
    slice(-1, None),
    slice(0, -1),
    slice(8, 4),
    slice(0, NBYTES + 1),
    slice(NBYTES + 1, NBYTES + 2),
    slice(0, 1 << 64),
    slice(0, 8, 2),
    slice(8, 0, -1),
    slice(0.0, 8.0),
    slice("a", "b"),
    5,
    (1, 2),
    None,
    ...,
]


async def test_contract_10_spans_that_are_not_inside(ground: Ground) -> None:
    for key in NOT_INSIDE:
        for what in (ground.source, ground.remote, ground.source[:], ground.remote[:]):
            with pytest.raises(aiohixl.RegionError):
                what[key]
    await ground.still_good()


async def test_spans_are_relative_to_their_span(ground: Ground) -> None:
    span = ground.remote[100:200][10:20]
    assert (span.offset, span.nbytes) == (110, 10)
    with pytest.raises(aiohixl.RegionError, match="100 bytes"):
        ground.remote[100:200][90:101]
    with pytest.raises(aiohixl.RegionError, match="outside"):
        aiohixl.Span(ground.remote, NBYTES - 1, 2)
    await ground.still_good()


async def test_an_empty_span_moves_nothing_and_completes(ground: Ground) -> None:
    done = await ground.peer.write(ground.source[5:5], ground.remote[NBYTES:NBYTES])
    assert done.nbytes == 0
    await ground.peer.write_many(ground.source, [], ground.remote, [], 64)
    await ground.still_good()


async def test_spans_in_the_wrong_places(ground: Ground, start: Start) -> None:
    a, b, peer = ground.a, ground.b, ground.peer
    misplaced: list[tuple[Any, Any]] = [
        (ground.remote, ground.source),
        (ground.source, ground.source),
        (ground.remote, ground.remote),
        (ground.here, ground.remote),
        (ground.source, ground.memory),
        (None, ground.remote),
        (b"abc", ground.remote[:3]),
    ]
    for local, remote in misplaced:
        for post in (peer.write, peer.read, peer.route):
            with pytest.raises(aiohixl.RegionError):
                post(local, remote)
    with pytest.raises(aiohixl.RegionError):
        peer.write_many(ground.source[0:8], [0], ground.remote, [0], 8)  # type: ignore[arg-type]
    # A region of another engine of this process, and a region that another peer announced.
    c = await start("c")
    other = await c.connect(b.address)
    theirs = c.register(noise(16))
    with pytest.raises(aiohixl.RegionError):
        peer.write(theirs, ground.remote[0:16])
    with pytest.raises(aiohixl.RemoteAccessError):
        peer.write(ground.source[0:16], (await other.region("ground"))[0:16])
    with pytest.raises(aiohixl.RegionError, match="not a span of"):
        await ground.target.revoke(spans=[ground.source[0:8]])
    assert a.stats()["pending"] == 0
    await ground.still_good()


# ---- rows ----


async def test_unequal_lengths(ground: Ground) -> None:
    peer = ground.peer
    for post in (peer.write, peer.read):
        with pytest.raises(aiohixl.RegionError, match="32 bytes here, 33 bytes"):
            post(ground.source[0:32], ground.remote[0:33])
    for post_many in (peer.write_many, peer.read_many):
        with pytest.raises(aiohixl.RegionError, match="2 local offsets, 1 remote offsets"):
            post_many(ground.source, [0, 8], ground.remote, [0], 8)
        with pytest.raises(aiohixl.RegionError, match="3 lengths"):
            post_many(ground.source, [0, 8], ground.remote, [0, 8], [8, 8, 8])
    await ground.still_good()


@pytest.mark.parametrize("side", ["local", "remote"])
async def test_contract_07_a_row_out_of_bounds_is_named(ground: Ground, side: str) -> None:
    good = np.arange(10, dtype=np.int64) * 64
    for bad in (-1, NBYTES - 7, NBYTES, NBYTES + 1, 1 << 62, -(1 << 63)):
        for index in (0, 3, 9):
            offsets = good.copy()
            offsets[index] = bad
            los, ros = (offsets, good) if side == "local" else (good, offsets)
            for post_many in (ground.peer.write_many, ground.peer.read_many):
                with pytest.raises(aiohixl.RegionError, match=rf"\(row {index}: 8 bytes"):
                    post_many(ground.source, los, ground.remote, ros, 8)
    await ground.still_good()


NO_ROWS: list[tuple[Any, Any, Any]] = [
    ([0], [0], -1),
    ([0, 8], [0, 8], [8, -8]),
    ([0], [0], NBYTES + 1),
    ([0], [0], 1 << 63),
    ([0], [0], 1 << 64),
    ([0], [0], 1 << 100),
    ([0, 8], [0, 8], 1 << 62),
    ([1, 1], [1, 1], [(1 << 63) - 1, (1 << 63) - 1]),
    ([0.0], [0], 8),
    ([0], [0], 8.0),
    ([0], [0], "8"),
    ([0], [0], None),
    ([0], [0], True),
    ([True], [0], 8),
    (None, [0], 8),
    ("0", [0], 8),
    ([[0]], [0], 8),
    ([[0], [1, 2]], [0], 8),
    ([1 << 64], [0], 8),
    (np.array([1 << 63], np.uint64), [0], 8),
    ({0: 0}, [0], 8),
]


async def test_contract_07_rows_that_are_no_rows(ground: Ground) -> None:
    for row in NO_ROWS:
        for post_many in (ground.peer.write_many, ground.peer.read_many):
            with pytest.raises(aiohixl.RegionError):
                post_many(ground.source, row[0], ground.remote, row[1], row[2])
    assert ground.a.stats()["pending"] == 0
    await ground.still_good()


async def test_overlapping_destinations(ground: Ground) -> None:
    free = [8192, 16384, 32768]
    for clash in ([0, 8192, 0], [0, 8192, 63], [63, 8192, 0], [4096, 8192, 4033]):
        with pytest.raises(aiohixl.RegionError, match=r"same destination bytes.*\(row 2\)"):
            await ground.peer.write_many(ground.source, free, ground.remote, clash, 64)
        with pytest.raises(aiohixl.RegionError, match=r"same destination bytes.*\(row 2\)"):
            await ground.peer.read_many(ground.source, clash, ground.remote, free, 64)
    await ground.still_good()


async def test_overlapping_sources_are_fine(ground: Ground) -> None:
    await ground.peer.write_many(ground.source, [0, 10, 20], ground.remote, [0, 64, 128], 64)
    for i in range(3):
        ground.model[64 * i : 64 * i + 64] = ground.here[10 * i : 10 * i + 64]
    await ground.still_good()


# ---- keys and access ----


async def test_contract_10_a_forged_key(ground: Ground) -> None:
    right = ground.remote.rkey
    for wrong in (0, right ^ 1, right ^ 1 << 63, (1 << 64) - 1):
        ground.remote.rkey = wrong
        for post in (ground.peer.write, ground.peer.read):
            with pytest.raises(aiohixl.RemoteAccessError, match="key is stale"):
                post(ground.source, ground.remote)
        with pytest.raises(aiohixl.RemoteAccessError):
            ground.peer.write_many(ground.source, [0], ground.remote, [0], 8, note=b"never")
    ground.remote.rkey = right
    await ground.still_good()


async def test_contract_10_a_stale_region_after_its_name_was_registered_again(ground: Ground) -> None:
    old = await ground.b.allocate(4096, "again")
    stale = await ground.peer.region("again")
    await ground.peer.write(ground.source[0:8], stale[0:8])
    await old.deregister()
    new = await ground.b.allocate(4096, "again")
    while (fresh := await ground.peer.region("again")) is stale:
        await asyncio.sleep(0)
    assert fresh.id != stale.id, "ids are never reused in an incarnation"
    stale.rkey = fresh.rkey  # even with the new key: it is another region
    with pytest.raises(aiohixl.RemoteAccessError):
        await ground.peer.write(ground.source[0:4096], stale)
    assert not any(bytes(new))
    assert bytes(old)[8:] == bytes(4088)
    await ground.peer.write(ground.source[0:4096], fresh)
    assert bytes(new) == bytes(ground.source)[:4096]
    await ground.still_good()


@pytest.mark.parametrize("access", ["r", "w", "rw"])
@pytest.mark.parametrize("kind", ["allocated", "foreign"])
async def test_contract_10_access_bits(ground: Ground, access: str, kind: str) -> None:
    memory: Any = (
        await ground.b.allocate(256, "bits", access=access)
        if kind == "allocated"
        else ground.b.register(np.zeros(256, np.uint8), "bits", access=access)
    )
    remote = await ground.peer.region("bits")
    assert remote.access == access
    back = ground.a.register(np.full(256, 9, np.uint8))
    if "w" in access:
        await ground.peer.write(ground.source[0:256], remote)
        assert bytes(memory) == bytes(ground.source)[:256]
    else:
        with pytest.raises(aiohixl.RemoteAccessError):
            await ground.peer.write(ground.source[0:256], remote)
        assert not any(bytes(memory))
    if "r" in access:
        await ground.peer.read(back, remote)
        assert bytes(back) == bytes(memory)
    else:
        with pytest.raises(aiohixl.RemoteAccessError):
            await ground.peer.read(back, remote)
        assert bytes(back) == bytes([9]) * 256
    await ground.still_good()


async def test_access_words_that_do_not_exist(ground: Ground) -> None:
    for access in ("", "x", "wr", "RW", None, 3, ["r"], b"r"):
        calls: list[Callable[[], Any]] = [
            lambda: ground.a.allocate(64, access=access),  # type: ignore[arg-type]  # noqa: B023
            lambda: ground.a.register(bytearray(8), access=access),  # type: ignore[arg-type]  # noqa: B023
            lambda: ground.a.register(bytes(8), access=access),  # type: ignore[arg-type]  # noqa: B023
            lambda: ground.a.register_many({"m": bytearray(8)}, access=access),  # type: ignore[arg-type]  # noqa: B023
            lambda: ground.a.register_kv([np.zeros((2, 4))], access=access),  # type: ignore[arg-type]  # noqa: B023
        ]
        for call in calls:
            with pytest.raises(aiohixl.ConfigError, match="access"):
                call()
    await ground.still_good()


async def test_read_only_memory_is_not_written_by_anybody(ground: Ground) -> None:
    fixed, array = bytes(range(64)), noise(64)
    array.flags.writeable = False
    for memory in (fixed, array, memoryview(bytearray(64)).toreadonly()):
        with pytest.raises(aiohixl.RegionError, match="read-only"):
            ground.b.register(memory, "fixed")
    ground.b.register(fixed, "fixed", access="r")
    remote = await ground.peer.region("fixed")
    with pytest.raises(aiohixl.RemoteAccessError):
        await ground.peer.write(ground.source[0:64], remote)
    # Its owner may send it, and not receive into it.
    local = ground.a.register(fixed, access="r")
    with pytest.raises(aiohixl.RegionError, match="read-only"):
        ground.peer.read(local, ground.remote[0:64])
    with pytest.raises(aiohixl.RegionError, match="read-only"):
        ground.peer.read(local[0:8], ground.remote[0:8])
    with pytest.raises(aiohixl.RegionError, match="read-only"):
        ground.peer.read_many(local, [0], ground.remote, [0], 8)
    assert fixed == bytes(range(64))
    await ground.peer.write(local, ground.remote[0:64])
    ground.model[:64] = list(fixed)
    back = ground.a.register(bytearray(64))
    await ground.peer.read(back, remote)
    assert bytes(back) == fixed
    await ground.still_good()


# ---- in flight ----


async def test_contract_03_the_target_is_deregistered_in_flight(start: Start) -> None:
    a, b = await start("a", faults=FaultPlan().delay(1, 0.2)), await start("b")
    ground = await Ground(a, b, await a.connect(b.address)).prepare()
    target = await b.allocate(4096, "going")
    going = await ground.peer.region("going")
    await ground.peer.write(ground.source[0:8], going[0:8])  # transfer 0; the next one is held
    transfer = ground.peer.write(ground.source[0:4096], going, note=b"late")
    await target.deregister()
    after = bytes(target)
    with pytest.raises(aiohixl.RemoteAccessError):
        await transfer
    assert bytes(target) == after == bytes(ground.source)[:8] + bytes(4088)
    note = await b.notes().get()
    assert (note.payload, note.aborted) == (b"late", True)
    with pytest.raises(aiohixl.RemoteAccessError):
        await ground.peer.write(ground.source[0:8], going[0:8])
    await ground.still_good()


async def test_contract_03_the_source_is_deregistered_in_flight(start: Start) -> None:
    a, b = await start("a", faults=FaultPlan().delay(0, 0.05)), await start("b")
    ground = await Ground(a, b, await a.connect(b.address)).prepare()
    local = a.register(noise(64))
    transfer = ground.peer.write(local, ground.remote[0:64])
    await local.deregister()  # waits for it
    assert transfer.done() or bytes(ground.target)[:64] == bytes(local)
    await transfer
    ground.model[:64] = noise(64)
    with pytest.raises(aiohixl.RegionError, match="deregistered"):
        ground.peer.write(local, ground.remote[0:64])
    await local.deregister()  # idempotent
    await ground.still_good()


# ---- names ----


async def test_a_name_is_registered_once(ground: Ground) -> None:
    b = ground.b
    calls: list[Callable[[], Any]] = [
        lambda: b.allocate(64, "ground"),
        lambda: b.register(bytearray(8), "ground"),
        lambda: b.register_many({"fresh": bytearray(8), "ground": bytearray(8)}),
        lambda: b.register_kv([np.zeros((2, 4))], "ground"),
    ]
    for call in calls:
        with pytest.raises(aiohixl.RegionError, match="registered already"):
            call()
    assert "fresh" not in ground.peer.regions
    cache = b.register_kv([np.zeros((2, 4))], "kv")
    with pytest.raises(aiohixl.RegionError, match="registered already"):
        b.register_kv([np.zeros((2, 4))], "kv")
    await cache.deregister()
    b.register_kv([np.zeros((2, 4))], "kv")
    await ground.peer.kv("kv")
    await ground.still_good()


@pytest.mark.parametrize("name", [5, None, b"x", "x" * 129, "é" * 65, "a\0b", "a\nb", "\ud800", ["x"]], ids=repr)
async def test_region_names_that_are_none(ground: Ground, name: Any) -> None:
    live = ground.b.stats()["live_regions"]
    calls: list[Callable[[], Any]] = [
        lambda: ground.b.allocate(64, name),
        lambda: ground.b.register(bytearray(8), name),
        lambda: ground.b.register_kv([np.zeros((2, 4))], name),
    ]
    if not isinstance(name, list):
        calls.append(lambda: ground.b.register_many({name: bytearray(8)}))
    for call in calls:
        with pytest.raises(aiohixl.ConfigError, match="name"):
            call()
    assert ground.b.stats()["live_regions"] == live
    await ground.still_good()


@pytest.mark.parametrize("name", ["x" * 128, "é" * 64, "a b", "'\"", "🦆/..", "-", "%00"])
async def test_region_names_that_look_odd(ground: Ground, name: str) -> None:
    ground.b.register(noise(16), name)
    remote = await ground.peer.region(name)
    back = ground.a.register(np.zeros(16, np.uint8))
    await ground.peer.read(back, remote)
    assert bytes(back) == noise(16).tobytes()
    await ground.still_good()


async def test_a_region_that_is_never_announced(ground: Ground) -> None:
    with pytest.raises(aiohixl.RegionError, match=r"announced no region 'nope' within 0 s; it has \['ground'\]"):
        await ground.peer.region("nope", wait=0)
    with pytest.raises(aiohixl.RegionError, match="announced no KV cache 'kv'"):
        await ground.peer.kv(wait=0)
    await ground.still_good()


# ---- whose engine ----


def _uses(ground: Ground) -> list[Callable[[], Any]]:
    a, peer, source = ground.a, ground.peer, ground.source
    return [
        lambda: a.allocate(64),
        lambda: a.register(bytearray(8)),
        lambda: a.register_many({}),
        lambda: a.register_kv([np.zeros((2, 4))]),
        a.notes,
        a.events,
        a.stats,
        a.abort,
        lambda: source.grant(),
        lambda: asyncio.run(a.connect("unix:///x")),
        lambda: asyncio.run(a.close()),
        lambda: asyncio.run(source.revoke()),
        lambda: asyncio.run(source.deregister()),
        lambda: asyncio.run(peer.region("ground")),
        lambda: asyncio.run(peer.close()),
        lambda: asyncio.run(peer.window()),
    ]


def _outcomes(uses: list[Callable[[], Any]]) -> list[str]:
    out = []
    for use in uses:
        try:
            use()
        except Exception as exc:
            out.append(f"{type(exc).__name__}: {exc}")
        else:
            out.append("nothing")
    return out


async def test_an_engine_of_another_thread_and_loop(ground: Ground) -> None:
    outcomes: list[str] = []
    thread = threading.Thread(target=lambda: outcomes.extend(_outcomes(_uses(ground))))
    thread.start()
    while thread.is_alive():
        await asyncio.sleep(0.001)
    thread.join()
    assert len(outcomes) == len(_uses(ground))
    for outcome in outcomes:
        assert outcome.startswith("ClosedError"), outcomes
        assert "another event loop" in outcome, outcomes
    await ground.still_good()


async def test_contract_12_an_engine_in_a_forked_child(ground: Ground) -> None:
    peer, cache = ground.peer, ground.a.register_kv([np.zeros((2, 4), np.float32)], "kv")
    ground.b.register_kv([np.zeros((2, 4), np.float32)], "kv")
    there = await peer.kv("kv")
    stream = peer.stream_kv(cache, [0], [1], remote=there)
    await stream.__aenter__()
    uses = _uses(ground)[:9]
    uses += [
        lambda: peer.write(ground.source, ground.remote),
        lambda: peer.read(ground.source, ground.remote),
        lambda: peer.write(ground.source, ground.remote, note=b"x"),
        lambda: peer.notify(b"x"),
        lambda: peer.write_kv(cache, [0], [1], remote=there),
        lambda: stream.post(0),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork() beside threads: that is the question here
        outcomes = forked(lambda: _outcomes(uses))
    assert len(outcomes) == len(uses)
    for outcome in outcomes:
        assert outcome.startswith("ClosedError"), outcomes
    for layer in range(stream.num_layers):
        stream.post(layer)
    await stream.__aexit__(None, None, None)
    await ground.still_good()


async def test_a_closed_engine(ground: Ground, start: Start) -> None:
    c = await start("c")
    peer = await c.connect(ground.b.address)
    source, remote = c.register(noise(8)), await peer.region("ground")
    await c.close()
    await c.close()
    c.abort()
    for use in (lambda: c.allocate(64), lambda: c.register(bytearray(8)), c.notes, c.events, c.stats):
        with pytest.raises(aiohixl.ClosedError):
            use()
    with pytest.raises(aiohixl.ClosedError):
        await c.connect(ground.b.address)
    with pytest.raises(aiohixl.HixlError):
        peer.write(source, remote[0:8])
    with pytest.raises(aiohixl.ClosedError):
        await c.start()
    await ground.still_good()
