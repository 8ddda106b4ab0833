"""A check as terminal tables, and its verdict."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from .check_report import Case, CheckReport, Stored, Way


def check_table(report: CheckReport) -> RenderableType:
    """Ways of feeding text, schemes, and what is wrong."""
    notes = [Text(f"note: {note}", style="yellow") for note in report.notes]
    return Group(
        Text(f"{report.title}: {report.geometry.summary()}; {report.dtype}\n"),
        _cases_table(report),
        _schemes_table(report),
        *notes,
        *_verdict(report),
    )


def _cases_table(report: CheckReport) -> Table:
    table = _table(
        f"{report.tokens} decoded greedily after {report.prompt_tokens} tokens",
        ("against no cache", "left"),
        ("DynamicCache", "left"),
        ("logits off by", "right"),
        ("kvquant none", "left"),
        ("logits off by", "right"),
        ("", "left"),
    )
    for case in report.cases:
        ways = (*_way(case.transformers), *_way(case.quantized))
        table.add_row(case.name, *ways, _mark(case))
    return table


def _schemes_table(report: CheckReport) -> Table:
    table = _table(
        f"{report.prompt_tokens + report.tokens} tokens stored (off by: norm of the change by norm,"
        " worst layer)",
        ("scheme", "left"),
        ("bytes", "right"),
        ("by formula", "right"),
        ("bits/value", "right"),
        ("vs bf16", "right"),
        ("keys off by", "right"),
        ("values off by", "right"),
        ("", "left"),
    )
    for stored in report.schemes:
        table.add_row(stored.scheme, *_sizes(stored), _mark(stored))
    return table


def _table(title: str, *columns: tuple[str, JustifyMethod]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name, justify in columns:
        table.add_column(name, justify=justify)
    return table


def _way(way: Way) -> tuple[str, str]:
    """What the tokens are, and how far the logits are away."""
    if way.error:
        return "fails", ""
    first = way.first_difference
    tokens = "same tokens" if first is None else f"token {first} differs"
    return tokens, "" if way.logit_difference is None else f"{way.logit_difference:.1e}"


def _sizes(stored: Stored) -> Iterable[str]:
    if stored.error:
        return ("fails", *[""] * 5)
    return (
        f"{stored.live_nbytes:,}",
        f"{stored.expected_nbytes:,}",
        f"{stored.bits_per_value:.2f}",
        f"{stored.ratio:.2f} x",
        f"{stored.key_difference:.2%}",
        f"{stored.value_difference:.2%}",
    )


def _mark(part: Case | Stored) -> Text:
    if part.finding:
        return Text("differs", style="bold red")
    return Text("see note", style="yellow") if part.note else Text("ok", style="green")


def _verdict(report: CheckReport) -> list[Text]:
    findings = report.findings
    if not findings:
        return [
            Text(
                "exact: the quantized cache does what Transformers' cache does, and stores what "
                "the formula says",
                style="bold green",
            )
        ]
    return [Text(f"differs: {finding}", style="bold red") for finding in findings]
