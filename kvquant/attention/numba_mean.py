"""What the mean that coded keys lack adds to their scores.

A mean that stays adds the same to all scores of a query. One that turns with the position p adds
``sum of a_i cos(p w_i) + b_i sin(p w_i)`` over the rotary pairs i that turn, where a and b depend
on the query alone.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

from kvquant.quantize.numba_memory import (
    add_multiples,
    load_float,
    load_halves,
    load_int,
    load_long,
    load_vector,
    smaller,
    store_float,
    store_halves,
    store_vector,
)
from kvquant.quantize.numba_vectors import LANES, fma, inline, plain, splat, total

from .numba_job import BLOCK, PAIR_NUMBERS, QUAD

_BYTES = 4 * LANES


@plain
def load_mean(job: Any, coder: Any, work: int, head: int) -> None:
    """For each query what the fixed mean adds, and for each turning pair a and b."""
    mean = head * coder.pitch
    for query in range(job.query_count):
        source, constant = work + job.plain_queries + query * job.key_pitch, splat(0.0)
        if coder.fixed:
            for channel in range(0, job.key_dim, LANES):
                fixed = load_vector(coder.fixed + mean + 4 * channel)
                constant = fma(load_vector(source + 4 * channel), fixed, constant)
        store_float(work + job.constants + 4 * query, total(constant))
        for pair in range(job.pairs):
            place = job.pair_table + 8 * PAIR_NUMBERS * pair
            one, other = 4 * load_long(place + 8), 4 * load_long(place + 16)
            first, second = load_float(source + one), load_float(source + other)
            target = work + job.pair_terms + 8 * (query * job.pairs + pair)
            for part in range(2):
                turned = (coder.turned_sin if part else coder.turned_cos) + mean
                term = first * load_float(turned + one) + second * load_float(turned + other)
                store_float(target + 4 * part, term)


@plain
def add_mean(
    job: Any, work: int, row: int, is_coded: bool, start: int, end: int, first: int
) -> None:
    """Fills scores with what the mean of their keys adds; zeros where keys are exact."""
    for query in range(job.query_count):
        place = work + job.scores + query * job.score_pitch - 4 * first
        constant = splat(load_float(work + job.constants + 4 * query) if is_coded else 0.0)
        for token in range(start, end, LANES):
            store_vector(place + 4 * token, constant)
    if is_coded and job.pairs:
        for token in range(start, end, BLOCK):
            count = smaller(BLOCK, end - token)
            if _are_consecutive(job, row, token, count):
                _add_block(job, work, row, token, first)
            else:
                _add_one_by_one(job, work, row, token, count, first)


@inline
def _position(job: Any, row: int, token: int) -> Any:
    place = job.positions + row * job.positions_batch
    place += (token - job.positions_first) * job.positions_size
    return load_long(place) if job.positions_size == 8 else load_int(place)


@plain
def _are_consecutive(job: Any, row: int, token: int, count: int) -> bool:
    base, wrong = _position(job, row, token), 0
    for index in range(count):
        wrong |= _position(job, row, token + index) ^ (base + index)
    return wrong == 0


@plain
def _add_block(job: Any, work: int, row: int, token: int, first: int) -> None:
    """The turning part of 64 scores; those beyond the run are filled later."""
    angle, step = 4 * _position(job, row, token), 8 * job.pairs
    for query in range(0, job.query_count, QUAD):
        scores = work + job.scores + query * job.score_pitch + 4 * (token - first)
        terms = work + job.pair_terms + query * step
        for part in range(0, BLOCK, 2 * LANES):
            place = scores + 4 * part
            square = load_halves(place, place + _BYTES, job.score_pitch)
            for pair in range(job.pairs):
                number = load_long(job.pair_table + 8 * PAIR_NUMBERS * pair)
                column, term = number * job.angles_row + angle + 4 * part, terms + 8 * pair
                cos, sin = job.cos + column, job.sin + column
                square = add_multiples(
                    load_vector(cos), load_vector(cos + _BYTES), term, step, square
                )
                square = add_multiples(
                    load_vector(sin), load_vector(sin + _BYTES), term + 4, step, square
                )
            store_halves(place, place + _BYTES, job.score_pitch, square)


@plain
def _add_one_by_one(job: Any, work: int, row: int, token: int, count: int, first: int) -> None:
    for index in range(count):
        angle = 4 * _position(job, row, token + index)
        for query in range(job.query_count):
            place = work + job.scores + query * job.score_pitch + 4 * (token + index - first)
            score = load_float(place)
            for pair in range(job.pairs):
                entry = job.pair_table + 8 * PAIR_NUMBERS * pair
                column = load_long(entry) * job.angles_row + angle
                term = work + job.pair_terms + 8 * (query * job.pairs + pair)
                score += load_float(term) * load_float(job.cos + column)
                score += load_float(term + 4) * load_float(job.sin + column)
            store_float(place, score)
