# SPDX-License-Identifier: Apache-2.0
"""KVLayout against a brute-force oracle: numpy's own indexing must agree, byte for byte."""

from __future__ import annotations

import ctypes
import json
import math
import pickle
import random
import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest

from aiohixl.buffers import inspect_buffer
from aiohixl.errors import ConfigError, HixlError, PeerMismatchError, RegionError
from aiohixl.geometry import MAX_DESCRIPTORS, Part, copy_plan
from aiohixl.kv import KVLayout, check_unique, merge, normalize_blocks
from aiohixl.kv_json import MAX_JSON

Array = npt.NDArray[Any]


def strided(
    shape: tuple[int, ...], dtype: npt.DTypeLike, order: tuple[int, ...], steps: tuple[int, ...], seed: int
) -> tuple[Array, Array]:
    """Make an array of this shape whose axes lie in ``order`` in memory, and the bytes under it."""
    stored = [shape[axis] * steps[axis] for axis in order]
    size = math.prod(stored) * np.dtype(dtype).itemsize
    memory = np.frombuffer(random.Random(seed).randbytes(size), np.uint8).copy()
    base = memory.view(dtype).reshape(stored)
    return base.transpose(np.argsort(order))[tuple(slice(None, None, s) for s in steps)], memory


def raw(array: Array) -> Array:
    """The bytes from the first to past the last that the array touches, writable, as a provider sees them."""
    info = inspect_buffer(array)
    return np.ctypeslib.as_array((ctypes.c_uint8 * info.nbytes).from_address(info.addr))


def check_against_oracle(
    local: Array,
    local_axis: int,
    remote: Array,
    remote_axis: int,
    remote_memory: Array,
    blocks: list[int],
    remote_blocks: list[int],
) -> int:
    """Apply the descriptors bytewise to the peer's memory and compare all of it. Returns how many."""
    ours, [info] = KVLayout.from_layers([local], block_axis=local_axis)
    theirs, [remote_info] = KVLayout.from_layers([remote], block_axis=remote_axis)
    before = remote_memory.copy()

    source, target = raw(local), raw(remote)
    rows = ours.descriptors(theirs, 0, "kv", blocks, remote_blocks)
    for row in rows:
        assert row.dtype == np.int64
        assert row.flags.c_contiguous
        assert len(row) == len(rows[0])
    for at, to, n in zip(*(row.tolist() for row in rows), strict=True):
        assert 0 <= at <= at + n <= info.nbytes == ours.part(0, "kv").extent
        assert 0 <= to <= to + n <= remote_info.nbytes == theirs.part(0, "kv").extent
        target[to : to + n] = source[at : at + n]
    got = remote_memory.copy()

    remote_memory[:] = before
    taken = np.moveaxis(local, local_axis, 0)[blocks]
    np.moveaxis(remote, remote_axis, 0)[remote_blocks] = taken
    assert got.tobytes() == remote_memory.tobytes()

    joined = (rows[0][1:] == rows[0][:-1] + rows[2][:-1]) & (rows[1][1:] == rows[1][:-1] + rows[2][:-1])
    assert not joined.any()
    assert rows[2].sum() == len(blocks) * ours.block_nbytes
    return len(rows[0])


@st.composite
def sides(draw: st.DrawFn) -> dict[str, Any]:
    block_shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    out: dict[str, Any] = {"dtype": draw(st.sampled_from(["u1", "f2", "f4", "i8", "c16"]))}
    for side in ("local", "remote"):
        nblocks = draw(st.integers(1, 6))
        axis = draw(st.integers(0, len(block_shape)))
        shape = (*block_shape[:axis], nblocks, *block_shape[axis:])
        order = tuple(draw(st.permutations(range(len(shape)))))
        steps = tuple(draw(st.integers(1, 2)) for _ in shape)
        out[side] = (shape, order, steps)
        out[f"{side}_axis"] = axis - len(shape) if draw(st.booleans()) else axis
    ours, theirs = (out[side][0][out[f"{side}_axis"]] for side in ("local", "remote"))
    out["remote_blocks"] = draw(st.lists(st.integers(0, theirs - 1), unique=True))
    n = len(out["remote_blocks"])
    out["blocks"] = draw(st.lists(st.integers(0, ours - 1), min_size=n, max_size=n))
    return out


