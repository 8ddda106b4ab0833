"""What the attention kernel is called with, and how a thread's memory is divided."""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, types  # type: ignore[attr-defined]

from kvquant.quantize import numba_panel
from kvquant.quantize.numba_memory import load_long
from kvquant.quantize.numba_panel import Job
from kvquant.quantize.numba_threads import THREAD_FIELDS, stamp
from kvquant.quantize.numba_vectors import LANES, define, inline

TILE = 32
"""Tokens that are worked on at once; a multiple of eight."""

QUAD = 4
"""Queries that are worked on at once."""

BLOCK = LANES * LANES
"""Numbers of a square."""

EXACT, CODED = 0, 1
"""What a run's tokens are."""

(
    FIRST,
    STOP,
    KIND,
    CODES,
    CODES_BATCH,
    CODES_HEAD,
    CODES_UNIT,
    CODES_TOKEN,
    NUMBER_KIND,
    SCALE,
    SCALE_BATCH,
    SCALE_HEAD,
    SCALE_UNIT,
    MIDDLE,
    MIDDLE_BATCH,
    MIDDLE_HEAD,
    MIDDLE_UNIT,
) = range(17)
"""Numbers that describe a run: addresses, and bytes from one to the next. Exact tokens lie where
codes would, each a unit."""

RUN_NUMBERS = 17

SPAN_NUMBERS = 3
"""A span: its first token, the one after its last, and its run of values."""

PAIR_NUMBERS = 3
"""A rotary pair: its number and its two channels."""

_INTS = """
    keys key_runs values spans span_table kv_heads group new query_count rows
    key_plan key_coder value_plan key_dim value_dim key_pitch value_pitch
    past window score_pitch partial partial_bytes turns
    query query_batch query_head query_token query_kind
    out out_batch out_head out_token out_kind
    has_softcap sinks
    pairs pair_table cos sin angles_row positions positions_batch positions_first positions_size
    plain_queries turned_queries folded_queries constants totals lifts pair_terms scores
    factors products weights tile
"""
_FLOATS = "scaling softcap"


class AttendJob(ctypes.Structure):
    """One call: tasks are spans of tokens of one row and one KV head.

    The fields from `plain_queries` to `tile` say where areas begin in a thread's memory. The last
    field is there for its name, which makes a signature of its own.
    """

    _fields_ = [
        *((name, ctypes.c_int64) for name in f"{THREAD_FIELDS} {_INTS}".split()),
        *((name, ctypes.c_float) for name in _FLOATS.split()),
        (
            f"text_{stamp(Path(__file__).parent, Path(numba_panel.__file__).parent)}",
            ctypes.c_float,
        ),
    ]


SIGNATURE = types.void(types.CPointer(numba.from_dtype(np.dtype(AttendJob))))

_STRUCTURE = ir.ArrayType(ir.IntType(8), ctypes.sizeof(Job))
_POINTER = types.CPointer(numba.from_dtype(np.dtype(Job)))


@define(_POINTER, types.int64)
def _pointer(builder: Any, address: Any) -> Any:
    """The structure at an address."""
    return builder.inttoptr(address, _STRUCTURE.as_pointer())


@inline
def template(address: int) -> Any:
    """What `kvquant.quantize.numba_plan` worked out for a codec."""
    return carray(_pointer(address), 1)[0]


@inline
def number(run: int, index: int) -> Any:
    """One of the numbers that describe a run."""
    return load_long(run + 8 * index)
