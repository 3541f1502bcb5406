# SPDX-License-Identifier: Apache-2.0
"""The rendezvous over real sockets: every endpoint, and everything that is refused."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiohixl.errors import ConfigError, RendezvousError
from aiohixl.rendezvous import MemoryStore, create_app, serve, serving, setup
from aiohixl.rendezvous.hub import BACKLOG, HISTORY, Hub, Watcher
from aiohixl.rendezvous.sse import Frame, FrameParser, encode_frame
from aiohixl.wire import MAX_BODY, JoinRequest, WatchEvent, encode_name, load_message

A, B = ("a" * 32, "b" * 32)
JOIN = {
    "version": 1,
    "incarnation": A,
    "ttl": 5,
    "addresses": ["tcp://10.0.0.1:9"],
    "capabilities": {"shm": 1},
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Site:
    """A running rendezvous, its store, the clock of the store, and a session to talk to it."""

    def __init__(self, url: str, store: MemoryStore, clock: Clock, session: aiohttp.ClientSession) -> None:
        self.url, self.store, self.clock, self.session = url, store, clock, session

    async def ask(self, method: str, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
        """One request; checks what holds for every answer."""
        async with self.session.request(method, f"{self.url}{path}", **options) as response:
            assert response.content_type == "application/json"
            assert response.headers["Cache-Control"] == "no-store"
            message = load_message(await response.read())
        assert len(message["instance"]) == 32
        assert ("error" in message) == (response.status != 200)
        return response.status, message

    async def error(self, method: str, path: str, **options: Any) -> tuple[int, str, str | None]:
        status, message = await self.ask(method, path, **options)
        assert message["error"]["message"]
        return status, message["error"]["code"], message["error"].get("field")

    async def usable(self) -> None:
        """Whatever was refused before, a good join still works."""
        status, _ = await self.ask("PUT", "/v1/engines/after%20all", json=JOIN)
        assert status == 200


@asynccontextmanager
async def running(token: str | None = None, host: str = "127.0.0.1") -> AsyncIterator[Site]:
    clock = Clock()
    store = MemoryStore(clock=clock)
    async with serving(host, 0, token, store=store) as url, aiohttp.ClientSession() as session:
        yield Site(url, store, clock, session)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running() as site:
        yield site


async def test_join_renew_look_up_list_leave(site: Site) -> None:
    status, joined = await site.ask("PUT", "/v1/engines/decode-0", json=JOIN)
    assert status == 200
    record = joined["record"]
    assert record == {
        "name": "decode-0",
        "epoch": record["epoch"],
        "age": 0,
        **{k: JOIN[k] for k in JOIN if k != "version"},
    }
    site.clock.now = 4
    renewal = {"version": 1, "incarnation": A}
    assert (await site.ask("POST", "/v1/engines/decode-0/renew", json=renewal))[1].items() >= {
        "epoch": record["epoch"],
        "ttl": 5,
    }.items()
    site.clock.now = 8
    status, found = await site.ask("GET", "/v1/engines/decode-0")
    assert (status, found["record"]) == (200, {**record, "age": 8})
    assert found["instance"] == joined["instance"]
    assert (await site.ask("GET", "/v1/engines"))[1]["records"] == [found["record"]]
    assert (await site.ask("DELETE", f"/v1/engines/decode-0?incarnation={A}"))[0] == 200
    assert (await site.ask("GET", "/v1/engines"))[1]["records"] == []
    assert await site.error("GET", "/v1/engines/decode-0") == (404, "not_found", "name")


async def test_an_expired_lease_is_gone_and_renewing_it_says_so(site: Site) -> None:
    await site.ask("PUT", "/v1/engines/x", json=JOIN)
    site.clock.now = 5
    renewal = {"version": 1, "incarnation": A}
    assert await site.error("POST", "/v1/engines/x/renew", json=renewal) == (404, "not_joined", "name")
    assert await site.error("DELETE", f"/v1/engines/x?incarnation={A}") == (404, "not_joined", "name")


async def test_conflicts_name_the_holder(site: Site) -> None:
    await site.ask("PUT", "/v1/engines/x", json=JOIN)
    site.clock.now = 2
    other = {**JOIN, "incarnation": B}
    status, message = await site.ask("PUT", "/v1/engines/x", json=other)
    holder = message["error"]["holder"]
    assert (status, message["error"]["code"], message["error"]["field"]) == (409, "name_taken", "name")
    assert holder == {"incarnation": A, "epoch": holder["epoch"], "age": 2, "since_renew": 2, "expires_in": 3}
    renewal = {"version": 1, "incarnation": B}
    assert await site.error("POST", "/v1/engines/x/renew", json=renewal) == (
        409,
        "wrong_incarnation",
        "incarnation",
    )
    assert await site.error("DELETE", f"/v1/engines/x?incarnation={B}") == (
        409,
        "wrong_incarnation",
        "incarnation",
    )
    status, message = await site.ask("PUT", "/v1/engines/x", json={**other, "replace": A})
    assert (status, message["record"]["incarnation"]) == (200, B)
    assert message["record"]["epoch"] > holder["epoch"]


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        'q"uote',
        "日本語",
        "😀",
        "100%",
        "%2F",
        "a?b#c&d",
        "{x}",
        "back\\slash",
        "a+b;c",
        "é" * 128,
        "...",
    ],
)
async def test_odd_names_work_through_urls(site: Site, name: str) -> None:
    path = f"{site.url}/v1/engines/{encode_name(name)}"
    async with site.session.put(path, json=JOIN) as response:
        assert (await response.json())["record"]["name"] == name
    async with site.session.post(path + "/renew", json={"version": 1, "incarnation": A}) as response:
        assert response.status == 200
    async with site.session.get(path) as response:
        assert (await response.json())["record"]["name"] == name
    assert [record.name for record in site.store.records()] == [name]


def raw_request(target: str, *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + body


async def raw(site: Site, request: bytes) -> tuple[int, dict[str, Any]]:
    """A request that a proper client would not send."""
    host, _, port = site.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), load_message(body)["error"] if body.startswith(b"{") else {}


@pytest.mark.parametrize(
    "segment",
    [
        "%FF",
        "%zz",
        "%",
        "%C3",
        "%00",
        "%0A",
        "a%2Fb",
        "%ED%A0%80",
        "x" * 129,
        "..",
        ".",
        "%2e%2E",
        "%E2%80%AE",
    ],
)
async def test_names_that_are_refused(site: Site, segment: str) -> None:
    status, error = await raw(site, raw_request(f"/v1/engines/{segment}"))
    assert (status, error["code"], error["field"]) == (400, "bad_field", "name")
    await site.usable()


@pytest.mark.parametrize("garbage", [b"\xff\xfe", b"\x80" * 40])
async def test_raw_bytes_in_the_path_are_refused(site: Site, garbage: bytes) -> None:
    request = raw_request("/v1/engines/@").replace(b"@", garbage)
    status, _ = await raw(site, request)
    assert status == 400
    await site.usable()


BAD_QUERIES = [
    ("wait", "wait=-1"),
    ("wait", "wait=61"),
    ("wait", "wait=nan"),
    ("wait", "wait=inf"),
    ("wait", "wait=1e1"),
    ("wait", "wait="),
    ("wait", "wait=%FF"),
    ("wait", "wait=٣"),
    ("wait", "wait=" + "9" * 5000),
    ("wait", "wait=1&wait=2"),
    ("after_epoch", "after_epoch=-1"),
    ("after_epoch", "after_epoch=1.5"),
    ("after_epoch", "after_epoch=x"),
    ("after_epoch", "after_epoch=" + "9" * 16),
    ("after_epoch", "after_epoch=" + "9" * 6000),
    ("epoch", "epoch=1"),
    ("", "=1"),
    ("a\\n", "a%0A=1"),
]


@pytest.mark.parametrize(("field", "query"), BAD_QUERIES, ids=lambda text: text[:24])
async def test_bad_queries_name_the_parameter(site: Site, field: str, query: str) -> None:
    assert await site.error("GET", f"/v1/engines/x?{query}") == (400, "bad_field", field)
    await site.usable()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/engines?x=1"),
        ("GET", "/v1/watch?x=1"),
        ("PUT", "/v1/engines/x?x=1"),
        ("POST", "/v1/engines/x/renew?x=1"),
    ],
)
async def test_parameters_are_refused_where_there_are_none(site: Site, method: str, path: str) -> None:
    assert await site.error(method, path) == (400, "bad_field", "x")


async def test_leaving_needs_an_incarnation(site: Site) -> None:
    for query in ("", "?incarnation=", "?incarnation=x", f"?incarnation={A.upper()}"):
        assert await site.error("DELETE", f"/v1/engines/x{query}") == (400, "bad_field", "incarnation")
    twice = f"?incarnation={A}&incarnation={A}"
    assert await site.error("DELETE", f"/v1/engines/x{twice}") == (400, "bad_field", "incarnation")


BAD_BODIES: list[tuple[str, bytes]] = [
    ("body", b""),
    ("body", b"{"),
    ("body", b"[]"),
    ("body", b"null"),
    ("body", b"\xff"),
    ("body", b'{"version":1,"ttl":NaN}'),
    ("body", b'{"version":1,"ttl":' + b"9" * 5000 + b"}"),
    ("body", b"[" * 60000),
    ("version", b"{}"),
    ("version", b'{"version":2,"incarnation":"x"}'),
    ("incarnation", b'{"version":1}'),
    ("incarnation", b'{"version":1,"incarnation":5}'),
    ("ttl", b'{"version":1,"ttl":1,"ttl":2}'),
    ("nonsense", b'{"version":1,"nonsense":1}'),
    ("\\ud800", b'{"version":1,"\\ud800":1}'),
]


@pytest.mark.parametrize("path", ["PUT /v1/engines/x", "POST /v1/engines/x/renew"])
@pytest.mark.parametrize(("field", "body"), BAD_BODIES, ids=lambda value: repr(value)[:32])
async def test_bad_bodies_name_the_field(site: Site, path: str, field: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    assert await site.error(*path.split(), data=body, headers=headers) == (400, "bad_field", field)
    await site.usable()


BAD_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("ttl", {"ttl": 0}),
    ("ttl", {"ttl": "5"}),
    ("ttl", {"ttl": 10**300}),
    ("addresses", {"addresses": ["x"] * 17}),
    ("addresses[0]", {"addresses": ["x" * 513]}),
    ("addresses[0]", {"addresses": ["\ud800"]}),
    ("capabilities", {"capabilities": {"a": "x" * 9000}}),
    ("capabilities", {"capabilities": {"a": "\ud800"}}),
    ("capabilities", {"capabilities": {"a": [[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]}}),
    ("epoch", {"epoch": 2**53}),
    ("replace", {"replace": "me"}),
    ("force", {"force": "yes"}),
]


@pytest.mark.parametrize(("field", "change"), BAD_FIELDS, ids=lambda value: repr(value)[:32])
async def test_bad_fields_are_named(site: Site, field: str, change: dict[str, Any]) -> None:
    assert await site.error("PUT", "/v1/engines/x", json={**JOIN, **change}) == (400, "bad_field", field)
    assert site.store.records() == ()


async def test_bodies_are_bounded_with_and_without_a_length(site: Site) -> None:
    headers = {"Content-Type": "application/json"}

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY // 4096 + 1):
            yield b" " * 4096

    for data in (b" " * (MAX_BODY + 1), pieces()):
        assert await site.error("PUT", "/v1/engines/x", data=data, headers=headers) == (
            413,
            "too_large",
            "body",
        )
        await site.usable()


@pytest.mark.parametrize(
    "headers",
    [{"Content-Type": "text/plain"}, {"Content-Type": "application/json", "Content-Encoding": "deflate"}],
    ids=["type", "encoding"],
)
async def test_other_content_is_refused(site: Site, headers: dict[str, str]) -> None:
    answer = await site.error("PUT", "/v1/engines/x", data=json.dumps(JOIN).encode(), headers=headers)
    assert answer == (415, "bad_content_type", None)


async def test_a_broken_transfer_encoding_is_refused(site: Site) -> None:
    headers = ("Content-Type: application/json", "Transfer-Encoding: chunked")
    status, _ = await raw(site, raw_request("/v1/engines/x", *headers, method="PUT", body=b"zz\r\n{}\r\n0\r\n\r\n"))
    assert status == 400
    await site.usable()


async def test_a_body_cut_short_leaves_the_server_usable(site: Site) -> None:
    host, _, port = site.url.removeprefix("http://").rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    headers = ("Content-Type: application/json", "Content-Length: 100")
    writer.write(raw_request("/v1/engines/x", *headers, method="PUT", body=b"{"))
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await site.usable()


async def test_a_body_that_does_not_come_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiohixl.rendezvous.app._BODY_PATIENCE", 0.05)
    headers = ("Content-Type: application/json", "Content-Length: 100")
    status, error = await raw(site, raw_request("/v1/engines/x", *headers, method="PUT", body=b"{"))
    assert (status, error["code"]) == (408, "too_slow")
    await site.usable()


KEYS = st.sampled_from(["version", "incarnation", "ttl", "epoch", "addresses", "capabilities", "replace", "force"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([1, A, B]),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text() | KEYS, children, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.dictionaries(KEYS, VALUES) | VALUES,
    path=st.sampled_from(["PUT /v1/engines/x", "POST /v1/engines/x/renew"]),
)
def test_random_json_is_never_a_server_error(fuzzed: Fuzzed, body: Any, path: str) -> None:
    method, _, target = path.partition(" ")
    status = fuzzed.ask(method, target, json.dumps(body).encode())
    assert status in (200, 400, 404, 409)


class Fuzzed:
    """One server for all of hypothesis' examples, which are plain functions: each runs the loop a little."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._site = running()
        self._open = self._runner.run(self._site.__aenter__())

    def ask(self, method: str, path: str, body: bytes) -> int:
        options = {"data": body, "headers": {"Content-Type": "application/json"}}
        return self._runner.run(self._open.ask(method, path, **options))[0]

    def close(self) -> None:
        self._runner.run(self._site.__aexit__(None, None, None))
        self._runner.close()


