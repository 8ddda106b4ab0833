"""Prefixes on disk: everything comes back bit for bit, and only for what it was made with."""

from __future__ import annotations

import json
import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from calib.collect import collect
from calib.solve import solve
from kvquant import KVScales, QuantizedCache
from kvquant.cache.companions import recurrent_state
from kvquant.cache.layer import QuantizedLayer
from kvquant.cache.prefix import _OF_THE_FILE, _sha256
from kvquant.cache.slot import SlotStore
from kvquant.cache.transformers_compat import cache_argument
from kvquant.cache.window import Window
from kvquant.errors import FileFormatError, FingerprintError, InputError
from kvquant.fingerprint import fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.quantize.codec import Codec
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format
from kvquant.storage import read, save_scales

KIVI = {"group_size": 4, "residual_length": 5}
SCHEMES: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("int8", {"residual_length": 3}),
    ("int4", {}),
    ("int4-kivi", KIVI),
]

MODELS = ("llama", "gemma2", "gemma3n_text", "gpt_oss", "deepseek")
# These keep something else beside keys and values.
BESIDE = ("qwen3_next", "falcon_h1", "lfm2", "deepseek_v32")


def ids(batch: int = 1, tokens: int = 23, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def left_padded() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = ids(2)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    return tokens, mask


def fill(
    model: Any, cache: QuantizedCache, tokens: torch.Tensor, mask: torch.Tensor | None = None
) -> QuantizedCache:
    """Lets `model` read `tokens` into `cache`; `mask` also covers what is in it."""
    call: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask}
    if mask is not None:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        call["position_ids"] = positions[:, -tokens.shape[1] :]
    with torch.no_grad():
        model(**call, **{cache_argument(model.get_decoder()): cache})
    return cache


def generate(model: Any, cache: Any, tokens: torch.Tensor, mask: torch.Tensor | None) -> Any:
    return model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens) if mask is None else mask,
        max_new_tokens=9,
        do_sample=False,
        pad_token_id=0,
        **{cache_argument(model.get_decoder()): cache},
    )


def content(cache: QuantizedCache) -> tuple[Any, dict[str, torch.Tensor]]:
    """Numbers and live tensors of a cache, by name."""
    numbers, tensors = cache._ledger.state()
    found: list[Any] = [numbers]
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, QuantizedLayer):
            own, parts = layer.state()
        elif hasattr(layer, "recurrent_states"):
            own, parts = recurrent_state(layer)
        else:
            continue
        found.append(own)
        tensors |= {f"{index}.{name}": part for name, part in parts.items()}
    return found, tensors


def assert_same(one: QuantizedCache, other: QuantizedCache) -> None:
    (numbers, tensors), (others, parts) = content(one), content(other)
    assert numbers == others
    assert tensors.keys() == parts.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == parts[name].dtype, name
        assert torch.equal(tensor, parts[name]), name
    assert len(tensors) > 0


def calibrated(model: Any, how: TensorScheme) -> KVScales:
    geometry = CacheGeometry.from_config(model.config)
    stats = collect(model, [ids(1, 64, 5)[0].tolist()] * 2, geometry)
    origin = replace(stats.provenance, fingerprints=(fingerprint(model),))
    return solve(replace(stats, provenance=origin), QuantScheme(how, how))


INT8 = TensorScheme(tensor_format("int8"), Granularity.PER_CHANNEL, symmetric=False)


