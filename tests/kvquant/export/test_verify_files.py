"""What is said of files, for loaders that read different ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvquant.export.served_files import Reading, read_served
from kvquant.export.verify_files import file_findings, repeated
from kvquant.export.verify_report import Finding
from kvquant.tensor_files import read_header

SCALE = "model.layers.0.self_attn.k_scale"
INDEXED, SINGLE = Reading.INDEXED, Reading.SINGLE_FIRST


def _save(path: Path, *names: str) -> None:
    tensors = {name: torch.ones(1) for name in names}
    save_file(tensors, path, metadata={"format": "pt"})


def _index(path: Path, **weight_map: str) -> None:
    text = json.dumps({"metadata": {}, "weight_map": {k: f"{v}.safetensors" for k, v in
                                                      weight_map.items()}})  # fmt: skip
    (path / "model.safetensors.index.json").write_text(text)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def found(path: Path, engine: str, reading: Reading) -> list[Finding]:
    return file_findings(read_served(path), engine, reading)


def test_a_directory_in_order(directory: Path) -> None:
    _save(directory / "a.safetensors", "w")
    _save(directory / "b.safetensors", SCALE)
    _index(directory, **{"w": "a", SCALE: "b"})
    for reading in Reading:
        assert found(directory, "vLLM", reading) == []


def test_a_single_file(directory: Path) -> None:
    _save(directory / "model.safetensors", "w", SCALE)
    for reading in Reading:
        assert found(directory, "vLLM", reading) == []


@pytest.mark.parametrize(
    ("name", "held"), [("pytorch_model.bin", "its weights are in .bin files"), ("x", "no weights")]
)
def test_no_weights(directory: Path, name: str, held: str) -> None:
    (directory / name).touch()
    (finding,) = found(directory, "vLLM", INDEXED)
    assert finding.serious
    assert held in finding.what


@pytest.mark.parametrize(
    ("engine", "reading", "serious"),
    [
        ("vLLM", INDEXED, False),
        ("TGI", Reading.EVERY, False),
        ("Transformers", SINGLE, True),
    ],
)
def test_a_shard_that_is_called_as_a_single_file(
    directory: Path, engine: str, reading: Reading, serious: bool
) -> None:
    """The base's only file kept its name, and an index was added."""
    _save(directory / "model.safetensors", "w")
    _save(directory / "b.safetensors", SCALE)
    _index(directory, **{"w": "model", SCALE: "b"})
    finding = next(f for f in found(directory, engine, reading) if "beside" in f.what)
    assert f"{'Transformers' if not serious else engine} loads that and nothing of" in finding.what
    assert finding.fix.startswith("rename it to model-00001-of-00002.safetensors")
    assert finding.serious is serious


def test_scales_outside_the_index(directory: Path) -> None:
    _save(directory / "a.safetensors", "w")
    _save(directory / "b.safetensors", SCALE)
    _index(directory, w="a")
    for engine, reading in (("vLLM", INDEXED), ("Transformers", SINGLE)):
        (finding,) = found(directory, engine, reading)
        assert finding.serious
        assert finding.what == (
            f"{engine} passes over b.safetensors and its 1 scale tensor: "
            f"model.safetensors.index.json does not name it"
        )
    assert found(directory, "TGI", Reading.EVERY) == []


def test_a_format_is_told_of_files_that_are_read(directory: Path) -> None:
    save_file({"w": torch.ones(1)}, directory / "a.safetensors")
    save_file({SCALE: torch.ones(1)}, directory / "b.safetensors")
    (finding,) = found(directory, "vLLM", INDEXED)
    assert finding.what.startswith("a.safetensors, b.safetensors have no format in the metadata")
    assert not finding.serious


def test_a_total_size_that_is_no_number(directory: Path) -> None:
    _save(directory / "a.safetensors", "w")
    text = json.dumps({"metadata": {"total_size": "4"}, "weight_map": {"w": "a.safetensors"}})
    (directory / "model.safetensors.index.json").write_text(text)
    (finding,) = found(directory, "vLLM", INDEXED)
    assert finding.what == "total_size in model.safetensors.index.json is '4', no number of bytes"
    assert finding.fix == "set metadata.total_size to 4; loaders only show it"


def test_repeated_tensors(directory: Path) -> None:
    _save(directory / "a.safetensors", "w", "x")
    _save(directory / "b.safetensors", "x", "y")
    files = [read_header(directory / name) for name in ("a.safetensors", "b.safetensors")]
    assert repeated(files) == {"x": ["a.safetensors", "b.safetensors"]}
    assert repeated(files[:1]) == {}
