"""The compiled encoder: bit for bit what `Codec.encode_reference` gives.

::

    rows of states → panel → minus mean → rotate → range → codes → rows of bytes
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

from numba import carray  # type: ignore[attr-defined]

from .numba_formats import (
    INTEGER,
    narrow,
    narrow_up,
    size_of,
    store_bits,
    to_fp8,
    widen,
)
from .numba_memory import (
    copy_bytes,
    load_int_square,
    load_long,
    load_square,
    load_vector,
    smaller,
    spread,
    store_bytes,
    store_int_square,
    store_ints,
    store_square,
    store_vector,
    take_number,
)
from .numba_panel import (
    COS,
    HIGH,
    LOW,
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
    load_panel,
    point,
    section,
)
from .numba_vectors import (
    LANES,
    fma,
    highest,
    inline,
    lowest,
    maximum,
    minimum,
    nan_if_any,
    nearest,
    plain,
    splat,
    splat_int,
    to_bits,
    to_int,
    transpose,
    where_less,
)


def encode_tasks(pointer: Any) -> None:
    """Encodes spans of tokens, each of one batch row and all KV heads, while there are any left."""
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
                    _encode_tokens(job, work, batch, head, token, last)
        else:
            for head in range(job.kv_heads):
                _encode_channels(job, work, batch, head, span, first, last)
        task = take_number(job.taken)


@plain
def _encode_tokens(job: Any, work: int, batch: int, head: int, first: int, last: int) -> None:
    """Eight tokens with a range each."""
    panel = _load_states(job, work, batch, head, first, last)
    if job.fixed or job.cos:
        _subtract_mean(job, work, head)
    if job.rotated:
        panel = _rotate(job, work)
    low, high = _extremes(panel, job.dim)
    scale_bits, middle_bits = _range(job, low, high)
    count = smaller(LANES, last + 1 - first)
    scales = job.scale + batch * job.scale_batch + head * job.scale_head
    _write(work, scale_bits, count, job.ranges_kind, scales + first * job.scale_unit)
    if not job.symmetric:
        middles = job.middle + batch * job.middle_batch + head * job.middle_head
        _write(work, middle_bits, count, job.ranges_kind, middles + first * job.middle_unit)
    middle, divisor = widen(middle_bits, job.ranges_kind), _divisor(job, scale_bits)
    zero = splat(job.zero)
    for channel in range(0, job.dim, LANES):
        place = panel + VECTOR_BYTES * channel
        codes = _codes(job, load_square(place, VECTOR_BYTES), middle, divisor, zero)
        store_int_square(place, VECTOR_BYTES, codes)
    _store_codes(job, work, panel, batch, head, first // job.span, first % job.span, first, last)


@plain
def _encode_channels(
    job: Any, work: int, batch: int, head: int, span: int, first: int, last: int
) -> None:
    """A span of tokens with ranges for each channel: calibrated ones, or those of the span."""
    ranges = job.tables + head * job.tables_head
    if job.grain == PER_GROUP:
        ranges = section(job, work, RANGES)
        for token in range(first, last + 1, LANES):
            panel = _load_states(job, work, batch, head, token, last)
            _widen_range(job, work, panel, token == first)
        _write_ranges(job, work, batch, head, span)
    for token in range(first, last + 1, LANES):
        panel = _load_states(job, work, batch, head, token, last)
        for channel in range(0, job.dim, LANES):
            place, row = panel + VECTOR_BYTES * channel, ranges + 4 * channel
            middle, divisor = spread(row), spread(row + job.pitch)
            zero = spread(row + 2 * job.pitch)
            codes = _codes(job, load_square(place, VECTOR_BYTES), middle, divisor, zero)
            store_int_square(place, VECTOR_BYTES, codes)
        _store_codes(job, work, panel, batch, head, span, token - first, token, last)


# States


@inline
def _load_states(job: Any, work: int, batch: int, head: int, first: int, last: int) -> Any:
    """The panel of eight tokens."""
    states = job.states + batch * job.states_batch + head * job.states_head
    point(work + TABLE, states, job.states_token, first, last)
    panel = section(job, work, PANEL)
    load_panel(job, work, job.states_kind, job.dim, panel)
    return panel


@plain
def _subtract_mean(job: Any, work: int, head: int) -> None:
    panel, mean = section(job, work, PANEL), head * job.pitch
    for channel in range(0, job.dim, LANES):
        place, row = panel + VECTOR_BYTES * channel, mean + 4 * channel
        states = load_square(place, VECTOR_BYTES)
        if job.fixed:
            states = states - spread(job.fixed + row)
        if job.cos:
            angles = angles_of(job, channel)
            cos = load_square(section(job, work, COS) + angles, VECTOR_BYTES)
            sin = load_square(section(job, work, SIN) + angles, VECTOR_BYTES)
            turned = spread(job.turned_cos + row) * cos + spread(job.turned_sin + row) * sin
            states = states - turned
        store_square(place, VECTOR_BYTES, states)


@plain
def _rotate(job: Any, work: int) -> Any:
    """Rotates the panel; returns where it is then."""
    panel = section(job, work, PANEL)
    butterflies(panel, job.core_order, job.dim)
    if job.core_order > 1:
        target = section(job, work, SPARE)
        apply_core(job, panel, target, True)
        panel = target
    factor = splat(job.factor)
    for channel in range(job.dim):
        place = panel + VECTOR_BYTES * channel
        store_vector(place, load_vector(place) * factor)
    return panel


# Ranges


@inline
def _extremes(panel: int, dim: int) -> Any:
    """Smallest and largest number of each of eight tokens; the latter NaN if one of them is."""
    low = high = load_vector(panel)
    nan = splat(0.0)
    for channel in range(dim, -(-dim // LANES) * LANES):
        store_vector(panel + VECTOR_BYTES * channel, low)
    for channel in range(0, dim, LANES):
        square = load_square(panel + VECTOR_BYTES * channel, VECTOR_BYTES)
        low, high = minimum(low, lowest(square)), maximum(high, highest(square))
        nan = nan + nan_if_any(square)
    return low, high + nan


@inline
def _range(job: Any, low: Any, high: Any) -> Any:
    """Bits of scale and middle; those of 0 for the middle if symmetric. NaN if `high` is."""
    kind, steps = job.ranges_kind, splat(job.steps)
    zero = splat(0.0)
    high = high + ((high - high) + (low - low))  # NaN if one of them is infinite
    if job.symmetric:
        return narrow_up(maximum(zero - low, high) / steps, kind), to_bits(zero)
    bits = narrow(low * splat(0.5) + high * splat(0.5) + zero, kind)
    middle = widen(bits, kind)
    return narrow_up(maximum(middle - low, high - middle) / steps, kind), bits


@inline
def _divisor(job: Any, scale_bits: Any) -> Any:
    """Scales, with 1 in place of 0."""
    scale = widen(scale_bits, job.ranges_kind)
    return where_less(splat(0.0), scale, scale, splat(1.0) + scale)


@inline
def _write(work: int, bits: Any, count: int, kind: int, target: int) -> None:
    """Writes the first `count` of eight numbers."""
    store_bits(work + NUMBERS, bits, kind)
    copy_bytes(work + NUMBERS, size_of(kind) * count, target)


@plain
def _widen_range(job: Any, work: int, panel: int, is_first: bool) -> None:
    """Takes eight more tokens of a group into account."""
    lows, highs = section(job, work, LOW), section(job, work, HIGH)
    for channel in range(0, job.dim, LANES):
        offset = VECTOR_BYTES * channel
        states = load_square(panel + offset, VECTOR_BYTES)
        low = high = states
        if not is_first:
            low = minimum(states, load_square(lows + offset, VECTOR_BYTES))
            high = maximum(states, load_square(highs + offset, VECTOR_BYTES))
        high = fma(states, splat(0.0), high)  # NaN from then on
        store_square(lows + offset, VECTOR_BYTES, low)
        store_square(highs + offset, VECTOR_BYTES, high)


@plain
def _write_ranges(job: Any, work: int, batch: int, head: int, unit: int) -> None:
    """Writes what a group has, and middle, divisor and zero of its channels as rows."""
    kind, size = job.ranges_kind, size_of(job.ranges_kind)
    scales = job.scale + batch * job.scale_batch + head * job.scale_head + unit * job.scale_unit
    middles = job.middle + batch * job.middle_batch + head * job.middle_head
    middles += unit * job.middle_unit
    for channel in range(0, job.dim, LANES):
        offset, count = VECTOR_BYTES * channel, smaller(LANES, job.dim - channel)
        low = lowest(transpose(load_square(section(job, work, LOW) + offset, VECTOR_BYTES)))
        highs = transpose(load_square(section(job, work, HIGH) + offset, VECTOR_BYTES))
        high = highest(highs) + nan_if_any(highs)
        scale_bits, middle_bits = _range(job, low, high)
        _write(work, scale_bits, count, kind, scales + size * channel)
        if not job.symmetric:
            _write(work, middle_bits, count, kind, middles + size * channel)
        row = section(job, work, RANGES) + 4 * channel
        store_vector(row, widen(middle_bits, kind))
        store_vector(row + job.pitch, _divisor(job, scale_bits))
        store_vector(row + 2 * job.pitch, splat(job.zero))


# Codes


@inline
def _codes(job: Any, states: Any, middle: Any, divisor: Any, zero: Any) -> Any:
    """Codes as they are stored, of a square."""
    steps = (states - middle) / divisor
    lowest_code, highest_code = splat(job.lowest), splat(job.highest)
    if job.coding == INTEGER:
        whole = nearest(steps + zero)
        return to_int(minimum(maximum(whole, lowest_code), highest_code)) + job.offset
    # Without the zero: adding it to -0 would give 0. NaN has a code, unlike for integers.
    return to_fp8(minimum(highest_code, maximum(lowest_code, steps)), job.coding)


@plain
def _store_codes(
    job: Any,
    work: int,
    panel: int,
    batch: int,
    head: int,
    span: int,
    index: int,
    token: int,
    last: int,
) -> None:
    """Packs the codes of eight tokens, from the one with this index in its span on."""
    codes = job.codes + batch * job.codes_batch + head * job.codes_head + span * job.codes_span
    rows = work + TABLE
    is_staged = job.row_bytes % LANES != 0
    if is_staged:
        point(rows, section(job, work, STAGING), job.pitch, 0, LANES - 1)
    else:
        point(rows, codes, job.codes_token, index, index + last - token)
    for channel in range(job.dim, job.section // VECTOR_BYTES):
        store_ints(panel + VECTOR_BYTES * channel, splat_int(0))
    if job.bits == 3:
        quarter = job.row_bytes // 3 * 2
        _pack(panel, rows, 0, quarter, 2, 0)
        _pack(panel, rows, quarter, quarter // 2, 1, 2)
    else:
        _pack(panel, rows, 0, job.row_bytes, job.bits, 0)
    if is_staged:
        for lane in range(smaller(LANES, last + 1 - token)):
            row = codes + (index + lane) * job.codes_token
            copy_bytes(load_long(rows + 8 * lane), job.row_bytes, row)


@inline
def _pack(panel: int, rows: int, offset: int, count: int, bits: int, dropped: int) -> None:
    """`count` bytes of each row: parts of the channels, `bits` of each, one above the other.

    Args:
        panel: Codes.
        rows: Table of rows.
        offset: Of these bytes in a row.
        count: Number of bytes, and of channels in a part. Up to 7 bytes more are written.
        bits: How many of a code's.
        dropped: How many of a code's lower bits are left out.
    """
    mask = (1 << bits) - 1
    for index in range(0, count, LANES):
        place = panel + VECTOR_BYTES * index
        packed = (load_int_square(place, VECTOR_BYTES) >> dropped) & mask
        for part in range(1, 8 // bits):
            codes = load_int_square(place + VECTOR_BYTES * count * part, VECTOR_BYTES)
            packed = packed | (((codes >> dropped) & mask) << (bits * part))
        store_bytes(rows, offset + index, packed)
