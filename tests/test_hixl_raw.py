# SPDX-License-Identifier: Apache-2.0
"""`connect_raw`: a plain C++ program of HIXL's at the other end, and no control link."""

from __future__ import annotations

import asyncio
import contextlib
import select
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ports import held_port
from processes import PATIENCE, until
from standin import FLAVOURS, HOME, Standin, StartNpu, bytes_of, npu_region, open_standin

import aiohixl
from aiohixl import ConfigError, PeerUnreachableError, ProviderError, TransferTimeoutError
from aiohixl.notifies import Notify

MIB = 1 << 20


class Program:
    """``raw_server``, on NPU 1."""

    def __init__(self, flavour: str, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        knobs = ",".join(f"{key}={value}" for key, value in FLAVOURS[flavour].items())
        self.process = subprocess.Popen(
            [str(HOME / "raw_server"), self.address, "1", str(MIB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"HIXL_STANDIN": knobs},
        )
        npu, host = (int(word) for word in self.line().split())
        self.npu = npu
        self.regions: dict[str, tuple[int, int] | tuple[int, int, str]] = {
            "npu": (npu, MIB),
            "host": (host, MIB, "cpu"),
        }

    def line(self) -> str:
        out = self.process.stdout
        assert out is not None
        assert select.select([out], [], [], PATIENCE)[0], "the program does not answer"
        line = out.readline().decode()
        assert line.endswith("\n"), f"the program ended: {self.process.wait()}"
        return line[:-1]

    def ask(self, *words: object) -> str:
        """Its answer. Blocks the loop, which nothing here needs meanwhile."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        self.process.stdin.flush()
        return self.line()

    def close(self, check: bool = True) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        code = self.process.wait(PATIENCE)
        self.process.stdout.close()
        assert code == 0 or not check


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest, standin: Standin) -> str:
    standin.set(**FLAVOURS[request.param])
    return str(request.param)


@pytest.fixture
def program(flavour: str) -> Iterator[Program]:
    open_standin()
    with held_port() as port:
        one = Program(flavour, port)
        yield one
        one.close(check=one.process.poll() is None)


async def test_there_and_back(program: Program, start_npu: StartNpu) -> None:
    a = await start_npu("a")
    mine, host = await npu_region(a, MIB, fill=7), a.register(np.full(MIB, 8, np.uint8))
    peer = await a.connect_raw(program.address, regions=program.regions)
    assert set(peer.regions) == {"npu", "host"}
    await peer.write(mine, peer.regions["npu"])
    await peer.write(host, await peer.region("host"))
    assert (program.ask("values", 0), program.ask("values", 1)) == ("7", "8")
    program.ask("fill", 0, 9)
    program.ask("fill", 1, 10)
    await peer.read(host, peer.regions["npu"])
    await peer.read(mine, peer.regions["host"])
    assert set(bytes(host)) == {9}
    assert set(await mine.download()) == {10}
    rows = np.arange(100) * 100
    await peer.write_many(mine, rows, peer.regions["npu"], rows[::-1], 50)
    assert program.ask("values", 0) == "9 10"
    assert peer.route(mine, peer.regions["npu"]).provider == "hixl"
    with pytest.raises(aiohixl.RegionError):
        peer.write(mine[:100], peer.regions["npu"][:101])
    await peer.close()
    again = await a.connect_raw(program.address, regions=program.regions)
    await again.write(mine[:100], again.regions["host"][50:150])
    assert program.ask("values", 1) == "10"


async def test_the_program_reaches_us(program: Program, start_npu: StartNpu) -> None:
    """With an address that it was told, as it would with any of HIXL's engines."""
    a = await start_npu("a")
    mine = await npu_region(a, MIB, fill=1)
    assert program.ask("connect", a.hixl_address) == "0"
    program.ask("fill", 0, 33)
    assert program.ask("write", a.hixl_address, 0, mine.addr, MIB) == "0 1"
    assert ((await bytes_of(mine)) == 33).all()
    await mine.upload(np.full(MIB, 34, np.uint8))
    assert program.ask("read", a.hixl_address, 1, mine.addr, MIB) == "0 1"
    assert program.ask("values", 1) == "34"
    assert program.ask("disconnect", a.hixl_address) == "0"


async def test_notifies_both_ways(standin: Standin, program: Program, start_npu: StartNpu) -> None:
    a = await start_npu("a")
    mine = await npu_region(a, MIB, fill=3)
    peer = await a.connect_raw(program.address, regions=program.regions)
    await peer.notify("a-message")
    await peer.notify("x" * 1024, "y" * 1024)
    await peer.write(mine, peer.regions["npu"], note="landed", note_name="req-1")
    assert program.ask("notifies") == f"0 =a-message {'y' * 1024}={'x' * 1024} req-1=landed"
    assert program.ask("values", 0) == "3"

    assert program.ask("connect", a.hixl_address) == "0"
    calls = standin.stat("get_notifies")
    assert program.ask("notify", a.hixl_address, "first", "one") == "0"
    await asyncio.sleep(0.05)  # nothing happens: nobody waits for it
    assert standin.stat("get_notifies") == calls
    notifies = a.notifies()
    waiting = asyncio.ensure_future(notifies.get())
    assert await waiting == Notify("first", "one")
    for number in range(20):
        assert program.ask("notify", a.hixl_address, f"n{number}", "text") == "0"
    got = [await notifies.get() for _ in range(20)]
    assert got == [Notify(f"n{number}", "text") for number in range(20)]
    cancelled = asyncio.ensure_future(notifies.get())
    await until(lambda: standin.stat("get_notifies") > calls + 2, "it is asked for while somebody waits")
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert program.ask("notify", a.hixl_address, "after", "cancellation") == "0"
    async for notify in notifies:
        assert notify == Notify("after", "cancellation")
        break
    assert program.ask("disconnect", a.hixl_address) == "0"


async def test_notifies_beside_other_transports(program: Program, start_npu: StartNpu) -> None:
    a = await start_npu("a", transports=["auto"])
    assert program.ask("connect", a.hixl_address) == "0"
    waiting = asyncio.ensure_future(a.notifies().get())
    assert program.ask("notify", a.hixl_address, "first", "one") == "0"
    assert await waiting == Notify("first", "one")
    assert program.ask("disconnect", a.hixl_address) == "0"


async def test_what_hixl_does_not_take(program: Program, start_npu: StartNpu) -> None:
    a = await start_npu("a")
    peer = await a.connect_raw(program.address, regions=program.regions)
    mine = await npu_region(a, 8)
    there = peer.regions["npu"][:8]
    posts: list[Callable[[str], Any]] = [
        lambda text: peer.notify(text),
        lambda text: peer.notify("", text),
        lambda text: peer.write(mine, there, note=text),
        lambda text: peer.write(mine, there, note="", note_name=text),
    ]
    for bad, why in (("x" * 1025, "1024 bytes"), ("a\0b", "NUL"), ("\ud800", "text only"), ("é" * 513, "1024 bytes")):
        for post in posts:
            with pytest.raises(ConfigError, match=why):
                await post(bad)
    assert program.ask("notifies") == "0"
    assert program.ask("values", 0) == "0"
    for name in ("write_kv", "read_kv", "stream_kv", "kv", "caches"):
        assert not hasattr(peer, name)


async def test_nobody_listens(standin: Standin, flavour: str, start_npu: StartNpu) -> None:
    a = await start_npu("a")
    with held_port() as port:
        address = f"127.0.0.1:{port}"
        with pytest.raises(PeerUnreachableError, match=rf"{address}.*503900") as failed:
            await a.connect_raw(address, regions={})
        assert failed.value.code == 503900
        standin.set(connect_ms=60000)
        task = asyncio.ensure_future(a.connect_raw(address, regions={}))
        await until(lambda: standin.stat("connects") > 3, "it connects")
        task.cancel()
        async with asyncio.timeout(5):
            await asyncio.wait([task])
        assert task.cancelled()
        standin.set(connect_ms=0)


async def test_a_region_that_is_not_there(program: Program, start_npu: StartNpu, flavour: str) -> None:
    """HIXL finds out: at once, or, the comm kind, on the NPU, where it never ends."""
    a = await start_npu("a", stall_timeout=0.5)
    mine = await npu_region(a, 4096, fill=3)
    wrong = {**program.regions, "wrong": (program.npu + MIB, 4096)}
    peer = await a.connect_raw(program.address, regions=wrong)
    with pytest.raises((ProviderError, TransferTimeoutError)) as failed:
        await peer.write(mine, peer.regions["wrong"])
    if isinstance(failed.value, ProviderError):
        assert failed.value.code in (103900, 503900)
    else:
        assert flavour == "comm"
    await peer.write(mine, peer.regions["npu"][:4096])
    assert program.ask("values", 0) == "0 3"


async def test_the_program_is_killed(program: Program, start_npu: StartNpu, flavour: str) -> None:
    """Nobody tells: HIXL's failure does, or stall_timeout."""
    a = await start_npu("a", stall_timeout=0.5)
    mine = await npu_region(a, 4096, fill=3)
    peer = await a.connect_raw(program.address, regions=program.regions)
    await peer.write(mine, peer.regions["npu"][:4096])
    program.process.kill()
    program.process.wait()
    async with asyncio.timeout(20):
        with pytest.raises((ProviderError, TransferTimeoutError, aiohixl.PeerLostError)):
            await peer.write(mine, peer.regions["npu"][:4096])
        with pytest.raises((ProviderError, aiohixl.PeerLostError)):
            await peer.notify("is anybody there?")
    assert mine.quarantined == ()
    await mine.deregister()


@pytest.mark.parametrize("flavour", ["device"], indirect=True)
async def test_a_notification_that_fails(standin: Standin, program: Program, start_npu: StartNpu) -> None:
    a = await start_npu("a")
    peer = await a.connect_raw(program.address, regions=program.regions)
    standin.set(notify_fail=1, err_msg="no one is home")
    with pytest.raises(ProviderError, match=r"HIXL answered 1 \(.*no one is home") as failed:
        await peer.notify("text")
    assert failed.value.code == 1
    standin.set(notify_fail=0)
    await peer.notify("text")
    assert program.ask("notifies") == "0 =text"
    program.ask("set", "max_notifies", 3)
    waiting = [peer.notify(f"n{i}") for i in range(6)]
    await waiting[2]
    await asyncio.sleep(0.02)
    assert not waiting[3].done(), "the queue there is full: it waits"
    assert program.ask("notifies") == "0 =n0 =n1 =n2"
    await waiting[5]


async def test_the_bad_calls(start_npu: StartNpu) -> None:
    a = await start_npu("a")
    addresses: list[Any] = ["localhost:5", "10.0.0.1", "10.0.0.1:0", "::1:5", 5]
    for address in addresses:
        with pytest.raises(ConfigError, match="connect_raw"):
            await a.connect_raw(address, regions={})
    bad: list[Any] = [[], {"": (5, 5)}]
    bad += [{"x": region} for region in ((0, 5), (5, 0), 5, (5, 5, "gpu"), (1 << 64, 1))]
    for regions in bad:
        with pytest.raises(ConfigError, match="connect_raw"):
            await a.connect_raw("127.0.0.1:5", regions=regions)
    async with aiohixl.Engine("plain") as plain:
        with pytest.raises(ConfigError, match="needs HIXL"):
            await plain.connect_raw("127.0.0.1:5", regions={})
        with pytest.raises(ConfigError, match="needs HIXL"):
            plain.notifies()
