# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces with a wire between them: two machines, as far as TCP can tell.

Each has an address of its own that is not the wire's, IPv4 and IPv6, and reaches the other's by a route.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Side = Literal["a", "b"]
CLONE_NEWNET = 0x40000000
_serial = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Why namespaces cannot be made here, in one line; empty: they can."""
    if os.geteuid() != 0:
        return "network namespaces: needs root"
    name = f"hx-try-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        try:
            _run("ip", "-n", name, "link", "add", "wire", "type", "veth", "peer", "name", "eriw")
        finally:
            _run("ip", "netns", "del", name)
    except (OSError, RuntimeError) as exc:
        return f"network namespaces: {exc}"
    return ""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def _enter(fd: int) -> None:
    if _libc.setns(fd, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


class Wire:
    """The two namespaces, ``a`` and ``b``. Made by `wire`."""

    def __init__(self, mtu: int) -> None:
        self.mtu = mtu
        stem = f"hx-{os.getpid()}-{next(_serial)}"
        self.names: dict[Side, str] = {"a": f"{stem}-a", "b": f"{stem}-b"}

    def address(self, side: Side, family: int) -> str:
        """The side's address, as it stands in ``address=``."""
        number = 1 if side == "a" else 2
        return f"10.99.{number}.1" if family == 4 else f"[fd99:{number}::1]"

    def ip(self, side: Side, *command: str) -> None:
        _run("ip", "-n", self.names[side], *command)

    def make(self) -> None:
        for name in self.names.values():
            _run("ip", "netns", "add", name)
        a, b = self.names["a"], self.names["b"]
        _run("ip", "link", "add", "wire", "netns", a, "type", "veth", "peer", "name", "wire", "netns", b)
        for side in self.names:
            self.ip(side, "link", "set", "lo", "up")
            # Its own address of the link would be tentative for a second, and neighbours unreachable meanwhile.
            self.ip(side, "link", "set", "wire", "mtu", str(self.mtu), "addrgenmode", "none")
            self.ip(side, "addr", "add", f"{self.address(side, 4)}/32", "dev", "lo")
            self.ip(side, "addr", "add", f"{self.address(side, 6)[1:-1]}/128", "dev", "lo", "nodad")
        for side in self.names:
            self.up(side)

    def remove(self) -> None:
        for name in self.names.values():
            with contextlib.suppress(RuntimeError):
                _run("ip", "netns", "del", name)

    def down(self, side: Side) -> None:
        """Pull the wire out at that side. Its routes go with it."""
        self.ip(side, "link", "set", "wire", "down")

    def up(self, side: Side) -> None:
        """Put it in again, with its addresses and routes."""
        other: Side = "b" if side == "a" else "a"
        here, there = (1, 2) if side == "a" else (2, 1)
        self.ip(side, "link", "set", "wire", "up")
        self.ip(side, "addr", "replace", f"10.99.0.{here}/24", "dev", "wire")
        self.ip(side, "addr", "replace", f"fe80::{here}/64", "dev", "wire", "nodad")
        self.ip(side, "addr", "replace", f"fd99:0::{here}/64", "dev", "wire", "nodad")
        for family in (4, 6):
            via = f"10.99.0.{there}" if family == 4 else f"fd99:0::{there}"
            target, source = self.address(other, family).strip("[]"), self.address(side, family).strip("[]")
            self.ip(side, "route", "replace", target, "via", via, "dev", "wire", "src", source)
        for end in self.names:  # what was not found meanwhile is looked for again at once
            self.ip(end, "neigh", "flush", "dev", "wire")

    def limit(self, gbit: float) -> None:
        """Both directions carry so much: Ethernet frames, as a switch counts them."""
        for name in self.names.values():
            shape = ["tbf", "rate", f"{int(gbit * 1000)}mbit", "burst", "512kb", "latency", "10ms"]
            _run("tc", "-n", name, "qdisc", "replace", "dev", "wire", "root", *shape)

    @contextlib.contextmanager
    def inside(self, side: Side) -> Iterator[None]:
        """This thread, the threads and processes that it starts, and their sockets, are there."""
        with contextlib.ExitStack() as stack:
            home, there = (
                os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                for path in (Path("/proc/thread-self/ns/net"), Path("/run/netns", self.names[side]))
            )
            stack.callback(os.close, home)
            stack.callback(os.close, there)
            _enter(there)
            stack.callback(_enter, home)
            yield


@contextlib.contextmanager
def wire(mtu: int = 1500) -> Iterator[Wire]:
    """Two namespaces, joined; gone afterwards."""
    made = Wire(mtu)
    try:
        made.make()
        yield made
    finally:
        made.remove()
