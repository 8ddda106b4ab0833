"""The compiled decoder.

::

    rows of bytes → panel → dequantize → rotate back → plus mean → rows of states
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

from numba import carray  # type: ignore[attr-defined]

from .numba_formats import (
    FP32,
    INTEGER,
    from_fp8,
    narrow_row,
    widen,
    widen_row,
)
from .numba_memory import (
    copy_bytes,
    load_bytes,
    load_int,
    load_ints,
    load_long,
    load_short,
    load_square,
    smaller,
    spread,
    store_int,
    store_long,
    store_rows,
    store_square,
    store_vector,
    take_number,
)
from .numba_panel import (
    COS,
    NUMBERS,
    PANEL,
    PER_GROUP,
    PER_TOKEN,
    RANGES,
    SIN,
    SPARE,
    STAGING,
    TABLE,
    VECTOR_BYTES,
    angles_of,
    apply_core,
    butterflies,
    load_angles,
    point,
    section,
)
from .numba_vectors import LANES, butterfly, fma, inline, plain, splat, to_float, transpose


def decode_tasks(pointer: Any) -> None:
    """Decodes spans of tokens, each of one batch row and all KV heads, while there are any left."""
    job = carray(pointer, 1)[0]
    work = job.work + job.scratch * take_number(job.joined)
    task = take_number(job.taken)
    while task < job.tasks:
        batch, span = task // job.spans, task % job.spans
        first = span * job.span
        last = smaller(first + job.span, job.tokens) - 1
        if job.grain == PER_TOKEN:
            for token in range(first, last + 1, LANES):
                if job.cos:
                    load_angles(job, work, batch, token, last)
                for head in range(job.kv_heads):
                    _point_codes(job, work, batch, head, span, token - first, last - first)
                    _load_tokens(job, work, batch, head, token, last)
                    _store_states(job, work, batch, head, token, last)
        else:
            for head in range(job.kv_heads):
                ranges = _load_ranges(job, work, batch, head, span)
                for token in range(first, last + 1, LANES):
                    _point_codes(job, work, batch, head, span, token - first, last - first)
                    _load_channels(job, work, ranges)
                    _store_states(job, work, batch, head, token, last)
        task = take_number(job.taken)


# Codes to panel


@plain
def _point_codes(
    job: Any, work: int, batch: int, head: int, span: int, index: int, last: int
) -> None:
    """Fills the table with the rows of eight tokens, from this index in their span on."""
    codes = job.codes + batch * job.codes_batch + head * job.codes_head + span * job.codes_span
    point(work + TABLE, codes, job.codes_token, index, last)
    if job.row_bytes % LANES:
        for lane in range(LANES):
            row = section(job, work, STAGING) + lane * job.pitch
            copy_bytes(load_long(work + TABLE + 8 * lane), job.row_bytes, row)
            store_long(work + TABLE + 8 * lane, row)


@plain
def _load_tokens(job: Any, work: int, batch: int, head: int, first: int, last: int) -> None:
    """Fills the panel with values of a range for each token, times the factor of the rotation."""
    factor, kind = splat(job.factor), job.ranges_kind
    scales = job.scale + batch * job.scale_batch + head * job.scale_head
    scale = _read(work, scales, job.scale_unit, first, last, kind) * factor
    middle = splat(0.0)
    if not job.symmetric:
        middles = job.middle + batch * job.middle_batch + head * job.middle_head
        middle = _read(work, middles, job.middle_unit, first, last, kind) * factor
    _unpack(job, work, scale, middle, splat(job.zero))


@inline
def _read(work: int, base: int, stride: int, first: int, last: int, kind: int) -> Any:
    """Numbers of eight tokens."""
    for lane in range(LANES):
        place = base + stride * smaller(first + lane, last)
        number = load_int(place) if kind == FP32 else load_short(place)
        store_int(work + NUMBERS + 4 * lane, number)
    return widen(load_ints(work + NUMBERS), kind)


@plain
def _load_ranges(job: Any, work: int, batch: int, head: int, unit: int) -> Any:
    """Rows of middle, scale and zero of each channel: calibrated ones, or those of a group."""
    if job.grain != PER_GROUP:
        return job.tables + head * job.tables_head
    kind, rows = job.ranges_kind, section(job, work, RANGES)
    scales = job.scale + batch * job.scale_batch + head * job.scale_head + unit * job.scale_unit
    middles = job.middle + batch * job.middle_batch + head * job.middle_head
    widen_row(scales, kind, job.dim, rows + job.pitch, work + NUMBERS)
    if not job.symmetric:
        widen_row(middles + unit * job.middle_unit, kind, job.dim, rows, work + NUMBERS)
    for channel in range(0, job.dim, LANES):
        if job.symmetric:
            store_vector(rows + 4 * channel, splat(0.0))
        store_vector(rows + 2 * job.pitch + 4 * channel, splat(job.zero))
    return rows


@plain
def _load_channels(job: Any, work: int, ranges: int) -> None:
    """Fills the panel with values of a range for each channel."""
    _unpack(job, work, splat(1.0), splat(0.0), splat(0.0))
    panel, pitch = section(job, work, PANEL), job.pitch
    for channel in range(0, job.dim, LANES):
        place, row = panel + VECTOR_BYTES * channel, ranges + 4 * channel
        codes = load_square(place, VECTOR_BYTES) - spread(row + 2 * pitch)
        values = fma(codes, spread(row + pitch), spread(row))
        store_square(place, VECTOR_BYTES, values)


@plain
def _unpack(job: Any, work: int, scale: Any, middle: Any, zero: Any) -> None:
    """Fills the panel with ``(code - zero) * scale + middle``."""
    panel, rows, count = section(job, work, PANEL), work + TABLE, job.row_bytes
    if job.bits == 8:
        _unpack_parts(rows, 0, count, 8, job.coding, panel, scale, middle, zero)
    elif job.bits == 4:
        _unpack_parts(rows, 0, count, 4, INTEGER, panel, scale, middle, zero)
    else:
        quarter, spare = count // 3 * 2, section(job, work, SPARE)
        none, top = splat(0.0), scale * splat(4.0)
        _unpack_parts(rows, 0, quarter, 2, INTEGER, panel, scale, middle, zero)
        _unpack_parts(rows, quarter, quarter // 2, 1, INTEGER, spare, top, none, none)
        for channel in range(0, job.dim, LANES):
            place = VECTOR_BYTES * channel
            added = load_square(spare + place, VECTOR_BYTES)
            total = load_square(panel + place, VECTOR_BYTES) + added
            store_square(panel + place, VECTOR_BYTES, total)


@inline
def _unpack_parts(
    rows: int,
    offset: int,
    count: int,
    bits: int,
    coding: int,
    panel: int,
    scale: Any,
    middle: Any,
    zero: Any,
) -> None:
    """Of `count` bytes of each row the parts, `bits` wide, which are as many runs of channels.

    What is written beyond a run is overwritten by the next, which is why the bytes descend.
    """
    mask = (1 << bits) - 1
    for index in range((count - 1) // LANES * LANES, -1, -LANES):
        packed = load_bytes(rows, offset + index)
        for part in range(8 // bits):
            codes = (packed >> (bits * part)) & mask
            numbers = to_float(codes) if coding == INTEGER else from_fp8(codes, coding)
            place = panel + VECTOR_BYTES * (index + count * part)
            store_square(place, VECTOR_BYTES, fma(numbers - zero, scale, middle))


# States


@plain
def _store_states(job: Any, work: int, batch: int, head: int, token: int, last: int) -> None:
    """Rotates the panel back, adds the mean, and writes eight tokens."""
    panel = section(job, work, PANEL)
    is_last_step_open = False
    if job.rotated:
        is_last_step_open = job.core_order == 1 and job.dim >= LANES
        butterflies(panel, LANES if is_last_step_open else job.core_order, job.dim)
        if job.core_order > 1:
            target = section(job, work, SPARE)
            apply_core(job, panel, target, False)
            panel = target
    states = job.states + batch * job.states_batch + head * job.states_head
    rows = work + TABLE
    is_staged = job.states_kind != FP32 or job.dim % LANES != 0
    if is_staged:
        point(rows, section(job, work, STAGING), job.pitch, 0, LANES - 1)
    else:
        point(rows, states, job.states_token, token, last)
    fixed, has_angles, mean = job.fixed, job.cos, head * job.pitch
    turned_cos, turned_sin = job.turned_cos + mean, job.turned_sin + mean
    cos_panel, sin_panel = section(job, work, COS), section(job, work, SIN)
    for channel in range(0, job.dim, LANES):
        square = load_square(panel + VECTOR_BYTES * channel, VECTOR_BYTES)
        if is_last_step_open:
            square = butterfly(square)
        if fixed:
            square = square + spread(fixed + mean + 4 * channel)
        if has_angles:
            angles = angles_of(job, channel)
            cos = load_square(cos_panel + angles, VECTOR_BYTES)
            sin = load_square(sin_panel + angles, VECTOR_BYTES)
            square = fma(spread(turned_cos + 4 * channel), cos, square)
            square = fma(spread(turned_sin + 4 * channel), sin, square)
        store_rows(rows, 4 * channel, transpose(square))
    if is_staged:
        for lane in range(smaller(LANES, last + 1 - token)):
            row = states + (token + lane) * job.states_token
            staged = load_long(rows + 8 * lane)
            narrow_row(staged, job.states_kind, job.dim, row, work + NUMBERS)