def build(case: dict[str, Any], side: str, seed: int) -> tuple[Array, Array]:
    shape, order, steps = case[side]
    return strided(shape, case["dtype"], order, steps, seed)


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(case=sides(), seed=st.integers(0, 2**32))
def test_random_layouts_agree_with_numpy(case: dict[str, Any], seed: int) -> None:
    local, _ = build(case, "local", seed)
    remote, remote_memory = build(case, "remote", seed + 1)
    check_against_oracle(
        local,
        case["local_axis"],
        remote,
        case["remote_axis"],
        remote_memory,
        case["blocks"],
        case["remote_blocks"],
    )


# Ordinary layouts of 6 blocks of 4 tokens, 3 heads, 8 dims in float16 (192 bytes per token or head x 4):
# how the axes lie in memory, where the block axis is, and the rows expected for 3 runs of blocks.
PAGED = ((6, 4, 3, 8), (0, 1, 2, 3), 0)
HEADS_OUTSIDE = ((6, 4, 3, 8), (2, 0, 1, 3), 0)
HEADS_FIRST = ((6, 4, 3, 8), (0, 2, 1, 3), 0)
BLOCKS_IN_MIDDLE = ((4, 6, 3, 8), (0, 1, 2, 3), 1)
BLOCKS_LAST = ((4, 3, 8, 6), (0, 1, 2, 3), 3)
RUNS = [0, 1, 2, 5, 3, 4], [2, 3, 4, 1, 5, 0]  # 0,1,2 go on; 5; 3; 4


@pytest.mark.parametrize(
    ("ours", "theirs", "rows"),
    [
        (PAGED, PAGED, 4),
        (HEADS_FIRST, HEADS_FIRST, 4),  # the same order on both sides is one run, whatever the order
        # Only the 8 dims go together, and where blocks go on, the end of one with the start of the next.
        (PAGED, HEADS_FIRST, 6 * 4 * 3 - 2),
        (BLOCKS_IN_MIDDLE, BLOCKS_IN_MIDDLE, 4 * 4),  # each token's runs of blocks join
        (HEADS_OUTSIDE, HEADS_OUTSIDE, 4 * 3),
        (PAGED, BLOCKS_IN_MIDDLE, 6 * 4),
        (BLOCKS_LAST, BLOCKS_LAST, 4 * 4 * 3 * 8),
        (BLOCKS_LAST, PAGED, 6 * 4 * 3 * 8),
    ],
)
def test_no_more_rows_than_needed(ours: Any, theirs: Any, rows: int) -> None:
    local, _ = strided(ours[0], "f2", ours[1], (1, 1, 1, 1), 1)
    remote, memory = strided(theirs[0], "f2", theirs[1], (1, 1, 1, 1), 2)
    assert check_against_oracle(local, ours[2], remote, theirs[2], memory, *RUNS) == rows


def test_adjacent_blocks_are_one_descriptor() -> None:
    layout, _ = KVLayout.from_layers([np.zeros((10, 16, 8), np.float32)])
    local, remote, nbytes = layout.descriptors(layout, 0, "kv", [3, 4, 5], [7, 8, 9])
    assert (local.tolist(), remote.tolist(), nbytes.tolist()) == ([3 * 512], [7 * 512], [3 * 512])
    # Adjacent on one side only, or in the other direction: nothing to join.
    assert layout.descriptors(layout, 0, "kv", [3, 4], [7, 9])[2].tolist() == [512, 512]
    assert layout.descriptors(layout, 0, "kv", [4, 3], [8, 7])[0].tolist() == [4 * 512, 3 * 512]


