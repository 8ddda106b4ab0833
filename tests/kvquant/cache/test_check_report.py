"""What counts as a defect of the quantized cache, and what is only worth a note."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvquant.cache.check_report import Case, CheckReport, Stored, Way
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind

FINE, FAR = Way(None, 1e-6), Way(3, 0.5)


@pytest.mark.parametrize(
    ("case", "finding", "note"),
    [
        (Case("x", FINE, FINE, 0.0, 1e-5), "", ""),
        # A tie: the token differs, the logits hardly do.
        (Case("x", FINE, Way(3, 1e-6), 0.0, 1e-5), "", ""),
        (
            Case("x", FINE, FAR, 0.5, 1e-5),
            "x: logits are 0.5 away from those without a cache; rounding explains 1e-05",
            "",
        ),
        (
            Case("x", FAR, FAR, 0.0, 1e-5),
            "",
            "x: with DynamicCache, logits are 0.5 away from those without a cache; rounding "
            "explains 1e-05",
        ),
        (Case("x", FINE, Way(None, math.nan), math.nan, 1e-5), "x: logits are nan", ""),
        (Case("x", FINE, Way(error="TypeError: y"), None, 1e-5), "x: TypeError: y", ""),
        (
            Case("x", Way(error="TypeError: y"), Way(error="TypeError: y")),
            "",
            "x: the model fails with DynamicCache too: TypeError: y",
        ),
        (Case("generate()", Way(), Way()), "", ""),
        (
            Case("generate()", Way(), Way(2)),
            "generate(): new token 2 is not the one of DynamicCache",
            "",
        ),
    ],
)
def test_cases(case: Case, finding: str, note: str) -> None:
    assert case.finding.startswith(finding) and bool(case.finding) == bool(finding)
    assert case.note == note


@pytest.mark.parametrize(
    ("stored", "finding"),
    [
        (Stored("int8", "", 10, 10, key_difference=0.99, value_difference=0.1), ""),
        (Stored("int8", "", 10, 11), "int8: stores 10 bytes, the formula says 11"),
        (
            Stored("int8", "", 10, 10, key_difference=1.0),
            "int8: keys come back changed by 1 of their norm",
        ),
        (
            Stored("int8", "", 10, 10, value_difference=math.nan),
            "int8: values come back changed by nan of their norm",
        ),
        (
            Stored("none", "", 10, 10, value_difference=1e-9, rounds=False),
            "none: values come back changed by 1e-09 of their norm",
        ),
        (Stored("int8", "", error="TypeError: y"), "int8: TypeError: y"),
    ],
)
def test_schemes(stored: Stored, finding: str) -> None:
    assert stored.finding == finding


def test_a_report_collects_them() -> None:
    layers = tuple(LayerGeometry(LayerKind.SLIDING, 1, 8, 8, window) for window in (64, 8, 64))
    cases = (Case("x", FAR, FAR, 0.0, 1e-5), Case("y", FINE, FAR, 0.5, 1e-5))
    schemes = (Stored("int8", "", 1, 2), Stored("int4-kivi", "", 2, 2, has_codes=False))
    geometry = CacheGeometry("test", layers, 512)
    report = CheckReport("dir/m", ("dir/a",), geometry, "float32", 30, 4, cases, schemes)
    assert report.title == "m + a"
    assert [line.partition(":")[0] for line in report.findings] == ["y", "int8"]
    assert [line.partition(":")[0] for line in report.notes] == [
        "x",
        "int4-kivi",
        "the window of 64 tokens is not passed; raise --prompt-tokens",
    ]
    again = replace(report, schemes=tuple(Stored(n, "", error="TypeError: y") for n in "abc"))
    assert again.findings[1:] == ["a, b, c: TypeError: y"]
    values = report.to_dict()
    assert values["findings"] == report.findings and values["notes"] == report.notes
    assert (values["model"], values["adapters"]) == ("dir/m", ("dir/a",))
    assert values["geometry"]["layers"][1]["window"] == 8
    assert values["cases"][1]["quantized"]["logit_difference"] == 0.5


@pytest.mark.parametrize(
    ("stored", "note"),
    [
        (Stored("x", ""), ""),
        (
            Stored("x", "", has_codes=False),
            "x: no token is old enough to be quantized; raise --prompt-tokens",
        ),
        (Stored("x", "", remarks=("nothing ever",)), "x: nothing ever"),
        (
            Stored("x", "", has_codes=False, remarks=("not there", "nor there")),
            "x: not there. nor there. no token is old enough to be quantized; raise "
            "--prompt-tokens",
        ),
        (Stored("x", "", has_codes=False, remarks=("nothing",), error="TypeError: y"), ""),
    ],
)
def test_notes_say_what_is_not_quantized(stored: Stored, note: str) -> None:
    assert stored.note == note


@pytest.mark.parametrize(("limit", "noted"), [(None, True), (65, True), (64, False), (40, False)])
def test_a_window_that_cannot_be_passed_is_not_to_be(limit: int | None, noted: bool) -> None:
    layers = (LayerGeometry(LayerKind.SLIDING, 1, 8, 8, 64),)
    report = CheckReport("m", (), CacheGeometry("test", layers, limit), "float32", 30, 4, (), ())
    assert bool(report.notes) == noted


def test_a_latent_is_worth_a_note() -> None:
    layers = (LayerGeometry(LayerKind.LATENT, 1, 16, 4),)
    report = CheckReport("m", (), CacheGeometry("test", layers, 512), "float32", 30, 4, (), ())
    (note,) = report.notes
    assert "values its rotary part, which presets keep exact: rotary_format of" in note
