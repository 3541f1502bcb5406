# SPDX-License-Identifier: Apache-2.0
"""Calls that may wait, made off the loop."""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from aiohixl.errors import ConfigError

__all__ = ["in_thread", "resolve"]

T = TypeVar("T")


async def in_thread(loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> T:
    """Run a blocking call in a thread of its own: the loop's executor would leave one behind, and may be full."""
    future: asyncio.Future[T] = loop.create_future()

    def finish(deliver: Callable[[], None]) -> None:
        if not future.done():
            deliver()

    def run() -> None:
        try:
            result = call()
        except BaseException as exc:
            deliver = functools.partial(future.set_exception, exc)
        else:
            deliver = functools.partial(future.set_result, result)
        loop.call_soon_threadsafe(finish, deliver)

    thread = threading.Thread(target=run, name="aiohixl-call", daemon=True)
    thread.start()
    try:
        return await future
    finally:
        if future.done():
            thread.join()


async def resolve(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[str]:
    """Numeric addresses of a host name, at least one, or `ConfigError`."""

    def numeric(flags: int) -> list[str]:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        return list(dict.fromkeys(str(info[4][0]) for info in infos))

    try:
        return numeric(socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):  # UnicodeError: labels that are no host's
        pass
    try:
        return await in_thread(loop, lambda: numeric(0))
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"host {host!r} cannot be resolved: {exc}") from None
