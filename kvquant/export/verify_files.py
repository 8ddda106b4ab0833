"""Checks that the weight files of a directory are the ones that a loader reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvquant.tensor_files import TensorFile

from .loader_rules import is_kv_scale
from .served_files import (
    ADAPTER,
    CONFIG,
    HF_QUANT_CONFIG,
    INDEX,
    SINGLE_FILE,
    Reading,
    ServedDirectory,
)
from .verify_report import Finding, examples, some


def file_findings(served: ServedDirectory, engine: str, reading: Reading) -> list[Finding]:
    """What is wrong with the files, for an engine whose loader reads as said."""
    return [
        *_unreadable(served),
        *_no_config(served),
        *_index(served, engine, reading),
        *_outside_index(served, engine, reading),
        *_beside(served, engine, reading),
        *_no_format(served, reading),
        *_adapter(served),
    ]


def _unreadable(served: ServedDirectory) -> list[Finding]:
    fixes = {
        CONFIG: "restore it from the base model, and add the quantization_config again",
        INDEX: "write the export again, or restore the index",
        HF_QUANT_CONFIG: "write the export again",
    }
    return [
        Finding(f"{name} cannot be read: {why}", fixes.get(name, "copy the file again"))
        for name, why in served.unreadable.items()
    ]


def _no_config(served: ServedDirectory) -> list[Finding]:
    if served.config or CONFIG in served.unreadable:
        return []
    return [Finding(f"there is no {CONFIG}", "copy it from the base model")]


# --- the index ------------------------------------------------------------------------------------


def _index(served: ServedDirectory, engine: str, reading: Reading) -> list[Finding]:
    if served.weight_map is None:
        return _no_index(served, engine, reading)
    return [
        *_missing_files(served.weight_map, served.path),
        *_misplaced(served.weight_map, served.files),
        *_wrong_size(served),
    ]


def _no_index(served: ServedDirectory, engine: str, reading: Reading) -> list[Finding]:
    broken = any(name.endswith(".safetensors") for name in served.unreadable)
    if INDEX in served.unreadable or (broken and not served.files):
        return []
    if not served.files:
        held = "its weights are in .bin files" if any(served.path.glob("*.bin")) else "no weights"
        return [
            Finding(
                f"there is no safetensors file here ({held})",
                "convert the weights to safetensors, or link them into this directory",
            )
        ]
    if reading is Reading.SINGLE_FIRST and SINGLE_FILE not in served.files:
        return [
            Finding(
                f"there is neither {SINGLE_FILE} nor {INDEX}: {engine} finds no weights",
                f"write {INDEX}, with every tensor of {examples(list(served.files))}",
            )
        ]
    return []


def _missing_files(weight_map: Mapping[str, str], path: Path) -> list[Finding]:
    promised = Counter(weight_map.values())
    return [
        Finding(
            f"{INDEX} places {some(count, 'tensor')} in {name}, which is not there",
            f"copy or link {name} into {path}",
        )
        for name, count in sorted(promised.items())
        if not (path / name).is_file()
    ]


def _misplaced(weight_map: Mapping[str, str], files: Mapping[str, TensorFile]) -> list[Finding]:
    absent: dict[str, list[str]] = {}
    for key, name in weight_map.items():
        if name in files and key not in files[name].tensors:
            absent.setdefault(name, []).append(key)
    return [
        Finding(
            f"{INDEX} places {examples(keys)} in {name}, which does not hold "
            f"{'it' if len(keys) == 1 else 'them'}",
            "write the index anew from what the files hold",
        )
        for name, keys in sorted(absent.items())
    ]


def _wrong_size(served: ServedDirectory) -> list[Finding]:
    weight_map, files = served.weight_map or {}, served.files
    placed = [(files[name], key) for key, name in weight_map.items() if name in files]
    there = all(key in file.tensors for file, key in placed)
    if not there or len(placed) < len(weight_map) or served.total_size is None:
        return []
    held = sum(file.nbytes(key) for file, key in placed)
    if served.total_size == held:
        return []
    return [
        Finding(
            f"{INDEX} says that all tensors have {served.total_size:,} bytes, but they have "
            f"{held:,}"
            if isinstance(served.total_size, int)
            else f"total_size in {INDEX} is {served.total_size!r}, no number of bytes",
            f"set metadata.total_size to {held}; loaders only show it",
            serious=False,
        )
    ]


# --- files that are not the model's shards --------------------------------------------------------


def _scales(file: TensorFile) -> list[str]:
    return [name for name in file.tensors if is_kv_scale(name)]


def _outside_index(served: ServedDirectory, engine: str, reading: Reading) -> list[Finding]:
    """Files that hold scales or weights, and that a loader passes over."""
    read = {file.path.name for file in served.read_by(reading)}
    findings = []
    for name, file in served.files.items():
        if name in read or name == SINGLE_FILE or "consolidated" in name:
            continue
        why = (
            f"{engine} reads only {SINGLE_FILE}"
            if reading is Reading.SINGLE_FIRST and SINGLE_FILE in read
            else f"{INDEX} does not name it"
        )
        scales = _scales(file)
        holds = f" and its {some(len(scales), 'scale tensor')}" if scales else ""
        findings.append(
            Finding(
                f"{engine} passes over {name}{holds}: {why}",
                f"list its tensors in {INDEX}, or remove the file",
                serious=bool(scales),
            )
        )
    return findings


def _beside(served: ServedDirectory, engine: str, reading: Reading) -> list[Finding]:
    """``model.safetensors`` and ``consolidated*.safetensors`` beside an index."""
    findings = []
    if served.weight_map is not None and SINGLE_FILE in served.files:
        findings.append(_single_file(served, engine, reading))
    consolidated = [name for name in served.files if name.startswith("consolidated")]
    if consolidated:
        serious = reading is Reading.EVERY or engine == "vLLM"
        then = (
            f"{engine} loads the model in Mistral's own format from it and never sees the scales"
            if engine == "vLLM"
            else f"{engine} reads it too, and the same weights twice"
            if serious
            else f"{engine} passes over it, but vLLM would load it in place of the shards"
        )
        findings.append(
            Finding(f"there is {consolidated[0]}: {then}", "remove it", serious=serious)
        )
    return findings


def _single_file(served: ServedDirectory, engine: str, reading: Reading) -> Finding:
    indexed = SINGLE_FILE in (served.weight_map or {}).values()
    if reading is Reading.SINGLE_FIRST:
        then = f"{engine} loads that and nothing of the other files, scales included"
    elif reading is Reading.INDEXED or indexed:
        then = "Transformers loads that and nothing of the other files"
    else:
        then = f"{engine} reads both, and the same weights twice"
    serious = reading is Reading.SINGLE_FIRST or (reading is not Reading.INDEXED and not indexed)
    fix = (
        f"rename it to model-00001-of-0000{len(served.files)}.safetensors, here and in the index"
        if indexed
        else "remove it"
    )
    return Finding(f"there is {SINGLE_FILE} beside {INDEX}: {then}", fix, serious=serious)


def _no_format(served: ServedDirectory, reading: Reading) -> list[Finding]:
    bare = [file.path.name for file in served.read_by(reading) if not file.metadata.get("format")]
    if not bare:
        return []
    return [
        Finding(
            f"{examples(bare)} {'has' if len(bare) == 1 else 'have'} no format in the metadata: "
            f"older Transformers do not load such files",
            'save with metadata={"format": "pt"}',
            serious=False,
        )
    ]


def _adapter(served: ServedDirectory) -> list[Finding]:
    if served.adapter is None or not (scales := _scales(served.adapter)):
        return []
    return [
        Finding(
            f"{ADAPTER} holds {some(len(scales), 'scale tensor')} ({examples(scales)}): KV scales "
            f'belong to the server, not to an adapter, and vLLM stops with "unsupported LoRA '
            f'weight"',
            "remove them from the adapter and put them beside the base model's weights",
        )
    ]


def repeated(files: Sequence[TensorFile]) -> dict[str, list[str]]:
    """Tensors that are in more than one of these files: name -> files."""
    places: dict[str, list[str]] = {}
    for file in files:
        for name in file.tensors:
            places.setdefault(name, []).append(file.path.name)
    return {name: found for name, found in places.items() if len(found) > 1}
