# SPDX-License-Identifier: Apache-2.0
"""Memory: registered here (`Region`), announced by a peer (`RemoteRegion`), and slices of either (`Span`)."""

from __future__ import annotations

import asyncio
import operator
import os
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from aiohixl import _core
from aiohixl.completion import CompletionQueue, Record, wake
from aiohixl.copies import copy, fresh_bytes, host_buffer
from aiohixl.errors import RegionError, RegionPinnedError, make_error, with_data

__all__ = ["ACCESS", "Region", "RemoteRegion", "Span"]

ACCESS = {"r": _core.ACCESS_READ, "w": _core.ACCESS_WRITE, "rw": _core.ACCESS_READ | _core.ACCESS_WRITE}
Spans = Iterable["Span | tuple[int, int]"]


class Span(_core.Extent):
    """``nbytes`` bytes from ``offset`` of a region, inside it by construction. Slices to smaller spans."""

    __slots__ = ()

    target: Region | RemoteRegion

    def __init__(self, target: Region | RemoteRegion, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > target.nbytes:
            raise RegionError(
                f"span of {nbytes} bytes at offset {offset} is outside {target!r}, which has {target.nbytes} bytes"
            )
        self.target = target
        self.offset = offset
        self.nbytes = nbytes

    def __getitem__(self, key: slice) -> Span:
        start, stop = _bounds(key, self.nbytes, self)
        return Span(self.target, self.offset + start, stop - start)

    def __len__(self) -> int:
        return self.nbytes

    def __repr__(self) -> str:
        return f"<Span [{self.offset}:{self.offset + self.nbytes}] of {self.target!r}>"


def whole_number(value: Any) -> int | None:
    """`value` as an int, numpy's integers included; None for anything else, bools too."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _bounds(key: object, nbytes: int, what: object) -> tuple[int, int]:
    # Not Python's clamping: a slice that reaches past the end is a mistake in an address, not a wish for less.
    if not isinstance(key, slice) or key.step not in (None, 1):
        raise RegionError(f"{what!r} slices as [start:stop] in bytes, without a step, not by {key!r}")
    start = 0 if key.start is None else whole_number(key.start)
    stop = nbytes if key.stop is None else whole_number(key.stop)
    if start is None or stop is None or not 0 <= start <= stop <= nbytes:
        raise RegionError(f"[{key.start}:{key.stop}] is outside {what!r}, which has {nbytes} bytes")
    return start, stop


class Host(Protocol):
    """What a region needs of its engine."""

    @property
    def queue(self) -> CompletionQueue: ...
    def check(self) -> None: ...
    def incarnation_of(self, peer: Any) -> bytes: ...
    def region_quarantined(self, region: Region, spans: tuple[tuple[int, int], ...], detail: str) -> None: ...
    def region_released(self, region: Region, spans: tuple[tuple[int, int], ...]) -> None: ...
    def region_unnamed(self, region: Region) -> None: ...
    def region_gone(self, region: Region) -> None: ...


class Region(_core.Region):
    """Registered memory of this engine. Made by `allocate`, `register` and `register_many`.

    It speaks the buffer protocol (``numpy.frombuffer(region, numpy.uint8)`` is its bytes; ``torch.frombuffer``; for
    type checkers write ``memoryview(region)``) and slices to a `Span`. An NPU's memory has no bytes that the CPU could
    look at: there it raises `BufferError`, and `upload` and `download` copy.
    Awaiting it waits until it is usable and gives it back; a transfer that uses it waits by itself.
    """

    def __new__(
        cls, host: Host, core: _core.Engine, *, name: str, access: str, place: str = "cpu", **native: Any
    ) -> Region:
        # Nobody hears of a region without a name, so nobody else is to reach it: not even by a key that is guessed.
        bits = ACCESS[access] if name else 0
        return super().__new__(cls, core, access=bits, device=place != "cpu", **native)

    def __init__(
        self, host: Host, core: _core.Engine, *, name: str, access: str, place: str = "cpu", **native: Any
    ) -> None:
        self.name = name
        self.access = access
        #: Where its memory is: ``cpu``, or ``npu:0`` and so on.
        self.device = place
        self._host = host
        self._ready = self.is_ready
        self._error: RegionError | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._quarantine = {}
        self._leaving: Answer | None = None
        #: Its memory cannot be written, not even by us: nothing is read into it.
        self.readonly = False

    def __repr__(self) -> str:
        where = "" if self.device == "cpu" else f" on {self.device}"
        return f"<Region {self.name!r} {self.nbytes} bytes{where}{' deregistered' if self.deregistered else ''}>"

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, key: slice) -> Span:
        start, stop = _bounds(key, self.nbytes, self)
        return Span(self, start, stop - start)

    def __await__(self) -> Generator[Any, Any, Region]:
        while not self._ready and self._error is None:
            yield from self._host.queue.waiter(self._waiters).__await__()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self

    @property
    def deregistered(self) -> bool:
        """Whether `deregister` was called."""
        return self._leaving is not None

    @property
    def ready(self) -> bool:
        """Whether transfers can use it without waiting."""
        return self._ready

    def became_ready(self, status: int, sys_errno: int, reason: str) -> None:
        """`reason`: why not, from a transport that could not take it."""
        if status:
            why = reason or f"{os.strerror(sys_errno)}; allocate less, or free memory first"
            self._error = RegionError(f"{self!r} could not be set up: {why}")
        self._ready = not status
        wake(self._waiters)

    # ---- its bytes, wherever they are ----

    async def upload(self, buffer: Any, offset: int = 0) -> None:
        """Copy all of `buffer` (host memory, contiguous) into the region at `offset`, off the loop.

        Of host regions as of an NPU's. Raises `RegionError` (out of bounds, read-only, quarantined). Cancelling this
        waits until the copy has ended: the buffer is in use until then.
        """
        what = f"upload to {self!r}"
        host = host_buffer(buffer, what, writable=False)
        if self.readonly:
            raise RegionError(f"{what}: it is read-only memory")
        span = self._span(what, offset, host.nbytes)
        self.check_quarantine(span.offset, span.nbytes)
        await self._copy_span(what, span, host, True)

    async def download(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        """The `nbytes` bytes (default: all that follow) at `offset`. Otherwise as `upload`."""
        start = whole_number(offset)
        size = max(0, self.nbytes - (start or 0)) if nbytes is None else nbytes
        what = f"download from {self!r}"
        span = self._span(what, offset, size)
        if not span.nbytes:
            return b""
        out = fresh_bytes(span.nbytes)
        await self._copy_span(what, span, host_buffer(out, what, writable=False), False)
        return bytes(out)

    async def download_into(self, buffer: Any, offset: int = 0) -> None:
        """Fill `buffer` (host memory, contiguous, writable) with the bytes at `offset`. Otherwise as `upload`."""
        what = f"download from {self!r}"
        host = host_buffer(buffer, what, writable=True)
        await self._copy_span(what, self._span(what, offset, host.nbytes), host, False)

    def _span(self, what: str, offset: Any, nbytes: Any) -> Span:
        start, size = whole_number(offset), whole_number(nbytes)
        if start is None or size is None or not 0 <= start <= start + size <= self.nbytes:
            raise RegionError(f"{what}: {nbytes!r} bytes at offset {offset!r} are outside of its {self.nbytes} bytes")
        return Span(self, start, size)

    async def _copy_span(self, what: str, span: Span, host: Any, up: bool) -> None:
        self._host.check()
        if self.deregistered:
            raise RegionError(f"{what}: it is deregistered")
        await self
        await copy(self, self._host.queue, what, span.offset, host, up)

    # ---- quarantine ----

    @property
    def quarantined(self) -> tuple[tuple[int, int], ...]:
        """``(offset, nbytes)`` pairs that cannot be shown to be free of the native side or of a peer: do not reuse."""
        return tuple(span for spans in self._quarantine.values() for span in spans)

    def quarantine(self, key: int, spans: tuple[tuple[int, int], ...], detail: str) -> None:
        self._quarantine[key] = spans
        self._host.region_quarantined(self, spans, detail)

    def release(self, key: int) -> None:
        spans = self._quarantine.pop(key, None)
        if spans is not None:
            self._host.region_released(self, spans)

    def check_quarantine(self, offset: int, nbytes: int) -> None:
        for off, n in self.quarantined:
            if off < offset + nbytes and offset < off + n:
                raise with_data(
                    RegionPinnedError(
                        f"[{offset}:{offset + nbytes}] of {self!r} is quarantined: an earlier transfer, or a peer, may "
                        "still touch it; wait for its wait_quiesced(), or for the 'released' event"
                    ),
                    spans=((off, n),),
                )

    def refuse_read(self) -> None:
        raise RegionError(f"{self!r} is read-only memory: nothing can be read into it; pass writable memory")

    # ---- taking it back ----

    async def revoke(self, peer: Any = None, *, spans: Spans | None = None) -> None:
        """Take permission for `spans` (default: all) from `peer` (default: every peer).

        When this returns, no peer can read or write those bytes any more, and they can be reused. They stay refused
        until `grant`; a transfer or stream whose permission is older than this call stays refused even then. If a peer
        stands still in the middle of a copy, this raises `RegionPinnedError` after `cancel_grace`, with the spans; the
        event ``released`` follows when they are free. Cancelling this stops waiting; the revocation stands.
        """
        self._host.check()
        pairs = self._pairs(spans)
        if not len(pairs):
            return
        incarnation = None if peer is None else self._host.incarnation_of(peer)
        await self._take_back(lambda token: self._revoke(incarnation, pairs, token), "revoke").wait()

    def grant(self, peer: Any = None, *, spans: Spans | None = None) -> None:
        """Give back what `revoke` took. At once; transfers posted from now on by who hears of it are judged by it."""
        self._host.check()
        pairs = self._pairs(spans)
        if len(pairs):
            self._grant(None if peer is None else self._host.incarnation_of(peer), pairs)

    async def deregister(self) -> None:
        """End its registration; returns when no peer and no transfer of ours touches the memory any more.

        Own transfers in flight are waited for; those of peers fail with `RemoteAccessError`. Errors as for `revoke`.
        Cancelling this stops waiting; the region is gone all the same. Calling it again waits, or raises, again.
        """
        self._host.check()
        if self._leaving is not None:
            await self._leaving.wait()
            return
        self._leaving = self._take_back(self._deregister, "deregister")
        # The memory goes once it is answered, and not when this await is cancelled: a peer may still touch it.
        self._leaving.future.add_done_callback(lambda _: self._host.region_gone(self))
        try:
            await self._leaving.wait()
        finally:
            self._host.region_unnamed(self)

    def _take_back(self, post: Any, verb: str) -> Answer:
        queue = self._host.queue
        answer = Answer(queue.loop.create_future(), self, verb)
        token = answer.token = queue.new_token()
        queue.expect(token, answer)
        try:
            post(token)
        except _core.StatusError as exc:
            queue.forget(token)
            raise make_error(queue.statuses[exc.status], f"{verb} of {self!r} was not possible") from exc
        return answer

    def _pairs(self, spans: Spans | None) -> npt.NDArray[np.int64]:
        if spans is None:
            return np.array([[0, self.nbytes]], np.int64)
        if not isinstance(spans, Iterable):
            raise self._malformed(spans)
        pairs = []
        for span in spans:
            if isinstance(span, Span):
                if span.target is not self:
                    raise RegionError(f"{span!r} is not a span of {self!r}")
                pairs.append((span.offset, span.nbytes))
            else:
                try:
                    offset, nbytes = (whole_number(number) for number in span)
                except (TypeError, ValueError):  # not iterable, or not two
                    raise self._malformed(span) from None
                if offset is None or nbytes is None:
                    raise self._malformed(span)
                checked = Span(self, offset, nbytes)
                pairs.append((checked.offset, checked.nbytes))
        return np.array(pairs, np.int64).reshape(-1, 2)

    def _malformed(self, what: object) -> RegionError:
        return RegionError(
            f"spans of {self!r}: a list of (offset, nbytes) pairs or slices of it, as in spans=[(0, 10)] or "
            f"spans=[region[0:10]], not {what!r}"
        )


class Answer:
    """Waits for the answer to a revoke or deregister: one event, or two when the memory was pinned at first."""

    def __init__(self, future: asyncio.Future[None], region: Region, verb: str) -> None:
        self.future = future
        self.region: Region | None = region
        self.verb = verb
        self.token = 0

    async def wait(self) -> None:
        await asyncio.shield(self.future)  # several may wait

    def settle(self, record: Record) -> None:
        raise AssertionError("a revocation is answered by an event")

    def answered(self, queue: CompletionQueue, ok: bool, nbytes: int, blob: bytes) -> None:
        region = self.region
        assert region is not None
        if ok:
            queue.forget(self.token)
            region.release(self.token)
            self.region = None  # which refers to us: its memory is not to wait for the garbage collector
            if self.future.done():  # it was pinned at first
                self.future = queue.loop.create_future()
            self.future.set_result(None)
            return
        spans: tuple[tuple[int, int], ...] = tuple(
            (int(off), int(n)) for off, n in np.frombuffer(blob, np.uint64).reshape(-1, 2)
        )
        text = (
            f"{self.verb} of {region!r}: a peer that stands still in the middle of a copy holds {nbytes} bytes in "
            f"{len(spans)} span(s), first {spans[0] if spans else None}; do not reuse them before the 'released' event"
        )
        region.quarantine(self.token, spans, text)
        if not self.future.done():
            self.future.set_exception(with_data(RegionPinnedError(text), spans=spans))


class RemoteRegion:
    """A peer's region, as it announced it. Slices to a `Span`."""

    __slots__ = ("access", "handle", "id", "kind", "name", "nbytes", "peer_name", "rkey")

    def __init__(self, handle: _core.RemoteRegion, name: str, peer_name: str) -> None:
        self.handle = handle
        self.name = name
        self.peer_name = peer_name
        self.nbytes = handle.nbytes
        self.id = handle.id
        self.rkey = handle.rkey
        self.kind = handle.kind
        self.access = next((key for key, bits in ACCESS.items() if bits == handle.access), "")

    @property
    def on_npu(self) -> bool:
        """Whether its memory is an NPU's."""
        return self.kind == _core.KIND_DEVICE

    def __repr__(self) -> str:
        gone = "" if self.handle.alive else " gone"
        return f"<RemoteRegion {self.name!r} of {self.peer_name!r} {self.nbytes} bytes{gone}>"

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, key: slice) -> Span:
        start, stop = _bounds(key, self.nbytes, self)
        return Span(self, start, stop - start)


def as_int64(values: Sequence[int] | npt.NDArray[Any], what: str) -> npt.NDArray[np.int64]:
    """Offsets or lengths as the native side takes them: contiguous int64, one axis."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # rows of unequal length
        raise RegionError(f"{what}: a list or array of whole numbers with one axis, not {values!r}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RegionError(
            f"{what}: a list or array of whole numbers with one axis, not {array.dtype} of shape {array.shape}"
        )
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise RegionError(f"{what}: {int(array.max())} is too large for an offset")
    return np.ascontiguousarray(array, np.int64)
