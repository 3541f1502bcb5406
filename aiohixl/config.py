# SPDX-License-Identifier: Apache-2.0
"""The options of an engine, validated once, before anything native runs."""

from __future__ import annotations

import difflib
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from aiohixl.errors import STATUS_ERRORS, ConfigError
from aiohixl.hixl import OPTIONS as HIXL_OPTIONS
from aiohixl.hixl import HixlConfig
from aiohixl.verbs import OPTIONS as VERBS_OPTIONS
from aiohixl.verbs import SHARED as VERBS_SHARED
from aiohixl.verbs import VerbsConfig

__all__ = ["FAULT_ACTIONS", "TRANSPORTS", "EngineConfig", "Fault", "parse_host_port"]

#: Every transport that has a name here, and what would bring those that this build lacks.
TRANSPORTS = {
    "auto": "",
    "shm": "",
    "tcp": "",
    "verbs": "",
    "hixl": "",
}

FAULT_ACTIONS = ("delay", "fail", "stall", "wedge", "die")
_NAME_BYTES = 128
_MAX_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the nth transfer (from 0) that an engine posts. For tests.

    ``delay`` holds it for ``delay`` seconds; ``fail`` fails it with ``status``; ``stall`` holds it until it is
    cancelled; ``wedge`` cannot be recalled until ``delay`` seconds after its cancel; ``die`` kills the process.
    """

    nth: int
    action: str
    delay: float = 0.0
    status: str = "FAULT"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """See `aiohixl.Engine` for what each option means. Times are seconds."""

    name: str
    rendezvous: str | None = None
    token: str | None = field(default=None, repr=False)
    secret: bytes | None = field(default=None, repr=False)
    transports: tuple[str, ...] = ("auto",)
    address: str | None = None
    advertise: str | None = None
    ttl: float = 10.0
    join_timeout: float = 30.0
    replace: str | None = None
    force: bool = False
    streams: int | None = None
    checksum: bool = False
    zerocopy: bool = False
    copy_threads: int | None = None
    queue_depth: int = 16384
    peer_depth: int = 8192
    inline_limit: int = 32768
    max_mappings: int | None = None
    peer_timeout: float = 10.0
    stall_timeout: float = 30.0
    cancel_grace: float = 1.0
    handshake_timeout: float = 5.0
    npu_id: int | None = None
    link: str = "auto"
    traffic_class: int | None = None
    service_level: int | None = None
    buffer_pool: str | tuple[int, int] | None = None
    fabric_mem: bool = False
    hixl_options: Mapping[str, Any] | None = None
    hixl_address: str | None = None
    hixl_library: str | None = None
    busy_poll: float = 0.0
    faults: tuple[Fault, ...] = ()
    verbs_device: str | None = None
    verbs_gid_index: int | None = None
    verbs_timeout: float | None = None
    #: What the options for RDMA devices come to; None: without.
    verbs: VerbsConfig | None = field(default=None, init=False)
    #: What the options for HIXL come to; None: this engine has no NPU.
    hixl: HixlConfig | None = field(default=None, init=False)

    @classmethod
    def build(cls, name: object, options: dict[str, object]) -> EngineConfig:
        """Validate; an option that does not exist is a `ConfigError` that names the nearest one."""
        known = [f.name for f in fields(cls) if f.init and f.name != "name"]
        for key in options:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
                raise ConfigError(f"Engine has no option {key!r}{hint}")
        values = dict(options)
        if isinstance(values.get("secret"), str):
            if not _encodes(secret := str(values["secret"])):
                raise ConfigError("secret: a str that UTF-8 can encode, or bytes")
            values["secret"] = secret.encode()
        if "transports" in values:
            values["transports"] = _transports(values["transports"])
        if "faults" in values:
            values["faults"] = _faults(values["faults"])
        advertise = values.get("advertise")
        if isinstance(advertise, str) and advertise.startswith("[") and advertise.endswith("]"):
            values["advertise"] = advertise[1:-1]  # as in a URL, which is where it goes
        config = cls(name, **values)  # type: ignore[arg-type]  # _check() looks at each
        config._check()
        object.__setattr__(config, "hixl", config._hixl(options))
        object.__setattr__(config, "verbs", config._verbs(options))
        return config

    def _hixl(self, options: dict[str, object]) -> HixlConfig | None:
        given = {key: options[key] for key in HIXL_OPTIONS if key in options}
        defaults = {f.name: f.default for f in fields(self)}
        # A default that is spelled out asks for nothing: no NPU is opened for it.
        shared = VERBS_SHARED if "verbs" in self.transports else ()
        asked = [key for key, value in given.items() if key not in shared and not _is_same(value, defaults[key])]
        if "hixl" not in self.transports and not ("auto" in self.transports and asked):
            if asked:
                raise self._stray(asked[0], "hixl")
            return None
        return HixlConfig.build(given)

    def _verbs(self, options: dict[str, object]) -> VerbsConfig | None:
        given = {key: options[key] for key in VERBS_OPTIONS if options.get(key) is not None}
        if "verbs" not in self.transports:
            if given:
                raise self._stray(next(iter(given)), "verbs")
            return None
        given |= {key: options[key] for key in VERBS_SHARED if options.get(key) is not None}
        if self.hixl is not None:
            raise ConfigError("transports: an engine has 'hixl' or 'verbs', not both")
        return VerbsConfig.build(given)

    def _stray(self, option: str, transport: str) -> ConfigError:
        return ConfigError(
            f"{option}: an option of the transport {transport!r}, which is not among transports "
            f"{list(self.transports)}: name it there, or leave the option out"
        )

    @property
    def transport_names(self) -> tuple[str, ...]:
        """The transports that carry bulk data, by their own names."""
        names = ["shm", "hixl", "verbs", "tcp"]
        wanted = {"shm", "tcp"} if "auto" in self.transports else set()
        wanted |= set(self.transports) | ({"hixl"} if self.hixl is not None else set())
        return tuple(name for name in names if name in wanted)

    def _check(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"an engine's name is a string that is not empty, not {self.name!r}")
        if len(self.name.encode("utf-8", "surrogatepass")) > _NAME_BYTES:
            raise ConfigError(f"an engine's name has at most {_NAME_BYTES} bytes of UTF-8: {self.name[:40]!r}...")
        if not self.name.isprintable() or "/" in self.name or self.name in (".", ".."):
            raise ConfigError(
                f"an engine's name has printable characters, no '/', and is not '.' or '..': {self.name!r}"
            )
        if self.secret is not None and (not isinstance(self.secret, bytes) or not self.secret):
            raise ConfigError("secret: a str or bytes that is not empty")
        for key in ("rendezvous", "token", "address", "advertise", "replace"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, str) or not value or not _encodes(value)):
                raise ConfigError(f"{key}: a str that is not empty and fit for UTF-8, not {type(value).__name__}")
        for flag in ("force", "checksum", "zerocopy"):
            if not isinstance(getattr(self, flag), bool):
                raise ConfigError(f"{flag}: True or False, not {getattr(self, flag)!r}")
        if self.replace is not None and not re.fullmatch("[0-9a-f]{32}", self.replace):
            raise ConfigError(
                "replace: the incarnation to take over from, 32 lower-case hexadecimal digits (`Engine.incarnation`), "
                f"not {self.replace!r}"
            )
        if self.advertise is not None:
            if not _is_host(self.advertise):
                raise ConfigError(f"advertise: one host name or IP address, without a port, not {self.advertise!r}")
            if self.address is None:
                raise ConfigError(
                    f"advertise={self.advertise!r} needs an address to listen on: give address='host:port' as well"
                )
        if self.address is not None:
            host, _ = parse_host_port(self.address, "address")
            if _is_wildcard(host) and self.advertise is None:
                raise ConfigError(
                    f"address {self.address!r} listens on every interface: say with advertise='host' which address "
                    "peers shall use"
                )
        for key, low, high in (
            ("ttl", 1.0, 3600.0),
            ("join_timeout", 0.0, _MAX_SECONDS),
            ("peer_timeout", 0.02, _MAX_SECONDS),
            ("stall_timeout", 0.02, _MAX_SECONDS),
            ("cancel_grace", 0.02, _MAX_SECONDS),
            ("handshake_timeout", 0.02, _MAX_SECONDS),
        ):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ConfigError(f"{key}: seconds from {low} to {high}, not {value!r}")
        for key, low_int, high_int in (
            ("queue_depth", 16, 1 << 20),
            ("peer_depth", 1, 1 << 20),
            ("inline_limit", 0, 1 << 20),
            ("copy_threads", 1, 16),
            ("streams", 1, 16),
            ("max_mappings", 4, 1 << 30),
        ):
            value = getattr(self, key)
            if key in ("copy_threads", "max_mappings", "streams") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low_int <= value <= high_int:
                raise ConfigError(f"{key}: a whole number from {low_int} to {high_int}, not {value!r}")
        if "tcp" not in self.transport_names:
            for key, given in (("streams", self.streams), ("checksum", self.checksum), ("zerocopy", self.zerocopy)):
                if given:
                    raise self._stray(key, "tcp")
        if self.queue_depth & (self.queue_depth - 1):
            raise ConfigError(f"queue_depth: a power of two, not {self.queue_depth}")

    def native(self) -> dict[str, int]:
        """Options under the names and units of the native core."""
        out = {
            "queue_depth": self.queue_depth,
            "peer_depth": self.peer_depth,
            "inline_limit": self.inline_limit,
            "peer_timeout_ns": int(self.peer_timeout * 1e9),
            "stall_timeout_ns": int(self.stall_timeout * 1e9),
            "cancel_grace_ns": int(self.cancel_grace * 1e9),
            "handshake_timeout_ns": int(self.handshake_timeout * 1e9),
            "checksum": int(self.checksum),
            "zerocopy": int(self.zerocopy),
        }
        if self.streams is not None:
            out["streams"] = self.streams
        if self.copy_threads is not None:
            out["copy_threads"] = self.copy_threads
        if self.max_mappings is not None:
            out["max_mappings"] = self.max_mappings
        return out


def _is_same(value: object, default: object) -> bool:
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    return type(value) is type(default) and value == default


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_host(text: str) -> bool:
    """Fit to stand in ``tcp://host:port``, in a list separated by commas."""
    if not text.isprintable() or set(text) & set(" ,/[]"):
        return False
    if ":" not in text:
        return True
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _is_wildcard(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            return socket.inet_aton(host) == bytes(4)  # "0" and the like, which resolvers take for 0.0.0.0
        except (OSError, ValueError):
            return False
    return (getattr(address, "ipv4_mapped", None) or address).is_unspecified


def _transports(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ConfigError(f"transports: a list of names out of {', '.join(TRANSPORTS)}, not {value!r}")
    for name in value:
        if name not in TRANSPORTS:
            near = difflib.get_close_matches(str(name), TRANSPORTS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"transports: there is no {name!r} among {', '.join(TRANSPORTS)}{hint}")
        if TRANSPORTS[name]:
            raise ConfigError(f"transports: {name!r} is not available: {TRANSPORTS[name]}")
    return tuple(value)


def _faults(value: object) -> tuple[Fault, ...]:
    if not isinstance(value, Iterable):
        raise ConfigError(f"faults: a FaultPlan or an iterable of Fault, not {value!r}")
    faults = tuple(value)
    for fault in faults:
        if not isinstance(fault, Fault) or fault.action not in FAULT_ACTIONS:
            raise ConfigError(f"faults: not a Fault with an action out of {', '.join(FAULT_ACTIONS)}: {fault!r}")
        if not isinstance(fault.nth, int) or not 0 <= fault.nth < 1 << 64:
            raise ConfigError(f"faults: nth counts transfers from 0: {fault!r}")
        if not isinstance(fault.delay, int | float) or not 0 <= fault.delay <= _MAX_SECONDS:
            raise ConfigError(f"faults: delay is in seconds from 0 to {_MAX_SECONDS}: {fault!r}")
        if fault.status not in STATUS_ERRORS:
            raise ConfigError(f"faults: status is one of {', '.join(STATUS_ERRORS)}: {fault!r}")
    return faults


def parse_host_port(text: str, what: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port``, with or without ``tcp://`` before it."""
    rest = text.removeprefix("tcp://")
    host, colon, port = rest.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if (
        not colon
        or not host
        or not port.isascii()
        or not port.isdigit()
        or int(port) > 65535
        or (":" in host) != bracketed
    ):
        raise ConfigError(f"{what}: host:port or [v6]:port with a port from 0 to 65535, not {text!r}")
    return host, int(port)
