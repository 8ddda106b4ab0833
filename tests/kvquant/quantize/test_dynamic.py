from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant.quantize.dynamic import SCALE_DTYPES, dequantize, quantize, round_nearest, round_up
from kvquant.scheme import SCALE_BITS, Granularity, TensorScheme, tensor_format

KINDS = [
    (name, symmetric)
    for name, symmetric in product(("fp8_e4m3", "fp8_e5m2", "int8", "int4", "int3"), (True, False))
    if symmetric or name.startswith("int")
]
SHAPES = [(1, 1, 1, 1), (2, 1, 5, 8), (5, 3, 7, 13), (1, 2, 123, 16)]
"""``[batch, kv_heads, tokens, dim]``"""


def scheme(name: str, symmetric: bool = True, scale_format: str = "fp32") -> TensorScheme:
    return TensorScheme(
        tensor_format(name), Granularity.PER_TOKEN, symmetric, scale_format=scale_format
    )


SCHEMES = [scheme(*kind, kept) for kind, kept in product(KINDS, SCALE_BITS)]
INTEGER = [how for how in SCHEMES if not how.format.is_float]
ASYMMETRIC = [how for how in INTEGER if not how.symmetric]


def name_of(how: TensorScheme) -> str:
    return f"{how} {how.scale_format}"


def sampled(shape: tuple[int, ...]) -> torch.Tensor:
    """Values whose channels differ in size and lie off centre."""
    states = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    channel = torch.arange(shape[-1]) - shape[-1] // 2
    return states * torch.exp2(channel.float() / 2) + channel


def restored(values: torch.Tensor, how: TensorScheme, axis: int = -1) -> torch.Tensor:
    return dequantize(*quantize(values, how, axis), how, axis)


# Rounding of scales


@pytest.mark.parametrize(
    ("value", "kept", "up", "nearest"),
    [
        (0.0, "bf16", 0.0, 0.0),
        (1.0, "bf16", 1.0, 1.0),
        (1 + 2.0**-23, "bf16", 1 + 2.0**-7, 1.0),
        (1 + 2.0**-8, "bf16", 1 + 2.0**-7, 1.0),  # a half goes to the even one
        (1 + 3 * 2.0**-8, "bf16", 1 + 2.0**-6, 1 + 2.0**-6),
        (1.9999, "bf16", 2.0, 2.0),
        (1e-45, "bf16", 2.0**-133, 0.0),
        (0.0, "fp16", 0.0, 0.0),
        (1.0, "fp16", 1.0, 1.0),
        (1 + 2.0**-12, "fp16", 1 + 2.0**-10, 1.0),
        (1 + 3 * 2.0**-12, "fp16", 1 + 2.0**-10, 1 + 2.0**-10),
        (1e-30, "fp16", 2.0**-24, 0.0),
        (65480.0, "fp16", 65504.0, 65472.0),
        (65504.0, "fp16", 65504.0, 65504.0),
        (65505.0, "fp16", 65504.0, 65504.0),
        (1e30, "fp16", 65504.0, 65504.0),
        (0.1, "fp32", 0.1, 0.1),
    ],
)
def test_literal_rounding(value: float, kept: str, up: float, nearest: float) -> None:
    values = torch.tensor([value])
    assert round_up(values, kept).dtype == round_nearest(values, kept).dtype == SCALE_DTYPES[kept]
    assert round_up(values, kept).item() == torch.tensor(up).item()
    assert round_nearest(values, kept).item() == torch.tensor(nearest).item()
    assert round_nearest(-values, kept).item() == -torch.tensor(nearest).item()


@pytest.mark.parametrize("kept", ["bf16", "fp16"])
@settings(max_examples=300, deadline=None)
@given(value=st.floats(0, 65504, width=32))
def test_rounding_up_gives_the_next_number(kept: str, value: float) -> None:
    rounded = round_up(torch.tensor([value]), kept)
    assert rounded.item() >= value
    if value:
        below = (rounded.view(torch.int16) - 1).view(SCALE_DTYPES[kept])
        assert below.item() < value


# Literal codes


def test_literal_symmetric() -> None:
    values = torch.tensor([[127.0, -63.5, 0.5, 1.5, -127.0], [0.0, 0.0, 254.0, 1.0, 3.0]])
    codes, scale, middle = quantize(values, scheme("int8"), -1)
    assert middle is None
    assert scale.tolist() == [1.0, 2.0]
    # Halves go to the even neighbour.
    assert codes.tolist() == [[127, -64, 0, 2, -127], [0, 0, 127, 0, 2]]
    assert codes.dtype == torch.int8
    back = dequantize(codes, scale, None, scheme("int8"), -1)
    assert back.tolist() == [[127, -64, 0, 2, -127], [0, 0, 254, 0, 4]]


