"""What lies in a model's directory, and where its attention is in it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvquant.errors import ExportError, FileFormatError, ModelError
from kvquant.export.checkpoint import attention_modules, read_checkpoint
from kvquant.geometry import CacheGeometry

SHARDED = {"max_shard_size": "20KB"}


@pytest.fixture
def saved(tiny_once: Callable[..., Any], tmp_path: Path) -> Path:
    """A Llama of two layers in one file."""
    tiny_once("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tiny_once: Callable[..., Any], tmp_path: Path) -> Path:
    """The same in many files."""
    tiny_once("llama").save_pretrained(tmp_path / "sharded", **SHARDED)
    return tmp_path / "sharded"


def edit(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON file; None removes one."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def renamed(directory: Path, rename: Callable[[str], str]) -> None:
    """Gives the tensors of a single file other names."""
    tensors = load_file(directory / "model.safetensors")
    changed = {rename(name): tensor for name, tensor in tensors.items()}
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})


# What lies there


def test_a_single_file(saved: Path, tiny_once: Callable[..., Any]) -> None:
    found = read_checkpoint(saved)
    state = tiny_once("llama").state_dict()
    assert found.directory == saved
    assert found.config == json.loads((saved / "config.json").read_text())
    assert {name: tensor.shape for name, tensor in found.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }
    assert {tensor.dtype for tensor in found.tensors.values()} == {"F32"}
    assert found.shards == dict.fromkeys(state, "model.safetensors")
    assert found.index is None
    assert found.quantization is None
    assert found.quant_method is None


def test_shards(sharded: Path, saved: Path) -> None:
    found, single = read_checkpoint(sharded), read_checkpoint(saved)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert len(set(found.shards.values())) > 5
    assert found.index == index
    assert found.shards == index["weight_map"]
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.tensors.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in single.tensors.items()
    }
    name = "model.layers.1.self_attn.k_proj.weight"
    stored = (sharded / found.shards[name]).read_bytes()
    raw = stored[found.tensors[name].start : found.tensors[name].stop]
    expected = load_file(saved / "model.safetensors")[name]
    assert torch.frombuffer(bytearray(raw), dtype=torch.float32).equal(expected.flatten())


def test_neither_index_nor_shards_need_metadata(sharded: Path) -> None:
    expected = read_checkpoint(sharded)
    edit(sharded / "model.safetensors.index.json", metadata=None)
    for shard in set(expected.shards.values()):
        save_file(load_file(sharded / shard), sharded / shard)
        with safe_open(sharded / shard, "pt") as file:
            assert file.metadata() is None
    found = read_checkpoint(sharded)
    assert found.shards == expected.shards
    assert found.tensors.keys() == expected.tensors.keys()
    assert found.index == {"weight_map": expected.shards}


def test_a_snapshot_in_the_hubs_cache(sharded: Path, tmp_path: Path) -> None:
    expected = read_checkpoint(sharded)
    snapshot = as_snapshot(sharded, tmp_path)
    found = read_checkpoint(snapshot)
    assert (found.tensors, found.shards) == (expected.tensors, expected.shards)


def as_snapshot(model: Path, place: Path) -> Path:
    """The model as the hub's cache holds it: links into a folder of blobs."""
    blobs = place / "models--org--name" / "blobs"
    snapshot = place / "models--org--name" / "snapshots" / ("c" * 40)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"{number:064x}"))
    return snapshot


def test_the_single_file_is_what_transformers_loads(saved: Path, sharded: Path) -> None:
    """Where there is an index too, which vLLM would go by."""
    shutil.copytree(sharded, saved, dirs_exist_ok=True)
    found = read_checkpoint(saved)
    assert found.index is None
    assert set(found.shards.values()) == {"model.safetensors"}
    (saved / "model.safetensors").unlink()
    assert read_checkpoint(saved).index is not None


def test_an_index_may_name_the_single_file(saved: Path) -> None:
    shards = read_checkpoint(saved).shards
    index = {"weight_map": shards}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_checkpoint(saved)
    assert found.index == index
    assert found.shards == shards


def test_tensors_that_the_index_does_not_name_are_there_too(sharded: Path) -> None:
    """Engines read whole files."""
    path = sharded / "model.safetensors.index.json"
    shards = json.loads(path.read_text())["weight_map"]
    file = shards.pop("model.norm.weight")
    shards["lm_head.weight"] = shards["lm_head.weight"]
    edit(path, weight_map=shards)
    assert file in shards.values(), "the norm has no shard of its own"
    found = read_checkpoint(sharded)
    assert found.shards["model.norm.weight"] == file
    assert found.tensors["model.norm.weight"].shape == (64,)


# How it is quantized


