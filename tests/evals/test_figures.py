"""Charts: that points are where their numbers are, and that nothing odd breaks them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evals.figures import (
    Axis,
    Point,
    Series,
    decades,
    draw,
    layer_charts,
    linear,
    marker,
    position_chart,
    powers_of_two,
    trade_chart,
)
from evals.results import Bucket, EvalReport, Interval

HALF = Axis("half", 0.0, 1.0, ((0.0, "0"), (1.0, "1")))


def places(svg: str) -> list[tuple[float, float]]:
    found = re.findall(r'transform="translate\(([\d.]+) ([\d.]+)\)"', svg)
    return [(float(x), float(y)) for x, y in found]


def labels(svg: str) -> list[str]:
    return [title.text or "" for title in ElementTree.fromstring(svg).iter("title")]


def test_corners() -> None:
    series = Series("a", 0, (Point(0.0, 0.0, "low"), Point(1.0, 1.0, "high")))

    assert places(draw("", [series], HALF, HALF)) == [(52.0, 208.0), (428.0, 10.0)]


def test_beyond_an_axis_is_on_its_edge_and_says_so() -> None:
    axis = replace(HALF, low=0.5)
    svg = draw("", [Series("a", 0, (Point(0.5, 0.1, "p"),))], HALF, axis)

    assert places(svg) == [(240.0, 208.0)]
    assert 'class="below"' in svg
    assert labels(svg) == ["a, p (below the axis)"]


def test_names_are_escaped() -> None:
    svg = draw('<&">', [Series('</svg><b x="', 0, (Point(0.5, 0.5, "\x1b\ud83d"),))], HALF, HALF)

    assert labels(svg) == ['</svg><b x=", ␛‹U+D83D›']
    assert ElementTree.fromstring(svg).get("aria-label") == '<&">'


def test_nothing_to_draw() -> None:
    assert draw("", [], HALF, HALF) == ""


def test_an_interval_is_a_line() -> None:
    series = Series("a", 0, (Point(0.5, 0.5, "", 0.25, 0.75),))

    assert "M240.0,158.5V59.5" in draw("", [series], HALF, HALF, joined=False)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.002, 5.0], ["0.01", "0.1", "1"]),
        ([0.011, 0.09], ["0.01", "0.02", "0.05", "0.1"]),
        ([1e-9, 2.0], ["1e-05", "0.0001", "0.001", "0.01", "0.1", "1"]),
        ([0.0, -1.0], ["0.1", "0.2", "0.5", "1"]),
        ([0.05], ["0.04", "0.05", "0.06"]),
    ],
)
def test_decades(values: list[float], ticks: list[str]) -> None:
    found = [label for _, label in decades(values).ticks]

    assert found[: len(ticks)] == ticks


@example([5e-324])
@given(st.lists(st.floats(allow_nan=False, min_value=0)))
def test_decades_hold_all_but_the_smallest(values: list[float]) -> None:
    finite = [value for value in values if 0 < value < 1e300]
    axis = decades(finite)

    assert axis.low < axis.high
    assert all(value < axis.high for value in finite)
    assert all(axis.low <= tick <= axis.high for tick, _ in axis.ticks)


def test_powers_of_two() -> None:
    axis = powers_of_two("x", 100, 5000)

    assert [label for _, label in axis.ticks] == ["64", "256", "1k", "4k"]
    assert (axis.low, axis.high) == (64.0, 8192.0)
    assert axis.share(64) == 0.0
    assert axis.share(8192) == 1.0
    assert powers_of_two("x", 0, 0).high == 2.0


def test_linear() -> None:
    assert [label for _, label in linear("", 0.0, 29.0).ticks] == ["0", "5", "10", "15", "20", "25"]
    assert [label for _, label in linear("", 0.0, 1.0).ticks] == ["0", "1"]


def test_arms_are_told_by_colour_and_shape() -> None:
    shapes = {marker(place) for place in range(56)}

    assert len(shapes) == 56


def test_of_a_report(eval_report: EvalReport) -> None:
    layers = layer_charts(eval_report)
    charts = [position_chart(eval_report), trade_chart(eval_report), *layers.values()]

    for svg in charts:
        assert ElementTree.fromstring(svg).tag == "svg"
    assert [len(labels(svg)) for svg in charts] == [25, 5, 150, 150]
    assert labels(charts[0])[0] == "int8, 64 to 127 tokens before: 0.000328"
    assert labels(charts[1])[3] == "int3, 3.63 bits per value, mean KL 0.193"
    assert labels(charts[2])[0].startswith("int8, layer 0: ")


def test_of_a_report_without_numbers(eval_report: EvalReport) -> None:
    arms = tuple(replace(arm, layer_errors={}) for arm in eval_report.arms)
    bare = EvalReport(eval_report.origin, arms)

    assert position_chart(bare) == trade_chart(bare) == ""
    assert layer_charts(bare) == {"keys": "", "values": ""}


def test_odd_numbers_are_left_out_or_on_the_edge(eval_report: EvalReport) -> None:
    assert eval_report.perplexity is not None
    first = eval_report.perplexity.arms["int8"]
    buckets = (Bucket(0, 1, 1, 0.0), Bucket(1, 2, 1, math.nan), Bucket(2, 4, 1, math.inf))
    odd = replace(first, buckets=buckets, kl_mean=Interval(0.0, math.nan, math.nan))
    perplexity = replace(eval_report.perplexity, arms={"int8": odd})
    arms = (replace(eval_report.arms[0], layer_errors={"0": (0.0, math.nan), "all": (1.0, 1.0)}),)
    report = replace(eval_report, perplexity=perplexity, arms=arms)

    assert labels(position_chart(report)) == ["int8, 0 to 0 tokens before: 0 (below the axis)"]
    assert len(labels(trade_chart(report))) == 1
    assert layer_charts(report)["values"] == ""
    assert labels(layer_charts(report)["keys"]) == ["int8, layer 0: 0 (below the axis)"]
    assert "nan" not in position_chart(report) + trade_chart(report)