@pytest.fixture
def fuzzed() -> Any:
    fuzzed = Fuzzed()
    yield fuzzed
    fuzzed.close()


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/v1/engines", "GET"),
        ("PATCH", "/v1/engines/x", "DELETE, GET, PUT"),
        ("GET", "/v1/engines/x/renew", "POST"),
        ("POST", "/v1/watch", "GET"),
        ("DELETE", "/v1/health", "GET"),
    ],
)
async def test_wrong_methods(site: Site, method: str, path: str, allow: str) -> None:
    assert await site.error(method, path) == (405, "method_not_allowed", None)
    async with site.session.request(method, site.url + path) as response:
        assert response.headers["Allow"] == allow


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/engines/", "/v1/engines/a/b", "/v1/nothing", "/v1//engines"])
async def test_paths_that_do_not_exist(site: Site, path: str) -> None:
    assert await site.error("GET", path) == (404, "no_such_route", None)


async def test_a_look_up_waits_for_a_name(site: Site) -> None:
    waiting = asyncio.create_task(site.ask("GET", "/v1/engines/late?wait=60"))
    await polls(site, 1)
    await site.ask("PUT", "/v1/engines/other", json=JOIN)
    await site.ask("PUT", "/v1/engines/late", json=JOIN)
    status, found = await waiting
    assert (status, found["record"]["name"]) == (200, "late")
    await polls(site, 0)


