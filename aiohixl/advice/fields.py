# SPDX-License-Identifier: Apache-2.0
"""Fields of a Hugging Face ``config.json``, which models spell in different ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohixl.errors import ConfigError

__all__ = ["Config", "head_dim", "heads", "hidden_size", "kv_heads", "layer_count", "number", "required"]

Config = Mapping[str, Any]

#: A field that is absurdly large is a mistake, or a file that is no model's.
_LARGEST = 1 << 32


def number(config: Config, *names: str) -> int | None:
    """The first of these fields that is there and not null, a whole number from 0."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
            raise ConfigError(f"config.json: {name} is a whole number, not {value!r}")
        return value
    return None


def required(config: Config, *names: str) -> int:
    """The same, and it must be there and above 0."""
    value = number(config, *names)
    if not value:
        raise ConfigError(
            f"config.json: no {names[0]}: this is not the configuration of a transformer with attention that is known "
            "here; look for the config.json beside the model's weights"
        )
    return value


def layer_count(config: Config) -> int:
    return required(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")


def heads(config: Config) -> int:
    return required(config, "num_attention_heads", "n_head", "n_heads")


def hidden_size(config: Config) -> int:
    return required(config, "hidden_size", "n_embd", "d_model")


def kv_heads(config: Config) -> int:
    """Heads of the cache: fewer than the query's with GQA, one with multi-query attention."""
    given = number(config, "num_key_value_heads", "n_head_kv")
    if given:
        return given
    if config.get("multi_query_attention") and (groups := number(config, "multi_query_group_num")):
        return groups
    # Falcon: `num_kv_heads` counts only in the new architecture, `multi_query` only in the old one.
    if config.get("new_decoder_architecture"):
        return number(config, "num_kv_heads") or heads(config)
    return 1 if config.get("multi_query") else heads(config)


def head_dim(config: Config) -> int:
    given = number(config, "head_dim", "kv_channels")
    if given:
        return given
    hidden, count = hidden_size(config), heads(config)
    if hidden % count:
        raise ConfigError(f"config.json: hidden_size {hidden} does not divide into {count} heads; head_dim is missing")
    return hidden // count
