from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant.presets import preset
from kvquant.quantize import numba_codec
from kvquant.quantize.codec import Center, Codec
from kvquant.rotary import RotaryLayout
from kvquant.scales import TensorScales
from kvquant.scheme import Granularity, TensorScheme, tensor_format

DIMS = (1, 2, 5, 16, 24, 64, 71, 80, 96, 112, 128, 192, 256)
SHAPES = ((1, 3, 17), (2, 1, 2), (3, 3, 1), (1, 1, 65), (2, 1, 15), (1, 3, 16), (2, 3, 0))
"""Batch, KV heads, units."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAST_BIT = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
POSITIONS = 300


def schemes() -> Iterator[TensorScheme]:
    integers = ("int8", "int4", "int3")
    for name, symmetric, kept in product(integers, (True, False), ("bf16", "fp16", "fp32")):
        for center, rotate in product((False, True), repeat=2):
            how = {"center": center, "rotate": rotate, "scale_format": kept}
            yield TensorScheme(tensor_format(name), Granularity.PER_TOKEN, symmetric, **how)
    for name, rotate in product(("fp8_e4m3", "fp8_e5m2"), (False, True)):
        how = {"center": rotate, "rotate": rotate, "scale_format": "bf16"}
        yield TensorScheme(tensor_format(name), Granularity.PER_TOKEN, **how)
    for name, symmetric, size in product(integers, (True, False), (1, 5, 16)):
        how = {"group_size": size, "scale_format": "fp16"}
        yield TensorScheme(tensor_format(name), Granularity.PER_GROUP, symmetric, **how)
    for granularity in (Granularity.PER_TENSOR, Granularity.PER_HEAD, Granularity.PER_CHANNEL):
        for name in ("int8", "int4", "fp8_e4m3", "fp8_e5m2"):
            for symmetric in (True, False) if name.startswith("int") else (True,):
                yield TensorScheme(tensor_format(name), granularity, symmetric)


SCHEMES = list(schemes())
NAMES = [f"{how} {how.scale_format}" for how in SCHEMES]

each_scheme = pytest.mark.parametrize("how", SCHEMES, ids=NAMES)
INT4 = preset("int4").key


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def states_of(batch: int, kv_heads: int, tokens: int, dim: int) -> torch.Tensor:
    """Tokens of very different size."""
    sizes = torch.exp(2 * gaussian(batch, kv_heads, tokens, 1, seed=dim + 1))
    return gaussian(batch, kv_heads, tokens, dim, seed=dim) * sizes


def angles(pairs: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    turned = torch.arange(POSITIONS)[:, None] * 100.0 ** (-torch.arange(pairs) / max(pairs, 1))
    return lambda bound: (turned.cos(), turned.sin())


def center(kv_heads: int, dim: int, kind: str) -> Center:
    """A mean that stays, or of which some turns: all pairs, every other, or a part of a head."""
    mean, half = 3 * gaussian(kv_heads, dim, seed=7), dim // 2
    layouts = {
        "halves": RotaryLayout(0, 2 * half, False, "half"),
        "neighbours": RotaryLayout(0, 2 * half, True, "half"),
        "trailing": RotaryLayout(dim - 2 * (dim // 4), 2 * (dim // 4), False, "half"),
    }
    if kind == "fixed" or not layouts[kind].width:
        return Center(mean)
    turns = torch.zeros(dim, dtype=torch.bool)
    turns[layouts[kind].start : layouts[kind].start + layouts[kind].width] = True
    if kind == "neighbours":  # and every other pair stays
        turns.view(-1)[: 2 * half].view(-1, 2)[::2] = False
    return Center(
        mean.where(~turns, 0.0),
        mean.where(turns, 0.0),
        layouts[kind],
        angles(layouts[kind].width // 2),
    )


def codec_of(how: TensorScheme, dim: int, kv_heads: int, kind: str = "halves") -> Codec:
    scales = None
    if how.format.is_scaled and how.granularity.is_static:
        shape = how.granularity.scale_shape(kv_heads, dim)
        low, high = -gaussian(*shape, seed=8).abs(), gaussian(*shape, seed=9).abs()
        scales = TensorScales.from_range(low, high, how)
    return Codec(how, dim, torch.float32, scales=scales, center=center(kv_heads, dim, kind))


def positions_of(batch: int, tokens: int) -> torch.Tensor:
    return torch.randperm(batch * tokens, generator=torch.Generator().manual_seed(3)).view(
        batch, tokens
    ) % (POSITIONS - 1)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


def identical(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    assert [(t.shape, t.dtype) for t in one] == [(t.shape, t.dtype) for t in other]
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))


def encoded(
    codec: Codec, states: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    coded = numba_codec.encode(codec, states, positions, POSITIONS)
    assert coded is not None
    return coded


def cases(how: TensorScheme) -> Iterator[tuple[Codec, torch.Tensor, torch.Tensor]]:
    """A codec, states and positions for each width, at changing shapes, layouts and dtypes."""
    kinds = ("halves", "neighbours", "trailing", "fixed")
    for number, dim in enumerate(DIMS):
        batch, kv_heads, units = SHAPES[number % len(SHAPES)]
        codec = codec_of(how, dim, kv_heads, kinds[number % len(kinds)])
        tokens = codec.unit * min(units, 3) if codec.unit > 1 else units
        states = states_of(batch, kv_heads, tokens, dim).to(DTYPES[(number + dim) % 3])
        yield codec, states, positions_of(batch, tokens)


# Against the reference


@each_scheme
def test_what_is_stored_is_that_of_the_reference_bit_for_bit(how: TensorScheme) -> None:
    for codec, states, positions in cases(how):
        wanted = codec.encode_reference(states, positions, POSITIONS)
        assert identical(encoded(codec, states, positions), wanted), (codec.dim, states.shape)


@each_scheme
def test_what_is_read_is_that_of_the_reference_to_the_last_bit(how: TensorScheme) -> None:
    for codec, states, positions in cases(how):
        coded = codec.encode_reference(states, positions, POSITIONS)
        size = states.float().abs().amax(-1, keepdim=True) + (10 if how.center else 0)
        for dtype in DTYPES:
            out, wanted = torch.full((2, *states.shape), torch.nan, dtype=dtype)
            assert numba_codec.decode(codec, coded, out, positions, POSITIONS)
            codec.decode_reference(coded, wanted, positions, POSITIONS)
            allowed = LAST_BIT[dtype] * wanted.float().abs() + 1e-6 * size
            assert bool(((out.float() - wanted.float()).abs() <= allowed).all()), codec.dim


@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=16, max_size=16),
    how=st.sampled_from([s for s in SCHEMES if s.granularity is Granularity.PER_TOKEN]),
)
@settings(deadline=None, max_examples=200)
def test_any_numbers_are_stored_like_the_reference_does(
    values: list[float], how: TensorScheme
) -> None:
    codec, states = codec_of(how, 16, 1), torch.tensor(values).view(1, 1, 1, 16) + 0.0
    positions = torch.tensor([[5]])
    wanted = codec.encode_reference(states, positions, POSITIONS)
    assert identical(encoded(codec, states, positions), wanted)


@pytest.mark.parametrize("kept", ["bf16", "fp16", "fp32"])
def test_extreme_tokens_are_stored_like_the_reference_does(kept: str) -> None:
    rows = torch.tensor(
        [
            [0.0, 0.0, 0.0, 0.0],
            [7.0, 7.0, 7.0, 7.0],
            [1e-45, 0.0, -1e-45, 0.0],
            [6e-8, 3e-8, -3e-8, 1e-7],
            [1e30, -1e30, 1.0, 0.0],
            [65504.0, 65519.0, -65520.0, 1e5],
            [3.0, 3.0 + 2**-20, 3.0 - 2**-20, 3.0],
            [0.5, 1.5, 2.5, -0.5],
        ]
    )[None, None]
    for name, symmetric in (("int8", True), ("int4", False), ("int3", False), ("fp8", True)):
        how = TensorScheme(tensor_format(name), Granularity.PER_TOKEN, symmetric, scale_format=kept)
        codec, positions = codec_of(how, 4, 1), positions_of(1, 8)
        wanted = codec.encode_reference(rows, positions, POSITIONS)
        assert identical(encoded(codec, rows, positions), wanted), name


def test_every_fp8_code_is_written_and_read() -> None:
    for name, torch_dtype in (
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
    ):
        how = TensorScheme(tensor_format(name), Granularity.PER_TENSOR)
        codec = Codec(how, 1, torch.float32, scales=TensorScales(torch.ones(1, 1)))
        codes = torch.arange(256, dtype=torch.uint8)
        numbers = codes.view(torch_dtype).float()
        out = torch.empty(1, 1, 256, 1)
        assert numba_codec.decode(codec, (codes.view(1, 1, 256, 1),), out, None, 0)
        assert torch.equal(out.flatten().nan_to_num(nan=-1.0), numbers.nan_to_num(nan=-1.0))
        finite = numbers[numbers.isfinite()].sort().values
        between = torch.cat([finite, (finite[1:] + finite[:-1]) / 2])  # and ties between them
        states = between.view(1, 1, -1, 1)
        (got,) = encoded(codec, states, positions_of(1, len(between)))
        assert torch.equal(got, codec.encode_reference(states)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_is_read_and_every_scale_is_written(dtype: torch.dtype) -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    halves = halves[halves.abs() < 2.0**126].view(1, 1, -1, 1)  # the sum of two is finite
    kept = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    for name, symmetric in (("int8", True), ("int8", False)):
        how = TensorScheme(tensor_format(name), Granularity.PER_TOKEN, symmetric, scale_format=kept)
        codec, positions = codec_of(how, 1, 1), positions_of(1, halves.shape[2])
        # A mean of zero of both signs is the one thing that is left open.
        for states in (halves, halves.float() * (1 + 2.0**-12)):
            wanted = codec.encode_reference(states, positions, POSITIONS)
            assert identical(encoded(codec, states, positions), wanted), name
        out, read = torch.empty(2, *halves.shape, dtype=dtype)
        assert numba_codec.decode(codec, wanted, out, positions, POSITIONS)
        codec.decode_reference(wanted, read, positions, POSITIONS)
        assert torch.equal(bits(out), bits(read)), name


# NaN and infinity


def reads(codec: Codec, states: torch.Tensor) -> Iterator[torch.Tensor]:
    """What the kernels and the reference read of `states`, which they store alike."""
    batch, _, tokens, _ = states.shape
    positions = positions_of(batch, tokens)
    coded = encoded(codec, states, positions)
    wanted = codec.encode_reference(states, positions, POSITIONS)
    for one, other in zip(
        map(numbers_of(codec), coded), map(numbers_of(codec), wanted), strict=True
    ):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    out, read = torch.empty(2, *states.shape, dtype=states.dtype)
    assert numba_codec.decode(codec, coded, out, positions, POSITIONS)
    codec.decode_reference(wanted, read, positions, POSITIONS)
    yield from (out, read)


def numbers_of(codec: Codec) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes numbers of stored tensors: NaN has several bits."""
    name = codec.scheme.format.name
    floats = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(name)

    def numbers(stored: torch.Tensor) -> torch.Tensor:
        is_fp8 = stored.dtype == torch.uint8 and floats is not None
        return (stored.view(floats) if is_fp8 else stored).float()

    return numbers


