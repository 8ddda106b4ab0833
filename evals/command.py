"""`kvquant evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvquant.errors import InputError
from kvquant.options import (
    adapters_option,
    base_option,
    json_option,
    model_option,
    placement_options,
)

if TYPE_CHECKING:
    from .gate_file import Gate
    from .request import Request
    from .results import EvalReport

EXIT_DRIFT = 1
HTML, JSON = ".html", ".json"


class _Numbers(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers with commas between."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> tuple[int, ...]:
        """``0,50,100`` becomes (0, 50, 100)."""
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list such as 0,50,100", param, context)
        if any(not 0 <= it <= 100 for it in found) or len(set(found)) < len(found):
            self.fail(f"{value}: different percentages from 0 to 100 are wanted", param, context)
        return found


class _Names(click.ParamType):  # type: ignore[type-arg]
    """Names with commas between."""

    name = "names"

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> tuple[str, ...]:
        """``a,b`` becomes (a, b)."""
        if isinstance(value, tuple):
            return value
        found = tuple(filter(None, (part.strip() for part in str(value).split(","))))
        if len(set(found)) < len(found):
            self.fail(f"{value} names something twice", param, context)
        return found


def _print_gate(context: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from .gate_file import load_gate

        click.echo(load_gate(None).to_toml(), nl=False)
        context.exit()


@click.command()
@model_option
@base_option
@adapters_option
@click.option(
    "--scales",
    "scales",
    multiple=True,
    metavar="FILE",
    help="Calibrated scales, in the format they were made for. Each is an arm.",
)
@click.option(
    "--scheme",
    "-s",
    "schemes",
    multiple=True,
    metavar="NAME[@FILE]",
    help="Preset, such as int8; with calibrated scales or means, such as int4@ft-scales; or a "
    "cache of Transformers: hf:quanto, hf:hqq, hf:fp8. Each is an arm.",
)
@click.option(
    "--lengths",
    "-l",
    metavar="TOKENS",
    help="Contexts: 1k,4k,16k; or served: what the scales were made for. [default: served]",
)
@click.option(
    "--max-model-len",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Length served, if no scales know it.",
)
@click.option(
    "--report",
    "-r",
    "report_path",
    metavar="FILE",
    help="FILE.html and FILE.json, or FILE.json alone. [default: the model's name + -eval.json]",
)
@click.option(
    "--gate",
    "gate_path",
    metavar="FILE",
    help="Thresholds in TOML (--print-gate), or `defaults`: exit with 1 unless all hold.",
)
@click.option(
    "--print-gate",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_gate,
    help="Print the default thresholds as a file to start from, and exit.",
)
@click.option(
    "--self-check",
    "only_self_check",
    is_flag=True,
    help="Only make sure that the cache is really read, and held as its scheme says.",
)
@click.option(
    "--data",
    "-d",
    metavar="PATH",
    help="Text to score: .txt, .jsonl, .json, .parquet, a directory of those, or a dataset's "
    "name. [default: Python's own help texts]",
)
@click.option("--text-field", metavar="NAME", help="Field of a row that holds its text.")
@click.option("--chat", is_flag=True, help="Apply the chat template, to rows and to needles.")
@click.option(
    "--documents",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    metavar="N",
    help="Documents of the longest length to score; 0: none. Intervals want 32.",
)
@click.option(
    "--prefill",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    metavar="TOKENS",
    help="Tokens read before the first one is scored.",
)
@click.option(
    "--block",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    metavar="TOKENS",
    help="Tokens read at once after that; 1 is true decoding, 64 times slower.",
)
@click.option(
    "--chunk",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Cut prefills, each piece reading those before it through the codes, as engines with "
    "chunked prefill do. [default: in one call]",
)
@click.option(
    "--tasks",
    "-t",
    type=_Names(),
    default="single",
    show_default=True,
    metavar="NAMES",
    help="Needles: single, repeat, multikey, multivalue, tracking.",
)
@click.option(
    "--depths",
    type=_Numbers(),
    default="0,25,50,75,100",
    show_default=True,
    metavar="PERCENT",
    help="Where needles are.",
)
@click.option(
    "--trials",
    "-n",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    metavar="N",
    help="Prompts for each task, length and depth; 0: none. 59 answers without a loss show "
    "that fewer than 5 % are lost.",
)
@click.option(
    "--haystack",
    multiple=True,
    metavar="PATH",
    help="Text that needles are hidden in. [default: Python's own help texts]",
)
@click.option(
    "--answer-tokens",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Room for an answer. [default: what the task takes, and 8 more]",
)
@click.option(
    "--batch-size",
    "-b",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Needle prompts read together.",
)
@click.option(
    "--continuations",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    metavar="N",
    help="Texts to continue greedily.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    metavar="N",
    help="Tokens to continue them by.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of needles, noise and bootstrap.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="At most N documents, and N needles for each task and length: a first look.",
)
@click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="Go on where an interrupted run of the same evaluation stopped.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Take scales of another model of the same shape: what they cost is the question.",
)
@placement_options
@json_option
@click.pass_context
def evaluate(
    context: click.Context,
    /,
    model: str,
    base: str | None,
    adapters: tuple[str, ...],
    schemes: tuple[str, ...],
    scales: tuple[str, ...],
    report_path: str | None,
    gate_path: str | None,
    resume: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Does a quantized cache still work, at the lengths you serve?

    Holds any number of arms against the unquantized cache, on the same tokens: how far predictions
    move (block decode, so that the cache is really read), which needles are lost, how texts go on.
    Each report proves first that what it measured was read from the quantized cache.

    Exit code 0: all that --gate asks for holds, or there is no gate; 1: it does not, or a
    self-check failed; 2: something cannot be evaluated.

    \b
    Examples:
      kvquant evaluate --model ft-model --scales ft-scales --report report.html
      kvquant evaluate --model ft-model --scales ft-scales --scheme int4@ft-scales \\
          --lengths 1k,4k,16k --trials 12 --gate gate.toml
      kvquant evaluate --model base -a my-lora --scales my-lora-kv --scales base-kv --force
      kvquant evaluate --model smollm2 --scheme int4 --scheme hf:quanto --lengths 1k --limit 2
      kvquant evaluate --model new-model --scheme int8 --self-check
    """
    from .arms import parse_arms

    requests = parse_arms(schemes, scales)
    page, data = _files(report_path, model)
    gate = _gate(gate_path)

    from kvquant.geometry import CacheGeometry
    from kvquant.models.source import read_config, resolve
    from kvquant.progress import notify
    from kvquant.storage import check_writable

    for path in filter(None, (page, data)):
        check_writable(path)
    source = resolve(model, base=base, adapters=adapters)
    geometry = CacheGeometry.from_config(read_config(source))

    from .arms import prepare_arms
    from .request import Request, check_judges, choose_lengths

    arms = prepare_arms(requests, geometry)
    gate.check({arm.name: arm.scheme_class for arm in arms})
    lengths = choose_lengths(
        options.pop("lengths"), options.pop("max_model_len"), arms, geometry, notify
    )
    request = Request(source, arms, lengths, **options)
    if gate_path is not None:
        check_judges(gate, request)
    report = _run(request, gate, data, page, resume)
    _show(report, [path for path in (page, data) if path is not None], as_json)
    verdict = report.verdict
    assert verdict is not None
    is_drift = bool(verdict.failed_checks) or (gate_path is not None and not verdict.passed)
    context.exit(EXIT_DRIFT if is_drift else 0)


