# SPDX-License-Identifier: Apache-2.0
"""What a caller can get wrong about buffers, options, layouts, notes and addresses: the documented exception."""

from __future__ import annotations

import array
import contextlib
import mmap
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from conftest import Start
from ground import Ground

import aiohixl


@pytest_asyncio.fixture
async def ground(pair: tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer]) -> AsyncIterator[Ground]:
    ground = await Ground(*pair).prepare()
    yield ground
    ground.forget()


# ---- buffers ----


class FakeTensor:
    """A tensor of a device that nothing here reaches."""

    shape, dtype, layout = (4, 4), "torch.float16", "torch.strided"

    def __init__(self, device: str) -> None:
        self.device = device

    def data_ptr(self) -> int:
        return 0x7F0000000000

    def stride(self) -> tuple[int, int]:
        return (4, 1)

    def element_size(self) -> int:
        return 2


NO_BUFFERS: list[tuple[Any, str]] = [
    (np.zeros((8, 8))[:, :4], "not contiguous"),
    (np.zeros((8, 8)).T[:4], "not contiguous"),
    (np.zeros(8)[::-1], "backwards"),
    (np.zeros(0), "empty"),
    (bytearray(), "empty"),
    (np.array([object()]), "Python objects"),
    (FakeTensor("npu:3"), "'npu:3'"),
    (FakeTensor("cuda:0"), "'cuda:0'"),
    ([1, 2, 3], "register_many"),
    ("text", "not a buffer"),
    (5, "not a buffer"),
    (None, "not a buffer"),
    (object(), "not a buffer"),
    (b"read-only", "read-only"),
    (memoryview(b"read-only"), "read-only"),
]


async def test_buffers_that_are_none(ground: Ground) -> None:
    a = ground.a
    closed = mmap.mmap(-1, 4096)
    closed.close()
    live = a.stats()["live_regions"]
    for buffer, why in [*NO_BUFFERS, (closed, "does not give")]:
        with pytest.raises(aiohixl.RegionError, match=why):
            a.register(buffer, "never")
        with pytest.raises(aiohixl.RegionError, match=why):
            a.register_many({"fine": bytearray(8), "never": buffer})
    assert a.stats()["live_regions"] == live, "register_many registers all or none"
    a.register(bytearray(8), "fine")
    await ground.still_good()


@pytest.mark.parametrize("nbytes", [0, -1, True, 1.5, "4096", None, 1 << 50, 1 << 63, 1 << 64, 1 << 200], ids=str)
async def test_allocations_that_cannot_be(ground: Ground, nbytes: Any) -> None:
    with pytest.raises(aiohixl.RegionError, match="allocate"):
        ground.a.allocate(nbytes, "never")
    await ground.a.allocate(1, "never")
    await ground.still_good()


# ---- options ----


def test_an_option_that_does_not_exist_names_the_nearest() -> None:
    with pytest.raises(aiohixl.ConfigError, match="no option 'peer_time_out'; did you mean 'peer_timeout'"):
        aiohixl.Engine("x", peer_time_out=3)
    with pytest.raises(aiohixl.ConfigError, match="no option 'q'; there are rendezvous, token"):
        aiohixl.Engine("x", q=1)
    with pytest.raises(aiohixl.ConfigError, match="no option 'name_'"):
        aiohixl.Engine("x", name_="y")


NONSENSE: tuple[Any, ...] = (None, "1", b"1", [1], float("nan"), float("inf"), True, 1j)


@pytest.mark.parametrize(
    ("option", "low", "high", "whole"),
    [
        ("ttl", 1.0, 3600.0, False),
        ("join_timeout", 0.0, 86400.0, False),
        ("peer_timeout", 0.02, 86400.0, False),
        ("stall_timeout", 0.02, 86400.0, False),
        ("cancel_grace", 0.02, 86400.0, False),
        ("handshake_timeout", 0.02, 86400.0, False),
        ("queue_depth", 16, 1 << 20, True),
        ("peer_depth", 1, 1 << 20, True),
        ("inline_limit", 0, 1 << 20, True),
        ("copy_threads", 1, 16, True),
    ],
)
def test_the_range_of_each_number(option: str, low: Any, high: Any, whole: bool) -> None:
    below, above = (low - 1, high + 1) if whole else (low - 0.001, high + 0.001)
    bad = [below, above, -1, 1 << 70, *NONSENSE]
    if whole:
        bad.append(16.5)
    if option == "copy_threads":
        bad.remove(None)
    for value in bad:
        with pytest.raises(aiohixl.ConfigError, match=f"{option}: .* from {low} to {high}"):
            aiohixl.Engine("x", **{option: value})
    for value in (low, high):
        aiohixl.Engine("x", **{option: value})


def test_queue_depth_is_a_power_of_two() -> None:
    with pytest.raises(aiohixl.ConfigError, match="power of two, not 24"):
        aiohixl.Engine("x", queue_depth=24)


