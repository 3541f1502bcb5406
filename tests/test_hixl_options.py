# SPDX-License-Identifier: Apache-2.0
"""What HIXL may be told: every option, good and bad, before anything native runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiohixl
from aiohixl import ConfigError, Engine, links
from aiohixl.config import EngineConfig
from aiohixl.hixl import CODES, OPTIONS, HixlConfig, code_in, explain, format_endpoint, parse_endpoint
from aiohixl.hixl_json import RESOURCE_FIELDS


def build(**options: Any) -> HixlConfig:
    config = EngineConfig.build("x", {"transports": ["hixl"], **options}).hixl
    assert config is not None
    return config


def own(config: HixlConfig) -> dict[str, str]:
    """HIXL's own options."""
    return dict(config.options)


# ---- when an NPU is opened at all ----

#: For each option something that asks for an NPU.
ASKING: dict[str, Any] = {
    "npu_id": 0,
    "link": "roce",
    "traffic_class": 4,
    "service_level": 0,
    "buffer_pool": "4:8",
    "fabric_mem": True,
    "hixl_options": {},
    "hixl_address": "127.0.0.1:0",
    "hixl_library": "/opt/cann/lib64",
    "busy_poll": 1e-5,
}


def test_every_option_is_known_here() -> None:
    assert set(ASKING) == set(OPTIONS)


@pytest.mark.parametrize("option", OPTIONS)
def test_auto_takes_hixl_when_an_option_asks_for_it(option: str) -> None:
    config = EngineConfig.build("x", {option: ASKING[option]})
    assert config.hixl is not None
    assert config.transport_names == ("shm", "hixl", "tcp")


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_without_its_transport(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"{option}: an option of the transport 'hixl'.*\['shm'\]"):
        Engine("x", transports=["shm"], **{option: ASKING[option]})


def test_defaults_ask_for_nothing() -> None:
    defaults: dict[str, Any] = {
        "npu_id": None,
        "link": "auto",
        "traffic_class": None,
        "service_level": None,
        "buffer_pool": None,
        "fabric_mem": False,
        "hixl_options": None,
        "hixl_address": None,
        "hixl_library": None,
        "busy_poll": 0,
    }
    assert set(defaults) == set(OPTIONS)
    for options in (defaults, {"transports": ["shm"], **defaults}, {}):
        config = EngineConfig.build("x", options)
        assert config.hixl is None
        assert "hixl" not in config.transport_names


@pytest.mark.parametrize(
    ("transports", "names"),
    [
        (["hixl"], ("hixl",)),
        (["shm", "hixl"], ("shm", "hixl")),
        (["hixl", "shm"], ("shm", "hixl")),
        (["auto", "hixl"], ("shm", "hixl", "tcp")),
        (["shm"], ("shm",)),
    ],
)
def test_the_transports_of_an_engine(transports: list[str], names: tuple[str, ...]) -> None:
    assert EngineConfig.build("x", {"transports": transports}).transport_names == names


def test_what_hixl_is_told_by_default() -> None:
    assert build() == HixlConfig(
        npu_id=0,
        link="auto",
        by_environment=True,
        options=(),
        host=None,
        port=0,
        library=None,
        busy_poll=0.0,
    )


def test_the_outcome_is_no_option() -> None:
    with pytest.raises(ConfigError, match="no option 'hixl'"):
        Engine("x", hixl=None)


# ---- plain options ----

NONSENSE: tuple[Any, ...] = ("1", b"1", [1], float("nan"), True, 1.5, 1j, -1, 1 << 70)


@pytest.mark.parametrize(
    ("option", "key", "high", "step"),
    [("traffic_class", "RdmaTrafficClass", 255, 4), ("service_level", "RdmaServiceLevel", 7, 1)],
)
def test_roce_classes(option: str, key: str, high: int, step: int) -> None:
    for good in (0, step, high - high % step):
        assert own(build(**{option: good})) == {key: str(good)}
        assert own(build(hixl_options={key: str(good)})) == {key: str(good)}
    for bad in (*NONSENSE, high + 1, *([2, 255] if step > 1 else [])):
        with pytest.raises(ConfigError, match=f"{option}: a whole number from 0 to {high}"):
            build(**{option: bad})
    texts: list[Any] = ["-1", str(high + 1), "x", "", " 4", "²", 4, None, True, {}]
    for text in texts:
        with pytest.raises(ConfigError, match=rf"hixl_options\['{key}'\]: a whole number"):
            build(hixl_options={key: text})


