# SPDX-License-Identifier: Apache-2.0
"""A KV cache sent layer by layer while later layers are still being computed."""

from __future__ import annotations

import asyncio
import contextlib
import operator
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from aiohixl.errors import ConfigError, HixlError, TransferAbortedError
from aiohixl.gate import PostGate
from aiohixl.transfer import Transfer, outlast, wait_all

__all__ = ["KVStream"]


class KVStream:
    """Made by `Peer.stream_kv`; an async context manager.

    Leaving the block normally waits until every layer has landed, then delivers the note. Leaving it by an exception or
    a cancellation recalls what is in flight, waits until it has let go, and delivers the note with ``aborted=True``.
    """

    def __init__(
        self,
        post_layer: Callable[[int, Any], Transfer],
        send_note: Callable[[bool], Transfer] | None,
        num_layers: int,
        what: str,
    ) -> None:
        self._post_layer = post_layer
        self._send_note = send_note
        self._what = what
        self._entered = False
        self._gate = PostGate()
        self._reserved: dict[int, object] = {}
        self._waiting = 0
        #: The transfer of each layer posted so far.
        self.transfers: dict[int, Transfer] = {}
        self.num_layers = num_layers

    def __repr__(self) -> str:
        return f"<KVStream {self._what} {len(self.transfers)}/{self.num_layers} layers posted>"

    def post(self, layer: int, *, after: Any = None) -> Transfer:
        """Send one layer, which must be complete in memory and stay as it is until it has landed.

        Of an NPU's memory, it may still be being computed: the transfer waits for `after`, as `Peer.write` does, by
        default for what the calling thread's current stream has been given so far.
        From any thread; never waits. Raises `ConfigError` for a layer that does not exist or was posted already,
        `QueueFullError` from a thread when the queue is full, and whatever `Peer.write_kv` raises.
        """
        index = operator.index(layer) if hasattr(layer, "__index__") and not isinstance(layer, bool) else -1
        if not 0 <= index < self.num_layers:
            raise ConfigError(
                f"{self._what}: there is no layer {layer!r}; the cache has layers 0 to {self.num_layers - 1}"
            )
        if not self._gate.begin():
            raise ConfigError(
                f"{self._what}: the stream has ended (its block was left or cancelled); stop computing for it"
                if self._entered
                else f"{self._what}: post() belongs inside the stream's `async with` block"
            )
        try:
            # setdefault is atomic: of two threads with one layer, one finds the other's mark.
            mark = object()
            if self._reserved.setdefault(index, mark) is not mark:
                raise ConfigError(f"{self._what}: layer {index} was posted already")
            try:
                transfer = self.transfers[index] = self._post_layer(index, after)
            except BaseException:
                del self._reserved[index]
                raise
            return transfer
        finally:
            self._gate.end()

    async def __aenter__(self) -> Self:
        if self._entered:
            raise ConfigError(f"{self._what}: a stream is entered once; make another with stream_kv()")
        self._entered = True
        self._gate.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        late = await self._gate.close()
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
