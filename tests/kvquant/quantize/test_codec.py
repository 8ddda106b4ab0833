from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvquant.presets import preset, preset_names
from kvquant.quantize.codec import Center, Codec, Field
from kvquant.quantize.packing import pack
from kvquant.quantize.reference import dequantize, quantize
from kvquant.quantize.rotation import rotation
from kvquant.rotary import RotaryLayout
from kvquant.scales import TensorScales
from kvquant.scheme import EXACT, Granularity, TensorScheme, format_names, tensor_format

SLOTS = {
    f"{name}-{slot}": getattr(preset(name), slot)
    for name in preset_names()
    for slot in ("key", "value")
}
CENTERED = TensorScheme(
    tensor_format("int4"),
    Granularity.PER_TOKEN,
    symmetric=False,
    center=True,
    rotate=True,
    scale_format="bf16",
)
STATIC = [
    TensorScheme(tensor_format(name), granularity, symmetric)
    for name, granularity, symmetric in product(format_names(), Granularity, (True, False))
    if granularity.is_static and (symmetric or name.startswith("int"))
]
LAYOUTS = {
    "half-split": RotaryLayout(0, 16, False, "all"),
    "interleaved": RotaryLayout(0, 16, True, "all"),
    "leading": RotaryLayout(0, 8, False, "all"),
    "trailing": RotaryLayout(10, 6, True, "all"),
}
KV_HEADS = 3

