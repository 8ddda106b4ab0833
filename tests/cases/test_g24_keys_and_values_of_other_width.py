"""G24, flashinfer-ai/flashinfer#877 and ml-explore/mlx-lm PR#1558: K and V of different width.

DeepSeek-V3 caches the latent in the key slot and the rotary part in the value slot, one head each.
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
from kvquant.cache.transformers_compat import cache_argument
from kvquant.geometry import CacheGeometry
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format


@pytest.mark.parametrize("granularity", [g for g in Granularity if g.is_static])
def test_each_slot_has_scales_of_its_own_width(
    tiny: Callable[..., Any], granularity: Granularity
) -> None:
    model = tiny("deepseek")
    torch.manual_seed(1)
    blocks = torch.randint(3, 128, (3, 30)).tolist()
    stats = collect(model, blocks, CacheGeometry.from_config(model.config))
    how = TensorScheme(tensor_format("int8"), granularity)
    scales = solve(stats, QuantScheme(how, how))
    per_channel = granularity is Granularity.PER_CHANNEL
    for index, layer in scales.layers.items():
        assert stats.layers[index].key.shape == (1, 16)
        assert stats.layers[index].value.shape == (1, 4)
        assert tuple(layer.key.scale.shape) == ((1, 16) if per_channel else (1, 1))
        assert tuple(layer.value.scale.shape) == ((1, 4) if per_channel else (1, 1))


def test_generating_records_twenty_numbers_a_token_and_layer(tiny: Callable[..., Any]) -> None:
    model = tiny("deepseek")
    geometry = CacheGeometry.from_config(model.config)
    torch.manual_seed(1)
    ids = torch.randint(3, 128, (1, 9))
    with Recorder(model, geometry) as recorder:
        cache = recorder.watch(DynamicCache(config=model.config))
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=12,
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            **{cache_argument(model.get_decoder()): cache},
        )
    assert [layer.key.tokens for layer in recorder.layers.values()] == [20, 20]  # 9 + 12 - 1
    for index, layer in recorder.layers.items():
        counted = layer.key.sketch.counts.sum() + layer.value.sketch.counts.sum()
        assert counted == 20 * 20
        held = cache.layers[index].keys.numel() + cache.layers[index].values.numel()
        assert counted == held
        assert torch.equal(layer.key.amax, cache.layers[index].keys.abs().amax((0, 2)))
        assert torch.equal(layer.value.amax, cache.layers[index].values.abs().amax((0, 2)))
