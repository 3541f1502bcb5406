# SPDX-License-Identifier: Apache-2.0
"""How many parameters a token meets on its way through a model."""

from __future__ import annotations

from aiohixl.advice.fields import Config, head_dim, heads, hidden_size, kv_heads, layer_count, number

__all__ = ["prefill_parameters"]

#: Their MLPs have no gate: two matrices instead of three.
_UNGATED = {"falcon", "gpt_neox", "nemotron", "phi", "starcoder2"}


def prefill_parameters(config: Config) -> int | None:
    """Parameters of a decoder, embeddings included; of experts, those that one token takes.

    Norms and biases are left out (below 0.1 %). None where the configuration does not say enough.
    """
    hidden, inner = hidden_size(config), number(config, "intermediate_size")
    vocabulary = number(config, "vocab_size")
    if not inner or not vocabulary:
        return None
    layers = layer_count(config)
    experts = number(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk")
    width = number(config, "moe_intermediate_size") or inner
    dense = layers if not experts else min(number(config, "first_k_dense_replace") or 0, layers)
    widths = dense * inner
    routers = 0
    if experts:
        shared = (number(config, "n_shared_experts") or 0) * width
        shared += number(config, "shared_expert_intermediate_size") or 0
        widths += (layers - dense) * (experts * width + shared)
        routers = (layers - dense) * (number(config, "n_routed_experts", "num_local_experts", "num_experts") or 0)
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    matrices = 2 if config.get("model_type") in _UNGATED else 3
    return layers * _attention(config, hidden) + hidden * (matrices * widths + routers) + embeddings


def _attention(config: Config, hidden: int) -> int:
    count = heads(config)
    rank = number(config, "kv_lora_rank")
    if not rank:
        size = head_dim(config)
        return hidden * size * (2 * count + 2 * kv_heads(config))
    rope = number(config, "qk_rope_head_dim") or 0
    nope, value = number(config, "qk_nope_head_dim") or 0, number(config, "v_head_dim") or 0
    queries = count * (nope + rope)
    q_rank = number(config, "q_lora_rank")
    into_queries = q_rank * (hidden + queries) if q_rank else hidden * queries
    return into_queries + hidden * (rank + rope) + rank * count * (nope + value) + count * value * hidden
