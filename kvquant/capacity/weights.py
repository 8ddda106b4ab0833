"""How many bytes a model's weights have, and how many of them one decode step reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvquant.errors import InputError
from kvquant.tensor_files import read_header

from .parameters import Parameters, count_parameters, experts_of
from .spec import ModelSpec

WEIGHT_BITS: Mapping[str, float] = {
    "fp32": 32,
    "bf16": 16,
    "fp16": 16,
    "fp8": 8,
    "int8": 8,
    "mxfp4": 4 + 8 / 32,
    "nvfp4": 4 + 8 / 16,
    "int4": 4 + (16 + 4) / 128,
}
"""Bits of one weight of a linear layer with its share of the scales.

mxfp4 has an 8-bit exponent for 32 weights (OCP MX 1.0), nvfp4 an 8-bit scale for 16, int4 a 16-bit
scale and a 4-bit zero point for 128, as AWQ and GPTQ store them. Embeddings, norms and biases keep
16 bits in the formats below 16.
"""

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Weights:
    """The weights of a model.

    Attributes:
        nbytes: All of them.
        expert_nbytes: Those of experts that a router chooses among.
        experts: Such experts in a layer; 0 for a dense model.
        chosen: How many of them the router chooses for a token.
        source: Where the number is from, for people.
    """

    nbytes: int
    expert_nbytes: int = 0
    experts: int = 0
    chosen: int = 0
    source: str = ""

    def read_nbytes(self, sequences: int) -> float:
        """Bytes that a step over `sequences` tokens reads.

        Of the experts as many as are expected if each token chooses its own at random:
        ``1 - (1 - chosen / experts) ** sequences`` of them.
        """
        if not self.expert_nbytes:
            return self.nbytes
        share = 1 - (1 - self.chosen / self.experts) ** sequences
        return self.nbytes - self.expert_nbytes * (1 - share)


def find_weights(model: ModelSpec, dtype: str | None, gigabytes: float | None) -> Weights | None:
    """The weights of a model, or None if nothing says how many bytes they have.

    Args:
        model: Whose.
        dtype: One of `WEIGHT_BITS` that they are converted to; None if they stay as published.
        gigabytes: Their size, if the user knows it, in units of 10^9 bytes.

    Raises:
        InputError: A checkpoint that is quantized in a way that its config does not tell the size
            of.
        FileFormatError: A damaged weight file.
    """
    found = None
    if dtype is None and model.directory is not None:
        found = _from_headers(model.directory)
    parameters = count_parameters(model.model_type, model.settings)
    if found is None and parameters is not None:
        published = dtype is None and gigabytes is None
        stored = stored_format(model.config) if published else dtype or "bf16"
        found = _from_count(parameters, stored)
    if gigabytes is not None:
        share = found.expert_nbytes / found.nbytes if found else 0
        total = round(gigabytes * 1e9)
        found = Weights(total, round(total * share), source="--weights-gb")
    experts = experts_of(model.settings)
    if found is None or experts is None:
        return found and replace(found, expert_nbytes=0)
    return replace(found, experts=experts[0], chosen=experts[1])


def stored_format(config: Mapping[str, Any]) -> str:
    """The format that a checkpoint's config says its weights have."""
    quantized = config.get("quantization_config") or {}
    method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
    if method in WEIGHT_BITS:
        return str(method)
    if method is not None:
        raise InputError(
            f"weights quantized by {method!r} cannot be counted from the config: give "
            "--weights-dtype or --weights-gb"
        )
    return _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), "bf16")


def _from_count(parameters: Parameters, stored: str) -> Weights:
    bits = WEIGHT_BITS[stored]
    rest_bits = max(bits, 16)
    # gpt-oss keeps its attention in bf16: only experts are mxfp4.
    matrix_bits = rest_bits if stored == "mxfp4" else bits
    scales = parameters.matrices + parameters.experts if stored == "fp8" else 0
    total = parameters.matrices * matrix_bits + parameters.experts * bits
    total += parameters.rest * rest_bits
    # fp8: a float32 for each block of 128 x 128 (DeepSeek-V3, README_WEIGHTS.md).
    total += scales * 32 / 128**2
    return Weights(
        round(total / 8),
        round(parameters.experts * bits / 8),
        source=f"{parameters.total:,} parameters in {stored}",
    )


def _from_headers(directory: Path) -> Weights | None:
    files = _weight_files(directory)
    if not files:
        return None
    total = experts = 0
    for path in files:
        header = read_header(path)
        for name in header.tensors:
            nbytes = header.nbytes(name)
            total += nbytes
            experts += nbytes if ".experts." in name else 0
    return Weights(total, experts, source=f"headers of {len(files)} safetensors files")


def _weight_files(directory: Path) -> list[Path]:
    """The files that make up a checkpoint; none if one is missing."""
    index = directory / _INDEX
    if not index.is_file():
        single = directory / "model.safetensors"
        return [single] if single.is_file() else []
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = [directory / name for name in sorted(set(shards))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"cannot read {index}: {error!r}") from error
    return files if all(path.is_file() for path in files) else []
