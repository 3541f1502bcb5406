# SPDX-License-Identifier: Apache-2.0
"""Runs a rendezvous on its own, for the command line and for tests."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from aiohixl.errors import ConfigError, RendezvousError
from aiohixl.rendezvous.app import create_app
from aiohixl.rendezvous.store import Store

__all__ = ["DEFAULT_HOST", "DEFAULT_PORT", "serve", "serving"]

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 7700
_GRACE = 2.0

_log = logging.getLogger("aiohixl.rendezvous")


async def serve(
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    token: str | None = None,
    on_ready: Callable[[str], object] | None = None,
    *,
    store: Store | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until cancelled, or until `stop` is set; then end every waiting request and close.

    `on_ready` is called once with the URL that really is served: port 0 takes a free one, and
    for a wildcard host the URL names the loopback address. A port that cannot be bound is a
    `RendezvousError` before that.
    """
    async with serving(host, port, token, store=store) as url:
        if on_ready is not None:
            on_ready(url)
        await (stop or asyncio.Event()).wait()


@asynccontextmanager
async def serving(
    host: str = DEFAULT_HOST, port: int = 0, token: str | None = None, *, store: Store | None = None
) -> AsyncIterator[str]:
    """A rendezvous for as long as the block lasts; gives its URL."""
    host = host.removeprefix("[").removesuffix("]")
    if not host:
        raise ConfigError("the rendezvous needs a host to listen on; '0.0.0.0' or '::' means every interface")
    if isinstance(port, bool) or not 0 <= port <= 65535:
        raise ConfigError(f"the rendezvous cannot listen on port {port}; give 0 to 65535 (0 takes a free one)")
    runner = web.AppRunner(
        create_app(token, store=store), access_log=None, handler_cancellation=True, shutdown_timeout=_GRACE
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as exc:
            reason = exc.strerror or str(exc)
            error = RendezvousError(
                f"the rendezvous cannot listen on {host} port {port}: {reason}; choose another host or port"
            )
            raise error from exc
        bound = runner.addresses[0]
        url = _url(str(bound[0]), int(bound[1]))
        if token is None and not _is_loopback(str(bound[0])):
            _log.warning("the rendezvous at %s is open to the network without a token", url)
        yield url
    finally:
        await runner.cleanup()


def _url(host: str, port: int) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:  # nobody can connect to a wildcard, so tell an address that works from here
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
