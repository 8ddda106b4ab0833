"""Factors that are chosen: what they gain, that they never cost, and where folding is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.collect import collect
from calib.solve import solve
from kvquant.errors import ExportError
from kvquant.export.fold import LayerFold, check_foldable, choose, folded_scales
from kvquant.export.fold_attention import AttentionCall, watched
from kvquant.export.fold_error import errors, fold_report, quantizer_names, read_back
from kvquant.export.fold_observe import ObservedLayer, ObservedSlot, observe
from kvquant.export.fold_places import FoldPlaces, Place
from kvquant.geometry import CacheGeometry
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

INTEGERS = ["int8", "int4", "int4-rotated"]


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def token_ids(tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 128, (1, tokens), generator=random(seed))


def with_key_bias(model: Any, outlier: int | None, seed: int = 0) -> Any:
    """A key bias from N(0, 0.1), with one rotary pair at 100 times its RMS or as drawn."""
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            bias = layer.self_attn.k_proj.bias
            bias.copy_(0.1 * torch.randn(bias.shape, generator=random(10 * seed + number)))
            if outlier is not None:
                pair = [outlier, outlier + model.config.head_dim // 2]
                bias[pair] *= 100 * bias.square().mean().sqrt() / bias[pair].square().mean().sqrt()
            layer.self_attn.q_proj.weight *= 8
    return model


def blocks() -> list[torch.Tensor]:
    return [token_ids(200, 100 + number) for number in range(4)]


def folded(model: Any, folds: dict[int, LayerFold]) -> Any:
    """The model with the factors in its weights, row by row as the definition says."""
    with torch.no_grad():
        for number, fold in folds.items():
            attention = model.model.layers[number].self_attn
            for name, factors in (
                ("k_proj", fold.key),
                ("q_proj", 1 / fold.key.repeat_interleave(2, 0)),
                ("v_proj", fold.value),
            ):
                getattr(attention, name).weight *= factors.view(-1, 1)
                getattr(attention, name).bias *= factors.flatten()
            attention.o_proj.weight /= fold.value.repeat_interleave(2, 0).flatten()
    return model


def score_errors(model: Any, ids: torch.Tensor, quantizer: str) -> list[float]:
    """Relative error of the scores q·k of each layer's own queries and quantized keys."""
    found: list[float] = []

    def look(call: AttentionCall) -> None:
        key, query = call.key[0], call.query[0].unflatten(0, (call.key.shape[1], -1))
        exact, stored = (
            query @ each.transpose(-1, -2)[:, None] for each in (key, read_back(key, quantizer))
        )
        found.append(float((stored - exact).norm() / exact.norm()))

    with torch.no_grad(), watched(model.get_decoder(), look):
        model(ids, use_cache=False)
    return found


@pytest.mark.parametrize("quantizer", INTEGERS)
@pytest.mark.parametrize("outlier", [0, 3, 7])
def test_scores_on_other_text_are_twice_as_good_beside_an_outlier(
    tiny: Callable[..., Any], outlier: int, quantizer: str
) -> None:
    """Issue 6: under per-token int4, in the model's own coordinates, against the unfolded export.

    Scores of the folded model are the unfolded one's, so that both errors have the same measure.
    """
    model, ids = with_key_bias(tiny("qwen2"), outlier), token_ids(300, 7)
    before = score_errors(model, ids, quantizer)
    folds = choose(observe(model, blocks()), quantizer)
    exact = model(ids).logits
    after = score_errors(folded(model, folds), ids, quantizer)
    torch.testing.assert_close(model(ids).logits, exact, rtol=1e-4, atol=1e-4)
    print(f"{quantizer}, pair {outlier}: {before} -> {after}")
    assert all(late < soon / 2 for soon, late in zip(before, after, strict=True))


@pytest.mark.parametrize("quantizer", quantizer_names())
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "glm", "gpt2", "smollm3"])
def test_factors_fit_the_layer_and_never_cost(
    tiny: Callable[..., Any], name: str, quantizer: str
) -> None:
    observed = observe(tiny(name), [token_ids(120, 1)])
    folds = choose(observed, quantizer)
    assert folds.keys() == observed.keys()
    for layer, fold in folds.items():
        seen = observed[layer]
        for slot, factors in ((seen.key, fold.key), (seen.value, fold.value)):
            assert factors.dtype == torch.float32
            assert factors.shape == (slot.states.shape[0], slot.states.shape[2])
            mantissas, exponents = torch.frexp(factors)
            assert (mantissas == 0.5).all(), "powers of two"
            assert int((exponents - 1).abs().max()) <= 10
            for group in range(int(slot.groups.max()) + 1):
                same = factors[:, slot.groups == group]
                assert (same == same[:, :1]).all()
            if slot.is_shared:
                assert (factors == factors[:1]).all()
    for line in fold_report(observed, folds):
        if line.quantizer == quantizer:
            assert line.key[1] <= line.key[0]
            assert line.value[1] <= line.value[0]


