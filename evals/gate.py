"""What was measured, held against thresholds, line by line.

Two kinds of lines:

-   Proofs: `delta_ln_ppl`, `kl_mean`, `top1`, `top1_confident`, `loss_rate`; and `kl_p99`,
    `delta_p_rms`, `agreement`, which have no interval. They pass once the whole 95 % interval is
    within the limit, fail once the estimate itself is beyond it, and are undecided in between,
    which is no pass: more text or trials decide. An arm passes if all of its proofs do. A bad one
    would have to be lucky in the very line that it is bad in, so that the chance of a false pass
    is no higher with many lines than with one, and nothing is corrected (intersection-union test;
    Berger, Technometrics 24, 1982).
-   Alarms: `kl_slope`, and `mcnemar_p` for each length and task. They fail once a fault is
    significant and pass otherwise. Many of them would raise false alarms, so that their p-values
    are corrected over all alarms of all arms (Holm).

What was not measured has no line, unless the gate file names its threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from scipy import stats

from .gate_file import Gate
from .results import Arm, Divergence, EvalReport, GateLine, Interval, Losses, Verdict
from .statistics import Z, holm, loss_rate_upper, trials_needed
from .wording import growth, number, percent, plural

Alarms = Mapping[tuple[str, str], float]
"""Corrected p-values by arm and name of the line."""

Limits = Mapping[str, float]
Show = Callable[[float], str]

_REMEDY = "scales of this very model, more exact tokens or more bits help"
_UNMEASURED = {
    "kl_slope": "no document is long enough to see the KL grow",
    "top1_confident": "the unquantized cache is confident nowhere",
}
_NOT_RUN = {"loss_rate": "no needle was looked for", "agreement": "no text was continued"}


def judge(report: EvalReport, gate: Gate) -> Verdict:
    """The verdict of a gate on a report.

    Raises:
        InputError: The gate does not fit the arms; `Gate.check` tells before anything is run.
    """
    gate.check({arm.name: arm.scheme_class for arm in report.arms})
    alarms = _alarms(report, gate)
    lines = [line for arm in report.arms for line in _lines(report, arm, gate, alarms)]
    failed = dict.fromkeys(check.arm for check in report.self_checks if check.failures)
    return Verdict(gate.source, tuple(lines), tuple(failed))


def _alarms(report: EvalReport, gate: Gate) -> Alarms:
    found: dict[tuple[str, str], float] = {}
    for arm in report.arms:
        divergence, limits = _divergence(report, arm), gate.limits(arm.name, arm.scheme_class)
        if divergence and divergence.kl_slope and "kl_slope" in limits:
            found[arm.name, "kl_slope"] = _p_beyond(divergence.kl_slope, limits["kl_slope"])
        found |= {(arm.name, _mcnemar(it)): it.p_value for it in _losses(report, arm)}
    found = {key: p_value for key, p_value in found.items() if not math.isnan(p_value)}
    return dict(zip(found, holm(list(found.values())), strict=True))


def _p_beyond(interval: Interval, limit: float) -> float:
    """Two-sided p-value of a number beyond a limit, from its interval as if normal.

    Uncorrected it is below 5 % exactly if the limit is below the interval. NaN without one.
    """
    beyond, error = interval.value - limit, (interval.value - interval.low) / Z
    if math.isnan(error):
        return math.nan
    if error == 0:
        return 0.0 if beyond > 0 else 1.0
    return min(1.0, 2 * float(stats.norm.sf(beyond / error)))


def _divergence(report: EvalReport, arm: Arm) -> Divergence | None:
    return report.perplexity.arms.get(arm.name) if report.perplexity else None


def _losses(report: EvalReport, arm: Arm) -> list[Losses]:
    found = report.retrieval.losses if report.retrieval else ()
    return [it for it in found if it.arm == arm.name]


def _mcnemar(found: Losses) -> str:
    return f"mcnemar_p {found.length} {found.task}"


def _lines(report: EvalReport, arm: Arm, gate: Gate, alarms: Alarms) -> Iterator[GateLine]:
    """All lines of an arm, and one for each threshold that would have had to be measured."""
    limits = gate.limits(arm.name, arm.scheme_class)
    lines = [
        *_divergence_lines(report, arm, limits),
        *_slope_lines(report, arm, limits, gate.significance, alarms),
        *_loss_lines(report, arm, limits),
        *_mcnemar_lines(report, arm, gate.significance, alarms),
        *_agreement_lines(report, arm, limits),
    ]
    yield from lines
    missing = gate.named(arm.name, arm.scheme_class) - {line.name.split()[0] for line in lines}
    for name in (name for name in limits if name in missing):
        why = _NOT_RUN.get(name, "no text was scored")
        if _divergence(report, arm) is not None:
            why = _UNMEASURED.get(name, why)
        detail = f"{gate.source} names it, but {why}: measure it, or take it out of the file"
        yield GateLine(arm.name, name, None, limits[name], "undecided", detail)


def _divergence_lines(report: EvalReport, arm: Arm, limits: Limits) -> Iterator[GateLine]:
    found = _divergence(report, arm)
    if report.perplexity is None or found is None:
        return
    proofs: dict[str, tuple[Interval | None, bool, Show]] = {
        "delta_ln_ppl": (found.delta_ln_ppl, True, growth),
        "kl_mean": (found.kl_mean, True, number),
        "kl_p99": (_point(found.kl_p99), True, number),
        "top1": (found.top1, False, _share),
        "top1_confident": (found.top1_confident, False, _share),
        "delta_p_rms": (_point(found.delta_p_rms), True, _share),
    }
    for name, (interval, at_most, show) in proofs.items():
        if name in limits and interval is not None:
            limit = limits[name]
            status = _proof(interval, limit, at_most)
            detail = _shown(interval, limit, at_most, show)
            if status == "failed":
                detail += f": {_REMEDY}"
            if status == "undecided":
                detail += f": {_more_text(interval, limit, at_most, report.perplexity.documents)}"
            yield GateLine(arm.name, name, interval.value, limit, status, detail)


def _point(value: float) -> Interval:
    """A number that has no interval counts as it is."""
    return Interval(value, value, value)


def _share(value: float) -> str:
    return percent(value, 2)


def _proof(interval: Interval, limit: float, at_most: bool) -> str:
    sign, end = (1, interval.high) if at_most else (-1, interval.low)
    if not sign * interval.value <= sign * limit or not math.isfinite(interval.value):
        return "failed"
    return "passed" if sign * end <= sign * limit else "undecided"


def _shown(interval: Interval, limit: float, at_most: bool, show: Show) -> str:
    """Number, interval and limit in words."""
    if not math.isfinite(interval.value):
        return "the arm's predictions are NaN or infinite somewhere"
    has_interval = interval.low < interval.high
    ends = f" ({show(interval.low)} to {show(interval.high)})" if has_interval else ""
    return f"{show(interval.value)}{ends}, at {'most' if at_most else 'least'} {show(limit)}"


def _more_text(interval: Interval, limit: float, at_most: bool, documents: int) -> str:
    """How much text would make the interval so narrow that it is within the limit."""
    if math.isnan(interval.low):
        return "a single document has no interval, evaluate 16 or more"
    gap = abs(limit - interval.value)
    if at_most:
        factor = ((interval.high - interval.value) / gap) ** 2 if gap else math.inf
    else:
        factor = _wilson_trials(interval, limit) / _wilson_trials(interval, interval.low)
    needed = documents * factor
    if needed > 1000 * documents:
        return "too close to the limit for any text to decide"
    return f"not enough text, about {math.ceil(needed):,} documents instead of {documents:,} decide"


def _wilson_trials(interval: Interval, low: float) -> float:
    """Trials that make `low` the lower end of Wilson's interval, by the square of Z."""
    gap = interval.value - low
    return low * (1 - low) / gap**2 if gap else math.inf