@pytest.fixture
def quiet() -> Any:
    """No warning is expected."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.parametrize(("scheme", "changes"), SCHEMES, ids=[name for name, _ in SCHEMES])
@pytest.mark.parametrize("name", [*MODELS, *BESIDE])
def test_generating_goes_on_as_it_would_have(
    tiny: Callable[..., Any],
    byte_tokenizer: Any,
    tmp_path: Path,
    name: str,
    scheme: str,
    changes: dict[str, Any],
) -> None:
    if name == "deepseek_v32" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("cached something else then")
    model = tiny(name)
    tokens, mask = left_padded()
    cache = fill(model, QuantizedCache.from_model(model, scheme, **changes), tokens, mask)
    cache.save(tmp_path / "p.safetensors", model, byte_tokenizer)
    loaded = QuantizedCache.load(tmp_path / "p", model, tokenizer=byte_tokenizer)
    assert loaded.scheme == cache.scheme
    assert loaded.live_nbytes() == cache.live_nbytes()
    assert_same(cache, loaded)
    text = torch.cat([tokens, ids(2, 4, 1)], 1)
    whole = torch.cat([mask, torch.ones(2, 4, dtype=mask.dtype)], 1)
    first, second = (generate(model, each, text, whole) for each in (cache, loaded))
    assert torch.equal(first, second)
    assert_same(cache, loaded)


def test_one_prefix_serves_many_questions(
    tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> None:
    model = tiny("llama")
    prefix = ids()
    cache = fill(model, QuantizedCache.from_model(model, "int4"), prefix)
    cache.save(tmp_path / "p.safetensors", model, byte_tokenizer)
    # Questions of 5, 3 and 1 tokens, padded between prefix and question.
    questions = ids(3, 5, 2)
    mask = torch.ones(3, 28, dtype=torch.long)
    mask[1, 23:25] = 0
    mask[2, 23:27] = 0
    text = torch.cat([prefix.expand(3, -1), questions], 1)
    answers = []
    for each in (cache, QuantizedCache.load(tmp_path / "p", model, tokenizer=byte_tokenizer)):
        each.batch_repeat_interleave(3)
        answers.append(generate(model, each, text, mask))
    assert torch.equal(*answers)
    alone = QuantizedCache.load(tmp_path / "p", model, tokenizer=byte_tokenizer)
    last = torch.cat([prefix, questions[2:, 4:]], 1)
    assert torch.equal(generate(model, alone, last, None)[0, 24:], answers[0][2, 28:])


PREFIX, QUESTIONS = "Answer in one word. ", ["Who?", "Where was it that they met?", "Why not?"]


def loaded_prefix(
    tiny: Callable[..., Any], tokenizer: Any, path: Path, scheme: str = "none", name: str = "llama"
) -> tuple[Any, QuantizedCache]:
    """A model, and a cache with one row of `PREFIX` that was saved and loaded."""
    model = tiny(name)
    tokens = tokenizer(PREFIX, return_tensors="pt")["input_ids"]
    fill(model, QuantizedCache.from_model(model, scheme), tokens).save(path, model, tokenizer)
    return model, QuantizedCache.load(path, model, tokenizer=tokenizer)


@pytest.fixture
def padding_tokenizer(byte_tokenizer: Any) -> Any:
    byte_tokenizer.pad_token = byte_tokenizer.eos_token
    return byte_tokenizer


HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "several samples": {"do_sample": True, "temperature": 2.0, "num_return_sequences": 2},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_example_of_the_documentation(
    tiny: Callable[..., Any], padding_tokenizer: Any, tmp_path: Path, name: str, how: str
) -> None:
    """What stands in `QuantizedCache.load`; each row says what it says without a prefix's cache."""
    tokenizer, prefix, questions = padding_tokenizer, PREFIX, QUESTIONS
    model, cache = loaded_prefix(tiny, tokenizer, tmp_path / "system-prompt", name=name)
    cache.batch_repeat_interleave(3)
    first = tokenizer([prefix] * 3, return_tensors="pt")
    rest = tokenizer(
        questions, return_tensors="pt", add_special_tokens=False, padding=True, padding_side="left"
    )
    inputs = {
        part: torch.cat([first[part], rest[part]], dim=1)
        for part in ("input_ids", "attention_mask")
    }
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **HOW[how]}
    given = {cache_argument(model.get_decoder()): cache}
    if how != "greedy":
        # Beams and samples repeat rows: those of a cache, before they are handed over.
        cache.batch_repeat_interleave(HOW[how].get("num_beams", 2))
    torch.manual_seed(5)
    found = model.generate(**inputs, **given, **settings)
    torch.manual_seed(5)
    assert torch.equal(found, model.generate(**inputs, **settings))
    if how == "greedy":
        whole = tokenizer(prefix + questions[1], return_tensors="pt")
        alone = model.generate(**whole, **settings)
        assert torch.equal(found[1, -6:], alone[0, -6:])