def test_npu_id() -> None:
    assert build(npu_id=7).npu_id == 7
    assert build(npu_id=None).npu_id == 0
    for bad in (*NONSENSE, 65536, "npu:0"):
        with pytest.raises(ConfigError, match="npu_id: a whole number from 0 to 65535"):
            build(npu_id=bad)


@pytest.mark.parametrize("bad", ["HCCS", "rdma", "", None, 5, ["roce"], "ub"])
def test_links_that_are_none(bad: Any) -> None:
    with pytest.raises(ConfigError, match="link: one of auto, hccs, roce, not"):
        build(link=bad)


@pytest.mark.parametrize("good", ["4:8", (4, 8), [4, 8]])
def test_buffer_pools(good: Any) -> None:
    assert own(build(buffer_pool=good)) == {"BufferPool": "4:8"}
    assert own(build(buffer_pool=(0, 0))) == {"BufferPool": "0:0"}
    assert own(build(hixl_options={"BufferPool": good})) == {"BufferPool": "4:8"}


@pytest.mark.parametrize(
    "bad", ["4", "4:", ":8", "4:8:1", "4:x", "-4:8", "4:0", "0:8", (4,), (4, 8, 1), (4, 0), (4.0, 8), (True, 8), 4, {}]
)
def test_buffer_pools_that_are_none(bad: Any) -> None:
    for name, options in (
        ("buffer_pool", {"buffer_pool": bad}),
        (r"hixl_options\['BufferPool'\]", {"hixl_options": {"BufferPool": bad}}),
    ):
        with pytest.raises(ConfigError, match=f"{name}: "):
            build(**options)


def test_fabric_mem() -> None:
    assert own(build(fabric_mem=True)) == {"EnableUseFabricMem": "1"}
    assert own(build(fabric_mem=False)) == {"EnableUseFabricMem": "0"}
    for bad in (1, 0, "1", None):
        with pytest.raises(ConfigError, match="fabric_mem: True or False"):
            build(fabric_mem=bad)
    for options in (
        {"fabric_mem": True, "buffer_pool": "4:8"},
        {"fabric_mem": True, "hixl_options": {"BufferPool": "0:0"}},
        {"buffer_pool": (4, 8), "hixl_options": {"EnableUseFabricMem": "1"}},
    ):
        with pytest.raises(ConfigError, match="buffer_pool: HIXL takes none with fabric_mem=True"):
            build(**options)
    assert own(build(fabric_mem=False, buffer_pool="4:8"))["BufferPool"] == "4:8"


def test_busy_poll() -> None:
    for good in (0, 0.0, 1e-6, 0.001):
        assert build(busy_poll=good).busy_poll == good
    for bad in (*NONSENSE, 0.0011, 1, None):
        with pytest.raises(ConfigError, match=r"busy_poll: seconds from 0 to 0\.001"):
            build(busy_poll=bad)


def test_hixl_library() -> None:
    assert build(hixl_library="/opt/cann/lib64").library == "/opt/cann/lib64"
    for bad in ("", 5, b"/opt", "/opt\0"):
        with pytest.raises(ConfigError, match=r"hixl_library: the path of libcann_hixl\.so"):
            build(hixl_library=bad)