def _slope_lines(
    report: EvalReport, arm: Arm, limits: Limits, significance: float, alarms: Alarms
) -> Iterator[GateLine]:
    found, name = _divergence(report, arm), "kl_slope"
    if found is None or found.kl_slope is None or name not in limits:
        return
    slope, limit = found.kl_slope, limits[name]
    p_value = alarms.get((arm.name, name))
    detail = f"{number(slope.value)} per doubling of the context"
    if not math.isfinite(slope.value):
        status, detail = "failed", _shown(slope, limit, True, number)
    elif p_value is None:
        status = "undecided"
        detail += ": a single document has no interval, evaluate 16 or more"
    else:
        status = "failed" if p_value < significance else "passed"
        beyond = "significantly beyond" if status == "failed" else "not significantly beyond"
        ends = f"{number(slope.low)} to {number(slope.high)}"
        detail += f" ({ends}), {beyond} {number(limit)}: {_corrected(p_value, alarms)}"
        if status == "failed":
            detail += "; evaluate the longest context that you serve"
    yield GateLine(arm.name, name, slope.value, limit, status, detail)


def _corrected(p_value: float, alarms: Alarms) -> str:
    return f"p = {number(p_value)}" + (f" among {len(alarms)} alarms" if len(alarms) > 1 else "")


