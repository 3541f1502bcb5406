# SPDX-License-Identifier: Apache-2.0
"""``async with peer.scope()``: everything posted to the peer inside has ended when the block is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Self

from aiohixl.gate import PostGate
from aiohixl.transfer import Transfer, outlast, wait_all

__all__ = ["Scope", "open_scopes", "scoped"]

#: What is open around the caller: asked for by each post.
open_scopes: ContextVar[tuple[Scope, ...]] = ContextVar("aiohixl_scopes", default=())


class Scope:
    """Collects the transfers that this task, and what it starts, posts to one peer inside the block.

    Threads that it starts by `asyncio.to_thread` count; what they post after the block was left does not.
    """

    def __init__(self, peer: Any) -> None:
        self.peer = peer
        self.gate = PostGate()
        self.transfers: list[Transfer] = []
        self._token: Token[tuple[Scope, ...]] | None = None

    async def __aenter__(self) -> Self:
        self.gate.open()
        self._token = open_scopes.set((*open_scopes.get(), self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            open_scopes.reset(self._token)
            self._token = None
        late = await self.gate.close()
        if error is None and late is None:
            await wait_all(self.transfers)
            return
        for transfer in self.transfers:
            transfer.cancel()
        cancelled = await outlast(self.transfers) or late
        if cancelled is not None and not isinstance(error, asyncio.CancelledError):
            raise cancelled


def scoped(peer: Any, post: Callable[[], Transfer]) -> Transfer:
    """Make a post to this peer, in the scopes that it falls into."""
    scopes = [scope for scope in open_scopes.get() if scope.peer is peer and scope.gate.begin()]
    try:
        transfer = post()
        for scope in scopes:
            scope.transfers.append(transfer)
        return transfer
    finally:
        for scope in scopes:
            scope.gate.end()
