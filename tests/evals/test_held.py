"""What a cache holds: slots, bytes and noise, literally."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import cache_utils

from evals.arms import bind, parse_arms, prepare_arms
from evals.held import coded_slots, live_nbytes, poison, quantized_reads, visible
from evals.reading import Reader
from kvquant import QuantizedCache
from kvquant.cache.layer import QuantizedLayer

needs_fp8 = pytest.mark.skipif(
    not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="Transformers 5.21 and newer have it"
)
STOCK = [pytest.param("hf:fp8", marks=needs_fp8), "hf:quanto", "hf:hqq"]


def filled(model: Any, cache: Any, *tokens: int, batch: int = 1) -> Any:
    """A cache that has read so many tokens, in calls of so many."""
    reader, generator = Reader(model), torch.Generator().manual_seed(1)
    for count in tokens:
        reader.read(torch.randint(3, 128, (batch, count), generator=generator), cache)
    return cache


def stock(model: Any, name: str) -> Any:
    return bind(prepare_arms(parse_arms([name], []), Reader(model).geometry)[0], model, None).make()


@pytest.mark.parametrize(
    ("scheme", "settings", "expected"),
    [
        ("none", {}, ()),
        ("bf16", {}, ()),  # numbers without a scale are no codes
        ("int8", {}, ((0, 20),)),
        ("int4", {}, ((4, 20),)),
        ("int4", {"residual_length": 5}, ((4, 15),)),
        ("int4-kivi", {"group_size": 4, "residual_length": 5}, ((0, 12),)),
        ("int4-kivi", {"group_size": 4, "residual_length": 5, "sink_tokens": 3}, ((3, 15),)),
        ("int4-kivi", {}, ()),  # the residual is longer than the text
    ],
)
def test_coded_slots_of_20_tokens(
    tiny_once: Callable[..., Any],
    scheme: str,
    settings: dict[str, int],
    expected: tuple[tuple[int, int], ...],
) -> None:
    model = tiny_once("llama")
    for calls in ((20,), (1, 7, 12)):
        cache = filled(model, QuantizedCache.from_model(model, scheme, **settings), *calls)
        assert [coded_slots(cache, layer) for layer in (0, 1)] == [expected, expected]


def test_what_the_next_call_reads_of_them(tiny_once: Callable[..., Any]) -> None:
    model = tiny_once("llama")
    cache = filled(model, QuantizedCache.from_model(model, "int4", residual_length=5), 20)
    assert quantized_reads(cache, 1, 3).tolist() == [False] * 4 + [True] * 11 + [False] * 8
    assert int(quantized_reads(filled(model, Reader(model).reference(), 20), 0, 3).sum()) == 0


def test_a_sliding_layer_reads_what_its_window_leaves(tiny_once: Callable[..., Any]) -> None:
    """A window of 8 lets the next token see the 7 before it: slots 13 to 19."""
    model = tiny_once("gemma2")  # sliding, full, sliding, full
    cache = filled(model, QuantizedCache.from_model(model, "int4"), 20)
    assert [coded_slots(cache, layer) for layer in (0, 1)] == [((13, 20),), ((4, 20),)]
    assert quantized_reads(cache, 0, 3).tolist() == [True] * 7 + [False] * 3
    assert quantized_reads(cache, 1, 3).tolist() == [False] * 4 + [True] * 16 + [False] * 3


def test_sinks_that_a_window_still_sees(tiny_once: Callable[..., Any]) -> None:
    model = tiny_once("gemma2")
    cache = filled(model, QuantizedCache.from_model(model, "int4"), 9)
    assert coded_slots(cache, 0) == ((4, 9),)
    assert quantized_reads(cache, 0, 1).tolist() == [False, False, *[True] * 5, False]


def test_groups_that_begin_before_the_window(tiny_once: Callable[..., Any]) -> None:
    """Whole groups are held, 12 to 15 and 16 to 19; of the first only slot 13 on is read."""
    model = tiny_once("gemma2")
    cache = filled(
        model, QuantizedCache.from_model(model, "int4-kivi", group_size=4, residual_length=0), 20
    )
    assert coded_slots(cache, 0) == ((12, 20),)
    assert quantized_reads(cache, 0, 2).tolist() == [True] * 7 + [False] * 2


@pytest.mark.parametrize("name", STOCK)
def test_coded_slots_of_transformers_caches(tiny_once: Callable[..., Any], name: str) -> None:
    model = tiny_once("llama", head_dim=64)  # whole groups, and an even number, of any tokens
    cache = filled(model, stock(model, name), 32)
    assert coded_slots(cache, 0) == ((0, 32),)
    filled(model, cache, 3)
    if name == "hf:fp8":
        assert coded_slots(cache, 0) == ((0, 35),)
        assert quantized_reads(cache, 0, 2).tolist() == [True] * 37
        return
    assert coded_slots(cache, 0) == ((0, 32),)
    assert quantized_reads(cache, 0, 2).tolist() == [True] * 32 + [False] * 5
    filled(model, cache, 125, 1)  # 128 exact tokens are enough to quantize all of them anew
    layer = cache.layers[1]
    coded = layer._dequantize(layer._quantized_keys).shape[2]
    assert coded >= 160
    assert coded_slots(cache, 1) == ((0, coded),)


def test_what_queries_see() -> None:
    assert visible(2, 4, None).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert visible(2, 4, 2).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert visible(3, 3, 8).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def buffers(cache: Any) -> list[torch.Tensor]:
    return [
        tensor.clone()
        for layer in cache.layers
        for pair in layer.stores
        for store in pair
        for buffer in store.buffers
        for tensor in buffer.tensors
    ]


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek"])
@pytest.mark.parametrize(
    ("scheme", "settings"),
    [("fp8", {}), ("int8", {}), ("int4", {}), ("int3", {}), ("int4-kivi", {"residual_length": 5})],
)
def test_noise_is_in_all_codes_and_nothing_else(
    tiny_once: Callable[..., Any], name: str, scheme: str, settings: dict[str, int]
) -> None:
    model = tiny_once(name)
    sizes = {"group_size": 4} if scheme == "int4-kivi" else {}
    cache = filled(model, QuantizedCache.from_model(model, scheme, **settings, **sizes), 70)
    before, slots = buffers(cache), coded_slots(cache, 1)
    poison(cache, seed=0)
    after = buffers(cache)
    changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert changed == [tensor.dtype.itemsize == 1 for tensor in before]
    assert any(changed)
    assert coded_slots(cache, 1) == slots
    for old, new in zip(before, after, strict=True):
        if new.dtype.itemsize == 1:  # the same codes in other places: no number is impossible
            old, new = (it.view(torch.uint8).flatten().sort().values for it in (old, new))
            assert torch.equal(old, new)


def test_noise_by_seed(tiny_once: Callable[..., Any]) -> None:
    model = tiny_once("llama")
    found = []
    for seed in (0, 0, 1):
        cache = filled(model, QuantizedCache.from_model(model, "int8"), 20)
        poison(cache, seed)
        found.append(buffers(cache))
    same = [all(map(torch.equal, found[0], it)) for it in found]
    assert same == [True, True, False]


def test_an_exact_cache_takes_no_noise(tiny_once: Callable[..., Any]) -> None:
    model = tiny_once("llama")
    for scheme in ("none", "bf16"):
        cache = filled(model, QuantizedCache.from_model(model, scheme), 20)
        before = buffers(cache)
        poison(cache, seed=0)
        assert all(map(torch.equal, before, buffers(cache)))
    reference = filled(model, Reader(model).reference(), 20)
    keys = reference.layers[0].keys.clone()
    poison(reference, seed=0)
    assert torch.equal(reference.layers[0].keys, keys)


@pytest.mark.parametrize("name", STOCK)
def test_noise_in_transformers_caches(tiny_once: Callable[..., Any], name: str) -> None:
    model = tiny_once("llama")
    cache = filled(model, stock(model, name), 32, 4)
    layer, size = cache.layers[1], live_nbytes(cache)
    slots = ("_quantized_keys", "_quantized_values")
    before = [layer._dequantize(getattr(layer, slot)) for slot in slots]
    exact = layer.keys.clone()
    poison(cache, seed=0)
    after = [layer._dequantize(getattr(layer, slot)) for slot in slots]
    for old, new in zip(before, after, strict=True):
        assert old.shape == new.shape
        assert float((old != new).float().mean()) > 0.8
        # The same numbers in other places, quantized once more in groups with other neighbours.
        assert float(new.std()) == pytest.approx(float(old.std()), rel=0.05)
        assert float(new.abs().max()) == pytest.approx(float(old.abs().max()), rel=0.05)
    assert torch.equal(layer.keys, exact)
    assert live_nbytes(cache) == size


@pytest.mark.parametrize(
    ("name", "first", "more"),
    [
        # 2 layers x 2 slots x (2 heads x 32 tokens x 16 bytes, and a float32 scale)
        pytest.param("hf:fp8", 4 * (1024 + 4), 4 * (35 * 32 + 4), marks=needs_fp8),
        # … x (half as many bytes, and scale and zero in float32 for each of 16 groups of 64); then
        # 3 exact tokens
        ("hf:quanto", 4 * (512 + 16 * 8), 4 * (512 + 16 * 8 + 3 * 32 * 4)),
        ("hf:hqq", 4 * (512 + 16 * 8), 4 * (512 + 16 * 8 + 3 * 32 * 4)),
    ],
)
def test_bytes_of_transformers_caches(
    tiny_once: Callable[..., Any], name: str, first: int, more: int
) -> None:
    model = tiny_once("llama")
    cache = filled(model, stock(model, name), 32)
    assert live_nbytes(cache) == first
    assert live_nbytes(filled(model, cache, 3)) == more


def test_bytes_of_the_unquantized_cache_and_of_ours(tiny_once: Callable[..., Any]) -> None:
    model = tiny_once("llama")
    reader = Reader(model)
    assert live_nbytes(reader.reference()) == 0
    assert live_nbytes(filled(model, reader.reference(), 20)) == 2 * 2 * 2 * 20 * 16 * 4
    # A bf16 scale with the codes of each token and head.
    int8 = filled(model, QuantizedCache.from_model(model, "int8"), 20)
    assert live_nbytes(int8) == 2 * 2 * 2 * 20 * (16 + 2)


def test_of_a_batch_the_first_row_counts(tiny_once: Callable[..., Any]) -> None:
    model = tiny_once("llama")
    cache = filled(model, QuantizedCache.from_model(model, "int4"), 20, batch=3)
    assert isinstance(cache.layers[0], QuantizedLayer)
    assert coded_slots(cache, 0) == ((4, 20),)
