"""Channels that dwarf the others, values beyond fp8, channels of nothing."""

from __future__ import annotations

import pytest
import torch

from calib.outliers import Outlier, outlier, outlier_dominated, outlier_ratio, remarks
from calib.stats import CalibrationStats, ChannelStats, LayerStats
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind


def stats_of(amax: list[list[float]]) -> ChannelStats:
    """Statistics of one token, ``[kv_heads][dim]``."""
    stats = ChannelStats.empty(len(amax), len(amax[0]))
    stats.update(torch.tensor(amax)[None])
    return stats


@pytest.mark.parametrize(
    ("amax", "expected"),
    [
        ([[1, 1, 1, 1]], Outlier(0, 0, 1)),
        ([[1, 1, 1], [1, -9, 1]], Outlier(1, 1, 9)),
        ([[2, 2, 2], [2, 2, 40]], Outlier(1, 2, 20)),
        ([[0, 0, 0], [0, 2, 40]], Outlier(1, 2, 20)),
        ([[0, 0, 0], [0, 0, 3]], Outlier(1, 2, 1)),
        ([[0, 0], [0, 0]], Outlier(0, 0, 1)),
    ],
)
def test_the_channel_that_reaches_farthest(amax: list[list[float]], expected: Outlier) -> None:
    assert outlier(stats_of(amax)) == expected
    assert outlier_ratio(stats_of(amax)) == expected.ratio


@pytest.mark.parametrize(("largest", "expected"), [(9.9, False), (10.0, True), (1000.0, True)])
def test_from_ten_times_the_median_on_it_dominates(largest: float, expected: bool) -> None:
    assert outlier_dominated(stats_of([[1, 1, 1, largest]])) is expected


def test_remarks() -> None:
    layers = {
        4: LayerStats(stats_of([[1, 1, 30], [1, 1, 1]]), stats_of([[449, 440, 430]])),
        1: LayerStats(stats_of([[448, 440, 440]]), stats_of([[0, 0, 1]])),
        0: LayerStats(stats_of([[1, 2, 3]]), stats_of([[1, 2, 3]])),
    }
    geometry = CacheGeometry("llama", (LayerGeometry(LayerKind.FULL, 1, 3, 3),) * 5, 64)
    found = remarks(CalibrationStats(geometry, layers))
    assert [(remark.layer, remark.slot, remark.kind, remark.text) for remark in found] == [
        (1, "value", "all-zero", "2 of 3 channels all zero"),
        (4, "key", "outlier-dominated", "outlier-dominated (h0 c2, 30x)"),
        (4, "value", "beyond-fp8", "449: clipped at 448 by fp8 at scale 1.0"),
    ]
