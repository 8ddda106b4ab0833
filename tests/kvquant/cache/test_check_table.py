"""The table of a check says what is wrong, and where."""

from __future__ import annotations

import math

from rich.console import Console

from kvquant.cache.check_report import Case, CheckReport, Stored, Way
from kvquant.cache.check_table import check_table
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind

FINE = Way(None, 1.234e-6)
GEOMETRY = CacheGeometry("llama", (LayerGeometry(LayerKind.FULL, 1, 8, 8),), 512)
INT8 = Stored("int8", "", 12_345, 12_345, 8.25, 1.94, 0.0123, 0.0234)


def shown(*parts: Case | Stored) -> str:
    cases = tuple(part for part in parts if isinstance(part, Case))
    schemes = tuple(part for part in parts if isinstance(part, Stored))
    report = CheckReport(
        "dir/my-model", ("dir/my-lora",), GEOMETRY, "float32", 30, 4, cases, schemes
    )
    console = Console(width=100)
    with console.capture() as capture:
        console.print(check_table(report))
    return capture.get()


def line(text: str, beginning: str) -> str:
    """The row that begins so, with single spaces."""
    (found,) = [row for row in text.splitlines() if row.strip().startswith(beginning)]
    return " ".join(found.split())


def test_all_is_well() -> None:
    text = shown(Case("one text", FINE, FINE, 0.0, 1e-5), INT8)
    assert (
        "my-model + my-lora: llama cache: 1 x full, 1 KV head of 8; 512 positions; float32" in text
    )
    assert line(text, "one text") == "one text same tokens 1.2e-06 same tokens 1.2e-06 ok"
    assert line(text, "int8") == "int8 12,345 12,345 8.25 1.94 x 1.23% 2.34% ok"
    assert text.rstrip().splitlines()[-1].startswith("exact: ")


def test_what_is_wrong_is_said_last() -> None:
    text = shown(
        Case("one text", FINE, Way(3, 0.5), 0.5, 1e-5),
        Case("generate()", Way(), Way(error="TypeError: x")),
        Stored("int8", "", 10, 11, 8.0, 2.0, math.nan, 0.0),
        Stored("int4", "", error="ValueError: y"),
    )
    assert line(text, "one text") == "one text same tokens 1.2e-06 token 3 differs 5.0e-01 differs"
    assert line(text, "generate()") == "generate() same tokens fails differs"
    assert line(text, "int4") == "int4 fails differs"
    assert "exact" not in text
    last = text.rstrip().splitlines()[-4:]
    assert [row.split(":")[:2] for row in last] == [
        ["differs", " one text"],
        ["differs", " generate()"],
        ["differs", " int8"],
        ["differs", " int4"],
    ]


def test_notes_are_shown() -> None:
    text = shown(Stored("int4-kivi", "", 10, 10, 32.0, 0.5, has_codes=False))
    assert line(text, "int4-kivi").endswith("see note")
    assert "note: int4-kivi: no token is old enough" in text
