# SPDX-License-Identifier: Apache-2.0
"""HIXL's library: found, missing, too old, of either string ABI; and what the binding wants of it.

In processes of their own: a process opens it once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from far import npu_child
from processes import PATIENCE
from standin import HOME, LIBRARY, Standin, StartNpu, noise, npu_region, open_standin

import aiohixl
from aiohixl.hixl import BINDING

LIBRARIES = ("libmetadef.so", "libacl_rt.so", "libcann_hixl.so")
OPEN = """
import asyncio, sys, aiohixl

async def main():
    for library in sys.argv[1:]:
        try:
            async with aiohixl.Engine("x", transports=["hixl"], hixl_library=library or None) as engine:
                region = await engine.allocate(4096, device="npu")
                await region.upload(b"there")
                print("bytes", (await region.download(0, 5)).decode())
        except aiohixl.ConfigError as exc:
            print("ConfigError", exc)

asyncio.run(main())
"""


def run(*arguments: str, **environment: str) -> str:
    open_standin()
    unset = ("ASCEND_HOME_PATH", "LD_LIBRARY_PATH", "HIXL_STANDIN")
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**{k: v for k, v in os.environ.items() if k not in unset}, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def opened(library: str | Path = "", *more: str, **environment: str) -> str:
    return run("-c", OPEN, str(library), *more, **environment)


def some_of(tmp_path: Path, *names: str) -> Path:
    open_standin()
    for name in names:
        shutil.copy(LIBRARY / name, tmp_path / name)
    return tmp_path


# ---- where it is found ----


def test_by_the_environment_of_cann() -> None:
    assert opened(ASCEND_HOME_PATH=str(HOME)) == "bytes there\n"


def test_by_the_loaders_path(tmp_path: Path) -> None:
    assert opened(LD_LIBRARY_PATH=str(LIBRARY)) == "bytes there\n"
    assert opened(LD_LIBRARY_PATH=str(LIBRARY), ASCEND_HOME_PATH=str(tmp_path)) == "bytes there\n", "left over"


def test_by_directory_and_by_file() -> None:
    assert opened(LIBRARY) == opened(LIBRARY / "libcann_hixl.so") == "bytes there\n"


def test_a_process_has_one(tmp_path: Path) -> None:
    other = some_of(tmp_path, *LIBRARIES)
    lines = opened(LIBRARY, str(LIBRARY), str(other), "").splitlines()
    assert lines[:2] == ["bytes there"] * 2
    assert re.search(rf"ConfigError .*{other}.*this process has opened {LIBRARY}", lines[2])
    assert lines[3] == "bytes there"


# ---- what is missing ----


@pytest.mark.parametrize("count", range(3))
def test_a_library_that_is_missing(tmp_path: Path, count: int) -> None:
    directory = some_of(tmp_path, *LIBRARIES[:count])
    said = opened(directory)
    assert re.match(rf"ConfigError engine 'x': .*{re.escape(LIBRARIES[count])}.*{directory}.*CANN", said), said
    said = opened()
    assert re.match(r"ConfigError engine 'x': .*libmetadef\.so.*ASCEND_HOME_PATH.*CANN", said), said


def test_no_such_place(tmp_path: Path) -> None:
    assert "there is no such file or directory" in opened(tmp_path / "none")


def test_a_library_that_is_too_old(tmp_path: Path) -> None:
    """It has none of HIXL's symbols."""
    directory = some_of(tmp_path, *LIBRARIES[:2])
    shutil.copy(LIBRARY / "libmetadef.so", directory / "libcann_hixl.so")
    said = opened(directory)
    assert re.match(rf"ConfigError engine 'x': .*{directory}.*too old, or not HIXL.*_ZN4hixl.*CANN", said) or re.match(
        r"ConfigError engine 'x': .*libcann_hixl\.so is too old, or not HIXL.*_ZN4hixl.*CANN", said
    ), said
    shutil.copy(LIBRARY / "libmetadef.so", directory / "libacl_rt.so")
    shutil.copy(LIBRARY / "libcann_hixl.so", directory / "libcann_hixl.so")
    said = opened(directory)
    assert re.match(r"ConfigError engine 'x': .*lib(acl_rt|cann_hixl)\.so", said), said


