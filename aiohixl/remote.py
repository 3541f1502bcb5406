# SPDX-License-Identifier: Apache-2.0
"""What every remote engine has, ours or not: its regions, transfers to and from them, and their pace."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from aiohixl import _core
from aiohixl.announced import Announced
from aiohixl.completion import CompletionQueue, wake
from aiohixl.errors import HixlError, QueueFullError, RegionError, TransferAbortedError, make_error
from aiohixl.npu import moment
from aiohixl.region import Region, RemoteRegion, Span, as_int64
from aiohixl.scope import Scope, open_scopes, scoped
from aiohixl.scratch import ScratchDesk
from aiohixl.transfer import REASONS, Transfer

__all__ = ["Host", "Offsets", "RemoteEngine", "Route", "Segment"]

T = TypeVar("T")
Offsets = Sequence[int] | npt.NDArray[Any]
#: local region, remote region, rkey, local offsets, remote offsets, lengths or one length
Segment = tuple[
    Region, _core.RemoteRegion, int, npt.NDArray[np.int64], npt.NDArray[np.int64], int | npt.NDArray[np.int64]
]
_MAX_NBYTES = (1 << 63) - 1
KINDS = {"write": _core.WRITE, "read": _core.READ, "note": _core.NOTE}


class Route(NamedTuple):
    """The path of a transfer: the provider, and in words why that one."""

    provider: str
    reason: str


class Host(Protocol):
    """What a remote engine needs of ours."""

    @property
    def queue(self) -> CompletionQueue: ...
    def check(self) -> None: ...
    def peer_parked(self, peer: Any) -> None: ...
    def has_room(self) -> bool: ...
    @property
    def peer_depth(self) -> int: ...
    @property
    def scratch(self) -> ScratchDesk: ...


class _Parked(NamedTuple):
    transfer: Transfer
    segments: list[Segment]
    epoch: int
    note: bytes | None
    topic: bytes
    aborted: bool
    after: int


def _extent(memory: Any) -> tuple[Any, int, int]:
    if type(memory) is Span:
        return memory.target, memory.offset, memory.nbytes
    return memory, 0, getattr(memory, "nbytes", 0)


class _Held(NamedTuple):
    """What a transfer keeps, with the NPU's event that it waits for."""

    memory: Any
    event: object


