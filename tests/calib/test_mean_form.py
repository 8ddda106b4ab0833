"""Which pairs turn: literal energies, every subset by hand, and the keys of real models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from math import inf, log2
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from calib.collect import collect
from calib.mean_form import (
    MAX_COST_BITS,
    choose_turned,
    mean_form_lines,
    turning_gains,
    worth_turning,
)
from calib.stats import CalibrationStats, ChannelStats
from kvquant.cache.transformers_compat import cache_argument
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.rotary import RotaryLayout
from kvquant.scales import KVScales, LayerScales, TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format


def energies(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# What turning a pair gains


@pytest.mark.parametrize(
    ("whole", "fixed", "turned", "gains"),
    [
        pytest.param([10, 10, 10], [9, 4, 0], [9, 8, 5], [0, 4, 5], id="without a factor"),
        pytest.param([9, 9], [1, 2], [0.5, 0], [0, 0], id="none is negative"),
        pytest.param([14, 10], [13, 1], [10, 5], [0, 5.5], id="f² = 1.3 shows in the first"),
        pytest.param([70, 10], [13, 1], [10, 5], [0, 4], id="13 of 70 may be an accident"),
        pytest.param([14, 6], [13, 1], [10, 5], [0, 5], id="f² is at most 6 / 5"),
        pytest.param([9, 2], [8, 0], [0, 1], [0, 1], id="a mean that only a rotation gives"),
        pytest.param([4, 9], [1, 1], [8, 4], [3, 1], id="f² = 0.5, since |t|² is twice the energy"),
        pytest.param([0, 0], [0, 0], [0, 0], [0, 0], id="zeros throughout"),
    ],
)
def test_turning_gains_energy(
    whole: list[float], fixed: list[float], turned: list[float], gains: list[float]
) -> None:
    found = turning_gains(*(energies(*values) for values in (whole, fixed, turned)))
    assert found.tolist() == pytest.approx(gains)


# Which gains are worth it


@pytest.mark.parametrize(
    ("gains", "energy", "chosen"),
    [
        # 100 · (2^0.04 - 1) = 2.81 may stay.
        ([1.0, 1.0, 1.0, 50.0], 100.0, [False, False, True, True]),
        ([0.5, 1.4, 0.9], 100.0, [False, False, False]),
        ([0.5, 1.5, 0.9], 100.0, [False, True, False]),
        ([3.0, 0.0, 2.9, 0.0], 100.0, [True, False, True, False]),
        ([0.0, 0.0], 0.0, [False, False]),
        ([0.0, 1e-9], 0.0, [False, True]),
        ([0.0, 1e-9], -1e-12, [False, True]),
    ],
)
def test_the_smallest_set_of_pairs_turns(
    gains: list[float], energy: float, chosen: list[bool]
) -> None:
    found = worth_turning(energies(*gains), energy)
    assert found.dtype == torch.bool
    assert found.tolist() == chosen


def cost(energy: float, left_out: float) -> float:
    """Bits that a layer pays for fixed means."""
    if not left_out:
        return 0.0
    return 0.5 * log2((energy + left_out) / energy) if energy else inf


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=7),
    st.one_of(st.just(0.0), st.floats(0.01, 1000)),
)
def test_no_smaller_set_would_do(gains: list[float], energy: float) -> None:
    chosen = worth_turning(energies(*gains), energy).tolist()
    turned = [gain for gain, is_chosen in zip(gains, chosen, strict=True) if is_chosen]
    fixed = [gain for gain, is_chosen in zip(gains, chosen, strict=True) if not is_chosen]
    assert cost(energy, sum(fixed)) <= MAX_COST_BITS * (1 + 1e-9)
    assert min(turned, default=inf) >= max(fixed, default=0.0), "largest first"
    if turned:
        fewer = combinations(range(len(gains)), len(turned) - 1)
        left_out = [sum(g for i, g in enumerate(gains) if i not in keep) for keep in fewer]
        assert min(cost(energy, rest) for rest in left_out) > MAX_COST_BITS * (1 - 1e-9)


# From statistics


def test_a_slot_that_is_not_rotated_has_no_pairs() -> None:
    stats = ChannelStats.empty(2, 4)
    stats.update(torch.ones(3, 2, 4))
    assert choose_turned(stats) is None


@pytest.mark.parametrize("interleaved", [True, False])
def test_gains_are_added_up_over_kv_heads_and_channels(interleaved: bool) -> None:
    """Channel 0 is not rotated; pair 1 has a turning mean in the second KV head only."""
    layout = RotaryLayout(1, 4, interleaved, "half")
    torch.manual_seed(0)
    states = torch.randn(500, 2, 5)
    unrotated = torch.zeros(2, 5)
    members = layout.split(torch.arange(5))
    unrotated[1, members[1][1]] = 0.7 * len(states)
    stats = ChannelStats.empty(2, 5, rotary=layout)
    stats.update(states, unrotated)
    assert stats.rotary == layout
    # A gain of 0.49 beside an energy of 10: 0.036 bits.
    chosen = choose_turned(stats)
    assert chosen is not None
    assert chosen.tolist() == [False, True]
    stats.total_unrotated = unrotated / 2
    assert choose_turned(stats).tolist() == [False, False]  # type: ignore[union-attr]


def biased(model: Any) -> Any:
    """`model` with key biases: what a mean before rotation is there for."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, bias in model.named_parameters():
            if name.endswith(("k_proj.bias", "kv_a_proj_with_mqa.bias")):
                bias.normal_(0, 0.5)
    return model


YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 32,
    }
}


