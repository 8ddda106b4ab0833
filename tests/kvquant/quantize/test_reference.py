from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant.quantize.reference import dequantize, quantize
from kvquant.scales import TensorScales
from kvquant.scheme import Granularity, TensorScheme, format_names, tensor_format

SHAPES = [(1, 1, 1, 1), (2, 1, 5, 8), (5, 3, 7, 13), (1, 2, 123, 16)]
"""``[batch, kv_heads, tokens, dim]``: one of everything, one KV head, nothing even, many tokens."""

STATIC = [granularity for granularity in Granularity if granularity.is_static]
SCHEMES = [
    TensorScheme(tensor_format(name), granularity, symmetric)
    for name, granularity, symmetric in product(format_names(), STATIC, (True, False))
    if symmetric or name.startswith("int")
]
INTEGER = [how for how in SCHEMES if not how.format.is_float]
FP8 = [how for how in SCHEMES if how.format.is_float]
MANTISSA = {"fp8_e4m3": 3, "fp8_e5m2": 2}
SMALLEST_NORMAL = {"fp8_e4m3": 2.0**-6, "fp8_e5m2": 2.0**-14}


def scheme(name: str, granularity: str = "channel", symmetric: bool = True) -> TensorScheme:
    return TensorScheme(tensor_format(name), Granularity.parse(granularity), symmetric)


