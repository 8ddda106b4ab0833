"""G16, pytorch/ao PR#4762 with ROCm/aiter#4289, Model-Optimizer PR#1397: the cache's half.

A range of zero gave 0/0; a value beyond the range became NaN, or wrapped around.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from calib.collect import collect
from calib.solve import solve
from kvquant import KVScales, QuantizedCache
from kvquant.geometry import CacheGeometry
from kvquant.presets import preset_names
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

SMALL = {"int4-kivi": {"residual_length": 0, "group_size": 4}}
QUANTIZED = [name for name in preset_names() if name not in ("none", "bf16", "fp16")]
LARGEST = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 60000.0}


def through(cache: QuantizedCache, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
    """What is read of keys and values after they have been stored."""
    cache.update(keys, values, 0)
    one = torch.zeros(keys.shape[0], 2, 1, 16, dtype=keys.dtype)
    return [part[:, :, :-1] for part in cache.update(one, one, 0)]


def states(dtype: torch.dtype, tokens: int = 16) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(1, 2, tokens, 16, generator=random).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("scheme", preset_names())
def test_tokens_and_texts_of_zeros_come_back_as_zeros(
    tiny_once: Callable[..., Any], scheme: str, dtype: torch.dtype
) -> None:
    model = tiny_once("llama")
    changes = SMALL.get(scheme, {})
    nothing = torch.zeros(1, 2, 16, 16, dtype=dtype)
    cache = QuantizedCache.from_model(model, scheme, **changes)
    for found in through(cache, nothing, nothing):
        assert not bool(found.any())
    keys, values = states(dtype)
    keys[:, 0, 5:9], values[:, 0, 5:9] = 0, 0  # of one head
    for found in through(QuantizedCache.from_model(model, scheme, **changes), keys, values):
        assert bool(torch.isfinite(found).all())
        # A group of channels has other tokens in its range: near zero, if not zero.
        limit = 0.3 if scheme == "int4-kivi" else 0
        assert float(found[:, 0, 5:9].abs().max()) <= limit


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_huge_values_stay_finite_and_keep_their_sign(
    tiny_once: Callable[..., Any], scheme: str, dtype: torch.dtype
) -> None:
    """One channel of some tokens, then all of them."""
    largest = LARGEST[dtype]
    for everywhere in (False, True):
        keys, values = states(dtype)
        for part in (keys, values):
            if everywhere:
                part.copy_((part.float().sign() * largest).to(dtype))
            else:
                part[:, :, 3:6, 2] = -largest
        cache = QuantizedCache.from_model(tiny_once("llama"), scheme, **SMALL.get(scheme, {}))
        for found, given in zip(through(cache, keys, values), (keys, values), strict=True):
            assert bool(torch.isfinite(found).all())
            huge = given.abs() == largest
            assert bool((found.float()[huge].sign() == given.float()[huge].sign()).all())


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_a_constant_channel_and_a_constant_token_round_trip(
    tiny_once: Callable[..., Any], scheme: str
) -> None:
    keys, values = states(torch.float32)
    for part in (keys, values):
        part[:, :, :, 7] = -0.7
        part[:, :, 9] = 0.3
    cache = QuantizedCache.from_model(tiny_once("llama"), scheme, **SMALL.get(scheme, {}))
    limit = 0.3 if scheme in ("int4-kivi", "int4") else 0.7 if scheme == "int3" else 0.09
    for found, given in zip(through(cache, keys, values), (keys, values), strict=True):
        assert float((found - given)[:, :, :, 7].abs().max()) <= limit
        assert float((found - given)[:, :, 9].abs().max()) <= limit


def static(model: Any, name: str, granularity: Granularity, symmetric: bool) -> KVScales:
    how = TensorScheme(tensor_format(name), granularity, symmetric)
    ids = torch.randint(3, 128, (4, 40), generator=torch.Generator().manual_seed(1)).tolist()
    stats = collect(model, ids, CacheGeometry.from_config(model.config))
    return solve(stats, QuantScheme(how, how))


@pytest.mark.parametrize("granularity", [g for g in Granularity if g.is_static])
@pytest.mark.parametrize(
    ("name", "symmetric"),
    [("fp8", True), ("fp8_e5m2", True), ("int8", True), ("int8", False), ("int4", False)],
)
def test_beyond_the_calibrated_range_is_its_end(
    tiny_once: Callable[..., Any], name: str, symmetric: bool, granularity: Granularity
) -> None:
    """Three times the range and far beyond it: no NaN, no wrapping around."""
    model = tiny_once("llama")
    scales = static(model, name, granularity, symmetric)
    for slot, scheme in (("key", scales.scheme.key), ("value", scales.scheme.value)):
        low, high = (end.float() for end in getattr(scales.layers[0], slot).range(scheme))
        reach = torch.maximum(low.abs(), high.abs()).expand(2, 16)
        for factor in (3.0, 1e30):
            sign = torch.where(torch.arange(16) % 2 == 0, 1.0, -1.0)
            far = (reach * sign * factor)[None, :, None, :].expand(1, 2, 6, 16).contiguous()
            cache = QuantizedCache.from_model(model, scales=scales, force=True)
            found = through(cache, far, far)[("key", "value").index(slot)]
            ends = torch.where(sign > 0, high.expand(2, 16), low.expand(2, 16))
            torch.testing.assert_close(
                found, ends[None, :, None, :].expand_as(found), rtol=1e-5, atol=1e-6
            )


def test_a_zero_channel_of_a_calibrated_model_stays_zero(
    tiny: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    """Rotary pair 3 of the keys and channel 5 of the values have no weights."""
    model = tiny("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight[[3, 11]] = 0
            layer.self_attn.v_proj.weight[5] = 0
    scales = static(model, "int8", Granularity.PER_CHANNEL, False)
    ids = torch.randint(3, 128, (1, 21), generator=torch.Generator().manual_seed(2))
    cache = QuantizedCache.from_model(model, scales=scales, force=True)
    forward(model, ids, cache)
    one = torch.zeros(1, 2, 1, 16)
    keys, values = cache.update(one, one, 0)
    assert not bool(keys[:, 0, :, [3, 11]].any())
    assert not bool(values[:, 0, :, 5].any())
    assert bool(torch.isfinite(keys).all() and torch.isfinite(values).all())
