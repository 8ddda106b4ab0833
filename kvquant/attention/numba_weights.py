"""Scores to weights: soft cap, what a query does not see, exponentials."""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

from kvquant.quantize.numba_memory import load_vector, smaller, store_float, store_vector
from kvquant.quantize.numba_vectors import (
    LANES,
    fma,
    from_bits,
    inline,
    largest,
    maximum,
    minimum,
    nearest,
    plain,
    splat,
    to_int,
    total,
    where_less,
)

HIDDEN = -1e30
"""A score that no weight comes from."""


@plain
def weigh(job: Any, work: int, query: int, first: int, stop: int, partial: int) -> None:
    """Makes weights of a query's scores; notes the largest score and the sum of the weights."""
    scores, count = work + job.scores + query * job.score_pitch, stop - first
    if job.has_softcap:
        _cap(scores, count, job.softcap)
    newest = job.past + query % job.new
    oldest = newest + 1 - job.window if job.window else 0
    for index in range(smaller(count, oldest - first)):
        store_float(scores + 4 * index, HIDDEN)
    seen = smaller(count, -smaller(0, first - newest - 1))
    for index in range(seen, (count + LANES - 1) // LANES * LANES):
        store_float(scores + 4 * index, HIDDEN)
    highest = splat(HIDDEN)
    for index in range(0, count, LANES):
        highest = maximum(highest, load_vector(scores + 4 * index))
    top = largest(highest)
    shift, weights = splat(top), splat(0.0)
    for index in range(0, count, LANES):
        weight = exponential(load_vector(scores + 4 * index) - shift)
        store_vector(scores + 4 * index, weight)
        weights = weights + weight
    store_float(partial + 4 * query, top)
    store_float(partial + 4 * (job.rows + query), total(weights))


@plain
def _cap(scores: int, count: int, softcap: float) -> None:
    """``softcap * tanh(score / softcap)``, as ``1 - 2 / (exp(2 x) + 1)``."""
    cap, twice, one = splat(softcap), splat(2.0 / softcap), splat(1.0)
    for index in range(0, count, LANES):
        # tanh has long been 1 there. In this order NaN stays NaN.
        power = minimum(splat(80.0), load_vector(scores + 4 * index) * twice)
        power = exponential(maximum(splat(-80.0), power))
        store_vector(scores + 4 * index, (one - splat(2.0) / (power + one)) * cap)


@inline
def exponential(numbers: Any) -> Any:
    """E to the power of eight numbers up to 88, to 2e-7; 0 below -87.

    ``2^n * e^r`` with ``|r| <= ln(2) / 2``: Cody and Waite's reduction, a polynomial of degree 6.
    """
    whole = nearest(numbers * splat(1.4426950408889634))
    rest = fma(whole, splat(-0.693359375), numbers)
    rest = fma(whole, splat(2.12194440e-4), rest)
    power = splat(1.0 / 720)
    for factor in (1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0):
        power = fma(power, rest, splat(factor))
    scale = from_bits((to_int(maximum(whole, splat(-126.0))) + 127) << 23)
    return where_less(numbers, splat(-87.0), splat(0.0), power * scale)
