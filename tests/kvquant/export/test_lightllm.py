from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvquant.errors import ExportError
from kvquant.export.lightllm import LightLlm
from kvquant.geometry import LayerGeometry, LayerKind

FULL = LayerGeometry(LayerKind.FULL, 2, 16, 16)
LINEAR = LayerGeometry(LayerKind.LINEAR)
LATENT = LayerGeometry(LayerKind.LATENT, 1, 16, 4)
SERVE = "python -m lightllm.server.api_server --model_dir {model} --llm_kv_type"
CALIBRATION = "--kv_quant_calibration_config_path {model}/kv_cache_calib.json"


def test_per_tensor(make_job: Callable[..., Any]) -> None:
    made = LightLlm().contribute(make_job({0: (0.5, 0.25), 1: (0.01, 4.0)}))
    assert (made.tensors, made.config) == ({}, {})
    assert list(made.files) == ["kv_cache_calib.json"]
    assert json.loads(made.files["kv_cache_calib.json"]) == {
        "version": "1.0",
        "architectures": "LlamaForCausalLM",
        "quant_type": "per_tensor",
        "qmin": -448.0,
        "qmax": 448.0,
        "num_layers": 2,
        "num_head": 2,
        "scales_shape": [2, 2],
        "scales": [[0.5, 0.25], [0.010009765625, 4.0]],
    }
    assert made.launch == (f"{SERVE} fp8kv_spt {CALIBRATION}",)
    assert not any("q_calibration" in remark for remark in made.remarks)


def test_per_head_has_all_keys_first(make_job: Callable[..., Any]) -> None:
    scales = {0: ([0.5, 0.25], [1.0, 2.0]), 1: ([4.0, 8.0], [16.0, 32.0])}
    made = LightLlm().contribute(make_job(scales, per_head=True))
    values = json.loads(made.files["kv_cache_calib.json"])
    assert values["quant_type"] == "per_head"
    assert values["scales_shape"] == [2, 4]
    assert values["scales"] == [[0.5, 0.25, 1.0, 2.0], [4.0, 8.0, 16.0, 32.0]]
    assert "q_calibration" not in values
    assert made.launch == (f"{SERVE} fp8kv_sph {CALIBRATION}",)
    assert any("2026-09 and later refuses fp8kv_sph" in remark for remark in made.remarks)


def test_layers_without_tokens_do_not_count(make_job: Callable[..., Any]) -> None:
    made = LightLlm().contribute(make_job({1: (0.5, 0.25)}, layers=[LINEAR, FULL, LINEAR]))
    values = json.loads(made.files["kv_cache_calib.json"])
    assert (values["num_layers"], values["scales"]) == (1, [[0.5, 0.25]])


def test_any_base_will_do(make_job: Callable[..., Any]) -> None:
    job = make_job({0: (0.5, 0.25)}, quantization={"quant_method": "gptq"})
    assert LightLlm().contribute(job).config == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key_format": "int8"}, "--model_dir MODEL --llm_kv_type int8kv"),
        ({"value_format": "int4"}, "--model_dir MODEL --llm_kv_type int4kv"),
        ({"key_format": "fp8_e5m2"}, "no fp8_e5m2 cache"),
        ({"layers": [LATENT]}, "--llm_kv_type fp8kv_dsa"),
        ({"layers": [FULL, FULL]}, "leave layer 1 exact"),
        ({"config": {"architectures": []}}, "has no architectures"),
        ({"per_head": True}, "keys are calibrated per-tensor"),
    ],
)
def test_refused(make_job: Callable[..., Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ExportError, match=said):
        LightLlm().contribute(make_job({0: (1.0, 1.0)}, **changes))


def test_layers_of_different_heads(make_job: Callable[..., Any]) -> None:
    layers = [FULL, LayerGeometry(LayerKind.FULL, 4, 16, 16)]
    with pytest.raises(ExportError, match=r"2 and 4 KV heads, but LightLLM's kv_cache_calib\.json"):
        LightLlm().contribute(make_job({0: (1.0, 1.0), 1: (1.0, 1.0)}, layers=layers))
