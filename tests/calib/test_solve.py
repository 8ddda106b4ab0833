"""Scales: literal numbers for every format, and quantizing real samples beside every claim."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from calib.method import Method, RangeMethod
from calib.solve import solve, solve_tensor
from calib.stats import CalibrationStats, ChannelStats, LayerStats
from kvquant.errors import InputError, NotObservedError, SchemeError
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.quantize.reference import dequantize, quantize
from kvquant.rotary import RotaryLayout
from kvquant.scales import TensorScales
from kvquant.scheme import EXACT, Granularity, QuantScheme, TensorScheme, tensor_format

FORMATS = ["fp8_e4m3", "fp8_e5m2", "int8", "int4"]
QMAX = {"fp8_e4m3": 448, "fp8_e5m2": 57344, "int8": 127, "int4": 7}
AMAX, MSE = RangeMethod(), RangeMethod(Method.MSE)


def scheme(name: str, granularity: str = "per-channel", symmetric: bool = True) -> TensorScheme:
    return TensorScheme(tensor_format(name), Granularity.parse(granularity), symmetric)


SCHEMES = [
    scheme(name, granularity, symmetric)
    for name in FORMATS
    for granularity in ("tensor", "head", "channel")
    for symmetric in (True, False)
    if symmetric or name.startswith("int")
]


def stats_of(states: torch.Tensor) -> ChannelStats:
    """Statistics of `states` ``[tokens, kv_heads, dim]``."""
    stats = ChannelStats.empty(*states.shape[1:])
    stats.update(states)
    return stats


def round_trip(states: torch.Tensor, scales: TensorScales, how: TensorScheme) -> torch.Tensor:
    """`states` ``[tokens, kv_heads, dim]`` quantized and back."""
    batched = states.transpose(0, 1)[None]
    return dequantize(quantize(batched, scales, how), scales)[0].transpose(0, 1)


def squared_error(states: torch.Tensor, scales: TensorScales, how: TensorScheme) -> float:
    error = round_trip(states, scales, how).double() - states.double()
    return float(error.square().sum())


def sampled(kind: str, tokens: int = 4000) -> torch.Tensor:
    """``[tokens, 2, 3]`` whose channels differ in size."""
    torch.manual_seed(0)
    size = torch.tensor([[0.1, 1.0, 10.0], [2.0, 2.0, 2.0]])
    draw: dict[str, Callable[[], torch.Tensor]] = {
        "normal": lambda: torch.randn(tokens, 2, 3),
        "shifted": lambda: torch.randn(tokens, 2, 3) + 3,
        "uniform": lambda: torch.rand(tokens, 2, 3),
        "heavy": lambda: torch.distributions.StudentT(2.5).sample((tokens, 2, 3)),
    }
    return draw[kind]() * size


def model_stats(
    layers: dict[int, LayerStats], kinds: list[LayerKind], dims: tuple[int, int, int] = (2, 3, 4)
) -> CalibrationStats:
    kv_heads, key_dim, value_dim = dims
    geometry = CacheGeometry(
        "llama",
        tuple(
            LayerGeometry(kind, kv_heads, key_dim, value_dim)
            if kind is LayerKind.FULL
            else LayerGeometry(kind)
            for kind in kinds
        ),
        512,
    )
    return CalibrationStats(geometry, layers)


def any_layer(seed: int = 0) -> LayerStats:
    torch.manual_seed(seed)
    return LayerStats(stats_of(torch.randn(20, 2, 3)), stats_of(torch.randn(20, 2, 4)))


# Scales of known extremes


@pytest.mark.parametrize("name", FORMATS)
def test_scale_is_amax_by_the_largest_code(name: str) -> None:
    states = torch.tensor([0.5, -4.48, 3.0])[:, None, None]
    scale = solve_tensor(stats_of(states), scheme(name), AMAX).scale
    assert scale.dtype == torch.float32
    assert torch.equal(scale, states.abs().amax()[None, None] / QMAX[name])
    if name == "fp8_e4m3":
        assert scale.item() == pytest.approx(0.01, rel=1e-7)


@pytest.mark.parametrize(
    ("low", "high", "name", "expected_scale", "expected_zero"),
    [
        (0.0, 255.0, "int8", 1.0, 0),
        (-255.0, 0.0, "int8", 1.0, 255),
        (-100.0, 155.0, "int8", 1.0, 100),
        (-0.25, 0.125, "int4", 0.025, 10),
        (10.0, 25.0, "int4", 1.0, -10),
        (-25.0, -10.0, "int4", 1.0, 25),
        (100.0, 355.0, "int8", 1.0, -100),
    ],
)
def test_asymmetric_scale_and_zero_point(
    low: float, high: float, name: str, expected_scale: float, expected_zero: int
) -> None:
    how = scheme(name, symmetric=False)
    states = torch.tensor([low, high])[:, None, None]
    scales = solve_tensor(stats_of(states), how, AMAX)
    assert scales.zero_point is not None
    assert scales.scale.item() == pytest.approx(expected_scale, rel=1e-6)
    assert scales.zero_point.item() == expected_zero
    codes = quantize(states.transpose(0, 1)[None], scales, how).flatten().tolist()
    assert codes == [0, int(how.levels)]
    assert (round_trip(states, scales, how) - states).abs().amax() <= scales.scale.amax() / 2


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_granularity_decides_the_shape_and_what_shares_a_scale(
    how: TensorScheme, method: Method
) -> None:
    states = sampled("normal", tokens=300)
    scales = solve_tensor(stats_of(states), how, RangeMethod(method))
    shape = {"per-tensor": (1, 1), "per-head": (2, 1), "per-channel": (2, 3)}
    assert tuple(scales.scale.shape) == shape[how.granularity.value]
    assert (scales.zero_point is None) == how.symmetric
    if method is Method.AMAX and how.symmetric:
        axes = {"per-tensor": (0, 1, 2), "per-head": (0, 2), "per-channel": (0,)}
        amax = states.abs().amax(axes[how.granularity.value])
        assert torch.equal(scales.scale.flatten(), (amax / how.format.qmax).flatten())


@pytest.mark.parametrize("how", SCHEMES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "shifted", "uniform", "heavy"])
def test_everything_seen_comes_back_within_half_a_step(kind: str, how: TensorScheme) -> None:
    states = sampled(kind)
    scales = solve_tensor(stats_of(states), how, AMAX)
    error = (round_trip(states, scales, how) - states).abs()
    if how.format.is_float:
        bound = states.abs() * 2.0 ** (-4 if how.format.name == "fp8_e4m3" else -3)
        bound = torch.maximum(bound, scales.scale * 2.0**-9)
    else:
        # A zero point is a whole number: it moves the two ends by up to half a step.
        bound = scales.scale * (0.5 if how.symmetric else 1.0)
    assert bool((error <= bound * (1 + 1e-5)).all())


def test_means_and_rotation_travel_with_the_scales() -> None:
    layout = RotaryLayout(0, 2, False, "half")
    stats = stats_of(sampled("shifted"))
    stats.rotary, stats.total_unrotated = layout, stats.total * 2
    scales = solve_tensor(stats, scheme("int8"), AMAX)
    assert scales.mean is not None
    assert torch.equal(scales.mean, stats.mean.float())
    assert scales.mean_unrotated is not None
    assert torch.equal(scales.mean_unrotated, (stats.mean * 2).float())
    assert scales.rotary == layout
    assert scales.turned is not None
    assert scales.turned.tolist() == [True], "its mean is twice as large before rotation"
    plain = solve_tensor(stats_of(sampled("normal")), scheme("int8"), AMAX)
    assert plain.mean_unrotated is None
    assert plain.rotary is None
    assert plain.turned is None


@pytest.mark.parametrize("slot", ["key", "value"])
@pytest.mark.parametrize(
    "dynamic",
    [
        TensorScheme(tensor_format("int8"), Granularity.PER_TOKEN),
        TensorScheme(tensor_format("int3"), Granularity.PER_TOKEN, center=True, rotate=True),
        TensorScheme(tensor_format("int4"), Granularity.PER_GROUP, group_size=32),
        TensorScheme(tensor_format("bf16"), Granularity.PER_TOKEN),
        EXACT,
    ],
    ids=str,
)
def test_schemes_without_calibrated_scales_are_refused(slot: str, dynamic: TensorScheme) -> None:
    static = scheme("int8")
    both = QuantScheme(**{"key": static, "value": static, slot: dynamic})
    with pytest.raises(SchemeError, match="no calibrated scales"):
        solve(model_stats({0: any_layer()}, [LayerKind.FULL]), both)


# Channels without much to say


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_all_zero_channels_get_a_usable_scale_and_give_zeros_back(
    how: TensorScheme, method: Method
) -> None:
    states = sampled("normal", tokens=300)
    states[:, 0, 1] = 0
    scales = solve_tensor(stats_of(states), how, RangeMethod(method))
    assert bool(((scales.scale > 0) & torch.isfinite(scales.scale)).all())
    back = round_trip(states, scales, how)
    assert bool(torch.isfinite(back).all())
    assert bool((back[:, 0, 1] == 0).all())


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_a_layer_of_zeros_is_safe(how: TensorScheme, method: Method) -> None:
    states = torch.zeros(10, 2, 3)
    scales = solve_tensor(stats_of(states), how, RangeMethod(method))
    assert bool(((scales.scale > 0) & torch.isfinite(scales.scale)).all())
    assert torch.equal(round_trip(states, scales, how), states)


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("constant", [0.3, -7.7, 1e-3, 400.0])
@pytest.mark.parametrize("how", [s for s in SCHEMES if s.granularity.fineness == 2], ids=str)
def test_constant_channels_round_trip_within_half_a_scale(
    how: TensorScheme, constant: float, method: Method
) -> None:
    states = torch.full((50, 2, 3), constant)
    scales = solve_tensor(stats_of(states), how, RangeMethod(method))
    error = (round_trip(states, scales, how) - states).abs()
    assert bool((error <= scales.scale / 2 * (1 + 1e-4)).all())


@pytest.mark.parametrize("how", [scheme(name) for name in FORMATS], ids=str)
def test_small_channels_keep_their_resolution(how: TensorScheme) -> None:
    """A v_proj scaled by 2^-12 (and o_proj by 2^12) is the same model: G13's swallowing floor."""
    states = sampled("normal")
    large = solve_tensor(stats_of(states), how, AMAX).scale
    small = solve_tensor(stats_of(states * 2.0**-14), how, AMAX).scale
    assert torch.equal(small, large * 2.0**-14)


