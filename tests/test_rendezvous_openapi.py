# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document says what the application does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from aiohixl import wire
from aiohixl.rendezvous import create_app

DOCUMENT: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[1] / "docs" / "openapi.json").read_text(encoding="utf-8")
)
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
METHODS = {"get", "put", "post", "delete", "patch", "head", "options"}


def test_paths_and_methods_are_those_of_the_application() -> None:
    documented = {(path, m.upper()) for path, item in DOCUMENT["paths"].items() for m in item if m in METHODS}
    served = {
        (route.resource.canonical, route.method)
        for route in create_app().router.routes()
        if route.resource is not None and route.method != "*"
    }
    assert documented == served


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_references_lead_somewhere_and_nothing_is_left_over() -> None:
    used = set(references(DOCUMENT))
    components = DOCUMENT["components"]
    defined = {f"#/components/{kind}/{name}" for kind in ("schemas", "responses") for name in components[kind]}
    assert used == defined


@pytest.mark.parametrize("name", ["JoinRequest", "RenewRequest", "Record", "Holder", "WatchEvent"])
def test_the_fields_are_those_of_the_messages(name: str) -> None:
    message = {field.name for field in fields(getattr(wire, name))}
    envelope = {"version", "instance"} & set(SCHEMAS[name]["properties"])
    assert set(SCHEMAS[name]["properties"]) - envelope == message


def test_the_limits_are_those_of_the_messages() -> None:
    assert SCHEMAS["Version"]["const"] == wire.VERSION
    assert SCHEMAS["Name"]["maxLength"] == wire.MAX_NAME_LENGTH
    assert SCHEMAS["Epoch"]["maximum"] == wire.MAX_EPOCH
    assert SCHEMAS["JoinRequest"]["properties"]["epoch"]["maximum"] == wire.MAX_EPOCH_HINT
    ttl = SCHEMAS["Ttl"]
    assert (ttl["minimum"], ttl["maximum"], ttl["default"]) == (wire.MIN_TTL, wire.MAX_TTL, wire.DEFAULT_TTL)
    addresses = SCHEMAS["Addresses"]
    limits = (addresses["maxItems"], addresses["items"]["maxLength"])
    assert limits == (wire.MAX_ADDRESSES, wire.MAX_ADDRESS_LENGTH)
    assert str(wire.MAX_CAPABILITIES) in SCHEMAS["Capabilities"]["description"]
    wait = DOCUMENT["paths"]["/v1/engines/{name}"]["get"]["parameters"][0]
    assert (wait["name"], wait["schema"]["maximum"]) == ("wait", wire.MAX_WAIT)
    assert str(wire.MAX_BODY) in DOCUMENT["components"]["responses"]["TooLarge"]["description"]