# ---- addresses ----


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:0", "127.0.0.1", 0), ("10.1.2.3:65535", "10.1.2.3", 65535), ("[::1]:26000", "::1", 26000)],
)
def test_where_hixl_listens(text: str, host: str, port: int) -> None:
    config = build(hixl_address=text)
    assert (config.host, config.port) == (host, port)
    assert format_endpoint(host, port) == text


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("10.0.0.1", "has no port.*does not listen"),
        ("::1", "has no port.*does not listen"),
        ("[::1]", "has no port.*does not listen"),
        ("node-7:26000", "an IP address and a port"),
        ("10.0.0.1:65536", "an IP address and a port"),
        ("10.0.0.1:-1", "an IP address and a port"),
        ("10.0.0.1:", "an IP address and a port"),
        (":26000", "an IP address and a port"),
        ("::1:26000", "an IP address and a port"),
        ("[10.0.0.1]:26000", "an IP address and a port"),
        ("[fe80::1%eth0]:26000", "an IP address and a port"),
        ("10.0.0.1:²", "an IP address and a port"),
        ("10.0.0.1:26000\n", "an IP address and a port"),
        ("0.0.0.0:26000", "leads nowhere"),
        ("[::]:26000", "leads nowhere"),
        ("", "an IP address and a port"),
        (5, "an IP address and a port"),
        (b"10.0.0.1:26000", "an IP address and a port"),
    ],
)
def test_where_hixl_cannot_listen(bad: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"hixl_address: .*{why}"):
        build(hixl_address=bad)


def test_endpoints_keep_their_spelling() -> None:
    assert parse_endpoint("[0:0::1]:1", "x") == ("0:0::1", 1)


# ---- HIXL's own options ----


def test_a_key_that_hixl_has_not_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="HIXL has no option 'BuferPool'; did you mean 'BufferPool'"):
        build(hixl_options={"BuferPool": "4:8"})
    with pytest.raises(
        ConfigError, match=r"HIXL has no option 'x'; there are RdmaTrafficClass, .*GlobalResourceConfig"
    ):
        build(hixl_options={"x": "1"})
    with pytest.raises(ConfigError, match="HIXL has no option 5"):
        build(hixl_options={5: "1"})
    for bad in ([], "AutoConnect=1", 5, [("AutoConnect", "1")]):
        with pytest.raises(ConfigError, match="hixl_options: a mapping"):
            build(hixl_options=bad)


