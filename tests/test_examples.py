# SPDX-License-Identifier: Apache-2.0
"""The examples are run as a user runs them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TIMEOUT = 60.0


@contextlib.contextmanager
def running(*args: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    process = subprocess.Popen([sys.executable, *args], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        try:
            yield process, process.stdout
        finally:
            process.kill()


def run(name: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_quickstart() -> None:
    assert run("quickstart.py") == "1048576 bytes by shm, arrived: True\n"


def test_prefill_and_decode() -> None:
    with running("-m", "aiohixl.cli", "rendezvous", "--port", "0") as (_, said):
        url = said.readline().split()[-1]
        with running(str(EXAMPLES / "decode.py"), url) as (decode, heard):
            assert heard.readline() == "waiting for a note\n"
            sent = run("prefill.py", url)
            received = heard.readline()
            assert decode.wait(TIMEOUT) == 0
    # 3 blocks of 16 x 8 x 64 elements; the layers hold 1 and 2, 2 and 3, 3 and 4, 4 and 5.
    total = 3 * 16 * 8 * 64 * 24
    assert sent == f"req-42: sent, sum {total}\n"
    assert received == f"req-42: blocks [17, 4, 40], sum {total}\n"
