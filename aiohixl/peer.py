# SPDX-License-Identifier: Apache-2.0
"""One remote engine."""

from __future__ import annotations

import asyncio
import contextlib
import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from aiohixl import _core
from aiohixl.announced import Announced
from aiohixl.completion import CompletionQueue, wake
from aiohixl.errors import (
    ConfigError,
    HixlError,
    PeerUnreachableError,
    QueueFullError,
    RegionError,
    TransferAbortedError,
    make_error,
)
from aiohixl.kvcache import Blocks, KVCache, RemoteKV, Row, rows_of_layer
from aiohixl.region import Region, RemoteRegion, Span, as_int64
from aiohixl.scope import Scope, any_open, scoped
from aiohixl.stream import KVStream
from aiohixl.transfer import REASONS, Transfer

__all__ = ["Peer", "Route"]

T = TypeVar("T")
Offsets = Sequence[int] | npt.NDArray[Any]
Payload = bytes | bytearray | memoryview
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
    """What a peer needs of its engine."""

    @property
    def queue(self) -> CompletionQueue: ...
    def check(self) -> None: ...
    def peer_parked(self, peer: Peer) -> None: ...
    def has_room(self) -> bool: ...
    @property
    def peer_depth(self) -> int: ...


class _Parked(NamedTuple):
    transfer: Transfer
    segments: list[Segment]
    epoch: int
    note: bytes | None
    topic: bytes
    aborted: bool


