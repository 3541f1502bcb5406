# SPDX-License-Identifier: Apache-2.0
"""``async with peer.scope()``: everything posted to the peer inside has ended when the block is left."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Self

from aiohixl.transfer import Transfer, outlast, wait_all

__all__ = ["Scope", "note_post"]

_open: ContextVar[tuple[Scope, ...]] = ContextVar("aiohixl_scopes", default=())


class Scope:
    """Collects the transfers that this task, and what it starts, posts to one peer inside the block."""

    def __init__(self, peer: Any) -> None:
        self.peer = peer
        self.transfers: list[Transfer] = []
        self._token: Token[tuple[Scope, ...]] | None = None

    async def __aenter__(self) -> Self:
        self._token = _open.set((*_open.get(), self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            _open.reset(self._token)
            self._token = None
        if error is None:
            await wait_all(self.transfers)
            return
        for transfer in self.transfers:
            transfer.cancel()
        cancelled = await outlast(self.transfers)
        if cancelled is not None and not isinstance(error, asyncio.CancelledError):
            raise cancelled


def note_post(peer: Any, transfer: Transfer) -> None:
    for scope in _open.get():
        if scope.peer is peer:
            scope.transfers.append(transfer)
