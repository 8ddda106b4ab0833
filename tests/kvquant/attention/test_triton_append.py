"""Quantize and append against `Codec.encode_reference`, bit for bit, in Triton's interpreter.

Collected only where the interpreter is on; test_triton_interpreter.py starts such a process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvquant.presets import preset
from kvquant.quantize.codec import Codec
from kvquant.quantize.packing import FP8

pytest.importorskip("triton")

__test__ = os.environ.get("TRITON_INTERPRET") == "1"

if __test__:
    from kvquant.attention.triton_kernels import append

BOUND = 400
FILL = 0xA5
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@pytest.fixture(scope="session")
def is_same(make_case: Callable[..., Any], make_codecs: Callable[..., Any]) -> Callable[..., bool]:
    """``is_same(scheme, dim, units, **changes)``: whether the buffer is as the reference says."""

    def compare(
        scheme: str,
        dim: int,
        units: int,
        dtype: torch.dtype = torch.float32,
        by: float = 1.0,
        spoil: Callable[[torch.Tensor], None] = lambda states: None,
        **fields: Any,
    ) -> bool:
        case = make_case(key=scheme, key_dim=dim, dtype=dtype, **fields)
        codec, _ = make_codecs(case)
        states = states_of(case, units * codec.unit, by)
        spoil(states)
        generator = torch.Generator().manual_seed(9)
        where = torch.randint(0, BOUND, (case.rows, states.shape[2]), generator=generator)
        targets = buffers(codec, case, units + 5)

        assert append(codec, states, targets, 3, where, BOUND)

        for target, coded in zip(
            targets, codec.encode_reference(states, where, BOUND), strict=True
        ):
            others = torch.cat((target[:, :, :3], target[:, :, 3 + units :]), dim=2)
            assert bool((others.contiguous().view(torch.uint8) == FILL).all())
            is_float8 = target is targets[0] and codec.scheme.format.is_float
            kind = FP8[codec.scheme.format.name] if is_float8 else target.dtype
            if not is_equal(target[:, :, 3 : 3 + units].contiguous().view(kind), coded.view(kind)):
                return False
        return True

    return compare


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether bits are the same, but for those of NaN."""
    nan = one.isnan() if one.is_floating_point() else torch.zeros_like(one, dtype=torch.bool)
    bits, wanted = (
        it.view(BITS[it.element_size()]).masked_fill(nan, 0) for it in (one, other.contiguous())
    )
    is_nan = other.isnan() if other.is_floating_point() else torch.zeros_like(nan)
    return bool((nan == is_nan).all()) and bits.equal(wanted)


