"""The tables of engine documentation, word for word."""

from __future__ import annotations

import pytest

from kvquant.export import sglang_models
from kvquant.export.loader_rules import (
    is_kv_scale,
    layer_number,
    older_vllm_parameter,
    sglang_knows,
    sglang_names,
    sglang_parameter,
    sglang_parameters,
    sglang_refuses,
    vllm_parameter,
)

P = "model.layers.3.self_attn"


@pytest.mark.parametrize(
    "name",
    [
        f"{P}.k_scale",
        f"{P}.v_scale",
        f"{P}.q_scale",
        f"{P}.kv_scale",
        f"{P}.k_proj.k_scale",
        f"{P}.attn.k_scale",
        f"{P}.k_proj.output_scale",
        f"{P}.prob_output_scale",
        f"{P}.k_global_scale",
        f"{P}.k_cache.scale",
        f"{P}.q.scale",
        f"{P}.key_scale",
        f"{P}.value_scales",
        f"{P}.k_scales",
        "transformer.layers.3.attention.kv_cache_scaling_factor",
        "transformer.layers.3.attention.k_cache_scaling_factor",
    ],
)
def test_what_somebody_means_to_be_a_scale_of_a_cache(name: str) -> None:
    assert is_kv_scale(name)


@pytest.mark.parametrize(
    "name",
    [
        f"{P}.k_proj.weight",
        f"{P}.k_proj.weight_scale",
        f"{P}.k_proj.input_scale",
        f"{P}.k_proj.weight_scale_inv",
        f"{P}.qk_scale",
        f"{P}.o_proj.output_scale",
        "model.layers.3.mlp.block_scale",
        "logit_scale",
        f"{P}.k_norm.weight",
    ],
)
def test_what_is_no_scale_of_a_cache(name: str) -> None:
    assert not is_kv_scale(name)


def test_layer_numbers() -> None:
    assert layer_number(f"{P}.k_scale") == 3
    assert layer_number("h.11.attn.k_scale") == 11
    assert layer_number("2.attn.k_scale") == 2
    assert layer_number("lm_head.k_scale") is None
    assert layer_number("model.layers2.k_scale") is None


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        (f"{P}.k_proj.k_scale", f"{P}.attn.k_scale"),
        (f"{P}.v_proj.v_scale", f"{P}.attn.v_scale"),
        (f"{P}.qkv_proj.k_scale", f"{P}.attn.k_scale"),
        (f"{P}.qkqkv_proj.v_scale", f"{P}.attn.v_scale"),
        ("backbone.layers.3.mixer.k_proj.k_scale", "backbone.layers.3.mixer.attn.k_scale"),
        (f"{P}.q.scale", f"{P}.attn.q_scale"),
        (f"{P}.k_cache.scale", f"{P}.attn.k_scale"),
        (f"{P}.k_scale", f"{P}.attn.k_scale"),
        (f"{P}.v_scale", f"{P}.attn.v_scale"),
        (f"{P}.q_scale", f"{P}.attn.q_scale"),
        (f"{P}.kv_scale", f"{P}.attn.k_scale"),
        (f"{P}.attn.k_scale", f"{P}.attn.k_scale"),
        ("gpt_neox.layers.0.attention.k_scale", "gpt_neox.layers.0.attention.attn.k_scale"),
        ("transformer.h.0.attn.k_scale", "transformer.h.0.attn.k_scale"),
        ("transformer.h.0.attn.attn.k_scale", "transformer.h.0.attn.attn.k_scale"),
        (f"{P}.k_proj.output_scale", f"{P}.k_proj.output_scale"),
        (f"{P}.k_proj.weight", f"{P}.k_proj.weight"),
    ],
)
def test_vllm(name: str, parameter: str) -> None:
    assert vllm_parameter(name) == parameter


def test_vllm_beside_fp8_and_quark() -> None:
    for slot in "qkv":
        name = f"{P}.{slot}_proj.output_scale"
        assert vllm_parameter(name, output_scales=True) == f"{P}.attn.{slot}_scale"
    found = vllm_parameter(f"{P}.prob_output_scale", output_scales=True)
    assert found == f"{P}.attn.prob_scale"
    assert vllm_parameter(f"{P}.k_scale", output_scales=True) == f"{P}.attn.k_scale"


def test_vllm_with_latent_attention() -> None:
    name = f"{P}.k_proj.k_scale"
    assert vllm_parameter(name, latent=True) == f"{P}.mla_attn.mla_attn.k_scale"
    assert vllm_parameter(f"{P}.k_scale", latent=True) == f"{P}.attn.k_scale"


def test_older_vllm_doubles() -> None:
    assert older_vllm_parameter(f"{P}.attn.k_scale") == f"{P}.attn.attn.k_scale"
    assert older_vllm_parameter(f"{P}.k_scale") == f"{P}.attn.k_scale"
    name = f"{P}.v_proj.output_scale"
    assert older_vllm_parameter(name, output_scales=True) == f"{P}.attn.v_scale"


