"""Channel statistics against torch on all tokens at once; merging in halves against the whole."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.sketch import QuantileSketch
from calib.stats import CalibrationStats, ChannelStats, LayerStats, merge_all
from kvquant.errors import FingerprintError, InputError, NotObservedError
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.provenance import Provenance
from kvquant.rotary import RotaryLayout

LAYOUT = RotaryLayout(start=0, width=4, interleaved=False, angles="half")


def states_of(tokens: int, seed: int = 0) -> torch.Tensor:
    """``[tokens, 2, 4]`` with channels of very different size and offset."""
    torch.manual_seed(seed)
    return torch.randn(tokens, 2, 4) * torch.logspace(-3, 3, 8).view(2, 4) + 0.5


def stats_of(*parts: torch.Tensor, rotary: RotaryLayout | None = None) -> ChannelStats:
    _, kv_heads, dim = parts[0].shape
    stats = ChannelStats.empty(kv_heads, dim, rotary=rotary)
    for part in parts:
        stats.update(part, part.double().sum(0) * 2 if rotary else None)
    return stats


def assert_same(one: ChannelStats, other: ChannelStats) -> None:
    """Extremes, counts and sketches bit for bit; sums up to the rounding of their order."""
    assert one.tokens == other.tokens
    assert one.rotary == other.rotary
    for name in ("minimum", "maximum", "amax"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for name in ("sketch", "token_amax"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert torch.equal(mine.exponent, theirs.exponent), name
        assert torch.equal(mine.counts, theirs.counts), name
    rms = other.mean_square.sqrt()
    for name in ("mean", "mean_square", "mean_unrotated"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            unit = theirs if name == "mean_square" else rms
            assert bool(((mine - theirs).abs() <= 1e-6 * unit).all()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_statistics_are_those_of_all_tokens(dtype: torch.dtype) -> None:
    states = (states_of(700) * 10).to(dtype)
    stats, exact = stats_of(states), states.double()
    assert stats.tokens == 700
    assert stats.shape == (2, 4)
    assert stats.minimum.dtype == stats.maximum.dtype == stats.amax.dtype == torch.float32
    assert torch.equal(stats.minimum, states.float().amin(0))
    assert torch.equal(stats.maximum, states.float().amax(0))
    assert torch.equal(stats.amax, states.float().abs().amax(0))
    rms = exact.square().mean(0).sqrt()
    assert bool(((stats.mean - exact.mean(0)).abs() <= 1e-6 * rms).all())
    torch.testing.assert_close(stats.mean_square, rms**2, rtol=1e-6, atol=0.0)
    assert stats.sketch.counts.sum(1).tolist() == [700] * 8
    for head in range(2):
        per_token = exact[:, head].abs().amax(1)
        for q in (0.1, 0.5, 0.9):
            expected = np.quantile(per_token.numpy(), q, method="inverted_cdf")
            assert stats.token_amax.quantile(q)[head].item() == pytest.approx(expected, rel=1 / 16)


def test_sketch_rows_are_channels_in_order() -> None:
    stats = stats_of(torch.arange(1.0, 9.0).view(1, 2, 4))
    found = stats.sketch.quantile(0.5)
    torch.testing.assert_close(found, torch.arange(1.0, 9.0).double(), rtol=1 / 16, atol=0.0)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.data())
def test_parts_merged_in_any_grouping_equal_the_whole(tokens: int, data: st.DataObject) -> None:
    states = states_of(tokens, seed=tokens).to(
        data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), min_size=2, max_size=2)))
    rotary = data.draw(st.sampled_from([None, LAYOUT]))
    parts = states.tensor_split(cuts)
    a, b, c = (stats_of(part, rotary=rotary) for part in parts)
    whole = stats_of(states, rotary=rotary)
    for merged in (a.merge(b).merge(c), a.merge(b.merge(c)), c.merge(a).merge(b)):
        assert_same(merged, whole)
    assert_same(stats_of(*parts, rotary=rotary), whole)


def test_merging_leaves_its_inputs_alone() -> None:
    a, b = stats_of(states_of(10)), stats_of(states_of(20, seed=1))
    before = stats_of(states_of(10))
    a.merge(b)
    assert_same(a, before)


def test_mean_before_rotation_needs_a_rotation() -> None:
    assert stats_of(states_of(5)).mean_unrotated is None
    rotated = stats_of(states_of(5), rotary=LAYOUT)
    assert rotated.mean_unrotated is not None
    torch.testing.assert_close(rotated.mean_unrotated, rotated.mean * 2)
    with pytest.raises(AssertionError, match="before rotation"):
        rotated.update(states_of(5))


def test_no_tokens_change_nothing() -> None:
    stats, before = stats_of(states_of(9)), stats_of(states_of(9))
    stats.update(states_of(0))
    assert_same(stats, before)
    with pytest.raises(NotObservedError, match="layer 3, keys"):
        stats_of(states_of(0)).check("layer 3, keys")


def test_sums_are_kept_in_float64() -> None:
    """In float32, 2^26 + 1 is 2^26, however often it is added."""
    stats = stats_of(torch.full((1, 1, 1), 2.0**26), *[torch.ones(1, 1, 1)] * 999)
    assert stats.mean.dtype == stats.mean_square.dtype == torch.float64
    assert stats.mean.item() == (2**26 + 999) / 1000
    assert stats.mean_square.item() == (2**52 + 999) / 1000


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_found_with_head_and_channel(bad: float) -> None:
    states = states_of(6)
    states[3, 1, 2] = bad
    with pytest.raises(InputError, match="layer 7, values, head 1, channel 2"):
        stats_of(states_of(4), states, states_of(4)).check("layer 7, values")
    merged = stats_of(states_of(4)).merge(stats_of(states))
    with pytest.raises(InputError, match="head 1, channel 2"):
        merged.check("layer 7, values")


def test_different_shapes_or_rotations_do_not_merge() -> None:
    stats = stats_of(states_of(5))
    with pytest.raises(InputError, match=r"2 heads of 4.*1 of 4"):
        stats.merge(stats_of(states_of(5)[:, :1]))
    with pytest.raises(InputError, match="rotary"):
        stats.merge(stats_of(states_of(5), rotary=LAYOUT))


def test_moving_to_a_device_copies_every_tensor_there() -> None:
    moved = stats_of(states_of(5), rotary=LAYOUT).to("meta")
    for field in fields(moved):
        value = getattr(moved, field.name)
        tensors = [value.exponent, value.counts] if isinstance(value, QuantileSketch) else [value]
        for tensor in tensors:
            assert not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta"


# A whole model


def model_stats(seed: int = 0, layers: tuple[int, ...] = (0, 1)) -> CalibrationStats:
    shape = LayerGeometry(LayerKind.FULL, 2, 4, 4)
    recorded = {
        index: LayerStats(
            stats_of(states_of(10, seed=seed + index), rotary=LAYOUT),
            stats_of(states_of(10, seed=seed - index)),
        )
        for index in layers
    }
    provenance = Provenance(tokens=10, longest_position=100 + seed)
    return CalibrationStats(CacheGeometry("llama", (shape, shape), 512), recorded, provenance)


def test_models_merge_layer_by_layer_and_slot_by_slot() -> None:
    parts = [model_stats(seed) for seed in (1, 5, 9)]
    merged = merge_all(parts)
    for index in (0, 1):
        for slot in ("key", "value"):
            channels = [getattr(part.layers[index], slot) for part in parts]
            assert_same(
                getattr(merged.layers[index], slot),
                channels[0].merge(channels[1]).merge(channels[2]),
            )
    assert merged.tokens == 30
    assert merged.provenance.tokens == 30
    assert merged.provenance.longest_position == 109


def test_other_geometries_and_other_layers_do_not_merge() -> None:
    one, other = model_stats(), model_stats()
    shape = LayerGeometry(LayerKind.FULL, 2, 4, 8)
    other.geometry = CacheGeometry("llama", (shape, shape), 512)
    with pytest.raises(FingerprintError, match=r"the first are of a .*; the second of a "):
        one.merge(other)
    with pytest.raises(InputError, match=r"\[1\] in one"):
        one.merge(model_stats(layers=(0,)))


def test_checking_names_the_layers_never_seen() -> None:
    model_stats().check()
    model_stats().check([0, 1])
    with pytest.raises(NotObservedError, match=r"layers \[1\] never wrote"):
        model_stats(layers=(0,)).check([0, 1])
    with pytest.raises(NotObservedError, match="no layer ever wrote"):
        model_stats(layers=()).check()
    empty = model_stats()
    empty.layers[1].value = ChannelStats.empty(2, 4)
    with pytest.raises(NotObservedError, match="layer 1, values"):
        empty.check()
    assert empty.tokens == 10