@pytest.mark.parametrize("option", ["rendezvous", "token", "address", "advertise", "replace"])
def test_options_that_are_text(option: str) -> None:
    for value in ("", b"x", 5, ["x"], "\ud800"):
        with pytest.raises(aiohixl.ConfigError, match=option):
            aiohixl.Engine("x", **{option: value})


def test_secrets() -> None:
    for value in ("", b"", 5, ["x"], bytearray(b"x"), "\ud800"):
        with pytest.raises(aiohixl.ConfigError, match="secret"):
            aiohixl.Engine("x", secret=value)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("auto", "a list of names"),
        ([], "a list of names"),
        (None, "a list of names"),
        (["ahm"], "did you mean 'shm'"),
        (["shm", "hxil"], "did you mean 'hixl'"),
        ([5], "there is no 5"),
        (["verbs"], "'verbs' is not available"),
        (["auto", "hixl"], "'hixl' is not available"),
        (["tcp"], "'tcp' is not available"),
    ],
)
def test_transports_that_are_not_there(value: Any, why: str) -> None:
    with pytest.raises(aiohixl.ConfigError, match=why):
        aiohixl.Engine("x", transports=value)


def test_faults_that_are_none() -> None:
    for value in (
        5,
        None,
        [5],
        [aiohixl.Fault(0, "explode")],
        [aiohixl.Fault(-1, "stall")],
        [aiohixl.Fault("0", "stall")],  # type: ignore[arg-type]
        [aiohixl.Fault(0, "delay", delay=-1)],
        [aiohixl.Fault(0, "delay", delay=float("nan"))],
        [aiohixl.Fault(0, "delay", delay="1")],  # type: ignore[arg-type]
        [aiohixl.Fault(0, "fail", status="NOPE")],
        [aiohixl.Fault(1 << 64, "stall")],
    ):
        with pytest.raises(aiohixl.ConfigError, match="fault"):
            aiohixl.Engine("x", faults=value)


NO_NAMES: list[Any] = [None, 5, "", b"x", "x" * 129, "é" * 65, "a/b", "..", "a\nb", "a\0b", "\ud800", "\x7f"]


@pytest.mark.parametrize("name", NO_NAMES, ids=repr)
def test_engine_names_that_are_none(name: Any) -> None:
    with pytest.raises(aiohixl.ConfigError, match="name"):
        aiohixl.Engine(name)


