"""Cache size against context, for each format, with the memory that is free for it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvquant.errors import InputError
from kvquant.storage import write_atomically

from .formats import CacheFormat
from .plan import Request
from .sequence import SequencePrice
from .wording import GB, some

SUFFIXES = (".png", ".svg", ".pdf")
_POINTS = 200
_DPI = 150
# Okabe and Ito's palette: told apart by colour-blind readers too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", "-.", ":")


def plot_plan(request: Request, forms: Sequence[CacheFormat], path: Path) -> None:
    """Draws the cache of the planned number of sequences on the fullest GPU.

    Args:
        request: What was planned; without a number of sequences, one is drawn.
        forms: A line each.
        path: Where to write; its suffix chooses the format.

    Raises:
        InputError: An unknown suffix, no matplotlib, or the file cannot be written.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"cannot draw {path.name!r}: the name has to end in {', '.join(SUFFIXES)}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("plots need matplotlib: pip install 'kvquant-toolkit[report]'") from error
    figure = Figure(figsize=(9, 5.4), facecolor="white", layout="constrained")
    axis = figure.subplots()
    sequences = -(-(request.workload.concurrency or 1) // request.parallel.data)
    contexts = _contexts(request)
    for number, form in enumerate(forms):
        axis.plot(
            contexts,
            [nbytes / GB for nbytes in _nbytes(request, form, sequences, contexts)],
            color=_COLOURS[number % len(_COLOURS)],
            linestyle=_STYLES[number // len(_COLOURS) % len(_STYLES)],
            label=form.name,
        )
    _draw_limits(axis, request, contexts[-1])
    each = " on the fullest GPU" if request.parallel.gpus > 1 else ""
    many = some(sequences, "sequence")
    axis.set_title(f"{request.model.name}: cache of {many}{each}", loc="left")
    axis.set_xlabel("tokens of each sequence")
    axis.set_ylabel("GB (10⁹ bytes)")
    axis.set_xlim(0, contexts[-1])
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.lower()[1:], dpi=_DPI)
    write_atomically(path, content.getvalue())


def _contexts(request: Request) -> list[int]:
    """Lengths from nothing to the model's positions, or beyond if more was asked for."""
    limit = request.model.geometry.max_positions or 0
    last = max(limit, request.workload.longest)
    return sorted({round(last * i / _POINTS) for i in range(_POINTS + 1)})


def _nbytes(
    request: Request, form: CacheFormat, sequences: int, contexts: Sequence[int]
) -> list[int]:
    """Bytes on the fullest GPU at each length."""
    layers = len(request.model.geometry.layers)
    stages = [
        SequencePrice(request.model, form, request.parallel, stage)
        for stage in request.parallel.stages(layers)
    ]
    return [sequences * max(stage.nbytes(tokens) for stage in stages) for tokens in contexts]


def _draw_limits(axis: Any, request: Request, last: int) -> None:
    """The memory that is free, and the positions of the model where the axis goes beyond."""
    if request.free_nbytes is not None and request.memory is not None:
        free = request.free_nbytes / GB
        axis.axhline(free, color="#555555", linestyle=(0, (6, 3)), linewidth=1.2)
        axis.annotate(
            f"free on {request.memory.name}: {free:,.1f} GB",
            (0.01, free),
            xycoords=("axes fraction", "data"),
            ha="left",
            va="bottom",
            fontsize=9,
        )
    limit = request.model.geometry.max_positions
    if limit is not None and last > limit:
        axis.axvline(limit, color="#555555", linestyle=":", linewidth=1.2)
