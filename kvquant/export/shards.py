"""The weight files of an export: which there are, what is in them, and how they get there.

A tensor must be in one file only: engines read every file that the index names, each of them whole,
and of two tensors of one name the later wins. So the base's files are linked as they are, except
those that hold a tensor which the export replaces: these are written anew without it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import BinaryIO

from kvquant.errors import ExportError
from kvquant.tensor_files import TensorFile, read_header

from .checkpoint import SINGLE_FILE, Checkpoint

_CHUNK = 16 * 2**20
_NO_HARD_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
"""Another filesystem; one without hard links, or somebody else's file; too many links already."""


class LinkMode(Enum):
    """How the base's weight files came into an export."""

    HARD = "hard link"
    SYMBOLIC = "symbolic link"
    COPY = "copy"


@dataclass(frozen=True)
class ShardPlan:
    """The weight files of an export, by the names that they have there.

    Attributes:
        linked: Files of the base that are taken as they are; links resolved.
        trimmed: Files of the base that are written anew without the tensors in `dropped`.
        added: Files that hold what replaces them.
        scales: Name of the file for the scales, None if there are none.
        dropped: Tensors of the base that the export has otherwise.
        weight_map: File of each tensor.
    """

    linked: Mapping[str, Path]
    trimmed: Mapping[str, TensorFile]
    added: Mapping[str, Path]
    scales: str | None
    dropped: Collection[str]
    weight_map: Mapping[str, str]

    @property
    def adds(self) -> bool:
        """Whether the export has tensors that the base has not, so that it needs an index."""
        return self.scales is not None or bool(self.added)

    def linked_nbytes(self) -> int:
        """Bytes of the files that are linked."""
        return sum(path.stat().st_size for path in self.linked.values())

    def trimmed_nbytes(self) -> int:
        """Bytes of the tensors in files that are written anew."""
        return sum(
            file.nbytes(key)
            for file in self.trimmed.values()
            for key in file.tensors
            if key not in self.dropped
        )


def plan_shards(
    checkpoint: Checkpoint, scales: Collection[str], replaced: Mapping[str, Path]
) -> ShardPlan:
    """The weight files that an export needs.

    Args:
        checkpoint: The base.
        scales: Names of the tensors in the scales' file; the base may have some of them already.
        replaced: The file that holds a tensor of the base from now on, by the tensor's name.

    Raises:
        ExportError: A file of `replaced` does not hold what it is to replace.
    """
    dropped = {*scales, *replaced}
    files = {name: _base_file(checkpoint, name) for name in sorted(set(checkpoint.shards.values()))}
    files = {name: file for name, file in files.items() if not dropped >= file.tensors.keys()}
    new = {path: {key for key in replaced if replaced[key] == path} for path in replaced.values()}
    for path, keys in new.items():
        _check_replacement(checkpoint, path, keys)
    names = _names(list(files), ["weights"] * len(new) + ["scales"] * bool(scales))
    of_base = dict(zip(files, names, strict=False))
    of_new = dict(zip(new, names[len(files) :], strict=False))
    whole = {name for name, file in files.items() if dropped.isdisjoint(file.tensors)}
    listed = checkpoint.shards if checkpoint.index is None else checkpoint.index["weight_map"]
    weight_map = {key: of_base[name] for key, name in listed.items() if key not in dropped}
    weight_map |= {key: of_new[path] for key, path in replaced.items()}
    weight_map |= dict.fromkeys(scales, names[-1])
    return ShardPlan(
        linked={of_base[name]: file.path for name, file in files.items() if name in whole},
        trimmed={of_base[name]: file for name, file in files.items() if name not in whole},
        added=dict(zip(of_new.values(), of_new, strict=True)),
        scales=names[-1] if scales else None,
        dropped=dropped,
        weight_map=weight_map,
    )


def _base_file(checkpoint: Checkpoint, name: str) -> TensorFile:
    """A weight file of the base, links resolved: a hub model's lie in another folder."""
    return read_header(Path(os.path.realpath(checkpoint.directory / name)))


def _check_replacement(checkpoint: Checkpoint, path: Path, keys: Collection[str]) -> None:
    file = read_header(path)
    same = [
        key
        for key in keys
        if key in file.tensors
        and key in checkpoint.tensors
        and file.tensors[key].shape == checkpoint.tensors[key].shape
        and file.tensors[key].dtype == checkpoint.tensors[key].dtype
    ]
    if len(same) < len(keys) or len(keys) < len(file.tensors):
        raise ExportError(
            f"{path} has {len(file.tensors)} tensors, {len(same)} of which are among the "
            f"{len(keys)} that it is to replace, of the same shape and dtype"
        )


def _names(base: Sequence[str], added: Sequence[str]) -> list[str]:
    """Names of the weight files: those of the base, then those that are added.

    A base of one file gets names as if it had been saved so. Shards keep theirs, except where the
    name makes an engine ignore the index: Transformers prefers ``model.safetensors``, and vLLM
    takes ``consolidated*.safetensors`` for Mistral's own format.
    """
    if not added:
        return list(base)
    total = len(base) + len(added)
    if len(base) <= 1:
        return [f"model-{i:05}-of-{total:05}.safetensors" for i in range(1, total + 1)]
    names = [
        f"base-{name}" if name == SINGLE_FILE or name.startswith("consolidated") else name
        for name in base
    ]
    for kind in added:
        endings = ("", *(f"-{number}" for number in range(2, total + 2)))
        free = (f"model-kvquant-{kind}{ending}.safetensors" for ending in endings)
        names.append(next(name for name in free if name not in names))
    return names


def place(source: Path, target: Path, *, copy: bool = False, symbolic: bool = True) -> LinkMode:
    """Makes `target` have the bytes of `source`: a hard link where that is possible.

    Args:
        source: A file, links resolved.
        target: Its new name.
        copy: Copy it in any case.
        symbolic: Make a symbolic link where a hard one is not possible, instead of a copy.
    """
    if not copy:
        try:
            os.link(source, target)
            return LinkMode.HARD
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
        if symbolic:
            target.symlink_to(source)
            return LinkMode.SYMBOLIC
    shutil.copyfile(source, target)
    return LinkMode.COPY


def write_trimmed(file: TensorFile, target: Path, dropped: Collection[str], version: str) -> None:
    """Writes `file` to `target` without the tensors in `dropped`, a few megabytes at a time."""
    kept = {key: tensor for key, tensor in file.tensors.items() if key not in dropped}
    kept = dict(sorted(kept.items(), key=lambda item: item[1].start))
    header: dict[str, object] = {
        "__metadata__": {"format": "pt", **file.metadata, "kvquant": version}
    }
    end = 0
    for key, tensor in kept.items():
        start, end = end, end + tensor.stop - tensor.start
        header[key] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with file.path.open("rb") as source, target.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in kept.values():
            source.seek(tensor.start)
            _copy_bytes(source, stream, tensor.stop - tensor.start)


def _copy_bytes(source: BinaryIO, target: BinaryIO, nbytes: int) -> None:
    while nbytes:
        chunk = source.read(min(_CHUNK, nbytes))
        if not chunk:
            raise OSError(errno.EIO, f"{source.name} became shorter while it was read")
        target.write(chunk)
        nbytes -= len(chunk)