def test_literal_asymmetric() -> None:
    how = scheme("int4", symmetric=False)
    codes, scale, middle = quantize(torch.tensor([0.0, 15.0, 7.0, 8.5, 0.5]), how, -1)
    assert middle is not None
    assert (scale.item(), middle.item()) == (1.0, 7.5)
    assert codes.tolist() == [0, 15, 7, 8, 0]
    assert codes.dtype == torch.uint8
    assert dequantize(codes, scale, middle, how, -1).tolist() == [0, 15, 7, 8, 0]


def test_literal_three_bits() -> None:
    codes, scale, middle = quantize(
        torch.tensor([-1.0, 6.0, 2.5, 3.2]), scheme("int3", symmetric=False), -1
    )
    assert middle is not None
    assert (scale.item(), middle.item()) == (1.0, 2.5)
    assert codes.tolist() == [0, 7, 4, 4]
    codes, scale, _ = quantize(torch.tensor([3.0, -2.5, 0.6]), scheme("int3"), -1)
    assert scale.item() == 1.0
    assert codes.tolist() == [3, -2, 1]


def test_literal_rounded_middle() -> None:
    """bf16 holds 256 and 258 but not 257.5: the range reaches as far as the farther end needs."""
    codes, scale, middle = quantize(
        torch.tensor([256.0, 259.0]), scheme("int4", symmetric=False, scale_format="bf16"), -1
    )
    assert middle is not None
    assert middle.item() == 258
    assert scale.item() == 137 / 512  # 2 / 7.5 = 136.53 / 512
    assert codes.tolist() == [0, 11]


def test_literal_fp8() -> None:
    values = torch.tensor([448.0, -448.0, 1.0625, 1.1875, 0.0])
    codes, scale, middle = quantize(values, scheme("fp8"), -1)
    assert middle is None
    assert scale.item() == 1.0
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.float().tolist() == [448, -448, 1.0, 1.25, 0]
    assert quantize(values, scheme("fp8_e5m2"), -1)[1].item() == pytest.approx(448 / 57344)


def test_scales_are_kept_as_the_scheme_says() -> None:
    for how in SCHEMES:
        _, scale, middle = quantize(sampled((1, 2, 3, 5)), how, -1)
        assert scale.shape == (1, 2, 3)
        assert scale.dtype == SCALE_DTYPES[how.scale_format]
        assert (middle is None) == how.symmetric
        assert middle is None or (middle.shape, middle.dtype) == (scale.shape, scale.dtype)


# How far the way back may be off


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("axis", [-1, 2])
@pytest.mark.parametrize("how", INTEGER, ids=name_of)
def test_integers_are_off_by_half_a_kept_scale_at_most(
    how: TensorScheme, axis: int, shape: tuple[int, ...]
) -> None:
    values = sampled(shape)
    codes, scale, middle = quantize(values, how, axis)
    error = (dequantize(codes, scale, middle, how, axis) - values).abs()
    bound = scale.float().unsqueeze(axis) / 2 * 1.001 + values.abs() * 2.0**-22
    assert bool((error <= bound).all())


@pytest.mark.parametrize("how", [how for how in SCHEMES if how.format.is_float], ids=name_of)
def test_fp8_is_off_by_half_a_step_of_its_mantissa(how: TensorScheme) -> None:
    values = sampled((5, 3, 7, 13))
    codes, scale, _ = quantize(values, how, -1)
    error = (dequantize(codes, scale, None, how, -1) - values).abs()
    relative, smallest = (2.0**-4, 2.0**-6) if how.format.name == "fp8_e4m3" else (2.0**-3, 2**-14)
    bound = torch.maximum(values.abs(), smallest * scale.float().unsqueeze(-1)) * relative
    assert bool((error <= bound * 1.001).all())


@pytest.mark.parametrize("how", ASYMMETRIC, ids=name_of)
def test_a_range_off_centre_costs_nothing(how: TensorScheme) -> None:
    """Its width alone matters, where the middle can be kept: the point of having one."""
    values = sampled((1, 1, 9, 16)) / 64
    _, scale, _ = quantize(values, how, -1)
    _, moved, _ = quantize(values + 256, how, -1)
    assert torch.allclose(moved.float(), scale.float(), rtol=0, atol=2 / how.levels)
    symmetric = scheme(how.format.name, True, how.scale_format)
    assert bool((quantize(values + 256, symmetric, -1)[1] > 8 * moved).all())


# Degenerate ranges


@pytest.mark.parametrize("how", SCHEMES, ids=name_of)
def test_zeros_come_back_as_zeros(how: TensorScheme) -> None:
    values = sampled((1, 2, 4, 8))
    values[:, :, 1] = 0
    _, scale, _ = quantize(values, how, -1)
    back = restored(values, how)
    assert bool((back[:, :, 1] == 0).all())
    assert bool((scale[:, :, 1] == 0).all())
    assert bool(back.isfinite().all())


