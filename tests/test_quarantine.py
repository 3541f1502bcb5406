# SPDX-License-Identifier: Apache-2.0
"""Contract 3 where the transport cannot let go in time: the exception goes on, the memory stays out of use."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conftest import Start
from ground import NBYTES, Ground, noise
from test_cancellation import cancelled, faulty, overwrite, parked_on

import aiohixl
from aiohixl.testing import FaultPlan

GRACE = 0.05
HELD = 0.8  # seconds after its cancel that a wedged transfer keeps its memory: longer than the grace


async def wedged(start: Start, **options: Any) -> Ground:
    return await faulty(start, FaultPlan().wedge(0, HELD), cancel_grace=GRACE, **options)


@pytest.mark.parametrize("kind", ["write", "read"])
async def test_contract_03_wedged_span_is_quarantined(start: Start, kind: str) -> None:
    ground = await wedged(start)
    events = ground.a.events()
    call = ground.peer.write if kind == "write" else ground.peer.read
    transfer = call(ground.source[4096:8192], ground.remote[0:4096])
    await cancelled(await parked_on(transfer))

    assert transfer.done()
    assert not transfer.quiesced
    assert ground.source.quarantined == ((4096, 4096),)
    event = await events.get()
    assert (event.kind, event.region, event.spans) == ("quarantined", ground.source, ((4096, 4096),))
    assert "peer 'b'" in event.detail

    for span in (ground.source, ground.source[8191:8192], ground.source[0:4097]):
        for post in (ground.peer.write, ground.peer.read):
            with pytest.raises(aiohixl.RegionPinnedError, match="quarantined") as caught:
                post(span, ground.remote[0 : span.nbytes])
            assert caught.value.spans == ((4096, 4096),)
    with pytest.raises(aiohixl.RegionPinnedError):
        ground.peer.write_many(ground.source, [0, 8000], ground.remote, [0, 8000], 512)
    # What lies beside it is as good as before.
    await ground.peer.write(ground.source[8192:12288], ground.remote[8192:12288])
    await ground.peer.write_many(ground.source, [0, 8192], ground.remote, [0, 8192], 512)
    ground.model[8192:12288] = ground.here[8192:12288]
    ground.model[0:512] = ground.here[0:512]

    # Cancelling a wait for it only ends that wait.
    await cancelled(await parked_on(transfer.wait_quiesced()))
    assert not transfer.quiesced
    await transfer.wait_quiesced()
    assert transfer.quiesced
    assert ground.source.quarantined == ()
    event = await events.get()
    assert (event.kind, event.region, event.spans) == ("released", ground.source, ((4096, 4096),))
    overwrite(ground)
    await ground.still_good()


async def test_contract_03_wedged_rows_are_quarantined_one_by_one(start: Start) -> None:
    ground = await wedged(start)
    transfer = ground.peer.write_many(ground.source, [0, 4096], ground.remote, [4096, 0], [100, 200])
    await cancelled(await parked_on(transfer))
    assert set(ground.source.quarantined) == {(0, 100), (4096, 200)}
    await ground.peer.write(ground.source[100:4096], ground.remote[100:4096])
    ground.model[100:4096] = ground.here[100:4096]
    await transfer.wait_quiesced()
    await ground.still_good()


async def test_contract_03_wedged_whole_region_and_a_second_wait(start: Start) -> None:
    ground = await wedged(start)
    transfer = ground.peer.write(ground.source, ground.remote)
    await cancelled(await parked_on(transfer))
    assert ground.source.quarantined == ((0, NBYTES),)
    await asyncio.gather(transfer.wait_quiesced(), transfer.wait_quiesced())
    await transfer.wait_quiesced()  # at once
    await ground.still_good()


async def test_contract_02_wedged_write_tells_the_receiver_once_it_has_let_go(start: Start) -> None:
    ground = await wedged(start)
    inbox = ground.b.notes("t")
    transfer = ground.peer.write(ground.source, ground.remote, note=b"n", topic="t")
    await cancelled(await parked_on(transfer))
    assert len(inbox) == 0
    note = await inbox.get()
    assert (note.payload, note.aborted) == (b"n", True)
    await transfer.wait_quiesced()
    await ground.still_good()


async def test_contract_03_wedged_and_timed_out(start: Start) -> None:
    ground = await faulty(start, FaultPlan().wedge(0, HELD), cancel_grace=GRACE, stall_timeout=0.1)
    transfer = ground.peer.write(ground.source[0:64], ground.remote[0:64])
    with pytest.raises(aiohixl.TransferTimeoutError):
        await transfer
    assert not transfer.quiesced
    assert ground.source.quarantined == ((0, 64),)
    await transfer.wait_quiesced()
    await ground.still_good()


async def test_contract_13_close_releases_what_is_wedged(start: Start) -> None:
    ground = await faulty(start, FaultPlan().wedge(0, 3600.0), cancel_grace=GRACE)
    transfer = ground.peer.write(ground.source, ground.remote)
    await cancelled(await parked_on(transfer))
    assert not transfer.quiesced
    await ground.a.close(timeout=0.1)
    assert transfer.quiesced
    assert ground.source.quarantined == ()
    ground.check()
    other = await start("c")
    peer = await other.connect(ground.b.address)
    source = other.register(noise(NBYTES, 4))
    await peer.write(source, await peer.region("ground"))
    assert ground.memory.tobytes() == bytes(source)


async def test_contract_03_stream_with_a_wedged_layer_tells_the_receiver_last(start: Start) -> None:
    ground = await wedged(start)
    layers = [ground.here[i * 4096 : (i + 1) * 4096].reshape(4, 1024) for i in range(3)]
    there = [ground.memory[i * 4096 : (i + 1) * 4096].reshape(4, 1024) for i in range(3)]
    await ground.b.register_kv(there)
    cache = await ground.a.register_kv(layers)
    await ground.peer.kv()
    inbox = ground.b.notes("t")
    left = asyncio.Event()

    async def stream() -> None:
        async with ground.peer.stream_kv(cache, [0, 1], [2, 3], note=b"n", topic="t") as stream:
            stream.post(0)
            left.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(stream())
    await left.wait()
    await cancelled(task)
    assert len(inbox) == 0, "told before the bytes had quiesced"
    assert cache.quarantined
    note = await inbox.get()
    assert (note.payload, note.aborted) == (b"n", True)
    assert not cache.quarantined
    await ground.still_good()