async def test_a_look_up_waits_for_a_newer_epoch(site: Site) -> None:
    epoch = (await site.ask("PUT", "/v1/engines/x", json=JOIN))[1]["record"]["epoch"]
    assert await site.error("GET", f"/v1/engines/x?after_epoch={epoch}") == (404, "not_found", "name")
    assert (await site.ask("GET", f"/v1/engines/x?after_epoch={epoch - 1}"))[0] == 200
    waiting = asyncio.create_task(site.ask("GET", f"/v1/engines/x?wait=60&after_epoch={epoch}"))
    await polls(site, 1)
    await site.ask("PUT", "/v1/engines/x", json={**JOIN, "addresses": []})  # an update, of the same epoch
    await site.ask("PUT", "/v1/engines/x", json={**JOIN, "incarnation": B, "force": True})
    assert (await waiting)[1]["record"]["incarnation"] == B


async def test_a_look_up_whose_client_went_away_is_dropped(site: Site) -> None:
    waiting = asyncio.create_task(site.ask("GET", "/v1/engines/late?wait=60"))
    await polls(site, 1)
    waiting.cancel()
    await polls(site, 0)


async def test_a_look_up_gives_up_in_the_end(site: Site) -> None:
    assert await site.error("GET", "/v1/engines/x?wait=0.05") == (404, "not_found", "name")