LLAMA, QWEN2, GPT2 = "LlamaForCausalLM", "Qwen2ForCausalLM", "GPT2LMHeadModel"
DEEPSEEK, QWEN3_NEXT = "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        (f"{P}.k_scale", f"{P}.attn.k_scale"),
        (f"{P}.k_proj.k_scale", f"{P}.attn.k_scale"),
        (f"{P}.kv_scale", f"{P}.attn.k_scale"),
        (f"{P}.k_proj.output_scale", f"{P}.attn.k_scale"),
        (f"{P}.attn.k_scale", f"{P}.attn.attn.k_scale"),
        (f"{P}.qkv_proj.k_scale", f"{P}.qkv_proj.attn.k_scale"),
        (f"{P}.v_proj.k_scale", f"{P}.v_proj.attn.k_scale"),
        (f"{P}.q_scale", f"{P}.q_scale"),
        ("backbone.layers.3.mixer.v_proj.v_scale", "backbone.layers.3.mixer.attn.v_scale"),
    ],
)
def test_sglang_classes_that_rename(name: str, parameter: str) -> None:
    assert sglang_parameter(name, LLAMA) == parameter


@pytest.mark.parametrize(
    ("architecture", "loads", "does_not"),
    [
        (LLAMA, ["k_scale", "k_proj.k_scale"], ["attn.k_scale"]),
        ("Gemma2ForCausalLM", ["k_scale"], ["attn.k_scale"]),
        (QWEN2, ["attn.k_scale"], ["k_scale", "k_proj.k_scale"]),
        ("Qwen3MoeForCausalLM", ["attn.k_scale"], ["k_scale", "k_proj.k_scale"]),
        (GPT2, ["attn.k_scale"], ["k_scale"]),
        (DEEPSEEK, ["k_proj.k_scale", "attn_mqa.k_scale"], ["k_scale", "attn.k_scale"]),
        ("Glm4MoeLiteForCausalLM", ["attn_mqa.k_scale"], ["k_proj.k_scale", "k_scale"]),
        (QWEN3_NEXT, ["k_proj.k_scale", "attn.k_scale"], ["k_scale"]),
        ("Qwen3_5ForCausalLM", ["k_proj.k_scale", "k_scale", "attn.k_scale"], ["q_scale"]),
        ("NobodysForCausalLM", ["attn.k_scale"], ["k_scale"]),
    ],
)
def test_what_each_sglang_class_loads(
    architecture: str, loads: list[str], does_not: list[str]
) -> None:
    key, value = sglang_parameters(P, architecture)
    assert value == key.replace("k_scale", "v_scale")
    for name in loads:
        assert sglang_parameter(f"{P}.{name}", architecture) == key
    for name in does_not:
        assert sglang_parameter(f"{P}.{name}", architecture) != key


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        (LLAMA, ("k_scale", "v_scale")),
        ("Qwen3_5MoeForCausalLM", ("k_scale", "v_scale")),
        (QWEN2, ("attn.k_scale", "attn.v_scale")),
        (GPT2, ("attn.k_scale", "attn.v_scale")),
        (DEEPSEEK, ("k_proj.k_scale", "v_proj.v_scale")),
        (QWEN3_NEXT, ("k_proj.k_scale", "v_proj.v_scale")),
        ("Glm4MoeLiteForCausalLM", ("attn_mqa.k_scale", "attn_mqa.v_scale")),
        ("NobodysForCausalLM", ("attn.k_scale", "attn.v_scale")),
    ],
)
def test_the_names_to_give_are_names_that_load(architecture: str, names: tuple[str, str]) -> None:
    found = sglang_names(P, architecture)
    assert found == tuple(f"{P}.{name}" for name in names)
    parameters = tuple(sglang_parameter(name, architecture) for name in found)
    assert parameters == sglang_parameters(P, architecture)


def test_sglang_classes_that_stop() -> None:
    name = f"{P}.k_scale"
    assert sglang_refuses(name, name, False, GPT2)
    assert not sglang_refuses(f"{P}.attn.k_scale", f"{P}.attn.k_scale", True, GPT2)
    assert not sglang_refuses(name, name, False, QWEN2)
    assert sglang_refuses(f"{P}.k_proj.k_scale", f"{P}.attn.k_scale", True, "Gemma2ForCausalLM")
    assert not sglang_refuses(f"{P}.k_proj.k_scale", f"{P}.attn.k_scale", True, LLAMA)


def test_each_class_is_of_one_kind() -> None:
    kinds = [
        sglang_models.RENAMING,
        sglang_models.LITERAL,
        sglang_models.STRICT,
        sglang_models.LATENT,
        sglang_models.LATENT_LITERAL,
        sglang_models.QWEN3_5,
        sglang_models.QWEN3_NEXT,
    ]
    assert sum(map(len, kinds)) == len(frozenset().union(*kinds))
    assert all(sglang_knows(name) for kind in kinds for name in kind)
    assert not sglang_knows("NobodysForCausalLM")
    assert frozenset().union(*kinds[:3]) >= sglang_models.NO_PROJECTIONS
    for named in (QWEN2, "Qwen2MoeForCausalLM", "GptOssForCausalLM", "OPTForCausalLM"):
        assert named in sglang_models.LITERAL
    for named in (LLAMA, "MistralForCausalLM", "Phi3ForCausalLM", "Qwen3ForCausalLM"):
        assert named in sglang_models.RENAMING
