# SPDX-License-Identifier: Apache-2.0
"""Contract 11: strangers stay out."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import wirepeer as wire
from aiohttp import web
from conftest import Start
from ground import Ground
from wirepeer import WirePeer

import aiohixl
from aiohixl.rendezvous import serving
from aiohixl.wire import derive_bearer

SECRET = "correct horse battery staple é"
OTHERS: dict[str, dict[str, Any]] = {
    "none": {},
    "different": {"secret": SECRET + "x"},
    "prefix": {"secret": SECRET[:-1]},
    "a token": {"token": "correct horse"},
    "long": {"secret": SECRET * 100},
}


@pytest_asyncio.fixture
async def guarded(start: Start) -> AsyncIterator[Ground]:
    """Two engines that share a secret; b listens on TCP as well."""
    a, b = await start("a", secret=SECRET), await start("b", secret=SECRET, address="127.0.0.1:0")
    ground = await Ground(a, b, await a.connect(b.address)).prepare()
    yield ground
    await ground.still_good()
    ground.forget()


async def refused(engine: aiohixl.Engine, address: str) -> str:
    with pytest.raises(aiohixl.PeerMismatchError, match="secret") as caught:
        await engine.connect(address)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


# ---- the secret ----


@pytest.mark.parametrize("kind", [0, 1], ids=["unix", "tcp"])
async def test_contract_11_equal_secrets(guarded: Ground, start: Start, kind: int) -> None:
    c = await start("c", secret=SECRET.encode())  # bytes and str of the same text are one secret
    peer = await c.connect(guarded.b.address.split(",")[kind])
    await peer.notify(b"in")
    assert (await guarded.b.notes().get()).payload == b"in"


@pytest.mark.parametrize("kind", [0, 1], ids=["unix", "tcp"])
@pytest.mark.parametrize("other", OTHERS)
async def test_contract_11_other_secrets(guarded: Ground, start: Start, kind: int, other: str) -> None:
    events = guarded.b.events()
    stranger = await start("stranger", address="127.0.0.1:0", **OTHERS[other])
    await refused(stranger, guarded.b.address.split(",")[kind])  # who does not know ours
    event = await events.get()
    assert event.kind == "refused"
    assert "secret" in event.detail
    assert guarded.b.stats()["refused"] == 1
    assert guarded.b.stats()["peers"] == 1
    theirs = stranger.events()
    await refused(guarded.a, stranger.address.split(",")[kind])  # whom we do not trust
    assert (await theirs.get()).kind == "refused"
    assert stranger.stats()["peers"] == 0


async def test_contract_11_a_token_is_the_secret_where_there_is_none(start: Start) -> None:
    a, b, c = await start("a", token="t0ken"), await start("b", token="t0ken"), await start("c", secret="t0ken")
    for engine in (a, c):
        await (await engine.connect(b.address)).notify(engine.name.encode())
    got = [(await b.notes().get()).payload for _ in range(2)]
    assert sorted(got) == [b"a", b"c"]
    d = await start("d", token="other", secret="t0ken")  # the secret decides
    await (await d.connect(b.address)).notify(b"d")
    e = await start("e", token="t0ken", secret="other")
    await refused(e, b.address)


async def test_contract_11_the_engine_proves_itself_too(guarded: Ground) -> None:
    """A listener that pretends to be the peer, and does not know the secret, gets nothing but a proof it cannot use."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        listener.setblocking(False)
        connecting = asyncio.create_task(guarded.a.connect(f"tcp://127.0.0.1:{port}"))
        victim, _ = await asyncio.get_running_loop().sock_accept(listener)
        with victim:
            victim.settimeout(20)
            hello = victim.recv(4096)
            assert hello[: wire.FRAME.size] == wire.frame(wire.HELLO, 0, hello[wire.FRAME.size :])[: wire.FRAME.size]
            victim.sendall(wire.frame(wire.ANSWER, 0, wire.greeting(b"b", secret=True)))
            auth = victim.recv(4096)
            assert len(auth) == wire.FRAME.size + 32
            victim.sendall(wire.frame(wire.READY, 0, auth[wire.FRAME.size :]))  # reflected
            with pytest.raises(aiohixl.PeerMismatchError, match="secrets differ"):
                await connecting
            assert victim.recv(4096) == b"", "no table, no page"


async def test_contract_11_a_recorded_handshake_cannot_be_replayed(guarded: Ground) -> None:
    for address in guarded.b.address.split(","):
        with WirePeer(address, secret=SECRET.encode()).handshake() as friend:
            friend.alive()
            hello, proof = friend.hello, friend.proof(b"i")
            ready = friend.proof(b"a")
        events = guarded.b.events()
        for replayed in (proof, ready, bytes(32), proof[:31], proof + b"\0"):
            with WirePeer(address, secret=SECRET.encode()) as thief:
                assert thief.greet(hello).type == wire.ANSWER
                thief.send(wire.AUTH, 0, replayed)
                (reject,) = thief.rest()
                assert reject.type == wire.REJECT
                assert reject.body == b"the secrets differ"
        kinds: list[str] = []
        while len(kinds) < 5:
            event = await events.get()
            if event.kind == "refused":
                kinds.append(event.detail)
        assert kinds == ["the secrets differ"] * 5


async def test_contract_11_challenges_are_never_the_same(guarded: Ground) -> None:
    answers = set()
    for _ in range(20):
        with WirePeer(guarded.b.address.split(",")[1], secret=SECRET.encode()) as peer:
            answers.add(peer.greet().body)
    assert len(answers) == 20
    assert not any(SECRET.encode() in answer for answer in answers)


