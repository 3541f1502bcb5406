# SPDX-License-Identifier: Apache-2.0
"""The engine: one per process and event loop; it owns the native core, the regions and the peers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import random
import secrets
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from aiohixl import _core
from aiohixl.address import Address, SocketFile, format_tcp, looks_like_address, parse_addresses
from aiohixl.buffers import BufferInfo, inspect_buffer
from aiohixl.completion import CompletionQueue, NativeEvent, wake
from aiohixl.config import EngineConfig, parse_host_port
from aiohixl.errors import (
    ClosedError,
    ConfigError,
    HixlError,
    PeerError,
    PeerMismatchError,
    PeerUnreachableError,
    RegionError,
    RegionPinnedError,
    RendezvousError,
    make_error,
)
from aiohixl.events import Event, EventFan
from aiohixl.kv import KVLayout
from aiohixl.kvcache import KVCache, encode_announcement
from aiohixl.notes import Inbox, Note, NoteBoard
from aiohixl.peer import Peer, unreachable
from aiohixl.region import ACCESS, Answer, Region

__all__ = ["Engine"]

_PART = "{cache}\n{slot}"  # the name of a KV cache's part; users' names have no line feed
# How an engine with no room for another handshake looks from outside: a full queue, a reset, a plain end.
_BUSY = (errno.EAGAIN, errno.ECONNRESET, errno.EPIPE, 0)
_UNPARK_PER_ROUND = 512
T = TypeVar("T")
#: Regions that a stopped peer may still touch although their engine is closed: leaking is safe, reusing is not.
_stuck_memory: list[Region] = []
_live: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()


class Engine:
    """Registers memory, connects to peers, and moves bytes between the two.

    ``async with Engine("decode-0", rendezvous="http://host:7700") as engine: ...``

    Args:
        name: what peers call it; at most 128 bytes of printable UTF-8 without ``/``.
        rendezvous: URL of the rendezvous; without one, peers connect by `address`.
        token: bearer token of the rendezvous; also the links' secret when `secret` is not given.
        secret: shared by all engines; each control link proves it. The rendezvous gets a token derived from it.
        transports: ``["auto"]``, or the transports that may be used.
        address: ``host:port`` to listen on by TCP as well, besides the unix socket; port 0 picks one.
        advertise: the host that peers are told, where `address` is a wildcard.
        ttl, join_timeout, replace, force: see `aiohixl.rendezvous.RendezvousClient.join`.
        copy_threads: native threads that copy; default the cores, at most 4.
        queue_depth, peer_depth: transfers in flight in the native core, in all and per peer; more park.
        inline_limit: bytes up to which a write between allocated regions is done inside the post.
        max_mappings: mappings of peers' regions; idle ones beyond it are dropped until their next use; default half of
            the kernel's vm.max_map_count.
        peer_timeout: seconds without a sign of life after which a peer that we wait for is lost.
        stall_timeout: seconds without progress after which a transfer fails.
        cancel_grace: seconds that a cancelled transfer, or a revoked peer, has to let go of memory.
        handshake_timeout: seconds that a connection has to prove who it is.
        faults: a `aiohixl.testing.FaultPlan`; for tests.

    An engine belongs to the loop it was entered on. Posting is possible from any thread; everything else raises
    `ClosedError` elsewhere, and in a forked child.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self._config = EngineConfig.build(name, options)
        self.name = name
        self._incarnation = secrets.token_bytes(16)
        self._core: _core.Engine | None = None
        self._queue: CompletionQueue | None = None
        self._socket: SocketFile | None = None
        self._forked = False
        self._closer: asyncio.Task[None] | None = None
        self._closed = False
        self._peers: dict[int, Peer] = {}
        self._by_address: dict[str, asyncio.Task[Peer]] = {}
        self._connecting: dict[int, asyncio.Future[Peer]] = {}
        self._parked: dict[Peer, None] = {}
        self._unpark_timer: asyncio.TimerHandle | None = None
        self._regions: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()
        self._named: dict[str, Region] = {}
        self._kept: dict[int, Region] = {}
        self._allocations: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()
        self._notes = NoteBoard(self._note_taken)
        self._credits: dict[Peer, int] = {}
        self._events = EventFan()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._client: Any = None
        self._awaiting: dict[asyncio.Task[Peer], int] = {}
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._epoch = 0
        self._created: traceback.StackSummary | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._core else "new"
        return f"<Engine {self.name!r} {self.incarnation[:8]} {state}>"

    # ---- life ----

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> Self:
        """What ``async with`` does on entry: listen, and join the rendezvous.

        Raises `ConfigError` (the address cannot be listened on) or `RendezvousError`; the engine is closed then.
        """
        if self._core is not None or self._closed:
            raise ClosedError(f"{self!r} was started before; make a new Engine")
        loop = asyncio.get_running_loop()
        config = self._config
        if loop.get_debug():
            self._created = traceback.extract_stack(sys._getframe(1))
        host, port = parse_host_port(config.address, "address") if config.address else (None, 0)
        if host is not None:
            host = (await _resolve(loop, host, port))[0]
        self._socket = SocketFile()
        try:
            self._core = _core.Engine(
                self.name.encode(),
                self._incarnation,
                secret=config.secret or (config.token.encode() if config.token else None),
                unix_path=os.fsencode(self._socket.path),
                tcp_host=host.encode() if host else None,
                tcp_port=port,
                options=config.native(),
                faults=[
                    (f.nth, _core.FAULT_ACTIONS[f.action], _status_number(f.status), int(f.delay * 1e9))
                    for f in config.faults
                ],
            )
        except _core.StatusError as exc:
            self._socket.close()
            self._closed = True
            raise ConfigError(f"engine {self.name!r}: {exc.text or os.strerror(exc.sys_errno)}") from None
        self._queue = CompletionQueue(self._core, loop, self._on_event)
        self._queue.after_drain = self._after_drain
        self._queue.start()
        _live[id(self)] = self
        if config.rendezvous is not None:
            try:
                await self._join(config.rendezvous)
            except BaseException:
                await self.close()
                raise
        return self

    async def _join(self, url: str) -> None:
        from aiohixl.rendezvous import RendezvousClient
        from aiohixl.wire import derive_bearer

        config = self._config
        token = config.token or (derive_bearer(config.secret) if config.secret else None)
        self._client = RendezvousClient(url, token=token)
        record = await self._client.join(
            self.name,
            incarnation=self.incarnation,
            addresses=[str(a) for a in parse_addresses(self.address)],
            capabilities={"transports": ["shm"]},
            ttl=config.ttl,
            replace=config.replace,
            force=config.force,
            timeout=config.join_timeout,
            on_lost=self._displaced,
            on_rejoined=lambda record: self._rejoined(record.epoch),
        )
        self._rejoined(record.epoch)
        self._spawn(self._watch(), "watch")

    def _rejoined(self, epoch: int) -> None:
        again = self._epoch != 0
        self._epoch = epoch
        if self._core is not None:
            self._core.set_epoch(epoch)
        if again:
            self._events.emit(Event("rejoined", detail=f"epoch {epoch}"))

    def _displaced(self, error: HixlError) -> None:
        """Another engine has our name: our peers must not take us for it."""
        self._events.emit(Event("displaced", detail=str(error)))
        for peer in list(self._peers.values()):
            if not peer.is_lost:
                peer._endpoint.close()

    async def _watch(self) -> None:
        """A newer engine under a connected peer's name means that the peer is gone, whatever its socket says."""
        async with contextlib.aclosing(self._client.watch()) as events:
            async for event in events:
                for record in event.records if event.kind in ("snapshot", "joined", "updated") else ():
                    if any(p.name == record.name and p.epoch < record.epoch for p in self._peers.values()):
                        self._native().supersede(record.name.encode(), record.epoch)

    async def close(self, timeout: float = 5.0) -> None:  # noqa: ASYNC109 - patience, not a limit on the call
        """Leave the rendezvous, wait up to `timeout` seconds for transfers in flight, abort the rest.

        Joins the native threads. Always ends closed, also when cancelled. Idempotent; concurrent closers share the one
        close. `RegionPinnedError`: it is closed, but a stopped peer may still touch the memory it had access to.
        """
        if self._forked:
            raise ClosedError(f"{self!r} belongs to the parent of this process")
        if self._core is None or (self._closed and self._closer is None):
            self._closed = True
            return
        self._check_loop()
        if self._closer is None:
            self._closer = self._queue_().loop.create_task(self._close(timeout))
        cancelled: asyncio.CancelledError | None = None
        while not self._closer.done():
            try:
                await asyncio.shield(self._closer)
            except asyncio.CancelledError as exc:
                if self._closer.cancelled():
                    raise
                cancelled = cancelled or exc
        self._closer.result()
        if cancelled is not None:
            raise cancelled

    async def _close(self, patience: float) -> None:
        try:
            await self._settle(patience)
            stuck = await _in_thread(self._queue_().loop, self._native().stop)
        except BaseException:  # cancelled with all tasks of its loop: the end is without patience, but it is the end
            self._finish_close(self._native().stop())
            raise
        self._finish_close(stuck)

    async def _settle(self, patience: float) -> None:
        queue = self._queue_()
        for task in [*self._tasks, *self._by_address.values()]:
            task.cancel()
        if self._client is not None:
            await self._client.close()
        deadline = queue.loop.time() + patience
        while (
            (queue.sinks or self._parked)
            and queue.loop.time() < deadline
            and any(not p.is_lost for p in self._peers.values())
        ):
            woken = queue.waiter(self._idle_waiters)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await woken

    def abort(self) -> None:
        """Close at once, without patience: transfers in flight fail with `TransferAbortedError`.

        Joins the native threads, which may take `cancel_grace` where a peer is copying out of our memory. Idempotent.
        """
        if self._forked:
            raise ClosedError(f"{self!r} belongs to the parent of this process")
        if self._core is None or self._closed:
            self._closed = True
            return
        self._check_loop()
        for task in [*self._tasks, *self._by_address.values()]:
            task.cancel()
        self._finish_close(self._core.stop())

    def _finish_close(self, stuck: int) -> None:
        if self._closed:
            return
        if stuck:
            _stuck_memory.extend(self._kept.values())
        queue = self._queue_()
        queue.close()
        self._closed = True
        for peer in self._peers.values():
            if not peer.is_lost:
                peer.became_lost("CLOSED", "this engine is closed")
        for future in self._connecting.values():
            if not future.done():
                future.set_exception(ClosedError(f"{self!r} is closed"))
        if self._unpark_timer is not None:
            self._unpark_timer.cancel()
        for region in list(self._regions.values()):
            if not region.ready:
                region.became_ready(_status_number("CLOSED"), 125)
        self._notes.close()
        self._events.close()
        self._kept.clear()
        self._named.clear()
        if self._socket is not None:
            self._socket.close()
        _live.pop(id(self), None)
        if stuck:
            raise RegionPinnedError(
                f"{self!r} is closed, but {stuck} peer(s) stand still in the middle of a copy: the memory that they "
                "could reach stays allocated for the life of this process; do not reuse it"
            )

    def __del__(self) -> None:
        if getattr(self, "_core", None) is None or self._closed or self._forked:
            return  # also where __init__ refused an option
        where = "" if self._created is None else "\nstarted at:\n" + "".join(self._created.format())
        warnings.warn(f"{self!r} was never closed{where}", ResourceWarning, source=self, stacklevel=2)
        queue = self._queue_()
        if not queue.loop.is_closed():
            with contextlib.suppress(Exception):
                queue.stop()
        if self._socket is not None:
            self._socket.close()

    def check(self) -> None:
        """Raise `ClosedError` unless this is the engine's own loop, process and lifetime."""
        if self._forked:
            raise ClosedError(f"{self!r} belongs to the parent of this process; make an engine of your own")
        if self._core is None:
            raise ClosedError(f"{self!r} is not started: use `async with`, or `await engine.start()`")
        if self._closed or self._closer is not None:
            raise ClosedError(f"{self!r} is closed")
        self._check_loop()

    def _check_loop(self) -> None:
        queue = self._queue_()
        if not queue.on_loop() or asyncio.get_running_loop() is not queue.loop:
            raise ClosedError(f"{self!r} belongs to another event loop or thread; only posts may come from elsewhere")

    def _native(self) -> _core.Engine:
        assert self._core is not None
        return self._core

    def _queue_(self) -> CompletionQueue:
        assert self._queue is not None
        return self._queue

    @property
    def queue(self) -> CompletionQueue:
        return self._queue_()

    def _spawn(self, coro: Coroutine[Any, Any, Any], what: str) -> None:
        task = self._queue_().loop.create_task(coro, name=f"aiohixl {self.name} {what}")
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._closed:
            self._queue_().loop.call_exception_handler(
                {"message": f"a background task of {self!r} failed", "exception": error, "task": task}
            )

    # ---- identity ----

    @property
    def incarnation(self) -> str:
        """32 hexadecimal digits, new for each engine object."""
        return self._incarnation.hex()

    @property
    def epoch(self) -> int:
        """What the rendezvous gave: grows with each incarnation of the name; 0 without a rendezvous."""
        return self._epoch

    @property
    def address(self) -> str:
        """Where peers can connect: give it to their `connect`."""
        if self._socket is None:
            raise ClosedError(f"{self!r} is not started: it has no address yet")
        out = [str(Address(self._socket.path, None, 0))]
        if self._config.address:
            host, _ = parse_host_port(self._config.address, "address")
            out.append(format_tcp(self._config.advertise or host, self._native().tcp_port))
        return ",".join(out)

    @property
    def peers(self) -> dict[str, Peer]:
        """Connected peers by name; of several links to one name, the newest."""
        return {peer.name: peer for peer in self._peers.values() if not peer.is_lost}

    # ---- memory ----

    def allocate(self, nbytes: int, name: str = "", *, access: str = "rw") -> Region:
        """Page-aligned memory that peers on this host can map: the fast path on both ends.

        At once; pages are filled in a native thread, and awaiting the region waits for that. With a `name`, peers can
        see it and do what `access` (``r``, ``w``, ``rw``) says, until `deregister`. Raises `RegionError` where memory
        is short.
        """
        self.check()
        self._check_name(name)
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes <= 0:
            raise RegionError(f"allocate: a positive number of bytes, not {nbytes!r}")
        free = _available_memory()
        if free is not None and nbytes > free:
            raise RegionError(f"allocate: {nbytes} bytes asked for, {free} bytes of memory are available")
        region = self._region(name, access, nbytes=nbytes, ready=False)
        self._allocations[region.id] = region
        self._announce(region, name)
        return region

    def register(self, buffer: Any, name: str = "", *, access: str = "rw") -> Region:
        """Register memory that exists: anything with the buffer protocol, numpy and torch CPU tensors, DLPack.

        No copy; contiguous. The object is kept until `deregister`. Memory inside an `allocate`d region is recognised
        and stays as fast. Raises `RegionError` for memory that no transport here reaches, and for read-only buffers
        unless ``access="r"``.
        """
        self.check()
        region = self._register(inspect_buffer(buffer), buffer, name, access)
        self._announce(region, name)
        return region

    def register_many(self, buffers: Mapping[str, Any], *, access: str = "rw") -> dict[str, Region]:
        """`register` for each, validated as a whole before any is registered."""
        self.check()
        infos = {name: inspect_buffer(buffer) for name, buffer in buffers.items()}
        for name, info in infos.items():
            self._check_name(name, required=True)
            _check_registrable(info, name, access)
        regions = {name: self._register(info, buffers[name], name, access) for name, info in infos.items()}
        for name, region in regions.items():
            self._announce(region, name)
        return regions

    def register_kv(self, layers: Any, name: str = "kv", *, block_axis: int = 0, access: str = "rw") -> KVCache:
        """Register a paged KV cache: for each layer one tensor, a (k, v) pair, or a mapping of parts.

        See `KVLayout.from_layers`. Peers see it under `name` with its layout. Raises `ConfigError` or `RegionError`
        that names the layer.
        """
        self.check()
        self._check_name(name, required=True)
        layout, infos = KVLayout.from_layers(layers, block_axis=block_axis)
        for info in infos:
            _check_access(info, name, access)
        regions = []
        for slot, info in enumerate(infos):
            part = _PART.format(cache=name, slot=slot)
            region = self._register(info, info.owner, part, access, strided=True)
            regions.append(region)
        root = self._region(name, "r", nbytes=0, layout=True, ready=True)
        blob = encode_announcement(layout, regions)
        if len(blob) > _core.BLOB_MAX:
            raise ConfigError(
                f"register_kv: the layout's description has {len(blob)} bytes, more than {_core.BLOB_MAX}"
            )
        for slot, region in enumerate(regions):
            self._announce(region, _PART.format(cache=name, slot=slot))
        cache = KVCache(name, layout, regions, root)
        self._announce(root, name, blob)
        return cache

    def _register(self, info: BufferInfo, owner: Any, name: str, access: str, *, strided: bool = False) -> Region:
        self._check_name(name, part=strided)
        if strided:
            _check_access(info, name, access)
        else:
            _check_registrable(info, name, access)
        region = self._place(info, (owner, info.owner), name, access)
        region.readonly = info.readonly
        return region

    def _place(self, info: BufferInfo, keep: Any, name: str, access: str) -> Region:
        for parent in self._allocations.values():
            if parent.addr <= info.addr and info.addr + info.nbytes <= parent.addr + parent.nbytes:
                offset = info.addr - parent.addr
                return self._region(
                    name,
                    access,
                    nbytes=info.nbytes,
                    parent=parent,
                    offset=offset,
                    owner=keep,
                    ready=parent.ready,
                )
        return self._region(name, access, nbytes=info.nbytes, addr=info.addr, owner=keep, ready=True)

    def _region(self, name: str, access: str, *, nbytes: int, ready: bool, **native: Any) -> Region:
        _check_access_word(access)
        try:
            region = Region(self, self._native(), name=name, access=access, ready=ready, nbytes=nbytes, **native)
        except _core.StatusError as exc:
            status = self._queue_().statuses[exc.status]
            detail = f": {os.strerror(exc.sys_errno)}" if status == "SYSTEM" else ""
            raise RegionError(f"cannot register {nbytes} bytes as {name!r}{detail}") from None
        self._regions[region.id] = region
        return region

    def _check_name(self, name: str, *, required: bool = False, part: bool = False) -> None:
        if not isinstance(name, str) or (required and not name):
            raise ConfigError(f"a name is a string that is not empty, not {name!r}")
        try:
            size = len(name.encode())
        except UnicodeEncodeError:
            raise ConfigError(f"a name is a string that UTF-8 can encode, not {name[:40]!r}") from None
        if size > _core.NAME_MAX or "\0" in name or ("\n" in name and not part):
            raise ConfigError(
                f"a name has at most {_core.NAME_MAX} bytes of UTF-8 without NUL and line feed: {name[:40]!r}"
            )
        if name in self._named:
            raise RegionError(f"{name!r} is registered already: {self._named[name]!r}; deregister it first")

    def _announce(self, region: Region, name: str, blob: bytes = b"") -> None:
        if name:
            self._named[name] = region
            self._kept[region.id] = region  # peers may use it whether or not anybody here still holds it
            region._announce(name.encode(), blob)

    # What regions ask of their engine.

    def incarnation_of(self, peer: Any) -> bytes:
        if isinstance(peer, str):
            found = self.peers.get(peer)
            if found is None:
                raise RegionError(f"no peer {peer!r} is connected; there are {list(self.peers) or 'none'}")
            peer = found
        if not isinstance(peer, Peer):
            raise ConfigError(f"a Peer or the name of one, not {peer!r}")
        return bytes.fromhex(peer.incarnation)

    def region_quarantined(self, region: Region, spans: tuple[tuple[int, int], ...], detail: str) -> None:
        self._events.emit(Event("quarantined", region=region, spans=spans, detail=detail))

    def region_released(self, region: Region, spans: tuple[tuple[int, int], ...]) -> None:
        self._events.emit(Event("released", region=region, spans=spans))
        if region.deregistered and not region.quarantined:
            self._kept.pop(region.id, None)

    def region_gone(self, region: Region) -> None:
        if self._named.get(region.name) is region:
            del self._named[region.name]
        if not region.quarantined:  # its memory must outlive whatever may still touch it
            self._kept.pop(region.id, None)

    # ---- peers ----

    async def connect(self, target: str, *, timeout: float = 30.0) -> Peer:  # noqa: ASYNC109 - bounds retries, told in the error
        """The peer of that name (from the rendezvous) or address (its `Engine.address`).

        Waits for a name that has not joined yet. Concurrent calls for one target share one connection; a peer that is
        connected is answered at once. Raises `PeerUnreachableError`, `PeerMismatchError` (protocol, secret,
        incarnation) or `RendezvousError`. Cancelling this ends the attempt if nobody else waits for it.
        """
        self.check()
        if not isinstance(target, str) or not target:
            raise ConfigError(f"connect takes a name or an address, not {target!r}")
        task = self._by_address.get(target)
        if task is not None and task.done():
            if not task.cancelled() and task.exception() is None and not task.result().is_lost:
                return task.result()
            task = None
        if task is None:
            task = self._queue_().loop.create_task(self._connect(target, timeout), name=f"aiohixl connect {target}")
            task.add_done_callback(lambda t: None if t.cancelled() else t.exception())
            self._by_address[target] = task
        self._awaiting[task] = self._awaiting.get(task, 0) + 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._closer is not None:
                raise ClosedError(f"connect to {target!r}: {self!r} was closed") from None
            if self._awaiting[task] == 1 and task.cancel() and self._by_address.get(target) is task:
                del self._by_address[target]  # a call from now on begins anew, not by waiting for what was given up
            raise
        finally:
            self._awaiting[task] -= 1
            if not self._awaiting[task]:
                del self._awaiting[task]
            failed = task.done() and (task.cancelled() or task.exception() is not None)
            if failed and self._by_address.get(target) is task:  # somebody may be trying again already
                del self._by_address[target]

    def _forget_address(self, lost: Peer) -> None:
        for target, task in list(self._by_address.items()):
            if task.done() and not task.cancelled() and task.exception() is None and task.result() is lost:
                del self._by_address[target]

    async def _connect(self, target: str, patience: float) -> Peer:
        loop = self._queue_().loop
        deadline = loop.time() + patience
        if looks_like_address(target):
            return await self._try_addresses(target, parse_addresses(target), None, None, deadline)
        if self._client is None:
            raise ConfigError(
                f"connect to {target!r}: a name needs a rendezvous; without one give the peer's engine.address"
            )
        pause = 0.05
        while True:
            try:
                record = await self._client.lookup(target, wait=max(0.0, deadline - loop.time()))
            except RendezvousError as exc:
                if exc.status != 404:
                    raise
                raise PeerUnreachableError(
                    f"connect to {target!r}: the name did not appear in {patience} s: {exc}"
                ) from exc
            addresses = parse_addresses(",".join(record.addresses)) if record.addresses else []
            try:
                return await self._try_addresses(
                    target, addresses, record.name, bytes.fromhex(record.incarnation), deadline
                )
            except PeerError as exc:
                # It may have restarted since it joined: its new incarnation will say so to the rendezvous.
                if isinstance(exc, PeerMismatchError) and getattr(exc, "native_status", "") != "STALE":
                    raise
                if loop.time() + pause >= deadline:
                    raise
                await asyncio.sleep(pause)
                pause = min(pause * 2, 1.0)

    async def _try_addresses(
        self,
        target: str,
        addresses: list[Address],
        name: str | None,
        incarnation: bytes | None,
        deadline: float,
    ) -> Peer:
        tried: list[str] = []
        last: HixlError | None = None
        for address in addresses:
            for numeric in await self._numeric(address, tried):
                try:
                    return await self._dial_patiently(target, numeric, name, incarnation, deadline)
                except PeerUnreachableError as exc:
                    last = exc
                    tried.append(f"{address}: {exc}")
        error = unreachable(repr(target), tried)
        if last is not None:
            error.__cause__ = last
        raise error

    async def _numeric(self, address: Address, tried: list[str]) -> list[Address]:
        if address.host is None:
            return [address]
        try:
            hosts = await _resolve(self._queue_().loop, address.host, address.port)
        except ConfigError as exc:
            tried.append(str(exc))
            return []
        return [Address(None, host, address.port) for host in hosts]

    async def _dial_patiently(
        self, target: str, address: Address, name: str | None, incarnation: bytes | None, deadline: float
    ) -> Peer:
        """`_dial`, and again while it turns us away as if too many were at its door, until their time is up."""
        loop = self._queue_().loop
        until = min(deadline, loop.time() + 1.5 * self._config.handshake_timeout)
        pause = 0.005
        while True:
            try:
                return await self._dial(target, address, name, incarnation, deadline)
            except PeerUnreachableError as exc:
                pause *= random.uniform(1.0, 2.0)
                if getattr(exc, "native_errno", None) not in _BUSY or loop.time() + pause >= until:
                    raise
            await asyncio.sleep(pause)

    async def _dial(
        self, target: str, address: Address, name: str | None, incarnation: bytes | None, deadline: float
    ) -> Peer:
        queue = self._queue_()
        token = queue.new_token()
        future: asyncio.Future[Peer] = queue.loop.create_future()
        self._connecting[token] = future
        try:
            self._native().connect(
                token,
                path=os.fsencode(address.path) if address.path else None,
                host=address.host.encode() if address.host else None,
                port=address.port,
                name=name.encode() if name else None,
                incarnation=incarnation,
            )
            async with asyncio.timeout_at(deadline):
                return await future
        except TimeoutError:
            raise PeerUnreachableError(f"connect to {target!r} at {address}: no answer in time") from None
        except _core.StatusError as exc:
            raise make_error(
                queue.statuses[exc.status], f"connect to {target!r} at {address} is not possible"
            ) from None
        finally:
            self._connecting.pop(token, None)

    # ---- notes, events, figures ----

    def notes(self, topic: str | None = None) -> Inbox[Note]:
        """``async for note in engine.notes()``: notes of that topic (default: those without one), oldest first.

        Each goes to one consumer. Those that nobody takes stand in the way of their senders (256 a peer), of nothing
        else.
        """
        self.check()
        return self._notes.inbox(topic or "")

    def events(self) -> Inbox[Event]:
        """``async for event in engine.events()``: from now on, each subscriber all of them; see `Event`."""
        self.check()
        return self._events.subscribe()

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and what is pending now."""
        self.check()
        return {
            **self._native().stats(),
            "parked": sum(len(p._parked) for p in self._parked),
            "notes_waiting": self._notes.waiting(),
            "pending": len(self._queue_().sinks),
        }

    def _note_taken(self, note: Note) -> None:
        """Credits go back in batches, or when nothing more of this topic is waiting: a command each would cost more."""
        peer: Peer = note.peer
        self._credits[peer] = self._credits.get(peer, 0) + 1
        if self._closed:
            return
        if self._credits[peer] >= 32 or not self._notes.inbox(note.topic):
            for who, count in self._credits.items():
                if not who.is_lost:
                    with contextlib.suppress(_core.StatusError):
                        who.credit(count)
            self._credits.clear()

    def peer_parked(self, peer: Peer) -> None:
        self._parked[peer] = None
        self._arm_unpark()

    def _arm_unpark(self) -> None:
        # Completions make room and drive this; the timer is for the case that none is due.
        if self._unpark_timer is None:
            self._unpark_timer = self._queue_().loop.call_later(0.005, self._unpark_late)

    def _unpark_late(self) -> None:
        self._unpark_timer = None
        self._unpark()
        if self._parked:
            self._arm_unpark()

    def _unpark(self) -> None:
        if not self._parked:
            return
        share = max(1, _UNPARK_PER_ROUND // len(self._parked))
        for peer in list(self._parked):
            if not peer.unpark(share):
                del self._parked[peer]

    def _after_drain(self) -> None:
        self._unpark()
        for peer in self._peers.values():
            peer.after_drain()
        if self._idle_waiters and not self._queue_().sinks and not self._parked:
            wake(self._idle_waiters)

    # ---- native events ----

    def _on_event(self, event: NativeEvent) -> None:
        kind, status, sys_errno, token, value, endpoint, handle, name, blob = event
        if kind == _core.EV_NOTE:
            peer = self._peer(endpoint)
            self._notes.put(Note(peer, blob, name.decode("utf-8", "replace"), bool(value & 1)))
        elif kind == _core.EV_REGION_ADD:
            assert handle is not None
            self._peer(endpoint).region_added(handle, name.decode("utf-8", "replace"), blob)
        elif kind == _core.EV_REGION_DEL:
            assert handle is not None
            self._peer(endpoint).region_removed(handle)
        elif kind == _core.EV_PEER_UP:
            self._events.emit(Event("joined", peer=self._peer(endpoint)))
        elif kind == _core.EV_PEER_READY:
            future = self._connecting.get(token)
            if future is not None and not future.done():
                future.set_result(self._peer(endpoint))
            elif token and endpoint is not None:
                endpoint.close()  # whoever asked for it has gone
        elif kind == _core.EV_PEER_LOST:
            assert endpoint is not None
            lost = self._peers.pop(endpoint.serial, None)
            if lost is not None:
                text = blob.decode("utf-8", "replace")
                lost.became_lost(self._queue_().statuses[status], text)
                self._credits.pop(lost, None)
                self._parked.pop(lost, None)
                self._forget_address(lost)
                self._events.emit(Event("lost", peer=lost, detail=text))
        elif kind == _core.EV_CONNECT_FAILED:
            future = self._connecting.get(token)
            if future is not None and not future.done():
                name_ = self._queue_().statuses[status]
                text = blob.decode("utf-8", "replace")
                future.set_exception(make_error(name_, text, native_status=name_, native_errno=sys_errno))
        elif kind == _core.EV_REGION_READY:
            region = self._regions.get(token)
            if region is not None:
                region.became_ready(status, sys_errno)
        elif kind == _core.EV_DONE:
            answer = self._queue_().sinks.get(token)
            if isinstance(answer, Answer):
                answer.answered(self._queue_(), status == 0, value, blob)
        elif kind == _core.EV_REFUSED:
            self._events.emit(Event("refused", detail=blob.decode("utf-8", "replace")))

    def _peer(self, endpoint: _core.Endpoint | None) -> Peer:
        assert endpoint is not None  # events of peers carry one
        peer = self._peers.get(endpoint.serial)
        if peer is None:
            peer = self._peers[endpoint.serial] = Peer(self, endpoint)
        return peer


def _status_number(name: str) -> int:
    return next(number for number, known in _core.statuses().items() if known == name)


def _check_access_word(access: object) -> None:
    if not isinstance(access, str) or access not in ACCESS:
        raise ConfigError(f"access: one of {', '.join(ACCESS)}, not {access!r}")


def _check_access(info: BufferInfo, name: str, access: str) -> None:
    _check_access_word(access)
    if info.readonly and "w" in access:
        raise RegionError(
            f"{name!r} is read-only memory, and access {access!r} lets peers write: use access='r', or a copy"
        )


def _check_registrable(info: BufferInfo, name: str, access: str) -> None:
    if not info.contiguous:
        raise RegionError(
            f"{name!r} is not contiguous (shape {info.shape}, strides {info.strides} bytes): register the whole of its "
            "memory, or use register_kv, which takes strides"
        )
    _check_access(info, name, access)


def _available_memory() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


async def _in_thread(loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> T:
    """Run a blocking call in a thread of its own: the loop's executor would leave one behind, and may be full."""
    future: asyncio.Future[T] = loop.create_future()

    def finish(deliver: Callable[[], None]) -> None:
        if not future.done():
            deliver()

    def run() -> None:
        try:
            result = call()
        except BaseException as exc:
            deliver = functools.partial(future.set_exception, exc)
        else:
            deliver = functools.partial(future.set_result, result)
        loop.call_soon_threadsafe(finish, deliver)

    thread = threading.Thread(target=run, name="aiohixl-call", daemon=True)
    thread.start()
    try:
        return await future
    finally:
        if future.done():
            thread.join()


async def _resolve(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[str]:
    """Numeric addresses of a host name, at least one, or `ConfigError`."""
    import socket

    def numeric(flags: int) -> list[str]:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        return list(dict.fromkeys(str(info[4][0]) for info in infos))

    try:
        return numeric(socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):  # UnicodeError: labels that are no host's
        pass
    try:
        return await _in_thread(loop, lambda: numeric(0))
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"host {host!r} cannot be resolved: {exc}") from None


# Other threads may run between these hooks, and may start, drop or fork too: one fork at a time, and each engine that
# was locked before is held, and let go after.
_fork_lock = threading.Lock()
_forking: list[Engine] = []


def _before_fork() -> None:
    _fork_lock.acquire()
    _forking.extend(engine for ref in _live.valuerefs() if (engine := ref()) is not None)
    for engine in _forking:
        engine._native().before_fork()


def _after_fork_in_parent() -> None:
    for engine in _forking:
        engine._native().after_fork()
    _forking.clear()
    _fork_lock.release()


def _after_fork_in_child() -> None:
    for engine in _forking:
        engine._native().forked()
        engine._forked = True
        if engine._socket is not None:
            engine._socket.forget()
    _forking.clear()
    _fork_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
