"""G15, NVIDIA/Model-Optimizer PR#381: a scale computed in bf16 is off by up to 0.4 %."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from calib.collect import collect
from calib.solve import solve
from calib.stats import CalibrationStats
from kvquant import storage
from kvquant.cache.transformers_compat import cache_argument
from kvquant.geometry import CacheGeometry
from kvquant.quantize.reference import dequantize, quantize
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format


@pytest.fixture
def model(tiny: Callable[..., Any]) -> Any:
    return tiny("llama").to(torch.bfloat16)


def blocks() -> list[list[int]]:
    torch.manual_seed(1)
    ids: list[list[int]] = torch.randint(3, 128, (6, 32)).tolist()
    return ids


def stats_of(model: Any, of: list[list[int]]) -> CalibrationStats:
    return collect(model, of, CacheGeometry.from_config(model.config), chunk=64)


def test_statistics_and_scales_of_a_bf16_model_are_float32(model: Any) -> None:
    fp8 = TensorScheme(tensor_format("fp8"), Granularity.PER_CHANNEL)
    stats = stats_of(model, blocks())
    scales = solve(stats, QuantScheme(fp8, fp8))
    rounded_away = 0
    for index, layer in stats.layers.items():
        for slot in ("key", "value"):
            channels, found = getattr(layer, slot), getattr(scales.layers[index], slot)
            assert channels.minimum.dtype == channels.maximum.dtype == torch.float32
            assert channels.mean.dtype == torch.float64
            assert found.scale.dtype == found.mean.dtype == torch.float32
            assert torch.equal(found.scale, (channels.amax.double() / 448).float())
            rounded_away += int((found.scale != found.scale.bfloat16().float()).sum())
    assert rounded_away > 64, "the test would notice scales computed in bf16"


@pytest.mark.parametrize("symmetric", [True, False])
def test_stored_scales_bound_the_error(model: Any, tmp_path: Path, symmetric: bool) -> None:
    """With the scales as read back from the file on both sides."""
    how = TensorScheme(tensor_format("int8"), Granularity.PER_CHANNEL, symmetric)
    storage.save_scales(
        solve(stats_of(model, blocks()), QuantScheme(how, how)), tmp_path / "scales"
    )
    scales = storage.load_scales(tmp_path / "scales")
    for batch in (blocks()[:2], blocks()[2:4], blocks()[4:]):  # as they were calibrated
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            ids = torch.tensor(batch)
            model(input_ids=ids, **{cache_argument(model.get_decoder()): cache})
        for index, layer in scales.layers.items():
            for slot, states in (
                (layer.key, cache.layers[index].keys),
                (layer.value, cache.layers[index].values),
            ):
                error = (dequantize(quantize(states, slot, how), slot) - states.float()).abs()
                # A whole zero point moves the ends by up to half a step.
                bound = slot.scale[:, None, :] * (0.5 if symmetric else 1.0) * 1.001
                assert bool((error <= bound).all())


def test_halves_merge_to_the_whole(model: Any) -> None:
    whole = stats_of(model, blocks())
    merged = stats_of(model, blocks()[:2]).merge(stats_of(model, blocks()[2:]))
    for index, layer in whole.layers.items():
        for slot in ("key", "value"):
            mine, theirs = getattr(merged.layers[index], slot), getattr(layer, slot)
            assert torch.equal(mine.amax, theirs.amax)
            assert torch.equal(mine.minimum, theirs.minimum)
            assert torch.equal(mine.maximum, theirs.maximum)
            rms = theirs.mean_square.sqrt()
            assert bool(((mine.mean - theirs.mean).abs() <= 1e-6 * rms).all())
            torch.testing.assert_close(mine.mean_square, theirs.mean_square, rtol=1e-6, atol=0.0)
