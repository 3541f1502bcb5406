# SPDX-License-Identifier: Apache-2.0
"""What one peer has announced: its regions, and the KV caches that they make up."""

from __future__ import annotations

import asyncio

from aiohixl import _core
from aiohixl.completion import wake
from aiohixl.errors import HixlError
from aiohixl.kv import KVLayout
from aiohixl.kvcache import RemoteKV, decode_announcement
from aiohixl.region import RemoteRegion

__all__ = ["Announced"]


class Announced:
    """Kept up to date by the native side's events. A cache appears once its layout and all of its regions are there."""

    def __init__(self, peer_name: str) -> None:
        self._peer_name = peer_name
        self._regions: dict[int, RemoteRegion] = {}
        self._layouts: dict[str, tuple[int, KVLayout, list[int]]] = {}
        self.caches: dict[str, RemoteKV] = {}
        #: Woken when something is added, and when the peer is lost.
        self.news: list[asyncio.Future[None]] = []

    def named(self) -> dict[str, RemoteRegion]:
        """Regions by name, without the parts of caches."""
        return {region.name: region for region in self._regions.values() if "\n" not in region.name}

    def hidden(self) -> dict[str, RemoteRegion]:
        """The others: parts of caches, and what is lent for a probe."""
        return {region.name: region for region in self._regions.values() if "\n" in region.name}

    def add(self, handle: _core.RemoteRegion, name: str, blob: bytes) -> list[HixlError]:
        """Answers what is wrong with caches that cannot be used."""
        problems: list[HixlError] = []
        if handle.kind == _core.KIND_LAYOUT:
            try:
                self._layouts[name] = (handle.id, *decode_announcement(blob))
            except HixlError as exc:
                problems.append(exc)
        else:
            self._regions[handle.id] = RemoteRegion(handle, name, self._peer_name)
        for cache, (_, layout, ids) in list(self._layouts.items()):
            if cache in self.caches or not all(i in self._regions for i in ids):
                continue
            try:
                self.caches[cache] = RemoteKV(cache, self._peer_name, layout, [self._regions[i] for i in ids])
            except HixlError as exc:
                del self._layouts[cache]
                problems.append(exc)
        wake(self.news)
        return problems

    def remove(self, handle: _core.RemoteRegion) -> None:
        self._regions.pop(handle.id, None)
        for name, (root, _, ids) in list(self._layouts.items()):
            if handle.id == root or handle.id in ids:
                del self._layouts[name]
                self.caches.pop(name, None)
