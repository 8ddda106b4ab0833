"""Layer patterns and head counts that follow from other keys."""

from __future__ import annotations

from typing import Any

import pytest

from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind

FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING
LATENT = LayerKind.LATENT


def full(kv_heads: int, dim: int) -> LayerGeometry:
    return LayerGeometry(FULL, kv_heads, dim, dim)


def sliding(kv_heads: int, dim: int, window: int) -> LayerGeometry:
    return LayerGeometry(SLIDING, kv_heads, dim, dim, window)


def kinds(config: dict[str, Any]) -> str:
    """One letter a layer: F full, S sliding, C chunked, A latent, R shared, L linear, N none."""
    letters = dict(zip(LayerKind, "FSCARLN", strict=True))
    return "".join(letters[layer.kind] for layer in CacheGeometry.from_config(config).layers)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gemma2", "num_hidden_layers": 5}, "SFSFS"),
        ({"model_type": "gemma3_text", "num_hidden_layers": 8}, "SSSSSFSS"),
        (
            {"model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window_pattern": 2},
            "SFSF",
        ),
        ({"model_type": "cohere2", "num_hidden_layers": 5}, "SSSFS"),
        ({"model_type": "cwm", "num_hidden_layers": 5}, "FSSSF"),
        ({"model_type": "llama4_text", "num_hidden_layers": 5}, "CCCFC"),
        ({"model_type": "llama4_text", "num_hidden_layers": 3, "no_rope_layers": [0, 1, 1]}, "FCC"),
        ({"model_type": "llama4_text", "num_hidden_layers": 2, "attention_chunk_size": None}, "FF"),
        ({"model_type": "qwen3", "num_hidden_layers": 3}, "FFF"),
        (
            {
                "model_type": "qwen3",
                "num_hidden_layers": 4,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            "FSSS",
        ),
        ({"model_type": "mistral", "num_hidden_layers": 2}, "SS"),
        ({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None}, "FF"),
        ({"model_type": "exaone4", "num_hidden_layers": 4}, "SSSF"),
        ({"model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": None}, "FFFF"),
        ({"model_type": "qwen3_next", "num_hidden_layers": 5}, "LLLFL"),
        (
            {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "full_attention_interval": 2},
            "LFLF",
        ),
        ({"model_type": "jamba", "num_hidden_layers": 6}, "LLLLFL"),
        ({"model_type": "bamba", "num_hidden_layers": 3, "attn_layer_indices": [1]}, "LFL"),
        ({"model_type": "falcon_h1", "num_hidden_layers": 2}, "FF"),
        (
            {
                "model_type": "granitemoehybrid",
                "num_hidden_layers": 2,
                "layer_types": ["mamba", "attention"],
            },
            "LF",
        ),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*E"}, "LNLFN"),
        ({"model_type": "lfm2", "num_hidden_layers": 4, "full_attn_idxs": [2]}, "LLFL"),
        ({"model_type": "kimi_linear", "num_hidden_layers": 5}, "LLLLA"),
        (
            {
                "model_type": "kimi_linear",
                "num_hidden_layers": 4,
                "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]},
            },
            "LLLA",
        ),
        ({"model_type": "deepseek_v32", "num_hidden_layers": 2}, "AA"),
        ({"model_type": "mllama", "text_config": {"num_hidden_layers": 5}}, "FFFNF"),
        (
            {"model_type": "gemma3n_text", "num_hidden_layers": 10, "num_kv_shared_layers": 3},
            "SSSSFSSRRR",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_layer_patterns(config: dict[str, Any], expected: str) -> None:
    assert kinds(config) == expected


def test_shared_layers_name_the_last_layer_of_their_type_before_them() -> None:
    config = {"model_type": "gemma3n_text", "num_hidden_layers": 10, "num_kv_shared_layers": 3}
    layers = CacheGeometry.from_config(config).layers
    assert [layer.shared_from for layer in layers] == [None] * 7 + [6, 6, 4]
    assert CacheGeometry.from_config(config).attention_layers == (0, 1, 2, 3, 4, 5, 6)


def test_gemma_4_full_layers_have_a_width_of_their_own() -> None:
    config = {"model_type": "gemma4", "text_config": {"num_hidden_layers": 6}}
    layers = CacheGeometry.from_config(config).layers
    assert layers[4:] == (sliding(4, 256, 512), full(4, 512))
    shared = {"num_hidden_layers": 6, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    layers = CacheGeometry.from_config({"model_type": "gemma4", "text_config": shared}).layers
    assert layers[4:] == (sliding(4, 256, 512), full(1, 512))


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 3,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize("key", ["1", "01", 1])
def test_per_layer_config_overrides_one_layer(key: str | int) -> None:
    overrides = {key: {"head_dim": 64, "num_key_value_heads": 1}}
    config = {**LLAMA, "per_layer_config": overrides}
    layers = CacheGeometry.from_config(config).layers
    assert layers == (full(8, 128), full(1, 64), full(8, 128))


def test_keys_and_values_may_differ_in_width() -> None:
    config = {"model_type": "mimo_v2_flash", "num_hidden_layers": 2}
    assert CacheGeometry.from_config(config).layers == (
        LayerGeometry(FULL, 4, 192, 128),
        LayerGeometry(SLIDING, 8, 192, 128, 129),
    )


def test_gpt_2_takes_no_notice_of_keys_it_does_not_know() -> None:
    config = {"model_type": "gpt2", "n_layer": 1, "num_key_value_heads": 2, "head_dim": 24}
    assert CacheGeometry.from_config(config).layers == (full(12, 64),)


def test_longcat_caches_twice_per_layer_of_its_config() -> None:
    layers = CacheGeometry.from_config({"model_type": "longcat_flash", "num_layers": 3}).layers
    assert layers == (LayerGeometry(LATENT, 1, 512, 64),) * 6


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [
        ({}, 1),
        ({"multi_query": False}, 8),
        ({"multi_query": False, "num_kv_heads": 2}, 2),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 8),
    ],
)
def test_falcon_kv_heads(changes: dict[str, Any], kv_heads: int) -> None:
    config = {"model_type": "falcon", "hidden_size": 512, "num_attention_heads": 8, **changes}
    assert CacheGeometry.from_config(config).layers[0] == full(kv_heads, 64)
