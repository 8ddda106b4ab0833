"""A model's files as they lie on disk: which tensors, in which files, described how.

Only config.json, the index and the headers of the weight files are read: no tensor, no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvquant.errors import ModelError
from kvquant.tensor_files import StoredTensor, TensorFile, read_header

from .attention_names import AttentionModule, find_attention

if TYPE_CHECKING:
    from kvquant.geometry import CacheGeometry

__all__ = ["AttentionModule", "Checkpoint", "attention_modules", "read_checkpoint"]

CONFIG = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """What lies in a model's directory.

    Attributes:
        directory: The directory.
        config: config.json as parsed.
        tensors: What the headers say about each tensor, by its name.
        shards: Name of the file that holds each tensor, by the tensor's name.
        index: model.safetensors.index.json as parsed; None for a single file.
        quantization: How the weights are quantized: ``quantization_config`` of config.json, else of
            its text part, else hf_quant_config.json as parsed. None if they are not.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    shards: Mapping[str, str]
    index: Mapping[str, Any] | None
    quantization: Mapping[str, Any] | None

    @property
    def quant_method(self) -> str | None:
        """``fp8``, ``modelopt``, ``gptq`` …; None where weights are not quantized.

        An hf_quant_config.json names its producer instead, which is ModelOpt.
        """
        if self.quantization is None:
            return None
        producer = self.quantization.get("producer")
        named = producer.get("name") if isinstance(producer, Mapping) else None
        return str(self.quantization.get("quant_method") or named or "unknown")


def read_checkpoint(directory: Path) -> Checkpoint:
    """Reads what lies in a model's directory.

    Raises:
        ModelError: No config or no safetensors weights there, shards are missing, or the index does
            not fit its shards.
        FileFormatError: A weight file that is cut short or no safetensors file.
    """
    if not directory.is_dir():
        raise ModelError(f"there is no directory {directory}")
    config = _read_json(directory / CONFIG)
    index = _read_index(directory)
    listed = {SINGLE_FILE: SINGLE_FILE} if index is None else index["weight_map"]
    files = {name: read_header(directory / name) for name in sorted(set(listed.values()))}
    found = {key: name for name, file in files.items() for key in file.tensors}
    if index is not None:
        _check_index(index["weight_map"], files, directory)
        found |= index["weight_map"]
    return Checkpoint(
        directory,
        config,
        {key: files[name].tensors[key] for key, name in found.items()},
        found,
        index,
        _quantization(directory, config),
    )


def attention_modules(
    checkpoint: Checkpoint, geometry: CacheGeometry
) -> dict[int, AttentionModule]:
    """The attention module of each layer that keeps tokens of its own, by layer.

    Raises:
        ExportError: The weights that make a layer's keys cannot be found, or not clearly.
    """
    return find_attention(checkpoint.tensors, geometry.attention_layers)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds {type(values).__name__}, not a JSON object")
    return values


def _read_index(directory: Path) -> dict[str, Any] | None:
    """The index, None where a single file holds all weights.

    Where a directory has both, Transformers loads the single file, so that scales are of its
    weights.
    """
    single = (directory / SINGLE_FILE).is_file()
    if not (directory / INDEX).is_file():
        if not single:
            raise ModelError(_no_weights(directory))
        return None
    index = _read_json(directory / INDEX)
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ModelError(f"{directory / INDEX} has no weight_map from tensors to files")
    if single and SINGLE_FILE not in shards.values():
        return None
    outside = [name for name in shards.values() if Path(name).name != name]
    if outside:
        raise ModelError(f"{directory / INDEX} names {outside[0]!r}, which lies elsewhere")
    files = sorted(set(shards.values()))
    missing = [name for name in files if not (directory / name).is_file()]
    if missing or not files:
        raise ModelError(
            f"{len(missing)} of the {len(files)} files that {directory / INDEX} names "
            f"{'is' if len(missing) == 1 else 'are'} missing"
            f"{', ' + missing[0] + ' the first of them' if missing else ''}: complete the download"
        )
    return index


def _no_weights(directory: Path) -> str:
    """Why a directory without the usual weight files cannot be used, and what to do."""
    if any(directory.glob("*.bin")):
        return (
            f"{directory} has its weights in .bin files only, which cannot carry scales: convert "
            f"them to safetensors (load the model in Transformers and call save_pretrained)"
        )
    others = sorted(path.name for path in directory.glob("*.safetensors"))
    if others:
        return f"{directory} has {others[0]}, but neither {SINGLE_FILE} nor {INDEX}"
    return f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX}"


def _check_index(
    listed: Mapping[str, str], files: Mapping[str, TensorFile], directory: Path
) -> None:
    """Makes sure that each tensor is in the file that the index names.

    Raises:
        ModelError: One is not.
    """
    absent = [key for key, name in listed.items() if key not in files[name].tensors]
    if absent:
        raise ModelError(
            f"{directory / INDEX} does not fit its files: {len(absent)} of {len(listed)} tensors "
            f"{'is' if len(absent) == 1 else 'are'} not where it says, such as {absent[0]}, which "
            f"is not in {listed[absent[0]]}"
        )


def _quantization(directory: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    text = config.get("text_config")
    for part in (config, text):
        found = part.get("quantization_config") if isinstance(part, Mapping) else None
        if isinstance(found, Mapping) and found:
            return found
    beside = directory / "hf_quant_config.json"
    return _read_json(beside) if beside.is_file() else None
