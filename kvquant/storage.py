"""Scales and statistics on disk: one safetensors file with a versioned JSON header.

The header is one metadata entry, ``kvquant``, beside the ``format: pt`` that older readers of
safetensors expect. Files appear under their final name only when they are complete.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import FileFormatError, FingerprintError, InputError, KVQuantError

if TYPE_CHECKING:
    import torch

    from .scales import KVScales, TensorScales

SUFFIX = ".safetensors"
"""Of scales and prefixes."""

FORMAT_VERSION = 2
_SLOTS = ("key", "value")
_SCALE_TENSORS = ("scale", "zero_point", "mean", "mean_unrotated")


class KVQuantWarning(UserWarning):
    """Something that may be meant, and that makes results wrong or worse if it is not."""


def warn(message: str) -> None:
    """Warns at the line from which kvquant was called, however deep inside it this is."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "kvquant":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, KVQuantWarning, stacklevel=level)


def write(
    path: Path, kind: str, tensors: Mapping[str, torch.Tensor], header: dict[str, Any]
) -> None:
    """Writes `tensors` and `header` to `path`, atomically.

    Args:
        path: Final name. An existing file stays as it is until the new one is complete.
        kind: ``scales``, ``stats`` or ``prefix``; `read` insists on it.
        tensors: Named tensors, on any device; they may share memory.
        header: JSON values.

    Raises:
        InputError: The place cannot be written, or the disk is full.
    """
    import torch
    from safetensors.torch import save

    entry = json.dumps({"version": FORMAT_VERSION, "kind": kind, **header})
    plain = torch.contiguous_format
    copies = {
        name: tensor.detach().cpu().clone(memory_format=plain) for name, tensor in tensors.items()
    }
    write_atomically(path, save(copies, metadata={"format": "pt", "kvquant": entry}))


def write_atomically(path: Path, content: bytes) -> None:
    """Writes `content` to `path` through a temporary file beside it.

    A symbolic link is followed, so that it still points to the new content afterwards.

    Raises:
        InputError: The place cannot be written, or the disk is full; nothing is left behind.
    """
    with _temporary(path, len(content)) as (temporary, target):
        with temporary.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)


def check_writable(path: Path) -> None:
    """Makes sure, before long work, that `write_atomically` can write to `path`.

    Raises:
        InputError: It cannot.
    """
    with _temporary(path) as (temporary, _):
        temporary.touch(exist_ok=False)


@contextmanager
def _temporary(path: Path, size: int = 0) -> Iterator[tuple[Path, Path]]:
    """A free name beside the file that `path` stands for, and that file; removes the former."""
    target = Path(os.path.realpath(path))
    if os.path.exists(target) and not os.path.isfile(target):
        what = "directory" if os.path.isdir(target) else "device or pipe"
        raise InputError(f"cannot write {path}: it is a {what}")
    temporary = target.parent / f".kvquant-{secrets.token_hex(8)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            target.lstat()  # a name that is too long
        try:
            yield temporary, target
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError as error:
        raise InputError(f"cannot write {path}: {error.filename} is no directory") from error
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({size / 1e6:.1f} MB): {error.strerror or error}"
        ) from error