def test_what_is_no_library(tmp_path: Path) -> None:
    directory = some_of(tmp_path, *LIBRARIES)
    (directory / "libcann_hixl.so").write_text("no library at all")
    assert re.match(r"ConfigError engine 'x': .*libcann_hixl\.so.*CANN", opened(directory))


def test_the_doctor_says_which_one() -> None:
    found = run("-m", "aiohixl", "doctor", ASCEND_HOME_PATH=str(HOME))
    assert re.search(rf"hixl +.*{LIBRARY}", found), found
    missing = run("-m", "aiohixl", "doctor")
    assert re.search(r"hixl .*libmetadef\.so", missing), missing
    assert "CANN" in missing


# ---- the string ABI ----


@pytest.mark.parametrize("abi", ["lib64", "abi1/lib64"])
async def test_either_string_abi(standin: Standin, start_npu: StartNpu, abi: str) -> None:
    """The peer's library is built with one or the other; the binding is the same."""
    a = await start_npu("a")
    source = await npu_region(a, 1 << 20, fill=noise(1 << 20))
    async with npu_child(hixl_library=str(HOME / abi), hixl_options={"RdmaTrafficClass": "8"}) as other:
        await other.ask("make", kind="npu", name="t", nbytes=1 << 20)
        await other.ask("make", kind="npu", name="fives", nbytes=1 << 20, fill=5)
        peer = await a.connect(other.address)
        await peer.write(source, await peer.region("t"), note=b"there")
        assert await other.ask("notes", count=1) == ["there"]
        back = await npu_region(a, 1 << 20)
        await peer.read(back, await peer.region("t"))
        assert await back.download() == noise(1 << 20).tobytes()
        await other.ask("connect", address=a.address)
        await npu_region(a, 1 << 20, "mine")
        assert await other.ask("transfer", kind="write", local="fives", remote="mine") == ""
        await other.ask("knobs", knobs={"fail_nth": 0, "err_msg": "as it says"})
        assert await other.ask("transfer", kind="write", local="fives", remote="mine") == "ProviderError"
        raw = await a.connect_raw(await other.ask("hixl_address"), regions={})
        await raw.notify("a message longer than what fits into a short string", "and its name, which is long as well")
        assert await other.ask("hixl_notify") == [
            "and its name, which is long as well",
            "a message longer than what fits into a short string",
        ]


# ---- what the binding wants ----


def test_the_bindings_symbols() -> None:
    """None but those that HIXL is known to have, and the C and C++ runtime's."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not there: apt-get install binutils")
    listed = {
        line
        for line in (Path(__file__).parent / "hixl" / "symbols.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    out = subprocess.run([nm, "-D", "--undefined-only", str(BINDING)], capture_output=True, text=True, check=True)
    wanted, runtime = set(), []
    for line in out.stdout.splitlines():
        kind, name = line.split()
        if kind == "w":  # weak: may be missing
            continue
        symbol, _, version = name.partition("@")
        if version:
            runtime.append(version.lstrip("@"))
        else:
            wanted.add(symbol)
    assert all(re.match(r"(GLIBC|GLIBCXX|CXXABI|GCC)_", version) for version in runtime), runtime
    assert wanted <= listed
    assert len(wanted) > 10
    assert not any("TransferSync" in symbol for symbol in wanted)


def test_the_core_wants_nothing_of_hixl() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not there: apt-get install binutils")
    core = str(aiohixl._core.__file__)
    out = subprocess.run([nm, "-D", "--undefined-only", core], capture_output=True, text=True, check=True).stdout
    assert "hixl" not in out
    assert "aclrt" not in out
