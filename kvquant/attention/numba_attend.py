"""The compiled kernel: attention of a few queries over the tokens of one layer, as they are stored.

A task is a span of tokens of one row and one KV head. Whoever finishes the last span of a head
joins all of them::

    queries → rotated ─┐
    span of keys ──────┴→ scores → weights ─┬→ weighted sum of the span  ─┐
    span of values ─────────────────────────┘   of all spans, rotated back ┴→ out

docs/attention.md has the formulas.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

from numba import carray  # type: ignore[attr-defined]

from kvquant.quantize.numba_formats import widen_row
from kvquant.quantize.numba_memory import (
    deal,
    load_float,
    load_long,
    load_vector,
    smaller,
    store_float,
    store_vector,
    take_number,
    take_turn,
)
from kvquant.quantize.numba_panel import NUMBERS, PER_GROUP, PER_TOKEN, STATIC
from kvquant.quantize.numba_vectors import LANES, fma, inline, plain, splat, total

from .numba_job import (
    CODED,
    FIRST,
    KIND,
    QUAD,
    RUN_NUMBERS,
    SPAN_NUMBERS,
    STOP,
    TILE,
    number,
    template,
)
from .numba_join import join, rotate
from .numba_mean import add_mean, load_mean
from .numba_products import FLOATS, add_keys, add_values, rows_kind
from .numba_read import (
    load_factors,
    load_ranges,
    read_rows,
    row_place,
    row_step,
    scale_rows,
    tile_size,
)
from .numba_weights import weigh


def attend_tasks(pointer: Any) -> None:
    """Takes spans while there are any left."""
    job = carray(pointer, 1)[0]
    work = job.work + job.scratch * take_number(job.joined)
    task = take_number(job.taken)
    while task < job.tasks:
        heads, span = task // job.spans, task % job.spans
        row, head = heads // job.kv_heads, heads % job.kv_heads
        partial = job.partial + task * job.partial_bytes
        _attend(job, work, row, head, span, partial)
        if take_turn(job.turns + 8 * heads) == job.spans - 1:
            join(job, work, row, head)
        task = take_number(job.taken)


@plain
def _attend(job: Any, work: int, row: int, head: int, span: int, partial: int) -> None:
    """One span: scores, weights, weighted sums."""
    place = job.span_table + 8 * SPAN_NUMBERS * span
    first, stop, values = load_long(place), load_long(place + 8), load_long(place + 16)
    _load_queries(job, work, row, head)
    for index in range(job.key_runs):
        run = job.keys + 8 * RUN_NUMBERS * index
        start = -smaller(-number(run, FIRST), -first)
        end = smaller(number(run, STOP), stop)
        if start < end:
            _score(job, work, row, head, run, start, end, first)
    for query in range(job.query_count):
        weigh(job, work, query, first, stop, partial)
    run = job.values + 8 * RUN_NUMBERS * values
    _sum_values(job, work, row, head, run, first, stop, partial)


# Queries


@plain
def _load_queries(job: Any, work: int, row: int, head: int) -> None:
    """The queries times `scaling`, as they are and, where keys are coded, rotated.

    Rows beyond the last query, up to a whole quad, are zero.
    """
    rows, pitch = work + job.plain_queries, job.key_pitch
    for place in range(0, job.rows * pitch, 4 * LANES):
        store_vector(rows + place, splat(0.0))
        store_vector(work + job.turned_queries + place, splat(0.0))
    for query in range(job.rows):
        store_float(work + job.totals + 4 * query, 0.0)
    for query in range(job.query_count):
        source = job.query + row * job.query_batch + query % job.new * job.query_token
        source += (head * job.group + query // job.new) * job.query_head
        target = rows + query * pitch
        widen_row(source, job.query_kind, job.key_dim, target, work + NUMBERS)
        for channel in range(0, job.key_dim, LANES):
            place = target + 4 * channel
            store_vector(place, load_vector(place) * splat(job.scaling))
        for channel in range(job.key_dim, pitch // 4):
            store_float(target + 4 * channel, 0.0)
    if job.key_coder:
        coder = template(job.key_coder)
        load_mean(job, coder, work, head)
        if coder.rotated:
            target = work + job.turned_queries
            rotate(coder, work, rows, target, pitch, job.query_count, True)
        if coder.grain == PER_TOKEN:
            _add_up(job, work, _coded_queries(job, work))


@inline
def _coded_queries(job: Any, work: int) -> Any:
    """Queries as the codes see them."""
    is_rotated = template(job.key_coder).rotated
    return work + (job.turned_queries if is_rotated else job.plain_queries)


@plain
def _add_up(job: Any, work: int, queries: int) -> None:
    """The sum of each query's channels, which offsets of tokens are multiplied by."""
    for query in range(job.query_count):
        summed = splat(0.0)
        for channel in range(0, job.key_dim, LANES):
            summed = summed + load_vector(queries + query * job.key_pitch + 4 * channel)
        store_float(work + job.totals + 4 * query, total(summed))


