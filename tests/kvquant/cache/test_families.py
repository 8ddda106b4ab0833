"""Every family of models: exact without quantization, bounded with it, and of the right size.

"Exact" is held against the model without any cache: greedy tokens are the same, logits differ by
less than 1e-4.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

from calib.collect import collect
from calib.solve import solve
from kvquant.cache.cache import QuantizedCache
from kvquant.cache.layer import QuantizedLayer
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.scales import KVScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, {})
        for name in (
            "llama",
            "llama_wide",
            "llama_linear",
            "llama_yarn",
            "llama_llama3",
            "phi3",
            "phi3_longrope",
            "qwen2",
            "qwen3",
            "mistral",
            "gemma2",
            "gemma3_text",
            "glm",
            "cohere",
            "smollm3",
            "gpt2",
            "gpt_oss",
            "deepseek",
            "llama4_text",
            "gemma3n_text",
            "gemma4_text",
            "qwen3_next",
            "falcon_h1",
            "lfm2",
        )
    },
    "deepseek_v32": ("deepseek_v32", {"index_topk": 64}),
    "deepseek_v32 picking 8": ("deepseek_v32", {}),
    "mha": ("llama", {"num_key_value_heads": 4}),
    "mqa": ("llama", {"num_key_value_heads": 1}),
    "head_dim 15": ("gpt2", {"hidden_size": 60}),
    "head_dim 71": ("gpt2", {"hidden_size": 142, "num_attention_heads": 2}),
    **{
        f"head_dim {dim}": ("llama", {"head_dim": dim, "num_attention_heads": 2})
        for dim in (64, 80, 96, 112, 128, 192, 256)
    },
}
MIXED = [
    "llama",
    "gemma2",
    "gpt_oss",
    "deepseek",
    "deepseek_v32 picking 8",
    "qwen3_next",
    "falcon_h1",
    "head_dim 71",
]
PROMPT, NEW = 17, 8
SMALL_KIVI = {"residual_length": 4, "group_size": 4}


@pytest.fixture(scope="session")
def build(tiny_once: Callable[..., Any]) -> Callable[[str], Any]:
    def by_name(family: str) -> Any:
        if family.startswith("deepseek_v32") and Version(transformers.__version__) < Version(
            "5.24"
        ):
            pytest.skip("this version of Transformers caches DeepSeek V3.2 per head")
        name, overrides = FAMILIES[family]
        return tiny_once(name, **overrides)

    return by_name


def prompt(batch: int = 1, tokens: int = PROMPT) -> torch.Tensor:
    return torch.randint(3, 128, (batch, tokens), generator=torch.Generator().manual_seed(1))


def step_by_step(
    forward: Callable[..., Any], model: Any, ids: torch.Tensor, cache: Any
) -> torch.Tensor:
    """Logits of `ids`: the first `PROMPT` in one call, the others one by one."""
    parts = [ids[:, :PROMPT], *ids[:, PROMPT:].split(1, dim=1)]
    return torch.cat([forward(model, part, cache) for part in parts], dim=1)


# Where tokens are picked, ties are broken one way in a prompt and another in a step.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "deepseek_v32 picking 8"])
def test_unquantized_it_is_the_model_without_a_cache(
    build: Callable[[str], Any],
    generate: Callable[..., Any],
    forward: Callable[..., Any],
    name: str,
) -> None:
    model = build(name)
    cache = QuantizedCache.from_model(model, scheme="none")
    found = generate(model, prompt(), cache, NEW, output_logits=True, return_dict_in_generate=True)
    assert cache.get_seq_length() == PROMPT + NEW - 1
    recomputed = forward(model, found.sequences)[:, PROMPT - 1 : -1]
    assert torch.equal(recomputed.argmax(-1), found.sequences[:, PROMPT:])
    assert float((torch.stack(found.logits, 1) - recomputed).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in MIXED for dtype in (torch.float32, torch.bfloat16)),
        ("llama", torch.float16),
        ("gemma2", torch.float16),
    ],
)
def test_unquantized_it_is_the_cache_of_transformers_bit_for_bit(
    build: Callable[[str], Any], forward: Callable[..., Any], name: str, dtype: torch.dtype
) -> None:
    model = copy.deepcopy(build(name)).to(dtype)
    ids = prompt(2, PROMPT + 4)
    theirs = step_by_step(forward, model, ids, DynamicCache(config=model.get_decoder().config))
    ours = step_by_step(forward, model, ids, QuantizedCache.from_model(model, scheme="none"))
    assert ours.dtype == dtype
    assert torch.equal(ours, theirs)


def row_bytes(scheme: str, dim: int) -> int:
    """Bytes of one quantized head of one token: codes, and bf16 scales and middles."""
    return {"int8": dim + 2, "int4": (dim + 1) // 2 + 4}[scheme]


def layer_bytes(layer: LayerGeometry, scheme: str, tokens: int) -> int:
    """Bytes of one layer of a float32 model, by hand."""
    first = 0 if layer.window is None else max(0, tokens - layer.window + 1)
    sinks = max(0, (4 if scheme == "int4" else 0) - first)
    exact, coded = sinks, tokens - first - sinks
    key = 4 * exact * layer.key_dim + coded * row_bytes(scheme, layer.key_dim)
    value = 4 * exact * layer.value_dim + coded * row_bytes(scheme, layer.value_dim)
    if layer.kind is LayerKind.LATENT:  # the rotary part is exact
        value = 4 * (exact + coded) * layer.value_dim
    return layer.kv_heads * (key + value)


# Errors relative to the logits' own spread: int8 0.0005 … 0.02, the others 0.003 … 0.2.
@pytest.mark.parametrize(
    ("name", "scheme", "changes", "limit"),
    [
        *((name, "int4", {}, 0.5) for name in FAMILIES),
        *((name, "int8", {}, 0.05) for name in MIXED),
        *((name, "int4-kivi", SMALL_KIVI, 0.5) for name in MIXED),
    ],
)
def test_quantized_it_is_nearly_the_model(
    build: Callable[[str], Any],
    forward: Callable[..., Any],
    name: str,
    scheme: str,
    changes: dict[str, Any],
    limit: float,
) -> None:
    model, ids = build(name), prompt(2, PROMPT + 4)
    cache = QuantizedCache.from_model(model, scheme=scheme, **changes)
    exact = step_by_step(forward, model, ids, DynamicCache(config=model.get_decoder().config))
    found = step_by_step(forward, model, ids, cache)
    assert torch.equal(found[:, :PROMPT], exact[:, :PROMPT]), "a prompt attends to itself exactly"
    error = (found - exact).norm(dim=-1) / (exact - exact.mean(-1, True)).norm(dim=-1)
    # The median: a router that changes its mind is an error of its own.
    assert 0 < float(error[:, PROMPT:].median()) < limit
    if scheme == "int4-kivi":
        return
    for layer, geometry in zip(cache.layers, cache.geometry.layers, strict=False):
        if isinstance(layer, QuantizedLayer):
            found_bytes = QuantizedLayer.live_nbytes(layer)
            assert found_bytes == 2 * layer_bytes(geometry, scheme, ids.shape[1])


# Calibrated means


def with_a_mean(model: Any) -> Any:
    """Keys and values far from zero: every embedding leans the same way."""
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight += 3 * weight.std() * torch.linspace(-1, 1, weight.shape[1]).sin().sign()
    return model


def past(cache: QuantizedCache, layer_idx: int) -> list[torch.Tensor]:
    """Keys and values that a layer's next call would read."""
    layer = cache.geometry.layers[layer_idx]
    new = [torch.zeros(1, layer.kv_heads, 1, d) for d in (layer.key_dim, layer.value_dim)]
    return [part[:, :, :-1].clone() for part in copy.deepcopy(cache).update(*new, layer_idx)]


