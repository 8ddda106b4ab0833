"""A plan as people look at it: what was planned, then a column for each format."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvquant.geometry import CacheGeometry

from .formats import CacheFormat
from .hardware import Gpu
from .models import KnownModel
from .parallel import Parallel
from .plan import Decode, FormatPlan, Request
from .sequence import SequencePrice
from .wording import count, exact, significant, size, some
from .workload import PERCENTILE

_WIDEST = 28
"""Characters of a format's column."""


def plan_table(request: Request, plans: Sequence[FormatPlan], remarks: Sequence[str]) -> Group:
    """The whole answer."""
    parts = [Text(line) for line in heading(request)]
    notes = [Text(f"note: {line}", style="yellow") for line in remarks]
    return Group(*parts, _answers(request, plans), *notes)


def heading(request: Request) -> list[str]:
    """What is planned: model, GPU, sequences."""
    model, weights, memory = request.model, request.weights, request.memory
    lines = [f"{model.name}: {model.geometry.summary()}", f"config: {model.source}"]
    if weights is not None:
        lines.append(f"weights: {size(weights.nbytes)}, {weights.source}")
    if memory is not None and request.free_nbytes is not None:
        speed = f", {memory.bandwidth / 1e12:g} TB/s" if memory.bandwidth else ""
        many = f"{request.parallel.gpus} x " if request.parallel.gpus > 1 else ""
        lines.append(f"GPU: {many}{memory.name}, {memory.nbytes / 1e9:g} GB{speed}")
        lines.append(
            f"for the cache{' of each GPU' if many else ''}: {size(request.free_nbytes)}, after "
            f"{size(request.weights_nbytes or 0)} of weights and {size(memory.overhead_nbytes)} "
            "kept free"
        )
    return [*lines, f"sequences: {_sequences(request)}"]


def _sequences(request: Request) -> str:
    workload = request.workload
    fill = "as many as fit" if request.memory is not None else "1"
    many = fill if workload.concurrency is None else f"{workload.concurrency:,}"
    if workload.drawn:
        requests = some(len(workload.lengths), "request")
        what = f"drawn from {requests}, at the {PERCENTILE}th percentile"
    else:
        what = " and ".join(f"{length:,}" for length in dict.fromkeys(workload.lengths))
    parts = [f"{many}, of {what} tokens" if not workload.drawn else f"{many}, {what}"]
    if workload.added_tokens:
        parts.append(f"{workload.added_tokens:,} of them for template and reasoning")
    if workload.prefix_tokens:
        copies = "1 copy" if workload.adapters == 1 else f"{workload.adapters} copies"
        parts.append(f"the first {workload.prefix_tokens:,} shared ({copies})")
    return "; ".join(parts)


def factors(price: SequencePrice) -> str:
    """The formula's factors: layers x KV heads x bytes of a head."""
    terms = [
        f"{len(alike.indices)} x {alike.layer.kv_heads} x "
        + exact(alike.token_nbytes / alike.layer.kv_heads)
        for alike in price.alike
        if alike.layer.keeps_tokens
    ]
    return " + ".join(terms)


