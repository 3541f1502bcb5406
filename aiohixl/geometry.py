# SPDX-License-Identifier: Apache-2.0
"""One tensor of a paged cache as blocks, and the byte pieces in which a block moves.

A block is what remains of the tensor when the block axis is fixed. It may lie
in many places: `Part.pieces` says in how many, and `copy_plan` finds the
fewest contiguous runs shared by two tensors of equal block shape whose memory
is ordered differently. Pieces are kept as loops, (count, stride) pairs, and
become arrays only in `expand`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .blocks import Int64Array, merge
from .buffers import BufferInfo
from .errors import ConfigError, PeerMismatchError, RegionError

__all__ = ["CopyPlan", "Part", "copy_plan", "expand"]

#: More than any address space in use; keeps every offset far inside int64.
MAX_EXTENT = 1 << 56
MAX_DIMS = 32
#: Rows that one call may make: 16 Mi rows are 384 MiB of offsets, and a mistake in the strides.
MAX_DESCRIPTORS = 1 << 24

_DTYPE = re.compile(r"[A-Za-z0-9_<>=|.\[\]]{1,64}")


@dataclass(frozen=True)
class Part:
    """The geometry of one tensor, wherever it is.

    ``block_shape`` and ``block_strides`` (bytes) leave out the block axis;
    ``block_stride`` is the distance in bytes from one block to the next, and
    ``block_axis`` (never negative) says where the axis stood. Offsets count
    from the tensor's first byte. Raises `ConfigError`, starting with the
    field's name, for values no tensor without overlapping elements can have.
    """

    dtype: str
    itemsize: int
    block_shape: tuple[int, ...]
    block_strides: tuple[int, ...]
    nblocks: int
    block_axis: int
    block_stride: int

    def __post_init__(self) -> None:
        if not _DTYPE.fullmatch(self.dtype):
            raise ConfigError(f"dtype: {self.dtype[:80]!r} is not the name of a dtype")
        if not 1 <= self.itemsize <= 1 << 20:
            raise ConfigError(f"itemsize: {self.itemsize} is not between 1 and {1 << 20} bytes")
        if len(self.block_shape) >= MAX_DIMS:
            raise ConfigError(f"block_shape: {len(self.block_shape)} axes, at most {MAX_DIMS - 1} can be")
        if len(self.block_strides) != len(self.block_shape):
            raise ConfigError(
                f"block_strides: {len(self.block_strides)} strides for a block shape of {len(self.block_shape)} axes"
            )
        if not 0 <= self.block_axis <= len(self.block_shape):
            raise ConfigError(f"block_axis: {self.block_axis} is not between 0 and {len(self.block_shape)}")
        for name, counts in (("nblocks", (self.nblocks,)), ("block_shape", self.block_shape)):
            if any(not 1 <= n <= MAX_EXTENT for n in counts):
                raise ConfigError(f"{name}: {counts} must be at least 1 and at most 2**56")
        # Axes from the tightest to the widest: each must step over all of the tighter ones.
        # This also refuses the stride 0 of broadcast tensors, where blocks share their bytes.
        reach = self.itemsize
        loops = [(self.block_stride, self.nblocks, "block_stride")]
        loops += [(s, n, "block_strides") for n, s in zip(self.block_shape, self.block_strides, strict=True)]
        for stride, count, name in sorted(loops):
            if not 0 <= stride <= MAX_EXTENT:
                raise ConfigError(f"{name}: {stride} is not between 0 and 2**56")
            if count == 1:
                continue
            if stride < reach:
                raise ConfigError(
                    f"{name}: {count} steps of {stride} bytes over elements that reach {reach} bytes: they "
                    "overlap or interleave, as in a broadcast tensor; pass one with memory for each element"
                )
            reach += (count - 1) * stride
            if reach > MAX_EXTENT:
                raise ConfigError(f"{name}: the tensor would reach over more than 2**56 bytes")

    @classmethod
    def from_buffer(cls, info: BufferInfo, block_axis: int = 0) -> Part:
        """Take the geometry of a buffer. ``block_axis`` may count from the end. Raises `ConfigError`."""
        ndim = len(info.shape)
        if not -ndim <= block_axis < ndim:
            raise ConfigError(
                f"block_axis: {block_axis} does not exist in a tensor of shape {info.shape} with {ndim} axes"
            )
        axis = block_axis % ndim
        # The stride of an axis of length 1 is arbitrary, so give it one spelling.
        strides = tuple(0 if n == 1 else s for n, s in zip(info.shape, info.strides, strict=True))
        return cls(
            dtype=info.dtype,
            itemsize=info.itemsize,
            block_shape=info.shape[:axis] + info.shape[axis + 1 :],
            block_strides=strides[:axis] + strides[axis + 1 :],
            nblocks=info.shape[axis],
            block_axis=axis,
            block_stride=strides[axis],
        )

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block's elements; gaps do not count."""
        return self.itemsize * math.prod(self.block_shape)

    @property
    def extent(self) -> int:
        """Bytes from the first to past the last byte touched: what a region must hold at least."""
        return (
            self.itemsize
            + (self.nblocks - 1) * self.block_stride
            + sum((n - 1) * s for n, s in zip(self.block_shape, self.block_strides, strict=True))
        )

    @property
    def pieces(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """The contiguous pieces of a block: bytes in each, and the (count, stride) loops around it."""
        plan = copy_plan(self, self)
        return plan.nbytes, tuple((count, local) for count, local, _ in plan.loops)


class CopyPlan(NamedTuple):
    """How one block is copied: ``nbytes`` at a time, in ``loops`` of (count, local, remote stride)."""

    nbytes: int
    loops: tuple[tuple[int, int, int], ...]


@lru_cache(maxsize=256)
def copy_plan(local: Part, remote: Part) -> CopyPlan:
    """Find the longest runs of bytes that are contiguous on both sides.

    An element's place is its index in the block shape, on both sides; only
    the strides differ. So every axis is one loop with two strides, in any
    order: axes that continue the run on both sides are absorbed into it,
    whichever axis that is. Raises `PeerMismatchError` for unlike blocks.
    """
    reason = part_mismatch(local, remote)
    if reason:
        raise PeerMismatchError(f"these blocks cannot be copied into one another: {reason}")
    loops = [(n, ours, theirs) for (n, ours), (_, theirs) in zip(_axes(local), _axes(remote), strict=True)]
    run = local.itemsize
    # From the last axis: dense tensors in C order are absorbed in one sweep.
    while found := next((loop for loop in reversed(loops) if loop[1] == run == loop[2]), None):
        loops.remove(found)
        run *= found[0]
    return CopyPlan(run, tuple(loops))


def _axes(part: Part) -> list[tuple[int, int]]:
    return [(n, s) for n, s in zip(part.block_shape, part.block_strides, strict=True) if n > 1]


def part_mismatch(local: Part, remote: Part) -> str | None:
    """Name the first field in which two parts hold different kinds of blocks, or return None."""
    if (local.dtype, local.itemsize) != (remote.dtype, remote.itemsize):
        return f"dtype is {_dtype_text(local, remote)} here and {_dtype_text(remote, local)} at the peer"
    if [n for n in local.block_shape if n > 1] != [n for n in remote.block_shape if n > 1]:
        return (
            f"block_shape is {local.block_shape} here ({local.block_nbytes} bytes) and "
            f"{remote.block_shape} at the peer ({remote.block_nbytes} bytes)"
        )
    return None


def _dtype_text(part: Part, other: Part) -> str:
    return f"{part.dtype} ({part.itemsize} bytes)" if part.dtype == other.dtype else part.dtype


def expand(
    local: Part, remote: Part, blocks: Int64Array, remote_blocks: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return merged descriptors for checked block lists of equal length.

    Rows are in the order of the blocks given, and piece by piece within a
    block; where whole runs of blocks can be joined, it is all blocks of the
    first piece, then of the second, and so on.
    """
    plan = copy_plan(local, remote)
    npieces = math.prod(count for count, _, _ in plan.loops)
    if npieces * blocks.size > MAX_DESCRIPTORS:
        raise RegionError(
            f"{blocks.size} blocks of {npieces} pieces of {plan.nbytes} bytes are more than "
            f"{MAX_DESCRIPTORS} descriptors: give both caches the same order in memory, or pass fewer "
            "blocks at a time"
        )
    ours = blocks * local.block_stride
    theirs = remote_blocks * remote.block_stride
    if not plan.loops:
        return merge(ours, theirs, plan.nbytes)
    local_pieces = remote_pieces = np.zeros(1, np.int64)
    for count, local_stride, remote_stride in plan.loops:
        steps = np.arange(count, dtype=np.int64)
        local_pieces = np.add.outer(local_pieces, steps * local_stride).ravel()
        remote_pieces = np.add.outer(remote_pieces, steps * remote_stride).ravel()
    if local.block_stride == plan.nbytes == remote.block_stride:
        rows = np.add.outer(local_pieces, ours), np.add.outer(remote_pieces, theirs)
    else:
        rows = np.add.outer(ours, local_pieces), np.add.outer(theirs, remote_pieces)
    return merge(rows[0].ravel(), rows[1].ravel(), plan.nbytes)
