# SPDX-License-Identifier: Apache-2.0
"""The client against real servers: good ones, ones that restart, and ones that talk nonsense."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from restartable import Server, restartable

from aiohixl.errors import ClosedError, ConfigError, RendezvousError
from aiohixl.rendezvous import MemoryStore, RefusedError, RendezvousClient, serving, setup
from aiohixl.wire import JoinRequest, Record, WireError

A, B, C = ("a" * 32, "b" * 32, "c" * 32)


@asynccontextmanager
async def started(token: str | None = None) -> AsyncIterator[Server]:
    async with restartable(token) as server:
        await server.start()
        yield server


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with started() as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[RendezvousClient]:
    async with RendezvousClient(server.url) as client:
        yield client


@pytest.fixture(autouse=True)
async def no_task_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield  # set-up and tear-down may be tasks of their own
    # Connections are closed a turn of the loop or two after the session.
    for _ in range(5):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not left


async def test_join_look_up_list_leave(server: Server, client: RendezvousClient) -> None:
    name = 'prefill "0" / ü'.replace("/", "%2F?#")
    record = await client.join(name, incarnation=A, addresses=["tcp://[::1]:5"], capabilities={"shm": [1]})
    assert client.record == record
    assert client.last_error is None
    async with RendezvousClient(server.url + "/") as other:
        found = await other.lookup(name)
        assert (found.incarnation, found.epoch, found.addresses) == (A, record.epoch, ("tcp://[::1]:5",))
        assert (found.name, found.capabilities) == (name, {"shm": [1]})
        assert [r.name for r in await other.list()] == [name]
        assert other.instance == client.instance != ""
    assert await client.leave() is True
    assert client.record is None
    assert await client.leave() is False
    assert await client.list() == ()
    await client.join("again", incarnation=A)


async def test_closing_leaves(server: Server) -> None:
    async with RendezvousClient(server.url) as client:
        await client.join("x", incarnation=A)
        assert server.store.get("x") is not None
    assert server.store.get("x") is None


async def test_one_client_holds_one_name(client: RendezvousClient) -> None:
    await client.join("x", incarnation=A)
    with pytest.raises(ConfigError, match="holds 'x'"):
        await client.join("y", incarnation=A)


async def test_what_is_wrong_is_said_before_anything_is_sent() -> None:
    async with restartable() as nobody, RendezvousClient(nobody.url) as client:
        for bad in ({"incarnation": "x"}, {"ttl": 0}, {"addresses": [""]}, {"capabilities": {"a": object()}}):
            with pytest.raises(WireError) as caught:
                await client.join("x", **{"incarnation": A, **bad})  # type: ignore[arg-type]
            assert caught.value.field.partition("[")[0] in bad
        for ask in (
            client.join("a/b", incarnation=A),
            client.lookup("a/b"),
            client.lookup("x", after_epoch=-1),
        ):
            with pytest.raises(WireError):
                await ask


async def test_a_lease_is_renewed_for_as_long_as_the_client_lives(server: Server, client: RendezvousClient) -> None:
    renewed = asyncio.Event()
    renewals = 0
    renew = server.store.renew

    def counting(name: str, incarnation: str) -> Record:
        nonlocal renewals
        renewals += 1
        if renewals == 5:  # by then well beyond the first lease
            renewed.set()
        return renew(name, incarnation)

    server.store.renew = counting  # type: ignore[method-assign]
    epoch = (await client.join("x", incarnation=A, ttl=1)).epoch
    await asyncio.wait_for(renewed.wait(), 30)
    found = await client.lookup("x", wait=0)
    assert (found.epoch, found.age > 1) == (epoch, True)


async def test_a_join_waits_until_a_crashed_holders_lease_ends(server: Server, client: RendezvousClient) -> None:
    crashed = server.store.join("x", JoinRequest(A, ttl=1))
    record = await client.join("x", incarnation=B)
    assert record.epoch > crashed.epoch


async def test_a_join_gives_up_and_names_the_holder(server: Server, client: RendezvousClient) -> None:
    server.store.join("x", JoinRequest(A, ttl=60))
    with pytest.raises(
        RefusedError, match=f"held by incarnation {A} .joined [0-9.]+ s ago.*gave up after 0.2 s"
    ) as caught:
        await client.join("x", incarnation=B, timeout=0.2)
    error = caught.value
    assert (error.status, error.code) == (409, "name_taken")
    assert error.holder is not None
    assert error.holder.incarnation == A
    assert server.url in str(error)
    with pytest.raises(RefusedError) as caught:
        await client.join("x", incarnation=B, wait=False)
    assert "gave up" not in str(caught.value)
    record = await client.join("x", incarnation=B, replace=A)
    assert record.incarnation == B


@pytest.mark.parametrize("how", [{"force": True}, {"replace": A}])
async def test_who_is_taken_over_hears_it_once_and_stops(
    server: Server, client: RendezvousClient, how: dict[str, Any]
) -> None:
    lost: asyncio.Queue[RendezvousError] = asyncio.Queue()
    first = await client.join("x", incarnation=A, ttl=1, on_lost=lost.put_nowait)
    async with RendezvousClient(server.url) as other:
        second = await other.join("x", incarnation=B, **how)
        assert second.epoch > first.epoch
        error = await asyncio.wait_for(lost.get(), 30)
        assert isinstance(error, RefusedError)
        assert error.holder is not None
        assert error.holder.incarnation == B
        assert client.record is None
        assert client.last_error is error
        assert await client.leave() is False
        assert (await other.lookup("x")).incarnation == B
        assert lost.empty()
        # The client is usable for another name.
        await client.join("y", incarnation=A)


async def test_a_callback_that_fails_is_reported_and_harmless(server: Server, client: RendezvousClient) -> None:
    loop = asyncio.get_running_loop()
    reports: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    loop.set_exception_handler(lambda _, context: reports.put_nowait(context))
    try:
        await client.join("x", incarnation=A, ttl=1, on_lost=lambda error: 1 / 0)
        server.store.join("x", JoinRequest(B, force=True))
        report = await asyncio.wait_for(reports.get(), 30)
    finally:
        loop.set_exception_handler(None)
    assert isinstance(report["exception"], ZeroDivisionError)
    assert await client.list()


async def test_a_restarted_rendezvous_gets_its_engines_back_with_their_epochs(server: Server) -> None:
    rejoined: asyncio.Queue[Record] = asyncio.Queue()
    async with RendezvousClient(server.url) as client:
        before = await client.join("x", incarnation=A, ttl=1, addresses=["addr"], on_rejoined=rejoined.put_nowait)
        instance = client.instance
        await server.stop()
        await server.start()
        assert server.store.get("x") is None
        record = await asyncio.wait_for(rejoined.get(), 30)
        assert (record.epoch, record.incarnation, record.addresses) == (before.epoch, A, ("addr",))
        assert client.record == record
        assert client.instance != instance
        assert client.last_error is None
        assert await client.leave() is True


async def test_renewing_survives_an_outage_and_tells_the_last_error(server: Server, client: RendezvousClient) -> None:
    rejoined = asyncio.Event()
    await client.join("x", incarnation=A, ttl=1, on_rejoined=lambda record: rejoined.set())
    await server.stop()
    async with asyncio.timeout(30):
        while client.last_error is None:
            await asyncio.sleep(0.01)
    assert client.last_error.status == 0
    await server.start()
    await asyncio.wait_for(rejoined.wait(), 30)
    assert client.last_error is None


async def test_a_name_taken_while_the_rendezvous_was_away_is_lost(server: Server, client: RendezvousClient) -> None:
    lost: asyncio.Queue[RendezvousError] = asyncio.Queue()
    await client.join("x", incarnation=A, ttl=1, on_lost=lost.put_nowait)
    await server.stop()
    store = MemoryStore()
    store.join("x", JoinRequest(B, ttl=60))
    await server.start(store)
    assert (await asyncio.wait_for(lost.get(), 30)).status == 409


async def test_a_store_that_outlives_its_server_is_joined_again_too(server: Server, client: RendezvousClient) -> None:
    rejoined = asyncio.Event()
    store = server.store
    before = await client.join("x", incarnation=A, ttl=30, on_rejoined=lambda record: rejoined.set())
    assert client._lease is not None
    await server.stop()
    await server.start(store)
    await client._lease._renew(5)
    assert rejoined.is_set()
    assert client.record is not None
    assert client.record.epoch == before.epoch


async def test_a_rendezvous_that_starts_late_is_waited_for() -> None:
    async with restartable() as server, RendezvousClient(server.url) as client:
        joining = asyncio.create_task(client.join("x", incarnation=A))
        with pytest.raises(RendezvousError):
            await client.lookup("x", wait=0)  # by now the join has been refused too
        await server.start()
        assert (await joining).incarnation == A


async def test_a_rendezvous_that_is_down_is_named_with_the_cause() -> None:
    async with restartable() as down, RendezvousClient(down.url, token="s3cret") as client:
        asks: list[Callable[[], Awaitable[object]]] = [
            lambda: client.join("x", incarnation=A, timeout=0.3),
            lambda: client.lookup("x", wait=0.3),
            lambda: client.list(timeout=0.3),
        ]
        for ask in asks:
            with pytest.raises(RendezvousError, match=f"cannot reach the rendezvous at {down.url}") as caught:
                await ask()
            assert caught.value.status == 0
            assert isinstance(caught.value.__cause__, aiohttp.ClientError)
        assert client.record is None


async def test_a_look_up_waits_for_a_name_across_a_restart(server: Server, client: RendezvousClient) -> None:
    looking = asyncio.create_task(client.lookup("late"))
    await client.list()
    await server.stop()
    await server.start()
    server.store.join("late", JoinRequest(A))
    assert (await looking).incarnation == A


async def test_a_look_up_waits_for_a_newer_epoch(server: Server, client: RendezvousClient) -> None:
    old = server.store.join("x", JoinRequest(A))
    looking = asyncio.create_task(client.lookup("x", after_epoch=old.epoch))
    await client.list()
    server.store.join("x", JoinRequest(B, force=True))
    assert (await looking).incarnation == B


@pytest.mark.parametrize("wait", [0, 0.1, -1])
async def test_a_look_up_that_finds_nobody(client: RendezvousClient, wait: float) -> None:
    with pytest.raises(RefusedError, match="no engine 'x' has joined") as caught:
        await client.lookup("x", wait=wait)
    assert (caught.value.status, caught.value.code) == (404, "not_found")


async def test_long_waits_are_made_of_short_polls(client: RendezvousClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiohixl.rendezvous.client._POLL", 0.02)
    with pytest.raises(RefusedError, match=r"gave up after 0\.2 s"):
        await client.lookup("x", wait=0.2)


async def test_watching_goes_on_across_a_restart(server: Server, client: RendezvousClient) -> None:
    server.store.join("x", JoinRequest(A))
    async with aclosing(client.watch()) as watch:
        event = await anext(watch)
        assert (event.kind, [r.name for r in event.records]) == ("snapshot", ["x"])
        server.store.join("y", JoinRequest(A))
        event = await anext(watch)
        assert (event.kind, event.record.name) == ("joined", "y")
        await server.stop()
        store = MemoryStore()
        store.join("z", JoinRequest(A))
        await server.start(store)
        event = await anext(watch)
        assert (event.kind, [r.name for r in event.records]) == ("snapshot", ["z"])


async def test_watching_ends_when_the_client_closes(client: RendezvousClient) -> None:
    seen = asyncio.Event()

    async def watch() -> list[str]:
        kinds: list[str] = []
        async for event in client.watch():
            kinds.append(event.kind)
            seen.set()
        return kinds

    watching = asyncio.create_task(watch())
    await seen.wait()
    await client.close()
    assert await watching == ["snapshot"]


async def test_closing_ends_what_waits_and_is_idempotent(server: Server) -> None:
    server.store.join("held", JoinRequest(A, ttl=60))
    client = RendezvousClient(server.url)
    waiting = [
        asyncio.create_task(client.lookup("x")),
        asyncio.create_task(client.join("held", incarnation=B)),
    ]
    await client.list()
    await asyncio.gather(client.close(), client.close())
    for task in waiting:
        with pytest.raises(ClosedError):
            await task
    await client.close()
    asks: list[Callable[[], Awaitable[object]]] = [
        lambda: client.join("y", incarnation=A),
        lambda: client.lookup("x"),
        client.list,
    ]
    for ask in asks:
        with pytest.raises(ClosedError, match="closed"):
            await ask()
    assert [event async for event in client.watch()] == []
    assert await client.leave() is False
    assert client._http._session is None
    assert "closed" in repr(client)


async def test_closing_while_the_rendezvous_is_down_is_quick_and_quiet(server: Server) -> None:
    client = RendezvousClient(server.url)
    await client.join("x", incarnation=A)
    await server.stop()
    await client.close()


async def test_closing_before_anything_was_asked() -> None:
    await RendezvousClient("http://127.0.0.1:1").close()


async def test_a_cancelled_join_is_taken_back_by_close(server: Server) -> None:
    client = RendezvousClient(server.url)
    server.store.join("x", JoinRequest(A, ttl=60))
    joining = asyncio.create_task(client.join("x", incarnation=B))
    await client.list()
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    server.store.join("x", JoinRequest(B, force=True))  # what the server may have made of it
    await client.close()
    assert server.store.get("x") is None


async def test_leaving_during_a_join_wins(server: Server, client: RendezvousClient) -> None:
    server.store.join("x", JoinRequest(A, ttl=60))
    joining = asyncio.create_task(client.join("x", incarnation=B))
    await client.list()
    await client.leave()
    server.store.leave("x", A)
    with pytest.raises(ClosedError, match=r"leave\(\) was called"):
        await joining
    assert server.store.get("x") is None


async def test_a_client_belongs_to_its_loop(client: RendezvousClient) -> None:
    await client.list()
    raised: list[BaseException] = []

    def elsewhere() -> None:
        with pytest.raises(ClosedError, match="another event loop") as caught:
            asyncio.run(client.lookup("x"))
        raised.append(caught.value)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.get_running_loop().run_in_executor(None, thread.join)
    assert raised


async def test_a_wrong_token_is_refused_at_once_and_never_shown() -> None:
    async with started("right-token") as server, RendezvousClient(server.url, token="wrong-token") as client:
        asks: list[Callable[[], Awaitable[object]]] = [
            lambda: client.join("x", incarnation=A),
            lambda: client.lookup("x"),
            client.list,
            lambda: anext(client.watch()),
        ]
        for ask in asks:
            with pytest.raises(RefusedError) as caught:
                await ask()
            assert (caught.value.status, caught.value.code) == (401, "unauthorized")
            assert_hidden("-token", caught.value)
        assert "-token" not in repr(client)
    async with started("right-token") as server, RendezvousClient(server.url, token="right-token") as client:
        assert await client.list() == ()


def assert_hidden(secret: str, error: BaseException) -> None:
    shown = "".join(traceback.format_exception(error))
    chain: BaseException | None = error
    while chain is not None:
        shown += repr(chain) + str(chain) + repr(chain.args) + repr(vars(chain))
        chain = chain.__cause__
    assert secret not in shown


RECORD = Record("x", A, 5).to_json()


def answer(status: int = 200, **content: Any) -> bytes:
    return http(status, json.dumps({"version": 1, "instance": "i", **content}).encode())


def http(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


GARBAGE = {
    "not http": b"SSH-2.0-OpenSSH_9.2\r\n",
    "nothing": b"",
    "html": http(200, b"<html>"),
    "html 404": http(404, b"<html>not found"),
    "redirect": http(302, b"", "Location: http://127.0.0.1:1/"),
    "no version": http(200, b'{"instance":"i"}'),
    "other version": http(200, b'{"version":2,"instance":"i"}'),
    "no instance": http(200, b'{"version":1}'),
    "list": http(200, b"[]"),
    "no record": answer(),
    "record of a wrong type": answer(record=[], records={}),
    "bad record": answer(record={**RECORD, "epoch": "x"}, records=[{**RECORD, "epoch": "x"}]),
    "another name": answer(record={**RECORD, "name": "y"}, records=[1]),
    "no error": answer(404),
    "error of a wrong type": answer(409, error="no"),
    "bad holder": answer(409, error={"code": "name_taken", "message": "", "holder": {"age": 1}}),
    "cut short": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
    "compressed nonsense": http(200, b"xxxx", "Content-Encoding: deflate"),
    "too much": http(200, b" " * 200_000),
    "bad headers": b"HTTP/1.1 200 OK\r\nbad\x00header\r\n\r\n",
    "server error": http(502, b"<html>bad gateway"),
}


@asynccontextmanager
async def talking(reply: bytes) -> AsyncIterator[str]:
    """A server that says `reply` to every request."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("reply", GARBAGE.values(), ids=GARBAGE.keys())
