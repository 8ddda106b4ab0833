"""What SGLang would make of JSON files for ``--quantization-param-path``, by its own schema."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvquant.geometry import CacheGeometry

from . import verify_config as config
from .served_files import CONFIG, ServedDirectory, is_number
from .sglang_models import JSON_SCALES
from .verify_report import Finding, LayerVerdict, ranges, some, spread

ENGINE = "SGLang"
_DTYPE = "float8_e4m3fn"
_THEN = f"{ENGINE} only logs that, and serves at scale 1.0"


def check_sglang_json(
    served: ServedDirectory, geometry: CacheGeometry | None
) -> tuple[list[LayerVerdict], list[Finding]]:
    """The scales that SGLang would serve each layer with, and what is wrong."""
    candidates = {path: _scales_of(path) for path in sorted(served.path.glob("*.json"))}
    files = {path: values for path, values in candidates.items() if values is not None}
    if not files:
        return [], [
            Finding(
                "there is no JSON file with kv_cache and its scaling_factor",
                "export with --engine sglang-json",
            )
        ]
    findings = _model_class(served)
    verdicts: list[LayerVerdict] = []
    for path, values in files.items():
        found, wrong = _check(path, values, served, geometry)
        verdicts = verdicts or found
        findings += wrong
    return verdicts, [*findings, *_remarks(list(files))]


def _scales_of(path: Path) -> dict[str, Any] | None:
    """The object in a file that is meant for SGLang; None for any other JSON."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and "kv_cache" in values else None


def _model_class(served: ServedDirectory) -> list[Finding]:
    findings = []
    if served.config and served.architecture not in JSON_SCALES:
        findings.append(
            Finding(
                f"the class {served.architecture or '(none named)'} has no load_kv_cache_scales: "
                f"{ENGINE} stops with a RuntimeError",
                "put scales into the checkpoint (--engine sglang)",
            )
        )
    block = config.declared(served)
    if block is not None and config.quant_method(block) not in config.WITHOUT_SCALES:
        findings.append(
            Finding(
                f"{CONFIG} has a quantization_config that makes parameters for scales: {ENGINE} "
                f"stops with a TypeError when it puts a number in their place",
                "put scales into the checkpoint (--engine sglang)",
            )
        )
    return findings


def _check(
    path: Path,
    values: Mapping[str, Any],
    served: ServedDirectory,
    geometry: CacheGeometry | None,
) -> tuple[list[LayerVerdict], list[Finding]]:
    findings = _head(path.name, values, served)
    ranks = _ranks(values.get("kv_cache"))
    if ranks is None:
        return [], [
            *findings,
            Finding(
                f"{path.name} has no scaling_factor, numbers by rank and layer: {_THEN}",
                "export again",
            ),
        ]
    if sorted(ranks) != list(range(len(ranks))):
        findings.append(
            Finding(
                f"{path.name} has the ranks {ranges(ranks)}, not 0 to {len(ranks) - 1}: {_THEN}",
                "export again for as many GPUs as share a layer",
            )
        )
    layers = range(len(geometry.layers)) if geometry else range(len(next(iter(ranks.values()))))
    for rank, scales in ranks.items():
        findings += _layers(path.name, rank, scales, layers)
    return _verdicts(path.name, ranks), [*findings, *_all_one(path.name, ranks)]


def _head(name: str, values: Mapping[str, Any], served: ServedDirectory) -> list[Finding]:
    findings = []
    cache = values.get("kv_cache")
    dtype = cache.get("dtype") if isinstance(cache, Mapping) else None
    if dtype != _DTYPE:
        findings.append(
            Finding(f"{name} has dtype {dtype!r}, not {_DTYPE!r}: {_THEN}", f"write {_DTYPE!r}")
        )
    wanted = served.config.get("model_type")
    if not isinstance(values.get("model_type"), str) or wanted not in (None, values["model_type"]):
        findings.append(
            Finding(
                f"{name} has model_type {values.get('model_type')!r}, but {CONFIG} says "
                f"{wanted!r}: {_THEN}",
                f'write "model_type": "{wanted}"',
            )
        )
    return findings


def _ranks(cache: Any) -> dict[int, dict[int, Any]] | None:
    """Numbers by rank and layer; None if it is anything else."""
    found: Any = cache.get("scaling_factor") if isinstance(cache, Mapping) else None
    try:
        return {
            int(rank): {int(layer): number for layer, number in scales.items()}
            for rank, scales in found.items()
        } or None
    except (AttributeError, TypeError, ValueError):
        return None


def _layers(name: str, rank: int, scales: Mapping[int, Any], layers: range) -> list[Finding]:
    every = set(layers)
    absent, odd = sorted(every - set(scales)), sorted(set(scales) - every)
    findings = spread(
        absent,
        layers,
        lambda layer, where: (f"{where}: {name} has no scale in rank {rank}: {_THEN}", "export"),
    )
    if odd:
        findings.append(
            Finding(
                f"{name} has scales of layers {ranges(odd)} in rank {rank}, but the model has "
                f"{some(len(layers), 'layer')}: {_THEN}",
                "export from this model",
            )
        )
    bad = [layer for layer, number in scales.items() if not _is_scale(number)]
    return findings + spread(
        bad,
        layers,
        lambda layer, where: (
            f"{where}: {name} has {scales[layer]!r} in rank {rank}, no finite number above 0",
            "calibrate again; one number per layer, for keys and values",
        ),
    )


def _is_scale(number: Any) -> bool:
    return is_number(number) and math.isfinite(number) and number > 0


def _all_one(name: str, ranks: Mapping[int, Mapping[int, Any]]) -> list[Finding]:
    if {number for scales in ranks.values() for number in scales.values() if _is_scale(number)} != {
        1.0
    }:
        return []
    return [
        Finding(
            f"all scales in {name} are exactly 1.0: nothing was calibrated, or a floor at 1.0 "
            f"swallowed it",
            "calibrate, if that is not what was meant",
            serious=False,
        )
    ]


def _verdicts(name: str, ranks: Mapping[int, Mapping[int, Any]]) -> list[LayerVerdict]:
    """Of the first rank."""
    rank = min(ranks)
    return [
        LayerVerdict(layer, place, place, scale, scale, name)
        for layer, number in sorted(ranks[rank].items())
        for place in [f'scaling_factor["{rank}"]["{layer}"]']
        for scale in [(float(number),) if is_number(number) else ()]
    ]


def _remarks(paths: list[Path]) -> list[Finding]:
    names = ", ".join(path.name for path in paths)
    return [
        Finding(
            f"launch with --kv-cache-dtype fp8_e4m3 --quantization-param-path {names}, the one for "
            f"your number of GPUs",
            serious=False,
        ),
        Finding(
            f"{ENGINE} up to 0.5.23 hands these numbers on wrongly (issue 18818): FlashInfer reads "
            f"at scale 1.0 what it wrote scaled, FlashAttention 3 stops; trtllm_mha works",
            "put scales into the checkpoint (--engine sglang)",
            serious=False,
        ),
    ]
