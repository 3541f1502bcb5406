# SPDX-License-Identifier: Apache-2.0
"""A test double: a peer of the tcp transport in pure Python, with the control link of `wirepeer`, and data connections
on which it can say what no engine would. docs/tcp-protocol.md describes the messages."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import wirepeer as wire
from wirepeer import WirePeer

from aiohixl import _core

FEATURE_TCP = 2
HELLO_DATA, ANSWER_DATA, PROOF_DATA, READY_DATA = range(22, 26)
INTRO = struct.Struct("<QHHI")

MAGIC = 0x31544148
HEAD = struct.Struct("<IHHIIQQQQQII")
ROW = struct.Struct("<QQ")
WRITE, READ, DATA, DONE = range(1, 5)
CHECKSUM = 1
ROWS_MAX, MESSAGE_MAX = 4096, 4 << 20

STATUS = {name: number for number, name in _core.statuses().items()}
Rows = Iterable[tuple[int, int]]


@dataclass
class Head:
    type: int
    flags: int
    nrows: int
    status: int
    id: int
    region: int
    rkey: int
    nbytes: int
    epoch: int
    crc: int


def _table() -> list[int]:
    out = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        out.append(value)
    return out


_TABLE = _table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def message(
    kind: int,
    ident: int = 0,
    rows: Rows = (),
    payload: bytes = b"",
    *,
    region: int = 0,
    rkey: int = 0,
    nbytes: int | None = None,
    nrows: int | None = None,
    magic: int = MAGIC,
    flags: int = 0,
    status: int = 0,
    epoch: int = 0,
    crc: int | None = None,
    head_crc: int | None = None,
) -> bytes:
    """What is not given is as it should be; a checksum is computed where the flag says that there is one."""
    rows = list(rows)
    if nbytes is None:
        nbytes = len(payload) if kind in (WRITE, DATA) else sum(row[1] for row in rows)
    if nrows is None:
        nrows = len(rows)
    summed = flags & CHECKSUM
    if crc is None:
        crc = crc32c(payload) if summed else 0
    fields = (magic, kind, flags, nrows, status, ident, region, rkey, nbytes, epoch, crc)
    table = b"".join(ROW.pack(*row) for row in rows)
    if head_crc is None:
        head_crc = crc32c(HEAD.pack(*fields, 0) + table) if summed else 0
    return HEAD.pack(*fields, head_crc) + table + payload


@dataclass
class Remote:
    """A region of the engine's, as it announced it."""

    id: int
    rkey: int
    nbytes: int
    access: int


class DataPeer(WirePeer):
    """A control link on which the tcp transport has been agreed."""

    def __init__(self, address: str, *, secret: bytes | None = None) -> None:
        super().__init__(address, secret=secret)
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.place = (host.strip("[]"), int(port))

    def meet(self, *, streams: int = 4) -> Self:
        """All of the handshake. `session`: the engine's name of this link."""
        try:
            self._meet(streams)
        except BaseException:
            self.close()
            raise
        return self

    def _meet(self, streams: int) -> None:
        self.authenticate(wire.greeting(secret=self.secret is not None, features=FEATURE_TCP))
        self.send(wire.PAGE)
        self.send(wire.PATH, 0, struct.pack("<I", 3) + b"tcp" + INTRO.pack(7, 0, streams, 0))
        self.send(wire.TABLE_END)
        while (found := self.receive()).type != wire.TABLE_END:
            self.table.append(found)
        (path,) = (f for f in self.table if f.type == wire.PATH)
        assert path.body[:7] == struct.pack("<I", 3) + b"tcp"
        self.session, self.port, self.streams, _ = INTRO.unpack_from(path.body, 7)

    def remotes(self) -> dict[bytes, Remote]:
        out = {}
        for found in self.table:
            body = found.body if found.type == wire.REGION_ADD else b""
            while body:
                ident, rkey, nbytes, _, _, _, access, name_len, blob_len = wire.ENTRY.unpack_from(body)
                name = body[wire.ENTRY.size : wire.ENTRY.size + name_len]
                out[name] = Remote(ident, rkey, nbytes, access)
                body = body[wire.ENTRY.size + name_len + blob_len :]
        return out

    def await_region(self, name: bytes) -> Remote:
        """One that is announced later."""
        while name not in (found := self.remotes()):
            self.table.append(self.expect(wire.REGION_ADD))
        return found[name]

    @property
    def key(self) -> bytes:
        return hmac.digest(self.secret or b"", b"d" + self.hello + self.answer, hashlib.sha256)

    def prove(self, role: bytes, session: int, stream: int, nonces: bytes) -> bytes:
        return hmac.digest(self.key, role + struct.pack("<QI", session, stream) + nonces, hashlib.sha256)

    def open(self, stream: int = 0) -> DataLink:
        """A data connection, proved on both sides."""
        link = DataLink(self.place)
        nonce = secrets.token_bytes(32)
        answer = link.hello(self.session, stream, nonce)
        assert answer is not None, "the engine turned a good data connection away"
        theirs, proof = answer[:32], answer[32:]
        assert proof == self.prove(b"a", self.session, stream, nonce + theirs), "the engine has not proved itself"
        link.sock.sendall(wire.frame(PROOF_DATA, 0, self.prove(b"i", self.session, stream, nonce + theirs)))
        ready = link.frame()
        assert ready is not None
        assert ready[0] == READY_DATA
        return link