def test_without_an_outlier_keys_of_a_random_model_stay(tiny: Callable[..., Any]) -> None:
    """Channels are alike: nothing to gain, so nothing is changed."""
    model = with_key_bias(tiny("qwen2"), None)
    for fold in choose(observe(model, blocks()), "int4").values():
        assert (fold.key == 1).all()


def test_only_the_outliers_head_is_changed(tiny: Callable[..., Any]) -> None:
    model = with_key_bias(tiny("qwen2"), 7)
    for fold in choose(observe(model, blocks()), "int4").values():
        assert (fold.key[1] == 1).all()
        assert (fold.key[0, [7, 15]] < 1).all()


NOWHERE = Place("k_proj", torch.zeros(0), None, 0, torch.zeros(0, 0, dtype=torch.long))
PLACES = FoldPlaces(NOWHERE, NOWHERE, NOWHERE, NOWHERE, torch.zeros(0, dtype=torch.long))


def random_slot(seed: int, kv_heads: int, tokens: int, dim: int, shared: bool) -> ObservedSlot:
    """Channels of very different size, read very differently."""
    generator = random(seed)
    spread = torch.exp(2 * torch.randn(kv_heads, 1, dim, generator=generator))
    states = torch.randn(kv_heads, tokens, dim, generator=generator) * spread
    states += 2 * torch.randn(kv_heads, 1, dim, generator=generator)
    queries = torch.randn(kv_heads, 50, dim, generator=generator)
    queries *= torch.exp(torch.randn(kv_heads, 1, dim, generator=generator))
    groups = torch.arange(dim) % max(dim // 2, 1)
    return ObservedSlot(states, queries.transpose(1, 2) @ queries / 50, groups, shared)


def cost(slot: ObservedSlot, factors: torch.Tensor, quantizer: str) -> torch.Tensor:
    return errors(slot.states, slot.reading, factors, quantizer)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1000),
    kv_heads=st.integers(1, 3),
    tokens=st.integers(1, 40),
    dim=st.integers(1, 12),
    shared=st.booleans(),
    quantizer=st.sampled_from(["fp8", *INTEGERS]),
)
def test_no_choice_costs_more_than_none(
    seed: int, kv_heads: int, tokens: int, dim: int, shared: bool, quantizer: str
) -> None:
    slot = random_slot(seed, kv_heads, tokens, dim, shared)
    fold = choose({0: ObservedLayer(slot, slot, PLACES)}, quantizer)[0]
    after, before = (
        cost(slot, factors, quantizer) for factors in (fold.key, torch.ones(kv_heads, dim))
    )
    assert float(after.sum()) <= float(before.sum())
    if quantizer != "fp8" and not shared:
        assert (after <= before).all(), "for each head"
    if shared:
        assert (fold.key == fold.key[:1]).all()


def test_equal_ranges_are_not_the_aim() -> None:
    """A small channel that queries hardly read: raising it to the others' range costs them all.

    The large channels are read most, so that here even factors of 1 beat equal ranges.
    """
    slot = random_slot(3, 1, 200, 16, False)
    slot.states.copy_(torch.randn(1, 200, 16, generator=random(1)))
    slot.states[:, :, [1, 9]] *= 40
    slot.reading.copy_(torch.eye(16)[None])
    slot.reading[:, 1, 1] = slot.reading[:, 9, 9] = 400.0
    amax = slot.states.abs().amax(1)[:, slot.groups]
    equal = torch.exp2(-amax.log2().round())
    chosen = choose({0: ObservedLayer(slot, slot, PLACES)}, "int4")[0].key
    equalised, plain, ours = (
        float(cost(slot, factors, "int4")) for factors in (equal, torch.ones(1, 16), chosen)
    )
    assert plain < equalised / 2
    assert ours <= plain


def test_for_fp8_channels_below_its_range_are_raised() -> None:
    """One channel a million times the others: these are zeros to e4m3, whose numbers reach 2^18."""
    states = torch.randn(1, 100, 16, generator=random(1))
    states[:, :, [7, 15]] *= 2.0**20
    slot = ObservedSlot(states, torch.eye(16)[None], torch.arange(16) % 8, False)
    reading = slot.reading.clone()
    reading[:, [7, 15], [7, 15]] = 2.0**-40
    slot = replace(slot, reading=reading)
    fold = choose({0: ObservedLayer(slot, slot, PLACES)}, "fp8")[0]
    assert cost(slot, fold.key, "fp8") < cost(slot, torch.ones(1, 16), "fp8") / 10
    assert (fold.key[0, [7, 15]] == 1).all()


def test_for_fp8_a_factor_must_not_raise_the_layers_scale() -> None:
    """Channel 2 would gain by being raised, were it not for its partner, one of the two largest.

    Nobody reads that one, so that its saturation would go unnoticed; but the scale would grow with
    it, and of channel 3, whose own partner keeps it from being raised, less would be left.
    """
    states = torch.randn(1, 100, 4, generator=random(1)) / 4
    states[:, :, :2] *= 2.0**14
    reading = torch.diag(torch.tensor([0.0, 1e-6, 64.0, 1.0]))[None]
    slot = ObservedSlot(states, reading, torch.tensor([0, 1, 0, 1]), False)
    plain, raised = torch.ones(1, 4), torch.tensor([[4.0, 1.0, 4.0, 1.0]])
    fixed = states.abs().amax()
    lost_if_fixed = errors(states, reading, plain, "fp8", fixed)
    assert errors(states, reading, raised, "fp8", fixed) < 0.8 * lost_if_fixed
    assert (choose({0: ObservedLayer(slot, slot, PLACES)}, "fp8")[0].key == 1).all()