async def polls(site: Site, number: int) -> None:
    """Wait until so many long-polls have arrived."""
    await until(lambda: hub(site)._npolls == number)


async def until(true: Callable[[], bool]) -> None:
    """For what the server does not announce: that a request has arrived at its handler."""
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.001)


def hub(site: Site) -> Hub:
    (listener,) = site.store._listeners
    owner = listener.__self__  # type: ignore[attr-defined]
    assert isinstance(owner, Hub)
    return owner


class Watch:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.parser = FrameParser(1 << 20)
        self.frames: list[Frame] = []

    async def frame(self) -> Frame | None:
        """The next frame; None at the end of the stream."""
        while not self.frames:
            piece = await self.response.content.readany()
            if not piece:
                return None
            self.frames += self.parser.feed(piece)
        return self.frames.pop(0)

    async def event(self) -> WatchEvent:
        frame = await self.frame()
        assert frame is not None
        event = WatchEvent.from_json(load_message(frame.data))
        assert frame.event == event.kind
        return event


@asynccontextmanager
async def watching(site: Site, last_id: str = "") -> AsyncIterator[Watch]:
    headers = {"Last-Event-ID": last_id} if last_id else {}
    async with site.session.get(f"{site.url}/v1/watch", headers=headers) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        yield Watch(response)


