# SPDX-License-Identifier: Apache-2.0
"""A `KVLayout` as JSON, and back from a peer's JSON without trusting a byte of it.

{"version": 1,
 "parts":  [{"dtype": "bfloat16", ...}, ...],       each distinct `Part`, all of its fields
 "layers": [[count, [["k", 0], ["v", 0]]], ...],    runs of equal layers; numbers index "parts"
 "names":  ["model.layers.0", ...]}                 only if the layers have names
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from .errors import ConfigError, PeerMismatchError
from .geometry import MAX_DIMS, MAX_EXTENT, Part
from .kv import LAYOUT_VERSION, MAX_LAYERS, MAX_PARTS, KVLayout, Layer

__all__ = ["MAX_JSON", "dump_layout", "load_layout"]

#: 4096 different (k, v) layers with long names stay below this.
MAX_JSON = 4 << 20


def dump_layout(layout: KVLayout) -> bytes:
    """Write a layout as compact ASCII JSON. Raises `ConfigError` if no peer would read that much."""
    index: dict[Part, int] = {}
    runs: list[list[Any]] = []
    for layer in layout.layers:
        refs = [[name, index.setdefault(part, len(index))] for name, part in layer]
        if runs and runs[-1][1] == refs:
            runs[-1][0] += 1
        else:
            runs.append([1, refs])
    document: dict[str, Any] = {
        "version": layout.version,
        "parts": [asdict(part) for part in index],
        "layers": runs,
    }
    if layout.names is not None:
        document["names"] = list(layout.names)
    data = json.dumps(document, separators=(",", ":")).encode("ascii")
    if len(data) > MAX_JSON:
        raise ConfigError(
            f"layers: {len(index)} different tensor geometries in {layout.num_layers} layers take "
            f"{len(data)} bytes to describe, more than the {MAX_JSON} that a peer reads"
        )
    return data


def load_layout(data: bytes) -> KVLayout:
    """Read a layout. Raises `PeerMismatchError` that names the field for anything not valid."""
    if len(data) > MAX_JSON:
        raise _bad("document", f"{len(data)} bytes, at most {MAX_JSON} are read")
    try:
        document = json.loads(bytes(data).decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise _bad("document", f"not JSON ({exc})") from exc
    if not isinstance(document, dict):
        raise _bad("document", f"a {type(document).__name__} where an object should be")
    # The version first: another version may have any other field.
    version = _int(document.get("version"), "version", 0, MAX_EXTENT)
    if version != LAYOUT_VERSION:
        raise _bad("version", f"{version}, and {LAYOUT_VERSION} is read here: run one release on both sides")
    _keys(document, "document", {"version", "parts", "layers"}, {"names"})
    items = _list(document["parts"], "parts", MAX_LAYERS * MAX_PARTS)
    parts = [_part(item, f"parts[{i}]") for i, item in enumerate(items)]
    layers: list[Layer] = []
    for i, run in enumerate(_list(document["layers"], "layers", MAX_LAYERS)):
        pair = _list(run, f"layers[{i}]", 2, 2)
        count = _int(pair[0], f"layers[{i}][0]", 1, MAX_LAYERS - len(layers))
        layers += [_layer(pair[1], f"layers[{i}][1]", parts)] * count
    names: tuple[str, ...] | None = None
    if "names" in document:
        items = _list(document["names"], "names", MAX_LAYERS)
        names = tuple(_str(item, f"names[{i}]") for i, item in enumerate(items))
    try:
        return KVLayout(tuple(layers), names)
    except ConfigError as exc:
        raise PeerMismatchError(f"the peer's KV layout is not valid: {exc}") from exc


def _part(item: object, field: str) -> Part:
    if not isinstance(item, dict):
        raise _bad(field, f"a {type(item).__name__} where an object should be")
    _keys(item, field, set(Part.__dataclass_fields__), set())
    try:
        return Part(
            dtype=_str(item["dtype"], f"{field}.dtype"),
            block_shape=_ints(item["block_shape"], f"{field}.block_shape"),
            block_strides=_ints(item["block_strides"], f"{field}.block_strides"),
            **{
                name: _int(item[name], f"{field}.{name}", 0, MAX_EXTENT)
                for name in ("itemsize", "nblocks", "block_axis", "block_stride")
            },
        )
    except ConfigError as exc:
        raise PeerMismatchError(f"the peer's KV layout is not valid: {field}.{exc}") from exc


def _layer(item: object, field: str, parts: list[Part]) -> Layer:
    layer = []
    for i, ref in enumerate(_list(item, field, MAX_PARTS)):
        name, index = _list(ref, f"{field}[{i}]", 2, 2)
        number = _int(index, f"{field}[{i}][1]", 0, len(parts) - 1)
        layer.append((_str(name, f"{field}[{i}][0]"), parts[number]))
    return tuple(layer)


def _bad(field: str, what: str) -> PeerMismatchError:
    return PeerMismatchError(f"the peer's KV layout is not valid: {field}: {what}")


def _keys(item: dict[str, Any], field: str, required: set[str], optional: set[str]) -> None:
    if missing := sorted(required - set(item)):
        raise _bad(field, f"{missing[0]!r} is missing")
    if unknown := sorted(set(item) - required - optional):
        raise _bad(field, f"{unknown[0][:80]!r} is not a field of it")


def _int(value: object, field: str, low: int, high: int) -> int:
    if type(value) is not int:  # a bool is an int to isinstance
        raise _bad(field, f"a {type(value).__name__} where a whole number should be")
    if not low <= value <= high:
        raise _bad(field, f"a number outside {low} to {high}")
    return value


def _ints(value: object, field: str) -> tuple[int, ...]:
    items = _list(value, field, MAX_DIMS)
    return tuple(_int(item, f"{field}[{i}]", 0, MAX_EXTENT) for i, item in enumerate(items))


def _list(value: object, field: str, most: int, least: int = 0) -> list[Any]:
    if not isinstance(value, list):
        raise _bad(field, f"a {type(value).__name__} where a list should be")
    if not least <= len(value) <= most:
        raise _bad(field, f"{len(value)} entries, expected {least} to {most}")
    return value


def _str(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise _bad(field, f"a {type(value).__name__} where a string should be")
    return value
