"""What a file of calibrated scales says about the cache made with it, read without its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvquant.errors import FingerprintError
from kvquant.geometry import CacheGeometry
from kvquant.scheme import QuantScheme
from kvquant.storage import find, parse_header, parsing
from kvquant.tensor_files import TensorFile, read_header

from .spec import ModelSpec

_SLOTS = ("key", "value")


@dataclass(frozen=True)
class Calibrated:
    """A file of scales.

    Attributes:
        name: Of the file, without its suffix.
        scheme: What the scales are for.
        turns_means: Whether some mean turns with the position, so that a cache which subtracts
            means keeps positions.
        longest_position: Up to which position calibration read; None if the file does not say.
    """

    name: str
    scheme: QuantScheme
    turns_means: bool
    longest_position: int | None


def read_calibrated(name: str, model: ModelSpec) -> Calibrated:
    """The file of scales called `name`.

    Raises:
        FileFormatError: Not such a file.
        FingerprintError: Its cache has another shape than the model's.
    """
    path = find(Path(name).expanduser(), ".safetensors")
    file = read_header(path)
    header = parse_header(path, "scales", file.metadata)
    with parsing(path):
        geometry = CacheGeometry.from_dict(header["geometry"])
        scheme = QuantScheme.from_dict(header["scheme"])
        turns = any(
            _turns(file, header["rotary"], f"layers.{index}.{slot}")
            for index in header["layers"]
            for slot in _SLOTS
        )
        longest = header["provenance"].get("longest_position")
    if geometry.layers != model.geometry.layers:
        raise FingerprintError(
            f"{path} is for a {geometry.summary()}; {model.name} has a {model.geometry.summary()}"
        )
    return Calibrated(path.stem, scheme, turns, longest)


def _turns(file: TensorFile, rotary: Mapping[str, Any], slot: str) -> bool:
    """Whether a slot's mean turns; files of version 1 do not say, and then it does."""
    if slot not in rotary or f"{slot}.mean_unrotated" not in file.tensors:
        return False
    turned = f"{slot}.turned"
    return turned not in file.tensors or any(file.read(turned))
