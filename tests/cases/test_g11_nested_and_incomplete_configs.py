"""G11, vllm-project/llm-compressor#2263 with #2005: head_dim not found in a multimodal config.

Settings of the text model sit in ``text_config``, and what equals a default is not there at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvquant.geometry import CacheGeometry
from kvquant.scheme import Granularity


def key_scale_shape(config: Any, layer_idx: int = 0) -> tuple[int, int]:
    layer = CacheGeometry.from_config(config).layers[layer_idx]
    return Granularity.PER_CHANNEL.scale_shape(layer.kv_heads, layer.key_dim)


NESTED = {
    "model_type": "qwen3_vl",
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 1152,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 36,
        "hidden_size": 4096,
    },
    "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16},
}


def test_the_text_part_wins_over_numbers_at_the_top() -> None:
    assert key_scale_shape(NESTED) == (8, 128)
    assert len(CacheGeometry.from_config(NESTED).layers) == 36


def test_a_text_part_that_does_not_name_its_model_type() -> None:
    text = {key: value for key, value in NESTED["text_config"].items() if key != "model_type"}
    assert CacheGeometry.from_config({**NESTED, "text_config": text}) == (
        CacheGeometry.from_config(NESTED)
    )


def test_the_config_of_transformers_says_the_same() -> None:
    from transformers import AutoConfig

    parts = {key: NESTED[key] for key in ("text_config",)}
    config = AutoConfig.for_model("qwen3_vl", **parts)
    assert CacheGeometry.from_config(config) == CacheGeometry.from_config(NESTED)


def test_a_multimodal_config_deeper_down() -> None:
    omni = {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": {"hidden_size": 3584}}}
    assert key_scale_shape(omni) == (4, 128)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama", {}, (2, 16)),
        ("llama", {"head_dim": None}, (2, 16)),
        ("llama_wide", {}, (2, 24)),
        ("llama", {"num_key_value_heads": None}, (4, 16)),
        ("llama", {"num_key_value_heads": 1}, (1, 16)),
        ("gemma3_text", {}, (2, 16)),
    ],
)
def test_head_counts_and_widths_of_real_models(
    name: str,
    changes: dict[str, Any],
    expected: tuple[int, int],
    tiny: Callable[..., Any],
    cached_shapes: Callable[..., dict[int, Any]],
) -> None:
    model = tiny(name, **changes)
    assert key_scale_shape(model.config) == expected
    key_shape, _ = cached_shapes(model)[0]
    assert (key_shape[1], key_shape[3]) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"head_dim": None}, (8, 128)),
        ({"head_dim": 24}, (8, 24)),
        ({"num_key_value_heads": None}, (32, 128)),
        ({"num_key_value_heads": 1}, (1, 128)),
    ],
)
def test_the_same_in_a_config_json(changes: dict[str, Any], expected: tuple[int, int]) -> None:
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    assert key_scale_shape({"model_type": "llama", **sizes, **changes}) == expected


def test_llama_without_kv_heads_is_multi_head_attention() -> None:
    assert key_scale_shape({"model_type": "llama"}) == (32, 128)
