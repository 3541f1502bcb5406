# SPDX-License-Identifier: Apache-2.0
"""Contract 2, when it goes wrong: the receiver hears that the bytes will not come, once none of them still can."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from conftest import Start
from ground import Ground
from processes import until

import aiohixl
from aiohixl.testing import FaultPlan


async def grounds(start: Start, faults: FaultPlan, **options: object) -> Ground:
    a, b = await start("a", faults=faults, **options), await start("b")
    return await Ground(a, b, await a.connect(b.address)).prepare()


async def aborted(ground: Ground, payload: bytes, topic: str = "") -> None:
    async with asyncio.timeout(20):
        note = await ground.b.notes(topic).get()
    assert (note.payload, note.topic, note.aborted, note.peer.name) == (payload, topic, True, "a")
    assert len(ground.b.notes(topic)) == 0, "once"


@pytest.mark.parametrize("nth", [0, 1])
async def test_contract_02_a_cancelled_write(start: Start, nth: int) -> None:
    """Held by a fault, and cancelled by its awaiter or by cancel()."""
    ground = await grounds(start, FaultPlan().stall(0))
    transfer = ground.peer.write(ground.source, ground.remote, note=b"req", topic="kv")
    if nth:
        transfer.cancel()
        with pytest.raises(aiohixl.TransferAbortedError):
            await transfer
    else:
        task = asyncio.create_task(transfer)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert transfer.quiesced
    await aborted(ground, b"req", "kv")
    await ground.still_good()
    ground.forget()


async def test_contract_02_a_write_that_times_out(start: Start) -> None:
    ground = await grounds(start, FaultPlan().stall(0).stall(1), stall_timeout=0.1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await ground.peer.write(ground.source, ground.remote, note=b"by the caller")
    await aborted(ground, b"by the caller")
    with pytest.raises(aiohixl.TransferTimeoutError):
        await ground.peer.write(ground.source, ground.remote, note=b"by stall_timeout")
    await aborted(ground, b"by stall_timeout")
    await ground.still_good()
    ground.forget()


async def test_contract_02_a_write_that_cannot_be_recalled(start: Start) -> None:
    """The await ends after cancel_grace; the note says aborted only when the bytes have quiesced."""
    ground = await grounds(start, FaultPlan().wedge(0, 0.3), cancel_grace=0.05)
    transfer = ground.peer.write(ground.source, ground.remote, note=b"wedged")
    transfer.cancel()
    with pytest.raises(aiohixl.TransferAbortedError):
        await transfer
    assert not transfer.quiesced
    assert len(ground.b.notes()) == 0, "not while the bytes may still come"
    await transfer.wait_quiesced()
    await aborted(ground, b"wedged")
    await ground.still_good()
    ground.forget()


async def test_contract_02_a_parked_write_that_is_cancelled(start: Start) -> None:
    ground = await grounds(start, FaultPlan().stall(0), peer_depth=1)
    held = ground.peer.write(ground.source[0:8], ground.remote[0:8], note=b"held")
    parked = ground.peer.write(ground.source, ground.remote, note=b"parked")
    assert ground.a.stats()["parked"] == 1
    parked.cancel()
    with pytest.raises(aiohixl.TransferAbortedError, match="before it was posted"):
        await parked
    held.cancel()
    with pytest.raises(aiohixl.TransferAbortedError):
        await held
    inbox = ground.b.notes()
    async with asyncio.timeout(20):
        notes = [await inbox.get(), await inbox.get()]
    assert sorted((n.payload, n.aborted) for n in notes) == [(b"held", True), (b"parked", True)]
    await ground.still_good()
    ground.forget()


@pytest.mark.parametrize("status", ["FAULT", "REMOTE_ACCESS"])
async def test_contract_02_a_write_that_fails(start: Start, status: str) -> None:
    ground = await grounds(start, FaultPlan().fail(0, status))
    with pytest.raises(aiohixl.TransferError):
        await ground.peer.write(ground.source, ground.remote, note=b"req")
    await aborted(ground, b"req")
    await ground.still_good()
    ground.forget()


async def test_contract_02_overlapping_rows_and_revoked_spans(start: Start) -> None:
    ground = await grounds(start, FaultPlan())
    with pytest.raises(aiohixl.RegionError):
        await ground.peer.write_many(ground.source, [0, 64], ground.remote, [0, 32], 64, note=b"overlap")
    await aborted(ground, b"overlap")
    await ground.target.revoke("a", spans=[(0, 64)])
    with pytest.raises(aiohixl.RemoteAccessError):
        await ground.peer.write(ground.source, ground.remote, note=b"revoked")
    await aborted(ground, b"revoked")
    ground.target.grant("a", spans=[(0, 64)])
    await until(lambda: ground.peer.inflight == 0, "nothing is in flight")
    await ground.still_good()
    ground.forget()


async def test_contract_02_a_post_that_is_refused_says_nothing(start: Start) -> None:
    """It raised before anything was posted: its caller knows, and the receiver was promised nothing."""
    ground = await grounds(start, FaultPlan())
    with pytest.raises(aiohixl.RegionError):
        ground.peer.write(ground.source[0:8], ground.remote[0:9], note=b"never")
    with pytest.raises(aiohixl.RegionError):
        ground.peer.write_many(ground.source, [-1], ground.remote, [0], 8, note=b"never")
    await ground.still_good()
    assert ground.b.stats()["notes_waiting"] == {}
    ground.forget()


async def test_contract_02_a_note_that_waits_for_credit_is_cancelled(start: Start) -> None:
    ground = await grounds(start, FaultPlan())
    for i in range(256):
        await ground.peer.notify(b"%d" % i)
    transfer = ground.peer.write(ground.source, ground.remote, note=b"late")
    await until(lambda: bytes(ground.target) == bytes(ground.source), "the bytes have landed")
    ground.model[:] = ground.here
    transfer.cancel()
    with pytest.raises(aiohixl.TransferAbortedError):
        await transfer
    inbox = ground.b.notes()
    assert [int((await inbox.get()).payload) for _ in range(256)] == list(range(256))
    await aborted(ground, b"late")
    await ground.still_good()
    ground.forget()


# ---- streams ----


class Streamed:
    """A ground, and a cache at each end."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.there = [np.zeros((4, 4096), np.uint8) for _ in range(3)]
        ground.b.register_kv(self.there, "kv")
        self.cache = ground.a.register_kv([np.full((4, 4096), i + 1, np.uint8) for i in range(3)], "kv")

    async def good(self) -> None:
        async with self.ground.peer.stream_kv(self.cache, [1], [2], note=b"good", topic="kv") as stream:
            for layer in range(3):
                stream.post(layer)
        note = await self.ground.b.notes("kv").get()
        assert (note.payload, note.aborted) == (b"good", False)
        assert [int(layer[2].min()) for layer in self.there] == [1, 2, 3]
        assert not any(layer[[1, 3]].any() for layer in self.there)
        await self.ground.still_good()


