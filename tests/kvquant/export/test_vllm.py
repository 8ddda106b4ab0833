from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvquant.errors import ExportError
from kvquant.export.vllm import Vllm
from kvquant.geometry import LayerGeometry, LayerKind

FULL = LayerGeometry(LayerKind.FULL, 2, 16, 16)
SLIDING = LayerGeometry(LayerKind.SLIDING, 2, 16, 16, window=8)
LATENT = LayerGeometry(LayerKind.LATENT, 1, 16, 4)
LINEAR = LayerGeometry(LayerKind.LINEAR)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": []}
FLAT_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}


def test_what_is_written(make_job: Callable[..., Any], plain: Callable[..., Any]) -> None:
    made = Vllm().contribute(make_job({0: (0.5, 0.25), 1: (0.01, 1.0)}))
    assert plain(made.tensors) == {
        "model.layers.0.self_attn.k_scale": ("float32", [0.5]),
        "model.layers.0.self_attn.v_scale": ("float32", [0.25]),
        "model.layers.1.self_attn.k_scale": ("float32", [0.010009765625]),
        "model.layers.1.self_attn.v_scale": ("float32", [1.0]),
    }
    assert made.config == {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "quantization_status": "frozen",
            "global_compression_ratio": None,
            "config_groups": {},
            "ignore": [],
            "kv_cache_scheme": {
                "num_bits": 8,
                "type": "float",
                "strategy": "tensor",
                "symmetric": True,
                "dynamic": False,
                "group_size": None,
                "block_structure": None,
                "actorder": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }
    }
    assert made.files == {}
    assert made.launch == ("vllm serve {model} --kv-cache-dtype fp8",)
    assert "LoRA" in made.remarks[-1]
    assert any("MI300" in remark for remark in made.remarks)


def test_per_head(make_job: Callable[..., Any], plain: Callable[..., Any]) -> None:
    made = Vllm().contribute(make_job({0: ([0.5, 0.25], [1.0, 2.0])}, per_head=True))
    assert plain(made.tensors) == {
        "model.layers.0.self_attn.k_scale": ("float32", [[[0.5]], [[0.25]]]),
        "model.layers.0.self_attn.v_scale": ("float32", [[[1.0]], [[2.0]]]),
    }
    block = made.config["quantization_config"]
    assert block["kv_cache_scheme"]["strategy"] == "attn_head"
    assert block["config_groups"] == {}, "without it vLLM does not know how many heads there are"
    assert any("FlashAttention 3 or later" in remark for remark in made.remarks)


def test_per_head_with_layers_of_different_heads(make_job: Callable[..., Any]) -> None:
    layers = [FULL, LayerGeometry(LayerKind.FULL, 1, 16, 16)]
    job = make_job({0: ([1.0, 1.0], [1.0, 1.0]), 1: ([1.0], [1.0])}, layers=layers, per_head=True)
    with pytest.raises(ExportError, match=r"1 and 2 KV heads.*leave --per-head out"):
        Vllm().contribute(job)


@pytest.mark.parametrize(
    ("path", "model_type", "name"),
    [
        ("transformer.h.{}.attn", "gpt2", "transformer.h.0.attn.attn.k_scale"),
        ("h.{}.attn", "gpt2", "h.0.attn.attn.k_scale"),
        ("gpt_neox.layers.{}.attention", "gpt_neox", "gpt_neox.layers.0.attention.k_scale"),
        ("transformer.h.{}.self_attention", "falcon", "transformer.h.0.self_attention.k_scale"),
        (
            "model.language_model.layers.{}.self_attn",
            "gemma3_text",
            "model.language_model.layers.0.self_attn.k_scale",
        ),
        ("backbone.layers.{}.mixer", "nemotron_h", "backbone.layers.0.mixer.k_scale"),
        ("model.layers.{}.self_attn", "gpt_oss", "model.layers.0.self_attn.attn.k_scale"),
    ],
)
def test_names(make_job: Callable[..., Any], path: str, model_type: str, name: str) -> None:
    made = Vllm().contribute(make_job({0: (0.5, 0.25)}, path=path, model_type=model_type))
    assert list(made.tensors) == [name, name.replace("k_scale", "v_scale")]
    literal = any("need vLLM from June 2026 on" in remark for remark in made.remarks)
    assert literal == name.endswith(".attn.k_scale")


def test_layers_without_tokens_have_no_scales_and_numbers_stay(
    make_job: Callable[..., Any],
) -> None:
    made = Vllm().contribute(make_job({1: (0.5, 0.25)}, layers=[LINEAR, FULL, LINEAR]))
    assert list(made.tensors) == [
        "model.layers.1.self_attn.k_scale",
        "model.layers.1.self_attn.v_scale",
    ]
    assert made.launch == ("vllm serve {model} --kv-cache-dtype fp8",)


def test_skipped_layers_are_launched_so(make_job: Callable[..., Any]) -> None:
    made = Vllm().contribute(make_job({1: (0.5, 0.25)}, layers=[FULL, FULL, LINEAR, FULL]))
    assert made.launch == (
        "vllm serve {model} --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0 3",
    )
    assert set(made.tensors) == {
        "model.layers.1.self_attn.k_scale",
        "model.layers.1.self_attn.v_scale",
    }


