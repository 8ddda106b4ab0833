"""Statistics, scales and drift as pictures: png, svg or pdf, by the file's suffix.

Figures are made without pyplot, so that no global state of matplotlib is read or changed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import max_pool1d

from kvquant.errors import InputError
from kvquant.geometry import CacheGeometry, LayerKind
from kvquant.scales import KVScales
from kvquant.storage import write_atomically

from .cost import SLOTS
from .drift import DriftReport, HeadDrift
from .stats import CalibrationStats
from .wording import model_title, percent

SUFFIXES = (".png", ".svg", ".pdf")
MAX_COLUMNS = 1024
"""Columns of a heat map: no more than there are pixels, or outliers could fall between them."""

_DPI = 150
_WIDTH = 11.5
_GREY = "#555555"
_BLANK = "#e4e4e4"
# Okabe and Ito's palette: told apart by colour-blind readers too.
_WITHIN, _BEYOND = "#0072B2", "#D55E00"
_CLIPPED_FLOOR = 1e-6
_RATIO_FLOOR = 0.01


@dataclass(frozen=True)
class _HeatMap:
    """What is drawn of one slot.

    Attributes:
        rows: Per layer ``[kv_heads, columns]``, or None where there is nothing.
        joined: Channels that one column stands for, by their maximum.
        largest: Where the largest number is, for people.
    """

    rows: Sequence[torch.Tensor | None]
    joined: int
    largest: str

    @property
    def width(self) -> int:
        """Columns of the widest layer, all heads side by side."""
        return max(row.numel() for row in self.rows if row is not None)

    @property
    def has_zeros(self) -> bool:
        """Whether a column is zero throughout."""
        return any(bool((row == 0).any()) for row in self.rows if row is not None)

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """Heads and columns per head, of all layers that there are."""
        return {tuple(row.shape) for row in self.rows if row is not None}


def plot_heat_map(content: CalibrationStats | KVScales, path: Path) -> None:
    """Draws layer by channel: the largest magnitudes, or the scales, of keys and of values.

    Bright streaks are outlier channels. Thin lines part the heads; layers without keys and values
    of their own, or left out, are grey, as is what lies beyond a narrower layer.

    Args:
        content: Statistics, or scales of any granularity.
        path: Where to write; its suffix chooses the format.

    Raises:
        InputError: An unknown suffix, no matplotlib, nothing to draw, or the file cannot be
            written.
    """
    layers = len(content.geometry.layers)
    panel = min(max(1.7, 0.09 * layers), 5.0)
    figure = _new_figure(path, panel * 2 + 2.6)
    if not content.layers:
        raise InputError(f"nothing to draw in {path}: not one layer was recorded")
    what = "scale" if isinstance(content, KVScales) else "largest magnitude"
    axes = figure.subplots(2, 1)
    for axis, slot in zip(axes, SLOTS, strict=True):
        heat = _heat_map(content, slot)
        _draw_heat_map(figure, axis, heat)
        zero = " (orange: zero throughout)" if heat.has_zeros else ""
        title = f"{_slot_name(slot, content.geometry)}: {what}, at most {heat.largest}{zero}"
        axis.set_title(title, loc="left", fontsize=10)
    subtitle = _heat_map_subtitle(content) + (
        "; grey: no data" if len(content.layers) < layers else ""
    )
    _draw_title(figure, model_title(content.provenance), subtitle)
    top = 1 - 0.98 / figure.get_figheight()
    bottom = 0.65 / figure.get_figheight()
    figure.subplots_adjust(left=0.06, right=0.99, top=top, bottom=bottom, hspace=0.95 / panel)
    _write(figure, path)


def plot_drift(report: DriftReport, path: Path) -> None:
    """Draws per layer and head how amax moved, what is clipped and what SQNR is lost.

    Args:
        report: From `drift`.
        path: Where to write; its suffix chooses the format.

    Raises:
        InputError: An unknown suffix, no matplotlib, or the file cannot be written.
    """
    figure = _new_figure(path, 8.6)
    limits = report.thresholds
    axes = figure.subplots(3, 2, sharex=True, sharey="row")
    for column, slot in enumerate(SLOTS):
        heads = [head for head in report.heads if head.slot == slot]
        failing = [head.severity(limits) > 1 for head in heads]
        ratios = [max(ratio, _RATIO_FLOOR) for ratio in _finite([h.amax_ratio for h in heads])]
        _draw_heads(axes[0][column], heads, failing, ratios)
        clipped = [max(head.extra_clipped, _CLIPPED_FLOOR) for head in heads]
        _draw_heads(axes[1][column], heads, failing, clipped, limits.max_clipped)
        loss = _finite([head.loss_db for head in heads])
        _draw_heads(axes[2][column], heads, failing, loss, limits.max_loss_db)
        axes[0][column].set_title(f"{slot}s", loc="left", fontsize=11)
        axes[2][column].set_xlabel("layer (KV heads side by side)", fontsize=9)
    _label_drift_axes(axes)
    verdict = "safe" if report.safe else "recalibrate"
    title = f"{report.tuned} under the scales of {report.base}: {verdict}"
    _draw_title(figure, title, f"{report.scheme}; ranges by {report.method}\n{report.reasons[0]}")
    _draw_legend(figure)
    figure.subplots_adjust(left=0.09, right=0.98, top=0.86, bottom=0.11, hspace=0.12, wspace=0.06)
    _write(figure, path)


def _new_figure(path: Path, height: float) -> Any:
    """A figure `height` inches high, once it is sure that it can be written as `path` says."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"cannot draw {path.name!r}: the name has to end in {', '.join(SUFFIXES)}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("plots need matplotlib: pip install 'kvquant-toolkit[report]'") from error
    return Figure(figsize=(_WIDTH, height), facecolor="white")


