"""Tables as they are printed: what is in them, and that they fit a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console, RenderableType

from calib.collect import collect
from calib.drift import DriftThresholds, drift
from calib.solve import solve
from calib.stats import CalibrationStats, ChannelStats, LayerStats
from calib.tables import (
    drift_table,
    provenance_panel,
    scales_summary,
    sharing_table,
    stats_summary,
)
from kvquant.fingerprint import Fingerprint
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.provenance import Provenance
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format


def printed(table: RenderableType, width: int = 100) -> str:
    console = Console(width=width, color_system=None, record=True, file=None, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def rows_of(text: str) -> dict[int, str]:
    """Rows of a table by the number they begin with."""
    found = (re.match(r"\s(\d+)\s\s", line) for line in text.splitlines())
    return {int(match[1]): match.string for match in found if match}


def scheme(format_name: str, granularity: str, symmetric: bool = True) -> QuantScheme:
    slot = TensorScheme(tensor_format(format_name), Granularity.parse(granularity), symmetric)
    return QuantScheme(slot, slot)


def many_layers(count: int = 30, kind: LayerKind = LayerKind.FULL) -> CalibrationStats:
    """Layer i has keys of amax i + 1 but for channel 3 of head 1, which has twice that."""
    layers = {}
    for index in range(count):
        keys = torch.full((10, 2, 8), float(index + 1))
        keys[:, 1, 3] *= 2
        keys[::2] *= -1
        key, value = ChannelStats.empty(2, 8), ChannelStats.empty(2, 8)
        key.update(keys)
        value.update(torch.ones(10, 2, 8) / 2)
        layers[index] = LayerStats(key, value)
    geometry = CacheGeometry("llama", (LayerGeometry(kind, 2, 8, 8),) * count, 64)
    provenance = Provenance(model="dir/my-model", tokens=10)
    return CalibrationStats(geometry, layers, provenance)


def test_statistics_show_the_layers_that_matter() -> None:
    stats = many_layers()
    stats.layers[2].key.maximum[1, 3] = 18  # the outlier ratio is 6, not 2
    text = printed(stats_summary(stats))
    assert text.startswith("my-model: 8 of 30 layers, 10 tokens")
    rows = rows_of(text)
    assert len(rows) == 8
    assert {2, 29, 28, 27} <= rows.keys()
    assert rows[2].split() == ["2", "18.0", "█▊", "0.500", "6.00x", "h1", "c3", "0%"]
    assert rows[29].split() == ["29", "60.0", "██████", "0.500", "2.00x", "h1", "c3", "0%"]
    assert "latent" not in text and "remarks too" not in text


def test_verbose_statistics_show_all_layers() -> None:
    text = printed(stats_summary(many_layers(), verbose=True))
    assert list(rows_of(text)) == list(range(30))
    assert "all 30 layers" in text


def test_remarkable_layers_are_shown_or_named() -> None:
    stats = many_layers(40)
    for index in range(16):
        stats.layers[index].value.minimum[0, 1] = stats.layers[index].value.maximum[0, 1] = 0
    stats.layers[0].key.maximum[0, 0] = 900
    text = printed(stats_summary(stats))
    rows = rows_of(text)
    assert len(rows) == 16
    assert "K outlier-dominated (h0 c0, 900x)" in rows[0]
    assert "K 900: clipped at 448 by fp8" in text and "V 1 of 16 channels all zero" in text
    hidden = re.search(r"layers ([\d, ]+) have remarks too: --verbose", text)
    assert hidden
    assert {int(number) for number in hidden[1].split(",")} == set(range(16)) - rows.keys()
    assert "--key-granularity per-channel" in text
    assert "remarks too" not in printed(stats_summary(stats, verbose=True))


def test_a_model_with_an_outlier_is_reported(tiny: Callable[..., Any]) -> None:
    """Case G2."""
    model = tiny("qwen2")
    ids = torch.randint(3, 128, (4, 64), generator=torch.Generator().manual_seed(0)).tolist()
    stats = collect(model, ids, CacheGeometry.from_config(model.config))
    text = printed(stats_summary(stats))
    for row in rows_of(text).values():
        assert "outlier-dominated (h0 c7" in row
    assert "(before rotary embedding)" in " ".join(text.split())


def test_latent_layers_are_explained() -> None:
    stats = many_layers(2, LayerKind.LATENT)
    assert "K is the latent, V the rotary part" in printed(stats_summary(stats))
    scales = solve(stats, scheme("fp8", "per-tensor"))
    assert "K is the latent, V the rotary part" in printed(scales_summary(scales))


@pytest.mark.parametrize(
    ("how", "cells"),
    [
        (scheme("fp8", "per-tensor"), ["0.134", "±60.0"]),
        (scheme("int8", "per-channel"), ["0.236", "…"]),
        (
            scheme("int8", "per-tensor", symmetric=False),
            ["0.471", "-59.8"],
        ),
    ],
)
def test_scales(how: QuantScheme, cells: list[str]) -> None:
    scales = solve(many_layers(), how)
    text = printed(scales_summary(scales))
    rows = rows_of(text)
    assert list(rows) == [22, 23, 24, 25, 26, 27, 28, 29]
    assert rows[29].split()[1:3] == cells[:2]
    assert str(how) in " ".join(text.split())
    assert len(rows_of(printed(scales_summary(scales, verbose=True)))) == 30


def test_scales_say_which_form_of_the_mean_pays(tiny: Callable[..., Any]) -> None:
    scales = solve(many_layers(), scheme("fp8", "per-tensor"))
    assert "\nkey mean: fixed in all 30 layers\n" in printed(scales_summary(scales))
    model = tiny("qwen2")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias.zero_()
    ids = torch.randint(3, 128, (4, 64), generator=torch.Generator().manual_seed(0)).tolist()
    stats = collect(model, ids, CacheGeometry.from_config(model.config))
    assert (
        "\nkey mean: turned with position in 1 of 2 layers (5 of 8 pairs on average), fixed in 1\n"
    ) in printed(scales_summary(solve(stats, scheme("fp8", "per-tensor"))))


def test_provenance() -> None:
    provenance = Provenance(
        model="base",
        adapters=("lora-a", "lora-b"),
        fingerprints=(Fingerprint("a" * 64, ("b" * 64,)), Fingerprint("a" * 64)),
        corpora=({"source": "prompts.jsonl", "tokens_used": 16384, "sha256": "c" * 64},),
        tokens=16384,
        longest_position=4096,
        context_length=4096,
        versions={"torch": "2.13.0", "transformers": "5.24.0"},
        command=("kvquant calibrate --model [base]",),
        notes=("forced",),
    )
    text = printed(provenance_panel(provenance, many_layers(2).geometry))
    lines = [line.strip("│╭╰─╮╯ \n") for line in text.splitlines()]
    assert [re.split(r"\s{2,}", line) for line in lines if line] == [
        ["where it comes from"],
        ["model", "base"],
        ["adapters", "lora-a"],
        ["lora-b"],
        ["fits", "aaaaaaaaaaaa + adapter bbbbbbbbbbbb"],
        ["aaaaaaaaaaaa"],
        ["cache", "llama cache: 2 x full, 2 KV heads of 8; 64 positions"],
        ["text", "prompts.jsonl, 16,384 tokens, sha256 cccccccccccc"],
        ["tokens", "16,384 recorded, blocks of 4,096, known up to position 4,096"],
        ["versions", "torch 2.13.0, transformers 5.24.0"],
        ["command", "kvquant calibrate --model [base]"],
        ["notes", "forced"],
    ]


def test_provenance_of_which_nothing_is_known() -> None:
    text = printed(provenance_panel(Provenance(), many_layers(2).geometry))
    assert "llama cache" in text
    assert "model " not in text and "tokens" not in text


def test_drift_that_is_safe() -> None:
    stats = many_layers()
    report = drift(stats, stats, scheme("fp8", "per-tensor"))
    text = printed(drift_table(report))
    assert "my-model under the scales of my-model: worst 8 of 120 heads" in text
    assert len(re.findall(r"^ \d+ ", text, re.MULTILINE)) == 8
    assert "\nsafe: the worst of 120 heads loses 0.0 dB" in text
    assert "may keep the base's scales" in text
    verbose = printed(drift_table(report, verbose=True))
    assert len(re.findall(r"^ \d+ ", verbose, re.MULTILINE)) == 120
    assert "all 120 heads" in verbose


def test_drift_that_is_not() -> None:
    base, tuned = many_layers(), many_layers()
    louder = ChannelStats.empty(2, 8)
    louder.update(torch.randn(4096, 2, 8) * 90)
    tuned.layers[7] = LayerStats(louder, tuned.layers[7].value)
    report = drift(base, tuned, scheme("fp8", "per-tensor"), thresholds=DriftThresholds(0.02, 2))
    report = replace(report, notes=("read this",))
    text = printed(drift_table(report))
    first = next(line for line in text.splitlines() if re.match(" 7 ", line))
    assert re.match(r" 7 +K [01] +(8.00|16.0) → \d{3} ", first)
    assert "note: read this" in text
    assert "\nrecalibrate: more than 2 dB of SQNR lost in 2 of 120 heads" in text
    assert "more than 2% of values clipped in 2 of 120 heads" in text
    assert "kvquant solve" in text and "--shared" in text


def test_drift_fits_eighty_columns() -> None:
    base, tuned = many_layers(), many_layers()
    tuned.layers[7].key.maximum[0, 0] = 900
    base.layers[8].key.minimum[:] = base.layers[8].key.maximum[:] = 0
    text = printed(drift_table(drift(base, tuned, scheme("int8", "per-channel"))), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert re.search(r"8\.00 → 900 +112x", text) and "∞" in text


def test_sharing() -> None:
    costs = [
        {
            "name": "base",
            "mean_loss_db": 0.04,
            "worst_loss_db": 0.5,
            "worst": "layer 1, keys, head 0",
        },
        {
            "name": "a",
            "mean_loss_db": 1,
            "worst_loss_db": math.inf,
            "worst": "layer 2, keys, head 1",
        },
    ]
    lines = [
        re.split(r"\s{2,}", line.strip()) for line in printed(sharing_table(costs)).splitlines()
    ]
    assert lines[4:6] == [
        ["base", "0.0 dB", "0.5 dB", "layer 1, keys, head 0"],
        ["a", "1.0 dB", "∞ dB", "layer 2, keys, head 1"],
    ]