@pytest.mark.parametrize(
    "address", ["nowhere", ":0", "1.2.3.4", "1.2.3.4:", "1.2.3.4:65536", "1.2.3.4:-1", "::1:0", "1:²"]
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(aiohixl.ConfigError, match="address: host:port"):
        aiohixl.Engine("x", address=address)


async def test_an_address_that_is_taken_or_not_ours(ground: Ground) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = aiohixl.Engine("busy", address=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(aiohixl.ConfigError, match=r"'busy': cannot listen on 127\.0\.0\.1 port"):
            await busy.start()
    for address, why in (("192.0.2.1:0", "cannot listen"), ("no.such.host.invalid:0", "cannot be resolved")):
        engine = aiohixl.Engine("elsewhere", address=address)
        with pytest.raises(aiohixl.ConfigError, match=why):
            await engine.start()
        await engine.close()
    await ground.still_good()


# ---- connecting ----


async def test_targets_that_are_none(ground: Ground) -> None:
    a = ground.a
    for target in ("", None, 5, b"b", ["b"]):
        with pytest.raises(aiohixl.ConfigError, match="connect takes"):
            await a.connect(target)  # type: ignore[arg-type]
    for address in (
        "http://x",
        "unix://",
        "unix:///" + "x" * 107,
        "unix:///a\0b",
        "tcp://",
        "tcp://host",
        "unix:///a,ftp://b",
    ):
        with pytest.raises(aiohixl.ConfigError, match="address"):
            await a.connect(address)
    with pytest.raises(aiohixl.ConfigError, match="a name needs a rendezvous"):
        await a.connect("b")
    nowhere = (
        "unix:///nowhere/at.all",
        "tcp://127.0.0.1:1",
        "tcp://no.such.host.invalid:5",
        "tcp://a..b:5",
        "tcp://a\0b:5",
    )
    for address in nowhere:
        with pytest.raises(aiohixl.PeerUnreachableError, match="cannot connect to"):
            await a.connect(address)
    with pytest.raises(aiohixl.PeerMismatchError, match="this engine itself"):
        await a.connect(a.address)
    await ground.still_good()


async def test_the_rendezvous_is_down(ground: Ground) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    engine = aiohixl.Engine("alone", rendezvous=url, join_timeout=0.2)
    with pytest.raises(aiohixl.RendezvousError, match=url):
        await engine.start()
    with pytest.raises(aiohixl.ClosedError):
        engine.allocate(64)
    await ground.still_good()


# ---- KV caches ----


def kv_layers(layers: int = 2, blocks: int = 8, block: tuple[int, ...] = (4, 2), dtype: Any = np.float32) -> list[Any]:
    return [np.zeros((blocks, *block), dtype) for _ in range(layers)]


async def test_layouts_that_do_not_match(ground: Ground) -> None:
    ground.b.register_kv(kv_layers(), "kv")
    await ground.peer.kv("kv")
    odd = {
        "dtype": kv_layers(dtype=np.float64),
        "shape": kv_layers(block=(2, 4)),
        "layer": kv_layers(layers=3),
        "parts": [(layer, layer.copy()) for layer in kv_layers()],
    }
    for what, layers in odd.items():
        cache = ground.a.register_kv(layers, what)
        calls: list[Callable[[], Any]] = [
            lambda cache=cache: ground.peer.write_kv(cache, [0], [1], remote="kv", note=b"x"),  # type: ignore[misc]
            lambda cache=cache: ground.peer.read_kv(cache, [0], [1], remote="kv"),  # type: ignore[misc]
            lambda cache=cache: ground.peer.stream_kv(cache, [0], [1], remote="kv"),  # type: ignore[misc]
        ]
        for call in calls:
            with pytest.raises(aiohixl.PeerMismatchError, match=f"do not match: .*{what}"):
                call()
    await ground.still_good()


async def test_blocks_that_are_none(ground: Ground) -> None:
    layers = kv_layers()
    ground.b.register_kv(layers, "kv")
    cache = ground.a.register_kv([layer + 5 for layer in kv_layers()], "kv")
    await ground.peer.kv("kv")
    for here, there in [
        ([8], [0]),
        ([0], [8]),
        ([-1], [0]),
        ([0], [-1]),
        ([0, 1], [0]),
        ([0, 1], [3, 3]),
        ([0.5], [0]),
        ([True], [0]),
        ("0", [0]),
        (None, [0]),
        ([[0]], [0]),
        ([1 << 64], [0]),
        ([[0], [1, 2]], [0]),
    ]:
        for call in (ground.peer.write_kv, ground.peer.read_kv if there != [3, 3] else ground.peer.write_kv):
            with pytest.raises(aiohixl.RegionError, match="block"):
                call(cache, here, there)  # type: ignore[arg-type]
        with pytest.raises(aiohixl.RegionError, match="block"):
            ground.peer.stream_kv(cache, here, there)  # type: ignore[arg-type]
    with pytest.raises(aiohixl.RegionError, match="block"):
        ground.peer.read_kv(cache, [3, 3], [0, 1])
    for wrong in ([2], [-1], [0, 0], ["0"], 0, [None]):
        with pytest.raises(aiohixl.ConfigError, match="layer"):
            ground.peer.write_kv(cache, [0], [1], layers=wrong)  # type: ignore[arg-type]
    assert not any(layer.any() for layer in layers)
    with pytest.raises(aiohixl.RegionError, match="no KV cache 'other' yet"):
        ground.peer.write_kv(cache, [0], [1], remote="other")
    await ground.peer.write_kv(cache, [0, 7], [7, 0])
    for layer in layers:
        assert (layer[[0, 7]] == 5).all()
        assert not layer[1:7].any()
    await ground.still_good()


# ---- notes ----


async def test_notes_that_are_none(ground: Ground) -> None:
    peer = ground.peer
    for payload in ("text", 5, None, [b"x"]):
        with pytest.raises(aiohixl.ConfigError, match="note: bytes"):
            peer.notify(payload)  # type: ignore[arg-type]
    for topic in ("x" * 257, "é" * 129, 5, None, b"topic", "\ud800"):
        with pytest.raises(aiohixl.ConfigError, match="topic"):
            peer.notify(b"", topic=topic)  # type: ignore[arg-type]
        with pytest.raises(aiohixl.ConfigError, match="topic"):
            peer.write(ground.source, ground.remote, note=b"", topic=topic)  # type: ignore[arg-type]
    for note in (bytes((64 << 10) + 1), array.array("I", range(1 << 15))):
        with pytest.raises(aiohixl.ConfigError, match="note"):
            peer.write(ground.source, ground.remote, note=note)  # type: ignore[arg-type]
    await ground.still_good()
    assert ground.b.stats()["notes_waiting"] == {}


async def test_an_engine_is_started_once(start: Start) -> None:
    engine = await start("once")
    with pytest.raises(aiohixl.ClosedError, match="started before"):
        await engine.start()
    never = aiohixl.Engine("never")
    for use in (never.stats, lambda: never.allocate(8), lambda: never.address):
        with pytest.raises(aiohixl.ClosedError, match="not started"):
            use()
    await never.close()
