# SPDX-License-Identifier: Apache-2.0
"""``aiohixl probe``: what it measures, in words."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from aiohixl import Engine
from aiohixl.advice import SLOW_GBIT, Advice, Model, advise, format_bytes, format_rate, format_seconds
from aiohixl.probe import ProbeResult, Way

__all__ = ["Asked", "Report", "measure"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says of the engines."""

    peer: str
    rendezvous: str | None = None
    token: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    transport: str = "auto"
    seconds: float = 2.0


async def measure(asked: Asked) -> ProbeResult:
    """Open an engine, connect, probe. Raises what these raise."""
    options: dict[str, Any] = {"transports": [asked.transport]}
    for key in ("rendezvous", "token", "secret"):
        if (value := getattr(asked, key)) is not None:
            options[key] = value
    async with Engine(f"probe-{os.uname().nodename[:64]}-{os.getpid()}", **options) as engine:
        peer = await engine.connect(asked.peer)
        return await peer.probe(seconds=asked.seconds)


class Report:
    """A result, with what it means for a model where one is given."""

    def __init__(self, result: ProbeResult, model: Model | None, tokens: int, tflops: float) -> None:
        self.result = result
        # The prefill side writes: that is the way that the first token waits for.
        self.advice: Advice | None = None if model is None else advise(model, tokens, result.write.rate, tflops)

    def as_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"ok": True, **self.result.as_dict(), "slow": self._slow, "advice": None}
        if self.advice is not None:
            found = self.advice
            out["advice"] = {
                "model": found.model.name,
                "source": found.model.source,
                "kv_dtype": found.model.kv_dtype,
                "tokens": found.tokens,
                "token_bytes": found.model.token_bytes,
                "nbytes": found.nbytes,
                "move_seconds": found.move_seconds,
                "recompute_seconds": found.recompute_seconds,
                "parameters": found.model.parameters,
                "assumed_tflops": found.tflops,
                "hiding_rate": found.hiding_rate,
                "sentences": found.sentences(),
            }
        return out

    @property
    def _slow(self) -> bool:
        return self.result.write.rate * 8 < SLOW_GBIT * 1e9

    def render(self) -> str:
        result = self.result
        lines = [
            f"{result.peer}: by {result.provider} ({result.reason}), host memory to host memory",
            *_way("write to it", result.write),
            *_way("read from it", result.read),
            f"  {'failed':<14}{self._failed()}",
        ]
        if result.segments is not None and result.resent is not None:
            share = result.resent / max(result.segments, 1)
            lines.append(
                f"  {'sent again':<14}{result.resent:,} of {result.segments:,} TCP segments ({share:.2%}), of all "
                "connections of this host"
            )
        if self.advice is not None:
            lines += ["", *self.advice.sentences()]
        elif self._slow:
            lines += [
                "",
                f"Below {SLOW_GBIT:g} Gbit/s a KV cache takes long enough to be felt in the time to the first token: "
                "--model llama-2-7b --tokens 4096 says how long, for that model and others.",
            ]
        return "\n".join(lines)

    def _failed(self) -> str:
        result = self.result
        text = f"{result.failed:,} of {result.transfers:,} transfers"
        return text if result.failure is None else f"{text} ({result.loss:.2%}), the last one: {result.failure}"


def _way(what: str, way: Way) -> list[str]:
    late = way.latency
    rates = ", ".join(f"{format_rate(rate.rate)} ({format_bytes(rate.nbytes)})" for rate in reversed(way.rates))
    return [
        f"  {what:<14}{rates}",
        f"  {'':<14}4 KiB awaited: median {format_seconds(late.median)}, p99 {format_seconds(late.p99)} "
        f"of {late.count:,}",
    ]
