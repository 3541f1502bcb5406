# SPDX-License-Identifier: Apache-2.0
"""Writes tests/fuzz/corpus anew: small inputs for the harnesses, each of messages that are valid or nearly so.

python tests/fuzz/make_corpus.py
"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"

MAGIC = 0x31544148
WRITE, READ, DATA, DONE = 1, 2, 3, 4
CHECKSUM = 1
RW, RO, WO, HIDDEN = 0, 1, 2, 3  # regions, as fuzz_receive.c numbers them
READ_ASKED, WRITE_ASKED = 0, 1  # questions, likewise
READ_NBYTES = 300
ZEROS_FOLLOW = 8  # in byte 0

HELLO, ANSWER, AUTH, READY, PAGE = 1, 2, 3, 4, 6
REGION_ADD, REGION_DEL, TABLE_END, MAP_ASK, MAP_ANSWER = 7, 8, 9, 10, 11
NOTE, NOTE_ACK, CREDIT, REVOKE, GRANT, PING, PONG, BYE = 12, 13, 14, 15, 16, 17, 18, 19
PATH, REVOKE_ACK, DATA_HELLO, DATA_PROOF = 20, 21, 22, 24
STRANGER_UNIX, STRANGER_TCP, PEER_UNIX, PEER_TCP = 0, 1, 2, 3


def message(
    kind: int,
    *,
    rows: list[tuple[int, int]] | None = None,
    payload: bytes = b"",
    region: int = RW,
    ident: int = 77,
    flags: int = 0,
    status: int = 0,
    rkey: int = 0,
    nbytes: int | None = None,
    epoch: int = 0,
) -> bytes:
    """A message of a data connection; `nbytes` is that of the rows, or of the payload, unless given."""
    rows = rows or []
    if nbytes is None:
        nbytes = sum(n for _, n in rows) if rows else len(payload)
    head = struct.pack("<IHHIIQQQQQII", MAGIC, kind, flags, len(rows), status, ident, region, rkey, nbytes, epoch, 0, 0)
    return head + b"".join(struct.pack("<QQ", *row) for row in rows) + payload


def frame(kind: int, arg: int = 0, body: bytes = b"", *, flags: int = 0, nfds: int = 0) -> bytes:
    """A frame of a control link."""
    return struct.pack("<IHBBQ", 16 + len(body), kind, nfds, flags, arg) + body


def hello(name: bytes = b"mallory", *, version: int = 1, features: int = 2, secret: int = 0) -> bytes:
    fixed = struct.pack("<QIIQQQIIII", 0x314C584948304941, version, version, features, 0, 0, secret, len(name), 0, 0)
    return fixed + b"\x5b" * 16 + bytes(16 + 32 + 32) + name


def entry(ident: int, name: bytes = b"r", blob: bytes = b"", *, kind: int = 1) -> bytes:
    return struct.pack("<QQQQQIIII", ident, 5, 4096, 0, 0, kind, 3, len(name), len(blob)) + name + blob


def receive_inputs() -> dict[str, bytes]:
    text = bytes(range(256)) * 4
    scattered = [(i * 512, 48) for i in range(20)]
    good_write = message(WRITE, rows=[(0, 1024)], payload=text)
    good_read = message(READ, rows=[(10, 100), (4000, 50)])
    return {
        "write": good_write,
        "write-rows": message(WRITE, rows=scattered, payload=text[: 20 * 48]),
        "write-checksum": message(WRITE, rows=[(5, 1000)], payload=text[:1000], flags=CHECKSUM),
        "write-nothing": message(WRITE),
        "write-revoked": message(WRITE, rows=[(8000, 400)], payload=text[:400]) + good_write,
        "write-read-only": message(WRITE, rows=[(0, 64)], payload=text[:64], region=RO) + good_write,
        "write-hidden": message(WRITE, rows=[(0, 64)], payload=text[:64], region=HIDDEN) + good_read,
        "write-wrong-key": message(WRITE, rows=[(0, 64)], payload=text[:64], rkey=5) + good_write,
        "write-beyond": message(WRITE, rows=[(65500, 100)], payload=text[:100]) + good_write,
        "write-wraps": message(WRITE, rows=[(2**64 - 8, 16)], payload=text[:16]) + good_write,
        "write-sum-wraps": message(WRITE, rows=[(0, 2**64 - 8), (0, 24)], payload=text[:16], nbytes=16),
        "write-short": message(WRITE, rows=[(0, 64)], payload=text[:16]),
        "write-too-much": message(WRITE, rows=[(0, 64)], payload=text[:16], nbytes=16),
        "read": good_read,
        "read-all": message(READ, rows=[(0, 8192), (12288, 65536 - 12288)])
        + message(READ, rows=[(0, 65536)], region=RO),
        "read-revoked": message(READ, rows=[(12000, 400)]) + good_read,
        "read-write-only": message(READ, rows=[(0, 64)], region=WO) + good_read,
        "read-epoch": message(READ, rows=[(0, 64)], epoch=1) + good_read,
        "write-epoch": message(WRITE, rows=[(8000, 400)], payload=text[:400], epoch=2**63) + good_write,
        "read-checksum": message(READ, rows=[(0, 4096)], flags=CHECKSUM),
        "many": (good_write + good_read) * 6,
        "data": message(DATA, payload=text[:READ_NBYTES], ident=READ_ASKED),
        "data-checksum": message(DATA, payload=text[:READ_NBYTES], ident=READ_ASKED, flags=CHECKSUM) + good_read,
        "data-short": message(DATA, payload=text[: READ_NBYTES - 1], ident=READ_ASKED),
        "data-twice": message(DATA, payload=text[:READ_NBYTES], ident=READ_ASKED) * 2,
        "data-of-write": message(DATA, payload=text[:100], ident=WRITE_ASKED),
        "data-unasked": message(DATA, payload=text[:100], ident=2**40 + 3),
        "done": message(DATA, payload=text[:READ_NBYTES], ident=READ_ASKED) + message(DONE, ident=WRITE_ASKED),
        "data-stale": message(DATA, payload=text[:READ_NBYTES], ident=READ_ASKED + 2),
        "done-stale": message(DONE, ident=WRITE_ASKED + 2),
        "done-refused": message(DONE, ident=READ_ASKED, status=4) + message(DONE, ident=WRITE_ASKED, status=4),
        "done-of-read": message(DONE, ident=READ_ASKED),
        "done-out-of-turn": message(DONE, ident=WRITE_ASKED) + message(DATA, payload=text[:READ_NBYTES], ident=0),
        "not-a-message": b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n" + bytes(64),
    }


def link_inputs() -> dict[str, tuple[int, bytes]]:
    span = struct.pack("<QQQ", 1, 0, 10)
    note = struct.pack("<II", 1, 0) + b"tpayload"
    shake = frame(HELLO, 0, hello()) + frame(AUTH, 0, bytes(32))
    path = struct.pack("<I", 3) + b"tcp" + struct.pack("<QHHI", 1, 4000, 1, 0)
    return {
        "hello-unix": (STRANGER_UNIX, frame(HELLO, 0, hello())),
        "hello-tcp": (STRANGER_TCP, frame(HELLO, 0, hello())),
        "hello-version": (STRANGER_TCP, frame(HELLO, 0, hello(version=9))),
        "hello-secret": (STRANGER_TCP, frame(HELLO, 0, hello(secret=1))),
        "shake": (STRANGER_TCP, shake + frame(PAGE)),
        "shake-up": (STRANGER_TCP, shake + frame(PAGE) + frame(TABLE_END) + frame(PING, 1)),
        "shake-twice": (STRANGER_TCP, shake + shake),
        "data": (STRANGER_TCP, frame(DATA_HELLO, 1, struct.pack("<II", 0, 0) + bytes(32))),
        "data-proof": (
            STRANGER_TCP,
            frame(DATA_HELLO, 1, struct.pack("<II", 0, 0) + bytes(32)) + frame(DATA_PROOF, 0, bytes(32)),
        ),
        "http": (STRANGER_TCP, b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"),
        "tls": (STRANGER_TCP, bytes.fromhex("16030100c8010000c40303") + bytes(190)),
        "regions": (PEER_TCP, frame(REGION_ADD, 0, entry(3) + entry(4, b"name", b"blob")) + frame(TABLE_END)),
        "regions-unix": (PEER_UNIX, frame(REGION_ADD, 0, entry(3, kind=2)) + frame(MAP_ASK, 1) + frame(REGION_DEL, 3)),
        "notes": (PEER_TCP, b"".join(frame(NOTE, i, note) for i in range(1, 6)) + frame(CREDIT, 0)),
        "note-again": (PEER_TCP, frame(NOTE, 1, note) * 2),
        "note-ack": (PEER_TCP, frame(NOTE_ACK, 1)),
        "revoke": (PEER_TCP, frame(REVOKE, 1, span) + frame(GRANT, 0, span) + frame(REVOKE_ACK, 1)),
        "revoke-unix": (PEER_UNIX, frame(REVOKE, 1, span) + frame(REVOKE, 2, span[:8]) + frame(PING, 3)),
        "ping": (PEER_UNIX, frame(PING, 1) + frame(PONG, 1) + frame(BYE)),
        "path-again": (PEER_TCP, frame(PATH, 0, path)),
        "map": (PEER_UNIX, frame(MAP_ASK, 1) + frame(MAP_ASK, 99) + frame(MAP_ANSWER, 1, bytes(4))),
        "optional": (PEER_TCP, frame(999, 0, bytes(40), flags=1) + frame(PING, 1)),
        "descriptor": (PEER_UNIX, frame(PING, 1, nfds=1)),
        "answer": (PEER_TCP, frame(ANSWER, 0, hello()) + frame(READY, 0, bytes(32))),
    }


def main() -> None:
    shutil.rmtree(CORPUS, ignore_errors=True)
    for name in ("receive", "link"):
        (CORPUS / name).mkdir(parents=True)
    for i, (name, messages) in enumerate(receive_inputs().items()):
        (CORPUS / "receive" / name).write_bytes(bytes([i % 8]) + messages)
    for rows in (4096, 4097, 4150):  # the zeros that the harness puts behind them
        head = struct.pack("<IHHIIQQQQQII", MAGIC, WRITE, 0, rows, 0, 77, RW, 0, 0, 0, 0, 0)
        (CORPUS / "receive" / f"rows-{rows}").write_bytes(bytes([ZEROS_FOLLOW]) + head)
    for name, (mode, frames) in link_inputs().items():
        (CORPUS / "link" / name).write_bytes(bytes([mode]) + frames)


if __name__ == "__main__":
    main()
