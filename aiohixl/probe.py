# SPDX-License-Identifier: Apache-2.0
"""What a path gives: latency, bandwidth each way and failures, measured with the transfers that applications use."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from aiohixl.errors import ConfigError, HixlError, RemoteAccessError, TransferError
from aiohixl.region import Region, RemoteRegion, Span
from aiohixl.scratch import SCRATCH_BYTES, Lender, ScratchDesk
from aiohixl.transfer import Transfer

__all__ = ["Latency", "ProbeResult", "Rate", "Way", "probe_path"]

SMALL = 4096
SIZES = (64 << 10, 1 << 20, 8 << 20, SCRATCH_BYTES)
#: Of the time that a probe may take: for the latency of one way, and for the bandwidth of one way.
_LATENCY_SHARE, _BANDWIDTH_SHARE = 0.1, 0.4
_FEWEST, _MOST_SMALL, _MOST_LARGE = 5, 1000, 200
_WARM_UP = 8
#: So many failures without one success: the path does not work, and there is nothing to measure.
_HOPELESS = 8
#: For the peer to lend memory, which its event loop does.
ANSWER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of an awaited transfer of 4 KiB, one at a time."""

    median: float
    p99: float
    count: int


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes per second of awaited transfers of ``nbytes``, one at a time."""

    nbytes: int
    rate: float
    count: int


@dataclass(frozen=True, slots=True)
class Way:
    """One direction of a path."""

    latency: Latency
    #: By growing size. Sizes that would have taken longer than the probe may are left out.
    rates: tuple[Rate, ...]

    @property
    def rate(self) -> float:
        """Bytes per second of the largest size: smaller ones pay for latency, or profit from the CPU's caches."""
        return self.rates[-1].rate


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What `Peer.probe` measured, between host memory here and host memory there."""

    peer: str
    #: ``shm``, ``tcp``, ``hixl``.
    provider: str
    #: Why that path.
    reason: str
    #: From here to the peer.
    write: Way
    #: From the peer to here.
    read: Way
    #: Transfers that were made, and those among them that failed; the last failure in words.
    transfers: int
    failed: int
    failure: str | None
    #: On tcp, of all connections of this host meanwhile: segments that it sent, and those among them that it sent
    #: again. None where that is not known.
    segments: int | None
    resent: int | None
    #: Seconds that the measuring took.
    elapsed: float

    @property
    def loss(self) -> float:
        """Share of the transfers that failed, 0 to 1."""
        return self.failed / self.transfers if self.transfers else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON: seconds, bytes, bytes per second."""
        out = asdict(self)
        out["write"]["rate"], out["read"]["rate"], out["loss"] = self.write.rate, self.read.rate, self.loss
        return out


class Probed(Lender, Protocol):
    """A peer, as far as it is needed here."""

    def write(self, local: Region | Span, remote: RemoteRegion | Span) -> Transfer: ...
    def read(self, local: Region | Span, remote: RemoteRegion | Span) -> Transfer: ...
    def route(self, local: Region | Span, remote: RemoteRegion | Span) -> tuple[str, str]: ...


async def probe_path(peer: Probed, desk: ScratchDesk, seconds: float) -> ProbeResult:
    """See `Peer.probe`."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.1 <= seconds <= 60:
        raise ConfigError(f"probe: seconds from 0.1 to 60, not {seconds!r}")
    local = desk.allocate(SCRATCH_BYTES)
    try:
        await local
        async with desk.borrowed(peer, SCRATCH_BYTES, wait=ANSWER_SECONDS) as remote:
            return await _measure(peer, local, remote, seconds)
    finally:
        with contextlib.suppress(HixlError):  # an engine that is closed by now; a quarantine is told by its event
            await local.deregister()


async def _measure(peer: Probed, local: Region, remote: RemoteRegion, seconds: float) -> ProbeResult:
    provider, reason = peer.route(local, remote)
    begun, before = time.perf_counter(), _tcp_segments() if provider == "tcp" else None
    ways = [_Run(post, local, remote) for post in (peer.write, peer.read)]
    for way in ways:
        for _ in range(_WARM_UP):
            await way.once(SMALL)
    latencies = [await way.latency(seconds * _LATENCY_SHARE) for way in ways]
    rates = [await way.rates(seconds * _BANDWIDTH_SHARE) for way in ways]
    after = _tcp_segments() if before is not None else None
    sent, resent = (None, None) if before is None or after is None else (after[0] - before[0], after[1] - before[1])
    failures = [way.error for way in ways if way.error is not None]
    return ProbeResult(
        peer=peer.name,
        provider=provider,
        reason=reason,
        write=Way(latencies[0], rates[0]),
        read=Way(latencies[1], rates[1]),
        transfers=sum(way.count for way in ways),
        failed=sum(way.failed for way in ways),
        failure=str(failures[-1]) if failures else None,
        segments=sent,
        resent=resent,
        elapsed=time.perf_counter() - begun,
    )


class _Run:
    """Transfers one way, one at a time."""

    def __init__(self, post: Callable[[Span, Span], Transfer], local: Region, remote: RemoteRegion) -> None:
        self._post = post
        self._local, self._remote = local, remote
        self.count = self.failed = 0
        self.error: TransferError | None = None

    async def once(self, nbytes: int) -> float | None:
        """Seconds from the post to its completion; None when it failed and the path still stands."""
        self.count += 1
        begun = time.perf_counter()
        try:
            await self._post(self._local[:nbytes], self._remote[:nbytes])
        except RemoteAccessError:
            raise  # the memory was taken back: there is nothing more to measure
        except TransferError as exc:
            self.failed += 1
            self.error = exc
            if self.failed == self.count and self.failed >= _HOPELESS:
                raise
            return None
        return time.perf_counter() - begun

    async def _several(self, nbytes: int, seconds: float, fewest: int, most: int) -> list[float]:
        """Times of those that succeeded, sorted; at least one."""
        times: list[float] = []
        tried, end = 0, time.perf_counter() + seconds
        while not times or tried < fewest or (tried < most and time.perf_counter() < end):
            tried += 1
            took = await self.once(nbytes)
            if took is not None:
                times.append(took)
            elif not times and tried >= _HOPELESS:
                assert self.error is not None
                raise self.error
        return sorted(times)

    async def latency(self, seconds: float) -> Latency:
        times = await self._several(SMALL, seconds, _FEWEST, _MOST_SMALL)
        return Latency(times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)], len(times))

    async def rates(self, seconds: float) -> tuple[Rate, ...]:
        found: list[Rate] = []
        end = time.perf_counter() + seconds
        for index, nbytes in enumerate(SIZES):
            left = end - time.perf_counter()
            if found and nbytes / found[-1].rate > left:
                break
            times = await self._several(nbytes, left / (len(SIZES) - index), 1, _MOST_LARGE)
            found.append(Rate(nbytes, nbytes * len(times) / sum(times), len(times)))
        return tuple(found)


def _tcp_segments() -> tuple[int, int] | None:
    """Segments sent, and sent again, by this network namespace so far."""
    try:
        with open("/proc/net/snmp", encoding="ascii") as lines:
            names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        counters = dict(zip(names, values, strict=True))
        return int(counters["OutSegs"]), int(counters["RetransSegs"])
    except (OSError, ValueError, KeyError):
        return None
