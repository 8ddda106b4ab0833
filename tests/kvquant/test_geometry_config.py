"""Reading any config: lengths, unknown model types, and what is wrong with a broken one."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvquant.errors import GeometryError
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind


def full(kv_heads: int, dim: int) -> LayerGeometry:
    return LayerGeometry(LayerKind.FULL, kv_heads, dim, dim)


ORIGINAL = "original_max_position_embeddings"
YARN_2 = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 4096),
        ({"rope_scaling": None}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 4096),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 16384),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 2048}}, 8192),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, ORIGINAL: 256}}, 4096),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}, ORIGINAL: 1024}, 8192),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [2.0]}}, 4096),
        ({"rope_parameters": {"full_attention": YARN_2, "sliding_attention": None}}, 8192),
    ],
)
def test_max_positions_follow_rope_scaling(changes: dict[str, Any], expected: int) -> None:
    config = {"model_type": "llama", "max_position_embeddings": 4096, **changes}
    assert CacheGeometry.from_config(config).max_positions == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "bloom", "n_layer": 1, "seq_length": 2048}, 2048),
        ({"model_type": "bloom", "n_layer": 1}, None),
        ({"model_type": "mpt", "n_layers": 1, "max_seq_len": 65536}, 65536),
        ({"model_type": "gpt2", "n_layer": 1, "n_positions": 512}, 512),
        ({"model_type": "kimi_linear", "model_max_length": 4096}, 4096),
    ],
)
def test_max_positions_under_their_other_names(
    config: dict[str, Any], expected: int | None
) -> None:
    assert CacheGeometry.from_config(config).max_positions == expected


PLAIN = {
    "model_type": "something_new",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}


def test_an_unknown_model_type_works_if_it_says_everything() -> None:
    assert CacheGeometry.from_config(PLAIN) == CacheGeometry(
        "something_new", (full(2, 16),) * 2, None
    )
    wide = {**PLAIN, "head_dim": 24, "v_head_dim": 8, "sliding_window": 8}
    assert CacheGeometry.from_config(wide).layers[0] == LayerGeometry(
        LayerKind.SLIDING, 2, 24, 8, 8
    )
    per_head = {**PLAIN, "num_key_value_heads": None, "use_sliding_window": False}
    assert CacheGeometry.from_config(per_head).layers[0] == full(4, 16)


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        ({"num_key_value_heads"}, "num_key_value_heads"),
        ({"hidden_size"}, r"head_dim \(or hidden_size\)"),
        (
            {"num_hidden_layers", "num_attention_heads"},
            "num_hidden_layers, num_attention_heads",
        ),
        (
            {"num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size"},
            "num_hidden_layers, num_attention_heads, num_key_value_heads, "
            r"head_dim \(or hidden_size\)",
        ),
    ],
)
def test_an_unknown_model_type_is_told_exactly_what_is_missing(
    left_out: set[str], named: str
) -> None:
    config = {key: value for key, value in PLAIN.items() if key not in left_out}
    with pytest.raises(GeometryError, match=f"'something_new' is not known.*not say {named}$"):
        CacheGeometry.from_config(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "there is no model_type, and its config does not say num_hidden_layers"),
        ({**PLAIN, "kv_lora_rank": 512}, "kv_lora_rank says that it compresses"),
        ({**PLAIN, "num_kv_shared_layers": 1}, "shares keys and values"),
        ({**PLAIN, "layer_types": ["full_attention"]}, "has 2 layers, but 1 layer_types"),
        (
            {**PLAIN, "layer_types": ["full_attention", "holographic"]},
            "layer 1 is of the type 'holographic'",
        ),
        (
            {**PLAIN, "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window must be a whole number of at least 1, not None",
        ),
        ({**PLAIN, "num_hidden_layers": "2"}, "num_hidden_layers must be .*not '2'"),
        ({**PLAIN, "num_key_value_heads": 0}, "num_key_value_heads must be .*not 0"),
        ({**PLAIN, "num_key_value_heads": True}, "num_key_value_heads must be .*not True"),
        ({**PLAIN, "head_dim": -16}, "head_dim must be .*not -16"),
        ({**PLAIN, "max_position_embeddings": 1.5}, "max_position_embeddings must be .*not 1.5"),
        ({**PLAIN, "per_layer_config": {"2": {}}}, "per_layer_config has '2', .*none of 2 layers"),
        ({**PLAIN, "per_layer_config": {"all": {}}}, "per_layer_config has 'all'"),
        ({**PLAIN, "text_config": {}, "decoder": PLAIN, "generator": PLAIN}, "several text parts"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5' is an encoder-decoder"),
        ({"model_type": "mamba2"}, "'mamba2' keeps a recurrent state and no keys and values"),
        ({"model_type": "deepseek_v4"}, "'deepseek_v4' compresses several tokens"),
        (
            {"model_type": "gemma3_text", "sliding_window_pattern": 0},
            "wrong kind: ZeroDivisionError",
        ),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "layer 1 is of .*'X'"),
        (
            {"model_type": "gemma3n_text", "num_hidden_layers": 6, "num_kv_shared_layers": 2},
            "last 2 of 6 layers share .* no layer before them is of the type full_attention",
        ),
        ({**PLAIN, "max_position_embeddings": 8, "rope_scaling": "yarn"}, "wrong kind: Attr"),
        ({**PLAIN, "layer_types": 2}, "wrong kind: TypeError"),
        (["not", "a", "dict"], "a config is a JSON object, not list"),
        (None, "a config is a JSON object, not NoneType"),
    ],
)
def test_broken_configs_get_one_clear_line(config: Any, message: str) -> None:
    with pytest.raises(GeometryError, match=message) as caught:
        CacheGeometry.from_config(config)
    assert "\n" not in str(caught.value)


def test_a_config_is_left_as_it_was() -> None:
    config = {
        "model_type": "gemma4",
        "text_config": {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2},
    }
    before = copy.deepcopy(config)
    CacheGeometry.from_config(config)
    assert config == before


def test_a_number_of_layers_that_no_model_has_is_refused() -> None:
    with pytest.raises(GeometryError, match="100,000,000"):
        CacheGeometry.from_config({"model_type": "llama", "num_hidden_layers": 100_000_000})
