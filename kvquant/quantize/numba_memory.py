"""Memory as the kernels see it: addresses, as ints. The caller answers for bounds.

A table is eight addresses, one for each row of a square.
"""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from .numba_vectors import (
    INT_SQUARE,
    INT_VECTOR,
    LANES,
    SQUARE,
    VECTOR,
    define,
    multiply_add,
    repeat,
    rows_of,
    shuffle,
)

_BYTE, _SHORT, _INT, _LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_SIZES = {_BYTE: 1, _SHORT: 2, _INT: 4, _LONG: 8, _FLOAT: 4}
_BYTES, _SHORTS = ir.VectorType(_BYTE, LANES), ir.VectorType(_SHORT, LANES)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    size = _SIZES[getattr(kind, "element", kind)]
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=size)


def _store(builder: Any, address: Any, value: Any) -> None:
    size = _SIZES[getattr(value.type, "element", value.type)]
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=size)


def _steps(builder: Any, address: Any, stride: Any) -> list[Any]:
    """Eight addresses, `stride` bytes apart."""
    return [builder.add(address, builder.mul(stride, _LONG(index))) for index in range(LANES)]


def _beyond(builder: Any, table: Any, offset: Any) -> list[Any]:
    """The addresses of a table, each plus `offset`."""
    places = _steps(builder, table, _LONG(8))
    return [builder.add(_load(builder, place, _LONG), offset) for place in places]


# Single numbers


@define(types.int64, types.int64)
def load_short(builder: Any, address: Any) -> Any:
    """Two bytes, unsigned."""
    return builder.zext(_load(builder, address, _SHORT), _LONG)


@define(types.int64, types.int64)
def load_int(builder: Any, address: Any) -> Any:
    """Four bytes."""
    return builder.sext(_load(builder, address, _INT), _LONG)


@define(types.int64, types.int64)
def load_long(builder: Any, address: Any) -> Any:
    """Eight bytes."""
    return _load(builder, address, _LONG)


@define(types.float32, types.int64)
def load_float(builder: Any, address: Any) -> Any:
    """A float32."""
    return _load(builder, address, _FLOAT)


@define(types.void, types.int64, types.float32)
def store_float(builder: Any, address: Any, number: Any) -> None:
    """Inverse of `load_float`."""
    _store(builder, address, number)


@define(types.void, types.int64, types.int64)
def store_int(builder: Any, address: Any, number: Any) -> None:
    """The four low bytes of a number."""
    _store(builder, address, builder.trunc(number, _INT))


@define(types.void, types.int64, types.int64)
def store_long(builder: Any, address: Any, number: Any) -> None:
    """Eight bytes."""
    _store(builder, address, number)


@define(types.void, types.int64, types.int64, types.int64)
def copy_bytes(builder: Any, source: Any, count: Any, target: Any) -> None:
    """Copies `count` bytes to `target`."""
    to, origin = (builder.inttoptr(each, _BYTE.as_pointer()) for each in (target, source))
    cgutils.raw_memcpy(builder, to, origin, count, 1)


@define(types.int64, types.int64, types.int64)
def smaller(builder: Any, one: Any, other: Any) -> Any:
    """The smaller int."""
    return builder.select(builder.icmp_signed("<", one, other), one, other)


@define(types.int64, types.int64)
def take_number(builder: Any, address: Any) -> Any:
    """The number at `address`, which becomes one more: each thread gets another one."""
    pointer = builder.inttoptr(address, _LONG.as_pointer())
    return builder.atomic_rmw("add", pointer, _LONG(1), "monotonic")


@define(types.int64, types.int64)
def take_turn(builder: Any, address: Any) -> Any:
    """As `take_number`; what other threads wrote before they took theirs can be read after it."""
    pointer = builder.inttoptr(address, _LONG.as_pointer())
    return builder.atomic_rmw("add", pointer, _LONG(1), "acq_rel")


# Vectors


@define(VECTOR, types.int64)
def load_vector(builder: Any, address: Any) -> Any:
    """Eight consecutive float32."""
    return [_load(builder, address, VECTOR.row)]


@define(INT_VECTOR, types.int64)
def load_ints(builder: Any, address: Any) -> Any:
    """Eight consecutive int32."""
    return [_load(builder, address, INT_VECTOR.row)]


