# SPDX-License-Identifier: Apache-2.0
"""What HIXL, Huawei's library for Ascend NPUs, may be told, and what its answers mean.

Options are judged here, by name and range, before anything native runs: HIXL itself answers a bare number.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohixl.errors import ConfigError
from aiohixl.hixl_json import check_comm_res, check_resources, parse_document

__all__ = [
    "BINDING",
    "CODES",
    "LINKS",
    "OPTIONS",
    "HixlConfig",
    "code_in",
    "explain",
    "format_endpoint",
    "parse_endpoint",
]

#: The binding to HIXL, beside this file. It is built everywhere, and opened where HIXL is wanted.
BINDING = Path(__file__).with_name("_provider_hixl.so")

#: The options of `Engine` that only HIXL has a use for.
OPTIONS = (
    "npu_id",
    "link",
    "traffic_class",
    "service_level",
    "buffer_pool",
    "fabric_mem",
    "hixl_options",
    "hixl_address",
    "hixl_library",
    "busy_poll",
)
LINKS = ("auto", "hccs", "roce")

#: HIXL's own option that an option of `Engine` stands for.
_SPELLED = {
    "traffic_class": "RdmaTrafficClass",
    "service_level": "RdmaServiceLevel",
    "buffer_pool": "BufferPool",
    "fabric_mem": "EnableUseFabricMem",
}
_KEYS = (*_SPELLED.values(), "LocalCommRes", "AutoConnect", "GlobalResourceConfig")
_MAX_BUSY_POLL = 0.001
_MAX_POOL = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class HixlConfig:
    """What an engine tells HIXL."""

    npu_id: int
    #: "hccs", "roce" or "ub" where that is certain; "auto" where HIXL chooses, and does not say.
    link: str
    #: No option names the protocols, so that HIXL goes by an environment variable, which the whole process shares.
    by_environment: bool
    #: HIXL's own keys and values.
    options: tuple[tuple[str, str], ...]
    #: Where HIXL listens. None: on the host that the engine listens on; port 0: on a free one.
    host: str | None
    port: int
    #: The library or its directory; None: wherever CANN is.
    library: str | None
    #: Seconds.
    busy_poll: float

    @classmethod
    def build(cls, given: Mapping[str, Any]) -> HixlConfig:
        """From the options of `Engine` that are in `OPTIONS`; `ConfigError` for what HIXL would refuse."""
        npu_id = 0 if given.get("npu_id") is None else check_whole("npu_id", given["npu_id"], 0, 65535)
        link = given.get("link", "auto")
        if link not in LINKS:
            raise ConfigError(f"link: one of {', '.join(LINKS)}, not {link!r}")
        options = _collect(given)
        protocols = _inspect(options)
        family = _link_of(link, protocols)
        host, port = None, 0
        if (address := given.get("hixl_address")) is not None:
            host, port = _listening(address)
        library = given.get("hixl_library")
        if library is not None and (not isinstance(library, str) or not library or "\0" in library):
            raise ConfigError(f"hixl_library: the path of libcann_hixl.so or of its directory, not {library!r}")
        return cls(
            npu_id=npu_id,
            link=family,
            by_environment=not protocols,
            options=tuple((key, text) for key, (text, _) in options.items()),
            host=host,
            port=port,
            library=library,
            busy_poll=check_busy_poll(given.get("busy_poll", 0.0)),
        )


def check_busy_poll(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_BUSY_POLL:
        raise ConfigError(f"busy_poll: seconds from 0 to {_MAX_BUSY_POLL}, not {value!r}")
    return float(value)


def check_whole(name: str, value: object, low: int, high: int, step: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high or value % step:
        steps = f" in steps of {step}" if step > 1 else ""
        raise ConfigError(f"{name}: a whole number from {low} to {high}{steps}, not {value!r}")
    return value


def _digits(name: str, value: object, low: int, high: int, step: int = 1) -> str:
    """HIXL takes numbers as text."""
    if not isinstance(value, str) or not value.isascii() or not value.isdigit():
        raise ConfigError(f"{name}: a whole number as a str, such as {str(high - high % step)!r}, not {value!r}")
    check_whole(name, int(value), low, high, step)
    return value


def _flag(name: str, value: object) -> str:
    if value not in ("0", "1"):
        raise ConfigError(f"{name}: '0' or '1', not {value!r}")
    return str(value)


def _pool(name: str, value: object) -> str:
    sizes: list[object]
    if isinstance(value, str):
        sizes = [int(part) if part.isascii() and part.isdigit() else part for part in value.split(":")]
    else:
        sizes = list(value) if isinstance(value, tuple | list) else [value]
    if len(sizes) != 2 or any(isinstance(n, bool) or not isinstance(n, int) for n in sizes):
        raise ConfigError(f"{name}: 'NUM:SIZE_MB' or (num, size_mb), not {value!r}")
    count, size = (check_whole(name, n, 0, _MAX_POOL) for n in sizes)
    if (count == 0) != (size == 0):
        raise ConfigError(f"{name}: a number of buffers and MiB for each, or 0:0 for no pool, not {value!r}")
    return f"{count}:{size}"


#: Text for HIXL, and the document that it is, if it is one.
_Collected = dict[str, tuple[str, dict[str, Any] | None]]


def _collect(given: Mapping[str, Any]) -> _Collected:
    options: _Collected = {}
    if given.get("traffic_class") is not None:
        options["RdmaTrafficClass"] = str(check_whole("traffic_class", given["traffic_class"], 0, 255, 4)), None
    if given.get("service_level") is not None:
        options["RdmaServiceLevel"] = str(check_whole("service_level", given["service_level"], 0, 7)), None
    if given.get("buffer_pool") is not None:
        options["BufferPool"] = _pool("buffer_pool", given["buffer_pool"]), None
    if "fabric_mem" in given:
        if not isinstance(given["fabric_mem"], bool):
            raise ConfigError(f"fabric_mem: True or False, not {given['fabric_mem']!r}")
        options["EnableUseFabricMem"] = str(int(given["fabric_mem"])), None
    more = given.get("hixl_options")
    if more is not None and not isinstance(more, Mapping):
        raise ConfigError(f"hixl_options: a mapping of HIXL's own options to their values, not {more!r}")
    for key, value in (more or {}).items():
        if key in options:
            name = next(name for name, spelled in _SPELLED.items() if spelled == key)
            raise ConfigError(f"{name} and hixl_options[{key!r}] are the same option: give one of them")
        options[key] = _own_option(key, value)
    return options


def _own_option(key: object, value: object) -> tuple[str, dict[str, Any] | None]:
    what = f"hixl_options[{key!r}]"
    match key:
        case "RdmaTrafficClass":
            return _digits(what, value, 0, 255, 4), None
        case "RdmaServiceLevel":
            return _digits(what, value, 0, 7), None
        case "BufferPool":
            return _pool(what, value), None
        case "EnableUseFabricMem":
            return _flag(what, value), None
        case "AutoConnect":
            if _flag(what, value) == "1":
                raise ConfigError(
                    f"{what}: aiohixl connects by itself, and again after a failure, once it knows who answers; HIXL's "
                    "own reconnecting could reach another engine at the same address: leave it out"
                )
            return "0", None
        case "LocalCommRes" | "GlobalResourceConfig":
            document, text = parse_document(value, what)
            return text, document
    near = difflib.get_close_matches(str(key), _KEYS, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_KEYS)}"
    raise ConfigError(f"hixl_options: HIXL has no option {key!r}; {hint}")


def _inspect(options: _Collected) -> frozenset[str]:
    """What is wrong with them together; answers the protocols that they name."""
    protocols: frozenset[str] = frozenset()
    cs_engine = False  # they choose the engine of HIXL's that goes by endpoints
    if (document := options.get("LocalCommRes", ("", None))[1]) is not None:
        version, protocols = check_comm_res(document, "hixl_options['LocalCommRes']")
        cs_engine = version == "1.3"
    if (document := options.get("GlobalResourceConfig", ("", None))[1]) is not None:
        described = check_resources(document, "hixl_options['GlobalResourceConfig']").get(
            "comm_resource_config.protocol_desc"
        )
        if described is not None:
            cs_engine = True
            names = [described] if isinstance(described, str) else described
            protocols |= {name.partition(":")[0] for name in names}
    pool = options.get("BufferPool", ("", None))[0]
    if pool and options.get("EnableUseFabricMem", ("0", None))[0] == "1":
        raise ConfigError(
            "buffer_pool: HIXL takes none with fabric_mem=True (EnableUseFabricMem); leave one of them out"
        )
    if cs_engine and pool not in ("", "0:0"):
        raise ConfigError(
            f"buffer_pool: HIXL takes none but 0:0 with LocalCommRes of version 1.3 or a protocol_desc, not {pool}"
        )
    return protocols


def _link_of(link: str, protocols: frozenset[str]) -> str:
    families = {protocol if protocol in LINKS else "ub" for protocol in protocols}
    if link == "auto":
        return families.pop() if len(families) == 1 else "auto"
    if families - {link}:
        raise ConfigError(
            f"link={link!r} and hixl_options disagree: LocalCommRes or protocol_desc names "
            f"{', '.join(sorted(protocols))}"
        )
    return link


# ---- addresses ----


def parse_endpoint(text: object, what: str) -> tuple[str, int]:
    """``ip:port`` or ``[v6]:port``. HIXL takes no names."""
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    literal = host[1:-1] if bracketed else host
    try:
        version = ipaddress.ip_address(literal).version if "%" not in literal else 0
    except ValueError:
        version = 0
    if version != (6 if bracketed else 4) or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{what}: an IP address and a port, as in '10.0.0.1:26000' or '[::1]:26000', not {text!r}")
    return literal, int(port)


def _listening(text: object) -> tuple[str, int]:
    if isinstance(text, str) and "%" not in text:
        try:
            ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
        except ValueError:
            pass
        else:
            raise ConfigError(
                f"hixl_address: {text!r} has no port, and to HIXL that means a client that does not listen; peers need "
                "to reach this engine: give a port, or 0 for a free one"
            )
    host, port = parse_endpoint(text, "hixl_address")
    if ipaddress.ip_address(host).is_unspecified:
        raise ConfigError(f"hixl_address: peers connect to it as it stands, so that {text!r} leads nowhere")
    return host, port


def format_endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# ---- answers ----

_LOG = "its log is in ~/ascend/log"
#: What HIXL, and the ACL under it, are known to answer: a name, and what to do. There are others.
CODES: dict[int, tuple[str, str]] = {
    1: ("the connection's socket is closed", "the peer has gone: connect again when it is back"),
    103900: ("PARAM_INVALID", "memory that one side has not registered, or an option out of range; " + _LOG),
    103901: ("TIMEOUT", "the peer or the link did not answer in time: look at both, then try again"),
    103902: ("NOT_CONNECTED", "the connection has gone and is made anew: try again"),
    103903: ("ALREADY_CONNECTED", "an earlier connection to that address still stands: close it first"),
    103904: ("NOTIFY_FAILED", "the peer did not take the notification: look at the peer"),
    103905: ("UNSUPPORTED", "not with this NPU, driver or version of CANN"),
    203900: ("RESOURCE_EXHAUSTED", "fewer at a time, or fewer peers on this NPU"),
    503900: ("FAILED", f"look at the peer, the link and the NPU (npu-smi info, hccn_tool); {_LOG}"),
    107002: ("ACL: no context on this thread", "a bug of aiohixl; please report it"),
    507018: ("ACL: the NPU could not finish a task", f"look at the NPU and the link; {_LOG}"),
    507046: ("ACL: a stream did not finish in time", f"look at the peer and the link; {_LOG}"),
}


def code_in(text: str) -> int:
    """The number in a text of the native side's, where an error comes as a text only; 0 without one."""
    found = re.search(r"HIXL answered (\d+)", text)
    return int(found[1]) if found else 0


def explain(code: int, detail: str) -> str:
    """``HIXL answered 503900 (FAILED): <detail>; <what to do>``."""
    name, advice = CODES.get(code, ("not documented", _LOG))
    said = f": {detail.strip()}" if detail.strip() else ""
    return f"HIXL answered {code} ({name}){said}; {advice}"
