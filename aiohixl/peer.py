# SPDX-License-Identifier: Apache-2.0
"""One remote engine of ours."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

from aiohixl import _core
from aiohixl.errors import ConfigError, HixlError, RegionError
from aiohixl.kvcache import Blocks, KVCache, RemoteKV, Row, rows_of_layer
from aiohixl.probe import ProbeResult, probe_path
from aiohixl.region import Region, RemoteRegion, Span
from aiohixl.remote import Host, Offsets, RemoteEngine, Segment
from aiohixl.scratch import PROBE_TOPIC
from aiohixl.stream import KVStream
from aiohixl.transfer import Transfer

__all__ = ["Peer"]

Payload = bytes | bytearray | memoryview


class Peer(RemoteEngine):
    """A connected engine.

    `write`, `read` and what is built on them may be called from any thread; all else belongs to the loop. Every post
    raises `PeerLostError` once the peer is lost; connect again then.
    """

    tells_aborts = True

    def __init__(self, host: Host, endpoint: _core.Endpoint) -> None:
        super().__init__(host, endpoint)
        #: 32 hexadecimal digits, new each time the remote engine starts.
        self.incarnation = endpoint.incarnation.hex()
        self.epoch = endpoint.peer_epoch

    def __repr__(self) -> str:
        return f"<Peer {self.name!r} {self.incarnation[:8]}{' lost' if self._lost else ''}>"

    @property
    def caches(self) -> dict[str, RemoteKV]:
        """KV caches announced so far, by name."""
        return dict(self._announced.caches)

    async def kv(self, name: str = "kv", *, wait: float = 10.0) -> RemoteKV:
        """The KV cache of that name; waits for it as `region` does."""
        self._host.check()
        return await self._wait_for("KV cache", name, lambda: self._announced.caches, wait)

    # ---- transfers ----

    def write(
        self,
        local: Region | Span,
        remote: RemoteRegion | Span,
        *,
        note: Payload | None = None,
        topic: str = "",
        after: Any = None,
    ) -> Transfer:
        """Put the bytes of `local` into `remote` (equal lengths).

        Posted at once; await it to know that they are visible there. A `note` is delivered to the peer after them.
        An NPU's memory is not touched before the event `after`: a ``torch.npu.Event`` or its handle; by default what
        the current stream of the calling thread has been given so far; 0 for nothing.
        Raises `RegionError` (wrong spans) and `RemoteAccessError` (the owner has announced that it forbids it) before
        anything is posted. The transfer fails with `RemoteAccessError` when the owner itself refuses it,
        `PeerLostError`, `TransferTimeoutError`, `ProviderError`. Cancelling the last await recalls it; the peer may
        then have any part of the bytes, and gets the note with ``aborted=True``.
        """
        payload = None if note is None else _note_bytes(note)
        return self._one("write", local, remote, payload, b"" if note is None else _topic_bytes(topic), after)

    #: The same as `write`: every post may be made from any thread. Off the loop a full queue is a `QueueFullError`.
    post_write = write

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
        after: Any = None,
    ) -> Transfer:
        """One transfer of many rows: ``nbytes`` (one for all, or one each) from each local offset to each remote one.

        Rows must not write the same bytes twice. A row out of bounds is a `RegionError` that names its index, before a
        byte moves; an overlap is found in a native thread and fails the transfer before a byte moves.
        """
        payload = None if note is None else _note_bytes(note)
        return self._many(
            "write", local, local_offsets, remote, remote_offsets, nbytes, payload, _topic_bytes(topic), after
        )

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
        after: Any = None,
    ) -> Transfer:
        """Put `blocks` of our cache into `remote_blocks` of the peer's (default: its cache of that name), all layers.

        Blocks are indices, lists or integer arrays of equal length, the remote ones without repetition. Raises
        `RegionError` (an index past the end, unequal lengths), `PeerMismatchError` (layouts that differ, by field).
        Otherwise as `write`.
        """
        return self._kv_transfer("write", cache, blocks, remote_blocks, remote, layers, note, topic, after)

    def read_kv(
        self,
        cache: KVCache,
        blocks: Blocks,
        remote_blocks: Blocks,
        *,
        remote: RemoteKV | str | None = None,
        layers: Sequence[int] | None = None,
        after: Any = None,
    ) -> Transfer:
        """Fetch `remote_blocks` of the peer's cache into `blocks` of ours. Otherwise as `write_kv`."""
        return self._kv_transfer("read", cache, blocks, remote_blocks, remote, layers, None, "", after)

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
        after: Any,
    ) -> Transfer:
        target = self._remote_kv(cache, remote)
        direction: Literal["local", "remote"] = "remote" if kind == "write" else "local"
        here, far = cache.layout.pair_blocks(target.layout, blocks, there, destination=direction)
        indices = _layers(layers, cache.layout.num_layers)
        rows = [row for layer in indices for row in rows_of_layer(cache, target, layer, here, far)]
        payload = None if note is None else _note_bytes(note)
        return self._post_rows(kind, rows, payload, _topic_bytes(topic), _core.EPOCH_NOW, after)

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

        payload, about = None if note is None else _note_bytes(note), _topic_bytes(topic)

        def post_layer(layer: int, after: Any) -> Transfer:
            return self._post_rows("write", rows_of_layer(cache, target, layer, here, far), None, b"", epoch, after)

        def send_note(aborted: bool) -> Transfer:
            return self._post("note", [], 0, payload, about, aborted=aborted)

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

    def _post_rows(
        self, kind: str, rows: list[Row], note: bytes | None, topic: bytes, epoch: int, after: Any
    ) -> Transfer:
        segments: list[Segment] = [(local, r.handle, r.rkey, lo, ro, n) for local, r, lo, ro, n in rows]
        total = sum(int(row[4].sum()) for row in rows)
        return self._post(kind, segments, total, note, topic, epoch=epoch, after=after)

    # ---- notes ----

    def notify(self, payload: Payload, *, topic: str = "") -> Transfer:
        """Send a note of its own (at most 64 KiB).

        Await it to know that it stands in the peer's queue; it fails as `write` does.
        """
        return self._post("note", [], 0, _note_bytes(payload), _topic_bytes(topic))

    # ---- measuring ----

    async def probe(self, *, seconds: float = 2.0) -> ProbeResult:
        """Measure the path to this peer, from host memory to host memory: latency, bandwidth each way, failures.

        Takes about `seconds` (0.1 to 60), and as much of the path as it gets: transfers of others suffer meanwhile. The
        peer lends up to 64 MiB for it, to one probe at a time, and takes them back when this ends, when we are lost, or
        after 90 s. Raises `RemoteAccessError` (it does not lend: it is being probed, or its memory is short),
        `TransferTimeoutError` (its loop does not answer), `RegionError` (no path, or no memory here), and as `write`.
        Cancelling this ends what is under way and gives the memory back.
        """
        self._host.check()
        self._endpoint.expect(1)  # heartbeats, so that a frozen peer is noticed
        try:
            return await probe_path(self, self._host.scratch, seconds)
        finally:
            self._endpoint.expect(-1)

    def note_probe(self, payload: bytes) -> Transfer:
        """A note between the two engines, about the memory of a probe."""
        return self._post("note", [], 0, payload, PROBE_TOPIC.encode())

    async def lent(self, name: str, *, wait: float) -> RemoteRegion:
        """The memory that it lends for a probe."""
        return await self._wait_for("memory for a probe", name, self._announced.hidden, wait)

    def lost_error(self) -> HixlError:
        """Why it is lost."""
        return self._lost_error()

    def became_lost(self, status: str, text: str) -> None:
        super().became_lost(status, text)
        self._host.scratch.lost(self)

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
    if encoded == PROBE_TOPIC.encode():
        raise ConfigError(f"topic: {topic!r} is what engines use between themselves; choose another")
    if len(encoded) > _core.TOPIC_MAX:
        raise ConfigError(f"topic: at most {_core.TOPIC_MAX} bytes of UTF-8, not {len(encoded)}")
    return bytes(encoded)
