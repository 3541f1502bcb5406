# SPDX-License-Identifier: Apache-2.0
"""Work on an NPU that a transfer has to wait for, as an event that HIXL's side of us can wait on.

torch_npu is never imported here: where it has not been imported yet, nobody computes with it in this process.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from aiohixl.errors import ConfigError

__all__ = ["Moment", "device_index", "moment"]


class Moment(NamedTuple):
    """A point in the work of an NPU. ``handle`` is its aclrtEvent; the event must live while somebody waits for it."""

    handle: int
    event: object


_NOTHING = Moment(0, None)


def moment(after: Any, device: str) -> Moment:
    """What `after` means for memory on `device`; None means all work that the current stream has been given so far."""
    if after is None:
        return _NOTHING if device == "cpu" else _current(device)
    handle = getattr(after, "npu_event", after)
    if isinstance(handle, bool) or not isinstance(handle, int) or not 0 <= handle < 1 << 64:
        raise ConfigError(
            f"after: a torch.npu.Event, the handle of one as an int, or None for the current stream, not {after!r}"
        )
    if handle == 0 and after is not handle:
        raise ConfigError(
            "after: this event was never recorded, so that there is nothing to wait for: record() it first"
        )
    return Moment(handle, after)


def _current(device: str) -> Moment:
    torch_npu: Any = sys.modules.get("torch_npu")
    if torch_npu is None:
        return _NOTHING
    event = torch_npu.npu.Event()
    event.record(torch_npu.npu.current_stream(device_index(device)))
    return Moment(int(event.npu_event), event)


def device_index(device: str) -> int:
    """3 for ``npu:3``."""
    return int(device.removeprefix("npu:"))
