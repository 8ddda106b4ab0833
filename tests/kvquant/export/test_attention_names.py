"""Which names in a checkpoint are the attention of its text model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvquant.errors import ExportError
from kvquant.export.attention_names import AttentionModule, find_attention

LLAMA = [
    f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 1) for name in "qkvo"
]


def paths(names: Sequence[str], layers: Sequence[int] = (0, 1)) -> dict[int, str]:
    return {layer: found.path for layer, found in find_attention(names, layers).items()}


def test_a_module_says_which_weight_makes_what() -> None:
    assert find_attention(LLAMA, [1]) == {
        1: AttentionModule(
            1,
            "model.layers.1.self_attn",
            {
                "q": "model.layers.1.self_attn.q_proj.weight",
                "k": "model.layers.1.self_attn.k_proj.weight",
                "v": "model.layers.1.self_attn.v_proj.weight",
                "o": "model.layers.1.self_attn.o_proj.weight",
            },
        )
    }


@pytest.mark.parametrize(
    ("key", "path", "made"),
    [
        ("transformer.h.3.attn.c_attn", "transformer.h.3.attn", "qkv"),
        ("h.3.attn.c_attn", "h.3.attn", "qkv"),
        ("model.layers.3.self_attn.qkv_proj", "model.layers.3.self_attn", "qkv"),
        ("gpt_neox.layers.3.attention.query_key_value", "gpt_neox.layers.3.attention", "qkv"),
        ("transformer.h.3.self_attention.query_key_value", "transformer.h.3.self_attention", "qkv"),
        ("transformer.h.3.attn.attention.k_proj", "transformer.h.3.attn.attention", "k"),
        ("transformer.blocks.3.attn.Wqkv", "transformer.blocks.3.attn", "qkv"),
        (
            "transformer.encoder.layers.3.self_attention.query_key_value",
            "transformer.encoder.layers.3.self_attention",
            "qkv",
        ),
        ("model.decoder.layers.3.self_attn.k_proj", "model.decoder.layers.3.self_attn", "k"),
        ("backbone.layers.3.mixer.k_proj", "backbone.layers.3.mixer", "k"),
        ("model.layers.3.temporal_block.k_proj", "model.layers.3.temporal_block", "k"),
        ("model.layers.3.attention.wqkv", "model.layers.3.attention", "qkv"),
        ("model.layers.3.self_attn.W_pack", "model.layers.3.self_attn", "qkv"),
        ("model.layers.3.self_attention.kv_proj", "model.layers.3.self_attention", "kv"),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa", "model.layers.3.self_attn", "kv_a"),
        ("layers.3.attention.wkv_a_with_mqa", "layers.3.attention", "kv_a"),
    ],
)
@pytest.mark.parametrize("kind", ["weight", "weight_packed", "qweight"])
def test_names_of_many_families(key: str, path: str, made: str, kind: str) -> None:
    assert find_attention([f"{key}.{kind}"], [3]) == {
        3: AttentionModule(3, path, {made: f"{key}.{kind}"})
    }


@pytest.mark.parametrize(
    "other",
    [
        "vision_tower.vision_model.encoder.layers.{}.self_attn.k_proj.weight",
        "model.vision_tower.encoder.layers.{}.self_attn.k_proj.weight",
        "visual.blocks.{}.attn.qkv.weight",
        "model.visual.blocks.{}.attn.qkv.weight",
        "thinker.audio_tower.layers.{}.self_attn.k_proj.weight",
        "talker.model.layers.{}.self_attn.k_proj.weight",
        "mtp.layers.{}.self_attn.k_proj.weight",
        "model.mtp_layers.{}.self_attn.k_proj.weight",
        "model.layers.{}.self_attn.indexer.wk.weight",
        "model.layers.{}.cross_attn.k_proj.weight",
        "model.layers.{}.crossattention.c_attn.weight",
        "model.layers.{}.encoder_attn.k_proj.weight",
        "model.layers.{}.self_attn.rotary_emb.inv_freq",
        "model.layers.{}.self_attn.k_proj.bias",
        "model.layers.{}.self_attn.k_proj.weight_scale",
    ],
)
def test_what_else_there_is_does_not_count(other: str) -> None:
    beside = [other.format(layer) for layer in (0, 1)]
    assert paths([*beside, *LLAMA]) == paths([*LLAMA, *beside]) == paths(LLAMA)
    with pytest.raises(ExportError, match="no weight that is known to make the keys of layer 0"):
        paths(beside)


def test_a_tower_of_an_unknown_name_gives_way_to_what_is_called_text() -> None:
    tower = ["qformer.layers.0.attention.key.weight", "qformer.layers.1.attention.key.weight"]
    text = [f"language_model.{name}" for name in LLAMA]
    assert paths([*tower, *text]) == {
        0: "language_model.model.layers.0.self_attn",
        1: "language_model.model.layers.1.self_attn",
    }
    with pytest.raises(ExportError, match=r"two attentions in layer 0, .*qformer.*not clear which"):
        paths([*LLAMA, *tower])
    # It cannot be the text model where it has fewer layers.
    assert paths([*tower[:1], *LLAMA]) == paths(LLAMA)


def test_two_modules_in_one_layer_are_refused() -> None:
    twice = [*LLAMA, "model.layers.1.memory.k_proj.weight"]
    with pytest.raises(ExportError, match=r"layer 1, model\.layers\.1\.self_attn and model\.lay"):
        paths(twice)
    assert paths(twice, [0]) == {0: "model.layers.0.self_attn"}


def test_layers_that_keep_nothing_are_left_out() -> None:
    """Of layers that share another's keys a checkpoint may hold weights all the same."""
    assert paths(LLAMA, [1]) == {1: "model.layers.1.self_attn"}
    assert paths(LLAMA, []) == {}
    assert paths([], []) == {}


def test_layers_for_multi_token_prediction_are_left_out() -> None:
    """DeepSeek numbers them on from the last layer."""
    beyond = [name.replace("layers.1", "layers.2") for name in LLAMA]
    assert paths([*LLAMA, *beyond]) == paths(LLAMA)


def test_longcat_attends_twice_in_a_layer() -> None:
    names = [
        f"model.layers.{layer}.self_attn.{i}.kv_a_proj_with_mqa.weight"
        for layer in (0, 1)
        for i in (0, 1)
    ]
    assert paths(names, [0, 1, 2, 3]) == {
        0: "model.layers.0.self_attn.0",
        1: "model.layers.0.self_attn.1",
        2: "model.layers.1.self_attn.0",
        3: "model.layers.1.self_attn.1",
    }


def test_a_layer_without_keys_is_named() -> None:
    with pytest.raises(ExportError, match=r"keys of layer 2 \(2 such layers of 4; looked for k_pr"):
        find_attention(LLAMA, [0, 1, 2, 3])
    with pytest.raises(ExportError, match=r"keys of layer 0 \(2 such layers of 2; "):
        find_attention(["model.layers.0.att.strange.weight", "nonsense", ""], [0, 1])


def test_values_may_come_from_the_keys_weight() -> None:
    """Gemma 4 has layers whose keys are their values."""
    names = [name for name in LLAMA if "v_proj" not in name]
    assert sorted(find_attention(names, [0])[0].projections) == ["k", "o", "q"]
