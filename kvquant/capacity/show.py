"""Prints plans and lists: JSON as it is made here, tables and sums as others make them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

from kvquant.geometry import LayerGeometry, LayerKind

from .ask import Question
from .format_names import PATTERNS, Overrides, format_names, parse_formats
from .hardware import gpus
from .models import known_models
from .plan import Allocated, FormatPlan, Request, plan
from .remarks import remarks
from .workload import PERCENTILE

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
        values = _plan_values(request, plans, notes)
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


# --- as JSON --------------------------------------------------------------------------------------


def _plan_values(
    request: Request, plans: Sequence[FormatPlan], notes: Sequence[str]
) -> dict[str, Any]:
    """Everything that the tables show, in bytes, seconds and counts.

    Keys are stable: what a release prints, the next one prints too.
    """
    return {
        "model": _model(request),
        "gpu": _gpu(request),
        "parallel": {
            "tp": request.parallel.tensor,
            "pp": request.parallel.pipeline,
            "dp": request.parallel.data,
            "gpus": request.parallel.gpus,
        },
        "workload": _workload(request),
        "kv": {p.form.name: _format(p, plans[0]) for p in plans},
        "warnings": list(notes),
    }


def _model(request: Request) -> dict[str, Any]:
    model, weights = request.model, request.weights
    return {
        "name": model.name,
        "source": model.source,
        "model_type": model.model_type,
        "layers": len(model.geometry.layers),
        "max_positions": model.geometry.max_positions,
        "weights_bytes": weights and weights.nbytes,
        "weights_source": weights and weights.source,
    }


def _gpu(request: Request) -> dict[str, Any] | None:
    memory = request.memory
    if memory is None:
        return None
    return {
        "name": memory.name,
        "source": memory.source,
        "memory_bytes": memory.nbytes,
        "overhead_bytes": memory.overhead_nbytes,
        "bandwidth_bytes_per_s": memory.bandwidth,
        "weights_bytes": request.weights_nbytes,
        "free_bytes": request.free_nbytes,
    }


def _workload(request: Request) -> dict[str, Any]:
    workload = request.workload
    return {
        "sequence_tokens": workload.longest,
        "concurrency": workload.concurrency,
        "lengths": None if workload.drawn else list(workload.lengths),
        "percentile": PERCENTILE if workload.drawn else None,
        "added_tokens": workload.added_tokens,
        "prefix_tokens": workload.prefix_tokens,
        "adapters": workload.adapters,
    }


def _format(p: FormatPlan, first: FormatPlan) -> dict[str, Any]:
    decode = p.decode
    return {
        "description": p.form.description,
        "bytes_per_token": _whole(p.token_nbytes),
        "ratio": float(first.token_nbytes / p.token_nbytes) if p.token_nbytes else None,
        "bytes_per_sequence": p.sequence_nbytes,
        "sequences": p.sequences,
        "total_bytes": p.total_nbytes,
        "per_gpu": {
            "bytes_per_token": _whole(p.gpu_token_nbytes),
            "bytes_per_sequence": p.gpu_sequence_nbytes,
            "cache_bytes": p.gpu_nbytes,
        },
        "max_sequences": p.max_sequences,
        "max_context": p.max_context,
        "outgrows_weights_tokens": p.outgrows_weights_tokens,
        "pages": _allocated(p.pages),
        "reserved": _allocated(p.reserved),
        "full_length_bytes_per_sequence": p.full_length_nbytes,
        "padding_layers": p.padding_layers,
        "decode_step_ms": decode and decode.step_seconds * 1e3,
        "tokens_per_s": decode and decode.tokens_per_second,
        "tokens_per_s_per_sequence": decode and 1 / decode.step_seconds,
        "ns_per_cached_token": decode and decode.token_seconds * 1e9,
        "cache_bound_sequences": decode and decode.cache_bound_sequences,
    }


def _allocated(allocated: Allocated) -> dict[str, Any]:
    return {
        "bytes_per_sequence": allocated.sequence_nbytes,
        "utilisation": allocated.utilisation,
        "max_sequences": allocated.max_sequences,
    }


def _whole(number: Fraction) -> int | float:
    """A whole number as int."""
    return int(number) if number.denominator == 1 else float(number)
