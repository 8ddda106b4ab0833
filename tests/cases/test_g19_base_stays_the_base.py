"""huggingface/peft#2289, #1035: attaching and merging change the base model in place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from calib.collect import collect
from calib.stats import CalibrationStats
from kvquant.fingerprint import fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.models.adapters import activate, attach, base_model, merge

BLOCKS = [[(7 * i + start) % 120 + 4 for i in range(24)] for start in (0, 3, 11)]
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "with embeddings": {"modules_to_save": ["embed_tokens"]},
}


@pytest.fixture
def adapters(tiny: Callable[..., Any], tmp_path: Path) -> Callable[..., list[Path]]:
    """Two adapters on disk."""

    def make(**config: Any) -> list[Path]:
        paths = [tmp_path / "first", tmp_path / "second"]
        for seed, path in enumerate(paths):
            base = tiny("llama")
            torch.manual_seed(seed)
            settings = {"target_modules": ["k_proj", "v_proj"], **config}
            tuned = LoraConfig(init_lora_weights=False, **settings)
            get_peft_model(base, tuned).save_pretrained(path)
        return paths

    return make


def stats_of(model: Any) -> CalibrationStats:
    return collect(model, BLOCKS, CacheGeometry.from_config(base_model(model).config))


def weights_hash(model: Any) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def tensors(stats: CalibrationStats) -> list[torch.Tensor]:
    """Everything that was counted."""
    return [
        value
        for _, layer in sorted(stats.layers.items())
        for slot in (layer.key, layer.value)
        for part in (slot, slot.sketch, slot.token_amax)
        for value in vars(part).values()
        if isinstance(value, torch.Tensor)
    ]


def same(one: CalibrationStats, other: CalibrationStats) -> bool:
    """Whether two statistics are equal bit for bit."""
    pairs = zip(tensors(one), tensors(other), strict=True)
    return one.tokens == other.tokens and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_base_adapter_base_in_one_process(
    tiny: Callable[..., Any], adapters: Callable[..., list[Path]], kind: str
) -> None:
    plain = stats_of(tiny("llama"))
    paths = adapters(**KINDS[kind])
    model = attach(tiny("llama"), paths[:1])
    everything = weights_hash(model)
    with activate(model, []):
        first = stats_of(model)
    with activate(model, ["first"]):
        tuned = stats_of(model)
    with activate(model, []):
        again = stats_of(model)
    assert same(first, again)
    assert same(first, plain)
    assert not same(first, tuned)
    assert weights_hash(model) == everything


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_one_adapter_does_not_leak_into_the_next(
    tiny: Callable[..., Any], adapters: Callable[..., list[Path]], kind: str
) -> None:
    paths = adapters(**KINDS[kind])
    model = attach(tiny("llama"), paths)
    everything, both = weights_hash(model), stats_of(model)
    found = {}
    for name in ("first", "second"):
        with activate(model, [name]):
            found[name] = stats_of(model)
        assert same(found[name], stats_of(attach(tiny("llama"), [paths[name == "second"]])))
    assert not same(found["first"], found["second"])
    assert same(stats_of(model), both)
    assert weights_hash(model) == everything


def test_merging_makes_a_copy(
    tiny: Callable[..., Any], adapters: Callable[..., list[Path]]
) -> None:
    model = attach(tiny("llama"), adapters()[:1])
    everything, live, identity = weights_hash(model), stats_of(model), fingerprint(model)
    merged = merge(model, ["first"])
    stats_of(merged)
    with torch.no_grad():
        for value in merged.parameters():
            value.zero_()
    assert weights_hash(model) == everything
    assert fingerprint(model) == identity
    assert same(stats_of(model), live)


def test_measuring_leaves_no_trace(
    tiny: Callable[..., Any], adapters: Callable[..., list[Path]]
) -> None:
    model = attach(tiny("llama"), adapters()).train()
    wanted = [value.requires_grad for value in model.parameters()]
    with activate(model, ["second"]):
        stats_of(model)
    assert model.active_adapters == ["first", "second"]
    assert [value.requires_grad for value in model.parameters()] == wanted
    assert all(module.training for module in model.modules())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    assert not any(getattr(module, name) for module in model.modules() for name in hooks)
