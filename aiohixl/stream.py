# SPDX-License-Identifier: Apache-2.0
"""A KV cache sent layer by layer while later layers are still being computed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from aiohixl.completion import wake
from aiohixl.errors import ConfigError, HixlError, TransferAbortedError
from aiohixl.transfer import Transfer, outlast, wait_all

__all__ = ["KVStream"]


class KVStream:
    """Made by `Peer.stream_kv`; an async context manager.

    Leaving the block normally waits until every layer has landed, then delivers the note. Leaving it by an exception or
    a cancellation recalls what is in flight, waits until it has let go, and delivers the note with ``aborted=True``.
    """

    def __init__(
        self,
        post_layer: Callable[[int], Transfer],
        send_note: Callable[[bool], Transfer] | None,
        num_layers: int,
        what: str,
    ) -> None:
        self._post_layer = post_layer
        self._send_note = send_note
        self._what = what
        self._open = False
        # Posts come from any thread: what is decided about them is decided under this lock, held for a few steps only.
        self._lock = threading.Lock()
        self._reserved: set[int] = set()
        self._posting = 0
        self._posted: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting = 0
        #: The transfer of each layer posted so far.
        self.transfers: dict[int, Transfer] = {}
        self.num_layers = num_layers

    def __repr__(self) -> str:
        return f"<KVStream {self._what} {len(self.transfers)}/{self.num_layers} layers posted>"

    def post(self, layer: int) -> Transfer:
        """Send one layer, which must be complete in memory and stay as it is until it has landed.

        From any thread; never waits. Raises `ConfigError` for a layer that does not exist or was posted already,
        `QueueFullError` from a thread when the queue is full, and whatever `Peer.write_kv` raises.
        """
        if not isinstance(layer, int) or not 0 <= layer < self.num_layers:
            raise ConfigError(
                f"{self._what}: there is no layer {layer!r}; the cache has layers 0 to {self.num_layers - 1}"
            )
        with self._lock:
            if not self._open:
                raise ConfigError(f"{self._what}: post() belongs inside the stream's `async with` block")
            if layer in self._reserved:
                raise ConfigError(f"{self._what}: layer {layer} was posted already")
            self._reserved.add(layer)
            self._posting += 1
        transfer: Transfer | None = None
        try:
            transfer = self._post_layer(layer)
        finally:
            self._post_ended(layer, transfer)
        return transfer

    def _post_ended(self, layer: int, transfer: Transfer | None) -> None:
        with self._lock:
            if transfer is None:
                self._reserved.discard(layer)
            else:
                self.transfers[layer] = transfer
            self._posting -= 1
            last = not self._open and not self._posting
        if last and self._loop is not None and self._posted is not None:
            self._loop.call_soon_threadsafe(wake, [self._posted])

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        late = await self._stop_posts()
        if error is None:
            error = late
        if error is None:
            missing = [layer for layer in range(self.num_layers) if layer not in self.transfers]
            if missing:
                error = TransferAbortedError(
                    f"{self._what}: left before every layer was posted; missing {len(missing)} of {self.num_layers}, "
                    f"first layer {missing[0]}; the receiver was told"
                )
            else:
                try:
                    await wait_all(self.transfers.values())
                except BaseException as exc:
                    error = exc
            if error is not None:
                await self._abort()
                raise error
            if self._send_note is not None:
                await self._send_note(False)
            return
        cancelled = await self._abort() or late
        if cancelled is not None and not isinstance(error, asyncio.CancelledError):
            raise cancelled
        if error is late and late is not None:
            raise late

    async def _stop_posts(self) -> asyncio.CancelledError | None:
        """No post begins from here on; those that threads have begun end (they take microseconds, and never wait)."""
        with self._lock:
            self._open = False
            if self._posting and self._loop is not None:
                self._posted = self._loop.create_future()
        cancelled: asyncio.CancelledError | None = None
        while self._posted is not None and not self._posted.done():
            try:
                await asyncio.shield(self._posted)
            except asyncio.CancelledError as exc:
                cancelled = cancelled or exc
        return cancelled

    async def _abort(self) -> asyncio.CancelledError | None:
        """What is in flight ends; then the receiver hears that the rest will not come."""
        for transfer in self.transfers.values():
            transfer.cancel()
        cancelled = await outlast(self.transfers.values())
        self._waiting = len(self.transfers) + 1
        for transfer in self.transfers.values():
            transfer.when_quiesced(self._tell_receiver)
        self._tell_receiver()
        return cancelled

    def _tell_receiver(self) -> None:
        # Only when nothing of the stream can still land: the receiver reuses the blocks.
        self._waiting -= 1
        if self._waiting or self._send_note is None:
            return
        with contextlib.suppress(HixlError):  # the peer is lost, and knows that of us
            self._send_note(True).detach()
