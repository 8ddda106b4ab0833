"""What turns the codes of a run into numbers, apart from the codes themselves.

A token is its row of numbers times a factor plus an offset, where the numbers are codes minus the
center of their format. Where scales are by channel, they go into the queries (for keys) or into the
sums (for values) instead, and factors are one.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

from kvquant.quantize.numba_formats import (
    FP32,
    INTEGER,
    from_fp8,
    load_bits,
    size_of,
    widen,
    widen_row,
)
from kvquant.quantize.numba_memory import (
    copy_bytes,
    load_int,
    load_ints,
    load_octets,
    load_short,
    load_vector,
    smaller,
    store_float,
    store_int,
    store_vector,
)
from kvquant.quantize.numba_panel import (
    NUMBERS,
    PER_GROUP,
    PER_TOKEN,
    RANGES,
    SPARE,
    STAGING,
    section,
)
from kvquant.quantize.numba_vectors import LANES, fma, inline, plain, splat, to_float

from .numba_job import (
    CODED,
    CODES,
    CODES_BATCH,
    CODES_HEAD,
    CODES_TOKEN,
    CODES_UNIT,
    FIRST,
    KIND,
    MIDDLE,
    MIDDLE_BATCH,
    MIDDLE_HEAD,
    MIDDLE_UNIT,
    NUMBER_KIND,
    SCALE,
    SCALE_BATCH,
    SCALE_HEAD,
    SCALE_UNIT,
    TILE,
    number,
)


@inline
def center_of(plan: Any) -> Any:
    """What is subtracted from codes: a whole number near the middle of the format."""
    return float(1 << (plan.bits - 1)) if plan.coding == INTEGER else 0.0


@plain
def tile_size(plan: Any, run: int, token: int, end: int) -> Any:
    """Tokens to work on at once; not beyond a group."""
    count = smaller(TILE, end - token)
    if number(run, KIND) == CODED and plan.grain == PER_GROUP:
        index = token - number(run, FIRST)
        count = smaller(count, plan.span - index % plan.span)
    return count


@plain
def row_step(plan: Any, run: int) -> Any:
    """Bytes from a token's codes to the next one's."""
    if number(run, KIND) == CODED and plan.grain == PER_GROUP:
        return number(run, CODES_TOKEN)
    return number(run, CODES_UNIT)


@plain
def row_place(plan: Any, run: int, row: int, head: int, token: int) -> Any:
    """Address of a token's codes, or of its exact numbers."""
    index = token - number(run, FIRST)
    base = number(run, CODES) + row * number(run, CODES_BATCH) + head * number(run, CODES_HEAD)
    if number(run, KIND) == CODED and plan.grain == PER_GROUP:
        inside = index % plan.span * number(run, CODES_TOKEN)
        return base + index // plan.span * number(run, CODES_UNIT) + inside
    return base + index * number(run, CODES_UNIT)


