"""Puts what exporters contribute into one directory, beside links to the base's weights.

All is written to a directory of another name beside the final one, which gets its name at the end:
under that name there is a complete export or none.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import kvquant
from kvquant.errors import ExportError

from .checkpoint import CONFIG, INDEX, Checkpoint
from .shards import LinkMode, ShardPlan, place, plan_shards, write_trimmed
from .target import Contribution
from .verify_report import some

__all__ = ["RECORD", "LinkMode", "Written", "check_output", "write_export"]

RECORD = "kvquant_export.json"
"""File in an export that says what it was made from, and what was reduced."""

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*")
_COPIED_BELOW = ("additional_chat_templates/*.jinja",)
_NOT_COPIED = (
    *(CONFIG, RECORD, "adapter_config.json", "trainer_state.json"),
    *("kv_cache_calib.json", "kv_cache_scales*.json", "kvquant_scales.json"),
)
"""Written anew, of no use without files that do not come along, or scales of another export."""

_LARGE = 1 << 17
"""Bytes from which a file of the base is linked like weights: a tokenizer's vocabulary."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        directory: The export.
        files: Names of all files in it, sorted.
        weights: How the base's weight files came into it.
        new_bytes: Bytes of all files that are no links to files of the base.
        remarks: What is not as one might expect, one sentence each.
    """

    directory: Path
    files: tuple[str, ...]
    weights: LinkMode
    new_bytes: int
    remarks: tuple[str, ...]


def write_export(
    checkpoint: Checkpoint,
    contribution: Contribution,
    output: Path,
    *,
    copy: bool = False,
    replaced: Mapping[str, Path] = MappingProxyType({}),
    named: Path | None = None,
    record: Mapping[str, Any],
    notify: Callable[[str], None],
) -> Written:
    """Writes an export, all of it or nothing; the base stays as it is.

    Args:
        checkpoint: The base.
        contribution: What the engines want.
        output: Directory that is made; it may exist if it is empty.
        copy: Copy the base's weights instead of linking to them.
        replaced: For tensors of the base that get other values, the safetensors file with them. It
            holds no others, in the base's shapes and dtypes; it is linked or copied.
        named: What errors call the output, where it gets another name later.
        record: JSON values for kvquant_export.json.
        notify: Told what takes long.

    Raises:
        ExportError: The output is not empty or lies in the base, the place cannot be written, or
            the disk is full; nothing is left behind.
    """
    target = check_output(output, checkpoint.directory)
    plan = plan_shards(checkpoint, contribution.tensors, replaced)
    small = _small_files(checkpoint, contribution, plan, record)
    if plan.scales is not None:
        small[plan.scales] = _serialized(contribution.tensors)
    needed = sum(map(len, small.values())) + plan.trimmed_nbytes()
    needed += plan.linked_nbytes() if copy else 0
    with _staging(target, named or output, needed) as staging:
        weights = _write_weights(plan, staging, copy=copy, notify=notify)
        large = _place_large_files(checkpoint, staging, set(small), copy=copy)
        for name, content in small.items():
            _write(staging / name, content)
        files = sorted(p.relative_to(staging).as_posix() for p in staging.rglob("*") if p.is_file())
        linked = set() if copy else {*large, *(plan.linked if weights is not LinkMode.COPY else ())}
        new_bytes = sum((staging / name).stat().st_size for name in files if name not in linked)
    remarks = _remarks(plan, weights, checkpoint.directory)
    return Written(output, tuple(files), weights, new_bytes, remarks)


def check_output(output: Path, base: Path) -> Path:
    """Where the export goes, links resolved.

    Raises:
        ExportError: There is something already, or it lies in the base.
    """
    target, base = Path(os.path.realpath(output)), Path(os.path.realpath(base))
    if target.is_relative_to(base):
        raise ExportError(f"{output} is or lies in the model's own directory: give another output")
    try:
        count = len(os.listdir(target))
    except FileNotFoundError:
        return target
    except OSError as error:
        raise ExportError(f"{output} is no directory to write to: {error.strerror}") from error
    if count:
        entries = "1 entry" if count == 1 else f"{count:,} entries"
        raise ExportError(f"{output} is not empty ({entries}): name a new directory or empty it")
    if os.path.ismount(target):
        raise ExportError(f"{output} is the root of a filesystem: name a directory in it")
    return target


@contextmanager
def _staging(target: Path, named: Path, needed: int) -> Iterator[Path]:
    """An empty directory beside `target` that becomes `target`; it is gone after any error.

    Args:
        target: Where the export goes.
        named: The same as the user named it.
        needed: Bytes that will be written.
    """
    staging = target.parent / f".kvquant-{secrets.token_hex(8)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        if needed > shutil.disk_usage(staging).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield staging
        staging.rename(target)
    except OSError as error:
        room = ""
        if error.errno in _NO_ROOM:
            free = shutil.disk_usage(target.parent).free
            room = f" ({_size(needed)} to write, {_size(free)} free)"
        raise ExportError(f"cannot write {named}: {error.strerror or error}{room}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _size(nbytes: int) -> str:
    """Bytes for people: ``1.2 MB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes / 1e3:,.1f} kB"


