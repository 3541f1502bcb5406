# SPDX-License-Identifier: Apache-2.0
"""From a name or an address to a connected peer."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from typing import Any, TypeVar

from aiohixl import _core
from aiohixl.address import Address, looks_like_address, parse_addresses
from aiohixl.completion import CompletionQueue
from aiohixl.errors import (
    ClosedError,
    ConfigError,
    HixlError,
    PeerError,
    PeerMismatchError,
    PeerUnreachableError,
    RendezvousError,
    TransferError,
    make_error,
    with_data,
)
from aiohixl.hixl import code_in
from aiohixl.offloop import resolve
from aiohixl.peer import Peer
from aiohixl.rawpeer import RawPeer
from aiohixl.remote import RemoteEngine

__all__ = ["Connector"]

# How an engine with no room for another handshake looks from outside: a full queue, a reset, a plain end.
_BUSY = (errno.EAGAIN, errno.ECONNRESET, errno.EPIPE, 0)

P = TypeVar("P", Peer, RawPeer)


class Connector:
    """The connections that one engine makes. `client` is its rendezvous client, or None."""

    def __init__(self, core: _core.Engine, queue: CompletionQueue, handshake_timeout: float) -> None:
        self._core = core
        self._queue = queue
        self._handshake_timeout = handshake_timeout
        self._by_address: dict[str, asyncio.Task[Peer]] = {}
        self._awaiting: dict[asyncio.Task[Peer], int] = {}
        self._connecting: dict[int, asyncio.Future[Any]] = {}
        self._closing = False
        self.client: Any = None

    # ---- what the native side answers ----

    def answered(self, token: int, peer: RemoteEngine) -> bool:
        """False: whoever asked for it has gone."""
        future = self._connecting.get(token)
        if future is None or future.done():
            return False
        future.set_result(peer)
        return True

    def failed(self, token: int, status: int, sys_errno: int, text: str) -> None:
        future = self._connecting.get(token)
        if future is not None and not future.done():
            name = self._queue.statuses[status]
            future.set_exception(make_error(name, text, native_status=name, native_errno=sys_errno))

    # ---- engines that are not ours ----

    async def connect_raw(
        self,
        address: str,
        regions: list[tuple[bytes, int, int, bool]],
        timeout: float,  # noqa: ASYNC109 - told in the error
    ) -> RawPeer:
        """See `Engine.connect_raw`."""
        queue = self._queue
        token = queue.new_token()
        future: asyncio.Future[RawPeer] = queue.loop.create_future()
        self._connecting[token] = future
        try:
            self._core.connect_raw(token, address.encode(), regions)
            async with asyncio.timeout(timeout):
                return await _owned(future)
        except TimeoutError:
            raise PeerUnreachableError(f"connect_raw to {address!r}: HIXL did not connect in {timeout} s") from None
        except (PeerUnreachableError, TransferError) as exc:
            text = f"connect_raw to {address!r}: {exc}; is HIXL listening there, and on a link that both have?"
            raise with_data(PeerUnreachableError(text), code=code_in(str(exc))) from None
        except _core.StatusError as exc:
            status = queue.statuses[exc.status]
            raise make_error(status, f"connect_raw to {address!r} is not possible: {status.lower()}") from None
        finally:
            self._connecting.pop(token, None)

    def cancel(self) -> None:
        """The engine is closing."""
        self._closing = True
        for task in self._by_address.values():
            task.cancel()

    def close(self, error: ClosedError) -> None:
        for future in self._connecting.values():
            if not future.done():
                future.set_exception(error)

    # ---- connecting ----

    async def connect(self, target: str, timeout: float) -> Peer:  # noqa: ASYNC109 - bounds retries, told in the error
        """See `Engine.connect`."""
        if not isinstance(target, str) or not target:
            raise ConfigError(f"connect takes a name or an address, not {target!r}")
        task = self._by_address.get(target)
        if task is not None and task.done():
            if not task.cancelled() and task.exception() is None and not task.result().is_lost:
                return task.result()
            task = None
        if task is None:
            task = self._queue.loop.create_task(self._connect(target, timeout), name=f"aiohixl connect {target}")
            task.add_done_callback(lambda t: None if t.cancelled() else t.exception())
            self._by_address[target] = task
        self._awaiting[task] = self._awaiting.get(task, 0) + 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._closing:
                raise ClosedError(f"connect to {target!r}: the engine was closed") from None
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

    def forget(self, lost: RemoteEngine) -> None:
        for target, task in list(self._by_address.items()):
            if task.done() and not task.cancelled() and task.exception() is None and task.result() is lost:
                del self._by_address[target]

    async def _connect(self, target: str, patience: float) -> Peer:
        loop = self._queue.loop
        deadline = loop.time() + patience
        if looks_like_address(target):
            return await self._try_addresses(target, parse_addresses(target), None, None, deadline)
        if self.client is None:
            raise ConfigError(
                f"connect to {target!r}: a name needs a rendezvous; without one give the peer's engine.address"
            )
        pause = 0.05
        while True:
            try:
                record = await self.client.lookup(target, wait=max(0.0, deadline - loop.time()))
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
                except PeerMismatchError as exc:
                    # A unix socket may turn us away for our uid, as another namespace sees it: is there another way?
                    if address.host is not None or address is addresses[-1]:
                        raise
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
            hosts = await resolve(self._queue.loop, address.host, address.port)
        except ConfigError as exc:
            tried.append(str(exc))
            return []
        return [Address(None, host, address.port) for host in hosts]

    async def _dial_patiently(
        self, target: str, address: Address, name: str | None, incarnation: bytes | None, deadline: float
    ) -> Peer:
        """`_dial`, and again while it turns us away as if too many were at its door, until their time is up."""
        loop = self._queue.loop
        until = min(deadline, loop.time() + 1.5 * self._handshake_timeout)
        pause = 0.005
        while True:
            try:
                return await self._dial(target, address, name, incarnation, deadline)
            except PeerUnreachableError as exc:
                pause *= random.uniform(1.0, 2.0)
                if getattr(exc, "native_errno", None) not in _BUSY:
                    raise
                if loop.time() + pause >= until:
                    text = f"{exc}; perhaps too many that have not proven who they are stand at its door"
                    raise with_data(PeerUnreachableError(text), **vars(exc)) from None
            await asyncio.sleep(pause)

    async def _dial(
        self, target: str, address: Address, name: str | None, incarnation: bytes | None, deadline: float
    ) -> Peer:
        queue = self._queue
        token = queue.new_token()
        future: asyncio.Future[Peer] = queue.loop.create_future()
        self._connecting[token] = future
        try:
            self._core.connect(
                token,
                path=os.fsencode(address.path) if address.path else None,
                host=address.host.encode() if address.host else None,
                port=address.port,
                name=name.encode() if name else None,
                incarnation=incarnation,
            )
            async with asyncio.timeout_at(deadline):
                return await _owned(future)
        except PeerMismatchError as exc:  # the native side knows neither the target nor the address as we write it
            raise with_data(PeerMismatchError(f"connect to {target!r} at {address}: {exc}"), **vars(exc)) from None
        except TimeoutError:
            raise PeerUnreachableError(f"connect to {target!r} at {address}: no answer in time") from None
        except _core.StatusError as exc:
            raise make_error(
                queue.statuses[exc.status], f"connect to {target!r} at {address} is not possible"
            ) from None
        finally:
            self._connecting.pop(token, None)


async def _owned(future: asyncio.Future[P]) -> P:
    """Its answer; given back if it came in the turn in which whoever asked was cancelled, or out of time."""
    try:
        return await future
    except asyncio.CancelledError:
        if future.done() and not future.cancelled() and future.exception() is None:
            future.result().drop()
        raise


def unreachable(target: str, tried: list[str]) -> PeerUnreachableError:
    what = "; ".join(tried) if tried else "it has no address that can be tried from here"
    return PeerUnreachableError(f"cannot connect to {target}: {what}")
