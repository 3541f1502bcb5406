# SPDX-License-Identifier: Apache-2.0
"""The engine: one per process and event loop; it owns the native core, the regions and the peers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import sys
import traceback
import warnings
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import Any, Self

from aiohixl import _core, forks, links
from aiohixl.address import Address, SocketFile, format_tcp, parse_addresses
from aiohixl.completion import CompletionQueue, NativeEvent, wake
from aiohixl.config import EngineConfig, parse_host_port
from aiohixl.connector import Connector
from aiohixl.copies import Copy
from aiohixl.errors import (
    ClosedError,
    ConfigError,
    HixlError,
    RegionError,
    RegionPinnedError,
)
from aiohixl.events import Event, EventFan
from aiohixl.kvcache import KVCache
from aiohixl.membership import Membership
from aiohixl.notes import Inbox, Note, NoteBoard
from aiohixl.notifies import Notifies, Notify
from aiohixl.offloop import in_thread, resolve
from aiohixl.opening import open_native
from aiohixl.peer import Peer
from aiohixl.rawpeer import RawPeer, check_regions
from aiohixl.region import Answer, Region
from aiohixl.registry import Registry
from aiohixl.remote import RemoteEngine
from aiohixl.scratch import PROBE_TOPIC, ScratchDesk
from aiohixl.transfer import NO_INDEX, Transfer

__all__ = ["Engine"]

_UNPARK_PER_ROUND = 512


class Engine:
    """Registers memory, connects to peers, and moves bytes between the two.

    ``async with Engine("decode-0", rendezvous="http://host:7700") as engine: ...``

    Args:
        name: what peers call it; at most 128 bytes of printable UTF-8 without ``/``.
        rendezvous: URL of the rendezvous; without one, peers connect by `address`.
        token: bearer token of the rendezvous; also the links' secret when `secret` is not given.
        secret: shared by all engines; each control link proves it. The rendezvous gets a token derived from it.
        transports: the transports that may be used: ``shm``, ``hixl``, ``verbs``, ``tcp``. ``["auto"]`` is ``shm`` on
            one host, ``tcp`` where the side that was connected to has an `address`, and ``hixl`` where an option asks
            for it: an NPU is not opened uninvited. ``["hixl"]`` alone does without ``shm`` on one host too. ``verbs``
            has to be named, and excludes ``hixl``. ``["tcp"]`` without an `address` listens on a port of the loopback
            interface.
        address: ``host:port`` to listen on by TCP as well, besides the unix socket; port 0 picks one.
        advertise: the host that peers are told instead of `address`'s; needed where that is a wildcard.
        ttl, join_timeout, replace, force: see `aiohixl.rendezvous.RendezvousClient.join`.
        streams: data connections of the tcp transport to a peer; default 1.
        checksum: the tcp transport protects each message by a CRC-32C, end to end; a mismatch fails the transfer.
        zerocopy: with the tcp transport the kernel sends large messages from their memory (MSG_ZEROCOPY) rather than
            copy them into the socket; a transfer then ends when the kernel has let go of its source, too.
        copy_threads: native threads that copy; default the cores, at most 4.
        queue_depth, peer_depth: transfers in flight in the native core, in all and per peer; more park.
        inline_limit: bytes up to which a write between allocated regions is done inside the post.
        max_mappings: mappings of peers' regions; idle ones beyond it are dropped until their next use; default half of
            the kernel's vm.max_map_count.
        peer_timeout: seconds without a sign of life after which a peer that we wait for is lost.
        stall_timeout: seconds without progress after which a transfer fails.
        cancel_grace: seconds that a cancelled transfer, or a revoked peer, has to let go of memory.
        handshake_timeout: seconds that a connection has to prove who it is.
        verbs_device, verbs_gid_index: the RDMA device, and its GID; default: the first that is active, and a GID that
            is routed.
        verbs_timeout: seconds after which a transfer fails whose peer's device does not answer; default 0.5, and up to
            four times that with some devices.
        npu_id: the Ascend NPU of this engine, default 0 with ``hixl``.
        link: ``hccs``, ``roce``, or ``auto``: HIXL chooses. Engines of one process go together in this.
        traffic_class, service_level: of RoCE, 0 to 255 (with ``hixl`` in steps of 4), and 0 to 7; also with ``verbs``.
        buffer_pool: ``"NUM:SIZE_MB"`` or ``(num, mb)``: HIXL's staging buffers; not with `fabric_mem`.
        fabric_mem: HIXL's fabric memory (A3 only).
        hixl_options: HIXL's own options by HIXL's names; ``LocalCommRes`` and ``GlobalResourceConfig`` also as dicts.
        hixl_address: ``ip:port`` for HIXL to listen on; default a free port where `address` is, or on the loopback.
        hixl_library: libcann_hixl.so or its directory; default ``ASCEND_HOME_PATH/lib64`` and the loader's path.
        busy_poll: seconds up to 0.001 for which an await, and HIXL's thread, spin for a completion before they sleep;
            with ``hixl`` and ``verbs``; default 0.
        faults: a `aiohixl.testing.FaultPlan`; for tests.

    An engine belongs to the loop it was entered on. Posting is possible from any thread; everything else raises
    `ClosedError` elsewhere, and in a forked child.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self._config = EngineConfig.build(name, options)
        self.name = name
        self._incarnation = secrets.token_bytes(16)
        self._core: _core.Engine | None = None
        self._listens: str | None = None
        self._queue: CompletionQueue | None = None
        self._socket: SocketFile | None = None
        self._forked = False
        self._closer: asyncio.Task[None] | None = None
        self._closed = False
        self._started = False
        self._hixl_address: str | None = None
        self._notifies: Notifies | None = None
        self._peers: dict[int, RemoteEngine] = {}
        self._parked: dict[RemoteEngine, None] = {}
        self._unpark_timer: asyncio.TimerHandle | None = None
        self._registry: Registry | None = None
        self._connector: Connector | None = None
        self._member: Membership | None = None
        self._notes = NoteBoard(self._note_taken)
        self._scratch = ScratchDesk(self._scratch_memory, self._spawn)
        self._credits: dict[Peer, int] = {}
        self._events = EventFan()
        self._tasks: set[asyncio.Task[Any]] = set()
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
        """What ``async with`` does on entry: listen, open the NPU (seconds, off the loop), join the rendezvous.

        Raises `ConfigError` (the address cannot be listened on; HIXL is missing, or refused) or `RendezvousError`; the
        engine is closed then. Cancelled while HIXL starts, this ends at once, and a thread closes what comes of it.
        """
        if self._started or self._closed:
            raise ClosedError(f"{self!r} was started before; make a new Engine")
        self._started = True
        loop = asyncio.get_running_loop()
        config = self._config
        if loop.get_debug():
            self._created = traceback.extract_stack(sys._getframe(1))
        host, port = parse_host_port(config.address, "address") if config.address else (None, 0)
        if host is None and "tcp" in config.transports:
            host = "127.0.0.1"  # what is reachable from elsewhere is for the user to choose
        if host is not None:
            host = (await resolve(loop, host, port))[0]
        self._listens = config.address or (f"{host}:0" if host else None)
        socket = self._socket = SocketFile()

        def discard(core: _core.Engine | None) -> None:
            if core is not None:
                core.stop()
                core.close_fds()
            socket.close()
            links.release(self)

        try:
            tcp = None if host is None else (host, port)
            core, self._hixl_address = await open_native(self, config, self._incarnation, socket.path, tcp, discard)
        except asyncio.CancelledError:
            self._closed = True
            raise
        except BaseException:
            self._closed = True
            discard(None)
            raise
        if self._closed:  # meanwhile
            await in_thread(loop, functools.partial(discard, core))
            raise ClosedError(f"{self!r} was closed while it was being started")
        self._core = core
        self._queue = CompletionQueue(self._core, loop, self._on_event)
        self._queue.after_drain = self._after_drain
        self._queue.busy_poll = config.busy_poll
        self._queue.start()
        npu_id = None if config.hixl is None else config.hixl.npu_id
        self._registry = Registry(self._core, self._queue, self.check, self._incarnation_of, self._events.emit, npu_id)
        self._connector = Connector(self._core, self._queue, config.handshake_timeout)
        forks.remember(self)
        if config.rendezvous is not None:
            try:
                await self._join()
            except BaseException:
                await self.close()
                raise
        return self

    async def _join(self) -> None:
        self._member = Membership(self._config, on_epoch=self._rejoined, on_displaced=self._displaced)
        self._connector_().client = self._member.client
        await self._member.join(self.incarnation, [str(a) for a in parse_addresses(self.address)])
        self._spawn(self._member.watch(self._seen), "watch")

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
            if isinstance(peer, Peer) and not peer.is_lost:
                peer.drop()

    def _seen(self, name: str, epoch: int) -> None:
        """A newer engine under a connected peer's name means that the peer is gone, whatever its socket says."""
        if any(isinstance(p, Peer) and p.name == name and p.epoch < epoch for p in self._peers.values()):
            self._native().supersede(name.encode(), epoch)

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
            stuck = await in_thread(self._queue_().loop, self._native().stop)
        except BaseException:  # cancelled with all tasks of its loop: the end is without patience, but it is the end
            self._finish_close(self._native().stop())
            raise
        self._finish_close(stuck)

    async def _settle(self, patience: float) -> None:
        queue = self._queue_()
        for task in self._tasks:
            task.cancel()
        self._connector_().cancel()
        if self._member is not None:
            await self._member.close()
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

        Joins the native threads, which may take `cancel_grace` where a peer is copying out of our memory, and with
        `verbs` twice that, or 2 seconds, where a driver does not come back. Idempotent.
        """
        if self._forked:
            raise ClosedError(f"{self!r} belongs to the parent of this process")
        if self._core is None or self._closed:
            self._closed = True
            return
        self._check_loop()
        for task in self._tasks:
            task.cancel()
        self._connector_().cancel()
        self._finish_close(self._core.stop())

    def _finish_close(self, stuck: int) -> None:
        if self._closed:
            return
        self._closed = True
        self._queue_().close()
        for peer in self._peers.values():
            if not peer.is_lost:
                peer.became_lost("CLOSED", "this engine is closed")
        self._connector_().close(ClosedError(f"{self!r} is closed"))
        pending = list(self._queue_().sinks.values())
        if stuck:
            self._registry_().keep_for_ever(*pending)
        for sink in pending:
            if isinstance(sink, Copy):
                sink.close("CLOSED")
            elif isinstance(sink, Transfer) and not sink.done():  # a library's call has not returned, and may not
                sink.settle((sink.token, _status_number("CLOSED"), 0, 0, 0, NO_INDEX, 0, 0, None))
        if self._unpark_timer is not None:
            self._unpark_timer.cancel()
        self._registry_().close(_status_number("CLOSED"))
        self._notes.close()
        if self._notifies is not None:
            self._notifies.close()
        self._events.close()
        if self._socket is not None:
            self._socket.close()
        forks.forget(self)
        links.release(self)
        if stuck:
            raise RegionPinnedError(
                f"{self!r} is closed, but {stuck} peer(s), or calls of a library, stand still in the middle of a copy: "
                "the memory that they could reach stays allocated for the life of this process; do not reuse it"
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
        # Before the regions and their owners go: native threads, and peers, may be copying.
        if self._core is not None and self._core.stop():
            self._registry_().keep_for_ever(*queue.sinks.values())
        links.release(self)
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

    def _registry_(self) -> Registry:
        assert self._registry is not None
        return self._registry

    def _connector_(self) -> Connector:
        assert self._connector is not None
        return self._connector

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

    # ---- forks ----

    def before_fork(self) -> None:
        self._native().before_fork()

    def after_fork_in_parent(self) -> None:
        self._native().after_fork()

    def after_fork_in_child(self) -> None:
        self._native().forked()
        self._forked = True
        if self._socket is not None:
            self._socket.forget()

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
        if self._listens:
            host, _ = parse_host_port(self._listens, "address")
            out.append(format_tcp(self._config.advertise or host, self._native().tcp_port))
        return ",".join(out)

    @property
    def hixl_address(self) -> str | None:
        """Where HIXL listens, for programs of HIXL's that are not ours; None without an NPU."""
        return self._hixl_address

    @property
    def peers(self) -> dict[str, Peer]:
        """Connected peers by name; of several links to one name, the newest."""
        return {peer.name: peer for peer in self._peers.values() if isinstance(peer, Peer) and not peer.is_lost}

    # ---- memory ----

    def allocate(self, nbytes: int, name: str = "", *, access: str = "rw", device: str = "cpu") -> Region:
        """Page-aligned memory that peers on this host can map: the fast path on both ends.

        At once; pages are filled in a native thread, and awaiting the region waits for that. With a `name`, peers can
        see it and do what `access` (``r``, ``w``, ``rw``) says, until `deregister`. With ``device="npu"`` (or
        ``"npu:0"``) it is memory of this engine's NPU, aligned to 4 KiB, for `Region.upload` and `download`. Raises
        `RegionError` where memory is short, or the engine has no such NPU.
        """
        self.check()
        return self._registry_().allocate(nbytes, name, access=access, device=device)

    def register(self, buffer: Any, name: str = "", *, access: str = "rw") -> Region:
        """Register memory that exists: anything with the buffer protocol, numpy arrays, torch tensors, DLPack.

        No copy; contiguous. The object is kept until `deregister`; an unnamed one, also only until you drop its
        `Region`. Memory inside an `allocate`d region is recognised and stays as fast. Tensors are of the CPU, or of
        this engine's NPU. Raises `RegionError` for memory that no transport here reaches, and for read-only buffers
        unless ``access="r"``; where HIXL cannot take it, awaiting the region raises, and says what it needs.
        """
        self.check()
        return self._registry_().register(buffer, name, access=access)

    def register_many(self, buffers: Mapping[str, Any], *, access: str = "rw") -> dict[str, Region]:
        """`register` for each, validated as a whole before any is registered."""
        self.check()
        return self._registry_().register_many(buffers, access=access)

    def register_kv(self, layers: Any, name: str = "kv", *, block_axis: int = 0, access: str = "rw") -> KVCache:
        """Register a paged KV cache: for each layer one tensor, a (k, v) pair, or a mapping of parts.

        See `KVLayout.from_layers`. Peers see it under `name` with its layout. Raises `ConfigError` or `RegionError`
        that names the layer.
        """
        self.check()
        return self._registry_().register_kv(layers, name, block_axis=block_axis, access=access)

    def _incarnation_of(self, peer: Any) -> bytes:
        if isinstance(peer, str):
            found = self.peers.get(peer)
            if found is None:
                raise RegionError(f"no peer {peer!r} is connected; there are {list(self.peers) or 'none'}")
            peer = found
        if not isinstance(peer, Peer):
            raise ConfigError(f"a Peer or the name of one, not {peer!r}")
        if peer._host is not self:
            raise ConfigError(f"{peer!r} is a peer of another engine than {self!r}: give this engine's, or its name")
        return bytes.fromhex(peer.incarnation)

    # ---- peers ----

    async def connect(self, target: str, *, timeout: float = 30.0) -> Peer:  # noqa: ASYNC109 - bounds retries, told in the error
        """The peer of that name (from the rendezvous) or address (its `Engine.address`).

        Waits for a name that has not joined yet. Concurrent calls for one target share one connection; a peer that is
        connected is answered at once. Raises `PeerUnreachableError`, `PeerMismatchError` (protocol, secret,
        incarnation) or `RendezvousError`. Cancelling this ends the attempt if nobody else waits for it.
        """
        self.check()
        return await self._connector_().connect(target, timeout)

    async def connect_raw(
        self,
        address: str,
        *,
        regions: Mapping[str, tuple[int, int] | tuple[int, int, str]],
        timeout: float = 30.0,  # noqa: ASYNC109 - told in the error
    ) -> RawPeer:
        """An engine of HIXL's that is not ours, at ``ip:port``, as HIXL's own programs connect.

        `regions`: what is agreed on beforehand, by name: ``(addr, nbytes)`` of an NPU's memory, or ``(addr, nbytes,
        "cpu")``; registered there before this is called, as HIXL wants it. See `RawPeer` for what is promised then.
        Raises `PeerUnreachableError` with HIXL's ``code``, and `ConfigError` for an engine without HIXL.
        """
        self.check()
        wanted = check_regions(address, regions)
        self._check_hixl("connect_raw")
        return await self._connector_().connect_raw(address, wanted, timeout)

    def _check_hixl(self, what: str) -> None:
        if self._config.hixl is None:
            raise ConfigError(f"{what} needs HIXL: open the engine with Engine(transports=['hixl'], npu_id=N)")

    # ---- notes, events, figures ----

    def notifies(self) -> Inbox[Notify]:
        """``async for notify in engine.notifies()``: HIXL's own notifications, from engines that are not ours.

        Each goes to one consumer. HIXL keeps 4,096 of them; they are fetched while somebody waits here.
        """
        self.check()
        self._check_hixl("notifies()")
        return self._notifies_()

    def _notifies_(self) -> Notifies:
        if self._notifies is None:
            self._notifies = Notifies(self._native().expect_notifies)
        return self._notifies

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
        """Credits go back once in a turn of the loop: a command to the native side for each note would cost more."""
        if self._closed:
            return
        if not self._credits:
            self._queue_().loop.call_soon(self._return_credits)
        peer: Peer = note.peer
        self._credits[peer] = self._credits.get(peer, 0) + 1

    def _return_credits(self) -> None:
        for peer, count in self._credits.items():
            if not self._closed and not peer.is_lost:
                with contextlib.suppress(_core.StatusError):
                    peer.credit(count)
        self._credits.clear()

    @property
    def scratch(self) -> ScratchDesk:
        """What peers borrow for a probe, and we of them."""
        return self._scratch

    def _scratch_memory(self, nbytes: int, name: str) -> Region:
        return self._registry_().allocate(nbytes, name, hidden=True)

    @property
    def peer_depth(self) -> int:
        return self._config.peer_depth

    def has_room(self) -> bool:
        """Whether the native queue takes another transfer, of whichever peer."""
        return sum(peer._endpoint.inflight for peer in self._peers.values()) < self._config.queue_depth

    def peer_parked(self, peer: RemoteEngine) -> None:
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
            note = Note(peer, blob, name.decode("utf-8", "replace"), bool(value & 1))
            if note.topic == PROBE_TOPIC:
                self._note_taken(note)
                self._scratch.noted(note)
            else:
                self._notes.put(note)
        elif kind == _core.EV_REGION_ADD:
            assert handle is not None
            self._peer(endpoint).region_added(handle, name.decode("utf-8", "replace"), blob)
        elif kind == _core.EV_REGION_DEL:
            assert handle is not None
            self._peer(endpoint).region_removed(handle)
        elif kind == _core.EV_PEER_UP:
            self._events.emit(Event("joined", peer=self._peer(endpoint)))
        elif kind == _core.EV_PEER_READY:
            if token and endpoint is not None and not self._connector_().answered(token, self._peer(endpoint)):
                self._peer(endpoint).drop()  # whoever asked for it has gone
        elif kind == _core.EV_PEER_LOST:
            assert endpoint is not None
            lost = self._peers.pop(endpoint.serial, None)
            if lost is not None:
                text = blob.decode("utf-8", "replace")
                lost.became_lost(self._queue_().statuses[status], text)
                if isinstance(lost, Peer):
                    self._credits.pop(lost, None)
                self._parked.pop(lost, None)
                self._connector_().forget(lost)
                self._events.emit(Event("lost", peer=lost, detail=text))
        elif kind == _core.EV_CONNECT_FAILED:
            self._connector_().failed(token, status, sys_errno, blob.decode("utf-8", "replace"))
        elif kind == _core.EV_REGION_READY:
            self._registry_().became_ready(token, status, sys_errno, blob.decode("utf-8", "replace"))
        elif kind == _core.EV_DONE:
            answer = self._queue_().sinks.get(token)
            if isinstance(answer, Answer):
                answer.answered(self._queue_(), status == 0, value, blob)
        elif kind == _core.EV_REFUSED:
            self._events.emit(Event("refused", detail=blob.decode("utf-8", "replace")))
        elif kind == _core.EV_COPIED:
            copied = self._queue_().sinks.pop(token, None)
            if isinstance(copied, Copy):
                copied.answered(self._queue_().statuses[status], blob.decode("utf-8", "replace"))
        elif kind == _core.EV_NOTIFY:
            self._notifies_().put(Notify(name.decode("utf-8", "replace"), blob.decode("utf-8", "replace")))
        elif kind == _core.EV_WARNING:
            text = f"{self!r}: {blob.decode('utf-8', 'replace')}"
            self._events.emit(Event("warning", detail=text))
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _peer(self, endpoint: _core.Endpoint | None) -> RemoteEngine:
        assert endpoint is not None  # events of peers carry one
        peer = self._peers.get(endpoint.serial)
        if peer is None:
            cls = RawPeer if endpoint.is_raw else Peer
            peer = self._peers[endpoint.serial] = cls(self, endpoint)
        return peer


def _status_number(name: str) -> int:
    return next(number for number, known in _core.statuses().items() if known == name)
