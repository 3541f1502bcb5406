# SPDX-License-Identifier: Apache-2.0
"""HIXL blocks where it likes; the loop and the other peers go on. And its calls never meet where they must not."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import random
import threading
import time

import numpy as np
import pytest
from processes import run_python, until
from standin import FLAVOURS, LIBRARY, PairNpu, Standin, StartNpu, npu_region
from ticking import ticking

import aiohixl
from aiohixl import ClosedError, HixlError

MIB = 1 << 20


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_one_peers_post_blocks_nobody_else(standin: Standin, start_npu: StartNpu, flavour: str) -> None:
    """TransferAsync of one peer takes 3 s. Polls do not wait for it either: they would share its lock."""
    standin.set(**FLAVOURS[flavour])
    a = await start_npu("a")
    source = await npu_region(a, 4096, fill=5)
    slow, fast = await start_npu("slow", 1), await start_npu("fast", 1)
    targets = [await npu_region(engine, 4096, "t") for engine in (slow, fast)]
    peers = [await a.connect(engine.address) for engine in (slow, fast)]
    remotes = [await peer.region("t") for peer in peers]
    for peer, remote in zip(peers, remotes, strict=True):
        await peer.write(source, remote)
    seconds = 3.0 if flavour == "device" else 0.7
    standin.set(block_post_peer=slow.hixl_address, block_post_ms=int(seconds * 1000))
    blocked = peers[0].write(source, remotes[0])
    rounds = 0
    async with ticking() as late:
        while standin.stat("posting") == 0:
            await asyncio.sleep(0.001)
        await source.upload(np.full(4096, 6, np.uint8))
        while not blocked.done():
            await peers[1].write(source, remotes[1])
            if rounds < 100:
                await peers[1].notify(b"")
            rounds += 1
            if rounds % 10 == 0:
                await asyncio.sleep(0)
        assert len(late) > 100
    assert rounds > 100
    assert set(await targets[1].download()) == {6}
    await blocked
    assert blocked.elapsed is not None
    assert blocked.elapsed > 0.9 * seconds
    assert standin.stat("polls_during_post") == 0
    assert standin.stat("max_concurrent_posts") >= 2


async def test_connect_blocks_nobody_else(standin: Standin, start_npu: StartNpu) -> None:
    a = await start_npu("a")
    source = await npu_region(a, 4096, fill=5)
    one, other = await start_npu("one", 1), await start_npu("other", 1)
    targets = [await npu_region(engine, 4096, "t") for engine in (one, other)]
    peer = await a.connect(one.address)
    remote = await peer.region("t")
    await peer.write(source, remote)
    standin.set(connect_ms=1500)
    second = await a.connect(other.address)
    waiting = second.write(source, await second.region("t"))
    async with ticking():
        while not waiting.done():
            await peer.write(source, remote)
    await waiting
    assert set(await targets[1].download()) == {5}


async def test_starting_and_closing_block_nobody(standin: Standin, start_npu: StartNpu) -> None:
    """Finalize takes most of a second."""
    standin.set(flavour="comm", finalize_ms=600)
    async with ticking() as late:
        for npu_id in (0, 1):
            engine = await start_npu(f"e{npu_id}", npu_id)
            await npu_region(engine, 16 * MIB)
            await engine.close()
        assert len(late) > 200
    assert standin.stat("finalizes") == 2


async def test_the_loops_thread_never_calls_hixl(standin: Standin, pair_npu: PairNpu) -> None:
    """Each call of its leaves a context on the thread that made it."""
    acl = ctypes.CDLL(str(LIBRARY / "libacl_rt.so"))

    def context() -> int | None:
        found = ctypes.c_void_p()
        acl.aclrtGetCurrentContext(ctypes.byref(found))
        return found.value

    a, b, peer = await pair_npu()
    source, _ = await npu_region(a, MIB, fill=1), await npu_region(b, MIB, "t")
    remote = await peer.region("t")
    await peer.write(source, remote, note=b"x")
    await peer.read(source, remote)
    await aiohixl.wait_all(peer.post_write(source[i : i + 1], remote[i : i + 1]) for i in range(100))
    raw = await a.connect_raw(b.hixl_address or "", regions={})
    await raw.notify("text")
    await raw.close()
    await source.download()
    await source.deregister()
    host = await a.register(np.zeros(10, np.uint8))
    await host.deregister()
    await a.close()
    assert context() is None

    seen: list[int | None] = []

    def call() -> None:
        acl.aclrtSetDevice(0)
        seen.append(context())

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert seen[0], "a context can be seen"


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_nothing_is_polled_while_nothing_is_outstanding(
    standin: Standin, pair_npu: PairNpu, flavour: str
) -> None:
    standin.set(**FLAVOURS[flavour])
    a, b, peer = await pair_npu()
    source, _ = await npu_region(a, MIB, fill=1), await npu_region(b, MIB, "t")
    remote = await peer.region("t")
    await aiohixl.wait_all(peer.write(source, remote) for _ in range(50))

    def calls() -> list[int]:
        return [standin.stat(key) for key in ("polls", "bulk_polls", "get_notifies", "posts", "connects")]

    before, cpu = calls(), time.process_time()
    await asyncio.sleep(0.5)
    assert calls() == before
    print(f"CPU of half an idle second: {(time.process_time() - cpu) * 1e3:.2f} ms")


@pytest.mark.parametrize("flavour", ["device", "comm"])
async def test_polls_become_rare(standin: Standin, pair_npu: PairNpu, flavour: str) -> None:
    """At most every 200 us or so while something is outstanding for long; far fewer than a busy poller's."""
    standin.set(**FLAVOURS[flavour])
    a, b, peer = await pair_npu()
    source, _ = await npu_region(a, MIB, fill=1), await npu_region(b, MIB, "t")
    remote = await peer.region("t")
    await peer.write(source, remote)
    before = standin.stat("polls") + standin.stat("bulk_polls")
    standin.set(hang_device=1)
    hung = peer.write(source, remote)
    await asyncio.sleep(0.5)
    polls = standin.stat("polls") + standin.stat("bulk_polls") - before
    standin.set(hang_device=0)
    await hung
    assert polls < 4000, "0.5 s at 200 us are 2,500"


