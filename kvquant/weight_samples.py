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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import FingerprintError

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
    return torch.arange(count) * (numel - 1) // max(count - 1, 1)


def _samples_in_memory(base: Any) -> Iterator[Sample]:
    for path, module in _own_modules(base):
        for name in _persistent_tensors(module):
            yield sample(_joined(path, name), _tensor(module, name))


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
        values = _stored_values(held, stored)
        if values is None:
            continue
        if not values.to(held.values.dtype).equal(held.values):
            return {}
        found[held.name] = replace(held, values=values)
    return found


@dataclass(frozen=True)
class _Stored:
    """A tensor in a checkpoint file, and how to read the values at some flat positions."""

    numel: int
    read: Callable[[torch.Tensor], torch.Tensor]


def _stored_values(held: Sample, stored: Mapping[str, _Stored]) -> torch.Tensor | None:
    """The values of `held` in the checkpoint, None if they are not there."""
    import torch

    parts = [held.name] if held.name in stored else _expert_names(held)
    numel = math.prod(held.shape)
    found = all(part in stored and stored[part].numel * len(parts) == numel for part in parts)
    if not parts or not numel or not found:
        return None
    positions, size = _positions(numel), numel // len(parts)
    owners = positions // size
    return torch.cat(
        [
            stored[parts[part]].read(positions[owners == part] - part * size)
            for part in sorted(set(owners.tolist()))
        ]
    )


def _expert_names(held: Sample) -> list[str]:
    """Checkpoint names of experts that Transformers joins in one ``[experts, rows, columns]``."""
    stem, _, last = held.name.rpartition(".")
    joined = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, ())
    return [f"{stem}.{expert}.{part}.weight" for expert in range(held.shape[0]) for part in joined]


def _stored_tensors(base: Any) -> dict[str, _Stored]:
    """What the checkpoint that `base` was loaded from holds, under the model's names.

    The bare decoder of a model has the same tensors without its prefix.
    """
    files: dict[str, _Stored] = {}
    for file in _checkpoint_files(base):
        files |= _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
    prefix = f"{base.base_model_prefix}."
    longer = {f"{prefix}{name}": entry for name, entry in files.items()}
    shorter = {name.removeprefix(prefix): entry for name, entry in files.items()}
    return longer | shorter | files


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
        shards = sorted(set(json.loads(file.read_text())["weight_map"].values()))
        return [shard for name in shards if (shard := _local_file(base, name))]
    return []


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
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return {
        name: _Stored(
            math.prod(entry["shape"]),
            partial(_read, file, 8 + length + entry["data_offsets"][0], dtypes[entry["dtype"]]),
        )
        for name, entry in header.items()
        if entry["dtype"] in dtypes
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
        name: _Stored(tensor.numel(), tensor.reshape(-1).__getitem__)
        for name, tensor in tensors.items()
    }
