# SPDX-License-Identifier: Apache-2.0
"""The geometry of a paged KV cache, without its addresses.

Each engine describes its own cache in a `KVLayout`, sends it to its peers as
JSON, and turns block lists into descriptor arrays with its own layout and the
peer's. See ``docs/kv.md``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from .blocks import BlockList, Int64Array, check_unique, merge, normalize_blocks
from .buffers import BufferInfo, inspect_buffer
from .errors import ConfigError, PeerMismatchError, RegionError
from .geometry import Part, expand, part_mismatch

__all__ = ["LAYOUT_VERSION", "KVLayout", "Part", "check_unique", "merge", "normalize_blocks"]

LAYOUT_VERSION = 1
MAX_LAYERS = 4096
MAX_PARTS = 64

_PART_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")

Layer = tuple[tuple[str, Part], ...]


@dataclass(frozen=True, repr=False)
class KVLayout:
    """What a cache looks like: for each layer its named parts, each with a `Part` geometry.

    All parts have the same number of blocks, and a block index means the same
    block in each of them. ``names`` are the layers' names if they have any.
    Raises `ConfigError`, starting with the field's name.
    """

    layers: tuple[Layer, ...]
    names: tuple[str, ...] | None = None
    version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise ConfigError(f"layers: a cache has 1 to {MAX_LAYERS} layers, not {len(self.layers)}")
        if self.names is not None:
            if len(self.names) != len(self.layers):
                raise ConfigError(f"names: {len(self.names)} names for {len(self.layers)} layers")
            if len(set(self.names)) != len(self.names):
                raise ConfigError("names: two layers have the same name")
            if any(not 1 <= len(name) <= 256 for name in self.names):
                raise ConfigError("names: the name of a layer has 1 to 256 characters")
        nblocks = self.layers[0][0][1].nblocks if self.layers[0] else 0
        checked: set[int] = set()  # equal layers are usually one object: look at it once
        for i, layer in enumerate(self.layers):
            if id(layer) in checked:
                continue
            checked.add(id(layer))
            if not 1 <= len(layer) <= MAX_PARTS or len(dict(layer)) != len(layer):
                raise ConfigError(f"layers: {self._label(i)} needs 1 to {MAX_PARTS} parts, each with its own name")
            for name, part in layer:
                if not _PART_NAME.fullmatch(name):
                    raise ConfigError(f"layers: {self._label(i)} has a part with the name {name[:80]!r}")
                if part.nblocks != nblocks:
                    raise ConfigError(
                        f"nblocks: {self._label(i)} part {name!r} has {part.nblocks} blocks, those before it "
                        f"have {nblocks}: every part of a cache needs the same number (is block_axis right?)"
                    )

    @classmethod
    def from_layers(
        cls, layers: Sequence[Any] | Mapping[str, Any], *, block_axis: int = 0
    ) -> tuple[KVLayout, list[BufferInfo]]:
        """Describe a cache that is in memory here.

        ``layers`` holds for each layer one tensor (a part called ``kv``), a
        (k, v) pair (parts ``k`` and ``v``) or a mapping of part names to
        tensors; it is a sequence, or a mapping of layer names to these.
        ``block_axis`` is the axis of every tensor that counts blocks.

        Returns the layout and the buffers in the order of `slots`. Raises
        `ConfigError` for a structure or a geometry that is no paged cache,
        `RegionError` for a tensor whose memory cannot be used; both name the
        layer and the part.
        """
        names: tuple[str, ...] | None = None
        if isinstance(layers, Mapping):
            for name in layers:
                if not isinstance(name, str):
                    raise ConfigError(f"layers: the name {name!r} of a layer is a {type(name).__name__}, not a str")
            names, entries = tuple(layers), list(layers.values())
        elif isinstance(layers, (list, tuple)):
            entries = list(layers)
        else:
            raise ConfigError(
                "layers: expected a list with one entry for each layer, or a mapping of names to such "
                f"entries, not a {type(layers).__name__}; a tensor of all layers can be given as list(tensor)"
            )
        built: list[Layer] = []
        buffers: list[BufferInfo] = []
        interned: dict[Any, Any] = {}
        for i, entry in enumerate(entries):
            label = f"layer {i}" + (f" ({names[i]!r})" if names else "")
            parts: list[tuple[str, Part]] = []
            for name, tensor in _named_parts(entry, label):
                try:
                    info = inspect_buffer(tensor)
                    part = Part.from_buffer(info, block_axis)
                except RegionError as exc:
                    raise RegionError(f"{label} part {name!r}: {exc}") from exc
                except ConfigError as exc:
                    raise ConfigError(f"{label} part {name!r} ({info.describe()}): {exc}") from exc
                buffers.append(info)
                parts.append((name, interned.setdefault(part, part)))
            layer = tuple(parts)
            built.append(interned.setdefault(layer, layer))
        return cls(tuple(built), names), buffers

    def to_json(self) -> bytes:
        """Return the layout as JSON; each distinct geometry stands in it once."""
        from .kv_json import dump_layout  # here, since it imports this module

        return dump_layout(self)

    @staticmethod
    def from_json(data: bytes) -> KVLayout:
        """Read a peer's layout. Raises `PeerMismatchError` that names the field for anything not valid."""
        from .kv_json import load_layout

        return load_layout(data)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def nblocks(self) -> int:
        """Blocks in this cache; block indices run from 0 to ``nblocks - 1``."""
        return self.layers[0][0][1].nblocks

    @cached_property
    def part_names(self) -> tuple[str, ...]:
        """Names of all parts, each once, in the order in which layers first have them."""
        return tuple(dict.fromkeys(name for _, name in self.slots()))

    @cached_property
    def block_nbytes(self) -> int:
        """Bytes of one block, all parts of all layers together."""
        return sum(part.block_nbytes for layer in self.layers for _, part in layer)

    def nbytes_for(self, nblocks: int) -> int:
        """Bytes that a transfer of ``nblocks`` blocks moves."""
        return nblocks * self.block_nbytes

    def slots(self) -> Iterator[tuple[int, str]]:
        """Yield (layer, part name) for every tensor of the cache, in the order of its buffers."""
        return ((i, name) for i, layer in enumerate(self.layers) for name, _ in layer)

    @cached_property
    def _slot_index(self) -> dict[tuple[int, str], int]:
        return {slot: i for i, slot in enumerate(self.slots())}

    def slot(self, layer: int | str, part: str) -> int:
        """Return the position of a tensor in `slots`. Raises `RegionError` where there is none."""
        i = self.layer_index(layer)
        try:
            return self._slot_index[i, part]
        except KeyError:
            has = ", ".join(repr(name) for name, _ in self.layers[i])
            raise RegionError(f"{self._label(i)} has no part {part!r}: it has {has}") from None

    def layer_index(self, layer: int | str) -> int:
        """Return the index of a layer given by index or name. Raises `RegionError` where there is none."""
        if isinstance(layer, str):
            if self.names is None or layer not in self.names:
                raise RegionError(f"this cache has no layer named {layer!r}: it has {self!r}")
            return self.names.index(layer)
        if isinstance(layer, bool) or not 0 <= layer < len(self.layers):
            last = len(self.layers) - 1
            raise RegionError(f"there is no layer {layer!r}: the cache has layers 0 to {last}")
        return layer

    def part(self, layer: int | str, part: str) -> Part:
        """Return the geometry of one tensor. Raises `RegionError` where there is none."""
        i = self.layer_index(layer)
        self.slot(i, part)
        return dict(self.layers[i])[part]

    def mismatch(self, other: KVLayout) -> str | None:
        """Name the first field that makes transfers with the peer's layout impossible, or return None.

        Numbers of blocks, strides and block axes may differ.
        """
        if self.version != other.version:
            return f"version is {self.version} here and {other.version} at the peer"
        if len(self.layers) != len(other.layers):
            return f"layers: {len(self.layers)} here and {len(other.layers)} at the peer"
        if self.names is not None and other.names is not None:
            for i, (ours, theirs) in enumerate(zip(self.names, other.names, strict=True)):
                if ours != theirs:
                    return (
                        f"names: layer {i} is {ours!r} here and {theirs!r} at the peer (give both caches "
                        "the same order, or one of them as a list, without names)"
                    )
        alike: set[tuple[int, int]] = set()
        for i, (mine, yours) in enumerate(zip(self.layers, other.layers, strict=True)):
            if (id(mine), id(yours)) in alike:
                continue
            alike.add((id(mine), id(yours)))
            names = [name for name, _ in mine], [name for name, _ in yours]
            if names[0] != names[1]:
                return f"parts of {self._label(i)} are {names[0]} here and {names[1]} at the peer"
            for (name, ours_part), (_, theirs_part) in zip(mine, yours, strict=True):
                if reason := part_mismatch(ours_part, theirs_part):
                    return f"{self._label(i)} part {name!r}: {reason}"
        return None

    def pair_blocks(
        self,
        remote: KVLayout,
        blocks: BlockList,
        remote_blocks: BlockList,
        *,
        destination: Literal["local", "remote"] = "remote",
    ) -> tuple[Int64Array, Int64Array]:
        """Check two block lists against each other and both caches, once for all layers.

        ``destination`` says which side is written, where no block may stand
        twice. Returns read-only arrays for `descriptors`. Raises `RegionError`
        that names the entry.
        """
        ours = normalize_blocks(blocks, self.nblocks, "blocks")
        theirs = normalize_blocks(remote_blocks, remote.nblocks, "remote_blocks")
        _check_lengths(ours, theirs)
        if destination == "remote":
            check_unique(theirs, "remote_blocks")
        else:
            check_unique(ours, "blocks")
        return ours, theirs

    def descriptors(
        self, remote: KVLayout, layer: int | str, part: str, blocks: BlockList, remote_blocks: BlockList
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return (local offsets, remote offsets, nbytes): the copies that move these blocks of one tensor.

        Offsets are bytes from the first byte of the tensor on each side. Each
        pair of blocks corresponds element by element in the block's shape,
        whatever the strides; neighbours in memory are merged. Raises
        `RegionError` for the lists, `PeerMismatchError` for unlike layouts.
        Whether a block is written twice is for `pair_blocks` to check.
        """
        i = self.layer_index(layer)
        mine = self.part(i, part)
        if i >= len(remote.layers):
            raise PeerMismatchError(f"the peer's cache has {len(remote.layers)} layers, so no layer {i}")
        yours = dict(remote.layers[i]).get(part)
        if yours is None:
            raise PeerMismatchError(f"{self._label(i)} has no part {part!r} at the peer")
        if reason := part_mismatch(mine, yours):
            raise PeerMismatchError(f"{self._label(i)} part {part!r}: {reason}")
        ours = normalize_blocks(blocks, mine.nblocks, "blocks")
        theirs = normalize_blocks(remote_blocks, yours.nblocks, "remote_blocks")
        _check_lengths(ours, theirs)
        return expand(mine, yours, ours, theirs)

    def _label(self, i: int) -> str:
        return f"layer {i} ({self.names[i]!r})" if self.names is not None else f"layer {i}"

    def __repr__(self) -> str:
        kinds = {layer: None for layer in self.layers}
        text = "; ".join(
            ", ".join(f"{name} {list(part.block_shape)} {part.dtype}" for name, part in kind)
            for kind in list(kinds)[:3]
        )
        more = f"; {len(kinds) - 3} more kinds" if len(kinds) > 3 else ""
        return (
            f"<KVLayout {self.num_layers} layers, {self.nblocks} blocks, {self.block_nbytes} bytes per "
            f"block: {text}{more}>"
        )


def _check_lengths(blocks: Int64Array, remote_blocks: Int64Array) -> None:
    if blocks.size != remote_blocks.size:
        raise RegionError(
            f"blocks has {blocks.size} entries and remote_blocks has {remote_blocks.size}: each block needs "
            "its counterpart"
        )


def _named_parts(entry: Any, label: str) -> Iterable[tuple[str, Any]]:
    if isinstance(entry, Mapping):
        for name in entry:
            if not isinstance(name, str):
                raise ConfigError(f"layers: {label} has a part named {name!r}, a {type(name).__name__}: use a str")
        return entry.items()
    if isinstance(entry, (list, tuple)):
        if len(entry) != 2:
            raise ConfigError(
                f"layers: {label} is a {type(entry).__name__} of {len(entry)} entries: give one tensor, a "
                "(k, v) pair, or a mapping of part names to tensors"
            )
        return zip(("k", "v"), entry, strict=True)
    return (("kv", entry),)
