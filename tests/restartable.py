# SPDX-License-Identifier: Apache-2.0
"""A rendezvous that can be stopped, and started again on its port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from ports import held_port

from aiohixl.rendezvous import MemoryStore, serving


class Server:
    """Made by `restartable`."""

    def __init__(self, port: int, token: str | None) -> None:
        self.port = port
        self.token = token
        self.url = f"http://127.0.0.1:{port}"
        self.store = MemoryStore()
        self._stack = AsyncExitStack()

    async def start(self, store: MemoryStore | None = None) -> None:
        """With nothing remembered, unless it is given what it knew."""
        self.store = store or MemoryStore()
        await self._stack.enter_async_context(serving("127.0.0.1", self.port, self.token, store=self.store))

    async def stop(self) -> None:
        await self._stack.aclose()


@asynccontextmanager
async def restartable(token: str | None = None) -> AsyncIterator[Server]:
    """Not started yet."""
    with held_port() as port:
        server = Server(port, token)
        try:
            yield server
        finally:
            await server.stop()
