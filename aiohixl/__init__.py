# SPDX-License-Identifier: Apache-2.0
"""One-sided transfers between processes and machines, awaited.

See `Engine` to begin with; `aiohixl.rendezvous` introduces engines to each other, `aiohixl.testing` helps to test what
uses them.
"""

from __future__ import annotations

from aiohixl.config import Fault
from aiohixl.engine import Engine
from aiohixl.errors import (
    ClosedError,
    ConfigError,
    HixlError,
    InternalError,
    PeerError,
    PeerLostError,
    PeerMismatchError,
    PeerUnreachableError,
    ProviderError,
    QueueFullError,
    RegionError,
    RegionPinnedError,
    RemoteAccessError,
    RendezvousError,
    TransferAbortedError,
    TransferError,
    TransferTimeoutError,
)
from aiohixl.events import Event
from aiohixl.kv import KVLayout
from aiohixl.kvcache import KVCache, RemoteKV
from aiohixl.notes import Note
from aiohixl.notifies import Notify
from aiohixl.peer import Peer
from aiohixl.probe import ProbeResult
from aiohixl.rawpeer import RawPeer
from aiohixl.region import Region, RemoteRegion, Span
from aiohixl.remote import Route
from aiohixl.stream import KVStream
from aiohixl.transfer import Transfer, wait_all

__version__ = "0.1.0.dev0"

__all__ = [
    "ClosedError",
    "ConfigError",
    "Engine",
    "Event",
    "Fault",
    "HixlError",
    "InternalError",
    "KVCache",
    "KVLayout",
    "KVStream",
    "Note",
    "Notify",
    "Peer",
    "PeerError",
    "PeerLostError",
    "PeerMismatchError",
    "PeerUnreachableError",
    "ProbeResult",
    "ProviderError",
    "QueueFullError",
    "RawPeer",
    "Region",
    "RegionError",
    "RegionPinnedError",
    "RemoteAccessError",
    "RemoteKV",
    "RemoteRegion",
    "RendezvousError",
    "Route",
    "Span",
    "Transfer",
    "TransferAbortedError",
    "TransferError",
    "TransferTimeoutError",
    "wait_all",
]