@define(INT_VECTOR, types.int64)
def load_octets(builder: Any, address: Any) -> Any:
    """Eight consecutive bytes, unsigned."""
    return [builder.zext(_load(builder, address, _BYTES), INT_VECTOR.row)]


@define(INT_VECTOR, types.int64)
def load_shorts(builder: Any, address: Any) -> Any:
    """Eight consecutive uint16."""
    return [builder.zext(_load(builder, address, _SHORTS), INT_VECTOR.row)]


@define(types.void, types.int64, VECTOR)
def store_vector(builder: Any, address: Any, numbers: Any) -> None:
    """Inverse of `load_vector`."""
    _store(builder, address, *rows_of(builder, numbers))


@define(types.void, types.int64, INT_VECTOR)
def store_ints(builder: Any, address: Any, numbers: Any) -> None:
    """Inverse of `load_ints`."""
    _store(builder, address, *rows_of(builder, numbers))


@define(types.void, types.int64, INT_VECTOR)
def store_shorts(builder: Any, address: Any, numbers: Any) -> None:
    """Inverse of `load_shorts`."""
    _store(builder, address, *(builder.trunc(row, _SHORTS) for row in rows_of(builder, numbers)))


# Squares


@define(SQUARE, types.int64)
def spread(builder: Any, address: Any) -> Any:
    """Eight consecutive float32: row i holds the i-th eight times."""
    places = _steps(builder, address, _LONG(4))
    return [repeat(builder, _load(builder, place, _FLOAT)) for place in places]


@define(SQUARE, types.int64, types.int64)
def load_square(builder: Any, address: Any, stride: Any) -> Any:
    """Eight vectors, `stride` bytes apart."""
    return [_load(builder, place, VECTOR.row) for place in _steps(builder, address, stride)]


@define(SQUARE, types.int64, types.int64, types.int64)
def load_halves(builder: Any, one: Any, other: Any, stride: Any) -> Any:
    """Four vectors from each of two addresses, `stride` bytes apart."""
    places = [*_steps(builder, one, stride)[:4], *_steps(builder, other, stride)[:4]]
    return [_load(builder, place, VECTOR.row) for place in places]


@define(types.void, types.int64, types.int64, types.int64, SQUARE)
def store_halves(builder: Any, one: Any, other: Any, stride: Any, square: Any) -> None:
    """Inverse of `load_halves`."""
    places = [*_steps(builder, one, stride)[:4], *_steps(builder, other, stride)[:4]]
    _store_rows(builder, places, rows_of(builder, square))


@define(SQUARE, types.int64, types.int64, VECTOR, VECTOR, SQUARE)
def add_products(builder: Any, address: Any, stride: Any, one: Any, other: Any, square: Any) -> Any:
    """Adds four vectors, `stride` bytes apart, times `one` to four rows, times `other` to four."""
    places, rows = _steps(builder, address, stride)[:4], rows_of(builder, square)
    loaded = [_load(builder, place, VECTOR.row) for place in places]
    factors = [*rows_of(builder, one) * 4, *rows_of(builder, other) * 4]
    triples = zip(loaded * 2, factors, rows, strict=True)
    return [multiply_add(builder, *triple) for triple in triples]


@define(SQUARE, VECTOR, VECTOR, types.int64, types.int64, SQUARE)
def add_multiples(
    builder: Any, one: Any, other: Any, address: Any, stride: Any, square: Any
) -> Any:
    """Adds `one` times four numbers, `stride` bytes apart, to four rows, `other` to four."""
    places = _steps(builder, address, stride)[:4]
    factors = [repeat(builder, _load(builder, place, _FLOAT)) for place in places]
    added = [*rows_of(builder, one) * 4, *rows_of(builder, other) * 4]
    triples = zip(added, factors * 2, rows_of(builder, square), strict=True)
    return [multiply_add(builder, *triple) for triple in triples]


