# SPDX-License-Identifier: Apache-2.0
"""Contracts 8 and 12: a forked child has none of its parent's engines, and takes nothing from them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import multiprocessing
import multiprocessing.resource_tracker
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from conftest import open_descriptors
from processes import CHILDREN, PATIENCE, child, forked

import aiohixl

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

Start = Callable[..., Coroutine[Any, Any, aiohixl.Engine]]
Pair = tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]


numbers = itertools.count()


async def check_transfers(pair: Pair, value: int) -> None:
    """The parent's engines work, by the inline path, the copy threads and notes."""
    a, b, peer = pair
    name = f"target {next(numbers)}"
    target = await b.allocate(1 << 20, name)
    remote = await peer.region(name)
    source = await a.allocate(1 << 20)
    np.frombuffer(memoryview(source), np.uint8)[:] = value
    for _ in range(3):
        await peer.write(source[:100], remote[:100])
    await peer.write(source, remote, note=b"%d" % value)
    assert (await b.notes().get()).payload == b"%d" % value
    assert set(bytes(target)) == {value}
    await target.deregister()


def refused(call: Callable[[], Any]) -> str:
    """The message of the `ClosedError` that it raises, also where it is a coroutine."""
    try:
        result = call()
        if asyncio.iscoroutine(result):
            asyncio.new_event_loop().run_until_complete(result)
    except aiohixl.ClosedError as exc:
        return str(exc)
    raise AssertionError(f"{call} did not raise ClosedError")


async def test_contract_12_the_childs_engines_are_closed(pair: Pair) -> None:
    a, b, peer = pair
    region = await a.allocate(4096, "mine")
    foreign = a.register(np.zeros(4096, np.uint8))
    await b.allocate(4096, "target")
    await b.allocate(4096, "unmapped")
    remote, unmapped = await peer.region("target"), await peer.region("unmapped")
    await peer.write(region, remote)  # mapped and warm: the next one would be done inside the post
    cache = a.register_kv([np.zeros((2, 64), np.uint8)])
    b.register_kv([np.zeros((2, 64), np.uint8)])
    await peer.kv()

    def in_child() -> dict[str, str]:
        calls: dict[str, Callable[[], Any]] = {
            "check": a.check,
            "allocate": lambda: a.allocate(4096),
            "register": lambda: a.register(bytearray(10)),
            "register_many": lambda: a.register_many({"x": bytearray(10)}),
            "register_kv": lambda: a.register_kv([np.zeros((2, 64), np.uint8)], "other"),
            "connect": lambda: a.connect(b.address),
            "notes": a.notes,
            "events": a.events,
            "stats": a.stats,
            "close": a.close,
            "abort": a.abort,
            "write": lambda: peer.write(region, remote),
            "write foreign": lambda: peer.write(foreign, remote),
            "write unmapped": lambda: peer.write(region, unmapped),
            "read": lambda: peer.read(region, remote),
            "noted": lambda: peer.write(region, remote, note=b"x"),
            "many": lambda: peer.write_many(region, [0, 8], remote, [0, 8], 8),
            "write_kv": lambda: peer.write_kv(cache, [0], [1]),
            "notify": lambda: peer.notify(b"x"),
            "region": lambda: peer.region("target"),
            "kv": lambda: peer.kv("never"),
            "window": peer.window,
            "close peer": peer.close,
            "revoke": region.revoke,
            "grant": region.grant,
            "deregister": region.deregister,
            "revoke cache": cache.revoke,
            "deregister cache": cache.deregister,
        }
        return {name: refused(call) for name, call in calls.items()}

    messages = forked(in_child)
    assert "belongs to the parent of this process" in messages["allocate"]
    assert "belongs to the parent of this process" in messages["close"]
    assert all(messages.values())
    await check_transfers(pair, 5)


async def test_contract_12_the_child_holds_no_descriptor(pair: Pair) -> None:
    a, _, peer = pair
    region = await a.allocate(1 << 20, "held")
    await check_transfers(pair, 1)
    before = set(open_descriptors())
    ours = {fd: what for fd, what in open_descriptors().items() if "aiohixl" in what or "socket" in what}
    assert len(ours) > 4

    def in_child() -> list[str]:
        return [
            what for fd, what in open_descriptors().items() if fd in before and ("aiohixl" in what or "pidfd" in what)
        ]

    assert forked(in_child) == []
    assert not any(bytes(region))
    assert not peer.is_lost
    await check_transfers(pair, 2)


async def test_contract_12_the_childs_garbage_collection_touches_nothing(pair: Pair) -> None:
    """Not even what the child has mapped since where the parent's mappings of its peers were."""
    a, b, peer = pair
    await check_transfers(pair, 1)
    holder: dict[str, Any] = {"region": await a.allocate(1 << 20), "peer": peer, "remote": peer.regions}
    path = a.address.removeprefix("unix://")

    def in_child() -> bool:
        import mmap

        taken = [mmap.mmap(-1, 1 << 16) for _ in range(500)]  # the gaps are filled
        for number, area in enumerate(taken):
            area[:] = bytes([number % 251]) * len(area)
        holder.clear()
        for owner in (a, b, peer):
            owner.__dict__.clear()  # whatever they hold, it goes now
        gc.collect()
        assert all(set(area[:]) == {number % 251} for number, area in enumerate(taken))
        return os.path.exists(path)

    assert forked(in_child) is True
    assert os.path.exists(path)
    await check_transfers(pair, 2)
    await (await b.connect(a.address)).notify(b"by the same socket file")