@pytest.mark.parametrize("value", [0.3, -77.7, 1e-5, 1000.1, 0.5])
@pytest.mark.parametrize("how", ASYMMETRIC, ids=name_of)
def test_equal_values_come_back_but_for_the_rounding_of_the_middle(
    how: TensorScheme, value: float
) -> None:
    values = torch.full((1, 1, 2, 8), value)
    _, scale, middle = quantize(values, how, -1)
    assert middle is not None
    off = (values - middle.float()[..., None]).abs()
    assert bool((scale.float()[..., None] <= off / (how.levels / 2) * 1.01 + 2.0**-24).all())
    error = (restored(values, how) - values).abs()
    assert bool((error <= scale.float()[..., None] / 2 * 1.001 + abs(value) * 2.0**-22).all())
    if how.scale_format == "fp32" or value == 0.5:
        assert bool((scale == 0).all())
        assert torch.equal(restored(values, how), values)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 3e4, 1e30])
@pytest.mark.parametrize("how", SCHEMES, ids=name_of)
def test_tiny_and_huge_values_stay_finite(how: TensorScheme, size: float) -> None:
    values = torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    back = restored(values * size, how)
    assert bool(back.isfinite().all())
    if how.scale_format != "fp16" or size == 3e4:
        worst = float((back - values * size).abs().max()) / size
        assert worst <= {8: 0.15, 4: 0.3, 3: 0.5}[how.format.bits]


@pytest.mark.parametrize("how", [how for how in SCHEMES if how.scale_format == "fp16"], ids=name_of)
def test_what_fp16_scales_cannot_reach_saturates(how: TensorScheme) -> None:
    values = torch.tensor([1e30, -1e30, 0.0, 1e30])
    codes, scale, middle = quantize(values, how, -1)
    assert scale.item() == 65504
    back = dequantize(codes, scale, middle, how, -1)
    end = 65504 * (how.format.qmax if how.symmetric else how.levels / 2)
    assert back[:2].tolist() == [end, -end]
    alike = torch.full((4,), 1e30)
    assert bool(restored(alike, how).isfinite().all())
    assert bool((restored(alike, how) >= 65504).all())


@pytest.mark.parametrize("how", SCHEMES, ids=name_of)
@settings(max_examples=100, deadline=None)
@given(numbers=st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=1, max_size=9))
def test_finite_values_come_back_finite(how: TensorScheme, numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    codes, scale, middle = quantize(values, how, -1)
    assert bool(dequantize(codes, scale, middle, how, -1).isfinite().all())
    assert bool(scale.isfinite().all())
    assert middle is None or bool(middle.isfinite().all())
    ends = (how.format.qmin, how.format.qmax) if how.symmetric else (0, how.levels)
    assert bool(((codes.float() >= ends[0]) & (codes.float() <= ends[1])).all())


# What shares a range


@pytest.mark.parametrize("how", SCHEMES, ids=name_of)
def test_a_group_is_a_token_turned_around(how: TensorScheme) -> None:
    """Per-group is the same arithmetic over the tokens of a channel."""
    values = sampled((2, 3, 4, 6, 5))
    grouped = quantize(values, how, 3)
    turned = quantize(values.transpose(3, 4).contiguous(), how, -1)
    assert grouped[1].shape == (2, 3, 4, 5)
    assert torch.equal(grouped[0].float(), turned[0].float().transpose(3, 4))
    assert torch.equal(grouped[1], turned[1])
    assert (grouped[2] is None) == (turned[2] is None)
    if grouped[2] is not None and turned[2] is not None:
        assert torch.equal(grouped[2], turned[2])
    back = dequantize(*turned, how, -1).transpose(3, 4)
    assert torch.equal(dequantize(*grouped, how, 3), back)


@pytest.mark.parametrize("how", SCHEMES, ids=name_of)
def test_each_range_is_its_own(how: TensorScheme) -> None:
    values = sampled((3, 2, 5, 16))
    alone = values[1:2, :, 2:3]
    values[0] *= 1000
    values[1, :, 3] = 1e9
    for whole, part in zip(quantize(values, how, -1), quantize(alone, how, -1), strict=True):
        if whole is not None and part is not None:
            assert torch.equal(whole[1:2, :, 2:3].float(), part.float())


@pytest.mark.parametrize("how", SCHEMES, ids=name_of)
def test_no_tokens_are_no_codes(how: TensorScheme) -> None:
    assert restored(torch.empty(1, 2, 0, 4), how).shape == (1, 2, 0, 4)
