"""What kernels read a word of codes as, for all words."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
import torch

from kvquant.quantize.packing import FP8

pytest.importorskip("triton")

from kvquant.attention.triton_codes import CENTERS, GAIN, KINDS, byte_of, parts_of, ptx_of

# The interpreter wraps functions of constants.
__test__ = os.environ.get("TRITON_INTERPRET") != "1"

WORDS = np.arange(1 << 16, dtype=np.uint32)
FORMATS = {kind: name for name, kind in KINDS.items()}


def run(instructions: str, register: np.ndarray) -> np.ndarray:
    """What the few PTX instructions that are used here do to 32-bit registers (PTX ISA 9)."""
    held = {"$1": register}

    def value(name: str) -> np.ndarray:
        return np.uint32(int(name, 16)) if name.startswith("0x") else held[name]

    def halves(name: str) -> np.ndarray:
        return np.ascontiguousarray(np.broadcast_to(value(name), register.shape)).view(np.float16)

    body = instructions.strip("{} ").removeprefix(".reg .b32 t, u, v;")
    for line in filter(None, map(str.strip, body.split(";"))):
        name, rest = line.split(" ", 1)
        out, *sources = re.split(r",\s*", rest)
        if name == "mov.b32":
            held[out] = np.broadcast_to(value(sources[0]), register.shape)
        elif name == "shl.b32":
            held[out] = value(sources[0]) << np.uint32(int(sources[1]))
        elif name == "shr.b32":
            shift = int(sources[1], 16) if "x" in sources[1] else int(sources[1])
            held[out] = value(sources[0]) >> np.uint32(shift)
        elif name == "add.u32":
            held[out] = value(sources[0]) + value(sources[1])
        elif name == "and.b32":
            held[out] = value(sources[0]) & value(sources[1])
        elif name == "lop3.b32":
            assert sources[3] == "0xEA"  # of 0xF0, 0xCC and 0xAA: (a & b) | c
            held[out] = (value(sources[0]) & value(sources[1])) | value(sources[2])
        elif name == "sub.rn.f16x2":
            held[out] = (halves(sources[0]) - halves(sources[1])).view(np.uint32)
        elif name == "fma.rn.f16x2":
            one, other, more = map(halves, sources)
            wide = one.astype(np.float64) * other + more
            held[out] = wide.astype(np.float16).view(np.uint32)
        else:
            raise AssertionError(line)
    return held["$0"]


def wanted(kind: str, part: int, words: np.ndarray) -> np.ndarray:
    """Codes minus the center of their format."""
    byte = ((words >> (8 * byte_of(part, kind))) & 0xFF).astype(np.uint8)
    if kind in ("e4m3", "e5m2"):
        read = torch.from_numpy(byte).view(FP8[FORMATS[kind]]).double().numpy()
        return read / GAIN[kind]
    if kind == "int4":
        byte = byte >> 4 if part % 2 else byte & 0xF
    return byte - CENTERS[kind]


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_instructions(kind: str, is_scaled: bool) -> None:
    # The other word of the register is another one, and must not matter.
    register = WORDS | (WORDS[::-1] << np.uint32(16))
    for part in range(parts_of(kind, 2)):
        instructions = ptx_of(part, kind, is_scaled)
        low, high = run(instructions, register).view(np.float16).reshape(-1, 2).T
        for found, words in ((low, WORDS), (high, WORDS[::-1])):
            expected = wanted(kind, part, words)
            if kind == "e4m3" and is_scaled:
                # Their scales are NaN.
                found, expected = found[np.isfinite(expected)], expected[np.isfinite(expected)]
            assert np.array_equal(found.astype(np.float64), expected, equal_nan=True)


def test_parts_of_a_word() -> None:
    assert [parts_of(kind, 2) for kind in ("int4", "int8", "e4m3")] == [4, 2, 2]
    assert [parts_of(kind, 1) for kind in ("int4", "int8", "e4m3")] == [2, 1, 1]
