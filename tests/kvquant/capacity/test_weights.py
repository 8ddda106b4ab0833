from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvquant.capacity.spec import ModelSpec, describe
from kvquant.capacity.weights import WEIGHT_BITS, Weights, find_weights
from kvquant.errors import FileFormatError, InputError
from kvquant.tensor_files import read_header

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 50,
}
MATRICES = 2 * (4 * 64 * 64 + 3 * 64 * 96)
REST = 2 * 2 * 64 + 64 + 2 * 50 * 64


def spec(directory: Path | None = None, **more: Any) -> ModelSpec:
    return ModelSpec.from_config({**LLAMA, **more}, "m", "", directory)


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [
        (None, 2 * (MATRICES + REST)),
        ("fp32", 4 * (MATRICES + REST)),
        ("fp16", 2 * (MATRICES + REST)),
        ("fp8", MATRICES + 4 * MATRICES / 128**2 + 2 * REST),
        ("int8", MATRICES + 2 * REST),
        ("int4", MATRICES * (4 + 20 / 128) / 8 + 2 * REST),
        ("nvfp4", MATRICES * 4.5 / 8 + 2 * REST),
    ],
)
def test_weights_from_the_number_of_parameters(dtype: str | None, nbytes: float) -> None:
    found = find_weights(spec(), dtype, None)
    assert found is not None
    assert found.nbytes == round(nbytes)
    assert found.source.startswith(f"{MATRICES + REST:,} parameters in {dtype or 'bf16'}")
    assert found.read_nbytes(100) == found.nbytes


def test_weights_as_they_were_published() -> None:
    """GPT-OSS: 12.8 and 60.8 GiB; DeepSeek-V3: 671e9 parameters of a byte."""
    sizes = {
        name: find_weights(describe(name), None, None)
        for name in ("gpt-oss-20b", "gpt-oss-120b", "deepseek-v3")
    }
    gib = {name: round(w.nbytes / 2**30, 1) for name, w in sizes.items() if w is not None}
    assert gib == {"gpt-oss-20b": 12.8, "gpt-oss-120b": 60.8, "deepseek-v3": 626.9}
    assert find_weights(spec(torch_dtype="float32"), None, None) == find_weights(
        spec(), "fp32", None
    )


def test_experts_that_a_step_reads() -> None:
    """DeepSeek-V3 activates 37 of 671 billion parameters for one token (README_WEIGHTS.md)."""
    weights = find_weights(describe("deepseek-v3"), "int8", None)
    assert weights is not None
    assert (weights.experts, weights.chosen) == (256, 8)
    # 36.7e9, of which 0.9e9 each are embedding and head, in 16 bits here.
    assert weights.read_nbytes(1) == pytest.approx(36.7e9 + 2 * 0.93e9, rel=0.03)
    assert weights.read_nbytes(10**6) == pytest.approx(weights.nbytes)
    reads = [weights.read_nbytes(n) for n in (1, 2, 8, 64, 512)]
    assert reads == sorted(reads)


def test_weights_from_the_user() -> None:
    found = find_weights(spec(), None, 16.1)
    assert found == Weights(16_100_000_000, source="--weights-gb")
    moe = find_weights(describe("gpt-oss-20b"), None, 10)
    assert moe is not None
    # The experts' share is that of the published weights.
    assert moe.expert_nbytes == pytest.approx(10e9 * 19.1 / 20.9, rel=0.01)


def test_weights_that_nobody_knows() -> None:
    unknown = ModelSpec.from_config({**LLAMA, "model_type": "glm", "head_dim": 16}, "m", "")
    assert find_weights(unknown, None, None) is None
    assert find_weights(unknown, None, 3) == Weights(3 * 10**9, source="--weights-gb")


def test_weights_quantized_in_a_way_that_the_config_does_not_tell() -> None:
    awq = spec(quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(InputError, match="quantized by 'awq' cannot be counted"):
        find_weights(awq, None, None)
    assert find_weights(awq, "int4", None) is not None
    assert find_weights(awq, None, 5) is not None


def _save(path: Path, **tensors: torch.Tensor) -> int:
    save_file(tensors, path)
    return sum(t.numel() * t.element_size() for t in tensors.values())


def test_weights_from_headers(tmp_path: Path) -> None:
    nbytes = _save(tmp_path / "model.safetensors", a=torch.zeros(10, 3), b=torch.zeros(7).half())
    found = find_weights(spec(tmp_path), None, None)
    assert found == Weights(nbytes, source="headers of 1 safetensors files")
    # Converting them is not what the files have.
    assert find_weights(spec(tmp_path), "fp16", None) == find_weights(spec(), "fp16", None)


def test_weights_from_shards(tmp_path: Path) -> None:
    shared = _save(tmp_path / "one.safetensors", **{"mlp.shared_experts.w": torch.zeros(5)})
    experts = _save(tmp_path / "two.safetensors", **{"mlp.experts.0.w": torch.zeros(6, 2)})
    _save(tmp_path / "consolidated.safetensors", other=torch.zeros(1000))
    names = {"mlp.shared_experts.w": "one.safetensors", "mlp.experts.0.w": "two.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    config = dict(describe("mixtral-8x7b").config)
    found = find_weights(ModelSpec.from_config(config, "m", "", tmp_path), None, None)
    assert found == Weights(shared + experts, experts, 8, 2, "headers of 2 safetensors files")
    # An incomplete download is no source.
    (tmp_path / "two.safetensors").unlink()
    counted = find_weights(ModelSpec.from_config(config, "m", "", tmp_path), None, None)
    assert counted == find_weights(describe("mixtral-8x7b"), None, None)
    index.write_text("{}")
    with pytest.raises(InputError, match=r"cannot read .*index.json"):
        find_weights(ModelSpec.from_config(config, "m", "", tmp_path), None, None)


def test_every_format_of_weights_is_smaller_than_fp32() -> None:
    assert all(bits <= WEIGHT_BITS["fp32"] for bits in WEIGHT_BITS.values())


def test_headers_of_tensor_files(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(3, dtype=torch.uint8), "b": torch.zeros(2, 2)}, path, {"k": "v"})
    file = read_header(path)
    assert file.metadata == {"k": "v"}
    assert {name: file.nbytes(name) for name in file.tensors} == {"a": 3, "b": 16}
    assert file.read("a") == bytes([0, 1, 2])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"\xff" * 30,
        (4).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (8).to_bytes(8, "little") + b'{"a": 1}',
        (35).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, 10000]}}',
    ],
)
def test_files_that_are_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match="cut short or no safetensors file"):
        read_header(path)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="No such file"):
        read_header(tmp_path / "none")
