"""huggingface/peft#2733, PR#3473, PR#3608: rsLoRA and DoRA are scaled otherwise when merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from calib.collect import collect
from calib.stats import CalibrationStats, ChannelStats
from kvquant.fingerprint import fingerprint, record_lineage
from kvquant.geometry import CacheGeometry
from kvquant.models.adapters import activate, attach, base_model, merge

BLOCKS = [[(7 * i + start) % 120 + 4 for i in range(24)] for start in (0, 3, 11)]
ON_KEYS_AND_VALUES: dict[str, Any] = {"target_modules": ["k_proj", "v_proj"], "r": 4}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "r": 16, "lora_alpha": 16},
    "dora": {"use_dora": True},
    "rslora and dora": {"use_rslora": True, "use_dora": True},
    "patterns": {
        "rank_pattern": {"layers.0.self_attn.k_proj": 8, "layers.0.self_attn.v_proj": 2},
        "alpha_pattern": {"layers.0.self_attn.k_proj": 64},
    },
}


def adapter(base: Any, directory: Path, **config: Any) -> Path:
    """An adapter for `base` with random matrices, on disk; `base` is spoiled."""
    torch.manual_seed(1)
    settings = {**ON_KEYS_AND_VALUES, "init_lora_weights": False, **config}
    model = get_peft_model(base, LoraConfig(**settings))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_magnitude_vector" in name:
                value *= torch.rand_like(value) + 0.5
            if ".modules_to_save." in name:
                value.normal_(std=0.1)
    model.save_pretrained(directory)
    return directory


def stats_of(model: Any) -> CalibrationStats:
    geometry = CacheGeometry.from_config(base_model(model).config)
    return collect(model, BLOCKS, geometry)


def channels(stats: CalibrationStats, layer: int) -> list[ChannelStats]:
    return [stats.layers[layer].key, stats.layers[layer].value]


def assert_close(one: CalibrationStats, other: CalibrationStats) -> None:
    """Extremes and means within 1e-4 of the largest value."""
    assert one.layers.keys() == other.layers.keys()
    for layer in one.layers:
        for mine, theirs in zip(channels(one, layer), channels(other, layer), strict=True):
            tolerance = 1e-4 * float(mine.amax.max())
            for name in ("minimum", "maximum", "mean"):
                found, expected = getattr(mine, name), getattr(theirs, name)
                torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
            torch.testing.assert_close(mine.mean_square, theirs.mean_square, rtol=1e-4, atol=1e-9)


def difference(one: CalibrationStats, other: CalibrationStats, layer: int) -> float:
    """Largest relative change of a channel's extremes."""
    pairs = zip(channels(one, layer), channels(other, layer), strict=True)
    return max(float(((a.amax - b.amax).abs() / b.amax).max()) for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_the_live_adapter_has_the_statistics_of_the_merged_model(
    tiny: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    path = adapter(tiny("llama"), tmp_path / "tuned", **KINDS[kind])
    live = attach(tiny("llama"), [path])
    measured = stats_of(live)
    assert_close(measured, stats_of(merge(live, ["tuned"])))
    base = stats_of(tiny("llama"))
    assert min(difference(measured, base, layer) for layer in (0, 1)) > 0.05


def test_the_scaling_of_rslora_is_alpha_over_the_root_of_the_rank(
    tiny: Callable[..., Any], tmp_path: Path
) -> None:
    """The same matrices with alpha / √16 and with the plain 4 times that alpha are one adapter."""
    stabilized = adapter(tiny("llama"), tmp_path / "a1", r=16, lora_alpha=8, use_rslora=True)
    plain = adapter(tiny("llama"), tmp_path / "a2", r=16, lora_alpha=32)
    assert_close(
        stats_of(attach(tiny("llama"), [stabilized])), stats_of(attach(tiny("llama"), [plain]))
    )


def test_an_adapter_beside_keys_and_values_changes_later_layers_only(
    tiny: Callable[..., Any], tmp_path: Path
) -> None:
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    path = adapter(tiny("llama"), tmp_path / "tuned", target_modules=targets)
    live, base = stats_of(attach(tiny("llama"), [path])), stats_of(tiny("llama"))
    for mine, theirs in zip(channels(live, 0), channels(base, 0), strict=True):
        assert torch.equal(mine.minimum, theirs.minimum)
        assert torch.equal(mine.maximum, theirs.maximum)
        assert torch.equal(mine.total, theirs.total)
        assert torch.equal(mine.sketch.counts, theirs.sketch.counts)
    assert difference(live, base, 1) > 0.05


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_with_a_larger_vocabulary_changes_the_first_layer(
    tiny: Callable[..., Any], tmp_path: Path, tied: bool
) -> None:
    grown = tiny("llama", tie_word_embeddings=tied)
    grown.resize_token_embeddings(136, mean_resizing=False)
    path = adapter(grown, tmp_path / "tuned", modules_to_save=["embed_tokens"])
    live = attach(tiny("llama", tie_word_embeddings=tied), [path])
    measured = stats_of(live)
    merged = merge(live, ["tuned"])
    assert_close(measured, stats_of(merged))
    assert difference(measured, stats_of(tiny("llama", tie_word_embeddings=tied)), 0) > 0.05
    with activate(live, []):
        assert_close(stats_of(live), stats_of(tiny("llama", tie_word_embeddings=tied)))


@pytest.mark.parametrize("tied", [False, True])
def test_a_larger_vocabulary_has_one_identity_live_and_merged(
    tiny: Callable[..., Any], tmp_path: Path, tied: bool
) -> None:
    grown = tiny("llama", tie_word_embeddings=tied)
    grown.resize_token_embeddings(136, mean_resizing=False)
    path = adapter(grown, tmp_path / "tuned", modules_to_save=["embed_tokens"])
    live = attach(tiny("llama", tie_word_embeddings=tied), [path])
    again = attach(tiny("llama", tie_word_embeddings=tied), [path])
    assert fingerprint(live) == fingerprint(again)
    merged = merge(live, ["tuned"])
    record_lineage(merged, fingerprint(live))
    assert fingerprint(merged) == fingerprint(live)
