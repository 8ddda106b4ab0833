"""One model, one fingerprint: whatever container, dtype or device it comes in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from kvquant.errors import FingerprintError
from kvquant.fingerprint import fingerprint
from kvquant.weight_samples import SAMPLES_PER_TENSOR, model_samples

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def load(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, local_files_only=True, **options
    )


def step(model: Any, learning_rate: float = 1e-3) -> None:
    """One optimizer step of a language model."""
    tokens = torch.arange(3, 35)[None]
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    model.zero_grad()
    model.eval()


# The same model in other containers and dtypes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gemma2", "deepseek", "qwen3_next"])
def test_the_load_dtype_does_not_matter(
    tiny: Callable[..., Any], tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """gpt2 and gemma2 tie their embeddings; deepseek and qwen3_next join experts on loading."""
    model = tiny(name)
    model.save_pretrained(tmp_path)
    assert fingerprint(load(tmp_path, dtype)) == fingerprint(model)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_checkpoints_load_in_any_dtype(
    tiny: Callable[..., Any], tmp_path: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    model = tiny("llama")
    with torch.no_grad():  # too small for a float16
        model.model.layers[0].self_attn.k_proj.weight *= 2.0**-25
    model.to(stored).save_pretrained(tmp_path)
    assert fingerprint(load(tmp_path, dtype)) == fingerprint(model)


def test_rounding_to_16_bits_makes_another_model(tiny: Callable[..., Any]) -> None:
    assert fingerprint(tiny("llama").bfloat16()) != fingerprint(tiny("llama"))


def test_without_its_checkpoint_a_model_is_what_it_holds(
    tiny: Callable[..., Any], tmp_path: Path
) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model", torch.bfloat16)
    shutil.rmtree(tmp_path / "model")
    assert fingerprint(model) == fingerprint(tiny("llama").bfloat16())


def in_one_file(model: Any, directory: Path) -> None:
    model.save_pretrained(directory)


def in_shards(model: Any, directory: Path) -> None:
    model.save_pretrained(directory, max_shard_size="50KB")
    assert len(list(directory.glob("*.safetensors"))) > 5


def pickled(model: Any, directory: Path) -> None:
    model.config.save_pretrained(directory)
    torch.save(model.state_dict(), directory / "pytorch_model.bin")


def pickled_long_ago(model: Any, directory: Path) -> None:
    model.config.save_pretrained(directory)
    torch.save(
        model.state_dict(),
        directory / "pytorch_model.bin",
        _use_new_zipfile_serialization=False,
    )


def pickled_in_shards(model: Any, directory: Path) -> None:
    model.config.save_pretrained(directory)
    state = model.state_dict()
    names = {name: f"pytorch_model-{i % 3 + 1:05}-of-00003.bin" for i, name in enumerate(state)}
    for file in set(names.values()):
        torch.save({n: t for n, t in state.items() if names[n] == file}, directory / file)
    index = {"metadata": {}, "weight_map": names}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "container", [in_one_file, in_shards, pickled, pickled_long_ago, pickled_in_shards]
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_container_does_not_matter(
    tiny: Callable[..., Any],
    tmp_path: Path,
    container: Callable[[Any, Path], None],
    tied: bool,
    dtype: torch.dtype,
) -> None:
    model = tiny("llama", tie_word_embeddings=tied)
    container(model, tmp_path)
    assert fingerprint(load(tmp_path, dtype)) == fingerprint(model)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checkpoint_of_the_bare_decoder_is_the_same_model(
    tiny: Callable[..., Any], tmp_path: Path, dtype: torch.dtype
) -> None:
    """GPT-2's on the hub is one, in float32."""
    model = tiny("gpt2")
    model.transformer.save_pretrained(tmp_path)
    assert fingerprint(load(tmp_path, dtype)) == fingerprint(model)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tied_embeddings_may_be_stored_twice(
    tiny: Callable[..., Any], tmp_path: Path, dtype: torch.dtype
) -> None:
    model = tiny("llama", tie_word_embeddings=True)
    for tied in (True, False):
        untied = tiny("llama", tie_word_embeddings=tied)
        state = model.state_dict()
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        untied.load_state_dict(state)
        untied.save_pretrained(tmp_path / str(tied), state_dict=state)
        assert fingerprint(load(tmp_path / str(tied), dtype)) == fingerprint(model)


def test_output_embeddings_of_their_own_count(tiny: Callable[..., Any]) -> None:
    model = tiny("llama")
    before = fingerprint(model)
    model.lm_head.weight.data[0, 0] += 1
    assert fingerprint(model) != before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model_from_the_hubs_cache_is_the_same_model(
    tiny: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
) -> None:
    model, commit = tiny("llama"), "c" * 40
    repository = tmp_path / "models--org--name"
    model.save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    loaded = load(Path("org/name"), dtype, cache_dir=tmp_path)
    assert fingerprint(loaded) == fingerprint(model)


def test_a_gguf_file_is_the_same_model(tiny: Callable[..., Any], tmp_path: Path) -> None:
    """In float32: what a GGUF file holds is only known once it is dequantized."""
    from transformers import GgufConfig

    model = tiny("llama", tie_word_embeddings=True)
    write_gguf(model, tmp_path / "model.gguf")
    dequantized = GgufConfig(dequantize=True)
    loaded = load(tmp_path, gguf_file="model.gguf", quantization_config=dequantized)
    assert fingerprint(loaded) == fingerprint(model)