def _answers(request: Request, plans: Sequence[FormatPlan]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    for p in plans:
        table.add_column(p.form.name, justify="right", max_width=_WIDEST, overflow="fold")
    longest = request.workload.longest
    _rows(table, plans, [("stored", lambda p: p.form.description)])
    table.add_section()
    _rows(table, plans, _size_rows(request, plans[0], longest))
    if request.free_nbytes is not None:
        table.add_section()
        _rows(table, plans, _fit_rows(request, longest))
    if any(p.decode for p in plans):
        table.add_section()
        _rows(table, plans, _speed_rows())
    return table


_Rows = list[tuple[str, Callable[[FormatPlan], str]]]


def _rows(table: Table, plans: Sequence[FormatPlan], rows: _Rows) -> None:
    for name, cell in rows:
        cells = [cell(p) for p in plans]
        if any(cells):
            table.add_row(name, *cells)


def _size_rows(request: Request, first: FormatPlan, longest: int) -> _Rows:
    layers = range(len(request.model.geometry.layers))

    def terms(p: FormatPlan) -> str:
        return factors(SequencePrice(request.model, p.form, Parallel(), layers))

    many = request.parallel.gpus > 1
    return [
        ("layers x KV heads x bytes", terms),
        ("bytes per token", lambda p: exact(p.token_nbytes)),
        (f"times smaller than {first.form.name}", lambda p: _ratio(first, p)),
        (f"one sequence of {longest:,}", lambda p: size(p.sequence_nbytes)),
        ("sequences planned", lambda p: count(p.sequences)),
        (
            "all of them, per copy of the model" if request.parallel.data > 1 else "all of them",
            lambda p: size(p.total_nbytes),
        ),
        ("  on the fullest GPU", lambda p: size(p.gpu_nbytes) if many else ""),
        ("  a sequence on it", lambda p: size(p.gpu_sequence_nbytes) if many else ""),
        (
            "cache outgrows weights at tokens",
            lambda p: count(p.outgrows_weights_tokens),
        ),
    ]


def _ratio(first: FormatPlan, p: FormatPlan) -> str:
    return f"{float(first.token_nbytes / p.token_nbytes):.2f}" if p.token_nbytes else ""


def _fit_rows(request: Request, longest: int) -> _Rows:
    asked = request.workload.concurrency or 1
    paged, reserved = request.page_tokens, request.reserved_tokens
    alike = set(request.workload.lengths) == {longest}
    return [
        (
            f"sequences{f' of {longest:,}' if alike else ''} that fit",
            lambda p: count(p.max_sequences, "no limit"),
        ),
        (
            f"  in pages of {paged}",
            lambda p: (
                f"{count(p.pages.max_sequences, 'no limit')} ({p.pages.utilisation:.1%} used)"
            ),
        ),
        (
            f"  with {reserved:,} reserved",
            lambda p: (
                f"{count(p.reserved.max_sequences, 'no limit')} ({p.reserved.utilisation:.1%} used)"
            ),
        ),
        (
            f"longest context, {asked:,} at once",
            lambda p: _context(p.max_context, request.model.geometry.max_positions),
        ),
    ]


def _context(longest: int | None, positions: int | None) -> str:
    """Beside what memory allows, what the model was built for, if that is less."""
    text = count(longest, "no limit")
    beyond = positions is not None and (longest is None or longest > positions)
    return f"{text} (model: {positions:,})" if beyond else text


def _speed_rows() -> _Rows:
    def speed(cell: Callable[[Decode], str]) -> Callable[[FormatPlan], str]:
        return lambda p: "" if p.decode is None else cell(p.decode)

    def bound(decode: Decode) -> str:
        found = decode.cache_bound_sequences
        return "no number of sequences" if found is None else some(found, "sequence")

    return [
        ("a step takes at least, ms", speed(lambda d: significant(d.step_seconds * 1e3))),
        ("tokens/s at most", speed(lambda d: significant(d.tokens_per_second))),
        ("  for each sequence", speed(lambda d: significant(1 / d.step_seconds))),
        ("  a cached token costs, ns", speed(lambda d: significant(d.token_seconds * 1e9))),
        ("more cache than weights read from", speed(bound)),
    ]


def model_table(models: Sequence[KnownModel]) -> Table:
    """The known models."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("model", "cache", "on the hub", "config read in"):
        table.add_column(title, overflow="fold")
    for model in models:
        summary = CacheGeometry.from_config(model.config).summary()
        table.add_row(model.name, summary, "\n".join(model.hub_ids), model.source)
    return table


def gpu_table(gpus: Sequence[Gpu]) -> Table:
    """The known GPUs."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("GPU")
    table.add_column("GB", justify="right")
    table.add_column("TB/s", justify="right")
    table.add_column("source", overflow="fold")
    for gpu in gpus:
        table.add_row(gpu.name, f"{gpu.memory_gb:g}", f"{gpu.bandwidth_tbs:g}", gpu.source)
    return table


def format_table(forms: Sequence[CacheFormat], bytes_of_head: Sequence[str]) -> Table:
    """The known formats, with what a key and a value of 128 numbers each take."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("--kv")
    table.add_column("bytes for K and V of 128", justify="right")
    table.add_column("stored", overflow="fold")
    for form, nbytes in zip(forms, bytes_of_head, strict=True):
        table.add_row(form.name, nbytes, form.description)
    return table
