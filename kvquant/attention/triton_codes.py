"""Codes as tensor cores take them: words of packed codes -> float16, without a rounding.

A word is two bytes of a row (one, where rows have an odd number of bytes), so that tokens that lie
next to each other in a register are unpacked together. What is unpacked from the words of a tile is
a tile of every second or fourth channel, a *part*; `channel_of` says which. With 4 bits and h bytes
to a row::

    bits of word i    3 … 0    7 … 4     11 … 8    15 … 12
    channel           2i       2i + h    2i + 1    2i + 1 + h

Codes are centred on the middle of their range: 4 bits on 8, 8 bits on 128. No integer is converted,
which GPUs do slowly: the bits of a code become the low bits of a float16 of fixed exponent. An
e4m3 code becomes a float16 of 2^-8 its value, as the exponents are biased by 7 and 15 (`GAIN`).
NaN of e4m3 would be 480, and is looked for where no scale beside it is NaN.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import triton
import triton.language as tl

KINDS = {"int4": "int4", "int8": "int8", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
"""What kernels call the formats that they read."""

CENTERS = {"int4": 8.0, "int8": 128.0, "e4m3": 0.0, "e5m2": 0.0}
"""The stored code that is read as 0."""

GAIN = {"int4": 1.0, "int8": 1.0, "e4m3": 256.0, "e5m2": 1.0}
"""What a part has to be multiplied by."""


@triton.constexpr_function
def parts_of(KIND: str, WORD: int) -> int:
    """Codes that a word of `WORD` bytes holds."""
    return WORD * (2 if KIND == "int4" else 1)


@triton.constexpr_function
def byte_of(part: int, KIND: str) -> int:
    """Which byte of its word a part is in."""
    return part // 2 if KIND == "int4" else part


@triton.jit
def channel_of(word, part: tl.constexpr, SLOT: tl.constexpr):
    """Channel that is number `part` in `word`."""
    channel = word * SLOT.word + byte_of(part, SLOT.kind)
    if SLOT.kind == "int4":
        channel += (part % 2) * SLOT.row
    return channel


@triton.jit
def load_words(row, there, SLOT: tl.constexpr):
    """Words of the rows that begin at the addresses `row` ``[tokens]``, ``[tokens, block]``.

    Rows that are not there, and words beyond a row, are 0.
    """
    word = tl.arange(0, SLOT.block)
    held = there[:, None]
    if SLOT.row != SLOT.word * SLOT.block:
        held = held & (word[None, :] * SLOT.word < SLOT.row)
    if SLOT.word == 2:
        pairs = row.to(tl.pointer_type(tl.uint16), bitcast=True)
        return tl.load(pairs[:, None] + word[None, :], mask=held, other=0)
    else:
        return tl.load(row[:, None] + word[None, :], mask=held, other=0).to(tl.uint16)


@triton.jit
def codes_of(words, part: tl.constexpr, SLOT: tl.constexpr, SHAPE: tl.constexpr):
    """Codes in `words` that are number `part`, centred, float16."""
    KIND: tl.constexpr = SLOT.kind
    SCALED: tl.constexpr = SLOT.scaled
    if SHAPE.ptx:
        PTX: tl.constexpr = ptx_of(part, KIND, SCALED)
        return tl.inline_asm_elementwise(
            PTX, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        if byte_of(part, KIND) == 1:
            words = words >> 8
        return _codes_of_bytes(words, part, KIND, SCALED)


@triton.jit
def _codes_of_bytes(words, part: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr):
    """Codes in the lower bytes of `words`, one by one."""
    if KIND == "int8":
        return ((words & 0xFF) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    elif KIND == "e5m2":
        return (words << 8).to(tl.float16, bitcast=True)
    elif KIND == "e4m3":
        bits = (words & 0x7F) << 7
        if not SCALED:
            # What reaches the next bit makes the exponent that of NaN.
            bits = bits | ((bits + 0x80) & 0x4000)
        return (((words & 0x80) << 8) | bits).to(tl.float16, bitcast=True)
    elif part % 2 == 1:
        return ((words & 0xF0) | 0x6400).to(tl.float16, bitcast=True) * 0.0625 - 72.0
    else:
        return ((words & 0x0F) | 0x6400).to(tl.float16, bitcast=True) - 1032.0


@triton.constexpr_function
def ptx_of(part: int, KIND: str, SCALED: bool) -> str:
    """What `_codes_of_bytes` does, for a register with two words.

    Left to themselves, compilers take words apart to shift and mask them.
    """
    byte = part // 2 if KIND == "int4" else part
    is_float = KIND in ("e4m3", "e5m2")
    # Integers belong into the lower byte of a float16, floats into the upper.
    shift = "shl" if is_float else "shr"
    moved = f"{shift}.b32 t, $1, 8;" if byte != is_float else "mov.b32 t, $1;"
    # lop3 with 0xEA: (first & second) | third.
    marked = _NAN if KIND == "e4m3" and not SCALED else ""
    return f"{{ .reg .b32 t, u, v; {moved} {_UNPACKED[KIND, part % 2]} {marked} }}"


_INT8 = (
    "lop3.b32 t, t, 0x00FF00FF, 0x64006400, 0xEA;"
    "mov.b32 u, 0x64806480; sub.rn.f16x2 $0, t, u;"  # 1152
)
_E4M3 = "and.b32 u, t, 0x7F007F00; shr.b32 u, u, 1; lop3.b32 $0, t, 0x80008000, u, 0xEA;"
_NAN = "add.u32 v, u, 0x00800080; lop3.b32 $0, v, 0x40004000, $0, 0xEA;"  # after _E4M3
_E5M2 = "and.b32 $0, t, 0xFF00FF00;"
_UNPACKED = {
    ("int4", 0): "lop3.b32 t, t, 0x000F000F, 0x64006400, 0xEA;"
    "mov.b32 u, 0x64086408; sub.rn.f16x2 $0, t, u;",  # 1032
    ("int4", 1): "lop3.b32 t, t, 0x00F000F0, 0x64006400, 0xEA;"
    "mov.b32 u, 0x2C002C00; mov.b32 v, 0xD480D480; fma.rn.f16x2 $0, t, u, v;",  # 1/16, -72
    **{("int8", part): _INT8 for part in (0, 1)},
    **{("e4m3", part): _E4M3 for part in (0, 1)},
    **{("e5m2", part): _E5M2 for part in (0, 1)},
}
