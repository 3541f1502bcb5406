# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, and what the caller should throw away because of it.

The tree answers one question: is it this transfer, this peer or this engine
that is unusable now? Each class mixes in the builtin that a Python user would
catch anyway, so ``except ConnectionError`` or ``except TimeoutError`` work.

No class has a constructor of its own: `OSError` subclasses with one do not
pickle. Data travels in attributes that are set after construction.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "STATUS_ERRORS",
    "ClosedError",
    "ConfigError",
    "HixlError",
    "InternalError",
    "PeerError",
    "PeerLostError",
    "PeerMismatchError",
    "PeerUnreachableError",
    "ProviderError",
    "QueueFullError",
    "RegionError",
    "RegionPinnedError",
    "RemoteAccessError",
    "RendezvousError",
    "TransferAbortedError",
    "TransferError",
    "TransferTimeoutError",
]


class HixlError(Exception):
    """Base of every exception that aiohixl raises by itself."""


class ConfigError(HixlError, ValueError):
    """An option that does not exist, a value out of range, a transport that is not there."""


class RegionError(HixlError, ValueError):
    """A span, buffer or layout that cannot be used as asked. Nothing was posted."""


class RegionPinnedError(RegionError):
    """Memory that cannot be shown to be free of a peer's hands: do not reuse it yet.

    ``spans`` lists the ``(offset, nbytes)`` pairs concerned.
    """

    spans: tuple[tuple[int, int], ...] = ()


class ClosedError(HixlError, RuntimeError):
    """You closed it; or it belongs to another event loop, or to the parent of this fork."""


class QueueFullError(HixlError, BlockingIOError):
    """A post from a thread found the queue full. On the loop a post parks instead."""


class TransferError(HixlError, OSError):
    """This transfer failed; the peer is still usable."""


class RemoteAccessError(TransferError, PermissionError):
    """The owner of the memory does not allow it: revoked, deregistered, stale key or access bits."""


class TransferTimeoutError(TransferError, TimeoutError):
    """The transfer made no progress for ``stall_timeout``."""


class TransferAbortedError(TransferError, ConnectionAbortedError):
    """The transfer was cancelled or aborted on this side before it completed."""


class ProviderError(TransferError):
    """The transport's own library reported an error (for `hixl`: HIXL, or the ACL under it).

    ``code`` is the number that it answered, as it is, known or not; ``detail`` what it said of it, or "".
    """

    code: int = 0
    detail: str = ""


class PeerError(HixlError, ConnectionError):
    """The peer is not usable; connect again."""


class PeerUnreachableError(PeerError, ConnectionRefusedError):
    """Nobody answered at the address, or the name did not appear in time.

    ``code`` is what HIXL answered, where it was HIXL that did not get there; 0 otherwise.
    """

    code: int = 0


class PeerLostError(PeerError, ConnectionResetError):
    """The peer died, froze or closed while we were connected."""


class PeerMismatchError(PeerError):
    """The peer is not the one expected: protocol, secret, incarnation or KV layout differ."""


class RendezvousError(HixlError, ConnectionError):
    """The HTTP side failed. ``status`` is the HTTP status, 0 where there was no answer."""

    status: int = 0


class InternalError(HixlError):
    """A bug in aiohixl. Please report it."""


#: Status of the native core (name in ``hx.h`` without its prefix) -> exception class.
STATUS_ERRORS: dict[str, type[HixlError]] = {
    # this transfer
    "REMOTE_ACCESS": RemoteAccessError,
    "BOUNDS": RegionError,
    "OVERLAP": RegionError,
    "NO_PATH": RegionError,
    "REGION_CLOSED": RegionError,
    "PINNED": RegionPinnedError,
    "TIMEOUT": TransferTimeoutError,
    "ABORTED": TransferAbortedError,
    "CANCELLED": TransferAbortedError,
    "FAULT": TransferError,
    "PROVIDER": ProviderError,
    "CONNECTION": TransferError,
    "CHECKSUM": TransferError,
    # this peer
    "UNREACHABLE": PeerUnreachableError,
    "PEER_LOST": PeerLostError,
    "MISMATCH": PeerMismatchError,
    "AUTH": PeerMismatchError,
    "STALE": PeerMismatchError,
    # this engine
    "QUEUE_FULL": QueueFullError,
    "CLOSED": ClosedError,
    "CONFIG": ConfigError,
    "NO_MEMORY": TransferError,
    "SYSTEM": TransferError,
    "INTERNAL": InternalError,
}


def with_data(error: HixlError, **data: Any) -> HixlError:
    """Attach attributes to an exception and return it (see the module's note on pickling)."""
    for key, value in data.items():
        setattr(error, key, value)
    return error


def make_error(status: str, text: str, sys_errno: int = 0, **data: Any) -> HixlError:
    """The exception for a native status. `text` says what was asked, of whom, and what to do."""
    cls = STATUS_ERRORS[status]
    error = cls(sys_errno, text) if sys_errno and issubclass(cls, OSError) else cls(text)
    return with_data(error, **data)
