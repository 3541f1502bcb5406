# SPDX-License-Identifier: Apache-2.0
"""RDMA: peers that die, ports that go down, devices that go away, and what an idle engine costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Start
from processes import child, until
from rdma import needs_device, own_machine

import aiohixl

pytestmark = needs_device

MIB = 1 << 20


async def pair(
    start: Start, nbytes: int = MIB, **options: object
) -> tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]:
    a, b = [await start(name, transports=["verbs"], **options) for name in "ab"]
    await b.allocate(nbytes, "target")
    return a, b, await a.connect(b.address)


async def good(engine: aiohixl.Engine, peer: aiohixl.Peer, value: int, nbytes: int = 4096) -> None:
    """There and back again."""
    remote = await peer.region("target")
    there, back = await engine.allocate(nbytes), await engine.allocate(nbytes)
    np.frombuffer(memoryview(there), np.uint8)[:] = value
    await peer.write(there, remote[:nbytes])
    await peer.read(back, remote[:nbytes])
    assert set(bytes(back)) == {value}


async def test_contract_08_a_peer_that_is_killed(start: Start) -> None:
    a = await start("a", transports=["verbs"])
    source = await a.allocate(8 * MIB)
    for value in (1, 2):
        async with child(script="tcp_peer.py", transports=["verbs"]) as other:
            await other.ask("make", kind="allocated", name="target", nbytes=8 * MIB)
            peer = await a.connect(other.address)
            await good(a, peer, value)
            remote = await peer.region("target")

            async def endless(peer: aiohixl.Peer, remote: aiohixl.RemoteRegion) -> None:
                while True:
                    batch = []
                    for _ in range(4):
                        batch.append(peer.write(source, remote))
                        batch[-1].detach()  # one failure is enough
                    for transfer in batch:
                        await transfer

            task = asyncio.create_task(endless(peer, remote))
            await asyncio.sleep(0.2)
            other.kill()
            with pytest.raises((aiohixl.PeerLostError, aiohixl.TransferError)):
                await task
            await until(lambda peer=peer: peer.is_lost, "the loss is noticed")  # type: ignore[misc]


async def test_contract_03_cancelled_and_written_again(start: Start) -> None:
    """What is posted after a transfer was taken back lands behind it."""
    a, b, peer = await pair(start, 8 * MIB, cancel_grace=0.05)
    target = next(iter(b._registry_()._named.values()))
    old, new = await a.allocate(8 * MIB), await a.allocate(8 * MIB)
    remote = await peer.region("target")
    there, first, second = (np.frombuffer(memoryview(r), np.uint8) for r in (target, old, new))
    for value in range(1, 9, 2):
        first[:], second[:] = value, value + 1
        transfer = peer.write(old, remote)
        await asyncio.sleep(0)
        transfer.cancel()
        with contextlib.suppress(aiohixl.TransferAbortedError):  # or it was quicker
            await transfer
        await peer.write(new, remote)
        await transfer.wait_quiesced()
        assert (there == value + 1).all()
    del there, first, second


async def test_memory_of_odd_addresses(start: Start) -> None:
    """Registrations begin anywhere, and rows cross pages."""
    a, b, peer = await pair(start)
    whole = np.zeros(3 * MIB, np.uint8)
    target = whole[12345 : 12345 + MIB]
    await b.register(target, "odd")
    source = a.register(np.arange(MIB, dtype=np.uint32).view(np.uint8)[7 : 7 + MIB])
    remote = await peer.region("odd")
    dice = np.random.default_rng(5)
    rows = dice.permutation(1000) * 1000
    await peer.write_many(source, rows, remote, rows[::-1].copy(), 999)
    expected = np.zeros(MIB, np.uint8)
    view = np.frombuffer(memoryview(source), np.uint8)
    for here, far in zip(rows, rows[::-1], strict=True):
        expected[far : far + 999] = view[here : here + 999]
    assert (target == expected).all()
    assert not whole[:12345].any()
    assert not whole[12345 + MIB :].any()


# ---- what it costs ----


def runs(prefix: str) -> dict[str, int]:
    """How often each thread of such a name has been on a core, so far. One that has not, has called nothing."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith(prefix):
            found[f"{name} {task.name}"] = int((task / "schedstat").read_text().split()[2])
    return found


