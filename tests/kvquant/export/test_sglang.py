from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvquant.errors import ExportError
from kvquant.export.sglang import Sglang, SglangModelopt
from kvquant.export.vllm import Vllm
from kvquant.geometry import LayerGeometry, LayerKind

FULL = LayerGeometry(LayerKind.FULL, 2, 16, 16)
LATENT = LayerGeometry(LayerKind.LATENT, 1, 16, 4)
LAUNCH = ("python -m sglang.launch_server --model-path {model} --kv-cache-dtype fp8_e4m3",)


def test_what_is_written(make_job: Callable[..., Any], plain: Callable[..., Any]) -> None:
    job = make_job({0: (0.5, 0.25)})
    made = Sglang().contribute(job)
    assert plain(made.tensors) == {
        "model.layers.0.self_attn.k_scale": ("float32", [0.5]),
        "model.layers.0.self_attn.v_scale": ("float32", [0.25]),
    }
    assert made.config == Vllm().contribute(job).config
    assert made.launch == LAUNCH
    assert any("even when it loaded these scales" in remark for remark in made.remarks)
    assert "LoRA" in made.remarks[-1]


@pytest.mark.parametrize(
    ("architecture", "path", "name"),
    [
        ("Qwen2ForCausalLM", "model.layers.{}.self_attn", "model.layers.0.self_attn.attn.k_scale"),
        (
            "Qwen3MoeForCausalLM",
            "model.layers.{}.self_attn",
            "model.layers.0.self_attn.attn.k_scale",
        ),
        ("GptOssForCausalLM", "model.layers.{}.self_attn", "model.layers.0.self_attn.attn.k_scale"),
        (
            "MixtralForCausalLM",
            "model.layers.{}.self_attn",
            "model.layers.0.self_attn.attn.k_scale",
        ),
        (
            "OPTForCausalLM",
            "model.decoder.layers.{}.self_attn",
            "model.decoder.layers.0.self_attn.attn.k_scale",
        ),
        ("GPT2LMHeadModel", "transformer.h.{}.attn", "transformer.h.0.attn.attn.k_scale"),
        ("Phi3ForCausalLM", "model.layers.{}.self_attn", "model.layers.0.self_attn.k_scale"),
        (
            "Gemma3ForConditionalGeneration",
            "model.language_model.layers.{}.self_attn",
            "model.language_model.layers.0.self_attn.k_scale",
        ),
    ],
)
def test_names_are_those_of_the_model_class(
    make_job: Callable[..., Any], architecture: str, path: str, name: str
) -> None:
    made = Sglang().contribute(make_job({0: (0.5, 0.25)}, architecture=architecture, path=path))
    assert list(made.tensors) == [name, name.replace("k_scale", "v_scale")]
    assert not any("is not known" in remark for remark in made.remarks)


def test_together_with_vllm_a_class_that_renames_nothing_has_both_names(
    make_job: Callable[..., Any],
) -> None:
    job = make_job({0: (0.5, 0.25)}, architecture="Qwen2ForCausalLM", model_type="qwen2")
    mine, theirs = Sglang().contribute(job), Vllm().contribute(job)
    assert sorted({**mine.tensors, **theirs.tensors}) == [
        "model.layers.0.self_attn.attn.k_scale",
        "model.layers.0.self_attn.attn.v_scale",
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.v_scale",
    ]
    assert mine.config == theirs.config


def test_a_class_that_nobody_looked_at(make_job: Callable[..., Any]) -> None:
    made = Sglang().contribute(make_job({0: (0.5, 0.25)}, architecture="NewForCausalLM"))
    assert next(iter(made.tensors)) == "model.layers.0.self_attn.attn.k_scale"
    assert any("loads scales of NewForCausalLM is not known" in remark for remark in made.remarks)


