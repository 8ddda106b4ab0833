"""`kvquant plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvquant.errors import InputError
from kvquant.options import json_option

_UNITS = {"k": 1024, "m": 1024**2}


def some_tokens(text: str) -> int:
    """A number of tokens: ``32768`` or ``32k`` (k = 1,024, m = 1,048,576).

    Raises:
        click.BadParameter: Something else, or none.
    """
    tokens = any_tokens(text)
    if tokens == 0:
        raise click.BadParameter("at least 1 token is needed")
    return tokens


def any_tokens(text: str) -> int:
    """As `some_tokens`, but 0 will do."""
    digits = str(text).strip().lower().replace("_", "")
    unit = _UNITS.get(digits[-1:], 1)
    digits = digits[:-1] if unit > 1 else digits
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 12:
        raise click.BadParameter(f"{text!r} is no number of tokens such as 32768 or 32k")
    return int(digits) * unit


def many_tokens(text: str) -> tuple[int, ...]:
    """Numbers of tokens with commas between them."""
    return tuple(some_tokens(part) for part in text.split(","))


_LEAST, _MOST = 1e-6, 10**9
"""Of numbers that are not 0: what is beyond is a slip of the finger, and overflows floats."""


def _bounded(number: float) -> None:
    # Click thinks that NaN lies in any range.
    if number and not _LEAST <= number <= _MOST:
        raise click.BadParameter(f"{number:g} is not between {_LEAST:f} and {_MOST:,}")


class _Number(click.FloatRange):
    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number: float = super().convert(value, param, ctx)
        _bounded(number)
        return number


class _Count(click.IntRange):
    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        number: int = super().convert(value, param, ctx)
        _bounded(number)
        return number


_POSITIVE = _Number(min=0, min_open=True)
_COUNT = _Count(min=1)


@click.command()
@click.option(
    "--model",
    "-m",
    metavar="MODEL",
    help="Model directory, config.json, hub id, or a name of --list-models.",
)
@click.option(
    "--kv",
    "formats",
    multiple=True,
    metavar="FORMAT",
    help="Cache format, or K:V. Several are put side by side. [default: bf16, fp8, int4]",
)
@click.option("--scales", metavar="FILE", help="Plan the cache of calibrated scales as well.")
@click.option("--sink-tokens", type=any_tokens, metavar="N", help="First tokens kept exactly.")
@click.option("--residual-length", type=any_tokens, metavar="N", help="Newest tokens kept exactly.")
@click.option("--group-size", type=_COUNT, metavar="N", help="Tokens of a key group of int4-kivi.")
@click.option(
    "--skip-layers",
    default="",
    metavar="0,-1,…",
    help="Layers that stay in the model's own dtype; negative ones count from the end.",
)
@click.option("--gpu", metavar="NAME", help="A name of --list-gpus.")
@click.option("--memory-gb", type=_POSITIVE, metavar="GB", help="Memory of a GPU, 10^9 bytes.")
@click.option("--bandwidth-tbs", type=_POSITIVE, metavar="TB/s", help="Its memory bandwidth.")
@click.option(
    "--overhead-gb",
    type=_Number(min=0),
    metavar="GB",
    help="Memory kept free of weights and cache. [default: 5 %]",
)
@click.option(
    "--weights-dtype", metavar="FORMAT", help="Format of the weights. [default: as published]"
)
@click.option("--weights-gb", type=_POSITIVE, metavar="GB", help="Size of the weights.")
@click.option(
    "--context",
    "-c",
    type=some_tokens,
    metavar="TOKENS",
    help="Tokens of each sequence, 32768 or 32k. [default: 8k, or the model's positions]",
)
@click.option("--contexts", type=many_tokens, metavar="N,N,…", help="Lengths of live sequences.")
@click.option(
    "--traffic",
    metavar="FILE",
    help="Requests of real traffic, .jsonl or .csv with prompt and output tokens: planned at the "
    "95th percentile of live tokens.",
)
@click.option(
    "--concurrency",
    "-n",
    type=_COUNT,
    metavar="N",
    help="Sequences at once. [default: all that fit]",
)
@click.option(
    "--template-tokens",
    type=any_tokens,
    default=0,
    metavar="N",
    help="Chat template and tool schemas, on top of each context.",
)
@click.option(
    "--thinking-tokens",
    type=any_tokens,
    default=0,
    metavar="N",
    help="Reasoning, on top of each context.",
)
@click.option(
    "--prefix-tokens",
    type=any_tokens,
    default=0,
    metavar="N",
    help="First tokens of each sequence that all share.",
)
@click.option(
    "--adapters",
    type=_COUNT,
    default=1,
    metavar="N",
    help="LoRA adapters served at once: a copy of the shared prefix for each.",
)
@click.option(
    "--page-size",
    type=_COUNT,
    default=16,
    show_default=True,
    metavar="TOKENS",
    help="Engine's page.",
)
@click.option(
    "--reserve",
    type=some_tokens,
    metavar="TOKENS",
    help="Length that a server without pages reserves. [default: the model's positions]",
)
@click.option("--tp", type=_COUNT, default=1, metavar="N", help="Tensor parallelism.")
@click.option("--pp", type=_COUNT, default=1, metavar="N", help="Pipeline parallelism.")
@click.option("--dp", type=_COUNT, default=1, metavar="N", help="Data parallelism.")
@click.option("--explain", is_flag=True, help="Print the sums line by line.")
@click.option("--plot", metavar="FILE", help="Draw cache against context: .png, .svg or .pdf.")
@json_option
@click.option("--list-models", is_flag=True, help="Show the known models.")
@click.option("--list-gpus", is_flag=True, help="Show the known GPUs.")
@click.option("--list-kv", is_flag=True, help="Show the known cache formats.")
def plan(model: str | None, plot: str | None, **options: Any) -> None:
    """How much cache, how many users, how fast: before anyone rents a GPU.

    Pure arithmetic on the model's config; no weights are read. Gives the exact bytes that a cache
    needs in each format, and a lower bound for the time of a step, which reads the weights and the
    whole cache once. docs/capacity.md derives the formulas.

    \b
    Examples:
      kvquant plan --model meta-llama/Llama-3.1-8B --gpu h100-80gb --context 32k
      kvquant plan -m qwen3-32b --gpu h200 --tp 2 -c 16k -n 64 --kv bf16 --kv int8:int4 --explain
      kvquant plan -m ft-model --gpu l40s --traffic requests.csv --scales ft-scales --plot plan.png
      kvquant plan -m deepseek-v3 --gpu b200 --tp 8 --kv bf16 --kv fp8_ds_mla --json
    """
    from .show import show_lists, show_plan

    listed = {name: options.pop(f"list_{name}") for name in ("models", "gpus", "kv")}
    if any(listed.values()):
        show_lists(listed)
        return
    if model is None:
        raise InputError("--model is missing: a directory, config.json, hub id or --list-models")
    from .ask import ask

    as_json, explained = options.pop("as_json"), options.pop("explain")
    question = ask(model, options)
    show_plan(question, as_json, explained, None if plot is None else Path(plot).expanduser())
