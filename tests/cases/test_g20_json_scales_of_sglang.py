"""G20, sgl-project/sglang#18818 and PR#20705: JSON scales never reached the kernel, or crashed it.

What the file holds is laid down by the engine's own schema: string keys, plain numbers, one entry
per layer and rank. Whether the engine then uses it is told with the export.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from calib.collect import collect
from calib.solve import solve
from kvquant.errors import SchemeError
from kvquant.export.checkpoint import attention_modules, read_checkpoint
from kvquant.export.rounding import tensor_scales
from kvquant.export.target import ExportJob
from kvquant.export.targets import target
from kvquant.geometry import CacheGeometry
from kvquant.scales import KVScales, LayerScales, TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

FP8 = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)


@pytest.fixture
def make_job(
    tiny: Callable[..., Any], save_tiny: Callable[..., Path], tmp_path: Path
) -> Callable[[int], ExportJob]:
    model = tiny("qwen2")
    geometry = CacheGeometry.from_config(model.config)
    scales = solve(collect(model, [list(range(3, 33))], geometry), QuantScheme(FP8, FP8))
    checkpoint = read_checkpoint(save_tiny(model, tmp_path))
    modules = attention_modules(checkpoint, geometry)
    return lambda ranks: ExportJob(checkpoint, geometry, modules, scales, tensor_parallel=ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_file_has_the_layout_that_the_engine_checks(
    make_job: Callable[[int], ExportJob], ranks: int
) -> None:
    job = make_job(ranks)
    made = target("sglang-json").contribute(job)
    values = json.loads(made.files[f"kv_cache_scales_tp{ranks}.json"])
    assert set(values) == {"model_type", "kv_cache"}
    assert values["model_type"] == "qwen2"
    assert set(values["kv_cache"]) == {"dtype", "scaling_factor"}
    assert values["kv_cache"]["dtype"] == "float8_e4m3fn"
    factors = values["kv_cache"]["scaling_factor"]
    assert set(factors) == {str(rank) for rank in range(ranks)}
    for numbers in factors.values():
        assert set(numbers) == {"0", "1"}
        assert all(type(number) is float for number in numbers.values())


def test_reading_back_gives_the_float32_that_was_meant(
    make_job: Callable[[int], ExportJob],
) -> None:
    job = make_job(1)
    meant, _ = tensor_scales(job, False)
    made = target("sglang-json").contribute(job)
    values = json.loads(made.files["kv_cache_scales_tp1.json"])
    for layer, number in values["kv_cache"]["scaling_factor"]["0"].items():
        key, value = meant[int(layer)]
        assert torch.tensor([number], dtype=torch.float32).equal(torch.maximum(key, value))
        assert key.item() != value.item()


def test_the_export_says_that_the_engine_does_not_use_it_rightly(
    make_job: Callable[[int], ExportJob],
) -> None:
    remarks = "\n".join(target("sglang-json").contribute(make_job(1)).remarks)
    assert "sgl-project/sglang#18818" in remarks
    assert "share one number here, the larger scale" in remarks


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 0.0, -1.0])
def test_numbers_that_no_engine_could_use_are_refused(
    make_job: Callable[[int], ExportJob], number: float
) -> None:
    job = make_job(1)
    wrong = TensorScales(torch.tensor([[number]]))
    layers = {index: LayerScales(wrong, wrong) for index in job.scales.layers}
    with pytest.raises(SchemeError, match="must be"):
        KVScales(job.geometry, job.scales.scheme, layers)
