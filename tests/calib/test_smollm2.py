"""The promises on a real model: SmolLM2 and the adapter trained on Python source."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from calib.collect import batches, collect
from calib.drift import drift
from calib.method import RangeMethod
from calib.solve import solve
from calib.stats import CalibrationStats
from kvquant.cache.transformers_compat import cache_argument
from kvquant.geometry import CacheGeometry
from kvquant.models.adapters import activate, attach
from kvquant.models.loading import LoadedModel, load, make_local, read_config, resolve
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format
from kvquant.text.corpus import read_rows, token_blocks

pytestmark = pytest.mark.real_model

ADAPTER = Path(__file__).parents[1] / "assets" / "smollm2-python-lora"
CHUNK = 384


def quiet(message: str) -> None:
    """Nobody listens."""


def scheme(name: str, granularity: Granularity = Granularity.PER_TENSOR) -> QuantScheme:
    tensor = TensorScheme(tensor_format(name), granularity)
    return QuantScheme(tensor, tensor)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(make_local(resolve("smollm2"), quiet), device="cpu", notify=quiet)


@pytest.fixture(scope="module")
def blocks(loaded: LoadedModel) -> Any:
    rows = read_rows(None, notify=quiet)
    return token_blocks(rows, loaded.tokenizer, context_length=512, samples=3).blocks


@pytest.fixture(scope="module")
def geometry(loaded: LoadedModel) -> CacheGeometry:
    return CacheGeometry.from_config(read_config(loaded.source))


@pytest.fixture(scope="module")
def base_stats(loaded: LoadedModel, blocks: Any, geometry: CacheGeometry) -> CalibrationStats:
    return collect(loaded.model, blocks, geometry, chunk=CHUNK)


@pytest.fixture(scope="module")
def tuned(
    base_stats: CalibrationStats, loaded: LoadedModel, blocks: Any, geometry: CacheGeometry
) -> tuple[CalibrationStats, CalibrationStats]:
    """Statistics with the trained adapter, and of the base again after it."""
    model = attach(loaded.model, [ADAPTER])
    stats = collect(model, blocks, geometry, chunk=CHUNK)
    with activate(model, []):
        again = collect(model, blocks[:1], geometry, chunk=CHUNK)
    model.unload()
    return stats, again


def test_fp8_scales_are_amax_by_448_of_a_dynamic_cache(
    loaded: LoadedModel, blocks: Any, base_stats: CalibrationStats
) -> None:
    decoder = loaded.model.get_decoder()
    keys, values = torch.zeros(30), torch.zeros(30)
    with torch.no_grad():
        for batch in batches(blocks, CHUNK):
            cache = DynamicCache(config=loaded.model.config)
            for part in torch.split(torch.tensor(np.array(batch)), CHUNK // len(batch), dim=1):
                decoder(part, use_cache=True, **{cache_argument(decoder): cache})
            for index, layer in enumerate(cache.layers):
                keys[index] = torch.maximum(keys[index], layer.keys.abs().max())
                values[index] = torch.maximum(values[index], layer.values.abs().max())
    scales = solve(base_stats, scheme("fp8"))
    for index, layer in scales.layers.items():
        assert layer.key.scale.item() == pytest.approx(keys[index].item() / 448, rel=2e-7)
        assert layer.value.scale.item() == pytest.approx(values[index].item() / 448, rel=2e-7)
    assert len(scales.layers) == 30
    assert base_stats.tokens == 1536
    assert base_stats.provenance.longest_position == 512


def test_the_key_mean_is_what_a_head_spends_most_on(base_stats: CalibrationStats) -> None:
    """measured.md: removing it before rotation is what makes 4 bits work on this model."""
    for layer in base_stats.layers.values():
        assert layer.key.rotary is not None
        assert (layer.key.rotary.start, layer.key.rotary.width) == (0, 64)
        assert layer.value.rotary is None
    shares = [
        float(layer.key.mean_unrotated.square().sum() / layer.key.mean_square.sum())
        for layer in base_stats.layers.values()
        if layer.key.mean_unrotated is not None
    ]
    assert len(shares) == 30
    assert float(np.median(shares)) > 0.5


def test_halves_merge_to_the_whole(
    loaded: LoadedModel, blocks: Any, geometry: CacheGeometry, base_stats: CalibrationStats
) -> None:
    parts = [
        collect(loaded.model, part, geometry, chunk=CHUNK) for part in (blocks[:2], blocks[2:])
    ]
    merged = parts[0].merge(parts[1])
    for index, layer in base_stats.layers.items():
        for slot in ("key", "value"):
            one, whole = getattr(merged.layers[index], slot), getattr(layer, slot)
            assert one.minimum.equal(whole.minimum)
            assert one.maximum.equal(whole.maximum)
            assert one.sketch.counts.equal(whole.sketch.counts)
            torch.testing.assert_close(one.mean, whole.mean, rtol=1e-6, atol=1e-9)
    assert merged.tokens == base_stats.tokens


def test_a_mild_fine_tune_may_keep_fp8_scales(
    base_stats: CalibrationStats, tuned: tuple[CalibrationStats, CalibrationStats]
) -> None:
    report = drift(base_stats, tuned[0], scheme("fp8"), RangeMethod())
    assert report.safe, report.reasons
    moved = [head.amax_ratio for head in report.heads]
    assert min(moved) < 0.99
    assert max(moved) > 1.01


def test_a_raised_rotary_pair_needs_scales_of_its_own(
    loaded: LoadedModel, blocks: Any, geometry: CacheGeometry, base_stats: CalibrationStats
) -> None:
    examples = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "outlier_adapter.py"))
    model = examples["outlier_adapter"](loaded.model, layer=10, pair=23, factor=8.0)
    stats = collect(model, blocks, geometry, chunk=CHUNK)
    model.unload()
    for name in ("fp8", "int8"):
        report = drift(base_stats, stats, scheme(name), RangeMethod())
        assert not report.safe
        failing = {(head.layer, head.slot, head.head) for head in report.failing}
        assert (10, "key", 0) in failing


def test_the_base_is_what_it_was(
    loaded: LoadedModel,
    blocks: Any,
    geometry: CacheGeometry,
    tuned: tuple[CalibrationStats, CalibrationStats],
) -> None:
    before = tuned[1]
    after = collect(loaded.model, blocks[:1], geometry, chunk=CHUNK)
    for index, layer in after.layers.items():
        assert layer.key.total.equal(before.layers[index].key.total)
        assert layer.value.total.equal(before.layers[index].value.total)
