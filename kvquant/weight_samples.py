"""A few values of each of a model's tensors, enough to tell one model from another.

Neither the container nor the dtype that a model was loaded in is to matter. float32 holds float16
and bfloat16 exactly, so that loading in a wider dtype changes nothing. Where a model was loaded in
a *narrower* dtype than its checkpoint holds, the values come from the checkpoint's files, after
making sure that the model still is what was loaded. No tensor is read whole.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import FileFormatError, FingerprintError
from .tensor_files import read_header

if TYPE_CHECKING:
    import torch

SAMPLES_PER_TENSOR = 256


@dataclass(frozen=True)
class Sample:
    """A few values of one tensor, in its own dtype and in a fixed order."""

    name: str
    shape: tuple[int, ...]
    values: torch.Tensor


def model_samples(base: Any) -> list[Sample]:
    """Samples of the model's own tensors at the precision of its checkpoint, sorted by name.

    Raises:
        FingerprintError: A tensor is offloaded to where it cannot be looked at.
    """
    samples = {found.name: found for found in _samples_in_memory(base)}
    _leave_out_tied_output(samples, base)
    return sorted((samples | _unrounded(samples, base)).values(), key=lambda found: found.name)


def checkpoint_samples(skeleton: Any) -> list[Sample] | None:
    """What `model_samples` gives for the model that a checkpoint loads as, without loading it.

    Args:
        skeleton: The model without values, on the meta device; `skeleton.name_or_path` is the
            checkpoint's directory.

    Returns:
        None where a tensor of the model is not in the checkpoint, or is stored in another way than
        is known here.
    """
    stored = _stored_tensors(skeleton)
    samples = {}
    for name, module, key in _own_tensors(skeleton):
        shape = tuple(getattr(module, key).shape)
        values = _stored_values(name, shape, stored)
        if values is None:
            return None
        samples[name] = Sample(name, shape, values)
    _leave_out_tied_output(samples, skeleton)
    return sorted(samples.values(), key=lambda found: found.name)


def sample(name: str, tensor: torch.Tensor) -> Sample:
    """`SAMPLES_PER_TENSOR` values spread evenly over the flattened tensor, on the CPU.

    Raises:
        FingerprintError: The tensor has no values.
    """
    if tensor.is_meta:
        raise FingerprintError(f"{name} is offloaded: load the model without offloading")
    flat = tensor.detach().reshape(-1)
    values = flat[_positions(flat.numel()).to(flat.device)].cpu()
    return Sample(name, tuple(tensor.shape), values)


def _positions(numel: int) -> torch.Tensor:
    """Evenly spread indices into `numel` values, first and last included."""
    import torch

    count = min(SAMPLES_PER_TENSOR, numel)
    return torch.arange(count, device="cpu") * (numel - 1) // max(count - 1, 1)


def _samples_in_memory(base: Any) -> Iterator[Sample]:
    for name, module, attribute in _own_tensors(base):
        yield sample(name, _tensor(module, attribute))


def _own_tensors(base: Any) -> Iterator[tuple[str, Any, str]]:
    """Each tensor that a checkpoint of the model holds: its name, its module, its name there."""
    for path, module in _own_modules(base):
        for attribute in _persistent_tensors(module):
            yield _joined(path, attribute), module, attribute


def _tensor(module: Any, name: str) -> torch.Tensor:
    """A tensor of `module`; an offloaded one without bringing it in."""
    tensor: torch.Tensor = getattr(module, name)
    elsewhere = getattr(getattr(module, "_hf_hook", None), "weights_map", None) or {}
    return elsewhere[name] if tensor.is_meta and name in elsewhere else tensor


def _own_modules(module: torch.nn.Module, path: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """The model's own modules, under the names they had before PEFT wrapped them."""
    for inside in ("base_layer", "original_module"):
        if inside in module._modules:
            yield from _own_modules(module.get_submodule(inside), path)
            return
    yield path, module
    for name, child in module.named_children():
        yield from _own_modules(child, _joined(path, name))


def _persistent_tensors(module: torch.nn.Module) -> list[str]:
    """Names of the tensors that a checkpoint of `module` holds, its children's left out."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    buffers = [name for name, _ in module.named_buffers(recurse=False)]
    return names + [name for name in buffers if name not in module._non_persistent_buffers_set]


def _leave_out_tied_output(samples: dict[str, Sample], base: Any) -> None:
    """Drops output embeddings that equal the input embeddings.

    Whether a model holds tied ones twice depends on its container and on where it was loaded.
    """
    paths = {id(module): path for path, module in base.named_modules()}
    pair = (base.get_output_embeddings(), base.get_input_embeddings())
    output, tied = (samples.get(_joined(paths.get(id(module), ""), "weight")) for module in pair)
    if output and tied and output.shape == tied.shape and output.values.equal(tied.values):
        del samples[output.name]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _unrounded(samples: dict[str, Sample], base: Any) -> dict[str, Sample]:
    """Samples of 16-bit tensors as the checkpoint holds them, by name.

    None at all where one of them is not what loading the checkpoint gives: a model that was
    trained, merged or edited since is identified by what it holds.
    """
    narrow = [held for held in samples.values() if held.values.dtype.itemsize == 2]
    stored = _stored_tensors(base) if narrow else {}
    found = {}
    for held in narrow:
        values = _stored_values(held.name, held.shape, stored)
        if values is None:
            continue
        if not values.to(held.values.dtype).equal(held.values):
            return {}
        found[held.name] = replace(held, values=values)
    return found


@dataclass(frozen=True)
class _Stored:
    """A tensor in a checkpoint file, and how to read the values at some flat positions."""

    shape: tuple[int, ...]
    read: Callable[[torch.Tensor], torch.Tensor]


def _stored_values(
    name: str, shape: tuple[int, ...], stored: Mapping[str, list[_Stored]]
) -> torch.Tensor | None:
    """The sampled values of a model's tensor in the checkpoint, None if they are not there."""
    import torch

    parts, numel = stored.get(name, []), math.prod(shape)
    if not parts or not numel:
        return None
    size = numel // len(parts)
    if any(math.prod(part.shape) != size for part in parts) or size * len(parts) != numel:
        return None
    if len(parts) == 1 and parts[0].shape != shape:
        return None
    positions = _positions(numel)
    owners = positions // size
    return torch.cat(
        [
            parts[part].read(positions[owners == part] - part * size)
            for part in sorted(set(owners.tolist()))
        ]
    )


