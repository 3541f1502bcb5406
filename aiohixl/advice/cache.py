# SPDX-License-Identifier: Apache-2.0
"""The KV cache that a configuration asks for: which layers keep what of how many tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from aiohixl.advice.fields import Config, head_dim, kv_heads, layer_count, number, required
from aiohixl.errors import ConfigError

__all__ = ["KV_DTYPES", "CacheLayers", "kv_dtype", "kv_layers"]

#: Bytes of one number of the cache. Scales that go with one-byte formats are left out: they are far below 1 %.
KV_DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}

_SPELLINGS = {
    "float32": "fp32",
    "float": "fp32",
    "fp32": "fp32",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp16": "fp16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_e4m3fn": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "int8": "int8",
}
#: These keep a state of a fixed size instead of one entry a token.
_STATE_ONLY = {"linear_attention", "mamba", "recurrent", "conv", "rwkv"}
#: Better no figure than a wrong one.
_OTHERWISE = ("compress_ratios", "global_head_dim", "hybrid_override_pattern")


@dataclass(frozen=True, slots=True)
class CacheLayers:
    """``count`` layers alike: ``token_bytes`` for each token, of the last ``window`` tokens (None: of all)."""

    count: int
    token_bytes: int
    window: int | None

    def nbytes(self, tokens: int) -> int:
        return self.count * self.token_bytes * (tokens if self.window is None else min(tokens, self.window))


def kv_dtype(config: Config, asked: str | None = None) -> str:
    """A key of `KV_DTYPES`: what was asked for, else what the configuration says of its cache, else its numbers' type.

    Weights in fp8 say nothing of the cache: DeepSeek's come in fp8, their cache in bf16.
    """
    if asked is not None:
        if asked not in KV_DTYPES:
            raise ConfigError(f"kv dtype: one of {', '.join(KV_DTYPES)}, not {asked!r}")
        return asked
    quantised = config.get("quantization_config") or config.get("quantization")
    for place in (config, quantised if isinstance(quantised, dict) else {}):
        for key in ("kv_cache_dtype", "kv_cache_quant_algo"):
            said = place.get(key)
            if isinstance(said, str) and said.lower() not in ("auto", "none", ""):
                return _spelled(key, said)
        scheme = place.get("kv_cache_scheme")
        if isinstance(scheme, dict):
            if scheme.get("num_bits") != 8 or scheme.get("type") not in ("float", "int"):
                raise ConfigError(f"config.json: kv_cache_scheme is not understood: {scheme!r}; give the kv dtype")
            return "fp8" if scheme["type"] == "float" else "int8"
    said = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    name = _spelled("torch_dtype", said)
    return "bf16" if KV_DTYPES[name] == 1 else name


def _spelled(key: str, said: object) -> str:
    known = _SPELLINGS.get(said.lower().removeprefix("torch.")) if isinstance(said, str) else None
    if known is None:
        raise ConfigError(f"config.json: {key} {said!r} is not understood; give the kv dtype")
    return known


def kv_layers(config: Config, dtype: str) -> tuple[CacheLayers, ...]:
    """The cache of a model with this configuration (its text part), alike layers together."""
    if config.get("is_encoder_decoder"):
        raise ConfigError("config.json: an encoder-decoder model: what its cache takes is not known here")
    size = KV_DTYPES[dtype]
    token_bytes = _token_numbers(config) * size
    counts = Counter(_windows(config))
    if not counts:
        raise ConfigError("config.json: none of its layers keeps a KV cache: there is nothing to move")
    return tuple(CacheLayers(count, token_bytes, window) for window, count in counts.items())


def _token_numbers(config: Config) -> int:
    """Numbers that one layer keeps for one token."""
    for field in _OTHERWISE:
        if config.get(field):
            raise ConfigError(f"config.json: {field} makes the cache one of a form that is not known here")
    rank = number(config, "kv_lora_rank")
    if rank:
        # Multi-head latent attention: one compressed vector and the rotary part of the key, shared by all heads; with
        # sparse attention, the indexer's key besides.
        return rank + required(config, "qk_rope_head_dim") + (number(config, "index_head_dim") or 0)
    return 2 * kv_heads(config) * head_dim(config)


def _windows(config: Config) -> list[int | None]:
    """For each layer that has a cache of its own, the tokens that it keeps (None: all)."""
    kinds = _kinds(config)
    # Gemma 3n: the last layers look into the cache of earlier ones.
    kinds = kinds[: len(kinds) - (number(config, "num_kv_shared_layers") or 0)]
    out: list[int | None] = []
    for kind in kinds:
        if kind == "full_attention":
            out.append(None)
        elif kind == "sliding_attention":
            out.append(required(config, "sliding_window"))
        elif kind == "chunked_attention":
            out.append(required(config, "attention_chunk_size"))
        elif kind not in _STATE_ONLY:
            raise ConfigError(f"config.json: layers of the kind {kind!r} are not known here")
    return out


def _kinds(config: Config) -> list[str]:
    count = layer_count(config)
    listed = config.get("layer_types") or config.get("layers_block_type")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != count:
            raise ConfigError(f"config.json: layer_types names {count} layers, one each, not {listed!r}")
        return ["full_attention" if kind == "attention" else str(kind) for kind in listed]
    every, offset = number(config, "attn_layer_period"), number(config, "attn_layer_offset") or 0
    if every:  # Jamba
        return ["full_attention" if i % every == offset else "mamba" for i in range(count)]
    every = number(config, "full_attention_interval")
    if every:  # Qwen3-Next
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    return [_kind(config, i) for i in range(count)]


def _kind(config: Config, layer: int) -> str:
    # Qwen's configurations give a window that is off unless this says otherwise.
    switch = config.get("use_sliding_window", not str(config.get("model_type", "")).startswith("qwen"))
    if not switch or not number(config, "sliding_window"):
        return "full_attention"
    pattern = number(config, "sliding_window_pattern") or (2 if config.get("model_type") == "gemma2" else None)
    if pattern:  # Gemma, Cohere: every nth layer sees all
        return "sliding_attention" if (layer + 1) % pattern else "full_attention"
    first = number(config, "max_window_layers")
    if first is not None:  # Qwen: the layers from there on
        return "sliding_attention" if layer >= first else "full_attention"
    return "sliding_attention"