# Values beyond what calibration saw


@pytest.mark.parametrize("how", SCHEMES, ids=str)
def test_three_times_the_range_saturates_at_its_end(how: TensorScheme) -> None:
    states = torch.tensor([1.0, -1.0, 0.5])[:, None, None]
    scales = solve_tensor(stats_of(states), how, AMAX)
    back = round_trip(torch.tensor([3.0, -3.0, 1e30])[:, None, None], scales, how).flatten()
    low, high = (end.item() for end in scales.range(how))
    assert back.tolist() == pytest.approx([high, low, high], rel=1e-6)
    if how.symmetric:
        assert high == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_code_below_the_smallest_does_not_wrap_around(name: str) -> None:
    for symmetric in (True, False):
        how = scheme(name, symmetric=symmetric)
        one = TensorScales(torch.ones(1, 1), None if symmetric else torch.zeros(1, 1))
        ends = how.format.qmin if symmetric else 0, how.format.qmax if symmetric else how.levels
        beyond = torch.tensor([ends[0] - 2, ends[0] - 1, ends[1] + 1, ends[1] + 2])
        codes = quantize(beyond.view(1, 1, 4, 1), one, how).flatten().float().tolist()
        assert codes == [ends[0], ends[0], ends[1], ends[1]]


# Choosing the range


