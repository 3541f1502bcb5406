# SPDX-License-Identifier: Apache-2.0
"""What a model's KV cache costs on a path: its size, the time it travels, and the time to compute it again. Pure."""

from __future__ import annotations

from aiohixl.advice.cache import KV_DTYPES, CacheLayers, kv_layers
from aiohixl.advice.cost import ASSUMED_TFLOPS, SLOW_GBIT, Advice, advise
from aiohixl.advice.models import BUILT_IN, Model, load_model, read_model
from aiohixl.advice.size import prefill_parameters
from aiohixl.advice.units import format_bytes, format_rate, format_seconds

__all__ = [
    "ASSUMED_TFLOPS",
    "BUILT_IN",
    "KV_DTYPES",
    "SLOW_GBIT",
    "Advice",
    "CacheLayers",
    "Model",
    "advise",
    "format_bytes",
    "format_rate",
    "format_seconds",
    "kv_layers",
    "load_model",
    "prefill_parameters",
    "read_model",
]
