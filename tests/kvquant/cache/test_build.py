from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import cache_utils

from kvquant.cache.angles import embedding_of
from kvquant.cache.build import Plan, build_layers
from kvquant.cache.companions import QuantizedHybridLayer, QuantizedIndexedLayer
from kvquant.cache.layer import QuantizedLayer
from kvquant.cache.ledger import TokenLedger
from kvquant.cache.workspace import Workspace
from kvquant.errors import NotObservedError, SchemeError
from kvquant.geometry import CacheGeometry
from kvquant.presets import preset
from kvquant.rotary import RotaryLayout
from kvquant.scales import KVScales, LayerScales, TensorScales
from kvquant.scheme import EXACT, Granularity, QuantScheme, TensorScheme, tensor_format

CPU = torch.device("cpu")
HALF = RotaryLayout(0, 16, False, "half")
STATIC_INT8 = TensorScheme(tensor_format("int8"), Granularity.PER_HEAD)
STATIC_FP8 = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)


def numbers(heads: int, dim: int, seed: int = 0, **more: Any) -> TensorScales:
    """Scales per head, with a mean."""
    mean = torch.randn(heads, dim, generator=torch.Generator().manual_seed(seed))
    return TensorScales(torch.full((heads, 1), 0.5), None, mean, **more)


def rotated(pairs: torch.Tensor | None, layout: RotaryLayout = HALF, **more: Any) -> TensorScales:
    """Scales of rotated keys, of which `pairs` turn; all if None."""
    unrotated = torch.randn(2, 16, generator=torch.Generator().manual_seed(9))
    return numbers(2, 16, mean_unrotated=unrotated, rotary=layout, turned=pairs, **more)


def scales_of(geometry: CacheGeometry, key: TensorScales, value: TensorScales) -> KVScales:
    layers = {index: LayerScales(key, value) for index in geometry.attention_layers}
    return KVScales(geometry, QuantScheme(STATIC_INT8, STATIC_INT8), layers)


def plan_of(
    model: Any,
    scheme: QuantScheme,
    key: TensorScales | None = None,
    value: TensorScales | None = None,
) -> Plan:
    geometry = CacheGeometry.from_config(model.config)
    if key is None:
        return Plan(geometry, scheme, None, model.get_decoder())
    scales = scales_of(geometry, key, numbers(2, 16, 1) if value is None else value)
    return Plan(geometry, scheme, scales, model.get_decoder())


# Schemes of slots


def test_keys_and_values_have_their_own_schemes(tiny: Callable[..., Any]) -> None:
    plan = plan_of(tiny("llama"), preset("int4-kivi"))
    assert plan.slot_scheme(0, "key") == preset("int4-kivi").key
    assert plan.slot_scheme(1, "value") == preset("int4-kivi").value


def test_the_rotary_part_of_a_latent_layer_is_exact_unless_asked(
    tiny: Callable[..., Any],
) -> None:
    model = tiny("deepseek")
    assert plan_of(model, preset("int4")).slot_scheme(0, "key") == preset("int4").key
    assert plan_of(model, preset("int4")).slot_scheme(0, "value") == EXACT
    asked = preset("int4", rotary_format="int8")
    assert plan_of(model, asked).slot_scheme(0, "value") == preset("int8").value


def test_single_layers_have_their_own(tiny: Callable[..., Any]) -> None:
    scheme = QuantScheme(
        preset("int4").key,
        preset("int4").value,
        skip_layers=frozenset({3}),
        layers=((1, preset("int8")),),
    )
    plan = plan_of(tiny("smollm3"), scheme)
    found = [plan.slot_scheme(index, "key") for index in range(4)]
    assert found == [preset("int4").key, preset("int8").key, preset("int4").key, EXACT]


# Codecs


def test_a_codec_has_the_width_of_its_slot(tiny: Callable[..., Any]) -> None:
    plan = plan_of(tiny("deepseek"), preset("int8", rotary_format="int8"))
    assert plan.codec(0, "key", torch.float32, CPU).dim == 16
    assert plan.codec(0, "value", torch.float32, CPU).dim == 4


