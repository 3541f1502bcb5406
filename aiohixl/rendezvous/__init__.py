# SPDX-License-Identifier: Apache-2.0
"""Where engines find each other: an HTTP application and its client.

The only part of aiohixl that needs aiohttp. It carries names, incarnations, addresses and
capabilities; keys, layouts and bytes travel between the engines themselves.
"""

from __future__ import annotations

from aiohixl.rendezvous.app import create_app, setup
from aiohixl.rendezvous.client import RendezvousClient
from aiohixl.rendezvous.refusal import RefusedError
from aiohixl.rendezvous.server import DEFAULT_HOST, DEFAULT_PORT, serve, serving
from aiohixl.rendezvous.store import MemoryStore, Store

__all__ = [
    "DEFAULT_HOST",
    "DEFAULT_PORT",
    "MemoryStore",
    "RefusedError",
    "RendezvousClient",
    "Store",
    "create_app",
    "serve",
    "serving",
    "setup",
]