@pytest.mark.parametrize(
    ("config", "beside", "quantization", "method"),
    [
        ({}, None, None, None),
        ({"quantization_config": {}}, None, None, None),
        ({"quantization_config": {"quant_method": "fp8"}}, None, {"quant_method": "fp8"}, "fp8"),
        (
            {"text_config": {"quantization_config": {"quant_method": "gptq"}}},
            None,
            {"quant_method": "gptq"},
            "gptq",
        ),
        (
            {"quantization_config": {"quant_method": "awq"}, "text_config": {"quantization": 1}},
            {"producer": {"name": "modelopt"}},
            {"quant_method": "awq"},
            "awq",
        ),
        (
            {},
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            "modelopt",
        ),
        ({"quantization_config": {"bits": 4}}, None, {"bits": 4}, "unknown"),
    ],
)
def test_how_the_weights_are_quantized(
    saved: Path, config: dict[str, Any], beside: Any, quantization: Any, method: str | None
) -> None:
    edit(saved / "config.json", **config)
    if beside is not None:
        (saved / "hf_quant_config.json").write_text(json.dumps(beside))
    found = read_checkpoint(saved)
    assert found.quantization == quantization
    assert found.quant_method == method


# What cannot be used


def without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def pickled(directory: Path) -> None:
    without_weights(directory)
    (directory / "pytorch_model.bin").touch()


def in_mistrals_format(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "consolidated.safetensors")


def without_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def with_a_config_that_is_no_json(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def with_a_config_that_is_a_list(directory: Path) -> None:
    (directory / "config.json").write_text("[]")


def with_a_config_in_another_encoding(directory: Path) -> None:
    (directory / "config.json").write_bytes(b'{"a": "\xff"}')


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            without_weights,
            r"has no weights: neither model\.safetensors nor model\.safetensors\.ind",
        ),
        (pickled, r"weights in \.bin files only.*convert them to safetensors"),
        (in_mistrals_format, r"has consolidated\.safetensors, but neither model\.safetensors nor"),
        (without_config, r"cannot read .*config\.json"),
        (with_a_config_that_is_no_json, r"cannot read .*config\.json"),
        (with_a_config_that_is_a_list, r"config\.json holds list, not a JSON object"),
        (with_a_config_in_another_encoding, r"cannot read .*config\.json"),
    ],
)
def test_a_directory_that_is_no_safetensors_model(
    saved: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(saved)
    with pytest.raises(ModelError, match=message) as caught:
        read_checkpoint(saved)
    assert "\n" not in str(caught.value)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no directory .*/nowhere"):
        read_checkpoint(tmp_path / "nowhere")


def test_missing_shards_are_counted(sharded: Path) -> None:
    files = sorted(sharded.glob("*.safetensors"))
    for file in files[1:4]:
        file.unlink()
    with pytest.raises(
        ModelError,
        match=rf"3 of the {len(files)} files that .* are missing, {files[1].name} the first of",
    ):
        read_checkpoint(sharded)


def test_a_tensor_that_is_not_where_the_index_says(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    shards = json.loads(path.read_text())["weight_map"]
    shards["model.norm.weight"] = shards["lm_head.weight"]
    shards["extra"] = shards["lm_head.weight"]
    edit(path, weight_map=shards)
    with pytest.raises(ModelError, match=rf"2 of {len(shards)} tensors are not where it says, su"):
        read_checkpoint(sharded)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "no weight_map"),
        ([], "no weight_map"),
        ({"a": 1}, "no weight_map"),
        ({}, "0 of the 0 files"),
        ({"a": "../model.safetensors"}, r"names '\.\./model\.safetensors', which lies elsewhere"),
        ({"a": "/model.safetensors"}, "lies elsewhere"),
        ({"a": ".."}, "missing"),
    ],
)
def test_an_index_that_is_none(sharded: Path, weight_map: Any, message: str) -> None:
    edit(sharded / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(ModelError, match=message):
        read_checkpoint(sharded)


def test_a_weight_file_that_was_cut_short(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(FileFormatError, match=rf"{shard.name} cannot be read"):
        read_checkpoint(sharded)


# Where the attention is

COMMON = {
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MORE: Mapping[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4},
    "gpt_neox": {"num_key_value_heads": None, "head_dim": None},
    "falcon": {"num_key_value_heads": None, "head_dim": None, "intermediate_size": None},
    "jamba": {
        "head_dim": None,
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*E-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "num_experts_per_tok": 2,
    },
}


def small(model_type: str) -> Any:
    """A model of a family that the fixture `tiny` does not have."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**COMMON, **MORE[model_type]}
    config = AutoConfig.for_model(
        model_type, **{key: value for key, value in settings.items() if value is not None}
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def gemma3() -> Any:
    """A model of text and images, six layers of text and eight of the tower."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {**COMMON, "model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 8}
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def modules_of(directory: Path) -> dict[int, tuple[str, str]]:
    """Layer -> path and what its projections make; each lies in the module, and is there."""
    checkpoint = read_checkpoint(directory)
    found = attention_modules(checkpoint, CacheGeometry.from_config(checkpoint.config))
    for layer, module in found.items():
        assert module.layer == layer
        for name in module.projections.values():
            assert name.startswith(f"{module.path}.")
            assert name in checkpoint.tensors
    return {i: (found[i].path, " ".join(sorted(found[i].projections))) for i in found}


APART, FUSED, LATENT = "k o q v", "o qkv", "kv_a kv_b o q_a q_b"
FAMILIES = [
    ("llama", "model.layers.{}.self_attn", APART, [0, 1]),
    ("qwen2", "model.layers.{}.self_attn", APART, [0, 1]),
    ("qwen3_moe", "model.layers.{}.self_attn", APART, [0, 1]),
    ("mixtral", "model.layers.{}.self_attn", APART, [0, 1]),
    ("phi3", "model.layers.{}.self_attn", FUSED, [0, 1]),
    ("gpt2", "transformer.h.{}.attn", FUSED, [0, 1]),
    ("gpt_neox", "gpt_neox.layers.{}.attention", FUSED, [0, 1]),
    ("falcon", "transformer.h.{}.self_attention", FUSED, [0, 1]),
    ("gpt_oss", "model.layers.{}.self_attn", APART, [0, 1]),
    ("gemma3_text", "model.layers.{}.self_attn", APART, [0, 1, 2, 3, 4, 5]),
    ("deepseek", "model.layers.{}.self_attn", LATENT, [0, 1]),
    ("deepseek_v32", "model.layers.{}.self_attn", LATENT, [0, 1]),
    ("gemma3n_text", "model.layers.{}.self_attn", APART, [0, 1, 2, 3]),
    ("gemma4_text", "model.layers.{}.self_attn", APART, [0, 1]),
    ("falcon_h1", "model.layers.{}.self_attn", APART, [0, 1]),
    ("jamba", "model.layers.{}.self_attn", APART, [1]),
    ("qwen3_next", "model.layers.{}.self_attn", APART, [3]),
    ("lfm2", "model.layers.{}.self_attn", APART, [1, 3]),
    ("nemotron_h", "backbone.layers.{}.mixer", APART, [1]),
    ("gemma3", "language_model.model.layers.{}.self_attn", APART, [0, 1, 2, 3, 4, 5]),
]


@pytest.fixture(scope="module")
def model_of(tiny_once: Callable[..., Any]) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def build(name: str) -> Any:
        if name == "gemma3" or name in MORE:
            if name not in made:
                made[name] = gemma3() if name == "gemma3" else small(name)
            return made[name]
        return tiny_once(name)

    return build


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["single", "sharded"])
@pytest.mark.parametrize(("name", "path", "made", "layers"), FAMILIES)
def test_the_attention_of_a_family(
    model_of: Callable[[str], Any],
    tmp_path: Path,
    name: str,
    path: str,
    made: str,
    layers: list[int],
    options: dict[str, str],
) -> None:
    model_of(name).save_pretrained(tmp_path, **options)
    assert modules_of(tmp_path) == {layer: (path.format(layer), made) for layer in layers}


