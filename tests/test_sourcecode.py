# SPDX-License-Identifier: Apache-2.0
"""Rules about the sources that no compiler or linter holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("aiohixl", "_native", "tests", "benchmarks", "examples")
SUFFIXES = {".py", ".pyi", ".pyx", ".pxd", ".c", ".cc", ".h", ".toml"}
GENERATED = {"_core.c"}

SPDX = re.compile(r"^(# |/\* |// )SPDX-License-Identifier: Apache-2\.0( \*/)?$")
# In pieces, so that this file does not break its own rule.
LATER = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK"]) + r")\b")


def sources(root: Path) -> Iterator[Path]:
    """Every source file that a person wrote."""
    found = [path for folder in FOLDERS for path in (root / folder).rglob("*")]
    found += root.iterdir()
    for path in sorted(found):
        if path.suffix in SUFFIXES and path.name not in GENERATED and path.is_file():
            yield path


def native(root: Path, *suffixes: str) -> Iterator[Path]:
    return (path for path in sources(root) if path.parent.name == "_native" and path.suffix in suffixes)


def matching(paths: Iterator[Path], pattern: str | re.Pattern[str]) -> list[str]:
    """``path:line: text`` for every line that matches."""
    return [
        f"{path}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(pattern, line)
    ]


def c_that_knows_python(root: Path) -> list[str]:
    return matching(native(root, ".c", ".cc", ".h"), r"\bPython\.h\b|\bPyObject\b|\bPy[A-Z]\w+_\w+\s*\(")


def native_threads_that_take_the_gil(root: Path) -> list[str]:
    return matching(native(root, ".c", ".cc", ".h", ".pyx", ".pxd"), r"\bwith\s+gil\b|\bPyGILState")


def without_licence(root: Path) -> list[str]:
    offenders = []
    for path in sources(root):
        lines = path.read_text(encoding="utf-8").splitlines()
        if lines and lines[0].startswith("#!"):
            lines = lines[1:]
        if not lines or not SPDX.match(lines[0]):
            offenders.append(str(path))
    return offenders


def left_for_later(root: Path) -> list[str]:
    return matching(sources(root), LATER)


RULES: list[tuple[Callable[[Path], list[str]], str, str]] = [
    (c_that_knows_python, "_native/x.c", "#include <Python.h>"),
    (c_that_knows_python, "_native/x.h", "void keep(PyObject *owner);"),
    (c_that_knows_python, "_native/x.c", "    PyErr_SetNone(error);"),
    (native_threads_that_take_the_gil, "_native/x.pyx", "cdef void ring() noexcept with gil:"),
    (native_threads_that_take_the_gil, "_native/x.pxd", "    PyGILState_STATE PyGILState_Ensure()"),
    (without_licence, "aiohixl/x.py", "import os"),
    (without_licence, "tests/x.py", ""),
    (left_for_later, "_native/x.c", "/* " + "TO" + "DO: later */"),
    (left_for_later, "aiohixl/rendezvous/x.py", "# " + "FIX" + "ME"),
]


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _, _ in RULES))
def test_sources_keep_the_rule(rule: Callable[[Path], list[str]]) -> None:
    assert rule(ROOT) == []


@pytest.mark.parametrize(("rule", "name", "text"), RULES)
def test_rule_sees_an_offence(rule: Callable[[Path], list[str]], name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    assert len(rule(tmp_path)) == 1
    assert str(path) in rule(tmp_path)[0]


def test_the_sources_are_where_the_rules_look() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in sources(ROOT)}
    assert {"aiohixl/__init__.py", "_native/hx.h", "_native/_core.pyx", "tests/test_sourcecode.py"} <= names
