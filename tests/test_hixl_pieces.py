# SPDX-License-Identifier: Apache-2.0
"""The small parts of the Python side of HIXL, each by itself: no NPU, and nothing that stands in for one."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Start

import aiohixl
from aiohixl import ConfigError, ProviderError, TransferError, _core
from aiohixl.copies import Copy
from aiohixl.hixl import explain
from aiohixl.notifies import Notifies, Notify
from aiohixl.npu import moment
from aiohixl.offloop import in_thread, outlive
from aiohixl.rawpeer import _text

# ---- what a transfer waits for ----


class FakeEvent:
    """As torch_npu's: its handle exists once it was recorded."""

    def __init__(self) -> None:
        self.npu_event = 0
        self.stream: Any = None

    def record(self, stream: Any) -> None:
        self.stream, self.npu_event = stream, 0x7F00_0000_1000


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> Any:
    npu = SimpleNamespace(Event=FakeEvent, current_stream=lambda index: f"stream of {index}")
    module = SimpleNamespace(npu=npu)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return module


def test_memory_of_the_cpu_waits_for_nothing(torch_npu: Any) -> None:
    assert moment(None, "cpu") == (0, None)


def test_npu_memory_waits_for_the_current_stream(torch_npu: Any) -> None:
    when = moment(None, "npu:3")
    assert isinstance(when.event, FakeEvent)
    assert (when.handle, when.event.stream) == (0x7F00_0000_1000, "stream of 3")


def test_nobody_computes_without_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    assert moment(None, "npu:0") == (0, None)
    assert "torch_npu" not in sys.modules


def test_an_event_of_the_callers(torch_npu: Any) -> None:
    event = FakeEvent()
    with pytest.raises(ConfigError, match="never recorded"):
        moment(event, "npu:0")
    event.record("mine")
    assert moment(event, "npu:0") == (event.npu_event, event)
    assert moment(event.npu_event, "npu:0").handle == event.npu_event
    assert moment(0, "npu:0").handle == 0, "zero: wait for nothing"
    for bad in (True, -1, 1 << 64, 1.0, "event", object(), [event]):
        with pytest.raises(ConfigError, match=r"after: a torch\.npu\.Event, the handle of one"):
            moment(bad, "npu:0")


async def test_after_is_for_npu_memory(start: Start) -> None:
    a, b = await start("a"), await start("b")
    peer = await a.connect(b.address)
    layers = [bytearray(64) for _ in range(2)]
    b.register_kv(layers, "kv")
    b.allocate(4096, "target")
    cache, local = a.register_kv([bytearray(64) for _ in range(2)], "kv"), a.allocate(4096)
    remote = await peer.region("target")
    await peer.kv("kv")
    posts: list[Callable[[Any], Any]] = [
        lambda after: peer.write(local, remote, after=after),
        lambda after: peer.write(local, remote, note=b"", after=after),
        lambda after: peer.read(local, remote, after=after),
        lambda after: peer.write_many(local, [0], remote, [0], 8, after=after),
        lambda after: peer.read_many(local, [0], remote, [0], 8, after=after),
        lambda after: peer.write_kv(cache, [0], [1], after=after),
        lambda after: peer.read_kv(cache, [0], [1], after=after),
    ]
    for post in posts:
        with pytest.raises(ConfigError, match="after= is for NPU memory"):
            await post(0x1000)
        with pytest.raises(ConfigError, match="after: a torch"):
            await post("now")
        await post(0)
        await post(None)
    async with peer.stream_kv(cache, [0], [1]) as stream:
        with pytest.raises(ConfigError, match="after= is for NPU memory"):
            stream.post(0, after=0x1000)
        await stream.post(0, after=0)
        stream.post(1)


# ---- errors of HIXL's ----


async def test_a_record_of_the_provider_becomes_its_error(start: Start) -> None:
    a, b = await start("a"), await start("b")
    peer = await a.connect(b.address)
    provider = next(number for number, name in _core.statuses().items() if name == "PROVIDER")
    for code, detail in ((503900, "the link is down"), (4294967295, None)):
        transfer = peer.notify(b"x")
        await transfer
        transfer._done = False
        transfer.settle((transfer.token, provider, 0, 0, 5, _core.NO_INDEX, 1, code, detail))
        with pytest.raises(ProviderError) as failed:
            await transfer
        assert (failed.value.code, failed.value.detail) == (code, detail or "")
        assert str(failed.value) == f"note to peer 'b': {explain(code, detail or '')}"
        again = pickle.loads(pickle.dumps(failed.value))
        assert (again.code, again.detail, str(again)) == (code, detail or "", str(failed.value))
    assert issubclass(ProviderError, TransferError)


async def test_an_answer_to_a_copy() -> None:
    loop = asyncio.get_running_loop()
    good, bad, late = (Copy(loop.create_future(), "upload to <Region>", None) for _ in range(3))
    good.answered("OK", "")
    await good.future
    bad.answered("PROVIDER", "HIXL answered 107002 (no context)")
    with pytest.raises(ProviderError, match="upload to <Region>: HIXL answered 107002") as failed:
        await bad.future
    assert failed.value.code == 107002
    late.close("CLOSED")
    late.answered("OK", "")
    with pytest.raises(aiohixl.ClosedError, match="upload to <Region>: the engine was closed"):
        await late.future


# ---- notifications ----