NOT_FINITE = (torch.nan, -torch.nan, torch.inf, -torch.inf)


@pytest.mark.parametrize("how", [s for s in SCHEMES if not s.granularity.is_static], ids=str)
def test_whatever_shares_a_range_with_nan_or_infinity_is_nan(how: TensorScheme) -> None:
    for number in range(8):
        dim, channel = (1, 5, 16, 71)[number % 4], -(number % 4 % 2)
        codec, dtype = codec_of(how, dim, 3), DTYPES[number % 3]
        token, tokens = (9, 11) if how.group_size is None else (codec.unit - 1, 2 * codec.unit)
        states = states_of(2, 3, tokens, dim).to(dtype)
        spoilt = states.clone()
        spoilt[1, 2, token, channel] = NOT_FINITE[(number + number // 4) % 4]
        expected = torch.zeros(states.shape, dtype=torch.bool)
        if how.group_size is None:
            expected[1, 2, token] = True
        else:
            expected[1, 2, : codec.unit, channel] = True
        for found, clean in zip(reads(codec, spoilt), reads(codec, states), strict=True):
            assert torch.equal(found.isnan(), expected)
            assert torch.equal(found[~expected], clean[~expected])
            assert bool(clean.isfinite().all())


@pytest.mark.parametrize("how", [s for s in SCHEMES if s.granularity.is_static], ids=str)
def test_calibrated_floats_keep_nan_and_calibrated_integers_take_the_end_of_their_range(
    how: TensorScheme,
) -> None:
    codec, states = codec_of(how, 16, 3), states_of(1, 3, 11, 16)
    spoilt, huge = states.clone(), states.clone()
    spoilt[0, 1, 4, 5], spoilt[0, 2, 10, 15] = torch.nan, torch.inf
    huge[0, 1, 4, 5], huge[0, 2, 10, 15] = -1e30, 1e30
    for found, saturated in zip(reads(codec, spoilt), reads(codec, huge), strict=True):
        assert bool(found[0, 1, 4, 5].isnan()) == how.format.is_float
        if how.format.is_float:
            found[0, 1, 4, 5] = saturated[0, 1, 4, 5]
        assert torch.equal(found, saturated)


@pytest.mark.parametrize("bits_of_one", [-1, 0x7FFFFFFF, 0x7F800001])
@pytest.mark.parametrize("kept", ["bf16", "fp16", "fp32"])
def test_nan_of_any_bits_is_nan(kept: str, bits_of_one: int) -> None:
    """Rounding up adds to the bits of a scale."""
    states = states_of(1, 1, 9, 16)
    states.view(torch.int32)[0, 0, 4] = bits_of_one
    for name, symmetric in (("int8", True), ("int4", False), ("fp8_e4m3", True)):
        how = TensorScheme(tensor_format(name), Granularity.PER_TOKEN, symmetric, scale_format=kept)
        codec = Codec(how, 16, torch.float32)
        for coded in (codec.encode(states), codec.encode_reference(states)):
            for read in (codec.decode, codec.decode_reference):
                out = torch.empty_like(states)
                read(coded, out)
                assert out.isnan().any(-1).flatten().tolist() == [n == 4 for n in range(9)]


@pytest.mark.parametrize("how", SCHEMES, ids=NAMES)
def test_numbers_that_docs_call_safe_stay_finite(how: TensorScheme) -> None:
    """Beyond them, sums over a head may overflow: that is read back as NaN, not as a number."""
    for dim in (64, 80, 128, 256):
        codec = Codec(how, dim, torch.float32, scales=codec_of(how, dim, 1).scales)
        signs = gaussian(1, 1, 3 * codec.unit, dim).sign()
        signs[:, :, : codec.unit] = 1
        for found in reads(codec, signs * 5e35):
            assert bool(found.isfinite().all())


def test_sums_that_overflow_are_nan() -> None:
    states = torch.full((1, 1, 2, 128), 3e36)
    states[0, 0, 1] = 1.0
    for found in reads(Codec(INT4, 128, torch.float32), states):
        assert bool(found[0, 0, 0].isnan().all())
        assert bool(found[0, 0, 1].isfinite().all())


# However many at a time


@given(cuts=st.lists(st.integers(0, 40), max_size=6), start=st.integers(0, 200))
@settings(deadline=None, max_examples=50)
def test_a_token_is_stored_alike_however_calls_are_cut(cuts: list[int], start: int) -> None:
    for dim in (24, 64, 71):
        codec, states = codec_of(INT4, dim, 2), states_of(1, 2, 40, dim)
        positions = torch.arange(start, start + 40)[None]
        edges = sorted({0, 40, *cuts})
        parts = [encoded(codec, states[:, :, a:b], positions[:, a:b]) for a, b in pairwise(edges)]
        joined = tuple(torch.cat(field, dim=2) for field in zip(*parts, strict=True))
        assert identical(joined, encoded(codec, states, positions))


@each_scheme
def test_threads_change_nothing(how: TensorScheme) -> None:
    codec = codec_of(how, 64, 2)
    tokens = 15 * codec.unit if codec.unit > 15 else 600 // codec.unit * codec.unit
    states = states_of(2, 2, tokens, 64).repeat(1, 1, 2, 1)
    positions, found = positions_of(2, 2 * tokens), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            out = torch.empty(states.shape)
            coded = encoded(codec, states, positions)
            assert numba_codec.decode(codec, coded, out, positions, POSITIONS)
            found.append((*coded, out))
    finally:
        torch.set_num_threads(before)
    assert identical(*found)


# Views of larger tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 71])
def test_rows_of_any_stride_are_read_and_written(dim: int, dtype: torch.dtype) -> None:
    codec = codec_of(INT4, dim, 3)
    states, positions = states_of(2, 3, 21, dim).to(dtype), positions_of(2, 21)
    wanted = codec.encode_reference(states, positions, POSITIONS)
    by_token = states.transpose(1, 2).contiguous().transpose(1, 2)
    by_channel = states.transpose(2, 3).contiguous().transpose(2, 3)
    for view in (by_token, by_channel, states.flip(0)[[1, 0]]):
        assert identical(encoded(codec, view, positions), wanted)
    every_other = positions.int().repeat_interleave(2, 1)[:, ::2]
    assert identical(encoded(codec, states, every_other), wanted)


@pytest.mark.parametrize("how", [INT4, preset("int3").key, preset("int4-kivi").key], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 71])
def test_parts_of_larger_buffers_are_read_and_nothing_beside_is_written(
    dim: int, dtype: torch.dtype, how: TensorScheme
) -> None:
    codec = codec_of(how, dim, 3)
    units = 19 if codec.unit == 1 else 2
    tokens = units * codec.unit
    positions = positions_of(2, tokens)
    coded = codec.encode_reference(states_of(2, 3, tokens, dim), positions, POSITIONS)
    larger = [field.new_ones(4, 3, units + 9, *field.shape[3:]) for field in coded]
    parts = tuple(buffer[1:3, :, 4 : 4 + units] for buffer in larger)
    for part, field in zip(parts, coded, strict=True):
        part.copy_(field)
    around = torch.full((3, 3, tokens + 5, dim + 3), 77.0, dtype=dtype)
    out = around[:2, :, 2 : 2 + tokens, :dim]
    wanted = torch.empty(out.shape, dtype=dtype)
    assert numba_codec.decode(codec, parts, out, positions, POSITIONS)
    assert numba_codec.decode(codec, coded, wanted, positions, POSITIONS)
    assert torch.equal(out, wanted)
    out.fill_(77.0)
    assert bool((around == 77.0).all())


def test_calibrated_numbers_may_be_replaced() -> None:
    codec, states, positions = codec_of(INT4, 16, 1), states_of(1, 1, 3, 16), positions_of(1, 3)
    before = encoded(codec, states, positions)
    codec.center = Center(gaussian(1, 16, seed=20))
    after = encoded(codec, states, positions)
    assert not torch.equal(before[0], after[0])
    assert identical(after, codec.encode_reference(states))


# What is left to plain torch


@pytest.mark.parametrize("name", ["none", "bf16", "fp16"])
def test_numbers_stored_as_they_are_have_no_kernel(name: str) -> None:
    codec, states = Codec(preset(name).key, 8, torch.float32), states_of(1, 1, 2, 8)
    assert numba_codec.encode(codec, states, None, 0) is None
    assert not numba_codec.decode(codec, codec.encode(states), states.clone(), None, 0)


def test_what_kernels_do_not_know_they_leave_alone() -> None:
    codec, positions = codec_of(INT4, 16, 2), positions_of(1, 3)
    states = states_of(1, 2, 3, 16)
    coded = encoded(codec, states, positions)
    assert numba_codec.encode(codec, states.double(), positions, POSITIONS) is None
    assert numba_codec.encode(codec, states[:, :1], positions, POSITIONS) is None
    assert numba_codec.encode(codec, states, None, POSITIONS) is None
    assert numba_codec.encode(codec, states, positions[:, :2], POSITIONS) is None
    assert numba_codec.encode(codec, states, positions.short(), POSITIONS) is None
    out = torch.zeros(1, 2, 16, 3).transpose(2, 3)
    assert not numba_codec.decode(codec, coded, out, positions, POSITIONS)
    wider = (coded[0], coded[1].float(), coded[2])
    assert not numba_codec.decode(codec, wider, states.clone(), positions, POSITIONS)
    gaps = (coded[0].repeat_interleave(2, -1)[..., ::2], *coded[1:])
    assert not numba_codec.decode(codec, gaps, states.clone(), positions, POSITIONS)
    assert bool((out == 0).all())


def test_angles_of_another_dtype_are_left_to_plain_torch() -> None:
    codec, states, positions = codec_of(INT4, 16, 1), states_of(1, 1, 3, 16), positions_of(1, 3)
    table = angles(8)(POSITIONS)
    kept = codec.center
    assert kept is not None
    codec.center = Center(
        kept.fixed, kept.turned, kept.layout, lambda _: (table[0].double(), table[1].double())
    )
    assert numba_codec.encode(codec, states, positions, POSITIONS) is None


def test_positions_beyond_the_table_read_nothing_else() -> None:
    codec, states = codec_of(INT4, 16, 1), states_of(1, 1, 2, 16)
    beyond = encoded(codec, states, torch.tensor([[-5, 2**40]]))
    assert identical(beyond, encoded(codec, states, torch.tensor([[0, POSITIONS - 1]])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dim", [16, 24, 80])
def test_tables_are_float32_whatever_torch_makes_by_default(dtype: torch.dtype, dim: int) -> None:
    states, positions = states_of(1, 2, 9, dim), positions_of(1, 9)
    expected = encoded(codec_of(INT4, dim, 2), states, positions)
    codec = codec_of(INT4, dim, 2)
    torch.set_default_dtype(dtype)
    try:
        found = encoded(codec, states, positions)
    finally:
        torch.set_default_dtype(torch.float32)
    assert identical(found, expected)


def test_kernels_stay_on_the_cpu_whatever_the_default_device() -> None:
    states, positions = states_of(1, 2, 9, 24), positions_of(1, 9)
    expected = encoded(codec_of(INT4, 24, 2), states, positions)
    codec = codec_of(INT4, 24, 2)
    with torch.device("meta"):
        found = encoded(codec, states, positions)
    assert identical(found, expected)
