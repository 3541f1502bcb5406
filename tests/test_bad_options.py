# SPDX-License-Identifier: Apache-2.0
"""What a caller can get wrong about buffers, options, layouts, notes and addresses: the documented exception."""

from __future__ import annotations

import array
import contextlib
import errno
import mmap
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from conftest import Start
from ground import Ground

import aiohixl
from aiohixl.config import EngineConfig


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
        (["hixl", "verbs"], "'hixl' or 'verbs', not both"),
        (["tcp", "tpc"], "did you mean 'tcp'"),
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


@pytest.mark.parametrize("option", [{"streams": 2}, {"checksum": True}, {"zerocopy": True}], ids=str)
def test_options_of_a_transport_that_is_not_there(option: dict[str, Any]) -> None:
    with pytest.raises(
        aiohixl.ConfigError, match=rf"{next(iter(option))}: an option of the transport 'tcp'.*\['shm'\]"
    ):
        aiohixl.Engine("x", transports=["shm"], **option)


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ({"verbs_device": ""}, "the name of an RDMA device"),
        ({"verbs_device": 5}, "the name of an RDMA device"),
        ({"verbs_device": "x" * 64}, "the name of an RDMA device"),
        ({"verbs_gid_index": -1}, "a whole number from 0 to 255"),
        ({"verbs_gid_index": 256}, "a whole number from 0 to 255"),
        ({"verbs_gid_index": True}, "a whole number from 0 to 255"),
        ({"verbs_timeout": 0}, "seconds from 0.001 to 60"),
        ({"verbs_timeout": 61}, "seconds from 0.001 to 60"),
        ({"verbs_timeout": float("nan")}, "seconds from 0.001 to 60"),
        ({"verbs_timeout": "1"}, "seconds from 0.001 to 60"),
        ({"traffic_class": 256}, "a whole number from 0 to 255"),
        ({"service_level": 8}, "a whole number from 0 to 7"),
        ({"busy_poll": 1.0}, "seconds from 0 to 0.001"),
    ],
    ids=str,
)
def test_options_of_rdma_devices(option: dict[str, Any], why: str) -> None:
    with pytest.raises(aiohixl.ConfigError, match=rf"{next(iter(option))}: {why}"):
        aiohixl.Engine("x", transports=["verbs"], **option)
    with pytest.raises(aiohixl.ConfigError, match=r"an option of the transport '(verbs|hixl)'"):
        aiohixl.Engine("x", transports=["tcp"], **option)


async def test_rdma_without_a_device_says_what_is_missing() -> None:
    with pytest.raises(aiohixl.ConfigError, match=r"engine 'x': .*(libibverbs|RDMA device|no port)"):
        await aiohixl.Engine("x", transports=["verbs"], verbs_device="none0").start()


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


# ---- whole numbers, hosts, spans, and what the messages name ----


async def test_numbers_of_numpy_are_whole_numbers(ground: Ground) -> None:
    span = ground.remote[np.int64(3) : np.uint8(10)]
    assert (span.offset, span.nbytes) == (3, 7)
    assert type(span.offset) is type(span.nbytes) is int
    assert len(ground.source[np.int32(8) :][: np.int64(4)]) == 4
    region = await ground.a.allocate(np.int64(4096))  # type: ignore[arg-type]
    assert region.nbytes == 4096
    await region.revoke(spans=np.array([[0, 10], [20, 5]]))
    region.grant(spans=[(np.int64(0), np.int64(10))])  # type: ignore[list-item]
    for bad in (True, np.True_, 1.0, "1", np.float64(1), 1 << 70):
        for key in (slice(bad, None), slice(0, bad)):
            with pytest.raises(aiohixl.RegionError, match="is outside"):
                ground.remote[key]
    with pytest.raises(aiohixl.RegionError, match="allocate"):
        ground.a.allocate(np.float64(4096))  # type: ignore[arg-type]
    await ground.still_good()


