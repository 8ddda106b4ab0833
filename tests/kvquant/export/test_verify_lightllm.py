"""Each of LightLLM's own checks, on a calibration file for a Llama of 2 layers with 2 KV heads."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvquant.export.verify import verify

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}
PER_HEAD: dict[str, Any] = {
    "version": "1.0",
    "architectures": "LlamaForCausalLM",
    "quant_type": "per_head",
    "qmin": -448.0,
    "qmax": 448.0,
    "num_layers": 2,
    "num_head": 2,
    "scales_shape": [2, 4],
    "scales": [[0.031, 0.029, 0.008, 0.007], [0.033, 0.030, 0.009, 0.008]],
    "q_calibration": {
        "num_head": 2,
        "scales_shape": [2, 2],
        "scales": [[0.02, 0.02], [0.02, 0.02]],
    },
}
PER_TENSOR: dict[str, Any] = {
    **{key: value for key, value in PER_HEAD.items() if key != "q_calibration"},
    "quant_type": "per_tensor",
    "scales_shape": [2, 2],
    "scales": [[0.031, 0.008], [0.033, 0.009]],
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def build(values: Any, config: Any = CONFIG) -> Path:
        (tmp_path / "kv_cache_calib.json").write_text(json.dumps(values))
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
            weights = {"model.norm.weight": np.ones(1, np.float32)}
            save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    return build


@pytest.mark.parametrize("values", [PER_HEAD, PER_TENSOR])
@pytest.mark.parametrize("config", [CONFIG, None])
def test_a_good_file_passes(write: Callable[..., Path], values: Any, config: Any) -> None:
    report = verify(write(values, config), "lightllm")
    assert report.ok
    assert [layer.layer for layer in report.layers] == [0, 1]
    half = len(values["scales"][1]) // 2
    assert report.layers[1].key_scale == tuple(values["scales"][1][:half])
    assert report.layers[1].value_scale == tuple(values["scales"][1][half:])
    (launch,) = report.findings
    kind = "fp8kv_sph" if values is PER_HEAD else "fp8kv_spt"
    assert f"--llm_kv_type {kind} --kv_quant_calibration_config_path" in launch.what


def _change(**changes: Any) -> dict[str, Any]:
    return {**PER_HEAD, **changes}


ROWS = PER_HEAD["scales"]
QUERIES = PER_HEAD["q_calibration"]


@pytest.mark.parametrize(
    ("values", "what", "layer"),
    [
        (
            _change(architectures=["LlamaForCausalLM"]),
            r"architectures \['LlamaForCausalLM'\]",
            None,
        ),
        (_change(architectures="Qwen2ForCausalLM"), "'Qwen2ForCausalLM', but config.json", None),
        (_change(qmin=-127.0), r"qmin -127.0, not -448.0", None),
        (_change(qmax=240.0), r"qmax 240.0, not 448.0", None),
        (_change(quant_type="per_channel"), "quant_type 'per_channel'", None),
        (_change(num_layers=3), "num_layers 3, but the model has 2 layers", None),
        (_change(num_head=4), "num_head 4, but the model has 2 KV heads", None),
        (_change(scales=ROWS[:1]), "1 row of scales for 2 layers", None),
        (_change(scales=[ROWS[0], ROWS[1][:2]]), "layer 1: .* has 2 scales, not 4", 1),
        (_change(scales=[[0.0, 1, 1, 1], ROWS[1]]), "layer 0: .* not all of them finite", 0),
        (_change(scales=[ROWS[0], [float("nan"), 1, 1, 1]]), "layer 1: .*nan", 1),
        (_change(scales=[ROWS[0], [float("inf"), 1, 1, 1]]), "layer 1: .*inf", 1),
        (_change(scales=[[0.1, "0.1", 1, 1], ROWS[1]]), "has no scales, rows of numbers", None),
        (_change(scales=None), "has no scales, rows of numbers", None),
        (_change(q_calibration=None), "has no q_calibration", None),
        (_change(q_calibration={**QUERIES, "scales": [[0.1, 0.1]]}), "1 rows of", None),
        (_change(q_calibration={**QUERIES, "num_head": 4}), "not 2 of 4", None),
        (_change(q_calibration={**QUERIES, "scales": [[0.1, -1.0]] * 2}), "not finite", None),
        (_change(q_calibration={**QUERIES, "scales": [[0.1, 0.0]] * 2}), "not finite", None),
        (_change(q_calibration={**QUERIES, "scales": [[0.1, 0.1], "x"]}), "no q_calibration", None),
        (_change(q_calibration={**QUERIES, "scales": [[0.1, 0.1], [0.1]]}), "not 2 of 2", None),
        (_change(num_draft_layers=1), "num_draft_layers 1", None),
        (_change(num_target_layers=2, num_draft_layers=1), "add up to num_layers 2", None),
        ([], "no JSON object", None),
    ],
)
def test_a_planted_defect_is_found_and_nothing_else(
    write: Callable[..., Path], values: Any, what: str, layer: int | None
) -> None:
    report = verify(write(values), "lightllm")
    (found,) = [finding for finding in report.findings if finding.serious]
    assert re.search(what, found.what)
    assert found.layer == layer
    assert found.fix


def test_draft_layers_that_add_up(write: Callable[..., Path]) -> None:
    assert verify(write(_change(num_target_layers=1, num_draft_layers=1)), "lightllm").ok


def test_scales_of_one_are_a_remark(write: Callable[..., Path]) -> None:
    report = verify(write(_change(scales=[[1.0] * 4] * 2)), "lightllm")
    assert report.ok
    assert any("exactly 1.0" in finding.what for finding in report.findings)


def test_layers_without_keys_have_no_row(write: Callable[..., Path]) -> None:
    config = {
        **CONFIG,
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2,
    }
    report = verify(write(PER_TENSOR, config), "lightllm")
    assert report.ok
    assert [layer.layer for layer in report.layers] == [1, 3]


@pytest.mark.parametrize("model_type", ["deepseek_v3", "bailing_hybrid"])
def test_a_latent_has_no_file(write: Callable[..., Path], model_type: str) -> None:
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "layer_group_size": 2}
    config = {**CONFIG, **latent, "model_type": model_type, "num_hidden_layers": 4}
    found = [f.what for f in verify(write(PER_TENSOR, config), "lightllm").findings if f.serious]
    assert found[0] == (
        "this model keeps a latent (MLA), for which LightLLM computes scales while serving and "
        "reads no kv_cache_calib.json"
    )


def test_no_file_and_no_json(tmp_path: Path) -> None:
    (found,) = [f for f in verify(tmp_path, "lightllm").findings if f.serious]
    assert found.what == "there is no kv_cache_calib.json"
    (tmp_path / "kv_cache_calib.json").write_text("{")
    (found,) = [f for f in verify(tmp_path, "lightllm").findings if f.serious]
    assert found.what.startswith("kv_cache_calib.json cannot be read")


def test_the_model_beside_it_is_looked_at(write: Callable[..., Path]) -> None:
    path = write(PER_TENSOR)
    weights = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(weights[:-2])
    (found,) = [f for f in verify(path, "lightllm").findings if f.serious]
    assert found.what.startswith("model.safetensors cannot be read")
    (path / "model.safetensors").unlink()
    (found,) = [f for f in verify(path, "lightllm").findings if f.serious]
    assert found.what == "there is no safetensors file here (no weights)"
    (path / "model.safetensors").write_bytes(weights)
    (path / "config.json").write_text("{")
    (found,) = [f for f in verify(path, "lightllm").findings if f.serious]
    assert found.what.startswith("config.json cannot be read")


def test_a_launch_line_is_quoted(write: Callable[..., Path], tmp_path: Path) -> None:
    directory = write(PER_TENSOR).rename(tmp_path.with_name("it's mine"))
    (said,) = [f.what for f in verify(directory, "lightllm").findings if "launch with" in f.what]
    assert shlex.split(said)[-1] == str(directory / "kv_cache_calib.json")
