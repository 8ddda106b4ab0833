"""Joins the spans of a head: one softmax of them all, rotated back, with the mean of the values."""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

from kvquant.quantize.numba_formats import FP32, narrow_row
from kvquant.quantize.numba_memory import (
    load_float,
    load_long,
    load_square,
    load_vector,
    smaller,
    store_float,
    store_rows,
    store_vector,
)
from kvquant.quantize.numba_panel import (
    NUMBERS,
    PANEL,
    SPARE,
    TABLE,
    VECTOR_BYTES,
    apply_core,
    butterflies,
    load_panel,
    point,
    section,
)
from kvquant.quantize.numba_vectors import LANES, fma, largest, maximum, plain, splat, transpose

from .numba_job import CODED, KIND, RUN_NUMBERS, SPAN_NUMBERS, number, template
from .numba_weights import HIDDEN, exponential


@plain
def rotate(
    plan: Any, work: int, source: int, target: int, pitch: int, count: int, is_forward: bool
) -> None:
    """Rotates rows, eight at a time; what is beyond the width becomes zero."""
    table, order, dim, factor = work + TABLE, plan.core_order, plan.dim, splat(plan.factor)
    for row in range(0, count, LANES):
        last = smaller(row + LANES, count) - 1
        point(table, source, pitch, row, last)
        panel = section(plan, work, PANEL)
        load_panel(plan, work, FP32, dim, panel)
        butterflies(panel, order, dim)
        if order > 1:
            spare = section(plan, work, SPARE)
            apply_core(plan, panel, spare, is_forward)
            panel = spare
        point(table, target, pitch, row, last)
        for channel in range(0, dim, LANES):
            square = load_square(panel + VECTOR_BYTES * channel, VECTOR_BYTES)
            store_rows(table, 4 * channel, transpose(square * factor))
        for index in range(row, last + 1):
            for channel in range(dim, pitch // 4):
                store_float(target + index * pitch + 4 * channel, 0.0)


@plain
def join(job: Any, work: int, row: int, head: int) -> None:
    """Writes the output of a head, all of whose spans are done."""
    count, pitch = job.query_count, job.value_pitch
    exact = work + job.scores  # not needed any more
    coded, shares = exact + count * pitch, exact + 2 * count * pitch
    for query in range(count):
        share = _join_query(job, row, head, query, exact + query * pitch, coded + query * pitch)
        store_float(shares + 4 * query, share)
    if job.value_plan:
        plan = template(job.value_plan)
        if plan.rotated:
            rotate(plan, work, coded, coded, pitch, count, False)
        for query in range(count):
            share = splat(load_float(shares + 4 * query))
            for channel in range(0, job.value_dim, LANES):
                place = exact + query * pitch + 4 * channel
                sums = load_vector(place) + load_vector(place + count * pitch)
                if plan.fixed:
                    mean = load_vector(plan.fixed + head * plan.pitch + 4 * channel)
                    sums = fma(mean, share, sums)
                store_vector(place, sums)
    for query in range(count):
        target = job.out + row * job.out_batch + query % job.new * job.out_token
        target += (head * job.group + query // job.new) * job.out_head
        narrow_row(exact + query * pitch, job.out_kind, job.value_dim, target, work + NUMBERS)


@plain
def _join_query(job: Any, row: int, head: int, query: int, exact: int, coded: int) -> Any:
    """Means of exact and of coded values over all spans; returns the share of the latter."""
    partials = job.partial + (row * job.kv_heads + head) * job.spans * job.partial_bytes
    sink = splat(HIDDEN)
    if job.sinks:
        sink = splat(load_float(job.sinks + 4 * (head * job.group + query // job.new)))
    top = sink
    for span in range(job.spans):
        score = load_float(partials + span * job.partial_bytes + 4 * query)
        top = maximum(top, splat(score))
    weights = exponential(sink - top) if job.sinks else splat(0.0)
    share = splat(0.0)
    for channel in range(0, job.value_dim, LANES):
        store_vector(exact + 4 * channel, splat(0.0))
        store_vector(coded + 4 * channel, splat(0.0))
    for span in range(job.spans):
        partial = partials + span * job.partial_bytes
        factor = exponential(splat(load_float(partial + 4 * query)) - top)
        weight = factor * splat(load_float(partial + 4 * (job.rows + query)))
        weights = weights + weight
        index = load_long(job.span_table + 8 * (SPAN_NUMBERS * span + 2))
        is_coded = number(job.values + 8 * RUN_NUMBERS * index, KIND) == CODED
        if is_coded:
            share = share + weight
        target = coded if is_coded else exact
        sums = partial + 8 * job.rows + query * job.value_pitch
        for channel in range(0, job.value_dim, LANES):
            place = target + 4 * channel
            store_vector(place, fma(load_vector(sums + 4 * channel), factor, load_vector(place)))
    for channel in range(0, job.value_dim, LANES):
        for target in (exact, coded):
            place = target + 4 * channel
            store_vector(place, load_vector(place) / weights)
    return largest(share / weights)
