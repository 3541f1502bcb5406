# SPDX-License-Identifier: Apache-2.0
"""Which transport carries the demo's bytes, what its engines are told, and whether an NPU is behind it.

``python -m aiohixl.demo.transport`` is the role that opens HIXL once, before
any model is loaded, to say what was found or what is missing.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohixl.demo.child import Child, run_role

__all__ = ["STAND_IN", "Carrier", "loaded_library"]

#: A symbol that the stand-in exports, and Huawei's library does not.
_MARK = "hixl_standin_stat"
STAND_IN = "the stand-in, which copies host memory: no figure here is an NPU's"


@dataclass(frozen=True)
class Carrier:
    """What the user chose: ``shm``, or ``hixl`` with the library, or None for wherever CANN is."""

    name: str = "shm"
    library: str | None = None

    def options(self, npu_id: int) -> dict[str, Any]:
        """Those of `aiohixl.Engine`; two engines of one machine have an NPU each."""
        if self.name != "hixl":
            return {"transports": [self.name]}
        library = {} if self.library is None else {"hixl_library": self.library}
        return {"transports": ["hixl"], "npu_id": npu_id, **library}

    @property
    def device(self) -> str:
        """Where the cache is."""
        return "npu" if self.name == "hixl" else "cpu"


def loaded_library() -> dict[str, Any]:
    """The libcann_hixl.so that this process has opened, and whether it is the stand-in; empty without one."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/") :]
        if path.endswith("/libcann_hixl.so"):
            return {"library": path, "stand_in": hasattr(ctypes.CDLL(path), _MARK)}
    return {}


async def main(child: Child) -> None:
    from aiohixl import Engine

    async with Engine(child.name, **child.config["engine"]):
        child.send("result", **loaded_library())


if __name__ == "__main__":
    run_role("transport", main)
