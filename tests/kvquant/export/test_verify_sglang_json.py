"""SGLang's schema of scales in JSON, for a Llama of 2 layers on 1 and 2 GPUs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvquant.export.verify import verify

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}
SCALES = {"0": 0.0312, "1": 0.0298}


def _file(ranks: Any, **changes: Any) -> dict[str, Any]:
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": ranks}
    return {"model_type": "llama", "kv_cache": cache, **changes}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def build(values: Any, config: Any = CONFIG, name: str = "kv_cache_scales.json") -> Path:
        (tmp_path / name).write_text(json.dumps(values))
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
            weights = {"model.norm.weight": np.ones(1, np.float32)}
            save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    return build


@pytest.mark.parametrize("ranks", [{"0": SCALES}, {"0": SCALES, "1": SCALES}])
def test_a_good_file_passes(write: Callable[..., Path], ranks: Any) -> None:
    report = verify(write(_file(ranks)), "sglang-json")
    assert report.ok
    assert [layer.key_scale for layer in report.layers] == [(0.0312,), (0.0298,)]
    assert [layer.value_scale for layer in report.layers] == [(0.0312,), (0.0298,)]
    launch, broken = report.findings
    assert "--quantization-param-path kv_cache_scales.json" in launch.what
    assert "issue 18818" in broken.what


def test_unknown_keys_and_other_json_are_passed_over(write: Callable[..., Path]) -> None:
    write({"not": "scales"}, name="tokenizer.json")
    assert verify(write(_file({"0": SCALES}, note="of ours")), "sglang-json").ok


def test_without_a_model_the_rest_is_checked(write: Callable[..., Path]) -> None:
    assert verify(write(_file({"0": SCALES}), None), "sglang-json").ok
    assert not verify(write(_file({"1": SCALES}), None), "sglang-json").ok


@pytest.mark.parametrize(
    ("values", "what", "layer"),
    [
        ({"kv_cache": _file({"0": SCALES})["kv_cache"]}, "model_type None, but", None),
        (_file({"0": SCALES}, model_type="qwen2"), "'qwen2', but config.json says 'llama'", None),
        (_file({"0": SCALES}, model_type=None), "model_type None", None),
        (
            _file({}, kv_cache={"dtype": "fp8_e4m3", "scaling_factor": {"0": SCALES}}),
            "dtype 'fp8_e4m3', not 'float8_e4m3fn'",
            None,
        ),
        (_file({"1": SCALES}), "has the ranks 1, not 0 to 0", None),
        (_file({"0": SCALES, "2": SCALES}), "has the ranks 0, 2, not 0 to 1", None),
        (_file({"0": {"0": 0.5}}), "layer 1: .* no scale in rank 0", 1),
        (_file({"0": {**SCALES, "2": 0.5}}), "scales of layers 2 in rank 0", None),
        (_file({"0": {"0": 0.5, "1": [0.5]}}), r"layer 1: .* has \[0.5\] in rank 0", 1),
        (_file({"0": {"0": 0.0, "1": 0.5}}), "layer 0: .* has 0.0 in rank 0", 0),
        (_file({"0": {"0": 0.5, "1": float("nan")}}), "layer 1: .* has nan", 1),
        (_file({"0": SCALES, "1": {"0": 0.5, "1": -1}}), "layer 1: .* has -1 in rank 1", 1),
        (_file({"0": [0.5, 0.5]}), "no scaling_factor", None),
        (_file({"zero": SCALES}), "no scaling_factor", None),
        (_file({}), "no scaling_factor", None),
        (_file(None), "no scaling_factor", None),
    ],
)
def test_a_planted_defect_is_found_and_nothing_else(
    write: Callable[..., Path], values: Any, what: str, layer: int | None
) -> None:
    report = verify(write(values), "sglang-json")
    (found,) = [finding for finding in report.findings if finding.serious]
    assert re.search(what, found.what)
    assert found.layer == layer
    assert found.fix


def test_a_class_that_cannot_read_them(write: Callable[..., Path]) -> None:
    config = {**CONFIG, "architectures": ["Qwen3MoeForCausalLM"]}
    (found,) = [
        f for f in verify(write(_file({"0": SCALES}), config), "sglang-json").findings if f.serious
    ]
    assert "Qwen3MoeForCausalLM has no load_kv_cache_scales" in found.what


@pytest.mark.parametrize(("method", "ok"), [("fp8", False), ("gptq", True)])
def test_parameters_in_their_place(write: Callable[..., Path], method: str, ok: bool) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": method}}
    assert verify(write(_file({"0": SCALES}), config), "sglang-json").ok is ok


def test_scales_of_one_are_a_remark(write: Callable[..., Path]) -> None:
    report = verify(write(_file({"0": {"0": 1.0, "1": 1.0}})), "sglang-json")
    assert report.ok
    assert any("exactly 1.0" in finding.what for finding in report.findings)


def test_each_file_is_checked(write: Callable[..., Path]) -> None:
    write(_file({"0": SCALES}))
    report = verify(write(_file({"0": {"0": 0.5}}), name="tp2.json"), "sglang-json")
    (found,) = [finding for finding in report.findings if finding.serious]
    assert "tp2.json" in found.what


def test_the_model_beside_it_is_looked_at(write: Callable[..., Path]) -> None:
    path = write(_file({"0": SCALES}))
    weights = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(weights[:-2])
    (found,) = [f for f in verify(path, "sglang-json").findings if f.serious]
    assert found.what.startswith("model.safetensors cannot be read")
    (path / "model.safetensors").write_bytes(weights)
    (path / "config.json").unlink()
    (found,) = [f for f in verify(path, "sglang-json").findings if f.serious]
    assert found.what == "there is no config.json"