@pytest.mark.parametrize("scheme", ["none", "int8", "int4"])
def test_prompts_that_were_padded_in_front_of_the_prefix_are_refused(
    tiny: Callable[..., Any], padding_tokenizer: Any, tmp_path: Path, scheme: str
) -> None:
    model, cache = loaded_prefix(tiny, padding_tokenizer, tmp_path / "p", scheme)
    cache.batch_repeat_interleave(3)
    texts = [PREFIX + question for question in QUESTIONS]
    inputs = padding_tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    given = {cache_argument(model.get_decoder()): cache}
    message = (
        "row 0: the attention mask calls 0 of the 20 cached tokens real .*, the cache holds 20. A "
        ".*: a cached prefix comes first in every row, and padding goes between it and the rest$"
    )
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            model.generate(**inputs, **given, max_new_tokens=3, do_sample=False)
        assert cache.get_seq_length() == 20
    # Padded on the right, the prefix is where it was.
    inputs = padding_tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    model.generate(**inputs, **given, max_new_tokens=3, do_sample=False)


def test_a_prefix_that_was_padded_itself_does_not_take_a_mask_of_ones(
    tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> None:
    """Transformers drops such a mask, so that there is none."""
    model = tiny("llama")
    tokens, mask = left_padded()
    cache = fill(model, QuantizedCache.from_model(model, "int8"), tokens, mask)
    text = torch.cat([tokens, ids(2, 4, 1)], 1)
    with pytest.raises(
        InputError, match=r"row 0: the attention mask calls 23 of the 23 .* holds 16"
    ):
        generate(model, cache, text, torch.ones_like(text))
    with pytest.raises(InputError, match=r"row 0: .* 23 of the 23 .*without one all are.* 16"):
        fill(model, cache, ids(2, 4, 1))


def test_a_prefix_goes_on_with_drafts(
    tiny: Callable[..., Any], padding_tokenizer: Any, tmp_path: Path
) -> None:
    model, cache = loaded_prefix(tiny, padding_tokenizer, tmp_path / "p")
    whole = padding_tokenizer(PREFIX + QUESTIONS[1] * 2, return_tensors="pt")
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    drafts = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}
    given = {cache_argument(model.get_decoder()): cache}
    if Version(transformers.__version__) < Version("5.24"):
        # It hands the whole prompt over again; with its own cache, that is other text in silence.
        with pytest.raises(InputError, match="a prompt begins with what is cached"):
            model.generate(**whole, **given, **settings, **drafts)
        return
    found = model.generate(**whole, **given, **settings, **drafts)
    assert torch.equal(found, model.generate(**whole, **settings))


