# SPDX-License-Identifier: Apache-2.0
"""Two machines with RDMA between them (``run.sh -n 2``): 64 MiB both ways, and the link cut in mid-transfer.

Each machine runs this; rank 0 owns memory, rank 1 writes and reads it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time

import numpy as np

import aiohixl

RANK = int(os.environ["RDMAVM_RANK"])
HERE, THERE = os.environ["RDMAVM_IP"], os.environ["RDMAVM_PEER_IP"]
NBYTES = 64 << 20
PORT = 7801
OPTIONS = {"transports": ["verbs"], "secret": "of both", "peer_timeout": 4.0}


def say(text: str) -> None:
    print(f"{time.monotonic():8.1f}  {text}", flush=True)


async def owner() -> None:
    async with aiohixl.Engine("owner", address=f"{HERE}:{PORT}", **OPTIONS) as engine:
        region = await engine.allocate(NBYTES, "target")
        inbox = engine.notes()
        memory = np.frombuffer(memoryview(region), np.uint8)
        while (note := await inbox.get()).payload != b"over":
            assert note.aborted or (memory == note.payload[0]).all(), "the note came before its bytes"
        del memory


async def connected(engine: aiohixl.Engine) -> aiohixl.Peer:
    async with asyncio.timeout(60):
        while True:
            try:
                return await engine.connect(f"tcp://{THERE}:{PORT}", timeout=5.0)
            except aiohixl.PeerError:
                await asyncio.sleep(0.2)


async def there_and_back(engine: aiohixl.Engine, peer: aiohixl.Peer, value: int) -> None:
    source, back = await engine.allocate(NBYTES), await engine.allocate(NBYTES)
    np.frombuffer(memoryview(source), np.uint8)[:] = value
    remote = await peer.region("target")
    assert peer.route(source, remote).provider == "verbs"
    begun = time.monotonic()
    await peer.write(source, remote, note=bytes([value]))
    wrote = time.monotonic()
    await peer.read(back, remote)
    assert (np.frombuffer(memoryview(back), np.uint8) == value).all()
    say(f"{NBYTES >> 20} MiB there in {wrote - begun:.1f} s, back in {time.monotonic() - wrote:.1f} s")


async def writer() -> None:
    async with aiohixl.Engine("writer", **OPTIONS) as engine:
        peer = await connected(engine)
        await there_and_back(engine, peer, 1)
        source = await engine.allocate(NBYTES)
        transfer = peer.write(source, await peer.region("target"))
        await asyncio.sleep(0.3)
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        begun = time.monotonic()
        try:
            await transfer
        except (aiohixl.TransferError, aiohixl.PeerLostError) as exc:
            say(f"the link was cut: {time.monotonic() - begun:.1f} s later {type(exc).__name__}: {exc}")
        else:
            raise AssertionError("a transfer over a link that is down succeeded")
        assert time.monotonic() - begun < 10, "it took too long"
        await transfer.wait_quiesced()
        subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)
        if peer.is_lost:
            peer = await connected(engine)
        for value in range(2, 60):
            try:
                await there_and_back(engine, peer, value)
                break
            except aiohixl.PeerLostError:
                peer = await connected(engine)
            except aiohixl.TransferError:
                await asyncio.sleep(0.2)
        await peer.notify(b"over")


asyncio.run(owner() if RANK == 0 else writer())
say("over")
