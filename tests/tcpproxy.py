# SPDX-License-Identifier: Apache-2.0
"""A test double: the network between two engines, which cuts, holds and falsifies.

The engine behind it listens on 127.0.0.2, the proxy on 127.0.0.1 at the same port: a peer's data connections go to the
host to which its control link went, and so through here as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable

from conftest import Start
from datapeer import HELLO_DATA
from wirepeer import FRAME

import aiohixl

BEHIND = "127.0.0.2"
FRONT = "127.0.0.1"
GREETED = 96  # bytes: DATA_ANSWER and DATA_READY
Tamper = Callable[["Pipe", int, bytes], bytes]


class Pipe:
    """One connection: `passed` counts its bytes [towards the engine, and back]. ``going``: cleared, it stands still."""

    def __init__(self, proxy: Proxy, front: socket.socket, back: socket.socket) -> None:
        self.proxy = proxy
        self.ends = (front, back)
        self.passed = [0, 0]
        self.data = False
        self.opened = asyncio.Event()
        self.going = asyncio.Event()
        self.going.set()
        self.over = False
        self._tasks = [asyncio.create_task(self._pump(way)) for way in (0, 1)]

    async def _pump(self, way: int) -> None:
        loop = asyncio.get_running_loop()
        source, sink = self.ends[way], self.ends[1 - way]
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, 1 << 16):
                if not way and not self.passed[0]:
                    self.data = FRAME.unpack_from(data)[1] == HELLO_DATA
                    self.opened.set()
                await self.proxy.going.wait()
                await self.going.wait()
                if self.data and (hold := self.proxy.hold) is not None:
                    await hold.wait()
                if self.proxy.cut_after is not None and self.data:
                    room = self.proxy.cut_after - self.passed[way]
                    if len(data) >= room:
                        self.proxy.cut_after = None
                        self.proxy.cuts += 1
                        await loop.sock_sendall(sink, data[: max(0, room)])
                        self.cut(reset=self.proxy.reset)
                        return
                tamper = self.proxy.tamper if self.data else self.proxy.tamper_control
                if tamper is not None:
                    data = tamper(self, way, data)
                self.passed[way] += len(data)
                await loop.sock_sendall(sink, data)
        self.cut()

    def cut(self, *, reset: bool = False) -> None:
        """Both ends: by FIN, or by RST; a turn of the loop later."""
        if not self.over:
            self.over = True
            self._end = asyncio.create_task(self._close(reset))

    async def _close(self, reset: bool) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for end in self.ends:  # not earlier: the loop watches them by their numbers
            if reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()

    async def close(self) -> None:
        self.cut()
        await self._end


class Proxy:
    """``cut_after``: the next data connection that has carried so many bytes in one direction is cut there, once.
    ``tamper``, ``tamper_control``: what becomes of a piece of a data connection, of a control link. ``going``: cleared,
    nothing moves. ``hold``: data connections wait for it. ``refusing``: whoever connects from now on is turned away,
    and counted in ``refused``."""

    def __init__(self) -> None:
        self.pipes: list[Pipe] = []
        self.going = asyncio.Event()
        self.going.set()
        self.hold: asyncio.Event | None = None
        self.cut_after: int | None = None
        self.reset = False
        self.cuts = 0
        self.tamper: Tamper | None = None
        self.tamper_control: Tamper | None = None
        self.refusing = False
        self.refused = 0
        self._listener = socket.create_server((FRONT, 0))
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self.address = f"tcp://{FRONT}:{self.port}"
        self._task = asyncio.create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            front, _ = await loop.sock_accept(self._listener)
            if self.refusing:
                front.close()
                self.refused += 1
                continue
            back = socket.socket()
            for end in (front, back):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(back, (BEHIND, self.port))
            self.pipes.append(Pipe(self, front, back))

    @property
    def data_pipes(self) -> list[Pipe]:
        """Those whose handshake is over."""
        return [pipe for pipe in self.pipes if pipe.data and not pipe.over and pipe.passed[1] >= GREETED]

    def cut_data(self, *, reset: bool = False) -> None:
        for pipe in self.pipes:
            if pipe.data:
                pipe.cut(reset=reset)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._listener.close()
        for pipe in self.pipes:
            await pipe.close()


@contextlib.asynccontextmanager
async def between(
    start: Start, **options: object
) -> AsyncIterator[tuple[aiohixl.Engine, aiohixl.Engine, aiohixl.Peer, Proxy]]:
    """Engine "a", engine "b", a's peer for b, and the network between them."""
    a = await start("a", transports=["tcp"], **options)
    proxy = Proxy()
    try:
        # A port that is free in front is free behind: only engines of proxies are there.
        b = await start("b", transports=["tcp"], address=f"{BEHIND}:{proxy.port}", **options)
        yield a, b, await a.connect(proxy.address), proxy
    finally:
        await proxy.close()