@pytest.mark.parametrize(("advertise", "told"), [("[::1]", "[::1]"), ("::1", "[::1]"), ("node-7", "node-7")])
async def test_the_advertised_host_stands_in_the_address(start: Start, advertise: str, told: str) -> None:
    engine = await start("a", address="127.0.0.1:0", advertise=advertise)
    assert re.fullmatch(rf"tcp://{re.escape(told)}:\d+", engine.address.split(",")[1])


@pytest.mark.parametrize(
    "host", ["a b", " a", "a\n", "a\t", "a\x7f", "a,b", "[[::1]]", "10.0.0.1:7000", "tcp://a", "[]"]
)
def test_advertised_hosts_that_are_none(host: str) -> None:
    with pytest.raises(aiohixl.ConfigError, match="advertise"):
        aiohixl.Engine("x", address="0.0.0.0:0", advertise=host)


def test_advertise_goes_with_an_address() -> None:
    with pytest.raises(aiohixl.ConfigError, match="needs an address to listen on"):
        aiohixl.Engine("x", advertise="10.0.0.1")


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "[::0]", "[0:0:0:0:0:0:0:0]", "[::ffff:0.0.0.0]", "0", "0.0"])
def test_every_spelling_of_a_wildcard_needs_advertise(host: str) -> None:
    with pytest.raises(aiohixl.ConfigError, match="every interface"):
        aiohixl.Engine("x", address=f"{host}:0")
    aiohixl.Engine("x", address=f"{host}:0", advertise="10.0.0.1")
    aiohixl.Engine("x", address="[::1]:0")


def test_taking_over_is_asked_for_in_the_right_form() -> None:
    for force in (1, 0, None, "yes"):
        with pytest.raises(aiohixl.ConfigError, match="force: True or False"):
            aiohixl.Engine("x", force=force)
    for replace in ("0" * 31, "0" * 33, "A" * 32, "g" * 32, "0" * 32 + "\n"):
        with pytest.raises(aiohixl.ConfigError, match=r"replace: .*32 lower-case"):
            aiohixl.Engine("x", replace=replace)
    aiohixl.Engine("x", force=True, replace="0123456789abcdef" * 2)


async def test_arguments_of_registering(ground: Ground) -> None:
    a = ground.a
    for buffers in ([bytearray(8)], bytearray(8), None):
        with pytest.raises(aiohixl.ConfigError, match="a mapping of names to buffers"):
            a.register_many(buffers)  # type: ignore[arg-type]
    for axis in ("0", None, 0.0, True):
        with pytest.raises(aiohixl.ConfigError, match="block_axis is the number of an axis"):
            a.register_kv(kv_layers(), "never", block_axis=axis)  # type: ignore[arg-type]
    assert a.register_kv(kv_layers(), "axis", block_axis=np.int64(0)).layout.nblocks == 8  # type: ignore[arg-type]
    await ground.still_good()


async def test_spans_that_are_none(ground: Ground) -> None:
    target = ground.target
    other = ground.b.allocate(64)
    for spans in ((0, 10), 5, target[0:10], target, [None], "ab", ["ab"], [(0,)], [(0, 1, 2)], [(0.0, 1)], [(True, 1)]):
        with pytest.raises(aiohixl.RegionError, match=r"pairs or slices of it, as in spans=\[\(0, 10\)\]"):
            await target.revoke(spans=spans)  # type: ignore[arg-type]
        with pytest.raises(aiohixl.RegionError, match=r"pairs or slices of it, as in spans=\[\(0, 10\)\]"):
            target.grant(spans=spans)  # type: ignore[arg-type]
    for outside in ([(0, ground.target.nbytes + 1)], [(-1, 1)], [(0, 1 << 70)]):
        with pytest.raises(aiohixl.RegionError, match="outside"):
            await target.revoke(spans=outside)
    with pytest.raises(aiohixl.RegionError, match="is not a span of"):
        await target.revoke(spans=[other[0:10]])
    await ground.still_good()