def test_an_unknown_quantizer_is_refused(tiny: Callable[..., Any]) -> None:
    with pytest.raises(ExportError, match="unknown quantizer 'int3'"):
        choose(observe(tiny("llama"), [token_ids(30, 1)]), "int3")


def test_the_report_has_all_quantizers(tiny: Callable[..., Any]) -> None:
    observed = observe(with_key_bias(tiny("qwen2"), 3), blocks())
    lines = list(fold_report(observed, choose(observed, "int4")))
    assert [(line.layer, line.quantizer) for line in lines] == [
        (layer, name) for layer in (0, 1) for name in ("fp8", "int8", "int4", "int4-rotated")
    ]
    for line in lines:
        if line.quantizer == "int4":
            assert line.key[1] < line.key[0] / 2
        assert 0 < line.value[1] <= 1.05 * line.value[0]


# Where folding is refused


def check(model: Any, config: Any = None) -> None:
    check_foldable(config or model.config, CacheGeometry.from_config(model.config), model)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek", "layer 0 caches a latent"),
        ("deepseek_v32", "layer 0 caches a latent"),
        ("gemma3n_text", "layer 4 reads the keys and values of layer 2"),
        ("gemma4_text", "layer 2 reads the keys and values of layer 0"),
    ],
)
def test_what_a_config_tells_needs_no_model(
    tiny: Callable[..., Any], name: str, reason: str
) -> None:
    config = tiny(name).config
    with pytest.raises(ExportError, match=reason):
        check_foldable(config.to_dict(), CacheGeometry.from_config(config))


@pytest.mark.parametrize("name", ["llama4_text", "qwen3_next"])
def test_the_rest_is_seen_in_the_model(tiny: Callable[..., Any], name: str) -> None:
    model = tiny(name)
    check_foldable(model.config, CacheGeometry.from_config(model.config))
    with pytest.raises(ExportError, match="it cannot be folded"):
        check(model)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma3_text", "falcon_h1"])
def test_what_can_be_folded_passes(tiny: Callable[..., Any], name: str) -> None:
    check(tiny(name))


@pytest.mark.parametrize(
    "config",
    [
        {"torch_dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"text_config": {"dtype": "bfloat16"}},
        {"dtype": None, "text_config": {"torch_dtype": "float16"}},
    ],
)
def test_one_plus_weight_needs_float32(tiny: Callable[..., Any], config: dict[str, Any]) -> None:
    model = tiny("gemma3_text")
    with pytest.raises(ExportError, match=r"k_norm of layer 0 multiplies by 1 \+ weight"):
        check(model, config)
    check(model, {"dtype": "float32"})
    check(tiny("qwen3"), config)


# Scales of the folded model


def calibrated(model: Any, granularity: Granularity) -> Any:
    tensor = TensorScheme(tensor_format("fp8"), granularity)
    stats = collect(
        model, [block[0].tolist() for block in blocks()], CacheGeometry.from_config(model.config)
    )
    return solve(stats, QuantScheme(tensor, tensor))


def test_scales_of_the_folded_model_are_those_that_it_would_be_given(
    tiny: Callable[..., Any],
) -> None:
    model = with_key_bias(tiny("qwen2"), 3)
    scales = calibrated(model, Granularity.PER_CHANNEL)
    folds = choose(observe(model, blocks()), "int4")
    expected = calibrated(folded(model, folds), Granularity.PER_CHANNEL)
    found = folded_scales(scales, folds)
    for layer, made in found.layers.items():
        for slot, wanted in (
            (made.key, expected.layers[layer].key),
            (made.value, expected.layers[layer].value),
        ):
            assert torch.equal(slot.scale, wanted.scale)
            for mean, wanted_mean in (
                (slot.mean, wanted.mean),
                (slot.mean_unrotated, wanted.mean_unrotated),
            ):
                torch.testing.assert_close(mean, wanted_mean)
    reduced = found.reduce(Granularity.PER_TENSOR).layers[0].key.scale
    assert float(reduced) < float(scales.reduce(Granularity.PER_TENSOR).layers[0].key.scale)


@pytest.mark.parametrize("granularity", [Granularity.PER_TENSOR, Granularity.PER_HEAD])
def test_coarser_scales_say_nothing_about_a_channel(
    tiny: Callable[..., Any], granularity: Granularity
) -> None:
    scales = calibrated(tiny("llama"), granularity)
    with pytest.raises(ExportError, match=rf"keys are calibrated {granularity.value}"):
        folded_scales(scales, {})


def test_layers_that_are_not_folded_keep_their_scales(tiny: Callable[..., Any]) -> None:
    scales = calibrated(tiny("llama"), Granularity.PER_CHANNEL)
    assert folded_scales(scales, {}).layers == scales.layers