def _write(figure: Any, path: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.lower()[1:], dpi=_DPI)
    write_atomically(path, content.getvalue())


def _draw_title(figure: Any, title: str, subtitle: str) -> None:
    height = figure.get_figheight()
    left = 0.06
    size = min(13, 13 * 90 / len(title))
    figure.text(left, 1 - 0.12 / height, title, fontsize=size, fontweight="bold", va="top")
    figure.text(left, 1 - 0.42 / height, subtitle, fontsize=9, color=_GREY, va="top")


def _heat_map(content: CalibrationStats | KVScales, slot: str) -> _HeatMap:
    numbers: dict[int, torch.Tensor] = {}
    for index, layer in content.layers.items():
        side = getattr(layer, slot)
        shape = content.geometry.layers[index]
        width = (shape.kv_heads, getattr(shape, f"{slot}_dim"))
        # A scale shared by channels is drawn as wide as they are.
        rows = side.scale.expand(width) if isinstance(content, KVScales) else side.amax
        numbers[index] = rows.float().cpu()
    columns = max(rows.numel() for rows in numbers.values())
    joined = math.ceil(columns / MAX_COLUMNS)
    drawn = [
        max_pool1d(numbers[index], joined, ceil_mode=True) if index in numbers else None
        for index in range(len(content.geometry.layers))
    ]
    return _HeatMap(drawn, joined, _largest(numbers))


def _largest(numbers: dict[int, torch.Tensor]) -> str:
    """The largest number and its place, head and channel only where they make a difference."""
    layer = max(numbers, key=lambda index: float(numbers[index].max()))
    rows = numbers[layer]
    head, channel = divmod(int(rows.argmax()), rows.shape[1])
    place = [f"layer {layer}"]
    if bool((rows != rows[0]).any()):
        place.append(f"head {head}")
    if bool((rows != rows[:, :1]).any()):
        place.append(f"channel {channel}")
    return f"{float(rows.max()):.3g} in {', '.join(place)}"


def _heat_map_subtitle(content: CalibrationStats | KVScales) -> str:
    if isinstance(content, KVScales):
        return f"{content.scheme}; ranges by {content.method}"
    position = content.provenance.longest_position
    where = f", up to position {position:,}" if position else ""
    return f"{content.tokens:,} tokens{where}"


def _slot_name(slot: str, geometry: CacheGeometry) -> str:
    if any(layer.kind is LayerKind.LATENT for layer in geometry.layers):
        return {"key": "latent", "value": "rotary part"}[slot]
    return f"{slot}s"


def _draw_heat_map(figure: Any, axis: Any, heat: _HeatMap) -> None:
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    image = torch.full((len(heat.rows), heat.width), math.nan)
    for index, row in enumerate(heat.rows):
        if row is not None:
            image[index, : row.numel()] = row.flatten()
    low, high = _colour_range(image)
    # Zeros get a colour of their own; all else is at least the lowest of the scale.
    image = torch.where(image == 0, low / 10, image.clamp(min=low))
    colours = colormaps["viridis"].with_extremes(bad=_BLANK, under=_BEYOND)
    extent = (0, heat.width, len(heat.rows) - 0.5, -0.5)
    drawn = axis.imshow(
        image.numpy(),
        cmap=colours,
        norm=LogNorm(low * 0.999, high),
        aspect="auto",
        interpolation="nearest",
        extent=extent,
    )
    lines = LineCollection(list(_head_borders(heat)), colors="white", linewidths=0.7)
    axis.add_collection(lines, autolim=False)
    bar = figure.colorbar(drawn, ax=axis, pad=0.01, fraction=0.06, aspect=18)
    bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=99))
    bar.ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    bar.ax.tick_params(which="both", labelsize=8)
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.outline.set_visible(False)
    bar.set_label("log scale", fontsize=8)
    axis.set_ylabel("layer", fontsize=9)
    axis.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axis.tick_params(labelsize=8)
    axis.spines[:].set_visible(False)
    _label_channels(axis, heat)


