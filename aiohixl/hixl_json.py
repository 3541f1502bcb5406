# SPDX-License-Identifier: Apache-2.0
"""The two options of HIXL that are documents: what they may say, checked before HIXL sees them."""

from __future__ import annotations

import difflib
import ipaddress
import json
from collections.abc import Callable, Mapping
from typing import Any

from aiohixl.errors import ConfigError

__all__ = ["RESOURCE_FIELDS", "check_comm_res", "check_resources", "parse_document"]

PROTOCOLS = ("roce", "hccs", "ub_ctp", "ub_rtp", "uboe")
_PLACEMENTS = ("host", "device")


def parse_document(value: object, what: str) -> tuple[dict[str, Any], str]:
    """The object that a str or a mapping describes, and its text."""
    if isinstance(value, Mapping):
        try:
            text = json.dumps(dict(value), separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as exc:
            raise ConfigError(f"{what}: cannot be written as JSON: {exc}") from None
    elif isinstance(value, str):
        text = value
    else:
        raise ConfigError(f"{what}: a dict, or a str of JSON, not {value!r}")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{what}: not JSON: {exc}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{what}: a JSON object, not {text[:60]!r}")
    return document, text


# ---- LocalCommRes ----


def check_comm_res(document: dict[str, Any], what: str) -> tuple[str, frozenset[str]]:
    """Its version, and the protocols of its endpoints (none where HIXL is left to find them).

    Documents of another version than 1.3 belong to HCCL, which judges them itself.
    """
    version = document.get("version")
    if not isinstance(version, str) or not version:
        raise ConfigError(f'{what}: needs "version" as a string, such as "1.3", not {version!r}')
    if version != "1.3":
        return version, frozenset()
    _check_spelling(document, ("version", "net_instance_id", "endpoint_list"), what)
    net = document.get("net_instance_id", "-")
    if not isinstance(net, str) or not net:
        raise ConfigError(f"{what}: net_instance_id is a string that is not empty, not {net!r}")
    endpoints = document.get("endpoint_list", [])
    if not isinstance(endpoints, list):
        raise ConfigError(f"{what}: endpoint_list is a list, not {endpoints!r}")
    if endpoints and "net_instance_id" not in document:
        raise ConfigError(f"{what}: an endpoint_list needs a net_instance_id beside it")
    return version, frozenset(_protocol(entry, f"{what}: endpoint_list[{i}]") for i, entry in enumerate(endpoints))


def _check_spelling(document: dict[str, Any], known: tuple[str, ...], what: str) -> None:
    """A newer HIXL may know more keys than we do; one that is nearly one of these is a slip of the pen."""
    for key in document:
        near = [] if key in known else difflib.get_close_matches(key, known, 1, 0.75)
        if near:
            raise ConfigError(f"{what}: there is no {key!r}; did you mean {near[0]!r}?")


def _protocol(entry: object, what: str) -> str:
    if not isinstance(entry, dict):
        raise ConfigError(f"{what}: an object with protocol, comm_id and placement, not {entry!r}")
    _check_spelling(entry, ("protocol", "comm_id", "placement"), what)
    for key, known in (("protocol", PROTOCOLS), ("placement", _PLACEMENTS)):
        if entry.get(key) not in known:
            raise ConfigError(f"{what}: {key} is one of {', '.join(known)}, not {entry.get(key)!r}")
    comm_id = entry.get("comm_id")
    if not isinstance(comm_id, str) or not comm_id:
        raise ConfigError(f"{what}: comm_id is an IP address or an EID, not {comm_id!r}")
    protocol = str(entry["protocol"])
    if protocol == "roce":
        try:
            ipaddress.ip_address(comm_id)
        except ValueError:
            raise ConfigError(f"{what}: comm_id of a roce endpoint is an IP address, not {comm_id!r}") from None
    return protocol


# ---- GlobalResourceConfig ----


def _whole(low: int, high: int) -> Callable[[object], str | None]:
    def check(value: object) -> str | None:
        # HIXL takes a number or its digits as a string.
        number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
            return f"a whole number from {low} to {high}"
        return None

    return check


def _share(value: object) -> str | None:
    try:
        number = float(value)  # type: ignore[arg-type]  # a TypeError is answered below
    except (TypeError, ValueError):
        number = -1.0
    return None if not isinstance(value, bool) and 0 < number < 1 else "a number between 0 and 1"


def _truth(value: object) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _path(value: object) -> str | None:
    return None if isinstance(value, str) and value and "\0" not in value else "a path"


def _protocols(value: object) -> str | None:
    names = [value] if isinstance(value, str) else value
    if isinstance(names, list) and names and all(isinstance(name, str) and name for name in names):
        heads = [name.partition(":") for name in names]
        if all(head in PROTOCOLS and (not colon or tail in _PLACEMENTS) for head, colon, tail in heads):
            return None
    return f"protocol:placement, or a list of those, with {', '.join(PROTOCOLS)} and {', '.join(_PLACEMENTS)}"


#: Each field of the document by its dotted name, and what is wrong with a value of it. Amounts of memory are in TB.
RESOURCE_FIELDS: dict[str, Callable[[object], str | None]] = {
    "fabric_memory.max_capacity": _whole(1, 1024),
    "fabric_memory.start_address": _whole(0, 1024),
    "fabric_memory.task_stream_num": _whole(1, 8),
    "fabric_memory.enable_aicpu_unfold": _truth,
    "connect_pool.thread_num": _whole(1, 64),
    "connect_pool.task_queue_capacity": _whole(1, 65535),
    "comm_resource_config.protocol_desc": _protocols,
    "comm_resource_config.listen_port": _whole(1, 65535),
    "comm_resource_config.qos": _whole(0, 7),
    "comm_resource_config.max_active_channels": _whole(1, 8192),
    "local_comm_res_path": _path,
    "channel_pool.max_channel": _whole(1, 512),
    "channel_pool.high_waterline": _share,
    "channel_pool.low_waterline": _share,
}
_GROUPS = {name.partition(".")[0] for name in RESOURCE_FIELDS if "." in name}


def check_resources(document: dict[str, Any], what: str) -> dict[str, Any]:
    """The fields by dotted name, however they were written: ``{"a.b": 1}`` or ``{"a": {"b": 1}}``."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        inner = {f"{key}.{k}": v for k, v in value.items()} if key in _GROUPS and isinstance(value, dict) else None
        for name, field in ({key: value} if inner is None else inner).items():
            if name in flat:
                raise ConfigError(f"{what}: {name} stands there twice")
            flat[name] = field
    for name, value in flat.items():
        if name not in RESOURCE_FIELDS:
            near = difflib.get_close_matches(name, RESOURCE_FIELDS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(RESOURCE_FIELDS)}"
            raise ConfigError(f"{what}: there is no field {name!r}; {hint}")
        wanted = RESOURCE_FIELDS[name](value)
        if wanted is not None:
            raise ConfigError(f"{what}: {name} is {wanted}, not {value!r}")
    high, low = flat.get("channel_pool.high_waterline"), flat.get("channel_pool.low_waterline")
    if (high is None) != (low is None) or (high is not None and float(str(low)) >= float(str(high))):
        raise ConfigError(
            f"{what}: channel_pool.low_waterline and high_waterline go together, and the low one is lower: not "
            f"{low!r} and {high!r}"
        )
    return flat
