"""G14, NVIDIA/TensorRT-LLM#967 and PR#2446: one scale for the fused QKV output ruined int8 values.

Queries and keys are larger than values; whoever takes one amax over all of them loses the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from calib.collect import collect
from calib.solve import solve
from kvquant.cache.transformers_compat import cache_argument
from kvquant.geometry import CacheGeometry
from kvquant.quantize.reference import dequantize, quantize
from kvquant.scales import KVScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

INT8 = TensorScheme(tensor_format("int8"), Granularity.PER_TENSOR)


def token_ids() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 128, (4, 30))


def scales_of(model: Any) -> KVScales:
    geometry = CacheGeometry.from_config(model.config)
    return solve(collect(model, token_ids().tolist(), geometry), QuantScheme(INT8, INT8))


def test_small_values_beside_large_keys_keep_their_own_precision(tiny: Callable[..., Any]) -> None:
    model = tiny("llama", num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.v_proj.weight.copy_(attention.k_proj.weight / 50)
    scales = scales_of(model).layers[0]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=token_ids(), **{cache_argument(model.get_decoder()): cache})
    values = cache.layers[0].values

    def worst(with_scales: Any) -> float:
        restored = dequantize(quantize(values, with_scales, INT8), with_scales)
        return float((restored - values).abs().amax())

    assert worst(scales.value) <= scales.value.scale.item() / 2 * (1 + 1e-5)
    assert scales.key.scale.item() > 30 * scales.value.scale.item()
    assert worst(scales.key) > 20 * worst(scales.value)


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_queries_take_no_part(tiny: Callable[..., Any], family: str) -> None:
    """Fused projections included: only the rows that make queries grow a hundredfold."""
    model = tiny(family, num_hidden_layers=1)
    before = scales_of(model).layers[0]
    with torch.no_grad():
        if family == "llama":
            model.model.layers[0].self_attn.q_proj.weight *= 100
        elif family == "phi3":
            model.model.layers[0].self_attn.qkv_proj.weight[:64] *= 100
        else:  # GPT-2's Conv1D holds its weight transposed
            model.transformer.h[0].attn.c_attn.weight[:, :64] *= 100
    after = scales_of(model).layers[0]
    assert after.key.scale.item() == before.key.scale.item()
    assert after.value.scale.item() == before.value.scale.item()
