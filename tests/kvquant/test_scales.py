from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant.errors import FingerprintError, NotObservedError, SchemeError
from kvquant.fingerprint import Fingerprint
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.provenance import Provenance
from kvquant.rotary import RotaryLayout
from kvquant.scales import KVScales, LayerScales, TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, format_names, tensor_format

STATIC = [granularity for granularity in Granularity if granularity.is_static]
SCHEMES = [
    TensorScheme(tensor_format(name), granularity, symmetric)
    for name, granularity, symmetric in product(format_names(), STATIC, (True, False))
    if symmetric or name.startswith("int")
]
KV_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 3
FULL = LayerGeometry(LayerKind.FULL, KV_HEADS, KEY_DIM, VALUE_DIM)
GEOMETRY = CacheGeometry("llama", (FULL, LayerGeometry(LayerKind.LINEAR), FULL), 512)
"""Layers 0 and 2 keep tokens, keys are wider than values."""


def scheme(
    name: str, granularity: str = "channel", symmetric: bool = True, **dynamic: Any
) -> TensorScheme:
    return TensorScheme(tensor_format(name), Granularity.parse(granularity), symmetric, **dynamic)


def made(low: float, high: float, how: TensorScheme) -> tuple[float, float | None]:
    """Scale and zero point of one range."""
    scales = TensorScales.from_range(torch.tensor([[low]]), torch.tensor([[high]]), how)
    point = scales.zero_point
    return scales.scale.item(), None if point is None else point.item()


def random_tensor(how: TensorScheme, dim: int, seed: int) -> TensorScales:
    """Scales of channels that differ in size and lie off centre, with means."""
    random = torch.Generator().manual_seed(seed)
    shape = how.granularity.scale_shape(KV_HEADS, dim)
    ends = torch.randn((2, *shape), generator=random) * torch.rand(shape, generator=random) * 10
    scales = TensorScales.from_range(ends.amin(0), ends.amax(0), how)
    mean = torch.randn(KV_HEADS, dim, generator=random)
    return replace(
        scales,
        mean=mean,
        mean_unrotated=mean + 1,
        rotary=RotaryLayout(0, 2, False, "half"),
        turned=torch.tensor([seed % 2 == 0]),
    )


def random_scales(key: TensorScheme, value: TensorScheme | None = None, seed: int = 0) -> KVScales:
    value = value or key
    layers = {
        index: LayerScales(
            random_tensor(key, KEY_DIM, seed * 100 + index),
            random_tensor(value, VALUE_DIM, seed * 100 + index + 50),
        )
        for index in (0, 2)
    }
    return KVScales(GEOMETRY, QuantScheme(key, value), layers)


def slots(scales: KVScales) -> list[tuple[TensorScheme, TensorScales]]:
    """Every tensor of scales with its scheme."""
    how = scales.scheme
    return [
        pair
        for _, layer in sorted(scales.layers.items())
        for pair in ((how.key, layer.key), (how.value, layer.value))
    ]


def ends(pair: tuple[TensorScheme, TensorScales]) -> tuple[torch.Tensor, torch.Tensor]:
    how, scales = pair
    return scales.range(how)


def numbers(scales: KVScales) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    return [(slot.scale, slot.zero_point) for _, slot in slots(scales)]


def assert_same_numbers(one: KVScales, other: KVScales) -> None:
    for (scale, point), (other_scale, other_point) in zip(
        numbers(one), numbers(other), strict=True
    ):
        assert torch.equal(scale, other_scale)
        if point is None or other_point is None:
            assert point is other_point
        else:
            assert torch.equal(point, other_point)


# From a range to a scale


@pytest.mark.parametrize(
    ("name", "low", "high", "scale"),
    [
        ("fp8_e4m3", -1.0, 4.48, 0.01),
        ("fp8_e4m3", -448.0, 3.0, 1.0),
        ("fp8_e5m2", -57344.0, 57344.0, 1.0),
        ("int8", -127.0, 1.0, 1.0),
        ("int8", 0.0, 12.7, 0.1),
        ("int4", -0.1, 0.7, 0.1),
        ("int4", 3.5, 7.0, 1.0),
        ("int4", -7.0, -3.5, 1.0),
    ],
)
def test_symmetric_scales_are_amax_over_qmax(
    name: str, low: float, high: float, scale: float
) -> None:
    expected = torch.tensor(scale).item()
    assert made(low, high, scheme(name)) == (pytest.approx(expected, rel=6e-8), None)


