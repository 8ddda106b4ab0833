"""`kvquant check`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from kvquant.options import adapters_option, base_option, json_option, placement_options

if TYPE_CHECKING:
    from kvquant.geometry import CacheGeometry

    from .check_report import CheckReport

EXIT_DIFFERS = 1


@click.command()
@click.argument("model", metavar="MODEL")
@base_option
@adapters_option
@click.option(
    "--scheme",
    "-s",
    "schemes",
    multiple=True,
    metavar="NAME",
    help="Preset to measure, such as int4. [default: all of them]",
)
@click.option(
    "--scales", metavar="FILE", help="Calibrated scales for the schemes that can use them."
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Length of the text to begin with. [default: 192, or what the model has positions for]",
)
@click.option(
    "--tokens",
    "-n",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    metavar="N",
    help="Tokens to decode.",
)
@placement_options
@json_option
@click.pass_context
def check(
    context: click.Context,
    /,
    model: str,
    base: str | None,
    adapters: tuple[str, ...],
    schemes: tuple[str, ...],
    dtype: str,
    device: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Is the quantized cache exact on this model?

    Run it first on a model family that is new to you. Decodes greedily without a cache, with
    Transformers' cache, and with the quantized cache where it does not round: one text, a text in
    pieces, a padded batch. Then measures what each scheme stores, against its formula, and how
    much it changes keys and values.

    Exit code 0: all is as it must be; 1: something differs, and what.

    \b
    Examples:
      kvquant check my-model
      kvquant check my-model --adapter my-lora --scheme int4 --scales ft-scales
      kvquant check gemma --prompt-tokens 5000  # beyond its sliding window
    """
    from kvquant.geometry import CacheGeometry
    from kvquant.models.source import read_config, resolve
    from kvquant.presets import preset, preset_names

    source = resolve(model, base=base, adapters=adapters)
    geometry = CacheGeometry.from_config(read_config(source))
    names = schemes or tuple(preset_names())
    for name in names:
        preset(name).check(geometry)
    _check_scales(options["scales"], geometry)

    from kvquant.models.loading import load

    from . import check as run

    run.prompt_length(geometry, options["prompt_tokens"], options["tokens"])
    loaded = load(source, dtype=dtype, device=device, notify=_notify)
    with _steps(run.CASES + len(names)) as progress:
        report = run.check(
            loaded.model,
            loaded.tokenizer,
            name=source.base,
            adapters=source.adapters,
            schemes=names,
            progress=progress,
            **options,
        )
    _show(report, as_json)
    context.exit(EXIT_DIFFERS if report.findings else 0)


def _check_scales(path: str | None, geometry: CacheGeometry) -> None:
    """Makes sure that there are such scales, for such a cache, before weights are read.

    Raises:
        FileFormatError: There are none.
        FingerprintError: They are another model's.
    """
    if path is None:
        return
    from kvquant.fingerprint import Fingerprint
    from kvquant.storage import load_scales

    scales = load_scales(path)
    if scales.geometry != geometry:
        scales.check_model(Fingerprint(), geometry)  # says what differs


def _notify(message: str) -> None:
    click.echo(message, err=True)


@contextmanager
def _steps(total: int) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says which of `total` steps is going on, from the first one on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("checking {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True))
    task = progress.add_task("", total=total)
    begun = 0

    def step(name: str) -> None:
        nonlocal begun
        progress.update(task, description=name, completed=begun)
        if not begun:
            progress.start()
        begun += 1

    try:
        yield step
        progress.update(task, description="done", completed=total)
    finally:
        if begun:
            progress.stop()


def _show(report: CheckReport, as_json: bool) -> None:
    """The report on stdout; numbers that JSON has no word for become null."""
    if as_json:
        values = json.loads(json.dumps(report.to_dict()), parse_constant=lambda name: None)
        click.echo(json.dumps(values, indent=2))
        return
    from rich.console import Console

    from .check_table import check_table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=100, highlight=False)
    console.print(check_table(report))
