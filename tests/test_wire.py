# SPDX-License-Identifier: Apache-2.0
"""The rendezvous messages: what is accepted, what is refused and which field is blamed."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiohixl import wire
from aiohixl.errors import ConfigError
from aiohixl.wire import (
    ErrorBody,
    Holder,
    JoinRequest,
    Record,
    RenewRequest,
    WatchEvent,
    WireError,
    check_name,
    decode_name,
    derive_bearer,
    dump_message,
    encode_name,
    load_message,
)

INC = "0123456789abcdef" * 2
RECORD = Record("decode-0", INC, 7, ("tcp://10.0.0.1:1", "unix:/run/x y"), {"shm": True}, 12.5, 3.0)
ODD_NAMES = [
    *("a b", " ", 'quo"te', "it's", "ümläut", "日本語", "😀", "100%", "%2F", "%41", "a+b", "a?b#c&d=e"),
    *("back\\slash", "a;b", "{name}", "...", "a:b@c", "[::1]", "~", "x" * 128, "é" * 128),
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_survive_their_url(name: str) -> None:
    segment = encode_name(name)
    assert segment.isascii()
    assert not set(segment) & set(' /?#"\\')
    assert decode_name(segment) == name


@given(st.text(min_size=1, max_size=20))
def test_any_text_is_a_name_that_round_trips_or_a_wire_error(text: str) -> None:
    try:
        segment = encode_name(text)
    except WireError as exc:
        field, message = exc.field, str(exc)
    else:
        assert decode_name(segment) == text
        return
    assert field == "name"
    assert message.encode("utf-8")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x" * 129,
        "a/b",
        ".",
        "..",
        "a\nb",
        "a\x00",
        "\x7f",
        "\u202e",
        "\ud800",
        "a\tb",
        5,
        None,
        b"x",
        ["x"],
    ],
)
def test_names_that_are_refused(name: object) -> None:
    with pytest.raises(WireError, match=r"^name: ") as caught:
        check_name(name)
    assert caught.value.field == "name"
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("segment", ["%FF", "%zz", "%", "%4", "a%2Fb", "%00", "%C3", "\udcff", "%ED%A0%80", "%2E%2E"])
def test_url_segments_that_are_no_name(segment: str) -> None:
    with pytest.raises(WireError) as caught:
        decode_name(segment)
    assert caught.value.field == "name"


def test_records_round_trip() -> None:
    assert Record.from_json(json.loads(dump_message(RECORD.to_json()))) == RECORD


def test_join_requests_round_trip_and_leave_out_what_is_unset() -> None:
    request = JoinRequest(INC, ("a",), {"k": [1, None, 2.5, {"x": "y"}]}, 5, epoch=3, replace="f" * 32, force=True)
    assert JoinRequest.from_json(json.loads(dump_message(request.to_json())), strict=True) == request
    assert set(JoinRequest(INC).to_json()) == {"incarnation", "addresses", "capabilities", "ttl", "force"}


def test_other_messages_round_trip() -> None:
    holder = Holder(INC, 9, 1.0, 0.5, 9.5)
    error = ErrorBody("name_taken", "no", "name", holder)
    event = WatchEvent("left", (RECORD,), "expired")
    for message in (RenewRequest(INC), holder, error, event, WatchEvent("snapshot", (RECORD, RECORD))):
        assert type(message).from_json(json.loads(dump_message(message.to_json()))) == message
    assert event.record == RECORD
    assert INC in holder.describe()


BAD_JOINS: list[tuple[str, dict[str, Any]]] = [
    ("incarnation", {"incarnation": None}),
    ("incarnation", {"incarnation": "0" * 31}),
    ("incarnation", {"incarnation": "A" * 32}),
    ("incarnation", {"incarnation": "0" * 32 + "\n"}),
    ("incarnation", {"incarnation": ["0" * 32]}),
    ("ttl", {"ttl": 0.5}),
    ("ttl", {"ttl": 3601}),
    ("ttl", {"ttl": "10"}),
    ("ttl", {"ttl": True}),
    ("ttl", {"ttl": None}),
    ("ttl", {"ttl": float("nan")}),
    ("ttl", {"ttl": float("inf")}),
    ("ttl", {"ttl": 10**400}),
    ("ttl", {"ttl": []}),
    ("epoch", {"epoch": -1}),
    ("epoch", {"epoch": 1.5}),
    ("epoch", {"epoch": True}),
    ("epoch", {"epoch": "1"}),
    ("epoch", {"epoch": 2**52 + 1}),
    ("epoch", {"epoch": 10**5000}),
    ("replace", {"replace": "x"}),
    ("replace", {"replace": 1}),
    ("force", {"force": 1}),
    ("force", {"force": None}),
    ("addresses", {"addresses": "tcp://x"}),
    ("addresses", {"addresses": {"a": 1}}),
    ("addresses", {"addresses": ["a"] * 17}),
    ("addresses[1]", {"addresses": ["a", "b" * 513]}),
    ("addresses[0]", {"addresses": [""]}),
    ("addresses[0]", {"addresses": [None]}),
    ("addresses[0]", {"addresses": ["a\nb"]}),
    ("addresses[0]", {"addresses": ["\ud800"]}),
    ("capabilities", {"capabilities": []}),
    ("capabilities", {"capabilities": None}),
    ("capabilities", {"capabilities": {"a": "x" * 8192}}),
    ("capabilities", {"capabilities": {"a": "é" * 4096}}),
    ("capabilities", {"capabilities": {"a": float("inf")}}),
    ("capabilities", {"capabilities": {"a": [float("nan")]}}),
    ("capabilities", {"capabilities": {"a": 2**64}}),
    ("capabilities", {"capabilities": {"a": "\ud800"}}),
    ("capabilities", {"capabilities": {"\udfff": 1}}),
    ("capabilities", {"capabilities": {"a": (1,)}}),
    ("capabilities", {"capabilities": {1: 1}}),
    ("capabilities", {"capabilities": {"a": object()}}),
]


@pytest.mark.parametrize(("field", "change"), BAD_JOINS)
def test_a_bad_join_names_its_field(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(WireError) as caught:
        JoinRequest.from_json({"incarnation": INC, **change}, strict=True)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert len(str(caught.value)) < 300


def test_nesting_is_bounded_in_capabilities() -> None:
    deep: Any = 1
    for _ in range(15):
        deep = [deep]
    JoinRequest(INC, capabilities={"a": deep[0]})
    cyclic: dict[str, Any] = {}
    cyclic["again"] = cyclic
    for capabilities in ({"a": [[deep]]}, cyclic):
        with pytest.raises(WireError, match="16 levels"):
            JoinRequest(INC, capabilities=capabilities)


@pytest.mark.parametrize("value", [None, 1, "x", [], [("incarnation", INC)]])
def test_a_message_is_an_object(value: object) -> None:
    with pytest.raises(WireError) as caught:
        JoinRequest.from_json(value, where="body")
    assert caught.value.field == "body"


@pytest.mark.parametrize("missing", ["name", "incarnation", "epoch"])
def test_a_missing_field_is_named(missing: str) -> None:
    value = RECORD.to_json()
    del value[missing]
    with pytest.raises(WireError, match="is missing") as caught:
        Record.from_json(value)
    assert caught.value.field == missing


def test_unknown_fields_are_refused_in_requests_and_ignored_in_answers() -> None:
    with pytest.raises(WireError) as caught:
        RenewRequest.from_json({"version": 1, "incarnation": INC, "tll": 5}, strict=True)
    assert caught.value.field == "tll"
    assert Record.from_json({**RECORD.to_json(), "later": 1}) == RECORD


BAD_EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("kind", {"kind": "gone"}),
    ("kind", {"kind": 1}),
    ("records", {"records": None}),
    ("records", {"records": []}),
    ("reason", {"reason": "bored"}),
    ("records", {"records": [1]}),
]


@pytest.mark.parametrize(("field", "change"), BAD_EVENTS)
def test_a_bad_event_names_its_field(field: str, change: dict[str, Any]) -> None:
    good = WatchEvent("left", (RECORD,), "left").to_json()
    with pytest.raises(WireError) as caught:
        WatchEvent.from_json({**good, **change})
    assert caught.value.field == field


BAD_BODIES: list[tuple[str, bytes]] = [
    ("body", b""),
    ("body", b"{"),
    ("body", b"[]"),
    ("body", b"null"),
    ("body", b'"x"'),
    ("body", b"\xff\xfe{}"),
    ("body", b"\xef\xbb\xbf{}"),
    ("body", b'{"version":1,"a":NaN}'),
    ("body", b'{"version":1,"a":-Infinity}'),
    ("body", b'{"version":1,"a":' + b"9" * 5000 + b"}"),
    ("body", b"[" * 60000),
    ("body", b'{"a":' * 12000),
    ("body", b" " * (wire.MAX_BODY + 1)),
    ("version", b"{}"),
    ("version", b'{"version":2}'),
    ("version", b'{"version":"1"}'),
    ("version", b'{"version":true}'),
    ("version", b'{"version":1.0}'),
    ("a", b'{"version":1,"b":{"a":1,"a":2}}'),
    ("\\ud800", b'{"version":1,"\\ud800":1,"\\ud800":2}'),
]


@pytest.mark.parametrize(("field", "body"), BAD_BODIES, ids=lambda value: repr(value)[:40])
def test_bad_bodies(field: str, body: bytes) -> None:
    with pytest.raises(WireError) as caught:
        load_message(body)
    assert caught.value.field == field
    str(caught.value).encode("utf-8")


def test_a_good_body() -> None:
    assert load_message(b' {"version": 1, "x": [1.5e3]} ') == {"version": 1, "x": [1500.0]}


def test_the_largest_join_fits_into_a_body() -> None:
    request = JoinRequest(INC, ("😀" * 512,) * 16, {"a": "x" * (wire.MAX_CAPABILITIES - 8)}, epoch=2**52)
    assert len(dump_message({"version": 1, **request.to_json()})) <= wire.MAX_BODY


@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_a_wire_error(body: bytes) -> None:
    field = ""
    try:
        message = load_message(body)
    except WireError as exc:
        field = exc.field
    else:
        assert message["version"] == 1
        return
    assert field


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda c: st.lists(c) | st.dictionaries(st.text(), c),
)


@settings(max_examples=40)
@pytest.mark.parametrize("message", [JoinRequest, RenewRequest, Record, Holder, ErrorBody, WatchEvent])
@given(data=st.data())
def test_random_json_is_a_message_or_a_wire_error(message: type[Any], data: st.DataObject) -> None:
    keys = st.sampled_from(sorted(message.__dataclass_fields__)) | st.text(max_size=3)
    value = data.draw(JSON | st.dictionaries(keys, JSON | st.just(INC)))
    try:
        read = message.from_json(value, strict=True)
    except WireError as exc:
        str(exc).encode("utf-8")
        exc.field.encode("utf-8")
    else:
        dump_message(read.to_json())


def test_wire_errors_pickle_with_their_field() -> None:
    with pytest.raises(WireError) as caught:
        check_name("")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.field) == (str(caught.value), "name")


def test_the_bearer_is_derived_one_way_and_is_stable() -> None:
    bearer = derive_bearer("s3cret")
    assert bearer == derive_bearer(b"s3cret")
    assert len(bearer) == 64
    assert int(bearer, 16)
    assert bearer != derive_bearer("s3cret2")
    assert "s3cret" not in bearer
    # Fixed for ever: engines of different releases share one rendezvous.
    assert derive_bearer("aiohixl") == "67f557af79da7861c67fbfcd6d80107c9eff8266c69a21847d4b66f05d94f5c4"
    for empty in ("", b""):
        with pytest.raises(ConfigError, match="empty"):
            derive_bearer(empty)
