"""Rotary layouts against the keys that real models give to their own rotation."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from calib.recorder import Recorder
from kvquant.cache.transformers_compat import cache_argument
from kvquant.geometry import CacheGeometry
from kvquant.rotary import RotaryLayout

HALF = RotaryLayout(0, 16, False, "half")
LAYOUTS = {
    "llama": HALF,
    "llama_linear": HALF,
    "llama_yarn": HALF,
    "llama_llama3": HALF,
    "llama_dynamic": HALF,
    "phi3": HALF,
    "phi3_longrope": HALF,
    "qwen2": HALF,
    "qwen3": HALF,
    "mistral": HALF,
    "gemma2": HALF,
    "gemma3_text": HALF,
    "smollm3": HALF,
    "glm": RotaryLayout(0, 8, True, "half"),
    "cohere": RotaryLayout(0, 16, True, "even"),
    "gpt_oss": RotaryLayout(0, 16, False, "all"),
    "qwen3_next": RotaryLayout(0, 4, False, "half"),
    "gpt_neox": RotaryLayout(0, 4, False, "half"),
    "phi": RotaryLayout(0, 8, False, "half"),
    "stablelm": RotaryLayout(0, 4, False, "half"),
    "qwen3_5_text": RotaryLayout(0, 4, False, "half"),
    "ministral3": HALF,
    "llama4_text": RotaryLayout(0, 16, True, "all"),
}
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
# Families that only matter here: other tables, or something else that depends on positions.
_MORE: dict[str, dict[str, Any]] = {
    "gpt_neox": {**_BASE},
    "phi": {**_BASE},
    "stablelm": {**_BASE},
    "ministral3": {**_BASE, "head_dim": 16},
    "nanochat": {**_BASE, "head_dim": 16},
    "llama4_text": {
        **_BASE,
        "head_dim": 16,
        "use_qk_norm": False,
        "intermediate_size_mlp": 64,
        "num_local_experts": 2,
    },
    "qwen3_5_text": {
        **_BASE,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


@pytest.fixture(scope="session")
def build(tiny: Callable[..., Any]) -> Callable[[str], Any]:
    """The tiny models by name, and a few more."""

    def built(name: str) -> Any:
        if name == "llama_dynamic":
            rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
            return tiny("llama", max_position_embeddings=32, rope_parameters=rope)
        if name not in _MORE:
            return tiny(name)
        settings = dict(_MORE[name])
        config = AutoConfig.for_model(name, **settings)
        if not hasattr(config, "num_key_value_heads"):
            settings.pop("num_key_value_heads")
            config = AutoConfig.for_model(name, **settings)
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    return built


def token_ids(*shape: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 128, shape)


def run(model: Any, ids: torch.Tensor, chunk: int, cache: Any) -> None:
    with torch.no_grad():
        for part in ids.split(chunk, 1):
            model(input_ids=part, use_cache=True, **{cache_argument(model.get_decoder()): cache})


def recorded(model: Any, ids: torch.Tensor, chunk: int) -> Recorder:
    with Recorder(model, CacheGeometry.from_config(model.config)) as recorder:
        run(model, ids, chunk, recorder.watch(DynamicCache(config=model.config)))
    return recorder


def keys_before_rotation(
    model: Any, ids: torch.Tensor, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """What the model hands to its own rotation, of each rotated layer ``[batch, kv, tokens, dim]``.

    Without a recorder, so that only real calls are seen.
    """
    module = sys.modules[type(model).__module__]
    calls: list[torch.Tensor] = []

    def noting(rotate: Callable[..., Any]) -> Callable[..., Any]:
        def noted(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append(k.clone())
            return rotate(q, k, *args, **kwargs)

        return noted

    for name in ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, noting(getattr(module, name)))
    run(model, ids, chunk, DynamicCache(config=model.config))
    monkeypatch.undo()
    passes = math.ceil(ids.shape[1] / chunk)
    layers = len(calls) // passes
    tokens = 1 if type(model).__name__.startswith("Llama4") else 2
    return [torch.cat(calls[layer::layers], tokens) for layer in range(layers)]


@pytest.mark.parametrize(
    ("name", "tokens", "chunk"),
    [(name, 40, chunk) for name in LAYOUTS for chunk in (40, 17)]
    + [
        # Beyond the 128 (or 32) positions of the original model, where the tables change.
        ("phi3_longrope", 200, 200),
        ("phi3_longrope", 200, 100),
        ("llama_yarn", 200, 100),
        ("llama_llama3", 200, 100),
        ("llama_dynamic", 100, 30),
        ("gpt_oss", 200, 100),
    ],
)
def test_mean_before_rotation_is_that_of_the_models_own_keys(
    build: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tokens: int,
    chunk: int,
) -> None:
    model, ids = build(name), token_ids(2, tokens)
    before = keys_before_rotation(model, ids, chunk, monkeypatch)
    layers = recorded(model, ids, chunk).layers
    rotated = [layer.key for layer in layers.values() if layer.key.rotary is not None]
    assert len(rotated) == len(before) > 0
    for stats, keys in zip(rotated, before, strict=True):
        assert stats.rotary == LAYOUTS[name]
        if name == "llama4_text":
            keys = keys.transpose(1, 2)
        expected = stats.mean.clone()
        expected[:, : keys.shape[3]] = keys.double().mean((0, 2))
        found = stats.mean_unrotated
        assert found is not None
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * _rms(keys))
        assert not torch.allclose(stats.mean, expected, atol=1e-2 * _rms(keys)), "rotation matters"
    assert all(layer.value.rotary is None for layer in layers.values())
    assert all(layer.value.mean_unrotated is None for layer in layers.values())


def _rms(states: torch.Tensor) -> float:
    return float(states.double().square().mean().sqrt())


@pytest.mark.parametrize("chunk", [40, 17])
def test_rotary_part_of_a_latent_layer_lies_in_the_value_slot(
    build: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """DeepSeek pairs (2i, 2i+1) but stores the halves apart: compared in the order of the cache."""
    model, ids = build("deepseek"), token_ids(2, 40)
    before = keys_before_rotation(model, ids, chunk, monkeypatch)
    layers = recorded(model, ids, chunk).layers
    assert len(before) == len(layers) == 2
    for layer, keys in zip(layers.values(), before, strict=True):
        assert layer.key.rotary is None
        assert layer.key.mean_unrotated is None
        assert layer.value.rotary == RotaryLayout(0, 4, False, "half")
        in_cache = torch.cat((keys[..., 0::2], keys[..., 1::2]), -1)
        expected = in_cache.double().mean((0, 2))
        assert layer.value.mean_unrotated is not None
        torch.testing.assert_close(layer.value.mean_unrotated, expected, rtol=1e-4, atol=1e-5)


def test_layers_without_rotation_have_no_layout(build: Callable[[str], Any]) -> None:
    smollm3 = recorded(build("smollm3"), token_ids(2, 20), 20).layers
    assert [layer.key.rotary for layer in smollm3.values()] == [HALF, HALF, HALF, None]
    assert smollm3[3].key.mean_unrotated is None
    gpt2 = recorded(build("gpt2"), token_ids(2, 20), 20).layers
    assert [layer.key.rotary for layer in gpt2.values()] == [None, None]


def test_a_rotation_unlike_those_known_is_no_layout(build: Callable[[str], Any]) -> None:
    """NanoChat turns its pairs the other way round."""
    for layer in recorded(build("nanochat"), token_ids(2, 20), 20).layers.values():
        assert layer.key.rotary is None
        assert layer.key.mean_unrotated is None
        assert layer.key.tokens == 40


def test_the_default_dtype_does_not_matter(build: Callable[[str], Any]) -> None:
    """bfloat16 does not hold each position beyond 256."""
    model, ids = build("llama"), token_ids(1, 300)
    torch.set_default_dtype(torch.bfloat16)
    try:
        layers = recorded(model, ids, 300).layers
    finally:
        torch.set_default_dtype(torch.float32)
    assert [layer.key.rotary for layer in layers.values()] == [HALF] * len(layers)


@pytest.mark.parametrize("name", ["llama", "glm", "cohere", "gpt_oss", "deepseek"])
def test_two_tokens_tell_as_much_as_many(build: Callable[[str], Any], name: str) -> None:
    model, ids = build(name), token_ids(2, 30)
    few, many = recorded(model, ids, 2).layers, recorded(model, ids, 30).layers
    for index in many:
        for slot in ("key", "value"):
            assert getattr(few[index], slot).rotary == getattr(many[index], slot).rotary


def test_one_token_first_leaves_the_layout_unknown(build: Callable[[str], Any]) -> None:
    """Position 0 is not turned: the mean before rotation is then missing, not wrong."""
    for layer in recorded(build("llama"), token_ids(2, 12), 1).layers.values():
        assert layer.key.rotary is None
        assert layer.key.mean_unrotated is None
        assert layer.key.tokens == 24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "llama_yarn", "qwen2", "glm", "cohere", "smollm3"])
def test_layouts_are_found_in_half_precision(
    build: Callable[[str], Any], name: str, dtype: torch.dtype
) -> None:
    model, ids = build(name), token_ids(2, 40)
    exact = recorded(model, ids, 40).layers
    for index, layer in recorded(model.to(dtype), ids, 40).layers.items():
        assert layer.key.rotary == exact[index].key.rotary
        mean, expected = layer.key.mean_unrotated, exact[index].key.mean_unrotated
        assert (mean is None) == (expected is None)
        if mean is not None and expected is not None:
            rms = exact[index].key.mean_square.sqrt()
            assert bool(((mean - expected).abs() <= 0.05 * rms).all())


# The layout itself


def random_table(columns: int, kind: str, factor: float) -> Any:
    """Position embeddings of 2 x 5 tokens as models make them; `factor` as in yarn."""
    torch.manual_seed(0)
    angles = torch.rand(2, 5, columns) * 6
    if kind == "complex":
        return torch.polar(torch.full_like(angles, factor), angles)
    if kind == "half":
        angles = torch.cat((angles, angles), -1)
    if kind == "even":
        angles = angles.repeat_interleave(2, -1)
    return angles.cos() * factor, angles.sin() * factor


@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("start", [0, 4, 8])
@pytest.mark.parametrize("kind", ["half", "even", "all", "complex"])
def test_unrotating_undoes_rotating(
    kind: str, start: int, interleaved: bool, factor: float
) -> None:
    layout = RotaryLayout(start, 8, interleaved, "all" if kind == "complex" else kind)
    table = random_table(4, kind, factor)
    states = torch.randn(2, 3, 5, 16)
    before = states.clone()
    turned = layout.rotate(states, table)
    torch.testing.assert_close(layout.unrotate(turned, table), states)
    torch.testing.assert_close(layout.rotate(layout.unrotate(states, table), table), states)
    assert torch.equal(states, before), "neither changes its input"
    untouched = [c for c in range(16) if not start <= c < start + 8]
    assert torch.equal(turned[..., untouched], states[..., untouched])
    norms = turned[..., start : start + 8].norm(dim=-1), states[..., start : start + 8].norm(dim=-1)
    torch.testing.assert_close(norms[0], norms[1] * factor)


@pytest.mark.parametrize(
    ("interleaved", "expected"),
    [(False, [[-3, -4, 1, 2, 5]]), (True, [[-2, 1, -4, 3, 5]])],
)
def test_a_quarter_turn(interleaved: bool, expected: list[list[float]]) -> None:
    states = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(1, 1, 1, 5)
    quarter = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
    layout = RotaryLayout(0, 4, interleaved, "all")
    assert layout.rotate(states, quarter)[0, 0].tolist() == expected


def test_multimodal_tables_are_those_of_text() -> None:
    cos, sin = random_table(4, "half", 1.0)
    stacked = cos.expand(3, 2, 5, 8), sin.expand(3, 2, 5, 8)
    states, layout = torch.randn(2, 3, 5, 8), RotaryLayout(0, 8, False, "half")
    assert torch.equal(layout.rotate(states, stacked), layout.rotate(states, (cos, sin)))


def test_plain_values_name_the_layout() -> None:
    layout = RotaryLayout(4, 8, True, "even")
    assert RotaryLayout(**layout.to_dict()) == layout