@plain
def load_factors(
    plan: Any, run: int, work: int, row: int, head: int, token: int, count: int, factors: int
) -> None:
    """Writes the factors of `count` tokens, then their offsets; offsets beyond them are zero.

    Offsets are multiples of one where scales are by channel.
    """
    is_coded = number(run, KIND) == CODED
    if is_coded and plan.grain == PER_TOKEN:
        index, spare = token - number(run, FIRST), work + NUMBERS
        scales = number(run, SCALE) + row * number(run, SCALE_BATCH)
        scales += head * number(run, SCALE_HEAD) + index * number(run, SCALE_UNIT)
        middles = number(run, MIDDLE) + row * number(run, MIDDLE_BATCH)
        middles += head * number(run, MIDDLE_HEAD) + index * number(run, MIDDLE_UNIT)
        left, kind = splat(center_of(plan) - plan.zero), plan.ranges_kind
        for place in range(0, count, LANES):
            scale = _numbers(scales, number(run, SCALE_UNIT), place, count, kind, spare)
            offset = left * scale
            if not plan.symmetric:
                step = number(run, MIDDLE_UNIT)
                offset = offset + _numbers(middles, step, place, count, kind, spare)
            store_vector(factors + 4 * place, scale)
            store_vector(factors + 4 * (TILE + place), offset)
    else:
        offset = splat(1.0 if is_coded else 0.0)
        for place in range(0, TILE, LANES):
            store_vector(factors + 4 * place, splat(1.0))
            store_vector(factors + 4 * (TILE + place), offset)
    for place in range(count, (count + LANES - 1) // LANES * LANES):
        store_float(factors + 4 * (TILE + place), 0.0)


@inline
def _numbers(base: int, step: int, first: int, count: int, kind: int, spare: int) -> Any:
    """Numbers of eight tokens; beyond the last one, its."""
    if step == size_of(kind) and first + LANES <= count:
        return widen(load_bits(base + step * first, kind), kind)
    for lane in range(LANES):
        place = base + step * smaller(first + lane, count - 1)
        store_int(spare + 4 * lane, load_int(place) if kind == FP32 else load_short(place))
    return widen(load_ints(spare), kind)


@plain
def load_ranges(plan: Any, run: int, work: int, row: int, head: int, token: int) -> Any:
    """Two rows, scale and offset of each channel: calibrated ones, or those of a token's group."""
    rows, pitch, left = section(plan, work, RANGES), plan.pitch, splat(center_of(plan))
    if plan.grain == PER_GROUP:
        unit, middles = (token - number(run, FIRST)) // plan.span, rows + 2 * pitch
        scales = number(run, SCALE) + row * number(run, SCALE_BATCH)
        scales += head * number(run, SCALE_HEAD) + unit * number(run, SCALE_UNIT)
        widen_row(scales, plan.ranges_kind, plan.dim, rows, work + NUMBERS)
        if not plan.symmetric:
            own = number(run, MIDDLE) + row * number(run, MIDDLE_BATCH)
            own += head * number(run, MIDDLE_HEAD) + unit * number(run, MIDDLE_UNIT)
            widen_row(own, plan.ranges_kind, plan.dim, middles, work + NUMBERS)
        for channel in range(0, plan.dim, LANES):
            place = rows + 4 * channel
            offset = (left - splat(plan.zero)) * load_vector(place)
            if not plan.symmetric:
                offset = offset + load_vector(middles + 4 * channel)
            store_vector(place + pitch, offset)
    else:
        table = plan.tables + head * plan.tables_head  # middle, scale, zero
        for channel in range(0, plan.dim, LANES):
            place, target = table + 4 * channel, rows + 4 * channel
            scale, zero = load_vector(place + pitch), load_vector(place + 2 * pitch)
            store_vector(target, scale)
            store_vector(target + pitch, fma(left - zero, scale, load_vector(place)))
    for channel in range(plan.dim, (plan.dim + LANES - 1) // LANES * LANES):
        store_float(rows + 4 * channel, 0.0)
        store_float(rows + pitch + 4 * channel, 0.0)
    return rows


# Rows of numbers, for what is not worked on as it is stored


@plain
def read_rows(
    plan: Any, run: int, work: int, dim: int, source: int, count: int, target: int, pitch: int
) -> None:
    """Writes exact tokens, or codes minus their center, to rows `pitch` bytes apart.

    Up to seven numbers beyond a row's last channel are written too.
    """
    step = row_step(plan, run)
    for place in range(count):
        row, out = source + place * step, target + place * pitch
        if number(run, KIND) == CODED:
            if plan.row_bytes % LANES:
                staged = section(plan, work, STAGING)
                copy_bytes(row, plan.row_bytes, staged)
                row = staged
            _unpack(plan, work, row, out)
        else:
            widen_row(row, number(run, NUMBER_KIND), dim, out, work + NUMBERS)
        # Queries are zero there, but zero times whatever lies there may be no number.
        for channel in range(dim, (dim + LANES - 1) // LANES * LANES):
            store_float(out + 4 * channel, 0.0)


@plain
def scale_rows(plan: Any, ranges: int, count: int, target: int, pitch: int) -> None:
    """Rows of numbers become what they stand for, where scales are by channel."""
    for place in range(count):
        for channel in range(0, plan.dim, LANES):
            entry, scale = target + place * pitch + 4 * channel, ranges + 4 * channel
            offset = load_vector(scale + plan.pitch)
            store_vector(entry, fma(load_vector(entry), load_vector(scale), offset))


@plain
def _unpack(plan: Any, work: int, source: int, target: int) -> None:
    count = plan.row_bytes
    if plan.bits == 4:
        _parts(source, count, 4, INTEGER, target)
    elif plan.bits == 8:
        _parts(source, count, 8, plan.coding, target)
    else:
        # 3 bits: the lower two of each channel, then the upper one of each.
        quarter, spare = count // 3 * 2, section(plan, work, SPARE)
        _parts(source, quarter, 2, INTEGER, target)
        _parts(source + quarter, quarter // 2, 1, INTEGER, spare)
        for channel in range(0, plan.dim, LANES):
            upper, place = load_vector(spare + 4 * channel), target + 4 * channel
            store_vector(place, fma(upper, splat(4.0), load_vector(place)))
    center = splat(center_of(plan))
    for channel in range(0, plan.dim, LANES):
        place = target + 4 * channel
        store_vector(place, load_vector(place) - center)


@inline
def _parts(source: int, count: int, bits: int, coding: int, target: int) -> None:
    """Of `count` bytes the parts, `bits` wide, which are as many runs of channels.

    What is written beyond a run is overwritten by the next, which is why the bytes descend.
    """
    mask = (1 << bits) - 1
    for index in range((count - 1) // LANES * LANES, -1, -LANES):
        packed = load_octets(source + index)
        for part in range(8 // bits):
            codes = (packed >> (bits * part)) & mask
            numbers = to_float(codes) if coding == INTEGER else from_fp8(codes, coding)
            store_vector(target + 4 * (index + count * part), numbers)
