"""Charts of a report as inline SVG: colours come from the page's style sheet, light or dark.

An arm is told by a marker's shape as well as by its colour; both follow from its place among the
arms. Colours are classes ``a0`` … ``a7`` that set ``--arm``; axes are drawn in ``currentColor``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from .results import EvalReport
from .wording import number, visible

COLOURS = 8
_WIDTH, _HEIGHT = 440, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 42
_DECADES = 6
"""A log axis never shows more: what is smaller lies on its lower edge, marked as such."""

_MARKERS = (
    "M-3.6,0a3.6,3.6 0 1,0 7.2,0a3.6,3.6 0 1,0 -7.2,0Z",
    "M-3.3,-3.3H3.3V3.3H-3.3Z",
    "M0,-4.4L4.2,3.2H-4.2Z",
    "M0,-4.8L4.8,0L0,4.8L-4.8,0Z",
    "M0,4.4L4.2,-3.2H-4.2Z",
    "M-4.2,-1.3H-1.3V-4.2H1.3V-1.3H4.2V1.3H1.3V4.2H-1.3V1.3H-4.2Z",
    "M0,-4.6L4.4,-1.4L2.7,3.7H-2.7L-4.4,-1.4Z",
)


@dataclass(frozen=True)
class Point:
    """Something measured, with its interval where it has one, and what to say about it."""

    x: float
    y: float
    label: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Points of one arm, `place` among all of them."""

    name: str
    place: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Axis:
    """From numbers to coordinates.

    Attributes:
        title: What it shows; a vertical axis has it above the chart.
        low: Number at its beginning.
        high: Number at its end.
        ticks: Numbers and their labels.
        log: Whether it is logarithmic.
    """

    title: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Where `value` is, 0 at the beginning and 1 at the end; beyond either, at that end."""
        inside = min(max(value, self.low), self.high)
        if self.log:
            span = math.log(self.high / self.low)
            return math.log(inside / self.low) / span
        return (inside - self.low) / (self.high - self.low)


def marker(place: int, size: int = 11) -> str:
    """The mark of the arm at `place`, to stand in a line of text."""
    return (
        f'<svg class="mark a{place % COLOURS}" width="{size}" height="{size}" '
        f'viewBox="-5.5 -5.5 11 11" aria-hidden="true"><path d="{_shape(place)}"/></svg>'
    )


def _shape(place: int) -> str:
    # As many shapes as are prime to the number of colours: 56 arms before a pair comes again.
    return _MARKERS[place % len(_MARKERS)]


def position_chart(report: EvalReport) -> str:
    """Mean KL by the number of tokens before, both logarithmic; empty where there is none."""
    arms = report.perplexity.arms if report.perplexity else {}

    def points(name: str) -> Iterator[Point]:
        for bucket in arms[name].buckets if name in arms else ():
            middle = math.sqrt(max(bucket.past_from, 1) * max(bucket.past_to - 1, 1))
            where = f"{bucket.past_from:,} to {bucket.past_to - 1:,} tokens before"
            yield Point(middle, bucket.kl_mean, f"{where}: {number(bucket.kl_mean)}")

    edges = {
        edge for arm in arms.values() for it in arm.buckets for edge in (it.past_from, it.past_to)
    }
    series = _series(report, points)
    x = powers_of_two("tokens before", min(edges, default=1), max(edges, default=2))
    return draw(
        "Mean KL by the number of tokens before",
        series,
        x,
        decades(_values(series)),
    )


def trade_chart(report: EvalReport) -> str:
    """Mean KL by bits per value: what a smaller cache costs; empty where there is none."""
    arms = report.perplexity.arms if report.perplexity else {}
    bits = {arm.name: arm.bits_per_value for arm in report.arms}

    def points(name: str) -> Iterator[Point]:
        if name in arms and bits[name] > 0:
            kl = arms[name].kl_mean
            label = f"{number(bits[name])} bits per value, mean KL {number(kl.value)}"
            yield Point(bits[name], kl.value, label, kl.low, kl.high)

    series = _series(report, points)
    return draw(
        "Mean KL by bits per value",
        series,
        linear("bits per value, metadata and exact tokens included", 0.0, max([8.5, *_xs(series)])),
        decades(_values(series)),
        joined=False,
    )


def layer_charts(report: EvalReport) -> dict[str, str]:
    """Relative error of keys and of values by layer, on one scale; empty where there is none."""
    sides = {"keys": 0, "values": 1}
    charts: dict[str, list[Series]] = {
        name: _series(report, _layer_points(report, side)) for name, side in sides.items()
    }
    both = [value for series in charts.values() for value in _values(series)]
    last = max((point for series in charts.values() for point in _xs(series)), default=1.0)
    return {
        name: draw(
            f"Relative error of {name} by layer",
            series,
            linear("layer", 0.0, max(last, 1.0)),
            decades(both),
        )
        for name, series in charts.items()
    }


def _layer_points(report: EvalReport, side: int) -> Callable[[str], Iterator[Point]]:
    errors = {arm.name: arm.layer_errors for arm in report.arms}

    def points(name: str) -> Iterator[Point]:
        layers = sorted(
            (int(layer), pair) for layer, pair in errors[name].items() if layer.isdecimal()
        )
        for layer, pair in layers:
            yield Point(layer, pair[side], f"layer {layer}: {number(pair[side])}")

    return points


def _series(report: EvalReport, points: Callable[[str], Iterator[Point]]) -> list[Series]:
    """Of all arms that have points, numbers only."""
    found = [
        Series(arm.name, place, tuple(it for it in points(arm.name) if math.isfinite(it.y)))
        for place, arm in enumerate(report.arms)
    ]
    return [series for series in found if series.points]


def _values(series: Sequence[Series]) -> list[float]:
    ends = [(it.y, it.low, it.high) for one in series for it in one.points]
    return [value for point in ends for value in point if value is not None]


def _xs(series: Sequence[Series]) -> list[float]:
    return [point.x for one in series for point in one.points]


def decades(values: Sequence[float]) -> Axis:
    """A logarithmic axis a little longer than `values`, with ticks at 1, or 1, 2 and 5, times 10ⁿ.

    Values that are zero or more than some decades below the largest lie on its lower end.
    """
    # What is smaller has too few digits for arithmetic.
    positive = [value for value in values if sys.float_info.min * 10 < value < math.inf]
    high = max(positive, default=1.0) * 1.3
    low = max(min(positive, default=0.1) / 1.3, high / 10**_DECADES)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 2, 5), range(1, 10)):
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) > 2:
            break
    return Axis("", low, high, tuple((tick, _tick(tick)) for tick in ticks), log=True)


def _tick(value: float) -> str:
    return f"{value:.10f}".rstrip("0").rstrip(".") if value >= 1e-4 else f"{value:.0e}"


def powers_of_two(title: str, low: int, high: int) -> Axis:
    """A logarithmic axis from one power of two to another around two counts."""
    first = math.floor(math.log2(max(low, 1)))
    last = max(math.ceil(math.log2(max(high, 1))), first + 1)
    step = math.ceil((last - first) / 6)
    ticks = tuple((2.0**power, _count(2**power)) for power in range(first, last + 1, step))
    return Axis(title, 2.0**first, 2.0**last, ticks, log=True)


def _count(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)


def linear(title: str, low: float, high: float) -> Axis:
    """A linear axis with ticks at round numbers."""
    step = next(it for it in _round_steps() if (high - low) / it <= 6)
    count = math.floor((high - low) / step + 1e-9)
    ticks = tuple((low + step * tick, f"{low + step * tick:g}") for tick in range(count + 1))
    return Axis(title, low, high, ticks)


def _round_steps() -> Iterator[float]:
    step = 1.0
    while True:
        yield from (step, 2 * step, 5 * step)
        step *= 10


def draw(title: str, series: Sequence[Series], x: Axis, y: Axis, joined: bool = True) -> str:
    """The chart, or nothing if there is nothing to draw.

    Args:
        title: For those who cannot see it.
        series: What to draw.
        x: Horizontal axis.
        y: Vertical axis.
        joined: Whether an arm's points are joined by a line.
    """
    if not series:
        return ""
    parts = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        *_axes(x, y),
        *(part for one in series for part in _draw_series(one, x, y, joined)),
        "</svg>",
    ]
    return "".join(parts)


def _axes(x: Axis, y: Axis) -> Iterator[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for value, label in y.ticks:
        at = _y(y, value)
        yield f'<path class="grid" d="M{_LEFT},{at}H{right}"/>'
        yield f'<text x="{_LEFT - 7}" y="{at}" dy=".34em" text-anchor="end">{label}</text>'
    for value, label in x.ticks:
        at = _x(x, value)
        yield f'<path class="axis" d="M{at},{bottom}v4"/>'
        yield f'<text x="{at}" y="{bottom + 17}" text-anchor="middle">{label}</text>'
    yield f'<path class="axis" d="M{_LEFT},{bottom}H{right}"/>'
    yield (
        f'<text class="what" x="{(_LEFT + right) / 2:g}" y="{_HEIGHT - 6}" '
        f'text-anchor="middle">{escape(x.title)}</text>'
    )


def _draw_series(series: Series, x: Axis, y: Axis, joined: bool) -> Iterator[str]:
    places = [(_x(x, it.x), _y(y, it.y), it) for it in series.points]
    yield f'<g class="a{series.place % COLOURS}">'
    if joined and len(places) > 1:
        yield f'<path class="line" d="M{"L".join(f"{px},{py}" for px, py, _ in places)}"/>'
    for px, py, point in places:
        low, high = point.low, point.high
        if low is not None and high is not None and math.isfinite(high - low):
            yield f'<path class="line" d="M{px},{_y(y, low)}V{_y(y, high)}"/>'
        below = " (below the axis)" if point.y < y.low else ""
        label = escape(visible(f"{series.name}, {point.label}{below}"))
        hollow = ' class="below"' if below else ""
        yield (
            f'<path{hollow} transform="translate({px} {py})" d="{_shape(series.place)}">'
            f"<title>{label}</title></path>"
        )
    yield "</g>"


def _x(axis: Axis, value: float) -> float:
    return round(_LEFT + axis.share(value) * (_WIDTH - _LEFT - _RIGHT), 1)


def _y(axis: Axis, value: float) -> float:
    span = _HEIGHT - _TOP - _BOTTOM
    return round(_TOP + (1 - axis.share(value)) * span, 1)
