"""The verdict in one sentence: who passed, who did not, and the one reason that matters most.

Also what did not pass line by line, and what numbers of the gate are called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .heat import Tally, arms_of, needles_kept
from .results import EvalReport, GateLine
from .wording import NOTHING, enumeration, growth, number, percent, plural, visible

PASSED, FAILED, UNDECIDED = "passed", "failed", "undecided"
BROKEN = "self-check failed"
UNJUDGED = "not judged"

_STATUSES = (BROKEN, FAILED, UNDECIDED, PASSED)
"""From the worst to the best."""

_MEASURES = {
    "delta_ln_ppl": "change of perplexity",
    "kl_mean": "mean KL",
    "kl_p99": "99th percentile of KL",
    "kl_slope": "KL per doubling of the context",
    "top1": "top-1 agreement",
    "top1_confident": "top-1 agreement where confident",
    "delta_p_rms": "RMS of Δp",
    "loss_rate": "loss rate of needles",
    "mcnemar_p": "McNemar's p of needles",
    "agreement": "agreement of continuations",
}
_SHARES = ("top1", "top1_confident", "delta_p_rms", "loss_rate", "agreement")
_AT_LEAST = ("top1", "top1_confident", "agreement", "mcnemar_p")
_NEEDLES = ("loss_rate", "mcnemar_p")


@dataclass(frozen=True)
class Complaint:
    """Something about an arm that is not as it has to be.

    Attributes:
        arm: Its name.
        status: ``failed`` or ``undecided``.
        what: The number or the self-check, in words.
        detail: What is wrong with it, and what to do.
        numbers: Number and limit, where there are any: ``0.193, limit 0.02``.
    """

    arm: str
    status: str
    what: str
    detail: str
    numbers: str = ""


def arm_status(report: EvalReport, arm: str) -> str:
    """What became of one arm: a failed self-check outweighs all lines of the gate."""
    verdict = report.verdict
    if _failed_checks(report, arm) or (verdict and arm in verdict.failed_checks):
        return BROKEN
    statuses = {line.status for line in verdict.lines if line.arm == arm} if verdict else set()
    return next((status for status in _STATUSES if status in statuses), UNJUDGED)


def report_status(report: EvalReport) -> str:
    """The same of a whole report: the worst of its arms."""
    statuses = {arm_status(report, arm.name) for arm in report.arms}
    return next((status for status in _STATUSES if status in statuses), UNJUDGED)


def complaints(report: EvalReport) -> dict[str, list[Complaint]]:
    """All that did not pass, by arm; what weighs most is first among an arm's and among arms."""
    found: dict[str, list[Complaint]] = {}
    for self_check in report.self_checks:
        for check in self_check.failures:
            what, detail = f"self-check, {check.name}", _clause(check.detail)
            complaint = Complaint(self_check.arm, FAILED, what, detail)
            found.setdefault(self_check.arm, []).append(complaint)
    for line in _lines_by_weight(report):
        numbers = f"{measured(line.name, line.value)}, limit {measured(line.name, line.limit)}"
        if line.name.startswith("loss_rate"):
            numbers = f"up to {numbers}"
        what, detail = measure(line.name), _clause(line.detail)
        complaint = Complaint(line.arm, line.status, what, detail, numbers)
        found.setdefault(line.arm, []).append(complaint)
    return found


def _lines_by_weight(report: EvalReport) -> list[GateLine]:
    """Lines of the gate that did not pass."""
    lines = report.verdict.lines if report.verdict else ()
    found = [line for line in lines if line.status != PASSED]
    return sorted(found, key=lambda line: _weight(report, line), reverse=True)


def headline(report: EvalReport) -> str:
    """The verdict in one sentence; without a gate, what was measured."""
    named = {
        status: [arm.name for arm in report.arms if arm_status(report, arm.name) == status]
        for status in (*_STATUSES, UNJUDGED)
    }
    if named[BROKEN]:
        return _broken(report, named[BROKEN])
    if report.verdict is None:
        return f"No gate was asked for: {_measured(report)}."
    if len(named[UNJUDGED]) == len(report.arms):
        if report.self_checks and not (report.perplexity or report.retrieval):
            return f"Nothing was held against a gate: {_measured(report)}."
        return f"The gate had nothing to judge: {_measured(report)}."
    reason = next((f": {_reason(report, line)}" for line in _lines_by_weight(report)), "")
    return f"{', '.join(_outcomes(named))}{reason}."


def measure(name: str) -> str:
    """A gate line's name in words.

    >>> measure("loss_rate 2048"), measure("mcnemar_p 512 single")
    ('loss rate of needles at 2,048 tokens', "McNemar's p of needles at 512 tokens, single")
    """
    first, *rest = name.split() or [name]
    words = _MEASURES.get(first, first.replace("_", " "))
    if rest and rest[0].isdecimal():
        words += f" at {int(rest.pop(0)):,} tokens"
    return ", ".join([words, *rest])


def measured(name: str, value: float | None) -> str:
    """A gate line's number or limit, in the unit that suits it."""
    if value is None or math.isnan(value):
        return NOTHING
    first = _first(name)
    if first == "delta_ln_ppl":
        return growth(value)
    return percent(value, 2) if first in _SHARES else number(value)


def _first(name: str) -> str:
    """A line's name without its length and task."""
    return name.partition(" ")[0]


def _failed_checks(report: EvalReport, arm: str) -> bool:
    return any(check.arm == arm and check.failures for check in report.self_checks)


