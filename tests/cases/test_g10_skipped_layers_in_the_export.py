"""G10, vllm-project/llm-compressor#1295 and #1881, in exports: exactly the layers with scales.

A layer is called by its number in the whole model, whatever others were skipped, and the engine is
told which ones stay exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from calib.collect import collect
from calib.solve import solve
from kvquant.errors import ExportError
from kvquant.export.export import ExportRequest, ExportResult, export
from kvquant.export.verify import verify
from kvquant.fingerprint import fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.models.source import resolve
from kvquant.provenance import Provenance
from kvquant.scales import KVScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format
from kvquant.storage import save_scales

FP8 = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
SKIPS = [({0, 4}, [1, 2, 3]), ({2}, [0, 1, 3, 4])]


@pytest.fixture
def exported(
    tiny: Callable[..., Any], save_tiny: Callable[..., Path], tmp_path: Path
) -> Callable[[set[int], str], tuple[KVScales, ExportResult]]:
    """Scales of five layers but for those skipped, and what one engine's export made of them."""

    def run(skipped: set[int], engine: str) -> tuple[KVScales, ExportResult]:
        model = tiny("llama", num_hidden_layers=5)
        save_tiny(model, tmp_path / "base")
        torch.manual_seed(1)
        ids = torch.randint(3, 128, (2, 12)).tolist()
        stats = collect(model, ids, CacheGeometry.from_config(model.config), skip_layers=skipped)
        scales = solve(stats, QuantScheme(FP8, FP8, frozenset(skipped)))
        scales = replace(scales, provenance=Provenance(fingerprints=(fingerprint(model),)))
        save_scales(scales, tmp_path / "scales.safetensors")
        source, output = resolve(str(tmp_path / "base")), tmp_path / "out"
        request = ExportRequest(source, str(tmp_path / "scales"), (engine,), output)
        return scales, export(request, lambda line: None)

    return run


@pytest.mark.parametrize(("skipped", "kept"), SKIPS)
def test_the_export_lists_exactly_those(
    exported: Callable[..., Any], tmp_path: Path, skipped: set[int], kept: list[int]
) -> None:
    scales, result = exported(skipped, "vllm")
    assert result.tensors == tuple(
        f"model.layers.{layer}.self_attn.{slot}_scale" for layer in kept for slot in "kv"
    )
    numbers = " ".join(map(str, sorted(skipped)))
    assert result.engines[0].launch[0].endswith(f" --kv-cache-dtype-skip-layers {numbers}")
    report = verify(tmp_path / "out", "vllm")
    assert report.ok
    assert [layer.layer for layer in report.layers if layer.source == "checkpoint"] == kept
    assert len({scales.layers[layer].key.scale.item() for layer in kept}) == len(kept)
    for layer in report.layers:
        if layer.layer in kept:
            needed = scales.layers[layer.layer]
            for held, least in (
                (layer.key_scale, needed.key.scale.item()),
                (layer.value_scale, needed.value.scale.item()),
            ):
                assert least <= held[0] < least * (1 + 2**-7)


@pytest.mark.parametrize("engine", ["sglang", "lightllm", "tgi", "transformers"])
def test_an_engine_that_cannot_leave_layers_out_says_so(
    exported: Callable[..., Any], tmp_path: Path, engine: str
) -> None:
    with pytest.raises(ExportError, match="the scales leave layer 2 exact, but "):
        exported({2}, engine)
    assert not (tmp_path / "out").exists()
