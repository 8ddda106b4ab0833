from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvquant.export.served_files import Reading, is_number, numbers, read_served, rounded
from kvquant.tensor_files import read_header


def _save(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors or {"w": torch.ones(1)}, path, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 1), (0,)])
def test_numbers_are_those_of_torch(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.rand(shape).to(dtype)
    file = read_header(_save(tmp_path / "a.safetensors", s=tensor))
    assert numbers(file, "s") == tuple(tensor.double().flatten().tolist())


def test_special_numbers(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.tensor([math.nan, math.inf, -0.0, -1.5]).to(dtype)
        found = numbers(read_header(_save(tmp_path / "a.safetensors", s=tensor)), "s")
        assert found is not None
        assert math.isnan(found[0])
        assert found[1:] == (math.inf, -0.0, -1.5)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(1, dtype=torch.int32), torch.ones(1, dtype=torch.float8_e4m3fn), torch.ones(70000)],
    ids=["integer", "fp8", "too many"],
)
def test_what_cannot_be_scales_is_not_read(tmp_path: Path, tensor: torch.Tensor) -> None:
    assert numbers(read_header(_save(tmp_path / "a.safetensors", s=tensor)), "s") is None


@settings(deadline=None)
@given(st.floats(2**-100, 2**100, width=32), st.sampled_from(["bfloat16", "float16", "float32"]))
def test_rounding_is_that_of_torch(number: float, dtype: str) -> None:
    wanted = torch.tensor(number).to(getattr(torch, dtype)).item()
    assert rounded(number, dtype) == wanted


@pytest.mark.parametrize("value", [0, -3, 0.5, math.inf, 2**62])
def test_numbers_of_json(value: Any) -> None:
    assert is_number(value)


@pytest.mark.parametrize("value", [True, False, None, "1", [1], 10**400, -(10**400)])
def test_what_is_no_number_of_json(value: Any) -> None:
    assert not is_number(value)


INDEX: dict[str, Any] = {"metadata": {"total_size": 8}, "weight_map": {"w": "b.safetensors"}}


def _directory(path: Path, index: dict[str, Any] | None = None) -> Path:
    for name in ("b", "c", "consolidated.00", "model", "adapter_model"):
        _save(path / f"{name}.safetensors")
    if index is not None:
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize(
    ("reading", "indexed", "files"),
    [
        (Reading.INDEXED, True, ["b"]),
        (Reading.INDEXED, False, ["b", "c", "consolidated.00", "model"]),
        (Reading.SINGLE_FIRST, True, ["model"]),
        (Reading.SINGLE_FIRST, False, ["model"]),
        (Reading.EVERY, True, ["b", "c", "consolidated.00", "model"]),
        (Reading.NOT_CONSOLIDATED, True, ["b", "c", "model"]),
    ],
)
def test_which_files_are_read(
    tmp_path: Path, reading: Reading, indexed: bool, files: list[str]
) -> None:
    served = read_served(_directory(tmp_path, INDEX if indexed else None))
    found = [file.path.name for file in served.read_by(reading)]
    assert found == [f"{name}.safetensors" for name in files]


def test_without_a_single_file_transformers_goes_by_the_index(tmp_path: Path) -> None:
    directory = _directory(tmp_path, INDEX)
    (directory / "model.safetensors").unlink()
    served = read_served(directory)
    assert [f.path.name for f in served.read_by(Reading.SINGLE_FIRST)] == ["b.safetensors"]
    (directory / "model.safetensors.index.json").unlink()
    assert read_served(directory).read_by(Reading.SINGLE_FIRST) == []


def test_consolidated_files_alone_are_read(tmp_path: Path) -> None:
    _save(tmp_path / "consolidated.safetensors")
    found = read_served(tmp_path).read_by(Reading.NOT_CONSOLIDATED)
    assert [file.path.name for file in found] == ["consolidated.safetensors"]


def test_what_is_read(tmp_path: Path) -> None:
    directory = _directory(tmp_path, INDEX)
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (directory / "hf_quant_config.json").write_text('{"quantization": {}}')
    served = read_served(directory)
    assert served.architecture == "LlamaForCausalLM"
    assert served.hf_quant_config == {"quantization": {}}
    assert served.weight_map == {"w": "b.safetensors"}
    assert served.total_size == 8
    assert served.adapter is not None
    assert served.names() == {"w"}
    assert served.unreadable == {}


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("config.json", "{", "Expecting"),
        ("config.json", "3", "holds int"),
        ("hf_quant_config.json", "[]", "holds list"),
        ("model.safetensors.index.json", '{"weight_map": {"w": 3}}', "no weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"w": 3, "v": "b"}}', "no weight_map"),
        ("model.safetensors.index.json", "{}", "no weight_map"),
        ("b.safetensors", "{}", "cut short"),
        ("adapter_model.safetensors", "", "cut short"),
    ],
)
def test_what_cannot_be_read_is_noted(tmp_path: Path, name: str, text: str, why: str) -> None:
    directory = _directory(tmp_path)
    (directory / name).write_text(text)
    served = read_served(directory)
    assert list(served.unreadable) == [name]
    assert why in served.unreadable[name]
    assert served.config == {}
    assert served.architecture == ""


def test_names_are_those_of_files_and_of_the_index(tmp_path: Path) -> None:
    index = {"weight_map": {"promised": "gone.safetensors"}}
    assert read_served(_directory(tmp_path, index)).names() == {"w", "promised"}


def test_a_link_that_leads_nowhere_is_noted(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "gone")
    assert list(read_served(tmp_path).unreadable) == ["a.safetensors"]


@pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", {}])
def test_architectures_that_are_no_list(tmp_path: Path, value: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": value}))
    assert read_served(tmp_path).architecture == ""
