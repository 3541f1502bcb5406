# SPDX-License-Identifier: Apache-2.0
"""One HTTP exchange with a rendezvous: bounded, without proxies or redirects, validated.

Whatever goes wrong is a `RendezvousError` here; nobody above sees an exception of aiohttp
except as a cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import hdrs

from aiohixl.errors import ClosedError, ConfigError, RendezvousError
from aiohixl.rendezvous.app import check_token
from aiohixl.rendezvous.refusal import RefusedError, refuse
from aiohixl.wire import MAX_BODY, ErrorBody, WireError, dump_message, load_message

__all__ = ["EventStream", "HttpClient", "is_passing"]

_CONNECT_PATIENCE = 5.0
_SILENCE = 60.0  # of a watch stream, whose server sends a comment every 15 s


def is_passing(error: RendezvousError) -> bool:
    """Whether the same request may well succeed later: nobody answered, or a 408, 429 or 5xx."""
    return error.status == 0 or error.status in (408, 429) or error.status >= 500


class HttpClient:
    """Knows the URL and the token and owns the session. Make and use it on one loop."""

    def __init__(self, url: str, token: str | None, *, trust_env: bool) -> None:
        self.url = _check_url(url)
        check_token(token)
        self.instance = ""  # of the server that answered last
        self._headers: dict[str, str] = {hdrs.ACCEPT_ENCODING: "identity"}
        if token is not None:
            self._headers[hdrs.AUTHORIZATION] = f"Bearer {token}"
        self._trust_env = trust_env
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def call(
        self,
        what: str,
        method: str,
        path: str,
        *,
        patience: float,
        body: Mapping[str, Any] | None = None,
        limit: int = MAX_BODY * 2,
    ) -> dict[str, Any]:
        """The answer to one request within `patience` seconds; `path` is encoded already.

        `what` begins the message of an error.
        Raises `RefusedError` where the rendezvous said no, else `RendezvousError`.
        """
        content: dict[str, Any] = {}
        if body is not None:
            content = {"data": dump_message(body), "headers": {hdrs.CONTENT_TYPE: "application/json"}}
        limits = aiohttp.ClientTimeout(total=patience, sock_connect=min(_CONNECT_PATIENCE, patience))
        try:
            async with self._open().request(
                method, self.url + path, timeout=limits, allow_redirects=False, **content
            ) as response:
                status = response.status
                text = await _read(response, limit)
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise self.unreachable(what, exc, patience) from exc
        return self._judge(what, status, text, limit)

    async def stream(self, what: str, path: str, last_id: str) -> EventStream:
        """Open an event stream, resuming after `last_id` where the server still can."""
        limits = aiohttp.ClientTimeout(
            total=None, connect=_CONNECT_PATIENCE, sock_connect=_CONNECT_PATIENCE, sock_read=_SILENCE
        )
        headers: dict[str, str] = {hdrs.ACCEPT: "text/event-stream"}
        if last_id:
            headers["Last-Event-ID"] = last_id
        try:
            response = await self._open().get(self.url + path, timeout=limits, allow_redirects=False, headers=headers)
            if response.status == 200 and response.content_type == "text/event-stream":
                return EventStream(self, what, response)
            async with response:
                text = await _read(response, MAX_BODY)
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise self.unreachable(what, exc, _CONNECT_PATIENCE) from exc
        self._judge(what, response.status, text, MAX_BODY)
        raise self._garbage(what, response.status, "it is no event stream")

    def garbage(self, what: str, problem: object) -> RendezvousError:
        """For an answer that came with status 200 and still makes no sense."""
        return self._garbage(what, 200, problem)

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise ClosedError(f"the client of the rendezvous at {self.url} is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers, trust_env=self._trust_env, cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._session

    def _judge(self, what: str, status: int, text: bytes, limit: int) -> dict[str, Any]:
        try:
            message = load_message(text, limit=limit)
            instance = message.get("instance")
            if not isinstance(instance, str) or not instance:
                raise WireError("instance: is missing")
            if status == 200:
                self.instance = instance
                return message
            error = ErrorBody.from_json(message.get("error"), where="error")
        except WireError as exc:
            raise self._garbage(what, status, exc) from exc
        raise self._refused(what, status, error)

    def _refused(self, what: str, status: int, error: ErrorBody) -> RefusedError:
        text = f"{what}: the rendezvous at {self.url} refused (HTTP {status}): {error.message}"
        return refuse(status, error.code, text, field=error.field, holder=error.holder)

    def _garbage(self, what: str, status: int, problem: object) -> RendezvousError:
        hint = "; it redirects, which is not followed" if 300 <= status < 400 else ""
        error = RendezvousError(
            f"{what}: what answers at {self.url} (HTTP {status}) is not an aiohixl rendezvous: "
            f"{problem}{hint}; check the address, the port and the prefix"
        )
        error.status = status
        return error

    def unreachable(self, what: str, exc: BaseException, patience: float) -> RendezvousError:
        """For a request that got no whole answer."""
        _redact(exc)
        reason = str(exc) or type(exc).__name__
        if isinstance(exc, TimeoutError):
            reason = f"no answer within {patience:g} s"
        return RendezvousError(
            f"{what}: cannot reach the rendezvous at {self.url}: {reason}; is it running, and reachable from here?"
        )


class EventStream:
    """An open stream of server-sent events; close it."""

    def __init__(self, http: HttpClient, what: str, response: aiohttp.ClientResponse) -> None:
        self._http = http
        self._what = what
        self._response = response

    async def piece(self) -> bytes:
        """The next bytes; b"" at the end of the stream."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise self._http.unreachable(self._what, exc, _SILENCE) from exc

    def close(self) -> None:
        self._response.close()


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    text = bytearray()
    async for piece in response.content.iter_any():
        text += piece
        if len(text) > limit:
            raise ValueError(f"an answer of more than {limit} bytes")
    return bytes(text)


def _redact(exc: BaseException) -> None:
    # These carry the request with its headers, and show them in repr(): take the token out.
    if isinstance(exc, aiohttp.ClientResponseError):
        info = exc.request_info
        headers = info.headers.copy()
        headers.popall(hdrs.AUTHORIZATION, None)
        exc.request_info = aiohttp.RequestInfo(info.url, info.method, type(info.headers)(headers), info.real_url)
        exc.args = (exc.request_info, *exc.args[1:])


def _check_url(url: str) -> str:
    like = "'http://10.0.0.1:7700' or 'http://[fd00::1]:7700/prefix'"
    if not isinstance(url, str):
        raise ConfigError(f"the rendezvous URL must be a string like {like}, not {type(url).__name__}")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable = usable and url.isprintable() and not set(url) & set(" ?#\\")
    except ValueError as exc:
        raise ConfigError(f"the rendezvous URL cannot be parsed; give one like {like}") from exc
    if "@" in parts.netloc:  # and do not show it
        raise ConfigError("the rendezvous URL must not carry a user or password; give the token as token=")
    if not usable:
        raise ConfigError(
            f"the rendezvous URL {url!r} must be http:// or https:// with a host, without query or fragment, "
            f"like {like}"
        )
    return url.rstrip("/")