class ModelError(Exception):
    pass


@pytest.mark.parametrize("posted", [0, 1, 3])
async def test_contract_02_a_stream_left_by_an_exception(start: Start, posted: int) -> None:
    ground = await grounds(start, FaultPlan().stall(1) if posted > 1 else FaultPlan())
    streamed = Streamed(ground)
    await ground.peer.kv("kv")
    with pytest.raises(ModelError):  # noqa: PT012 - what leaves the block is the subject
        async with ground.peer.stream_kv(streamed.cache, [0], [0], note=b"req", topic="kv") as stream:
            for layer in range(posted):
                stream.post(layer)
            raise ModelError
    assert all(transfer.quiesced for transfer in stream.transfers.values())
    await aborted(ground, b"req", "kv")
    await streamed.good()
    ground.forget()


async def test_contract_02_a_stream_left_early(start: Start) -> None:
    ground = await grounds(start, FaultPlan())
    streamed = Streamed(ground)
    await ground.peer.kv("kv")
    with pytest.raises(aiohixl.TransferAbortedError, match="missing 2 of 3, first layer 0"):
        async with ground.peer.stream_kv(streamed.cache, [0], [0], note=b"req", topic="kv") as stream:
            stream.post(1)
    await aborted(ground, b"req", "kv")
    await streamed.good()
    ground.forget()


async def test_contract_02_a_stream_with_a_layer_that_fails(start: Start) -> None:
    ground = await grounds(start, FaultPlan().fail(1))
    streamed = Streamed(ground)
    await ground.peer.kv("kv")
    with pytest.raises(aiohixl.TransferError):  # noqa: PT012 - leaving the block raises
        async with ground.peer.stream_kv(streamed.cache, [0], [0], note=b"req", topic="kv") as stream:
            for layer in range(3):
                stream.post(layer)
    await aborted(ground, b"req", "kv")
    await streamed.good()
    ground.forget()


async def test_contract_02_a_stream_that_is_cancelled(start: Start) -> None:
    ground = await grounds(start, FaultPlan().stall(2))
    streamed = Streamed(ground)
    await ground.peer.kv("kv")
    inside = asyncio.Event()

    async def run() -> None:
        async with ground.peer.stream_kv(streamed.cache, [0], [0], note=b"req", topic="kv") as stream:
            for layer in range(3):
                stream.post(layer)
            inside.set()

    task = asyncio.create_task(run())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await aborted(ground, b"req", "kv")
    await streamed.good()
    ground.forget()
