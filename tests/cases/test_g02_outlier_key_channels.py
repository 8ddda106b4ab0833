"""G2, huggingface/transformers#35185 and ggml-org/llama.cpp#21385: a key bias that dwarfs the rest.

Qwen2's k_proj bias is enormous in a few channels; a scale that other channels share with them is
spent on them. `tiny_qwen2` has one channel of the bias at 100 times the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from calib.collect import collect
from calib.method import RangeMethod
from calib.outliers import outlier_dominated
from calib.solve import solve_tensor
from calib.stats import CalibrationStats
from kvquant.cache.transformers_compat import cache_argument
from kvquant.geometry import CacheGeometry
from kvquant.quantize.reference import dequantize, quantize
from kvquant.scheme import Granularity, TensorScheme, tensor_format

OUTLIER = (0, 7)
CONTEXT = 200


def int4(granularity: str, symmetric: bool) -> TensorScheme:
    return TensorScheme(tensor_format("int4"), Granularity.parse(granularity), symmetric)


def without_outlier(model: Any) -> Any:
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias[OUTLIER[1]] = 0.1
    return model


def calibrated(model: Any, ids: torch.Tensor) -> CalibrationStats:
    return collect(model, ids.tolist(), CacheGeometry.from_config(model.config))


def passed(model: Any, ids: torch.Tensor, cache: Any) -> None:
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{cache_argument(model.get_decoder()): cache})


def filled(model: Any, ids: torch.Tensor) -> Any:
    cache = DynamicCache(config=model.config)
    passed(model, ids, cache)
    return cache


@pytest.fixture
def ids() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 128, (1, CONTEXT))


def error_of_other_channels(model: Any, ids: torch.Tensor, how: TensorScheme) -> list[float]:
    """Relative error of all key channels but the outlier, per layer."""
    stats, cache = calibrated(model, ids), filled(model, ids)
    found = []
    for index, layer in stats.layers.items():
        keys = cache.layers[index].keys
        scales = solve_tensor(layer.key, how, RangeMethod())
        error = dequantize(quantize(keys, scales, how), scales) - keys
        others = torch.ones(keys.shape[1], keys.shape[3], dtype=torch.bool)
        others[OUTLIER] = False
        error, keys = (it.transpose(1, 2)[:, :, others] for it in (error, keys))
        found.append(float(error.norm() / keys.norm()))
    return found


@pytest.mark.parametrize("symmetric", [True, False])
def test_other_channels_keep_their_precision_per_channel(
    tiny: Callable[..., Any], ids: torch.Tensor, symmetric: bool
) -> None:
    how = int4("channel", symmetric)
    with_it = error_of_other_channels(tiny("qwen2"), ids, how)
    level = error_of_other_channels(without_outlier(tiny("qwen2")), ids, how)
    assert all(found <= 2 * expected for found, expected in zip(with_it, level, strict=True))
    # Per tensor they are lost: most of them round to zero.
    assert min(error_of_other_channels(tiny("qwen2"), ids, int4("tensor", symmetric))) > 0.7


def attention_error(model: Any, ids: torch.Tensor, how: TensorScheme) -> float:
    """Error of what attention of 20 new tokens reads from quantized keys, by what it reads exactly.

    Both read exact values; measured where attention's output enters the first o_proj.
    """
    stats, new = calibrated(model, ids), ids[:, :20].flip(1)
    outputs: list[torch.Tensor] = []
    handle = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda _, args: outputs.append(args[0])
    )
    for quantized in (False, True):
        cache = filled(model, ids)
        if quantized:
            scales = solve_tensor(stats.layers[0].key, how, RangeMethod())
            keys = cache.layers[0].keys
            cache.layers[0].keys = dequantize(quantize(keys, scales, how), scales)
        passed(model, new, cache)
    handle.remove()
    exact, found = outputs[1], outputs[3]
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("symmetric", [True, False])
def test_attention_reads_five_times_better_per_channel(
    tiny: Callable[..., Any], ids: torch.Tensor, symmetric: bool
) -> None:
    model = tiny("qwen2")
    with torch.no_grad():  # a random model attends almost evenly, whatever its keys are
        model.model.layers[0].self_attn.q_proj.weight *= 8
    per_channel = attention_error(model, ids, int4("channel", symmetric))
    per_tensor = attention_error(model, ids, int4("tensor", symmetric))
    assert per_channel < per_tensor / 5


def test_the_layer_is_reported_as_outlier_dominated(
    tiny: Callable[..., Any], ids: torch.Tensor
) -> None:
    for layer in calibrated(tiny("qwen2"), ids).layers.values():
        assert outlier_dominated(layer.key)
        assert not outlier_dominated(layer.value)
    for layer in calibrated(without_outlier(tiny("qwen2")), ids).layers.values():
        assert not outlier_dominated(layer.key)
