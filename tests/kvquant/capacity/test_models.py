from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvquant.capacity.models import find_model, known_models
from kvquant.capacity.parameters import count_parameters
from kvquant.capacity.spec import ModelSpec, describe
from kvquant.errors import GeometryError, KVQuantError, ModelError
from kvquant.geometry import CacheGeometry

# Parameters of the published checkpoints; of Gemma 3 from 4b on, those of the text part.
TOTALS = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-3.5-mini": 3_821_079_552,
    "opt-13b": 12_853_473_280,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}


def test_known_sizes() -> None:
    found = {}
    for model in known_models():
        spec = describe(model.name)
        parameters = count_parameters(spec.model_type, spec.settings)
        assert parameters is not None, model.name
        found[model.name] = parameters.total
    assert found == TOTALS


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.2-1b",
        "mistral-7b-v0.1",
        "mixtral-8x7b",
        "qwen2.5-7b",
        "qwen3-8b",
        "qwen3-30b-a3b",
        "gemma-2-2b",
        "gemma-3-1b",
        "gpt-oss-20b",
        "deepseek-v2",
        "deepseek-v3",
        "phi-3-mini-4k",
        "opt-13b",
    ],
)
def test_transformers_builds_as_many_parameters(name: str) -> None:
    """One model of each family, without memory."""
    config = dict(describe(name).config)
    for key in ("torch_dtype", "quantization_config"):
        config.pop(key, None)
    built = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    assert sum({id(p): p.numel() for p in model.parameters()}.values()) == TOTALS[name]
    assert CacheGeometry.from_config(built) == describe(name).geometry


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": None, "head_dim": 24}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("gemma", {"head_dim": 32}),
        ("gemma2", {"tie_word_embeddings": True}),
        ("deepseek_v3", {"q_lora_rank": None, "n_shared_experts": 2}),
    ],
)
def test_variants_of_a_family(model_type: str, changes: dict[str, Any]) -> None:
    config: dict[str, Any] = {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 50,
        "pad_token_id": None,
    }
    if model_type == "deepseek_v3":
        widths = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
        experts = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
        config |= {**widths, **experts, "v_head_dim": 10, "moe_intermediate_size": 12}
        config |= {"first_k_dense_replace": 1, "num_key_value_heads": 4}
    config |= changes
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))
    spec = ModelSpec.from_config({"model_type": model_type, **config}, "m", "")
    found = count_parameters(model_type, spec.settings)
    assert found is not None
    assert found.total == sum({id(p): p.numel() for p in model.parameters()}.values())


def test_parameters_of_an_unknown_family_are_not_guessed() -> None:
    assert count_parameters("glm4", {"num_hidden_layers": 2}) is None
    assert count_parameters("llama", {"num_hidden_layers": 2}) is None


def test_every_model_names_its_source_and_has_a_name_of_its_own() -> None:
    models = known_models()
    names = [name.lower() for model in models for name in (model.name, *model.hub_ids)]
    assert len(set(names)) == len(names)
    assert all(model.source and model.hub_ids for model in models)


def test_names_of_the_hub_are_found() -> None:
    found = find_model("meta-llama/llama-3.1-8B-instruct")
    assert found is not None
    assert found.name == "llama-3.1-8b"
    assert find_model("llama-4") is None
    assert describe("Qwen/Qwen3-8B").geometry.layers[0].key_dim == 128


# --- what a name stands for ----------------------------------------------------------------------


def _write(path: Path, **more: object) -> Path:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        **more,
    }
    path.write_text(json.dumps(config))
    return path


def test_a_config_file_and_its_directory(tmp_path: Path) -> None:
    file = _write(tmp_path / "config.json", torch_dtype="float32")
    for name in (str(file), str(tmp_path)):
        spec = describe(name)
        assert spec.geometry.layers[0].kv_heads == 4
        assert spec.directory == tmp_path
        assert spec.dtype_bytes == 4
        assert spec.query_heads == 4


@pytest.mark.parametrize(
    ("more", "nbytes"),
    [
        ({}, 2),
        ({"torch_dtype": "bfloat16"}, 2),
        ({"dtype": "float32"}, 4),
        ({"dtype": "torch.float32"}, 4),
        ({"torch_dtype": "float16", "dtype": None}, 2),
    ],
)
def test_dtype_of_the_model(tmp_path: Path, more: dict[str, Any], nbytes: int) -> None:
    assert describe(str(_write(tmp_path / "config.json", **more))).dtype_bytes == nbytes


def test_a_local_directory_comes_before_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-3-8b").mkdir()
    _write(tmp_path / "llama-3-8b" / "config.json")
    assert len(describe("llama-3-8b").geometry.layers) == 2


def test_text_part_of_a_model_with_several() -> None:
    config = {
        "model_type": "gemma3",
        "text_config": {"num_hidden_layers": 12, "num_attention_heads": 4, "dtype": "float32"},
        "vision_config": {},
    }
    spec = ModelSpec.from_config(config, "m", "")
    assert spec.model_type == "gemma3_text"
    assert (len(spec.geometry.layers), spec.dtype_bytes, spec.query_heads) == (12, 4, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama3-8b", "known model 'llama3-8b': did you mean llama-3-8b or"),
        ("qwen-3-8b", "did you mean qwen3-8b"),
        ("no/such/model", "there is no file or directory no/such/model"),
        ("none.json", "cannot read none.json"),
    ],
)
def test_names_that_stand_for_nothing(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        describe(name)


@pytest.mark.parametrize("text", ["{", "[1]", '{"model_type": "llama", "num_hidden_layers": "x"}'])
def test_configs_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(KVQuantError):
        describe(str(path))


def test_an_unknown_model_type_has_to_say_everything(tmp_path: Path) -> None:
    path = _write(tmp_path / "config.json", model_type="brand_new")
    with pytest.raises(GeometryError, match=r"'brand_new' is not known, .* num_key_value_heads"):
        describe(str(path))
    path = _write(tmp_path / "config.json", model_type="brand_new", num_key_value_heads=2)
    assert describe(str(path)).geometry.layers[0].kv_heads == 2
