# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: one frame to bytes, and bytes in any pieces to frames."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["KEEP_ALIVE", "Frame", "FrameParser", "encode_frame"]

KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class Frame:
    event: str
    data: bytes
    id: str


def encode_frame(frame: Frame) -> bytes:
    """`data` is compact JSON and so has no line break in it."""
    head = f"id: {frame.id}\nevent: {frame.event}\ndata: ".encode()
    return head + frame.data + b"\n\n"


class FrameParser:
    """Feed it what arrives; it yields whole frames. A frame beyond `limit` bytes is a ValueError."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = bytearray()
        self._event, self._id = b"", b""
        self._data: list[bytes] = []
        self._held = 0

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        start = len(self._rest)
        self._rest += chunk
        begin = 0
        # Look for the end of the line in the new bytes only, so that a long line costs linear time.
        while (end := self._rest.find(b"\n", max(start, begin))) >= 0:
            frame = self._line(bytes(self._rest[begin:end]).rstrip(b"\r"))
            begin = end + 1
            if frame is not None:
                yield frame
        del self._rest[:begin]
        if self._held + len(self._rest) > self._limit:
            raise ValueError(f"an event of more than {self._limit} bytes")

    def _line(self, line: bytes) -> Frame | None:
        if not line:
            frame = Frame(self._event.decode(), b"\n".join(self._data), self._id.decode())
            complete = bool(self._data)
            self._event, self._data, self._held = b"", [], 0
            return frame if complete else None
        key, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if key == b"data":
            self._held += len(value) + 1
            if self._held > self._limit:
                raise ValueError(f"an event of more than {self._limit} bytes")
            self._data.append(value)
        elif key == b"event":
            self._event = value
        elif key == b"id":
            self._id = value
        return None
