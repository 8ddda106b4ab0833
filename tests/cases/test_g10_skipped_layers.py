"""G10, vllm-project/llm-compressor#1295 and #1881: a layer's place in a list is not its number.

Skipping the first and last layers crashed calibration, whose observers sat in a list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from calib.collect import collect
from calib.recorder import Recorder
from calib.solve import solve
from calib.stats import CalibrationStats
from kvquant.cache.transformers_compat import cache_argument
from kvquant.geometry import CacheGeometry
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

FP8 = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
SKIPS = [({0, 4}, [1, 2, 3]), ({2}, [0, 1, 3, 4])]


@pytest.fixture
def model(tiny: Callable[..., Any]) -> Any:
    return tiny("llama", num_hidden_layers=5)


def token_ids() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 128, (2, 12))


def in_one_pass(model: Any, skipped: set[int]) -> CalibrationStats:
    geometry = CacheGeometry.from_config(model.config)
    return collect(model, token_ids().tolist(), geometry, skip_layers=skipped)


def layer_by_layer(model: Any, skipped: set[int]) -> CalibrationStats:
    """As sequential calibration does: one layer is run alone, then the next on its output."""
    geometry, decoder = CacheGeometry.from_config(model.config), model.get_decoder()
    with torch.no_grad(), Recorder(model, geometry, skipped) as recorder:
        states = decoder.embed_tokens(token_ids())
        positions = torch.arange(12)[None]
        embeddings = decoder.rotary_emb(states, positions)
        for layer in decoder.layers:
            cache = recorder.watch(DynamicCache(config=model.config))
            states = layer(
                states,
                position_embeddings=embeddings,
                position_ids=positions,
                **{cache_argument(layer): cache},
            )
            recorder.release(cache)
    return CalibrationStats(geometry, recorder.layers)


@pytest.mark.parametrize(("skipped", "kept"), SKIPS)
@pytest.mark.parametrize("calibrate", [in_one_pass, layer_by_layer])
def test_scales_carry_the_numbers_of_their_layers(
    model: Any, calibrate: Callable[..., CalibrationStats], skipped: set[int], kept: list[int]
) -> None:
    everything = in_one_pass(model, set())
    stats = calibrate(model, skipped)
    assert list(stats.layers) == kept
    scales = solve(stats, QuantScheme(FP8, FP8, frozenset(skipped)))
    assert list(scales.layers) == kept
    for index in kept:
        torch.testing.assert_close(
            scales.layers[index].key.scale,
            everything.layers[index].key.amax.amax().view(1, 1) / 448,
        )
        mine, theirs = stats.layers[index].key, everything.layers[index].key
        assert mine.mean_unrotated is not None
        assert theirs.mean_unrotated is not None
        torch.testing.assert_close(mine.mean_unrotated, theirs.mean_unrotated, atol=1e-5, rtol=1e-4)
    assert len({scales.layers[index].key.scale.item() for index in kept}) == len(kept)


@pytest.mark.parametrize(("skipped", "kept"), SKIPS)
def test_layers_may_be_skipped_after_calibration_too(
    model: Any, skipped: set[int], kept: list[int]
) -> None:
    scales = solve(in_one_pass(model, set()), QuantScheme(FP8, FP8, frozenset(skipped)))
    assert list(scales.layers) == kept
