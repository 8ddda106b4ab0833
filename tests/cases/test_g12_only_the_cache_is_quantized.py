"""G12, vllm-project/llm-compressor#1024, #1254: a recipe for the cache alone had no effect.

"No weight is quantized" was taken for "nothing to do", and the config said nothing, or checkpoints
were refused because of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from calib.collect import collect
from calib.solve import solve
from kvquant.export.checkpoint import attention_modules, read_checkpoint
from kvquant.export.directory import write_export
from kvquant.export.target import ExportJob
from kvquant.export.targets import target
from kvquant.geometry import CacheGeometry
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

FP8 = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)


@pytest.fixture
def exported(
    tiny: Callable[..., Any], save_tiny: Callable[..., Path], tmp_path: Path
) -> tuple[Path, Path]:
    """A plain model's directory and its export for vLLM."""
    model = tiny("llama").bfloat16()
    base = save_tiny(model, tmp_path / "base")
    geometry = CacheGeometry.from_config(model.config)
    stats = collect(model, [list(range(3, 33))], geometry)
    checkpoint = read_checkpoint(base)
    modules = attention_modules(checkpoint, geometry)
    job = ExportJob(checkpoint, geometry, modules, solve(stats, QuantScheme(FP8, FP8)))
    contribution = target("vllm").contribute(job)
    write_export(checkpoint, contribution, tmp_path / "out", record={}, notify=lambda text: None)
    return base, tmp_path / "out"


def block_of(directory: Path) -> dict[str, Any]:
    block: dict[str, Any] = json.loads((directory / "config.json").read_text())[
        "quantization_config"
    ]
    return block


def tensors_of(directory: Path) -> dict[str, Any]:
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def test_the_config_says_so(exported: tuple[Path, Path]) -> None:
    block = block_of(exported[1])
    assert block["quant_method"] == "compressed-tensors"
    assert block["config_groups"] == {}, "no module is listed as quantized"
    scheme = block["kv_cache_scheme"]
    assert {name: scheme[name] for name in ("type", "num_bits", "strategy", "dynamic")} == {
        "type": "float",
        "num_bits": 8,
        "strategy": "tensor",
        "dynamic": False,
    }


def test_weights_are_those_of_the_base(exported: tuple[Path, Path]) -> None:
    base, out = exported
    before, after = tensors_of(base), tensors_of(out)
    assert all(after[name].equal(tensor) for name, tensor in before.items())
    assert sorted(after.keys() - before.keys()) == [
        f"model.layers.{layer}.self_attn.{slot}_scale" for layer in (0, 1) for slot in "kv"
    ]
    whole = (base / "model.safetensors").read_bytes()
    assert any(path.read_bytes() == whole for path in out.glob("*.safetensors"))


def test_the_format_s_own_library_reads_it(exported: tuple[Path, Path]) -> None:
    quantization = pytest.importorskip(
        "compressed_tensors.quantization", reason="compressed-tensors is not installed"
    )
    parsed = quantization.QuantizationConfig.model_validate(block_of(exported[1]))
    assert parsed.config_groups == {}
    assert parsed.kv_cache_scheme.num_bits == 8