@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.9])
@pytest.mark.parametrize("granularity", ["tensor", "head", "channel"])
@pytest.mark.parametrize("kind", ["normal", "shifted", "heavy"])
def test_percentile_covers_its_share(kind: str, granularity: str, percentile: float) -> None:
    states = sampled(kind, tokens=50_000)
    for symmetric in (True, False):
        how = scheme("int8", granularity, symmetric)
        method = RangeMethod(Method.PERCENTILE, percentile)
        low, high = solve_tensor(stats_of(states), how, method).range(how)
        covered = ((states >= low) & (states <= high)).double()
        axes = {"tensor": (0, 1, 2), "head": (0, 2), "channel": (0,)}[granularity]
        missing = 1 - covered.mean(axes)
        wanted = 1 - percentile / 100
        assert bool((missing <= wanted * 1.3).all()), missing
        if symmetric:  # a rounded zero point may add half a step, where many values can lie
            assert bool((missing >= wanted * 0.7).all()), missing


def test_percentile_100_is_amax() -> None:
    states = sampled("heavy")
    for how in SCHEMES:
        full = solve_tensor(stats_of(states), how, RangeMethod(Method.PERCENTILE, 100.0))
        assert torch.equal(full.scale, solve_tensor(stats_of(states), how, AMAX).scale)


