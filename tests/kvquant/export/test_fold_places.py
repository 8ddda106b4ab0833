"""Where factors go, in models of many families: literal rows, and refusals where none are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvquant.errors import ExportError
from kvquant.export.fold_places import FoldPlaces, Place, find_places
from kvquant.geometry import CacheGeometry

_BASE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_HEADS_OF_16 = {**_BASE, "head_dim": 16}
_MORE: dict[str, dict[str, Any]] = {
    "gpt_neox": {k: v for k, v in _BASE.items() if k != "num_key_value_heads"},
    "persimmon": {k: v for k, v in _BASE.items() if k != "num_key_value_heads"},
    "phi": _BASE,
    "olmo2": _BASE,
    "cohere": {**_BASE, "use_qk_norm": True},
    "opt": {k: v for k, v in _BASE.items() if k != "num_key_value_heads"},
    "gpt_bigcode": {k: v for k, v in _BASE.items() if k != "num_key_value_heads"},
    "hunyuan_v1_dense": _HEADS_OF_16,
    "qwen3_moe": {
        **_HEADS_OF_16,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
    },
    "nanochat": _HEADS_OF_16,
    "bitnet": _BASE,
    "diffllama": _BASE,
    "bloom": {k: v for k, v in _BASE.items() if k != "num_key_value_heads"},
}


@pytest.fixture(scope="session")
def build(tiny: Callable[..., Any]) -> Callable[[str], Any]:
    """The tiny models by name, and more; norms with weights that are not all 1."""

    def built(name: str) -> Any:
        if name in _MORE:
            torch.manual_seed(0)
            config = AutoConfig.for_model(name, **_MORE[name])
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        else:
            model = tiny(name)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name:
                    parameter += 0.3 * torch.rand(parameter.shape)
        return model

    return built


def places_of(model: Any) -> dict[int, FoldPlaces]:
    return find_places(model, CacheGeometry.from_config(model.config))


def first_rows(place: Place) -> list[int]:
    """Where each head's channels begin; they follow each other."""
    dim = place.entries.shape[1]
    assert (place.entries == place.entries[:, :1] + torch.arange(dim)).all()
    return [int(row) for row in place.entries[:, 0]]


def described(place: Place) -> tuple[str, int | None, list[int]]:
    return place.module, place.axis, first_rows(place)


