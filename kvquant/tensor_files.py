"""Reads headers of safetensors files: names, shapes and metadata, without a tensor and torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvquant.errors import FileFormatError

_LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""


@dataclass(frozen=True)
class StoredTensor:
    """What a header says about one tensor.

    Attributes:
        dtype: As safetensors names it: ``F32``, ``BF16``, ``F8_E4M3`` …
        shape: Its shape.
        start: Its first byte in the file.
        stop: The byte after its last.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class TensorFile:
    """What the header of one file says.

    Attributes:
        path: The file.
        metadata: Free texts that its writer added.
        tensors: The tensors in it, by name.
    """

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor."""
        return self.tensors[name].stop - self.tensors[name].start

    def read(self, name: str) -> bytes:
        """Bytes of a tensor, as they are stored."""
        with self.path.open("rb") as file:
            file.seek(self.tensors[name].start)
            return file.read(self.nbytes(name))


def read_header(path: Path) -> TensorFile:
    """The header of `path`.

    Raises:
        FileFormatError: Missing, cut short, or no safetensors file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= _LONGEST_HEADER:
                raise ValueError(f"a header of {length:,} bytes")
            text = file.read(length)
        if len(text) < length:
            raise ValueError(f"{len(text):,} of {length:,} bytes of its header")
        header: dict[str, Any] = json.loads(text)
        metadata = header.pop("__metadata__", {})
        tensors = {
            name: StoredTensor(
                str(entry["dtype"]),
                tuple(map(int, entry["shape"])),
                *(8 + length + int(offset) for offset in entry["data_offsets"]),
            )
            for name, entry in header.items()
        }
        end = max((tensor.stop for tensor in tensors.values()), default=0)
        if end > path.stat().st_size:
            raise ValueError(f"{path.stat().st_size:,} bytes of {end:,}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise FileFormatError(
            f"{path} cannot be read ({error}); it is cut short or no safetensors file"
        ) from error
    return TensorFile(path, metadata, tensors)
