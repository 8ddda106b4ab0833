"""safetensors/safetensors#549: a file saved without metadata that older Transformers cannot load.

They read ``metadata.get("format")`` of whatever the file has, and safetensors writes none unless it
is told to.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kvquant
from kvquant.export.checkpoint import Checkpoint, attention_modules, read_checkpoint
from kvquant.export.directory import write_export
from kvquant.export.target import Contribution
from kvquant.geometry import CacheGeometry

INDEX = "model.safetensors.index.json"


def single(model: Any, directory: Path) -> None:
    model.save_pretrained(directory)


def sharded(model: Any, directory: Path) -> None:
    model.save_pretrained(directory, max_shard_size="50KB")


def without_metadata(model: Any, directory: Path) -> None:
    single(model, directory)
    strip(directory / "model.safetensors")


def index_without_metadata(model: Any, directory: Path) -> None:
    sharded(model, directory)
    shards = json.loads((directory / INDEX).read_text())["weight_map"]
    (directory / INDEX).write_text(json.dumps({"weight_map": shards}))


def shards_without_metadata(model: Any, directory: Path) -> None:
    sharded(model, directory)
    for file in directory.glob("*.safetensors"):
        strip(file)


def strip(file: Path) -> None:
    save_file(load_file(file), file)
    with safe_open(file, "pt") as opened:
        assert opened.metadata() is None


BASES = [single, sharded, without_metadata, index_without_metadata, shards_without_metadata]


def scales_for(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    modules = attention_modules(checkpoint, CacheGeometry.from_config(checkpoint.config))
    return {
        f"{module.path}.{slot}_scale": torch.tensor([1.0 + layer])
        for layer, module in modules.items()
        for slot in "kv"
    }


def contents(directory: Path) -> dict[str, tuple[str, int]]:
    return {
        file.name: (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns)
        for file in directory.iterdir()
    }


@pytest.fixture(params=BASES, ids=lambda make: make.__name__)
def base(request: pytest.FixtureRequest, tiny_once: Callable[..., Any], tmp_path: Path) -> Path:
    request.param(tiny_once("llama"), tmp_path / "base")
    return tmp_path / "base"


def test_scales_added_to_any_checkpoint(
    base: Path, tiny_once: Callable[..., Any], tmp_path: Path
) -> None:
    before, model = contents(base), tiny_once("llama")
    checkpoint = read_checkpoint(base)
    scales = scales_for(checkpoint)
    output = tmp_path / "out"
    write_export(checkpoint, Contribution(tensors=scales), output, record={}, notify=print)
    assert contents(base) == before

    index = json.loads((output / INDEX).read_text())
    assert index["weight_map"].keys() == model.state_dict().keys() | scales.keys()
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert index["metadata"]["total_size"] == total + 4 * len(scales)
    assert not (output / "model.safetensors").exists()
    for name in set(index["weight_map"].values()):
        with safe_open(output / name, "pt") as file:
            assert set(file.keys()) == {k for k, v in index["weight_map"].items() if v == name}

    (ours,) = {index["weight_map"][name] for name in scales}
    with safe_open(output / ours, "pt") as file:
        assert file.metadata() == {"format": "pt", "kvquant": kvquant.__version__}
        assert all(torch.equal(file.get_tensor(name), scales[name]) for name in scales)


def test_transformers_loads_all_of_it(
    base: Path, tiny_once: Callable[..., Any], forward: Callable[..., Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = read_checkpoint(base)
    scales = scales_for(checkpoint)
    output = tmp_path / "out"
    write_export(checkpoint, Contribution(tensors=scales), output, record={}, notify=print)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        output, dtype=torch.float32, output_loading_info=True
    )
    assert set(info["missing_keys"]) == set()
    assert set(info["unexpected_keys"]) == scales.keys()  # no quantization_config asks for them
    tokens = torch.arange(3, 20)[None]
    assert torch.equal(forward(loaded.eval(), tokens), forward(tiny_once("llama"), tokens))


def test_rewritten_weights_have_metadata_too(base: Path, tmp_path: Path) -> None:
    """Also where the base's have none."""
    name = "model.layers.0.self_attn.k_proj.weight"
    checkpoint = read_checkpoint(base)
    old = load_file(base / checkpoint.shards[name])[name]
    save_file({name: old * 2}, tmp_path / "new.safetensors", metadata={"format": "pt"})
    before = contents(base)
    write_export(
        checkpoint,
        Contribution(),
        tmp_path / "out",
        replaced={name: tmp_path / "new.safetensors"},
        record={},
        notify=print,
    )
    assert contents(base) == before
    shards = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert torch.equal(load_file(tmp_path / "out" / shards[name])[name], old * 2)
    for key, file in shards.items():
        if file in checkpoint.shards.values() and (tmp_path / "out" / file).samefile(base / file):
            continue  # a link: as the base has it
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            assert key in opened.keys()  # noqa: SIM118


def test_a_copied_export_lives_without_its_base(base: Path, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(base)
    contribution = Contribution(tensors=scales_for(checkpoint))
    output = tmp_path / "out"
    write_export(checkpoint, contribution, output, copy=True, record={}, notify=print)
    shutil.rmtree(base)
    assert read_checkpoint(output).tensors.keys() == {
        *checkpoint.tensors,
        *contribution.tensors,
    }
