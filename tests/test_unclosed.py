# SPDX-License-Identifier: Apache-2.0
"""Contract 13: an engine's socket files, and engines and processes that end without a close."""

from __future__ import annotations

import asyncio
import gc
import os
import stat
import time
import warnings
from pathlib import Path

import pytest
from conftest import native_threads
from processes import child, run_python

import aiohixl


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this test's sockets, and nobody else's."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "aiohixl"


async def test_contract_13_socket_files_come_and_go(home: Path) -> None:
    async with aiohixl.Engine("a") as engine:
        path = Path(engine.address.removeprefix("unix://"))
        assert path.parent == home
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert {p.suffix for p in home.iterdir()} == {".sock", ".lock"}
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("wrong", ["mode", "file", "link"])
async def test_contract_13_a_directory_that_others_can_enter_is_not_used(home: Path, wrong: str) -> None:
    if wrong == "file":
        home.touch()
    elif wrong == "link":
        (home.parent / "real").mkdir(mode=0o700)
        home.symlink_to(home.parent / "real")
    else:
        home.mkdir()
        home.chmod(0o755)
    async with aiohixl.Engine("a") as engine:
        assert not engine.address.startswith(f"unix://{home}/")
        assert stat.S_IMODE(Path(engine.address.removeprefix("unix://")).parent.stat().st_mode) == 0o700


async def test_contract_13_files_of_a_killed_process_are_swept(home: Path) -> None:
    async with child("killed") as killed, child("alive") as alive:
        paths = [Path(c.address.removeprefix("unix://")) for c in (killed, alive)]
        killed.kill()
        killed.process.wait()
        long_ago = time.time() - 3600
        for lock in home.glob("*.lock"):
            os.utime(lock, (long_ago, long_ago))
        assert all(path.exists() for path in paths)
        async with aiohixl.Engine("a") as engine:
            assert not paths[0].exists()
            assert not paths[0].with_suffix(".lock").exists()
            await (await engine.connect(alive.address)).notify(b"not swept: it lives")
            assert len(list(home.iterdir())) == 4


# ---- processes and objects that end without a close ----

PROGRAM = """
import asyncio, sys
import numpy as np
import aiohixl

async def main():
    global a, b, peer, pending
    a, b = await aiohixl.Engine("a").start(), await aiohixl.Engine("b").start()
    await b.allocate(1 << 24, "target")
    peer = await a.connect(b.address)
    remote = await peer.region("target")
    pending = [peer.write(a.register(np.ones(1 << 24, np.uint8)), remote) for _ in range(8)]
    if sys.argv[1] == "raise":
        raise SystemExit(0)

loop = asyncio.new_event_loop()
loop.run_until_complete(main())
if sys.argv[1] == "loop-closed":
    loop.close()
if sys.argv[1] == "dropped":
    import gc
    loop.close()
    del a, b, peer, pending, loop
    gc.collect()
"""


@pytest.mark.parametrize("flags", [(), ("-X", "dev")], ids=["plain", "dev"])
@pytest.mark.parametrize("how", ["open", "loop-closed", "dropped", "raise"])
def test_contract_13_a_process_that_never_closes_ends_quietly(how: str, flags: tuple[str, ...], home: Path) -> None:
    done = run_python(PROGRAM, how, flags=flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    if not flags:
        assert done.stderr == ""
        return
    complaints = [line for line in done.stderr.splitlines() if "Warning" in line or "rror" in line]
    assert all("ResourceWarning" in line for line in complaints), done.stderr
    if how == "dropped":
        assert sum("was never closed" in line for line in complaints) == 2


def test_contract_13_an_engine_that_is_dropped_warns_and_is_gone(home: Path) -> None:
    loop = asyncio.new_event_loop()
    engine = aiohixl.Engine("dropped")
    loop.run_until_complete(engine.start())
    loop.close()
    assert len(list(home.iterdir())) == 2
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        del engine
        gc.collect()
    said = [str(w.message) for w in seen if w.category is ResourceWarning]
    assert len(said) == 1
    assert "<Engine 'dropped'" in said[0]
    assert "was never closed" in said[0]
    seen.clear()  # a warning keeps what it is about
    gc.collect()
    assert native_threads() == set()
    assert list(home.iterdir()) == []
