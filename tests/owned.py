# SPDX-License-Identifier: Apache-2.0
"""Memory of both kinds, and what taking it back says."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import numpy as np
import numpy.typing as npt

import aiohixl

NEW = 0xEE  # what an owner writes once the memory is its own again; no peer ever sends it


def view(region: Any) -> npt.NDArray[np.uint8]:
    return np.frombuffer(region, np.uint8)


async def make(engine: aiohixl.Engine, memory: str, nbytes: int, name: str) -> aiohixl.Region:
    if memory == "allocated":
        return await engine.allocate(nbytes, name)
    return engine.register(np.zeros(nbytes, np.uint8), name)


async def pinned(taking_back: Coroutine[Any, Any, None]) -> aiohixl.RegionPinnedError | None:
    try:
        await taking_back
    except aiohixl.RegionPinnedError as exc:
        return exc
    return None
