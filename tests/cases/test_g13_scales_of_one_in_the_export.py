"""G13, NVIDIA/Model-Optimizer#20 and PR#1012: every FP8 scale came out as exactly 1.0.

What is exported is amax / 448 for each engine that uses scales, and where an export holds nothing
but ones, verify says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from calib.collect import collect
from calib.solve import solve
from kvquant.export.checkpoint import attention_modules, read_checkpoint
from kvquant.export.directory import write_export
from kvquant.export.target import ExportJob
from kvquant.export.targets import target
from kvquant.export.verify import verify
from kvquant.export.verify_report import VerifyReport
from kvquant.geometry import CacheGeometry
from kvquant.scales import KVScales, LayerScales, TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

FP8 = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
SCHEME = QuantScheme(FP8, FP8)
SEPARATE = [
    "vllm",
    "sglang",
    "sglang-modelopt",
    "tensorrt-llm-nvfp4",
    "tgi",
    "transformers",
    "lightllm",
]
ENGINES = [*SEPARATE, "sglang-json"]


def scales_of(model: Any) -> KVScales:
    torch.manual_seed(1)
    blocks = torch.randint(3, 128, (4, 30)).tolist()
    return solve(collect(model, blocks, CacheGeometry.from_config(model.config)), SCHEME)


def all_of(number: float, scales: KVScales) -> KVScales:
    """The same scales, with one number everywhere."""
    slot = TensorScales(torch.full((1, 1), number))
    return replace(scales, layers={i: LayerScales(slot, slot) for i in scales.layers})


@pytest.fixture
def exported(
    save_tiny: Callable[..., Path], tmp_path: Path
) -> Callable[[Any, KVScales, str], VerifyReport]:
    """``exported(model, scales, engine)``: what verify says of a real export."""

    def run(model: Any, scales: KVScales, engine: str) -> VerifyReport:
        base = save_tiny(model, tmp_path / f"base {len(list(tmp_path.iterdir()))}")
        checkpoint = read_checkpoint(base)
        modules = attention_modules(checkpoint, scales.geometry)
        job = ExportJob(checkpoint, scales.geometry, modules, scales)
        output = tmp_path / f"export {len(list(tmp_path.iterdir()))}"
        made = target(engine).contribute(job)
        write_export(checkpoint, made, output, record={}, notify=lambda line: None)
        return verify(output, engine)

    return run


@pytest.mark.parametrize("engine", ENGINES)
def test_an_amax_of_4_48_is_exported_as_0_01(
    tiny_once: Callable[..., Any], exported: Callable[..., VerifyReport], engine: str
) -> None:
    model = tiny_once("llama")
    scale = (torch.tensor(4.48) / 448).item()
    report = exported(model, all_of(scale, scales_of(model)), engine)
    assert report.ok
    for layer in report.layers:
        for (found,) in (layer.key_scale, layer.value_scale):
            # Never below what is needed, and at most a step of bfloat16 above it.
            assert scale <= found <= 0.010009765625


@pytest.mark.parametrize("engine", ENGINES)
def test_scales_of_a_model_differ_between_layers_and_none_is_one(
    tiny_once: Callable[..., Any], exported: Callable[..., VerifyReport], engine: str
) -> None:
    model = tiny_once("llama")
    scales = scales_of(model)
    report = exported(model, scales, engine)
    assert report.ok
    assert not any("exactly 1.0" in finding.what for finding in report.findings)
    for slot in ("key", "value"):
        found = {layer.layer: getattr(layer, f"{slot}_scale")[0] for layer in report.layers}
        assert len(set(found.values())) == len(scales.layers) > 1
        for index, layer in scales.layers.items():
            needed = getattr(layer, slot).scale.item()
            if engine == "sglang-json":
                needed = max(layer.key.scale.item(), layer.value.scale.item())
            assert needed <= found[index] < needed * (1 + 2**-7) < 1


@pytest.mark.parametrize("engine", SEPARATE)
def test_halving_k_proj_halves_the_exported_key_scale_and_nothing_else(
    tiny: Callable[..., Any], exported: Callable[..., VerifyReport], engine: str
) -> None:
    model = tiny("llama", num_hidden_layers=1)
    (before,) = exported(model, scales_of(model), engine).layers
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight /= 2
    (after,) = exported(model, scales_of(model), engine).layers
    assert after.key_scale == tuple(scale / 2 for scale in before.key_scale)
    assert after.value_scale == before.value_scale


@pytest.mark.parametrize("engine", ENGINES)
def test_an_export_with_a_floor_at_1_is_told(
    tiny_once: Callable[..., Any], exported: Callable[..., VerifyReport], engine: str
) -> None:
    model = tiny_once("llama")
    report = exported(model, all_of(1.0, scales_of(model)), engine)
    (found,) = [finding for finding in report.findings if "exactly 1.0" in finding.what]
    assert not found.serious
    assert json.dumps(report.to_dict(), allow_nan=False)
    assert all(math.isclose(layer.key_scale[0], 1.0) for layer in report.layers)
