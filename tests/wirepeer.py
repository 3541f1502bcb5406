# SPDX-License-Identifier: Apache-2.0
"""A test double: the control link spoken in pure Python, so that tests can say what no engine would.

Blocking sockets: engines answer from native threads, and need no turn of the loop for it. docs/control-link.md
describes the frames.
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import hmac
import mmap
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Self

MAGIC = 0x314C584948304941
FEATURE_SHM = 4
FRAME = struct.Struct("<IHBBQ")
GREETING = struct.Struct("<QIIQQQIIII16s16s32s32s")
ENTRY = struct.Struct("<QQQQQIIII")
HELLO_MAX = GREETING.size + 2 * 128
FRAME_MAX = 1 << 20

HELLO, ANSWER, AUTH, READY, REJECT, PAGE, REGION_ADD, REGION_DEL, TABLE_END, MAP_ASK, MAP_ANSWER = range(1, 12)
NOTE, NOTE_ACK, CREDIT, REVOKE, GRANT, PING, PONG, BYE, PATH, REVOKE_ACK = range(12, 22)
OPTIONAL = 1

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PATIENCE = 20.0  # seconds; only ever reached by a failure


@dataclass
class Frame:
    type: int
    nfds: int
    flags: int
    arg: int
    body: bytes


def frame(
    kind: int, arg: int = 0, body: bytes = b"", *, nfds: int = 0, flags: int = 0, length: int | None = None
) -> bytes:
    return FRAME.pack(FRAME.size + len(body) if length is None else length, kind, nfds, flags, arg) + body


def greeting(
    name: bytes = b"wire",
    want: bytes = b"",
    *,
    magic: int = MAGIC,
    versions: tuple[int, int] = (1, 1),
    features: int = FEATURE_SHM,
    epoch: int = 0,
    secret: bool = False,
    incarnation: bytes = b"",
    wanted: bytes | None = None,
    name_len: int | None = None,
    want_len: int | None = None,
) -> bytes:
    return (
        GREETING.pack(
            magic,
            *versions,
            features,
            epoch,
            0,
            secret,
            len(name) if name_len is None else name_len,
            len(want) if want_len is None else want_len,
            wanted is not None,
            incarnation or secrets.token_bytes(16),
            wanted or b"",
            secrets.token_bytes(32),
            secrets.token_bytes(32),
        )
        + name
        + want
    )


def entry(
    ident: int = 1,
    name: bytes = b"region",
    blob: bytes = b"",
    *,
    rkey: int = 5,
    nbytes: int = 4096,
    addr: int = 0,
    direct: int = 0,
    kind: int = 1,
    access: int = 3,
    name_len: int | None = None,
    blob_len: int | None = None,
) -> bytes:
    name_len = len(name) if name_len is None else name_len
    blob_len = len(blob) if blob_len is None else blob_len
    return ENTRY.pack(ident, rkey, nbytes, addr, direct, kind, access, name_len, blob_len) + name + blob


def note(payload: bytes = b"", topic: bytes = b"", *, flags: int = 0, topic_len: int | None = None) -> bytes:
    return struct.pack("<II", len(topic) if topic_len is None else topic_len, flags) + topic + payload


def spans(region: int, *pairs: tuple[int, int]) -> bytes:
    return struct.pack("<Q", region) + b"".join(struct.pack("<QQ", *pair) for pair in pairs)


def memfd(nbytes: int = 4096, seals: int = SEALS) -> int:
    fd = os.memfd_create("wirepeer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def dial(address: str) -> socket.socket:
    """A plain connection to one of an engine's addresses."""
    if address.startswith("unix://"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.removeprefix("unix://"))  # waits for room in the listener's queue, as no timeout would
        sock.settimeout(PATIENCE)
        return sock
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), PATIENCE)


class Ended(Exception):
    """The engine closed the link."""


