"""Command-line options that commands of several rooms have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def model_option(command: Command) -> Command:
    """Adds ``--model``, which has to be given."""
    return click.option(
        "--model",
        "-m",
        required=True,
        metavar="MODEL",
        help="Model directory, hub id, .gguf file, PEFT adapter directory, or smollm2.",
    )(command)


def adapters_option(command: Command) -> Command:
    """Adds ``--adapter``, for adapters that are active together."""
    return click.option(
        "--adapter",
        "-a",
        "adapters",
        multiple=True,
        metavar="DIR",
        help="PEFT adapter on top of the model; several are active together.",
    )(command)


def base_option(command: Command) -> Command:
    """Adds ``--base``."""
    return click.option(
        "--base", metavar="MODEL", help="Base of an adapter, if not the one it names."
    )(command)


def placement_options(command: Command) -> Command:
    """Adds ``--dtype`` and ``--device``."""
    device = click.option(
        "--device", metavar="DEVICE", help="cpu, cuda, cuda:1. [default: a GPU if there is one]"
    )
    dtype = click.option(
        "--dtype",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        help="auto: as the checkpoint on a GPU, float32 on a CPU.",
    )
    return dtype(device(command))


def json_option(command: Command) -> Command:
    """Adds ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")(
        command
    )
