"""The kernel that quantizes and appends, bit for bit as `Codec.encode_reference` does.

All operations are those of docs/schemes.md in its order, each rounded by itself: products and sums
are not fused, division is IEEE division, numbers are rounded by adding a large one, and 8-bit
floats are made from bits. Those of a NaN are not the reference's. Left alone, `tl.max` and the like
pass over NaN; the one that arithmetic makes on a GPU is all ones, and would wrap around.

A token is a tile of two halves, which is how 4-bit codes share bytes. With a rotation of m
butterflies and a core of order c (without one, m = 2 and c is half the channels)::

    channel = (half * m / 2 + a) * c + b        place in the tile = (half * m / 2 + a) * C + b

with C the order c rounded up to a power of two.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

# Added and subtracted, it rounds numbers below 2^22 to whole ones, halves to even.
_WHOLE = tl.constexpr(12582912.0)

_ALL = tl.constexpr(tl.PropagateNan.ALL)


@dataclass(frozen=True)
class Form:
    """What the kernel is compiled for.

    Attributes:
        name: ``int4``, ``int8``, ``fp8_e4m3`` or ``fp8_e5m2``.
        dim: Width of a head.
        row: Bytes of a token's codes.
        butterflies: Order m of the Sylvester matrix; 2 without a rotation.
        order: Order c of the core; half the channels without a rotation.
        padded: `order`, rounded up to a power of two.
        rotated: Whether there is a rotation.
        cored: Whether that has a core.
        centered: Whether a mean is subtracted.
        turned: Whether one is subtracted that turns with the position.
        static: Whether scales are calibrated.
        symmetric: Whether there are no middles, or zero points.
        group: Tokens that share scales by channel, and make a tile; 1 for none.
        tokens: Of a tile, a power of two.
        kept: What scales are kept in: ``bf16``, ``fp16`` or ``fp32``.
        most: Largest code, or largest number of a float.
    """

    name: str
    dim: int
    row: int
    butterflies: int
    order: int
    padded: int
    rotated: bool
    cored: bool
    centered: bool
    turned: bool
    static: bool
    symmetric: bool
    group: int
    tokens: int
    kept: str
    most: float


@triton.jit(do_not_specialize=["turn", "kv_heads", "count", "place"])
def append_kernel(
    # [rows, kv_heads, tokens, dim], and positions [rows, tokens].
    states,
    state_row,
    state_head,
    state_unit,
    positions,
    position_row,
    position_token,
    # As Numbers has them.
    mean,
    of_cos,
    of_sin,
    column,
    cos,
    cos_row,
    sin,
    sin_row,
    core,
    scales,
    zeros,
    # Buffers.
    codes,
    code_row,
    code_head,
    code_unit,
    scale,
    middle,
    scale_row,
    scale_head,
    scale_unit,
    turn: tl.float32,
    kv_heads: tl.int32,
    count: tl.int32,
    place: tl.int32,
    FORM: tl.constexpr,
):
    """Appends a tile of the tokens of one head; the first unit of all gets row `place`."""
    TOKENS: tl.constexpr = FORM.tokens
    SPOTS: tl.constexpr = FORM.butterflies * FORM.padded
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // kv_heads, pair % kv_heads
    nth = tl.arange(0, TOKENS)
    spot = tl.arange(0, SPOTS)
    channel = spot // FORM.padded * FORM.order + spot % FORM.padded
    real = (spot % FORM.padded < FORM.order) & (channel < FORM.dim)
    own = head * FORM.dim + channel
    if FORM.group > 1:
        token = tl.program_id(1) * FORM.group + nth
        there = nth < FORM.group
        unit = (place + tl.program_id(1)).to(tl.int64)
        rows = codes + row * code_row + head * code_head + unit * code_unit + nth * FORM.row
        ranges = row * scale_row + head * scale_head + unit * scale_unit + channel
    else:
        token = tl.program_id(1) * TOKENS + nth
        there = token < count
        unit = (place + token).to(tl.int64)
        rows = codes + row * code_row + head * code_head + unit * code_unit
        ranges = row * scale_row + head * scale_head + unit * scale_unit
    held = there[:, None] & real[None, :]

    at = states + row * state_row + head * state_head + token.to(tl.int64) * state_unit
    numbers = tl.load(at[:, None] + channel[None, :], mask=held, other=0.0).to(tl.float32)
    if FORM.centered:
        numbers -= tl.load(mean + own, mask=real, other=0.0)[None, :]
    if FORM.turned:
        where = tl.load(
            positions + row * position_row + token * position_token, mask=there, other=0
        )
        waves = (
            where.to(tl.int64)[:, None],
            tl.load(column + channel, mask=real, other=0)[None, :],
        )
        cosine = tl.load(cos + waves[0] * cos_row + waves[1], mask=held, other=0.0)
        sine = tl.load(sin + waves[0] * sin_row + waves[1], mask=held, other=0.0)
        by_cos = tl.load(of_cos + own, mask=real, other=0.0)[None, :]
        by_sin = tl.load(of_sin + own, mask=real, other=0.0)[None, :]
        numbers -= by_cos * cosine + by_sin * sine
    if FORM.rotated:
        numbers = _rotated(numbers, core, FORM) * turn

    if FORM.static:
        steps = tl.div_rn(numbers, tl.load(scales + own, mask=real, other=1.0)[None, :])
        if not FORM.symmetric:
            steps += tl.load(zeros + own, mask=real, other=0.0)[None, :]
    else:
        AXIS: tl.constexpr = 0 if FORM.group > 1 else 1
        steps, kept, center = _steps(numbers, held, AXIS, FORM)
        mask = real if FORM.group > 1 else there
        tl.store(scale + ranges, kept, mask=mask)
        if not FORM.symmetric:
            tl.store(middle + ranges, center, mask=mask)
    _store(_codes(steps, held, FORM), rows, spot, there, FORM)


@triton.jit
def _rotated(numbers, core, FORM: tl.constexpr):
    """Butterflies of all strides, then the core, in the order of `Rotation.apply`; no factor."""
    ROWS: tl.constexpr = FORM.tokens * FORM.butterflies
    PADDED: tl.constexpr = FORM.padded
    STAGES: tl.constexpr = _log2(FORM.butterflies)
    numbers = tl.reshape(numbers, (ROWS, PADDED))
    for stage in tl.static_range(STAGES):
        numbers = _butterfly(numbers, ROWS, PADDED, 2**stage)
    if FORM.cored:
        place = tl.arange(0, PADDED)
        total = tl.zeros_like(numbers)
        for index in range(FORM.order):
            column = tl.sum(tl.where((place == index)[None, :], numbers, 0.0), 1)
            factors = core + place * FORM.order + index
            factors = tl.load(factors, mask=place < FORM.order, other=0.0)
            total += column[:, None] * factors[None, :]
        numbers = total
    return tl.reshape(numbers, (FORM.tokens, FORM.butterflies * FORM.padded))


@triton.jit
def _butterfly(numbers, ROWS: tl.constexpr, PADDED: tl.constexpr, STRIDE: tl.constexpr):
    """Sum and difference of rows that lie `STRIDE` apart."""
    pairs = tl.reshape(numbers, (ROWS // (2 * STRIDE), 2, STRIDE * PADDED))
    one, other = tl.split(tl.permute(pairs, (0, 2, 1)))
    pairs = tl.permute(tl.join(one + other, one - other), (0, 2, 1))
    return tl.reshape(pairs, (ROWS, PADDED))


@triton.constexpr_function
def _log2(number: int) -> int:
    return number.bit_length() - 1


@triton.jit
def _steps(numbers, held, AXIS: tl.constexpr, FORM: tl.constexpr):
    """Numbers in steps of their scale, not yet rounded; scale and middle as kept."""
    # NaN where one of them is NaN or infinite, else 0.
    nan = tl.sum(tl.where(held, numbers, 0.0) * 0.0, AXIS)
    if FORM.symmetric:
        reach = tl.max(tl.abs(tl.where(held, numbers, 0.0)), AXIS) + nan
        kept, divisor = _round_up(tl.div_rn(reach, FORM.most), FORM)
        center = kept
    else:
        low = tl.min(tl.where(held, numbers, float("inf")), AXIS)
        high = tl.max(tl.where(held, numbers, float("-inf")), AXIS) + nan
        center, middle = _nearest(low * 0.5 + high * 0.5 + 0.0, FORM)
        reach = tl.maximum(high - middle, middle - low)
        kept, divisor = _round_up(tl.div_rn(reach, FORM.most / 2), FORM)
        numbers -= tl.expand_dims(middle, AXIS)
    divisor = tl.expand_dims(tl.where(divisor == 0.0, 1.0, divisor), AXIS)
    steps = tl.div_rn(numbers, tl.broadcast_to(divisor, numbers.shape))
    if not FORM.symmetric:
        steps += FORM.most / 2
    return steps, kept, center


@triton.jit
def _round_up(numbers, FORM: tl.constexpr):
    """The smallest numbers of the scales' format that are no less: as kept, and in float32."""
    if FORM.kept == "bf16":
        return _upper_half(numbers, 0xFFFF)
    elif FORM.kept == "fp16":
        numbers = tl.minimum(numbers, 65504.0, propagate_nan=_ALL)
        nearest = numbers.to(tl.float16)
        above = (nearest.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
        kept = tl.where(nearest.to(tl.float32) < numbers, above, nearest)
        return kept, kept.to(tl.float32)
    else:
        return numbers, numbers


@triton.jit
def _nearest(numbers, FORM: tl.constexpr):
    """The nearest numbers of the scales' format, halves to even: as kept, and in float32."""
    if FORM.kept == "bf16":
        odd = (numbers.to(tl.int32, bitcast=True) >> 16) & 1
        return _upper_half(numbers, 0x7FFF + odd)
    elif FORM.kept == "fp16":
        kept = _clamped(numbers, 65504.0).to(tl.float16)
        return kept, kept.to(tl.float32)
    else:
        return numbers, numbers


@triton.jit
def _upper_half(numbers, added):
    """The bfloat16 in the upper half of bits to which some are added, and the same in float32."""
    bits = tl.where(numbers == numbers, numbers.to(tl.int32, bitcast=True) + added, 0x7FC00000)
    kept = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return kept, (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _clamped(numbers, most):
    """Numbers of at most `most` in magnitude; NaN stays NaN."""
    return tl.minimum(tl.maximum(numbers, -most, propagate_nan=_ALL), most, propagate_nan=_ALL)


@triton.jit
def _codes(steps, held, FORM: tl.constexpr):
    """Codes as they are stored, int32; 0 where there is no channel.

    `tl.maximum` of NaN and the lowest code of an integer format is that code.
    """
    if FORM.name == "fp8_e4m3":
        codes = _float8(_clamped(steps, FORM.most), 3, 7)
    elif FORM.name == "fp8_e5m2":
        codes = _float8(_clamped(steps, FORM.most), 2, 15)
    elif FORM.symmetric:
        offset = 8 if FORM.name == "int4" else 128
        whole = tl.minimum(tl.maximum(steps, -FORM.most), FORM.most) + _WHOLE - _WHOLE
        codes = whole.to(tl.int32) + offset
    else:
        whole = tl.minimum(tl.maximum(steps, 0.0), FORM.most) + _WHOLE - _WHOLE
        codes = whole.to(tl.int32)
    return tl.where(held, codes, 0)


@triton.jit
def _float8(numbers, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Bits of the nearest 8-bit floats, halves to even, of numbers within their range, or NaN."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = numbers.to(tl.int32, bitcast=True)
    sign, bits = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    normal = bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)
    normal = (normal >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal number the steps are equal.
    steps = tl.abs(numbers) * 2.0 ** (BIAS - 1 + MANTISSA) + _WHOLE
    small = steps.to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(bits < ((128 - BIAS) << 23), small, normal)
    return sign | tl.where(bits > 0x7F800000, 0x7F, code)


@triton.jit
def _store(codes, rows, spot, there, FORM: tl.constexpr):
    """Writes codes into rows of bytes."""
    HALF: tl.constexpr = FORM.butterflies * FORM.padded // 2
    if FORM.name == "int4":
        halves = tl.permute(tl.reshape(codes, (FORM.tokens, 2, HALF)), (0, 2, 1))
        low, high = tl.split(halves)
        codes = low | (high << 4)
        spot = tl.arange(0, HALF)
    byte = spot // FORM.padded * FORM.order + spot % FORM.padded
    real = (spot % FORM.padded < FORM.order) & (byte < FORM.row)
    held = there[:, None] & real[None, :]
    tl.store(rows[:, None] + byte[None, :], codes.to(tl.uint8), mask=held)
