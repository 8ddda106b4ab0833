"""One model, one fingerprint: whatever its adapters are called and wherever they come from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from kvquant.errors import FingerprintError
from kvquant.fingerprint import Fingerprint, fingerprint, record_lineage
from kvquant.models.adapters import activate, attach, merge

DTYPES = [torch.float32, torch.bfloat16]
KEYS = ["k_proj", "v_proj"]


def load(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, local_files_only=True, **options
    )


def trained(model: Any, seed: int = 1, **config: Any) -> Any:
    """`model` wrapped in PEFT, with an adapter that does something."""
    peft_model = get_peft_model(model, LoraConfig(**{"target_modules": KEYS, **config}))
    random = torch.Generator().manual_seed(seed)
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=random) * 0.05
    return peft_model.eval()


def step(model: Any, learning_rate: float = 1e-3) -> None:
    """One optimizer step of a language model."""
    tokens = torch.arange(3, 35)[None]
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    model.zero_grad()
    model.eval()


def test_looking_changes_nothing(tiny: Callable[..., Any]) -> None:
    model = trained(tiny("llama")).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = [value.requires_grad for value in model.parameters()]
    assert fingerprint(model) == fingerprint(model)
    assert model.training
    assert [value.requires_grad for value in model.parameters()] == wanted
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# Adapters

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "dora": {"use_dora": True},
    "patterns": {
        "rank_pattern": {"layers.0.self_attn.k_proj": 4},
        "alpha_pattern": {"layers.0.self_attn.k_proj": 5},
    },
    "embeddings": {"target_modules": ["k_proj", "embed_tokens"]},
    "saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens": {"trainable_token_indices": [1, 5]},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_live_adapter_is_the_base_and_one_adapter(
    tiny: Callable[..., Any], tmp_path: Path, kind: str, tied: bool, dtype: torch.dtype
) -> None:
    base = tiny("llama", tie_word_embeddings=tied)
    expected = fingerprint(base)
    base.save_pretrained(tmp_path / "base")
    model = trained(base, **KINDS[kind])
    adapter = fingerprint(model).adapters
    assert len(adapter) == 1
    assert fingerprint(model) == replace(expected, adapters=adapter)
    model.save_pretrained(tmp_path / "adapter")
    again = attach(load(tmp_path / "base", dtype), [tmp_path / "adapter"])
    assert fingerprint(again) == replace(expected, adapters=adapter)
    with activate(again, []):
        assert fingerprint(again) == expected
    by_peft = PeftModel.from_pretrained(load(tmp_path / "base", dtype), tmp_path / "adapter")
    assert fingerprint(by_peft) == replace(expected, adapters=adapter)
    with by_peft.disable_adapter():
        assert fingerprint(by_peft) == expected
    assert fingerprint(by_peft.get_base_model()) == replace(expected, adapters=adapter)


def test_every_kind_of_adapter_is_another(tiny: Callable[..., Any]) -> None:
    found = {fingerprint(trained(tiny("llama"), **config)).adapters for config in KINDS.values()}
    assert len(found) == len(KINDS)


def test_other_peft_methods_leave_the_base_alone_too(tiny: Callable[..., Any]) -> None:
    base = tiny("llama")
    expected = fingerprint(base)
    config = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    found = fingerprint(get_peft_model(base, config))
    assert found.weights == expected.weights
    assert len(found.adapters) == 1


def test_an_adapter_loaded_by_transformers_itself_is_the_same(
    tiny: Callable[..., Any], tmp_path: Path
) -> None:
    model = trained(tiny("llama"))
    model.save_pretrained(tmp_path)
    native = tiny("llama")
    native.load_adapter(str(tmp_path))
    assert fingerprint(native) == fingerprint(model)


def test_an_adapters_name_and_place_do_not_matter(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = trained(tiny("llama"))
    model.save_pretrained(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "elsewhere" / "two")
    found = {
        fingerprint(attach(tiny("llama"), [tmp_path / place])) for place in ("one", "elsewhere/two")
    }
    named = PeftModel.from_pretrained(tiny("llama"), tmp_path / "one", adapter_name="production")
    assert found == {fingerprint(model)} == {fingerprint(named)}


def saved_pair(tiny: Callable[..., Any], directory: Path) -> list[Path]:
    for seed, name in enumerate(("first", "second")):
        trained(tiny("llama"), seed=seed).save_pretrained(directory / name)
    return [directory / "first", directory / "second"]


def test_two_adapters_are_a_set(tiny: Callable[..., Any], tmp_path: Path) -> None:
    pair = saved_pair(tiny, tmp_path)
    model, swapped = attach(tiny("llama"), pair), attach(tiny("llama"), pair[::-1])
    both = fingerprint(model)
    assert len(set(both.adapters)) == 2
    assert list(both.adapters) == sorted(both.adapters)
    assert fingerprint(swapped) == both
    singles = []
    for name in ("first", "second"):
        with activate(model, [name]):
            singles.append(fingerprint(model))
    assert sorted(single.adapters[0] for single in singles) == list(both.adapters)
    assert {single.weights for single in singles} == {both.weights}
    assert fingerprint(model) == both


def test_the_same_weights_scaled_otherwise_are_another_adapter(tiny: Callable[..., Any]) -> None:
    models = [trained(tiny("llama"), lora_alpha=alpha) for alpha in (8, 16)]
    first, second = map(fingerprint, models)
    assert first.weights == second.weights
    assert first.adapters != second.adapters
    for layer in (0, 1):
        for name in KEYS:
            getattr(models[1].base_model.model.model.layers[layer].self_attn, name).scaling = {
                "default": 1
            }
    assert fingerprint(models[1]) == first


def test_which_layer_is_scaled_matters(tiny: Callable[..., Any]) -> None:
    found = {
        fingerprint(trained(tiny("llama"), alpha_pattern={f"layers.{layer}.self_attn.k_proj": 32}))
        for layer in (0, 1)
    }
    assert len(found) == 2


def test_training_the_adapter_makes_another_adapter(tiny: Callable[..., Any]) -> None:
    model = trained(tiny("llama"))
    before = fingerprint(model)
    step(model)
    assert fingerprint(model).weights == before.weights
    assert fingerprint(model).adapters != before.adapters


# Merged models


@pytest.mark.parametrize("again", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_a_merged_model_keeps_the_identity_of_its_parts(
    tiny: Callable[..., Any], tmp_path: Path, tied: bool, dtype: torch.dtype, again: torch.dtype
) -> None:
    """In bfloat16, some tensors of the merged model still are roundings of the base's float32."""
    tiny("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    trained(tiny("llama")).save_pretrained(tmp_path / "adapter")
    live = attach(load(tmp_path / "base", dtype), [tmp_path / "adapter"])
    origin = fingerprint(live)
    merged = merge(live, ["adapter"])
    record_lineage(merged, origin)
    assert fingerprint(merged) == origin
    merged.save_pretrained(tmp_path / "merged")
    assert fingerprint(load(tmp_path / "merged", dtype)) == origin
    assert fingerprint(load(tmp_path / "merged", again)) == origin
    assert fingerprint(live) == origin


def merged_pair(tiny: Callable[..., Any], directory: Path) -> tuple[Any, Fingerprint, list[Path]]:
    """A model with the first adapter merged into it, and what base and adapter are."""
    pair = saved_pair(tiny, directory)
    live = attach(tiny("llama"), pair[:1])
    origin = fingerprint(live)
    merged = merge(live, ["first"])
    record_lineage(merged, origin)
    return merged, origin, pair


def test_a_merged_model_that_is_trained_further_is_one_of_its_own(
    tiny: Callable[..., Any], tmp_path: Path
) -> None:
    merged, origin, _ = merged_pair(tiny, tmp_path)
    step(merged.requires_grad_(True))
    after = fingerprint(merged)
    assert after.weights != origin.weights
    assert after.adapters == ()
    merged.save_pretrained(tmp_path / "trained")
    assert fingerprint(load(tmp_path / "trained")) == after


def test_an_adapter_on_a_merged_model_joins_the_set(
    tiny: Callable[..., Any], tmp_path: Path
) -> None:
    merged, origin, pair = merged_pair(tiny, tmp_path)
    both = fingerprint(attach(tiny("llama"), pair))
    live = attach(merged, pair[1:])
    assert fingerprint(live) == both
    with activate(live, []):
        assert fingerprint(live) == origin
    twice = merge(live, ["second"])
    record_lineage(twice, both)
    assert fingerprint(twice) == both


def test_a_merged_model_without_lineage_is_one_of_its_own(
    tiny: Callable[..., Any], tmp_path: Path
) -> None:
    merged, origin, _ = merged_pair(tiny, tmp_path)
    vars(merged.config).pop("kvquant_lineage")
    assert fingerprint(merged).weights != origin.weights
    assert fingerprint(merged).adapters == ()


# Tokenizer and chat template


def test_tokenizer_and_template_are_part_of_the_identity(
    tiny: Callable[..., Any], byte_tokenizer: Any
) -> None:
    model = tiny("llama")
    plain = fingerprint(model)
    assert (plain.tokenizer, plain.chat_template) == ("", "")
    first = fingerprint(model, byte_tokenizer)
    assert first == replace(plain, tokenizer=first.tokenizer)
    assert len(first.tokenizer) == 64
    byte_tokenizer.chat_template = "{{ messages }}"
    second = fingerprint(model, byte_tokenizer)
    assert second == replace(first, chat_template=second.chat_template)
    assert len(second.chat_template) == 64
    byte_tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert fingerprint(model, byte_tokenizer).tokenizer != first.tokenizer


def test_a_tokenizer_saved_and_loaded_is_the_same(
    tiny: Callable[..., Any], save_tiny: Callable[..., Path], byte_tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    model = tiny("llama")
    byte_tokenizer.chat_template = "{{ messages }}"
    byte_tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert fingerprint(model, again) == fingerprint(model, byte_tokenizer)


def test_tokenizer_and_template_do_not_refuse() -> None:
    mine = Fingerprint("w", ("a",), "tokenizer", "template")
    theirs = replace(mine, tokenizer="another", chat_template="")
    assert mine.differences(theirs) == []
    mine.check(theirs)


# What people see


@pytest.mark.parametrize(
    ("theirs", "differ"),
    [
        (Fingerprint("v" * 64, ("a" * 64,)), "weights differ"),
        (Fingerprint("w" * 64), "adapters differ"),
        (Fingerprint("v" * 64, ("b" * 64,)), "weights and adapters differ"),
        (Fingerprint(), "weights and adapters differ"),
    ],
)
def test_a_refusal_shows_both_and_what_differs(theirs: Fingerprint, differ: str) -> None:
    mine = Fingerprint("w" * 64, ("a" * 64,))
    with pytest.raises(FingerprintError) as caught:
        mine.check(theirs)
    message = str(caught.value)
    assert message.endswith(differ)
    assert "wwwwwwwwwwww + adapter aaaaaaaaaaaa" in message
    assert str(theirs) in message


def test_the_short_form_is_for_people() -> None:
    assert str(Fingerprint("0123456789abcdef", ("fedcba9876543210",))) == (
        "0123456789ab + adapter fedcba987654"
    )
    assert str(Fingerprint()) == "unknown weights"


def test_it_survives_json() -> None:
    whole = Fingerprint("w", ("a", "b"), "t", "c")
    assert Fingerprint.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole
    assert Fingerprint.from_dict(json.loads(json.dumps(Fingerprint().to_dict()))) == Fingerprint()
