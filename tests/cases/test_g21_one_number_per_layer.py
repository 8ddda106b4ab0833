"""G21, vllm-project/vllm#6738 and PR#6761: "Only support per-tensor scaling factor".

Scales that are not one number per layer were refused when the model was loaded. The export reduces
them, says so, and no channel gets less than it needs.
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
from kvquant.export.checkpoint import attention_modules, read_checkpoint
from kvquant.export.target import Contribution, ExportJob
from kvquant.export.targets import target
from kvquant.geometry import CacheGeometry
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

ENGINES = [
    "vllm",
    "sglang",
    "sglang-modelopt",
    "tensorrt-llm",
    "tensorrt-llm-nvfp4",
    "tgi",
    "transformers",
]
FINER = [Granularity.PER_HEAD, Granularity.PER_CHANNEL]


@pytest.fixture(scope="module")
def make_job(
    tiny: Callable[..., Any],
    save_tiny: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., ExportJob]:
    """A model whose keys have an outlier channel, so that a reduction costs something."""
    model = tiny("qwen2")
    geometry = CacheGeometry.from_config(model.config)
    torch.manual_seed(1)
    stats = collect(model, torch.randint(3, 128, (4, 30)).tolist(), geometry)
    checkpoint = read_checkpoint(save_tiny(model, tmp_path_factory.mktemp("qwen2")))
    modules = attention_modules(checkpoint, geometry)

    def make(granularity: Granularity, per_head: bool = False) -> ExportJob:
        slot = TensorScheme(tensor_format("fp8"), granularity)
        scales = solve(stats, QuantScheme(slot, slot))
        return ExportJob(checkpoint, geometry, modules, scales, per_head)

    return make


def slots(made: Contribution, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    mine = [tensor for name, tensor in made.tensors.items() if f".{layer}." in name]
    return mine[0], mine[1]


@pytest.mark.parametrize("granularity", FINER)
@pytest.mark.parametrize("engine", ENGINES)
def test_one_number_that_no_channel_is_short_of(
    make_job: Callable[..., ExportJob], engine: str, granularity: Granularity
) -> None:
    job = make_job(granularity)
    made = target(engine).contribute(job)
    for index, layer in job.scales.layers.items():
        key, value = slots(made, index)
        for mine, needed in ((key, layer.key.scale), (value, layer.value.scale)):
            assert mine.shape == (1,)
            assert mine.dtype == torch.float32
            assert bool((mine >= needed).all())
            assert mine.item() <= needed.max().item() * (1 + 2**-7)
    reduced = f"keys {granularity.value} and values {granularity.value} were reduced to per-tensor"
    assert any(remark.startswith(reduced) for remark in made.remarks)


@pytest.mark.parametrize("granularity", FINER)
def test_numbers_in_files_likewise(
    make_job: Callable[..., ExportJob], granularity: Granularity
) -> None:
    job = make_job(granularity)
    rows = json.loads(target("lightllm").contribute(job).files["kv_cache_calib.json"])["scales"]
    file = target("sglang-json").contribute(job).files["kv_cache_scales_tp1.json"]
    numbers = json.loads(file)["kv_cache"]["scaling_factor"]["0"]
    for index, layer in job.scales.layers.items():
        key, value = float(layer.key.scale.max()), float(layer.value.scale.max())
        assert rows[index] == [pytest.approx(key, rel=2**-7), pytest.approx(value, rel=2**-7)]
        assert rows[index][0] >= key and rows[index][1] >= value
        assert numbers[str(index)] == max(rows[index])


def test_nothing_is_said_where_nothing_was_reduced(make_job: Callable[..., ExportJob]) -> None:
    remarks = target("vllm").contribute(make_job(Granularity.PER_TENSOR)).remarks
    assert not any("reduced" in remark for remark in remarks)


def test_the_largest_step_is_that_of_the_outlier(make_job: Callable[..., ExportJob]) -> None:
    job = make_job(Granularity.PER_CHANNEL)
    remark = next(r for r in target("vllm").contribute(job).remarks if "were reduced" in r)
    ratios = {
        (float(slot.scale.max() / slot.scale.min()), f"{what} of layer {index}")
        for index, layer in job.scales.layers.items()
        for what, slot in (("keys", layer.key), ("values", layer.value))
    }
    ratio, where = max(ratios)
    assert ratio > 10
    assert where in remark
    assert f"({ratio:.3g} times)" in remark


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_an_engine_that_takes_heads_gets_them(
    make_job: Callable[..., ExportJob], engine: str
) -> None:
    job = make_job(Granularity.PER_CHANNEL, per_head=True)
    made = target(engine).contribute(job)
    for index, layer in job.scales.layers.items():
        key, _ = slots(made, index)
        needed = layer.key.scale.amax(dim=1)
        assert key.shape == (2, 1, 1)
        assert bool((key.flatten() >= needed).all())
        assert bool((key.flatten() <= needed * (1 + 2**-7)).all())