def test_fused_kv_tensor_joins_runs_of_blocks_in_both_halves() -> None:
    """[2, nblocks, tokens, heads, dim] with the block axis 1: a block is two pieces."""
    cache = np.zeros((2, 10, 16, 2, 8), np.float16)
    layout, _ = KVLayout.from_layers([cache], block_axis=1)
    part = layout.part(0, "kv")
    assert part.pieces == (512, ((2, 5120),))
    local, remote, nbytes = layout.descriptors(layout, 0, "kv", [3, 4, 8], [0, 1, 2])
    assert local.tolist() == [3 * 512, 8 * 512, 5120 + 3 * 512, 5120 + 8 * 512]
    assert remote.tolist() == [0, 2 * 512, 5120, 5120 + 2 * 512]
    assert nbytes.tolist() == [1024, 512, 1024, 512]


def test_merge_takes_arrays_and_one_size() -> None:
    local = np.array([0, 10, 30, 40], np.int64)
    remote = np.array([100, 110, 130, 140], np.int64)
    merged = merge(local, remote, 10)
    assert [a.tolist() for a in merged] == [[0, 30], [100, 130], [20, 20]]
    merged = merge(local, remote, np.array([10, 20, 10, 1]))
    assert [a.tolist() for a in merged] == [[0], [100], [41]]
    empty = np.empty(0, np.int64)
    assert [a.tolist() for a in merge(empty, empty, 8)] == [[], [], []]
    assert [a.tolist() for a in merge(local[:1], remote[:1], 8)] == [[0], [100], [8]]


def test_many_descriptors() -> None:
    """More than 100,000 rows in one call, none adjacent."""
    n = 120_000
    part = Part("float16", 2, (16, 8), (16, 2), 2 * n, 0, 256)
    layout = KVLayout(((("kv", part),),))
    blocks = np.arange(0, 2 * n, 2)
    local, remote, nbytes = layout.descriptors(layout, 0, "kv", blocks, blocks + 1)
    assert local.tolist() == (blocks * 256).tolist()
    assert remote.tolist() == ((blocks + 1) * 256).tolist()
    assert (nbytes == 256).all()


def test_more_descriptors_than_memory_can_hold_are_refused() -> None:
    blocks = 4096
    ours = Part("uint8", 1, (128, 128), (128, 1), blocks, 0, 1 << 14)
    theirs = Part("uint8", 1, (128, 128), (1, 128), blocks, 0, 1 << 14)
    assert blocks * 128 * 128 > MAX_DESCRIPTORS
    layout, other = KVLayout(((("kv", ours),),)), KVLayout(((("kv", theirs),),))
    with pytest.raises(RegionError, match="pieces of 1 bytes are more than"):
        layout.descriptors(other, 0, "kv", range(blocks), range(blocks))
    assert len(layout.descriptors(other, 0, "kv", [0, 2], [1, 3])[0]) == 2 * 128 * 128


# --- describing a cache ---------------------------------------------------


def test_pairs_mappings_and_single_tensors() -> None:
    k, v = np.zeros((8, 16, 2, 4), np.float16), np.zeros((8, 16, 2, 4), np.float16)
    scale = np.zeros((8, 16), np.float32)
    layout, buffers = KVLayout.from_layers([(k, v), [k, v], k, {"k": k, "k_scale": scale}])
    assert list(layout.slots()) == [
        (0, "k"),
        (0, "v"),
        (1, "k"),
        (1, "v"),
        (2, "kv"),
        (3, "k"),
        (3, "k_scale"),
    ]
    assert [info.addr for info in buffers] == [a.ctypes.data for a in (k, v, k, v, k, k, scale)]
    assert [layout.slot(*slot) for slot in layout.slots()] == list(range(7))
    assert layout.part_names == ("k", "v", "kv", "k_scale")
    assert (layout.num_layers, layout.nblocks) == (4, 8)
    assert layout.block_nbytes == 6 * 16 * 2 * 4 * 2 + 16 * 4
    assert layout.nbytes_for(3) == 3 * layout.block_nbytes
    assert layout.layers[0] is layout.layers[1]
    assert layout.names is None
    assert layout.mismatch(layout) is None
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_strides_of_axes_of_length_one_do_not_matter() -> None:
    cache = np.zeros((4, 8, 2), np.float16)
    plain, _ = KVLayout.from_layers([cache[:, :1].copy()])
    odd, _ = KVLayout.from_layers([cache[:, ::-8][:, :1]])  # its one row stands at a negative stride
    assert odd.part(0, "kv").block_strides == (0, 2)
    assert plain.part(0, "kv").block_strides == (0, 2)
    assert odd.descriptors(plain, 0, "kv", [0, 1], [2, 3])[0].tolist() == [0, 32]


