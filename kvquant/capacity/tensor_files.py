"""Reads the headers of safetensors files: names, sizes and metadata, without a tensor and torch."""

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
class TensorFile:
    """What the header of one file says.

    Attributes:
        path: The file.
        metadata: Free texts that its writer added.
        places: Name of a tensor -> its first byte and the byte after its last, in the file.
    """

    path: Path
    metadata: Mapping[str, str]
    places: Mapping[str, tuple[int, int]]

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor."""
        start, stop = self.places[name]
        return stop - start

    def read(self, name: str) -> bytes:
        """Bytes of a tensor, as they are stored."""
        start, stop = self.places[name]
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)


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
        places = {
            name: (8 + length + tensor["data_offsets"][0], 8 + length + tensor["data_offsets"][1])
            for name, tensor in header.items()
        }
        end = max((stop for _, stop in places.values()), default=0)
        if end > path.stat().st_size:
            raise ValueError(f"{path.stat().st_size:,} bytes of {end:,}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise FileFormatError(
            f"{path} cannot be read ({error}); it is cut short or no safetensors file"
        ) from error
    return TensorFile(path, metadata, places)
