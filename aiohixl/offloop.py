# SPDX-License-Identifier: Apache-2.0
"""Calls that may wait, made off the loop."""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohixl.errors import ConfigError

__all__ = ["in_thread", "outlive", "resolve"]

T = TypeVar("T")


async def in_thread(
    loop: asyncio.AbstractEventLoop, call: Callable[[], T], *, discard: Callable[[T | None], None] | None = None
) -> T:
    """Run a blocking call in a thread of its own: the loop's executor would leave one behind, and may be full.

    Cancelled, this waits for the call all the same, unless there is a `discard`: then the await ends at once, and the
    thread hands what the call answers (None: it raised) to that, still off the loop.
    """
    future: asyncio.Future[T] = loop.create_future()

    def throw_away(result: T | None) -> None:
        if discard is not None:
            thread = threading.Thread(target=discard, args=(result,), name="aiohixl-discard", daemon=True)
            thread.start()

    def run() -> None:
        result: T | None = None
        try:
            result = call()
        except BaseException as exc:
            deliver = functools.partial(future.set_exception, exc)
        else:
            deliver = functools.partial(future.set_result, result)

        def finish() -> None:
            if future.done():
                throw_away(result)
            else:
                deliver()

        try:
            loop.call_soon_threadsafe(finish)
        except RuntimeError:  # the loop has ended
            throw_away(result)

    thread = threading.Thread(target=run, name="aiohixl-call", daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        if future.done() and not future.cancelled():  # answered in the same turn
            throw_away(None if future.exception() is not None else future.result())
        raise
    finally:
        if future.done() and not (discard is not None and future.cancelled()):
            thread.join()


async def outlive(work: Awaitable[T]) -> T:
    """Await it to its end, whatever comes; a cancellation that came meanwhile goes on then."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as exc:
            cancelled = cancelled or exc
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen
        raise cancelled
    return task.result()


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
        return await in_thread(loop, lambda: numeric(0), discard=lambda _: None)  # a slow name server outlasts us
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"host {host!r} cannot be resolved: {exc}") from None
