"""Reads a directory that is to be served, whatever state it is in.

Nothing here raises over a broken file: what cannot be read is noted, and the rest is looked at.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from kvquant.errors import FileFormatError
from kvquant.tensor_files import StoredTensor, TensorFile, read_header

CONFIG = "config.json"
HF_QUANT_CONFIG = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
_MOST_NUMBERS = 65_536
"""No model has more KV heads; a larger tensor is none of scales, and is not read."""


class Reading(Enum):
    """Which weight files an engine's loader reads."""

    INDEXED = "all, but with an index only the files that it names"
    SINGLE_FIRST = "model.safetensors if there is one, else the files that the index names"
    EVERY = "all"
    NOT_CONSOLIDATED = "all but consolidated*.safetensors"


@dataclass(frozen=True)
class ServedDirectory:
    """What lies in a directory.

    Attributes:
        path: The directory.
        config: config.json as parsed, empty if it cannot be.
        hf_quant_config: ModelOpt's hf_quant_config.json, None if there is none that can be read.
        weight_map: File of each tensor by the index, None without an index that can be read.
        total_size: Bytes of all tensors, as the index has it.
        files: Headers of the weight files that can be read, by file name.
        adapter: Header of a LoRA adapter's weights.
        unreadable: File name -> why it cannot be read.
    """

    path: Path
    config: Mapping[str, Any]
    hf_quant_config: Mapping[str, Any] | None
    weight_map: Mapping[str, str] | None
    total_size: Any
    files: Mapping[str, TensorFile]
    adapter: TensorFile | None
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The model class that config.json names, ``""`` if it names none."""
        listed = self.config.get("architectures")
        return str(listed[0]) if isinstance(listed, list) and listed else ""

    def names(self) -> set[str]:
        """Tensors that are there or that the index promises."""
        found = {name for file in self.files.values() for name in file.tensors}
        return found | (self.weight_map or {}).keys()

    def read_by(self, reading: Reading) -> list[TensorFile]:
        """The weight files that a loader would read, in the order of their names."""
        if reading is Reading.SINGLE_FIRST and SINGLE_FILE in self.files:
            return [self.files[SINGLE_FILE]]
        indexed = reading in (Reading.INDEXED, Reading.SINGLE_FIRST)
        if indexed and self.weight_map is not None:
            names = set(self.weight_map.values())
            return [file for name, file in self.files.items() if name in names]
        if reading is Reading.SINGLE_FIRST:
            return []
        if reading is Reading.NOT_CONSOLIDATED:
            kept = [file for name, file in self.files.items() if "consolidated" not in name]
            return kept or list(self.files.values())
        return list(self.files.values())


def read_served(path: Path) -> ServedDirectory:
    """Reads everything but weights."""
    unreadable: dict[str, str] = {}
    config = _json(path / CONFIG, unreadable)
    index = _json(path / INDEX, unreadable)
    files: dict[str, TensorFile] = {}
    for name in sorted(found.name for found in path.glob("*.safetensors")):
        try:
            files[name] = read_header(path / name)
        except (FileFormatError, RecursionError) as error:
            unreadable[name] = str(error)
    weight_map, metadata = (index or {}).get("weight_map"), (index or {}).get("metadata")
    if index is not None and not _is_weight_map(weight_map):
        unreadable[INDEX] = "it has no weight_map from tensors to files"
        weight_map = None
    return ServedDirectory(
        path,
        config or {},
        _json(path / HF_QUANT_CONFIG, unreadable),
        weight_map,
        metadata.get("total_size") if isinstance(metadata, dict) else None,
        {name: file for name, file in files.items() if name != ADAPTER},
        files.get(ADAPTER),
        unreadable,
    )


def _json(path: Path, unreadable: dict[str, str]) -> dict[str, Any] | None:
    """A JSON object; None without such a file, or noted in `unreadable`."""
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        unreadable[path.name] = str(error)
        return None
    if not isinstance(values, dict):
        unreadable[path.name] = f"it holds {type(values).__name__}, not a JSON object"
        return None
    return values


def _is_weight_map(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(name, str) for name in found.values())


# --- numbers --------------------------------------------------------------------------------------

_CODES = {"F64": "d", "F32": "f", "F16": "e", "BF16": "H"}
FLOATS = tuple(_CODES)
"""Types of tensors whose numbers can be read here."""


def numbers(file: TensorFile, name: str) -> tuple[float, ...] | None:
    """The numbers of a tensor of scales; None for one that is no tensor of floats, or too large."""
    tensor = file.tensors[name]
    code = _CODES.get(tensor.dtype)
    count = math.prod(tensor.shape)
    if code is None or count > _MOST_NUMBERS or not _fits(tensor, code, count):
        return None
    found = struct.unpack(f"<{count}{code}", file.read(name))
    return tuple(map(_from_bfloat16, found)) if tensor.dtype == "BF16" else found


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number that a float can hold; it may be infinite or none."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, float) or (whole and abs(value) < 2**63)


def _fits(tensor: StoredTensor, code: str, count: int) -> bool:
    return tensor.stop - tensor.start == count * struct.calcsize(f"<{code}")


def _from_bfloat16(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


def rounded(number: float, dtype: str) -> float:
    """A positive finite float32 as a model in `dtype` (``bfloat16``, ``float16``) holds it."""
    if dtype == "float16":
        try:
            return float(struct.unpack("<e", struct.pack("<e", number))[0])
        except OverflowError:
            return math.inf
    bits = struct.unpack("<I", struct.pack("<f", number))[0]
    even = bits + 0x7FFF + (bits >> 16 & 1)
    return _from_bfloat16(even >> 16) if dtype == "bfloat16" else number