async def test_a_watch_begins_with_a_snapshot_and_goes_on(site: Site) -> None:
    await site.ask("PUT", "/v1/engines/old", json=JOIN)
    async with watching(site) as watch:
        event = await watch.event()
        assert (event.kind, [r.name for r in event.records]) == ("snapshot", ["old"])
        await site.ask("PUT", "/v1/engines/new", json={**JOIN, "ttl": 20})
        await site.ask("PUT", "/v1/engines/new", json={**JOIN, "ttl": 30})
        await site.ask("PUT", "/v1/engines/new", json={**JOIN, "incarnation": B, "force": True, "ttl": 30})
        await site.ask("DELETE", f"/v1/engines/new?incarnation={B}")
        site.clock.now = 5
        await site.ask("GET", "/v1/engines")
        seen = [await watch.event() for _ in range(6)]
    assert [(e.kind, e.record.name, e.record.incarnation, e.reason) for e in seen] == [
        ("joined", "new", A, None),
        ("updated", "new", A, None),
        ("left", "new", A, "replaced"),
        ("joined", "new", B, None),
        ("left", "new", B, "left"),
        ("left", "old", A, "expired"),
    ]


async def test_a_watcher_hears_of_an_expiry_that_nobody_else_looks_at() -> None:
    async with serving() as url, aiohttp.ClientSession() as session:
        site = Site(url, MemoryStore(), Clock(), session)
        async with watching(site) as watch:
            await watch.event()
            await site.ask("PUT", "/v1/engines/x", json={**JOIN, "ttl": 1})
            assert (await watch.event()).kind == "joined"
            event = await watch.event()
    assert (event.kind, event.reason) == ("left", "expired")


async def test_a_watch_resumes_after_the_last_event_seen(site: Site) -> None:
    async with watching(site) as watch:
        await watch.event()
        await site.ask("PUT", "/v1/engines/one", json=JOIN)
        frame = await watch.frame()
    assert frame is not None
    await site.ask("PUT", "/v1/engines/two", json=JOIN)
    async with watching(site, frame.id) as watch:
        event = await watch.event()
        assert (event.kind, event.record.name) == ("joined", "two")
    forgotten = f"{frame.id.partition('-')[0]}-999"
    for last_id in (forgotten, "", "nonsense", f"{'0' * 32}-1", frame.id + "x", frame.id[:33] + "9" * 30):
        async with watching(site, last_id) as watch:
            assert (await watch.event()).kind == "snapshot"


