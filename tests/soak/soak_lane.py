# SPDX-License-Identifier: Apache-2.0
"""One writer's part of a peer's memory, and a model of it: as no other writes there, each byte is known."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

import aiohixl

Bytes = npt.NDArray[np.uint8]

SIZE = 1 << 20  # bytes of a lane
SCRIBBLE = 0xEE  # over each buffer once its transfer has ended: what goes out late shows, and what comes in late
CHECK_TOPIC, OK_TOPIC = "check", "ok"
PATIENCE = 30.0  # seconds; only a failure waits so long


def view(region: Any) -> Bytes:
    return np.frombuffer(region, np.uint8)


class WrongByteError(AssertionError):
    """Memory that differs from the model."""


def pattern(ident: int, offset: int, nbytes: int) -> Bytes:
    """The bytes of transfer `ident` for the span at `offset`: each depends on both."""
    first = offset // 8
    words = np.arange(first, (offset + nbytes + 7) // 8, dtype=np.uint64)
    with np.errstate(over="ignore"):
        words = (words + np.uint64(ident * 0x9E3779B97F4A7C15 % 2**64)) * np.uint64(0xBF58476D1CE4E5B9)
        words ^= words >> np.uint64(29)
    start = offset - first * 8
    return words.view(np.uint8)[start : start + nbytes]


def compare(got: Bytes, expected: Bytes, what: str, other: Bytes | None = None) -> None:
    """Each byte is the expected one, or that of `other`."""
    right = got == expected
    if other is not None:
        right |= got == other
    if not right.all():
        at = int(np.flatnonzero(~right)[0])
        wrong = int((~right).sum())
        raise WrongByteError(
            f"{what}: {wrong} of {got.nbytes} bytes are wrong, first at {at}: {int(got[at])}, not {int(expected[at])}"
            + (", which is a buffer's that was given back" if got[at] == SCRIBBLE else "")
        )


class Answers:
    """What peers say once they have looked at the bytes of a note."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @contextlib.contextmanager
    def expected(self, ident: int) -> Iterator[asyncio.Future[None]]:
        future = self._waiting[ident] = asyncio.get_running_loop().create_future()
        try:
            yield future
        finally:
            del self._waiting[ident]

    def came(self, ident: int) -> None:
        future = self._waiting.get(ident)
        if future is not None and not future.done():
            future.set_result(None)

    async def wait(self, answer: asyncio.Future[None], peer: aiohixl.Peer) -> None:
        """Until it is there, or the peer is lost (`PeerLostError`)."""
        for _ in range(int(PATIENCE * 10)):
            done, _ = await asyncio.wait([answer], timeout=0.1)
            if done:
                return
            if peer.is_lost:
                await peer.notify(b"", topic=OK_TOPIC)  # raises what there is to say
        raise WrongByteError(f"a note was delivered to {peer.name}, and never came out there")