def test_latent(make_job: Callable[..., Any], plain: Callable[..., Any]) -> None:
    job = make_job({0: (0.5, 2.0)}, layers=[LATENT], model_type="deepseek_v3", per_head=True)
    made = Vllm().contribute(job)
    assert plain(made.tensors) == {
        "model.layers.0.self_attn.k_proj.k_scale": ("float32", [2.0]),
        "model.layers.0.self_attn.v_proj.v_scale": ("float32", [2.0]),
    }
    assert made.config == {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "ignore": ["*"],
            "kv_cache_scheme": FLAT_FP8,
        }
    }
    assert any("read in its source, not run" in remark for remark in made.remarks)
    assert any("vLLM takes no scales per head" in remark for remark in made.remarks)


def test_a_base_of_compressed_tensors_keeps_the_rest(make_job: Callable[..., Any]) -> None:
    block = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"]}},
        "ignore": ["lm_head"],
        "format": "float-quantized",
    }
    job = make_job({0: (0.5, 0.25)}, config={"quantization_config": block}, quantization=block)
    made = Vllm().contribute(job).config["quantization_config"]
    scheme = made.pop("kv_cache_scheme")
    assert made == block
    assert (scheme["type"], scheme["num_bits"], scheme["strategy"]) == ("float", 8, "tensor")


def test_an_fp8_base_gets_tensors_only(
    make_job: Callable[..., Any], plain: Callable[..., Any]
) -> None:
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    job = make_job({0: ([0.5, 0.5], [0.25, 1.0])}, quantization=block, per_head=True)
    made = Vllm().contribute(job)
    assert plain(made.tensors) == {
        "model.layers.0.self_attn.k_scale": ("float32", [0.5]),
        "model.layers.0.self_attn.v_scale": ("float32", [1.0]),
    }
    assert (made.config, made.files) == ({}, {})
    assert made.launch == ("vllm serve {model} --kv-cache-dtype fp8",)
    assert any("vLLM takes no scales per head" in remark for remark in made.remarks)
    assert any("scale of the keys for queries too" in remark for remark in made.remarks)


@pytest.mark.parametrize("layers", [[FULL], [LATENT]])
def test_a_base_of_modelopt_says_what_its_cache_is(
    make_job: Callable[..., Any], tmp_path: Path, layers: list[LayerGeometry]
) -> None:
    whole = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(whole))
    config = {"quantization_config": MODELOPT}
    made = Vllm().contribute(
        make_job({0: (0.5, 0.5)}, layers=layers, config=config, quantization=MODELOPT)
    )
    assert made.config == {"quantization_config": {**MODELOPT, "kv_cache_scheme": FLAT_FP8}}
    assert json.loads(made.files["hf_quant_config.json"])["quantization"] == {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
    }


@pytest.mark.parametrize(
    "method", ["gptq", "awq", "bitsandbytes", "mxfp4", "gguf", "quark", "unknown"]
)
def test_bases_beside_which_vllm_reads_no_scales(make_job: Callable[..., Any], method: str) -> None:
    with pytest.raises(ExportError, match=f"quantized with {method}: vLLM reads KV scales only"):
        Vllm().contribute(make_job({0: (1.0, 1.0)}, quantization={"quant_method": method}))


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_bases_beside_which_vllm_reads_no_latent_scales(
    make_job: Callable[..., Any], method: str
) -> None:
    job = make_job({0: (1.0, 1.0)}, layers=[LATENT], quantization={"quant_method": method})
    with pytest.raises(ExportError, match=rf"quantized with {method}: vLLM for a latent cache"):
        Vllm().contribute(job)


def test_mixed_precision_with_a_latent(make_job: Callable[..., Any]) -> None:
    block = {**MODELOPT, "quant_algo": "MIXED_PRECISION"}
    Vllm().contribute(make_job({0: (1.0, 1.0)}, quantization=block))
    job = make_job({0: (1.0, 1.0)}, layers=[LATENT], quantization=block)
    with pytest.raises(ExportError, match="mixed precision: vLLM reads no scales of a latent"):
        Vllm().contribute(job)


def test_scales_from_before_are_refused(make_job: Callable[..., Any]) -> None:
    job = make_job({0: (1.0, 1.0)}, tensors=["model.layers.0.self_attn.k_scale"])
    with pytest.raises(ExportError, match="has KV scales already"):
        Vllm().contribute(job)


@pytest.mark.parametrize(
    ("form", "launch"),
    [
        ("int8", "vllm serve MODEL --kv-cache-dtype int8_per_token_head"),
        ("int4", "vllm serve MODEL --kv-cache-dtype int4_per_token_head"),
        ("fp8_e5m2", "vllm serve MODEL --kv-cache-dtype fp8_e5m2"),
    ],
)
def test_other_formats(make_job: Callable[..., Any], form: str, launch: str) -> None:
    job = make_job({0: (1.0, 1.0)}, key_format=form, value_format=form)
    with pytest.raises(ExportError, match=launch):
        Vllm().contribute(job)


def test_what_depends_on_the_geometry(make_job: Callable[..., Any]) -> None:
    def remarks(*layers: LayerGeometry) -> str:
        scales = {index: (1.0, 1.0) for index in range(len(layers))}
        return "\n".join(Vllm().contribute(make_job(scales, layers=layers)).remarks)

    odd = LayerGeometry(LayerKind.FULL, 2, 24, 16)
    assert "head size 24 is no multiple of 16" in remarks(odd)
    assert "no multiple" not in remarks(FULL)
    assert "1 sliding-window layer among the others" in remarks(FULL, SLIDING)
    assert "window" not in remarks(FULL)
    assert "window" not in remarks(SLIDING), "then nothing would be quantized"