@plain
def _fold(job: Any, work: int, queries: int, ranges: int, pitch: int) -> None:
    """Scales of channels go into the queries, their offsets into the totals."""
    folded = work + job.folded_queries
    for query in range(job.rows):
        row, summed = query * job.key_pitch, splat(0.0)
        for channel in range(0, job.key_dim, LANES):
            numbers, place = load_vector(queries + row + 4 * channel), ranges + 4 * channel
            store_vector(folded + row + 4 * channel, numbers * load_vector(place))
            summed = fma(numbers, load_vector(place + pitch), summed)
        store_float(work + job.totals + 4 * query, total(summed))


# Scores


@plain
def _score(
    job: Any, work: int, row: int, head: int, run: int, start: int, end: int, first: int
) -> None:
    """Scores of the tokens `start` to `end` of a run; rows of scores begin at token `first`.

    What is written beyond `end` is written again by the next run.
    """
    plan, is_coded = template(job.key_plan), number(run, KIND) == CODED
    add_mean(job, work, row, is_coded, start, end, first)
    kind, queries = FLOATS, work + job.plain_queries
    if is_coded:
        kind, queries = rows_kind(plan, True), _coded_queries(job, work)
    token = start
    while token < end:
        count = tile_size(plan, run, token, end)
        rows = queries
        if is_coded and plan.grain != PER_TOKEN:
            ranges = load_ranges(plan, run, work, row, head, token)
            _fold(job, work, queries, ranges, plan.pitch)
            rows = work + job.folded_queries
        load_factors(plan, run, work, row, head, token, count, work + job.factors)
        source, step = row_place(plan, run, row, head, token), row_step(plan, run)
        width, coding = job.key_dim, 0
        if kind == FLOATS:
            tile = work + job.tile
            read_rows(plan, run, work, job.key_dim, source, count, tile, job.key_pitch)
            source, step = tile, job.key_pitch
        else:
            width, coding = plan.row_bytes, plan.coding
        for query in range(0, job.query_count, QUAD):
            numbers, products = rows + query * job.key_pitch, work + job.products
            add_keys(kind, coding, source, step, count, width, numbers, job.key_pitch, products)
            _add_products(job, work, query, count, token - first)
        token += count


@plain
def _add_products(job: Any, work: int, first: int, count: int, offset: int) -> None:
    """Adds products times factors, and what the offsets give, to the scores of four queries."""
    factors, spare = work + job.factors, work + NUMBERS
    dealt = work + job.products + 4 * QUAD * (TILE + LANES)
    for index in range(0, count, LANES):
        deal(work + job.products + 4 * QUAD * index, dealt, 4 * LANES)
        factor = load_vector(factors + 4 * index)
        extra = load_vector(factors + 4 * (TILE + index))
        for query in range(first, smaller(first + QUAD, job.query_count)):
            place = work + job.scores + query * job.score_pitch + 4 * (offset + index)
            summed = splat(load_float(work + job.totals + 4 * query))
            product = load_vector(dealt + 4 * LANES * (query - first))
            added = fma(product, factor, fma(extra, summed, load_vector(place)))
            if index + LANES <= count:
                store_vector(place, added)
            else:
                store_vector(spare, added)
                for lane in range(count - index):
                    store_float(place + 4 * lane, load_float(spare + 4 * lane))


