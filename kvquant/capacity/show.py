"""Prints plans and lists."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvquant.geometry import LayerGeometry, LayerKind

from .ask import Question
from .format_names import PATTERNS, Overrides, format_names, parse_formats
from .hardware import gpus
from .models import known_models
from .plan import plan
from .remarks import remarks

_WIDEST = 200


def show_plan(question: Question, as_json: bool, explained: bool, plot: Path | None) -> None:
    """Plans, and prints what was asked for."""
    request = question.request
    plans = [plan(request, form) for form in question.forms]
    notes = remarks(request, plans, question.scales)
    if plot is not None:
        from .plot import plot_plan

        plot_plan(request, question.forms, plot)
    if as_json:
        from .values import plan_values

        values = plan_values(request, plans, notes)
        click.echo(json.dumps(values, indent=2, allow_nan=False))
    elif explained:
        from .explain import explain
        from .tables import heading

        for line in (*heading(request), "", *explain(request, plans)):
            click.echo(line)
        for line in notes:
            click.echo(f"note: {line}")
    else:
        from .tables import plan_table

        _print(plan_table(request, plans, notes))


def show_lists(wanted: Mapping[str, bool]) -> None:
    """Prints the tables that are wanted."""
    from . import tables

    if wanted["models"]:
        _print(tables.model_table(known_models()))
    if wanted["gpus"]:
        _print(tables.gpu_table(gpus()))
    if wanted["kv"]:
        names = [*format_names(), *PATTERNS]
        forms = parse_formats(names, Overrides(), 2)
        latent = LayerGeometry(LayerKind.LATENT, 1, 512, 64)
        head = LayerGeometry(LayerKind.FULL, 1, 128, 128)
        nbytes = [_bytes(form, latent if form.name == "fp8_ds_mla" else head) for form in forms]
        _print(tables.format_table(forms, nbytes))


def _bytes(form: Any, layer: LayerGeometry) -> str:
    from .wording import exact

    beside = " (MLA, 512 + 64)" if layer.kind is LayerKind.LATENT else ""
    return exact(form.token_nbytes(0, layer)) + beside


def _print(renderable: Any) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDEST
    console.print(renderable)