def test_percentile_of_what_lies_in_the_zero_bin_covers_it() -> None:
    """Values a thousandth of the outlier share one bin; the range must not end short of them."""
    torch.manual_seed(0)
    states = (torch.rand(20_000, 1, 1) - 0.5) * 2
    states[0] = 1100.0
    how = scheme("int8")
    clip = solve_tensor(stats_of(states), how, RangeMethod(Method.PERCENTILE, 60.0)).range(how)[1]
    assert (states.abs() <= clip).double().mean().item() >= 0.6


@pytest.mark.parametrize("how", SCHEMES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "shifted", "uniform", "heavy"])
def test_mse_is_never_worse_than_amax(kind: str, how: TensorScheme) -> None:
    states = sampled(kind)
    stats = stats_of(states)
    full = squared_error(states, solve_tensor(stats, how, AMAX), how)
    clipped = squared_error(states, solve_tensor(stats, how, MSE), how)
    assert clipped <= full * 1.05


@pytest.mark.parametrize("name", ["normal", "heavy"])
def test_mse_of_int4_beats_amax_on_bell_shaped_values(name: str) -> None:
    states = sampled(name)
    for symmetric in (True, False):
        how = scheme("int4", symmetric=symmetric)
        stats = stats_of(states)
        full = squared_error(states, solve_tensor(stats, how, AMAX), how)
        assert squared_error(states, solve_tensor(stats, how, MSE), how) < full * 0.8


def least_error(states: torch.Tensor, how: TensorScheme) -> float:
    """Least squared error over a grid of ranges, each tried on the samples themselves."""
    middle = 0.0 if how.symmetric else states.median().item()
    factors = torch.exp2(-torch.arange(0, 9, 0.5, dtype=torch.float64)).tolist()
    low, high = states.min().item() - middle, states.max().item() - middle
    if how.symmetric:
        ranges = [(-max(-low, high) * f, max(-low, high) * f) for f in factors]
    else:
        ranges = [(middle + low * f, middle + high * g) for f in factors for g in factors]
    tried = (
        TensorScales.from_range(torch.tensor([[start]]), torch.tensor([[end]]), how)
        for start, end in ranges
    )
    return min(squared_error(states, scales, how) for scales in tried)


