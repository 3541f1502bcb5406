# SPDX-License-Identifier: Apache-2.0
"""Contracts 5 and 6: every completion wakes its waiter, and nothing here keeps the loop from others."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time

import numpy as np
import pytest
from ground import noise
from test_backpressure import Counting
from ticking import ticking

import aiohixl

Pair = tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]
SIZE = 64
ROUND = 256  # completions that one round of the reader serves


async def foreign(pair: Pair, slots: int) -> tuple[aiohixl.Region, aiohixl.RemoteRegion]:
    """Memory that the engines did not allocate: nothing is done inline, every completion comes from a native thread."""
    a, b, peer = pair
    there = np.zeros(slots * SIZE, np.uint8)
    b.register(there, "there")
    return a.register(noise(slots * SIZE)), await peer.region("there")


@pytest.mark.parametrize("seed", [1, 2])
async def test_contract_06_no_wakeup_is_lost(pair: Pair, seed: int) -> None:
    a, _, peer = pair
    local, remote = await foreign(pair, 16)
    count = 0

    def post(slot: int) -> aiohixl.Transfer:
        return peer.write(local[slot * SIZE : (slot + 1) * SIZE], remote[slot * SIZE : (slot + 1) * SIZE])

    async def singles(slot: int, n: int) -> None:
        nonlocal count
        for _ in range(n):
            await post(slot)
            count += 1

    async def bursts(slot: int, n: int) -> None:
        nonlocal count
        dice = random.Random(seed * 100 + slot)
        while n > 0:
            burst = [post(slot) for _ in range(dice.choice((2, 3, 10, ROUND - 1, ROUND, ROUND + 1, 600)))]
            n -= len(burst)
            await aiohixl.wait_all(burst)
            count += len(burst)

    # A waiter whose wake-up was lost waits for ever: the limit is no measure of speed.
    async with asyncio.timeout(60):
        # One task alone, so that nothing else rings for it: the loop sleeps, or is about to, at each completion.
        await singles(0, 6000)
        for together in (2, 3, 4, 6):
            for _ in range(5000):
                transfers = [post(slot) for slot in range(together)]
                for transfer in transfers:
                    await transfer
            count += 5000 * together
        async with asyncio.TaskGroup() as group:
            for slot in range(4):
                group.create_task(singles(slot, 6000))
                group.create_task(bursts(8 + slot, 8000))
    stats = a.stats()
    assert stats["inlined"] == 0
    assert stats["completed"] == stats["posted"] == count >= 137_000


async def test_contract_06_no_wakeup_is_lost_when_threads_post(pair: Pair) -> None:
    a, _, peer = pair
    local, remote = await foreign(pair, 16)
    loop, per_thread = asyncio.get_running_loop(), 3000
    done = 0
    finished = loop.create_future()
    failures: list[BaseException] = []

    def landed(transfer: aiohixl.Transfer) -> None:
        nonlocal done
        task = loop.create_task(wait(transfer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def wait(transfer: aiohixl.Transfer) -> None:
        nonlocal done
        await transfer
        done += 1
        room.release()
        if done == 3 * per_thread:
            finished.set_result(None)

    def post(slot: int) -> None:
        try:
            for _ in range(per_thread):
                room.acquire()
                span = slice(slot * SIZE, (slot + 1) * SIZE)
                loop.call_soon_threadsafe(landed, peer.post_write(local[span], remote[span]))
        except BaseException as exc:
            failures.append(exc)
            loop.call_soon_threadsafe(finished.cancel)

    tasks: set[asyncio.Task[None]] = set()
    room = threading.Semaphore(700)
    threads = [threading.Thread(target=post, args=(slot,)) for slot in range(3)]
    for thread in threads:
        thread.start()
    async with asyncio.timeout(60):
        await finished
    for thread in threads:
        thread.join()
    assert failures == []
    assert a.stats()["completed"] == 3 * per_thread


async def test_contract_06_more_completions_than_one_round_serves(pair: Pair) -> None:
    a, _, peer = pair
    local, remote = await foreign(pair, 16)
    counting = Counting(a)
    transfers = [peer.write(local, remote) for _ in range(10 * ROUND + 1)]
    tasks = [asyncio.ensure_future(t) for t in transfers]
    while a.stats()["completed"] < len(transfers):
        os.sched_yield()  # the loop does not run while they complete: the doorbell rings once
    other_turns = 0
    async with asyncio.timeout(20):
        while not all(t.done() for t in tasks):
            await asyncio.sleep(0)
            other_turns += 1
    assert counting.rounds[:10] == [ROUND] * 10
    assert sum(counting.rounds) == len(transfers)
    assert other_turns >= 10, "one burst kept the loop from others"
    await peer.write(local, remote)  # and the bell rings again afterwards


async def test_contract_05_the_loop_is_never_blocked(pair: Pair) -> None:
    a, b, peer = pair
    nbytes = 512 << 20
    there, here = await b.allocate(nbytes, "there"), await a.allocate(nbytes)
    np.frombuffer(memoryview(here), np.uint8)[:] = 5
    remote = await peer.region("there")
    await peer.write(here, remote)
    assert (np.frombuffer(memoryview(there), np.uint8) == 5).all()
    writes = 0
    async with ticking():
        until = time.perf_counter() + 5.0
        while time.perf_counter() < until:
            await peer.write(here, remote)
            writes += 1
    assert writes > 1


async def test_contract_05_inline_awaits_let_others_run(pair: Pair) -> None:
    a, b, peer = pair
    count, nbytes = 100_000, 4096
    there, here = await b.allocate(nbytes, "there"), await a.allocate(nbytes)
    remote = await peer.region("there")
    np.frombuffer(memoryview(here), np.uint8)[:] = noise(nbytes)
    async with asyncio.timeout(20):
        while not a.stats()["inlined"]:  # the mapping is populated in a native thread
            await peer.write(here, remote)
    turns = 0
    over = False

    async def other() -> None:
        nonlocal turns
        while not over:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    before = a.stats()["inlined"]
    for _ in range(count):
        await peer.write(here, remote)
    at_the_end = turns
    over = True
    await task
    assert a.stats()["inlined"] - before == count
    assert at_the_end >= 1000
    assert bytes(there) == bytes(here)
