"""What `kvquant export` and `kvquant verify` print."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

import click

from .verify_report import Finding, LayerVerdict, VerifyReport, ranges, some

if TYPE_CHECKING:
    from rich.console import Console

    from .export import ExportResult
    from .folded import Folded
    from .verify_run import RunReport


def print_json(values: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(values, indent=2))


def console() -> Console:
    """As wide as the terminal, or 100 columns into a pipe."""
    from rich.console import Console

    made = Console(highlight=False, emoji=False)
    return made if made.is_terminal else Console(width=100, highlight=False, emoji=False)


def show_engines() -> None:
    """`kvquant export --list`."""
    from rich import box
    from rich.table import Table

    from .targets import target, target_names

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("--engine", "formats", "one scale for", "written", "facts from", "in all"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "--engine")
    for name in target_names():
        facts = target(name).facts
        table.add_row(
            name,
            ", ".join(facts.formats),
            facts.granularity.removeprefix("per ").replace(" or per ", " or "),
            facts.files,
            facts.versions,
            "yes" if facts.shares_directory else "",
        )
    console().print(table)


def engines_values() -> list[dict[str, Any]]:
    """The same as JSON."""
    from dataclasses import asdict

    from .targets import target, target_names

    return [{"engine": name, **asdict(target(name).facts)} for name in target_names()]


def show_export(result: ExportResult) -> None:
    """What was written, for whom, how to serve it, and what to know."""
    out = console()
    if result.written is not None:
        written = result.written
        out.print(
            f"{written.directory}: {some(len(written.files), 'file')}, weights by "
            f"{written.weights.value}, {written.new_bytes / 1e6:.2f} MB new, "
            f"{some(len(result.tensors), 'scale tensor')}",
            soft_wrap=True,
            markup=False,
        )
    if result.sidecar is not None:
        out.print(f"written: {result.sidecar}", soft_wrap=True, markup=False)
    if result.folded is not None:
        _show_folded(out, result.folded)
    for engine in result.engines:
        _heading(out, engine.name, engine.refusal, engine.ok, engine.layers)
        for line in engine.launch:
            out.print(f"  {line}", soft_wrap=True, markup=False)
        _show_findings(out, engine.findings)
    if result.remarks:
        out.print("\nto know:")
    for remark in result.remarks:
        _item(out, "-", remark)


def _heading(out: Console, name: str, refusal: str, ok: bool, layers: int | None) -> None:
    if refusal:
        out.print(f"\n{name}: left out, {refusal}", markup=False)
    elif layers is None:
        out.print(f"\n{name}:", markup=False)
    else:
        verdict = "would load" if ok else "WOULD NOT serve as meant;"
        scales = f"scales of {some(layers, 'layer')}"
        count = scales if layers or not ok else "no scales, and uses none"
        out.print(f"\n{name}: {verdict} {count}", markup=False)


def _show_findings(out: Console, findings: tuple[Finding, ...]) -> None:
    for finding in findings:
        mark = "[red]✗[/red]" if finding.serious else "[dim]·[/dim]"
        _item(out, mark, f"{finding.what}; {finding.fix}" if finding.fix else finding.what)


def _item(out: Console, mark: str, text: str) -> None:
    """One of a list, its further lines below the first; names and paths stay whole."""
    lines = textwrap.wrap(
        text, max(out.width - 4, 40), break_long_words=False, break_on_hyphens=False
    )
    out.print(f"  {mark} ", end="")
    out.print("\n    ".join(lines), soft_wrap=True, markup=False)


def _show_folded(out: Console, folded: Folded) -> None:
    """Errors before and after, as means over the layers."""
    from rich import box
    from rich.table import Table

    out.print(
        f"\nfolded for {folded.quantizer}: {some(folded.layers, 'layer')}, "
        f"{some(folded.check.tensors, 'tensor')} exactly, logits differ by "
        f"{folded.check.logits:.1e} at most"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("mean error under")
    for heading in ("scores, before", "after", "values, before", "after"):
        table.add_column(heading, justify="right")
    for quantizer in dict.fromkeys(error.quantizer for error in folded.errors):
        rows = [error for error in folded.errors if error.quantizer == quantizer]
        columns = [[error.key[0] for error in rows], [error.key[1] for error in rows]]
        columns += [[error.value[0] for error in rows], [error.value[1] for error in rows]]
        table.add_row(quantizer, *(f"{100 * sum(c) / len(c):.3g} %" for c in columns))
    out.print(table)


def export_values(result: ExportResult) -> dict[str, Any]:
    """An export's result as JSON values."""
    from dataclasses import asdict

    written, folded = result.written, result.folded
    return {
        "ok": result.ok,
        "directory": None if written is None else str(written.directory),
        "files": [] if written is None else list(written.files),
        "weights": None if written is None else written.weights.value,
        "new_bytes": 0 if written is None else written.new_bytes,
        "sidecar": None if result.sidecar is None else str(result.sidecar),
        "tensors": list(result.tensors),
        "engines": [{**asdict(engine), "ok": engine.ok} for engine in result.engines],
        "remarks": list(result.remarks),
        "folded": None if folded is None else asdict(folded),
    }


def show_verify(report: VerifyReport, run: RunReport | None) -> None:
    """What an engine would make of a directory."""
    from rich import box
    from rich.table import Table

    out = console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("layers", "K scale", "V scale", "from"):
        table.add_column(heading)
    for layers, verdict in _alike(report.layers):
        table.add_row(
            layers, _scale(verdict.key_scale), _scale(verdict.value_scale), verdict.source
        )
    out.print(table)
    _show_findings(out, report.findings)
    serious = sum(finding.serious for finding in report.findings)
    wrong = "1 thing is wrong" if serious == 1 else f"{serious} things are wrong"
    judged = "would be served as meant" if report.ok else wrong
    out.print(f"\n{report.engine}: {report.directory}: {judged}", soft_wrap=True, markup=False)
    if run is not None:
        _show_run(out, run)


def _alike(layers: tuple[LayerVerdict, ...]) -> list[tuple[str, LayerVerdict]]:
    """Layers whose scales are the same, together; nearly always each is alone."""
    rows: dict[tuple[Any, ...], list[LayerVerdict]] = {}
    for verdict in layers:
        key = (verdict.key_scale, verdict.value_scale, verdict.source)
        rows.setdefault(key, []).append(verdict)
    return [(ranges(each.layer for each in row), row[0]) for row in rows.values()]


def _scale(scale: tuple[float, ...]) -> str:
    if not scale:
        return "?"
    if len(scale) == 1:
        return f"{scale[0]:.5g}"
    return f"{min(scale):.5g} … {max(scale):.5g} ({len(scale)} heads)"


def _show_run(out: Console, run: RunReport) -> None:
    versions = ", ".join(f"{name} {number}" for name, number in run.versions.items())
    tokens = some(len(run.generated), "token")
    out.print(f"\nrun with {versions}: {tokens} generated", markup=False)
    for change in run.changes:
        out.print(
            f"  {change.slot} of layer {change.layer} times {change.factor:.3g}: logits change by "
            f"{change.logits:.2g}"
        )
    _show_findings(out, run.findings)
    out.print("the scales are used" if run.ok else "the scales are NOT used as meant")
