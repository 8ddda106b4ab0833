"""Numbers and texts as people see them."""

from __future__ import annotations

import doctest
import math
import unicodedata
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals import compare, headline, page, wording
from evals.results import Arm, Interval
from evals.wording import (
    NOTHING,
    enumeration,
    growth,
    interval,
    number,
    percent,
    plural,
    scales_of,
    size,
    times,
    visible,
)


@pytest.mark.parametrize("module", [wording, headline, page, compare])
def test_examples_in_docstrings(module: ModuleType) -> None:
    found = doctest.testmod(module)

    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain ü 東京 🚀", "plain ü 東京 🚀"),
        ("\x00\x07\t\n\r", "␀␇␉␊␍"),
        ("\x1b[2J", "␛[2J"),
        ("\x7f\x9b", "␡‹U+009B›"),
        ("\u202eabc\u2028", "‹U+202E›abc‹U+2028›"),
        ("\ud83d", "‹U+D83D›"),
        ("a\u200db", "a\u200db"),
    ],
)
def test_visible(text: str, expected: str) -> None:
    assert visible(text) == expected


@given(st.text(st.characters(codec=None)))
def test_visible_leaves_nothing_to_obey(text: str) -> None:
    shown = visible(text)

    assert shown.encode().decode() == shown
    kinds = {unicodedata.category(it) for it in shown if it not in "\u200c\u200d"}
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, NOTHING),
        (math.nan, NOTHING),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
        (0.000123456, "0.000123"),
        (0.99999, "1.000"),
        (-0.5, "-0.500"),
        (999.9, "1000"),
        (123456.0, "1.2e+05"),
    ],
)
def test_number(value: float | None, expected: str) -> None:
    assert number(value) == expected


@given(st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_percent_is_neither_nothing_nor_all(share: float) -> None:
    assert percent(share) not in ("0.0 %", "0 %", "100.0 %", "100 %")


@pytest.mark.parametrize(
    ("share", "digits", "expected"),
    [(None, 1, NOTHING), (math.nan, 1, NOTHING), (0.5, 0, "50 %"), (0.99994, 2, "99.99 %")],
)
def test_percent(share: float | None, digits: int, expected: str) -> None:
    assert percent(share, digits) == expected


def test_interval_without_ends() -> None:
    assert interval(None) == NOTHING
    assert interval(Interval(0.1, math.nan, 0.2)) == NOTHING
    assert interval(Interval(0.1, 0.0999, 0.2), growth) == "+10.51 – +22.14 %"


def test_counts_and_sizes() -> None:
    assert [plural(count, "trial") for count in (0, 1, 2000)] == [
        "0 trials",
        "1 trial",
        "2,000 trials",
    ]
    assert size(10**16) == "10,000 TB"
    assert (times(3.456), times(math.nan)) == ("3.46 x", NOTHING)
    assert growth(math.nan) == NOTHING
    assert growth(math.inf) != ""


def test_enumeration_escapes_and_shortens() -> None:
    assert enumeration([]) == "none"
    assert enumeration(["a\x1b", "b"]) == "a␛ and b"
    assert enumeration(list("abcde")) == "a, b, c and 2 others"


def test_scales_of() -> None:
    assert scales_of(Arm("a", "", "4-bit")) == "computed from what is stored"
    assert scales_of(Arm("a", "", "4-bit", "s", "base")) == "s, measured on base"
    assert scales_of(Arm("a", "", "4-bit", "s")) == "s"
