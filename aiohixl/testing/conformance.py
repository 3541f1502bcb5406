# SPDX-License-Identifier: Apache-2.0
"""What every provider must do, whatever carries the bytes.

``CONFORMANCE`` maps names to checks; each takes a `Bench` and raises ``AssertionError``. Run them over every kind of
memory that a provider reaches::

    @pytest.mark.parametrize("check", CONFORMANCE.values(), ids=CONFORMANCE)
    async def test_provider(check):
        async with engine_pair() as (a, b, peer):
            await check(Bench(a, b, peer, allocated, foreign))
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aiohixl import (
    Engine,
    Peer,
    Region,
    RegionError,
    RemoteAccessError,
    RemoteRegion,
    Transfer,
    TransferError,
    wait_all,
)

__all__ = ["CONFORMANCE", "Bench", "Check", "Held", "Memory", "allocated", "foreign", "npu"]

Bytes = npt.NDArray[np.uint8]
#: Makes registered memory: (engine, nbytes, name, access) -> its region.
Memory = Callable[[Engine, int, str, str], Awaitable[Region]]


async def allocated(engine: Engine, nbytes: int, name: str, access: str = "rw") -> Region:
    """Memory from `Engine.allocate`."""
    return await engine.allocate(nbytes, name, access=access)


async def foreign(engine: Engine, nbytes: int, name: str, access: str = "rw") -> Region:
    """Memory that somebody else allocated, registered."""
    return await engine.register(np.zeros(nbytes, np.uint8), name, access=access)


async def npu(engine: Engine, nbytes: int, name: str, access: str = "rw") -> Region:
    """Memory of the engine's NPU."""
    return await engine.allocate(nbytes, name, access=access, device="npu")


class Held:
    """A region's bytes, wherever they are: the host's at once, an NPU's by a copy."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.view = np.frombuffer(memoryview(region), np.uint8) if region.device == "cpu" else None

    async def get(self) -> Bytes:
        """A copy of all of them, which is the caller's."""
        if self.view is not None:
            return self.view.copy()
        out = np.empty(self.region.nbytes, np.uint8)
        await self.region.download_into(out)
        return out

    async def set(self, bytes_or_value: Bytes | int) -> None:
        if self.view is not None:
            self.view[:] = bytes_or_value
        else:
            await self.region.upload(np.full(self.region.nbytes, bytes_or_value, np.uint8))

    async def equals(self, model: Bytes) -> bool:
        return bool((await self.get() == model).all())


@dataclass
class Bench:
    """Two connected engines and the kinds of memory to use on each."""

    a: Engine
    b: Engine
    peer: Peer
    here: Memory = allocated
    there: Memory = allocated
    seed: int = 0
    _names: int = field(default=0, repr=False)

    def noise(self, nbytes: int) -> Bytes:
        self.seed += 1
        return np.random.default_rng(self.seed).integers(0, 256, nbytes, dtype=np.uint8)

    async def local(self, nbytes: int) -> tuple[Region, Held]:
        held = Held(await self.here(self.a, nbytes, "", "rw"))
        await held.set(self.noise(nbytes))
        return held.region, held

    async def remote(self, nbytes: int, access: str = "rw") -> tuple[Region, RemoteRegion, Held]:
        self._names += 1
        name = f"bench-{self._names}"
        held = Held(await self.there(self.b, nbytes, name, access))
        await held.set(self.noise(nbytes))
        return held.region, await self.peer.region(name), held


Check = Callable[[Bench], Awaitable[None]]
CONFORMANCE: dict[str, Check] = {}


def check(function: Check) -> Check:
    CONFORMANCE[function.__name__] = function
    return function


@check
async def write_is_remote_complete(bench: Bench) -> None:
    """Contract 1, at sizes around pages, chunks and the inline limit."""
    nbytes = (3 << 20) + 17
    source, held = await bench.local(nbytes)
    _, remote, target = await bench.remote(nbytes)
    sent, model = await held.get(), await target.get()
    for size in (0, 1, 63, 4096, 4097, 32768, 32769, 65536, (1 << 20) - 1, (1 << 20) + 1, nbytes):
        offset = (nbytes - size) // 3
        model[offset : offset + size] = sent[:size]
        transfer = await bench.peer.write(source[:size], remote[offset : offset + size])
        assert transfer.nbytes == size
        assert await target.equals(model), f"a write of {size} bytes"


@check
async def read_is_complete(bench: Bench) -> None:
    nbytes = (2 << 20) + 5
    target, held = await bench.local(nbytes)
    _, remote, there = await bench.remote(nbytes)
    kept, model = await there.get(), await held.get()
    for size in (0, 1, 4096, 32769, (1 << 20) + 1, nbytes):
        model[:size] = kept[nbytes - size :]
        await bench.peer.read(target[:size], remote[nbytes - size :])
        assert await held.equals(model), f"a read of {size} bytes"