@pytest.mark.parametrize(
    ("name", "low", "high", "scale", "zero_point"),
    [
        ("int8", 0.0, 255.0, 1.0, 0),
        ("int8", -255.0, 0.0, 1.0, 255),
        ("int8", -100.0, 155.0, 1.0, 100),
        ("int8", 10.0, 265.0, 1.0, -10),
        ("int8", -265.0, -10.0, 1.0, 265),
        ("int4", -1.0, 2.0, 0.2, 5),
        ("int4", -0.8, 0.7, 0.1, 8),
    ],
)
def test_asymmetric_scales_spread_the_range_over_all_codes(
    name: str, low: float, high: float, scale: float, zero_point: float
) -> None:
    expected = (pytest.approx(scale, rel=6e-8), zero_point)
    assert made(low, high, scheme(name, symmetric=False)) == expected


@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_a_channel_of_zeros_gets_the_range_of_the_smallest_normal_float16(
    how: TensorScheme,
) -> None:
    steps = how.format.qmax if how.symmetric else how.levels
    assert made(0.0, 0.0, how) == (
        pytest.approx(2.0**-14 / steps, rel=1e-7),
        None if how.symmetric else 0,
    )


@pytest.mark.parametrize("constant", [1.0, -1.0, 600.0, -3e-5])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_constant_channel_gets_a_narrow_range_and_a_zero_point_that_float32_holds(
    name: str, constant: float
) -> None:
    how = scheme(name, symmetric=False)
    scale, zero_point = made(constant, constant, how)
    steps = how.levels * 2**12
    assert scale == pytest.approx(abs(constant) / steps, rel=1e-7)
    assert zero_point == -steps * (1 if constant > 0 else -1)
    assert abs(zero_point) < 2**24
    assert -zero_point * scale == pytest.approx(constant, rel=1e-6)


@pytest.mark.parametrize("how", SCHEMES, ids=str)
@pytest.mark.parametrize("exponent", [-12, -20, -40, 12])
def test_scales_follow_the_weights_however_small(how: TensorScheme, exponent: int) -> None:
    """G13: a floor under scales swallows the calibration. v_proj × 2^-12 is the same model."""
    scale, zero_point = made(-0.3, 1.1, how)
    low, high = (torch.tensor(end).item() for end in (-0.3, 1.1))
    assert made(low * 2.0**exponent, high * 2.0**exponent, how) == (
        scale * 2.0**exponent,
        zero_point,
    )


@pytest.mark.parametrize("how", SCHEMES, ids=str)
@pytest.mark.parametrize("low", [1e-44, 1e-38, 3e38, -3e38])
def test_scales_are_normal_numbers_at_both_ends_of_float32(how: TensorScheme, low: float) -> None:
    for high in (low, 3e38):
        scale, zero_point = made(min(low, high), high, how)
        assert 2.0**-126 <= scale <= 3e38
        assert zero_point is None or abs(zero_point) <= 2**24


def test_float32_and_float64_ranges_give_the_same_scales() -> None:
    how = scheme("int8", symmetric=False)
    low, high = torch.tensor([[-0.1, 5.0]]), torch.tensor([[0.7, 5.0]])
    one = TensorScales.from_range(low, high, how)
    other = TensorScales.from_range(low.double(), high.double(), how)
    assert torch.equal(one.scale, other.scale)
    assert one.scale.dtype == torch.float32
    assert one.zero_point is not None
    assert other.zero_point is not None
    assert torch.equal(one.zero_point, other.zero_point)
    assert one.zero_point.dtype == torch.float32


@pytest.mark.parametrize("how", [s for s in SCHEMES if s.granularity.fineness == 0], ids=str)
@settings(max_examples=100, deadline=None)
@given(low=st.floats(-1e4, 1e4, width=32), width=st.floats(0, 1e4, width=32))
def test_the_way_back_through_the_range_is_exact(
    how: TensorScheme, low: float, width: float
) -> None:
    """Otherwise scales would creep each time they are reduced or shared."""
    ends = torch.tensor([[low]]), torch.tensor([[low]]) + width
    scales = TensorScales.from_range(*ends, how)
    again = TensorScales.from_range(*scales.range(how), how)
    assert torch.equal(scales.scale, again.scale)
    if scales.zero_point is not None and again.zero_point is not None:
        assert torch.equal(scales.zero_point, again.zero_point)


