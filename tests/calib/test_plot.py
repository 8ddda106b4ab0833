"""Plots: files of the right kind, nothing lost in the picture, clear errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from calib import plot
from calib.drift import drift
from calib.plot import MAX_COLUMNS, plot_drift, plot_heat_map
from calib.solve import solve
from calib.stats import CalibrationStats, ChannelStats, LayerStats
from kvquant.errors import InputError
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.provenance import Provenance
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

SIGNATURES = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF-"}


def layer(heads: int, key_dim: int, value_dim: int, kind: LayerKind = LayerKind.FULL) -> Any:
    return LayerGeometry(kind, heads, key_dim, value_dim)


def stats_of(*layers: LayerGeometry, skip: tuple[int, ...] = ()) -> CalibrationStats:
    torch.manual_seed(0)
    found = {}
    for index, shape in enumerate(layers):
        if index in skip or not shape.keeps_tokens:
            continue
        slots = []
        for dim in (shape.key_dim, shape.value_dim):
            slots.append(ChannelStats.empty(shape.kv_heads, dim))
            slots[-1].update(torch.randn(32, shape.kv_heads, dim))
        found[index] = LayerStats(*slots)
    provenance = Provenance(model="my-model", tokens=32, longest_position=32)
    return CalibrationStats(CacheGeometry("any", layers, 64), found, provenance)


def scheme(format_name: str, granularity: str) -> QuantScheme:
    slot = TensorScheme(tensor_format(format_name), Granularity.parse(granularity))
    return QuantScheme(slot, slot)


MODELS = {
    "plain": stats_of(layer(2, 16, 16), layer(2, 16, 16)),
    "one layer": stats_of(layer(1, 8, 8)),
    "other widths": stats_of(layer(4, 16, 16), layer(1, 32, 32), layer(2, 8, 24), skip=(1,)),
    "latent": stats_of(layer(1, 32, 8, LayerKind.LATENT), layer(1, 32, 8, LayerKind.LATENT)),
    "hybrid": stats_of(
        LayerGeometry(LayerKind.LINEAR), layer(2, 8, 8), LayerGeometry(LayerKind.SHARED)
    ),
    "wide": stats_of(layer(20, 128, 128)),
}


@pytest.mark.parametrize("name", MODELS)
def test_heat_maps_of_all_shapes(tmp_path: Path, name: str) -> None:
    stats = MODELS[name]
    plot_heat_map(stats, tmp_path / "stats.png")
    for granularity in ("per-tensor", "per-head", "per-channel"):
        if name != "other widths":  # has a layer left out on purpose
            how = scheme("int8", granularity)
            plot_heat_map(solve(stats, how), tmp_path / f"{granularity}.png")
    assert all(file.read_bytes().startswith(SIGNATURES[".png"]) for file in tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf", ".PNG"])
def test_the_suffix_chooses_the_format(tmp_path: Path, suffix: str) -> None:
    stats = MODELS["plain"]
    plot_heat_map(stats, tmp_path / f"heat{suffix}")
    plot_drift(drift(stats, stats, scheme("fp8", "tensor")), tmp_path / f"drift{suffix}")
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"drift{suffix}", f"heat{suffix}"]
    for file in tmp_path.iterdir():
        assert file.read_bytes().startswith(SIGNATURES[suffix.lower()])


@pytest.mark.parametrize("name", ["heat.gif", "heat", "heat.png.txt"])
def test_other_suffixes(tmp_path: Path, name: str) -> None:
    stats = MODELS["plain"]
    with pytest.raises(InputError, match=r"has to end in \.png, \.svg, \.pdf"):
        plot_heat_map(stats, tmp_path / name)
    with pytest.raises(InputError, match=r"has to end in \.png, \.svg, \.pdf"):
        plot_drift(drift(stats, stats, scheme("fp8", "tensor")), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not one layer"):
        plot_heat_map(stats_of(layer(1, 8, 8), skip=(0,)), tmp_path / "heat.png")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        plot_heat_map(MODELS["plain"], tmp_path / "file" / "heat.png")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install 'kvquant-toolkit\[report\]'"):
        plot_heat_map(MODELS["plain"], tmp_path / "heat.png")


def test_global_state_is_left_alone(tmp_path: Path) -> None:
    """Matplotlib is loaded when something is drawn; pyplot, which picks a backend, never is."""
    code = (
        "import sys; from pathlib import Path; from test_plot import MODELS;"
        "from calib.plot import plot_heat_map; early = 'matplotlib' in sys.modules;"
        "plot_heat_map(MODELS['plain'], Path(sys.argv[1]));"
        "print(early, 'matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "heat.png"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["False", "True", "False"], done.stderr


@pytest.mark.parametrize(("heads", "dim", "joined"), [(8, 128, 1), (8, 129, 2), (32, 128, 4)])
def test_no_outlier_falls_between_columns(heads: int, dim: int, joined: int) -> None:
    stats = stats_of(layer(heads, dim, dim))
    stats.layers[0].key.maximum[heads - 1, dim - 1] = 1234
    heat = plot._heat_map(stats, "key")
    assert heat.joined == joined and heat.width <= MAX_COLUMNS + heads
    row = heat.rows[0]
    assert row is not None and tuple(row.shape) == (heads, -(-dim // joined))
    assert float(row[-1, -1]) == 1234 and int((row == 1234).sum()) == 1
    assert heat.largest == f"1.23e+03 in layer 0, head {heads - 1}, channel {dim - 1}"


def test_heads_are_parted_where_they_are() -> None:
    stats = stats_of(
        layer(2, 8, 8), layer(2, 8, 8), layer(1, 16, 16), layer(2, 8, 8), layer(4, 4, 8), skip=(3,)
    )
    heat = plot._heat_map(stats, "key")
    assert [row is None for row in heat.rows] == [False, False, False, True, False]
    assert list(plot._head_borders(heat)) == [
        [(8, -0.5), (8, 1.5)],
        [(4, 3.5), (4, 4.5)],
        [(8, 3.5), (8, 4.5)],
        [(12, 3.5), (12, 4.5)],
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 10.0], (1.0, 10.0)),
        ([0.0, 1e-9, 10.0], (1e-3, 10.0)),
        ([float("nan"), 2.0], (1.0, 4.0)),
        ([0.0, 0.0], (0.1, 1.0)),
    ],
)
def test_colours_cover_four_decades(values: list[float], expected: tuple[float, float]) -> None:
    assert plot._colour_range(torch.tensor(values)) == pytest.approx(expected)


def test_channels_of_nothing_are_told_apart() -> None:
    stats = stats_of(layer(2, 8, 8))
    assert not plot._heat_map(stats, "key").has_zeros
    stats.layers[0].key.minimum[0, 3] = stats.layers[0].key.maximum[0, 3] = 0
    assert plot._heat_map(stats, "key").has_zeros


def test_scales_that_are_shared_name_no_channel() -> None:
    stats = MODELS["plain"]
    for granularity, place in (("tensor", ""), ("head", ", head"), ("channel", ", channel")):
        largest = plot._heat_map(solve(stats, scheme("int8", granularity)), "key").largest
        assert place in largest
        assert ("channel" in largest) == (granularity == "channel")
        assert ("head" in largest) == (granularity != "tensor")


def test_drift_beyond_all_bounds_can_be_drawn(tmp_path: Path) -> None:
    base, tuned = (stats_of(layer(2, 16, 16), layer(2, 16, 16)) for _ in range(2))
    base.layers[0].key.minimum[:] = base.layers[0].key.maximum[:] = 0
    tuned.layers[1].value.minimum[:] = tuned.layers[1].value.maximum[:] = 0
    report = drift(base, tuned, scheme("int8", "per-channel"))
    assert {head.amax_ratio for head in report.heads} >= {0, float("inf")}
    plot_drift(report, tmp_path / "drift.png")
    assert (tmp_path / "drift.png").stat().st_size > 10_000


def test_infinite_numbers_are_drawn_beyond_the_others() -> None:
    assert plot._finite([1.0, float("inf"), -3.0, float("-inf")]) == [1.0, 4.5, -3.0, -4.5]
    assert plot._finite([float("inf")]) == [1.5]