async def test_a_server_that_talks_nonsense_is_a_rendezvous_error(reply: bytes) -> None:
    async with talking(reply) as url, RendezvousClient(url, token="s3cret") as client:
        asks: list[Callable[[], Awaitable[object]]] = [
            lambda: client.join("x", incarnation=B, timeout=0.1),
            lambda: client.lookup("x", wait=0),
            lambda: client.list(timeout=5),
        ]
        for ask in asks:
            with pytest.raises(RendezvousError, match=url) as caught:
                await ask()
            assert_hidden("s3cret", caught.value)


@pytest.mark.parametrize(
    "text",
    [
        b"data: {}\n\n",
        b"data: x\n\n",
        b'event: joined\ndata: {"version":1,"kind":"joined","records":[]}\n\n',
        b"id: \xff\ndata: {}\n\n",
    ],
)
async def test_a_watch_of_nonsense_is_a_rendezvous_error(text: bytes) -> None:
    async with (
        talking(http(200, text, "Content-Type: text/event-stream")) as url,
        RendezvousClient(url) as client,
    ):
        with pytest.raises(RendezvousError, match="is not an aiohixl rendezvous"):
            await anext(client.watch())


async def test_a_watch_of_something_else_is_a_rendezvous_error() -> None:
    async with talking(answer()) as url, RendezvousClient(url) as client:
        with pytest.raises(RendezvousError, match="no event stream"):
            await anext(client.watch())