def read(path: Path, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and header of a file written by `write`.

    Raises:
        FileFormatError: Missing, cut short, not ours, of another kind, or of a newer version.
    """
    from safetensors import SafetensorError, safe_open

    if not os.path.isfile(path):
        what = "is a directory" if os.path.isdir(path) else "does not exist or is no file"
        maker = "QuantizedCache.save" if kind == "prefix" else "kvquant calibrate"
        raise FileFormatError(f"{path} {what}; a {kind} file from `{maker}` is needed")
    try:
        with safe_open(path, framework="pt") as file:
            header = parse_header(path, kind, file.metadata())
            # Copies: the file may be written over while its tensors are in use.
            return {name: file.get_tensor(name).clone() for name in file.keys()}, header  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FileFormatError(
            f"{path} cannot be read ({error}); it is cut short or no safetensors file"
        ) from error


@contextmanager
def parsing(path: Path) -> Iterator[None]:
    """Turns whatever a damaged header or tensor leads to into a `FileFormatError`."""
    try:
        yield
    except FileFormatError:
        raise
    except (KVQuantError, KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise FileFormatError(f"{path} is damaged: {what}") from error


def kind_of(path: Path) -> str | None:
    """``scales``, ``stats``, ``prefix``, or None for anything that `write` did not produce."""
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
    with parsing(path):
        header: dict[str, Any] = json.loads(metadata["kvquant"])
        version, found = int(header["version"]), header["kind"]
    if version > FORMAT_VERSION:
        raise FileFormatError(
            f"{path} has format version {version}, this kvquant reads up to {FORMAT_VERSION}: "
            "upgrade kvquant-toolkit"
        )
    if found != kind:
        raise FileFormatError(f"{path} is a {found} file, a {kind} file is needed")
    return header


def save_scales(scales: KVScales, path: Path | str) -> None:
    """Writes scales, atomically.

    Args:
        scales: The scales.
        path: The file, with or without its ``.safetensors``.

    Raises:
        InputError: The place cannot be written, or the disk is full.
    """
    write(suffixed(path, SUFFIX), "scales", *pack_scales(scales))


def pack_scales(scales: KVScales) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and header of a file that holds `scales`."""
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
    for prefix, slot in slots.items():
        if slot.turned is not None:
            tensors[f"{prefix}.turned"] = slot.turned.byte()
    rotary = {prefix: slot.rotary.to_dict() for prefix, slot in slots.items() if slot.rotary}
    header = {
        "scheme": scales.scheme.to_dict(),
        "geometry": scales.geometry.to_dict(),
        "provenance": scales.provenance.to_dict(),
        "method": scales.method,
        "layers": sorted(scales.layers),
        "rotary": rotary,
    }
    return tensors, header


def load_scales(
    path: Path | str, model: Any = None, *, tokenizer: Any = None, force: bool = False
) -> KVScales:
    """Reads scales, and makes sure that they belong to `model` if one is given.

    Args:
        path: The file, with or without its ``.safetensors``.
        model: Transformers model or PeftModel, with the adapters active that it is served with.
        tokenizer: Its tokenizer; another one than calibrated with is worth a warning, no more.
        force: Take scales of another model of the same shape all the same, with a warning.

    Raises:
        FileFormatError: Not such a file, cut short, or of a newer version.
        FingerprintError: Scales of another model, adapter set or geometry.
        InputError: `model` is no model.
    """
    scales = _read_scales(find(path, SUFFIX))
    if model is not None:
        check_belonging(scales, model, tokenizer, force)
    return scales


def check_belonging(scales: KVScales, model: Any, tokenizer: Any, force: bool) -> None:
    """Makes sure that scales belong to a model in memory; arguments are those of `load_scales`.

    Raises:
        FingerprintError: Scales of another model, adapter set or geometry.
        InputError: `model` is no model.
    """
    from .fingerprint import fingerprint
    from .geometry import CacheGeometry

    served = fingerprint(model, tokenizer)
    geometry = CacheGeometry.from_config(model.config)
    if force:
        scales.check_shape(geometry)
    try:
        scales.check_model(served, geometry)
    except FingerprintError as error:
        if not force:
            raise
        warn(f"forced: {error}")
    if not scales.provenance.knows_tokenizer(served):
        warn(
            "the scales were calibrated with another tokenizer than this one, on text that was cut "
            "into other tokens: calibrate with the tokenizer that you serve"
        )


def suffixed(path: Path | str, suffix: str) -> Path:
    """The file to write where users name `path`, with or without its suffix; `find` finds it.

    Raises:
        InputError: The name of a directory.
    """
    name = os.fspath(path)
    if os.path.isdir(name) or os.path.basename(name) in ("", ".", ".."):
        raise InputError(f"cannot write {path}: it is a directory, name a file in it")
    return Path(name if name.endswith(suffix) else f"{name}{suffix}")


def find(path: Path | str, suffix: str) -> Path:
    """`path` as it is if there is such a file, else with `suffix` appended."""
    exact = os.path.isfile(path) or str(path).endswith(suffix)
    return Path(path) if exact else Path(f"{path}{suffix}")


def _read_scales(path: Path) -> KVScales:
    tensors, header = read(path, "scales")
    with parsing(path):
        return unpack_scales(tensors, header)


def unpack_scales(tensors: Mapping[str, torch.Tensor], header: dict[str, Any]) -> KVScales:
    """Inverse of `pack_scales`; errors of all kinds where the file is damaged: see `parsing`."""
    from .geometry import CacheGeometry
    from .provenance import Provenance
    from .scales import KVScales, LayerScales
    from .scheme import QuantScheme

    return KVScales(
        CacheGeometry.from_dict(header["geometry"]),
        QuantScheme.from_dict(header["scheme"]),
        {
            index: LayerScales(
                *(_tensor_scales(tensors, header, f"layers.{index}.{slot}") for slot in _SLOTS)
            )
            for index in header["layers"]
        },
        Provenance.from_dict(header["provenance"]),
        header["method"],
    )


def _tensor_scales(
    tensors: Mapping[str, torch.Tensor], header: dict[str, Any], prefix: str
) -> TensorScales:
    from .rotary import RotaryLayout
    from .scales import TensorScales

    if f"{prefix}.scale" not in tensors:
        raise ValueError(f"it lacks the tensor {prefix}.scale")
    rotary = header["rotary"].get(prefix)
    return TensorScales(
        **{name: tensors.get(f"{prefix}.{name}") for name in _SCALE_TENSORS},  # type: ignore[arg-type]
        rotary=RotaryLayout(**rotary) if rotary else None,
        turned=_turned(f"{prefix}.turned", tensors),
    )


def _turned(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Bytes as bool; None in files of version 1, which do not say."""
    import torch

    stored = tensors.get(name)
    if stored is None:
        return None
    if stored.dtype != torch.uint8 or bool((stored > 1).any()):
        raise ValueError(f"{name} must be bytes of 0 and 1")
    return stored.bool()