@pytest.mark.parametrize(
    ("option", "value", "key", "text"),
    [
        ("traffic_class", 132, "RdmaTrafficClass", "132"),
        ("service_level", 4, "RdmaServiceLevel", "4"),
        ("buffer_pool", "4:8", "BufferPool", "4:8"),
        ("fabric_mem", False, "EnableUseFabricMem", "0"),
    ],
)
def test_a_value_given_twice(option: str, value: Any, key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{option} and hixl_options\['{key}'\] are the same option"):
        build(**{option: value, "hixl_options": {key: text}})


def test_hixl_is_not_to_connect_by_itself() -> None:
    with pytest.raises(ConfigError, match=r"AutoConnect.*connects by itself.*leave it out"):
        build(hixl_options={"AutoConnect": "1"})


@pytest.mark.parametrize("key", ["AutoConnect", "EnableUseFabricMem"])
def test_flags(key: str) -> None:
    for good in ("0", "1") if key == "EnableUseFabricMem" else ("0",):
        assert own(build(hixl_options={key: good})) == {key: good}
    for bad in ("", "2", "true", 1, True, None):
        with pytest.raises(ConfigError, match=rf"hixl_options\['{key}'\]: '0' or '1'"):
            build(hixl_options={key: bad})


ROCE = {"protocol": "roce", "comm_id": "10.10.10.1", "placement": "device"}
HCCS = {"protocol": "hccs", "comm_id": "1", "placement": "device"}
UB = {"protocol": "ub_ctp", "comm_id": "00000000007f020000100000df149001", "placement": "host"}


def local(*endpoints: object, **more: Any) -> dict[str, Any]:
    return {"LocalCommRes": {"version": "1.3", "net_instance_id": "pod1", "endpoint_list": list(endpoints), **more}}


@pytest.mark.parametrize("key", ["LocalCommRes", "GlobalResourceConfig"])
def test_documents(key: str) -> None:
    good: dict[str, Any] = {"version": "1.3"} if key == "LocalCommRes" else {"connect_pool.thread_num": 3}
    assert json.loads(own(build(hixl_options={key: good}))[key]) == good
    spaced = json.dumps(good, indent=2)
    assert own(build(hixl_options={key: spaced})) == {key: spaced}, "a text goes to HIXL as it stands"
    for bad, why in (
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[1]", "a JSON object"),
        ("5", "a JSON object"),
        (5, "a dict, or a str"),
        (None, "a dict, or a str"),
        (b"{}", "a dict, or a str"),
        ({"a": {1, 2}}, "cannot be written as JSON"),
        ({"a": float("nan")}, "cannot be written as JSON"),
        ("[" * 100_000, "not JSON"),
    ):
        with pytest.raises(ConfigError, match=rf"hixl_options\['{key}'\]: {why}"):
            build(hixl_options={key: bad})


@pytest.mark.parametrize(
    ("endpoints", "asked", "link"),
    [
        ([], "auto", "auto"),
        ([ROCE], "auto", "roce"),
        ([ROCE, ROCE], "roce", "roce"),
        ([HCCS], "hccs", "hccs"),
        ([UB, {**UB, "protocol": "uboe"}], "auto", "ub"),
        ([ROCE, HCCS], "auto", "auto"),
        ([], "roce", "roce"),
    ],
)
def test_the_link_of_local_comm_res(endpoints: list[Any], asked: str, link: str) -> None:
    config = build(link=asked, hixl_options=local(*endpoints))
    assert config.link == link
    assert config.by_environment == (not endpoints)


@pytest.mark.parametrize(
    ("link", "endpoints"), [("roce", [HCCS]), ("hccs", [ROCE]), ("hccs", [HCCS, ROCE]), ("roce", [UB])]
)
def test_endpoints_and_link_agree(link: str, endpoints: list[Any]) -> None:
    with pytest.raises(ConfigError, match=f"link='{link}' and hixl_options disagree"):
        build(link=link, hixl_options=local(*endpoints))


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({}, 'needs "version"'),
        ({"version": 1.3}, 'needs "version"'),
        ({"version": ""}, 'needs "version"'),
        (local(net_instance_id="")["LocalCommRes"], "net_instance_id is a string"),
        (local(net_instance_id=5)["LocalCommRes"], "net_instance_id is a string"),
        ({"version": "1.3", "endpoint_list": [ROCE]}, "needs a net_instance_id"),
        (local(endpoint_list={})["LocalCommRes"], "endpoint_list is a list"),
        (local("roce")["LocalCommRes"], r"endpoint_list\[0\]: an object"),
        (local(ROCE, {**ROCE, "protocol": "rdma"})["LocalCommRes"], r"endpoint_list\[1\]: protocol is one of roce"),
        (local({**ROCE, "placement": "npu"})["LocalCommRes"], "placement is one of host, device"),
        (local({**ROCE, "comm_id": "eth0"})["LocalCommRes"], "comm_id of a roce endpoint is an IP address"),
        (local({**UB, "comm_id": ""})["LocalCommRes"], "comm_id is an IP address or an EID"),
        (local({"protocol": "hccs"})["LocalCommRes"], "placement is one of"),
    ],
)
def test_local_comm_res_that_is_none(document: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"hixl_options\['LocalCommRes'\]: .*{why}"):
        build(hixl_options={"LocalCommRes": document})


def test_local_comm_res_of_other_versions_is_hccls_business() -> None:
    config = build(link="roce", buffer_pool="4:8", hixl_options={"LocalCommRes": {"version": "1.2", "server_list": []}})
    assert (config.link, config.by_environment) == ("roce", True)


