# SPDX-License-Identifier: Apache-2.0
"""How the benchmarks of the transports show their figures, and against which goals."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any


def show(
    figures: Mapping[str, float],
    targets: Mapping[str, tuple[float, bool]],
    *,
    as_json: bool,
    note: str = "",
    **given: Any,
) -> int:
    """Print them, and answer 1 if a goal is missed; `targets`: the bound, and whether more is better.

    note: a line before the figures; given: what else the JSON says of how they were measured.
    """
    missed = [
        name
        for name, (bound, more) in targets.items()
        if name in figures and (figures[name] < bound if more else figures[name] > bound)
    ]
    if as_json:
        print(json.dumps({**given, **figures, "missed": missed}, indent=1))
        return 1 if missed else 0
    versions = f"Python {platform.python_version()}, uvloop {version('uvloop')}"
    print(f"{platform.platform()}, {os.cpu_count()} cores, {versions}")
    if note:
        print(note)
    for name, value in figures.items():
        bound = targets.get(name)
        goal = "" if bound is None else f"   (goal {'>=' if bound[1] else '<='} {bound[0]:g})"
        print(f"  {name:52} {value:10.3f}{goal}")
    if missed:
        print("missed:", ", ".join(missed))
    return 1 if missed else 0
