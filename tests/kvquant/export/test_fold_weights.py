"""Folded checkpoints: the same model, and weights that changed in their exponents only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
)

from kvquant.cache.transformers_compat import cache_argument
from kvquant.errors import ExportError
from kvquant.export.checkpoint import (
    AttentionModule,
    Checkpoint,
    attention_modules,
    read_checkpoint,
)
from kvquant.export.fold import LayerFold
from kvquant.export.fold_places import FoldPlaces, find_places
from kvquant.export.fold_weights import check_folded, folded_tensors
from kvquant.geometry import CacheGeometry

_NEOX = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_MORE = {
    "gpt_neox": _NEOX,
    "persimmon": _NEOX,
    "olmo2": {**_NEOX, "num_key_value_heads": 2},
    "cohere": {**_NEOX, "num_key_value_heads": 2, "use_qk_norm": True},
    "hunyuan_v1_dense": {**_NEOX, "num_key_value_heads": 2, "head_dim": 16},
}
FAMILIES = [
    *("llama", "llama_wide", "llama_yarn", "phi3", "qwen2", "qwen3", "mistral", "gemma2", "glm"),
    *("gpt2", "gpt_oss", "smollm3", "falcon_h1", "lfm2", *_MORE),
]


@pytest.fixture(scope="session")
def build(tiny: Callable[..., Any]) -> Callable[..., Any]:
    """A tiny model by name; norms and biases with numbers that are not all 1 and 0."""

    def built(name: str, dtype: torch.dtype = torch.float32) -> Any:
        if name in _MORE:
            torch.manual_seed(0)
            config = AutoConfig.for_model(name, **_MORE[name])
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        else:
            model = tiny(name)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name or parameter_name.endswith("bias"):
                    parameter += 0.3 * torch.rand(parameter.shape)
        return model.to(dtype)

    return built


def random_factors(places: FoldPlaces, kv_heads: int, seed: int) -> LayerFold:
    """Powers of two from 1/8 to 8, as far as rotary pairs and shared norms let them differ."""
    generator = torch.Generator().manual_seed(seed)

    def factors(groups: torch.Tensor, shared: bool) -> torch.Tensor:
        size = (1 if shared else kv_heads, int(groups.max()) + 1)
        return torch.exp2(torch.randint(-3, 4, size, generator=generator).float())[
            :, groups
        ].repeat(kv_heads if shared else 1, 1)

    value_dim = places.value.entries.shape[1]
    shared = places.key.is_shared or places.query.is_shared
    return LayerFold(
        factors(places.key_groups, shared), factors(torch.arange(value_dim), False), places
    )


class Case:
    """A model on disk with random factors for it."""

    def __init__(self, model: Any, directory: Path, shard_size: str = "1GB") -> None:
        self.model = model
        model.save_pretrained(directory / "base", max_shard_size=shard_size)
        self.base = read_checkpoint(directory / "base")
        geometry = CacheGeometry.from_config(model.config)
        self.modules = attention_modules(self.base, geometry)
        self.folds = {
            layer: random_factors(places, geometry.layers[layer].kv_heads, layer)
            for layer, places in find_places(model, geometry).items()
        }
        self.output = directory / "folded"

    def write(self, **changed: torch.Tensor) -> Checkpoint:
        """The folded directory; single tensors can be put in the place of what they should be."""
        shutil.copytree(self.base.directory, self.output)
        new = {**dict(folded_tensors(self.base, self.modules, self.folds)), **changed}
        for name in set(self.base.shards.values()):
            tensors = load_file(self.output / name)
            tensors.update({key: value for key, value in new.items() if key in tensors})
            save_file(tensors, self.output / name, {"format": "pt"})
        return read_checkpoint(self.output)

    def reloaded(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.output).eval()


@pytest.fixture
def make_case(build: Callable[..., Any], tmp_path: Path) -> Callable[..., Case]:
    def make(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Case:
        return Case(build(name, dtype), tmp_path, **options)

    return make


def some_tokens() -> torch.Tensor:
    return torch.randint(3, 128, (2, 50), generator=torch.Generator().manual_seed(5))


def cached(model: Any) -> Any:
    cache = DynamicCache(config=model.config)
    name = cache_argument(model.get_decoder())
    with torch.no_grad():
        logits = model(some_tokens(), use_cache=True, **{name: cache}).logits
    return logits, cache


@pytest.mark.parametrize("name", FAMILIES)
def test_the_reloaded_model_is_the_same_with_other_keys_and_values(
    make_case: Callable[..., Case], name: str
) -> None:
    case = make_case(name)
    case.write()
    logits, cache = cached(case.model)
    folded_logits, folded_cache = cached(case.reloaded())
    torch.testing.assert_close(folded_logits, logits, rtol=1e-5, atol=1e-5)
    for layer, fold in case.folds.items():
        was, now = cache.layers[layer], folded_cache.layers[layer]
        for factors, before, after in (
            (fold.key, was.keys, now.keys),
            (fold.value, was.values, now.values),
        ):
            expected = before * factors[:, None, :]
            torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)
            assert not torch.allclose(after, before, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2", "phi3", "olmo2"])
def test_weights_change_their_exponents_only(
    make_case: Callable[..., Case], name: str, dtype: torch.dtype
) -> None:
    case = make_case(name, dtype)
    case.write()
    integer, mantissa = (torch.int16, 0x7F) if dtype == torch.bfloat16 else (torch.int32, 0x7FFFFF)
    sign = torch.iinfo(integer).min
    stored = load_file(case.base.directory / "model.safetensors")
    changed = 0
    for key, tensor in load_file(case.output / "model.safetensors").items():
        assert tensor.dtype == dtype
        was, now = stored[key].view(integer), tensor.view(integer)
        assert torch.equal(now & (mantissa | sign), was & (mantissa | sign))
        changed += int((now != was).any())
    parts = {"gpt2": 3, "phi3": 2, "qwen2": 7}  # gpt2: c_attn with bias and c_proj
    assert changed == 2 * parts.get(name, 4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "glm", "gpt2"])
def test_in_bfloat16_not_one_bit_of_the_logits_changes(
    make_case: Callable[..., Case], name: str
) -> None:
    """Each product and sum of attention is the same power of two times what it was."""
    case = make_case(name, torch.bfloat16)
    folded = case.write()
    logits = []
    for directory in (case.base.directory, folded.directory):
        model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
        assert model.dtype == torch.bfloat16
        logits.append(cached(model.eval())[0])
    assert torch.equal(*logits)


def test_rows_and_columns_by_hand(make_case: Callable[..., Case]) -> None:
    """Two KV heads of 16, two query heads each: one rotary pair of head 1, one value channel."""
    case = make_case("qwen2")
    places = case.folds[1].places
    key, value = torch.ones(2, 16), torch.ones(2, 16)
    key[1, [3, 11]] = 0.25
    value[0, 5] = 8.0
    case.folds = {1: LayerFold(key, value, places)}
    stored = load_file(case.base.directory / "model.safetensors")
    new = dict(folded_tensors(case.base, case.modules, case.folds))
    prefix = "model.layers.1.self_attn."
    assert set(new) == {
        prefix + name
        for name in (
            *(f"{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")),
            "o_proj.weight",
        )
    }
    factors = {name: (tensor / stored[name]) for name, tensor in new.items()}
    for part, rows, factor in (
        ("k", [19, 27], 0.25),
        ("q", [35, 43, 51, 59], 4.0),
        ("v", [5], 8.0),
    ):
        found = factors[f"{prefix}{part}_proj.weight"][:, 0], factors[f"{prefix}{part}_proj.bias"]
        for each in found:
            assert (each != 1).nonzero().flatten().tolist() == rows
            assert (each[rows] == factor).all()
    columns = factors[f"{prefix}o_proj.weight"][0]
    assert (columns != 1).nonzero().flatten().tolist() == [5, 21]
    assert (columns[[5, 21]] == 0.125).all()


def test_what_keeps_its_factors_is_not_written(make_case: Callable[..., Case]) -> None:
    case = make_case("llama")
    ones = torch.ones(2, 16)
    fold = case.folds[0]
    case.folds = {0: LayerFold(ones, ones, fold.places)}
    assert not case.folds[0].changes
    assert dict(folded_tensors(case.base, case.modules, case.folds)) == {}
    for keys, expected in ((True, {"q_proj", "k_proj"}), (False, {"v_proj", "o_proj"})):
        only = replace(fold, value=ones) if keys else replace(fold, key=ones)
        assert only.changes
        new = dict(folded_tensors(case.base, case.modules, {0: only}))
        assert set(new) == {f"model.layers.0.self_attn.{name}.weight" for name in expected}


def test_sharded_checkpoints(make_case: Callable[..., Case]) -> None:
    case = make_case("llama", shard_size="100KB")
    assert len(set(case.base.shards.values())) > 1
    folded = case.write()
    found = check_folded(case.base, folded, case.modules, case.folds, case.model, some_tokens())
    assert found.tensors == 8
    assert found.logits < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_the_check_finds_nothing_wrong(make_case: Callable[..., Case], name: str) -> None:
    case = make_case(name)
    folded = case.write()
    was = {key: value.clone() for key, value in case.model.state_dict().items()}
    found = check_folded(case.base, folded, case.modules, case.folds, case.model, some_tokens()[0])
    assert found.logits < 1e-5
    assert found.tensors == len(list(folded_tensors(case.base, case.modules, case.folds)))
    now = case.model.state_dict()
    assert all(torch.equal(now[key], value) for key, value in was.items())


def test_text_inside_a_multimodal_model(tmp_path: Path) -> None:
    """The decoder's layers are folded, the vision tower's are not; names keep their prefix."""
    text = {**_NEOX, "num_key_value_heads": 2, "head_dim": 16, "model_type": "mistral"}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = AutoConfig.for_model(
        "mistral3", text_config=text, vision_config=vision, image_token_index=120
    )
    torch.manual_seed(0)
    case = Case(AutoModelForImageTextToText.from_config(config, dtype=torch.float32), tmp_path)
    names = [name for name, _ in folded_tensors(case.base, case.modules, case.folds)]
    assert len(names) == 8
    assert all(name.startswith("language_model.model.layers.") for name in names)
    folded, ids = case.write(), some_tokens() % 100 + 3
    found = check_folded(case.base, folded, case.modules, case.folds, case.model, ids)
    assert found.logits < 1e-5


def test_the_check_finds_a_changed_bit(make_case: Callable[..., Case]) -> None:
    case = make_case("llama")
    name = "model.layers.1.self_attn.q_proj.weight"
    changed = dict(folded_tensors(case.base, case.modules, case.folds))[name]
    changed.view(torch.int32)[3, 4] ^= 1
    folded = case.write(**{name: changed})
    with pytest.raises(ExportError, match=rf"{name} .* is not the base's times its factors"):
        check_folded(case.base, folded, case.modules, case.folds, case.model, some_tokens())


@pytest.mark.parametrize("what", ["pair", "inverse"])
def test_the_check_finds_factors_that_are_not_exact(
    make_case: Callable[..., Case], what: str
) -> None:
    """Each weight is what was asked for, but the model is another one."""
    case = make_case("llama")
    fold = case.folds[1]
    if what == "pair":
        key = fold.key.clone()
        key[0, 3] *= 2  # and not its partner, channel 11
        case.folds[1] = replace(fold, key=key)
    else:
        places = replace(
            fold.places,
            query=replace(fold.places.query, entries=torch.arange(64).view(4, 16).flip(0)),
        )
        case.folds[1] = replace(fold, places=places)
    folded = case.write()
    with pytest.raises(ExportError, match=r"logits differ by .* for LlamaForCausalLM"):
        check_folded(case.base, folded, case.modules, case.folds, case.model, some_tokens())
    again = case.model(some_tokens()).logits
    assert torch.isfinite(again).all()


@pytest.mark.parametrize("change", ["missing", "dtype", "shape"])
def test_the_check_finds_other_tensors(make_case: Callable[..., Case], change: str) -> None:
    case = make_case("llama")
    case.write()
    file = case.output / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.mlp.up_proj.weight"
    tensor = tensors.pop(name)
    if change != "missing":
        tensors[name] = tensor.bfloat16() if change == "dtype" else tensor[:-1].clone()
    save_file(tensors, file, {"format": "pt"})
    found = {"missing": "is missing", "dtype": r"is BF16 \[128, 64\]", "shape": r"is F32 \[127"}
    with pytest.raises(ExportError, match=f"{name} {found[change]}"):
        check_folded(
            case.base,
            read_checkpoint(case.output),
            case.modules,
            case.folds,
            case.model,
            some_tokens(),
        )


# What a dtype cannot hold


def stored_otherwise(case: Case, change: Callable[[dict[str, Any]], None]) -> Checkpoint:
    file = case.base.directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return read_checkpoint(case.base.directory)


def test_float16_is_refused_where_bits_would_fall_off(make_case: Callable[..., Case]) -> None:
    """A number of 6e-5, the smallest normal one, cannot lose a factor of 8."""
    case = make_case("llama", torch.float16)
    with pytest.raises(ExportError, match=r"of 2,048 values .* leave the normal range of float16"):
        list(folded_tensors(case.base, case.modules, case.folds))


def test_float16_without_small_numbers_is_folded(build: Callable[..., Any], tmp_path: Path) -> None:
    model = build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                weight = getattr(layer.self_attn, name).weight
                weight.copy_(weight.sign() * weight.abs().clamp(min=1e-3))
    case = Case(model.half(), tmp_path)
    folded, exact = case.write(), case.model.float()
    found = check_folded(case.base, folded, case.modules, case.folds, exact, some_tokens())
    assert found.tensors == 8
    assert found.logits < 1e-5


def test_overflow_is_refused(make_case: Callable[..., Case]) -> None:
    case = make_case("llama")
    name = "model.layers.0.self_attn.v_proj.weight"
    base = stored_otherwise(case, lambda tensors: tensors[name][0, 0].fill_(3e38))
    value = torch.ones(2, 16)
    value[0, 0] = 2.0
    folds = {0: LayerFold(torch.ones(2, 16), value, case.folds[0].places)}
    with pytest.raises(ExportError, match=rf"1 of 2,048 values of {name}"):
        list(folded_tensors(base, case.modules, folds))


def test_numbers_that_add_nothing_do_not_count(build: Callable[..., Any], tmp_path: Path) -> None:
    """Subnormal leftovers of training are in many checkpoints, zeros are too."""
    model = build("llama", torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[:, :2] = torch.tensor([1e-40, 0.0])
    case = Case(model, tmp_path)
    new = dict(folded_tensors(case.base, case.modules, case.folds))
    assert not new["model.layers.0.self_attn.k_proj.weight"][:, 1].any()


def test_one_plus_weight_in_float32(make_case: Callable[..., Case]) -> None:
    case = make_case("gemma3_text")
    assert case.folds[0].places.key.offset == 1.0
    found = check_folded(
        case.base, case.write(), case.modules, case.folds, case.model, some_tokens()
    )
    assert 0 < found.logits < 1e-4
    name = "model.layers.0.self_attn.k_norm.weight"
    was = case.model.state_dict()[name]
    now = load_file(case.output / "model.safetensors")[name]
    torch.testing.assert_close(1 + now, (1 + was) * case.folds[0].key[0])


def test_one_plus_weight_in_bfloat16_is_refused(make_case: Callable[..., Case]) -> None:
    case = make_case("gemma3_text", torch.bfloat16)
    with pytest.raises(ExportError, match=r"k_norm.weight is multiplied by as 1 \+ weight"):
        list(folded_tensors(case.base, case.modules, case.folds))


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ("packed", "has no tensor model.layers.0.self_attn.k_proj.weight"),
        ("fp8", "k_proj.weight is stored as F8_E4M3: quantized weights cannot be folded"),
        ("transposed", r"is \[64, 32\] in .* and \[32, 64\] in the model"),
    ],
)
def test_weights_in_another_form_are_refused(
    make_case: Callable[..., Case], stored: str, message: str
) -> None:
    case = make_case("llama")
    name = "model.layers.0.self_attn.k_proj.weight"

    def change(tensors: dict[str, Any]) -> None:
        weight = tensors.pop(name)
        if stored == "packed":
            tensors[name.replace("weight", "weight_packed")] = weight
        elif stored == "fp8":
            tensors[name] = weight.to(torch.float8_e4m3fn)
        else:
            tensors[name] = weight.T.contiguous()

    base = stored_otherwise(case, change)
    with pytest.raises(ExportError, match=message):
        list(folded_tensors(base, case.modules, case.folds))


def test_names_are_those_of_the_checkpoint(make_case: Callable[..., Case]) -> None:
    """Whatever Transformers calls the modules after loading."""
    case = make_case("llama")
    stored = load_file(case.base.directory / "model.safetensors")
    renamed = {key.replace("model.", "language_model.model.", 1): v for key, v in stored.items()}
    save_file(renamed, case.base.directory / "model.safetensors", {"format": "pt"})
    base = read_checkpoint(case.base.directory)
    modules = {
        layer: AttentionModule(layer, f"language_model.model.layers.{layer}.self_attn", {})
        for layer in range(2)
    }
    new = dict(folded_tensors(base, modules, case.folds))
    assert len(new) == 8
    assert all(key.startswith("language_model.model.layers.") for key in new)
    config = json.loads((case.base.directory / "config.json").read_text())
    assert config["model_type"] == "llama"