each_slot = pytest.mark.parametrize("how", [pytest.param(s, id=n) for n, s in SLOTS.items()])
each_static = pytest.mark.parametrize("how", STATIC, ids=str)
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def angles(pairs: int, factor: float = 1.0) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Cosines and sines as a model makes them; `factor` is what yarn multiplies them by."""

    def table(bound: int) -> tuple[torch.Tensor, torch.Tensor]:
        speed = 100.0 ** (-torch.arange(pairs) / pairs)
        turned = torch.arange(bound)[:, None] * speed
        return factor * turned.cos(), factor * turned.sin()

    return table


def turning(dim: int, layout: RotaryLayout, factor: float = 1.0) -> Center:
    """A mean of which every other rotary pair turns and the rest stays."""
    mean = 3 * gaussian(KV_HEADS, dim, seed=1)
    turns = torch.zeros(dim, dtype=torch.bool)
    for part in layout.split(turns):
        part[::2] = True
    return Center(
        mean.where(~turns, 0.0),
        mean.where(turns, 0.0),
        layout,
        angles(layout.width // 2, factor),
    )


def whole(dim: int) -> RotaryLayout:
    return RotaryLayout(0, dim - dim % 2, False, "all")


def fitted(states: torch.Tensor, how: TensorScheme) -> TensorScales:
    axes = {"per-tensor": (0, 1, 2, 3), "per-head": (0, 2, 3), "per-channel": (0, 2)}
    over = axes[how.granularity.value]
    shape = how.granularity.scale_shape(states.shape[1], states.shape[3])
    low, high = states.amin(over).reshape(shape), states.amax(over).reshape(shape)
    return TensorScales.from_range(low, high, how)


def read(codec: Codec, coded: tuple[torch.Tensor, ...], shape: Any, *where: Any) -> torch.Tensor:
    out = torch.full(shape, torch.nan)
    codec.decode(coded, out, *where)
    return out


def restored(codec: Codec, states: torch.Tensor, *where: Any) -> torch.Tensor:
    return read(codec, codec.encode(states, *where), states.shape, *where)


def same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# What a unit is stored as


@pytest.mark.parametrize(
    ("slot", "dim", "unit", "fields"),
    [
        ("none-key", 5, 1, [("values", (5,), torch.float32)]),
        ("bf16-key", 5, 1, [("values", (5,), torch.bfloat16)]),
        ("fp16-key", 5, 1, [("values", (5,), torch.float16)]),
        ("fp8-key", 5, 1, [("codes", (5,), torch.uint8), ("scale", (), torch.bfloat16)]),
        ("int8-value", 64, 1, [("codes", (64,), torch.uint8), ("scale", (), torch.bfloat16)]),
        (
            "int4-key",
            71,
            1,
            [
                ("codes", (36,), torch.uint8),
                ("scale", (), torch.bfloat16),
                ("middle", (), torch.bfloat16),
            ],
        ),
        (
            "int3-value",
            64,
            1,
            [
                ("codes", (24,), torch.uint8),
                ("scale", (), torch.bfloat16),
                ("middle", (), torch.bfloat16),
            ],
        ),
        (
            "int4-kivi-key",
            5,
            64,
            [
                ("codes", (64, 3), torch.uint8),
                ("scale", (5,), torch.float16),
                ("middle", (5,), torch.float16),
            ],
        ),
    ],
)
def test_literal_fields(
    slot: str, dim: int, unit: int, fields: list[tuple[str, tuple[int, ...], torch.dtype]]
) -> None:
    codec = Codec(SLOTS[slot], dim, torch.float32)
    assert codec.unit == unit
    assert codec.fields == tuple(Field(*field) for field in fields)
    first = codec.fields[0]
    assert codec.row_bytes == first.shape[-1] * first.dtype.itemsize


@each_slot
def test_encoding_gives_the_fields(how: TensorScheme) -> None:
    codec = Codec(how, 13, torch.bfloat16)
    coded = codec.encode(gaussian(2, KV_HEADS, 2 * codec.unit, 13).bfloat16())
    for tensor, field in zip(coded, codec.fields, strict=True):
        assert tensor.shape == (2, KV_HEADS, 2, *field.shape)
        assert tensor.dtype == field.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_none_keeps_every_bit(dtype: torch.dtype) -> None:
    states = gaussian(2, KV_HEADS, 5, 7).to(dtype)
    states[0, 0, 0, :3] = torch.tensor([torch.inf, -torch.inf, -0.0])
    codec = Codec(EXACT, 7, dtype)
    out = torch.empty_like(states)
    codec.decode(codec.encode(states), out)
    assert torch.equal(out, states)


def test_literal_unit() -> None:
    """Every step on one small token: 1, 2, 3, 4 minus 1, turned, in 15 steps."""
    center = Center(torch.ones(1, 4))
    codec = Codec(replace(CENTERED, scale_format="fp32"), 4, torch.float32, center=center)
    states = torch.tensor([1.0, 2.0, 3.0, 4.0])[None, None, None]
    # d = 0 1 2 3, R d = 3 -1 -2 0: middle 0.5, scale 2.5 / 7.5.
    codes, scale, middle = codec.encode(states)
    assert middle.item() == 0.5
    assert scale.item() == pytest.approx(1 / 3)
    assert codes.flatten().tolist() == [15 | 0 << 4, 3 | 6 << 4]
    back = read(codec, (codes, scale, middle), states.shape)
    assert back.flatten().tolist() == pytest.approx([1, 2, 3, 4], abs=1e-5)


# How good it is


@pytest.mark.parametrize("dim", [64, 80, 128])
@each_slot
def test_signal_to_noise(how: TensorScheme, dim: int) -> None:
    """In decibels, on normally distributed values."""
    at_least = {"none": 200, "bf16": 50, "fp16": 68, "fp8_e4m3": 30, "fp8_e5m2": 24}
    at_least |= {"int8": 41, "int4": 19.5, "int3": 13}
    states = gaussian(2, KV_HEADS, 64, dim)
    noise = (restored(Codec(how, dim, torch.float32), states) - states).square().sum()
    assert 10 * float((states.square().sum() / noise).log10()) > at_least[how.format.name]


def test_the_mean_and_the_rotation_pay() -> None:
    """Two channels far off, as in keys with a bias, and one that is large."""
    states = gaussian(1, KV_HEADS, 32, 64)
    states[..., 3] += 30
    states[..., 40] -= 20
    states[..., 7] *= 8
    center = Center(states.mean((0, 2)))
    errors = [
        float((restored(codec, states) - states).square().mean())
        for codec in (
            Codec(CENTERED, 64, torch.float32, center=center),
            Codec(CENTERED, 64, torch.float32),
            Codec(replace(CENTERED, center=False, rotate=False), 64, torch.float32),
        )
    ]
    assert errors[0] < errors[1] / 3
    assert errors[1] < errors[2] / 2


@each_slot
def test_zeros_are_read_as_zeros(how: TensorScheme) -> None:
    codec = Codec(how, 12, torch.float32)
    states = torch.zeros(1, KV_HEADS, 2 * codec.unit, 12)
    assert torch.equal(restored(codec, states), states)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 3e4, 1e30])
@each_slot
def test_whatever_is_finite_stays_finite(how: TensorScheme, size: float) -> None:
    codec = Codec(how, 20, torch.bfloat16)
    states = (gaussian(1, KV_HEADS, 2 * codec.unit, 20) * size).bfloat16()
    back = restored(codec, states)
    assert bool(back.isfinite().all())
    if size == 1e-6 and how.scale_format == "bf16" and how.format.name != "fp16":
        assert float((back - states).square().mean()) < 0.05 * size**2


@each_slot
def test_the_largest_float16_does_not_become_infinite(how: TensorScheme) -> None:
    """Rounding the scale up puts the last code beyond what went in."""
    codec = Codec(how, 16, torch.float16)
    states = 65504 * gaussian(1, KV_HEADS, 2 * codec.unit, 16).sign().half()
    out = torch.empty_like(states)
    codec.decode(codec.encode(states), out)
    assert bool(out.isfinite().all())
    if not how.rotate:
        assert torch.allclose(out.float(), states.float(), rtol=0.01)


def test_fp16_saturates() -> None:
    codec = Codec(SLOTS["fp16-key"], 2, torch.bfloat16)
    states = torch.tensor([1e30, -1e30])[None, None, None]
    assert restored(codec, states).flatten().tolist() == [65504, -65504]


# Static schemes are those of reference.py


@pytest.mark.parametrize("dim", [1, 7, 16])
@each_static
def test_static_is_the_reference(how: TensorScheme, dim: int) -> None:
    states = gaussian(2, KV_HEADS, 5, dim) + 0.5
    scales = fitted(states[:, :, :3], how)
    codec = Codec(how, dim, torch.float32, scales=scales)
    codes = quantize(states, scales, how)
    coded = codec.encode(states)
    assert codec.unit == 1
    assert same(coded, (pack(codes, how),))
    assert torch.equal(restored(codec, states), dequantize(codes, scales))


@each_static
def test_static_codes_of_16_bit_states(how: TensorScheme) -> None:
    states = gaussian(2, KV_HEADS, 5, 8).bfloat16()
    codec = Codec(how, 8, torch.bfloat16, scales=fitted(states.float(), how))
    assert same(codec.encode(states), codec.encode(states.float()))


# The mean


def test_a_fixed_mean_is_subtracted() -> None:
    mean = gaussian(KV_HEADS, 24, seed=1)
    states = gaussian(2, KV_HEADS, 5, 24)
    plain = Codec(CENTERED, 24, torch.float32)
    codec = Codec(CENTERED, 24, torch.float32, center=Center(mean))
    coded = codec.encode(states)
    assert same(coded, plain.encode(states - mean[:, None]))
    back = read(plain, coded, states.shape) + mean[:, None]
    assert torch.allclose(read(codec, coded, states.shape), back, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("factor", [1.0, 1.2])
@each_layout
def test_a_turned_mean_is_that_of_the_layout(
    layout: RotaryLayout, factor: float, dtype: torch.dtype
) -> None:
    """Against `RotaryLayout.rotate`, which does what the model does."""
    dim = 16
    center = turning(dim, layout, factor)
    assert center.turned is not None and center.angles is not None
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 3, 90, 0, 41]], dtype=dtype)
    states = gaussian(2, KV_HEADS, 5, dim)
    tables = tuple(table[positions.long()] for table in center.angles(100))
    spread = center.turned[None, :, None].expand(states.shape)
    mean = layout.rotate(spread, tables) + center.fixed[:, None]
    assert not torch.equal(mean[0], mean[1])

    codec = Codec(CENTERED, dim, torch.float32, center=center)
    plain = Codec(CENTERED, dim, torch.float32)
    for encoded, expected in (
        (codec.encode(states, positions, 100), plain.encode(states - mean)),
        (codec.encode_reference(states, positions, 100), plain.encode_reference(states - mean)),
    ):
        assert same(encoded, expected)
    coded = codec.encode(states, positions, 100)
    back = read(plain, coded, states.shape) + mean
    assert torch.allclose(read(codec, coded, states.shape, positions, 100), back, atol=1e-5)


def test_only_centered_schemes_look_at_a_mean() -> None:
    center = Center(gaussian(KV_HEADS, 24))
    states = gaussian(2, KV_HEADS, 5, 24)
    plain = Codec(SLOTS["int8-key"], 24, torch.float32)
    given = Codec(SLOTS["int8-key"], 24, torch.float32, center=center)
    assert plain.center is None and given.center is None
    assert same(given.encode(states), plain.encode(states))


# What is stored does not depend on how calls were cut


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256, 80, 71])
@each_slot
def test_chunks_are_stored_as_the_whole(how: TensorScheme, dim: int, dtype: torch.dtype) -> None:
    if how.group_size is not None:
        how = replace(how, group_size=4)
    center = turning(dim, whole(dim)) if how.center else None
    codec = Codec(how, dim, dtype, center=center)
    tokens = 16 * codec.unit
    states = gaussian(2, KV_HEADS, tokens, dim).to(dtype)
    positions = torch.stack((torch.arange(tokens), torch.arange(tokens) + 9))
    for encode in (codec.encode, codec.encode_reference):
        at_once = encode(states, positions, 100)
        for size in (1, 3, 5, 7):
            steps = size * codec.unit
            parts = zip(states.split(steps, 2), positions.split(steps, 1), strict=True)
            pieces = [encode(part, where, 100) for part, where in parts]
            joined = tuple(torch.cat(tensors, 2) for tensors in zip(*pieces, strict=True))
            assert same(joined, at_once)
        alone = encode(states[1:], positions[1:], 100)
        assert same(alone, tuple(tensor[1:] for tensor in at_once))


@each_slot
def test_encoding_what_was_laid_out_otherwise(how: TensorScheme) -> None:
    """Attention layers hand over transposed views."""
    codec = Codec(how, 24, torch.float32, center=turning(24, whole(24)))
    tokens = 2 * codec.unit
    states = gaussian(2, tokens, KV_HEADS, 24)
    wide = gaussian(2, tokens, KV_HEADS, 50)
    positions = torch.arange(tokens).expand(2, tokens)
    for view in (states.transpose(1, 2), wide.transpose(1, 2)[..., 3:27]):
        before = view.clone()
        coded = codec.encode(view, positions, tokens)
        assert same(coded, codec.encode(view.contiguous(), positions.contiguous(), tokens))
        assert same(coded, codec.encode_reference(view, positions, tokens))
        assert torch.equal(view, before)


@each_slot
def test_states_may_require_gradients(how: TensorScheme) -> None:
    codec = Codec(how, 8, torch.float32)
    states = gaussian(1, KV_HEADS, codec.unit, 8).requires_grad_()
    for encode in (codec.encode, codec.encode_reference):
        assert not any(tensor.requires_grad for tensor in encode(states))


# Reading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each_slot
def test_reading_from_views_into_views(how: TensorScheme, dtype: torch.dtype) -> None:
    codec = Codec(how, 24, torch.bfloat16, center=turning(24, whole(24)))
    tokens = 3 * codec.unit
    states = gaussian(2, KV_HEADS, tokens, 24).bfloat16()
    where = (torch.arange(tokens).expand(2, tokens), tokens)
    coded = codec.encode(states, *where)
    expected = read(codec, coded, states.shape, *where).to(dtype)

    views = tuple(_inside(tensor, units=3, extra=4) for tensor in coded)
    buffer = torch.full((3, tokens + 5, KV_HEADS, 30), 7.0, dtype=dtype)
    out = buffer[1:, 2 : tokens + 2, :, 4:28].transpose(1, 2)
    for decode in (codec.decode, codec.decode_reference):
        buffer.fill_(7)
        decode(views, out, *where)
        assert torch.allclose(out.float(), expected.float(), rtol=1e-2, atol=1e-5)
        out.fill_(7)
        assert bool((buffer == 7).all())


def _inside(tensor: torch.Tensor, *, units: int, extra: int) -> torch.Tensor:
    """`tensor` as a part of a larger one, along batch and units."""
    batch, kv_heads = tensor.shape[:2]
    shape = (batch + 1, kv_heads, units + extra, *tensor.shape[3:])
    buffer = torch.full(shape, 3.0).to(tensor.dtype)
    view = buffer[1:, :, 2 : 2 + units]
    view.copy_(tensor)
    return view


@each_slot
def test_no_tokens(how: TensorScheme) -> None:
    codec = Codec(how, 24, torch.float32, center=turning(24, whole(24)))
    states = torch.empty(2, KV_HEADS, 0, 24)
    where = (torch.empty(2, 0, dtype=torch.long), 0)
    coded = codec.encode(states, *where)
    assert [tensor.shape[2] for tensor in coded] == [0] * len(codec.fields)
    assert read(codec, coded, states.shape, *where).shape == states.shape


# What cannot be


def test_wrong_states_are_named() -> None:
    codec = Codec(replace(SLOTS["int4-kivi-key"], group_size=8), 16, torch.float32)
    with pytest.raises(ValueError, match=r"\[batch, kv_heads, tokens, 16\], not \[2, 3, 8, 15\]"):
        codec.encode(torch.zeros(2, 3, 8, 15))
    with pytest.raises(ValueError, match=r"not \[3, 8, 16\]"):
        codec.encode(torch.zeros(3, 8, 16))
    with pytest.raises(ValueError, match="12 tokens are no whole groups of 8"):
        codec.encode(torch.zeros(2, 3, 12, 16))
    with pytest.raises(ValueError, match="12 tokens are no whole groups of 8"):
        codec.decode(codec.encode(torch.zeros(2, 3, 8, 16)), torch.zeros(2, 3, 12, 16))


@pytest.mark.parametrize("slot", ["none-key", "int4-value", "int4-kivi-key"])
def test_reading_into_something_else_is_refused(slot: str) -> None:
    """A broadcast would fill it with the same token over and over."""
    codec = Codec(SLOTS[slot], 16, torch.float32)
    coded = codec.encode(torch.zeros(2, KV_HEADS, codec.unit, 16))
    with pytest.raises(ValueError, match=rf"fill \[2, 3, {2 * codec.unit}, 16\]"):
        codec.decode(coded, torch.zeros(2, KV_HEADS, 2 * codec.unit, 16))
    with pytest.raises(ValueError, match="needs tensors of"):
        codec.decode((*coded, coded[0]), torch.zeros(2, KV_HEADS, codec.unit, 16))
    with pytest.raises(ValueError, match="not"):
        codec.decode(coded, torch.zeros(2, KV_HEADS, codec.unit, 17))


def test_a_turned_mean_needs_positions() -> None:
    codec = Codec(CENTERED, 24, torch.float32, center=turning(24, whole(24)))
    states = gaussian(2, KV_HEADS, 5, 24)
    coded = codec.encode(states, torch.zeros(2, 5, dtype=torch.long), 1)
    for encode in (codec.encode, codec.encode_reference):
        with pytest.raises(ValueError, match=r"\[2, 5\], not None"):
            encode(states)
        with pytest.raises(ValueError, match=r"\[2, 5\], not \[5\]"):
            encode(states, torch.arange(5), 5)
    for decode in (codec.decode, codec.decode_reference):
        with pytest.raises(ValueError, match=r"\[2, 5\], not None"):
            decode(coded, torch.empty_like(states))


def test_static_schemes_need_scales_that_fit() -> None:
    how = next(how for how in STATIC if how.granularity is Granularity.PER_CHANNEL)
    with pytest.raises(ValueError, match="fp8_e4m3 per-channel needs calibrated scales"):
        Codec(how, 16, torch.float32)
    with pytest.raises(ValueError, match="scales of 15 channels, but heads have 16"):
        Codec(how, 16, torch.float32, scales=TensorScales(torch.ones(KV_HEADS, 15)))


# Without Numba


def test_plain_torch_takes_over_where_numba_is_missing() -> None:
    code = """