async def test_contract_11_a_proof_covers_names_and_roles(guarded: Ground) -> None:
    """A proof made for one greeting is none for another, and the acceptor's is none for the initiator."""
    for change in ("name", "role"):
        with WirePeer(guarded.b.address.split(",")[0], secret=SECRET.encode()) as peer:
            peer.greet()
            if change == "name":
                peer.hello = peer.hello.replace(b"wire", b"wirf")
            peer.send(wire.AUTH, 0, peer.proof(b"a" if change == "role" else b"i"))
            (reject,) = peer.rest()
            assert reject.type == wire.REJECT


# ---- the rendezvous ----


async def test_contract_11_the_rendezvous_never_sees_the_secret(start: Start) -> None:
    bearer = derive_bearer(SECRET.encode())
    assert SECRET not in bearer
    async with serving("127.0.0.1", 0, bearer) as url:
        a, b = await start("a", rendezvous=url, secret=SECRET), await start("b", rendezvous=url, secret=SECRET)
        await (await a.connect("b")).notify(b"in")
        assert (await b.notes().get()).payload == b"in"
        for options in ({}, {"secret": SECRET + "x"}, {"token": "guess"}):
            stranger = aiohixl.Engine("c", rendezvous=url, join_timeout=0.2, **options)
            with pytest.raises(aiohixl.RendezvousError) as caught:
                await stranger.start()
            assert caught.value.status == 401
            assert bearer not in str(caught.value)
        await a.close()
        await b.close()


async def test_contract_11_what_goes_to_the_rendezvous() -> None:
    seen: list[str] = []

    async def record(request: web.Request) -> web.Response:
        seen.append(f"{request.method} {request.path_qs} {dict(request.headers)} {await request.text()}")
        return web.json_response({"error": {"code": "unauthorized", "message": "no"}}, status=401)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", record)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        for options in ({"secret": SECRET}, {"secret": SECRET, "token": "t0ken"}):
            with pytest.raises(aiohixl.RendezvousError):
                await aiohixl.Engine("a", rendezvous=url, join_timeout=0.1, **options).start()
    finally:
        await runner.cleanup()
    assert f"Bearer {derive_bearer(SECRET.encode())}" in seen[0]
    assert "Bearer t0ken" in seen[-1]
    for form in (SECRET, SECRET.encode().hex(), repr(SECRET.encode())):
        assert form not in "".join(seen)


# ---- not told to anybody ----


async def test_contract_11_secrets_are_in_no_text(start: Start) -> None:
    a = await start("a", secret=SECRET, token="t0ken-of-mine")
    b = await start("b", secret="other" + SECRET)
    texts = [repr(a), str(a), repr(a._config), str(a._config), str(a.stats()), a.address, await refused(a, b.address)]
    wrong: list[dict[str, Any]] = [
        {"secret": SECRET, "ttl": -1},
        {"token": "t0ken-of-mine", "nope": 1},
        {"token": "t0ken-of-mine", "secret": b""},
    ]
    for bad in wrong:
        with pytest.raises(aiohixl.ConfigError) as caught:
            aiohixl.Engine("x", **bad)
        texts.append("".join(traceback.format_exception(caught.value, limit=0)))
    for text in texts:
        assert SECRET not in text
        assert "correct horse" not in text
        assert "t0ken-of-mine" not in text


# ---- where it listens ----


def listeners() -> set[str]:
    """Local addresses of this process's listening TCP sockets."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    out = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                out.add(fields[1].rpartition(":")[0])
    return out


async def test_contract_11_nothing_listens_on_tcp_unless_asked(start: Start) -> None:
    before = listeners()
    a = await start("a")
    assert listeners() == before
    assert a.address.startswith("unix://")
    assert "," not in a.address
    path = Path(a.address.removeprefix("unix://"))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.stat().st_uid == os.geteuid()
    await start("b", address="127.0.0.1:0")
    assert listeners() - before == {"0100007F"}


async def test_contract_11_every_interface_only_with_an_address_to_tell(start: Start) -> None:
    for wildcard in ("0.0.0.0:0", "[::]:0"):
        with pytest.raises(aiohixl.ConfigError, match=r"every interface.*advertise"):
            aiohixl.Engine("a", address=wildcard)
    b = await start("b", address="0.0.0.0:0", advertise="127.0.0.1", secret=SECRET)
    tcp = b.address.split(",")[1]
    assert tcp.startswith("tcp://127.0.0.1:")
    assert not tcp.endswith(":0")
    a = await start("a", secret=SECRET)
    await (await a.connect(tcp)).notify(b"in")
    assert (await b.notes().get()).payload == b"in"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user: run the tests as root")
async def test_contract_11_another_user_is_turned_away_from_the_unix_socket(guarded: Ground) -> None:
    path = Path(guarded.b.address.split(",")[0].removeprefix("unix://"))
    program = """
import os, socket, sys
fd = os.open(sys.argv[1], os.O_PATH)  # opened as root: the directory alone would keep others out
os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
try:
    sock.connect(f"/proc/self/fd/{fd}")
    sock.settimeout(20)
    print("closed" if not sock.recv(100) else "answered")
except PermissionError:
    print("denied")
"""
    events = guarded.b.events()

    def attempt(at: Path) -> str:
        command = [sys.executable, "-c", program, str(at)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return run.stdout.strip()

    assert attempt(path) == "denied", "the socket's directory or mode keeps others out"
    # A second name for the socket, where everybody may go: the directory of all engines stays as it is.
    with tempfile.TemporaryDirectory(dir=path.parent.parent) as folder:
        Path(folder).chmod(0o755)
        door = Path(folder, "door")
        door.hardlink_to(path)
        door.chmod(0o777)
        assert attempt(door) == "closed"
    event = await events.get()
    assert event.kind == "refused"
    assert "runs as uid 65534, this engine as uid 0" in event.detail