def test_named_layers() -> None:
    tensors = {f"model.layers.{i}": np.zeros((4, 8), np.int8) for i in range(3)}
    layout, _ = KVLayout.from_layers(tensors)
    assert layout.names == tuple(tensors)
    assert layout.layer_index("model.layers.2") == 2
    assert layout.slot("model.layers.1", "kv") == 1
    unnamed, _ = KVLayout.from_layers(list(tensors.values()))
    assert layout.mismatch(unnamed) is unnamed.mismatch(layout) is None
    turned, _ = KVLayout.from_layers(dict(reversed(tensors.items())))
    assert "names: layer 0 is 'model.layers.0' here and 'model.layers.2'" in str(layout.mismatch(turned))
    for layer in ("model.layers.9", 3, -1, True):
        with pytest.raises(RegionError, match="layer"):
            layout.layer_index(layer)
    with pytest.raises(RegionError, match=r"layer 1 \('model.layers.1'\) has no part 'v': it has 'kv'"):
        layout.part(1, "v")


def test_repr_is_short_and_tells_the_geometry() -> None:
    layers = [(np.zeros((8, n, 2), np.float16), np.zeros((8, n, 2), np.float16)) for n in range(1, 41)]
    layout, _ = KVLayout.from_layers(layers)
    text = repr(layout)
    assert "40 layers, 8 blocks" in text
    assert "k [1, 2] float16" in text
    assert "37 more kinds" in text
    assert len(text) < 250


@pytest.mark.parametrize("axis", [-3, 2, 7])
def test_block_axis_that_does_not_exist(axis: int) -> None:
    tensor = np.zeros((4, 8), np.float16)
    message = rf"layer 1 \('b'\) part 'kv' \(float16, shape \(4, 8\).*block_axis: {axis} does not exist"
    with pytest.raises(ConfigError, match=message):
        KVLayout.from_layers({"a": np.zeros((4,) * 8), "b": tensor}, block_axis=axis)


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ([], ConfigError, "layers: a cache has 1 to 4096 layers, not 0"),
        (
            np.zeros((2, 4, 8)),
            ConfigError,
            r"not a ndarray; a tensor of all layers can be given as list\(tensor\)",
        ),
        ([(np.zeros(4),) * 3], ConfigError, "layer 0 is a tuple of 3 entries"),
        ([np.zeros(4), {}], ConfigError, "layer 1 needs 1 to 64 parts"),
        ([{}, np.zeros(4)], ConfigError, "layer 0 needs 1 to 64 parts"),
        ([{3: np.zeros(4)}], ConfigError, "layer 0 has a part named 3"),
        ([{"a b": np.zeros(4)}], ConfigError, "layer 0 has a part with the name 'a b'"),
        ({3: np.zeros(4)}, ConfigError, "the name 3 of a layer is a int"),
        ({"": np.zeros(4)}, ConfigError, "names: the name of a layer"),
        (
            [np.zeros((4, 8)), (np.zeros((4, 8)), np.zeros((5, 8)))],
            ConfigError,
            "layer 1 part 'v' has 5 blocks",
        ),
        ([np.zeros((4, 8)), [1, 2]], RegionError, "layer 1 part 'k': a int is not a buffer"),
        ([np.zeros((4, 0))], RegionError, "layer 0 part 'kv': .* is empty"),
        ([np.zeros((4, 8))[::-1]], RegionError, "layer 0 part 'kv': .* runs backwards"),
        ([np.broadcast_to(np.zeros(8), (4, 8))], ConfigError, "block_stride: .* overlap"),
        (
            [np.broadcast_to(np.zeros((4, 1)), (4, 8))],
            ConfigError,
            "layer 0 part 'kv'.*block_strides: .* overlap",
        ),
        ([np.zeros(())], ConfigError, "with 0 axes"),
    ],
)
def test_caches_that_cannot_be_described(layers: Any, error: type[HixlError], message: str) -> None:
    with pytest.raises(error, match=message):
        KVLayout.from_layers(layers)