class Lane:
    """Random transfers, one after the other, each checked. `source` and `sink` are spans of this lane's alone."""

    def __init__(
        self,
        peer: aiohixl.Peer,
        remote: aiohixl.RemoteRegion,
        base: int,
        scratch: aiohixl.Region,
        scratch_at: int,
        tally: collections.Counter[str],
        answers: Answers,
    ) -> None:
        self._peer, self._remote, self._base = peer, remote, base
        self._scratch, self._source_at, self._sink_at = scratch, scratch_at, scratch_at + SIZE
        memory = view(scratch)
        self._source = memory[self._source_at : self._source_at + SIZE]
        self._sink = memory[self._sink_at : self._sink_at + SIZE]
        self._expected = np.zeros(SIZE, np.uint8)
        self._tally = tally
        self._answers = answers
        self._dice = random.Random()

    async def run(self) -> None:
        """Until the peer is lost, or a byte is wrong."""
        self._sink[:] = SCRIBBLE
        await self._read(0, SIZE)
        self._expected[:] = self._sink  # of an earlier connection, which may have ended in the middle of a write
        self._sink[:] = SCRIBBLE
        kinds = [self.write, self.read, self.scatter, self.note, self.cancelled_write, self.cancelled_read]
        while True:
            kind = self._dice.choice(kinds)
            compare(self._sink, np.full(SIZE, SCRIBBLE, np.uint8), f"before {kind.__name__}: a read's buffer")
            await kind()
            self._tally[kind.__name__] += 1
            await asyncio.sleep(self._dice.random() * 0.01)

    def _span(self) -> tuple[int, int]:
        nbytes = int(2 ** (self._dice.random() * 20))
        return self._dice.randrange(SIZE - nbytes + 1), nbytes

    def _there(self, offset: int, nbytes: int) -> aiohixl.Span:
        return self._remote[self._base + offset : self._base + offset + nbytes]

    def _fill(self, offset: int, nbytes: int) -> tuple[Bytes, int]:
        ident = self._dice.getrandbits(48)
        new = pattern(ident, offset, nbytes)
        self._source[offset : offset + nbytes] = new
        return new, ident

    def _post(self, offset: int, nbytes: int, note: bytes | None = None) -> aiohixl.Transfer:
        here = self._scratch[self._source_at + offset : self._source_at + offset + nbytes]
        return self._peer.write(here, self._there(offset, nbytes), note=note, topic=CHECK_TOPIC if note else "")

    async def _ended(self, transfer: aiohixl.Transfer, buffer: Bytes, patience: float | None = None) -> bool:
        """Whether it came to its end within `patience`; the buffer is ours again, and scribbled over, in any case."""
        try:
            async with asyncio.timeout(patience):
                await transfer
            return True
        except TimeoutError:
            if patience is None:
                raise
            self._tally["cancelled"] += 1
            return False
        finally:
            if not transfer.quiesced:
                self._tally["quarantined"] += 1
                await transfer.wait_quiesced()
            buffer[:] = SCRIBBLE

    async def write(self) -> None:
        offset, nbytes = self._span()
        new, _ = self._fill(offset, nbytes)
        await self._ended(self._post(offset, nbytes), self._source)
        self._expected[offset : offset + nbytes] = new
        self._tally["bytes"] += nbytes

    async def _read(self, offset: int, nbytes: int) -> None:
        await self._peer.read(
            self._scratch[self._sink_at + offset : self._sink_at + offset + nbytes], self._there(offset, nbytes)
        )
        self._tally["bytes"] += nbytes

    async def _check(self, offset: int, nbytes: int, what: str, other: Bytes | None = None) -> None:
        await self._read(offset, nbytes)
        got = self._sink[offset : offset + nbytes]
        compare(got, self._expected[offset : offset + nbytes], what, other)
        if other is not None:
            self._expected[offset : offset + nbytes] = got
        got[:] = SCRIBBLE

    async def read(self) -> None:
        await self._check(*self._span(), "read")

    async def scatter(self) -> None:
        block = self._dice.choice([64, 512, 4096])
        chosen = self._dice.sample(range(SIZE // block), self._dice.randint(1, 200))
        offsets = np.array(chosen, np.int64) * block
        for offset in offsets:
            new, _ = self._fill(int(offset), block)
            self._expected[offset : offset + block] = new
        here, there = offsets + self._source_at, offsets + self._base
        await self._ended(self._peer.write_many(self._scratch, here, self._remote, there, block), self._source)
        self._tally["bytes"] += block * len(chosen)

    async def note(self) -> None:
        """The peer itself looks at the bytes when the note has come."""
        offset, nbytes = self._span()
        new, ident = self._fill(offset, nbytes)
        said = {"at": self._base + offset, "offset": offset, "nbytes": nbytes, "ident": ident}
        with self._answers.expected(ident) as answer:  # it may come before we hear that the note was delivered
            await self._ended(self._post(offset, nbytes, json.dumps(said).encode()), self._source)
            self._expected[offset : offset + nbytes] = new
            self._tally["bytes"] += nbytes
            await self._answers.wait(answer, self._peer)

    async def cancelled_write(self) -> None:
        """What has landed is a part of it, and no more comes."""
        offset, nbytes = self._span()
        new, _ = self._fill(offset, nbytes)
        if await self._ended(self._post(offset, nbytes), self._source, self._dice.random() * 0.002):
            self._expected[offset : offset + nbytes] = new
        else:
            await self._check(offset, nbytes, "after a cancelled write", new)

    async def cancelled_read(self) -> None:
        offset, nbytes = self._span()
        here = self._scratch[self._sink_at + offset : self._sink_at + offset + nbytes]
        await self._ended(self._peer.read(here, self._there(offset, nbytes)), self._sink, self._dice.random() * 0.002)
