"""Scales and statistics on disk: one safetensors file with a versioned JSON header.

The header is one metadata entry, ``kvquant``, beside the ``format: pt`` that older readers of
safetensors expect. Files appear under their final name only when they are complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from .errors import FileFormatError, InputError

if TYPE_CHECKING:
    import torch

    from .scales import KVScales, TensorScales

FORMAT_VERSION = 1
_SLOTS = ("key", "value")
_SCALE_TENSORS = ("scale", "zero_point", "mean", "mean_unrotated")


def write(path: Path, kind: str, tensors: Mapping[str, torch.Tensor], header: dict[str, Any]) -> None:
    """Writes `tensors` and `header` to `path`, atomically.

    Args:
        path: Final name. An existing file stays as it is until the new one is complete.
        kind: ``scales`` or ``stats``; `read` insists on it.
        tensors: Named tensors, moved to the CPU as they are.
        header: JSON values.

    Raises:
        InputError: The place cannot be written, or the disk is full.
    """
    from safetensors.torch import save

    entry = json.dumps({"version": FORMAT_VERSION, "kind": kind, **header})
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, save(on_cpu, metadata={"format": "pt", "kvquant": entry}))


def write_atomically(path: Path, content: bytes) -> None:
    """Writes `content` to `path` through a temporary file beside it.

    Raises:
        InputError: The place cannot be written, or the disk is full; nothing is left behind.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as stream:
            temporary = Path(stream.name)
            try:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
                temporary.chmod(0o666 & ~_umask())
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        size = len(content) / 1e6
        raise InputError(f"cannot write {path} ({size:.1f} MB): {error.strerror or error}") from error


def read(path: Path, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and header of a file written by `write`.

    Raises:
        FileFormatError: Missing, cut short, not ours, of another kind, or of a newer version.
    """
    from safetensors import SafetensorError, safe_open

    if path.is_dir() or not path.exists():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise FileFormatError(f"{path} {what}; a {kind} file from `kvquant calibrate` is needed")
    try:
        with safe_open(path, framework="pt") as file:
            header = parse_header(path, kind, file.metadata())
            return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise FileFormatError(
            f"{path} cannot be read ({error}); it is cut short or no safetensors file"
        ) from error


def kind_of(path: Path) -> str | None:
    """``scales``, ``stats``, or None for anything that `write` did not produce."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return str(json.loads(file.metadata()["kvquant"])["kind"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return None


def parse_header(path: Path, kind: str, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """The JSON header in a file's metadata.

    Raises:
        FileFormatError: There is none, or it is of another kind or a newer version.
    """
    if not metadata or "kvquant" not in metadata:
        raise FileFormatError(f"{path} is a safetensors file, but not one of kvquant's")
    header: dict[str, Any] = json.loads(metadata["kvquant"])
    if header["version"] > FORMAT_VERSION:
        raise FileFormatError(
            f"{path} has format version {header['version']}, this kvquant reads up to "
            f"{FORMAT_VERSION}: upgrade kvquant-toolkit"
        )
    if header["kind"] != kind:
        raise FileFormatError(f"{path} is a {header['kind']} file, a {kind} file is needed")
    return header


def save_scales(scales: KVScales, path: Path) -> None:
    """Writes scales, atomically.

    Raises:
        InputError: The place cannot be written, or the disk is full.
    """
    slots = {
        f"layers.{index}.{slot}": getattr(layer, slot)
        for index, layer in scales.layers.items()
        for slot in _SLOTS
    }
    tensors = {
        f"{prefix}.{name}": tensor
        for prefix, slot in slots.items()
        for name in _SCALE_TENSORS
        if (tensor := getattr(slot, name)) is not None
    }
    rotary = {prefix: slot.rotary.to_dict() for prefix, slot in slots.items() if slot.rotary}
    header = {
        "scheme": scales.scheme.to_dict(),
        "geometry": scales.geometry.to_dict(),
        "provenance": scales.provenance.to_dict(),
        "method": scales.method,
        "layers": sorted(scales.layers),
        "rotary": rotary,
    }
    write(path, "scales", tensors, header)


def load_scales(path: Path) -> KVScales:
    """Reads scales; whether they fit a model is for `KVScales.check_model` to say.

    Raises:
        FileFormatError: Not such a file, cut short, or of a newer version.
    """
    from .geometry import CacheGeometry
    from .provenance import Provenance
    from .scales import KVScales, LayerScales
    from .scheme import QuantScheme

    tensors, header = read(path, "scales")
    layers = {
        index: LayerScales(
            *(_tensor_scales(tensors, header, f"layers.{index}.{slot}", path) for slot in _SLOTS)
        )
        for index in header["layers"]
    }
    return KVScales(
        CacheGeometry.from_dict(header["geometry"]),
        QuantScheme.from_dict(header["scheme"]),
        layers,
        Provenance.from_dict(header["provenance"]),
        header["method"],
    )


def _tensor_scales(
    tensors: Mapping[str, torch.Tensor], header: dict[str, Any], prefix: str, path: Path
) -> TensorScales:
    from .rotary import RotaryLayout
    from .scales import TensorScales

    if f"{prefix}.scale" not in tensors:
        raise FileFormatError(f"{path} lacks the tensor {prefix}.scale")
    rotary = header["rotary"].get(prefix)
    return TensorScales(
        **{name: tensors.get(f"{prefix}.{name}") for name in _SCALE_TENSORS},  # type: ignore[arg-type]
        rotary=RotaryLayout(**rotary) if rotary else None,
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