def _outcomes(named: dict[str, list[str]]) -> Iterator[str]:
    """Who passed, who failed, who is undecided."""
    others = named[FAILED] + named[UNDECIDED] + named[UNJUDGED]
    if len(named[PASSED]) > 2 and not others:
        yield f"All {len(named[PASSED])} arms pass, {enumeration(named[PASSED])}"
        return
    for status, one, many in (
        (PASSED, "passes", "pass"),
        (FAILED, "fails", "fail"),
        (UNDECIDED, "is undecided", "are undecided"),
        (UNJUDGED, "was not judged", "were not judged"),
    ):
        if named[status]:
            yield f"{enumeration(named[status])} {_verb(named[status], one, many)}"


def _verb(names: Sequence[str], one: str, many: str) -> str:
    return one if len(names) == 1 else many


def _broken(report: EvalReport, names: list[str]) -> str:
    """Nothing measured of a cache counts that the harness may not have read."""
    found_wrong = complaints(report)
    first = next((found_wrong[name][0] for name in names if name in found_wrong), None)
    whose = _verb(names, "it", "them")
    found = f"The self-check of {enumeration(names)} failed, so nothing measured of {whose} counts"
    if first is None:
        return f"{found}."
    what = first.what.removeprefix("self-check, ")
    where = f"{visible(first.arm)}, " if len(names) > 1 else ""
    return f"{found}: {where}{what}: {first.detail}."


def _clause(detail: str) -> str:
    """A detail as the end of a sentence of ours."""
    return visible(detail).strip().rstrip(".")


def _weight(report: EvalReport, line: GateLine) -> tuple[bool, bool, float]:
    """Failed before undecided, lost needles before other numbers, then by how much."""
    tally = _needles_of(report, line)
    weight = tally.share_lost if tally else _excess(line)
    return line.status == FAILED, tally is not None, weight


def _needles_of(report: EvalReport, line: GateLine) -> Tally | None:
    """The trials that a line about needles is about."""
    first, *rest = line.name.split() or [line.name]
    if first not in _NEEDLES or report.retrieval is None or not rest or not rest[0].isdecimal():
        return None
    length, task = int(rest[0]), rest[1] if len(rest) > 1 else None
    found = [
        it
        for it in report.retrieval.losses
        if (it.arm, it.length) == (line.arm, length) and task in (None, it.task)
    ]
    lost, trials = sum(it.losses for it in found), sum(it.trials for it in found)
    return Tally(kept=trials - lost, lost=lost)


def _excess(line: GateLine) -> float:
    """How many times its limit a number is, or the other way round where it has to be more."""
    if line.value is None or math.isnan(line.value):
        return math.inf
    top, bottom = line.value, line.limit
    if _first(line.name) in _AT_LEAST:
        top, bottom = 1 - line.value, 1 - line.limit
    return top / bottom if bottom else 1.0


def _reason(report: EvalReport, line: GateLine) -> str:
    arm, tally = visible(line.arm), _needles_of(report, line)
    if line.status == FAILED and tally and tally.lost:
        length = int(line.name.split()[1])
        return (
            f"{arm} lost {tally.lost:,} of the {plural(tally.counted, 'needle')} that the "
            f"unquantized cache found at {length:,} tokens"
        )
    if line.status == FAILED and line.value is not None and math.isfinite(line.value):
        beyond = "below" if _first(line.name) in _AT_LEAST else "above"
        value, limit = measured(line.name, line.value), measured(line.name, line.limit)
        return f"{arm} has a {measure(line.name)} of {value}, {beyond} the limit of {limit}"
    # What is needed suffices here; what was seen is below.
    detail = line.detail.partition(" (")[0] if line.detail.startswith("not enough") else line.detail
    return f"{arm}, {measure(line.name)}: {_clause(detail)}"


def _measured(report: EvalReport) -> str:
    """What a report without a verdict has to say."""
    facts = list(filter(None, [_divergence(report), _retrieval(report)]))
    if facts:
        return "; ".join(facts)
    if report.self_checks:
        return f"the self-checks of {enumeration([it.arm for it in report.self_checks])} passed"
    if report.continuations:
        return f"{plural(len(report.continuations), 'text')} continued side by side"
    return "nothing was measured"


def _divergence(report: EvalReport) -> str:
    arms = report.perplexity.arms if report.perplexity else {}
    ranked = _ranked(list(arms), lambda name: arms[name].kl_mean.value)
    if not ranked:
        return ""
    (best, low), (worst, high) = ranked[0], ranked[-1]
    if len(ranked) == 1:
        return f"{visible(best)} has a mean KL of {number(low)} nats per token"
    return (
        f"the mean KL is {number(low)} ({visible(best)}) to {number(high)} ({visible(worst)}) "
        "nats per token"
    )


def _retrieval(report: EvalReport) -> str:
    if report.retrieval is None or not report.retrieval.cells:
        return ""
    tallies = {arm: needles_kept(report.retrieval, arm) for arm in arms_of(report.retrieval)}
    worst = max(tallies, key=lambda arm: tallies[arm].share_lost)
    tally = tallies[worst]
    if not tally.counted:
        return "the unquantized cache found no needle"
    if not tally.lost:
        return f"no arm lost any of {plural(tally.counted, 'needle')}"
    most = ", the most" if len(tallies) > 1 else ""
    return f"{visible(worst)} lost {tally.lost:,} of {plural(tally.counted, 'needle')}{most}"


def _ranked(names: Sequence[str], value: Callable[[str], float]) -> list[tuple[str, float]]:
    """Names with their numbers, smallest first; those without a number left out."""
    found = [(name, value(name)) for name in names]
    return sorted((it for it in found if not math.isnan(it[1])), key=lambda it: it[1])
