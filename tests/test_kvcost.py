# SPDX-License-Identifier: Apache-2.0
"""What a model's KV cache takes, from its configuration; the expected figures are worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiohixl.advice import (
    BUILT_IN,
    KV_DTYPES,
    advise,
    format_bytes,
    format_rate,
    format_seconds,
    load_model,
    prefill_parameters,
    read_model,
)
from aiohixl.errors import ConfigError

#: One layer of 8 heads, 2 of them for K and V, of 16 numbers: 64 numbers, 128 bytes in bf16.
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}
LAYER = 128


def nbytes(config: dict[str, Any], tokens: int, dtype: str | None = None) -> int:
    return read_model(config, dtype, name="a model", source="a test").nbytes(tokens)


def small(**fields: Any) -> dict[str, Any]:
    """`SMALL` with other fields; None takes one out."""
    return {key: value for key, value in {**SMALL, **fields}.items() if value is not None}


# --- models by name


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("llama-2-7b", 2 * 32 * 32 * 128 * 2),
        ("llama-2-70b", 2 * 80 * 8 * 128 * 2),
        ("llama-3-8b", 2 * 32 * 8 * 128 * 2),
        ("llama-3-70b", 2 * 80 * 8 * 128 * 2),
        ("mistral-7b", 2 * 32 * 8 * 128 * 2),
        ("qwen2.5-7b", 2 * 28 * 4 * 128 * 2),
        ("deepseek-v3", 61 * (512 + 64) * 2),
    ],
)
def test_bytes_of_a_token(name: str, token_bytes: int) -> None:
    model = load_model(name)
    assert model.token_bytes == token_bytes
    assert model.nbytes(4096) == 4096 * token_bytes
    assert load_model(name, "fp8").token_bytes * 2 == token_bytes
    assert "config.json of" in model.source


@pytest.mark.parametrize(
    ("name", "published", "tolerance"),
    [
        # The totals of the weights' files; norms and biases are what is left out.
        ("llama-2-7b", 6_738_415_616, 0.001),
        ("llama-2-70b", 68_976_648_192, 0.001),
        ("llama-3-8b", 8_030_261_248, 0.001),
        ("llama-3-70b", 70_553_706_496, 0.001),
        ("mistral-7b", 7_241_732_096, 0.001),
        ("qwen2.5-7b", 7_615_616_512, 0.001),
        # "37B activated", rounded.
        ("deepseek-v3", 37_000_000_000, 0.02),
    ],
)
def test_parameters_are_those_published(name: str, published: int, tolerance: float) -> None:
    assert load_model(name).parameters == pytest.approx(published, rel=tolerance)


def test_every_name_is_tested() -> None:
    assert len(BUILT_IN) == 7


# --- configurations


def test_grouped_heads() -> None:
    assert nbytes(SMALL, 10) == 10 * 6 * LAYER
    assert nbytes(small(num_key_value_heads=None), 10) == 10 * 6 * LAYER * 4
    assert nbytes(small(num_key_value_heads=None, multi_query=True), 10) == 10 * 6 * LAYER // 2
    assert nbytes(small(head_dim=32), 10) == 10 * 6 * LAYER * 2


def test_falcon_in_its_two_architectures() -> None:
    assert nbytes(small(num_key_value_heads=None, num_kv_heads=8, multi_query=True), 1) == 6 * LAYER // 2
    new = small(num_key_value_heads=None, num_kv_heads=2, multi_query=True, new_decoder_architecture=True)
    assert nbytes(new, 1) == 6 * LAYER


def test_names_of_gpt2() -> None:
    config = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "torch_dtype": "float32"}
    assert nbytes(config, 100) == 100 * 12 * 2 * 768 * 4
    assert prefill_parameters(config) is None


def test_latent_attention_is_one_vector_for_all_heads() -> None:
    config = small(kv_lora_rank=32, qk_rope_head_dim=8)
    assert nbytes(config, 10) == 10 * 6 * 40 * 2
    assert nbytes({**config, "index_head_dim": 16}, 10) == 10 * 6 * 56 * 2
    with pytest.raises(ConfigError, match="no qk_rope_head_dim"):
        nbytes(small(kv_lora_rank=32), 10)


@pytest.mark.parametrize(
    ("fields", "full", "windowed"),
    [
        ({"model_type": "mistral"}, 0, 6),
        ({"sliding_window": None}, 6, 0),
        ({"sliding_window": 0}, 6, 0),
        ({"model_type": "gemma2"}, 3, 3),
        ({"sliding_window_pattern": 6}, 1, 5),
        ({"sliding_window_pattern": 4}, 1, 5),
        # Qwen: off unless it says so; then the layers from max_window_layers on.
        ({"model_type": "qwen2", "max_window_layers": 4}, 6, 0),
        ({"model_type": "qwen2", "max_window_layers": 4, "use_sliding_window": False}, 6, 0),
        ({"model_type": "qwen2", "max_window_layers": 4, "use_sliding_window": True}, 4, 2),
        ({"model_type": "qwen2", "max_window_layers": 6, "use_sliding_window": True}, 6, 0),
        ({"layer_types": ["sliding_attention", "full_attention"] * 3}, 3, 3),
        ({"layer_types": ["linear_attention", "full_attention"] * 3}, 3, 0),
        ({"layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 3}, 1, 2),
        ({"layers_block_type": ["mamba", "attention"] * 3}, 3, 0),
        ({"attn_layer_period": 3, "attn_layer_offset": 1}, 2, 0),
        ({"full_attention_interval": 3}, 2, 0),
    ],
)
def test_windows_and_layers_without_a_cache(fields: dict[str, Any], full: int, windowed: int) -> None:
    config = small(**{"sliding_window": 100, **fields})
    assert nbytes(config, 70) == 70 * (full + windowed) * LAYER
    assert nbytes(config, 1000) == (1000 * full + 100 * windowed) * LAYER


def test_chunked_attention() -> None:
    config = small(layer_types=["chunked_attention"] * 5 + ["full_attention"], attention_chunk_size=64)
    assert nbytes(config, 1000) == (1000 + 5 * 64) * LAYER


def test_the_text_part_of_a_model_that_sees() -> None:
    vision = {"num_hidden_layers": 99, "hidden_size": 7}
    config = {"text_config": small(torch_dtype=None), "vision_config": vision, "torch_dtype": "float32"}
    assert nbytes(config, 10) == 10 * 6 * LAYER * 2


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "bf16"),
        ({"torch_dtype": None}, "bf16"),
        ({"torch_dtype": None, "dtype": "float16"}, "fp16"),
        ({"torch_dtype": "torch.float32"}, "fp32"),
        ({"torch_dtype": "float8_e4m3fn"}, "bf16"),
        # Weights in fp8 say nothing of the cache.
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, "bf16"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}, "fp8"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}}, "int8"),
        ({"quantization_config": {"kv_cache_scheme": None}}, "bf16"),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8"),
        ({"kv_cache_dtype": "auto"}, "bf16"),
    ],
)
def test_numbers_of_the_cache(fields: dict[str, Any], kind: str) -> None:
    model = read_model(small(**fields), name="m", source="s")
    assert model.kv_dtype == kind
    assert model.token_bytes == 6 * 64 * KV_DTYPES[kind]
    assert read_model(small(**fields), "fp8", name="m", source="s").token_bytes == 6 * 64


def test_experts_count_as_far_as_a_token_meets_them() -> None:
    attention = 6 * 128 * 16 * (8 + 8 + 2 + 2)
    ends = 2 * 1000 * 128
    assert prefill_parameters(SMALL) == attention + ends + 6 * 3 * 128 * 256
    assert prefill_parameters(small(tie_word_embeddings=True)) == attention + ends // 2 + 6 * 3 * 128 * 256
    mixtral = small(num_experts_per_tok=2, num_local_experts=8)
    assert prefill_parameters(mixtral) == attention + ends + 6 * (2 * 3 * 128 * 256 + 8 * 128)
    assert prefill_parameters(small(model_type="phi")) == attention + ends + 6 * 2 * 128 * 256


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"num_hidden_layers": "six"}, "num_hidden_layers is a whole number, not 'six'"),
        ({"num_hidden_layers": 0}, "no num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads is a whole number"),
        ({"num_attention_heads": None, "num_key_value_heads": None}, "no num_attention_heads"),
        ({"hidden_size": 130}, "does not divide into 8 heads"),
        ({"hidden_size": -128}, "hidden_size is a whole number"),
        ({"layer_types": ["full_attention"]}, "names 6 layers"),
        ({"layer_types": ["strange_attention"] * 6}, "'strange_attention' are not known"),
        ({"layer_types": ["sliding_attention"] * 6}, "no sliding_window"),
        ({"layer_types": ["mamba"] * 6}, "nothing to move"),
        ({"compress_ratios": [4]}, "compress_ratios"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"torch_dtype": "float4"}, "'float4' is not understood"),
        ({"torch_dtype": 7}, "7 is not understood"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 4, "type": "int"}}}, "kv_cache_scheme"),
    ],
)
def test_what_is_not_understood_is_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        nbytes(small(**fields), 1)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of fp32, bf16, fp16, fp8, int8, not 'fp4'"):
        load_model("llama-2-7b", "fp4")


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20), st.sampled_from(sorted(BUILT_IN)))
def test_more_tokens_take_more(one: int, more: int, name: str) -> None:
    model = load_model(name)
    assert model.nbytes(one) <= model.nbytes(one + more) <= model.nbytes(one) + model.nbytes(more)
    assert model.nbytes(one) <= one * model.token_bytes


# --- files


def test_a_file_and_its_directory(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    for path in (folder, folder / "config.json"):
        model = load_model(str(path))
        assert model.name == "my-model"
        assert model.source == str(folder / "config.json")
        assert model.token_bytes == 6 * LAYER


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"not json", "is not a config.json: Expecting value"),
        (b"[1]", "not a JSON object"),
        (b"\xff\xfe\xfd", "is not a config.json"),
        (b"[" * 100_000, "is not a config.json"),
        (b"{}", "no num_attention_heads"),
    ],
)
def test_a_file_that_is_no_configuration(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        load_model(str(path))


@pytest.mark.parametrize("model", ["gpt-9", "/nowhere/config.json", "/dev/null/x", "a\0b"])
def test_neither_a_name_nor_a_file(model: str) -> None:
    with pytest.raises(ConfigError, match=r"neither a name known here \(llama-2-7b, "):
        load_model(model)


# --- against the models themselves


@pytest.mark.parametrize(
    ("config_class", "model_class", "fields"),
    [
        ("LlamaConfig", "LlamaForCausalLM", {}),
        ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
        ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 2, "num_experts_per_tok": 2}),
    ],
)
def test_a_real_model_makes_a_cache_of_that_size(config_class: str, model_class: str, fields: dict[str, Any]) -> None:
    torch, transformers = (
        pytest.importorskip(name, reason="`make demo` once installs what the model needs")
        for name in ("torch", "transformers")
    )
    config = getattr(transformers, config_class)(**small(model_type=None, torch_dtype=None, **fields))
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        cache = model(torch.arange(37)[None], use_cache=True).past_key_values
    held = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    asked = json.loads(config.to_json_string(use_diff=False))
    assert read_model(asked, "fp32", name="m", source="s").nbytes(37) == held
    counted = sum(p.numel() for p in model.parameters())
    assert prefill_parameters(asked) == pytest.approx(counted, rel=0.02)


# --- advice


def test_a_slow_path_is_told_to_compute() -> None:
    found = advise(load_model("llama-2-7b"), 4096, 1e9 / 8, tflops=100)
    assert found.nbytes == 2 << 30
    assert found.move_seconds == pytest.approx((2 << 30) * 8 / 1e9)
    assert found.recompute_seconds == pytest.approx(2 * 6.738e9 * 4096 / 100e12, rel=1e-3)
    assert found.slow
    text = " ".join(found.sentences())
    assert "4,096 tokens of llama-2-7b in fp16 is 2 GiB (512 KiB for a token" in text
    assert "(1.00 Gbit/s) takes 17.2 s" in text
    assert "about 552 ms: 2 x 6.74 billion parameters" in text
    assert "at 100 TFLOP/s, which is an assumption" in text
    assert "Computing it again is 31.1 times as fast" in text
    assert "breaks even at 31.1 Gbit/s" in text


def test_a_fast_path_is_told_to_move() -> None:
    found = advise(load_model("deepseek-v3"), 1, 50e9)
    assert not found.slow
    text = " ".join(found.sentences())
    assert "of 1 token of deepseek-v3" in text
    assert "Moving it is" in text
    assert "stream_kv" in text


def test_the_two_verdicts_meet_where_the_path_breaks_even() -> None:
    model = load_model("llama-3-8b")
    even = advise(model, 1000, 1e9).hiding_rate
    assert even is not None
    assert "Computing it again is" in " ".join(advise(model, 1000, even * 0.9).sentences())
    assert "Moving it is" in " ".join(advise(model, 1000, even * 1.1).sentences())


def test_windows_are_mentioned_when_they_matter() -> None:
    model = load_model("mistral-7b")
    assert "last 4,096 tokens" not in " ".join(advise(model, 4096, 1e9).sentences())
    assert "last 4,096 tokens" in " ".join(advise(model, 4097, 1e9).sentences())


def test_without_parameters_there_is_no_verdict() -> None:
    model = read_model(small(intermediate_size=None), name="m", source="s")
    found = advise(model, 10, 1e9)
    assert found.recompute_seconds is None
    assert found.hiding_rate is None
    assert "is not known" in found.sentences()[-1]


@pytest.mark.parametrize(
    ("tokens", "rate", "tflops"), [(0, 1e9, 1), (1, 0, 1), (1, float("nan"), 1), (1, 1e9, 0), (1, 1e9, float("inf"))]
)
def test_figures_out_of_range(tokens: int, rate: float, tflops: float) -> None:
    with pytest.raises(ConfigError):
        advise(load_model("llama-2-7b"), tokens, rate, tflops)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_bytes(0), "0 bytes"),
        (format_bytes(1000), "1000 bytes"),
        (format_bytes(70272), "68.6 KiB"),
        (format_bytes(1 << 20), "1 MiB"),
        (format_bytes((1 << 20) * 1023), "1,023 MiB"),
        (format_bytes(5 << 40), "5,120 GiB"),
        (format_rate(125e6), "1.00 Gbit/s"),
        (format_rate(124e6), "992 Mbit/s"),
        (format_rate(12.5e9), "100 Gbit/s"),
        (format_seconds(17.24), "17.2 s"),
        (format_seconds(1234), "1,234 s"),
        (format_seconds(0.0421), "42.1 ms"),
        (format_seconds(3.1e-6), "3.10 µs"),
    ],
)
def test_figures_for_people(shown: str, expected: str) -> None:
    assert shown == expected
