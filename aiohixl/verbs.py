# SPDX-License-Identifier: Apache-2.0
"""What an engine needs to know of RDMA devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohixl.errors import ConfigError

__all__ = ["BINDING", "OPTIONS", "VerbsConfig"]

#: The shared object that calls libibverbs; built where its headers are.
BINDING = Path(__file__).with_name("_provider_verbs.so")
OPTIONS = ("verbs_device", "verbs_gid_index")
_DEVICE_BYTES = 63


@dataclass(frozen=True, slots=True)
class VerbsConfig:
    """None stands for: choose."""

    device: str | None
    gid_index: int | None

    @classmethod
    def build(cls, given: dict[str, Any]) -> VerbsConfig:
        device, index = given.get("verbs_device"), given.get("verbs_gid_index")
        if device is not None and not (
            isinstance(device, str) and device.isascii() and device.isprintable() and 0 < len(device) <= _DEVICE_BYTES
        ):
            raise ConfigError(f"verbs_device: the name of an RDMA device, such as 'mlx5_0' or 'rxe0', not {device!r}")
        if index is not None and (isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < 256):
            raise ConfigError(f"verbs_gid_index: a whole number from 0 to 255, not {index!r}")
        return cls(device, index)