@check
async def scattered_rows_land_where_they_belong(bench: Bench) -> None:
    nbytes, rows = 1 << 20, 3000
    source, held = await bench.local(nbytes)
    _, remote, target = await bench.remote(nbytes)
    dice = np.random.default_rng(7)
    slots = dice.permutation(nbytes // 300)[:rows]
    there = slots * 300 + dice.integers(0, 50, rows)
    sizes = dice.integers(0, 250, rows)
    here = dice.integers(0, nbytes - 250, rows)
    sent, model = await held.get(), await target.get()
    for lo, ro, n in zip(here, there, sizes, strict=True):
        model[ro : ro + n] = sent[lo : lo + n]
    await bench.peer.write_many(source, here, remote, there, sizes)
    assert await target.equals(model)
    for lo, ro, n in zip(slots * 300, there, sizes, strict=True):
        sent[lo : lo + n] = model[ro : ro + n]
    await bench.peer.read_many(source, slots * 300, remote, there, sizes)
    assert await held.equals(sent)


@check
async def many_at_once(bench: Bench) -> None:
    count, size = 1000, 5000
    source, held = await bench.local(count * size)
    _, remote, target = await bench.remote(count * size)
    await wait_all(
        bench.peer.write(source[i * size : (i + 1) * size], remote[i * size : (i + 1) * size]) for i in range(count)
    )
    assert await target.equals(await held.get())


@check
async def a_note_follows_its_bytes(bench: Bench) -> None:
    """Contract 2."""
    nbytes = 4 << 20
    source, held = await bench.local(nbytes)
    _, remote, target = await bench.remote(nbytes)
    transfer = bench.peer.write(source, remote, note=b"here", topic="conformance")
    note = await bench.b.notes("conformance").get()
    assert await target.equals(await held.get())
    assert (note.payload, note.aborted) == (b"here", False)
    await transfer


@check
async def a_cancelled_write_leaves_the_source_alone(bench: Bench) -> None:
    """Contract 3: after the cancellation the source is overwritten, and none of the new bytes may arrive."""
    nbytes = 16 << 20
    source, held = await bench.local(nbytes)
    _, remote, target = await bench.remote(nbytes)
    await held.set(1)
    await target.set(0)
    await bench.peer.write(source[:1], remote[:1])
    for _ in range(5):
        task = asyncio.ensure_future(bench.peer.write(source, remote))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await held.set(2)
        await bench.peer.notify(b"", topic="fence")  # whatever was on its way has had every chance to arrive
        assert not (await target.get() == 2).any(), "a byte written after the cancellation arrived"
        await held.set(1)
    await bench.peer.write(source, remote)
    assert (await target.get() == 1).all()
    await drain_topic(bench, "fence", 5)


@check
async def revoked_memory_stays_untouched(bench: Bench) -> None:
    """Contract 3, the owner's side."""
    nbytes, block = 1 << 20, 1 << 16
    source, _ = await bench.local(nbytes)
    region, remote, target = await bench.remote(nbytes)
    await region.revoke(spans=[(block, block)])
    model = await target.get()
    await refused(lambda: bench.peer.write(source[:block], remote[block : 2 * block]))
    await refused(lambda: bench.peer.read(source[:block], remote[block : 2 * block]))
    assert await target.equals(model)
    await bench.peer.write(source[:block], remote[:block])  # the rest is as it was
    region.grant(spans=[(block, block)])
    for _ in range(1000):  # the grant travels to the peer
        try:
            await bench.peer.write(source[:block], remote[block : 2 * block])
            break
        except RemoteAccessError:
            await asyncio.sleep(0)
    else:
        raise AssertionError("a granted span stays refused")
    await region.deregister()
    await refused(lambda: bench.peer.write(source[:block], remote[:block]))


@check
async def access_bits_hold(bench: Bench) -> None:
    """Contract 10."""
    source, _ = await bench.local(4096)
    _, readable, _ = await bench.remote(4096, "r")
    _, writable, target = await bench.remote(4096, "w")
    await bench.peer.read(source, readable)
    await refused(lambda: bench.peer.read(source, writable))
    before = await target.get()
    await bench.peer.write(source, writable)
    assert not await target.equals(before)
    await refused(lambda: bench.peer.write(source, readable))


@check
async def one_bad_row_moves_nothing(bench: Bench) -> None:
    """Contract 7."""
    source, _ = await bench.local(1 << 16)
    _, remote, target = await bench.remote(1 << 16)
    model = await target.get()
    offsets = np.arange(100) * 64
    bad = offsets.copy()
    bad[57] = (1 << 16) - 63
    await bad_rows(lambda: bench.peer.write_many(source, offsets, remote, bad, 64), "57")
    bad[57] = bad[3] + 1
    await bad_rows(lambda: bench.peer.write_many(source, offsets, remote, bad, 64), "row")
    assert await target.equals(model)
    await bench.peer.write_many(source, offsets, remote, offsets, 64)  # without it, they are fine
    assert not await target.equals(model)


async def bad_rows(post: Callable[[], Transfer], word: str) -> None:
    """Refused, with `word` in the error's text."""
    try:
        await post()
    except RegionError as exc:
        if word not in str(exc):
            raise AssertionError(f"an error without {word!r}: {exc}") from exc
    else:
        raise AssertionError(f"accepted; expected an error with {word!r}")


async def refused(post: Callable[[], Transfer]) -> None:
    """By the post or by the await: whichever of the two finds out."""
    try:
        await post()
    except RemoteAccessError:
        return
    except TransferError as exc:
        raise AssertionError(f"refused with the wrong error: {exc!r}") from exc
    raise AssertionError("it was not refused")


async def drain_topic(bench: Bench, topic: str, count: int) -> None:
    for _ in range(count):
        await bench.b.notes(topic).get()
