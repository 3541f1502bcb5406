# SPDX-License-Identifier: Apache-2.0
"""Measuring a path: what comes of it, the memory that the peer lends for it, and the command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Start
from processes import until
from standin import PairNpu, Standin

import aiohixl
from aiohixl import Engine, Peer, ProbeResult, cli, probe, scratch
from aiohixl.advice import load_model
from aiohixl.errors import (
    ConfigError,
    PeerLostError,
    RegionError,
    RemoteAccessError,
    TransferError,
    TransferTimeoutError,
)
from aiohixl.probe import SIZES, Latency, Rate, Way
from aiohixl.probe_command import Asked, Report, measure
from aiohixl.rendezvous import serving
from aiohixl.testing import FaultPlan

PATIENCE = 20.0


async def back(engine: Engine) -> None:
    """Wait until what the engine lent has been taken back."""
    async with asyncio.timeout(PATIENCE), engine.scratch._turn:
        assert engine._registry_()._named == {}


@contextlib.asynccontextmanager
async def borrowed(borrower: Engine, peer: Peer) -> AsyncIterator[aiohixl.RemoteRegion]:
    async with borrower.scratch.borrowed(peer, 4096, PATIENCE) as region:
        yield region


# --- measuring


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_path_is_measured(transport: str, start: Start) -> None:
    a, b = await start("a", transports=[transport]), await start("b", transports=[transport])
    peer = await a.connect(b.address)
    result = await peer.probe(seconds=0.3)
    assert (result.peer, result.provider) == ("b", transport)
    assert result.reason
    counted = 2 * 8
    for way in (result.write, result.read):
        assert 0 < way.latency.median <= way.latency.p99
        assert [rate.nbytes for rate in way.rates] == list(SIZES[: len(way.rates)])
        assert all(rate.rate > 0 and rate.count for rate in way.rates)
        assert way.rate == way.rates[-1].rate
        counted += way.latency.count + sum(rate.count for rate in way.rates)
    assert result.transfers == counted
    assert (result.failed, result.failure, result.loss) == (0, None, 0.0)
    if transport == "tcp":
        assert result.segments is not None
        assert result.resent is not None
        assert 0 <= result.resent <= result.segments
        assert result.segments > 0
    else:
        assert (result.segments, result.resent) == (None, None)
    assert json.loads(json.dumps(result.as_dict()))["write"]["rate"] == result.write.rate
    assert peer.regions == {}
    await back(b)


async def test_a_path_by_hixl(standin: Standin, pair_npu: PairNpu) -> None:
    _, b, peer = await pair_npu(transports=["hixl"])
    result = await peer.probe(seconds=0.2)
    assert (result.provider, result.failed) == ("hixl", 0)
    assert result.write.rate > 0 < result.read.rate
    await back(b)


async def test_one_probe_after_the_other(pair: tuple[Engine, Engine, Peer]) -> None:
    """The memory of the first may not be back yet when the second asks: it waits."""
    _, b, peer = pair
    for _ in range(3):
        assert (await peer.probe(seconds=0.1)).failed == 0
    await back(b)


async def test_both_probe_each_other(pair: tuple[Engine, Engine, Peer]) -> None:
    a, b, peer = pair
    other = await b.connect(a.address)
    results = await asyncio.gather(peer.probe(seconds=0.1), other.probe(seconds=0.1))
    assert [result.peer for result in results] == ["b", "a"]
    await back(a)
    await back(b)


async def test_failures_are_counted_and_measuring_goes_on(start: Start) -> None:
    plan = FaultPlan()
    for nth in range(20, 26):
        plan.fail(nth)
    a, b = await start("a", faults=plan), await start("b")
    result = await (await a.connect(b.address)).probe(seconds=0.2)
    assert result.failed == 6
    assert result.loss == pytest.approx(6 / result.transfers)
    assert result.failure is not None
    assert "to peer 'b'" in result.failure


async def test_a_path_that_carries_nothing_is_an_error(start: Start) -> None:
    plan = FaultPlan()
    for nth in range(1, 200):  # the first is the note that asks for memory
        plan.fail(nth)
    a, b = await start("a", faults=plan), await start("b")
    with pytest.raises(TransferError):
        await (await a.connect(b.address)).probe(seconds=0.2)


@pytest.mark.parametrize("seconds", [0, 0.09, 61, float("nan"), True, "1", None])
async def test_seconds_have_bounds(seconds: Any, pair: tuple[Engine, Engine, Peer]) -> None:
    with pytest.raises(ConfigError, match=r"seconds from 0\.1 to 60"):
        await pair[2].probe(seconds=seconds)


async def test_a_probe_is_cancelled(pair: tuple[Engine, Engine, Peer]) -> None:
    a, b, peer = pair
    events = a.events()
    task = asyncio.create_task(peer.probe(seconds=60))
    await until(lambda: b.scratch._loan is not None, "the loan")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await back(b)
    assert len(events) == 0
    assert (await peer.probe(seconds=0.1)).failed == 0


async def test_the_peer_ends_while_it_is_probed(start: Start) -> None:
    a, b = await start("a"), await start("b")
    task = asyncio.create_task((await a.connect(b.address)).probe(seconds=60))
    await until(lambda: b.scratch._loan is not None, "the loan")
    b.abort()
    with pytest.raises(PeerLostError):
        await task


async def test_this_side_ends_while_it_probes(start: Start) -> None:
    a, b = await start("a"), await start("b")
    task = asyncio.create_task((await a.connect(b.address)).probe(seconds=60))
    await until(lambda: b.scratch._loan is not None, "the loan")
    a.abort()
    with pytest.raises(aiohixl.HixlError):
        await task
    await back(b)


async def test_a_peer_that_is_lost_while_it_is_asked(
    pair: tuple[Engine, Engine, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error, and none that nobody retrieves."""
    a, _, peer = pair

    def ask(_: bytes) -> None:
        a.scratch.lost(peer)
        raise PeerLostError("gone")

    monkeypatch.setattr(peer, "note_probe", ask)
    monkeypatch.setattr(peer, "lost_error", lambda: PeerLostError("gone, too"))
    with pytest.raises(PeerLostError, match=r"^gone$"):
        await peer.probe(seconds=0.1)