SEPARATE = [
    ("q_proj", 0, [0, 16, 32, 48]),
    ("k_proj", 0, [0, 16]),
    ("v_proj", 0, [0, 16]),
    ("o_proj", 1, [0, 16, 32, 48]),
]
HALF = [*range(8), *range(8)]
NEIGHBOURS = [channel // 2 for channel in range(16)]
FREE = list(range(16))


def norms(query: str, key: str, output: str = "o_proj") -> list[tuple[str, int | None, list[int]]]:
    """Norms that all heads share, in front of the same values."""
    return [
        (query, None, [0, 0, 0, 0]),
        (key, None, [0, 0]),
        ("v_proj", 0, [0, 16]),
        (output, 1, [0, 16, 32, 48]),
    ]


# name, layer, query, key, value and output, groups of key channels
FAMILIES = [
    ("llama", 0, SEPARATE, HALF),
    ("llama_yarn", 1, SEPARATE, HALF),
    ("qwen2", 0, SEPARATE, HALF),
    ("mistral", 0, SEPARATE, HALF),
    ("gemma2", 0, SEPARATE, HALF),
    ("gpt_oss", 1, SEPARATE, HALF),
    ("falcon_h1", 0, SEPARATE, HALF),
    ("smollm3", 2, SEPARATE, HALF),
    ("smollm3", 3, SEPARATE, FREE),  # not rotated
    ("glm", 0, SEPARATE, [0, 0, 1, 1, 2, 2, 3, 3, *range(4, 12)]),
    ("qwen3", 0, norms("q_norm", "k_norm"), HALF),
    ("qwen3_moe", 1, norms("q_norm", "k_norm"), HALF),
    ("gemma3_text", 5, norms("q_norm", "k_norm"), HALF),
    ("lfm2", 1, norms("q_layernorm", "k_layernorm", "out_proj"), HALF),
    # Norms after the rotation: there pairs may have two factors.
    ("hunyuan_v1_dense", 0, norms("query_layernorm", "key_layernorm"), FREE),
    (
        "olmo2",
        0,
        [("q_norm", None, [0, 16, 32, 48]), ("k_norm", None, [0, 16]), *SEPARATE[2:]],
        HALF,
    ),
    (
        "cohere",
        1,
        [("q_norm", None, [0, 16, 32, 48]), ("k_norm", None, [0, 16]), *SEPARATE[2:]],
        NEIGHBOURS,
    ),
    (
        "phi3",
        1,
        [
            ("qkv_proj", 0, [0, 16, 32, 48]),
            ("qkv_proj", 0, [64, 80]),
            ("qkv_proj", 0, [96, 112]),
            ("o_proj", 1, [0, 16, 32, 48]),
        ],
        HALF,
    ),
    (
        "gpt2",
        0,
        [
            ("c_attn", 1, [0, 16, 32, 48]),
            ("c_attn", 1, [64, 80, 96, 112]),
            ("c_attn", 1, [128, 144, 160, 176]),
            ("c_proj", 0, [0, 16, 32, 48]),
        ],
        FREE,
    ),
    (
        "gpt_neox",
        0,
        [
            ("query_key_value", 0, [0, 48, 96, 144]),
            ("query_key_value", 0, [16, 64, 112, 160]),
            ("query_key_value", 0, [32, 80, 128, 176]),
            ("dense", 1, [0, 16, 32, 48]),
        ],
        [0, 1, 0, 1, *range(2, 14)],
    ),
    (
        "persimmon",
        0,
        [
            ("q_layernorm", None, [0, 0, 0, 0]),
            ("k_layernorm", None, [0, 0, 0, 0]),
            ("query_key_value", 0, [32, 80, 128, 176]),
            ("dense", 1, [0, 16, 32, 48]),
        ],
        [0, 1, 2, 3, 0, 1, 2, 3, *range(4, 12)],
    ),
    (
        "gpt_bigcode",
        0,
        [
            ("c_attn", 0, [0, 16, 32, 48]),
            ("c_attn", 0, [64]),
            ("c_attn", 0, [80]),
            ("c_proj", 1, [0, 16, 32, 48]),
        ],
        FREE,
    ),
    (
        "phi",
        1,
        [*SEPARATE[:3], ("dense", 1, [0, 16, 32, 48])],
        [0, 1, 2, 3, 0, 1, 2, 3, *range(4, 12)],
    ),
    (
        "opt",
        0,
        [
            *((f"{name}_proj", 0, [0, 16, 32, 48]) for name in "qkv"),
            ("out_proj", 1, [0, 16, 32, 48]),
        ],
        FREE,
    ),
]


@pytest.mark.parametrize(
    ("name", "layer", "expected", "groups"), FAMILIES, ids=[f"{f[0]}-{f[1]}" for f in FAMILIES]
)
def test_rows_and_groups(
    build: Callable[[str], Any], name: str, layer: int, expected: Any, groups: list[int]
) -> None:
    found = places_of(build(name))[layer]
    assert [
        described(place) for place in (found.query, found.key, found.value, found.output)
    ] == expected
    assert found.key_groups.tolist() == groups
    attention_bias = name in ("qwen2", "gpt2", "gpt_oss", "glm")
    if attention_bias:
        assert found.key.bias is not None
    assert found.output.bias is None, "what is added after the projection has no channels"
    assert found.key.offset == (1.0 if name == "gemma3_text" else 0.0)
    assert found.key.is_shared == (expected[1][2] in ([0, 0], [0, 0, 0, 0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama_yarn", "qwen2", "qwen3", "glm", "gpt2", "phi3"])
def test_the_same_is_found_in_16_bits(
    build: Callable[[str], Any], name: str, dtype: torch.dtype
) -> None:
    """`qwen2` has a key channel that is 100 times as large as its partner."""
    model = build(name)
    exact = places_of(model)
    for layer, found in places_of(model.to(dtype)).items():
        for slot in ("query", "key", "value", "output"):
            assert described(getattr(found, slot)) == described(getattr(exact[layer], slot))
        assert torch.equal(found.key_groups, exact[layer].key_groups)


def test_eager_attention_is_observed_too(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    model.set_attn_implementation("eager")
    assert described(places_of(model)[0].key) == SEPARATE[1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek", "does not attend to the keys that it caches"),
        ("llama4_text", "as it is or rotated in a way that is known"),  # norm without weights
        ("nanochat", "as it is or rotated in a way that is known"),  # turns the other way round
        ("qwen3_next", "layer 3 and its output projection lies something else"),  # gate
        ("bitnet", "layer 0 and its output projection lies something else"),  # norm
        ("diffllama", "layer 0 and its output projection lies something else"),
        ("gemma4_text", "does not attend to the keys that it caches"),
        ("bloom", "cannot be observed"),
    ],
)
def test_refused_with_the_reason(build: Callable[[str], Any], name: str, reason: str) -> None:
    with pytest.raises(ExportError, match=reason):
        places_of(build(name))


@pytest.mark.parametrize("whole_module", [True, False])
def test_a_projection_of_two_layers_is_refused(
    tiny: Callable[..., Any], whole_module: bool
) -> None:
    model = tiny("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    if whole_module:
        second.k_proj = first.k_proj
    else:
        second.k_proj.weight = first.k_proj.weight
    with pytest.raises(ExportError, match=r"layers 0 and 1 have the same k_proj.weight"):
        places_of(model)


def test_keys_that_are_values_too_are_refused(tiny: Callable[..., Any]) -> None:
    model = tiny("smollm3")
    attention = model.model.layers[3].self_attn  # not rotated
    attention.v_proj = attention.k_proj
    with pytest.raises(ExportError, match="keys and values from the same rows of k_proj"):
        places_of(model)


def test_a_layer_of_an_unknown_kind_is_refused(tiny: Callable[..., Any]) -> None:
    class Doubling(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.weight = inner.weight

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states @ self.weight.T

    model = tiny("llama")
    model.model.layers[1].self_attn.k_proj = Doubling(model.model.layers[1].self_attn.k_proj)
    with pytest.raises(ExportError, match="k_proj of layer 1 is a Doubling"):
        places_of(model)


def test_quantized_weights_are_refused(tiny: Callable[..., Any]) -> None:
    """Their module is a Linear like others, and numbers without their scales say nothing."""
    model = tiny("llama")

    class Quantized(torch.nn.Linear):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states @ self.weight.float().T

    attention = model.model.layers[0].self_attn
    made = Quantized(64, 32, bias=False)
    weight = attention.k_proj.weight.detach().to(torch.float8_e4m3fn)
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    attention.k_proj = made
    with pytest.raises(ExportError, match="k_proj of layer 0 is a Quantized"):
        places_of(model)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek"])
def test_the_model_is_left_as_found(tiny: Callable[..., Any], name: str) -> None:
    """Also where it is refused."""
    model = tiny(name)
    model.model.layers[1].train()
    usual = dict(ALL_ATTENTION_FUNCTIONS.items())
    training = [module.training for module in model.modules()]
    try:
        places_of(model)
    except ExportError:
        assert name == "deepseek"
    assert [module.training for module in model.modules()] == training
    assert dict(ALL_ATTENTION_FUNCTIONS.items()) == usual
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
