# SPDX-License-Identifier: Apache-2.0
"""Everything by which HIXL surprises its callers, met by transfers."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from standin import FLAVOURS, PairNpu, Standin, StartNpu, bytes_of, noise, npu_region

import aiohixl
from aiohixl import ProviderError, RegionPinnedError, TransferTimeoutError

MIB = 1 << 20
FAILED = 503900
HIXL_KINDS = ["device", "host"]  # those of its engines that tell of a failure


async def until(standin: Standin, key: str, at_least: int) -> None:
    async with asyncio.timeout(20):
        while standin.stat(key) < at_least:
            await asyncio.sleep(0.001)


class Ends:
    """Engine a with a source, engine b with a target, both of NPU memory."""

    def __init__(self, a: aiohixl.Engine, b: aiohixl.Engine, peer: aiohixl.Peer) -> None:
        self.a, self.b, self.peer = a, b, peer

    async def prepare(self, nbytes: int, fill: int = 1) -> Ends:
        self.source, self.target = await npu_region(self.a, nbytes, fill=fill), await npu_region(self.b, nbytes, "t")
        self.remote = await self.peer.region("t")
        return self

    def write(self, start: int, stop: int) -> aiohixl.Transfer:
        return self.peer.write(self.source[start:stop], self.remote[start:stop])

    async def landed(self) -> None:
        assert ((await bytes_of(self.target)) == (await bytes_of(self.source))).all()


async def ends(pair_npu: PairNpu, nbytes: int, **options: object) -> Ends:
    return await Ends(*(await pair_npu(**options))).prepare(nbytes)


# ---- handles ----


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_handles_are_used_again_at_once(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    """Thousands of transfers that share a few handles: each ends once, and moved its own bytes."""
    standin.set(**FLAVOURS[flavour])
    count, size = 3000, 96
    both = await ends(pair_npu, count * size)
    await both.source.upload(noise(count * size))
    turn = iter(range(count))

    async def some() -> None:
        for slot in turn:
            transfer = await both.write(slot * size, (slot + 1) * size)
            assert (transfer.nbytes, transfer.quiesced) == (size, True)

    await asyncio.gather(*(some() for _ in range(5)))
    await both.landed()
    stats = both.a.stats()
    assert (stats["posted"], stats["completed"], stats["live_ops"]) == (count, count, 0)
    assert standin.stat("posts") == count


# ---- answers ----


@pytest.mark.parametrize("code", [507018, 1, 0xFFFFFFFF, 0x5010B001, 507046])
@pytest.mark.parametrize("flavour", HIXL_KINDS)
async def test_a_code_that_is_in_no_list(standin: Standin, pair_npu: PairNpu, flavour: str, code: int) -> None:
    standin.set(**FLAVOURS[flavour])
    both = await ends(pair_npu, MIB)
    await both.write(0, 100)
    standin.set(err_msg="the stream is upset", fail_nth=0, fail_code=code)
    with pytest.raises(ProviderError, match=rf"write of 1048576 bytes to peer 'b': HIXL answered {code} \(") as failed:
        await both.write(0, MIB)
    assert failed.value.code == code
    assert "the stream is upset" in failed.value.detail
    assert "the stream is upset" in str(failed.value)
    await both.write(0, MIB)
    await both.landed()


@pytest.mark.parametrize("code", [507018, FAILED, 0])
async def test_a_code_of_the_answer_about_a_request(standin: Standin, pair_npu: PairNpu, code: int) -> None:
    standin.set(**FLAVOURS["device"])
    both = await ends(pair_npu, MIB)
    await both.write(0, 100)
    standin.set(fail_nth=0, fail_poll_code=code)
    with pytest.raises(ProviderError) as failed:
        await both.write(0, MIB)
    assert failed.value.code in (code or FAILED, FAILED)  # the bulk call has no code
    await both.write(0, MIB)
    await both.landed()


# ---- waiting for ever ----


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_request_that_waits_for_ever(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    """It fails after stall_timeout; those beside it land, and so do those after it."""
    standin.set(**FLAVOURS[flavour])
    both = await ends(pair_npu, MIB, stall_timeout=0.3)
    await both.write(0, 4096)
    standin.set(wait_forever_nth=0)
    stuck = both.write(0, 4096)
    others = [both.write(4096 * i, 4096 * (i + 1)) for i in range(1, 200)]
    with pytest.raises(TransferTimeoutError, match="write of 4096 bytes to peer 'b'"):
        await stuck
    await stuck.wait_quiesced()
    assert both.source.quarantined == ()
    for transfer in others:
        await transfer
    await both.write(4096 * 200, MIB)
    await both.landed()
    assert not both.peer.is_lost


@pytest.mark.parametrize("flavour", ["device", "host", "comm"])
async def test_a_large_transfer_is_split_and_does_not_stall(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    """Longer than stall_timeout in all; but its parts land in time."""
    standin.set(**FLAVOURS[flavour])
    nbytes = 200 * MIB
    both = await ends(pair_npu, nbytes, stall_timeout=0.8)
    await both.write(0, 4096)
    posts = standin.stat("posts")
    standin.set(bandwidth_mbs=180)
    transfer = await both.write(0, nbytes)
    assert transfer.elapsed is not None
    assert transfer.elapsed > 0.8, "else nothing is shown"
    assert standin.stat("posts") - posts >= 4
    assert standin.stat("connects") == 1
    standin.set(bandwidth_mbs=0)
    await both.landed()


# ---- the failure latch ----


@pytest.mark.parametrize("flavour", HIXL_KINDS)
async def test_one_failure_is_not_everybodys(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    """HIXL calls all requests of the peer failed, and refuses new ones: one transfer fails, all others land."""
    standin.set(**FLAVOURS[flavour], latency_us=200)
    size, count = 4096, 256
    both = await ends(pair_npu, size * count)
    await both.source.upload(noise(size * count))
    await both.write(0, size)
    standin.set(fail_nth=20)
    transfers = [both.write(i * size, (i + 1) * size) for i in range(count)]
    results = await asyncio.gather(*transfers, return_exceptions=True)
    failed = [i for i, result in enumerate(results) if isinstance(result, BaseException)]
    assert len(failed) == 1, results
    error = results[failed[0]]
    assert isinstance(error, ProviderError)
    assert error.code == FAILED
    await both.write(failed[0] * size, (failed[0] + 1) * size)
    await both.landed()
    assert standin.stat("connects") == 2


@pytest.mark.parametrize("flavour", HIXL_KINDS)
async def test_the_link_comes_back_before_it_is_wanted(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    standin.set(**FLAVOURS[flavour])
    both = await ends(pair_npu, MIB)
    await both.write(0, 100)
    standin.set(fail_nth=0)
    with pytest.raises(ProviderError):
        await both.write(0, MIB)
    await until(standin, "connects", 2)
    await until(standin, "links", 1)
    connects = standin.stat("connects")
    await both.write(0, MIB)
    assert standin.stat("connects") == connects
    await both.landed()


async def test_failures_again_and_again(standin: Standin, pair_npu: PairNpu) -> None:
    both = await ends(pair_npu, MIB)
    for round_ in range(20):
        standin.set(fail_nth=round_ % 4)
        results = await asyncio.gather(*(both.write(0, 4096 * i) for i in range(1, 9)), return_exceptions=True)
        bad = [r for r in results if isinstance(r, BaseException)]
        assert len(bad) == 1, results
        assert isinstance(bad[0], ProviderError)
    standin.set(fail_nth=-1)
    await both.write(0, MIB)
    await both.landed()


# ---- Connect ----


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_connect_that_fails_at_first(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    standin.set(**FLAVOURS[flavour], connect_fail=FAILED, connect_fail_n=2)
    both = await ends(pair_npu, MIB)
    await both.write(0, MIB)
    await both.landed()
    assert standin.stat("connects") == 3


async def test_a_connect_that_goes_on_failing(standin: Standin, pair_npu: PairNpu) -> None:
    standin.set(connect_fail=103901, err_msg="wait socket establish timeout")
    both = await ends(pair_npu, MIB)
    first, second = both.write(0, MIB), both.write(0, 8)
    with pytest.raises(ProviderError, match=r"HIXL answered 103901 \(TIMEOUT\).*Connect to 127\.0\.0\.1:") as failed:
        await first
    assert failed.value.code == 103901
    with pytest.raises(ProviderError):
        await second
    await both.peer.notify(b"the control link lives")
    standin.set(connect_fail=0)
    await both.write(0, MIB)
    await both.landed()


# ---- rows ----


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_rows_without_bytes(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    standin.set(**FLAVOURS[flavour])
    both = await ends(pair_npu, MIB)
    sizes = np.array([0, 10, 0, 0, 20, 0])
    offsets = np.arange(6) * 1000
    await both.peer.write_many(both.source, offsets, both.remote, offsets, sizes)
    model = np.zeros(MIB, np.uint8)
    model[1000:1010] = model[4000:4020] = 1
    assert ((await bytes_of(both.target)) == model).all()
    await both.peer.write_many(both.source, offsets, both.remote, offsets, 0, note=b"nothing")
    assert (await both.b.notes().get()).payload == b"nothing"
    await both.peer.write_many(both.source, [], both.remote, [], [])
    await both.write(5, 5)
    await both.write(MIB, MIB)
    assert ((await bytes_of(both.target)) == model).all()


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_very_many_rows(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    """More than one kernel of HIXL's takes, and than contract 7 promises."""
    standin.set(**FLAVOURS[flavour])
    count = 100_000
    both = await ends(pair_npu, count * 8)
    await both.source.upload(noise(count * 8))
    await both.peer.write_many(
        both.source, np.arange(count) * 8, both.remote, np.random.default_rng(1).permutation(count) * 8, 8
    )
    got = (await bytes_of(both.target)).view(np.uint64)
    assert (got[np.random.default_rng(1).permutation(count)] == (await bytes_of(both.source)).view(np.uint64)).all()


