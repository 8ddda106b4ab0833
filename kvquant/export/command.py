"""`kvquant export` and `kvquant verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvquant.errors import ExportError
from kvquant.options import base_option, json_option

EXIT_WRONG = 1

_NOT_BESIDE = ("merge_adapter", "fold", "copy", "per_head")
"""Options that have no meaning for a file beside an adapter."""


@click.command()
@click.option(
    "--model",
    "-m",
    metavar="MODEL",
    help="Model directory, hub id, PEFT adapter directory, or smollm2.",
)
@base_option
@click.option(
    "--adapter", "-a", "adapters", multiple=True, metavar="DIR", help="PEFT adapter of the model."
)
@click.option("--scales", "-s", metavar="FILE", help="Scales from kvquant calibrate.")
@click.option(
    "--engine",
    "-e",
    "engines",
    multiple=True,
    metavar="NAME",
    help="Who is to read them: see --list. all: whoever one directory can serve.",
)
@click.option("--output", "-o", metavar="DIR", help="Directory to write; new or empty.")
@click.option(
    "--merge-adapter",
    is_flag=True,
    help="Merge the adapters into the weights, served with their own scales.",
)
@click.option(
    "--sidecar",
    is_flag=True,
    help="Write kvquant_scales.json beside the adapter instead of a directory.",
)
@click.option("--per-head", is_flag=True, help="A scale per KV head where the engine takes it.")
@click.option(
    "--tensor-parallel",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="GPUs that share a layer; for sglang-json, which has an entry per GPU.",
)
@click.option(
    "--fold",
    type=click.Choice(["fp8", "int8", "int4"]),
    help="Move differences between channels into the weights, where that is exact, for static "
    "fp8 scales or for an engine's own int8 or int4.",
)
@click.option(
    "--data",
    "-d",
    metavar="PATH",
    help="Text to fold by: a file, a directory, a data set. [default: Python's own help texts]",
)
@click.option("--copy", is_flag=True, help="Copy the weights instead of linking to them.")
@click.option("--force", is_flag=True, help="Take scales of another model of the same shape.")
@click.option("--list", "is_list", is_flag=True, help="Engines, formats, versions read; then end.")
@json_option
@click.pass_context
def export(
    context: click.Context,
    /,
    model: str | None,
    base: str | None,
    adapters: tuple[str, ...],
    scales: str | None,
    engines: tuple[str, ...],
    output: str | None,
    is_list: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write calibrated scales so that serving engines really load them.

    The directory holds links to the model's own weights, one small file of scales, and the config
    that makes the engine look for it. What an engine cannot take is refused, and what it ignores is
    said. The result is verified by the rules of the engine's loader.

    Exit code 0: would be served as meant; 1: would not, and why; 2: not possible.

    \b
    Examples:
      kvquant export --list
      kvquant export --model my-model --scales my-kv --engine vllm --output my-model-fp8kv
      kvquant export --model my-lora --scales my-kv --merge-adapter --engine all --output served
      kvquant export --model my-model --fold int4 --engine vllm --output my-model-folded
    """
    from . import show

    if is_list:
        show.print_json(show.engines_values()) if as_json else show.show_engines()
        return
    _check_options(model, scales, engines, output, options)
    assert model is not None
    from kvquant.models.source import resolve

    from .export import ExportRequest
    from .export import export as run

    request = ExportRequest(
        resolve(model, base=base, adapters=adapters),
        scales,
        engines,
        None if output is None else Path(output),
        **options,
    )
    result = run(request, _notify)
    show.print_json(show.export_values(result)) if as_json else show.show_export(result)
    context.exit(0 if result.ok else EXIT_WRONG)


def _check_options(
    model: str | None,
    scales: str | None,
    engines: tuple[str, ...],
    output: str | None,
    options: dict[str, Any],
) -> None:
    """Refuses what cannot be meant.

    Raises:
        ExportError: Something is missing, or two things exclude each other.
    """
    if model is None:
        raise ExportError("nothing to export: name the model with --model (--list shows engines)")
    if scales is None and options["fold"] in (None, "fp8"):
        raise ExportError("name the scales with --scales: kvquant calibrate makes them")
    if options["sidecar"]:
        given = {"engine": engines, "output": output, **options}
        both = [name for name in ("engine", "output", *_NOT_BESIDE) if given[name]]
        if both:
            named = f"--{both[0].replace('_', '-')}"
            raise ExportError(f"--sidecar writes one file beside the adapter: leave {named} out")
    elif not engines:
        raise ExportError("name who is to read it with --engine: --list shows them, or all")
    if options["data"] is not None and options["fold"] is None:
        raise ExportError("--data is text to fold by: leave it out, or add --fold")
    if scales is not None and options["fold"] in ("int8", "int4"):
        raise ExportError(
            f"an engine's own {options['fold']} computes its scales while serving: leave --scales "
            "out, or --fold fp8"
        )


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--engine", "-e", required=True, metavar="NAME", help="Who is to serve it.")
@click.option(
    "--run",
    "is_run",
    is_flag=True,
    help="Load it in Transformers with compressed-tensors too, and show that scales are used.",
)
@json_option
@click.pass_context
def verify(
    context: click.Context, /, directory: Path, engine: str, is_run: bool, as_json: bool
) -> None:
    """Would an engine load the scales in DIR, and all of them?

    Follows the naming rules of the engine's loader on the headers of the files; needs neither the
    engine nor a GPU. DIR may come from kvquant, llm-compressor, ModelOpt, or a text editor.

    Exit code 0: would be served as meant; 1: would not, and why; 2: cannot be looked at.

    \b
    Examples:
      kvquant verify my-model-fp8kv --engine vllm
      kvquant verify my-model-fp8kv --engine transformers --run
    """
    from . import show
    from .verify import verify as look

    report = look(directory, engine)
    ran = None
    if is_run:
        from .verify_run import run

        ran = run(directory, engine)
    if as_json:
        values = report.to_dict()
        show.print_json(values if ran is None else {**values, "run": ran.to_dict()})
    else:
        show.show_verify(report, ran)
    is_fine = report.ok and (ran is None or ran.ok)
    context.exit(0 if is_fine else EXIT_WRONG)


def _notify(message: str) -> None:
    click.echo(message, err=True)
