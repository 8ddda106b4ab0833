"""What LightLLM would make of a directory's kv_cache_calib.json, by its own checks."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvquant.geometry import CacheGeometry, LayerKind

from .served_files import CONFIG, ServedDirectory, is_number
from .verify_report import Finding, LayerVerdict, some, spread

ENGINE = "LightLLM"
FILE = "kv_cache_calib.json"
_PER_HEAD, _PER_TENSOR = "per_head", "per_tensor"
_LAUNCH = {_PER_HEAD: "fp8kv_sph", _PER_TENSOR: "fp8kv_spt"}


def check_lightllm(
    served: ServedDirectory, geometry: CacheGeometry | None
) -> tuple[list[LayerVerdict], list[Finding]]:
    """The scales that LightLLM would serve each layer with, and what is wrong."""
    values, findings = _read(served.path)
    if values is None:
        return [], findings
    findings += [*_latent(geometry), *_head(values, served)]
    kind = values.get("quant_type")
    layers = None if geometry is None else geometry.attention_layers
    heads = None if geometry is None else _kv_heads(geometry)
    findings += _counts(values, layers, heads)
    if not isinstance(kind, str) or kind not in _LAUNCH:
        return [], findings
    rows, wrong = _rows(values.get("scales"), layers, _width(kind, values, heads))
    findings += wrong
    if kind == _PER_HEAD:
        findings += _queries(values, layers)
    findings.append(
        Finding(
            f"launch with --llm_kv_type {_LAUNCH[kind]} --kv_quant_calibration_config_path "
            f"{shlex.quote(str(served.path / FILE))}",
            serious=False,
        )
    )
    return _verdicts(rows, layers), findings


def _latent(geometry: CacheGeometry | None) -> list[Finding]:
    if geometry is None or all(layer.kind is not LayerKind.LATENT for layer in geometry.layers):
        return []
    return [
        Finding(
            f"this model keeps a latent (MLA), for which {ENGINE} computes scales while serving "
            f"and reads no {FILE}",
            "launch with --llm_kv_type fp8kv_dsa, without the file",
        )
    ]


def _read(directory: Path) -> tuple[dict[str, Any] | None, list[Finding]]:
    path = directory / FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, [Finding(f"there is no {FILE}", "export with --engine lightllm")]
    except (OSError, ValueError, RecursionError) as error:
        return None, [Finding(f"{FILE} cannot be read: {error}", "export it again")]
    if not isinstance(values, dict):
        return None, [Finding(f"{FILE} holds no JSON object", "export it again")]
    return values, []


def _head(values: Mapping[str, Any], served: ServedDirectory) -> list[Finding]:
    """What LightLLM compares before it reads a scale."""
    findings = []
    if served.config and values.get("architectures") != served.architecture:
        findings.append(
            Finding(
                f"{FILE} is for architectures {values.get('architectures')!r}, but {CONFIG} says "
                f"{served.architecture!r}: {ENGINE} refuses it",
                f'write "architectures": "{served.architecture}", a text and no list',
            )
        )
    for key, wanted in (("qmin", -448.0), ("qmax", 448.0)):
        if values.get(key) != wanted:
            findings.append(
                Finding(
                    f"{FILE} has {key} {values.get(key)!r}, not {wanted}: {ENGINE} refuses it",
                    f'write "{key}": {wanted}',
                )
            )
    if values.get("quant_type") not in list(_LAUNCH):
        findings.append(
            Finding(
                f"{FILE} has quant_type {values.get('quant_type')!r}: {ENGINE} refuses it",
                "write per_tensor or per_head",
            )
        )
    return findings


def _kv_heads(geometry: CacheGeometry) -> int:
    return max((geometry.layers[i].kv_heads for i in geometry.attention_layers), default=0)


def _counts(
    values: Mapping[str, Any], layers: tuple[int, ...] | None, heads: int | None
) -> list[Finding]:
    findings = []
    listed = values.get("num_layers")
    if layers is not None and listed != len(layers):
        findings.append(
            Finding(
                f"{FILE} has num_layers {listed!r}, but the model has {some(len(layers), 'layer')} "
                f"with keys and values: {ENGINE} refuses it",
                f'write "num_layers": {len(layers)}',
            )
        )
    wanted = values.get("num_head")
    if heads is not None and wanted != heads and values.get("quant_type") == _PER_HEAD:
        findings.append(
            Finding(
                f"{FILE} has num_head {wanted!r}, but the model has {some(heads, 'KV head')}",
                f'write "num_head": {heads}',
            )
        )
    parts = [values.get(key) for key in ("num_target_layers", "num_draft_layers")]
    given = [part for part in parts if part is not None]
    if given and (len(given) == 1 or sum(given) != listed):
        findings.append(
            Finding(
                f"{FILE} has num_target_layers {parts[0]!r} and num_draft_layers {parts[1]!r}, "
                f"which have to add up to num_layers {listed!r}",
                "leave both out",
            )
        )
    return findings


def _width(kind: str, values: Mapping[str, Any], heads: int | None) -> int | None:
    if kind == _PER_TENSOR:
        return 2
    listed = values.get("num_head")
    known = heads if heads is not None else listed if isinstance(listed, int) else None
    return None if known is None else 2 * known


def _rows(
    scales: Any, layers: tuple[int, ...] | None, width: int | None
) -> tuple[list[list[float]], list[Finding]]:
    """The rows of `scales`, one per layer that keeps tokens, and what is wrong with them."""
    if not isinstance(scales, list) or not all(_is_row(row) for row in scales):
        return [], [Finding(f"{FILE} has no scales, rows of numbers", "export it again")]
    findings = []
    count = len(scales) if layers is None else len(layers)
    if len(scales) != count:
        findings.append(
            Finding(
                f"{FILE} has {some(len(scales), 'row')} of scales for {some(count, 'layer')}",
                "export again",
            )
        )
    numbers = dict(zip(layers or range(len(scales)), scales, strict=False))
    short = [i for i, row in numbers.items() if width is not None and len(row) != width]
    bad = [i for i, row in numbers.items() if not all(math.isfinite(n) and n > 0 for n in row)]
    findings += spread(
        short,
        numbers,
        lambda layer, where: (
            f"{where}: {FILE} has {some(len(numbers[layer]), 'scale')}, not {width} (keys, then "
            f"values)",
            "export again",
        ),
    )
    findings += spread(
        bad,
        numbers,
        lambda layer, where: (
            f"{where}: {FILE} holds {numbers[layer]}, not all of them finite and above 0: "
            f"{ENGINE} refuses it",
            "calibrate again",
        ),
    )
    findings += _all_one(scales)
    return scales, findings


def _is_row(row: Any) -> bool:
    return isinstance(row, list) and all(map(is_number, row))


def _all_one(scales: list[list[float]]) -> list[Finding]:
    found = {number for row in scales for number in row}
    if found != {1.0}:
        return []
    return [
        Finding(
            "all scales are exactly 1.0: nothing was calibrated, or a floor at 1.0 swallowed it",
            "calibrate, if that is not what was meant",
            serious=False,
        )
    ]


def _queries(values: Mapping[str, Any], layers: tuple[int, ...] | None) -> list[Finding]:
    """q_calibration, which newer revisions want beside scales per head."""
    given = values.get("q_calibration")
    found: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    rows = found.get("scales")
    if not isinstance(rows, list) or not all(_is_row(row) for row in rows):
        return [
            Finding(
                f"{FILE} has no q_calibration: {ENGINE} of September 2026 refuses fp8kv_sph "
                f"without it",
                "export with scales of queries, or per tensor",
            )
        ]
    count = values.get("num_layers") if layers is None else len(layers)
    width = found.get("num_head")
    flat = [number for row in rows for number in row]
    if len(rows) != count or any(len(row) != width for row in rows):
        return [
            Finding(
                f"q_calibration in {FILE} has {len(rows)} rows of "
                f"{sorted({len(row) for row in rows})} scales, not {count} of {width}",
                "export again",
            )
        ]
    if not all(math.isfinite(number) and number > 0 for number in flat):
        return [
            Finding(
                f"q_calibration in {FILE} holds numbers that are not finite and above 0",
                "calibrate again",
            )
        ]
    return []


def _verdicts(rows: list[list[float]], layers: tuple[int, ...] | None) -> list[LayerVerdict]:
    numbered = zip(layers or range(len(rows)), enumerate(rows), strict=False)
    return [
        LayerVerdict(
            layer,
            f"scales[{row}]",
            f"scales[{row}]",
            tuple(scales[: len(scales) // 2]),
            tuple(scales[len(scales) // 2 :]),
            FILE,
        )
        for layer, (row, scales) in numbered
    ]
