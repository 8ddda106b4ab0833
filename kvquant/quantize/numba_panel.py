"""Panels: eight tokens of one KV head, a vector of the eight for each channel.

On a panel, whatever a head needs (mean, butterflies, core, range) is the same operation on whole
vectors, so that each token goes through the very operations of the reference, in their order. Fewer
than eight tokens are filled up with the last one, which is then computed, and written, repeatedly.
Rows that are not float32, or no multiple of eight long, go through a staging area.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types

from .numba_formats import FP32, widen_row
from .numba_memory import (
    load_int,
    load_long,
    load_rows,
    load_square,
    load_vector,
    smaller,
    spread,
    store_long,
    store_square,
    store_vector,
)
from .numba_threads import THREAD_FIELDS, stamp
from .numba_vectors import LANES, butterfly, fma, inline, plain, transpose

VECTOR_BYTES = 4 * LANES

PER_TOKEN, PER_GROUP, STATIC = 0, 1, 2
"""What shares a range."""

TABLE, NUMBERS, FIRST_SECTION = 0, 64, 128
"""Where eight addresses, eight numbers and the sections begin in the memory that a thread uses."""

PANEL, SPARE, STAGING, COS, SIN, LOW, HIGH, RANGES = range(8)
"""Sections, each as large as a panel."""

SECTIONS = 8

_INTS = """
    section pitch lanes
    spans span tokens kv_heads dim
    states states_batch states_head states_token states_kind
    codes codes_batch codes_head codes_span codes_token row_bytes bits coding offset
    scale scale_batch scale_head scale_unit middle middle_batch middle_head middle_unit
    ranges_kind grain symmetric tables tables_head
    rotated core_order core
    fixed turned_cos turned_sin pairs pair_of by_channel cos sin angles_row
    positions positions_batch positions_token positions_size last_position
"""
_FLOATS = "steps lowest highest zero factor"


class Job(ctypes.Structure):
    """What a kernel is called with.

    Work is cut into tasks, each a span of tokens of one batch row, which threads take by number.
    A tensor is given by its address, and the bytes from a batch row, KV head, token (or unit, or
    span) to the next. The last field is there for its name, which makes a signature of its own.
    """

    _fields_ = [
        *((name, ctypes.c_int64) for name in f"{THREAD_FIELDS} {_INTS}".split()),
        *((name, ctypes.c_float) for name in _FLOATS.split()),
        (f"text_{stamp(Path(__file__).parent)}", ctypes.c_float),
    ]


SIGNATURE = types.void(types.CPointer(numba.from_dtype(np.dtype(Job))))


@inline
def section(job: Any, work: int, index: int) -> Any:
    """Address of a section."""
    return work + FIRST_SECTION + index * job.section


# Rows to panel


@inline
def point(table: int, base: int, stride: int, first: int, last: int) -> None:
    """Fills a table with the addresses of tokens ``first, first + 1, …``; beyond `last`, of it."""
    for lane in range(LANES):
        store_long(table + 8 * lane, base + stride * smaller(first + lane, last))


@plain
def load_panel(job: Any, work: int, kind: int, count: int, panel: int) -> None:
    """Fills a panel from `count` numbers at each address of the table."""
    table = work + TABLE
    if kind != FP32 or count % LANES:
        # As many as LANES, but LLVM must not know: unrolled, this would be most of the code.
        for lane in range(job.lanes):
            row = section(job, work, STAGING) + lane * job.pitch
            widen_row(load_long(table + 8 * lane), kind, count, row, work + NUMBERS)
            store_long(table + 8 * lane, row)
    for index in range(0, count, LANES):
        square = transpose(load_rows(table, 4 * index))
        store_square(panel + VECTOR_BYTES * index, VECTOR_BYTES, square)


@plain
def load_angles(job: Any, work: int, batch: int, first: int, last: int) -> None:
    """Cosines and sines at the positions of eight tokens, as panels of pairs, or of channels.

    Positions that no table holds become the nearest ones: there is no bound check to rely on.
    """
    positions = job.positions + batch * job.positions_batch
    for index in range(2):
        for lane in range(LANES):
            place = positions + smaller(first + lane, last) * job.positions_token
            position = load_long(place) if job.positions_size == 8 else load_int(place)
            position = 0 if position < 0 else smaller(position, job.last_position)
            row = (job.sin if index else job.cos) + job.angles_row * position
            store_long(work + TABLE + 8 * lane, row)
        panel = section(job, work, SIN if index else COS)
        if job.by_channel:
            spare = section(job, work, SPARE)
            load_panel(job, work, FP32, job.pairs, spare)
            for channel in range(job.dim):
                pair = spare + VECTOR_BYTES * load_long(job.pair_of + 8 * channel)
                store_vector(panel + VECTOR_BYTES * channel, load_vector(pair))
        else:
            load_panel(job, work, FP32, job.pairs, panel)


@inline
def angles_of(job: Any, channel: int) -> Any:
    """Where the angles of eight channels begin in those panels, in bytes."""
    return VECTOR_BYTES * (channel if job.by_channel else load_long(job.pair_of + 8 * channel))


# Rotation


@plain
def butterflies(panel: int, stride: int, dim: int) -> None:
    """Sums and differences of channels `stride` apart, then 2 * stride, up to dim / 2."""
    while stride < dim:
        # Three steps at a time, between registers, while as many are left.
        step = 8 if 8 * stride <= dim else 2
        apart = VECTOR_BYTES * stride
        for start in range(0, dim, step * stride):
            for channel in range(start, start + stride):
                place = panel + VECTOR_BYTES * channel
                if step == 8:
                    store_square(place, apart, butterfly(load_square(place, apart)))
                else:
                    one, other = load_vector(place), load_vector(place + apart)
                    store_vector(place, one + other)
                    store_vector(place + apart, one - other)
        stride *= step


@inline
def apply_core(job: Any, panel: int, target: int, is_exact: bool) -> None:
    """The core times each block of channels, inputs ascending, eight outputs at a time.

    What is written beyond a block is overwritten by the next.
    """
    order, row = job.core_order, 4 * (job.core_order + LANES)
    for start in range(0, job.dim, order):
        for output in range(0, order, LANES):
            total = spread(job.core + row * order)  # zeros
            for index in range(order):
                column = spread(job.core + row * index + 4 * output)
                entry = load_vector(panel + VECTOR_BYTES * (start + index))
                total = total + column * entry if is_exact else fma(column, entry, total)
            store_square(target + VECTOR_BYTES * (start + output), VECTOR_BYTES, total)
