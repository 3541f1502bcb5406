# SPDX-License-Identifier: Apache-2.0
"""Where a role keeps its cache: in memory that the processor and the transport share, or on an NPU, behind a host copy.

A model on an NPU computes where its cache is. The demo's computes on the
processor, so that with HIXL each layer is copied to the NPU before it is
sent, and back from it before it is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

__all__ = ["CacheMemory", "NpuTensor"]


class NpuTensor:
    """A contiguous piece of an NPU's memory, with as much of a tensor's interface as `register_kv` looks at.

    ``owner`` keeps the memory: the region from `Engine.allocate`.
    """

    def __init__(self, owner: Any, offset: int, shape: Sequence[int], itemsize: int, dtype: str) -> None:
        self.owner = owner
        self.device = owner.device
        self.shape = tuple(shape)
        self.dtype = dtype
        self._addr = owner.addr + offset
        self._itemsize = itemsize

    def data_ptr(self) -> int:
        return int(self._addr)

    def element_size(self) -> int:
        return self._itemsize

    def stride(self) -> tuple[int, ...]:
        """In elements, as torch counts."""
        strides = [1]
        for length in self.shape[:0:-1]:
            strides.append(strides[-1] * length)
        return tuple(reversed(strides))


class CacheMemory:
    """Memory of a cache whose ``layers`` layers follow each other, each with keys and then values in equal halves."""

    def __init__(self, region: Any, host: Any, layers: int) -> None:
        #: What the processor reads and writes.
        self.host = host
        self._region = region
        self._layers = layers
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def allocate(cls, engine: Any, nbytes: int, layers: int, device: str) -> Self:
        """On ``device``: ``cpu``, or ``npu`` for the engine's."""
        region = await engine.allocate(nbytes, device=device)
        return cls(region, region if device == "cpu" else bytearray(nbytes), layers)

    @property
    def on_npu(self) -> bool:
        return self.host is not self._region

    def tensors(self, pairs: Sequence[tuple[Any, Any]], itemsize: int, dtype: str) -> list[tuple[Any, Any]]:
        """For `Engine.register_kv`: ``pairs``, which are views of `host`, or the same on the NPU."""
        if not self.on_npu:
            return list(pairs)
        half = self._region.nbytes // self._layers // 2
        return [
            (
                NpuTensor(self._region, 2 * layer * half, keys.shape, itemsize, dtype),
                NpuTensor(self._region, (2 * layer + 1) * half, values.shape, itemsize, dtype),
            )
            for layer, (keys, values) in enumerate(pairs)
        ]

    def push_layer(self, layer: int) -> None:
        """Make a layer of `host` what the transport sees. From any thread but the loop's; returns when it is done."""
        if self.on_npu:
            size = self._region.nbytes // self._layers
            piece = memoryview(self.host)[layer * size : (layer + 1) * size]
            asyncio.run_coroutine_threadsafe(self._region.upload(piece, layer * size), self._loop).result()

    async def push(self) -> None:
        """Make all of `host` what the transport sees."""
        if self.on_npu:
            await self._region.upload(self.host)

    async def pull(self) -> None:
        """Make `host` what has arrived."""
        if self.on_npu:
            await self._region.download_into(self.host)
