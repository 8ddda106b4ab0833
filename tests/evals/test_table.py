"""The terminal's table: a row for each arm, what failed, and that it fits 100 columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from evals.results import Check, EvalReport
from evals.table import report_table, show


def printed(table: RenderableType, width: int = 100) -> str:
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def row(text: str, begin: str) -> str:
    """The row of the table that begins so."""
    lines = text[text.index(" arm ") :].splitlines()
    return next(joined(line) for line in lines if line.strip().startswith(begin))


def joined(text: str) -> str:
    return " ".join(text.split())


def test_rows(eval_report: EvalReport) -> None:
    text = printed(report_table(eval_report))

    assert row(text, "arm ") == "arm bits ratio ppl Δ ppl KL mean KL p99 top-1 needles verdict"
    assert row(text, "int8 ") == "int8 8.25 1.94x 16.7 +0.04% 0.000410 0.00385 99.1% 116/116 passed"
    assert row(text, "0.00036") == "0.00036–0.00048"
    assert row(text, "int3 ").endswith(" 54/116 failed")
    assert row(text, "hf:quanto ").endswith(" 116/116 undecided")


def test_begins_with_the_verdict_and_ends_with_the_files(eval_report: EvalReport) -> None:
    files = [Path("out/eval.json"), Path("out/eval.html")]
    lines = printed(report_table(eval_report, files)).splitlines()

    assert lines[0].startswith("int8 and int4@ft-scales pass, int4@base-scales and int3 fail")
    assert lines[-2:] == ["written: out/eval.json", "written: out/eval.html"]


def test_fits_into_100_columns(eval_report: EvalReport) -> None:
    widths = [len(line) for line in printed(report_table(eval_report), 400).splitlines()]
    table = [line for line in printed(report_table(eval_report)).splitlines() if "16.7" in line]

    assert max(widths) > 100
    assert "…" not in "".join(table)
    assert max(len(line) for line in printed(report_table(eval_report)).splitlines()) <= 100


def test_every_line_that_failed_is_there(eval_report: EvalReport) -> None:
    text = joined(printed(report_table(eval_report)))

    assert (
        "failed: int3, loss rate of needles at 2,048 tokens: 32 of 36 right answers lost, 88.89%"
    ) in text
    assert "failed: loss rate of needles at 512 tokens: up to 60.00 %, limit 5.00 %" in text
    assert "failed: change of perplexity: +18.97 %, limit +2.00 %" in text
    assert "undecided: hf:quanto, loss rate of needles at 512 tokens: not enough trials" in text
    assert text.count("failed: ") == 11
    assert text.count("undecided: ") == 4  # one of them in the verdict


def test_foreign_scales_stand_out(eval_report: EvalReport) -> None:
    text = joined(printed(report_table(eval_report)))

    assert (
        "scales scales/base-scales.safetensors, measured on SmolLM2-135M-Instruct, 7f3a91c2d4e5, "
        "which is another model"
    ) in text
    assert text.count("which is another model") == 1


def test_a_failed_self_check_is_no_result(eval_report: EvalReport) -> None:
    failed = Check("reads", "failed", "0 % of the key reads were of codes.")
    broken = replace(eval_report.self_checks[0], checks=(failed,))
    text = printed(report_table(replace(eval_report, self_checks=(broken,))))

    assert row(text, "int8 ").endswith(" invalid")
    assert "failed: int8, self-check, reads: 0 % of the key reads were of codes" in text
    assert "invalid: its self-check failed" in joined(text)


def test_parts_that_were_not_asked_for(eval_report: EvalReport) -> None:
    bare = EvalReport(eval_report.origin, eval_report.arms)
    text = printed(report_table(bare))

    assert row(text, "arm ") == "arm bits ratio verdict"
    assert row(text, "int8 ") == "int8 8.25 1.94x –"
    assert "KL" not in text.partition("No gate was asked for")[2]


def test_a_self_check_alone_is_shown_line_by_line(eval_report: EvalReport) -> None:
    reads = Check("reads", "passed", "82.9% of the keys read are codes")
    broken = Check("bytes", "failed", "8 bytes held, 7 by the formula")
    checks = (replace(eval_report.self_checks[0], checks=(reads, broken)),)
    text = printed(report_table(EvalReport(eval_report.origin, eval_report.arms, checks)))

    assert "passed: int8, reads: 82.9% of the keys read are codes" in text
    assert text.count("failed: int8") == 1
    assert "82.9%" not in printed(report_table(replace(eval_report, self_checks=checks)))


def test_an_arm_without_numbers_has_dashes(eval_report: EvalReport) -> None:
    assert eval_report.perplexity is not None
    perplexity = replace(eval_report.perplexity, arms={})
    text = printed(report_table(replace(eval_report, perplexity=perplexity)))

    assert row(text, "int8 ") == "int8 8.25 1.94x – – – – – 116/116 passed"


def test_text_is_neither_markup_nor_control(eval_report: EvalReport) -> None:
    arms = (replace(eval_report.arms[0], name="[red]\x1b[31m\ud83d", scheme="[/x]"),)
    text = printed(report_table(EvalReport(eval_report.origin, arms)), 200)

    assert "[red]␛[31m‹U+D83D›: [/x]" in text


def test_show_into_a_pipe(eval_report: EvalReport, capsys: pytest.CaptureFixture[str]) -> None:
    show(eval_report, [Path("eval.json")])
    text = capsys.readouterr().out

    assert text.splitlines()[-1] == "written: eval.json"
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