# --- the memory that is lent


async def test_what_is_lent_is_not_listed(pair: tuple[Engine, Engine, Peer], start: Start) -> None:
    a, b, peer = pair
    third = await (await start("c")).connect(b.address)
    async with borrowed(a, peer) as region:
        assert region.nbytes == 4096
        assert peer.regions == third.regions == {}
    await back(b)


async def test_one_probe_at_a_time(pair: tuple[Engine, Engine, Peer], start: Start) -> None:
    a, b, peer = pair
    third = await (await start("c")).connect(b.address)
    async with borrowed(a, peer):
        with pytest.raises(RemoteAccessError, match=r"peer 'b'.*being probed by 'a' already; try again"):
            await third.probe(seconds=0.1)
    assert (await third.probe(seconds=0.1)).failed == 0


async def test_who_is_lost_lends_to_others_again(start: Start) -> None:
    a, b, c = await start("a"), await start("b"), await start("c")
    third = await c.connect(b.address)
    peer = await a.connect(b.address)

    async def end_with_it() -> None:
        async with borrowed(a, peer):
            a.abort()
            await peer.notify(b"")

    with pytest.raises(aiohixl.HixlError):
        await end_with_it()
    await until(lambda: "a" not in b.peers, "the loss of a")
    assert (await third.probe(seconds=0.1)).failed == 0


