"""G5, huggingface/transformers#48501 with PR#46781: layers differ in shape, or have no KV at all.

Gemma 4 has a head_dim for sliding and another for full layers, and reading ``config.head_dim``
raises; models that mix recurrent layers with attention got a quantized layer for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.scheme import Granularity


@pytest.fixture
def gemma4() -> Any:
    """Four layers: heads of 8 where attention slides, of 16 where it does not."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gemma4_text",
        vocab_size=128,
        vocab_size_per_layer_input=128,
        hidden_size=64,
        hidden_size_per_layer_input=8,
        intermediate_size=128,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        sliding_window=8,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def numbers_per_token(geometry: CacheGeometry) -> int:
    return sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in geometry.layers)


def test_each_layer_has_its_own_width(
    gemma4: Any, cached_shapes: Callable[..., dict[int, Any]]
) -> None:
    geometry = CacheGeometry.from_config(gemma4.config)
    slides = LayerGeometry(LayerKind.SLIDING, 2, 8, 8, window=8)
    assert geometry.layers == (slides, LayerGeometry(LayerKind.FULL, 2, 16, 16)) * 2
    for layer_idx, shapes in cached_shapes(gemma4).items():
        geometry.check_tensors(layer_idx, *shapes)
    assert numbers_per_token(geometry) == 2 * (2 * 2 * 8) + 2 * (2 * 2 * 16)


def test_the_config_on_disk_says_the_same(gemma4: Any, save_tiny: Any, tmp_path: Any) -> None:
    import json

    saved = save_tiny(gemma4, tmp_path / "model", tokenizer=False) / "config.json"
    raw = json.loads(saved.read_text())
    assert CacheGeometry.from_config(raw) == CacheGeometry.from_config(gemma4.config)


def test_layers_without_keys_and_values_get_none(
    tiny: Callable[..., Any], cached_shapes: Callable[..., dict[int, Any]]
) -> None:
    model = tiny("qwen3_next")
    geometry = CacheGeometry.from_config(model.config)
    assert geometry.attention_layers == (3,)
    assert set(cached_shapes(model)) == {3}
    assert {layer.kind for layer in geometry.layers[:3]} == {LayerKind.LINEAR}
    assert numbers_per_token(geometry) == 2 * 2 * 16
    scales = {
        i: Granularity.PER_CHANNEL.scale_shape(layer.kv_heads, layer.key_dim)
        for i, layer in enumerate(geometry.layers)
        if layer.keeps_tokens
    }
    assert scales == {3: (2, 16)}


def calibrated(model: Any) -> Any:
    """Per-channel scales from a few tokens."""
    import torch

    from calib.collect import collect
    from calib.solve import solve
    from kvquant.scheme import QuantScheme, TensorScheme, tensor_format

    geometry = CacheGeometry.from_config(model.config)
    tokens = torch.randint(3, 100, (2, 21), generator=torch.Generator().manual_seed(0))
    tensor = TensorScheme(tensor_format("int8"), Granularity.PER_CHANNEL)
    return solve(collect(model, tokens.tolist(), geometry, chunk=8), QuantScheme(tensor, tensor))


def test_calibration_gives_each_layer_scales_of_its_width(gemma4: Any) -> None:
    scales = calibrated(gemma4)
    assert {i: tuple(layer.key.scale.shape) for i, layer in scales.layers.items()} == {
        0: (2, 8),
        1: (2, 16),
        2: (2, 8),
        3: (2, 16),
    }


def test_calibration_gives_scales_to_attention_layers_alone(tiny: Callable[..., Any]) -> None:
    scales = calibrated(tiny("qwen3_next"))
    assert list(scales.layers) == [3]
    assert tuple(scales.layers[3].value.scale.shape) == (2, 16)