@pytest.mark.parametrize("target", [Sglang(), SglangModelopt()])
def test_latent(make_job: Callable[..., Any], plain: Callable[..., Any], target: Any) -> None:
    job = make_job({0: (0.5, 2.0)}, layers=[LATENT], architecture="DeepseekV3ForCausalLM")
    made = target.contribute(job)
    assert plain(made.tensors) == {
        "model.layers.0.self_attn.k_proj.k_scale": ("float32", [2.0]),
        "model.layers.0.self_attn.v_proj.v_scale": ("float32", [2.0]),
    }
    assert made.config == Vllm().contribute(job).config
    assert any("not run" in remark for remark in made.remarks)


def test_older_versions_get_a_config_of_modelopt(
    make_job: Callable[..., Any], plain: Callable[..., Any]
) -> None:
    made = SglangModelopt().contribute(make_job({0: (0.5, 0.25)}))
    assert plain(made.tensors) == {
        "model.layers.0.self_attn.k_scale": ("float32", [0.5]),
        "model.layers.0.self_attn.v_scale": ("float32", [0.25]),
    }
    assert made.config == {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "ignore": ["*"],
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        }
    }
    assert made.launch == LAUNCH


@pytest.mark.parametrize("target", [Sglang(), SglangModelopt()])
def test_bases(make_job: Callable[..., Any], target: Any) -> None:
    def config(method: str) -> Any:
        block = {"quant_method": method, "quant_algo": "FP8"}
        base = {"quantization_config": block}
        made = target.contribute(make_job({0: (0.5, 0.25)}, config=base, quantization=block))
        assert next(iter(made.tensors)) == "model.layers.0.self_attn.k_scale"
        return made.config

    assert config("fp8") == {}
    assert config("modelopt")["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    for method in ("gptq", "awq", "bitsandbytes", "mxfp4"):
        with pytest.raises(ExportError, match=f"quantized with {method}: SGLang reads"):
            config(method)


def test_compressed_tensors_weights_need_the_newer_version(make_job: Callable[..., Any]) -> None:
    block = {"quant_method": "compressed-tensors", "config_groups": {"a": {}}}
    job = make_job({0: (0.5, 0.25)}, config={"quantization_config": block}, quantization=block)
    made = Sglang().contribute(job).config["quantization_config"]
    assert made["config_groups"] == {"a": {}}
    assert made["kv_cache_scheme"]["strategy"] == "tensor"
    with pytest.raises(ExportError, match=r"before 0\.5\.23 drops KV scales.*--engine sglang"):
        SglangModelopt().contribute(job)


def test_per_head_becomes_per_layer(
    make_job: Callable[..., Any], plain: Callable[..., Any]
) -> None:
    made = Sglang().contribute(make_job({0: ([0.5, 1.0], [0.25, 0.5])}, per_head=True))
    assert [numbers for _, numbers in plain(made.tensors).values()] == [[1.0], [0.5]]
    assert made.config["quantization_config"]["kv_cache_scheme"]["strategy"] == "tensor"
    assert made.remarks[0].startswith("SGLang takes no scales per head")
    assert "(2 times)" in made.remarks[1]


def test_skipped_layers_are_refused(make_job: Callable[..., Any]) -> None:
    with pytest.raises(ExportError, match="leave layer 0 exact, but SGLang"):
        Sglang().contribute(make_job({1: (1.0, 1.0)}, layers=[FULL, FULL]))


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("int8", "no int8 cache"),
        ("int4", "no int4 cache"),
        ("fp8_e5m2", "--kv-cache-dtype fp8_e5m2"),
    ],
)
def test_other_formats(make_job: Callable[..., Any], form: str, said: str) -> None:
    with pytest.raises(ExportError, match=said):
        Sglang().contribute(make_job({0: (1.0, 1.0)}, key_format=form, value_format=form))


def test_heads_too_wide_for_flash_attention(make_job: Callable[..., Any]) -> None:
    wide = LayerGeometry(LayerKind.FULL, 2, 512, 512)
    remarks = Sglang().contribute(make_job({0: (1.0, 1.0)}, layers=[wide])).remarks
    assert any("head sizes beyond 256" in remark for remark in remarks)
