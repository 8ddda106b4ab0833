"""An evaluation in the terminal: a row for each arm, what did not pass, and where the files are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .compare import Comparison, columns
from .gate_file import DEFAULT_GATE, MEANT_FOR
from .headline import (
    BROKEN,
    FAILED,
    PASSED,
    UNDECIDED,
    UNJUDGED,
    arm_status,
    complaints,
    headline,
    report_status,
)
from .heat import needles_kept
from .results import Arm, Divergence, EvalReport
from .wording import (
    NOTHING,
    growth,
    interval,
    number,
    percent,
    plural,
    scales_of,
    times,
    visible,
)

_STYLES = {PASSED: "green", FAILED: "bold red", BROKEN: "bold red", UNDECIDED: "yellow"}
_SHORT = {BROKEN: "invalid", UNJUDGED: NOTHING}
_WIDTH = 100
"""Columns where there is no terminal."""


def show(report: EvalReport, files: Sequence[Path] = ()) -> None:
    """Prints a report; as wide as the terminal, or 100 columns into a pipe.

    Args:
        report: What to print.
        files: What was written.
    """
    print_tables(report_table(report, files))


def print_tables(*tables: RenderableType) -> None:
    """Tables, one below the other."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=_WIDTH, highlight=False)
    for table in tables:
        console.print(table)


def report_table(report: EvalReport, files: Sequence[Path] = ()) -> RenderableType:
    """The verdict, a row for each arm, what they are, what did not pass, and `files`."""
    style = _STYLES.get(report_status(report), "")
    return Group(
        Text(headline(report), style=f"bold {style}".strip()),
        _arms_table(report),
        *_legend(report),
        *_arm_lines(report),
        *_check_lines(report),
        *_complaint_lines(report),
        *_gate_lines(report),
        *(Text(f"written: {path}") for path in files),
    )


def _gate_lines(report: EvalReport) -> Iterator[Text]:
    """Whose thresholds these are, and which models they are meant for."""
    if report.verdict is not None and report.verdict.lines:
        own = report.verdict.gate != DEFAULT_GATE
        yield Text(f"thresholds: {report.verdict.gate if own else MEANT_FOR}", "dim")


def comparison_table(comparison: Comparison, files: Sequence[Path] = ()) -> RenderableType:
    """What differs between the runs, a table for each arm, and `files`."""
    return Group(
        *_runs(comparison),
        *(_rows_table(arm, comparison) for arm in comparison.arms),
        Text(
            f"Changes are against {comparison.names[0]}; =: none. In brackets: 95 % intervals.",
            "dim",
        ),
        *(Text(f"written: {path}") for path in files),
    )


def _runs(comparison: Comparison) -> Iterator[Text]:
    runs = zip(comparison.names, comparison.reports, comparison.statuses, strict=True)
    for name, report, status in runs:
        yield Text(f"{name}: {visible(report.origin.title)}, {status}", _STYLES.get(status, ""))
    for difference in comparison.differences:
        warning = "not paired" if difference.unpaired else "differs"
        style = "bold red" if difference.unpaired else "yellow"
        yield Text(f"{warning}: {difference.sentence(comparison.names)}", style)


def _rows_table(arm: str, comparison: Comparison) -> Table:
    table = _table(arm)
    table.add_column("")
    for index, name in enumerate(comparison.names):
        table.add_column(name, justify="right")
        if index:
            table.add_column("change", justify="right")
    for row in comparison.arms[arm]:
        table.add_row(row.metric, *columns(row))
    return table


def _table(title: str) -> Table:
    return Table(
        title=Text(visible(title)),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )


def _arms_table(report: EvalReport) -> Table:
    table = _table(report.origin.title)
    table.add_column("arm", overflow="fold")
    for column in _columns(report):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for arm in report.arms:
        table.add_row(Text(visible(arm.name)), *_numbers(report, arm), _mark(report, arm.name))
    return table


def _columns(report: EvalReport) -> Iterator[str]:
    yield from ("bits", "ratio")
    if report.perplexity:
        yield from ("ppl", "Δ ppl", "KL mean", "KL p99", "top-1")
    if report.retrieval:
        yield "needles"


def _numbers(report: EvalReport, arm: Arm) -> Iterator[str]:
    yield f"{arm.bits_per_value:.2f}"
    yield times(arm.ratio).replace(" ", "")
    if report.perplexity:
        yield from _divergence(report.perplexity.arms.get(arm.name))
    if report.retrieval:
        tally = needles_kept(report.retrieval, arm.name)
        yield f"{tally.kept}/{tally.counted}" if tally.counted else NOTHING


def _divergence(found: Divergence | None) -> Iterator[str]:
    if found is None:
        yield from [NOTHING] * 5
        return
    yield number(found.ppl)
    yield growth(found.delta_ln_ppl.value).replace(" %", "%")
    yield f"{number(found.kl_mean.value)}\n{interval(found.kl_mean).replace(' ', '')}"
    yield number(found.kl_p99)
    yield percent(found.top1.value).replace(" %", "%")


def _mark(report: EvalReport, arm: str) -> Text:
    status = arm_status(report, arm)
    return Text(_SHORT.get(status, status), style=_STYLES.get(status, "dim"))


def _legend(report: EvalReport) -> Iterator[Text]:
    words = [
        "bits: per value, metadata and exact tokens included",
        "ratio: times smaller than the unquantized cache in 16 bit",
    ]
    if report.perplexity:
        scored = plural(report.perplexity.scored_tokens, "token")
        documents = plural(report.perplexity.documents, "document")
        words.append(f"ppl: perplexity, {number(report.perplexity.reference_ppl)} unquantized")
        words.append(f"KL: nats per token, {scored} of {documents}, mean with its 95 % interval")
        words.append("top-1: same likeliest token")
    if report.retrieval:
        words.append("needles: kept of those that the unquantized cache found")
    if any(arm_status(report, arm.name) == BROKEN for arm in report.arms):
        words.append("invalid: its self-check failed, so that nothing measured of it counts")
    yield Text("; ".join(words) + ".", style="dim")


def _arm_lines(report: EvalReport) -> Iterator[Text]:
    """What each arm is; scales of another model stand out."""
    yield Text("")
    for arm in report.arms:
        line = Text(f"{visible(arm.name)}: {visible(arm.scheme)}")
        if arm.scales is not None:
            line.append(f"; scales {visible(scales_of(arm))}")
        if arm.foreign:
            line.append(", which is another model", style="yellow")
        yield line


def _check_lines(report: EvalReport) -> Iterator[Text]:
    """What self-checks found, if that is all there is."""
    if report.perplexity or report.retrieval or report.continuations:
        return
    for found in report.self_checks:
        yield Text("")
        for check in found.checks:
            text = f"{check.status}: {visible(found.arm)}, {check.name}: {visible(check.detail)}"
            if check.status != FAILED:  # those are among the complaints
                yield Text(text, _STYLES.get(check.status, ""))


def _complaint_lines(report: EvalReport) -> Iterator[Text]:
    found = complaints(report)
    if found:
        yield Text("")
    for first, *others in found.values():
        arm = visible(first.arm)
        text = f"{first.status}: {arm}, {first.what}: {first.detail}"
        yield Text(text, style=_STYLES[first.status])
        for it in others:
            numbers = f": {it.numbers}" if it.numbers else f": {it.detail}"
            yield Text(f"  {it.status}: {it.what}{numbers}", style=_STYLES[it.status])