async def test_notifications_are_asked_for_while_somebody_waits() -> None:
    waiting = [0]

    def expect(change: int) -> None:
        waiting.append(waiting[-1] + change)

    box = Notifies(expect)
    one, two = asyncio.ensure_future(box.get()), asyncio.ensure_future(box.get())
    await asyncio.sleep(0)
    assert waiting[-1] == 2
    two.cancel()
    await asyncio.wait([two])
    assert waiting[-1] == 1
    box.put(Notify("name", "message"))
    assert await one == Notify("name", "message")
    assert waiting[-1] == 0
    box.put(Notify("", "second"))
    assert (await box.get()).message == "second"
    assert waiting == [0, 1, 2, 1, 0], "what is here already is not asked for"
    box.close()
    assert [item async for item in box] == []
    assert waiting[-1] == 0


@pytest.mark.parametrize("good", ["", "x" * 1024, "é" * 512])
def test_notifications_that_hixl_takes(good: str) -> None:
    assert _text(good, "message") == good.encode()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"bytes", "takes text only"),
        (None, "takes text only"),
        ("\ud800", "takes text only"),
        ("x" * 1025, "at most 1024 bytes of UTF-8 as the name, not 1025"),
        ("é" * 513, "at most 1024 bytes of UTF-8 as the name, not 1026"),
        ("a\0b", "the name has a NUL"),
    ],
)
def test_notifications_that_hixl_does_not_take(bad: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"notify: .*{why}"):
        _text(bad, "name")


# ---- calls off the loop ----


async def test_a_call_that_is_given_up_is_thrown_away_in_a_thread() -> None:
    """Cancelled before it answers: the await ends at once, and what it opens later is closed, off the loop."""
    go, thrown = threading.Event(), threading.Event()
    seen: list[tuple[Any, bool]] = []

    def discard(result: Any) -> None:
        seen.append((result, threading.current_thread() is threading.main_thread()))
        thrown.set()

    task = asyncio.ensure_future(in_thread(asyncio.get_running_loop(), lambda: go.wait() and "opened", discard=discard))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not seen
    go.set()
    await asyncio.to_thread(thrown.wait)
    assert seen == [("opened", False)]
    await joined("aiohixl")


async def test_a_call_that_answers_in_the_turn_of_its_cancellation() -> None:
    loop = asyncio.get_running_loop()
    thrown: asyncio.Future[Any] = loop.create_future()

    def discard(result: Any) -> None:
        loop.call_soon_threadsafe(thrown.set_result, result)

    task = asyncio.ensure_future(in_thread(loop, lambda: "opened", discard=discard))
    await asyncio.sleep(0)
    for thread in threading.enumerate():
        if thread.name == "aiohixl-call":
            thread.join()  # its answer is the loop's next callback, and the cancellation the one after that
    loop.call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await thrown == "opened"
    await joined("aiohixl")


async def test_a_call_that_fails_after_it_was_given_up() -> None:
    go = threading.Event()
    loop = asyncio.get_running_loop()
    thrown: asyncio.Future[Any] = loop.create_future()

    def fail() -> None:
        go.wait()
        raise OSError("too late")

    def discard(result: Any) -> None:
        loop.call_soon_threadsafe(thrown.set_result, result)

    task = asyncio.ensure_future(in_thread(loop, fail, discard=discard))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    go.set()
    assert await thrown is None
    await joined("aiohixl")


async def test_what_outlives_its_cancellation() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(outlive(future))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    future.set_result(5)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await outlive(future) == 5
    failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    failed.set_exception(OSError("no"))
    with pytest.raises(OSError, match="no"):
        await outlive(failed)


async def joined(prefix: str) -> None:
    """The threads of that name have ended."""
    for thread in threading.enumerate():
        if thread.name.startswith(prefix):
            await asyncio.to_thread(thread.join)


# ---- an engine that cannot have its NPU ----


_WITHOUT_HIXL = """
import asyncio, os, aiohixl, aiohixl.opening
from pathlib import Path
home = os.environ["ASCEND_HOME_PATH"]

async def refused(options, *words):
    engine = aiohixl.Engine("x", **options)
    try:
        await engine.start()
    except aiohixl.ConfigError as exc:
        assert str(exc).startswith("engine 'x': ") and all(word in str(exc) for word in words), exc
    else:
        raise AssertionError(f"{options}: accepted")
    for again in (lambda: engine.allocate(8), engine.start):
        try:
            result = again()
            if asyncio.iscoroutine(result):
                await result
        except aiohixl.ClosedError:
            pass
        else:
            raise AssertionError("an engine that could not be started can be used")
    await engine.close()

async def main():
    for options in {"transports": ["hixl"]}, {"npu_id": 0}, {"hixl_library": home}, {"link": "roce"}:
        await refused(options, "libmetadef.so", home, "CANN")
    aiohixl.opening.BINDING = Path(home, "_provider_hixl.so")
    await refused({"npu_id": 0}, "lacks the binding to HIXL", "build it again")
    async with aiohixl.Engine("fine"):
        print("fine")

asyncio.run(main())
"""


def test_hixl_that_is_missing(tmp_path: Any) -> None:
    """In a process of its own: a library that an earlier test has opened is there for good."""
    (tmp_path / "lib64").mkdir()
    env = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"} | {"ASCEND_HOME_PATH": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", _WITHOUT_HIXL], env=env, capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    assert out.stdout == "fine\n"
