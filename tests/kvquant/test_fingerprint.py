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
from peft import (
    CPTConfig,
    FourierFTConfig,
    HRAConfig,
    IA3Config,
    LoraConfig,
    MultitaskPromptTuningConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

from kvquant.errors import FileFormatError, FingerprintError, InputError
from kvquant.fingerprint import (
    Fingerprint,
    check_model,
    checkpoint_fingerprint,
    differing,
    fingerprint,
    record_lineage,
)
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


PROMPTS: dict[str, Callable[..., PeftConfig]] = {
    "prompt tuning": PromptTuningConfig,
    "p-tuning": lambda **own: PromptEncoderConfig(encoder_hidden_size=16, **own),
    "prefix tuning": PrefixTuningConfig,
    "multitask": lambda **own: MultitaskPromptTuningConfig(num_tasks=2, **own),
    "cpt": lambda **own: CPTConfig(
        cpt_token_ids=[3] * 5, cpt_mask=[1] * 5, cpt_tokens_type_mask=[1] * 5, **own
    ),
}


def prompted(base: Any, kind: str, seed: int) -> Any:
    """`base` with five virtual tokens, of random numbers, in front of each text."""
    config = PROMPTS[kind](task_type="CAUSAL_LM", num_virtual_tokens=5)
    model, random = get_peft_model(base, config), torch.Generator().manual_seed(seed)
    for parameter in model.prompt_encoder.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random)
    return model.eval()


