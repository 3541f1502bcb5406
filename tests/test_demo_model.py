# SPDX-License-Identifier: Apache-2.0
"""The demo's model code on a tiny random Llama: paged cache, layer-wise prefill, decode from pages."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the packages of requirements/torch.txt")
from aiohixl.demo.paged import Geometry, PagedCache  # noqa: E402


def make(geometry: Geometry, nblocks: int) -> PagedCache:
    return PagedCache(geometry, nblocks, bytearray(geometry.nbytes(nblocks)))


@pytest.mark.parametrize("ntokens", [1, 15, 16, 17, 48])
def test_store_and_load(ntokens: int) -> None:
    geometry = Geometry(layers=2, kv_heads=3, head_dim=4)
    pages = make(geometry, 7)
    blocks = [5, 0, 6][: geometry.blocks_for(ntokens)]
    keys, values = torch.randn(2, 1, 3, ntokens, 4)
    pages.store(1, keys, values, blocks)
    loaded = pages.load(1, blocks, ntokens)
    assert torch.equal(loaded[0], keys)
    assert torch.equal(loaded[1], values)
    assert pages.written_outside(blocks) == []
    assert bool(torch.isnan(pages.layers[0][0]).all())
    # Token i lives in blocks[i // 16], row i % 16.
    last = ntokens - 1
    assert torch.equal(pages.layers[1][1][blocks[last // 16], last % 16], values[0, :, last])


def test_a_block_that_was_not_asked_for_is_seen() -> None:
    pages = make(Geometry(layers=2, kv_heads=1, head_dim=4), 4)
    pages.layers[1][0][2, 3, 0, 1] = 0.0
    assert pages.written_outside([0, 1]) == [2]
    assert pages.written_outside([2]) == []
    pages.blank([2, 3])
    assert pages.written_outside([]) == []


def test_the_pages_are_the_buffer() -> None:
    geometry = Geometry(layers=1, kv_heads=1, head_dim=1, block_size=1)
    buffer = bytearray(geometry.nbytes(2))
    pages = PagedCache(geometry, 2, buffer)
    pages.layers[0][1][1] = 1.0
    assert bytes(buffer[-4:]) == b"\x00\x00\x80?"
    assert not torch.isfinite(pages.layers[0][0]).any()


def test_too_small_a_buffer_is_refused() -> None:
    geometry = Geometry(layers=1, kv_heads=1, head_dim=4)
    with pytest.raises(ValueError, match="buffer"):
        PagedCache(geometry, 4, bytearray(geometry.nbytes(4) - 4))


@pytest.fixture(scope="module")
def lm() -> Any:
    transformers = pytest.importorskip(
        "transformers", minversion="5.24", reason="`make demo` once installs what the model needs"
    )
    torch.manual_seed(7)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return [int(token) for token in torch.randint(0, 97, (71,), generator=torch.Generator().manual_seed(1))]


@pytest.fixture(scope="module")
def expected(lm: Any, tokens: list[int]) -> Any:
    from aiohixl.demo import generate

    return generate.decode(lm, generate.prefill(lm, tokens), tokens[-1], 12, frozenset())


def copy_blocks(layer: int, source: PagedCache, here: list[int], target: PagedCache, there: list[int]) -> None:
    """What the transfer does, by hand."""
    for mine, theirs in zip(source.layers[layer], target.layers[layer], strict=True):
        theirs[there] = mine[here]


def test_decode_from_another_cache_gives_the_same_tokens(lm: Any, tokens: list[int], expected: Any) -> None:
    from aiohixl.demo import generate
    from aiohixl.demo.prefill import paged_prefill

    geometry = Geometry.of(lm.config)
    source, target = make(geometry, 9), make(geometry, 11)
    here, there = [8, 1, 5, 0, 3], [2, 10, 0, 7, 4]
    order = []

    def post(layer: int) -> None:
        order.append(layer)
        # Later layers do not exist yet, so that they cannot have been copied by mistake.
        assert all(bool(torch.isnan(source.layers[later][0]).all()) for later in range(layer + 1, 4))
        copy_blocks(layer, source, here, target, there)

    paged_prefill(lm, tokens, source, here, post)
    assert order == [0, 1, 2, 3]
    assert source.checksums(here) == target.checksums(there)
    assert target.written_outside(there) == []
    cache = generate.from_pages(lm, target, there, len(tokens) - 1)
    answer = generate.decode(lm, cache, tokens[-1], 12, frozenset())
    assert answer.tokens == expected.tokens
    assert torch.equal(answer.first_logits, expected.first_logits)
    one_forward, _ = generate.one_forward(lm, tokens)
    assert torch.allclose(answer.first_logits, one_forward, atol=1e-4)


def test_a_block_that_never_arrived_poisons_the_logits(lm: Any, tokens: list[int]) -> None:
    from aiohixl.demo import generate
    from aiohixl.demo.prefill import paged_prefill

    pages = make(Geometry.of(lm.config), 9)
    paged_prefill(lm, tokens, pages, [8, 1, 5, 0, 3], lambda layer: None)
    cache = generate.from_pages(lm, pages, [8, 2, 5, 0, 3], len(tokens) - 1)
    answer = generate.decode(lm, cache, tokens[-1], 1, frozenset())
    assert not torch.isfinite(answer.first_logits).any()


def test_swapped_blocks_are_seen_by_checksum_only(lm: Any, tokens: list[int], expected: Any) -> None:
    """Keys carry their position, so attention does not care where a block stands."""
    from aiohixl.demo import generate
    from aiohixl.demo.prefill import paged_prefill

    pages = make(Geometry.of(lm.config), 9)
    blocks, swapped = [8, 1, 5, 0, 3], [1, 8, 5, 0, 3]
    paged_prefill(lm, tokens, pages, blocks, lambda layer: None)
    cache = generate.from_pages(lm, pages, swapped, len(tokens) - 1)
    answer = generate.decode(lm, cache, tokens[-1], 12, frozenset())
    assert answer.tokens == expected.tokens
    different = [a != b for a, b in zip(pages.checksums(blocks), pages.checksums(swapped), strict=True)]
    assert different == [True] * 4


def test_an_error_in_the_callback_ends_the_forward_pass(lm: Any, tokens: list[int]) -> None:
    from aiohixl.demo import generate

    seen = []

    def refuse(layer: int, keys: Any, values: Any) -> None:
        seen.append(layer)
        raise ConnectionResetError("peer lost")

    with pytest.raises(ConnectionResetError):
        generate.prefill(lm, tokens, refuse)
    assert seen == [0]


def test_decode_ends_at_a_stop_token(lm: Any, tokens: list[int], expected: Any) -> None:
    from aiohixl.demo import generate

    stop = expected.tokens[3]
    first = expected.tokens.index(stop)
    answer = generate.decode(lm, generate.prefill(lm, tokens), tokens[-1], 12, frozenset([stop]))
    assert answer.tokens == expected.tokens[: first + 1]
