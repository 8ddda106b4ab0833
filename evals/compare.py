"""Several evaluations side by side: what differs between the runs, and by how much their numbers.

Runs whose numbers are not paired (see `pairing`) are refused unless somebody asks for them; what
else differs between runs is said and nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

from kvquant.errors import InputError

from .headline import arm_status, report_status
from .pairing import Difference, differences
from .results import Arm, Divergence, EvalReport, Interval
from .wording import NOTHING, growth, interval, number, percent, size, visible

Show = Callable[[float], str]
T = TypeVar("T")
U = TypeVar("U")

SAME = "="
"""Stands for no change."""


@dataclass(frozen=True)
class Entry:
    """A number of one arm in one run, and as it is shown; neither where it was not measured."""

    value: float | None = None
    text: str = NOTHING


@dataclass(frozen=True)
class Row:
    """One number of one arm in all runs.

    Attributes:
        metric: Which.
        entries: Of each run.
        changes: Of each run but the first, against the first, in words.
    """

    metric: str
    entries: tuple[Entry, ...]
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """All that there is to say about several runs.

    Attributes:
        names: Short names of the runs.
        reports: What they found.
        differences: Between the runs themselves.
        arms: Rows by arm, those of the first run first.
    """

    names: tuple[str, ...]
    reports: tuple[EvalReport, ...]
    differences: tuple[Difference, ...]
    arms: dict[str, tuple[Row, ...]]

    @property
    def statuses(self) -> tuple[str, ...]:
        """What became of each run."""
        return tuple(map(report_status, self.reports))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "reports": [
                {"name": name, "title": report.origin.title, "status": status}
                for name, report, status in zip(
                    self.names, self.reports, self.statuses, strict=True
                )
            ],
            "differences": [
                {"what": it.what, "values": list(it.values), "unpaired": it.unpaired}
                for it in self.differences
            ],
            "arms": {
                arm: {
                    row.metric: [it.text if it.value is None else it.value for it in row.entries]
                    for row in rows
                }
                for arm, rows in self.arms.items()
            },
        }


def compare(names: Sequence[str], reports: Sequence[EvalReport], force: bool = False) -> Comparison:
    """Two or more runs, held against the first one.

    Args:
        names: Short names of the runs.
        reports: What they found.
        force: Take runs whose numbers are not paired.

    Raises:
        InputError: They are not paired, and nobody said that they need not be.
    """
    found = tuple(differences(reports))
    unpaired = [it.sentence(names) for it in found if it.unpaired]
    if unpaired and not force:
        raise InputError(
            f"these runs did not read the same, so that their numbers are not paired: "
            f"{'; '.join(unpaired)}. Evaluate them alike, or see them side by side with --force"
        )
    arms = dict.fromkeys(arm.name for report in reports for arm in report.arms)
    rows = {name: tuple(_rows(name, reports)) for name in arms}
    return Comparison(tuple(names), tuple(reports), found, rows)


def _rows(name: str, reports: Sequence[EvalReport]) -> Iterator[Row]:
    statuses = [
        Entry(None, arm_status(report, name) if _arm(report, name) else NOTHING)
        for report in reports
    ]
    yield Row("verdict", tuple(statuses), tuple(_status_change(statuses)))
    arms = [_arm(report, name) for report in reports]
    yield _row("bits per value", _each(arms, lambda it: it.bits_per_value), number, _ratio)
    yield _row("bytes held", _each(arms, lambda it: float(it.live_nbytes)), _size, _ratio)
    found = [it.perplexity.arms.get(name) if it.perplexity else None for it in reports]
    if any(found):
        yield from _divergence_rows(found)
    for task, length in _needle_places(reports):
        yield _loss_row(name, task, length, reports)


def _each(things: Sequence[T | None], part: Callable[[T], U | None]) -> list[U | None]:
    """A part of everything that is there."""
    return [None if it is None else part(it) for it in things]


def _arm(report: EvalReport, name: str) -> Arm | None:
    return next((arm for arm in report.arms if arm.name == name), None)


def _status_change(statuses: Sequence[Entry]) -> Iterator[str]:
    first = statuses[0].text
    for entry in statuses[1:]:
        yield (
            NOTHING
            if NOTHING in (first, entry.text)
            else (SAME if entry.text == first else "changed")
        )


def _divergence_rows(found: Sequence[Divergence | None]) -> Iterator[Row]:
    yield _row("perplexity", _each(found, lambda it: it.ppl), number, _ratio)
    deltas = _each(found, lambda it: it.delta_ln_ppl)
    yield _interval_row("change of perplexity", deltas, growth, _points)
    yield _interval_row("KL mean", _each(found, lambda it: it.kl_mean), number, _ratio)
    yield _row("KL median", _each(found, lambda it: it.kl_median), number, _ratio)
    yield _row("KL p99", _each(found, lambda it: it.kl_p99), number, _ratio)
    yield _interval_row("KL per doubling", _each(found, lambda it: it.kl_slope), number, _plainly)
    yield _interval_row("top-1", _each(found, lambda it: it.top1), _share, _points)
    confident = _each(found, lambda it: it.top1_confident)
    yield _interval_row("top-1 where confident", confident, _share, _points)
    yield _row("RMS of Δp", _each(found, lambda it: it.delta_p_rms), _share, _points)


def _needle_places(reports: Sequence[EvalReport]) -> list[tuple[str, int]]:
    found = [
        (it.task, it.length)
        for report in reports
        for it in (report.retrieval.losses if report.retrieval else ())
    ]
    return list(dict.fromkeys(found))


def _loss_row(name: str, task: str, length: int, reports: Sequence[EvalReport]) -> Row:
    entries = []
    for report in reports:
        losses = report.retrieval.losses if report.retrieval else ()
        place = (name, task, length)
        it = next((it for it in losses if (it.arm, it.task, it.length) == place), None)
        entries.append(Entry(it.losses, f"{it.losses} of {it.trials}") if it else Entry())
    changes = tuple(_changes(entries, _count))
    return Row(f"lost, {visible(task)} at {length:,}", tuple(entries), changes)


def _row(
    metric: str,
    values: Sequence[float | None],
    show: Show,
    change: Callable[[float, float], str],
) -> Row:
    entries = [Entry() if it is None else Entry(it, show(it)) for it in values]
    return Row(metric, tuple(entries), tuple(_changes(entries, change)))


def _interval_row(
    metric: str,
    values: Sequence[Interval | None],
    show: Show,
    change: Callable[[float, float], str],
) -> Row:
    ends = None if show is number else show
    entries = [
        Entry() if it is None else Entry(it.value, f"{show(it.value)} ({interval(it, ends)})")
        for it in values
    ]
    return Row(metric, tuple(entries), tuple(_changes(entries, change)))


def _changes(entries: Sequence[Entry], change: Callable[[float, float], str]) -> Iterator[str]:
    first = entries[0].value
    for entry in entries[1:]:
        known = first is not None and entry.value is not None
        finite = known and math.isfinite(first or 0.0) and math.isfinite(entry.value or 0.0)
        yield change(first or 0.0, entry.value or 0.0) if finite else NOTHING


def _ratio(first: float, other: float) -> str:
    if first == other:
        return SAME
    if first <= 0 or other <= 0:
        return _plainly(first, other)
    if other < first / 2:
        return f"÷ {number(first / other)}"
    return growth(math.log(other / first))


def _points(first: float, other: float) -> str:
    """Of shares, and of differences of logarithms, which are nearly such."""
    return SAME if first == other else f"{(other - first) * 100:+.2f} points"


def _plainly(first: float, other: float) -> str:
    sign = "+" if other > first else ""
    return SAME if first == other else f"{sign}{number(other - first)}"


def _count(first: float, other: float) -> str:
    return SAME if first == other else f"{other - first:+.0f}"


def _share(value: float) -> str:
    return percent(value, 2)


def _size(nbytes: float) -> str:
    return size(int(nbytes))


def short_names(paths: Sequence[str]) -> tuple[str, ...]:
    """File names without what they have in common with none: stems, or paths where those clash.

    >>> short_names(["runs/a.json", "b.json"]), short_names(["x/a.json", "y/a.json"])
    (('a', 'b'), ('x/a.json', 'y/a.json'))
    """
    stems = [path.replace("\\", "/").rpartition("/")[2].removesuffix(".json") for path in paths]
    pairs = zip(stems, paths, strict=True)
    return tuple(visible(stem if stems.count(stem) == 1 else path) for stem, path in pairs)


def columns(row: Row) -> Iterator[str]:
    """A row's texts in the order of a table: first run, second, its change, third, its change."""
    first, *others = row.entries
    yield first.text
    for entry, change in zip_longest(others, row.changes):
        yield entry.text
        yield change
