"""A checkpoint with adapters merged into its weights, for engines that serve it as one model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvquant.errors import ExportError
from kvquant.models.source import ModelSource

if TYPE_CHECKING:
    from kvquant.fingerprint import Fingerprint

    from .checkpoint import Checkpoint

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
    except OSError as error:
        raise ExportError(
            f"cannot write the merged model beside the output: {error.strerror or error}"
        ) from error