def _stored_tensors(base: Any) -> dict[str, list[_Stored]]:
    """What the checkpoint that `base` was loaded from holds, under the model's names.

    A tensor of the model may be several in the checkpoint that follow each other in its memory. Of
    tied ones the checkpoint needs to hold one.
    """
    files: dict[str, _Stored] = {}
    for file in _checkpoint_files(base):
        files |= _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
    if not files:
        return {}
    found = {name: [files[part] for part in parts] for name, parts in _parts(base, files).items()}
    own = [(name, id(getattr(module, key))) for name, module, key in _own_tensors(base)]
    tied = {tensor: found[name] for name, tensor in own if name in found}
    return {name: found.get(name, tied[tensor]) for name, tensor in own if tensor in tied}


def _parts(base: Any, stored: Iterable[str]) -> dict[str, list[str]]:
    """Checkpoint names of what makes up each of the model's tensors, in the order of its memory.

    Transformers renames tensors when it loads them, and joins experts: ``[experts, rows,
    columns]`` is the gate of the first expert, then its up projection, then the second's gate.
    Tensors that it joins or changes in another way are left out.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(base)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    own = {name: True for name, _, _ in _own_tensors(base)}
    prefix = base.base_model_prefix
    found: dict[str, dict[str | None, list[str]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:
            target, pattern = name, None
        found.setdefault(target, {}).setdefault(pattern, []).append(name)
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    parts = {name: _in_order(found[name], by_pattern) for name in own if name in found}
    return {name: names for name, names in parts.items() if names}


def _in_order(sources: Mapping[str | None, list[str]], converters: Mapping[str, Any]) -> list[str]:
    """Names in `sources`, sorted by the pattern that they match, as they follow in memory.

    Empty where they do not simply follow each other.
    """
    patterns = [pattern for pattern in sources if pattern is not None]
    if not patterns:
        return sources[None][:1]
    converter = converters[patterns[0]]
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    expected = [("MergeModulelist", 0), ("Concatenate", 1)][: len(converter.source_patterns)]
    lists = [sources.get(pattern, []) for pattern in converter.source_patterns]
    if None in sources or steps != expected or len({*map(len, lists)}) != 1:
        return []
    return [name for expert in zip(*lists, strict=True) for name in expert]


def _checkpoint_files(base: Any) -> list[Path]:
    """Files that `base` was loaded from, as far as they are on this machine."""
    from transformers.utils import (
        SAFE_WEIGHTS_INDEX_NAME,
        SAFE_WEIGHTS_NAME,
        WEIGHTS_INDEX_NAME,
        WEIGHTS_NAME,
    )

    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        file = _local_file(base, name)
        if file is None:
            continue
        if not name.endswith(".json"):
            return [file]
        return [shard for name in _shards(file) if (shard := _local_file(base, name))]
    return []


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise FileFormatError(f"cannot read {index}: {error!r}") from error


def _local_file(base: Any, name: str) -> Path | None:
    """A file of the directory, or of the cached hub repository, that `base` came from."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    source = base.name_or_path
    if not source:
        return None
    if Path(source).is_dir():
        file = Path(source, name)
        return file if file.is_file() else None
    revision = getattr(base.config, "_commit_hash", None)
    try:
        cached = try_to_load_from_cache(source, name, revision=revision)
    except HFValidationError:  # a directory that is gone
        return None
    return Path(cached) if isinstance(cached, str) else None


def _safetensors(file: Path) -> dict[str, _Stored]:
    import torch

    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return {
        name: _Stored(tensor.shape, partial(_read, file, tensor.start, dtypes[tensor.dtype]))
        for name, tensor in read_header(file).tensors.items()
        if tensor.dtype in dtypes
    }


def _read(file: Path, start: int, dtype: torch.dtype, positions: torch.Tensor) -> torch.Tensor:
    """Values at `positions` of a tensor that begins at byte `start`; reads no others."""
    import torch

    raw = bytearray()
    with file.open("rb", buffering=0) as stream:
        for position in positions.tolist():
            stream.seek(start + position * dtype.itemsize)
            raw += stream.read(dtype.itemsize)
    return torch.frombuffer(raw, dtype=dtype)


def _pickled(file: Path) -> dict[str, _Stored]:
    import torch

    # Files older than PyTorch 1.6 are no zip archives and have to be read whole.
    tensors = torch.load(file, "cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    return {
        name: _Stored(tuple(tensor.shape), tensor.reshape(-1).__getitem__)
        for name, tensor in tensors.items()
    }