# --- comparing with the peer's --------------------------------------------


def one(shape: tuple[int, ...], dtype: npt.DTypeLike = "f2", axis: int = 0, n: int = 2) -> KVLayout:
    return KVLayout.from_layers([(np.zeros(shape, dtype), np.zeros(shape, dtype))] * n, block_axis=axis)[0]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (one((4, 16, 8), n=3), "layers: 2 here and 3 at the peer"),
        (one((4, 16, 8), "f4"), "layer 0 part 'k': dtype is float16 here and float32"),
        (one((4, 8, 8)), r"layer 0 part 'k': block_shape is \(16, 8\) here \(256 bytes\) and \(8, 8\)"),
        (one((4, 8, 16)), r"layer 0 part 'k': block_shape"),  # as many bytes, but not the same places
        (one((4, 128)), r"layer 0 part 'k': block_shape"),
        (
            KVLayout.from_layers([np.zeros((4, 16, 8), "f2")] * 2)[0],
            "parts of layer 0 are .'k', 'v'. here and .'kv'.",
        ),
        (KVLayout(one((4, 16, 8)).layers, version=2), "version is 1 here and 2"),
    ],
)
def test_mismatch_names_the_field(other: KVLayout, message: str) -> None:
    layout = one((4, 16, 8))
    reason = layout.mismatch(other)
    assert reason is not None
    assert re.search(message, reason)


def test_last_layer_alone_differs() -> None:
    ours = KVLayout.from_layers([np.zeros((4, 16, 8), "f2")] * 60)[0]
    theirs = KVLayout.from_layers([np.zeros((4, 16, 8), "f2")] * 59 + [np.zeros((4, 16, 9), "f2")])[0]
    assert str(ours.mismatch(theirs)).startswith("layer 59 part 'kv': block_shape")


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((9, 16, 8), 0), ((16, 9, 8), 1), ((9, 1, 16, 1, 8), 0), ((16, 8, 9), -1)],
)
def test_what_may_differ(shape: tuple[int, ...], axis: int) -> None:
    layout, other = one((4, 16, 8)), one(shape, axis=axis)
    assert layout.mismatch(other) is other.mismatch(layout) is None
    assert layout.descriptors(other, 1, "v", [0, 3], [8, 2])[2].sum() == 2 * 256


def test_descriptors_between_unlike_layouts() -> None:
    layout = one((4, 16, 8))
    with pytest.raises(PeerMismatchError, match="layer 1 part 'k': dtype"):
        layout.descriptors(one((4, 16, 8), "i2"), 1, "k", [0], [0])
    with pytest.raises(PeerMismatchError, match="2 layers, so no layer 2"):
        one((4, 16, 8), n=3).descriptors(layout, 2, "k", [0], [0])
    single = KVLayout.from_layers([np.zeros((4, 16, 8), "f2")] * 2)[0]
    with pytest.raises(PeerMismatchError, match="layer 0 has no part 'k' at the peer"):
        layout.descriptors(single, 0, "k", [0], [0])
    with pytest.raises(PeerMismatchError, match="block_shape"):
        copy_plan(layout.part(0, "k"), one((4, 2)).part(0, "k"))


# --- block lists ----------------------------------------------------------