def sampled(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Values whose channels differ in size and lie off centre."""
    random = torch.Generator().manual_seed(seed)
    states = torch.randn(shape, generator=random)
    channel = torch.arange(shape[-1]) - shape[-1] // 2
    return states * torch.exp2(channel.float() / 2) + channel


def fitted(states: torch.Tensor, how: TensorScheme) -> TensorScales:
    """Scales that just cover `states`."""
    axes = {"per-tensor": (0, 1, 2, 3), "per-head": (0, 2, 3), "per-channel": (0, 2)}
    over = axes[how.granularity.value]
    low, high = (end.float() for end in (states.amin(over, True), states.amax(over, True)))
    shape = how.granularity.scale_shape(states.shape[1], states.shape[3])
    return TensorScales.from_range(low.reshape(shape), high.reshape(shape), how)


def restored(states: torch.Tensor, scales: TensorScales, how: TensorScheme) -> torch.Tensor:
    return dequantize(quantize(states, scales, how), scales)


def per_value(scales: TensorScales, states: torch.Tensor) -> torch.Tensor:
    return scales.scale[:, None, :].expand(states.shape)


# What codes are


@pytest.mark.parametrize(
    ("name", "symmetric", "dtype"),
    [
        ("fp8_e4m3", True, torch.float8_e4m3fn),
        ("fp8_e5m2", True, torch.float8_e5m2),
        ("int8", True, torch.int8),
        ("int8", False, torch.uint8),
        ("int4", True, torch.int8),
        ("int4", False, torch.uint8),
    ],
)
def test_codes_have_the_shape_of_the_states(name: str, symmetric: bool, dtype: torch.dtype) -> None:
    how = scheme(name, symmetric=symmetric)
    states = sampled((5, 3, 7, 13))
    codes = quantize(states, fitted(states, how), how)
    assert codes.shape == states.shape
    assert codes.dtype == dtype
    assert dequantize(codes, fitted(states, how)).dtype == torch.float32


def test_literal_codes_symmetric() -> None:
    scales = TensorScales(torch.tensor([[0.5]]))
    states = torch.tensor([0.0, 0.5, 0.24, 0.26, -0.76, 63.5, 64.0, -63.5, -1e9, 0.75, 1.25])
    how = scheme("int8", "tensor")
    codes = quantize(states[None, None, None], scales, how)
    # Halves go to the even neighbour, as in torch and in IEEE 754.
    assert codes.flatten().tolist() == [0, 1, 0, 1, -2, 127, 127, -127, -127, 2, 2]
    assert dequantize(codes, scales).flatten()[:4].tolist() == [0.0, 0.5, 0.0, 0.5]


def test_literal_codes_asymmetric() -> None:
    how = scheme("int4", "tensor", symmetric=False)
    scales = TensorScales.from_range(torch.tensor([[-1.0]]), torch.tensor([[2.0]]), how)
    assert scales.scale.item() == pytest.approx(0.2)
    assert scales.zero_point is not None
    assert scales.zero_point.item() == 5
    states = torch.tensor([-1.0, 0.0, 2.0, 0.21, -9.0, 9.0])
    codes = quantize(states[None, None, None], scales, how)
    assert codes.flatten().tolist() == [0, 5, 15, 6, 0, 15]


def test_each_head_and_channel_uses_its_own_scale() -> None:
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    states = torch.full((1, 2, 3, 2), 8.0)
    codes = quantize(states, TensorScales(scale), scheme("int8"))
    assert codes[0, :, 0].tolist() == [[8, 4], [2, 1]]
    assert bool((codes == codes[:, :, :1]).all())


# How far the way back may be off


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("how", INTEGER, ids=str)
def test_integers_are_off_by_half_a_scale_at_most(
    how: TensorScheme, shape: tuple[int, ...]
) -> None:
    states = sampled(shape)
    scales = fitted(states, how)
    error = (restored(states, scales, how) - states).abs()
    # float32 itself cannot hold a value better than to 2^-23 of its size.
    assert bool((error <= per_value(scales, states) / 2 + states.abs() * 2.0**-22).all())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["int8", "int4"])
@settings(max_examples=100, deadline=None)
@given(
    low=st.floats(-1000, 1000, width=32),
    width=st.floats(0, 1000, width=32),
    share=st.floats(0, 1),
)
def test_the_bound_holds_up_to_both_ends(
    name: str, symmetric: bool, low: float, width: float, share: float
) -> None:
    """The zero point is rounded, which moves the ends by up to half a step: no more than that."""
    how = scheme(name, "tensor", symmetric)
    ends = torch.tensor([low, low + width])
    scales = TensorScales.from_range(ends[:1, None], ends[1:, None], how)
    states = torch.tensor([ends[0], ends[1], ends[0] + share * (ends[1] - ends[0])])
    states = states.clamp(ends[0], ends[1])
    error = (restored(states[None, None, None], scales, how).flatten() - states).abs()
    assert bool((error <= scales.scale.item() / 2 + states.abs() * 2.0**-22).all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("how", FP8, ids=str)
def test_fp8_is_off_by_half_a_step_of_its_mantissa(
    how: TensorScheme, shape: tuple[int, ...]
) -> None:
    """Relative error 2^-4 (e4m3) or 2^-3 (e5m2); below the smallest normal number, absolute."""
    states = sampled(shape)
    scales = fitted(states, how)
    error = (restored(states, scales, how) - states).abs()
    relative = 2.0 ** -(MANTISSA[how.format.name] + 1)
    floor = SMALLEST_NORMAL[how.format.name] * per_value(scales, states)
    bound = torch.maximum(states.abs(), floor) * relative
    assert bool((error <= bound * (1 + 1e-6)).all())


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_every_fp8_code_comes_back_as_itself(name: str) -> None:
    how = scheme(name, "tensor")
    dtype = torch.float8_e4m3fn if name == "fp8_e4m3" else torch.float8_e5m2
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()]
    assert codes.max().item() == how.format.qmax
    scales = TensorScales(torch.tensor([[0.37]]))
    states = (codes * 0.37)[None, None, None]
    assert torch.equal(quantize(states, scales, how).float().flatten(), codes)


@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_quantizing_what_was_restored_changes_nothing(how: TensorScheme) -> None:
    states = sampled((2, 3, 7, 5))
    scales = fitted(states, how)
    codes = quantize(states, scales, how)
    again = quantize(dequantize(codes, scales), scales, how)
    assert torch.equal(again.float(), codes.float())


# Beyond the range


@pytest.mark.parametrize("value", [3.0, 1e6, 3.4e38, float("inf")])
@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_values_beyond_the_range_saturate(how: TensorScheme, value: float) -> None:
    calibrated = torch.tensor([-1.0, 1.0])[None, None, :, None]
    scales = fitted(calibrated, how)
    low, high = (end.item() for end in scales.range(how))
    back = restored(torch.tensor([value, -value])[None, None, :, None], scales, how).flatten()
    assert back.tolist() == pytest.approx([high, low], rel=1e-6)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integers_do_not_wrap_around(name: str) -> None:
    """-128 and -129 as int8 codes are out of range, not +127."""
    how = scheme(name, "tensor")
    qmax = how.format.qmax
    states = torch.tensor([-qmax - 1, -qmax - 2, qmax + 1, qmax + 2, 2 * qmax + 2])
    codes = quantize(states[None, None, None], TensorScales(torch.ones(1, 1)), how)
    assert codes.flatten().tolist() == [-qmax, -qmax, qmax, qmax, qmax]


@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_huge_values_with_tiny_scales_stay_finite(how: TensorScheme) -> None:
    zeros = torch.zeros(1, 2, 3, 4)
    scales = fitted(zeros, how)
    huge = torch.full_like(zeros, torch.finfo(torch.float32).max)
    back = restored(torch.cat([huge, -huge, zeros]), scales, how)
    assert bool(back.isfinite().all())
    assert bool((back[2] == 0).all())


@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_ranges_near_the_end_of_float32_stay_finite(how: TensorScheme) -> None:
    largest = torch.finfo(torch.float32).max / 2
    states = torch.tensor([-largest, 0.0, largest])[None, None, :, None]
    scales = fitted(states, how)
    error = restored(states, scales, how) - states
    assert float(error.abs().max()) <= scales.scale.item() * 0.501


# Other dtypes and layouts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_16_bit_states_give_the_codes_of_their_float32_values(
    how: TensorScheme, dtype: torch.dtype
) -> None:
    states = sampled((2, 3, 7, 13)).to(dtype)
    scales = fitted(states, how)
    assert scales.scale.dtype == torch.float32
    codes = quantize(states, scales, how)
    assert torch.equal(codes.float(), quantize(states.float(), scales, how).float())
    assert dequantize(codes, scales).dtype == torch.float32


@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_how_states_lie_in_memory_does_not_matter(how: TensorScheme) -> None:
    states = sampled((2, 7, 3, 13))
    scales = fitted(states.transpose(1, 2), how)
    codes = quantize(states.transpose(1, 2), scales, how)
    assert torch.equal(
        codes.float(), quantize(states.transpose(1, 2).contiguous(), scales, how).float()
    )
    before = states.clone()
    quantize(states.transpose(1, 2), scales, how)
    assert torch.equal(states, before)


@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_no_tokens_are_no_codes(how: TensorScheme) -> None:
    scales = fitted(sampled((1, 2, 3, 4)), how)
    assert restored(torch.empty(1, 2, 0, 4), scales, how).shape == (1, 2, 0, 4)