def own_sleeps() -> int:
    """How often this thread has gone to sleep, so far."""
    status = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


async def test_contract_05_an_idle_engine_is_silent(start: Start) -> None:
    """None of its threads runs; and transfers that fit the send queue wake the loop, once each, and nobody else."""
    a, _b, peer = await pair(start)
    await good(a, peer, 3)
    source, remote = await a.allocate(4096), await peer.region("target")
    await asyncio.sleep(3.0)  # the control thread looks around for another two seconds
    before = runs("hx-")
    await asyncio.sleep(1.0)
    assert runs("hx-") == before
    slept, queue, rounds = own_sleeps(), a._queue_(), 0
    drain = queue.core.drain

    def counted() -> Any:
        nonlocal rounds
        rounds += 1
        return drain()

    core = queue.core
    queue.core = SimpleNamespace(drain=counted, next_event=core.next_event)  # type: ignore[assignment]
    try:
        for _ in range(200):
            await peer.write(source, remote[:4096])
    finally:
        queue.core = core
    assert rounds <= 200
    assert own_sleeps() - slept <= 200
    assert runs("hx-verbs") == {name: count for name, count in before.items() if name.startswith("hx-verbs")}


# ---- ports and devices ----


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def links_of() -> list[tuple[str, str]]:
    """RDMA devices, and the network interfaces under them."""
    told = subprocess.run(["rdma", "-j", "link", "show"], check=True, capture_output=True, text=True)
    return [(entry["ifname"], entry["netdev"]) for entry in json.loads(told.stdout)]


@pytest.fixture
def device() -> Iterator[None]:  # before `start`: what engines hold open cannot be taken away
    links = links_of()
    yield
    run("ip", "link", "set", "eth0", "up")
    if links_of() != links:  # an engine takes the first one: their order counts, too
        for name, _ in links_of():
            run("rdma", "link", "delete", name)
        for name, interface in links:
            run("rdma", "link", "add", name, "type", "rxe", "netdev", interface)
    assert links_of() == links


@own_machine
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
async def test_a_port_goes_down_and_up(device: None, start: Start) -> None:
    """It is told, and it is made good."""
    a, _b, peer = await pair(start)
    await good(a, peer, 1)
    events = a.events()
    run("ip", "link", "set", "eth0", "down")
    async with asyncio.timeout(20):
        while (event := await events.get()).kind != "warning" or "port" not in event.detail.lower():
            pass
    run("ip", "link", "set", "eth0", "up")
    for value in range(2, 40):
        try:
            await good(a, peer, value)
            break
        except aiohixl.TransferError:
            await asyncio.sleep(0.1)
    else:
        raise AssertionError("the port is up again, and transfers are not")


@own_machine
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
async def test_a_device_goes_away_under_load(device: None, start: Start) -> None:
    """Every transfer ends, and so do the engines; new ones find the new device."""
    a, b, peer = await pair(start, 8 * MIB)
    source, remote = await a.allocate(8 * MIB), await peer.region("target")
    transfers = [peer.write(source, remote) for _ in range(16)]
    await asyncio.sleep(0.05)
    gone = threading.Thread(target=run, args=("rdma", "link", "delete", "rxe0"))
    gone.start()
    async with asyncio.timeout(60):
        await asyncio.gather(*transfers, return_exceptions=True)
    await a.close()
    await b.close()
    while gone.is_alive():  # the device goes when nobody has it open
        await asyncio.sleep(0.05)
    gone.join()
    run("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "eth0")
    c, d = [await start(name, transports=["verbs"]) for name in "cd"]
    await d.allocate(MIB, "target")
    await good(c, await c.connect(d.address), 9)
