"""The two inner loops: products of four queries with keys, sums of values by four weights.

Codes are read as they are stored. The codes of a head of 64 channels in 4 bits are 32 bytes; byte i
has channel i in its lower half and channel 32 + i in its upper one. Eight sums at a time are as
many as a core needs to be busy, and fit its registers.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

from kvquant.quantize.numba_formats import INTEGER, from_fp8
from kvquant.quantize.numba_memory import (
    add_multiples,
    add_products,
    load_halves,
    load_octets,
    load_vector,
    smaller,
    store_halves,
    store_vector,
)
from kvquant.quantize.numba_vectors import LANES, from_bits, inline, plain, row_sums, splat, zeros

FLOATS, NIBBLES, BYTES, FP8 = range(4)
"""What rows hold."""


@inline
def rows_kind(plan: Any, is_coded: bool) -> Any:
    """What the rows of a run hold, where they can be worked on as they are stored; else FLOATS."""
    if not is_coded or plan.row_bytes % LANES:
        return FLOATS
    if plan.bits == 4:
        return NIBBLES
    if plan.bits == 8:
        return BYTES if plan.coding == INTEGER else FP8
    return FLOATS


# A code in the last bits of 2^23 (or 2^19, for the upper half of a byte) is a number without a
# shift or a conversion.


@inline
def _lower(packed: Any) -> Any:
    return from_bits((packed & 0x0F) | 0x4B000000) - splat(8388616.0)


@inline
def _upper(packed: Any) -> Any:
    return from_bits((packed & 0xF0) | 0x49000000) - splat(524296.0)


@inline
def _octet(packed: Any) -> Any:
    return from_bits(packed | 0x4B000000) - splat(8388736.0)


@plain
def add_keys(
    kind: int, coding: int, source: int, step: int, count: int, width: int, queries: int,
    pitch: int, products: int,
) -> None:  # fmt: skip
    """Products of `count` rows with four queries, four numbers for each row; perhaps one row more.

    Args:
        kind: What the rows hold.
        coding: Format of FP8.
        source: The first row.
        step: Bytes to the next.
        count: How many.
        width: Bytes of codes in a row, or its channels.
        queries: The first query.
        pitch: Bytes to the next.
        products: Where to write.
    """
    for row in range(0, count, 2):
        one, other = source + row * step, source + smaller(row + 1, count - 1) * step
        sums = zeros()
        if kind == NIBBLES:
            for index in range(0, width, LANES):
                first, second = load_octets(one + index), load_octets(other + index)
                place = queries + 4 * index
                sums = add_products(place, pitch, _lower(first), _lower(second), sums)
                place += 4 * width
                sums = add_products(place, pitch, _upper(first), _upper(second), sums)
        elif kind == BYTES:
            for index in range(0, width, LANES):
                first, second = load_octets(one + index), load_octets(other + index)
                place = queries + 4 * index
                sums = add_products(place, pitch, _octet(first), _octet(second), sums)
        elif kind == FP8:
            for index in range(0, width, LANES):
                first = from_fp8(load_octets(one + index), coding)
                second = from_fp8(load_octets(other + index), coding)
                sums = add_products(queries + 4 * index, pitch, first, second, sums)
        else:
            for index in range(0, width, LANES):
                first, second = load_vector(one + 4 * index), load_vector(other + 4 * index)
                sums = add_products(queries + 4 * index, pitch, first, second, sums)
        store_vector(products + 16 * row, row_sums(sums))


@plain
def add_values(
    kind: int, coding: int, source: int, step: int, count: int, width: int, weights: int,
    weight_pitch: int, sums: int, pitch: int,
) -> None:  # fmt: skip
    """Adds `count` rows times their weights to the sums of four queries.

    Args:
        kind: What the rows hold.
        coding: Format of FP8.
        source: The first row.
        step: Bytes to the next.
        count: How many.
        width: Bytes of codes in a row, or its channels.
        weights: Of the first query.
        weight_pitch: Bytes to those of the next.
        sums: Of the first query; up to eight channels beyond the last are written too.
        pitch: Bytes to those of the next.
    """
    if kind == NIBBLES:
        for index in range(0, width, LANES):
            place, mate = sums + 4 * index, sums + 4 * (index + width)
            square = load_halves(place, mate, pitch)
            for row in range(count):
                packed = load_octets(source + row * step + index)
                entry = weights + 4 * row
                square = add_multiples(_lower(packed), _upper(packed), entry, weight_pitch, square)
            store_halves(place, mate, pitch, square)
    else:
        for index in range(0, width, 2 * LANES):
            place, mate = sums + 4 * index, sums + 4 * (index + LANES)
            square = load_halves(place, mate, pitch)
            # Of an odd number of vectors, the last one twice.
            beside = smaller(index + LANES, width - LANES) if kind != FLOATS else index + LANES
            if kind == BYTES:
                for row in range(count):
                    base, entry = source + row * step, weights + 4 * row
                    first, second = load_octets(base + index), load_octets(base + beside)
                    square = add_multiples(
                        _octet(first), _octet(second), entry, weight_pitch, square
                    )
            elif kind == FP8:
                for row in range(count):
                    base, entry = source + row * step, weights + 4 * row
                    first = from_fp8(load_octets(base + index), coding)
                    second = from_fp8(load_octets(base + beside), coding)
                    square = add_multiples(first, second, entry, weight_pitch, square)
            else:
                for row in range(count):
                    base, entry = source + row * step, weights + 4 * row
                    first, second = load_vector(base + 4 * index), load_vector(base + 4 * beside)
                    square = add_multiples(first, second, entry, weight_pitch, square)
            store_halves(place, mate, pitch, square)
