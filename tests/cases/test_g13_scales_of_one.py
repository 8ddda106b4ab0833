"""G13, NVIDIA/Model-Optimizer#20 and PR#1012: every FP8 scale came out as exactly 1.0.

A floor of 1.0 swallowed the calibration, since the amax of nearly all models is below 448.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from calib.collect import collect
from calib.method import RangeMethod
from calib.solve import solve, solve_tensor
from calib.stats import ChannelStats
from kvquant.geometry import CacheGeometry
from kvquant.scales import KVScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

FP8 = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)


def scales_of(model: Any) -> KVScales:
    torch.manual_seed(1)
    blocks = torch.randint(3, 128, (4, 30)).tolist()
    return solve(
        collect(model, blocks, CacheGeometry.from_config(model.config)), QuantScheme(FP8, FP8)
    )


def test_an_amax_of_4_48_gives_a_scale_of_0_01() -> None:
    stats = ChannelStats.empty(2, 4)
    stats.update(torch.linspace(-4.48, 4, 24).view(3, 2, 4))
    scale = solve_tensor(stats, FP8, RangeMethod()).scale
    assert scale.item() == (torch.tensor(4.48) / 448).item() == pytest.approx(0.01, rel=1e-7)


def test_halving_k_proj_halves_the_key_scale_and_nothing_else(tiny: Callable[..., Any]) -> None:
    model = tiny("llama", num_hidden_layers=1)
    before = scales_of(model).layers[0]
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight /= 2
    after = scales_of(model).layers[0]
    assert after.key.scale.item() == before.key.scale.item() / 2
    assert after.value.scale.item() == before.value.scale.item()


@pytest.mark.parametrize("exponent", [-12, 12])
def test_a_rescaling_that_leaves_the_model_alone_moves_the_value_scale_exactly(
    tiny: Callable[..., Any], exponent: int
) -> None:
    model = tiny("llama")
    before = scales_of(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight *= 2.0**exponent
            layer.self_attn.o_proj.weight *= 2.0**-exponent
    after = scales_of(model)
    for index, layer in before.layers.items():
        found = after.layers[index]
        assert found.key.scale.item() == layer.key.scale.item()
        assert found.value.scale.item() == layer.value.scale.item() * 2.0**exponent


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "deepseek"])
def test_scales_vary_between_layers_and_none_is_one(tiny: Callable[..., Any], family: str) -> None:
    layers = scales_of(tiny(family)).layers
    for slot in ("key", "value"):
        found = [getattr(layer, slot).scale.item() for layer in layers.values()]
        assert len(set(found)) == len(layers) > 1
        assert all(0 < scale < 1 for scale in found)