# ---- once, and in order ----


async def test_initialized_once(standin: Standin, start_npu: StartNpu) -> None:
    a = await start_npu("a")
    for _ in range(2):
        with pytest.raises(ClosedError, match="started before"):
            await a.start()
    assert standin.stat("initializes") == 1
    await a.close()
    with pytest.raises(ClosedError):
        await a.start()
    assert (standin.stat("initializes"), standin.stat("finalizes")) == (1, 1)


async def test_a_port_that_is_taken(standin: Standin, start_npu: StartNpu) -> None:
    a = await start_npu("a")
    assert a.hixl_address is not None
    with pytest.raises(aiohixl.ConfigError, match=r"503900"):
        await aiohixl.Engine(
            "b", transports=["hixl"], hixl_library=standin.library, hixl_address=a.hixl_address
        ).start()
    await start_npu("c", hixl_address="127.0.0.1:0")


async def test_a_start_that_is_given_up(standin: Standin) -> None:
    """A thread finishes it, and undoes it."""
    standin.set(finalize_ms=0)
    given_up = 0
    for turns in [*range(4), 0, 0, 0]:
        task = asyncio.ensure_future(aiohixl.Engine("x", transports=["hixl"], hixl_library=standin.library).start())
        for _ in range(turns + 1):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        given_up += task.cancelled()
        if not task.cancelled():  # the thread was quicker
            await task.result().close()
    assert given_up
    await until(lambda: standin.stat("finalizes") == standin.stat("initializes"), "all are finalized")
    await until(lambda: not any(t.name.startswith("aiohixl") for t in threading.enumerate()), "its threads end")
    assert standin.stat("registered") == 0


