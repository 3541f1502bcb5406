# SPDX-License-Identifier: Apache-2.0
"""An engine's side of the rendezvous: join and stay joined, look up others, watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from aiohixl.errors import ClosedError, ConfigError, RendezvousError
from aiohixl.rendezvous.backoff import Backoff
from aiohixl.rendezvous.http import HttpClient, is_passing
from aiohixl.rendezvous.lease import Lease
from aiohixl.rendezvous.refusal import RefusedError
from aiohixl.rendezvous.sse import Frame, FrameParser
from aiohixl.wire import (
    DEFAULT_TTL,
    JoinRequest,
    Record,
    WatchEvent,
    WireError,
    check_epoch,
    check_name,
    encode_name,
    load_message,
)

__all__ = ["RendezvousClient"]

_T = TypeVar("_T")
_POLL = 20.0  # one long-poll; short enough for proxies that cut silent requests at 30 s
_ANSWER = 10.0  # for the answer to a join
_GRACE = 5.0  # for the answer to a long-poll, on top of what the server was asked to wait
_LEAVE = 2.0
_LIST_LIMIT = 256 * 1024 * 1024


class RendezvousClient:
    """Talks to one rendezvous and holds at most one name there.

    Belongs to the loop it is first used on. Cancelling any method ends its request; a
    cancelled join may have reached the server, and `close()` takes it back.
    """

    def __init__(self, url: str, *, token: str | None = None, trust_env: bool = False) -> None:
        """A URL or token that cannot be used is a `ConfigError`. Nothing is sent yet.

        `trust_env` lets proxy settings of the environment apply; they rarely should between engines.
        """
        self._http = HttpClient(url, token, trust_env=trust_env)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lease: Lease | None = None
        self._closing = False
        self._closer: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        held = "" if self._lease is None else f" name={self._lease.name!r}"
        return f"<RendezvousClient {self._http.url}{held}{' closed' if self._closing else ''}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def url(self) -> str:
        return self._http.url

    @property
    def instance(self) -> str:
        """The server instance that answered last, "" before; a new one means that it was restarted."""
        return self._http.instance

    @property
    def record(self) -> Record | None:
        """What we are joined as, as the server said last; None when not joined or when the name was lost."""
        return None if self._lease is None else self._lease.record

    @property
    def last_error(self) -> RendezvousError | None:
        """Why the latest renewal failed; None when it did not."""
        return None if self._lease is None else self._lease.last_error

    async def join(
        self,
        name: str,
        *,
        incarnation: str,
        addresses: Sequence[str] = (),
        capabilities: Mapping[str, Any] | None = None,
        ttl: float = DEFAULT_TTL,
        replace: str | None = None,
        force: bool = False,
        wait: bool = True,
        timeout: float = 30.0,  # noqa: ASYNC109 - bounds the retries and is told in the error
        on_lost: Callable[[RendezvousError], object] | None = None,
        on_rejoined: Callable[[Record], object] | None = None,
    ) -> Record:
        """Take `name` for this incarnation and keep it by renewing every third of `ttl` seconds.

        While the rendezvous is down, or (with `wait`) another incarnation holds the name, this
        retries for `timeout` seconds; then the `RendezvousError` says what stood in the way. `replace`
        takes the name over from that incarnation, `force` from anybody.

        Later, on the loop: `on_rejoined(record)` after the server had forgotten us (restarted) and
        knows us again; `on_lost(error)`, once, when another incarnation has taken the name over.
        """
        check_name(name)
        request = JoinRequest(
            incarnation=incarnation,
            addresses=tuple(addresses),
            capabilities=dict(capabilities or {}),
            ttl=ttl,
            replace=replace,
            force=force,
        )
        self._check()
        if self._lease is not None and self._lease.running:
            raise ConfigError(f"join of {name!r}: this client holds {self._lease.name!r}; leave it first")
        lease = self._lease = Lease(self._http, name, request, on_lost, on_rejoined)
        try:
            return await self._guard(self._join(lease, wait, timeout))
        except RefusedError:
            self._lease = None
            raise
        except asyncio.CancelledError:
            lease.stop()
            raise

    async def leave(self, *, timeout: float = _LEAVE) -> bool:  # noqa: ASYNC109 - never raises
        """Stop renewing and give the name back; whether the server confirmed it within `timeout` seconds.

        Never raises for a rendezvous that is down: the lease then ends by itself.
        """
        lease, self._lease = self._lease, None
        return False if lease is None else await lease.end(timeout)

    async def lookup(self, name: str, *, wait: float = 30.0, after_epoch: int | None = None) -> Record:
        """The engine called `name`, as soon as it has joined (with an epoch above `after_epoch`).

        After `wait` seconds (a server that hangs may add 5) it is a `RendezvousError`: with status 404
        when the rendezvous does not know the name, 0 when it did not answer. A restart of the
        rendezvous meanwhile is ridden out.
        """
        check_name(name)
        if after_epoch is not None:
            check_epoch(after_epoch, "after_epoch")
        return await self._guard(self._lookup(name, wait, after_epoch))

    async def list(self, *, timeout: float = 10.0) -> tuple[Record, ...]:  # noqa: ASYNC109 - as in join
        """Everybody who is joined, by name."""
        return await self._guard(self._list(timeout))

    async def watch(self) -> AsyncGenerator[WatchEvent, None]:
        """Events from now on: a ``snapshot`` first, and again whenever events may have been missed.

        Reconnects for ever while the rendezvous is down; a refusal (wrong token, wrong URL) raises. Ends
        when the client closes. Leave it early through `contextlib.aclosing`.
        """
        what, backoff, last_id = "watch", Backoff(), ""
        while not self._closing:
            try:
                stream = await self._guard(self._http.stream(what, "/v1/watch", last_id))
                try:
                    parser = FrameParser(_LIST_LIMIT)
                    while piece := await self._guard(stream.piece()):
                        for frame in self._frames(what, parser, piece):
                            event = self._event(what, frame)
                            backoff.reset()
                            last_id = frame.id
                            yield event
                finally:
                    stream.close()
                await self._guard(asyncio.sleep(backoff.next()))
            except ClosedError:
                if not self._closing:
                    raise
            except RendezvousError as exc:
                if not is_passing(exc):
                    raise
                with suppress(ClosedError):
                    await self._guard(asyncio.sleep(backoff.next()))

    async def close(self) -> None:
        """Leave (best effort, 2 s), end every request of this client with `ClosedError`, free the session.

        Idempotent; concurrent closers wait for the same end, which a cancelled closer does not stop.
        """
        if self._closer is None:
            self._closing = True
            self._closer = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closer)

    async def _close(self) -> None:
        try:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self.leave()
        finally:
            await self._http.close()

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        if self._closing:
            raise ClosedError(f"the client of the rendezvous at {self.url} is closed; make another one")
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise ClosedError(f"the client of the rendezvous at {self.url} belongs to another event loop")

    async def _guard(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await `work` in a task of its own, so that `close()` can end it without cancelling our caller."""
        try:
            self._check()
        except ClosedError:
            work.close()
            raise
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()  # retrieved: the cancellation is what our caller hears of
            raise
        finally:
            self._tasks.discard(task)
        if task.cancelled():
            raise ClosedError(f"the client of the rendezvous at {self.url} was closed meanwhile")
        return task.result()

    async def _join(self, lease: Lease, wait: bool, patience: float) -> Record:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        backoff = Backoff(limit=1.0)
        while True:
            try:
                record = await lease.join(min(_ANSWER, max(deadline - loop.time(), 0.1)))
                break
            except RendezvousError as exc:
                delay = backoff.next()
                holder = exc.holder if isinstance(exc, RefusedError) and exc.code == "name_taken" else None
                if holder is not None and wait:
                    delay = min(delay, holder.expires_in + 0.05)
                elif not is_passing(exc):
                    raise
                if loop.time() + delay >= deadline:
                    raise _gave_up(exc, patience) from (exc.__cause__ or exc)
            await asyncio.sleep(delay)
        if lease.ended:
            await lease.end(_LEAVE)
            raise ClosedError(f"join of {lease.name!r}: leave() was called meanwhile")
        lease.start()
        return record

    async def _lookup(self, name: str, wait: float, after_epoch: int | None) -> Record:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        backoff = Backoff(first=0.05, limit=1.0)
        what = f"look-up of {name!r}"
        while True:
            remaining = max(deadline - loop.time(), 0.0)
            poll = min(remaining, _POLL)
            path = f"/v1/engines/{encode_name(name)}?wait={poll:.3f}"
            if after_epoch is not None:
                path += f"&after_epoch={after_epoch}"
            delay = 0.0
            try:
                answer = await self._http.call(what, "GET", path, patience=poll + _GRACE)
                return self._record(what, answer.get("record"), name)
            except RendezvousError as exc:
                if is_passing(exc):
                    delay = backoff.next()
                elif not (isinstance(exc, RefusedError) and exc.code == "not_found"):
                    raise
                if loop.time() + delay >= deadline or poll == remaining == 0:
                    raise _gave_up(exc, wait) from (exc.__cause__ or exc)
            await asyncio.sleep(delay)

    async def _list(self, patience: float) -> tuple[Record, ...]:
        what = "list"
        answer = await self._http.call(what, "GET", "/v1/engines", patience=patience, limit=_LIST_LIMIT)
        records = answer.get("records")
        if not isinstance(records, list):
            raise self._http.garbage(what, "records: must be a list")
        return tuple(self._record(what, record) for record in records)

    def _record(self, what: str, value: object, name: str | None = None) -> Record:
        try:
            record = Record.from_json(value, where="record")
        except WireError as exc:
            raise self._http.garbage(what, exc) from exc
        if name is not None and record.name != name:
            raise self._http.garbage(what, f"it answers for {record.name!r}")
        return record

    def _frames(self, what: str, parser: FrameParser, piece: bytes) -> tuple[Frame, ...]:
        try:
            return tuple(parser.feed(piece))
        except ValueError as exc:
            raise self._http.garbage(what, exc) from exc

    def _event(self, what: str, frame: Frame) -> WatchEvent:
        try:
            return WatchEvent.from_json(load_message(frame.data, limit=_LIST_LIMIT), where="event")
        except WireError as exc:
            raise self._http.garbage(what, exc) from exc


def _gave_up(last: RendezvousError, patience: float) -> RendezvousError:
    """The same kind of error, with how long we tried."""
    error = type(last)(f"{last} (gave up after {patience:g} s)")
    error.__dict__.update(last.__dict__)
    return error