async def test_one_memory_for_two_parts_is_read_only(ground: Ground) -> None:
    a, (x, y) = ground.a, kv_layers()
    for layers, first, second in (
        ([(x, x)], "layer 0 part 'k'", "layer 0 part 'v'"),
        ([x, y, x], "layer 0 part 'kv'", "layer 2 part 'kv'"),
        ([y, x[:], x.view()], "layer 1 part 'kv'", "layer 2 part 'kv'"),
    ):
        for access in ("w", "rw"):
            with pytest.raises(aiohixl.ConfigError, match=f"{first} and {second} are the same memory"):
                a.register_kv(layers, "twice", access=access)
    a.register_kv([(x, x)], "twice", access="r")
    both = np.zeros((8, 2, 4, 2), np.float32)
    a.register_kv([(both[:, 0], both[:, 1])], "interleaved")
    await ground.still_good()


async def test_messages_name_what_has_no_name(ground: Ground) -> None:
    a = ground.a
    with pytest.raises(aiohixl.RegionError, match=r"^the buffer \(uint8, shape \(4,\)\) is read-only memory"):
        a.register(b"1234")
    with pytest.raises(aiohixl.RegionError, match=r"^the buffer \(float64, shape \(8, 4\)\) is not contiguous"):
        a.register(np.zeros((8, 8))[:, :4])
    cache = a.register_kv(kv_layers(), "kv")
    for again in (lambda: a.register_kv(kv_layers(), "kv"), lambda: a.allocate(8, "kv")):
        with pytest.raises(aiohixl.RegionError, match="'kv' is registered already: a KV cache of that name"):
            again()
    await cache.deregister()
    a.allocate(8, "kv")
    with pytest.raises(aiohixl.RegionError, match="'kv' is registered already: <Region 'kv' 8 bytes>"):
        a.allocate(8, "kv")


async def test_a_refusal_says_who_refused(start: Start) -> None:
    a, b = await start("a", secret="one"), await start("b", secret="two")
    for engine, why, status in ((b, "secrets differ", "AUTH"), (a, "this engine itself", "MISMATCH")):
        for address in engine.address.split(","):
            with pytest.raises(aiohixl.PeerMismatchError) as refused:
                await a.connect(address)
            assert str(refused.value).startswith(f"connect to {address!r} at {address}: ")
            assert why in str(refused.value)
            assert refused.value.native_status == status  # type: ignore[attr-defined]
            assert isinstance(refused.value.native_errno, int)  # type: ignore[attr-defined]


async def test_no_private_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(aiohixl.ConfigError, match="remove it, or set XDG_RUNTIME_DIR or TMPDIR") as refused:
        await aiohixl.Engine("x").start()
    assert str(refused.value).count("/tmp/aiohixl-") == 1


@pytest.mark.parametrize("streams", [0, 17, True, 1.0, "2"])
def test_streams(streams: object) -> None:
    with pytest.raises(aiohixl.ConfigError, match="streams: a whole number from 1 to 16"):
        aiohixl.Engine("x", streams=streams)


@pytest.mark.parametrize("checksum", [1, None, "yes"])
def test_checksum(checksum: object) -> None:
    with pytest.raises(aiohixl.ConfigError, match="checksum: True or False"):
        aiohixl.Engine("x", checksum=checksum)


def test_options_of_verbs_as_the_device_gets_them() -> None:
    options = {"verbs_timeout": 0.5, "traffic_class": 106, "service_level": 3, "busy_poll": 0.0002}
    config = EngineConfig.build("x", {"transports": ["verbs"], **options})
    assert config.verbs is not None
    assert config.hixl is None
    assert (config.verbs.traffic_class, config.verbs.service_level) == (106, 3)
    # Seven attempts of 4.096 us x 2^n each: the n that fits, and the next one would not.
    n = config.verbs.timeout
    assert 7 * 4.096e-6 * 2**n <= 0.5 < 7 * 4.096e-6 * 2 ** (n + 1)