async def close_in_the_middle(a: aiohixl.Engine, others: list[aiohixl.Engine], how: str, dice: random.Random) -> None:
    """Transfers, registrations, connections and posts of another thread under way."""
    loop = asyncio.get_running_loop()
    source = await npu_region(a, MIB, fill=1)
    peer = await a.connect(others[0].address)
    remote = await peer.region("t")
    stop, posted = threading.Event(), threading.Event()

    def post() -> None:
        with contextlib.suppress(HixlError):
            while not stop.is_set():
                with contextlib.suppress(aiohixl.QueueFullError):
                    loop.call_soon_threadsafe(peer.post_write(source[:64], remote[:64]).detach)
                posted.set()
                stop.wait(0.0002)
        posted.set()

    async def work(address: str) -> None:
        with contextlib.suppress(HixlError):
            while True:
                peer = await a.connect(address)
                remote = await peer.region("t")
                await aiohixl.wait_all(peer.write(source, remote) for _ in range(5))
                extra = await a.allocate(4096, device="npu")
                await peer.write(extra, remote[:4096])
                await extra.deregister()
                if dice.random() < 0.3:
                    await peer.close()

    thread = threading.Thread(target=post)
    thread.start()
    tasks = [asyncio.create_task(work(engine.address)) for engine in others]
    raw = asyncio.create_task(a.connect_raw(others[1].hixl_address or "", regions={}))
    await asyncio.to_thread(posted.wait, 10)
    await asyncio.sleep(dice.random() * 0.02)
    if how == "abort":
        a.abort()
    else:
        await a.close(timeout=0.0 if how == "impatient" else 0.2)
    stop.set()
    await asyncio.to_thread(thread.join)
    results = await asyncio.gather(*tasks, raw, return_exceptions=True)
    unexpected = [r for r in results if isinstance(r, BaseException) and not isinstance(r, HixlError | ExceptionGroup)]
    assert unexpected == []


@pytest.mark.parametrize("how", ["close", "abort", "impatient"])
@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_closed_in_the_middle_of_everything(
    standin: Standin, start_npu: StartNpu, flavour: str, how: str
) -> None:
    """The stand-in aborts the process when Finalize meets another call."""
    standin.set(**FLAVOURS[flavour], latency_us=300, connect_ms=2)
    dice = random.Random(f"{flavour} {how}")
    b = await start_npu("b", 1)
    await npu_region(b, MIB, "t")
    for _ in range(6):
        c = await start_npu("c", 1)
        await npu_region(c, MIB, "t")
        await close_in_the_middle(await start_npu("a", cancel_grace=0.05), [b, c], how, dice)
        await c.close()
    assert standin.stat("initializes") == standin.stat("finalizes") + 1
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_closed_while_nothing_returns(standin: Standin, start_npu: StartNpu) -> None:
    """The NPU hangs, and so does Disconnect: close waits for it, though not for ever."""
    a, b = await start_npu("a", cancel_grace=0.1), await start_npu("b", 1)
    source, _ = await npu_region(a, MIB, fill=1), await npu_region(b, MIB, "t")
    peer = await a.connect(b.address)
    remote = await peer.region("t")
    await peer.write(source, remote)
    standin.set(hang_device=1, hang_disconnect_ms=1000)
    hung = peer.write(source, remote)
    while standin.stat("posts") < 2:
        await asyncio.sleep(0.001)
    async with asyncio.timeout(20):
        with contextlib.suppress(aiohixl.RegionPinnedError):
            await a.close(timeout=0.0)
    with pytest.raises(HixlError):
        await hung


STUCK = """
import asyncio, ctypes, sys, aiohixl

async def main():
    options = {"transports": ["hixl"], "hixl_library": sys.argv[1], "cancel_grace": 0.1}
    a = await aiohixl.Engine("a", npu_id=0, **options).start()
    b = await aiohixl.Engine("b", npu_id=1, **options).start()
    source = await a.allocate(4096, device="npu")
    await b.allocate(4096, "t", device="npu")
    peer = await a.connect(b.address)
    remote = await peer.region("t")
    await peer.write(source, remote)
    library = ctypes.CDLL(sys.argv[1] + "/libcann_hixl.so")
    for knob in (b"hang_device", b"hang_disconnect_ms"):
        assert library.hixl_standin_set(knob, b"600000") == 0
    hung = peer.write(source, remote)
    while library.hixl_standin_stat(b"posts") < 2:
        await asyncio.sleep(0.001)
    try:
        await a.close(timeout=0.0)
    except aiohixl.RegionPinnedError:
        print("pinned")
    try:
        await hung
    except aiohixl.TransferAbortedError:
        print("aborted")
    await b.close()

asyncio.run(main())
print("over")
"""


def test_a_library_that_never_returns(standin: Standin) -> None:
    """The engine closes, the process ends; what the library holds is never given to anybody else."""
    done = run_python(STUCK, standin.library)
    assert done.stdout.split() == ["pinned", "aborted", "over"], done
    assert done.returncode == 0