def test_static_scales_reach_only_static_slots(tiny: Callable[..., Any]) -> None:
    key = numbers(2, 16)
    model = tiny("llama")
    plan = plan_of(model, QuantScheme(STATIC_INT8, preset("int8").value), key)
    codec = plan.codec(1, "key", torch.float32, CPU)
    assert codec.scales is key
    assert plan.codec(1, "value", torch.float32, CPU).scales is None
    assert codec.center is None


def test_without_calibration_nothing_is_subtracted(tiny: Callable[..., Any]) -> None:
    plan = plan_of(tiny("llama"), preset("int4"))
    assert plan.codec(0, "key", torch.float32, CPU).center is None
    assert plan.turned_pairs(0, "key") is None
    assert not plan.turns_means
    assert plan.tensor_scales(0, "key") is None


def test_a_mean_that_stays_is_taken_as_it_is(tiny: Callable[..., Any]) -> None:
    key = numbers(2, 16)
    plan = plan_of(tiny("llama"), preset("int4"), key)
    center = plan.codec(0, "key", torch.float32, CPU).center
    assert center is not None
    assert key.mean is not None
    assert torch.equal(center.fixed, key.mean)
    assert (center.turned, center.layout, center.angles) == (None, None, None)
    assert center.fixed is not key.mean  # nobody may change what was calibrated
    assert not plan.turns_means


def test_only_centered_schemes_subtract(tiny: Callable[..., Any]) -> None:
    plan = plan_of(tiny("llama"), preset("int8"), rotated(None))
    assert plan.codec(0, "key", torch.float32, CPU).center is None
    assert plan.turned_pairs(0, "key") is None
    assert not plan.turns_means


