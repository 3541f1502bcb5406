# SPDX-License-Identifier: Apache-2.0
"""An engine of HIXL's that is not ours: reached as HIXL's own programs reach each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohixl.errors import ConfigError
from aiohixl.hixl import parse_endpoint
from aiohixl.region import Region, RemoteRegion, Span, whole_number
from aiohixl.remote import Offsets, RemoteEngine
from aiohixl.transfer import Transfer

__all__ = ["RawPeer", "check_regions"]

#: Bytes of UTF-8 that HIXL takes as a notification's name and as its message, each.
NOTIFY_BYTES = 1024


class RawPeer(RemoteEngine):
    """An engine of HIXL's at ``ip:port``, with regions agreed on beforehand. Made by `Engine.connect_raw`.

    There is no control link, and nobody of ours at the other end, so that only this much is promised: a transfer that
    was awaited is remote-complete as far as HIXL's COMPLETED says so (contract 1); when an await ends, memory of this
    side is free (own half of 3); one completion a post (4); the loop is never blocked (5), no wake-up is lost (6), full
    queues park (7, where only rows of this side are checked against more than the sizes given here); no Python in
    native threads (12), close closes (13), transfers compose (14).

    Not promised: that a note arrives once, or at all after an error, and nobody hears that one will not come (2); that
    the owner's memory is his again after an error or a cancellation, since there is no revocation (3); that a dead peer
    is noticed sooner than ``stall_timeout`` (8); that the engine there is the one that you mean, and lets you (9, 10,
    11). There are no KV caches and no streams.

    `write` and `read` and what is built on them may be called from any thread; all else belongs to the loop.
    """

    def __repr__(self) -> str:
        return f"<RawPeer {self.name!r}{' lost' if self.is_lost else ''}>"

    def write(
        self,
        local: Region | Span,
        remote: RemoteRegion | Span,
        *,
        note: str | None = None,
        note_name: str = "",
        after: Any = None,
    ) -> Transfer:
        """Put the bytes of `local` into `remote` (equal lengths), then send `note`, as `notify` does.

        `after` as for `Peer.write`. Fails with `ProviderError` (HIXL's number and words), `TransferTimeoutError` or
        `PeerLostError`. Cancelling the last await recalls it: any part of the bytes may have arrived, the note has not.
        """
        payload, name = _notification(note, note_name)
        return self._one("write", local, remote, payload, name, after)

    #: The same as `write`: every post may be made from any thread. Off the loop a full queue is a `QueueFullError`.
    post_write = write

    def write_many(
        self,
        local: Region,
        local_offsets: Offsets,
        remote: RemoteRegion,
        remote_offsets: Offsets,
        nbytes: int | Offsets,
        *,
        note: str | None = None,
        note_name: str = "",
        after: Any = None,
    ) -> Transfer:
        """One transfer of many rows, as `Peer.write_many`; then `note`, as `notify` does."""
        payload, name = _notification(note, note_name)
        return self._many("write", local, local_offsets, remote, remote_offsets, nbytes, payload, name, after)

    def notify(self, message: str, name: str = "") -> Transfer:
        """Send one of HIXL's own notifications: `message` and `name`, at most 1,024 bytes of UTF-8 each, without NUL.

        Await it to know that the peer's HIXL has it; the peer finds it by asking (``GetNotifies``), and is not told who
        sent it. Raises `ConfigError` for a text that HIXL does not take.
        """
        return self._post("note", [], 0, _text(message, "message"), _text(name, "name"))


def _notification(message: object, name: object) -> tuple[bytes | None, bytes]:
    return None if message is None else _text(message, "message"), _text(name, "name")


def _text(text: object, what: str) -> bytes:
    try:
        encoded = text.encode() if isinstance(text, str) else None
    except UnicodeEncodeError:
        encoded = None
    if encoded is None:
        raise ConfigError(
            f"notify: the {what} is a str that UTF-8 can encode, since HIXL takes text only, not {text!r}"
        )
    if len(encoded) > NOTIFY_BYTES:
        raise ConfigError(
            f"notify: HIXL takes at most {NOTIFY_BYTES} bytes of UTF-8 as the {what}, not {len(encoded)}; write the "
            "rest into memory of the peer"
        )
    if b"\0" in encoded:
        raise ConfigError(f"notify: the {what} has a NUL, where HIXL would cut it off: {text!r}")
    return encoded


def check_regions(address: object, regions: object) -> list[tuple[bytes, int, int, bool]]:
    """What `Engine.connect_raw` was given, as the native side takes it; `ConfigError` where it cannot be."""
    _, port = parse_endpoint(address, "connect_raw: address")
    if not port:
        raise ConfigError(f"connect_raw: the port that the peer listens on, not 0: {address!r}")
    if not isinstance(regions, Mapping):
        raise ConfigError(f"connect_raw: regions maps names to (addr, nbytes) or (addr, nbytes, kind), not {regions!r}")
    return [_raw_region(name, region) for name, region in regions.items()]


def _raw_region(name: object, region: object) -> tuple[bytes, int, int, bool]:
    if not isinstance(name, str) or not name or not name.isprintable() or len(name.encode()) > 128:
        raise ConfigError(f"connect_raw: a region's name has 1 to 128 bytes of printable UTF-8, not {name!r}")
    what = f"connect_raw: region {name!r}"
    if not isinstance(region, tuple | list) or len(region) not in (2, 3):
        raise ConfigError(f"{what}: (addr, nbytes) or (addr, nbytes, 'npu' or 'cpu'), not {region!r}")
    addr, nbytes = whole_number(region[0]), whole_number(region[1])
    kind = region[2] if len(region) == 3 else "npu"
    if addr is None or nbytes is None or addr <= 0 or not 0 < nbytes < 1 << 63 or addr + nbytes > 1 << 64:
        raise ConfigError(f"{what}: an address and a number of bytes, not {region[0]!r} and {region[1]!r}")
    if kind not in ("npu", "cpu"):
        raise ConfigError(f"{what}: its memory is 'npu' or 'cpu', not {kind!r}")
    return name.encode(), addr, nbytes, kind == "npu"
