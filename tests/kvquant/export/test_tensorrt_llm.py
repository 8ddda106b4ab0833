from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvquant.errors import ExportError
from kvquant.export.tensorrt_llm import TensorRtLlm, TensorRtLlmNvfp4
from kvquant.geometry import LayerGeometry, LayerKind

FULL = LayerGeometry(LayerKind.FULL, 2, 16, 16)
LATENT = LayerGeometry(LayerKind.LATENT, 1, 16, 4)
BOTH = [(TensorRtLlm(), "FP8"), (TensorRtLlmNvfp4(), "NVFP4")]


@pytest.mark.parametrize(("target", "algorithm"), BOTH)
def test_what_is_written(
    make_job: Callable[..., Any], plain: Callable[..., Any], target: Any, algorithm: str
) -> None:
    made = target.contribute(make_job({0: ([0.5, 0.25], [0.25, 1.0])}, per_head=True))
    assert plain(made.tensors) == {
        "model.layers.0.self_attn.k_proj.k_scale": ("float32", [0.5]),
        "model.layers.0.self_attn.v_proj.v_scale": ("float32", [1.0]),
    }
    assert made.config == {}, "TensorRT-LLM refuses a block with empty config_groups"
    assert list(made.files) == ["hf_quant_config.json"]
    values = json.loads(made.files["hf_quant_config.json"])
    assert values["producer"]["name"] == "modelopt"
    assert values["quantization"] == {
        "quant_algo": None,
        "kv_cache_quant_algo": algorithm,
        "exclude_modules": [],
    }
    assert made.launch == ("trtllm-serve {model}",)
    assert any("TensorRT-LLM takes no scales per head" in remark for remark in made.remarks)
    assert "LoRA" in made.remarks[-1]


def test_fp8_says_that_scales_change_nothing(make_job: Callable[..., Any]) -> None:
    def told(target: Any) -> bool:
        remarks = target.contribute(make_job({0: (1.0, 1.0)})).remarks
        return any("ignores every scale" in remark for remark in remarks)

    assert told(TensorRtLlm())
    assert not told(TensorRtLlmNvfp4())


def test_latent(make_job: Callable[..., Any], plain: Callable[..., Any]) -> None:
    job = make_job({0: (0.5, 1.0)}, layers=[LATENT])
    assert [numbers for _, numbers in plain(TensorRtLlm().contribute(job).tensors).values()] == [
        [1.0],
        [1.0],
    ]
    with pytest.raises(ExportError, match="takes NVFP4 scales with k_proj and v_proj"):
        TensorRtLlmNvfp4().contribute(job)


@pytest.mark.parametrize(("target", "algorithm"), BOTH)
def test_a_base_of_modelopt(
    make_job: Callable[..., Any], tmp_path: Path, target: Any, algorithm: str
) -> None:
    flat = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    whole = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(whole))
    config = {"quantization_config": flat}
    made = target.contribute(make_job({0: (1.0, 1.0)}, config=config, quantization=flat))
    assert json.loads(made.files["hf_quant_config.json"])["quantization"] == {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": algorithm,
    }
    inline = made.config["quantization_config"].pop("kv_cache_scheme")
    assert made.config == {"quantization_config": flat}
    assert inline == (
        "NVFP4" if algorithm == "NVFP4" else {"dynamic": False, "num_bits": 8, "type": "float"}
    )


def test_config_json_alone_is_enough_for_fp8_only(make_job: Callable[..., Any]) -> None:
    flat = {"quant_method": "modelopt", "quant_algo": "FP8"}
    job = make_job({0: (1.0, 1.0)}, config={"quantization_config": flat}, quantization=flat)
    assert TensorRtLlm().contribute(job).files == {}
    with pytest.raises(ExportError, match=r"has no hf_quant_config\.json"):
        TensorRtLlmNvfp4().contribute(job)


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8", "gptq", "awq", "mxfp4"])
def test_other_bases(make_job: Callable[..., Any], method: str) -> None:
    job = make_job({0: (1.0, 1.0)}, quantization={"quant_method": method})
    with pytest.raises(
        ExportError, match=f"quantized with {method}.*trtllm-serve MODEL --kv_cache_dtype fp8"
    ):
        TensorRtLlm().contribute(job)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key_format": "int8"}, "Its caches are fp8 and nvfp4"),
        ({"layers": [FULL, FULL]}, "leave layer 1 exact"),
        ({"tensors": ["model.layers.0.self_attn.k_proj.k_scale"]}, "has KV scales already"),
    ],
)
def test_refused(make_job: Callable[..., Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ExportError, match=said):
        TensorRtLlm().contribute(make_job({0: (1.0, 1.0)}, **changes))
