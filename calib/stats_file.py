"""CalibrationStats on disk."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from kvquant import storage
from kvquant.errors import FileFormatError
from kvquant.geometry import CacheGeometry
from kvquant.provenance import Provenance
from kvquant.rotary import RotaryLayout

from .sketch import BINS, QuantileSketch
from .stats import CalibrationStats, ChannelStats, LayerStats

_SLOTS = ("key", "value")


def save_stats(stats: CalibrationStats, path: Path) -> None:
    """Writes statistics, so that other schemes can be solved later without the model."""
    tensors: dict[str, torch.Tensor] = {}
    slots: dict[str, Any] = {}
    for index, layer in stats.layers.items():
        for slot in _SLOTS:
            channel: ChannelStats = getattr(layer, slot)
            prefix = f"layers.{index}.{slot}"
            tensors |= {f"{prefix}.{name}": value for name, value in _tensors(channel).items()}
            slots[prefix] = {
                "tokens": channel.tokens,
                "rotary": channel.rotary.to_dict() if channel.rotary else None,
            }
    header = {
        "geometry": stats.geometry.to_dict(),
        "provenance": stats.provenance.to_dict(),
        "bins": BINS,
        "slots": slots,
    }
    storage.write(path, "stats", tensors, header)


def load_stats(path: Path) -> CalibrationStats:
    """Reads statistics written by `save_stats`.

    Raises:
        FileFormatError: Not such a file, or cut short.
    """
    tensors, header = storage.read(path, "stats")
    with storage.parsing(path):
        if header["bins"] != BINS:
            raise FileFormatError(f"{path} has histograms of {header['bins']} bins, not {BINS}")
        layers: dict[int, dict[str, ChannelStats]] = {}
        for prefix, slot in header["slots"].items():
            _, index, name = prefix.split(".")
            layers.setdefault(int(index), {})[name] = _channel_stats(tensors, prefix, slot)
        stats = CalibrationStats(
            CacheGeometry.from_dict(header["geometry"]),
            {index: LayerStats(**slots) for index, slots in sorted(layers.items())},
            Provenance.from_dict(header["provenance"]),
        )
        _check(stats)
        return stats


def _check(stats: CalibrationStats) -> None:
    """Holds the tensors against what statistics of such a cache would be.

    Raises:
        ValueError: A layer that the geometry lacks, or a tensor of another shape or dtype.
        InputError: Something is not finite.
        NotObservedError: A layer without tokens.
    """
    for index, layer in stats.layers.items():
        if index not in stats.geometry.attention_layers:
            raise ValueError(f"it has layer {index}, the model keeps none there")
        shape = stats.geometry.layers[index]
        for slot, dim in zip(_SLOTS, (shape.key_dim, shape.value_dim), strict=True):
            found: ChannelStats = getattr(layer, slot)
            empty = ChannelStats.empty(shape.kv_heads, dim, rotary=found.rotary)
            tensors = _tensors(found)
            for name, model in _tensors(empty).items():
                if (tensors[name].shape, tensors[name].dtype) != (model.shape, model.dtype):
                    raise ValueError(
                        f"layers.{index}.{slot}.{name} is {_kind(tensors[name])}, not "
                        f"{_kind(model)}"
                    )
            if not isinstance(found.tokens, int):
                raise ValueError(f"layers.{index}.{slot} has {found.tokens!r} tokens")
    stats.check()


def _kind(tensor: torch.Tensor) -> str:
    """``float32 [2, 16]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _tensors(channel: ChannelStats) -> dict[str, torch.Tensor]:
    """All tensors of a slot, sketches as two each."""
    found = {}
    for field in fields(channel):
        value = getattr(channel, field.name)
        if isinstance(value, QuantileSketch):
            found[f"{field.name}.exponent"] = value.exponent
            found[f"{field.name}.counts"] = value.counts
        elif isinstance(value, torch.Tensor):
            found[field.name] = value
    return found


def _channel_stats(
    tensors: dict[str, torch.Tensor], prefix: str, slot: dict[str, Any]
) -> ChannelStats:
    def sketch(name: str) -> QuantileSketch:
        return QuantileSketch(
            tensors[f"{prefix}.{name}.exponent"], tensors[f"{prefix}.{name}.counts"]
        )

    rotary = RotaryLayout(**slot["rotary"]) if slot["rotary"] else None
    names = ("minimum", "maximum", "total", "total_squares")
    return ChannelStats(
        **{name: tensors[f"{prefix}.{name}"] for name in names},
        sketch=sketch("sketch"),
        token_amax=sketch("token_amax"),
        tokens=slot["tokens"],
        rotary=rotary,
        total_unrotated=tensors[f"{prefix}.total_unrotated"] if rotary else None,
    )
