# SPDX-License-Identifier: Apache-2.0
"""The ports of this machine's RDMA devices, as `aiohixl doctor` lists them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from aiohixl.verbs import BINDING

__all__ = ["Port", "ports"]

_SYSFS = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Port:
    """``usable``: a transport could be opened on it. Sizes in bytes; ``gid`` is the one that would be chosen."""

    device: str
    port: int
    state: str
    usable: bool
    speed: str
    mtu: int
    max_mtu: int
    gid_index: int | None
    gid: str

    def __str__(self) -> str:
        gid = f"GID {self.gid_index} {self.gid}" if self.gid_index is not None else "no GID"
        return f"{self.state}, {self.speed}, MTU {self.mtu} of {self.max_mtu}, {gid}"


def ports() -> list[Port]:
    """None where this build has no binding, or the library finds no device."""
    if not BINDING.exists():
        return []
    from aiohixl import _core  # here, where its absence is answered

    found = []
    for device, port, state, usable, mtu, max_mtu, index, gid in _core.verbs_ports(os.fsencode(BINDING)):
        known = index if index >= 0 else None
        found.append(Port(device, port, state, usable, _speed(device, port), mtu, max_mtu, known, gid))
    return found


def _speed(device: str, port: int) -> str:
    # The kernel knows the names of all speeds; the library has numbers, to which new ones are added.
    try:
        return (_SYSFS / device / "ports" / str(port) / "rate").read_text().strip()
    except OSError:
        return "speed unknown"
