"""CacheGeometry against published configs and against the tensors that real models cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvquant.errors import GeometryError
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind

FULL, SLIDING, CHUNKED = LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED
LATENT, SHARED = LayerKind.LATENT, LayerKind.SHARED
LINEAR, NONE = LayerGeometry(LayerKind.LINEAR), LayerGeometry(LayerKind.NONE)


def full(kv_heads: int, dim: int) -> LayerGeometry:
    return LayerGeometry(FULL, kv_heads, dim, dim)


def sliding(kv_heads: int, dim: int, window: int) -> LayerGeometry:
    return LayerGeometry(SLIDING, kv_heads, dim, dim, window)


# --- published config.json files, as they are -----------------------------------------------------

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
QWEN_2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
GEMMA_2_9B = {
    "head_dim": 256,
    "hidden_size": 3584,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
MISTRAL_7B_V01 = {
    "hidden_size": 4096,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "v_head_dim": 128,
}
GPT_OSS_20B = {
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "sliding_window": 128,
}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27},
}
QWEN2_VL_7B = {
    "hidden_size": 3584,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "embed_dim": 1280, "num_heads": 16},
}
PHI_3_5_MINI = {
    "hidden_size": 3072,
    "max_position_embeddings": 131072,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"long_factor": [1.08] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "sliding_window": 262144,
}
FALCON_7B = {
    "hidden_size": 4544,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
}
GPT2 = {"model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12}

PUBLISHED = {
    "Llama-3.1-8B": (LLAMA_3_1_8B, [full(8, 128)] * 32, 131072),
    "Qwen2.5-7B-Instruct": (QWEN_2_5_7B, [full(4, 128)] * 28, 32768),
    "gemma-2-9b": (GEMMA_2_9B, [sliding(8, 256, 4096), full(8, 256)] * 21, 8192),
    "Mistral-7B-v0.1": (MISTRAL_7B_V01, [sliding(8, 128, 4096)] * 32, 32768),
    "DeepSeek-V3": (DEEPSEEK_V3, [LayerGeometry(LATENT, 1, 512, 64)] * 61, 163840),
    "gpt-oss-20b": (GPT_OSS_20B, [sliding(8, 64, 128), full(8, 64)] * 12, 131072),
    "gemma-3-4b": (
        GEMMA_3_4B,
        ([sliding(4, 256, 1024)] * 5 + [full(4, 256)]) * 5 + [sliding(4, 256, 1024)] * 4,
        131072,
    ),
    "Qwen2-VL-7B": (QWEN2_VL_7B, [full(4, 128)] * 28, 32768),
    "Phi-3.5-mini": (PHI_3_5_MINI, [sliding(32, 96, 262144)] * 32, 131072),
    "falcon-7b": (FALCON_7B, [full(1, 64)] * 32, 2048),
    "gpt2": (GPT2, [full(12, 64)] * 12, 1024),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_give_the_cache_their_models_have(name: str) -> None:
    config, layers, max_positions = PUBLISHED[name]
    geometry = CacheGeometry.from_config(config)
    assert list(geometry.layers) == layers
    assert geometry.max_positions == max_positions


def test_deepseek_v3_caches_576_numbers_per_token_and_layer() -> None:
    layer = CacheGeometry.from_config(DEEPSEEK_V3).layers[0]
    assert layer.kv_heads * (layer.key_dim + layer.value_dim) == 576


def test_model_type_is_that_of_the_text_part() -> None:
    assert CacheGeometry.from_config(GEMMA_3_4B).model_type == "gemma3_text"
    assert CacheGeometry.from_config(QWEN2_VL_7B).model_type == "qwen2_vl_text"
    assert CacheGeometry.from_config(LLAMA_3_1_8B).model_type == "llama"


# --- against real tensors -------------------------------------------------------------------------

TINY = (
    "llama llama_wide qwen2 qwen3 mistral gemma2 gemma3_text phi3 gpt2 deepseek qwen3_next gpt_oss "
    "glm cohere smollm3"
)


def assert_tensors_agree(geometry: CacheGeometry, seen: dict[int, Any]) -> None:
    assert tuple(sorted(seen)) == geometry.attention_layers
    for layer_idx, (key_shape, value_shape) in seen.items():
        geometry.check_tensors(layer_idx, key_shape, value_shape)


@pytest.mark.parametrize("name", TINY.split())
def test_real_models_cache_what_their_geometry_says(
    name: str, tiny: Callable[..., Any], cached_shapes: Callable[..., dict[int, Any]]
) -> None:
    model = tiny(name)
    geometry = CacheGeometry.from_config(model.config)
    assert_tensors_agree(geometry, cached_shapes(model))


_SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}
_SMALL_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
_SMALL_MLA = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "q_lora_rank": 24,
}
_SMALL_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
ODD_ONES: dict[str, tuple[str, dict[str, Any], list[LayerGeometry]]] = {
    "gemma4": (
        "gemma4_text",
        {
            "num_hidden_layers": 7,
            "layer_types": [*["sliding_attention", "full_attention"] * 3, "full_attention"],
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 8,
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 128,
        },
        [
            *[sliding(2, 8, 8), full(2, 16)] * 2,
            LayerGeometry(SHARED, shared_from=2),
            LayerGeometry(SHARED, shared_from=3),
            LayerGeometry(SHARED, shared_from=3),
        ],
    ),
    "mimo": (
        "mimo_v2_flash",
        {
            **_SMALL_EXPERTS,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "v_head_dim": 10,
            "sliding_window": 8,
            "n_routed_experts": 4,
        },
        [LayerGeometry(FULL, 2, 24, 10), LayerGeometry(SLIDING, 4, 24, 10, 8)],
    ),
    "falcon_new": (
        "falcon",
        {"num_hidden_layers": 1, "new_decoder_architecture": True, "num_kv_heads": 2},
        [full(4, 16)],
    ),
    "falcon_old": ("falcon", {"num_hidden_layers": 1}, [full(1, 16)]),
    "gpt_bigcode": ("gpt_bigcode", {"num_hidden_layers": 1}, [full(1, 16)]),
    "llama4": (
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
        },
        [*[LayerGeometry(CHUNKED, 2, 16, 16, 8)] * 3, full(2, 16)],
    ),
    "jamba": (
        "jamba",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
        [LINEAR, full(2, 16)],
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "mlp", "attention"],
            "num_key_value_heads": 2,
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 8,
        },
        [LINEAR, NONE, full(2, 16)],
    ),
    "falcon_h1": (
        "falcon_h1",
        {**_SMALL_MAMBA, "num_hidden_layers": 1, "num_key_value_heads": 2, "mamba_d_ssm": 128},
        [full(2, 16)],
    ),
    "minicpm3": (
        "minicpm3",
        {**_SMALL_MLA, "num_hidden_layers": 1, "num_key_value_heads": 4},
        [LayerGeometry(LATENT, 1, 16, 4)],
    ),
    "lfm2": (
        "lfm2",
        {"num_hidden_layers": 2, "num_key_value_heads": 2, "full_attn_idxs": [1]},
        [LINEAR, full(2, 16)],
    ),
    "starcoder2": (
        "starcoder2",
        {"num_hidden_layers": 1, "num_key_value_heads": 1, "sliding_window": 8},
        [sliding(1, 16, 8)],
    ),
}


@pytest.mark.parametrize("name", ODD_ONES)
def test_odd_shapes_are_what_their_models_cache(
    name: str, cached_shapes: Callable[..., dict[int, Any]]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, changes, expected = ODD_ONES[name]
    config = AutoConfig.for_model(model_type, **_SMALL, **changes)
    geometry = CacheGeometry.from_config(config)
    assert list(geometry.layers) == expected
    assert CacheGeometry.from_config({"model_type": model_type, **_SMALL, **changes}) == geometry
    assert_tensors_agree(geometry, cached_shapes(AutoModelForCausalLM.from_config(config).eval()))


# --- check_tensors --------------------------------------------------------------------------------


def test_check_tensors_names_both_sizes() -> None:
    geometry = CacheGeometry.from_config(LLAMA_3_1_8B)
    geometry.check_tensors(31, (1, 8, 5, 128), [3, 8, 0, 128])
    with pytest.raises(
        GeometryError, match=r"layer 2 caches keys of 32 heads x 128.* 8 heads x 128"
    ):
        geometry.check_tensors(2, (1, 32, 5, 128), (1, 8, 5, 128))
    with pytest.raises(
        GeometryError, match=r"layer 2 caches values of 8 heads x 64.* 8 heads x 128"
    ):
        geometry.check_tensors(2, (1, 8, 5, 128), (1, 8, 5, 64))
    with pytest.raises(GeometryError, match=r"caches keys of \[1, 5, 128\]"):
        geometry.check_tensors(2, (1, 5, 128), (1, 8, 5, 128))


def test_check_tensors_says_whose_shapes_these_are() -> None:
    geometry = CacheGeometry.from_config({"model_type": "qwen3_next", "num_hidden_layers": 4})
    says: dict[str, Any] = {"whose": "the other model", "advice": "take that one"}
    for layer, shape, message in (
        (9, (1, 2, 5, 256), "the model caches in layer 9, but the other model has 4 layers"),
        (
            0,
            (1, 2, 5, 256),
            ".* the other model has one of the kind 'linear' there, which has none",
        ),
        (
            3,
            (1, 1, 5, 256),
            "layer 3 caches keys of 1 head x 256, but the other model has 2 heads x",
        ),
    ):
        with pytest.raises(GeometryError, match=f"^{message}.*: take that one$"):
            geometry.check_tensors(layer, shape, shape, **says)


def test_layers_with_a_latent() -> None:
    geometry = CacheGeometry.from_config({"model_type": "deepseek_v3", "num_hidden_layers": 3})
    assert geometry.latent_layers == geometry.attention_layers == (0, 1, 2)
    assert all(layer.is_latent for layer in geometry.layers)
    assert CacheGeometry.from_config(LLAMA_3_1_8B).latent_layers == ()


def test_check_tensors_refuses_layers_that_cache_nothing_or_do_not_exist() -> None:
    geometry = CacheGeometry.from_config({"model_type": "qwen3_next", "num_hidden_layers": 4})
    with pytest.raises(GeometryError, match=r"layer 0 caches keys and values, but .*'linear'"):
        geometry.check_tensors(0, (1, 2, 5, 256), (1, 2, 5, 256))
    with pytest.raises(GeometryError, match="layer 4, but its config has 4 layers"):
        geometry.check_tensors(4, (1, 2, 5, 256), (1, 2, 5, 256))


# --- round trip and imports -----------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "gemma3n_text", "nemotron_h", "deepseek_v3"])
def test_round_trip_through_json(model_type: str) -> None:
    geometry = CacheGeometry.from_config({"model_type": model_type})
    assert CacheGeometry.from_dict(json.loads(json.dumps(geometry.to_dict()))) == geometry


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model_type": "llama", "max_positions": None, "layers": [{"kind": "round"}]},
        {"model_type": "llama", "max_positions": None, "layers": [{"kv_heads": 2}]},
        {"model_type": "llama", "max_positions": None, "layers": [{"kind": "full", "depth": 2}]},
    ],
)
def test_from_dict_refuses_what_it_did_not_write(values: dict[str, Any]) -> None:
    with pytest.raises(GeometryError, match="this is no cache geometry"):
        CacheGeometry.from_dict(values)


def test_geometry_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from kvquant.geometry import CacheGeometry; "
        "CacheGeometry.from_config({'model_type': 'llama'}); "
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
