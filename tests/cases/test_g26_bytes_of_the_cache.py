"""G26, LMCache/LMCache#688 with vllm-project/vllm#25350, jy-yuan/KIVI#17, ml-explore/mlx-lm#1587.

Memory numbers that were wrong or never materialised: bytes by hand against bytes held, and what is
needed beside them. (The plan's half is test_g26_planned_capacity.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvquant import QuantizedCache

TOKENS = 192


def ids(tokens: int = TOKENS, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (batch, tokens), generator=torch.Generator().manual_seed(1))


def held(cache: QuantizedCache) -> int:
    """Bytes of the memory behind every tensor that the layers reach."""
    tensors = [
        tensor
        for layer in cache.layers
        for stores in layer.stores
        for store in stores
        for buffer in store.buffers
        for tensor in buffer.tensors
    ]
    return sum(storage.nbytes() for storage in {t.untyped_storage() for t in tensors})


@pytest.mark.parametrize(("kv_heads", "dim"), [(2, 24), (4, 24), (1, 24), (2, 15)])
@pytest.mark.parametrize(
    ("scheme", "changes", "row"),
    [
        ("none", {}, lambda dim: 4 * dim),
        ("bf16", {}, lambda dim: 2 * dim),
        ("fp8", {}, lambda dim: dim + 2),
        ("int8", {}, lambda dim: dim + 2),
        ("int4", {"sink_tokens": 0}, lambda dim: (dim + 1) // 2 + 4),
    ],
)
def test_bytes_of_a_token_by_hand(
    tiny_once: Callable[..., Any],
    forward: Callable[..., Any],
    kv_heads: int,
    dim: int,
    scheme: str,
    changes: dict[str, Any],
    row: Callable[[int], int],
) -> None:
    """GQA, MHA, MQA; head_dim is not hidden_size / heads, and one is odd."""
    if dim == 15:
        model, kv_heads = tiny_once("gpt2", hidden_size=60), 4
    else:
        model = tiny_once("llama_wide", num_key_value_heads=kv_heads)
    cache = QuantizedCache.from_model(model, scheme, **changes)
    forward(model, ids(), cache)
    assert cache.live_nbytes() == TOKENS * 2 * 2 * kv_heads * row(dim)
    assert cache.nbytes() == held(cache) == cache.live_nbytes(), "192 tokens are three pages"


def test_int4_in_groups_of_32_takes_5_bits(
    tiny_once: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    """Four for the code, one for scale and middle: half of that is easily forgotten."""
    model = tiny_once("llama", head_dim=64)
    cache = QuantizedCache.from_model(model, "int4-kivi", group_size=32, residual_length=0)
    forward(model, ids(), cache)
    keys = sum(layer.stores[0][0].live_nbytes() for layer in cache.layers)
    values = sum(layer.stores[0][1].live_nbytes() for layer in cache.layers)
    numbers = TOKENS * 2 * 2 * 64
    assert 8 * keys == 5 * numbers
    assert 8 * values == 4.5 * numbers
    assert cache.live_nbytes() == keys + values


def test_fp8_holds_twice_the_tokens_of_bf16_but_for_its_scales(
    tiny_once: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    model, sizes = tiny_once("llama_wide"), {}
    for scheme in ("bf16", "fp8"):
        cache = QuantizedCache.from_model(model, scheme)
        forward(model, ids(), cache)
        sizes[scheme] = cache.live_nbytes()
    assert sizes["bf16"] / sizes["fp8"] == pytest.approx(2 * 24 / 26)


def test_what_is_held_is_what_is_promised_however_it_was_filled(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], generate: Callable[..., Any]
) -> None:
    """Residual, sinks and pages included, in batches and after generating."""
    for name in ("llama", "gemma2", "gpt_oss", "deepseek"):
        model = tiny_once(name)
        for scheme in ("int8", "int4", "int4-kivi"):
            cache = QuantizedCache.from_model(model, scheme)
            generate(model, ids(30, batch=2), cache, 4)
            assert cache.nbytes() == held(cache)
            assert cache.live_nbytes() <= cache.nbytes()


@pytest.mark.parametrize("scheme", ["none", "int8", "int4", "int4-kivi"])
def test_beside_it_there_is_one_layers_keys_and_values_whatever_their_number(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], scheme: str
) -> None:
    sizes = []
    for count in (2, 5):
        model = tiny_once("llama", num_hidden_layers=count)
        cache = QuantizedCache.from_model(model, scheme, attention="dequantize")
        forward(model, ids(), cache)
        assert cache.workspace_nbytes() == 0, "a prompt is read by nobody yet"
        for _ in range(3):
            forward(model, ids(1), cache)
        sizes.append(cache.workspace_nbytes())
        cache.reset()
        assert cache.workspace_nbytes() == cache.nbytes() == 0
    one_layer = 2 * 2 * (TOKENS + 3) * 16 * 4
    assert one_layer <= sizes[0] == sizes[1] <= one_layer * 1.15


@pytest.mark.parametrize("scheme", ["int8", "int4", "int4-kivi"])
def test_beside_it_there_is_nothing_where_codes_are_attended_to(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], scheme: str
) -> None:
    model = tiny_once("llama")
    cache = QuantizedCache.from_model(model, scheme)
    forward(model, ids(), cache)
    forward(model, ids(1), cache)
    assert cache.workspace_nbytes() == 0


def test_a_prompt_read_in_chunks_peaks_below_the_cache_of_transformers(
    tiny_once: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    """In MLX the quantized cache peaked above fp16 while reading the prompt."""
    model = tiny_once("llama", num_hidden_layers=8)
    cache, exact, peak = (
        QuantizedCache.from_model(model, "int4"),
        DynamicCache(config=model.config),
        0,
    )
    for part in ids(480).split(120, dim=1):
        forward(model, part, cache)
        forward(model, part, exact)
        peak = max(peak, cache.nbytes() + cache.workspace_nbytes())
    theirs = sum(2 * layer.keys.numel() * 4 for layer in exact.layers)
    assert peak < theirs / 2


@pytest.mark.parametrize(
    ("scheme", "row"),
    [("none", 64), ("int8", 16 + 2), ("int4", 8 + 4), ("int4-kivi", 64)],  # its residual: exact
)
def test_a_window_that_was_passed_stops_growing(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], scheme: str, row: int
) -> None:
    """Of a window of 8, 7 past tokens are seen; they live in one page of 64."""
    cache = QuantizedCache.from_model(tiny_once("mistral"), scheme)
    for number, part in enumerate(ids(400).split(20, dim=1)):
        forward(tiny_once("mistral"), part, cache)
        if number:
            assert cache.live_nbytes() == 2 * 2 * 2 * 7 * row
            assert cache.nbytes() == held(cache) == 2 * 2 * 2 * 64 * row