def states_of(case: Any, tokens: int, by: float) -> torch.Tensor:
    """Of many magnitudes, as a projection gives them: tokens before heads."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.rows, tokens, case.kv_heads, case.key_dim)
    sizes = torch.randn((*shape[:3], 1), generator=generator).exp()
    states = by * sizes * torch.randn(shape, generator=generator)
    return states.to(case.dtype).transpose(1, 2)


def buffers(codec: Codec, case: Any, room: int) -> tuple[torch.Tensor, ...]:
    lead = (case.rows, case.kv_heads, room)
    made = [torch.empty((*lead, *field.shape), dtype=field.dtype) for field in codec.fields]
    for buffer in made:
        buffer.view(torch.uint8).fill_(FILL)
    return tuple(made)


SCHEMES = [
    *("int4", "int8", "fp8", "fp8_e5m2", "int4-kivi 64", "int8 group32", "int4-kivi 24"),
    *(
        "int8 per-channel asymmetric",
        "int8 per-tensor",
        "int4 per-head",
        "int4 per-head asymmetric",
    ),
    *("fp8 per-channel", "fp8_e5m2 per-head"),
]


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(scheme: str, dim: int, is_same: Any) -> None:
    assert is_same(scheme, dim, units=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_16_bits(dtype: torch.dtype, is_same: Any) -> None:
    assert is_same("int4", 128, units=1, dtype=dtype)


@pytest.mark.parametrize("units", [1, 2, 8, 17])
def test_tokens_of_a_call(units: int, is_same: Any) -> None:
    assert is_same("int4", 64, units, rows=2, kv_heads=3)


@pytest.mark.parametrize("dim", [16, 96, 112, 128, 192, 256])
def test_rotations(dim: int, is_same: Any) -> None:
    assert is_same("int4", dim, units=2)


@pytest.mark.parametrize("dim", [1, 33, 71])
@pytest.mark.parametrize("scheme", ["int4-kivi 16", "int8", "int4 per-head asymmetric"])
def test_odd_widths(scheme: str, dim: int, is_same: Any) -> None:
    assert is_same(scheme, dim, units=2)


@pytest.mark.parametrize("mean", ["none", "fixed", "all"])
@pytest.mark.parametrize("layout", ["interleaved", "trailing"])
def test_means(mean: str, layout: str, is_same: Any) -> None:
    assert is_same("int4", 64, units=4, mean=mean, layout=layout)


@pytest.mark.parametrize("by", [2.0**-130, 1e-30, 1e30, 0.0])
@pytest.mark.parametrize("scheme", ["int4-kivi 16", "int8", "fp8", "fp8_e5m2", "fp8 per-head"])
def test_magnitudes(scheme: str, by: float, is_same: Any) -> None:
    assert is_same(scheme, 32, units=2, by=by)


# Numbers that are none


def spoil(states: torch.Tensor) -> None:
    """Writes what is no number, of all kinds, into every other token of the first 16."""
    nan, inf = torch.nan, torch.inf
    kinds = ((nan,), (-nan,), (inf,), (-inf,), (inf, -inf), (nan, inf), (nan, -inf), (nan, -nan))
    for index, kind in enumerate(kinds):
        for place, number in enumerate(kind):
            states[0, index % states.shape[1], 2 * index, index + 3 * place] = number


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nan_and_infinity(scheme: str, dtype: torch.dtype, is_same: Any) -> None:
    units = 2 if " " in scheme and "per" not in scheme else 17
    assert is_same(scheme, 64, units, dtype=dtype, spoil=spoil)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("scheme", ["int4", "int4-kivi 16", "int8", "fp8", "fp8_e5m2"])
@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
def test_tokens_without_a_number(scheme: str, number: float, is_same: Any) -> None:
    def fill(states: torch.Tensor) -> None:
        states[:, 0, :20] = number

    assert is_same(scheme, 33 if scheme.startswith("int8") else 32, units=40, spoil=fill)


def test_sums_that_overflow_are_nan(is_same: Any) -> None:
    def enlarge(states: torch.Tensor) -> None:
        states[0, 0, 3] = 3e38

    assert is_same("int4", 64, units=5, spoil=enlarge)


def test_nan_as_arithmetic_on_a_gpu_makes_it(is_same: Any) -> None:
    def fill(states: torch.Tensor) -> None:
        states.view(torch.int32)[0, 1, 2] = 0x7FFFFFFF

    for scheme in ("int4", "int8", "fp8", "int4-kivi 16"):
        assert is_same(scheme, 32, units=4, spoil=fill)


def test_every_8_bit_float_is_rounded_to_nearest(make_case: Any, make_codecs: Any) -> None:
    # Scales of 1, and numbers on and between all codes.
    for scheme, dtype in (("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        codec, _ = make_codecs(make_case(key=f"{scheme} per-tensor", key_dim=64, kv_heads=1))
        codec.scales.scale.fill_(1.0)
        codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        codes = codes[codes.isfinite()].unique()
        between = (codes[1:] + codes[:-1]) / 2
        numbers = torch.cat((codes, between, between.nextafter(codes[1:]), 2 * codes))
        states = torch.nn.functional.pad(numbers, (0, -len(numbers) % 64)).view(1, 1, -1, 64)
        target = torch.empty_like(states, dtype=torch.uint8)

        assert append(codec, states, (target,), 0, None, 0)

        assert target.equal(codec.encode_reference(states)[0])


def test_middles_half_way_between_two_bfloat16() -> None:
    codec = Codec(preset("int4-kivi").value, 4, torch.float32)
    middles = 1 + torch.tensor([1, 3, 5, 7]) * 2.0**-8
    states = middles[:, None] * torch.tensor([0.0, 2.0, 0.5, 1.0])
    states = states.view(1, 1, 4, 4)
    targets = tuple(torch.zeros_like(coded) for coded in codec.encode(states))

    assert append(codec, states, targets, 0, None, 0)

    assert targets[2].flatten().tolist() == [1.0, 1 + 2.0**-6, 1 + 2.0**-6, 1 + 2.0**-5]
    assert all(map(torch.equal, targets, codec.encode_reference(states)))


@pytest.mark.parametrize(
    ("scheme", "dim"), [("int3", 64), ("bf16", 64), ("none", 64), ("int4", 71)]
)
def test_codecs_without_a_kernel(scheme: str, dim: int, make_case: Any, make_codecs: Any) -> None:
    case = make_case(key=scheme, key_dim=dim, mean="fixed")
    codec, _ = make_codecs(case)
    targets = buffers(codec, case, 4)

    assert not append(codec, states_of(case, 2, 1.0), targets, 0, None, 0)
    assert all(bool((target.view(torch.uint8) == FILL).all()) for target in targets)
