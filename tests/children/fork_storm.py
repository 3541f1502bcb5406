# SPDX-License-Identifier: Apache-2.0
"""For so many seconds: small transfers by tcp on the loop, while another thread forks, and calls a fork's hooks alone.

Python's lock and the transport's are wanted by both. A process of its own: one that waits for itself never ends."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

import aiohixl


def storm(engines: list[aiohixl.Engine], over: threading.Event) -> None:
    while not over.is_set():
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        for _ in range(20):
            for engine in engines:
                engine.before_fork()
            for engine in engines:
                engine.after_fork_in_parent()
            time.sleep(0.0002)


async def main(seconds: float) -> None:
    async with (
        aiohixl.Engine("a", transports=["tcp"], address="127.0.0.1:0") as a,
        aiohixl.Engine("b", transports=["tcp"], address="127.0.0.1:0") as b,
    ):
        peer = await a.connect(b.address)
        await b.allocate(1 << 16, "target")
        source, remote = await a.allocate(1 << 16), await peer.region("target")
        over = threading.Event()
        thread = threading.Thread(target=storm, args=([a, b], over), daemon=True)
        thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.gather(*[peer.write(source[:4096], remote[:4096]) for _ in range(8)])
            await asyncio.gather(*[peer.write_many(source, [0], remote, [0], 4096) for _ in range(8)])
        over.set()
        thread.join()


asyncio.run(main(float(sys.argv[1])))