@pytest.mark.parametrize(
    ("layout", "pairs", "channels"),
    [
        # Pair i is channels i and i + 8, or 2i and 2i + 1; a partial layout begins elsewhere.
        (HALF, [0, 3], [0, 8, 3, 11]),
        (RotaryLayout(0, 16, True, "half"), [0, 3], [0, 1, 6, 7]),
        (RotaryLayout(4, 12, False, "half"), [5], [9, 15]),
    ],
)
def test_a_mean_turns_in_the_pairs_that_calibration_chose(
    tiny: Callable[..., Any], layout: RotaryLayout, pairs: list[int], channels: list[int]
) -> None:
    chosen = torch.zeros(layout.width // 2, dtype=torch.bool)
    chosen[pairs] = True
    key = rotated(chosen, layout)
    plan = plan_of(tiny("llama"), preset("int4"), key)
    found = plan.turned_pairs(0, "key")
    assert found is not None
    assert torch.equal(found, chosen)
    assert plan.turns_means
    center = plan.codec(0, "key", torch.float32, CPU).center
    assert center is not None
    assert center.turned is not None
    assert center.layout == layout
    turns = torch.zeros(16, dtype=torch.bool)
    turns[channels] = True
    assert key.mean is not None
    assert key.mean_unrotated is not None
    assert torch.equal(center.fixed, key.mean * ~turns)
    assert torch.equal(center.turned, key.mean_unrotated * turns)


def test_files_that_do_not_say_which_pairs_turn_mean_all(tiny: Callable[..., Any]) -> None:
    key = rotated(None)
    plan = plan_of(tiny("llama"), preset("int4"), key)
    center = plan.codec(0, "key", torch.float32, CPU).center
    assert center is not None
    assert center.turned is not None
    assert key.mean_unrotated is not None
    assert torch.equal(center.turned, key.mean_unrotated)
    assert bool((center.fixed == 0).all())
    assert plan.turned_pairs(0, "key").tolist() == [True] * 8  # type: ignore[union-attr]


def test_no_pair_chosen_means_that_the_mean_stays(tiny: Callable[..., Any]) -> None:
    key = rotated(torch.zeros(8, dtype=torch.bool))
    plan = plan_of(tiny("llama"), preset("int4"), key)
    center = plan.codec(0, "key", torch.float32, CPU).center
    assert center is not None
    assert center.turned is None
    assert torch.equal(center.fixed, key.mean)  # type: ignore[arg-type]
    assert not plan.turns_means


def test_where_no_table_would_hold_the_mean_stays(tiny: Callable[..., Any]) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    key = rotated(None)
    plan = plan_of(tiny("llama", rope_parameters=rope), preset("int4"), key)
    center = plan.codec(0, "key", torch.float32, CPU).center
    assert center is not None
    assert center.turned is None
    assert torch.equal(center.fixed, key.mean)  # type: ignore[arg-type]
    assert not plan.turns_means


def test_what_is_subtracted_is_the_mean_as_the_model_turns_it(tiny: Callable[..., Any]) -> None:
    model, key = tiny("llama"), rotated(None)
    plan = plan_of(model, preset("int4"), key)
    center = plan.codec(0, "key", torch.float32, CPU).center
    embed = embedding_of(model.get_decoder(), 0)
    assert center is not None
    assert embed is not None
    assert key.mean_unrotated is not None
    positions = torch.tensor([[0, 1, 7, 1500]])
    mean = key.mean_unrotated[None, :, None].expand(1, 2, 4, 16)
    wanted = -HALF.rotate(mean, embed(positions))
    found = center.subtract(torch.zeros(1, 2, 4, 16), positions, 1501)
    assert torch.equal(found, wanted)


def test_layers_that_rotate_alike_share_a_table(tiny: Callable[..., Any]) -> None:
    plan = plan_of(tiny("gemma3_text"), preset("int4"), rotated(None))
    centers = [plan.codec(index, "key", torch.float32, CPU).center for index in range(6)]
    tables = [center.angles for center in centers if center is not None]
    assert len(tables) == 6
    assert all(table is tables[0] for table in tables[:5])  # five sliding layers, then a full one
    assert tables[5] is not tables[0]
    assert plan.nbytes() == 0
    for table in tables:
        assert table is not None
        table(1)
    assert plan.nbytes() == 2 * (2 * 1024 * 8 * 4)


# Static schemes need scales


def test_a_static_scheme_without_scales_is_refused(tiny: Callable[..., Any]) -> None:
    plan = plan_of(tiny("llama"), QuantScheme(preset("int8").key, STATIC_FP8))
    with pytest.raises(
        NotObservedError, match=r"layer 0: fp8_e4m3 per-tensor needs calibrated value scales.*int8"
    ):
        build_layers(plan, TokenLedger(False), Workspace())


def test_scales_of_another_scheme_are_refused(tiny: Callable[..., Any]) -> None:
    plan = plan_of(tiny("llama"), QuantScheme(STATIC_INT8, STATIC_FP8), numbers(2, 16))
    with pytest.raises(
        SchemeError, match=r"layer 0: the value scales are int8 per-head, the scheme is fp8_e4m3 p"
    ):
        plan.check_scales()


def test_layers_that_are_not_static_need_none(tiny: Callable[..., Any]) -> None:
    static = QuantScheme(STATIC_INT8, STATIC_INT8)
    plan = plan_of(tiny("llama"), replace(static, layers=((0, preset("int4")),)), numbers(2, 16))
    assert plan.scales is not None
    plan.scales.layers.pop(0)  # type: ignore[attr-defined]
    plan.check_scales()
    plan.scheme = replace(static, skip_layers=frozenset({0}))
    plan.check_scales()
    plan.scheme = static
    with pytest.raises(NotObservedError, match="layer 0: int8 per-head needs calibrated key"):
        plan.check_scales()


# Layers


def built(model: Any, scheme: QuantScheme) -> tuple[list[Any], Workspace]:
    workspace = Workspace()
    return build_layers(plan_of(model, scheme), TokenLedger(False), workspace), workspace


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("llama", [None, None]),
        ("mistral", [8, 8]),
        ("gemma2", [8, None, 8, None]),
        ("gemma3_text", [8, 8, 8, 8, 8, None]),
        ("gpt_oss", [8, None]),
        ("gpt2", [None, None]),
        ("deepseek", [None, None]),
    ],
)
def test_layers_are_as_the_model_has_them(
    tiny: Callable[..., Any], family: str, windows: list[int | None]
) -> None:
    layers, workspace = built(tiny(family), preset("int8"))
    assert [type(layer) for layer in layers] == [QuantizedLayer] * len(windows)
    assert [layer.geometry.window for layer in layers] == windows
    assert [layer.is_sliding for layer in layers] == [window is not None for window in windows]
    assert all(layer._workspace is workspace for layer in layers)
    assert len({id(layer._ledger) for layer in layers}) == 1


