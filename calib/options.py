"""Command-line options that several commands share, and how they become a scheme."""

from __future__ import annotations

import re
from typing import Any

import click

from kvquant.errors import SchemeError
from kvquant.options import Command
from kvquant.scheme import (
    Granularity,
    QuantScheme,
    TensorFormat,
    TensorScheme,
    format_names,
    tensor_format,
)

from .method import Method, RangeMethod

_FORMATS = f"fp8 or one of {', '.join(format_names())}"
_LAYER = re.compile("[0-9]{1,5}")  # no set of ten billion numbers
_GRANULARITIES = ", ".join(g.value for g in Granularity if g.is_static)


def scheme_options(command: Command) -> Command:
    """Adds everything that describes a scheme and how its ranges are chosen."""
    options = [
        click.option(
            "--format", "format_name", default="fp8", show_default=True, metavar="NAME",
            help=f"Format of keys and values: {_FORMATS}.",
        ),
        click.option("--key-format", metavar="NAME", help="Format of the keys alone."),
        click.option("--value-format", metavar="NAME", help="Format of the values alone."),
        click.option(
            "--granularity", default="per-tensor", show_default=True, metavar="NAME",
            help=f"What shares a scale: {_GRANULARITIES}. Most engines read per-tensor.",
        ),
        click.option("--key-granularity", metavar="NAME", help="Granularity of the keys alone."),
        click.option(
            "--value-granularity", metavar="NAME", help="Granularity of the values alone."
        ),
        click.option(
            "--asymmetric", is_flag=True,
            help="Give int8 and int4 a zero point; FP8 has none.",
        ),
        click.option(
            "--skip-layers", default="", metavar="0,1,…",
            help="Layers that stay in the model's own dtype.",
        ),
        click.option(
            "--method", default="amax", show_default=True,
            type=click.Choice(["amax", "percentile", "mse"]),
            help="How far a range reaches: to the largest value, to a percentile, or to where the "
            "squared error is least.",
        ),
        click.option(
            "--percentile", type=float, metavar="P",
            help="Share of values in percent that --method percentile covers. [default: 99.99]",
        ),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def plot_option(command: Command) -> Command:
    """Adds ``--plot``."""
    return click.option("--plot", metavar="FILE", help="Draw it into a .png, .svg or .pdf file.")(
        command
    )


def verbose_option(command: Command) -> Command:
    """Adds ``--verbose``."""
    return click.option(
        "--verbose", "-v", is_flag=True, help="Show every layer, not only those that matter."
    )(command)


def build_scheme(options: dict[str, Any]) -> QuantScheme:
    """Takes the scheme options out of a command's options.

    Raises:
        SchemeError: An unknown name, one that needs no calibration, or a combination that does not
            exist.
    """
    common, granularity = options.pop("format_name"), options.pop("granularity")
    asymmetric = options.pop("asymmetric")
    slots = [
        TensorScheme(
            _calibrated_format(options.pop(f"{slot}_format") or common),
            _static_granularity(options.pop(f"{slot}_granularity") or granularity),
            symmetric=not asymmetric,
        )
        for slot in ("key", "value")
    ]
    return QuantScheme(slots[0], slots[1], _layer_set(options.pop("skip_layers")))


def _calibrated_format(name: str) -> TensorFormat:
    try:
        found = tensor_format(name)
    except SchemeError:
        raise SchemeError(
            f"unknown format {name!r}: possible are {', '.join(format_names())} (fp8 = fp8_e4m3)"
        ) from None
    if found.name not in format_names():
        needs = (
            "scales are computed while serving, with the means that every scales file has"
            if found.is_scaled
            else "has no scales and needs no calibration"
        )
        raise SchemeError(
            f"{found.name} {needs}; formats with calibrated scales are {', '.join(format_names())}"
        )
    return found


def _static_granularity(name: str) -> Granularity:
    try:
        found = Granularity.parse(name)
    except SchemeError:
        raise SchemeError(f"unknown granularity {name!r}: possible are {_GRANULARITIES}") from None
    if not found.is_static:
        raise SchemeError(
            f"{found.value} scales are computed while serving and need no calibration; calibrated "
            f"scales are {_GRANULARITIES}"
        )
    return found


def build_method(options: dict[str, Any]) -> RangeMethod:
    """Takes the range method out of a command's options.

    Raises:
        SchemeError: A percentile that covers less than half, or that the method does not use.
    """
    method, percentile = Method(options.pop("method")), options.pop("percentile")
    if percentile is None:
        return RangeMethod(method)
    if method is not Method.PERCENTILE:
        raise SchemeError(f"--percentile goes with --method percentile, not with {method.value}")
    return RangeMethod(method, percentile)


def _layer_set(text: str) -> frozenset[int]:
    """Layers of ``0,2,5-7``.

    Raises:
        SchemeError: Not a list of layers.
    """
    layers: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(_LAYER.fullmatch(end) for end in ends) or int(ends[0]) > int(ends[1]):
            raise SchemeError(f"--skip-layers takes layers such as 0,1,4-7, not {text!r}")
        layers |= set(range(int(ends[0]), int(ends[1]) + 1))
    return frozenset(layers)
