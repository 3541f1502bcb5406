# SPDX-License-Identifier: Apache-2.0
"""Block lists and descriptor lists as int64 arrays: checked once, merged without a Python loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import RegionError

__all__ = ["BlockList", "Int64Array", "check_unique", "merge", "normalize_blocks"]

Int64Array = npt.NDArray[np.int64]
BlockList = Sequence[int] | npt.NDArray[np.integer[Any]]


def normalize_blocks(blocks: BlockList, nblocks: int, what: str = "blocks") -> Int64Array:
    """Return ``blocks`` as a one-dimensional read-only int64 array, each in ``range(nblocks)``.

    Takes lists, tuples, ranges and one-dimensional integer arrays of any
    width. The result never changes when the caller's list or array does.
    ``what`` names the list in messages. Raises `RegionError`, for a bad entry
    with its position and value.
    """
    if isinstance(blocks, np.ndarray):
        array = blocks
    elif isinstance(blocks, range):
        array = _from_range(blocks, nblocks, what)
    elif isinstance(blocks, (str, bytes, bytearray, set, frozenset, dict)) or not hasattr(blocks, "__len__"):
        raise RegionError(
            f"{what} is a {type(blocks).__name__}: pass a list, tuple, range or one-dimensional integer array"
        )
    else:
        if isinstance(blocks, (list, tuple)):
            _refuse_odd_types(blocks, what)
        try:
            array = np.asarray(blocks)
        except (ValueError, TypeError, OverflowError) as exc:
            raise RegionError(f"{what} cannot be read as block indices: {exc}") from exc
    if array.ndim != 1:
        raise RegionError(f"{what} has shape {array.shape}: block indices come in one dimension")
    if array.size == 0:
        return _frozen(np.empty(0, np.int64))
    if array.dtype.kind not in "iu":
        if not isinstance(blocks, (list, tuple)):
            raise RegionError(f"{what} has dtype {array.dtype}: block indices are integers")
        # Whole numbers for which numpy has no common integer type: some too large, or of mixed widths.
        for i, value in enumerate(blocks):
            if not 0 <= value < nblocks:
                raise _out_of_range(what, i, value, nblocks)
        array = np.array([int(value) for value in blocks], np.int64)
    bad = (array < 0) | (array > np.iinfo(np.int64).max) if array.dtype == np.uint64 else array < 0
    # Only an array of our own making (checked and frozen before) can do without the copy.
    out = array.astype(np.int64, copy=array.flags.writeable or not array.flags.owndata)
    bad |= out >= nblocks
    if bad.any():
        i = int(np.argmax(bad))
        raise _out_of_range(what, i, int(array[i]), nblocks)
    return _frozen(out)


def _from_range(blocks: range, nblocks: int, what: str) -> Int64Array:
    # The ends are checked first: a range may be of any length and cost nothing until it is an array.
    if blocks and not 0 <= blocks[0] < nblocks:
        raise _out_of_range(what, 0, blocks[0], nblocks)
    if blocks and not 0 <= blocks[-1] < nblocks:
        past = nblocks - blocks.start if blocks.step > 0 else blocks.start + 1
        i = -(-past // abs(blocks.step))
        raise _out_of_range(what, i, blocks[i], nblocks)
    if len(blocks) < 2:  # the step, never taken, may be too large for int64
        return np.array(list(blocks), np.int64)
    return np.arange(len(blocks), dtype=np.int64) * blocks.step + blocks.start


def _refuse_odd_types(blocks: Sequence[object], what: str) -> None:
    # numpy would take True for 1 in a list of ints, so look at the types first.
    for kind in set(map(type, blocks)):
        if issubclass(kind, bool) or not issubclass(kind, (int, np.integer)):
            i = next(i for i, value in enumerate(blocks) if type(value) is kind)
            raise RegionError(f"{what}[{i}] is {blocks[i]!r}, a {kind.__name__}: block indices are whole numbers")


def _out_of_range(what: str, i: int, value: object, nblocks: int) -> RegionError:
    return RegionError(f"{what}[{i}] is {value}, but the cache has {nblocks} blocks (0 to {nblocks - 1})")


def _frozen(array: Int64Array) -> Int64Array:
    array.flags.writeable = False
    return array


def check_unique(blocks: Int64Array, what: str = "blocks") -> None:
    """Raise `RegionError` if a block stands twice in a list of destinations, naming both positions."""
    order = np.argsort(blocks, kind="stable")
    ordered = blocks[order]
    same = np.flatnonzero(ordered[1:] == ordered[:-1])
    if same.size:
        at = same[np.argmin(order[same + 1])]
        first, second = int(order[at]), int(order[at + 1])
        raise RegionError(
            f"{what}[{first}] and {what}[{second}] are both block {int(blocks[first])}: a block can be "
            "written only once in a transfer"
        )


def merge(local: Int64Array, remote: Int64Array, nbytes: Int64Array | int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Join each descriptor that goes on where the previous one ends, on both sides.

    The three arrays have one length (``nbytes`` may be one int for all) and
    keep their order. The results may be the very arrays that were passed.
    """
    sizes = np.broadcast_to(np.asarray(nbytes, np.int64), local.shape)
    joined = (local[1:] == local[:-1] + sizes[:-1]) & (remote[1:] == remote[:-1] + sizes[:-1])
    if not joined.any():
        return local, remote, np.ascontiguousarray(sizes)
    starts = np.flatnonzero(np.concatenate(([True], ~joined)))
    return local[starts], remote[starts], np.add.reduceat(sizes, starts)