def _colour_range(image: torch.Tensor) -> tuple[float, float]:
    """Smallest and largest number that colours tell apart: four decades at most."""
    positive = image[image > 0]
    if not positive.numel():
        return 0.1, 1.0
    high = float(positive.max())
    low = max(float(positive.min()), high * 1e-4)
    return (low, high) if low < high else (low / 2, high * 2)


def _head_borders(heat: _HeatMap) -> Iterator[list[tuple[float, float]]]:
    """Vertical lines between heads, one for each run of layers of one shape."""
    first = 0
    for shape, run in groupby(None if row is None else tuple(row.shape) for row in heat.rows):
        last = first + len(list(run))
        for head in range(1, shape[0] if shape else 1):
            x = head * (shape[1] if shape else 0)
            yield [(x, first - 0.5), (x, last - 0.5)]
        first = last


def _label_channels(axis: Any, heat: _HeatMap) -> None:
    """Names heads where all layers have the same, else counts channels."""
    (heads, columns), *others = heat.shapes
    joined = f", a column is the largest of {heat.joined}" if heat.joined > 1 else ""
    if others or heads == 1:
        axis.set_xlabel(f"channel, heads side by side{joined}", fontsize=9)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x * heat.joined:.0f}")
        return
    step = math.ceil(heads / 16)
    shown = range(0, heads, step)
    axis.set_xticks([(head + 0.5) * columns for head in shown], [f"head {h}" for h in shown])
    axis.tick_params(axis="x", length=0)
    axis.set_xlabel(f"channel within each KV head{joined}", fontsize=9)


def _draw_heads(
    axis: Any,
    heads: Sequence[HeadDrift],
    failing: Sequence[bool],
    values: Sequence[float],
    limit: float | None = None,
) -> None:
    """One mark per head at its layer, those beyond a limit in another colour and shape."""
    across = 1 + max((head.head for head in heads), default=0)
    places = [head.layer + (head.head - (across - 1) / 2) * 0.7 / across for head in heads]
    styles = (
        (False, {"color": _WITHIN, "marker": "o", "s": 12, "alpha": 0.6}),
        (True, {"color": _BEYOND, "marker": "^", "s": 34, "zorder": 3}),
    )
    for beyond, style in styles:
        chosen = [i for i, fails in enumerate(failing) if fails is beyond]
        axis.scatter(
            [places[i] for i in chosen], [values[i] for i in chosen], linewidths=0, **style
        )
    if limit is not None:
        axis.axhline(limit, color=_BEYOND, linestyle="--", linewidth=1.1)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def _finite(values: Sequence[float]) -> list[float]:
    """`values` with infinite ones a little beyond the largest finite one."""
    top = max((abs(value) for value in values if math.isfinite(value)), default=1.0)
    return [value if math.isfinite(value) else math.copysign(1.5 * top, value) for value in values]


def _label_drift_axes(axes: Any) -> None:
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

    for axis in axes[0]:
        axis.axhline(1.0, color=_GREY, linewidth=0.9)
        axis.set_yscale("log", base=2)
        axis.margins(y=0.15)
    low, high = axes[0][0].get_ylim()
    low, high = min(low, 0.7), max(high, 1.4)
    axes[0][0].set_ylim(low, high)
    for axis in axes[0]:
        if high / low < 6:
            axis.yaxis.set_major_locator(FixedLocator([0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3]))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:.3g}x")
    for axis in axes[1]:
        axis.set_yscale("log")
        axis.set_ylim(_CLIPPED_FLOOR / 2, 1.5)
        axis.yaxis.set_major_locator(FixedLocator([_CLIPPED_FLOOR, 1e-4, 1e-2, 1.0]))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(lambda y, _: "0%" if y <= _CLIPPED_FLOOR else percent(y))
    for axis in axes[2]:
        axis.axhline(0.0, color=_GREY, linewidth=0.9)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    for row, name in zip(
        axes,
        ("amax,\nfine-tune by base", "values clipped\nby the base's range", "SQNR lost, dB"),
        strict=True,
    ):
        row[0].set_ylabel(name, fontsize=9)


def _draw_legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], color=_WITHIN, marker="o", linestyle="", markersize=5, label="head"),
        Line2D(
            [], [], color=_BEYOND, marker="^", linestyle="", markersize=7, label="beyond a limit"
        ),
        Line2D([], [], color=_BEYOND, linestyle="--", label="limit"),
    ]
    figure.legend(handles=marks, loc="lower right", ncols=3, fontsize=9, frameon=False)
