# SPDX-License-Identifier: Apache-2.0
"""Copies between a region and memory of the caller's, off the loop wherever they take long."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

from aiohixl import _core
from aiohixl.buffers import BufferInfo, inspect_buffer
from aiohixl.completion import CompletionQueue, Record
from aiohixl.errors import RegionError, make_error
from aiohixl.hixl import code_in
from aiohixl.offloop import in_thread, outlive

__all__ = ["Copy", "copy", "fresh_bytes", "host_buffer"]

#: Bytes of host memory that are copied on the loop, as a post copies them.
INLINE = 32768


class Copy:
    """Waits for the native side's answer to a copy to or from an NPU."""

    def __init__(self, future: asyncio.Future[None], what: str, keep: object) -> None:
        self.future = future
        self.what = what
        self.keep = keep  # both memories, while the native side may touch them

    def settle(self, record: Record) -> None:
        raise AssertionError("a copy is answered by an event")

    def answered(self, status: str, text: str) -> None:
        if self.future.done():
            return
        if status == "OK":
            self.future.set_result(None)
            return
        data: dict[str, Any] = {"code": code_in(text), "detail": text} if status == "PROVIDER" else {}
        self.future.set_exception(make_error(status, f"{self.what}: {text or status.lower()}", **data))

    def close(self, status: str) -> None:
        """The engine has ended without an answer."""
        self.answered(status, "the engine was closed")


def host_buffer(buffer: object, what: str, *, writable: bool) -> BufferInfo:
    """The memory of one side of a copy."""
    info = inspect_buffer(buffer, writable=writable)
    if info.device != "cpu":
        raise RegionError(f"{what}: memory of this host, not a buffer on {info.device!r}; register that one instead")
    if not info.contiguous:
        raise RegionError(f"{what}: contiguous memory, not {info.describe()}; pass a contiguous copy")
    return info


def fresh_bytes(nbytes: int) -> bytes | bytearray:
    """Memory to fill, for which ``bytes()`` gives the result without copying much of it on the loop."""
    # A large bytes object is new and nobody else has seen it, so that it can be filled; a small one may be shared.
    return bytes(nbytes) if nbytes > INLINE else bytearray(nbytes)


async def copy(
    region: _core.Region, queue: CompletionQueue, what: str, offset: int, host: BufferInfo, up: bool
) -> None:
    """Copy all of `host` to (`up`) or from `region` at `offset`. Returns, or raises, when the copy has ended.

    A cancellation waits for that too: until then the caller's memory is in use.
    """
    if region.kind == _core.KIND_DEVICE:
        await _device_copy(region, queue, what, offset, host, up)
        return
    here, there = region.addr + offset, host.addr
    target, source = (here, there) if up else (there, here)
    if host.nbytes <= INLINE:
        ctypes.memmove(target, source, host.nbytes)
    else:

        def move(keep: object = (region, host)) -> None:
            ctypes.memmove(target, source, host.nbytes)

        await outlive(in_thread(queue.loop, move))


async def _device_copy(
    region: _core.Region, queue: CompletionQueue, what: str, offset: int, host: BufferInfo, up: bool
) -> None:
    waiting = Copy(queue.loop.create_future(), what, (region, host))
    token = queue.new_token()
    queue.expect(token, waiting)
    try:
        region._copy(token, offset, host.addr, host.nbytes, up)
    except _core.StatusError as exc:
        queue.forget(token)
        raise make_error(queue.statuses[exc.status], f"{what} was not possible") from None
    await outlive(waiting.future)