def calibrated(model: Any) -> KVScales:
    """Means of other text, with scales that int4 does not look at."""
    slot = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
    blocks = torch.randint(3, 128, (6, 40), generator=torch.Generator().manual_seed(8)).tolist()
    stats = collect(model, blocks, CacheGeometry.from_config(model.config))
    return solve(stats, QuantScheme(slot, slot))


MEANS = ["llama", "llama_yarn", "glm", "qwen2", "gemma2", "gemma3_text", "gpt_oss", "deepseek"]


@pytest.mark.parametrize(
    "name", [*MEANS, "gpt2", "llama4_text", "gemma3n_text", "gemma4_text", "qwen3_next"]
)
def test_means_are_restored_in_full_on_reading(
    tiny: Callable[..., Any], forward: Callable[..., Any], name: str
) -> None:
    """So that softcap, attention sinks and a latent's projection need no correction."""
    model, ids = with_a_mean(tiny(name)), prompt(tokens=30)
    scales = calibrated(model)
    caches = [
        QuantizedCache.from_model(model, "int4", given, sink_tokens=1, force=True)
        for given in (scales, None)
    ]
    exact = DynamicCache(config=model.get_decoder().config)
    for cache in (*caches, exact):
        forward(model, ids[:, :26], cache)
    errors, size = torch.zeros(2), 0.0
    for index in caches[0].geometry.attention_layers:
        for slot, states in enumerate((exact.layers[index].keys, exact.layers[index].values)):
            read = [past(cache, index)[slot] for cache in caches]
            errors += torch.tensor([float((found - states).norm()) for found in read])
            size += float(states.norm())
        exact.layers[index].keys, exact.layers[index].values = past(caches[0], index)
    assert errors[0] < errors[1] / 2, "the mean is worth something here"
    assert errors[0] < size / 20
    # Attention over the very tensors that were read says the same.
    expected = forward(model, ids[:, 26:], exact)
    torch.testing.assert_close(
        forward(model, ids[:, 26:], caches[0]), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", ["llama", "llama_yarn", "glm", "qwen2"])
@pytest.mark.parametrize("start", [0, 7, 700, 5000])
def test_means_turn_with_the_positions_that_the_call_names(
    tiny: Callable[..., Any], forward: Callable[..., Any], name: str, start: int
) -> None:
    """Of two rows, one left-padded; in calls of 12, 1 and 13 tokens."""
    model, ids = with_a_mean(tiny(name)), prompt(2, 26)
    scales = calibrated(model)
    layers = {  # all pairs turn, also those that hardly do within calibration's 40 positions
        index: replace(layer, key=replace(layer.key, turned=None))
        for index, layer in scales.layers.items()
    }
    scales = replace(scales, layers=layers)
    assert all(layer.key.turned_pairs is not None for layer in layers.values())
    cache = QuantizedCache.from_model(model, "int4", scales, sink_tokens=0, force=True)
    exact = DynamicCache(config=model.config)
    mask = torch.ones(2, 26, dtype=torch.long)
    mask[0, :5] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0) + start
    for first, last in ((0, 12), (12, 13), (13, 26)):
        given = {"attention_mask": mask[:, :last], "position_ids": places[:, first:last]}
        for one in (cache, exact):
            forward(model, ids[:, first:last], one, **given)
    keys = exact.layers[0].keys
    new = [torch.zeros(2, 2, 1, keys.shape[3]) for _ in range(2)]
    found = cache.update(*new, 0)[0][:, :, :-1]
    assert not bool(found[0, :, :5].any()), "padding is read as zeros"
    real = mask.bool()[:, None, :, None].expand_as(keys)
    assert float((found - keys)[real].norm()) < float(keys[real].norm()) / 20