def _loss_lines(report: EvalReport, arm: Arm, limits: Limits) -> Iterator[GateLine]:
    """Lost answers at each length, all tasks together."""
    if "loss_rate" not in limits:
        return
    found, limit = _losses(report, arm), limits["loss_rate"]
    for length in sorted({it.length for it in found}):
        here = [it for it in found if it.length == length]
        lost, trials = sum(it.losses for it in here), sum(it.trials for it in here)
        upper = loss_rate_upper(lost, trials)
        status, detail = _loss_verdict(lost, trials, upper, limit)
        yield GateLine(arm.name, f"loss_rate {length}", upper, limit, status, detail)


def _loss_verdict(lost: int, trials: int, upper: float, limit: float) -> tuple[str, str]:
    if trials == 0:
        return "undecided", (
            "the unquantized cache gives no right answer, so that none could be lost: try shorter "
            "lengths or easier tasks"
        )
    seen = f"{lost:,} of {plural(trials, 'right answer')} lost"
    if lost > limit * trials:
        return "failed", f"{seen}, {_share(lost / trials)}, at most {_share(limit)}: {_REMEDY}"
    if upper > limit:
        needed = trials_needed(limit, lost)
        return "undecided", (
            f"not enough trials: {trials:,} of {needed:,} needed to show at most {_share(limit)} "
            f"({seen}; those count that the unquantized cache gets right)"
        )
    return "passed", f"{seen}, so at most {_share(upper)} are (95 %), at most {_share(limit)}"


def _mcnemar_lines(
    report: EvalReport, arm: Arm, significance: float, alarms: Alarms
) -> Iterator[GateLine]:
    for it in _losses(report, arm):
        p_value = alarms[arm.name, _mcnemar(it)]
        failed = p_value < significance
        detail = f"{plural(it.losses, 'answer')} lost, {it.gains:,} gained: "
        detail += "no accident" if failed else "no more lost than may happen by accident"
        detail += f", {_corrected(p_value, alarms)}" + (f"; {_REMEDY}" if failed else "")
        status = "failed" if failed else "passed"
        yield GateLine(arm.name, _mcnemar(it), p_value, significance, status, detail)


def _agreement_lines(report: EvalReport, arm: Arm, limits: Limits) -> Iterator[GateLine]:
    """Mean over continuations; a single early difference changes all that follows."""
    found = [it.agreement[arm.name] for it in report.continuations if arm.name in it.agreement]
    if not found or "agreement" not in limits:
        return
    interval, limit = _point(math.fsum(found) / len(found)), limits["agreement"]
    status = _proof(interval, limit, at_most=False)
    detail = f"{_shown(interval, limit, False, _share)}, in {plural(len(found), 'continuation')}"
    yield GateLine(arm.name, "agreement", interval.value, limit, status, detail)