import sys
sys.modules["numba"] = None
import torch
from kvquant.presets import preset
from kvquant.quantize.codec import Codec
codec = Codec(preset("int4").key, 16, torch.float32)
states = torch.arange(32.0).reshape(1, 1, 2, 16)
out = torch.empty_like(states)
codec.decode(codec.encode(states), out)
print(float((out - states).norm() / states.norm()) < 0.2)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True"], done.stderr


# CUDA without a GPU


@pytest.mark.parametrize("dim", [64, 80, 71])
@each_slot
def test_presets_run_on_cuda_without_looking_at_values(
    how: TensorScheme, dim: int, without_device_guards: Callable[..., Any]
) -> None:
    """A fake tensor refuses ``item()``, ``tolist()`` and ``bool()``: nothing waits for the GPU."""
    rotation.cache_clear()
    with FakeTensorMode(), without_device_guards():
        center = _on_cuda(turning(dim, whole(dim))) if how.center else None
        codec = Codec(how, dim, torch.bfloat16, center=center)
        tokens = 2 * codec.unit
        states = torch.randn(2, KV_HEADS, tokens, dim, device="cuda", dtype=torch.bfloat16)
        positions = torch.arange(tokens, device="cuda").expand(2, tokens)
        coded = codec.encode(states, positions, tokens)
        out = torch.empty_like(states)
        codec.decode(coded, out, positions, tokens)
    assert {tensor.device.type for tensor in coded} == {"cuda"}
    for tensor, field in zip(coded, codec.fields, strict=True):
        assert tensor.shape == (2, KV_HEADS, 2, *field.shape)
        assert tensor.dtype == field.dtype