def test_without_a_mean_all_pairs_are_fixed(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    for layer in measured(model).layers.values():
        chosen = choose_turned(layer.key)
        assert chosen is not None
        assert chosen.tolist() == [False] * 8
        assert choose_turned(layer.value) is None


IDS = torch.randint(3, 128, (4, 400), generator=torch.Generator().manual_seed(1))


def measured(model: Any) -> CalibrationStats:
    return collect(model, IDS.tolist(), CacheGeometry.from_config(model.config))


@pytest.mark.parametrize(
    ("name", "slot", "config"),
    [
        ("qwen2", "key", {}),
        ("qwen2", "key", YARN),
        ("glm", "key", {"attention_bias": True}),
        ("cohere", "key", {"attention_bias": True}),
        ("deepseek", "value", {"attention_bias": True}),
    ],
)
def test_what_is_fixed_costs_no_more_than_promised(
    tiny: Callable[..., Any], name: str, slot: str, config: dict[str, Any]
) -> None:
    """The energies that both forms leave, from the cache itself, are those of the rule."""
    model = biased(tiny(name, **config))
    stats = measured(model)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS, **{cache_argument(model.get_decoder()): cache})
    angles = model.model.rotary_emb(torch.zeros(1), torch.arange(IDS.shape[1])[None])
    seen = set()
    for index, layer in stats.layers.items():
        channel: ChannelStats = getattr(layer, slot)
        states = getattr(cache.layers[index], f"{slot}s").double()
        chosen = choose_turned(channel)
        assert chosen is not None
        left = [left_by(states, channel, mask, angles) for mask in masks(chosen)]
        with_all, with_chosen, with_one_less = left
        assert 0.5 * log2(with_chosen / with_all) <= MAX_COST_BITS * 1.02
        assert 0.5 * log2(with_one_less / with_all) > MAX_COST_BITS * 0.98
        seen |= set(chosen.tolist())
    assert seen == ({True, False} if slot == "key" else {True})


def masks(chosen: torch.Tensor) -> list[torch.Tensor]:
    """All pairs, those chosen, and those without the last of them."""
    fewer = chosen.clone()
    fewer[chosen.nonzero()[-1:]] = False
    return [torch.ones_like(chosen), chosen, fewer]


def left_by(states: torch.Tensor, stats: ChannelStats, mask: torch.Tensor, angles: Any) -> float:
    """Mean energy of ``[batch, kv_heads, tokens, dim]`` less the means that `mask` asks for."""
    assert stats.rotary is not None and stats.mean_unrotated is not None
    fixed = stats.mean[None, :, None].expand(states[:1].shape)
    plain = stats.mean_unrotated[None, :, None].expand(states[:1].shape)
    means = fixed.clone()
    turned = stats.rotary.rotate(plain, angles)
    for into, out_of in zip(stats.rotary.split(means), stats.rotary.split(turned), strict=True):
        into[..., mask] = out_of[..., mask]
    return float((states - means).square().sum((1, 3)).mean())


# How it is said


def scales_with(pairs: list[list[bool] | None], latent: bool = False) -> KVScales:
    """Scales whose key slot (value slot, if latent) turns these pairs, a layer each."""
    fp8 = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
    plain = TensorScales(torch.ones(1, 1), mean=torch.zeros(1, 8))
    layers = {}
    for index, mask in enumerate(pairs):
        slot = plain
        if mask is not None:
            layout = RotaryLayout(0, 2 * len(mask), False, "half")
            slot = replace(
                plain, mean_unrotated=plain.mean, rotary=layout, turned=torch.tensor(mask)
            )
        layers[index] = LayerScales(plain, slot) if latent else LayerScales(slot, plain)
    kind = LayerKind.LATENT if latent else LayerKind.FULL
    geometry = CacheGeometry("llama", (LayerGeometry(kind, 1, 8, 8),) * len(pairs), None)
    return KVScales(geometry, QuantScheme(fp8, fp8), layers)


@pytest.mark.parametrize(
    ("pairs", "line"),
    [
        (
            [[True, False, False, False], [True, True, True, False], [False] * 4],
            "turned with position in 2 of 3 layers (2 of 4 pairs on average), fixed in 1",
        ),
        ([[True, False]] * 5, "turned with position in all 5 layers (1 of 2 pairs on average)"),
        ([[False, False], None], "fixed in all 2 layers"),
        ([None, None, None], "fixed in all 3 layers"),
        (
            [[True, True], None],
            "turned with position in 1 of 2 layers (2 of 2 pairs on average), fixed in 1",
        ),
    ],
)
def test_it_is_one_line(pairs: list[list[bool] | None], line: str) -> None:
    assert mean_form_lines(scales_with(pairs)) == [f"key mean: {line}"]
    if pairs[0] is not None:
        rotated = [mask for mask in pairs if mask is not None]
        assert mean_form_lines(scales_with(rotated, latent=True))[0] == (
            f"key mean: fixed in all {len(rotated)} layers"
        )


def test_the_rotary_part_of_latent_layers_has_its_own_line() -> None:
    assert mean_form_lines(scales_with([[True, False], [False, False]], latent=True)) == [
        "key mean: fixed in all 2 layers",
        "value mean: turned with position in 1 of 2 layers (1 of 2 pairs on average), fixed in 1",
    ]


def test_old_files_turn_every_pair() -> None:
    scales = scales_with([[True, False], [False, False]])
    old = {
        index: LayerScales(replace(layer.key, turned=None), layer.value)
        for index, layer in scales.layers.items()
    }
    assert mean_form_lines(replace(scales, layers=old)) == [
        "key mean: turned with position in all 2 layers (2 of 2 pairs on average)"
    ]


def test_scales_without_means_say_nothing() -> None:
    scales = scales_with([None])
    bare = TensorScales(torch.ones(1, 1))
    assert mean_form_lines(replace(scales, layers={0: LayerScales(bare, bare)})) == []
