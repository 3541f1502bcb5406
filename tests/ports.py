# SPDX-License-Identifier: Apache-2.0
"""Ports that stay one's own. One that was only seen to be free is somebody else's by the time it is used, once in some
thousand runs: every connection of this host takes one."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port where whoever connects is refused, until somebody listens who knows the number: the system gives it to
    nobody, for a socket is bound to it. Listening on it takes SO_REUSEADDR, which every listener here sets."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])
