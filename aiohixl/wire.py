# SPDX-License-Identifier: Apache-2.0
"""What engines and the rendezvous tell each other: JSON messages, versioned and validated.

Both sides build and read every message here, so that a limit exists once. A message
checks itself when it is constructed, whichever side does it: `WireError.field` names
the field at fault. Requests refuse fields they do not know; answers ignore them, so that
a newer server can say more to an older client.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, Self, cast
from urllib.parse import quote, unquote_to_bytes

from aiohixl.errors import ConfigError

__all__ = [
    "DEFAULT_TTL",
    "MAX_ADDRESSES",
    "MAX_ADDRESS_LENGTH",
    "MAX_BODY",
    "MAX_CAPABILITIES",
    "MAX_EPOCH",
    "MAX_EPOCH_HINT",
    "MAX_NAME_LENGTH",
    "MAX_TTL",
    "MAX_WAIT",
    "MIN_TTL",
    "VERSION",
    "ErrorBody",
    "Holder",
    "JoinRequest",
    "Record",
    "RenewRequest",
    "WatchEvent",
    "WireError",
    "check_epoch",
    "check_incarnation",
    "check_name",
    "decode_name",
    "derive_bearer",
    "dump_message",
    "encode_name",
    "load_message",
]

VERSION = 1
MAX_BODY = 64 * 1024
MAX_NAME_LENGTH = 128
MAX_ADDRESSES = 16
MAX_ADDRESS_LENGTH = 512
MAX_CAPABILITIES = 8 * 1024
MAX_CAPABILITY_DEPTH = 16
MIN_TTL = 1.0
MAX_TTL = 3600.0
DEFAULT_TTL = 10.0
MAX_WAIT = 60.0
# Epochs survive readers that keep numbers as doubles. A hint stops half way, so that
# whatever a client claims, there are epochs left above it.
MAX_EPOCH = 2**53 - 1
MAX_EPOCH_HINT = 2**52

_INCARNATION = re.compile(r"[0-9a-f]{32}")
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


class WireError(ConfigError):
    """A message or a value in it that cannot be accepted. ``field`` names the culprit."""

    field: str = ""


def _bad(name: str, problem: str) -> WireError:
    error = WireError(f"{name}: {problem}")
    error.field = name
    return error


def _show(value: object) -> str:
    """A value as it may stand in a message: short, on one line, encodable."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "an integer beyond 64 bits"
    text = ascii(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 64 else text[:61] + "..."


def check_name(value: object, where: str = "name") -> str:
    """An engine's name: 1 to 128 printable characters, no slash; not ``.`` or ``..`` (URLs drop those)."""
    if not isinstance(value, str):
        raise _bad(where, f"must be a string, not {_show(value)}")
    if not 1 <= len(value) <= MAX_NAME_LENGTH:
        raise _bad(where, f"must have 1 to {MAX_NAME_LENGTH} characters, not {len(value)}")
    if "/" in value or value in (".", "..") or not value.isprintable():
        raise _bad(where, f"must be printable without '/' and not '.' or '..', unlike {_show(value)}")
    return value


def encode_name(name: str) -> str:
    """The name as one segment of a URL path."""
    return quote(check_name(name), safe="")


def decode_name(segment: str) -> str:
    """The name in a raw (still percent-encoded) path segment; the reverse of `encode_name`."""
    if _BROKEN_ESCAPE.search(segment):
        raise _bad("name", "has a '%' in its URL that is not a percent-encoding")
    try:
        # Raw bytes of a request line arrive as surrogates, which `strict` must get to see as bytes.
        return check_name(unquote_to_bytes(segment.encode("utf-8", "surrogateescape")).decode("utf-8"))
    except UnicodeError as exc:
        raise _bad("name", "is not UTF-8 in its URL") from exc


def check_incarnation(value: object, where: str = "incarnation") -> str:
    """32 lower-case hexadecimal characters that name one life of an engine."""
    if not isinstance(value, str) or not _INCARNATION.fullmatch(value):
        raise _bad(where, f"must be 32 lower-case hexadecimal characters, not {_show(value)}")
    return value


def check_epoch(value: object, where: str = "epoch", limit: int = MAX_EPOCH) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
        raise _bad(where, f"must be an integer from 0 to {limit}, not {_show(value)}")
    return value


def _check_number(value: object, where: str, low: float, high: float = math.inf) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _bad(where, f"must be a number, not {_show(value)}")
    # Compare before float(): a huge int does not convert, and NaN fails both comparisons.
    if not low <= value <= high or value == math.inf:
        raise _bad(where, f"must be from {low:g} to {high:g} seconds, not {_show(value)}")
    return float(value)


def _check_text(value: object, where: str, low: int, high: int) -> str:
    if not isinstance(value, str) or not low <= len(value) <= high or not value.isprintable():
        raise _bad(where, f"must be {low} to {high} printable characters, not {_show(value)}")
    return value


def _check_addresses(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise _bad("addresses", f"must be a list of strings, not {_show(value)}")
    if len(value) > MAX_ADDRESSES:
        raise _bad("addresses", f"may have {MAX_ADDRESSES} entries, not {len(value)}")
    return tuple(_check_text(a, f"addresses[{i}]", 1, MAX_ADDRESS_LENGTH) for i, a in enumerate(value))


def _check_json(value: object, where: str, depth: int) -> None:
    if depth > MAX_CAPABILITY_DEPTH:
        raise _bad(where, f"may nest {MAX_CAPABILITY_DEPTH} levels deep")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise _bad(where, f"may have string keys only, not {_show(key)}")
            _check_json(key, where, depth)
            _check_json(item, where, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_json(item, where, depth + 1)
    elif isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as exc:
            raise _bad(where, f"has text that is not Unicode: {_show(value)}") from exc
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise _bad(where, "may have integers of 64 bits only")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _bad(where, f"may have finite numbers only, not {value}")
    elif value is not None:
        raise _bad(where, f"may have JSON values only, not {_show(value)}")


def _check_capabilities(value: object) -> dict[str, Any]:
    where = "capabilities"
    if not isinstance(value, dict):
        raise _bad(where, f"must be an object, not {_show(value)}")
    _check_json(value, where, 1)
    nbytes = len(dump_message(value))
    if nbytes > MAX_CAPABILITIES:
        raise _bad(where, f"may have {MAX_CAPABILITIES} bytes as JSON, not {nbytes}")
    return value


def _check_literal(value: object, where: str, allowed: Iterable[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise _bad(where, f"must be one of {', '.join(sorted(allowed))}, not {_show(value)}")
    return value


class _Message:
    """Reading and writing, shared by the dataclasses below; `_normalise` is where each checks itself."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for key, value in self._normalise().items():
            object.__setattr__(self, key, value)

    def _normalise(self) -> dict[str, Any]:
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; fields that are None are left out."""
        names = [f.name for f in fields(cast(Any, self))]
        values = {name: _to_json(getattr(self, name)) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_json(cls, value: object, *, strict: bool = False, where: str = "body") -> Self:
        """Read a JSON object; `strict` refuses unknown fields. Raises `WireError`."""
        if not isinstance(value, dict):
            raise _bad(where, f"must be an object, not {_show(value)}")
        known = {f.name for f in fields(cast(Any, cls))}
        if strict and (unknown := sorted(set(value) - known - {"version"})):
            raise _bad(_show(unknown[0])[1:-1], "is not a field of this message")
        required = (f.name for f in fields(cast(Any, cls)) if f.default is MISSING is f.default_factory)
        for name in required:
            if name not in value:
                raise _bad(name, "is missing")
        return cls(**{key: item for key, item in value.items() if key in known})


def _to_json(value: object) -> object:
    if isinstance(value, _Message):
        return value.to_json()
    return [_to_json(item) for item in value] if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class Record(_Message):
    """One joined engine as the rendezvous tells it; `ttl` and `age` (since it joined) in seconds."""

    name: str
    incarnation: str
    epoch: int
    addresses: tuple[str, ...] = ()
    capabilities: dict[str, Any] = field(default_factory=dict)
    ttl: float = DEFAULT_TTL
    age: float = 0.0

    def _normalise(self) -> dict[str, Any]:
        return {
            "name": check_name(self.name),
            "incarnation": check_incarnation(self.incarnation),
            "epoch": check_epoch(self.epoch),
            "addresses": _check_addresses(self.addresses),
            "capabilities": _check_capabilities(self.capabilities),
            "ttl": _check_number(self.ttl, "ttl", MIN_TTL, MAX_TTL),
            "age": _check_number(self.age, "age", 0.0),
        }


@dataclass(frozen=True, slots=True)
class JoinRequest(_Message):
    """Asks for a name (which stands in the URL) for `ttl` seconds.

    `epoch` is the epoch this incarnation had before, if any; `replace` the incarnation
    that may be taken over, `force` takes over whoever holds the name.
    """

    incarnation: str
    addresses: tuple[str, ...] = ()
    capabilities: dict[str, Any] = field(default_factory=dict)
    ttl: float = DEFAULT_TTL
    epoch: int | None = None
    replace: str | None = None
    force: bool = False

    def _normalise(self) -> dict[str, Any]:
        if not isinstance(self.force, bool):
            raise _bad("force", f"must be true or false, not {_show(self.force)}")
        return {
            "incarnation": check_incarnation(self.incarnation),
            "addresses": _check_addresses(self.addresses),
            "capabilities": _check_capabilities(self.capabilities),
            "ttl": _check_number(self.ttl, "ttl", MIN_TTL, MAX_TTL),
            "epoch": None if self.epoch is None else check_epoch(self.epoch, limit=MAX_EPOCH_HINT),
            "replace": None if self.replace is None else check_incarnation(self.replace, "replace"),
        }


@dataclass(frozen=True, slots=True)
class RenewRequest(_Message):
    """Extends the lease of a name by its time-to-live."""

    incarnation: str

    def _normalise(self) -> dict[str, Any]:
        return {"incarnation": check_incarnation(self.incarnation)}


@dataclass(frozen=True, slots=True)
class Holder(_Message):
    """Who holds a name: seconds since it joined and renewed, and until its lease ends."""

    incarnation: str
    epoch: int
    age: float
    since_renew: float
    expires_in: float

    def _normalise(self) -> dict[str, Any]:
        times = {k: _check_number(getattr(self, k), k, 0.0) for k in ("age", "since_renew", "expires_in")}
        return {"incarnation": check_incarnation(self.incarnation), "epoch": check_epoch(self.epoch), **times}

    def describe(self) -> str:
        return (
            f"incarnation {self.incarnation} (joined {self.age:.1f} s ago, renewed {self.since_renew:.1f} s "
            f"ago, lease ends in {self.expires_in:.1f} s)"
        )


@dataclass(frozen=True, slots=True)
class ErrorBody(_Message):
    """The ``error`` object of an answer: `code` for programs, `message` for people."""

    code: str
    message: str
    field: str | None = None
    holder: Holder | None = None

    def _normalise(self) -> dict[str, Any]:
        holder = self.holder
        return {
            "code": _check_text(self.code, "code", 1, 64),
            "message": _check_text(self.message, "message", 0, 4096),
            "field": None if self.field is None else _check_text(self.field, "field", 0, 256),
            "holder": holder if isinstance(holder, Holder | None) else Holder.from_json(holder, where="holder"),
        }


@dataclass(frozen=True, slots=True)
class WatchEvent(_Message):
    """What a watch reports.

    ``snapshot`` carries all records and replaces what was known; ``joined``, ``updated``
    and ``left`` carry one. `reason` says how an engine went: ``left``, ``expired`` or ``replaced``.
    """

    kind: Literal["snapshot", "joined", "updated", "left"]
    records: tuple[Record, ...]
    reason: Literal["left", "expired", "replaced"] | None = None

    @property
    def record(self) -> Record:
        """The one record of an event that is no snapshot."""
        (record,) = self.records
        return record

    def _normalise(self) -> dict[str, Any]:
        kind = _check_literal(self.kind, "kind", ("snapshot", "joined", "updated", "left"))
        if not isinstance(self.records, list | tuple):
            raise _bad("records", f"must be a list, not {_show(self.records)}")
        records = tuple(r if isinstance(r, Record) else Record.from_json(r, where="records") for r in self.records)
        if kind != "snapshot" and len(records) != 1:
            raise _bad("records", f"must be one record in a {kind!r} event, not {len(records)}")
        if self.reason is not None:
            _check_literal(self.reason, "reason", ("left", "expired", "replaced"))
        return {"records": records}


def dump_message(message: Mapping[str, Any]) -> bytes:
    """Compact UTF-8 JSON."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")


def load_message(body: bytes, *, limit: int = MAX_BODY) -> dict[str, Any]:
    """Parse a JSON object of this protocol version from at most `limit` bytes. Raises `WireError`.

    Refused: other encodings than UTF-8, NaN and Infinity, a key given twice in one
    object, integers of thousands of digits, nesting beyond the interpreter's stack.
    """
    if len(body) > limit:
        raise _bad("body", f"may have {limit} bytes, not {len(body)}")
    try:
        message = json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except WireError:
        raise
    except UnicodeDecodeError as exc:
        raise _bad("body", f"is not UTF-8 (at byte {exc.start})") from exc
    except RecursionError as exc:
        raise _bad("body", "is JSON nested too deeply") from exc
    except json.JSONDecodeError as exc:
        raise _bad("body", f"is not JSON: {exc.msg} at character {exc.pos}") from exc
    except ValueError as exc:
        raise _bad("body", "is JSON with a number that is too long") from exc
    if not isinstance(message, dict):
        raise _bad("body", f"must be a JSON object, not {_show(message)}")
    if "version" not in message:
        raise _bad("version", f"is missing; this side speaks version {VERSION}")
    version = message["version"]
    if type(version) is not int or version != VERSION:
        raise _bad("version", f"is {_show(version)}; this side speaks version {VERSION}")
    return message


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _bad(_show(key)[1:-1], "is given twice in one object")
        result[key] = value
    return result


def _no_constant(text: str) -> object:
    raise _bad("body", f"has {text}, which is not JSON")


def derive_bearer(secret: str | bytes) -> str:
    """The bearer token that stands for an engine's secret at the rendezvous.

    One-way: who reads it (a server, a proxy, a log) learns nothing that helps on a control link.
    """
    key = secret.encode("utf-8") if isinstance(secret, str) else secret
    if not key:
        raise ConfigError("the secret is empty; give one of at least one byte, or None for no secret")
    return hmac.new(key, b"aiohixl rendezvous bearer 1", hashlib.sha256).hexdigest()