def test_layers_that_keep_no_tokens_stay_those_of_transformers(
    tiny: Callable[..., Any],
) -> None:
    layers, _ = built(tiny("qwen3_next"), preset("int8"))
    linear = cache_utils.LinearAttentionLayer
    assert [type(layer) for layer in layers] == [linear, linear, linear, QuantizedLayer]


def test_layers_have_the_schemes_that_were_asked_for(tiny: Callable[..., Any]) -> None:
    scheme = replace(preset("int4"), skip_layers=frozenset({0}), layers=((2, preset("int4-kivi")),))
    layers, _ = built(tiny("smollm3"), scheme)
    assert layers[0].scheme == QuantScheme(EXACT, EXACT)
    assert layers[1].scheme == preset("int4")
    assert layers[2].scheme == preset("int4-kivi")
    for layer in layers:
        layer.update(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16))
    units = [[store.codec.unit for store in layer.stores[0]] for layer in layers]
    assert units == [[1, 1], [1, 1], [64, 1], [1, 1]]


SHARING = {
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_kv_shared_layers": 2,
    "sliding_window": 8,
    "laurel_rank": 4,
    "hidden_size_per_layer_input": 8,
    "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
    "activation_sparsity_pattern": None,
}


def test_what_other_layers_read_later_is_not_in_the_workspace() -> None:
    from transformers import AutoModelForCausalLM, Gemma3nTextConfig

    model = AutoModelForCausalLM.from_config(Gemma3nTextConfig(**SHARING))
    layers, workspace = built(model, preset("int8"))
    # The last two layers keep nothing: they read what layers 1 and 2 do.
    assert not any(isinstance(layer, QuantizedLayer) for layer in layers[3:])
    assert [layer._workspace for layer in layers[:3]] == [workspace, None, None]


def mllama() -> Any:
    from transformers import MllamaForCausalLM
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 128, "pad_token_id": 0}
    return MllamaForCausalLM(MllamaTextConfig(**sizes, **more, cross_attention_layers=[1, 3]))


def test_cross_attention_is_refused(tiny: Callable[..., Any]) -> None:
    """Its layers cache keys and values of images, or of another text."""
    for model in (mllama(), tiny("gpt2", add_cross_attention=True)):
        with pytest.raises(SchemeError, match="has cross-attention, which caches keys and values"):
            built(model, preset("int8"))


class Unknown(cache_utils.DynamicLayer):  # type: ignore[misc]
    """A kind of layer that nobody has heard of."""


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (cache_utils.DynamicLayer, QuantizedLayer),
        (cache_utils.DynamicIndexedLayer, QuantizedIndexedLayer),
        (cache_utils.LinearAttentionAndFullAttentionLayer, QuantizedHybridLayer),
        (Unknown, None),
    ],
)
def test_kinds_of_layers(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, theirs: type, ours: type | None
) -> None:
    model = tiny("qwen3")
    known = cache_utils.DYNAMIC_LAYER_TYPE_MAPPING
    monkeypatch.setitem(known, "full_attention", theirs)
    if ours is None:
        with pytest.raises(SchemeError, match="layer 0 is a Unknown, which cannot be quantized"):
            built(model, preset("int8"))
        return
    layers, _ = built(model, preset("int8"))
    assert [type(layer) for layer in layers] == [ours] * 2
    key, _ = layers[0].update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16))
    assert key.shape == (1, 2, 3, 16)
