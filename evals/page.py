"""What the HTML report shows: a report's records arranged as its template prints them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import figures, wording
from .gate_file import DEFAULT_GATE, MEANT_FOR
from .headline import arm_status, complaints, headline, report_status
from .heat import HeatMap, heat_maps, lost_cells, needles_kept, tasks_of, unfound_cells
from .results import Cell, Continuation, EvalReport, Losses, Retrieval

LISTED = 40
"""Answers listed of an arm; the JSON has all of them."""
REASONS = 6
"""Arms whose reasons are at the top."""
_WORD = 20
"""Characters of a word, at most; more is a language without blanks."""


def report_values(report: EvalReport) -> dict[str, Any]:
    """Everything that the template prints."""
    from markupsafe import Markup

    retrieval, verdict = report.retrieval, report.verdict
    places = {arm.name: place for place, arm in enumerate(report.arms)}
    # The style sheet and all charts are ours; names inside charts are escaped there.
    charts = {name: Markup(svg) for name, svg in figures.layer_charts(report).items()}
    lost = _lost(report)
    lines = sorted(verdict.lines, key=lambda line: line.status == "passed") if verdict else []
    reasons = list(complaints(report).values())
    return {
        "report": report,
        "places": places,
        "headline": headline(report),
        "overall": report_status(report),
        "statuses": {arm.name: arm_status(report, arm.name) for arm in report.arms},
        "reasons": reasons[:REASONS],
        "reasons_left": max(0, len(reasons) - REASONS),
        "needles": {name: needles_kept(retrieval, name) for name in places} if retrieval else {},
        "grids": _grids(retrieval) if retrieval else [],
        "losses": _loss_rows(retrieval.losses) if retrieval else [],
        "loss_lengths": sorted({it.length for it in retrieval.losses}) if retrieval else [],
        "lost": lost,
        "links": _links(lost, places),
        "unfound": _Listing.of(unfound_cells(retrieval) if retrieval else ()),
        "lengths": _span(cell.length for cell in retrieval.cells) if retrieval else "",
        "position": Markup(figures.position_chart(report)),
        "trade": Markup(figures.trade_chart(report)),
        "buckets": list(_bucket_rows(report)),
        "layers": charts,
        "layer_names": list(dict.fromkeys(key for arm in report.arms for key in arm.layer_errors)),
        "continuations": [_Texts.of(it) for it in report.continuations],
        "gate_lines": lines,
        "detectable": _detectable(report),
        "meant_for": MEANT_FOR if verdict and verdict.gate == DEFAULT_GATE else "",
        "provenance": list(_provenance(report)),
    }


def _detectable(report: EvalReport) -> dict[str, str]:
    """For each arm, the change of perplexity that so many documents could have shown."""
    from .statistics import detectable

    arms = report.perplexity.arms if report.perplexity else {}
    found = {name: detectable(it.delta_ln_ppl) for name, it in arms.items()}
    return {name: wording.growth(value) for name, value in found.items() if math.isfinite(value)}


@dataclass(frozen=True)
class _Listing:
    """Some prompts of many."""

    shown: list[Cell]
    total: int

    @property
    def left(self) -> int:
        """How many are not shown."""
        return self.total - len(self.shown)

    @classmethod
    def of(cls, cells: Iterable[Cell]) -> _Listing:
        """At most `LISTED`: one of each place first, so that all red squares lead somewhere."""
        every = list(cells)
        seen: Counter[tuple[str, int, int]] = Counter()
        turns = []
        for index, cell in enumerate(every):
            place = (cell.task, cell.length, cell.depth)
            turns.append((seen[place], index))
            seen[place] += 1
        chosen = sorted(index for _, index in sorted(turns)[:LISTED])
        return cls([every[index] for index in chosen], len(every))


def _lost(report: EvalReport) -> list[tuple[str, _Listing]]:
    """For each arm that lost any, some of them."""
    if report.retrieval is None:
        return []
    found = [(arm.name, _Listing.of(lost_cells(report.retrieval, arm.name))) for arm in report.arms]
    return [(name, listing) for name, listing in found if listing.total]


def _links(
    lost: list[tuple[str, _Listing]], places: dict[str, int]
) -> dict[tuple[str, str, int, int], str]:
    """Where a red square leads: the first lost answer listed from it."""
    links: dict[tuple[str, str, int, int], str] = {}
    for name, listing in lost:
        for cell in listing.shown:
            where = f"{slug(cell.task)}-{cell.length}-{cell.depth}-{cell.trial}"
            square = (name, cell.task, cell.length, cell.depth)
            links.setdefault(square, f"lost-{places[name]}-{where}")
    return links


def _grids(retrieval: Retrieval) -> list[tuple[str, list[HeatMap]]]:
    return [(task, list(heat_maps(retrieval, task))) for task in tasks_of(retrieval)]


def _span(lengths: Iterable[int]) -> str:
    ends = sorted(set(lengths))
    if not ends:
        return "no"
    return f"{ends[0]:,}" if len(ends) == 1 else f"{ends[0]:,} to {ends[-1]:,}"


@dataclass(frozen=True)
class _LossRow:
    """Losses of one arm in one task, by length."""

    arm: str
    task: str
    by_length: dict[int, Losses]


def _loss_rows(losses: Iterable[Losses]) -> list[_LossRow]:
    rows: dict[tuple[str, str], _LossRow] = {}
    for one in losses:
        row = rows.setdefault((one.arm, one.task), _LossRow(one.arm, one.task, {}))
        row.by_length[one.length] = one
    return list(rows.values())


@dataclass(frozen=True)
class _BucketRow:
    """Mean KL of all arms at one range of positions."""

    range: str
    tokens: int
    values: list[float | None]


def _bucket_rows(report: EvalReport) -> Iterator[_BucketRow]:
    arms = list(report.perplexity.arms.values()) if report.perplexity else []
    tables = [{(it.past_from, it.past_to): it for it in arm.buckets} for arm in arms]
    for low, high in sorted({edges for table in tables for edges in table}):
        found = [table.get((low, high)) for table in tables]
        tokens = max(it.tokens for it in found if it)
        values = [it.kl_mean if it else None for it in found]
        yield _BucketRow(f"{low:,} – {high - 1:,}", tokens, values)


@dataclass(frozen=True)
class _Text:
    """One arm's continuation: what is the same, the first word that differs, what follows."""

    arm: str
    words: str
    same: str
    first: str
    rest: str

    @classmethod
    def of(cls, one: Continuation, arm: str) -> _Text:
        """Cut where it leaves the reference."""
        text = one.texts[arm]
        same = _whole_words(text, _common(one.reference, text))
        first = one.first_difference.get(arm)
        if first is None:
            words = "the same tokens throughout"
        else:
            share = wording.percent(one.agreement.get(arm), 0)
            words = f"first other token: {first + 1} of {one.tokens}; {share} the same in its place"
        end = same + len(_word(text[same:]))
        mark = text[same:end] or ("∎" if len(text) < len(one.reference) else "")
        return cls(arm, words, text[:same], mark, text[end:])


