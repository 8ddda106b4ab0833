"""G2, huggingface/transformers#35185 and ggml-org/llama.cpp#21385: the cache's half.

The stock int4 cache destroys Qwen2.5, whose key bias dwarfs everything else in a few channels. Ours
subtracts the calibrated mean, turned to each position where that pays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from calib.collect import collect
from calib.solve import solve
from kvquant import KVScales, QuantizedCache
from kvquant.geometry import CacheGeometry
from kvquant.presets import preset
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

SEEDS, TOKENS = range(5), 200
KINDS = ("int4 calibrated", "int4 uncalibrated", "per token without a mean")


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_key_bias(model: Any, seed: int, outlier: int | None) -> Any:
    """A key bias from N(0, 0.1), with one rotary pair at 100 times its RMS or as drawn."""
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            bias = layer.self_attn.k_proj.bias
            bias.copy_(0.1 * torch.randn(bias.shape, generator=random(10 * seed + number)))
            if outlier is not None:
                pair = [outlier, outlier + model.config.head_dim // 2]
                bias[pair] *= 100 * bias.square().mean().sqrt() / bias[pair].square().mean().sqrt()
            # A random model attends almost evenly, whatever its keys are.
            layer.self_attn.q_proj.weight *= 8
    return model


def calibrated(model: Any, seed: int) -> KVScales:
    fp8 = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
    blocks = torch.randint(3, 128, (8, TOKENS), generator=random(100 + seed)).tolist()
    stats = collect(model, blocks, CacheGeometry.from_config(model.config))
    return solve(stats, QuantScheme(fp8, fp8))


def attention_errors(forward: Callable[..., Any], model: Any, seed: int) -> torch.Tensor:
    """Relative error of what 20 new tokens attend to, for each of `KINDS`."""
    ids = torch.randint(3, 128, (1, TOKENS + 20), generator=random(200 + seed))
    values = preset("int4-kivi").value  # asymmetric, a scale a token, as it comes
    caches = [
        DynamicCache(config=model.config),
        QuantizedCache.from_model(model, "int4", calibrated(model, seed), force=True),
        QuantizedCache.from_model(model, "int4"),
        QuantizedCache.from_model(model, QuantScheme(values, values)),
    ]
    seen: list[torch.Tensor] = []
    handle = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    for cache in caches:
        forward(model, ids[:, :TOKENS], cache)
        forward(model, ids[:, TOKENS:], cache)
    handle.remove()
    exact, *found = seen[1::2]
    return torch.tensor([float((each - exact).norm() / exact.norm()) for each in found])


@pytest.mark.parametrize("outlier", [0, 3, 7])
def test_calibrated_int4_does_not_mind_the_outlier(
    tiny: Callable[..., Any], forward: Callable[..., Any], outlier: int
) -> None:
    """Whether its pair turns by 1, 0.03 or 0.0003 rad a token; means over five seeds."""
    level, found = (
        torch.stack(
            [
                attention_errors(forward, with_key_bias(tiny("qwen2"), seed, pair), seed)
                for seed in SEEDS
            ]
        ).mean(0)
        for pair in (None, outlier)
    )
    for kind, before, after in zip(KINDS, level.tolist(), found.tolist(), strict=True):
        print(f"{kind}: {before:.4f} without the outlier, {after:.4f} with it")
    calibrated_ratio, _, plain_ratio = (found / level).tolist()
    assert calibrated_ratio < 1.2, "issue 3 asks for 2"
    assert plain_ratio > 2
    assert found[0] < found[1] < found[2]
    assert found[2] > 3 * found[0]


def test_the_turned_mean_is_what_does_it(
    tiny: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    """A mean that stays cannot follow a pair that turns by 1 rad a token."""
    model = with_key_bias(tiny("qwen2"), 0, 0)
    scales = calibrated(model, 0)
    turned = [layer.key.turned_pairs for layer in scales.layers.values()]
    assert all(pairs is not None and bool(pairs[0]) for pairs in turned)
    assert "turned with the position" in (
        QuantizedCache.from_model(model, "int4", scales, force=True).summary()
    )
