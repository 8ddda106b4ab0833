"""What is not the same about several runs, and whether their numbers are paired all the same.

Numbers of two runs are paired if both read the same tokens in the same blocks and were asked for
the same needles; only then a difference of theirs is one of the cache. What a comparison may be
about, another adapter, scheme or version, does not unpair them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .results import Arm, EvalReport, Perplexity, Retrieval
from .wording import NOTHING, visible


@dataclass(frozen=True)
class Difference:
    """Something about the runs themselves that is not the same.

    Attributes:
        what: Which thing.
        values: Of each run.
        unpaired: Whether numbers of these runs are not paired because of it.
    """

    what: str
    values: tuple[str, ...]
    unpaired: bool

    def sentence(self, names: Sequence[str]) -> str:
        """In words: ``block: 64 in a, 16 in b``."""
        pairs = zip(self.values, names, strict=True)
        return f"{self.what}: {', '.join(f'{value} in {name}' for value, name in pairs)}"


def differences(reports: Sequence[EvalReport]) -> Iterator[Difference]:
    """What is not the same in all runs, first what unpairs their numbers."""
    for what, read in {**_TEXT, **_NEEDLES}.items():
        yield from _differing(what, [read(report) for report in reports], unpaired=True)
    yield from _settings(reports)
    for what, describe in _ABOUT.items():
        yield from _differing(what, [describe(report) for report in reports], unpaired=False)
    yield from _versions(reports)
    for arm in dict.fromkeys(arm.name for report in reports for arm in report.arms):
        for what, part in _ARM.items():
            values = [
                next((part(it) for it in report.arms if it.name == arm), None) for report in reports
            ]
            yield from _differing(f"{what} of {visible(arm)}", values, unpaired=False)


def _differing(what: str, values: Sequence[Any], unpaired: bool) -> Iterator[Difference]:
    """A difference between those that have such a thing, if there is one."""
    present = [value for value in values if value is not None]
    if any(value != present[0] for value in present):
        shown = tuple(NOTHING if value is None else _short(value) for value in values)
        yield Difference(what, shown, unpaired)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return visible(text if len(text) <= 60 else f"{text[:57]}…")


def _of_text(part: Callable[[Perplexity], Any]) -> Callable[[EvalReport], Any]:
    return lambda report: part(report.perplexity) if report.perplexity else None


def _of_needles(part: Callable[[EvalReport, Retrieval], Any]) -> Callable[[EvalReport], Any]:
    return lambda report: part(report, report.retrieval) if report.retrieval else None


_TEXT: dict[str, Callable[[EvalReport], Any]] = {
    "text, SHA-256 of its tokens": _of_text(lambda it: it.corpus.get("sha256", it.corpus)),
    "documents": _of_text(lambda it: it.documents),
    "tokens of a document": _of_text(lambda it: it.document_tokens),
    "prefill": _of_text(lambda it: it.prefill),
    "block": _of_text(lambda it: it.block),
    "scored tokens": _of_text(lambda it: it.scored_tokens),
}
_NEEDLES: dict[str, Callable[[EvalReport], Any]] = {
    "seed": _of_needles(lambda report, _: report.origin.seed),
    "haystack, SHA-256": _of_needles(lambda _, it: it.sha256),
    "chat template": _of_needles(lambda _, it: it.chat),
    "answer tokens": _of_needles(lambda _, it: it.answer_tokens),
    "needle prompts": _of_needles(lambda _, it: _prompts(it)),
}
_ABOUT: dict[str, Callable[[EvalReport], Any]] = {
    "model": lambda report: report.origin.title,
    "fingerprint": lambda report: report.origin.fingerprint,
    "dtype": lambda report: report.origin.dtype,
    "device": lambda report: report.origin.device,
}
_ARM: dict[str, Callable[[Arm], Any]] = {
    "scheme": lambda arm: arm.scheme,
    "scales": lambda arm: arm.scales_origin,
    "kernel": lambda arm: arm.kernel or None,
}


def _prompts(retrieval: Retrieval) -> str:
    """How many needles were asked for, where, and a hash of which."""
    asked = sorted((it.task, it.length, it.depth, it.trial, it.expected) for it in retrieval.cells)
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:8]
    lengths = ", ".join(f"{length:,}" for length in sorted({it.length for it in retrieval.cells}))
    return f"{len(asked):,} at {lengths} tokens, {digest}"


def _settings(reports: Sequence[EvalReport]) -> Iterator[Difference]:
    """Settings that numbers depend on; one that a run does not name is none of its time."""
    for name in dict.fromkeys(key for report in reports for key in report.origin.settings):
        known = [report for report in reports if name in report.origin.settings]
        values = {json.dumps(it.origin.settings[name], default=str) for it in known}
        if len(values) > 1:
            shown = (_short(it.origin.settings[name]) if it in known else NOTHING for it in reports)
            yield Difference(f"setting {visible(name)}", tuple(shown), unpaired=True)


def _versions(reports: Sequence[EvalReport]) -> Iterator[Difference]:
    for name in dict.fromkeys(key for report in reports for key in report.origin.versions):
        values = [report.origin.versions.get(name) for report in reports]
        yield from _differing(visible(name), values, unpaired=False)
