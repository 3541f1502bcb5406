# SPDX-License-Identifier: Apache-2.0
"""A paged KV cache in one flat buffer, as a serving engine keeps it.

Per layer one tensor of keys and one of values, each
``[nblocks, block_size, kv_heads, head_dim]`` in float32. A sequence owns a
list of blocks in any order; token ``i`` lives in ``blocks[i // block_size]``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Geometry", "PagedCache"]


@dataclass(frozen=True)
class Geometry:
    """Shape of a paged cache, the same on both sides."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int = 16

    @classmethod
    def of(cls, config: Any) -> Geometry:
        """From a transformers model configuration."""
        return cls(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)

    def blocks_for(self, ntokens: int) -> int:
        return -(-ntokens // self.block_size)

    def nbytes(self, nblocks: int) -> int:
        """Bytes of the whole cache: keys and values of every layer in float32."""
        return self.layers * 2 * nblocks * self.block_size * self.kv_heads * self.head_dim * 4


class PagedCache:
    """Views of ``buffer``, which must be writable and hold ``geometry.nbytes(nblocks)`` bytes.

    Every element starts as NaN: a block that never arrived cannot pass for a
    block of zeros, it poisons the logits.
    """

    def __init__(self, geometry: Geometry, nblocks: int, buffer: Any) -> None:
        self.geometry = geometry
        self.nblocks = nblocks
        flat = torch.frombuffer(buffer, dtype=torch.float32, count=geometry.nbytes(nblocks) // 4)
        flat.fill_(float("nan"))
        shape = (geometry.layers, 2, nblocks, geometry.block_size, geometry.kv_heads, geometry.head_dim)
        self._all = flat.view(shape)
        #: What `Engine.register_kv` takes: one (keys, values) pair per layer.
        self.layers: list[tuple[Any, Any]] = [(layer[0], layer[1]) for layer in self._all]

    def store(self, layer: int, keys: Any, values: Any, blocks: Sequence[int]) -> None:
        """Copy one layer, as the model has it (``[1, kv_heads, tokens, head_dim]``), into ``blocks``."""
        size = self.geometry.block_size
        whole, rest = divmod(keys.shape[2], size)
        index = torch.tensor(blocks[:whole], dtype=torch.long)
        for paged, dense in zip(self.layers[layer], (keys, values), strict=True):
            rows = dense[0].transpose(0, 1)  # [tokens, kv_heads, head_dim]
            paged.index_copy_(0, index, rows[: whole * size].reshape(whole, size, *rows.shape[1:]))
            if rest:
                paged[blocks[whole], :rest] = rows[whole * size :]

    def load(self, layer: int, blocks: Sequence[int], ntokens: int) -> tuple[Any, Any]:
        """One layer gathered from ``blocks``, in the shape that the model takes."""
        index = torch.tensor(blocks, dtype=torch.long)
        keys, values = (
            paged.index_select(0, index).flatten(0, 1)[:ntokens].transpose(0, 1).unsqueeze(0)
            for paged in self.layers[layer]
        )
        return keys, values

    def blank(self, blocks: Sequence[int]) -> None:
        """As if nothing had ever arrived in ``blocks``."""
        self._all[:, :, list(blocks)] = float("nan")

    def checksums(self, blocks: Sequence[int]) -> list[str]:
        """SHA-256 per layer over keys, then values, in the order of ``blocks``."""
        index = torch.tensor(blocks, dtype=torch.long)
        return [hashlib.sha256(pair.index_select(1, index).numpy().tobytes()).hexdigest() for pair in self._all]

    def written_outside(self, blocks: Sequence[int]) -> list[int]:
        """Block numbers beyond ``blocks`` that anything was written to, in any layer."""
        clean = torch.isnan(self._all).flatten(3).all(dim=3).all(dim=1).all(dim=0)  # per block
        asked = set(blocks)
        return [block for block in range(self.nblocks) if block not in asked and not bool(clean[block])]
