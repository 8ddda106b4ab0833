"""Collecting against the same passes made by hand."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from calib.collect import Watcher, batches, collect
from calib.solve import solve
from calib.stats import CalibrationStats
from kvquant.cache.transformers_compat import cache_argument
from kvquant.errors import InputError, NotObservedError
from kvquant.geometry import CacheGeometry
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

FP8 = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
FULL = ["llama", "qwen2", "qwen3", "phi3", "gpt2", "deepseek", "glm", "cohere", "smollm3"]
WINDOWED = ["mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen3_next"]


class KeepingCache(DynamicCache):
    """A DynamicCache that keeps the largest magnitudes of all it was given, per layer and slot."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.amax: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        zero = torch.zeros(())
        key, value = self.amax.get(layer_idx, (zero, zero))
        self.amax[layer_idx] = (
            torch.maximum(key, keys.abs().amax()),
            torch.maximum(value, values.abs().amax()),
        )
        return super().update(keys, values, layer_idx, *args, **kwargs)


def random_blocks(*lengths: int, seed: int = 1) -> list[list[int]]:
    torch.manual_seed(seed)
    return [torch.randint(3, 128, (length,)).tolist() for length in lengths]


def collected(model: Any, blocks: list[list[int]], **options: Any) -> CalibrationStats:
    return collect(model, blocks, CacheGeometry.from_config(model.config), **options)


def filled(model: Any, ids: torch.Tensor, chunk: int, cache: Any) -> Any:
    """`cache` after `ids` went through it in chunks."""
    with torch.no_grad():
        for part in ids.split(chunk, 1):
            model(input_ids=part, use_cache=True, **{cache_argument(model.get_decoder()): cache})
    return cache


@pytest.mark.parametrize("family", FULL)
def test_fp8_scales_are_those_of_a_dynamic_cache(tiny: Callable[..., Any], family: str) -> None:
    """Eight blocks of 20 tokens, four a batch, in chunks of 12: the same passes by hand."""
    model, blocks = tiny(family), random_blocks(*[20] * 8)
    scales = solve(collected(model, blocks, chunk=80), QuantScheme(FP8, FP8))
    chunked = solve(collected(model, blocks, chunk=12), QuantScheme(FP8, FP8))
    batched = [
        filled(model, torch.tensor(blocks[i : i + 4]), 20, DynamicCache(config=model.config))
        for i in (0, 4)
    ]
    singly = [
        filled(model, torch.tensor([block]), 12, DynamicCache(config=model.config))
        for block in blocks
    ]
    for found, caches in ((scales, batched), (chunked, singly)):
        assert list(found.layers) == list(range(len(caches[0].layers)))
        for index, layer in found.layers.items():
            keys = torch.stack([cache.layers[index].keys.abs().amax() for cache in caches])
            values = torch.stack([cache.layers[index].values.abs().amax() for cache in caches])
            assert layer.key.scale.item() == (keys.amax() / 448).item()
            assert layer.value.scale.item() == (values.amax() / 448).item()


@pytest.mark.parametrize("family", WINDOWED)
def test_fp8_scales_cover_what_sliding_layers_have_dropped(
    tiny: Callable[..., Any], family: str
) -> None:
    model, blocks = tiny(family), random_blocks(*[30] * 3)
    scales = solve(collected(model, blocks, chunk=12), QuantScheme(FP8, FP8))
    caches = [
        filled(model, torch.tensor([block]), 12, KeepingCache(model.config)) for block in blocks
    ]
    assert list(scales.layers) == sorted(caches[0].amax)
    for index, layer in scales.layers.items():
        for slot, found in enumerate((layer.key.scale, layer.value.scale)):
            amax = torch.stack([cache.amax[index][slot] for cache in caches]).amax()
            assert found.item() == (amax / 448).item()


def test_scales_differ_between_layers(tiny: Callable[..., Any]) -> None:
    layers = solve(collected(tiny("llama"), random_blocks(50)), QuantScheme(FP8, FP8)).layers
    assert len({layer.key.scale.item() for layer in layers.values()}) == 2
    assert len({layer.value.scale.item() for layer in layers.values()}) == 2


def test_halves_merge_to_the_whole(tiny: Callable[..., Any]) -> None:
    model, blocks = tiny("llama"), random_blocks(*[16] * 6)
    whole = collected(model, blocks, chunk=16)
    merged = collected(model, blocks[:2], chunk=16).merge(collected(model, blocks[2:], chunk=16))
    assert merged.tokens == whole.tokens == 96
    for index, layer in whole.layers.items():
        for slot in ("key", "value"):
            mine, theirs = getattr(merged.layers[index], slot), getattr(layer, slot)
            for name in ("minimum", "maximum", "amax"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name))
            assert torch.equal(mine.sketch.counts, theirs.sketch.counts)
            assert torch.equal(mine.token_amax.counts, theirs.token_amax.counts)
            rms = theirs.mean_square.sqrt()
            assert bool(((mine.mean - theirs.mean).abs() <= 1e-6 * rms).all())


@pytest.mark.parametrize(
    ("lengths", "chunk", "expected"),
    [
        ([2, 2, 2, 2, 2, 1], 4, [2, 2, 1, 1]),
        ([5], 4, [1]),
        ([5, 5], 4, [1, 1]),
        ([3, 3, 4, 3], 100, [2, 1, 1]),
        ([4, 4, 4], 8, [2, 1]),
        ([], 8, []),
        ([4, 4], 1, [1, 1]),
    ],
)
def test_batches_hold_neighbours_of_equal_length(
    lengths: list[int], chunk: int, expected: list[int]
) -> None:
    blocks = random_blocks(*lengths)
    found = list(batches(blocks, chunk))
    assert [len(batch) for batch in found] == expected
    assert [block for batch in found for block in batch] == blocks