class Peer:
    """A connected engine.

    `write`, `read` and what is built on them may be called from any thread; all else belongs to the loop. Every post
    raises `PeerLostError` once the peer is lost; connect again then.
    """

    def __init__(self, host: Host, endpoint: _core.Endpoint) -> None:
        self._host = host
        self._queue = host.queue
        self._endpoint = endpoint
        self._parked: deque[_Parked] = deque()
        self._space: list[asyncio.Future[None]] = []
        self._lost: tuple[str, str] | None = None
        self.name = endpoint.name
        self._announced = Announced(self.name)
        #: 32 hexadecimal digits, new each time the remote engine starts.
        self.incarnation = endpoint.incarnation.hex()
        self.epoch = endpoint.peer_epoch

    def __repr__(self) -> str:
        return f"<Peer {self.name!r} {self.incarnation[:8]}{' lost' if self._lost else ''}>"

    @property
    def is_lost(self) -> bool:
        """Whether it can no longer be used: true by the time that a transfer fails with `PeerLostError`."""
        return self._lost is not None or not self._endpoint.is_up

    @property
    def serial(self) -> int:
        return self._endpoint.serial

    # ---- what the peer has announced ----

    @property
    def regions(self) -> dict[str, RemoteRegion]:
        """Announced so far, by name. The parts of a KV cache stand in `caches`, as one."""
        return self._announced.named()

    @property
    def caches(self) -> dict[str, RemoteKV]:
        """KV caches announced so far, by name."""
        return dict(self._announced.caches)

    async def region(self, name: str, *, wait: float = 10.0) -> RemoteRegion:
        """The region of that name; waits up to `wait` seconds for its announcement (`RegionError` then)."""
        self._host.check()
        return await self._wait_for("region", name, self._announced.named, wait)

    async def kv(self, name: str = "kv", *, wait: float = 10.0) -> RemoteKV:
        """The KV cache of that name; waits for it as `region` does."""
        self._host.check()
        return await self._wait_for("KV cache", name, lambda: self._announced.caches, wait)

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
        parked, self._parked = self._parked, deque()
        for entry in parked:
            entry.transfer.fail(make_error(status, f"{self.describe(entry.transfer)}: the peer is lost: {text}"))
        wake(self._announced.news)
        wake(self._space)

    # ---- transfers ----

    def write(
        self,
        local: Region | Span,
        remote: RemoteRegion | Span,
        *,
        note: Payload | None = None,
        topic: str = "",
    ) -> Transfer:
        """Put the bytes of `local` into `remote` (equal lengths).

        Posted at once; await it to know that they are visible there. A `note` is delivered to the peer after them.
        Raises `RegionError` (wrong spans; nothing was posted); the transfer fails with `RemoteAccessError` when the
        owner does not allow it, `PeerLostError`, `TransferTimeoutError`. Cancelling the last await recalls it; the peer
        may then have any part of the bytes, and gets the note with ``aborted=True``.
        """
        return self._one("write", local, remote, note, topic)

    def read(self, local: Region | Span, remote: RemoteRegion | Span) -> Transfer:
        """Fetch the bytes of `remote` into `local` (equal lengths). Otherwise as `write`."""
        return self._one("read", local, remote, None, "")

    #: The same as `write`: every post may be made from any thread. Off the loop a full queue is a `QueueFullError`.
    post_write = write
    post_read = read

    def _one(self, kind: str, local: Any, remote: Any, note: Payload | None, topic: str) -> Transfer:
        if any_open():
            return scoped(self, lambda: self._one_now(kind, local, remote, note, topic))
        return self._one_now(kind, local, remote, note, topic)

    def _one_now(self, kind: str, local: Any, remote: Any, note: Payload | None, topic: str) -> Transfer:
        if type(local) is Span:
            region, lo, nbytes = local.target, local.offset, local.nbytes
        else:
            region, lo, nbytes = local, 0, getattr(local, "nbytes", 0)
        if type(remote) is Span:
            target, ro, there = remote.target, remote.offset, remote.nbytes
        else:
            target, ro, there = remote, 0, getattr(remote, "nbytes", 0)
        if not isinstance(region, Region) or type(target) is not RemoteRegion:
            raise RegionError(
                f"{kind} takes a region or span of this engine first and one of the peer second, "
                f"not {local!r} and {remote!r}"
            )
        if nbytes != there:
            raise RegionError(
                f"{kind} between unequal lengths: {nbytes} bytes here, {there} bytes at peer {self.name!r}"
            )
        if kind == "read" and region.readonly:
            region.refuse_read()
        if region._quarantine:
            region.check_quarantine(lo, nbytes)
        if note is not None or self._parked:
            los, ros = np.array([lo], np.int64), np.array([ro], np.int64)
            return self._post_now(kind, [(region, target.handle, target.rkey, los, ros, nbytes)], nbytes, note, topic)
        queue = self._queue
        transfer = Transfer(self, queue, kind, nbytes, local)
        token = transfer.token
        queue.sinks[token] = transfer
        try:
            handle = self._endpoint.post_one(KINDS[kind], token, region, lo, target.handle, target.rkey, ro, nbytes)
        except _core.StatusError as exc:
            los, ros = np.array([lo], np.int64), np.array([ro], np.int64)
            segment = (region, target.handle, target.rkey, los, ros, nbytes)
            self._not_posted(exc, _Parked(transfer, [segment], _core.EPOCH_NOW, None, b"", False))
        else:
            if handle < 0:
                del queue.sinks[token]
                transfer.complete_inline(-1 - handle)
            else:
                transfer.posted(handle)
        return transfer

    def write_many(
        self,
        local: Region,
        local_offsets: Offsets,
        remote: RemoteRegion,
        remote_offsets: Offsets,
        nbytes: int | Offsets,
        *,
        note: Payload | None = None,
        topic: str = "",
    ) -> Transfer:
        """One transfer of many rows: ``nbytes`` (one for all, or one each) from each local offset to each remote one.

        Rows must not write the same bytes twice. A row out of bounds is a `RegionError` that names its index, before a
        byte moves; an overlap is found in a native thread and fails the transfer before a byte moves.
        """
        return self._many("write", local, local_offsets, remote, remote_offsets, nbytes, note, topic)

    def read_many(
        self,
        local: Region,
        local_offsets: Offsets,
        remote: RemoteRegion,
        remote_offsets: Offsets,
        nbytes: int | Offsets,
    ) -> Transfer:
        """`write_many` in the other direction."""
        return self._many("read", local, local_offsets, remote, remote_offsets, nbytes, None, "")

    def _many(
        self,
        kind: str,
        local: Region,
        los: Offsets,
        remote: RemoteRegion,
        ros: Offsets,
        nbytes: int | Offsets,
        note: Payload | None,
        topic: str,
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
        return self._post(kind, [(local, remote.handle, remote.rkey, lo, ro, n)], total, note, topic)

    # ---- KV caches ----

    def write_kv(
        self,
        cache: KVCache,
        blocks: Blocks,
        remote_blocks: Blocks,
        *,
        remote: RemoteKV | str | None = None,
        layers: Sequence[int] | None = None,
        note: Payload | None = None,
        topic: str = "",
    ) -> Transfer:
        """Put `blocks` of our cache into `remote_blocks` of the peer's (default: its cache of that name), all layers.

        Blocks are indices, lists or integer arrays of equal length, the remote ones without repetition. Raises
        `RegionError` (an index past the end, unequal lengths), `PeerMismatchError` (layouts that differ, by field).
        Otherwise as `write`.
        """
        return self._kv_transfer("write", cache, blocks, remote_blocks, remote, layers, note, topic)

    def read_kv(
        self,
        cache: KVCache,
        blocks: Blocks,
        remote_blocks: Blocks,
        *,
        remote: RemoteKV | str | None = None,
        layers: Sequence[int] | None = None,
    ) -> Transfer:
        """Fetch `remote_blocks` of the peer's cache into `blocks` of ours. Otherwise as `write_kv`."""
        return self._kv_transfer("read", cache, blocks, remote_blocks, remote, layers, None, "")

    def _kv_transfer(
        self,
        kind: str,
        cache: KVCache,
        blocks: Blocks,
        there: Blocks,
        remote: RemoteKV | str | None,
        layers: Sequence[int] | None,
        note: Payload | None,
        topic: str,
    ) -> Transfer:
        target = self._remote_kv(cache, remote)
        direction: Literal["local", "remote"] = "remote" if kind == "write" else "local"
        here, far = cache.layout.pair_blocks(target.layout, blocks, there, destination=direction)
        indices = _layers(layers, cache.layout.num_layers)
        rows = [row for layer in indices for row in rows_of_layer(cache, target, layer, here, far)]
        return self._post_rows(kind, rows, note, topic, _core.EPOCH_NOW)

    def stream_kv(
        self,
        cache: KVCache,
        blocks: Blocks,
        remote_blocks: Blocks,
        *,
        remote: RemoteKV | str | None = None,
        note: Payload | None = None,
        topic: str = "",
    ) -> KVStream:
        """``async with peer.stream_kv(...) as stream``: `write_kv` one layer at a time.

        ``stream.post(layer)`` may be called from any thread. Permission counts from now: if the owner revokes the
        blocks, what is posted later fails, even if they were granted to another request meanwhile.
        """
        target = self._remote_kv(cache, remote)
        here, far = cache.layout.pair_blocks(target.layout, blocks, remote_blocks)
        epoch = self._endpoint.epoch

        def post_layer(layer: int) -> Transfer:
            return self._post_rows("write", rows_of_layer(cache, target, layer, here, far), None, "", epoch)

        def send_note(aborted: bool) -> Transfer:
            return self._post("note", [], 0, note, topic, aborted=aborted)

        what = f"stream of {len(here)} blocks of {cache.name!r} to peer {self.name!r}"
        return KVStream(post_layer, None if note is None else send_note, cache.layout.num_layers, what)

    def _remote_kv(self, cache: KVCache, remote: RemoteKV | str | None) -> RemoteKV:
        if not isinstance(cache, KVCache):
            raise RegionError(f"a KV cache of this engine comes first (from register_kv), not {cache!r}")
        name = cache.name if remote is None else remote
        target = remote if isinstance(remote, RemoteKV) else self._announced.caches.get(str(name))
        if target is None:
            if self._lost is not None:
                raise self._lost_error()
            raise RegionError(
                f"peer {self.name!r} has announced no KV cache {name!r} yet (it has {list(self.caches) or 'none'}); "
                f"`await peer.kv({name!r})` waits for it"
            )
        target.agree(cache)
        return target

    def _post_rows(self, kind: str, rows: list[Row], note: Payload | None, topic: str, epoch: int) -> Transfer:
        segments: list[Segment] = [(local, r.handle, r.rkey, lo, ro, n) for local, r, lo, ro, n in rows]
        total = sum(int(row[4].sum()) for row in rows)
        return self._post(kind, segments, total, note, topic, epoch=epoch)

    # ---- notes ----

    def notify(self, payload: Payload, *, topic: str = "") -> Transfer:
        """Send a note of its own (at most 64 KiB).

        Await it to know that it stands in the peer's queue; it fails as `write` does.
        """
        return self._post("note", [], 0, _note_bytes(payload), topic)

    # ---- posting ----

    def _post(
        self,
        kind: str,
        segments: list[Segment],
        nbytes: int,
        note: Payload | None,
        topic: str,
        *,
        epoch: int = _core.EPOCH_NOW,
        aborted: bool = False,
    ) -> Transfer:
        def post() -> Transfer:
            return self._post_now(kind, segments, nbytes, note, topic, epoch=epoch, aborted=aborted)

        return scoped(self, post) if any_open() else post()

    def _post_now(
        self,
        kind: str,
        segments: list[Segment],
        nbytes: int,
        note: Payload | None,
        topic: str,
        *,
        epoch: int = _core.EPOCH_NOW,
        aborted: bool = False,
    ) -> Transfer:
        payload = None if note is None else _note_bytes(note)
        topic_bytes = _topic_bytes(topic)
        for region, _, _, lo, _, n in segments:
            if kind == "read" and region.readonly:
                region.refuse_read()
            if region._quarantine:
                for off, size in _spans(lo, n):
                    region.check_quarantine(off, size)
        transfer = Transfer(self, self._queue, kind, nbytes, segments)
        entry = _Parked(transfer, segments, epoch, payload, topic_bytes, aborted)
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
            )
        except _core.StatusError as exc:
            self._not_posted(exc, entry)
            return
        if handle < 0:
            queue.forget(transfer.token)
            transfer.complete_inline(-1 - handle)
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
        if entry.note is not None and self._lost is None:
            with contextlib.suppress(HixlError):  # the peer is lost, and knows that of us
                self._post("note", [], 0, entry.note, entry.topic.decode(), aborted=True).detach()

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

    def credit(self, notes: int) -> None:
        if self._lost is None:
            self._endpoint.credit(notes)