@pytest.mark.parametrize("outlier", [30.0, -30.0])
@pytest.mark.parametrize("bulk", [-0.5, 0.0, 5.0])
@pytest.mark.parametrize("symmetric", [True, False])
def test_mse_lets_one_huge_outlier_go(bulk: float, outlier: float, symmetric: bool) -> None:
    torch.manual_seed(0)
    states = torch.rand(100_000, 1, 1) + bulk
    states[7] = outlier
    how = scheme("int4", symmetric=symmetric)
    stats = stats_of(states)
    found = solve_tensor(stats, how, MSE)
    assert squared_error(states, found, how) <= least_error(states, how) * 1.1
    states[7] = bulk
    full = squared_error(states, solve_tensor(stats, how, AMAX), how)
    assert squared_error(states, found, how) < full / 10


@pytest.mark.parametrize("percentile", [50.0, 0.0, -1.0, 100.1, float("nan")])
def test_percentiles_that_make_no_sense_are_refused(percentile: float) -> None:
    with pytest.raises(SchemeError, match="percentile"):
        RangeMethod(Method.PERCENTILE, percentile)


# Whole models


def test_layers_without_keys_and_values_need_no_scales() -> None:
    kinds = [LayerKind.LINEAR, LayerKind.FULL, LayerKind.SHARED, LayerKind.FULL]
    stats = model_stats({1: any_layer(), 3: any_layer(1)}, kinds)
    both = QuantScheme(scheme("int8"), scheme("fp8_e4m3", "tensor"))
    scales = solve(stats, both)
    assert list(scales.layers) == [1, 3]
    assert tuple(scales.layers[1].key.scale.shape) == (2, 3)
    assert tuple(scales.layers[1].value.scale.shape) == (1, 1)
    assert scales.method == "amax"
    assert solve(stats, both, RangeMethod(Method.PERCENTILE, 99.5)).method == "percentile 99.5"


def test_layer_that_was_never_observed_is_named() -> None:
    stats = model_stats({0: any_layer(), 2: any_layer()}, [LayerKind.FULL] * 4)
    both = QuantScheme(scheme("int8"), scheme("int8"))
    with pytest.raises(NotObservedError, match=r"\[1, 3\]"):
        solve(stats, both)
    empty = LayerStats(ChannelStats.empty(2, 3), ChannelStats.empty(2, 4))
    stats = model_stats({0: any_layer(), 1: empty}, [LayerKind.FULL] * 2)
    with pytest.raises(NotObservedError, match="layer 1, keys"):
        solve(stats, both)
    with pytest.raises(NotObservedError):
        solve(model_stats({}, [LayerKind.FULL]), both)


def test_skipped_layers_may_be_unobserved_and_get_no_scales() -> None:
    kinds = [LayerKind.FULL] * 3
    skipping = QuantScheme(scheme("int8"), scheme("int8"), frozenset({1}))
    for layers in ({0: any_layer(), 2: any_layer()}, {i: any_layer() for i in range(3)}):
        assert list(solve(model_stats(layers, kinds), skipping).layers) == [0, 2]
    with pytest.raises(SchemeError, match=r"layer 5.*0 to 2"):
        both = QuantScheme(scheme("int8"), scheme("int8"), frozenset({5}))
        solve(model_stats({i: any_layer() for i in range(3)}, kinds), both)


def test_values_that_are_not_finite_are_refused_with_their_place() -> None:
    layer = any_layer()
    layer.value.maximum[1, 2] = float("nan")
    stats = model_stats({0: layer, 1: any_layer()}, [LayerKind.FULL] * 2)
    with pytest.raises(InputError, match="layer 0, values, head 1, channel 2"):
        solve(stats, QuantScheme(scheme("int8"), scheme("int8")))
    skipping = QuantScheme(scheme("int8"), scheme("int8"), frozenset({0}))
    assert list(solve(stats, skipping).layers) == [1], "a skipped layer may be as it likes"