#: Good values of each field, then bad ones.
FIELDS: dict[str, tuple[list[Any], list[Any]]] = {
    "fabric_memory.max_capacity": ([1, 1024, "128"], [0, 1025, "x", 1.5, True]),
    "fabric_memory.start_address": ([0, 40, "1024"], [-1, 1025, "-1"]),
    "fabric_memory.task_stream_num": ([1, "8"], [0, 9, None]),
    "fabric_memory.enable_aicpu_unfold": ([True, False], [1, "true"]),
    "connect_pool.thread_num": ([1, "64"], [0, 65]),
    "connect_pool.task_queue_capacity": ([1, 65535], [0, 65536]),
    "comm_resource_config.protocol_desc": (
        ["roce:device", ["hccs:device", "roce:host"], "ub_ctp"],
        ["", [], "rdma", "roce:npu", [5], {}, "roce:"],
    ),
    "comm_resource_config.listen_port": ([1, "65535"], [0, 65536, "port"]),
    "comm_resource_config.qos": ([0, 7], [-1, 8]),
    "comm_resource_config.max_active_channels": ([1, "8192"], [0, 8193]),
    "local_comm_res_path": (["/etc/local.json"], ["", 5, "a\0b"]),
    "channel_pool.max_channel": ([1, "512"], [0, 513]),
    "channel_pool.high_waterline": ([], [0, 1, "x", True, None]),
    "channel_pool.low_waterline": ([], [0, "1.0", -0.5]),
}


