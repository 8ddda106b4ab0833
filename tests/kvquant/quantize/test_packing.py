from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant.quantize.packing import pack, row_bytes, unpack
from kvquant.scheme import Granularity, TensorScheme, tensor_format

INTEGER = ["int8", "int4", "int3"]


def scheme(name: str, symmetric: bool = False) -> TensorScheme:
    return TensorScheme(tensor_format(name), Granularity.PER_TOKEN, symmetric)


def unsigned(*codes: int) -> torch.Tensor:
    return torch.tensor(codes, dtype=torch.uint8)


def signed(*codes: int) -> torch.Tensor:
    return torch.tensor(codes, dtype=torch.int8)


def every_code(how: TensorScheme, shape: tuple[int, ...]) -> torch.Tensor:
    """Codes of `how` in random order."""
    random = torch.Generator().manual_seed(0)
    if how.symmetric:
        reach = int(how.format.qmax)
        return torch.randint(-reach, reach + 1, shape, generator=random).to(torch.int8)
    return torch.randint(0, int(how.levels) + 1, shape, generator=random).to(torch.uint8)


# Literal bytes


@pytest.mark.parametrize(
    ("dim", "sizes"),
    [
        (1, {"fp8": 1, "int8": 1, "int4": 1, "int3": 3}),
        (5, {"fp8": 5, "int8": 5, "int4": 3, "int3": 3}),
        (8, {"fp8": 8, "int8": 8, "int4": 4, "int3": 3}),
        (9, {"fp8": 9, "int8": 9, "int4": 5, "int3": 6}),
        (64, {"fp8": 64, "int8": 64, "int4": 32, "int3": 24}),
        (80, {"fp8": 80, "int8": 80, "int4": 40, "int3": 30}),
        (128, {"fp8": 128, "int8": 128, "int4": 64, "int3": 48}),
    ],
)
def test_bytes_of_a_row(dim: int, sizes: dict[str, int]) -> None:
    assert {name: row_bytes(tensor_format(name), dim) for name in sizes} == sizes
    for name in INTEGER:
        assert pack(every_code(scheme(name), (2, dim)), scheme(name)).shape == (2, sizes[name])


@pytest.mark.parametrize(
    ("name", "codes", "rows"),
    [
        ("int8", [0, 1, 254, 255], [0, 1, 254, 255]),
        ("int4", [1, 2, 3, 4], [0x31, 0x42]),
        ("int4", [1, 2, 3, 4, 5], [0x41, 0x52, 0x03]),
        ("int4", [15], [0x0F]),
        # Low bits 0 1 2 3 0 1 2 3 by twos, then the top bits of channels 4 … 7.
        ("int3", [0, 1, 2, 3, 4, 5, 6, 7], [0b10_00_10_00, 0b11_01_11_01, 0b1111_0000]),
        ("int3", [5], [0b01, 0, 0b1]),
        ("int3", [7] * 9, [0b11_11_11, 0b11_11, 0b11_11, 0b11_11, 0b1_1111, 0b1111]),
    ],
)
def test_literal_bytes_asymmetric(name: str, codes: list[int], rows: list[int]) -> None:
    packed = pack(unsigned(*codes), scheme(name))
    assert packed.dtype == torch.uint8
    assert packed.tolist() == rows
    assert unpack(packed, scheme(name), len(codes)).tolist() == codes


@pytest.mark.parametrize(
    ("name", "codes", "rows"),
    [
        ("int8", [-127, -1, 0, 1, 127], [1, 127, 128, 129, 255]),
        ("int4", [-7, -1, 0, 7], [0x81, 0xF7]),
        ("int4", [-7, 0, 7], [0xF1, 0x08]),
        # 1, 4 and 7; the other five channels of the byte are 0, not 4.
        ("int3", [-3, 0, 3], [0b11_01, 0b00, 0b110]),
    ],
)
def test_literal_bytes_symmetric(name: str, codes: list[int], rows: list[int]) -> None:
    packed = pack(signed(*codes), scheme(name, symmetric=True))
    assert packed.tolist() == rows
    unpacked = unpack(packed, scheme(name, symmetric=True), len(codes))
    assert unpacked.dtype == torch.int8
    assert unpacked.tolist() == codes


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)]
)
def test_fp8_is_stored_as_its_bits(name: str, dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    packed = pack(bits.view(dtype), scheme(name, symmetric=True))
    assert torch.equal(packed, bits)
    unpacked = unpack(packed, scheme(name, symmetric=True), 256)
    assert unpacked.dtype == dtype
    assert torch.equal(unpacked.view(torch.uint8), bits)


# There and back


@pytest.mark.parametrize("name", INTEGER)
@pytest.mark.parametrize("symmetric", [True, False])
@settings(max_examples=60, deadline=None)
@given(dim=st.integers(1, 70), rows=st.integers(0, 5))
def test_every_width_comes_back(name: str, symmetric: bool, dim: int, rows: int) -> None:
    how = scheme(name, symmetric)
    codes = every_code(how, (2, rows, dim))
    packed = pack(codes, how)
    assert packed.shape == (2, rows, row_bytes(how.format, dim))
    assert torch.equal(unpack(packed, how, dim), codes)


@pytest.mark.parametrize("name", INTEGER)
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_no_bit_is_shared_or_wasted(name: str, dim: int) -> None:
    """Each bit of each code is one bit of the row, and no other code has it."""
    how = scheme(name)
    bits = [1 << bit for bit in range(how.format.bits)]
    codes = torch.zeros(dim * len(bits), dim, dtype=torch.uint8)
    for row in range(codes.shape[0]):
        codes[row, row // len(bits)] = bits[row % len(bits)]
    weights = 256.0 ** torch.arange(row_bytes(how.format, dim)).double()
    numbers = (pack(codes, how).double() * weights).sum(-1)
    assert numbers.unique().numel() == codes.shape[0]
    assert bool((numbers.log2() % 1 == 0).all())


@pytest.mark.parametrize("name", INTEGER)
@pytest.mark.parametrize("symmetric", [True, False])
def test_how_codes_and_rows_lie_in_memory_does_not_matter(name: str, symmetric: bool) -> None:
    how = scheme(name, symmetric)
    codes = every_code(how, (3, 5, 13))
    packed = pack(codes.transpose(0, 1), how)
    assert torch.equal(packed, pack(codes, how).transpose(0, 1))
    buffer = torch.full((5, 9, packed.shape[-1]), 0xAA, dtype=torch.uint8)
    buffer[:, 2:5] = packed
    assert torch.equal(unpack(buffer[:, 2:5], how, 13), codes.transpose(0, 1))
