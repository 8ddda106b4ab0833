"""An evaluation as one HTML file that needs nothing else: no network, no fonts, no scripts.

Whatever comes out of a report (answers of a model, names of files) is text: jinja escapes it, and
`visible` is applied to every string that the template prints. Should markup get through all the
same, the page's Content-Security-Policy lets it load and run nothing.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvquant
from kvquant.errors import InputError
from kvquant.storage import write_atomically

from . import figures, wording
from .compare import Comparison, columns
from .headline import BROKEN, UNJUDGED, headline, measure, measured
from .heat import Tally
from .page import report_values, slug
from .results import Arm, EvalReport

if TYPE_CHECKING:
    import jinja2

ANSWER_CHARACTERS = 300
"""Characters shown of an answer."""


def check_report_tools() -> None:
    """Makes sure, before long work, that `write_html` will be able to.

    Raises:
        InputError: jinja2 is not installed.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise InputError("an HTML report needs jinja2: pip install 'kvquant-toolkit[report]'")


def write_html(report: EvalReport, path: Path) -> None:
    """Writes the page, in one step.

    Raises:
        InputError: jinja2 is missing, or the place cannot be written.
    """
    write_atomically(path, report_html(report).encode())


def report_html(report: EvalReport) -> str:
    """The page.

    Raises:
        InputError: jinja2 is missing.
    """
    return render("report.html.j2", report_values(report))


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Writes a page with several runs side by side, in one step.

    Raises:
        InputError: jinja2 is missing, or the place cannot be written.
    """
    write_atomically(path, comparison_html(comparison).encode())


def comparison_html(comparison: Comparison) -> str:
    """That page.

    Raises:
        InputError: jinja2 is missing.
    """
    each = zip(comparison.names, comparison.reports, comparison.statuses, strict=True)
    runs = [
        {"name": name, "report": report, "css": _css(status), "headline": headline(report)}
        for name, report, status in each
    ]
    return render("compare.html.j2", {"comparison": comparison, "runs": runs})


def render(template: str, values: Mapping[str, Any]) -> str:
    """A template of this package, with its style sheet and script inside.

    Raises:
        InputError: jinja2 is missing.
    """
    check_report_tools()
    from markupsafe import Markup

    script = _resource("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        _environment()
        .get_template(template)
        .render(
            **values,
            script=Markup(script),
            script_hash=f"sha256-{digest}",
            version=kvquant.__version__,
        )
    )


def _resource(name: str) -> str:
    return (files(__package__) / "templates" / name).read_text(encoding="utf-8")


def _environment() -> jinja2.Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=FunctionLoader(_resource),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: wording.visible(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        columns=columns,
        css=_css,
        growth=wording.growth,
        held=_held,
        interval=wording.interval,
        growths=lambda value: wording.interval(value, wording.growth),
        percents=lambda value: wording.interval(value, wording.percent),
        marker=lambda place: Markup(figures.marker(place)),
        measure=measure,
        measured=lambda value, name: measured(name, value),
        multiline=lambda text: escape(wording.visible(text, keep="\n")),
        number=wording.number,
        percent=wording.percent,
        plural=wording.plural,
        shade=_shade,
        shortened=_shortened,
        size=wording.size,
        slug=slug,
        times=wording.times,
        unbroken=lambda text: text.replace(" %", "\u00a0%"),
    )
    return environment


def _css(status: str) -> str:
    return {BROKEN: "failed", UNJUDGED: "unjudged"}.get(status, status)


def _held(arm: Arm) -> float:
    """What an arm holds of the 16-bit cache, in percent."""
    share = arm.live_nbytes / arm.reference_nbytes if arm.reference_nbytes else 0.0
    return round(min(share, 1.0) * 100, 1)


def _shade(tally: Tally) -> str:
    """Class of a square."""
    if not tally.counted:
        return "out"
    if not tally.lost:
        return "kept"
    if tally.share_lost <= 0.25:
        return "lost-1"
    return "lost-2" if tally.share_lost <= 0.5 else "lost-3"


def _shortened(text: str) -> str:
    if len(text) <= ANSWER_CHARACTERS:
        return text
    left = len(text) - ANSWER_CHARACTERS
    return f"{text[:ANSWER_CHARACTERS]}… ({left:,} characters more)"