@pytest.mark.parametrize("how", [s for s in SCHEMES if s.granularity.fineness == 0], ids=str)
@settings(max_examples=100, deadline=None)
@given(low=st.floats(-1e4, 1e4, width=32), width=st.floats(0, 1e4, width=32))
def test_the_range_covers_what_it_was_made_for(how: TensorScheme, low: float, width: float) -> None:
    """A rounded zero point moves an asymmetric range by half a step at most."""
    wanted_low, wanted_high = torch.tensor([[low]]), torch.tensor([[low]]) + width
    scales = TensorScales.from_range(wanted_low, wanted_high, how)
    found_low, found_high = scales.range(how)
    slack = 0.0 if how.symmetric else scales.scale.double() * 0.5
    rounding = 1 + 2.0**-23
    assert bool(found_low <= wanted_low.double() + slack + wanted_low.abs() * (rounding - 1))
    assert bool(found_high >= wanted_high.double() - slack - wanted_high.abs() * (rounding - 1))


# What cannot be built


def one_layer(key: TensorScales, how: TensorScheme) -> KVScales:
    geometry = CacheGeometry("llama", (FULL,), 512)
    value = TensorScales(torch.ones(1, 1))
    return KVScales(
        geometry, QuantScheme(how, scheme("fp8", "tensor")), {0: LayerScales(key, value)}
    )


@pytest.mark.parametrize(
    "shape", [(), (1,), (1, 1), (KV_HEADS, 1), (KEY_DIM, KV_HEADS), (KV_HEADS, VALUE_DIM)]
)
def test_a_scale_has_the_shape_of_its_granularity(shape: tuple[int, ...]) -> None:
    with pytest.raises(SchemeError, match=r"layer 0, keys: per-channel scales .*\[2, 4\]"):
        one_layer(TensorScales(torch.ones(shape)), scheme("int8"))


