"""Results on stdout: tables for people, JSON for programs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from kvquant.errors import FileFormatError, InputError
from kvquant.scales import KVScales, TensorScales
from kvquant.storage import find, kind_of, load_scales, parse_header, parsing
from kvquant.tensor_files import read_header

from .calibrate import Calibration
from .stats import CalibrationStats, ChannelStats
from .stats_file import load_stats


def print_json(values: Any) -> None:
    """One JSON document; numbers that JSON has no word for become null."""
    print(json.dumps(_plain(values), indent=2, allow_nan=False))


def print_tables(*tables: RenderableType) -> None:
    """Tables, one below the other; as wide as the terminal, or 100 columns into a pipe."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=100, highlight=False)
    for table in tables:
        console.print(table)


def show_calibration(
    calibration: Calibration, files: list[Path], as_json: bool, verbose: bool
) -> None:
    """What `kvquant calibrate` ends with."""
    from .sharing import sharing_costs
    from .tables import scales_summary, sharing_table, stats_summary

    costs = sharing_costs(calibration)
    if as_json:
        print_json(
            {
                "files": list(map(str, files)),
                "seconds": round(calibration.seconds, 3),
                "scales": scales_values(calibration.scales),
                "members": {m.name: stats_values(m.stats) for m in calibration.members},
                "sharing": costs,
            }
        )
        return
    for member in calibration.members if verbose or not costs else ():
        print_tables(stats_summary(member.stats, verbose))
    print_tables(scales_summary(calibration.scales, verbose))
    if costs:
        print_tables(sharing_table(costs))
    print_tables(f"written: {', '.join(map(str, files))}")


def show_scales(scales: KVScales, path: Path, as_json: bool, verbose: bool) -> None:
    """What `kvquant solve` ends with."""
    from .tables import scales_summary

    if as_json:
        print_json({"files": [str(path)], "scales": scales_values(scales)})
    else:
        print_tables(scales_summary(scales, verbose), f"written: {path}")


def show_file(name: str, plot: str | None, as_json: bool, verbose: bool) -> None:
    """What `kvquant inspect` does.

    Raises:
        FileFormatError: Neither scales nor statistics nor a prefix.
        InputError: A prefix is to be drawn.
    """
    from .tables import provenance_panel, scales_summary, stats_summary

    places = [find(name, suffix) for suffix in (".safetensors", ".stats")]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        tried = " nor ".join(dict.fromkeys(map(str, places)))
        raise FileFormatError(f"there is no file {tried}: name one that `kvquant calibrate` wrote")
    kind = kind_of(path)
    if kind == "prefix":
        if plot:
            raise InputError(f"{path} is a prefix: --plot draws scales and statistics")
        _show_prefix(path, as_json)
        return
    content: KVScales | CalibrationStats
    content = load_stats(path) if kind == "stats" else load_scales(path)
    if plot:
        from .plot import plot_heat_map

        plot_heat_map(content, Path(plot))
    if as_json:
        values = scales_values(content) if isinstance(content, KVScales) else stats_values(content)
        print_json({"file": str(path), "kind": kind, **values})
        return
    summary = (
        scales_summary(content, verbose)
        if isinstance(content, KVScales)
        else stats_summary(content, verbose)
    )
    print_tables(provenance_panel(content.provenance, content.geometry), summary)


def _show_prefix(path: Path, as_json: bool) -> None:
    """What a prefix of `QuantizedCache.save` holds, from its header alone."""
    from .tables import prefix_panel

    file = read_header(path)
    header = parse_header(path, "prefix", file.metadata)
    with parsing(path):
        shown = ("fingerprint", "geometry", "dtype", "scheme", "scales")
        values = {
            "rows": header["ledger"]["batch"],
            "tokens": header["ledger"]["slots"],
            "bytes": sum(map(file.nbytes, file.tensors)),
            **{name: header[name] for name in shown},
        }
        panel = prefix_panel(values)
    if as_json:
        print_json({"file": str(path), "kind": "prefix", **values})
    else:
        print_tables(panel)


def scales_values(scales: KVScales) -> dict[str, Any]:
    """Scales as JSON: every layer, every number."""
    return {
        "scheme": scales.scheme.to_dict(),
        "method": scales.method,
        "geometry": scales.geometry.to_dict(),
        "provenance": scales.provenance.to_dict(),
        "layers": {
            str(index): {"key": _scale_values(layer.key), "value": _scale_values(layer.value)}
            for index, layer in scales.layers.items()
        },
    }


def stats_values(stats: CalibrationStats) -> dict[str, Any]:
    """Statistics as JSON: per layer and slot what a person would ask for."""
    return {
        "geometry": stats.geometry.to_dict(),
        "provenance": stats.provenance.to_dict(),
        "tokens": stats.tokens,
        "layers": {
            str(index): {"key": _channel_values(layer.key), "value": _channel_values(layer.value)}
            for index, layer in stats.layers.items()
        },
    }


def _scale_values(scales: TensorScales) -> dict[str, Any]:
    zero_point, turned = scales.zero_point, scales.turned_pairs
    return {
        "scale": scales.scale.tolist(),
        "zero_point": None if zero_point is None else zero_point.tolist(),
        # Rotary pairs whose mean turns with the position; none: fixed; null: nothing is rotated.
        "turned_pairs": None if turned is None else turned.nonzero().flatten().tolist(),
    }


def _channel_values(stats: ChannelStats) -> dict[str, Any]:
    from .outliers import outlier_dominated, outlier_ratio

    return {
        "amax": float(stats.amax.max()),
        "amax_per_head": stats.amax.amax(1).tolist(),
        "outlier_ratio": outlier_ratio(stats),
        "outlier_dominated": outlier_dominated(stats),
        "rms": float(stats.mean_square.mean().sqrt()),
        "rotary": stats.rotary.to_dict() if stats.rotary else None,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