async def test_a_watch_too_old_to_resume_gets_a_snapshot(site: Site) -> None:
    async with watching(site) as watch:
        first = await watch.frame()
    assert first is not None
    for number in range(HISTORY + 1):
        site.store.join("x", JoinRequest(A, (str(number),)))
    async with watching(site, first.id) as watch:
        assert (await watch.event()).kind == "snapshot"


async def test_silence_is_broken_by_comments() -> None:
    app = web.Application()
    setup(app, keep_alive=0.01)
    async with (
        mounted(app) as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}/v1/watch") as response,
    ):
        text = b""
        while text.count(b": keep-alive\n\n") < 3:
            text += await response.content.readany()
    assert text.startswith(b"id: ")


async def test_a_watcher_that_lags_too_far_is_cut_off() -> None:
    aborted: list[bool] = []
    watcher = Watcher(lambda: aborted.append(True))
    watcher.writing = True
    for _ in range(BACKLOG):
        watcher.push(b"x")
    assert not watcher.ended
    watcher.push(b"x")
    assert (watcher.ended, aborted) == (True, [True])
    assert await watcher.take(60) == b""


async def test_a_watcher_that_does_not_read_is_cut_off_and_the_others_are_not(site: Site) -> None:
    host, _, port = site.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1)
    writer.write(raw_request("/v1/watch"))
    async with watching(site) as watch:
        assert (await watch.event()).kind == "snapshot"
        await until(lambda: len(hub(site)._watchers) == 2)
        request = {"k": "x" * 8000}
        async with asyncio.timeout(60):
            for number in range(1_000_000):
                site.store.join("x", JoinRequest(A, (str(number),), request))
                assert (await watch.event()).record.addresses == (str(number),)
                if len(hub(site)._watchers) == 1:
                    break
    with suppress(ConnectionError):
        while await reader.read(1 << 20):
            pass
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    await site.usable()


@pytest.mark.parametrize("pieces", [1, 2, 7, 1000])
def test_frames_survive_any_split(pieces: int) -> None:
    frames = [Frame("joined", b'{"a":1}', "i-1"), Frame("left", "{}é".encode(), "i-2")]
    text = b": hello\n\n" + b"".join(encode_frame(frame) for frame in frames).replace(b"\n", b"\r\n")
    parser = FrameParser(1000)
    step = max(len(text) // pieces, 1)
    got = [frame for at in range(0, len(text), step) for frame in parser.feed(text[at : at + step])]
    assert got == frames


@pytest.mark.parametrize("endless", [b"data: " + b"x" * 200, b"data: x\n" * 100])
def test_frames_are_bounded(endless: bytes) -> None:
    with pytest.raises(ValueError, match="more than 100 bytes"):
        list(FrameParser(100).feed(endless))


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic s3cret",
        "s3cret",
        "Bearer s3cret x",
        "Bearer s3cre",
        "Bearer s3crét",
    ],
)
async def test_a_token_keeps_strangers_out(header: str | None) -> None:
    async with running("s3cret") as site:
        headers = {} if header is None else {"Authorization": header}
        for method, path in (
            ("GET", "/v1/engines"),
            ("PUT", "/v1/engines/x"),
            ("GET", "/v1/engines/x"),
            ("DELETE", f"/v1/engines/x?incarnation={A}"),
            ("POST", "/v1/engines/x/renew"),
            ("GET", "/v1/watch"),
            ("GET", "/v1/nothing"),
            ("POST", "/v1/watch"),
        ):
            status, message = await site.ask(method, path, headers=headers)
            assert (status, message["error"]["code"]) == (401, "unauthorized")
            assert "s3cret" not in json.dumps(message)
        assert (await site.ask("GET", "/v1/health"))[1]["status"] == "ok"
        for good in ("Bearer s3cret", "bearer s3cret"):
            assert (await site.ask("GET", "/v1/engines", headers={"Authorization": good}))[0] == 200