class WirePeer:
    """One control link to an engine, as its initiator."""

    def __init__(self, address: str, *, secret: bytes | None = None) -> None:
        self.local = address.startswith("unix://")
        self.sock = dial(address)
        self.secret = secret
        self.fds: list[int] = []
        self.table: list[Frame] = []
        self.page: mmap.mmap | None = None  # where the engine shows what it writes into our memory
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()
        if self.page is not None:
            self.page.close()
        while self.fds:
            os.close(self.fds.pop())

    @property
    def incarnation(self) -> str:
        return self.hello[56:72].hex()

    # ---- frames ----

    def send_bytes(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        """The descriptors go with the first byte, and are closed here. A link that has been closed is no error."""
        try:
            if fds:
                sent = self.sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
                data = data[sent:]
            self.sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            for fd in fds:
                os.close(fd)

    def send(self, kind: int, arg: int = 0, body: bytes = b"", fd: int | None = None) -> None:
        self.send_bytes(frame(kind, arg, body, nfds=fd is not None), () if fd is None else (fd,))

    def _exactly(self, nbytes: int) -> bytes:
        while len(self._buffer) < nbytes:
            try:
                if self.local:
                    data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 8)
                    self.fds += fds
                else:
                    data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                raise Ended
            self._buffer += data
        out, self._buffer = self._buffer[:nbytes], self._buffer[nbytes:]
        return out

    def receive(self) -> Frame:
        length, kind, nfds, flags, arg = FRAME.unpack(self._exactly(FRAME.size))
        return Frame(kind, nfds, flags, arg, self._exactly(length - FRAME.size))

    def expect(self, kind: int) -> Frame:
        """The next frame of that type; others are passed over."""
        while (found := self.receive()).type != kind:
            pass
        return found

    def rest(self) -> list[Frame]:
        """What comes until the engine closes the link."""
        out = []
        try:
            while True:
                out.append(self.receive())
        except Ended:
            return out

    # ---- the handshake ----

    def proof(self, role: bytes) -> bytes:
        if self.secret is None:
            return bytes(32)
        return hmac.digest(self.secret, role + self.hello + self.answer, hashlib.sha256)

    def greet(self, hello: bytes | None = None) -> Frame:
        """HELLO, and what comes back."""
        self.hello = hello or greeting(secret=self.secret is not None)
        self.send(HELLO, 0, self.hello)
        found = self.receive()
        self.answer = found.body
        return found

    def authenticate(self, hello: bytes | None = None) -> None:
        """As far as the engine's page; our own is still to be sent."""
        found = self.greet(hello)
        assert found.type == ANSWER, found
        self.send(AUTH, 0, self.proof(b"i"))
        ready = self.receive()
        assert ready.type == READY, ready
        assert ready.body == self.proof(b"a"), "the engine has not proved itself"
        assert self.receive().type == PAGE
        if self.local:
            self.page = mmap.mmap(self.fds[0], 4096)

    def handshake(self, hello: bytes | None = None) -> Self:
        """All of it, with a page and an empty region table of our own."""
        self.authenticate(hello)
        self.send(PAGE, fd=memfd() if self.local else None)
        self.send(TABLE_END)
        while (found := self.receive()).type != TABLE_END:
            self.table.append(found)
        return self

    def regions(self) -> dict[bytes, int]:
        """Names and ids of the engine's table."""
        out = {}
        for found in self.table:
            body = found.body if found.type == REGION_ADD else b""
            while body:
                ident, *_, name_len, blob_len = ENTRY.unpack_from(body)
                out[body[ENTRY.size : ENTRY.size + name_len]] = ident
                body = body[ENTRY.size + name_len + blob_len :]
        return out

    def revoke(self, seq: int, body: bytes) -> None:
        """As an owner does: first in the page, then by the frame."""
        assert self.page is not None
        self.page[:8] = struct.pack("<Q", seq)
        self.send(REVOKE, seq, body)

    def alive(self) -> None:
        """The engine still answers on this link."""
        token = secrets.randbits(64)
        self.send(PING, token)
        assert self.expect(PONG).arg == token
