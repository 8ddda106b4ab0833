"""`kvquant report`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from kvquant.options import json_option

if TYPE_CHECKING:
    from pathlib import Path

    from .compare import Comparison
    from .results import EvalReport


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--html", metavar="FILE", help="Write a self-contained HTML file too.")
@click.option("--force", is_flag=True, help="Compare runs although their numbers are not paired.")
@json_option
def report(files: tuple[str, ...], html: str | None, force: bool, as_json: bool) -> None:
    """Show evaluations again, or side by side.

    FILE is the JSON of `kvquant evaluate`. One of them is shown as it was when it was made, and
    --html makes its page. Several are compared, each with the first: what differs between the
    runs, and all numbers of each arm with their changes.

    Numbers of runs that read other tokens or looked for other needles are not paired: that is an
    error, and --force shows them nevertheless. Other models, adapters, schemes and versions are
    what a comparison may be about; they are named.

    Exit code 0: shown, whatever the verdicts in the files; 2: no such file, or not comparable.

    \b
    Examples:
      kvquant report eval.json --html eval.html
      kvquant report before.json after.json
      kvquant report before.json after.json --json
    """  # noqa: D301
    from pathlib import Path

    from kvquant.storage import check_writable

    from .report_file import read_report

    reports = [read_report(Path(file)) for file in files]
    page = Path(html) if html else None
    if page is not None:
        from .html import check_report_tools

        check_report_tools()
        _check_apart(page, files)
        check_writable(page)
    if len(reports) == 1:
        _show(reports[0], page, as_json)
    else:
        from .compare import compare, short_names

        _show_comparison(compare(short_names(files), reports, force), page, as_json)


def _check_apart(page: Path, files: tuple[str, ...]) -> None:
    """A page in the place of a run would be the end of the run."""
    from kvquant.errors import InputError

    for file in files:
        if page.exists() and page.samefile(file):
            raise InputError(f"--html {page} is the evaluation itself: name another file")


def _show(found: EvalReport, page: Path | None, as_json: bool) -> None:
    if page is not None:
        from .html import write_html

        write_html(found, page)
    if as_json:
        _print_json(found.to_dict())
        return
    from .table import show

    show(found, [page] if page else [])


def _show_comparison(found: Comparison, page: Path | None, as_json: bool) -> None:
    if page is not None:
        from .html import write_comparison

        write_comparison(found, page)
    if as_json:
        _print_json(found.to_dict())
        return
    from .table import comparison_table, print_tables

    print_tables(comparison_table(found, [page] if page else []))


def _print_json(values: Any) -> None:
    click.echo(json.dumps(values, indent=2, allow_nan=False))
