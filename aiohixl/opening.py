# SPDX-License-Identifier: Apache-2.0
"""An engine's native half, opened: at once without an NPU; in a thread, and with some care, with one."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import os
import socket
from collections.abc import Callable
from typing import Any

from aiohixl import _core, links
from aiohixl.config import EngineConfig
from aiohixl.errors import ConfigError
from aiohixl.hixl import BINDING, HixlConfig, format_endpoint
from aiohixl.offloop import in_thread, resolve
from aiohixl.verbs import BINDING as VERBS_BINDING

__all__ = ["open_native"]

_BITS = {
    "shm": _core.TRANSPORT_SHM,
    "hixl": _core.TRANSPORT_HIXL,
    "tcp": _core.TRANSPORT_TCP,
    "verbs": _core.TRANSPORT_VERBS,
}
_OTHER_PORTS = 3
#: HIXL's answer to, among others, a port that is taken.
_FAILED = "503900"

Open = Callable[[dict[str, Any] | None], _core.Engine]


async def open_native(
    owner: object,
    config: EngineConfig,
    incarnation: bytes,
    path: str,
    tcp: tuple[str, int] | None,
    discard: Callable[[_core.Engine | None], None],
) -> tuple[_core.Engine, str | None]:
    """The engine, and where its HIXL listens. `path`, `tcp`: where its control links listen, numeric.

    Raises `ConfigError`. Cancelled, it ends at once; then what the opening comes to is given to `discard`, in a thread.
    """
    make = functools.partial(_make, config, incarnation, path, tcp)
    try:
        if config.hixl is None:
            return make(None), None
        if not BINDING.exists():
            raise ConfigError(
                f"engine {config.name!r}: this build of aiohixl lacks the binding to HIXL, {BINDING}: build it again "
                "(pip install, or `make build`; it needs a C++ compiler), or leave 'hixl' out of transports"
            )
        links.claim(owner, config.name, config.hixl.link, config.hixl.by_environment)
        return await _open_hixl(config, config.hixl, make, tcp, discard)
    except _core.StatusError as exc:
        raise ConfigError(f"engine {config.name!r}: {exc.text or os.strerror(exc.sys_errno)}") from None


def _make(
    config: EngineConfig,
    incarnation: bytes,
    path: str,
    tcp: tuple[str, int] | None,
    hixl: Any,
) -> _core.Engine:
    numbers = {name: number for number, name in _core.statuses().items()}
    return _core.Engine(
        config.name.encode(),
        incarnation,
        secret=config.secret or (config.token.encode() if config.token else None),
        unix_path=os.fsencode(path),
        tcp_host=tcp[0].encode() if tcp else None,
        tcp_port=tcp[1] if tcp else 0,
        options=config.native(),
        faults=[(f.nth, _core.FAULT_ACTIONS[f.action], numbers[f.status], int(f.delay * 1e9)) for f in config.faults],
        transports=sum(_BITS[name] for name in config.transport_names),
        hixl=hixl,
        verbs=_verbs(config),
    )


def _verbs(config: EngineConfig) -> Any:
    if config.verbs is None:
        return None
    if not VERBS_BINDING.exists():
        raise ConfigError(
            f"engine {config.name!r}: this build of aiohixl lacks the binding to libibverbs, {VERBS_BINDING}: install "
            "its headers (Debian: libibverbs-dev) and build it again, or leave 'verbs' out of transports"
        )
    wanted = config.verbs
    return {
        "binding": os.fsencode(VERBS_BINDING),
        "device": (wanted.device or "").encode(),
        "port": 0,
        "gid_index": -1 if wanted.gid_index is None else wanted.gid_index,
        "timeout": wanted.timeout,
        "service_level": wanted.service_level,
        "traffic_class": wanted.traffic_class,
    }


async def _open_hixl(
    config: EngineConfig,
    hixl: HixlConfig,
    make: Open,
    tcp: tuple[str, int] | None,
    discard: Callable[[_core.Engine | None], None],
) -> tuple[_core.Engine, str]:
    loop = asyncio.get_running_loop()
    host = hixl.host or await _default_host(loop, config, tcp)
    # HIXL takes no port 0, so that somebody else may be quicker than we are: then another one is tried.
    attempts = 1 if hixl.port else 1 + _OTHER_PORTS
    while True:
        local = format_endpoint(host, hixl.port or _free_port(host))
        native = {
            "binding": os.fsencode(BINDING),
            "library": os.fsencode(hixl.library) if hixl.library else None,
            "local": local.encode(),
            "link": hixl.link.encode(),
            "device": hixl.npu_id,
            "busy_poll_ns": round(hixl.busy_poll * 1e9),
            "options": [(key.encode(), value.encode()) for key, value in hixl.options],
        }
        attempts -= 1
        try:
            return await in_thread(loop, functools.partial(make, native), discard=discard), local
        except _core.StatusError as exc:
            if not attempts or _FAILED not in exc.text:
                raise


async def _default_host(loop: asyncio.AbstractEventLoop, config: EngineConfig, tcp: tuple[str, int] | None) -> str:
    """Where the control links listen; what is told to peers, where that is every interface."""
    if tcp is None:
        return "127.0.0.1"
    if ipaddress.ip_address(tcp[0]).is_unspecified and config.advertise is not None:
        return (await resolve(loop, config.advertise, 0))[0]
    return tcp[0]


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError as exc:
            raise ConfigError(f"hixl_address: HIXL cannot listen on {host}: {exc.strerror}") from None
        return int(probe.getsockname()[1])
