"""Verdicts, line by line, on reports whose numbers are set by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.gate import judge
from evals.gate_file import Gate
from evals.results import (
    Arm,
    Check,
    Continuation,
    Divergence,
    EvalReport,
    GateLine,
    Interval,
    Losses,
    Origin,
    Perplexity,
    Retrieval,
    SelfCheck,
    Verdict,
)
from evals.statistics import Z, loss_rate_upper, mcnemar_exact
from kvquant.errors import InputError

NAN = math.nan
ORIGIN = Origin("m", "m", (), "f", 1, "float32", "cpu", 0, (1024,), {}, {}, "kvquant", "now")
GOOD = Divergence(
    nll=2.0,
    delta_ln_ppl=Interval(0.002, 0.001, 0.003),
    kl_mean=Interval(0.004, 0.003, 0.005),
    kl_median=0.001,
    kl_p99=0.05,
    kl_max=1.0,
    buckets=(),
    kl_slope=Interval(0.0005, 0.0001, 0.0009),
    top1=Interval(0.98, 0.975, 0.985),
    top1_confident=Interval(0.999, 0.997, 0.9995),
    confident_tokens=5000,
    delta_p_rms=0.01,
)
"""Well within the 4-bit defaults."""


def lost(arm: str, losses: int, trials: int, gains: int = 0, **where: Any) -> Losses:
    return Losses(
        arm=arm,
        task=where.get("task", "single"),
        length=where.get("length", 1024),
        cells=trials + gains,
        trials=trials,
        losses=losses,
        gains=gains,
        loss_rate_upper=loss_rate_upper(losses, trials),
        p_value=mcnemar_exact(losses, gains),
    )


def report(
    divergences: dict[str, Divergence] | None = None,
    losses: Iterable[Losses] = (),
    agreement: dict[str, list[float]] | None = None,
    documents: int = 8,
    checks: tuple[SelfCheck, ...] = (),
    scheme_class: str = "4-bit",
) -> EvalReport:
    """A report of whatever arms are in what is given."""
    losses, agreement = tuple(losses), agreement or {}
    names = dict.fromkeys([*(divergences or {}), *(it.arm for it in losses), *agreement])
    continued = [
        Continuation(8, 4, "", {}, {}, dict(zip(agreement, shares, strict=True)))
        for shares in zip(*agreement.values(), strict=True)
    ]
    return EvalReport(
        ORIGIN,
        tuple(Arm(name, "", scheme_class) for name in names),
        checks,
        Perplexity(documents, 2048, 256, 64, 9999, 2.0, {}, divergences) if divergences else None,
        Retrieval("", "", False, 32, (), losses) if losses else None,
        tuple(continued),
    )


def line(verdict: Verdict, name: str, arm: str = "int4") -> GateLine:
    found = [it for it in verdict.lines if (it.arm, it.name) == (arm, name)]
    assert len(found) == 1, verdict.lines
    return found[0]


def judged(name: str, documents: int = 8, gate: Gate | None = None, **changes: Any) -> GateLine:
    """That line of an arm that is good but for the changes."""
    divergence = replace(GOOD, **changes)
    return line(judge(report({"int4": divergence}, documents=documents), gate or Gate()), name)


# Verdicts


def test_good_arm_passes() -> None:
    verdict = judge(report({"int4": GOOD}, [lost("int4", 0, 60)]), Gate())
    assert [(it.name, it.status) for it in verdict.lines] == [
        ("delta_ln_ppl", "passed"),
        ("kl_mean", "passed"),
        ("kl_p99", "passed"),
        ("top1", "passed"),
        ("top1_confident", "passed"),
        ("delta_p_rms", "passed"),
        ("kl_slope", "passed"),
        ("loss_rate 1024", "passed"),
        ("mcnemar_p 1024 single", "passed"),
    ]
    assert verdict.passed and verdict.passed_by("int4")
    assert verdict.gate == "defaults"
    assert all("\n" not in it.detail and it.detail for it in verdict.lines)


def test_classes_have_their_own_thresholds() -> None:
    for scheme_class, passes in (
        ("exact", False),
        ("8-bit", False),
        ("4-bit", True),
        ("3-bit", True),
    ):
        found = report({"x": replace(GOOD, kl_mean=Interval(0.008, 0.007, 0.009))})
        found = replace(found, arms=(Arm("x", "", scheme_class),))
        assert judge(found, Gate()).passed is passes


def test_one_bad_arm_fails_the_run() -> None:
    bad = replace(GOOD, kl_p99=0.2)
    verdict = judge(report({"int4": GOOD, "int4-kivi": bad}), Gate())
    assert not verdict.passed
    assert verdict.passed_by("int4") and not verdict.passed_by("int4-kivi")
    assert [it.name for it in verdict.lines if it.status != "passed"] == ["kl_p99"]


def test_failed_self_check_is_no_pass() -> None:
    bad, fine = Check("poison", "failed", ""), Check("bytes", "passed", "")
    noted = Check("mass", "noted", "")
    checks = (
        SelfCheck("int8", (fine, noted), 1.0, None, 0.0, 1.0, 0.0),
        SelfCheck("int4", (fine, bad, bad), 0.0, None, 0.0, 0.0, 0.0),
    )
    verdict = judge(report({"int8": GOOD, "int4": GOOD}, checks=checks), Gate())
    assert verdict.failed_checks == ("int4",)
    assert not verdict.passed
    assert all(it.status == "passed" for it in verdict.lines)


def test_gate_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="has thresholds for int5"):
        judge(report({"int4": GOOD}), Gate("g.toml", arms={"int5": {"kl_mean": 0.1}}))


def test_nothing_measured_nothing_judged() -> None:
    found = replace(report({"int4": GOOD}), perplexity=None)
    assert judge(found, Gate()).lines == ()


# Proofs


@pytest.mark.parametrize(
    ("name", "interval", "status"),
    [
        ("delta_ln_ppl", (0.005, 0.0, 0.00995), "passed"),
        ("delta_ln_ppl", (0.005, 0.0, 0.00996), "undecided"),
        ("delta_ln_ppl", (0.00995, 0.00995, 0.00995), "passed"),
        ("delta_ln_ppl", (0.00996, -1.0, 1.0), "failed"),
        ("delta_ln_ppl", (-0.5, -0.6, -0.4), "passed"),
        ("kl_mean", (0.004, 0.0, 0.01), "passed"),
        ("kl_mean", (0.004, 0.0, 0.0101), "undecided"),
        ("kl_mean", (0.0101, 0.005, 0.02), "failed"),
        ("top1", (0.98, 0.97, 0.99), "passed"),
        ("top1", (0.98, 0.969, 0.99), "undecided"),
        ("top1", (0.969, 0.95, 0.99), "failed"),
        ("top1", (1.0, 0.97, 1.0), "passed"),
        ("top1_confident", (0.999, 0.995, 1.0), "passed"),
        ("top1_confident", (1.0, 0.994, 1.0), "undecided"),
        ("top1_confident", (0.994, 0.99, 0.999), "failed"),
    ],
)
def test_whole_interval_has_to_be_within(
    name: str, interval: tuple[float, float, float], status: str
) -> None:
    found = judged(name, **{name: Interval(*interval)})
    assert found.status == status
    assert found.value == interval[0]
    assert found.limit == Gate().limits("int4", "4-bit")[name]


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("kl_p99", 0.1, "passed"),
        ("kl_p99", 0.101, "failed"),
        ("delta_p_rms", 0.02, "passed"),
        ("delta_p_rms", 0.0201, "failed"),
    ],
)
def test_numbers_without_interval_count_as_they_are(name: str, value: float, status: str) -> None:
    found = judged(name, **{name: value})
    assert (found.value, found.status) == (value, status)
    assert " to " not in found.detail


@pytest.mark.parametrize("value", [math.inf, -math.inf, NAN])
@pytest.mark.parametrize("name", ["delta_ln_ppl", "kl_mean", "kl_slope"])
def test_broken_predictions_fail(name: str, value: float) -> None:
    found = judged(name, **{name: Interval(value, NAN, NAN)})
    assert found.status == "failed"
    assert "predictions are NaN or infinite somewhere" in found.detail


@pytest.mark.parametrize("name", ["kl_p99", "delta_p_rms"])
def test_broken_percentiles_fail(name: str) -> None:
    assert judged(name, **{name: NAN}).status == "failed"


@pytest.mark.parametrize("name", ["delta_ln_ppl", "kl_mean", "kl_slope"])
def test_single_document_is_no_proof(name: str) -> None:
    found = judged(name, documents=1, **{name: Interval(0.0001, NAN, NAN)})
    assert found.status == "undecided"
    assert "a single document has no interval, evaluate 16 or more" in found.detail


def test_single_document_far_beyond_fails() -> None:
    assert judged("kl_mean", documents=1, kl_mean=Interval(1.0, NAN, NAN)).status == "failed"


def test_details_say_number_interval_and_limit() -> None:
    assert judged("kl_mean").detail == "0.00400 (0.00300 to 0.00500), at most 0.0100"
    assert judged("top1").detail == "98.00 % (97.50 % to 98.50 %), at least 97.00 %"
    assert judged("delta_ln_ppl").detail == "+0.20 % (+0.10 % to +0.30 %), at most +1.00 %"
    failed = judged("kl_mean", kl_mean=Interval(0.02, 0.01, 0.03)).detail
    assert failed.startswith("0.0200 (0.0100 to 0.0300), at most 0.0100: ")
    assert "more bits" in failed


def test_undecided_says_how_much_text_decides() -> None:
    # An interval of 0.004 has to shrink to 0.002, which takes four times as many documents.
    found = judged("kl_mean", kl_mean=Interval(0.008, 0.005, 0.012))
    assert "not enough text, about 32 documents instead of 8 decide" in found.detail
    # The lower end of Wilson's interval is 0.96 after 0.96 x 0.04 / 0.02^2 = 96 Z^2 tokens, and
    # 0.97 after 0.97 x 0.03 / 0.01^2 = 291 Z^2.
    found = judged("top1", top1=Interval(0.98, 0.96, 0.99))
    assert "about 25 documents instead of 8 decide" in found.detail


@pytest.mark.parametrize("value", [0.01, 0.00999])
def test_too_close_to_decide(value: float) -> None:
    found = judged("kl_mean", kl_mean=Interval(value, 0.005, 0.02))
    assert found.status == "undecided"
    assert "too close to the limit for any text to decide" in found.detail


def test_share_at_its_limit() -> None:
    found = judged("top1", top1=Interval(0.97, 0.96, 0.98))
    assert found.status == "undecided"
    assert "too close to the limit" in found.detail


@given(st.floats(0, 0.02), st.floats(0, 0.02), st.floats(0, 0.02))
def test_narrower_intervals_never_undo_a_pass(value: float, below: float, above: float) -> None:
    wide = judged("kl_mean", kl_mean=Interval(value, value - below, value + above))
    narrow = judged("kl_mean", kl_mean=Interval(value, value - below / 2, value + above / 2))
    assert (wide.status, narrow.status) in {
        ("passed", "passed"),
        ("undecided", "undecided"),
        ("undecided", "passed"),
        ("failed", "failed"),
    }


# Lost answers


@pytest.mark.parametrize(
    ("losses", "trials", "status"),
    [
        (0, 59, "passed"),
        (0, 58, "undecided"),
        (1, 93, "passed"),
        (1, 92, "undecided"),
        (1, 20, "undecided"),
        (1, 19, "failed"),
        (6, 100, "failed"),
        (5, 100, "undecided"),
    ],
)
def test_loss_rate(losses: int, trials: int, status: str) -> None:
    found = line(judge(report(losses=[lost("int4", losses, trials)]), Gate()), "loss_rate 1024")
    assert found.status == status
    assert found.value == loss_rate_upper(losses, trials)
    assert found.limit == 0.05


def test_too_few_trials_say_how_many_are_needed() -> None:
    verdict = judge(report(losses=[lost("int4", 0, 15)]), Gate())
    assert line(verdict, "loss_rate 1024").detail.startswith(
        "not enough trials: 15 of 59 needed to show at most 5.00 % (0 of 15 right answers lost"
    )
    assert not verdict.passed
    one = judge(report(losses=[lost("int4", 1, 40)]), Gate())
    assert "40 of 93 needed" in line(one, "loss_rate 1024").detail


def test_lost_answers_say_how_many() -> None:
    detail = line(judge(report(losses=[lost("int4", 3, 20)]), Gate()), "loss_rate 1024").detail
    assert detail.startswith("3 of 20 right answers lost, 15.00 %, at most 5.00 %: ")


def test_tasks_of_a_length_are_pooled_and_lengths_are_not() -> None:
    losses = [
        lost("int4", 0, 30, task="single", length=4096),
        lost("int4", 0, 30, task="multikey", length=4096),
        lost("int4", 0, 58, task="single", length=512),
        lost("int8", 30, 30, task="single", length=4096),
    ]
    verdict = judge(report(losses=losses), Gate())
    assert [it.name for it in verdict.lines if it.name.startswith("loss")] == [
        "loss_rate 512",
        "loss_rate 4096",
        "loss_rate 4096",
    ]
    assert line(verdict, "loss_rate 4096").status == "passed"
    assert line(verdict, "loss_rate 512").status == "undecided"
    assert line(verdict, "loss_rate 4096", "int8").status == "failed"


def test_reference_that_knows_nothing_proves_nothing() -> None:
    found = line(judge(report(losses=[lost("int4", 0, 0)]), Gate()), "loss_rate 1024")
    assert found.status == "undecided"
    assert "the unquantized cache gives no right answer" in found.detail


# Alarms


def slope(value: float, error: float) -> Interval:
    return Interval(value, value - Z * error, value + Z * error)


def test_slope_raises_an_alarm_once_it_is_significant() -> None:
    # Two-sided: 1.96 standard errors beyond the limit of 0.001.
    assert judged("kl_slope", kl_slope=slope(0.00295, 0.001)).status == "passed"
    found = judged("kl_slope", kl_slope=slope(0.00297, 0.001))
    assert found.status == "failed"
    assert found.value == 0.00297
    assert "significantly beyond 0.00100: p = 0.0488; evaluate the longest context" in found.detail


def test_slope_that_is_certain() -> None:
    assert judged("kl_slope", kl_slope=slope(0.00101, 0.0)).status == "failed"
    assert judged("kl_slope", kl_slope=slope(0.001, 0.0)).status == "passed"
    assert judged("kl_slope", kl_slope=slope(-0.1, 0.0001)).status == "passed"


def test_slopes_of_many_arms_are_corrected() -> None:
    # Each of them p = 0.0027, three standard errors.
    steep = replace(GOOD, kl_slope=slope(0.004, 0.001))
    arms = {f"arm{i}": replace(GOOD, kl_slope=slope(0.0, 0.001)) for i in range(17)}
    failed = judge(report({"int4": steep, **arms}), Gate())
    assert line(failed, "kl_slope").status == "failed"
    assert "p = 0.0486 among 18 alarms" in line(failed, "kl_slope").detail
    arms["arm18"] = GOOD
    assert line(judge(report({"int4": steep, **arms}), Gate()), "kl_slope").status == "passed"


def test_mcnemar_raises_an_alarm() -> None:
    verdict = judge(report(losses=[lost("int4", 5, 200)]), Gate())
    found = line(verdict, "mcnemar_p 1024 single")
    assert (found.value, found.limit, found.status) == (1 / 32, 0.05, "failed")
    assert found.detail.startswith("5 answers lost, 0 gained: no accident, p = 0.0312; ")
    assert not verdict.passed

    found = line(judge(report(losses=[lost("int4", 4, 200)]), Gate()), "mcnemar_p 1024 single")
    assert (found.value, found.status) == (1 / 16, "passed")
    gained = line(judge(report(losses=[lost("int4", 5, 200, 5)]), Gate()), "mcnemar_p 1024 single")
    assert gained.status == "passed"


def test_alarms_of_all_kinds_are_corrected_together() -> None:
    losses = [
        lost("int4", 6, 200),
        lost("int4", 0, 200, task="multikey"),
        lost("int4", 0, 200, length=4096),
    ]
    p_value = line(judge(report(losses=losses), Gate()), "mcnemar_p 1024 single").value
    assert p_value == pytest.approx(3 / 64)
    verdict = judge(report({"int4": GOOD}, losses), Gate())
    assert line(verdict, "mcnemar_p 1024 single").value == pytest.approx(4 / 64)
    assert line(verdict, "mcnemar_p 1024 single").status == "passed"


def test_alarms_without_a_p_value_do_not_count() -> None:
    single = replace(GOOD, kl_slope=Interval(0.1, NAN, NAN))
    verdict = judge(report({"int4": single}, [lost("int4", 5, 200)]), Gate())
    assert line(verdict, "mcnemar_p 1024 single").value == 1 / 32


def test_significance_of_the_gate() -> None:
    verdict = judge(report(losses=[lost("int4", 5, 200)]), Gate(significance=0.01))
    found = line(verdict, "mcnemar_p 1024 single")
    assert (found.limit, found.status) == (0.01, "passed")
    steep = {"kl_slope": slope(0.00297, 0.001)}
    assert judged("kl_slope", gate=Gate(significance=0.01), **steep).status == "passed"


# What was not measured


def test_what_is_switched_off_has_no_line_and_raises_no_alarm() -> None:
    gate = Gate("g.toml", classes={"4-bit": {"kl_slope": None, "loss_rate": None, "top1": None}})
    steep = replace(GOOD, kl_slope=slope(0.1, 0.001), top1=Interval(0.0, 0.0, 0.0))
    verdict = judge(report({"int4": steep}, [lost("int4", 5, 200)]), gate)
    names = {it.name for it in verdict.lines}
    assert not names & {"kl_slope", "loss_rate 1024", "top1"}
    assert line(verdict, "mcnemar_p 1024 single").value == 1 / 32


def test_numbers_that_there_are_none_of_have_no_line() -> None:
    short = replace(GOOD, kl_slope=None, top1_confident=None)
    names = {it.name for it in judge(report({"int4": short}), Gate()).lines}
    assert names == {"delta_ln_ppl", "kl_mean", "kl_p99", "top1", "delta_p_rms"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("kl_mean", "no text was scored"),
        ("kl_slope", "no text was scored"),
        ("top1_confident", "no text was scored"),
        ("loss_rate", "no needle was looked for"),
        ("agreement", "no text was continued"),
    ],
)
def test_what_the_gate_file_names_has_to_be_measured(name: str, reason: str) -> None:
    gate = Gate("g.toml", arms={"int4": {name: 0.5}})
    verdict = judge(replace(report({"int4": GOOD}), perplexity=None), gate)
    assert verdict.lines == (
        GateLine(
            "int4",
            name,
            None,
            0.5,
            "undecided",
            f"g.toml names it, but {reason}: measure it, or take it out of the file",
        ),
    )
    assert not verdict.passed


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("kl_slope", "no document is long enough to see the KL grow"),
        ("top1_confident", "the unquantized cache is confident nowhere"),
    ],
)
def test_named_numbers_that_there_are_none_of(name: str, reason: str) -> None:
    gate = Gate("g.toml", classes={"4-bit": {name: 0.5}})
    found = judged(name, gate=gate, **{name: None})
    assert found.status == "undecided"
    assert reason in found.detail


def test_only_arms_of_the_class_that_is_named() -> None:
    gate = Gate("g.toml", classes={"3-bit": {"loss_rate": 0.1}})
    assert judge(report({"int4": GOOD}), gate).passed
    assert not judge(report({"int4": GOOD}, scheme_class="3-bit"), gate).passed


# Continuations


def test_agreement_has_no_default_limit() -> None:
    assert judge(report(agreement={"int4": [0.0, 0.1]}), Gate()).lines == ()


@pytest.mark.parametrize(("limit", "status"), [(0.75, "passed"), (0.76, "failed")])
def test_agreement_is_the_mean_of_all_continuations(limit: float, status: str) -> None:
    gate = Gate("g.toml", arms={"int4": {"agreement": limit}})
    verdict = judge(report(agreement={"int4": [0.5, 1.0], "int8": [0.0, 0.0]}), gate)
    found = line(verdict, "agreement")
    assert (found.value, found.limit, found.status) == (0.75, limit, status)
    assert "75.00 %, at least" in found.detail and "in 2 continuations" in found.detail
    assert len(verdict.lines) == 1


def test_a_report_read_back_is_judged_alike() -> None:
    found = report(
        {"int4": replace(GOOD, kl_mean=Interval(0.001, NAN, NAN)), "int8": GOOD},
        [lost("int4", 1, 20), lost("int8", 0, 100)],
        {"int4": [0.5], "int8": [1.0]},
    )
    gate = Gate("g.toml", classes={"4-bit": {"agreement": 0.9}})
    again = EvalReport.from_dict(found.to_dict())
    assert judge(again, gate) == judge(found, gate)
