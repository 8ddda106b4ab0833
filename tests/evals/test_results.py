"""A report through its JSON and back, what is refused, and the page that documents it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals import results
from evals.report_file import read_report, report_json, write_report
from evals.results import FORMAT, VERSION, Answer, Arm, EvalReport, GateLine, Interval, Verdict
from kvquant.errors import FileFormatError

PAGE = Path(__file__).parents[2] / "docs" / "evaluation-report.md"
_JSON = {str: "string", int: "integer", float: "number", bool: "boolean", typing.Any: "any"}


def through_json(report: EvalReport) -> EvalReport:
    return EvalReport.from_dict(json.loads(report_json(report)))


def damaged(report: EvalReport, change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    values = json.loads(report_json(report))
    change(values)
    return typing.cast(dict[str, Any], values)


def test_round_trip_is_exact(eval_report: EvalReport) -> None:
    assert through_json(eval_report) == eval_report


def test_round_trip_of_a_report_with_nothing_in_it(eval_report: EvalReport) -> None:
    bare = EvalReport(eval_report.origin, ())

    assert through_json(bare) == bare


def test_round_trip_keeps_half_a_surrogate_pair(eval_report: EvalReport, tmp_path: Path) -> None:
    write_report(eval_report, tmp_path / "eval.json")

    assert (tmp_path / "eval.json").read_bytes().isascii()
    assert read_report(tmp_path / "eval.json") == eval_report
    texts = {answer.text for cell in cells(eval_report) for answer in cell.arms.values()}
    assert any("\ud83d" in text for text in texts)


def cells(report: EvalReport) -> tuple[results.Cell, ...]:
    assert report.retrieval is not None
    return report.retrieval.cells


@given(
    number=st.floats(allow_nan=False, allow_infinity=False),
    text=st.text(st.characters(codec=None)),
    name=st.text(),
)
def test_round_trip_of_any_number_and_text(number: float, text: str, name: str) -> None:
    line = GateLine(name, text, number, number, "failed", text)
    report = EvalReport(ORIGIN, (Arm(name, text, "4-bit"),), verdict=Verdict("", (line,)))

    assert through_json(report) == report


ORIGIN = results.Origin("", "", (), "", 0, "", "", 0, (), {}, {}, "", "")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_json_has_no_word_for_becomes_null_and_not_a_number(number: float) -> None:
    report = EvalReport(ORIGIN, (replace(Arm("int4", "", "4-bit"), bits_per_value=number),))

    values = json.loads(report_json(report))
    assert values["arms"][0]["bits_per_value"] is None
    assert math.isnan(through_json(report).arms[0].bits_per_value)


def test_header() -> None:
    values = EvalReport(ORIGIN, ()).to_dict()

    assert list(values)[:2] == ["format", "version"]
    assert (values["format"], values["version"]) == ("kvquant-evaluation", 1) == (FORMAT, VERSION)


@pytest.mark.parametrize("content", [[], "text", 3, None, {}, {"format": "other", "version": 1}])
def test_something_else_is_refused(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))

    with pytest.raises(FileFormatError, match=r"other\.json is no evaluation"):
        read_report(path)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused(eval_report: EvalReport, version: Any) -> None:
    values = {**eval_report.to_dict(), "version": version}

    with pytest.raises(FileFormatError, match=f"has version {version}, this kvquant reads 1"):
        EvalReport.from_dict(values)


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it.pop("origin"),
        lambda it: it.update(extra=1),
        lambda it: it.update(arms=None),
        lambda it: it.update(arms=3),
        lambda it: it.update(origin=[]),
        lambda it: it["origin"].pop("seed"),
        lambda it: it["origin"].update(seed="0"),
        lambda it: it["origin"].update(model=None),
        lambda it: it["arms"][0].update(tokens=1.5),
        lambda it: it["arms"][0].update(live_nbytes=None),
        lambda it: it["arms"][0]["layer_errors"].update({"0": [0.1]}),
        lambda it: it["arms"][0].update(foreign="no"),
        lambda it: it["arms"][0].update(bits_per_value="many"),
        lambda it: it["perplexity"]["arms"]["int8"]["kl_mean"].pop("low"),
        lambda it: it["perplexity"].update(arms=[]),
        lambda it: it["retrieval"]["cells"][0]["reference"].update(text=7),
        lambda it: it["verdict"]["lines"][0].update(status=None),
    ],
)
def test_a_damaged_one_is_refused(
    eval_report: EvalReport, change: Callable[[dict[str, Any]], object]
) -> None:
    values = damaged(eval_report, change)

    with pytest.raises(FileFormatError, match=r"eval\.json is damaged"):
        EvalReport.from_dict(values, "eval.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{}", b"[" * 100_000, b"\x89PNG"])
def test_no_json_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    path.write_bytes(content)

    with pytest.raises(FileFormatError, match=r"eval\.json is no JSON"):
        read_report(path)


def test_cut_short_is_refused(eval_report: EvalReport, tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    path.write_text(report_json(eval_report)[:-20])

    with pytest.raises(FileFormatError, match="cut short"):
        read_report(path)


@pytest.mark.parametrize("name", ["missing.json", ""])
def test_no_file_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="cannot be read"):
        read_report(tmp_path / name)


def test_writing_replaces_in_one_step(eval_report: EvalReport, tmp_path: Path) -> None:
    path = tmp_path / "new" / "eval.json"
    write_report(eval_report, path)
    write_report(EvalReport(ORIGIN, ()), path)

    assert read_report(path) == EvalReport(ORIGIN, ())
    assert [it.name for it in path.parent.iterdir()] == ["eval.json"]


def test_derived_numbers() -> None:
    arm = Arm("int4", "", "4-bit", live_nbytes=25, reference_nbytes=100)

    assert arm.ratio == 4.0
    assert math.isnan(Arm("int4", "", "4-bit").ratio)
    assert Answer("", 1.0).is_right
    assert not Answer("", 0.999).is_right


@pytest.mark.parametrize(
    ("status", "failed_checks", "passed"),
    [("passed", (), True), ("failed", (), False), ("undecided", (), False), ("passed", "a", False)],
)
def test_a_verdict_passes_only_if_all_did(status: str, failed_checks: Any, passed: bool) -> None:
    lines = (
        GateLine("a", "kl_mean", 0.1, 0.2, status, ""),
        GateLine("b", "kl_mean", 0.1, 0.2, "passed", ""),
    )
    verdict = Verdict("defaults", lines, tuple(failed_checks))

    assert verdict.passed is passed
    assert verdict.passed_by("a") is passed
    assert verdict.passed_by("b")


def json_name(kind: Any) -> str:
    """An annotation as the page calls it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = next(it for it in arguments if it is not type(None))
        return f"{json_name(inner)} or null"
    if origin is tuple:
        return f"array of {json_name(arguments[0])}"
    if origin is dict:
        return f"object of {json_name(arguments[1])}"
    return _JSON.get(kind) or kind.__name__


def records() -> Iterator[type]:
    for kind in vars(results).values():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield kind


def documented() -> dict[str, list[tuple[str, str]]]:
    """Fields and their JSON, by record, as the page lists them."""
    sections = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    pairs = zip(sections[::2], sections[1::2], strict=True)
    names = {kind.__name__ for kind in records()}
    row = re.compile(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)
    return {name: row.findall(text) for name, text in pairs if name in names}


def test_the_page_documents_every_field() -> None:
    expected = {
        kind.__name__: [
            (field.name, json_name(typing.get_type_hints(kind)[field.name]))
            for field in dataclasses.fields(kind)
        ]
        for kind in records()
    }

    assert documented() == expected


def test_the_page_names_format_and_version() -> None:
    text = PAGE.read_text()

    assert f"`format` is `{FORMAT}` and `version` is {VERSION}." in text


def test_json_name_tells_types_apart() -> None:
    assert json_name(tuple[tuple[float, float], ...]) == "array of array of number"
    assert json_name(dict[str, int | None]) == "object of integer or null"
    assert json_name(Interval) == "Interval"