# Values


@plain
def _sum_values(
    job: Any, work: int, row: int, head: int, run: int, first: int, stop: int, partial: int
) -> None:
    """Weighted sums of the tokens of a span, which are all in one run; and their lifts.

    A lift is what the offsets of tokens add to all channels of a query.
    """
    plan, is_coded = template(job.value_plan), number(run, KIND) == CODED
    sums, lifts = partial + 8 * job.rows, work + job.lifts
    for place in range(0, job.rows * job.value_pitch, 4 * LANES):
        store_vector(sums + place, splat(0.0))
    for query in range(job.rows):
        store_float(lifts + 4 * query, 0.0)
    is_grouped = is_coded and plan.grain == PER_GROUP
    kind = FLOATS if is_grouped else rows_kind(plan, is_coded) if is_coded else FLOATS
    token = first
    while token < stop:
        count = tile_size(plan, run, token, stop)
        load_factors(plan, run, work, row, head, token, count, work + job.factors)
        source, step = row_place(plan, run, row, head, token), row_step(plan, run)
        width, coding = job.value_dim, 0
        if kind == FLOATS:
            tile = work + job.tile
            read_rows(plan, run, work, job.value_dim, source, count, tile, job.value_pitch)
            if is_grouped:
                ranges = load_ranges(plan, run, work, row, head, token)
                scale_rows(plan, ranges, count, tile, job.value_pitch)
            source, step = tile, job.value_pitch
        else:
            width, coding = plan.row_bytes, plan.coding
        for query in range(0, job.query_count, QUAD):
            weights = work + job.weights
            _factor_weights(job, work, query, count, token - first)
            add_values(
                kind, coding, source, step, count, width, weights, 4 * TILE,
                sums + query * job.value_pitch, job.value_pitch,
            )  # fmt: skip
        token += count
    if is_coded and not is_grouped:
        _finish_sums(job, plan, run, work, row, head, first, sums)


@plain
def _factor_weights(job: Any, work: int, first: int, count: int, offset: int) -> None:
    """Weights of four queries times the factors of their tokens; the lifts grow."""
    factors = work + job.factors
    for query in range(first, smaller(first + QUAD, job.query_count)):
        source = work + job.scores + query * job.score_pitch + 4 * offset
        target, lift = work + job.weights + 4 * TILE * (query - first), splat(0.0)
        for index in range(0, count, LANES):
            weight = load_vector(source + 4 * index)
            lift = fma(weight, load_vector(factors + 4 * (TILE + index)), lift)
            store_vector(target + 4 * index, weight * load_vector(factors + 4 * index))
        place = work + job.lifts + 4 * query
        store_float(place, load_float(place) + total(lift))


@plain
def _finish_sums(
    job: Any, plan: Any, run: int, work: int, row: int, head: int, token: int, sums: int
) -> None:
    """What the channels of a span have in common: scales where calibrated, and lifts."""
    is_static = plan.grain == STATIC
    ranges = load_ranges(plan, run, work, row, head, token) if is_static else 0
    for query in range(job.query_count):
        lift = splat(load_float(work + job.lifts + 4 * query))
        for channel in range(0, job.value_dim, LANES):
            place = sums + query * job.value_pitch + 4 * channel
            summed, added = load_vector(place), lift
            if is_static:
                scale = ranges + 4 * channel
                summed = summed * load_vector(scale)
                added = lift * load_vector(scale + plan.pitch)
            store_vector(place, summed + added)