def _layers(layers: Any, count: int) -> Sequence[int]:
    if layers is None:
        return range(count)
    try:
        indices = [operator.index(layer) for layer in layers]
    except TypeError:
        raise ConfigError(f"layers: a list of whole numbers, not {layers!r}") from None
    for layer in indices:
        if not 0 <= layer < count:
            raise ConfigError(f"layers: there is no layer {layer}; the cache has layers 0 to {count - 1}")
    if len(set(indices)) != len(indices):
        raise ConfigError(f"layers: a layer stands twice in {indices}")
    return indices


def _note_bytes(note: object) -> bytes:
    if not isinstance(note, bytes | bytearray | memoryview):
        raise ConfigError(f"note: bytes, not {type(note).__name__}")
    payload = bytes(note)
    if len(payload) > _core.NOTE_MAX:
        raise ConfigError(f"note: at most {_core.NOTE_MAX} bytes, not {len(payload)}; put the rest into a region")
    return payload


def _topic_bytes(topic: object) -> bytes:
    try:
        encoded = topic.encode()  # type: ignore[attr-defined]  # an AttributeError is answered below
    except (AttributeError, UnicodeEncodeError):
        raise ConfigError(f"topic: a str that UTF-8 can encode, not {topic!r}") from None
    if len(encoded) > _core.TOPIC_MAX:
        raise ConfigError(f"topic: at most {_core.TOPIC_MAX} bytes of UTF-8, not {len(encoded)}")
    return bytes(encoded)


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


def _local_spans(keep: Region | list[Segment] | None) -> list[tuple[Region, tuple[tuple[int, int], ...]]]:
    if isinstance(keep, Region):
        return [(keep, ((0, keep.nbytes),))]
    if isinstance(keep, Span):
        assert isinstance(keep.target, Region)
        return [(keep.target, ((keep.offset, keep.nbytes),))]
    return [(region, _spans(lo, n)) for region, _, _, lo, _, n in keep or ()]


def unreachable(target: str, tried: list[str]) -> PeerUnreachableError:
    what = "; ".join(tried) if tried else "it has no address that can be tried from here"
    return PeerUnreachableError(f"cannot connect to {target}: {what}")
