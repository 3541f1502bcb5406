# SPDX-License-Identifier: Apache-2.0
"""A target whose every byte is known: after each misfortune, a good transfer, and nothing else has changed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import aiohixl

NBYTES = 64 << 10
Bytes = npt.NDArray[np.uint8]


def noise(nbytes: int, seed: int = 1) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Ground:
    """Engine ``a`` with a `source`, its `peer` for engine ``b``, b's `target` and what that must contain (`model`)."""

    def __init__(self, a: aiohixl.Engine, b: aiohixl.Engine, peer: aiohixl.Peer) -> None:
        self.a, self.b, self.peer = a, b, peer
        self.rounds = 0

    async def prepare(self) -> Ground:
        self.target = await self.b.allocate(NBYTES, "ground")
        self.memory = np.frombuffer(memoryview(self.target), np.uint8)
        self.memory[:] = noise(NBYTES, 7)
        self.model = self.memory.copy()
        self.source = await self.a.allocate(NBYTES)
        self.here = np.frombuffer(memoryview(self.source), np.uint8)
        self.here[:] = noise(NBYTES, 8)
        self.here_model = self.here.copy()
        self.remote = await self.peer.region("ground")
        return self

    def check(self) -> None:
        """Not a byte has changed at either end beside what the model says."""
        assert np.array_equal(self.memory, self.model), "bytes at the target changed that nobody asked to change"
        assert np.array_equal(self.here, self.here_model), "bytes at the source changed that nobody asked to change"

    async def still_good(self) -> None:
        """Nothing was touched so far; and a write with a note and a read still work."""
        self.check()
        self.rounds += 1
        at, size = 101 * self.rounds, 4099
        self.here[at : at + size] = self.here_model[at : at + size] = noise(size, self.rounds)
        inbox = self.b.notes("ground")
        await self.peer.write(
            self.source[at : at + size], self.remote[at + 1 : at + 1 + size], note=b"good", topic="ground"
        )
        note = await inbox.get()
        assert (note.payload, note.aborted) == (b"good", False)
        self.model[at + 1 : at + 1 + size] = self.here[at : at + size]
        back = self.a.register(np.zeros(size, np.uint8))
        await self.peer.read(back, self.remote[at + 1 : at + 1 + size])
        assert bytes(back) == self.here[at : at + size].tobytes()
        self.check()

    def forget(self) -> None:
        """Drop the memory: pytest holds a fixture's value until after the check for leaks."""
        self.__dict__.clear()
