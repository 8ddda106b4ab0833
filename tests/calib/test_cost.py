"""What scales that are not a model's own cost its heads."""

from __future__ import annotations

import math

import pytest
import torch

from calib.cost import RAREST, SQNR_CEILING_DB, HeadCost, head_costs
from calib.method import RangeMethod
from calib.solve import solve
from calib.stats import CalibrationStats, ChannelStats, LayerStats
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format


def int8(granularity: str = "per-channel") -> QuantScheme:
    slot = TensorScheme(tensor_format("int8"), Granularity.parse(granularity))
    return QuantScheme(slot, slot)


def stats_of(states: torch.Tensor) -> CalibrationStats:
    """One layer whose keys and values are both `states` ``[tokens, kv_heads, dim]``."""
    slot = ChannelStats.empty(*states.shape[1:])
    slot.update(states)
    _, heads, dim = states.shape
    geometry = CacheGeometry("llama", (LayerGeometry(LayerKind.FULL, heads, dim, dim),), 4096)
    return CalibrationStats(geometry, {0: LayerStats(slot, slot)})


def uniform(tokens: int = 4096, seed: int = 0) -> torch.Tensor:
    """Values spread evenly from -1 to 1, ``[tokens, 1, 4]``."""
    return torch.rand(tokens, 1, 4, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def costs(states: torch.Tensor, foreign: torch.Tensor) -> list[HeadCost]:
    own = stats_of(states)
    return head_costs(own, solve(stats_of(foreign), int8()), solve(own, int8()))


def test_a_range_twice_as_wide_costs_one_bit() -> None:
    key, value = costs(uniform(), uniform() * 2)
    # A uniform signal by uniform rounding: 20 log10 of the steps between -amax and amax.
    assert key.sqnr_own_db == pytest.approx(20 * math.log10(2 * 127), abs=0.05)
    assert key.loss_db == pytest.approx(20 * math.log10(2), abs=0.05)
    assert key.clipped == key.clipped_own == key.extra_clipped == 0
    assert (str(key), str(value)) == ("layer 0, keys, head 0", "layer 0, values, head 0")


def test_a_range_that_leaves_a_tenth_out() -> None:
    key, _ = costs(uniform(), uniform() * 0.9)
    assert key.clipped == key.extra_clipped == pytest.approx(0.1, abs=0.01)
    # The integral of squared errors up to 0.1 beyond, at both ends.
    squared = 0.1**3 / 3
    assert key.sqnr_base_db == pytest.approx(10 * math.log10((1 / 3) / squared), abs=0.4)


@pytest.mark.parametrize(("strays", "counts"), [(RAREST, False), (3 * RAREST, True)])
def test_the_rarest_values_do_not_count(strays: int, counts: bool) -> None:
    states = uniform()
    states[:strays] = 3
    key, _ = costs(states, uniform())
    assert (key.loss_db > 3) == counts
    assert key.clipped == pytest.approx(strays / 4096)


def test_of_few_tokens_one_in_a_hundred_is_rare() -> None:
    states = uniform(tokens=100)
    states[:2] = 3
    assert costs(states, uniform(tokens=100))[0].loss_db > 3


def test_errors_below_those_of_bfloat16_are_none() -> None:
    bfloat16 = uniform(tokens=65536).bfloat16().float() - uniform(tokens=65536)
    signal = uniform(tokens=65536).square().sum() / bfloat16.square().sum()
    assert float(10 * torch.log10(signal)) == pytest.approx(SQNR_CEILING_DB, abs=1)
    constant = torch.full((64, 1, 4), 127.0)
    key, _ = costs(constant, constant * 1.001)
    assert SQNR_CEILING_DB < key.sqnr_base_db < key.sqnr_own_db
    assert key.loss_db == 0


def test_shared_scales_cost_the_smaller_of_two() -> None:
    small, large = stats_of(uniform() / 4), stats_of(uniform())
    own = [solve(stats, int8(), RangeMethod()) for stats in (small, large)]
    shared = own[0].union(own[1])
    assert head_costs(small, shared, own[0])[0].loss_db == pytest.approx(12.04, abs=0.1)
    assert head_costs(large, shared, own[1])[0].loss_db == 0
