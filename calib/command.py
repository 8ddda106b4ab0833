"""`kvquant calibrate`, `solve`, `merge`, `drift` and `inspect`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from kvquant.errors import InputError
from kvquant.options import base_option, json_option, model_option, placement_options

from .options import (
    build_method,
    build_scheme,
    plot_option,
    scheme_options,
    verbose_option,
)

EXIT_RECALIBRATE = 1


@click.command()
@model_option
@base_option
@click.option(
    "--adapter",
    "-a",
    "adapters",
    multiple=True,
    metavar="DIR",
    help="PEFT adapter on top of the model; several are active together, or apart with --shared.",
)
@click.option(
    "--shared",
    is_flag=True,
    help="One set of scales that is safe for the base and for each adapter: engines keep one "
    "set per server.",
)
@click.option(
    "--output",
    "-o",
    metavar="NAME",
    help="Writes NAME.safetensors (scales) and NAME.stats. [default: the model's name + -kv]",
)
@click.option(
    "--data",
    "-d",
    metavar="PATH",
    help=".txt, .jsonl, .json, .parquet, a directory of those, or a dataset's name. "
    "[default: Python's own help texts]",
)
@click.option("--text-field", metavar="NAME", help="Field of a row that holds its text.")
@click.option("--chat", is_flag=True, help="Rows are message lists: apply the chat template.")
@click.option(
    "--context-length",
    "-c",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Length you serve. [default: the model's positions, at most 8192]",
)
@click.option(
    "--samples",
    "-n",
    type=click.IntRange(min=1),
    metavar="N",
    help="Blocks of that length. [default: enough for 32768 tokens, at least 4]",
)
@click.option(
    "--chunk",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    metavar="TOKENS",
    help="Tokens per forward pass; memory grows with it.",
)
@placement_options
@click.option(
    "--device-map", type=click.Choice(["auto"]), help="Spread the model over all GPUs and the CPU."
)
@scheme_options
@json_option
@verbose_option
def calibrate(
    output: str | None, as_json: bool, verbose: bool, adapters: tuple[str, ...], **options: Any
) -> None:
    """Measure a model's keys and values and write the scales of its quantized cache.

    Reads text through the model at the length you serve, records what goes into the KV cache
    (after RoPE, per KV head and channel), and solves scales for a format. The statistics are kept,
    so that `kvquant solve` can make scales for other formats without the model.

    \b
    Examples:
      kvquant calibrate --model ft-model --data prompts.jsonl --context-length 16384 -o ft-scales
      kvquant calibrate --model base-model --adapter my-lora -o lora-scales
      kvquant calibrate --model base-model -a lora-a -a lora-b --shared -o server-scales
      kvquant calibrate --model smollm2 --context-length 512 --samples 4  # a first, quick look
    """
    scheme, method = build_scheme(options), build_method(options)

    from kvquant.models.source import resolve

    source = resolve(options.pop("model"), base=options.pop("base"), adapters=adapters)
    default = f"{Path(source.requested).expanduser().resolve().name}-kv"
    name = output_name(default if output is None else output)

    from . import calibrate as run
    from .output import show_calibration

    request = run.Request(source, scheme, method, **options)
    calibration = run.calibrate(request, name)
    files = run.save(calibration, name)
    show_calibration(calibration, files, as_json, verbose)


@click.command()
@click.argument("stats", nargs=-1, required=True, metavar="STATS…")
@click.option("--output", "-o", required=True, metavar="NAME", help="Writes NAME.safetensors.")
@scheme_options
@json_option
@verbose_option
def solve(
    stats: tuple[str, ...], output: str, as_json: bool, verbose: bool, **options: Any
) -> None:
    """Make scales for another format from saved statistics, without the model.

    Several statistics (a base and its adapters) give one set of scales that is safe for all.

    \b
    Examples:
      kvquant solve ft-scales.stats --format int8 --granularity per-channel -o ft-int8
      kvquant solve server.base.stats server.lora-a.stats --method mse -o server-mse
    """
    scheme, method = build_scheme(options), build_method(options)

    from functools import reduce

    from kvquant.scales import KVScales
    from kvquant.storage import save_scales

    from .output import show_scales
    from .solve import solve as solve_stats

    members = [load_stats_named(path) for path in stats]
    scales = reduce(KVScales.union, (solve_stats(member, scheme, method) for member in members))
    path = Path(f"{output_name(output)}.safetensors")
    save_scales(scales, path)
    show_scales(scales, path, as_json, verbose)


@click.command()
@click.argument("stats", nargs=-1, required=True, metavar="STATS…")
@click.option("--output", "-o", required=True, metavar="NAME", help="Writes NAME.stats.")
@json_option
def merge(stats: tuple[str, ...], output: str, as_json: bool) -> None:
    """Join statistics of one model that several machines collected.

    Extremes and histograms are joined exactly: the order does not matter.

    \b
    Example:
      kvquant merge part-a.stats part-b.stats -o whole
    """
    from kvquant.progress import notify

    from .output import print_json
    from .stats import merge_all
    from .stats_file import save_stats

    joined = merge_all(load_stats_named(path) for path in stats)
    texts = [str(corpus.get("sha256")) for corpus in joined.provenance.corpora]
    if len(set(texts)) < len(texts):
        notify("warning: parts that read the same text count it several times; is a file repeated?")
    path = Path(f"{output_name(output)}.stats")
    save_stats(joined, path)
    if as_json:
        print_json({"files": [str(path)], "parts": len(stats), "tokens": joined.tokens})
    else:
        files = "1 file" if len(stats) == 1 else f"{len(stats)} files"
        click.echo(f"{path}: {joined.tokens:,} tokens from {files}")


@click.command()
@click.argument("base", metavar="BASE.stats")
@click.argument("tuned", metavar="FINE-TUNE.stats")
@scheme_options
@click.option(
    "--max-clipped",
    type=float,
    metavar="SHARE",
    help="Share of a head's values that the base's range may clip. [default: 0.01]",
)
@click.option(
    "--max-loss",
    type=float,
    metavar="DB",
    help="Signal-to-noise ratio that a head may lose, in dB. [default: 3]",
)
@plot_option
@json_option
@verbose_option
@click.pass_context
def drift(
    context: click.Context,
    /,
    base: str,
    tuned: str,
    plot: str | None,
    as_json: bool,
    verbose: bool,
    max_clipped: float | None,
    max_loss: float | None,
    **options: Any,
) -> None:
    """May a fine-tune keep the scales of its base?

    Compares two statistics files on paper: the fine-tune's values are quantized with the base's
    scales and with their own, per layer and KV head. Exit code 0: safe; 1: recalibrate.

    Text moves ranges too. Calibrate the base on the fine-tune's text as well if you want to know
    what the weights alone do.

    \b
    Examples:
      kvquant drift base-scales.stats ft-scales.stats
      kvquant drift base-scales.stats ft-scales.stats --format int8 --plot drift.png
    """
    scheme, method = build_scheme(options), build_method(options)

    from .drift import DriftThresholds
    from .drift import drift as compare
    from .output import print_json, print_tables

    limits = {"max_clipped": max_clipped, "max_loss_db": max_loss}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    report = compare(
        load_stats_named(base), load_stats_named(tuned), scheme, method, DriftThresholds(**given)
    )
    if plot:
        from .plot import plot_drift

        plot_drift(report, Path(plot))
    if as_json:
        print_json(report.to_dict())
    else:
        from .tables import drift_table

        print_tables(drift_table(report, verbose))
    context.exit(0 if report.safe else EXIT_RECALIBRATE)


@click.command()
@click.argument("file", metavar="FILE")
@plot_option
@json_option
@verbose_option
def inspect(file: str, plot: str | None, as_json: bool, verbose: bool) -> None:
    """Show what a scales, statistics or prefix file holds, and where it comes from.

    With --plot it draws a heat map, layer by channel, of the largest keys and values: outlier
    channels stand out as columns.

    \b
    Examples:
      kvquant inspect ft-scales
      kvquant inspect ft-scales.stats --plot ft.png --verbose
    """
    from .output import show_file

    show_file(file, plot, as_json, verbose)


def output_name(output: str) -> str:
    """`output` without a suffix that would be appended again.

    Raises:
        InputError: The name of a directory, not of a file in it.
    """
    name = output
    for suffix in (".safetensors", ".stats"):
        name = name.removesuffix(suffix)
    if os.path.basename(name) in ("", ".", ".."):
        raise InputError(
            f"--output {output!r} names no file: give a name without suffix, such as "
            f"{os.path.join(name, 'ft-scales')}"
        )
    return os.path.expanduser(name)


def load_stats_named(path: str) -> Any:
    """Statistics from `path`, with or without its ``.stats``."""
    from kvquant.storage import find

    from .stats_file import load_stats

    return load_stats(find(path, ".stats"))
