"""Number formats in vectors: bf16, fp16 and fp8, bit for bit as torch casts.

In integer arithmetic, since not every machine has instructions for them; formulas as in c10 of
PyTorch (Half.h, Float8_e4m3fn.h, Float8_e5m2.h).
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

from .numba_memory import (
    copy_bytes,
    load_ints,
    load_shorts,
    load_vector,
    store_ints,
    store_shorts,
    store_vector,
)
from .numba_vectors import (
    LANES,
    from_bits,
    inline,
    maximum,
    minimum,
    plain,
    splat,
    splat_int,
    to_bits,
    to_float,
    where_less,
)

FP32, BF16, FP16 = 0, 1, 2
"""What numbers in memory are."""

INTEGER, E4M3, E5M2 = 0, 1, 2
"""What codes are."""

FP16_MAX = 65504.0


@inline
def widen(bits: Any, kind: int) -> Any:
    """float32 of the bits of eight numbers."""
    if kind == FP32:
        return from_bits(bits)
    if kind == BF16:
        return from_bits(bits << 16)
    return _from_fp16(bits)


@inline
def narrow(numbers: Any, kind: int) -> Any:
    """Bits of eight float32, rounded to nearest, halves to even; fp16 saturates at ±65504.

    NaN stays NaN, but for those in bf16 that no arithmetic makes (all ones).
    """
    if kind == FP32:
        return to_bits(numbers)
    if kind == BF16:
        bits = to_bits(numbers)
        return (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    return _to_fp16(minimum(splat(FP16_MAX), maximum(splat(-FP16_MAX), numbers)))


@inline
def narrow_up(numbers: Any, kind: int) -> Any:
    """Bits of eight float32 that are not negative, rounded up; fp16 saturates at 65504.

    NaN stays NaN.
    """
    if kind == FP32:
        return to_bits(numbers)
    if kind == BF16:
        bits = (to_bits(numbers) + 0xFFFF) >> 16
        return where_less(splat(-1.0), numbers, bits, splat_int(0x7FC0))
    numbers = minimum(splat(FP16_MAX), numbers)
    bits = _to_fp16(numbers)
    return where_less(_from_fp16(bits), numbers, bits + 1, bits)


@inline
def _from_fp16(bits: Any) -> Any:
    rest = (bits & 0x7FFF) << 13
    normal = from_bits(rest + (0xE0 << 23)) * splat(2.0**-112)
    subnormal = from_bits((rest >> 13) | (126 << 23)) - splat(0.5)
    number = where_less(rest, splat_int(1 << 23), subnormal, normal)
    return from_bits(to_bits(number) | ((bits & 0x8000) << 16))


@inline
def _to_fp16(numbers: Any) -> Any:
    """Of numbers within the range, or NaN: adding 2^k rounds to where its last bit is."""
    bits = to_bits(numbers)
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude & 0x7F800000
    least = splat_int(0x38800000)
    exponent = where_less(exponent, least, least, exponent)
    scaled = from_bits(magnitude) * splat(2.0**112) * splat(2.0**-110)
    rounded = to_bits(from_bits(exponent + 0x07800000) + scaled)
    narrowed = ((rounded >> 13) & 0x7C00) + (rounded & 0xFFF)
    narrowed = where_less(splat_int(0x7F800000), magnitude, splat_int(0x7E00), narrowed)
    return narrowed | ((bits >> 16) & 0x8000)


@inline
def to_fp8(numbers: Any, coding: int) -> Any:
    """Codes of numbers within the range of the format, or NaN."""
    bits = to_bits(numbers)
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 24) & 0x80
    if coding == E4M3:
        return _to_small(magnitude, 20, 7) | sign
    return _to_small(magnitude, 21, 15) | sign


@inline
def _to_small(magnitude: Any, dropped: int, bias: int) -> Any:
    """Codes of a format without sign, of `dropped` mantissa bits less than float32's.

    In both 0x7F is NaN, and what comes out for one without the last step is larger.
    """
    one = (128 - bias + dropped) << 23  # adding it leaves the mantissa bits of a subnormal number
    subnormal = to_bits(from_bits(magnitude) + from_bits(splat_int(one))) - one
    odd = (magnitude >> dropped) & 1
    half = (1 << (dropped - 1)) - 1
    normal = (magnitude + odd + (half - ((127 - bias) << 23))) >> dropped
    code = where_less(magnitude, splat_int((128 - bias) << 23), subnormal, normal)
    return where_less(code, splat_int(0x7F), code, splat_int(0x7F))


@inline
def from_fp8(codes: Any, coding: int) -> Any:
    """float32 of codes."""
    if coding == E5M2:
        return _from_fp16(codes << 8)  # its upper half
    rest = codes & 0x7F
    normal = from_bits((rest << 20) + (120 << 23))
    number = where_less(rest, splat_int(8), to_float(rest) * splat(2.0**-9), normal)
    number = where_less(rest, splat_int(0x7F), number, splat(float("nan")))
    return from_bits(to_bits(number) | ((codes & 0x80) << 24))


@inline
def size_of(kind: int) -> int:
    """Bytes of a number."""
    return 4 if kind == FP32 else 2


@inline
def load_bits(address: int, kind: int) -> Any:
    """Bits of eight consecutive numbers."""
    return load_ints(address) if kind == FP32 else load_shorts(address)


@inline
def store_bits(address: int, bits: Any, kind: int) -> None:
    """Inverse of `load_bits`."""
    if kind == FP32:
        store_ints(address, bits)
    else:
        store_shorts(address, bits)


@plain
def widen_row(source: int, kind: int, count: int, target: int, spare: int) -> None:
    """Copies `count` consecutive numbers as float32, and up to seven of any value more.

    Args:
        source: Where they are.
        kind: What they are.
        count: How many.
        target: Where to.
        spare: 32 bytes to use.
    """
    size, whole = size_of(kind), count - count % LANES
    for index in range(0, whole, LANES):
        bits = load_bits(source + size * index, kind)
        store_vector(target + 4 * index, widen(bits, kind))
    if whole < count:
        copy_bytes(source + size * whole, size * (count - whole), spare)
        store_vector(target + 4 * whole, widen(load_bits(spare, kind), kind))


@plain
def narrow_row(source: int, kind: int, count: int, target: int, spare: int) -> None:
    """Inverse of `widen_row`, but `count` numbers only."""
    size, whole = size_of(kind), count - count % LANES
    for index in range(0, whole, LANES):
        bits = narrow(load_vector(source + 4 * index), kind)
        store_bits(target + size * index, bits, kind)
    if whole < count:
        store_bits(spare, narrow(load_vector(source + 4 * whole), kind), kind)
        copy_bytes(spare, size * (count - whole), target + size * whole)
