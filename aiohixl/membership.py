# SPDX-License-Identifier: Apache-2.0
"""An engine's place at the rendezvous: its lease, and what it hears of others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from aiohixl.config import EngineConfig
from aiohixl.errors import HixlError

__all__ = ["Membership"]


class Membership:
    """Joined until closed. The callbacks run on the loop."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_epoch: Callable[[int], None],
        on_displaced: Callable[[HixlError], None],
    ) -> None:
        from aiohixl.rendezvous import RendezvousClient
        from aiohixl.wire import derive_bearer

        assert config.rendezvous is not None
        token = config.token or (derive_bearer(config.secret) if config.secret else None)
        self.client: Any = RendezvousClient(config.rendezvous, token=token)
        self._config = config
        self._on_epoch = on_epoch
        self._on_displaced = on_displaced

    async def join(self, incarnation: str, addresses: list[str]) -> None:
        """Raises `RendezvousError` when the name cannot be had within ``join_timeout``."""
        config = self._config
        record = await self.client.join(
            config.name,
            incarnation=incarnation,
            addresses=addresses,
            capabilities={"transports": list(config.transport_names)},
            ttl=config.ttl,
            replace=config.replace,
            force=config.force,
            timeout=config.join_timeout,
            on_lost=self._on_displaced,
            on_rejoined=lambda again: self._on_epoch(again.epoch),
        )
        self._on_epoch(record.epoch)

    async def watch(self, on_seen: Callable[[str, int], None]) -> None:
        """Tell of every name and epoch that is seen, until closed."""
        async with contextlib.aclosing(self.client.watch()) as events:
            async for event in events:
                for record in event.records if event.kind in ("snapshot", "joined", "updated") else ():
                    on_seen(record.name, record.epoch)

    async def close(self) -> None:
        await self.client.close()