@define(types.void, types.int64, types.int64, types.int64)
def deal(builder: Any, source: Any, target: Any, stride: Any) -> None:
    """Of 32 numbers each fourth to one of four vectors, `stride` bytes apart."""
    rows = [_load(builder, place, VECTOR.row) for place in _steps(builder, source, _LONG(32))[:4]]
    halves = [
        [shuffle(builder, rows[start], rows[start + 1], lanes) for start in (0, 2)]
        for lanes in ([0, 4, 8, 12, 1, 5, 9, 13], [2, 6, 10, 14, 3, 7, 11, 15])
    ]
    lanes = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
    dealt = [shuffle(builder, one, other, half) for one, other in halves for half in lanes]
    _store_rows(builder, _steps(builder, target, stride)[:4], dealt)


@define(INT_SQUARE, types.int64, types.int64)
def load_int_square(builder: Any, address: Any, stride: Any) -> Any:
    """Eight vectors of int32, `stride` bytes apart."""
    return [_load(builder, place, INT_VECTOR.row) for place in _steps(builder, address, stride)]


@define(types.void, types.int64, types.int64, SQUARE)
def store_square(builder: Any, address: Any, stride: Any, square: Any) -> None:
    """Inverse of `load_square`."""
    _store_rows(builder, _steps(builder, address, stride), rows_of(builder, square))


@define(types.void, types.int64, types.int64, INT_SQUARE)
def store_int_square(builder: Any, address: Any, stride: Any, square: Any) -> None:
    """Inverse of `load_int_square`."""
    _store_rows(builder, _steps(builder, address, stride), rows_of(builder, square))


@define(SQUARE, types.int64, types.int64)
def load_rows(builder: Any, table: Any, offset: Any) -> Any:
    """Eight float32 `offset` bytes beyond each address of a table."""
    return [_load(builder, place, VECTOR.row) for place in _beyond(builder, table, offset)]


@define(types.void, types.int64, types.int64, SQUARE)
def store_rows(builder: Any, table: Any, offset: Any, square: Any) -> None:
    """Inverse of `load_rows`."""
    _store_rows(builder, _beyond(builder, table, offset), rows_of(builder, square))


@define(INT_SQUARE, types.int64, types.int64)
def load_bytes(builder: Any, table: Any, offset: Any) -> Any:
    """Eight bytes `offset` beyond each address of a table: row j holds the j-th of each."""
    rows = [_load(builder, place, _BYTES) for place in _beyond(builder, table, offset)]
    return [builder.zext(row, INT_VECTOR.row) for row in _transpose(builder, rows)]


@define(types.void, types.int64, types.int64, INT_SQUARE)
def store_bytes(builder: Any, table: Any, offset: Any, square: Any) -> None:
    """Inverse of `load_bytes`; of each number the low byte."""
    rows = [builder.trunc(row, _BYTES) for row in rows_of(builder, square)]
    _store_rows(builder, _beyond(builder, table, offset), _transpose(builder, rows))


def _store_rows(builder: Any, places: list[Any], rows: list[Any]) -> None:
    for place, row in zip(places, rows, strict=True):
        _store(builder, place, row)


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """Eight rows of eight bytes: interleaved byte by byte, then two by two, then four by four."""
    mask = _interleaved(0, 8, 8)
    pairs = [shuffle(builder, rows[i], rows[i + 1], mask) for i in range(0, LANES, 2)]
    fours = _interleave(builder, pairs, ((0, 1), (2, 3)), ir.VectorType(_SHORT, 8))
    eights = _interleave(builder, fours, ((0, 2), (1, 3)), ir.VectorType(_INT, 4))
    whole = [builder.bitcast(row, ir.VectorType(_BYTE, 16)) for row in eights]
    halves = (range(8), range(8, 16))
    return [shuffle(builder, row, row, half) for row in whole for half in halves]


def _interleave(
    builder: Any, rows: list[Any], pairs: tuple[tuple[int, int], ...], kind: Any
) -> list[Any]:
    """Interleaves pairs of rows as vectors of `kind`: of each first the lower halves."""
    rows = [builder.bitcast(row, kind) for row in rows]
    half = kind.count // 2
    return [
        shuffle(builder, rows[one], rows[other], _interleaved(start, half, kind.count))
        for one, other in pairs
        for start in (0, half)
    ]


def _interleaved(start: int, length: int, second: int) -> list[int]:
    """Lanes ``start … start + length`` of two rows in turn; the other row's begin at `second`."""
    return [lane for i in range(start, start + length) for lane in (i, i + second)]