@each_static
def test_static_schemes_run_on_cuda_without_looking_at_values(
    how: TensorScheme, without_device_guards: Callable[..., Any]
) -> None:
    with FakeTensorMode(), without_device_guards():
        shape = how.granularity.scale_shape(KV_HEADS, 16)
        scales = TensorScales(torch.ones(shape), None if how.symmetric else torch.zeros(shape))
        codec = Codec(how, 16, torch.bfloat16, scales=scales)
        states = torch.randn(2, KV_HEADS, 5, 16, device="cuda", dtype=torch.bfloat16)
        coded = codec.encode(states)
        codec.decode(coded, torch.empty_like(states))
    assert coded[0].device.type == "cuda"


def test_a_fake_tensor_would_complain() -> None:
    """Else the two tests above could not fail."""
    with FakeTensorMode(), pytest.raises(Exception, match="_local_scalar_dense"):
        torch.zeros(1, device="cuda").item()


def _on_cuda(center: Center) -> Center:
    """With angles where the states are, as the owner of a center sees to."""
    angles = center.angles
    assert angles is not None

    def moved(bound: int) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = angles(bound)
        return cos.to("cuda:0"), sin.to("cuda:0")

    return replace(center, angles=moved)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dim", [64, 80, 71])
@each_slot
def test_a_gpu_stores_the_same(how: TensorScheme, dim: int) -> None:
    center = turning(dim, whole(dim)) if how.center else None
    here = Codec(how, dim, torch.float32, center=center)
    there = Codec(how, dim, torch.float32, center=None if center is None else _on_cuda(center))
    tokens = 2 * here.unit
    states = gaussian(2, KV_HEADS, tokens, dim)
    positions = torch.arange(tokens).expand(2, tokens)
    coded = here.encode_reference(states, positions, tokens)
    on_gpu = there.encode(states.cuda(), positions.cuda(), tokens)
    assert same(tuple(tensor.cpu() for tensor in on_gpu), coded)
    out = torch.empty(states.shape, device="cuda")
    there.decode(on_gpu, out, positions.cuda(), tokens)
    expected = read(here, coded, states.shape, positions, tokens)
    assert torch.allclose(out.cpu(), expected, rtol=1e-4, atol=1e-4)