def _common(left: str, right: str) -> int:
    """How many characters two texts have in common before they differ."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))


def _whole_words(text: str, same: int) -> int:
    """Where the word begins that `same` characters end in, if it is a word and not a script's way.

    >>> _whole_words("one two", 6), _whole_words("one two", 7), _whole_words("one two", 3)
    (4, 7, 3)
    """
    if same == len(text) or text[same].isspace():
        return same
    start = max(text.rfind(" ", 0, same), text.rfind("\n", 0, same)) + 1
    return start if same - start <= _WORD else same


def _word(text: str) -> str:
    """The beginning of `text` up to the end of its first word."""
    word = text.lstrip().split(maxsplit=1)[:1]
    return text[: len(text) - len(text.lstrip()) + len(word[0])] if word else text


@dataclass(frozen=True)
class _Texts:
    """One continuation, with all arms' texts cut."""

    prompt_tokens: int
    tokens: int
    reference: str
    texts: list[_Text]

    @classmethod
    def of(cls, one: Continuation) -> _Texts:
        """Of all arms that wrote one."""
        texts = [_Text.of(one, arm) for arm in one.texts]
        return cls(one.prompt_tokens, one.tokens, one.reference, texts)


def _provenance(report: EvalReport) -> Iterator[tuple[str, str]]:
    origin = report.origin
    yield "model", origin.model
    yield "adapters", ", ".join(origin.adapters) or "none"
    yield "fingerprint", origin.fingerprint
    yield "parameters", f"{origin.parameters:,}"
    yield "dtype, device", f"{origin.dtype}, {origin.device}"
    yield "lengths", ", ".join(f"{length:,}" for length in origin.lengths)
    yield "seed", str(origin.seed)
    if report.perplexity:
        yield "corpus", _pairs(report.perplexity.corpus)
    if report.retrieval:
        yield "haystack", f"{report.retrieval.haystack}, SHA-256 {report.retrieval.sha256}"
    for arm in report.arms:
        if arm.scales:
            yield f"scales of {arm.name}", wording.scales_of(arm)
    kernels = dict.fromkeys(arm.kernel for arm in report.arms if arm.kernel)
    yield "kernels", "; ".join(kernels) or "unknown"
    yield "settings", _pairs(origin.settings)
    yield "versions", ", ".join(f"{name} {it}" for name, it in origin.versions.items())
    yield "command", origin.command
    yield "made", origin.created


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_plain(value)}" for name, value in values.items()) or "none"


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return "+".join(map(_plain, value)) or "none"
    return str(value)


def slug(name: str) -> str:
    """A task's name as part of an anchor."""
    return "".join(it if it.isascii() and it.isalnum() else "_" for it in name)