# ---- queues ----


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_queue_of_hixls_that_is_full(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    standin.set(**FLAVOURS[flavour], max_unpolled=3, latency_us=100)
    size, count = 4096, 200
    both = await ends(pair_npu, size * count)
    await both.source.upload(noise(size * count))
    await aiohixl.wait_all(both.write(i * size, (i + 1) * size) for i in range(count))
    await both.landed()
    assert standin.stat("connects") == 1


async def test_more_peers_than_hixl_takes(standin: Standin, start_npu: StartNpu) -> None:
    """128 with something outstanding, for one NPU and process; here 2, and 5 of them."""
    standin.set(max_peers_outstanding=2, latency_us=300)
    a = await start_npu("a")
    source = await npu_region(a, 64 << 10, fill=7)
    targets, posts = [], []
    for number in range(5):
        b = await start_npu(f"b{number}", 1)
        targets.append(await npu_region(b, 64 << 10, "t"))
        peer = await a.connect(b.address)
        posts.append((peer, await peer.region("t")))
    for _ in range(5):
        await aiohixl.wait_all(
            peer.write(source[i * 4096 : (i + 1) * 4096], remote[i * 4096 : (i + 1) * 4096])
            for i in range(16)
            for peer, remote in posts
        )
    for target in targets:
        assert set(await target.download()) == {7}


# ---- memory that HIXL has, and does not give back ----


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_contract_03_cancelled_while_the_npu_hangs(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    """The link is taken down after cancel_grace; nothing of it lands when the NPU goes on."""
    standin.set(**FLAVOURS[flavour])
    both = await ends(pair_npu, MIB, cancel_grace=0.1)
    await both.write(0, 4096)
    standin.set(hang_device=1)
    transfer = both.write(0, MIB)
    await until(standin, "posts", 2)
    task = asyncio.ensure_future(transfer)
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await task
    if flavour == "host":  # the post itself hangs, and Disconnect waits for it
        assert not transfer.quiesced
        assert both.source.quarantined == ((0, MIB),)
    else:
        await transfer.wait_quiesced()
        await both.source.upload(np.full(MIB, 2, np.uint8))
    standin.set(hang_device=0)
    await transfer.wait_quiesced()
    assert both.source.quarantined == ()
    await both.source.upload(np.full(MIB, 3, np.uint8))
    await both.peer.notify(b"")
    assert not {2, 3} & set(await both.target.download())
    await both.write(0, MIB)
    await both.landed()


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_contract_03_disconnect_does_not_return(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    """Until it has, the memory is quarantined: posts from it are refused, and it is said when it comes back."""
    standin.set(**FLAVOURS[flavour])
    both = await ends(pair_npu, MIB, cancel_grace=0.1)
    events = both.a.events()
    await both.write(0, 4096)
    standin.set(hang_device=1, hang_disconnect_ms=60000)
    transfer = both.write(0, 4096)
    await until(standin, "posts", 2)
    task = asyncio.ensure_future(transfer)
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not transfer.quiesced
    assert both.source.quarantined == ((0, 4096),)
    assert (await events.get()).kind == "quarantined"
    with pytest.raises(RegionPinnedError, match="quarantined"):
        both.write(4000, 5000)
    with pytest.raises(RegionPinnedError, match="quarantined"):
        both.peer.read(both.source, both.remote)
    with pytest.raises(RegionPinnedError):
        await both.source.upload(b"x")
    assert not transfer.quiesced
    standin.set(hang_device=0, hang_disconnect_ms=0)
    await transfer.wait_quiesced()
    assert transfer.quiesced
    assert both.source.quarantined == ()
    assert (await events.get()).kind == "released"
    await both.write(0, MIB)
    await both.landed()


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_cancelled_transfers_among_others(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    """Half of them are recalled, over and over: the other half land, and the cancelled ones touch nothing later."""
    standin.set(**FLAVOURS[flavour], latency_us=2000)
    size, count = 4096, 64
    both = await ends(pair_npu, size * count, cancel_grace=0.02)
    cancelled = 0
    for round_ in range(1, 6):
        await both.source.upload(np.full(size * count, round_, np.uint8))
        tasks = [asyncio.ensure_future(both.write(i * size, (i + 1) * size)) for i in range(count)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, aiohixl.Transfer) for r in results[1::2])
        # One that had landed when it was cancelled has landed.
        assert all(isinstance(r, asyncio.CancelledError | aiohixl.Transfer) for r in results[::2])
        cancelled += sum(isinstance(r, asyncio.CancelledError) for r in results[::2])
        await both.source.upload(np.full(size * count, 200 + round_, np.uint8))
        await both.peer.notify(b"")
        got = (await bytes_of(both.target)).reshape(count, size)
        assert (got[1::2] == round_).all()
        assert (got < 200).all()
    assert cancelled


@pytest.mark.parametrize("flavour", ["device", "comm"])
async def test_a_link_that_stalls_twice_fails_all_that_is_on_it(
    standin: Standin, pair_npu: PairNpu, flavour: str
) -> None:
    """Each in its turn would wait stall_timeout after stall_timeout."""
    standin.set(**FLAVOURS[flavour])
    a, b, peer = await pair_npu(stall_timeout=0.4)
    source, _ = await npu_region(a, 4096, fill=1), await npu_region(b, 4096, "t")
    remote = await peer.region("t")
    await peer.write(source, remote)
    connects = standin.stat("connects")
    standin.set(hang_device=1)
    writes = [peer.write(source[i * 64 : i * 64 + 64], remote[i * 64 : i * 64 + 64]) for i in range(20)]
    with pytest.raises(ExceptionGroup) as failed:
        await aiohixl.wait_all(writes)
    assert {type(error) for error in failed.value.exceptions} == {TransferTimeoutError}
    assert standin.stat("connects") - connects <= 3
    standin.set(hang_device=0)
    await peer.write(source, remote)