@pytest.mark.parametrize(
    "blocks",
    [
        [3, 1, 2],
        (3, 1, 2),
        [np.int16(3), 1, np.uint64(2)],
        *(np.array([3, 1, 2], t) for t in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4")),
        np.array([3, 0, 1, 0, 2, 0])[::2],
    ],
)
def test_block_lists_of_every_kind(blocks: Any) -> None:
    out = normalize_blocks(blocks, 4)
    assert out.tolist() == [3, 1, 2]
    assert out.dtype == np.int64
    assert out.dtype.isnative
    assert out.flags.c_contiguous
    assert not out.flags.writeable


def test_block_lists_more() -> None:
    assert normalize_blocks(range(5, 1, -2), 6).tolist() == [5, 3]
    assert normalize_blocks(np.array([127], np.int8), 300).tolist() == [127]
    assert normalize_blocks(range(2, 3, 10**30), 4).tolist() == [2]
    nothing: list[Any] = [[], (), range(0), np.array([], np.int32)]
    nothing += [range(10**20, 10**20), range(5, 2)]
    for blocks in nothing:
        out = normalize_blocks(blocks, 4)
        assert out.shape == (0,)
        assert out.dtype == np.int64
    mine = np.array([0, 1, 2])
    out = normalize_blocks(mine, 4)
    mine[:] = 99
    assert out.tolist() == [0, 1, 2]
    assert normalize_blocks(out, 4) is out
    assert mine.flags.writeable


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([0, 1, 4], r"blocks\[2\] is 4, but the cache has 4 blocks \(0 to 3\)"),
        ([0, -1], r"blocks\[1\] is -1"),
        ([0, 2**70], r"blocks\[1\] is 1180591620717411303424"),
        ([0, 2**63], r"blocks\[1\] is 9223372036854775808"),
        ([-1, 2**63], r"blocks\[0\] is -1"),
        (range(2, 6), r"blocks\[2\] is 4"),
        (range(0, 10**15, 3), r"blocks\[2\] is 6"),
        (range(1, 10**15, 3), r"blocks\[1\] is 4"),
        (range(3, -(10**15), -2), r"blocks\[2\] is -1"),
        (range(2, -(10**15), -2), r"blocks\[2\] is -2"),
        (range(2**70, 2**70 + 1), r"blocks\[0\] is 1180591620717411303424"),
        (range(3, 10**30), r"blocks\[1\] is 4"),
        (range(-1, 3), r"blocks\[0\] is -1"),
        (np.array([1, 2**64 - 1], np.uint64), r"blocks\[1\] is 18446744073709551615"),
        (np.array([1, -128], np.int8), r"blocks\[1\] is -128"),
        ([0, True], r"blocks\[1\] is True, a bool"),
        ([0, 1.0], r"blocks\[1\] is 1.0, a float"),
        ([0, "1"], r"blocks\[1\] is '1', a str"),
        ([0, [1]], r"blocks\[1\] is \[1\], a list"),
        ([0, None], r"blocks\[1\] is None"),
        (np.array([True]), "dtype bool"),
        (np.array([0.0]), "dtype float64"),
        (np.array([[0, 1]]), r"shape \(1, 2\)"),
        (np.array(3), r"shape \(\)"),
        (np.array([0, 1], object), "dtype object"),
        (3, "a int: pass a list"),
        ({0, 1}, "a set: pass a list"),
        ("01", "a str: pass a list"),
        (b"01", "a bytes: pass a list"),
        (iter([0]), "pass a list"),
        (None, "a NoneType: pass a list"),
    ],
)
def test_bad_block_lists(blocks: Any, message: str) -> None:
    with pytest.raises(RegionError, match=message):
        normalize_blocks(blocks, 4)
    layout = one((4, 16, 8))
    with pytest.raises(RegionError, match=message):
        layout.descriptors(layout, 0, "k", blocks, [0, 1])
    with pytest.raises(RegionError, match=message.replace("blocks", "remote_blocks", 1)):
        layout.descriptors(layout, 0, "k", [0, 1], blocks)


def test_unequal_lengths() -> None:
    layout = one((4, 16, 8))
    with pytest.raises(RegionError, match="blocks has 1 entries and remote_blocks has 2"):
        layout.descriptors(layout, 0, "k", [0], [0, 1])
    with pytest.raises(RegionError, match="blocks has 3 entries and remote_blocks has 0"):
        layout.pair_blocks(layout, [0, 1, 2], [])


