# SPDX-License-Identifier: Apache-2.0
"""Moving a cache beside computing it again."""

from __future__ import annotations

from dataclasses import dataclass

from aiohixl.advice.models import Model
from aiohixl.advice.units import format_bytes, format_rate, format_seconds
from aiohixl.errors import ConfigError

__all__ = ["ASSUMED_TFLOPS", "SLOW_GBIT", "Advice", "advise"]

#: What one accelerator reaches in a prefill, of the several hundred that its data sheet promises. An assumption.
ASSUMED_TFLOPS = 200.0
#: Below this a path adds to the time to the first token what a user can feel.
SLOW_GBIT = 25.0


@dataclass(frozen=True, slots=True)
class Advice:
    """What the cache of ``tokens`` tokens of a model costs on one path. Seconds, bytes, bytes per second."""

    model: Model
    tokens: int
    nbytes: int
    rate: float
    #: What moving it adds to the time to the first token.
    move_seconds: float
    #: What computing it again takes at ``tflops``; None: the model's configuration does not say enough.
    recompute_seconds: float | None
    tflops: float
    #: From this rate on, `stream_kv` hides the transfer behind the prefill; None as above.
    hiding_rate: float | None

    @property
    def slow(self) -> bool:
        return self.rate * 8 < SLOW_GBIT * 1e9

    def sentences(self) -> list[str]:
        model, tokens = self.model, f"{self.tokens:,} token" + ("s" if self.tokens != 1 else "")
        out = [
            f"The KV cache of {tokens} of {model.name} in {model.kv_dtype} is {format_bytes(self.nbytes)} "
            f"({format_bytes(model.token_bytes)} for a token; {model.source})."
        ]
        windows = sorted({layers.window for layers in model.layers if layers.window is not None})
        if any(window < self.tokens for window in windows):
            kept = " and ".join(f"{window:,}" for window in windows)
            out.append(
                f"That counts the last {kept} tokens of the layers with a window; an engine that keeps and sends all "
                "tokens of them has more to move."
            )
        out.append(
            f"To move it over this path ({format_rate(self.rate)}) takes {format_seconds(self.move_seconds)}, which is "
            "added to the time to the first token."
        )
        if self.recompute_seconds is None or self.hiding_rate is None:
            out.append("What computing it again takes is not known: the configuration does not give the MLPs' size.")
            return out
        assert model.parameters is not None
        out.append(
            f"To compute it again takes about {format_seconds(self.recompute_seconds)}: 2 x "
            f"{model.parameters / 1e9:.3g} billion parameters x {tokens} at {self.tflops:g} TFLOP/s, which is an "
            "assumption (--tflops), and without attention's own share, which grows with the square of the tokens."
        )
        out.append(self._verdict(self.recompute_seconds, self.hiding_rate))
        return out

    def _verdict(self, recompute: float, hiding: float) -> str:
        if self.move_seconds > recompute:
            times = self.move_seconds / recompute
            return (
                f"Computing it again is {times:.1f} times as fast: on this path keep prefill and decode together, or "
                f"move less (an fp8 cache, a model with fewer KV heads). Moving breaks even at {format_rate(hiding)}."
            )
        return (
            f"Moving it is {recompute / self.move_seconds:.1f} times as fast. With stream_kv the layers travel while "
            f"the prefill computes the next ones: from {format_rate(hiding)} on, all but the last layer is hidden."
        )


def advise(model: Model, tokens: int, rate: float, tflops: float = ASSUMED_TFLOPS) -> Advice:
    """What the cache of so many tokens costs on a path of `rate` bytes per second.

    Computing it again is taken as 2 x parameters x tokens floating-point operations at `tflops`.
    """
    if tokens < 1:
        raise ConfigError(f"tokens: a whole number from 1, not {tokens}")
    if not rate > 0 or not 0 < tflops < float("inf"):
        raise ConfigError(f"a rate and tflops above 0, not {rate} bytes/s and {tflops} TFLOP/s")
    nbytes = model.nbytes(tokens)
    again = None if model.parameters is None else 2 * model.parameters * tokens / (tflops * 1e12)
    return Advice(model, tokens, nbytes, rate, nbytes / rate, again, tflops, None if again is None else nbytes / again)
