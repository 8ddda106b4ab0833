"""G14, NVIDIA/TensorRT-LLM#967 and PR#2446, in exports: one scale for keys and values.

Where an engine takes two, each keeps its own; where it takes one, that is the larger one, and the
export says what it costs. Queries take no part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from calib.collect import collect
from calib.solve import solve
from kvquant.export.checkpoint import attention_modules, read_checkpoint
from kvquant.export.target import Contribution, ExportJob
from kvquant.export.targets import target
from kvquant.geometry import CacheGeometry
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

FP8 = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
Export = Callable[[Any, str], Contribution]


@pytest.fixture
def export(save_tiny: Callable[..., Path], tmp_path: Path) -> Export:
    def run(model: Any, engine: str) -> Contribution:
        directory = save_tiny(model, tmp_path / f"{engine} {len(list(tmp_path.iterdir()))}")
        geometry = CacheGeometry.from_config(model.config)
        torch.manual_seed(1)
        stats = collect(model, torch.randint(3, 128, (4, 30)).tolist(), geometry)
        checkpoint = read_checkpoint(directory)
        modules = attention_modules(checkpoint, geometry)
        job = ExportJob(checkpoint, geometry, modules, solve(stats, QuantScheme(FP8, FP8)))
        return target(engine).contribute(job)

    return run


@pytest.fixture
def small_values(tiny: Callable[..., Any]) -> Any:
    """Values are 1/50 of what keys are before rotary embedding."""
    model = tiny("llama", num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.v_proj.weight.copy_(attention.k_proj.weight / 50)
    return model


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm-nvfp4", "tgi", "transformers"])
def test_two_scales_stay_two(export: Export, small_values: Any, engine: str) -> None:
    key, value = export(small_values, engine).tensors.values()
    assert key.item() > 30 * value.item()


def test_lightllm_has_two_numbers(export: Export, small_values: Any) -> None:
    values = json.loads(export(small_values, "lightllm").files["kv_cache_calib.json"])
    key, value = values["scales"][0]
    assert key > 30 * value


def test_one_number_is_the_larger_and_its_price_is_told(export: Export, small_values: Any) -> None:
    key, value = export(small_values, "vllm").tensors.values()
    made = export(small_values, "sglang-json")
    numbers = json.loads(made.files["kv_cache_scales_tp1.json"])["kv_cache"]["scaling_factor"]
    assert numbers == {"0": {"0": key.item()}}
    told = re.search(r"most apart in layer 0: .*\(([\d.]+) times\)", "\n".join(made.remarks))
    assert told is not None
    assert float(told[1]) == pytest.approx(key.item() / value.item(), rel=5e-3)


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_queries_take_no_part(export: Export, tiny: Callable[..., Any], family: str) -> None:
    """Fused projections included: only the rows that make queries grow a hundredfold."""
    model = tiny(family, num_hidden_layers=1)
    before = export(model, "vllm").tensors
    with torch.no_grad():
        if family == "llama":
            model.model.layers[0].self_attn.q_proj.weight *= 100
        elif family == "phi3":
            model.model.layers[0].self_attn.qkv_proj.weight[:64] *= 100
        else:  # GPT-2's Conv1D holds its weight transposed
            model.transformer.h[0].attn.c_attn.weight[:, :64] *= 100
    after = export(model, "vllm").tensors
    assert before.keys() == after.keys()
    assert all(after[name].equal(scale) for name, scale in before.items())
