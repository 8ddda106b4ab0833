"""Good exports pass; what `verify` reads, and what it reports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvquant.errors import ExportError, ModelError
from kvquant.export.verify import verify
from kvquant.export.verify_report import VerifyReport

BASE = "model-00001-of-00002.safetensors"
PLAIN, INNER = ("k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale")
PROJECTIONS = ("k_proj.k_scale", "v_proj.v_scale")
LLAMA = "model.layers.{}.self_attn"
K1 = f"{LLAMA.format(1)}.k_scale"


def serious(report: VerifyReport) -> list[str]:
    return [finding.what for finding in report.findings if finding.serious]


# --- good exports ---------------------------------------------------------------------------------

GOOD = [
    ("vllm", "compressed-tensors", "llama", LLAMA, [0, 1], PLAIN),
    ("vllm", "fp8", "llama", LLAMA, [0, 1], PLAIN),
    ("vllm", "modelopt", "llama", LLAMA, [0, 1], PROJECTIONS),
    ("vllm", "compressed-tensors", "qwen2", LLAMA, [0, 1], INNER),
    ("vllm", "compressed-tensors", "phi3", LLAMA, [0, 1], PLAIN),
    ("vllm", "compressed-tensors", "phi3", LLAMA, [0, 1], ("qkv_proj.k_scale", "qkv_proj.v_scale")),
    ("vllm", "compressed-tensors", "gpt2", "transformer.h.{}.attn", [0, 1], INNER),
    ("vllm", "modelopt", "deepseek", LLAMA, [0, 1], PROJECTIONS),
    ("vllm", "compressed-tensors", "qwen3_next", LLAMA, [3], PLAIN),
    ("vllm", "compressed-tensors", "gemma3n_text", LLAMA, range(4), PLAIN),
    ("vllm", "quark", "llama", LLAMA, [0, 1],
     ("k_proj.output_scale", "v_proj.output_scale")),
    ("sglang", "compressed-tensors", "llama", LLAMA, [0, 1], PLAIN),
    ("sglang", "fp8", "llama", LLAMA, [0, 1], PROJECTIONS),
    ("sglang", "compressed-tensors", "phi3", LLAMA, [0, 1], PLAIN),
    ("sglang", "compressed-tensors", "qwen2", LLAMA, [0, 1], INNER),
    ("sglang", "compressed-tensors", "gpt2", "transformer.h.{}.attn", [0, 1], INNER),
    ("sglang", "modelopt", "deepseek", LLAMA, [0, 1], PROJECTIONS),
    ("sglang", "modelopt", "qwen3_next", LLAMA, [3], PROJECTIONS),
    ("sglang-modelopt", "modelopt", "llama", LLAMA, [0, 1], PROJECTIONS),
    ("tgi", None, "llama", LLAMA, [0, 1], PLAIN),
    ("tgi", "compressed-tensors", "gpt2", "transformer.h.{}.attn", [0, 1], PLAIN),
    ("transformers", "compressed-tensors", "llama", LLAMA, [0, 1], PLAIN),
    ("transformers", "compressed-tensors", "qwen3_next", LLAMA, [3], PLAIN),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "block", "family", "path", "layers", "names"), GOOD)
def test_a_good_export_passes(
    export: Callable[..., Any],
    engine: str,
    block: str | None,
    family: str,
    path: str,
    layers: list[int],
    names: tuple[str, str],
) -> None:
    report = verify(export(block, family).add(path, layers, names).write(), engine)
    assert serious(report) == []
    assert report.ok
    assert [layer.layer for layer in report.layers] == list(layers)
    for layer in report.layers:
        assert (layer.key, layer.value) == tuple(f"{path.format(layer.layer)}.{n}" for n in names)
        assert layer.key_scale == (np.float32(0.25 + layer.layer / 100),)
        assert layer.value_scale == (np.float32(0.125 + layer.layer / 100),)
        assert layer.source == "checkpoint"


ENGINES = [
    "vllm",
    "vllm fp8",
    "vllm modelopt",
    "sglang",
    "sglang-modelopt",
    "tensorrt-llm",
    "tensorrt-llm-nvfp4",
    "tgi",
    "transformers",
]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_base_of_all_mutations_is_good(llama: Callable[..., Any], engine: str) -> None:
    report = verify(llama(engine).write(), engine.split()[0])
    assert report.ok
    # What is to be launched, how, and with which versions: nothing about scales.
    assert not any(finding.layer is not None for finding in report.findings)
    assert len(report.findings) <= 2


def test_tensorrt_llm_ignores_fp8_scales(llama: Callable[..., Any]) -> None:
    report = verify(llama("tensorrt-llm").write(), "tensorrt-llm")
    assert report.ok
    assert "ignores calibrated scales, the 6 scale tensors here" in report.findings[0].what
    assert [layer.key_scale for layer in report.layers] == [(1.0,)] * 3


def test_scales_that_are_needed_under_two_names_serve_two_engines(
    export: Callable[..., Any],
) -> None:
    made = export("compressed-tensors", "qwen2").add(LLAMA, [0, 1]).add(LLAMA, [0, 1], INNER)
    made.write()
    for engine in ("vllm", "sglang", "tgi", "transformers"):
        assert verify(made.path, engine).ok


def test_per_head_scales(export: Callable[..., Any]) -> None:
    made = export("compressed-tensors").add(LLAMA, [0, 1])
    made.scheme["strategy"] = "attn_head"
    for name in made.scales:
        made.scales[name] = np.array([[[0.5]], [[0.25]]], np.float32)
    made.write()
    for engine in ("vllm", "transformers"):
        report = verify(made.path, engine)
        assert report.ok
        assert report.layers[0].key_scale == (0.5, 0.25)
    assert "strategy 'attn_head', not 'tensor'" in serious(verify(made.path, "sglang"))[0]
    for name in made.scales:
        made.scales[name] = np.array([0.5, 0.25], np.float32)
    made.write()
    assert verify(made.path, "vllm").ok
    assert "wants [2, 1, 1]" in serious(verify(made.path, "transformers"))[0]


def test_layers_that_the_record_leaves_exact_need_no_scales(
    export: Callable[..., Any],
) -> None:
    made = export("compressed-tensors", "gemma3_text").add(LLAMA, [0, 5])
    made.scales.pop(f"{LLAMA.format(0)}.k_scale")
    assert "layer 0: vLLM finds" in serious(verify(made.write(), "vllm"))[0]
    made.add(LLAMA, [0])
    record = {"launch": ["vllm serve DIR --kv-cache-dtype-skip-layers 1 2 3 4"]}
    assert "layer 1" in serious(verify(made.write(), "vllm"))[0]
    (made.path / "kvquant_export.json").write_text(json.dumps(record))
    report = verify(made.path, "vllm")
    assert report.ok
    assert [layer.source for layer in report.layers[:2]] == ["checkpoint", "not quantized"]
    assert report.layers[1].key_scale == report.layers[1].value_scale == ()
    made.add(LLAMA, [2])
    made.scales.pop(f"{LLAMA.format(2)}.v_scale")
    assert verify(made.write(), "vllm").layers[2].source == "not quantized"
    record = {"launch": ["vllm serve DIR --kv-cache-dtype-skip-layers sliding_window"]}
    (made.path / "kvquant_export.json").write_text(json.dumps(record))
    assert verify(made.path, "vllm").ok


# --- the report -----------------------------------------------------------------------------------


def test_an_engine_without_scales_has_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"llama\.cpp computes scales itself.*nothing to verify"):
        verify(tmp_path, "llama.cpp")
    with pytest.raises(ExportError, match="LMDeploy computes scales itself"):
        verify(tmp_path, "lmdeploy")
    with pytest.raises(ExportError, match="no engine 'vlm': did you mean vllm"):
        verify(tmp_path, "vlm")
    with pytest.raises(ModelError, match="there is no directory"):
        verify(tmp_path / "nowhere", "vllm")


def test_the_report_is_plain_json(llama: Callable[..., Any]) -> None:
    made = llama("vllm")
    made.scales[K1] = np.array([np.nan], np.float32)
    values = verify(made.write(), "vllm").to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert (values["engine"], values["ok"], values["directory"]) == ("vllm", False, str(made.path))
    assert values["layers"][1]["key_scale"] == ["nan"]
    assert values["layers"][1]["key"] == K1
    assert set(values["findings"][0]) == {"what", "fix", "layer", "serious"}


def test_no_torch_is_imported(llama: Callable[..., Any]) -> None:
    directory = llama("vllm").write()
    code = (
        "import sys; from pathlib import Path;"
        "from kvquant.export.verify import verifiable, verify;"
        f"ok = [verify(Path({str(directory)!r}), name).ok for name in verifiable()"
        " if name != 'transformers'];"
        "assert ok[0]; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_weights_are_not_read(llama: Callable[..., Any]) -> None:
    """The bytes of weights may be anything, here a hole in the file."""
    made = llama("vllm")
    made.write()
    before = verify(made.path, "vllm")
    header = 8 + int.from_bytes((made.path / BASE).read_bytes()[:8], "little")
    data = (made.path / BASE).read_bytes()
    with (made.path / BASE).open("wb") as file:
        file.write(data[:header])
        file.truncate(len(data))
    assert verify(made.path, "vllm") == before