def _write_weights(
    plan: ShardPlan, staging: Path, *, copy: bool, notify: Callable[[str], None]
) -> LinkMode:
    """Puts all weights but the scales into `staging`; says how the base's whole files got there."""
    if plan.linked:
        doing = "copying" if copy else "linking"
        files = some(len(plan.linked), "weight file")
        notify(f"{doing} {files} ({_size(plan.linked_nbytes())})")
    modes = {place(path, staging / name, copy=copy) for name, path in plan.linked.items()}
    for name, file in plan.trimmed.items():
        gone = sum(key in plan.dropped for key in file.tensors)
        notify(f"writing {name} without {gone} of its {some(len(file.tensors), 'tensor')}")
        write_trimmed(file, staging / name, plan.dropped, kvquant.__version__)
    for name, path in plan.added.items():
        place(Path(os.path.realpath(path)), staging / name, symbolic=False)
    weakest = (LinkMode.SYMBOLIC, LinkMode.HARD, LinkMode.COPY)
    return next(mode for mode in weakest if mode in modes or mode is LinkMode.COPY)


def _serialized(tensors: Mapping[str, Any]) -> bytes:
    """A safetensors file; older readers insist on a format in its metadata."""
    from safetensors.torch import save

    # Copies: a file cannot hold tensors that share memory.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return save(copies, metadata={"format": "pt", "kvquant": kvquant.__version__})


def _small_files(
    checkpoint: Checkpoint, contribution: Contribution, plan: ShardPlan, record: Mapping[str, Any]
) -> dict[str, bytes]:
    """Everything but weights: the base's own files, then what the export sets, by name."""
    base = checkpoint.directory
    files = {
        path.relative_to(base).as_posix(): _read(path)
        for path in _companions(base)
        if path.stat().st_size < _LARGE
    }
    files |= contribution.files
    files[CONFIG] = _json({**checkpoint.config, **contribution.config})
    files[RECORD] = _json(record)
    if plan.adds:
        files[INDEX] = _json(_index(checkpoint, contribution, plan))
    elif checkpoint.index is not None:
        files[INDEX] = _read(base / INDEX)
    return files


def _place_large_files(
    checkpoint: Checkpoint, staging: Path, written: set[str], *, copy: bool
) -> list[str]:
    """Brings vocabularies along as weights are: they too can have many megabytes."""
    base, placed = checkpoint.directory, []
    for path in _companions(base):
        name = path.relative_to(base).as_posix()
        if path.stat().st_size >= _LARGE and name not in written:
            (staging / name).parent.mkdir(exist_ok=True)
            place(Path(os.path.realpath(path)), staging / name, copy=copy)
            placed.append(name)
    return placed


def _companions(base: Path) -> list[Path]:
    """Files of the base that come along: tokenizer, generation config, chat templates, code."""
    found = {path for pattern in (*_COPIED, *_COPIED_BELOW) for path in base.glob(pattern)}
    return [
        path
        for path in sorted(found)
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(".index.json")
        and not any(map(path.match, _NOT_COPIED))
    ]


def _index(checkpoint: Checkpoint, contribution: Contribution, plan: ShardPlan) -> dict[str, Any]:
    """The base's index, or that of its single file, with what was added."""
    index = checkpoint.index or {}
    sizes = {key: tensor.stop - tensor.start for key, tensor in checkpoint.tensors.items()}
    sizes |= {key: value.numel() * value.itemsize for key, value in contribution.tensors.items()}
    metadata = {
        **(index.get("metadata") or {}),
        "total_size": sum(sizes[k] for k in plan.weight_map),
    }
    return {**index, "metadata": metadata, "weight_map": dict(plan.weight_map)}


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ExportError(f"cannot read {path}: {error.strerror or error}") from error


def _write(path: Path, content: bytes) -> None:
    """Writes a new file: one that is there already may be a link to the base."""
    path.parent.mkdir(exist_ok=True)
    with path.open("xb") as stream:
        stream.write(content)


def _remarks(plan: ShardPlan, weights: LinkMode, base: Path) -> tuple[str, ...]:
    found = []
    if weights is LinkMode.SYMBOLIC:
        found.append(
            f"the weights are symbolic links to {base}, because a hard link to another filesystem "
            f"(or to somebody else's file) is not possible: the export needs them to stay there; "
            f"--copy makes it independent"
        )
    if plan.trimmed:
        found.append(
            f"{some(len(plan.trimmed), 'weight file')} ({_size(plan.trimmed_nbytes())}) written "
            f"anew without the tensors that the export replaces, because engines read whole files "
            f"and a tensor must be in one of them only: {', '.join(plan.trimmed)}"
        )
    return tuple(found)