@pytest.mark.parametrize(
    ("name", "rename", "path"),
    [
        ("gpt2", lambda key: key.removeprefix("transformer."), "h.{}.attn"),
        (
            "gemma3",
            lambda key: key.replace("language_model.model.", "model.language_model."),
            "model.language_model.layers.{}.self_attn",
        ),
        ("llama", lambda key: key.removeprefix("model."), "layers.{}.self_attn"),
        ("nemotron_h", lambda key: key.replace("backbone.", "model."), "model.layers.{}.mixer"),
    ],
)
def test_names_that_other_versions_write(
    model_of: Callable[[str], Any],
    tmp_path: Path,
    name: str,
    rename: Callable[[str], str],
    path: str,
) -> None:
    model_of(name).save_pretrained(tmp_path)
    before = modules_of(tmp_path)
    renamed(tmp_path, rename)
    found = modules_of(tmp_path)
    assert found == {layer: (path.format(layer), made) for layer, (_, made) in before.items()}
    assert found != before


def test_weights_of_layers_that_share_are_not_taken(
    model_of: Callable[[str], Any], tmp_path: Path
) -> None:
    """Published checkpoints of Gemma 3n hold key weights for layers that never use them."""
    model_of("gemma3n_text").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in (4, 5):
        name = f"model.layers.{layer}.self_attn.k_proj.weight"
        tensors[name] = tensors["model.layers.0.self_attn.k_proj.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert list(modules_of(tmp_path)) == [0, 1, 2, 3]


@pytest.mark.parametrize("beyond", ["model.layers.2.self_attn", "mtp.layers.0.self_attn"])
def test_layers_for_multi_token_prediction_are_not_taken(saved: Path, beyond: str) -> None:
    tensors = load_file(saved / "model.safetensors")
    for layer in (0, 1):
        name = f"{beyond.replace('0', str(layer))}.k_proj.weight"
        tensors[name] = tensors["model.layers.0.self_attn.k_proj.weight"].clone()
    save_file(tensors, saved / "model.safetensors")
    assert modules_of(saved) == {i: (f"model.layers.{i}.self_attn", APART) for i in (0, 1)}


def test_a_config_of_more_layers_than_there_are(saved: Path) -> None:
    edit(saved / "config.json", num_hidden_layers=3, layer_types=None)
    checkpoint = read_checkpoint(saved)
    with pytest.raises(ExportError, match=r"the keys of layer 2 \(1 such layers of 3"):
        attention_modules(checkpoint, CacheGeometry.from_config(checkpoint.config))


def test_a_checkpoint_is_read_without_torch() -> None:
    code = "import sys, kvquant.export.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