def test_no_blocks_no_descriptors() -> None:
    for layout in (one((4, 16, 8)), one((16, 4, 8), axis=1)):
        for row in layout.descriptors(layout, 0, "k", [], []):
            assert row.shape == (0,)
            assert row.dtype == np.int64


def test_destinations_only_once() -> None:
    layout, other = one((8, 4)), one((9, 4))
    ours, theirs = layout.pair_blocks(other, [1, 1, 2], [8, 0, 3])
    assert (ours.tolist(), theirs.tolist()) == ([1, 1, 2], [8, 0, 3])
    with pytest.raises(RegionError, match=r"remote_blocks\[1\] and remote_blocks\[3\] are both block 0"):
        layout.pair_blocks(other, [1, 2, 3, 4, 5], [1, 0, 3, 0, 1])
    many = np.arange(5000)[::-1].copy()
    many[[100, 4000, 4900]] = 7777
    with pytest.raises(RegionError, match=r"here\[100\] and here\[4000\] are both block 7777"):
        check_unique(many, "here")
    with pytest.raises(RegionError, match=r"blocks\[0\] and blocks\[1\] are both block 1"):
        layout.pair_blocks(other, [1, 1], [2, 3], destination="local")
    layout.pair_blocks(other, [1, 2], [3, 3], destination="local")
    check_unique(np.arange(5))
    check_unique(np.empty(0, np.int64))


# --- JSON -----------------------------------------------------------------


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(case=sides())
def test_json_round_trip(case: dict[str, Any]) -> None:
    local, _ = build(case, "local", 1)
    layout, _ = KVLayout.from_layers({"a": local, "b": (local, local)}, block_axis=case["local_axis"])
    again = KVLayout.from_json(layout.to_json())
    assert again == layout
    assert repr(again) == repr(layout)


def test_json_of_a_large_model_is_small() -> None:
    full, window = np.zeros((8, 16, 8, 128), np.float16), np.zeros((8, 16, 4, 128), np.float16)
    layers = [(full, full) if i % 6 == 5 else (window, window) for i in range(80)]
    layout, _ = KVLayout.from_layers(layers)
    data = layout.to_json()
    assert len(data) < 2048
    again = KVLayout.from_json(data)
    assert again == layout
    assert again.layers[0] is again.layers[1]


def test_json_that_nobody_would_read_is_not_written() -> None:
    layers = [
        tuple((f"part{j}", Part("int8", 1, (64 * i + j + 1,), (1,), 2, 0, 1 << 20)) for j in range(64))
        for i in range(1024)
    ]
    with pytest.raises(ConfigError, match="65536 different tensor geometries in 1024 layers"):
        KVLayout(tuple(layers)).to_json()


