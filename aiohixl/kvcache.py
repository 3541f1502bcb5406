# SPDX-License-Identifier: Apache-2.0
"""A registered paged KV cache, here (`KVCache`) and at a peer (`RemoteKV`): a layout, and a region for each part."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aiohixl.blocks import normalize_blocks
from aiohixl.errors import PeerMismatchError, RegionError
from aiohixl.kv import KVLayout
from aiohixl.region import Region, RemoteRegion

__all__ = ["KVCache", "RemoteKV", "decode_announcement", "encode_announcement", "rows_of_layer"]

Blocks = Sequence[int] | npt.NDArray[Any]
#: local region, remote region, rkey, local offsets, remote offsets, lengths
Row = tuple[Region, RemoteRegion, npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]


class KVCache:
    """A KV cache registered with `Engine.register_kv`. Await it until it is usable."""

    def __init__(self, name: str, layout: KVLayout, regions: list[Region], root: Region | None) -> None:
        self.name = name
        self.layout = layout
        #: One a part, in the order of `layout.slots()`.
        self.regions = regions
        self._root = root  # carries the layout to peers

    def __repr__(self) -> str:
        return f"<KVCache {self.name!r} {self.layout!r}>"

    def __await__(self) -> Generator[Any, Any, KVCache]:
        for region in self.regions:
            yield from region.__await__()
        return self

    @property
    def quarantined(self) -> tuple[tuple[int, tuple[int, int]], ...]:
        """``(index of the region, (offset, nbytes))`` of what cannot be reused yet."""
        return tuple((i, span) for i, region in enumerate(self.regions) for span in region.quarantined)

    async def revoke(self, peer: Any = None, *, blocks: Blocks | None = None) -> None:
        """`Region.revoke` for `blocks` (default: all) of every layer."""
        errors = []
        for region, spans in self._spans(blocks):
            try:
                await region.revoke(peer, spans=spans)
            except RegionError as exc:
                errors.append(exc)
        if errors:
            raise errors[0]

    def grant(self, peer: Any = None, *, blocks: Blocks | None = None) -> None:
        """`Region.grant` for `blocks` (default: all) of every layer."""
        for region, spans in self._spans(blocks):
            region.grant(peer, spans=spans)

    async def deregister(self) -> None:
        """`Region.deregister` for every part."""
        errors = []
        for region in [*([self._root] if self._root is not None else []), *self.regions]:
            try:
                await region.deregister()
            except RegionError as exc:
                errors.append(exc)
        if errors:
            raise errors[0]

    def _spans(self, blocks: Blocks | None) -> list[tuple[Region, list[tuple[int, int]] | None]]:
        if blocks is None:
            return [(region, None) for region in self.regions]
        out: list[tuple[Region, list[tuple[int, int]] | None]] = []
        wanted = normalize_blocks(blocks, self.layout.nblocks)
        for layer, part in self.layout.slots():
            offsets, _, lengths = self.layout.descriptors(self.layout, layer, part, wanted, wanted)
            region = self.regions[self.layout.slot(layer, part)]
            out.append((region, list(zip(offsets.tolist(), lengths.tolist(), strict=True))))
        return out


class RemoteKV:
    """A peer's KV cache, once its layout and every region of it has been announced."""

    def __init__(self, name: str, peer_name: str, layout: KVLayout, regions: list[RemoteRegion]) -> None:
        self.name = name
        self.peer_name = peer_name
        self.layout = layout
        self.regions = regions
        self._agreed: set[KVLayout] = set()
        for layer, part in layout.slots():
            region = regions[layout.slot(layer, part)]
            extent = layout.part(layer, part).extent
            if extent > region.nbytes:
                raise PeerMismatchError(
                    f"KV cache {name!r} of {peer_name!r}: layer {layer} {part!r} needs {extent} bytes, "
                    f"its region has {region.nbytes}"
                )

    def __repr__(self) -> str:
        return f"<RemoteKV {self.name!r} of {self.peer_name!r} {self.layout!r}>"

    def agree(self, cache: KVCache) -> None:
        """`PeerMismatchError` that names the first difference, if blocks cannot go between the two."""
        if cache.layout in self._agreed:
            return
        difference = cache.layout.mismatch(self.layout)
        if difference:
            raise PeerMismatchError(
                f"KV cache {cache.name!r} here and {self.name!r} of {self.peer_name!r} do not match: {difference}"
            )
        self._agreed.add(cache.layout)


def rows_of_layer(
    cache: KVCache, remote: RemoteKV, layer: int, local: npt.NDArray[np.int64], there: npt.NDArray[np.int64]
) -> list[Row]:
    """The rows that move `local` blocks of one layer to or from the `there` blocks."""
    rows: list[Row] = []
    for part, _ in cache.layout.layers[layer]:
        lo, ro, n = cache.layout.descriptors(remote.layout, layer, part, local, there)
        rows.append(
            (
                cache.regions[cache.layout.slot(layer, part)],
                remote.regions[remote.layout.slot(layer, part)],
                lo,
                ro,
                n,
            )
        )
    return rows


def encode_announcement(layout: KVLayout, regions: list[Region]) -> bytes:
    head = json.dumps({"regions": [region.id for region in regions]}, separators=(",", ":")).encode()
    return len(head).to_bytes(4, "little") + head + layout.to_json()


def decode_announcement(blob: bytes) -> tuple[KVLayout, list[int]]:
    """A peer's announcement; `PeerMismatchError` when it is not one."""
    try:
        size = int.from_bytes(blob[:4], "little")
        ids = json.loads(blob[4 : 4 + size])["regions"]
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError("regions")
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise PeerMismatchError("a KV cache is announced in a form that this version does not know") from exc
    layout = KVLayout.from_json(blob[4 + size :])
    parts = sum(1 for _ in layout.slots())
    if len(ids) != parts:
        raise PeerMismatchError(f"a KV cache of {parts} parts is announced with {len(ids)} regions")
    return layout, ids
