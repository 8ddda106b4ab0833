"""A checkpoint with adapters merged into its weights, for engines that serve it as one model."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvquant.errors import ExportError
from kvquant.models.source import ModelSource

from .checkpoint import CONFIG, Checkpoint
from .directory import LinkMode, Written, write_export

if TYPE_CHECKING:
    from kvquant.fingerprint import Fingerprint

    from .target import Contribution

_KEPT = ("*processor_config.json", "LICENSE*", "NOTICE*")
"""Files of the base that neither model nor tokenizer writes: a server of pictures needs them."""

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def stored_dtype(checkpoint: Checkpoint) -> str:
    """Dtype of most of a checkpoint's weights, as torch names it.

    Raises:
        ExportError: None that adapters can be merged into.
    """
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.stop - tensor.start
    most = max(sizes, key=lambda name: sizes[name])
    if most not in _DTYPES:
        raise ExportError(
            f"the weights of {checkpoint.directory} are {most}: adapters can only be merged into "
            "float32, bfloat16 or float16"
        )
    return _DTYPES[most]


def write_merged(
    source: ModelSource,
    checkpoint: Checkpoint,
    check: Callable[[Fingerprint], None],
    directory: Path,
    notify: Callable[[str], None],
) -> None:
    """Writes the merged model, with its tokenizer, to an empty directory.

    Args:
        source: The base and its adapters.
        checkpoint: The base as it lies on disk; its dtype is that of the merged weights.
        check: Given the identity of base and adapters before anything is merged.
        directory: Where to.
        notify: Told what takes long.

    Raises:
        AdapterError: These adapters cannot be merged.
        ExportError: The base's weights are of another kind, or the place cannot be written.
    """
    dtype = stored_dtype(checkpoint)
    from kvquant.fingerprint import fingerprint
    from kvquant.models.adapters import merge
    from kvquant.models.loading import load, quiet
    from kvquant.models.switching import adapter_names

    notify(f"merging {', '.join(source.adapters)} into {source.base or source.model}")
    loaded = load(source, dtype=dtype, device="cpu", notify=notify)
    check(fingerprint(loaded.model, loaded.tokenizer))
    merged = merge(loaded.model, adapter_names(loaded.model))
    try:
        with quiet():
            merged.save_pretrained(directory)
        loaded.tokenizer.save_pretrained(directory)
        for path in (path for pattern in _KEPT for path in checkpoint.directory.glob(pattern)):
            shutil.copyfile(path, directory / path.name)
        for path in directory.iterdir():
            readable(path)
    except Exception as error:  # safetensors wraps a full disk in an exception of its own
        raise ExportError(f"cannot write the merged model beside the output: {error}") from error


def readable(path: Path) -> None:
    """Gives a file the permissions of any new file: safetensors keeps its files to their owner."""
    fresh = path.with_name(f".kvquant-{secrets.token_hex(8)}")
    fresh.touch(exist_ok=False)
    mode = fresh.stat().st_mode
    fresh.unlink()
    path.chmod(stat.S_IMODE(mode))


@contextmanager
def scratch(output: Path) -> Iterator[Path]:
    """A directory on the filesystem of the output, gone at the end."""
    target = Path(os.path.realpath(output))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(prefix=".kvquant-", dir=target.parent)
    except OSError as error:
        raise ExportError(f"cannot write {output}: {error.strerror or error}") from error
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def write_from_scratch(
    checkpoint: Checkpoint, contribution: Contribution, output: Path, **options: Any
) -> Written:
    """Writes an export whose base is gone afterwards, so that all of it is new.

    Args:
        checkpoint: A model in a directory of `scratch`.
        contribution: What the engines want.
        output: Directory that is made.
        options: As for `write_export`.

    Raises:
        ExportError: It cannot be written.
    """
    copy = not _has_hard_links(checkpoint.directory)
    written = write_export(checkpoint, contribution, output, copy=copy, **options)
    nbytes = sum((output / name).stat().st_size for name in written.files)
    return replace(written, weights=LinkMode.COPY, new_bytes=nbytes)


def _has_hard_links(directory: Path) -> bool:
    """Whether the filesystem has them; a symbolic link would lead to what is gone afterwards."""
    other = directory / ".linked"
    try:
        os.link(directory / CONFIG, other)
    except OSError:
        return False
    other.unlink()
    return True