def document(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = json.loads(KVLayout.from_layers({"a": np.zeros((4, 3, 2), np.int8)})[0].to_json())
    for path, value in changes.items():
        *where, last = path.split("__")
        target: Any = base
        for key in where:
            target = target[int(key) if key.isdigit() else key]
        if value is ...:
            del target[last]
        else:
            target[int(last) if last.isdigit() else last] = value
    return base


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"version": 2}, "version: 2"),
        ({"version": ...}, "version: a NoneType"),
        ({"version": True}, "version: a bool"),
        ({"parts": ...}, "document: 'parts' is missing"),
        ({"extra": 1}, "document: 'extra'"),
        ({"parts": {}}, "parts: a dict"),
        ({"parts": []}, r"layers\[0\]\[1\]\[0\]\[1\]: a number outside"),
        ({"parts__0": 3}, r"parts\[0\]: a int"),
        ({"parts__0__dtype": ...}, r"parts\[0\]: 'dtype' is missing"),
        ({"parts__0__dtype": 1}, r"parts\[0\].dtype: a int"),
        ({"parts__0__dtype": "a b"}, r"parts\[0\].dtype"),
        ({"parts__0__dtype": "x" * 65}, r"parts\[0\].dtype"),
        ({"parts__0__more": 1}, r"parts\[0\]: 'more'"),
        ({"parts__0__itemsize": 0}, r"parts\[0\].itemsize"),
        ({"parts__0__itemsize": 1.0}, r"parts\[0\].itemsize: a float"),
        ({"parts__0__nblocks": 0}, r"parts\[0\].nblocks"),
        ({"parts__0__nblocks": -1}, r"parts\[0\].nblocks: a number outside"),
        ({"parts__0__nblocks": 2**56}, r"parts\[0\].block_stride: the tensor would reach"),
        ({"parts__0__nblocks": True}, r"parts\[0\].nblocks: a bool"),
        ({"parts__0__block_axis": 3}, r"parts\[0\].block_axis"),
        ({"parts__0__block_stride": 2**57}, r"parts\[0\].block_stride"),
        ({"parts__0__block_stride": 0}, r"parts\[0\].block_stride: .*overlap"),
        ({"parts__0__block_shape": [3]}, r"parts\[0\].block_strides: 2 strides"),
        ({"parts__0__block_shape": [3, 0]}, r"parts\[0\].block_shape"),
        ({"parts__0__block_shape": [3, "2"]}, r"parts\[0\].block_shape\[1\]: a str"),
        ({"parts__0__block_shape": [1] * 33}, r"parts\[0\].block_shape: 33 entries"),
        ({"parts__0__block_strides": [1, 1]}, r"parts\[0\].block_strides: .*overlap"),
        ({"parts__0__block_strides": [2, -1]}, r"parts\[0\].block_strides\[1\]"),
        ({"layers": []}, "layers: a cache has 1 to 4096"),
        ({"layers": "abc"}, "layers: a str"),
        ({"layers__0": [1]}, r"layers\[0\]: 1 entries"),
        ({"layers__0__0": 0}, r"layers\[0\]\[0\]: a number outside 1 to 4096"),
        ({"layers__0__0": 10**12}, r"layers\[0\]\[0\]: a number outside"),
        ({"layers__0__0": 2}, "names: 1 names for 2 layers"),
        ({"layers__0__1": []}, "layers: layer 0 .'a'. needs 1 to 64 parts"),
        ({"layers__0__1__0": "kv"}, r"layers\[0\]\[1\]\[0\]: a str"),
        ({"layers__0__1__0__0": 1}, r"layers\[0\]\[1\]\[0\]\[0\]: a int"),
        ({"layers__0__1__0__1": -1}, r"layers\[0\]\[1\]\[0\]\[1\]: a number outside 0 to 0"),
        ({"layers__0__1": [["kv", 0], ["kv", 0]]}, "layers: .* each with its own name"),
        ({"names": [1]}, r"names\[0\]: a int"),
        ({"names": []}, "names: 0 names for 1 layers"),
        ({"names": None}, "names: a NoneType"),
    ],
)
def test_json_with_one_bad_field(changes: dict[str, Any], field: str) -> None:
    KVLayout.from_json(json.dumps(document()).encode())
    with pytest.raises(PeerMismatchError, match=f"the peer's KV layout is not valid: {field}"):
        KVLayout.from_json(json.dumps(document(**changes)).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{}",
        b"NaN",
        b"[" * 200_000,
        b'{"version": ' + b"9" * 5000 + b"}",
        b" " * (MAX_JSON + 1),
        json.dumps(document()).encode()[:-1],
    ],
)
def test_garbage_instead_of_json(data: bytes) -> None:
    with pytest.raises(PeerMismatchError, match="the peer's KV layout is not valid") as caught:
        KVLayout.from_json(data)
    assert len(str(caught.value)) < 500


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(place for key, value in inner for place in _places(value, (*path, key)))]


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(where=st.sampled_from(_places(document())), value=json_values)
def test_any_value_anywhere_is_refused_or_harmless(where: tuple[Any, ...], value: Any) -> None:
    changed: Any = {"root": document()}
    target = changed
    for key in ("root", *where)[:-1]:
        target = target[key]
    target[("root", *where)[-1]] = value
    try:
        layout = KVLayout.from_json(json.dumps(changed["root"]).encode())
    except PeerMismatchError:
        return
    assert KVLayout.from_json(layout.to_json()) == layout
    assert max(part.extent for layer in layout.layers for _, part in layer) <= 2**56
