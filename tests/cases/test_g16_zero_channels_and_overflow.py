"""G16, pytorch/ao PR#4762, ROCm/aiter#4289, Model-Optimizer PR#1397: NaN from 0/0 and overflow.

A channel that is zero throughout gave scale 0; a value beyond the FP8 maximum became NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from calib.collect import collect
from calib.method import Method, RangeMethod
from calib.solve import solve
from kvquant.cache.transformers_compat import cache_argument
from kvquant.geometry import CacheGeometry
from kvquant.quantize.reference import dequantize, quantize
from kvquant.scales import TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

SCHEMES = [
    TensorScheme(tensor_format(name), granularity, symmetric)
    for name in ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
    for granularity in Granularity
    if granularity.is_static
    for symmetric in (True, False)
    if symmetric or name.startswith("int")
]
ZERO_KEYS = [3, 11]
"""A rotary pair: one of them alone would be turned out of zero."""
ZERO_VALUE, CONSTANT_VALUE = 5, 9


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Any]) -> Any:
    """Zero channels in keys and values of KV head 0, and a constant one in the values."""
    built = tiny("qwen2")
    with torch.no_grad():
        for layer in built.model.layers:
            keys, values = layer.self_attn.k_proj, layer.self_attn.v_proj
            for projection, rows in ((keys, ZERO_KEYS), (values, [ZERO_VALUE])):
                projection.weight[rows] = 0
                projection.bias[rows] = 0
            values.weight[CONSTANT_VALUE] = 0
            values.bias[CONSTANT_VALUE] = -0.7
    return built


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 128, (3, 40))


def restored(states: torch.Tensor, scales: TensorScales, how: TensorScheme) -> torch.Tensor:
    return dequantize(quantize(states, scales, how), scales)


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_zero_channels_are_safe_and_large_values_saturate(
    model: Any, ids: torch.Tensor, how: TensorScheme, method: Method
) -> None:
    stats = collect(model, ids.tolist(), CacheGeometry.from_config(model.config))
    scales = solve(stats, QuantScheme(how, how), RangeMethod(method))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, **{cache_argument(model.get_decoder()): cache})
    for index, layer in scales.layers.items():
        slots = (
            (layer.key, cache.layers[index].keys, ZERO_KEYS),
            (layer.value, cache.layers[index].values, [ZERO_VALUE]),
        )
        for slot, states, zero in slots:
            assert bool((states[:, 0, :, zero] == 0).all()), "the model as intended"
            assert bool(((slot.scale > 0) & torch.isfinite(slot.scale)).all())
            back = restored(states, slot, how)
            assert bool(torch.isfinite(back).all())
            assert bool((back[:, 0, :, zero] == 0).all())
            low, high = (end[:, None, :].float() for end in slot.range(how))
            rounding = 1e-6 * torch.maximum(low.abs(), high.abs())
            for factor in (3.0, 1e6, 1e30):
                far = restored(states * factor, slot, how)
                assert bool(torch.isfinite(far).all())
                assert bool(((far >= low - rounding) & (far <= high + rounding)).all())
                assert bool((far.sign() * states.sign() >= 0).all()), "nothing wraps around"


@pytest.mark.parametrize("how", [it for it in SCHEMES if it.granularity.fineness == 2], ids=str)
def test_a_constant_channel_comes_back_within_half_a_scale(
    model: Any, ids: torch.Tensor, how: TensorScheme
) -> None:
    stats = collect(model, ids.tolist(), CacheGeometry.from_config(model.config))
    for layer in solve(stats, QuantScheme(how, how)).layers.values():
        states = torch.full((1, 2, 4, 16), -0.7)
        error = (restored(states, layer.value, how) - states)[0, 0, :, CONSTANT_VALUE].abs()
        assert bool((error <= layer.value.scale[0, CONSTANT_VALUE] / 2 * (1 + 1e-4)).all())


@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_three_times_the_calibrated_amax_is_the_end_of_the_range(how: TensorScheme) -> None:
    """One head of one channel: ±amax × 3 gives exactly the largest code times the scale."""
    ends = torch.tensor([-2.0, 2.0]).view(1, 1, 2, 1)
    scales = TensorScales.from_range(ends[0, :, 0].double(), ends[0, :, 1].double(), how)
    low, high = (end.item() for end in scales.range(how))
    found = restored(ends * 3, scales, how).flatten().tolist()
    assert found == pytest.approx([low, high], rel=1e-6)
    assert found == pytest.approx([-2.0, 2.0], abs=scales.scale.item() / 2 * 1.001)