@pytest.mark.parametrize("bad", [0.0, -0.5, float("nan"), float("inf"), -float("inf")])
def test_a_scale_is_finite_and_positive(bad: float) -> None:
    scale = torch.ones(KV_HEADS, KEY_DIM)
    scale[1, 2] = bad
    with pytest.raises(SchemeError, match=rf"layer 0, keys.*found {bad:g}"):
        one_layer(TensorScales(scale), scheme("int8"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_a_scale_is_float32(dtype: torch.dtype) -> None:
    """G15: in bfloat16 it would be off by up to 0.4 %."""
    scale = torch.ones(KV_HEADS, KEY_DIM, dtype=dtype)
    with pytest.raises(SchemeError, match=str(dtype).removeprefix("torch.")):
        one_layer(TensorScales(scale), scheme("int8"))


def test_zero_points_go_with_asymmetric_schemes_only() -> None:
    scale, point = torch.ones(KV_HEADS, KEY_DIM), torch.zeros(KV_HEADS, KEY_DIM)
    with pytest.raises(SchemeError, match="only with them"):
        one_layer(TensorScales(scale, point), scheme("int8"))
    with pytest.raises(SchemeError, match="only with them"):
        one_layer(TensorScales(scale), scheme("int8", symmetric=False))


@pytest.mark.parametrize(
    ("point", "complaint"),
    [
        (torch.zeros(1, 1), "shape|float32"),
        (torch.full((KV_HEADS, KEY_DIM), 0.5), "whole numbers"),
        (torch.full((KV_HEADS, KEY_DIM), float("nan")), "finite"),
        (torch.zeros(KV_HEADS, KEY_DIM, dtype=torch.int32), "float32"),
    ],
)
def test_zero_points_are_whole_numbers_of_the_scales_shape(
    point: torch.Tensor, complaint: str
) -> None:
    scales = TensorScales(torch.ones(KV_HEADS, KEY_DIM), point)
    with pytest.raises(SchemeError, match=complaint):
        one_layer(scales, scheme("int8", symmetric=False))


@pytest.mark.parametrize("name", ["mean", "mean_unrotated"])
@pytest.mark.parametrize(
    "mean", [torch.zeros(KV_HEADS, 1), torch.full((KV_HEADS, KEY_DIM), float("nan"))]
)
def test_means_are_finite_and_per_channel(name: str, mean: torch.Tensor) -> None:
    scales = TensorScales(torch.ones(1, 1), **{name: mean})  # type: ignore[arg-type]
    with pytest.raises(SchemeError, match="means"):
        one_layer(scales, scheme("int8", "tensor"))


def test_every_quantized_layer_has_scales_and_no_other() -> None:
    whole = random_scales(scheme("int8"))
    layer = whole.layers[0]
    with pytest.raises(NotObservedError, match=r"missing \[2\], unexpected \[\]"):
        replace(whole, layers={0: layer})
    with pytest.raises(NotObservedError, match=r"missing \[\], unexpected \[1\]"):
        replace(whole, layers={**whole.layers, 1: layer})
    with pytest.raises(NotObservedError, match=r"missing \[\], unexpected \[0\]"):
        replace(whole, scheme=replace(whole.scheme, skip_layers=frozenset({0})))
    skipped = replace(whole.scheme, skip_layers=frozenset({0}))
    assert replace(whole, scheme=skipped, layers={2: layer}).layers.keys() == {2}


@pytest.mark.parametrize("name", ["scale", "zero_point", "mean", "mean_unrotated", "turned"])
def test_scales_are_equal_only_bit_for_bit(name: str) -> None:
    how = scheme("int8", symmetric=False)
    one = random_tensor(how, KEY_DIM, seed=0)
    assert one == random_tensor(how, KEY_DIM, seed=0)
    changed = getattr(one, name).clone()
    changed.view(-1)[-1] = 0 if changed.dtype == torch.bool else changed.view(-1)[-1] + 1
    assert one != replace(one, **{name: changed})
    assert one != replace(one, **{name: None})
    assert one != replace(one, rotary=RotaryLayout(0, 4, False, "half"))
    assert one != "something else"


LAYOUT = RotaryLayout(0, KEY_DIM, False, "half")


@pytest.mark.parametrize(
    ("turned", "found"),
    [
        (torch.ones(KEY_DIM, dtype=torch.bool), r"bool \[4\]"),
        (torch.ones(1, dtype=torch.bool), r"bool \[1\]"),
        (torch.ones(1, 2, dtype=torch.bool), r"bool \[1, 2\]"),
        (torch.tensor(True), r"bool \[\]"),
        (torch.ones(2, dtype=torch.uint8), r"uint8 \[2\]"),
        (torch.ones(2), r"float32 \[2\]"),
    ],
    ids=str,
)
def test_turned_pairs_are_those_of_the_rotary_layout(turned: torch.Tensor, found: str) -> None:
    scales = TensorScales(torch.ones(1, 1), rotary=LAYOUT, turned=turned)
    with pytest.raises(SchemeError, match=rf"keys: turned pairs must be bool \[2\], not {found}$"):
        one_layer(scales, scheme("int8", "tensor"))


def test_turned_pairs_need_a_rotary_layout() -> None:
    scales = TensorScales(torch.ones(1, 1), turned=torch.ones(2, dtype=torch.bool))
    with pytest.raises(SchemeError, match="turned pairs go with a rotary layout"):
        one_layer(scales, scheme("int8", "tensor"))


def test_scales_that_do_not_say_turn_every_pair() -> None:
    mean = torch.zeros(KV_HEADS, KEY_DIM)
    one = torch.ones(1, 1)
    unrotated = TensorScales(one, mean=mean)
    unsaid = replace(unrotated, mean_unrotated=mean, rotary=LAYOUT)
    assert unrotated.turned_pairs is None
    assert unsaid.turned_pairs is not None
    assert unsaid.turned_pairs.tolist() == [True, True]
    mask = torch.tensor([False, True])
    assert replace(unsaid, turned=mask).turned_pairs is mask
    one_layer(replace(unsaid, turned=mask), scheme("int8", "tensor"))


# What calibration finds no scales for


@pytest.mark.parametrize(
    ("dynamic", "words"),
    [
        (scheme("int8", "token"), "int8 per-token take no calibrated scales: those are per-tensor"),
        (
            scheme("int4", "group", group_size=64),
            "int4 per-channel in groups of 64 tokens take no calibrated scales",
        ),
        (scheme("none", "token"), "none take no calibrated scales"),
    ],
    ids=str,
)
def test_schemes_with_dynamic_scales_are_refused(dynamic: TensorScheme, words: str) -> None:
    whole = random_scales(scheme("int8"))
    for slot, name in (("key", "keys"), ("value", "values")):
        with pytest.raises(SchemeError, match=f"^{name} as {words}"):
            replace(whole, scheme=replace(whole.scheme, **{slot: dynamic}))


def test_layers_with_a_scheme_of_their_own_are_refused() -> None:
    whole = random_scales(scheme("int8"))
    own = replace(whole.scheme, layers=((0, whole.scheme),))
    with pytest.raises(SchemeError, match="layers can only be skipped"):
        replace(whole, scheme=own)


# Reducing to a coarser granularity


@pytest.mark.parametrize("how", SCHEMES, ids=str)
@pytest.mark.parametrize("granularity", list(Granularity), ids=str)
def test_reducing_refuses_to_refine(how: TensorScheme, granularity: Granularity) -> None:
    whole = random_scales(how)
    if granularity.fineness <= how.granularity.fineness:
        assert whole.reduce(granularity).scheme.key.granularity is granularity
    else:
        with pytest.raises(SchemeError, match=f"{how.granularity.value}.*{granularity.value}"):
            whole.reduce(granularity)


def test_reducing_says_which_of_the_two_is_too_coarse() -> None:
    mixed = random_scales(scheme("fp8"), scheme("fp8", "tensor"))
    with pytest.raises(SchemeError, match="values are calibrated per-tensor"):
        mixed.reduce(Granularity.PER_HEAD)
    assert mixed.reduce(Granularity.PER_TENSOR).scheme.key == scheme("fp8", "tensor")


@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_reducing_to_what_there_is_changes_nothing(how: TensorScheme) -> None:
    whole = random_scales(how)
    assert whole.reduce(how.granularity) == whole


@pytest.mark.parametrize("name", format_names())
def test_symmetric_scales_reduce_to_their_maximum_bit_for_bit(name: str) -> None:
    whole = random_scales(scheme(name))
    per_head, per_tensor = (
        slots(whole.reduce(granularity))
        for granularity in (Granularity.PER_HEAD, Granularity.PER_TENSOR)
    )
    for (_, fine), (_, head), (_, tensor) in zip(slots(whole), per_head, per_tensor, strict=True):
        assert torch.equal(head.scale, fine.scale.amax(1, keepdim=True))
        assert torch.equal(tensor.scale, fine.scale.amax().view(1, 1))


@pytest.mark.parametrize("how", [s for s in SCHEMES if s.granularity.fineness == 2], ids=str)
def test_reducing_in_steps_gives_the_same_as_at_once(how: TensorScheme) -> None:
    whole = random_scales(how)
    stepwise = whole.reduce(Granularity.PER_HEAD).reduce(Granularity.PER_TENSOR)
    for (_, at_once), (_, in_steps) in zip(
        slots(whole.reduce(Granularity.PER_TENSOR)), slots(stepwise), strict=True
    ):
        # Asymmetric ranges move by half a step each time their zero point is rounded.
        tolerance = 0.0 if how.symmetric else 1 / how.levels
        torch.testing.assert_close(in_steps.scale, at_once.scale, rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("granularity", [Granularity.PER_HEAD, Granularity.PER_TENSOR], ids=str)
@pytest.mark.parametrize("how", [s for s in SCHEMES if s.granularity.fineness == 2], ids=str)
def test_reduced_scales_cover_every_channel(
    how: TensorScheme, granularity: Granularity, seed: int
) -> None:
    """G21: reducing never lowers a scale below any channel's need."""
    whole = random_scales(how, seed=seed)
    coarse = whole.reduce(granularity)
    for fine, reduced in zip(slots(whole), slots(coarse), strict=True):
        (low, high), (reduced_low, reduced_high) = ends(fine), ends(reduced)
        slack = 0.0 if how.symmetric else reduced[1].scale.double() / 2
        assert bool((reduced_low <= low + slack).all())
        assert bool((reduced_high >= high - slack).all())
        assert bool((reduced[1].scale >= fine[1].scale).all())


def test_reducing_keeps_everything_else() -> None:
    whole = replace(
        random_scales(scheme("int8")), method="mse", provenance=Provenance(model="m", tokens=7)
    )
    coarse = whole.reduce(Granularity.PER_TENSOR)
    assert (coarse.method, coarse.provenance, coarse.geometry) == (
        "mse",
        whole.provenance,
        GEOMETRY,
    )
    assert coarse.layers.keys() == whole.layers.keys()
    for (_, fine), (_, reduced) in zip(slots(whole), slots(coarse), strict=True):
        assert fine.mean is reduced.mean
        assert fine.mean_unrotated is reduced.mean_unrotated
        assert fine.rotary is reduced.rotary
        assert fine.turned is reduced.turned
    assert whole.scheme.key.granularity is Granularity.PER_CHANNEL


# Sharing one set between several models


@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_shared_scales_are_safe_for_both(how: TensorScheme) -> None:
    one, other = random_scales(how, seed=1), random_scales(how, seed=2)
    shared = one.union(other)
    for mine, theirs, both in zip(slots(one), slots(other), slots(shared), strict=True):
        low, high = ends(both)
        slack = 0.0 if how.symmetric else both[1].scale.double() / 2
        for single in (mine, theirs):
            assert bool((low <= ends(single)[0] + slack).all())
            assert bool((high >= ends(single)[1] - slack).all())
    assert_same_numbers(shared, other.union(one))


def test_shared_scales_have_the_means_of_the_first() -> None:
    one, other = random_scales(scheme("int8"), seed=0), random_scales(scheme("int8"), seed=1)
    shared = one.union(other)
    for (_, mine), (_, theirs), (_, both) in zip(*map(slots, (one, other, shared)), strict=True):
        assert mine != theirs
        for name in ("mean", "mean_unrotated", "rotary", "turned"):
            assert getattr(both, name) is getattr(mine, name)


@pytest.mark.parametrize("name", format_names())
def test_shared_symmetric_scales_are_the_element_wise_maximum(name: str) -> None:
    parts = [random_scales(scheme(name), seed=seed) for seed in range(3)]
    shared = parts[0].union(parts[1]).union(parts[2])
    assert_same_numbers(shared, parts[2].union(parts[0]).union(parts[1]))
    for *singles, (_, both) in zip(*map(slots, parts), slots(shared), strict=True):
        assert torch.equal(both.scale, torch.stack([s.scale for _, s in singles]).amax(0))


@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_sharing_with_oneself_changes_nothing(how: TensorScheme) -> None:
    whole = random_scales(how)
    assert whole.union(whole) == whole


def test_constant_channels_do_not_creep_when_shared_again_and_again() -> None:
    how = scheme("int8", symmetric=False)
    constant = torch.tensor([[3.3, -3.3, 0.0, 600.0], [1e-3, -700.0, 12.0, 0.1]])
    key = TensorScales.from_range(constant, constant, how)
    geometry = CacheGeometry("llama", (LayerGeometry(LayerKind.FULL, 2, 4, 4),), None)
    whole = KVScales(geometry, QuantScheme(how, how), {0: LayerScales(key, key)})
    shared = whole
    for _ in range(5):
        shared = shared.union(whole)
    assert_same_numbers(whole, shared)


def test_sharing_needs_one_scheme_and_one_geometry() -> None:
    whole = random_scales(scheme("int8"))
    with pytest.raises(SchemeError, match=r"int8 per-channel.*int4 per-channel"):
        whole.union(random_scales(scheme("int4")))
    wider = replace(whole, geometry=replace(GEOMETRY, max_positions=1024))
    with pytest.raises(FingerprintError, match=r"512 positions; and .* 1,024 positions"):
        whole.union(wider)


def test_shared_scales_say_what_they_hold_for() -> None:
    base, tuned = Fingerprint("base"), Fingerprint("base", ("adapter",))
    one = replace(
        random_scales(scheme("fp8")),
        provenance=Provenance(fingerprints=(base,), tokens=100, longest_position=64),
    )
    other = replace(
        random_scales(scheme("fp8"), seed=1),
        method="mse",
        provenance=Provenance(
            fingerprints=(tuned,), adapters=("a",), tokens=90, longest_position=32, notes=("n",)
        ),
    )
    shared = one.union(other)
    assert shared.method == "amax | mse"
    assert shared.provenance == Provenance(
        fingerprints=(base, tuned), adapters=("a",), tokens=90, longest_position=32, notes=("n",)
    )
    for model in (base, tuned):
        shared.check_model(model, GEOMETRY)


# Whose scales they are

BASE = Fingerprint("b" * 64, (), "tokenizer", "template")
TUNED = Fingerprint("b" * 64, ("a" * 64,), "tokenizer", "template")
OTHER = Fingerprint("c" * 64)


def owned(*owners: Fingerprint) -> KVScales:
    return replace(random_scales(scheme("fp8")), provenance=Provenance(fingerprints=owners))


def test_scales_fit_the_model_they_were_measured_on() -> None:
    owned(TUNED).check_model(TUNED, GEOMETRY)
    owned(OTHER, TUNED).check_model(TUNED, GEOMETRY)


def test_another_template_or_tokenizer_is_no_other_model() -> None:
    served = replace(TUNED, tokenizer="other", chat_template="")
    owned(TUNED).check_model(served, GEOMETRY)


@pytest.mark.parametrize(
    ("owners", "model", "differ"),
    [
        ((BASE,), OTHER, "weights differ"),
        ((BASE,), TUNED, "adapters differ"),
        ((TUNED,), BASE, "adapters differ"),
        ((TUNED,), OTHER, "weights and adapters differ"),
        ((OTHER, TUNED), BASE, "weights differ"),
        ((TUNED, OTHER), BASE, "adapters differ"),
        ((), BASE, "weights differ"),
    ],
)
def test_another_model_is_refused_with_both_fingerprints(
    owners: tuple[Fingerprint, ...], model: Fingerprint, differ: str
) -> None:
    with pytest.raises(FingerprintError) as caught:
        owned(*owners).check_model(model, GEOMETRY)
    message = str(caught.value)
    assert all(str(owner) in message for owner in owners)
    assert f"the model is {model}: {differ}" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (replace(GEOMETRY, layers=GEOMETRY.layers[:2]), "3 layers in the scales, 2 in the model"),
        (
            replace(GEOMETRY, layers=(*GEOMETRY.layers[:2], replace(FULL, kv_heads=4))),
            "layer 2: kv_heads 2 in the scales, 4 in the model",
        ),
        (
            replace(GEOMETRY, layers=(replace(FULL, kind=LayerKind.SLIDING), *GEOMETRY.layers[1:])),
            "layer 0: kind full in the scales, sliding in the model",
        ),
        (
            replace(GEOMETRY, layers=(replace(FULL, window=8), *GEOMETRY.layers[1:])),
            "layer 0: window None in the scales, 8 in the model",
        ),
        (
            replace(GEOMETRY, max_positions=1024),
            "max_positions 512 in the scales, 1024 in the model",
        ),
        (
            replace(GEOMETRY, model_type="qwen2"),
            "model_type llama in the scales, qwen2 in the model",
        ),
    ],
)
def test_another_geometry_is_refused_with_what_differs(
    other: CacheGeometry, difference: str
) -> None:
    with pytest.raises(FingerprintError) as caught:
        owned(BASE).check_model(BASE, other)
    assert str(caught.value) == (
        f"the scales belong to this model ({BASE}), but not to its config: {difference}; calibrate "
        "it with the config that it is served with"
    )
    with pytest.raises(FingerprintError) as caught:
        owned(BASE).check_model(OTHER, other)
    assert str(caught.value) == (
        f"the scales belong to {BASE}, the model is {OTHER}: {difference}; calibrate this model"
    )
    with pytest.raises(FingerprintError) as caught:
        owned(BASE).check_model(Fingerprint(), other)  # weights that nobody has read
    assert str(caught.value) == (f"the scales belong to {BASE}: {difference}; calibrate this model")


def test_only_the_shape_counts_where_scales_are_forced() -> None:
    scales = owned(BASE)
    scales.check_shape(replace(GEOMETRY, max_positions=1024, model_type="qwen2"))
    with pytest.raises(FingerprintError, match=r"another cache cannot be forced: llama cache: .*"):
        scales.check_shape(replace(GEOMETRY, layers=GEOMETRY.layers[:2]))


def test_shown_in_one_line() -> None:
    text = repr(random_scales(scheme("int8")))
    assert len(text) < 300
    assert "int8 per-channel" in text