@pytest.mark.parametrize("kind", PROMPTS)
def test_virtual_tokens_are_an_adapter(tiny: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    """Their numbers lie beside the base's modules, not in them."""
    expected = fingerprint(tiny("llama"))
    one, other = (prompted(tiny("llama"), kind, seed) for seed in (1, 2))
    found = fingerprint(one)
    assert found.weights == fingerprint(other).weights == expected.weights
    assert len(found.adapters) == 1
    assert found.adapters != fingerprint(other).adapters
    with one.disable_adapter():
        assert fingerprint(one) == expected
    assert fingerprint(one) == found
    one.save_pretrained(tmp_path)
    assert fingerprint(PeftModel.from_pretrained(tiny("llama"), tmp_path)) == found


def test_virtual_tokens_on_top_of_an_adapter_are_two(tiny: Callable[..., Any]) -> None:
    prompt = fingerprint(prompted(tiny("llama"), "prompt tuning", 1))
    lora = trained(tiny("llama"))
    below = fingerprint(lora)
    both = prompted(lora, "prompt tuning", 1)
    expected = replace(below, adapters=tuple(sorted([*below.adapters, *prompt.adapters])))
    assert fingerprint(both) == expected
    with both.disable_adapter():
        assert fingerprint(both) == below


SETTINGS: dict[str, tuple[Callable[..., PeftConfig], dict[str, Any], dict[str, Any]]] = {
    "places": (FourierFTConfig, {"n_frequency": 50}, {"n_frequency": 50, "random_loc_seed": 3}),
    "matrices": (
        VeraConfig,
        {"save_projection": False},
        {"save_projection": False, "projection_prng_key": 5},
    ),
    "another formula": (HRAConfig, {}, {"apply_GS": True}),
    "which tokens": (LoraConfig, {}, {"alora_invocation_tokens": [7]}),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_count_where_tensors_do_not_tell(
    tiny: Callable[..., Any], tmp_path: Path, case: str
) -> None:
    """Seeds of numbers that are not stored, formulas: the same tensors are another adapter."""
    config, *settings = SETTINGS[case]
    found = []
    for number, own in enumerate(settings):
        torch.manual_seed(0)
        task = {"task_type": "CAUSAL_LM", "target_modules": KEYS}
        model = get_peft_model(tiny("llama"), config(**task, **own))
        found.append(fingerprint(model))
        place = tmp_path / str(number)
        model.save_pretrained(place)
        assert fingerprint(PeftModel.from_pretrained(tiny("llama"), place)) == found[number]
    assert found[0].weights == found[1].weights
    assert found[0].adapters != found[1].adapters


def test_settings_that_tensors_tell_do_not_count_again(tiny: Callable[..., Any]) -> None:
    """How it was trained, and settings of this list that ended up in names, shapes and scaling."""
    own = {"lora_dropout": 0.5, "init_lora_weights": "gaussian", "target_modules": ".*[kv]_proj"}
    plain, other = (trained(tiny("llama"), r=4, lora_alpha=4, **config) for config in ({}, own))
    for (_, one), (_, two) in zip(plain.named_parameters(), other.named_parameters(), strict=True):
        two.data.copy_(one.data)
    assert fingerprint(plain) == fingerprint(other)


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


# Checkpoints, without loading them

FAMILIES = [
    "llama",
    "qwen2",
    "phi3",
    "gpt2",
    "gemma2",
    "cohere",
    "gpt_oss",
    "deepseek",
    "deepseek_v32",
    "qwen3_next",
    "llama4_text",
    "gemma3n_text",
    "gemma4_text",
    "falcon_h1",
    "lfm2",
]
SHARDED = {"max_shard_size": "20KB"}


def mixtral() -> Any:
    """Its experts have other names on disk than those of the other families."""
    config = AutoConfig.for_model(
        "mixtral",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=12,  # the tenth comes after the ninth, not after the first
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def gemma3() -> Any:
    """A model of text and images; on disk its parts have the names of older versions."""
    text = {
        "model_type": "gemma3_text",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize(
    ("stored", "options"), [(torch.float32, SHARDED), (torch.bfloat16, {})], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_is_the_model_that_it_loads_as(
    tiny: Callable[..., Any],
    tmp_path: Path,
    name: str,
    stored: torch.dtype,
    options: dict[str, str],
) -> None:
    """gpt2, gemma2, cohere and lfm2 tie their embeddings; some families join experts."""
    model = tiny(name).to(stored)
    model.save_pretrained(tmp_path, **options)
    found = checkpoint_fingerprint(tmp_path)
    assert found == fingerprint(model)
    assert found == fingerprint(load(tmp_path, DTYPES[stored == DTYPES[0]]))


@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("make", [mixtral, gemma3])
def test_names_that_loading_changes(
    tmp_path: Path, make: Callable[[], Any], stored: torch.dtype
) -> None:
    """What a model rounds when it is loaded comes from the checkpoint under these names too."""
    model = make().to(stored)
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert len(names - model.state_dict().keys()) > 20
    found = checkpoint_fingerprint(tmp_path)
    assert found == fingerprint(model)
    for dtype in DTYPES:
        assert found == fingerprint(type(model).from_pretrained(tmp_path, dtype=dtype))


def test_names_of_the_bare_decoder(tiny: Callable[..., Any], tmp_path: Path) -> None:
    """GPT-2's checkpoint on the hub is one."""
    model = tiny("gpt2")
    model.transformer.save_pretrained(tmp_path)
    assert "h.0.attn.c_attn.weight" in load_file(tmp_path / "model.safetensors")
    assert checkpoint_fingerprint(tmp_path) is not None
    assert checkpoint_fingerprint(tmp_path) == fingerprint(load(tmp_path))


def test_a_pickled_checkpoint(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert checkpoint_fingerprint(tmp_path) == fingerprint(model)


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("kept", ["both", "input", "output"])
@pytest.mark.parametrize("same", [False, True])
def test_embeddings_tied_or_not(
    tiny: Callable[..., Any], tmp_path: Path, configured: bool, kept: str, same: bool
) -> None:
    """Whatever the config says and the checkpoint holds of the two."""
    model = tiny("llama", tie_word_embeddings=configured)
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    inputs = held["model.embed_tokens.weight"]
    held["lm_head.weight"] = inputs.clone() if same else inputs + 1
    if kept != "both":
        del held["lm_head.weight" if kept == "input" else "model.embed_tokens.weight"]
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = checkpoint_fingerprint(tmp_path)
    if not configured and kept != "both":
        assert found is None  # half of the model is missing
        return
    for dtype in DTYPES:
        assert found == fingerprint(load(tmp_path, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_a_merged_checkpoint_keeps_the_identity_of_its_parts(
    tiny: Callable[..., Any], tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    tiny("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    trained(tiny("llama")).save_pretrained(tmp_path / "adapter")
    live = attach(load(tmp_path / "base", dtype), [tmp_path / "adapter"])
    origin = fingerprint(live)
    assert len(origin.adapters) == 1
    merge(live, ["adapter"]).save_pretrained(tmp_path / "merged", **SHARDED)
    assert checkpoint_fingerprint(tmp_path / "merged") == origin
    base = checkpoint_fingerprint(tmp_path / "base")
    assert base == replace(origin, adapters=())
    # Trained further, it is a model of its own.
    further = load(tmp_path / "merged", dtype)
    step(further.requires_grad_(True))
    further.save_pretrained(tmp_path / "further")
    found = checkpoint_fingerprint(tmp_path / "further")
    assert found == fingerprint(load(tmp_path / "further", dtype))
    assert found is not None
    assert found.adapters == ()
    assert found.weights != origin.weights


def test_every_tensor_of_a_checkpoint_counts(tiny: Callable[..., Any], tmp_path: Path) -> None:
    tiny("deepseek").save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    found = {checkpoint_fingerprint(tmp_path)}
    for name, tensor in held.items():
        changed = {**held, name: tensor + 1}
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        found.add(checkpoint_fingerprint(tmp_path))
    assert len(found) == len(held) + 1
    assert None not in found


def transposed(directory: Path) -> None:
    held = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    held[name] = held[name].T.contiguous()
    save_file(held, directory / "model.safetensors")


def without(name: str) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        held = load_file(directory / "model.safetensors")
        del held[name]
        save_file(held, directory / "model.safetensors")

    return spoil


def configured(**settings: Any) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        values = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**values, **settings}))

    return spoil


def in_another_dtype(dtype: torch.dtype) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        held = load_file(directory / "model.safetensors")
        name = "model.layers.0.self_attn.o_proj.weight"
        save_file({**held, name: held[name].to(dtype)}, directory / "model.safetensors")

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        without("model.layers.1.self_attn.kv_a_proj_with_mqa.weight"),
        without("model.layers.1.mlp.experts.2.up_proj.weight"),
        without("model.layers.1.mlp.gate.e_score_correction_bias"),
        configured(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        configured(quantization_config={"quant_method": "no such method"}),
        configured(model_type="no such model"),
        configured(hidden_size=32),
        configured(n_routed_experts=2, n_group=1),
        configured(num_hidden_layers=3),
        in_another_dtype(torch.float8_e4m3fn),
        in_another_dtype(torch.int8),
        transposed,
        lambda directory: (directory / "config.json").unlink(),
        lambda directory: (directory / "config.json").write_text("{"),
        lambda directory: (directory / "model.safetensors").unlink(),
        lambda directory: shutil.rmtree(directory),
    ],
)
def test_what_cannot_be_told_is_not_guessed(
    tiny: Callable[..., Any], tmp_path: Path, spoil: Callable[[Path], Any]
) -> None:
    tiny("deepseek").save_pretrained(tmp_path / "model")
    assert checkpoint_fingerprint(tmp_path / "model") is not None
    spoil(tmp_path / "model")
    assert checkpoint_fingerprint(tmp_path / "model") is None


def test_a_checkpoint_that_was_cut_short(tiny: Callable[..., Any], tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(FileFormatError, match=r"model\.safetensors cannot be read"):
        checkpoint_fingerprint(tmp_path)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": null}']
)
def test_an_index_that_is_none(tiny: Callable[..., Any], tmp_path: Path, content: str) -> None:
    tiny("llama").save_pretrained(tmp_path, **SHARDED)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(FileFormatError, match=r"cannot read .*index\.json"):
        checkpoint_fingerprint(tmp_path)


def test_looking_at_a_checkpoint_changes_nothing(
    tiny: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny("phi3_longrope").save_pretrained(tmp_path)
    tiny("llama", torch_dtype="bfloat16").config.save_pretrained(tmp_path / "broken")
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    before = torch.get_rng_state(), torch.get_default_dtype(), logging.get_verbosity()
    capfd.readouterr()
    assert checkpoint_fingerprint(tmp_path) is not None
    assert checkpoint_fingerprint(tmp_path / "broken") is None
    assert capfd.readouterr() == ("", "")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_default_dtype(), logging.get_verbosity()) == before[1:]
    assert torch.empty(1).device == torch.device("cpu")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux to count bytes read")
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_of_a_checkpoint_only_samples_are_read(
    tiny: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    tiny(name, vocab_size=30_000).save_pretrained(tmp_path)
    checkpoint_fingerprint(tmp_path)  # imports what it needs
    before = bytes_read()
    checkpoint_fingerprint(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size > 15_000_000
    assert bytes_read() - before < 300_000


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


@pytest.mark.real_model
def test_smollm2_is_told_from_its_files() -> None:
    from kvquant.models.loading import load as load_source
    from kvquant.models.loading import make_local, resolve

    source = make_local(resolve("smollm2"), print)
    loaded = load_source(source, device="cpu", notify=print)
    found = checkpoint_fingerprint(Path(source.model))
    assert found is not None
    assert found == fingerprint(loaded.model)
    rounded = load_source(source, device="cpu", dtype="bfloat16", notify=print)
    assert found == fingerprint(rounded.model)


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


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["weights"], "weights differ"),
        (["tokenizer"], "tokenizer differs"),
        (["chat template"], "chat template differs"),
        (["cache geometry"], "cache geometry differs"),
        (["rotary settings"], "rotary settings differ"),
        (["tokenizer", "chat template"], "tokenizer and chat template differ"),
        (["weights", "adapters", "tokenizer"], "weights, adapters and tokenizer differ"),
    ],
)
def test_what_differs_is_said_in_good_english(names: list[str], said: str) -> None:
    assert differing(names) == said


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("tiny-llama", "'tiny-llama'"),
        (Path("tiny-llama"), r"PosixPath\('tiny-llama'\)"),
        (None, "a NoneType"),
        (torch.nn.Linear(2, 2), "a Linear"),
    ],
)
def test_what_is_no_model_is_refused(model: Any, shown: str) -> None:
    for look in (check_model, fingerprint):
        with pytest.raises(InputError, match=f"^model must be a model in memory, not {shown}: gi"):
            look(model)


def test_a_name_is_no_tokenizer(tiny: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match=r"^tokenizer must be a tokenizer in memory, not 'tiny'"):
        fingerprint(tiny("llama"), "tiny")


def test_the_short_form_is_for_people() -> None:
    assert str(Fingerprint("0123456789abcdef", ("fedcba9876543210",))) == (
        "0123456789ab + adapter fedcba987654"
    )
    assert str(Fingerprint()) == "unknown weights"


def test_it_survives_json() -> None:
    whole = Fingerprint("w", ("a", "b"), "t", "c")
    assert Fingerprint.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole
    assert Fingerprint.from_dict(json.loads(json.dumps(Fingerprint().to_dict()))) == Fingerprint()
