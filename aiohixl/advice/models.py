# SPDX-License-Identifier: Apache-2.0
"""Models by name, and by their ``config.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohixl.advice.cache import CacheLayers, kv_dtype, kv_layers
from aiohixl.advice.fields import Config
from aiohixl.advice.size import prefill_parameters
from aiohixl.errors import ConfigError

__all__ = ["BUILT_IN", "Model", "load_model", "read_model"]

_LARGEST_FILE = 16 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model matters on the wire, and for computing its cache again."""

    name: str
    #: Where the figures come from.
    source: str
    #: ``bf16``, ``fp8`` and so on: of the cache, not of the weights.
    kv_dtype: str
    layers: tuple[CacheLayers, ...]
    #: Parameters that one token meets, of experts only those it is routed to; None: the source does not say.
    parameters: int | None

    @property
    def token_bytes(self) -> int:
        """Bytes that one token adds to the cache, while it fits every window."""
        return self.nbytes(1)

    def nbytes(self, tokens: int) -> int:
        """Bytes of the cache of so many tokens."""
        return sum(layers.nbytes(tokens) for layers in self.layers)


def _llama(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int, dtype: str) -> Config:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "torch_dtype": dtype,
    }


#: Name -> the model's page on Hugging Face, whose config.json the figures are from, and those figures.
BUILT_IN: dict[str, tuple[str, Config]] = {
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf", _llama(32, 4096, 11008, 32, 32, 32000, "float16")),
    "llama-2-70b": ("meta-llama/Llama-2-70b-hf", _llama(80, 8192, 28672, 64, 8, 32000, "float16")),
    "llama-3-8b": ("meta-llama/Meta-Llama-3-8B", _llama(32, 4096, 14336, 32, 8, 128256, "bfloat16")),
    "llama-3-70b": ("meta-llama/Meta-Llama-3-70B", _llama(80, 8192, 28672, 64, 8, 128256, "bfloat16")),
    "mistral-7b": (
        "mistralai/Mistral-7B-v0.1",
        {**_llama(32, 4096, 14336, 32, 8, 32000, "bfloat16"), "sliding_window": 4096},
    ),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B", _llama(28, 3584, 18944, 28, 4, 152064, "bfloat16")),
    "deepseek-v3": (
        "deepseek-ai/DeepSeek-V3",
        {
            **_llama(61, 7168, 18432, 128, 128, 129280, "bfloat16"),
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
        },
    ),
}


def load_model(model: str, dtype: str | None = None) -> Model:
    """A name out of `BUILT_IN`, a ``config.json``, or the directory that it is in. Raises `ConfigError`.

    `dtype` (a key of `KV_DTYPES`) overrules what the configuration says of the cache.
    """
    known = BUILT_IN.get(model.lower())
    if known is not None:
        page, config = known
        return read_model(config, dtype, name=model.lower(), source=f"config.json of {page}")
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        raise ConfigError(
            f"model {model!r}: neither a name known here ({', '.join(BUILT_IN)}) nor a config.json that can be read: "
            f"{reason}"
        ) from None
    try:
        if len(text) > _LARGEST_FILE:
            raise ValueError(f"more than {_LARGEST_FILE} bytes")
        parsed = json.loads(text)
        if not isinstance(parsed, dict):
            raise ValueError("not a JSON object")
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"model {model!r}: {path} is not a config.json: {exc}") from None
    return read_model(parsed, dtype, name=_called(parsed, path), source=str(path))


def read_model(config: Config, dtype: str | None = None, *, name: str, source: str) -> Model:
    """A model by its configuration. Raises `ConfigError` that names the field."""
    text = _text_part(config)
    chosen = kv_dtype(text, dtype)
    return Model(name, source, chosen, kv_layers(text, chosen), prefill_parameters(text))


def _text_part(config: Config) -> Config:
    """Models that see or hear keep the language model's fields in a part of their own."""
    for key in ("text_config", "llm_config", "language_config"):
        part = config.get(key)
        if isinstance(part, dict):
            about = ("torch_dtype", "dtype", "quantization_config")
            return {**{k: config[k] for k in about if k in config}, **part}
    return config


def _called(config: dict[str, Any], path: Path) -> str:
    place = path.resolve().parent.name if path.name == "config.json" else path.stem
    name = config.get("_name_or_path") or place or config.get("model_type")
    return str(name)[:80]
