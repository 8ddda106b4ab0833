"""What is peculiar to a model class, or to a way to declare a cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvquant.export.verify import verify
from kvquant.export.verify_report import VerifyReport

INNER = ("attn.k_scale", "attn.v_scale")
PROJECTIONS = ("k_proj.k_scale", "v_proj.v_scale")
LLAMA = "model.layers.{}.self_attn"
HALF = np.array([0.5], np.float32)


def serious(report: VerifyReport) -> list[str]:
    return [finding.what for finding in report.findings if finding.serious]


def remarks(report: VerifyReport) -> list[str]:
    """What is said without being serious."""
    return [finding.what for finding in report.findings if not finding.serious]


def test_a_class_that_stops_loads_nothing(export: Callable[..., Any]) -> None:
    made = export("compressed-tensors", "gpt2").add("transformer.h.{}.attn", [0, 1], INNER)
    made.add("transformer.h.{}.attn", [0])
    report = verify(made.write(), "sglang")
    assert [layer.source for layer in report.layers] == ["does not load"] * 2
    (found,) = serious(report)
    assert "transformer.h.0.attn.k_scale, transformer.h.0.attn.v_scale" in found


def test_gpt2_needs_attn_twice_in_vllm(export: Callable[..., Any]) -> None:
    made = export("compressed-tensors", "gpt2").add("transformer.h.{}.attn", [0, 1])
    (found,) = serious(verify(made.write(), "vllm"))
    assert found == (
        "all 2 layers: vLLM finds no scale and serves keys and values at scale 1.0; it looks for "
        "transformer.h.0.attn.attn.k_scale, and drops transformer.h.0.attn.k_scale, "
        "transformer.h.0.attn.v_scale"
    )
    assert "stops at transformer.h.0.attn.k_scale" in serious(verify(made.path, "sglang"))[0]


def test_latent_attention_needs_modelopt_in_vllm(export: Callable[..., Any]) -> None:
    made = export("compressed-tensors", "deepseek").add(LLAMA, [0, 1])
    (found,) = serious(verify(made.write(), "vllm"))
    assert found.startswith("layers 0-1 keep a latent (MLA)")
    made.declare("modelopt")
    (found,) = serious(verify(made.write(), "vllm"))
    assert "looks for model.layers.0.self_attn.k_proj.k_scale" in found
    made.declare("modelopt", quant_algo="MIXED_PRECISION")
    assert "mixed ones" in serious(verify(made.write(), "vllm"))[0]


def test_latent_attention_in_other_engines(export: Callable[..., Any]) -> None:
    made = export(None, "deepseek").add(LLAMA, [0, 1], PROJECTIONS).add(LLAMA, [0, 1])
    made.beside(quant_algo=None, kv_cache_quant_algo="NVFP4")
    (found,) = serious(verify(made.write(), "tensorrt-llm-nvfp4"))
    assert found.startswith("layers 0-1 keep a latent (MLA): TensorRT-LLM takes NVFP4 scales with")
    report = verify(made.path, "tgi")
    assert report.ok
    assert any("for which TGI is not known to load" in f.what for f in report.findings)
    made.declare("modelopt")
    (made.path / "hf_quant_config.json").unlink()
    report = verify(made.write(), "vllm")
    assert report.ok
    assert any("fp8_ds_mla uses scales of its own" in f.what for f in report.findings)


def test_scales_of_layers_without_keys_are_not_used(export: Callable[..., Any]) -> None:
    made = export("compressed-tensors", "gemma3n_text").add(LLAMA, range(5))
    report = verify(made.write(), "vllm")
    assert report.ok
    (found,) = [finding for finding in report.findings if finding.layer == 4]
    assert "2 scale tensors of layer 4, where no attention keeps" in found.what
    assert [layer.layer for layer in report.layers] == [0, 1, 2, 3]


def test_a_model_class_that_renames_nothing(export: Callable[..., Any]) -> None:
    made = export("compressed-tensors", "qwen2").add(LLAMA, [0, 1])
    (found,) = serious(verify(made.write(), "sglang"))
    assert found.startswith("all 2 layers: SGLang finds no scale and serves")
    assert "looks for model.layers.0.self_attn.attn.k_scale, and drops" in found


def test_a_model_class_that_is_not_known(export: Callable[..., Any]) -> None:
    made = export("compressed-tensors").add(LLAMA, [0, 1])
    made.config["architectures"] = ["SomebodysForCausalLM"]
    report = verify(made.write(), "sglang")
    assert not report.ok
    assert any("SomebodysForCausalLM is not known here" in text for text in remarks(report))


def test_a_config_in_the_text_part_counts(export: Callable[..., Any]) -> None:
    made = export("compressed-tensors").add(LLAMA, [0, 1])
    made.config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": made.config,
    }
    assert verify(made.write(), "vllm").ok


def test_weights_that_are_quantized_need_no_exception(export: Callable[..., Any]) -> None:
    made = export(None).declare("modelopt", ignore=["lm_head"]).add(LLAMA, [0, 1], PROJECTIONS)
    assert not verify(made.write(), "vllm").ok
    made.scales["model.layers.0.mlp.up_proj.weight_scale"] = np.ones(1, np.float32)
    assert verify(made.write(), "vllm").ok
    assert verify(made.path, "sglang").ok


def test_hf_quant_config_alone(export: Callable[..., Any]) -> None:
    """What ModelOpt writes beside the config: vLLM falls back on it."""
    made = export(None).add(LLAMA, [0, 1], PROJECTIONS)
    made.beside(quant_algo="FP8", kv_cache_quant_algo="FP8", exclude_modules=["*"])
    assert verify(made.write(), "vllm").ok
    made.beside(quant_algo="MXFP8", kv_cache_quant_algo="FP8", exclude_modules=["*"])
    assert "quant_algo MXFP8" in serious(verify(made.path, "vllm"))[0]
    made.beside(quant_algo=None, kv_cache_quant_algo="FP8")
    (found,) = serious(verify(made.path, "vllm"))
    assert "no quant_algo" in found
    text = json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["*"]}})
    (made.path / "hf_quant_config.json").write_text(text)
    assert "does not name modelopt" in serious(verify(made.path, "vllm"))[0]


def test_heads_that_few_backends_take(export: Callable[..., Any]) -> None:
    report = verify(export("compressed-tensors", "llama_wide").add(LLAMA, [0, 1]).write(), "vllm")
    assert report.ok
    assert any("layers 0-1 have heads of 24, no multiple of 16" in t for t in remarks(report))
    made = export("modelopt", "deepseek", kv_lora_rank=20, path="latent")
    report = verify(made.add(LLAMA, [0, 1], PROJECTIONS).write(), "vllm")
    assert report.ok
    assert not any("no multiple" in text for text in remarks(report))


def test_per_head_scales_need_a_backend(export: Callable[..., Any]) -> None:
    made = export("compressed-tensors").add(LLAMA, [0, 1])
    made.scheme["strategy"] = "attn_head"
    for name in made.scales:
        made.scales[name] = np.full((2, 1, 1), 0.5, np.float32)
    report = verify(made.write(), "vllm")
    assert report.ok
    assert any("need the backend FlashAttention 3" in text for text in remarks(report))


def test_the_flat_form_declares_fp8_to_tensorrt_llm(export: Callable[..., Any]) -> None:
    made = export(None).declare("modelopt", quant_algo=None).add(LLAMA, [0, 1], PROJECTIONS)
    assert verify(made.write(), "tensorrt-llm").ok
    (found,) = serious(verify(made.path, "tensorrt-llm-nvfp4"))
    assert found == "config.json declares the cache as FP8, not NVFP4"
    made.beside(quant_algo=None, kv_cache_quant_algo="NVFP4")
    found = serious(verify(made.path, "tensorrt-llm"))[1]
    assert found == "hf_quant_config.json declares the cache as NVFP4, not FP8"


def test_beside_compressed_tensors_queries_are_not_spoken_of(
    llama: Callable[..., Any],
) -> None:
    said = "there are no scales of queries: vLLM takes the keys'"
    assert not any(said in text for text in remarks(verify(llama("vllm").write(), "vllm")))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda scales: None, True),
        (lambda scales: scales.update({f"{LLAMA.format(1)}.q_scale": HALF}), False),
        (lambda scales: scales.update({f"{LLAMA.format(1)}.q_proj.output_scale": HALF}), False),
        (lambda scales: scales.pop(f"{LLAMA.format(1)}.k_scale"), False),
    ],
)
def test_queries_beside_fp8(
    llama: Callable[..., Any], change: Callable[[Any], Any], told: bool
) -> None:
    made = llama("vllm fp8")
    change(made.scales)
    found = remarks(verify(made.write(), "vllm"))
    assert any("there are no scales of queries" in text for text in found) is told
    assert len(found) == 1 + told