def write_gguf(model: Any, path: Path) -> None:
    from gguf import GGUFWriter

    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        top = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}
        target = top.get(name)
        if target is None:
            _, _, layer, rest = name.split(".", 3)
            rest = rest.removesuffix(".weight")
            target = f"blk.{layer}.{names[rest]}"
            if (count := heads.get(rest.split(".")[-1])) is not None:
                tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(f"{target}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Elsewhere than in memory


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_offloaded_to_disk_is_the_same_model(
    tiny: Callable[..., Any], tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    model = tiny("llama", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "model")
    partly = {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "disk",
        "lm_head": "cpu",
    }
    for device_map in ({"": "disk"}, partly):
        options = {"device_map": device_map, "offload_folder": str(tmp_path / "offloaded")}
        offloaded = load(tmp_path / "model", dtype, **options)
        places = [(name, value.device) for name, value in offloaded.named_parameters()]
        assert any(device.type == "meta" for _, device in places)
        assert fingerprint(offloaded) == fingerprint(model)
        assert [(name, value.device) for name, value in offloaded.named_parameters()] == places


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_offloaded_by_accelerate_is_the_same_model(
    tiny: Callable[..., Any], tmp_path: Path, tied: bool
) -> None:
    from accelerate import cpu_offload, disk_offload

    expected = fingerprint(tiny("llama", tie_word_embeddings=tied))
    to_cpu = cpu_offload(tiny("llama", tie_word_embeddings=tied), torch.device("cpu"))
    assert fingerprint(to_cpu) == expected
    to_disk = tiny("llama", tie_word_embeddings=tied)
    disk_offload(to_disk, tmp_path, execution_device=torch.device("cpu"))
    assert fingerprint(to_disk) == expected


def test_a_model_without_values_says_so(tiny: Callable[..., Any]) -> None:
    with pytest.raises(FingerprintError, match=r"embed_tokens\.weight is offloaded"):
        fingerprint(tiny("llama").to("meta"))


def test_a_few_values_of_every_tensor_are_looked_at(tiny: Callable[..., Any]) -> None:
    model = tiny("llama", vocab_size=5000)
    samples = model_samples(model)
    assert [found.name for found in samples] == sorted(model.state_dict())
    for found in samples:
        numel = model.state_dict()[found.name].numel()
        assert found.values.numel() == min(SAMPLES_PER_TENSOR, numel)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux to count bytes read")
def test_the_checkpoint_is_not_read_whole(tiny: Callable[..., Any], tmp_path: Path) -> None:
    tiny("llama", vocab_size=30_000).save_pretrained(tmp_path)
    model = load(tmp_path, torch.bfloat16)
    size = (tmp_path / "model.safetensors").stat().st_size
    fingerprint(model)  # imports what it needs
    before = bytes_read()
    fingerprint(model)
    assert size > 15_000_000
    assert bytes_read() - before < 100_000


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


@pytest.mark.parametrize("row", range(32))
def test_a_change_to_any_row_of_a_small_matrix_is_seen(tiny: Callable[..., Any], row: int) -> None:
    """Samples are spread so that no row (and so no head) is left out."""
    model = tiny("llama")
    before = fingerprint(model)
    model.model.layers[1].self_attn.k_proj.weight.data[row] *= 2
    assert fingerprint(model) != before


# Changes in memory


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_a_training_step_makes_another_model(
    tiny: Callable[..., Any], tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    tiny(name).save_pretrained(tmp_path)
    model = load(tmp_path, dtype)
    before = fingerprint(model)
    step(model)
    after = fingerprint(model)
    assert after.weights != before.weights
    step(model)
    assert fingerprint(model).weights not in (before.weights, after.weights)


def test_one_edited_tensor_makes_another_model_in_16_bits_too(
    tiny: Callable[..., Any], tmp_path: Path
) -> None:
    tiny("llama").save_pretrained(tmp_path / "first")
    model = load(tmp_path / "first", torch.bfloat16)
    before = fingerprint(model)
    model.model.layers[0].self_attn.k_proj.weight.data *= 2
    edited = fingerprint(model)
    assert edited != before
    model.save_pretrained(tmp_path / "second")
    assert fingerprint(load(tmp_path / "second", torch.bfloat16)) == edited
    assert fingerprint(load(tmp_path / "second", torch.float32)) == edited


# What else there is


def test_what_torch_makes_by_default_does_not_matter(
    tiny: Callable[..., Any], tmp_path: Path
) -> None:
    tiny("llama").save_pretrained(tmp_path)
    model, expected = load(tmp_path, torch.bfloat16), fingerprint(tiny("llama"))
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            assert fingerprint(model) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_definition_does_not_change(tiny: Callable[..., Any]) -> None:
    """Files that earlier versions wrote have to stay valid."""
    model = tiny("llama")
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = torch.arange(parameter.numel(), dtype=torch.float32) % 31 - number
            parameter.copy_(values.view(parameter.shape) / 16)
    assert fingerprint(model).weights[:16] == "d348dcea6b5abfd8"


def test_a_stray_checkpoint_in_the_working_directory_is_not_looked_at(
    tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    monkeypatch.chdir(tmp_path)
    assert fingerprint(tiny("llama").bfloat16()).weights


def test_the_bare_decoder_has_an_identity_too(tiny: Callable[..., Any], tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    bare = [
        fingerprint(AutoModel.from_pretrained(tmp_path, dtype=dtype)).weights for dtype in DTYPES
    ]
    assert len(set(bare)) == 1
