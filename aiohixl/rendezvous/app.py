# SPDX-License-Identifier: Apache-2.0
"""The rendezvous as an aiohttp application, or as routes in somebody else's.

Nothing here leans on middleware or on settings of the application, which may not be ours:
each handler is wrapped, so that whatever is refused is answered as JSON in one shape.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from aiohixl.errors import ConfigError
from aiohixl.rendezvous.hub import Hub
from aiohixl.rendezvous.refusal import RefusedError, refuse
from aiohixl.rendezvous.sse import KEEP_ALIVE
from aiohixl.rendezvous.store import MemoryStore, Store
from aiohixl.wire import (
    MAX_BODY,
    MAX_WAIT,
    VERSION,
    JoinRequest,
    Record,
    RenewRequest,
    WireError,
    check_epoch,
    check_incarnation,
    decode_name,
    dump_message,
    load_message,
)

__all__ = ["create_app", "setup"]

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SECONDS = re.compile(r"[0-9]{1,4}(\.[0-9]{1,6})?")
_INTEGER = re.compile(r"[0-9]{1,16}")
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)*")
_BODY_PATIENCE = 10.0
_WRITE_PATIENCE = 30.0


def create_app(token: str | None = None, *, store: Store | None = None) -> web.Application:
    """An application that is a rendezvous and nothing else."""
    app = web.Application()
    setup(app, token=token, store=store)
    return app


def setup(
    app: web.Application,
    *,
    prefix: str = "",
    token: str | None = None,
    store: Store | None = None,
    keep_alive: float = 15.0,
) -> None:
    """Mount the rendezvous below `prefix` in an application that has not started yet.

    `token` is the bearer token that clients must show (all but ``/v1/health``). `store`
    defaults to memory. `keep_alive` is the silence in seconds after which a watch stream
    gets a comment. An impossible prefix or token is a `ConfigError`.
    """
    prefix = prefix.rstrip("/")
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError(f"the rendezvous cannot be mounted at {prefix!r}; give a path like '/kv' or ''")
    check_token(token)
    _Rendezvous(store if store is not None else MemoryStore(), token, keep_alive).mount(app, prefix)


def check_token(token: str | None) -> None:
    """None, or something that fits into an Authorization header as it is; else `ConfigError`."""
    if token is not None and not (token.isascii() and token.isprintable() and token and " " not in token):
        raise ConfigError("the token must be printable ASCII without spaces and not empty; None means no token")


class _Rendezvous:
    def __init__(self, store: Store, token: str | None, keep_alive: float) -> None:
        self._store = store
        self._expected = None if token is None else token.encode()
        self._keep_alive = keep_alive
        self._hub = Hub(store)

    def mount(self, app: web.Application, prefix: str) -> None:
        name = prefix + "/v1/engines/{name:[^/]+}"
        routes: list[tuple[str, dict[str, _Handler]]] = [
            (prefix + "/v1/engines", {"GET": self._list}),
            (name, {"GET": self._lookup, "PUT": self._join, "DELETE": self._leave}),
            (name + "/renew", {"POST": self._renew}),
            (prefix + "/v1/watch", {"GET": self._watch}),
            (prefix + "/v1/health", {"GET": self._health}),
        ]
        for path, handlers in routes:
            resource = app.router.add_resource(path)
            for method, handler in handlers.items():
                resource.add_route(method, self._wrap(handler, public=path.endswith("/health")))
            resource.add_route(hdrs.METH_ANY, self._wrap(self._wrong_method(sorted(handlers))))
        app.router.add_route(hdrs.METH_ANY, prefix + "/v1{rest:(/.*)?}", self._wrap(self._no_such_route))
        app.on_shutdown.append(self._shutdown)

    async def _shutdown(self, app: web.Application) -> None:
        self._hub.close()

    def _wrap(self, handler: _Handler, *, public: bool = False) -> _Handler:
        async def run(request: web.Request) -> web.StreamResponse:
            try:
                if not public:
                    self._authorize(request)
                return await handler(request)
            except WireError as exc:
                return self._refusal(refuse(400, "bad_field", str(exc), field=exc.field))
            except RefusedError as exc:
                return self._refusal(exc)

        return run

    def _authorize(self, request: web.Request) -> None:
        if self._expected is None:
            return
        shown = request.headers.getall(hdrs.AUTHORIZATION, [])
        scheme, _, token = shown[0].partition(" ") if len(shown) == 1 else ("", "", "")
        given = token.strip().encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._expected) or scheme.lower() != "bearer":
            raise refuse(401, "unauthorized", "this rendezvous wants its bearer token; give the right one")

    def _answer(self, content: Mapping[str, Any], status: int = 200) -> web.Response:
        body = dump_message({"version": VERSION, "instance": self._hub.instance, **content})
        headers = {hdrs.CACHE_CONTROL: "no-store"}
        return web.Response(body=body, status=status, content_type="application/json", headers=headers)

    def _refusal(self, error: RefusedError) -> web.Response:
        response = self._answer({"error": error.body().to_json()}, error.status)
        if error.status == 401:
            response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
        elif error.status == 503:
            response.headers[hdrs.RETRY_AFTER] = "1"
        return response

    def _wrong_method(self, allowed: list[str]) -> _Handler:
        async def run(request: web.Request) -> web.StreamResponse:
            say = ", ".join(allowed)
            response = self._refusal(refuse(405, "method_not_allowed", f"this path answers to {say} only"))
            response.headers[hdrs.ALLOW] = say
            return response

        return run

    async def _no_such_route(self, request: web.Request) -> web.StreamResponse:
        raise refuse(404, "no_such_route", "the rendezvous has no such path; see its OpenAPI document")

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return self._answer({"status": "ok"})

    async def _list(self, request: web.Request) -> web.StreamResponse:
        _query(request)
        return self._answer({"records": [record.to_json() for record in self._store.records()]})

    async def _join(self, request: web.Request) -> web.StreamResponse:
        _query(request)
        name = _name(request, -1)
        wanted = JoinRequest.from_json(await _body(request), strict=True)
        return self._answer({"record": self._store.join(name, wanted).to_json()})

    async def _renew(self, request: web.Request) -> web.StreamResponse:
        _query(request)
        name = _name(request, -2)
        wanted = RenewRequest.from_json(await _body(request), strict=True)
        record = self._store.renew(name, wanted.incarnation)
        return self._answer({"epoch": record.epoch, "ttl": record.ttl})

    async def _leave(self, request: web.Request) -> web.StreamResponse:
        query = _query(request, "incarnation")
        self._store.leave(_name(request, -1), check_incarnation(query.get("incarnation")))
        return self._answer({})

    async def _lookup(self, request: web.Request) -> web.StreamResponse:
        query = _query(request, "wait", "after_epoch")
        name = _name(request, -1)
        after = _after_epoch(query)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _wait(query)
        with self._hub.poll(name) as changed:
            while (record := self._newer(name, after)) is None:
                if self._hub.closing:
                    raise self._hub.stopping()
                if loop.time() >= deadline:
                    newer = "" if after is None else f" with an epoch above {after}"
                    raise refuse(404, "not_found", f"no engine {name!r}{newer} has joined", field="name")
                changed.clear()
                try:
                    async with asyncio.timeout_at(deadline):
                        await changed.wait()
                except TimeoutError:
                    continue
        return self._answer({"record": record.to_json()})

    def _newer(self, name: str, after: int | None) -> Record | None:
        record = self._store.get(name)
        return record if record is not None and (after is None or record.epoch > after) else None

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        _query(request)
        response = web.StreamResponse(headers={hdrs.CACHE_CONTROL: "no-store", "X-Accel-Buffering": "no"})
        response.content_type = "text/event-stream"
        transport = request.transport
        if transport is None:  # gone before we began
            return response
        with self._hub.watch(transport.abort, request.headers.get("Last-Event-ID", "")) as watcher:
            try:
                watcher.writing = True
                await response.prepare(request)
                while True:
                    watcher.writing = False
                    frame = await watcher.take(self._keep_alive)
                    if watcher.ended and not frame:
                        return response
                    watcher.writing = True
                    async with asyncio.timeout(_WRITE_PATIENCE):
                        await response.write(frame or KEEP_ALIVE)
            except (ConnectionError, TimeoutError):
                transport.abort()
        return response


def _name(request: web.Request, position: int) -> str:
    # From the raw path: what the router decoded is ambiguous for '%' and for bytes that are no UTF-8.
    return decode_name(request.rel_url.raw_path.split("/")[position])


def _query(request: web.Request, *allowed: str) -> Mapping[str, str]:
    query = request.rel_url.query
    for key in query:
        if key not in allowed:
            shown = ascii(key)[1:-1][:64]
            raise refuse(400, "bad_field", f"{shown}: is not a parameter of this request", field=shown)
        if len(query.getall(key)) > 1:
            raise refuse(400, "bad_field", f"{key}: is given more than once", field=key)
    return query


def _wait(query: Mapping[str, str]) -> float:
    text = query.get("wait", "0")
    if not _SECONDS.fullmatch(text) or float(text) > MAX_WAIT:
        raise refuse(400, "bad_field", f"wait: must be from 0 to {MAX_WAIT:g} seconds", field="wait")
    return float(text)


def _after_epoch(query: Mapping[str, str]) -> int | None:
    text = query.get("after_epoch")
    if text is None:
        return None
    return check_epoch(int(text) if _INTEGER.fullmatch(text) else text, "after_epoch")


async def _body(request: web.Request) -> dict[str, Any]:
    # A browser may send other types anywhere without asking; this one it must ask for first.
    if request.content_type != "application/json" or hdrs.CONTENT_ENCODING in request.headers:
        raise refuse(415, "bad_content_type", "the body must be application/json without a content encoding")
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_PATIENCE):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > MAX_BODY:
                    raise refuse(413, "too_large", f"the body may have {MAX_BODY} bytes", field="body")
    except TimeoutError as exc:
        raise refuse(408, "too_slow", f"the body did not come within {_BODY_PATIENCE:g} s", field="body") from exc
    except (web.RequestPayloadError, HttpProcessingError) as exc:
        raise refuse(400, "bad_body", "the body's transfer encoding is broken", field="body") from exc
    return load_message(bytes(body))