class RemoteEngine:
    """Base of `Peer` and `RawPeer`."""

    #: Whether whoever waits for a note hears when it will not come.
    tells_aborts = False

    def __init__(self, host: Host, endpoint: _core.Endpoint) -> None:
        self._host = host
        self._queue = host.queue
        self._endpoint = endpoint
        self._parked: deque[_Parked] = deque()
        self._space: list[asyncio.Future[None]] = []
        self._lost: tuple[str, str] | None = None
        self.name = endpoint.name
        self._announced = Announced(self.name)
        self._poster = _core.Poster(
            endpoint, self._queue, open_scopes, self._parked, RemoteRegion, Transfer, moment, _Held
        )

    @property
    def is_lost(self) -> bool:
        """Whether it can no longer be used: true by the time that a transfer fails with `PeerLostError`."""
        return self._lost is not None or not self._endpoint.is_up

    @property
    def serial(self) -> int:
        return self._endpoint.serial

    @property
    def link(self) -> str | None:
        """What HIXL's bytes to this peer travel over: ``hccs``, ``roce`` or ``ub``.

        ``auto``: no option said, HIXL chose, and does not tell. None: there is no path by `hixl` to it.
        """
        return self._endpoint.link or None

    # ---- what it has announced ----

    @property
    def regions(self) -> dict[str, RemoteRegion]:
        """Announced so far, by name; without the parts of KV caches."""
        return self._announced.named()

    async def region(self, name: str, *, wait: float = 10.0) -> RemoteRegion:
        """The region of that name; waits up to `wait` seconds for its announcement (`RegionError` then)."""
        self._host.check()
        return await self._wait_for("region", name, self._announced.named, wait)

    async def _wait_for(self, what: str, name: str, known: Callable[[], dict[str, T]], patience: float) -> T:
        self._endpoint.expect(1)  # heartbeats, so that a frozen peer is noticed
        try:
            async with asyncio.timeout(patience):
                while (found := known().get(name)) is None:
                    if self._lost is not None:
                        raise self._lost_error()
                    await self._queue.waiter(self._announced.news)
                return found
        except TimeoutError:
            raise RegionError(
                f"peer {self.name!r} announced no {what} {name!r} within {patience} s; it has {list(known()) or 'none'}"
            ) from None
        finally:
            self._endpoint.expect(-1)

    def region_added(self, handle: _core.RemoteRegion, name: str, blob: bytes) -> None:
        for error in self._announced.add(handle, name, blob):
            self._queue.loop.call_exception_handler(
                {"message": f"peer {self.name!r} announced a KV cache that cannot be used", "exception": error}
            )

    def region_removed(self, handle: _core.RemoteRegion) -> None:
        self._announced.remove(handle)

    def _lost_error(self) -> HixlError:
        """A new one each time: one that is raised keeps the frames that it passed, and a lost peer may be kept long."""
        assert self._lost is not None
        return make_error(*self._lost)

    def became_lost(self, status: str, text: str) -> None:
        self._lost = status, f"peer {self.name!r} is lost: {text}; connect again"
        parked = [*self._parked]
        self._parked.clear()
        for entry in parked:
            entry.transfer.fail(make_error(status, f"{self.describe(entry.transfer)}: the peer is lost: {text}"))
        wake(self._announced.news)
        wake(self._space)

    # ---- transfers ----

    def read(self, local: Region | Span, remote: RemoteRegion | Span, *, after: Any = None) -> Transfer:
        """Fetch the bytes of `remote` into `local` (equal lengths). Otherwise as `write`."""
        return self._one("read", local, remote, None, b"", after)

    #: The same as `read`: every post may be made from any thread. Off the loop a full queue is a `QueueFullError`.
    post_read = read

    def _one(self, kind: str, local: Any, remote: Any, note: bytes | None, topic: bytes, after: Any) -> Transfer:
        if note is None:
            transfer = self._poster.post(self, KINDS[kind], kind, local, remote, after)
            if transfer is not None:
                return transfer
        # The long way: it takes all, and says what is wrong with it.
        region, lo, nbytes = _extent(local)
        target, ro, there = _extent(remote)
        if not isinstance(region, Region) or type(target) is not RemoteRegion:
            raise RegionError(
                f"{kind} takes a region or span of this engine first and one of the peer second, "
                f"not {local!r} and {remote!r}"
            )
        if nbytes != there:
            raise RegionError(
                f"{kind} between unequal lengths: {nbytes} bytes here, {there} bytes at peer {self.name!r}"
            )
        los, ros = np.array([lo], np.int64), np.array([ro], np.int64)
        segment = (region, target.handle, target.rkey, los, ros, nbytes)
        return self._post(kind, [segment], nbytes, note, topic, after=after)

    def read_many(
        self,
        local: Region,
        local_offsets: Offsets,
        remote: RemoteRegion,
        remote_offsets: Offsets,
        nbytes: int | Offsets,
        *,
        after: Any = None,
    ) -> Transfer:
        """`write_many` in the other direction."""
        return self._many("read", local, local_offsets, remote, remote_offsets, nbytes, None, b"", after)

    def _many(
        self,
        kind: str,
        local: Region,
        los: Offsets,
        remote: RemoteRegion,
        ros: Offsets,
        nbytes: int | Offsets,
        note: bytes | None,
        topic: bytes,
        after: Any,
    ) -> Transfer:
        if not isinstance(local, Region) or not isinstance(remote, RemoteRegion):
            raise RegionError(
                f"{kind}_many takes a region of this engine and one of the peer, not {local!r} and {remote!r}"
            )
        if isinstance(nbytes, np.integer):
            nbytes = int(nbytes)
        lo, ro = as_int64(los, "local offsets"), as_int64(ros, "remote offsets")
        n = nbytes if isinstance(nbytes, int) else as_int64(nbytes, "nbytes")
        if len(lo) != len(ro) or (not isinstance(n, int) and len(n) != len(lo)):
            lengths = "" if isinstance(n, int) else f", {len(n)} lengths"
            raise RegionError(f"{kind}_many: {len(lo)} local offsets, {len(ro)} remote offsets{lengths}")
        if isinstance(n, int) and (isinstance(n, bool) or not 0 <= n <= _MAX_NBYTES):
            raise RegionError(f"{kind}_many: nbytes is not a number of bytes: {n}")
        total = n * len(lo) if isinstance(n, int) else int(n.sum())
        return self._post(kind, [(local, remote.handle, remote.rkey, lo, ro, n)], total, note, topic, after=after)

    # ---- posting ----

    def _post(
        self,
        kind: str,
        segments: list[Segment],
        nbytes: int,
        note: bytes | None,
        topic: bytes,
        *,
        epoch: int = _core.EPOCH_NOW,
        aborted: bool = False,
        after: Any = None,
    ) -> Transfer:
        def post() -> Transfer:
            return self._post_now(kind, segments, nbytes, note, topic, epoch=epoch, aborted=aborted, after=after)

        return scoped(self, post) if open_scopes.get() else post()

    def _post_now(
        self,
        kind: str,
        segments: list[Segment],
        nbytes: int,
        note: bytes | None,
        topic: bytes,
        *,
        epoch: int = _core.EPOCH_NOW,
        aborted: bool = False,
        after: Any = None,
    ) -> Transfer:
        device = "cpu"
        for region, _, _, lo, _, n in segments:
            if kind == "read" and region.readonly:
                region.refuse_read()
            if region._quarantine:
                for off, size in _spans(lo, n):
                    region.check_quarantine(off, size)
            if region.device != "cpu":
                device = region.device
        event, held = moment(after, device)
        keep = _Held(segments, held) if event else segments
        transfer = Transfer(self, self._queue, self._queue.new_token(), kind, nbytes, keep)
        entry = _Parked(transfer, segments, epoch, note, topic, aborted, event)
        if self._parked:
            self._park(entry)
        else:
            self._submit(entry)
        return transfer

    def _submit(self, entry: _Parked) -> None:
        transfer, queue = entry.transfer, self._queue
        queue.sinks[transfer.token] = transfer
        try:
            handle = self._endpoint.post(
                KINDS[transfer.kind],
                transfer.token,
                entry.segments,
                epoch=entry.epoch,
                note=entry.note,
                topic=entry.topic,
                aborted=entry.aborted,
                after=entry.after,
            )
        except _core.StatusError as exc:
            self._not_posted(exc, entry)
            return
        if handle < 0:
            queue.forget(transfer.token)
            transfer.complete_inline(-1 - handle)
            queue.ended_within_its_post()
        else:
            transfer.posted(handle)

    def _not_posted(self, exc: _core.StatusError, entry: _Parked) -> None:
        """A post that failed has no completion: it parks, or raises."""
        self._queue.forget(entry.transfer.token)
        name = self._queue.statuses[exc.status]
        if name == "QUEUE_FULL":
            self._park(entry)
            return
        if name in ("PEER_LOST", "ABORTED") and self._lost is not None:
            raise self._lost_error()
        text = f"{self.describe(entry.transfer)}: {REASONS.get(name, name.lower())}"
        if exc.index != _core.NO_INDEX:
            text += f" (row {exc.index}{_row(entry.segments, exc.index)})"
        if name == "NO_PATH" and entry.segments:
            text += f": {self._endpoint.route(entry.segments[0][0], entry.segments[0][1])[1]}"
        raise make_error(name, text) from None

    def _park(self, entry: _Parked) -> None:
        """The queue is full, or others wait already: posted later, in order."""
        if not self._queue.on_loop():
            raise QueueFullError(
                f"{self.describe(entry.transfer)}: {self._endpoint.inflight} transfers are in flight to this peer; "
                "wait for some of them, or post on the loop, where posts park"
            )
        if entry.epoch == _core.EPOCH_NOW:  # its permission is of the post, however late it is submitted
            entry = entry._replace(epoch=self._endpoint.epoch)
        self._parked.append(entry)
        self._host.peer_parked(self)

    def unpark(self, budget: int) -> bool:
        """Post up to `budget` parked transfers; whether some still wait."""
        while self._parked and budget > 0:
            entry = self._parked.popleft()
            budget -= 1
            before = len(self._parked)
            try:
                self._submit(entry)
            except HixlError as exc:
                self._give_up(entry, exc)
                continue
            if len(self._parked) > before:  # still full: it went to the back, and belongs at the front
                self._parked.rotate(1)
                break
        if not self._parked:
            wake(self._space)
        return bool(self._parked)

    def recall_parked(self, transfer: Transfer) -> bool:
        """Takes a parked transfer out, if it is one. Its note goes out as aborted."""
        for entry in self._parked:
            if entry.transfer is transfer:
                self._parked.remove(entry)
                text = f"{self.describe(transfer)}: cancelled before it was posted"
                self._give_up(entry, TransferAbortedError(text))
                return True
        return False

    def _give_up(self, entry: _Parked, error: HixlError) -> None:
        """A parked transfer will not be posted: it fails, and whoever waits for its note hears that it won't come."""
        entry.transfer.fail(error)
        if entry.note is not None and self._lost is None and self.tells_aborts:
            with contextlib.suppress(HixlError):  # the peer is lost, and knows that of us
                self._post("note", [], 0, entry.note, entry.topic, aborted=True).detach()

    # ---- what transfers ask of their peer ----

    def describe(self, transfer: Transfer) -> str:
        preposition = {"write": "to", "read": "from"}.get(transfer.kind, "to")
        size = "" if transfer.kind == "note" else f" of {transfer.nbytes} bytes"
        return f"{transfer.kind}{size} {preposition} peer {self.name!r}"

    def quarantine(self, transfer: Transfer) -> None:
        for region, spans in _local_spans(transfer.keep):
            region.quarantine(
                transfer.token, spans, f"{self.describe(transfer)} was given up before the transport let go"
            )

    def release(self, transfer: Transfer) -> None:
        for region, _ in _local_spans(transfer.keep):
            region.release(transfer.token)

    # ---- pacing, closing ----

    @property
    def inflight(self) -> int:
        """Transfers handed to the native side and not complete, plus those that are parked."""
        return self._endpoint.inflight + len(self._parked)

    async def window(self) -> None:
        """Return when the next post will not park. Cancelling this only stops waiting."""
        self._host.check()
        while not self.has_room() and self._lost is None:
            await self._queue.waiter(self._space)

    def has_room(self) -> bool:
        return not self._parked and self._endpoint.inflight < self._host.peer_depth and self._host.has_room()

    def scope(self) -> Scope:
        """``async with peer.scope()``: leaving waits for everything posted inside.

        Leaving by an exception recalls it first.
        """
        return Scope(self)

    def route(self, local: Region | Span, remote: RemoteRegion | Span) -> Route:
        """Which path a transfer between the two takes, and why; `RegionError` with the reason when there is none."""
        here = local.target if isinstance(local, Span) else local
        there = remote.target if isinstance(remote, Span) else remote
        if not isinstance(here, Region) or not isinstance(there, RemoteRegion):
            raise RegionError(f"route takes a region of this engine and one of the peer, not {local!r} and {remote!r}")
        provider, reason = self._endpoint.route(here, there.handle)
        if provider is None:
            raise RegionError(f"no path between {here!r} and {there!r}: {reason}")
        return Route(provider, reason)

    async def close(self) -> None:
        """Drop the link to this peer: waits for its transfers, then closes. The peer sees us as lost. Idempotent."""
        self._host.check()
        if self._lost is not None:
            return
        try:
            while self.inflight and self._lost is None:
                await self._queue.waiter(self._space)
        finally:
            if self._lost is None:
                self.drop()
        while self._lost is None:
            await self._queue.waiter(self._announced.news)

    def drop(self) -> None:
        """End the link without waiting for anything."""
        with contextlib.suppress(_core.StatusError):  # the engine has stopped, and with it the link
            self._endpoint.close()

    def after_drain(self) -> None:
        if self._space and (not self.inflight or self.has_room()):
            wake(self._space)


def _row(segments: list[Segment], index: int) -> str:
    for region, remote, _, lo, ro, n in segments:
        if index < len(lo):
            size = n if isinstance(n, int) else int(n[index])
            return (
                f": {size} bytes at offset {int(lo[index])} of {region.nbytes} here, at offset {int(ro[index])} of "
                f"{remote.nbytes} there"
            )
        index -= len(lo)
    return ""


def _spans(offsets: npt.NDArray[np.int64], n: int | npt.NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    sizes = [n] * len(offsets) if isinstance(n, int) else n.tolist()
    return tuple(zip(offsets.tolist(), sizes, strict=True))


def _local_spans(keep: Any) -> list[tuple[Region, tuple[tuple[int, int], ...]]]:
    if isinstance(keep, _Held):
        keep = keep.memory
    if isinstance(keep, Region):
        return [(keep, ((0, keep.nbytes),))]
    if isinstance(keep, Span):
        assert isinstance(keep.target, Region)
        return [(keep.target, ((keep.offset, keep.nbytes),))]
    return [(region, _spans(lo, n)) for region, _, _, lo, _, n in keep or ()]