async def test_two_authorization_headers_are_none() -> None:
    async with running("s3cret") as site:
        lines = ("Authorization: Bearer s3cret", "Authorization: Bearer s3cret")
        assert (await raw(site, raw_request("/v1/engines", *lines)))[0] in (400, 401)


@pytest.mark.parametrize("token", ["", " ", "a b", "é", "a\n"])
async def test_tokens_that_no_header_can_carry(token: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        create_app(token)


@asynccontextmanager
async def mounted(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_mounted_twice_in_an_application_of_somebody_else() -> None:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application(client_max_size=10)
    app.router.add_get("/", hello)
    setup(app, prefix="/kv/one")
    setup(app, prefix="/kv/two/", token="t")
    inner = web.Application()
    setup(inner, prefix="/deep")
    app.add_subapp("/sub", inner)
    async with mounted(app) as url, aiohttp.ClientSession() as session:
        for prefix in ("/kv/one", "/kv/two", "/sub/deep"):
            site = Site(url + prefix, MemoryStore(), Clock(), session)
            headers = {"Authorization": "Bearer t"}
            assert (await site.ask("GET", "/v1/engines", headers=headers))[1]["records"] == []
            assert (await site.ask("PUT", "/v1/engines/a%20b", json=JOIN, headers=headers))[0] == 200
            renewal = {"version": 1, "incarnation": A}
            assert (await site.ask("POST", "/v1/engines/a%20b/renew", json=renewal, headers=headers))[0] == 200
            assert (await site.error("GET", "/v1/x", headers=headers))[1] == "no_such_route"
        async with session.get(url) as response:
            assert await response.text() == "hello"
        async with session.get(url + "/elsewhere") as response:
            assert response.status == 404


@pytest.mark.parametrize("prefix", ["kv", "/a b", "/{x}", "/a//b", "/é"])
def test_prefixes_that_are_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="cannot be mounted"):
        setup(web.Application(), prefix=prefix)


async def test_shutdown_ends_long_polls_and_watches_at_once() -> None:
    store = MemoryStore()
    async with aiohttp.ClientSession() as session:
        async with serving(store=store) as url:
            site = Site(url, store, Clock(), session)
            poll = asyncio.create_task(site.error("GET", "/v1/engines/x?wait=60"))
            await polls(site, 1)
            watch_open = watching(site)
            watch = await watch_open.__aenter__()
            await watch.event()
        assert await poll == (503, "shutting_down", None)
        assert await watch.frame() is None
        await watch_open.__aexit__(None, None, None)
    assert store._listeners == []


async def test_serve_tells_its_real_url_and_stops() -> None:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(port=0, on_ready=ready.set_result, stop=stop))
    url = await ready
    assert re.fullmatch(r"http://127\.0\.0\.1:[1-9][0-9]*", url)
    async with aiohttp.ClientSession() as session, session.get(url + "/v1/health") as response:
        assert response.status == 200
    stop.set()
    await task
    port = int(url.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_serve_stops_when_cancelled() -> None:
    ready = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(port=0, on_ready=ready.set_result))
    await ready
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_port_that_is_taken_is_an_error_that_says_so() -> None:
    async with serving() as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(RendezvousError, match=f"cannot listen on 127.0.0.1 port {port}") as caught:
            await serve(port=port)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 65536), ("127.0.0.1", -1), ("", 0), ("127.0.0.1", True)])
async def test_addresses_that_cannot_be_served(host: str, port: int) -> None:
    with pytest.raises(ConfigError):
        await serve(host, port)


async def test_a_wildcard_is_never_told_and_an_open_door_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "aiohixl.rendezvous"):
        async with serving("0.0.0.0", 0, "token") as url:
            assert url.startswith("http://127.0.0.1:")
        assert not caplog.records
        async with serving("0.0.0.0", 0):
            assert "without a token" in caplog.text


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="no ::1 here: sysctl net.ipv6.conf.lo.disable_ipv6=0")
@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
async def test_ipv6(host: str) -> None:
    async with running(host=host, token="t") as site:
        assert re.fullmatch(r"http://\[::1\]:[0-9]+", site.url)
        assert (await site.ask("GET", "/v1/health"))[0] == 200
