# SPDX-License-Identifier: Apache-2.0
"""What an engine needs to know of RDMA devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohixl.errors import ConfigError
from aiohixl.hixl import check_busy_poll, check_whole

__all__ = ["BINDING", "OPTIONS", "VerbsConfig"]

#: The shared object that calls libibverbs; built where its headers are.
BINDING = Path(__file__).with_name("_provider_verbs.so")
#: Of this transport alone, and those that mean the same with HIXL.
OPTIONS = ("verbs_device", "verbs_gid_index", "verbs_timeout")
SHARED = ("traffic_class", "service_level", "busy_poll")
_DEVICE_BYTES = 63
#: An attempt to get an answer is given 4.096 us x 2^n, n from 1 to 31 (InfiniBand Architecture Specification, Local ACK
#: Timeout); a transfer fails after the last of seven. A device may take up to four times as long.
_ATTEMPT, _ATTEMPTS = 4.096e-6, 7
_TIMEOUT, _MAX_TIMEOUT = 0.5, 60.0


@dataclass(frozen=True, slots=True)
class VerbsConfig:
    """None stands for: choose."""

    device: str | None
    gid_index: int | None
    #: n of the formula above.
    timeout: int
    service_level: int
    traffic_class: int

    @classmethod
    def build(cls, given: dict[str, Any]) -> VerbsConfig:
        device, index = given.get("verbs_device"), given.get("verbs_gid_index")
        if device is not None and not (
            isinstance(device, str) and device.isascii() and device.isprintable() and 0 < len(device) <= _DEVICE_BYTES
        ):
            raise ConfigError(f"verbs_device: the name of an RDMA device, such as 'mlx5_0' or 'rxe0', not {device!r}")
        if index is not None:
            check_whole("verbs_gid_index", index, 0, 255)
        check_busy_poll(given.get("busy_poll", 0.0))
        return cls(
            device,
            index,
            _exponent(given.get("verbs_timeout", _TIMEOUT)),
            check_whole("service_level", given.get("service_level", 0), 0, 7),
            check_whole("traffic_class", given.get("traffic_class", 0), 0, 255),
        )


def _exponent(timeout: object) -> int:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0.001 <= timeout <= _MAX_TIMEOUT:
        raise ConfigError(f"verbs_timeout: seconds from 0.001 to {_MAX_TIMEOUT:g}, not {timeout!r}")
    return max(1, int(math.log2(timeout / _ATTEMPTS / _ATTEMPT)))