async def test_a_loan_runs_out(pair: tuple[Engine, Engine, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "LOAN_SECONDS", 0.3)
    with pytest.raises(RemoteAccessError, match="the owner does not allow it"):
        await pair[2].probe(seconds=60)
    await back(pair[1])


async def test_a_peer_without_memory(pair: tuple[Engine, Engine, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int, name: str) -> Any:
        raise RegionError(f"allocate: {nbytes} bytes asked for, 5 bytes of memory are available")

    monkeypatch.setattr(pair[1].scratch, "_allocate", refuse)
    with pytest.raises(RemoteAccessError, match=r"does not lend 67108864 bytes for it: .* 5 bytes of memory"):
        await pair[2].probe(seconds=0.1)


async def test_a_peer_that_does_not_answer(pair: tuple[Engine, Engine, Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(pair[1].scratch, "noted", lambda note: None)
    with pytest.raises(TransferTimeoutError, match=r"did not answer within 0\.05 s"):
        await pair[2].probe(seconds=0.1)


NONSENSE = [
    b"",
    b"\xff",
    b"[]",
    b"7",
    b'"lend"',
    b"{}",
    b'{"do": "lend"}',
    b'{"do": "lend", "id": 7, "nbytes": 4096}',
    b'{"do": "lend", "id": "a/b", "nbytes": 4096}',
    b'{"do": "lend", "id": "' + b"a" * 33 + b'", "nbytes": 4096}',
    b'{"do": ["lend"], "id": "a", "nbytes": 4096}',
    b'{"do": "dance", "id": "a"}',
    b'{"do": "lent", "id": "a"}',
    b'{"do": "return", "id": "a"}',
    b"[" * 50_000,
]


async def test_what_is_not_understood_is_left_alone(pair: tuple[Engine, Engine, Peer]) -> None:
    _, b, peer = pair
    for payload in NONSENSE:
        await peer.note_probe(payload)
        assert b.scratch._loan is None, payload
    assert b.stats()["notes_waiting"] == {}
    assert (await peer.probe(seconds=0.1)).failed == 0


@pytest.mark.parametrize("nbytes", [0, -1, scratch.SCRATCH_BYTES + 1, 1 << 70, True, None, "4096", 1.5])
async def test_no_more_is_lent_than_has_been_agreed(nbytes: Any, pair: tuple[Engine, Engine, Peer]) -> None:
    a, b, peer = pair
    with pytest.raises(RemoteAccessError, match="it lends up to 67108864 bytes"):
        async with a.scratch.borrowed(peer, nbytes, PATIENCE):
            raise AssertionError("it was lent")
    assert b.scratch._loan is None


async def test_a_flood_of_requests_keeps_little(pair: tuple[Engine, Engine, Peer]) -> None:
    """More than the credits for notes: they come back; and no more than a few answers and loans are kept for one."""
    a, b, peer = pair
    async with borrowed(a, peer):
        for i in range(600):
            await peer.note_probe(json.dumps({"do": "lend", "id": f"x{i}", "nbytes": 4096}).encode())
            assert b.scratch._waiting <= 4
            assert sum(b.scratch._answering.values()) <= 16
    for i in range(300):
        for do in ("lend", "return"):
            await peer.note_probe(json.dumps({"do": do, "id": f"y{i}", "nbytes": 4096}).encode())
        assert b.scratch._waiting <= 4
    await back(b)
    assert (await peer.probe(seconds=0.1)).failed == 0


async def test_the_topic_is_taken(pair: tuple[Engine, Engine, Peer]) -> None:
    with pytest.raises(ConfigError, match="engines use between themselves"):
        pair[2].notify(b"x", topic=scratch.PROBE_TOPIC)


# --- in words


def way(*rates: float) -> Way:
    sizes = zip(SIZES, rates, strict=False)
    return Way(Latency(21e-6, 95e-6, 700), tuple(Rate(nbytes, rate, 3) for nbytes, rate in sizes))


def result(**fields: Any) -> ProbeResult:
    values: dict[str, Any] = {
        "peer": "decode-0",
        "provider": "tcp",
        "reason": "another host",
        "write": way(50e6, 100e6, 118e6),
        "read": way(50e6),
        "transfers": 1500,
        "failed": 0,
        "failure": None,
        "segments": 10_000,
        "resent": 25,
        "elapsed": 1.9,
    }
    return ProbeResult(**{**values, **fields})


def test_a_report_for_people() -> None:
    text = Report(result(), load_model("llama-2-7b"), 4096, 200.0).render()
    assert "decode-0: by tcp (another host)" in text
    assert re.search(r"write to it +944 Mbit/s \(8 MiB\), 800 Mbit/s \(1 MiB\), 400 Mbit/s \(64 KiB\)", text)
    assert re.search(r"read from it +400 Mbit/s \(64 KiB\)", text)
    assert "median 21.0 µs, p99 95.0 µs of 700" in text
    assert re.search(r"failed +0 of 1,500 transfers\n", text)
    assert "25 of 10,000 TCP segments (0.25%)" in text
    assert "To move it over this path (944 Mbit/s) takes 18.2 s" in text


def test_a_slow_path_without_a_model_points_to_the_option() -> None:
    assert "Below 25 Gbit/s" in Report(result(), None, 4096, 200.0).render()
    fast = result(write=way(1e9, 2e9, 3e9, 4e9), segments=None, resent=None)
    text = Report(fast, None, 4096, 200.0).render()
    assert "Below 25 Gbit/s" not in text
    assert "sent again" not in text


def test_failures_are_told() -> None:
    text = Report(result(failed=15, failure="it broke"), None, 1, 1.0).render()
    assert "15 of 1,500 transfers (1.00%), the last one: it broke" in text


def test_a_report_as_json() -> None:
    out = json.loads(json.dumps(Report(result(), load_model("deepseek-v3"), 100, 50.0).as_dict()))
    assert out["ok"] is True
    assert out["slow"] is True
    assert out["advice"]["nbytes"] == 100 * 70272
    assert out["advice"]["move_seconds"] == pytest.approx(100 * 70272 / 118e6)
    assert out["advice"]["assumed_tflops"] == 50.0
    assert Report(result(), None, 1, 1.0).as_dict()["advice"] is None


# --- the command


async def command(*args: str, **environment: str) -> tuple[int, str, str]:
    """Its exit code, output and errors; the engines of the test run on meanwhile."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with subprocess.Popen(
            [sys.executable, "-m", "aiohixl", "probe", *args],
            stdout=out,
            stderr=err,
            env={**os.environ, **environment},
        ) as process:
            try:
                await until(lambda: process.poll() is not None, "the end of the command")
            finally:
                process.kill()
        out.seek(0)
        err.seek(0)
        return process.returncode, out.read(), err.read()


@pytest.mark.parametrize("transport", ["auto", "shm", "tcp"])
async def test_the_command_by_address(transport: str, start: Start) -> None:
    b = await start("b", address="127.0.0.1:0")
    more = ["--transport", transport, "--seconds", "0.2", "--json", "--model", "qwen2.5-7b", "--kv-dtype", "fp8"]
    code, out, err = await command(b.address, *more, "--tokens", "1000")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["ok"] is True
    assert found["provider"] == ("tcp" if transport == "tcp" else "shm")
    assert found["advice"]["nbytes"] == 1000 * 57344 // 2
    await back(b)


async def test_the_command_by_name(start: Start, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t0ken\n")
    async with serving("127.0.0.1", 0, "t0ken") as url:
        b = await start("b", rendezvous=url, token="t0ken")
        asked = ["b", "--rendezvous", url, "--token-file", str(tmp_path / "token"), "--seconds", "0.1"]
        code, out, err = await command(*asked)
        assert (code, err) == (0, "")
        assert out.startswith("b: by shm (")
        code, _, err = await command("b", "--rendezvous", url, "--token", "other")
        assert code == 1
        assert err.count("\n") == 1
        await b.close()


async def test_the_command_with_the_secret(start: Start, tmp_path: Path) -> None:
    b = await start("b", secret="s3cret")
    (tmp_path / "secret").write_text("s3cret\n")
    code, out, err = await command(b.address, "--seconds", "0.1", "--secret-file", str(tmp_path / "secret"))
    assert (code, err) == (0, "")
    assert out.startswith("b: by shm (")
    code, out, err = await command(b.address, "--seconds", "0.1", AIOHIXL_SECRET="s3cret")
    assert (code, err) == (0, "")
    code, out, err = await command(b.address, "--seconds", "0.1", "--json")
    assert code == 1
    assert err.startswith("aiohixl probe: ")
    assert err.count("\n") == 1
    assert json.loads(out) == {"ok": False, "error": err.removeprefix("aiohixl probe: ").strip()}


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ([], "PEER"),
        (["b", "--tokens", "0"], "'0' is not a number from 1"),
        (["b", "--tokens", "1.5"], "'1.5' is not a number from 1"),
        (["b", "--tflops", "0"], "'0' is not a number"),
        (["b", "--tflops", "nan"], "'nan' is not a number"),
        (["b", "--seconds", "61"], "from 0.1 to 60"),
        (["b", "--transport", "pigeon"], "pigeon"),
        (["b", "--kv-dtype", "fp4"], "fp4"),
        (["b", "--secret", "a", "--secret-file", "b"], "--secret-file"),
    ],
)
def test_wrong_usage(args: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["probe", *args])
    assert stopped.value.code == 2
    assert word in capsys.readouterr().err


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["probe", "nobody", "--model", "/nowhere/config.json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("aiohixl probe: model '/nowhere/config.json': neither")


async def test_a_peer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(aiohixl.PeerUnreachableError):
        await measure(Asked(f"unix://{tmp_path}/absent.sock"))