class DataLink:
    """A connection to an engine's port, for data."""

    def __init__(self, place: tuple[str, int]) -> None:
        self.sock = socket.create_connection(place, wire.PATIENCE)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()

    def exactly(self, nbytes: int) -> bytes | None:
        """None: the engine has ended it."""
        out = b""
        while len(out) < nbytes:
            try:
                piece = self.sock.recv(nbytes - len(out))
            except ConnectionResetError:
                piece = b""
            if not piece:
                return None
            out += piece
        return out

    # ---- the handshake ----

    def frame(self) -> tuple[int, bytes] | None:
        head = self.exactly(wire.FRAME.size)
        if head is None:
            return None
        length, kind, *_ = wire.FRAME.unpack(head)
        body = self.exactly(length - wire.FRAME.size)
        return None if body is None else (kind, body)

    def hello(self, session: int, stream: int, nonce: bytes) -> bytes | None:
        """The answer's body; None where there was none."""
        self.send(wire.frame(HELLO_DATA, session, struct.pack("<II", stream, 0) + nonce))
        found = self.frame()
        if found is None:
            return None
        assert found[0] == ANSWER_DATA
        return found[1]

    # ---- messages ----

    def send(self, data: bytes) -> None:
        """A connection that has been ended is no error."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.sock.sendall(data)

    def head(self) -> Head:
        data = self.exactly(HEAD.size)
        assert data is not None, "the engine ended the data connection"
        magic, *fields, _ = HEAD.unpack(data)
        assert magic == MAGIC
        return Head(*fields)

    def rows(self, head: Head) -> list[tuple[int, int]]:
        data = self.exactly(head.nrows * ROW.size)
        assert data is not None
        return [ROW.unpack_from(data, at) for at in range(0, len(data), ROW.size)]

    def payload(self, head: Head) -> bytes:
        data = self.exactly(head.nbytes)
        assert data is not None
        return data

    def done(self) -> Head:
        head = self.head()
        assert head.type == DONE, head
        return head

    def write(self, remote: Remote, offset: int, payload: bytes, ident: int = 1, **fields: int) -> int:
        """The status that the engine answers."""
        fields = {"region": remote.id, "rkey": remote.rkey, **fields}
        self.send(message(WRITE, ident, [(offset, len(payload))], payload, **fields))
        head = self.done()
        assert head.id == ident
        return head.status

    def read(self, remote: Remote, rows: Rows, ident: int = 2, **fields: int) -> bytes | int:
        """The bytes, or the status."""
        fields = {"region": remote.id, "rkey": remote.rkey, **fields}
        self.send(message(READ, ident, rows, b"", **fields))
        head = self.head()
        assert head.id == ident
        return self.payload(head) if head.type == DATA else head.status

    def ended(self) -> bool:
        """The engine closes it, whatever it has said before."""
        while self.exactly(1) is not None:
            pass
        return True

    def reset(self) -> None:
        """RST instead of FIN."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()