def test_every_field_is_known_here() -> None:
    assert set(FIELDS) == set(RESOURCE_FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_fields_of_the_resources(name: str) -> None:
    good, bad = FIELDS[name]
    group, _, field = name.partition(".")
    for value in good:
        for document in ({name: value}, *([{group: {field: value}}] if field else [])):
            assert json.loads(own(build(hixl_options={"GlobalResourceConfig": document}))["GlobalResourceConfig"]) == (
                document
            )
    for value in bad:
        with pytest.raises(ConfigError, match=rf"hixl_options\['GlobalResourceConfig'\]: {re.escape(name)} is "):
            build(hixl_options={"GlobalResourceConfig": {name: value}})


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({"connect_pool.thread_nun": 2}, "no field 'connect_pool.thread_nun'; did you mean 'connect_pool.thread_num'"),
        ({"connect_pool": {"threads": 2}}, r"no field 'connect_pool\.threads'"),
        ({"connect_pool": 5}, "no field 'connect_pool'"),
        ({"zzz": 5}, "no field 'zzz'; there are fabric_memory"),
        ({"connect_pool": {"thread_num": 2}, "connect_pool.thread_num": 3}, "stands there twice"),
        ({"channel_pool.high_waterline": "0.3"}, "go together"),
        ({"channel_pool.low_waterline": 0.1}, "go together"),
        ({"channel_pool": {"high_waterline": "0.3", "low_waterline": "0.3"}}, "go together, and the low one is lower"),
    ],
)
def test_resources_that_are_none(document: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        build(hixl_options={"GlobalResourceConfig": document})


def test_water_lines() -> None:
    build(hixl_options={"GlobalResourceConfig": {"channel_pool": {"high_waterline": "0.3", "low_waterline": 0.1}}})


def test_protocol_desc_decides_the_link() -> None:
    desc = {"GlobalResourceConfig": {"comm_resource_config.protocol_desc": ["roce:device", "roce:host"]}}
    assert build(hixl_options=desc).link == "roce"
    with pytest.raises(ConfigError, match="link='hccs' and hixl_options disagree"):
        build(link="hccs", hixl_options=desc)


@pytest.mark.parametrize(
    "options", [local(), {"GlobalResourceConfig": {"comm_resource_config.protocol_desc": "hccs:device"}}]
)
def test_no_buffer_pool_where_hixl_goes_by_endpoints(options: dict[str, Any]) -> None:
    assert own(build(buffer_pool="0:0", hixl_options=options))["BufferPool"] == "0:0"
    with pytest.raises(ConfigError, match="HIXL takes none but 0:0"):
        build(buffer_pool="4:8", hixl_options=options)


# ---- the link of a process ----


class Owner:
    """An engine, as far as its link is concerned."""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv(links.VARIABLE, raising=False)
    yield monkeypatch
    assert links.VARIABLE not in os.environ or os.environ[links.VARIABLE] == "0"


def test_roce_sets_the_variable_while_it_lives(environment: pytest.MonkeyPatch) -> None:
    one, two = Owner(), Owner()
    links.claim(one, "one", "roce", True)
    assert os.environ[links.VARIABLE] == "1"
    links.claim(two, "two", "roce", True)
    links.release(one)
    assert os.environ[links.VARIABLE] == "1"
    links.release(two)
    links.release(two)
    assert links.VARIABLE not in os.environ


def test_the_users_value_comes_back(environment: pytest.MonkeyPatch) -> None:
    environment.setenv(links.VARIABLE, "0")
    owner = Owner()
    links.claim(owner, "one", "roce", True)
    assert os.environ[links.VARIABLE] == "1"
    links.release(owner)
    assert os.environ[links.VARIABLE] == "0"


@pytest.mark.parametrize(("first", "second"), [("roce", "hccs"), ("hccs", "roce"), ("auto", "roce"), ("roce", "auto")])
def test_links_that_cannot_share_a_process(environment: pytest.MonkeyPatch, first: str, second: str) -> None:
    one, two = Owner(), Owner()
    links.claim(one, "one", first, True)
    with pytest.raises(ConfigError, match=f"engine 'two': link='{second}', but engine 'one' .* link='{first}'"):
        links.claim(two, "two", second, True)
    links.claim(two, "two", second, False)  # its options name the protocols
    links.release(two)
    links.release(one)
    links.claim(two, "two", second, True)
    links.release(two)


def test_hccs_and_auto_share_a_process(environment: pytest.MonkeyPatch) -> None:
    one, two = Owner(), Owner()
    links.claim(one, "one", "hccs", True)
    links.claim(two, "two", "auto", True)
    links.release(one)
    links.release(two)


def test_hccs_against_the_environment(environment: pytest.MonkeyPatch) -> None:
    owner = Owner()
    environment.setenv(links.VARIABLE, "1")
    with pytest.raises(ConfigError, match=f"link='hccs', but {links.VARIABLE}=1 in the environment"):
        links.claim(owner, "one", "hccs", True)
    for link, bound in (("hccs", False), ("auto", True), ("roce", True)):
        links.claim(owner, "one", link, bound)
        links.release(owner)
        assert os.environ[links.VARIABLE] == "1"
    environment.delenv(links.VARIABLE)


def test_a_dropped_owner_has_no_claim(environment: pytest.MonkeyPatch) -> None:
    owner = Owner()
    links.claim(owner, "one", "roce", True)
    del owner
    other = Owner()
    links.claim(other, "two", "hccs", False)
    links.release(other)
    assert links.VARIABLE not in os.environ


def test_a_forked_child_has_no_claims(environment: pytest.MonkeyPatch) -> None:
    program = (
        "import os\nfrom aiohixl import links\n"
        "class O: pass\n"
        "o, p = O(), O()\n"
        "links.claim(o, 'one', 'roce', True)\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    assert links.VARIABLE not in os.environ\n"
        "    links.claim(p, 'two', 'hccs', True)\n"
        "    os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), os.environ[links.VARIABLE])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["7", "1"], done.stderr


# ---- what HIXL answers ----


def test_answers_are_explained() -> None:
    for code, (name, advice) in CODES.items():
        text = explain(code, " words of HIXL\n")
        assert text == f"HIXL answered {code} ({name}): words of HIXL; {advice}"
        assert code_in(f"connect: {text}") == code
    assert explain(4294967295, "").startswith("HIXL answered 4294967295 (not documented); ")
    assert code_in("nobody answered 5") == 0


async def test_hixl_is_needed_for_its_own_things() -> None:
    async with Engine("a") as a:
        assert a.hixl_address is None
        with pytest.raises(ConfigError, match="connect_raw needs HIXL"):
            await a.connect_raw("127.0.0.1:26000", regions={"x": (4096, 64)})
        with pytest.raises(ConfigError, match=r"notifies\(\) needs HIXL"):
            a.notifies()
        for device, index in (("npu", 0), ("npu:3", 3)):
            with pytest.raises(aiohixl.RegionError, match=rf"no NPU: .*transports=\['hixl'\], npu_id={index}.*\[npu\]"):
                a.allocate(4096, device=device)
        for bad in ("gpu", "npu:", "npu:x", "npu:-1", "cpu:0", "", 0, None):
            with pytest.raises(ConfigError, match=r"allocate: device is 'cpu', 'npu' or 'npu:N'"):
                a.allocate(4096, device=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "regions", "why"),
    [
        ("node:1", {}, "an IP address and a port"),
        ("10.0.0.1:0", {}, "the port that the peer listens on"),
        ("10.0.0.1:1", [], "regions maps names"),
        ("10.0.0.1:1", {"": (1, 1)}, "a region's name"),
        ("10.0.0.1:1", {"a\nb": (1, 1)}, "a region's name"),
        ("10.0.0.1:1", {5: (1, 1)}, "a region's name"),
        ("10.0.0.1:1", {"a": 5}, r"\(addr, nbytes\)"),
        ("10.0.0.1:1", {"a": (1,)}, r"\(addr, nbytes\)"),
        ("10.0.0.1:1", {"a": (0, 1)}, "an address and a number of bytes"),
        ("10.0.0.1:1", {"a": (1, 0)}, "an address and a number of bytes"),
        ("10.0.0.1:1", {"a": (1, -1)}, "an address and a number of bytes"),
        ("10.0.0.1:1", {"a": (1.5, 1)}, "an address and a number of bytes"),
        ("10.0.0.1:1", {"a": ((1 << 64) - 1, 2)}, "an address and a number of bytes"),
        ("10.0.0.1:1", {"a": (1, 1, "gpu")}, "'npu' or 'cpu'"),
    ],
)
async def test_raw_regions_that_are_none(address: str, regions: Any, why: str) -> None:
    async with Engine("a") as a:
        with pytest.raises(ConfigError, match=f"connect_raw: .*{why}"):
            await a.connect_raw(address, regions=regions)


async def test_copies_of_host_regions() -> None:
    """`upload` and `download` are for every region; see the tests of NPUs for those of an NPU."""
    async with Engine("a") as a:
        for nbytes in (100, 1 << 20):
            data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
            region = a.allocate(nbytes + 7)
            assert region.device == "cpu"
            await region.upload(data, 7)
            assert await region.download(7) == data.tobytes()
            assert await region.download(0, 7) == bytes(7)
            assert await region.download(nbytes + 7) == b""
            back = bytearray(nbytes - 50)
            await region.download_into(back, 57)
            assert back == data[50:].tobytes()
            for offset, size in ((-1, 8), (nbytes, 8), (0, -1), (0, nbytes + 8), ("0", 8), (0, 1.5), (True, 1)):
                with pytest.raises(aiohixl.RegionError, match="are outside of its"):
                    await region.download(offset, size)  # type: ignore[arg-type]
            for call in (region.upload, region.download_into):
                with pytest.raises(aiohixl.RegionError, match="are outside of its"):
                    await call(back, 58)
                with pytest.raises(aiohixl.RegionError, match="contiguous memory"):
                    await call(data.copy()[::2])
            with pytest.raises(aiohixl.RegionError, match="read-only"):
                await region.download_into(b"12345678")
        with pytest.raises(aiohixl.RegionError, match="it is read-only memory"):
            await a.register(b"12345678", access="r").upload(b"1")
        await region.deregister()
        with pytest.raises(aiohixl.RegionError, match="it is deregistered"):
            await region.download()


def test_a_misspelt_key_of_local_comm_res() -> None:
    text = r"LocalCommRes.*there is no 'endpont_list'; did you mean 'endpoint_list'\?"
    with pytest.raises(ConfigError, match=text):
        build(hixl_options={"LocalCommRes": {"version": "1.3", "net_instance_id": "pod1", "endpont_list": [ROCE]}})
    with pytest.raises(ConfigError, match=r"there is no 'protocoll'; did you mean 'protocol'\?"):
        build(hixl_options=local({**ROCE, "protocoll": "roce"}))
    build(hixl_options=local(ROCE, future_key=1))  # a newer HIXL's