async def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiohixl.rendezvous.client._GRACE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with RendezvousClient(f"http://127.0.0.1:{silent.getsockname()[1]}") as client:
            for ask in (
                client.lookup("x", wait=0),
                client.list(timeout=0.1),
                client.join("x", incarnation=A, timeout=0.2),
            ):
                with pytest.raises(RendezvousError, match="no answer within") as caught:
                    await ask
                assert caught.value.status == 0


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:7700",
        "ftp://x",
        "http://",
        "http:///x",
        "http://x:99999",
        "http://x:0",
        "http://x?y",
        "http://x#y",
        "http://[::1",
        "http://a b",
        "http://x\n",
        None,
        5,
    ],
)
def test_urls_that_cannot_be_used(url: Any) -> None:
    with pytest.raises(ConfigError, match="rendezvous URL"):
        RendezvousClient(url)


def test_credentials_do_not_belong_into_the_url() -> None:
    for url in ("http://user:s3cret@x:1", "http://s3cret@x"):
        with pytest.raises(ConfigError, match="token=") as caught:
            RendezvousClient(url)
        assert "s3cret" not in str(caught.value)


def test_a_token_that_no_header_can_carry() -> None:
    with pytest.raises(ConfigError, match="token"):
        RendezvousClient("http://x", token="a\nb")


async def test_below_a_prefix_and_proxies_of_the_environment_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # discard: nobody is there
    app = web.Application()
    setup(app, prefix="/kv", token="t")
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with RendezvousClient(url + "/kv/", token="t") as client:
            await client.join("x", incarnation=A)
            assert (await client.lookup("x", wait=0)).incarnation == A
        async with RendezvousClient(url, token="t") as client:
            with pytest.raises(RendezvousError, match="check the address, the port and the prefix"):
                await client.join("x", incarnation=A)
        async with RendezvousClient(url + "/kv", token="t", trust_env=True) as client:
            with pytest.raises(RendezvousError, match="cannot reach"):
                await client.lookup("x", wait=0)
    finally:
        await runner.cleanup()


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="no ::1 here: sysctl net.ipv6.conf.lo.disable_ipv6=0")
async def test_ipv6() -> None:
    async with serving("::1") as url, RendezvousClient(url) as client:
        await client.join("x", incarnation=A)
        assert [record.name for record in await client.list()] == ["x"]
