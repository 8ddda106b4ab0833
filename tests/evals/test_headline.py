"""One sentence: who passed, who did not, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from evals.headline import arm_status, complaints, headline, measured, report_status
from evals.results import Arm, Check, EvalReport, GateLine, SelfCheck, Verdict


def report_of(eval_report: EvalReport, *lines: GateLine, names: Sequence[str]) -> EvalReport:
    arms = tuple(Arm(name, "", "4-bit") for name in names)
    verdict = Verdict("defaults", lines)
    return replace(eval_report, arms=arms, verdict=verdict, self_checks=(), retrieval=None)


def line(arm: str, status: str = "passed", name: str = "kl_mean", value: float = 0.1) -> GateLine:
    return GateLine(arm, name, value, 0.05, status, f"{value} is too much (by far).")


def test_of_a_mixed_report(eval_report: EvalReport) -> None:
    assert headline(eval_report) == (
        "int8 and int4@ft-scales pass, int4@base-scales and int3 fail, hf:quanto is undecided: "
        "int3 lost 32 of the 36 needles that the unquantized cache found at 2,048 tokens."
    )
    assert report_status(eval_report) == "failed"
    assert [arm_status(eval_report, arm.name) for arm in eval_report.arms] == [
        "passed",
        "passed",
        "failed",
        "failed",
        "undecided",
    ]


@pytest.mark.parametrize(
    ("lines", "names", "expected"),
    [
        ([line("a")], ["a"], "a passes."),
        ([line("a"), line("b")], ["a", "b"], "a and b pass."),
        ([line("a"), line("b"), line("c")], ["a", "b", "c"], "All 3 arms pass, a, b and c."),
        (
            [line("a"), line("b", "failed")],
            ["a", "b"],
            "a passes, b fails: b has a mean KL of 0.100, above the limit of 0.0500.",
        ),
        (
            [line("a", "failed", "top1", 0.02)],
            ["a"],
            "a fails: a has a top-1 agreement of 2.00 %, below the limit of 5.00 %.",
        ),
        (
            [line("a", "failed", value=math.nan)],
            ["a"],
            "a fails: a, mean KL: nan is too much (by far).",
        ),
        (
            [line("a", "undecided")],
            ["a"],
            "a is undecided: a, mean KL: 0.1 is too much (by far).",
        ),
        ([line("a")], ["a", "b"], "a passes, b was not judged."),
    ],
)
def test_of_a_gate(
    eval_report: EvalReport, lines: list[GateLine], names: list[str], expected: str
) -> None:
    assert headline(report_of(eval_report, *lines, names=names)) == expected


def test_undecided_says_what_is_needed(eval_report: EvalReport) -> None:
    few = GateLine("a", "loss_rate 512", 0.1, 0.05, "undecided", "not enough trials: 3 of 59 (0)")

    assert headline(report_of(eval_report, few, names=["a"])) == (
        "a is undecided: a, loss rate of needles at 512 tokens: not enough trials: 3 of 59."
    )


def test_failed_outweighs_undecided_and_far_outweighs_near(eval_report: EvalReport) -> None:
    lines = (line("a", "undecided", value=9.0), line("b", "failed"), line("c", "failed", value=0.2))
    found = headline(report_of(eval_report, *lines, names=["a", "b", "c"]))

    assert found.startswith("b and c fail, a is undecided: c has a mean KL of 0.200")


def test_a_line_from_below_weighs_by_what_is_missing(eval_report: EvalReport) -> None:
    near = GateLine("a", "top1", 0.965, 0.97, "failed", "")
    far = GateLine("b", "top1", 0.90, 0.97, "failed", "")

    assert "b has a top-1 agreement of 90.00 %" in headline(
        report_of(eval_report, near, far, names=["a", "b"])
    )


def test_a_failed_self_check_outweighs_everything(eval_report: EvalReport) -> None:
    broken = replace(
        eval_report.self_checks[0], checks=(Check("reads", "failed", "0 % were of codes."),)
    )
    report = replace(eval_report, self_checks=(broken, *eval_report.self_checks[1:]))

    assert headline(report) == (
        "The self-check of int8 failed, so nothing measured of it counts: reads: 0 % were of codes."
    )
    assert report_status(report) == arm_status(report, "int8") == "self-check failed"
    assert headline(replace(report, verdict=None)) == headline(report)


def test_a_verdict_alone_knows_of_a_failed_self_check(eval_report: EvalReport) -> None:
    verdict = Verdict("defaults", (), ("int3", "int8"))
    report = replace(eval_report, self_checks=(), verdict=verdict)

    assert headline(report) == (
        "The self-check of int8 and int3 failed, so nothing measured of them counts."
    )


def test_without_a_gate(eval_report: EvalReport) -> None:
    report = replace(eval_report, verdict=None)

    assert headline(report) == (
        "No gate was asked for: the mean KL is 0.000410 (int8) to 0.193 (int3) nats per token; "
        "int3 lost 62 of 116 needles, the most."
    )
    assert report_status(report) == "not judged"


def test_without_anything_measured(eval_report: EvalReport) -> None:
    bare = EvalReport(eval_report.origin, eval_report.arms)
    checked = replace(bare, self_checks=eval_report.self_checks[:1])
    continued = replace(bare, continuations=eval_report.continuations)

    assert headline(bare) == "No gate was asked for: nothing was measured."
    assert headline(checked) == "No gate was asked for: the self-checks of int8 passed."
    assert headline(continued) == "No gate was asked for: 1 text continued side by side."
    assert headline(replace(bare, verdict=Verdict("defaults", ()))) == (
        "The gate had nothing to judge: nothing was measured."
    )


def test_names_are_shown_and_not_obeyed(eval_report: EvalReport) -> None:
    assert headline(report_of(eval_report, line("a\x1b"), names=["a\x1b"])) == "a␛ passes."


def test_complaints_by_weight(eval_report: EvalReport) -> None:
    found = complaints(eval_report)

    assert list(found) == ["int3", "int4@base-scales", "hf:quanto"]
    assert [it.what for it in found["int3"]] == [
        "loss rate of needles at 2,048 tokens",
        "loss rate of needles at 1,024 tokens",
        "loss rate of needles at 512 tokens",
        "mean KL",
        "99th percentile of KL",
        "change of perplexity",
    ]
    assert found["int3"][0].numbers == "up to 60.00 %, limit 5.00 %"
    assert found["int3"][3].numbers == "0.193, limit 0.0200"
    assert {it.status for it in found["hf:quanto"]} == {"undecided"}


def test_complaints_begin_with_self_checks(eval_report: EvalReport) -> None:
    failed = Check("bytes", "failed", "1 too many.")
    broken = SelfCheck("int3", (failed,), 1.0, None, 0.0, 9.0, 0.1)
    found = complaints(replace(eval_report, self_checks=(broken,)))

    assert (found["int3"][0].what, found["int3"][0].detail) == ("self-check, bytes", "1 too many")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("kl_mean", None, "–"),
        ("kl_mean", math.nan, "–"),
        ("delta_ln_ppl", 0.01, "+1.01 %"),
        ("loss_rate 512", 0.05, "5.00 %"),
        ("something_new", 0.05, "0.0500"),
    ],
)
def test_measured(name: str, value: float | None, expected: str) -> None:
    assert measured(name, value) == expected


def test_self_checks_alone_are_held_against_nothing(eval_report: EvalReport) -> None:
    verdict = Verdict("defaults", (), ())
    checked = EvalReport(
        eval_report.origin, eval_report.arms[:1], eval_report.self_checks[:1], verdict=verdict
    )
    assert headline(checked) == ("Nothing was held against a gate: the self-checks of int8 passed.")