def test_groups_that_a_crop_left_short_stay_short(
    tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> None:
    model = tiny("llama")
    cache = fill(model, QuantizedCache.from_model(model, "int4-kivi", **KIVI), ids())
    cache.crop(-13)
    fill(model, cache, ids(1, 12, 1))
    cache.crop(-6)
    key, _ = cache.layers[0].stores[0]
    assert key.state()[0]["short"], "nothing is short: the test is about nothing"
    cache.save(tmp_path / "p.safetensors", model, byte_tokenizer)
    loaded = QuantizedCache.load(tmp_path / "p", model, tokenizer=byte_tokenizer)
    assert_same(cache, loaded)
    for each in (cache, loaded):
        fill(model, each, ids(1, 8, 2))
        each.crop(-3)
        fill(model, each, ids(1, 30, 3))
    assert_same(cache, loaded)


def test_what_a_rollback_may_take_back_is_still_exact(
    tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> None:
    model = tiny("gemma2")
    cache = QuantizedCache.from_model(model, "int8")
    cache.activate_past_recording()
    fill(model, cache, ids())
    cache.save(tmp_path / "p.safetensors", model, byte_tokenizer)
    loaded = QuantizedCache.load(tmp_path / "p", model, tokenizer=byte_tokenizer)
    assert loaded.is_croppable
    for each in (cache, loaded):
        each.crop(-12)
        fill(model, each, ids(1, 3, 1))
    assert_same(cache, loaded)


def test_a_longer_prefix_can_be_saved_again(
    tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> None:
    model, path = tiny("mistral"), tmp_path / "p.safetensors"
    cache = fill(model, QuantizedCache.from_model(model, "int4-kivi", **KIVI), ids())
    cache.save(path, model, byte_tokenizer)
    loaded = QuantizedCache.load(path, model, tokenizer=byte_tokenizer)
    fill(model, loaded, ids(1, 40, 1)).save(path, model, byte_tokenizer)
    fill(model, cache, ids(1, 40, 1))
    assert_same(cache, QuantizedCache.load(path, model, tokenizer=byte_tokenizer))


def test_only_what_can_be_seen_is_written(
    tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> None:
    model = tiny("gemma2")
    cache = fill(model, QuantizedCache.from_model(model, "int4"), ids(1, 90))
    cache.save(tmp_path / "p.safetensors", model, byte_tokenizer)
    tensors, _ = read(tmp_path / "p.safetensors", "prefix")
    written = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert written == cache.live_nbytes() < cache.nbytes()


def test_the_means_come_along(
    tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path, quiet: None
) -> None:
    model, path = tiny("qwen2"), tmp_path / "p.safetensors"
    scales = calibrated(model, INT8)
    cache = QuantizedCache.from_model(model, "int4", scales, tokenizer=byte_tokenizer)
    assert cache.plan.turns_means
    fill(model, cache, ids(1, 40)).save(path, model, byte_tokenizer)
    save_scales(scales, tmp_path / "scales.safetensors")
    given = (None, scales, tmp_path / "scales")
    caches = [
        QuantizedCache.load(path, model, tokenizer=byte_tokenizer, scales=each) for each in given
    ]
    for each in (cache, *caches):
        fill(model, each, ids(1, 9, 1))
    for each in caches:
        assert each.scales is not None
        assert_same(cache, each)
    assert "turned with the position" in caches[0].summary()


def test_static_scales_come_along(
    tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> None:
    model, path = tiny("llama"), tmp_path / "p.safetensors"
    cache = QuantizedCache.from_model(model, scales=calibrated(model, INT8))
    fill(model, cache, ids()).save(path, model, byte_tokenizer)
    loaded = QuantizedCache.load(path, model, tokenizer=byte_tokenizer)
    assert loaded.scales is not None and cache.scales is not None
    assert loaded.scales.layers == cache.scales.layers
    for each in (cache, loaded):
        fill(model, each, ids(1, 9, 1))
    assert_same(cache, loaded)


def test_other_scales_are_refused(
    tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> None:
    model, path = tiny("qwen2"), tmp_path / "p.safetensors"
    scales = calibrated(model, INT8)
    cache = QuantizedCache.from_model(model, "int4", scales)
    fill(model, cache, ids()).save(path, model, byte_tokenizer)
    key = scales.layers[1].key
    assert key.mean_unrotated is not None
    moved = replace(scales.layers[1], key=replace(key, mean_unrotated=key.mean_unrotated + 1e-3))
    other = replace(scales, layers={**scales.layers, 1: moved})
    with pytest.raises(FingerprintError, match="other scales or means: leave scales away"):
        QuantizedCache.load(path, model, tokenizer=byte_tokenizer, scales=other)
    # Ranges are no part of what int4 is made with.
    wider = replace(key, scale=key.scale * 2)
    layers = {**scales.layers, 1: replace(scales.layers[1], key=wider)}
    QuantizedCache.load(
        path, model, tokenizer=byte_tokenizer, scales=replace(scales, layers=layers)
    )


@pytest.fixture
def saved(tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path) -> Path:
    """A prefix of the tiny llama."""
    model = tiny("llama")
    path = tmp_path / "p.safetensors"
    cache = fill(model, QuantizedCache.from_model(model, "int4"), ids())
    cache.save(path, model, byte_tokenizer)
    return path


def refused(path: Path, model: Any, tokenizer: Any) -> str:
    with pytest.raises(FingerprintError) as caught:
        QuantizedCache.load(path, model, tokenizer=tokenizer)
    return str(caught.value)


def test_other_weights_are_refused_and_can_be_forced(
    saved: Path, tiny: Callable[..., Any], byte_tokenizer: Any
) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0] += 0.01
    message = refused(saved, model, byte_tokenizer)
    assert ": weights differ," in message
    assert "let this model read the prefix and save it" in message
    with pytest.warns(UserWarning, match="forced: .*weights differ") as caught:
        cache = QuantizedCache.load(saved, model, tokenizer=byte_tokenizer, force=True)
    assert [warning.filename for warning in caught] == [__file__], "it points here"
    assert cache.get_seq_length() == 23


def test_another_adapter_is_refused(
    saved: Path, tiny: Callable[..., Any], byte_tokenizer: Any
) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["v_proj"], r=2, init_lora_weights=False)
    model = get_peft_model(tiny("llama"), config)
    assert ": adapters differ," in refused(saved, model, byte_tokenizer)
    with model.disable_adapter():
        QuantizedCache.load(saved, model, tokenizer=byte_tokenizer)


def test_an_adapters_prefix_is_its_own(
    tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["v_proj"], r=2, init_lora_weights=False)
    torch.manual_seed(1)
    model = get_peft_model(tiny("llama"), config)
    cache = fill(model, QuantizedCache.from_model(model, "int8"), ids())
    cache.save(tmp_path / "p", model, byte_tokenizer)
    assert_same(cache, QuantizedCache.load(tmp_path / "p", model, tokenizer=byte_tokenizer))
    assert ": adapters differ," in refused(tmp_path / "p", tiny("llama"), byte_tokenizer)


def test_another_tokenizer_or_chat_template_is_refused(
    saved: Path, tiny: Callable[..., Any], byte_tokenizer: Any
) -> None:
    model = tiny("llama")
    byte_tokenizer.chat_template = "{{ messages }}"
    who = f"{saved} is a prefix of this model ({fingerprint(model)}), but the"
    then = (
        ", so that its tokens may be others than those of your text; give the tokenizer that it "
        "was saved with, or let the model read the prefix again and save it"
    )
    assert refused(saved, model, byte_tokenizer) == f"{who} chat template differs{then}"
    byte_tokenizer.add_tokens(["<tool>"])
    both = "tokenizer and chat template differ"
    assert refused(saved, model, byte_tokenizer) == f"{who} {both}{then}"
    byte_tokenizer.chat_template = None
    assert refused(saved, model, byte_tokenizer) == f"{who} tokenizer differs{then}"
    byte_tokenizer.chat_template = "{{ messages }}"
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    message = refused(saved, model, byte_tokenizer)
    assert f", the model is {fingerprint(model)}: weights, {both}, so that its keys" in message


def test_other_rotary_settings_are_refused(
    saved: Path, tiny: Callable[..., Any], byte_tokenizer: Any
) -> None:
    # The same weights, as when a longer context is served through YaRN.
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny("llama", rope_parameters={**rope, "original_max_position_embeddings": 128})
    message = refused(saved, model, byte_tokenizer)
    assert ': rope_parameters ({"rope_theta": 10000.0, "rope_type": "default"}, here {' in message
    assert ") differs, so that its keys and values would be wrong; let this model" in message


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("llama", {"rms_norm_eps": 1e-2}, "rms_norm_eps (1e-06, here 0.01) differs"),
        ("llama", {"hidden_act": "relu"}, 'hidden_act ("silu", here "relu") differs'),
        (
            "llama",
            {"hidden_act": "relu", "rms_norm_eps": 1e-2},
            'hidden_act ("silu", here "relu") and rms_norm_eps (1e-06, here 0.01) differ',
        ),
        ("llama", {"heat": 2.0}, "heat (null, here 2.0) differs"),  # of a version to come
        ("qwen3_next", {"num_experts_per_tok": 1}, "num_experts_per_tok (2, here 1) differs"),
        ("gemma2", {"query_pre_attn_scalar": 4}, "query_pre_attn_scalar (256, here 4) differs"),
    ],
)
def test_the_same_weights_with_other_settings_are_refused(
    tiny: Callable[..., Any],
    byte_tokenizer: Any,
    tmp_path: Path,
    family: str,
    settings: dict[str, Any],
    named: str,
) -> None:
    model = tiny(family)
    cache = fill(model, QuantizedCache.from_model(model, "int8"), ids())
    cache.save(tmp_path / "p", model, byte_tokenizer)
    other = tiny(family, **settings)
    assert f": {named}, so that its keys" in refused(tmp_path / "p", other, byte_tokenizer)
    with pytest.warns(UserWarning, match="forced: "):
        QuantizedCache.load(tmp_path / "p", other, tokenizer=byte_tokenizer, force=True)


def test_many_other_settings_are_counted(
    saved: Path, tiny: Callable[..., Any], byte_tokenizer: Any
) -> None:
    other = tiny("llama", **{f"new_{letter}": letter * 99 for letter in "abcdef"})
    message = refused(saved, other, byte_tokenizer)
    assert f'new_a (null, here "{"a" * 76}…), new_b' in message
    assert "…) and 3 other settings differ, so" in message


def test_settings_that_change_no_keys_or_values_do_not_matter(
    saved: Path, tiny: Callable[..., Any], byte_tokenizer: Any
) -> None:
    other = tiny(
        "llama",
        use_cache=False,
        attention_dropout=0.5,
        eos_token_id=[5, 6],
        architectures=["LlamaForCausalLM"],
        pretraining_tp=2,
        id2label={0: "yes"},
        unsloth_version="1",
    )
    other.config.initializer_range = 0.5
    other.set_attn_implementation("eager")
    QuantizedCache.load(saved, other, tokenizer=byte_tokenizer)


def test_settings_that_one_version_does_not_know_do_not_matter(
    saved: Path, tiny: Callable[..., Any], byte_tokenizer: Any
) -> None:
    """A new version adds settings whose default is what the old one did."""

    def from_before(_: dict[str, Any], header: dict[str, Any]) -> None:
        header["transformers"] = "5.16.0"
        header["config"]["gone_since"] = 1.0
        del header["config"]["mlp_bias"]

    def another_norm(_: dict[str, Any], header: dict[str, Any]) -> None:
        header["config"]["rms_norm_eps"] = 0.5

    for change in (from_before, another_norm):
        rewritten(saved, change)
        rewritten(saved, hashed_again)
        if change is from_before:
            QuantizedCache.load(saved, tiny("llama"), tokenizer=byte_tokenizer)
    named = ": rms_norm_eps (0.5, here 1e-06) differs, so"
    assert named in refused(saved, tiny("llama"), byte_tokenizer)


@pytest.mark.parametrize("family", [*MODELS, "qwen3_next", "falcon_h1", "gpt2", "phi3_longrope"])
def test_a_model_from_disk_has_the_same_settings(
    tiny: Callable[..., Any], tmp_path: Path, family: str
) -> None:
    model = tiny(family)
    cache = fill(model, QuantizedCache.from_model(model, "int8"), ids())
    cache.save(tmp_path / "p", model)
    model.save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with pytest.warns(UserWarning, match="which tokenizer"):
        assert_same(cache, QuantizedCache.load(tmp_path / "p", again))


def test_another_geometry_cannot_be_forced(
    saved: Path, tiny: Callable[..., Any], byte_tokenizer: Any
) -> None:
    other = tiny("llama", num_key_value_heads=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing was forced, nor did anything matter
        for tokenizer in (byte_tokenizer, None):
            with pytest.raises(FingerprintError, match="weights and cache geometry differ"):
                QuantizedCache.load(saved, other, tokenizer=tokenizer, force=True)
    other = tiny("llama", max_position_embeddings=1024)
    message = f"of this model ({fingerprint(other)}): cache geometry differs, so that its keys"
    assert message in refused(saved, other, byte_tokenizer)


def test_an_unknown_tokenizer_is_worth_a_warning(
    saved: Path, tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> None:
    model = tiny("llama")
    with pytest.warns(UserWarning, match="this call does not say which tokenizer") as caught:
        cache = QuantizedCache.load(saved, model)
    assert [warning.filename for warning in caught] == [__file__], "it points here"
    cache.save(tmp_path / "unknown.safetensors", model)
    with pytest.warns(UserWarning, match="the prefix does not say which tokenizer"):
        QuantizedCache.load(tmp_path / "unknown", model, tokenizer=byte_tokenizer)


def test_another_dtype_is_worth_a_warning(
    tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> None:
    half = tiny("llama").bfloat16()
    cache = fill(half, QuantizedCache.from_model(half, "int4"), ids())
    cache.save(tmp_path / "p.safetensors", half, byte_tokenizer)
    model = tiny("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    message = "computed in bfloat16, the model is in float32.*: load the model in bfloat16, or"
    with pytest.warns(UserWarning, match=message):
        loaded = QuantizedCache.load(tmp_path / "p", model, tokenizer=byte_tokenizer)
    assert_same(cache, loaded)
    fill(model, loaded, ids(1, 5, 1))
    assert loaded.get_seq_length() == 28


def test_there_must_be_something_to_save(
    tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> None:
    model = tiny("llama")
    cache = QuantizedCache.from_model(model, "int8")
    with pytest.raises(InputError, match="nothing to save: let the model read the prefix first"):
        cache.save(tmp_path / "p", model, byte_tokenizer)
    fill(model, cache, ids())
    with pytest.raises(InputError, match="made for another model"):
        cache.save(tmp_path / "p", tiny("llama"), byte_tokenizer)
    cache.crop(-23)
    with pytest.raises(InputError, match="nothing to save"):
        cache.save(tmp_path / "p", model, byte_tokenizer)
    assert not list(tmp_path.iterdir())


def test_a_forward_pass_that_was_cut_off_is_not_saved(
    tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> None:
    model = tiny("llama")
    cache = fill(model, QuantizedCache.from_model(model, "int8"), ids())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        fill(model, cache, ids(1, 4, 1))
    handle.remove()
    with pytest.raises(InputError, match="layers hold 23 to 27 tokens of 27: a forward pass was"):
        cache.save(tmp_path / "p", model, byte_tokenizer)


@pytest.mark.parametrize("cut", [1, 200, 5000])
def test_a_file_cut_short_is_refused(
    saved: Path, tiny: Callable[..., Any], byte_tokenizer: Any, cut: int
) -> None:
    saved.write_bytes(saved.read_bytes()[:-cut])
    with pytest.raises(FileFormatError, match="cut short or no safetensors file"):
        QuantizedCache.load(saved, tiny("llama"), tokenizer=byte_tokenizer)


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        header = json.loads(file.metadata()["kvquant"])
    change(tensors, header)
    save_file(tensors, path, metadata={"format": "pt", "kvquant": json.dumps(header)})


def hashed_again(tensors: dict[str, Any], header: dict[str, Any]) -> None:
    noted = {name: value for name, value in header.items() if name not in _OF_THE_FILE}
    header["sha256"] = _sha256(tensors, noted)


def one_bit(tensors: dict[str, Any], _: dict[str, Any]) -> None:
    tensors["layers.1.key.0.coded.codes"][0, 0, 0, 0] ^= 1


def one_scale_of_minus_zero(tensors: dict[str, Any], _: dict[str, Any]) -> None:
    tensors["layers.1.key.0.coded.scale"][0, 0, 0] *= -1


def one_tensor_less(tensors: dict[str, Any], _: dict[str, Any]) -> None:
    del tensors["layers.1.key.0.sinks.exact"]


def one_token_more(_: dict[str, Any], header: dict[str, Any]) -> None:
    header["ledger"]["slots"] += 1


def no_hash(_: dict[str, Any], header: dict[str, Any]) -> None:
    del header["sha256"]


def no_fingerprint(_: dict[str, Any], header: dict[str, Any]) -> None:
    del header["fingerprint"]


CHANGES = [one_bit, one_scale_of_minus_zero, one_tensor_less, one_token_more, no_hash]


@pytest.mark.parametrize("change", [*CHANGES, no_fingerprint])
def test_content_that_changed_is_refused(
    saved: Path,
    tiny: Callable[..., Any],
    byte_tokenizer: Any,
    change: Callable[[dict[str, Any], dict[str, Any]], None],
) -> None:
    rewritten(saved, lambda tensors, header: None)
    QuantizedCache.load(saved, tiny("llama"), tokenizer=byte_tokenizer)
    rewritten(saved, change)
    with pytest.raises(FileFormatError, match="is damaged"):
        QuantizedCache.load(saved, tiny("llama"), tokenizer=byte_tokenizer)


def test_files_of_another_kind_are_refused(
    saved: Path, tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> None:
    model = tiny("llama")
    save_scales(calibrated(model, INT8), tmp_path / "scales.safetensors")
    with pytest.raises(FileFormatError, match="is a scales file, a prefix file is needed"):
        QuantizedCache.load(tmp_path / "scales", model, tokenizer=byte_tokenizer)
    with pytest.raises(FileFormatError, match="a prefix file from `QuantizedCache"):
        QuantizedCache.load(tmp_path / "nothing", model, tokenizer=byte_tokenizer)
    with pytest.raises(FileFormatError, match="is a prefix file, a scales file is needed"):
        QuantizedCache.from_model(model, "int4", saved)


@pytest.mark.parametrize("name", ["system-prompt", "system-prompt.safetensors"])
def test_the_suffix_is_added_where_it_is_not_there(
    tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path, name: str
) -> None:
    model = tiny("llama")
    cache = fill(model, QuantizedCache.from_model(model, "int8"), ids())
    for path in (tmp_path / name, str(tmp_path / name)):
        cache.save(path, model, byte_tokenizer)
        assert [path.name for path in tmp_path.iterdir()] == ["system-prompt.safetensors"]
        assert_same(cache, QuantizedCache.load(path, model, tokenizer=byte_tokenizer))


def test_places_that_cannot_be_written_are_one_line(
    tiny: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> None:
    model = tiny("llama")
    cache = fill(model, QuantizedCache.from_model(model, "int8"), ids())
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "p", tmp_path / ("x" * 300)):
        with pytest.raises(InputError, match="cannot write"):
            cache.save(place, model, byte_tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@contextmanager
def full_disk() -> Iterator[None]:
    """A limit on the size of files is what a full disk looks like, to pytest's output too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_the_old_file(saved: Path, tiny: Callable[..., Any]) -> None:
    before = saved.read_bytes()
    model = tiny("llama")
    cache = fill(model, QuantizedCache.from_model(model, "int8"), ids(1, 100))
    message = r"cannot write .*p.safetensors .*: File too large"
    with pytest.raises(InputError, match=message), full_disk():
        cache.save(saved, model)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_what_is_loaded_does_not_depend_on_the_file_any_more(
    saved: Path, tiny: Callable[..., Any], byte_tokenizer: Any
) -> None:
    model = tiny("llama")
    cache = QuantizedCache.load(saved, model, tokenizer=byte_tokenizer)
    cache.save(saved, model, byte_tokenizer)
    assert_same(cache, QuantizedCache.load(saved, model, tokenizer=byte_tokenizer))
    saved.write_bytes(b"\0" * saved.stat().st_size)
    other = fill(model, QuantizedCache.from_model(model, "int4"), ids())
    assert_same(cache, other)


def positions(start: int, stop: int) -> None:
    return None


STEPS = st.lists(st.integers(-6, 12).filter(bool), min_size=1, max_size=8)


@given(
    STEPS,
    STEPS,
    st.sampled_from([Window(2, 3, 4), Window(0, 0, 1), Window(1, 2, 3, 9), Window(3, 9, 2, 7)]),
)
def test_a_store_goes_on_from_its_state(before: list[int], after: list[int], at: Window) -> None:
    """Tokens added (positive) and taken back (negative), before and after."""
    how = TensorScheme(
        tensor_format("int4"),
        Granularity.PER_GROUP if at.unit > 1 else Granularity.PER_TOKEN,
        symmetric=False,
        group_size=at.unit if at.unit > 1 else None,
    )
    codec = Codec(how, 6, torch.float32)
    store, twin = SlotStore(codec, at), SlotStore(codec, at)
    generator = torch.Generator().manual_seed(0)

    def run(steps: list[int], *stores: SlotStore) -> None:
        for step in steps:
            if step > 0:
                states = torch.randn(2, 1, step, 6, generator=generator)
                for each in stores:
                    each.append(states, positions)
            elif all(each.can_crop(-step) for each in stores):
                for each in stores:
                    each.crop(-step)

    run(before, store)
    numbers, tensors = store.state()
    twin.restore(json.loads(json.dumps(numbers)), tensors)
    run(after, store, twin)
    for one, other in ((store.state(), twin.state()),):
        assert one[0] == other[0]
        assert one[1].keys() == other[1].keys()
        assert all(torch.equal(part, other[1][name]) for name, part in one[1].items())
    seen = store.length - store.window.first_kept(store.length)
    out = torch.zeros(2, 2, 1, seen, 6)
    if seen:
        store.read(out[0], positions)
        twin.read(out[1], positions)
    assert torch.equal(out[0], out[1])
    assert store.live_nbytes() == twin.live_nbytes()
