# SPDX-License-Identifier: Apache-2.0
"""Where the tcp transport listens, and how it is found there."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest
from conftest import Start
from ports import held_port

import aiohixl

NAME = "decode-0.example"


def tcp_part(engine: aiohixl.Engine) -> str:
    return next(a for a in engine.address.split(",") if a.startswith("tcp://"))


async def works(a: aiohixl.Engine, b: aiohixl.Engine, address: str) -> None:
    target = await b.allocate(1 << 20, "target")
    peer = await a.connect(address)
    source = a.register(np.full(1 << 20, 7, np.uint8))
    remote = await peer.region("target")
    assert peer.route(source, remote).provider == "tcp"
    await peer.write(source, remote)
    assert bytes(target) == bytes(source)


async def test_the_default_is_loopback(start: Start) -> None:
    a, b = await start("a", transports=["tcp"]), await start("b", transports=["tcp"])
    assert tcp_part(b).startswith("tcp://127.0.0.1:")
    await works(a, b, tcp_part(b))


async def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        engine = aiohixl.Engine("b", transports=["tcp"], address=f"127.0.0.1:{port}")
        with pytest.raises(aiohixl.ConfigError, match=f"port {port}.*in use"):
            await engine.start()


async def test_an_address_of_another_host() -> None:
    with pytest.raises(aiohixl.ConfigError, match=r"192\.0\.2\.1"):
        await aiohixl.Engine("b", transports=["tcp"], address="192.0.2.1:0").start()


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="no ::1 here: sysctl net.ipv6.conf.lo.disable_ipv6=0")
@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_ipv6(start: Start, kind: str) -> None:
    """Also where the control link is a unix socket, and the port has to be found by what the peer says."""
    a, b = await start("a", transports=["tcp"]), await start("b", transports=["tcp"], address="[::1]:0")
    assert tcp_part(b).startswith("tcp://[::1]:")
    await works(a, b, next(address for address in b.address.split(",") if address.startswith(kind)))


async def test_another_address_of_this_host_by_unix(start: Start) -> None:
    a, b = await start("a", transports=["tcp"]), await start("b", transports=["tcp"], address="127.0.0.4:0")
    await works(a, b, b.address.split(",")[0])


async def test_every_interface(start: Start) -> None:
    a = await start("a", transports=["tcp"])
    b = await start("b", transports=["tcp"], address="0.0.0.0:0", advertise="127.0.0.1")
    await works(a, b, tcp_part(b))


async def test_every_interface_by_unix(start: Start) -> None:
    a = await start("a", transports=["tcp"])
    b = await start("b", transports=["tcp"], address="0.0.0.0:0", advertise="127.0.0.1")
    await works(a, b, b.address.split(",")[0])


async def test_a_name_with_several_addresses(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tried in their order; the data connections go where the control link got through."""
    a, b = await start("a", transports=["tcp"]), await start("b", transports=["tcp"], address="127.0.0.3:0")
    port = int(tcp_part(b).rpartition(":")[2])
    original = socket.getaddrinfo
    asked = []

    def getaddrinfo(host: Any, port: Any, *rest: Any, **options: Any) -> Any:
        if host != NAME:
            return original(host, port, *rest, **options)
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not a numeric address")
        asked.append(host)
        hosts = [("::1", socket.AF_INET6), ("127.0.0.2", socket.AF_INET), ("127.0.0.3", socket.AF_INET)]
        return [(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port)) for address, family in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    await works(a, b, f"tcp://{NAME}:{port}")
    assert asked


async def test_nobody_listens(start: Start) -> None:
    a = await start("a", transports=["tcp"])
    with held_port() as port, pytest.raises(aiohixl.PeerUnreachableError, match="refused"):
        await a.connect(f"tcp://127.0.0.1:{port}")


async def test_an_engine_without_shm_is_reached_by_tcp(start: Start) -> None:
    """On one host, by its unix socket, and by a peer that has both: nobody writes its memory without its checks."""
    a, b = await start("a", transports=["auto"]), await start("b", transports=["tcp"])
    await b.allocate(4096, "target")
    await a.allocate(4096, "back")
    peer = await a.connect(b.address.split(",")[0])
    (back,) = b.peers.values()
    assert isinstance(back, aiohixl.Peer)
    for one, local, remote in (
        (peer, a.allocate(4096), await peer.region("target")),
        (back, b.allocate(4096), await back.region("back")),
    ):
        assert one.route(local, remote).provider == "tcp"
        await one.write(local, remote)
    c = await start("c", transports=["shm"])
    alone = await c.connect(b.address.split(",")[0])
    with pytest.raises(aiohixl.RegionError, match="shm: the peer's engine has no shm transport"):
        alone.write(c.allocate(4096), await alone.region("target"))


async def test_two_transports_that_do_not_meet(start: Start) -> None:
    """No path is an error that says why, before a byte moves."""
    a, b = await start("a", transports=["tcp"]), await start("b", transports=["shm"])
    await b.allocate(4096, "target")
    peer = await a.connect(b.address)
    with pytest.raises(aiohixl.RegionError, match="tcp"):
        peer.write(a.allocate(4096), await peer.region("target"))