def _files(asked: str | None, model: str) -> tuple[Path | None, Path]:
    """The HTML page, if there is to be one, and the JSON file."""
    if asked is None:
        return None, Path(f"{Path(model).expanduser().resolve().name}-eval{JSON}")
    path = Path(asked).expanduser()
    if path.suffix == JSON:
        return None, path
    if path.suffix not in ("", HTML) or not path.name:
        raise InputError(f"--report {asked}: a name that ends in .html or .json is wanted")

    from .html import check_report_tools

    check_report_tools()
    return path.with_suffix(HTML), path.with_suffix(JSON)


def _gate(asked: str | None) -> Gate:
    from .gate_file import DEFAULT_GATE, load_gate

    return load_gate(None if asked == DEFAULT_GATE else asked)


def _run(request: Request, gate: Gate, data: Path, page: Path | None, resume: bool) -> EvalReport:
    """Evaluates, judges, writes."""
    import shutil
    from dataclasses import replace

    from .gate import judge
    from .report_file import write_report
    from .runner import evaluate as run

    partial = data.with_name(f"{data.name.removesuffix(JSON)}.partial")
    report = run(request, partial, resume=resume)
    report = replace(report, verdict=judge(report, gate))
    write_report(report, data)
    if page is not None:
        from .html import write_html

        write_html(report, page)
    shutil.rmtree(partial, ignore_errors=True)
    return report


def _show(report: EvalReport, files: list[Path], as_json: bool) -> None:
    if as_json:
        from .report_file import report_json

        click.echo(report_json(report), nl=False)
        return
    from .table import show

    show(report, files)