@pytest.mark.parametrize("chunk", [1, 7, 64, 2048])
def test_tokens_and_longest_position_do_not_depend_on_chunks(
    tiny: Callable[..., Any], chunk: int
) -> None:
    stats = collected(tiny("llama"), random_blocks(20, 33, 33, 2), chunk=chunk)
    assert stats.tokens == 88
    assert stats.provenance.tokens == 88
    assert stats.provenance.longest_position == 33
    assert stats.layers[0].key.minimum.device.type == "cpu"


def test_watcher_hears_of_tokens_and_finished_blocks(tiny: Callable[..., Any]) -> None:
    read: list[int] = []
    finished: list[tuple[int, int]] = []
    parts: list[CalibrationStats] = []

    def note(blocks: int, stats: Callable[[], CalibrationStats]) -> None:
        parts.append(stats())
        finished.append((blocks, parts[-1].tokens))

    model = tiny("llama")
    whole = collected(
        model, random_blocks(6, 6, 6, 10), chunk=12, watcher=Watcher(read.append, note)
    )
    assert read == [12, 6, 10]
    assert finished == [(2, 12), (3, 18), (4, 28)]
    assert parts[0].tokens == 12, "a snapshot does not go on counting"
    first = collected(model, random_blocks(6, 6, 6, 10)[:2], chunk=12)
    assert torch.equal(parts[0].layers[1].key.total, first.layers[1].key.total)
    assert torch.equal(parts[-1].layers[1].key.total, whole.layers[1].key.total)


def test_caches_of_finished_batches_are_gone(tiny: Callable[..., Any]) -> None:
    alive: list[int] = []

    def count(_: int, __: Any) -> None:
        gc.collect()
        alive.append(sum(type(thing) is DynamicCache for thing in gc.get_objects()))

    gc.collect()
    before = sum(type(thing) is DynamicCache for thing in gc.get_objects())
    collected(tiny("llama"), random_blocks(8, 9, 10), watcher=Watcher(finished=count))
    assert alive == [before] * 3


# The model afterwards


def state_of(model: Any) -> tuple[list[bool], list[int], dict[str, torch.Tensor]]:
    hooks = [
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    ]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return [module.training for module in model.modules()], hooks, weights


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(tiny: Callable[..., Any], fails: bool) -> None:
    """Mode of every module, for some may be frozen in a training model; hooks; weights."""

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory, say")

    model = tiny("llama", attention_dropout=0.5).train()
    model.model.layers[1].eval()
    if fails:
        model.model.layers[1].mlp.register_forward_pre_hook(fail)
    before = state_of(model)
    with pytest.raises(RuntimeError, match="out of memory") if fails else nullcontext():
        collected(model, random_blocks(12))
    after = state_of(model)
    assert after[:2] == before[:2]
    assert after[2].keys() == before[2].keys()
    assert all(torch.equal(after[2][name], value) for name, value in before[2].items())


def test_dropout_takes_no_part(tiny: Callable[..., Any]) -> None:
    plain = collected(tiny("llama"), random_blocks(30))
    dropping = collected(tiny("llama", attention_dropout=0.9).train(), random_blocks(30))
    assert torch.equal(plain.layers[1].key.total, dropping.layers[1].key.total)


def test_adapters_with_their_own_embeddings(tiny: Callable[..., Any]) -> None:
    peft = pytest.importorskip("peft")
    base, blocks = tiny("llama"), random_blocks(30)
    geometry = CacheGeometry.from_config(base.config)
    plain = collect(base, blocks, geometry)
    config = peft.LoraConfig(
        target_modules=["v_proj"], modules_to_save=["embed_tokens"], init_lora_weights=False
    )
    model = peft.get_peft_model(base, config)
    embeddings = model.base_model.model.model.embed_tokens.modules_to_save["default"]
    with torch.no_grad():
        embeddings.weight.copy_(embeddings.weight.flip(0))
    live = collect(model, blocks, geometry)
    assert not torch.allclose(live.layers[0].key.amax, plain.layers[0].key.amax, rtol=1e-3)
    merged = collect(model.merge_and_unload(), blocks, geometry)
    for index in live.layers:
        for slot in ("key", "value"):
            one, other = getattr(live.layers[index], slot), getattr(merged.layers[index], slot)
            torch.testing.assert_close(one.amax, other.amax, rtol=1e-4, atol=1e-5)


# What cannot be


def test_a_layer_that_never_caches_is_named(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    geometry = CacheGeometry.from_config(tiny("llama", num_hidden_layers=4).config)
    with pytest.raises(NotObservedError, match=r"layers \[2, 3\]"):
        collect(model, random_blocks(5), geometry)
    assert list(collect(model, random_blocks(5), geometry, skip_layers=[2, 3]).layers) == [0, 1]


def test_no_blocks_at_all_are_an_error(tiny: Callable[..., Any]) -> None:
    with pytest.raises(NotObservedError, match="no layer ever wrote"):
        collected(tiny("llama"), [])


def test_a_model_that_makes_nan_is_found_out(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[19] = float("nan")
    with pytest.raises(InputError, match="layer 1, keys, head 1, channel 3"):
        collected(model, random_blocks(5))


def test_a_token_without_embedding_is_refused_before_the_first_pass(
    tiny: Callable[..., Any],
) -> None:
    with pytest.raises(InputError, match=r"token 128\b.*0 to 127"):
        collected(tiny("llama"), [*random_blocks(5), [5, 128, 7]])


def test_a_name_is_no_model() -> None:
    geometry = CacheGeometry.from_config({"model_type": "llama", "num_hidden_layers": 1})
    with pytest.raises(InputError, match="model must be a model in memory, not 'tiny-llama'"):
        collect("tiny-llama", [[3, 4]], geometry)