async def test_contract_12_an_engine_of_the_childs_own(pair: Pair) -> None:
    """It even talks to the parent's, which runs meanwhile."""
    a, b, _ = pair
    target = await b.allocate(1 << 16, "from the child")

    async def own() -> str:
        async with aiohixl.Engine("child") as engine, aiohixl.Engine("second") as second:
            assert engine.incarnation != a.incarnation
            peer = await engine.connect(b.address)
            source = engine.register(np.full(1 << 16, 9, np.uint8))
            await peer.write(source, await peer.region("from the child"), note=b"hello")
            await (await second.connect(engine.address)).notify(b"x")
            return (await engine.notes().get()).payload.decode()

    done = asyncio.get_running_loop().run_in_executor(None, lambda: forked(lambda: asyncio.run(own())))
    note = await b.notes().get()
    assert (note.payload, note.peer.name) == (b"hello", "child")
    assert await done == "x"
    assert set(bytes(target)) == {9}
    await asyncio.get_running_loop().shutdown_default_executor()
    await check_transfers(pair, 3)


@pytest.fixture(scope="module", autouse=True)
def resource_tracker() -> None:
    """The process that `spawn` starts once, and that stays."""
    multiprocessing.resource_tracker.ensure_running()


def engine_in_process(address: str) -> None:
    async def run() -> None:
        async with aiohixl.Engine("worker") as engine:
            await (await engine.connect(address)).notify(b"from a worker")

    asyncio.run(run())


@pytest.mark.parametrize("method", ["fork", "spawn"])
async def test_contract_12_multiprocessing(pair: Pair, method: str) -> None:
    _, b, _ = pair
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=engine_in_process, args=(b.address,))
    process.start()
    try:
        async with asyncio.timeout(PATIENCE):
            assert (await b.notes().get()).payload == b"from a worker"
    finally:
        process.join(PATIENCE)
    assert process.exitcode == 0
    process.close()
    await check_transfers(pair, 4)


async def test_contract_12_subprocesses(pair: Pair) -> None:
    out = subprocess.run(
        [sys.executable, "-c", "import os; print(len(os.listdir('/proc/self/fd')))"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
        close_fds=False,
    )
    assert int(out.stdout) <= 6, "a descriptor is inherited over exec"
    await check_transfers(pair, 6)


@pytest.mark.parametrize("forkers", [1, 3])
async def test_contract_12_forks_from_threads_while_everything_moves(pair: Pair, start: Start, forkers: int) -> None:
    """Transfers of both kinds, notes, and engines that come and go: no child hangs, and no byte is wrong."""
    a, b, peer = pair
    errors: list[BaseException] = []
    moving = asyncio.Event()

    def fork_many() -> None:
        try:
            for _ in range(15):
                assert forked(lambda: refused(a.check) and refused(lambda: peer.notify(b"x")))
        except BaseException as exc:
            errors.append(exc)

    async def transfers() -> None:
        value = 0
        while not moving.is_set():
            value = value % 250 + 1
            await check_transfers(pair, value)

    async def engines() -> None:
        while not moving.is_set():
            async with aiohixl.Engine("passing") as passing:
                await (await passing.connect(b.address)).close()

    tasks = [asyncio.create_task(transfers()), asyncio.create_task(engines())]
    threads = [threading.Thread(target=fork_many) for _ in range(forkers)]
    for thread in threads:
        thread.start()
    try:
        async with asyncio.timeout(60):
            while any(thread.is_alive() for thread in threads):
                await asyncio.sleep(0.01)
    finally:
        moving.set()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*tasks)
        for thread in threads:
            thread.join(PATIENCE)
    assert errors == []
    await check_transfers(pair, 7)


def test_contract_12_who_forks_and_who_posts_do_not_wait_for_each_other() -> None:
    """Python's lock, and the lock of a transport that a fork holds, are taken in one order."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(CHILDREN / "fork_storm.py"), "4"]
    subprocess.run(command, check=True, timeout=PATIENCE)


async def test_contract_08_a_forked_child_does_not_hide_its_parents_death(start: Start) -> None:
    """By its sockets alone, as a peer without a descriptor of the process would see it, and to new peers, too."""
    engine = await start("here")
    async with child(address="127.0.0.1:0") as other:
        links = [await engine.connect(address) for address in other.address.split(",")]
        pid = await other.ask("fork")
        try:
            events = engine.events()
            other.kill()
            async with asyncio.timeout(1):
                lost = {(await events.get()).peer, (await events.get()).peer}
            assert lost == set(links)
            for address in other.address.split(","):
                with pytest.raises(aiohixl.PeerUnreachableError):
                    await engine.connect(address)
            os.kill(pid, 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
