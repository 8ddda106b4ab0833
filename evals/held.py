"""What a cache holds: which tokens as codes, how many bytes; and codes overwritten with noise.

Knows our cache and those of Transformers.
"""

from __future__ import annotations

from typing import Any

import torch

from kvquant.cache.cache import QuantizedCache
from kvquant.cache.layer import QuantizedLayer
from kvquant.quantize.codec import Codec

Slots = tuple[tuple[int, int], ...]
"""Ranges of slots, start and end."""


def coded_slots(cache: Any, layer_idx: int) -> Slots:
    """Slots whose keys are held as codes; of the first row of a batch without padding."""
    layer = cache.layers[layer_idx]
    if isinstance(layer, QuantizedLayer):
        offset = layer.get_mask_sizes(0)[1]
        runs = [run for keys, _ in layer.stores[:1] for run in keys.runs(offset) or ()]
        return tuple((run.first, run.stop) for run in runs if _is_coded(run.codec))
    if not hasattr(layer, "_quantized_keys"):
        return ()
    residual = layer.keys.shape[-2] if layer.keys.dim() == 4 else 0
    return ((0, layer.get_seq_length() - residual),)


def _is_coded(codec: Codec | None) -> bool:
    return codec is not None and codec.scheme.format.is_scaled


def quantized_reads(cache: Any, layer_idx: int, new: int) -> torch.Tensor:
    """Which of the keys that a call of `new` tokens reads are codes.

    Returns:
        bool ``[keys]`` for the keys that `update` will return, oldest first.
    """
    layer = cache.layers[layer_idx]
    total, offset = layer.get_mask_sizes(new)
    if hasattr(layer, "_quantized_keys") and not hasattr(layer, "residual_length"):
        # Transformers' fp8 reads a call's own tokens from their codes, too; but for the first call.
        return torch.full((total,), total > new)
    found = torch.zeros(total, dtype=torch.bool)
    for start, stop in coded_slots(cache, layer_idx):
        found[max(start - offset, 0) : max(stop - offset, 0)] = True
    return found


def visible(new: int, total: int, window: int | None) -> torch.Tensor:
    """What queries see by their position: bool ``[new, total]``, the newest last.

    >>> visible(2, 4, window=2).int().tolist()
    [[0, 1, 1, 0], [0, 0, 1, 1]]
    """
    query = torch.arange(total - new, total)[:, None]
    key = torch.arange(total)[None]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def poison(cache: Any, seed: int) -> None:
    """Overwrites all codes with other codes of the same tensor, so that no number is impossible."""
    generator = torch.Generator().manual_seed(seed)
    for layer in cache.layers:
        if isinstance(layer, QuantizedLayer):
            for store in (store for pair in layer.stores for store in pair):
                if _is_coded(store.codec):
                    store.coded.map(lambda held: _shuffled_codes(held, generator))
        elif hasattr(layer, "_quantized_keys"):
            _poison_stock(layer, generator)


def _shuffled_codes(held: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Codes in another order; scales, which are wider than a byte, as they are."""
    return _shuffled(held, generator) if held.dtype.itemsize == 1 else held


def _shuffled(held: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    order = torch.randperm(held.numel(), generator=generator).to(held.device)
    if held.dtype.itemsize == 1:
        return held.view(torch.uint8).flatten()[order].view(held.dtype).view(held.shape)
    return held.flatten()[order].view(held.shape)


def _poison_stock(layer: Any, generator: torch.Generator) -> None:
    """Once, what a layer of Transformers reads from its codes, in another order."""
    for name in ("_quantized_keys", "_quantized_values"):
        noise = _shuffled(layer._dequantize(getattr(layer, name)).contiguous(), generator)
        axis = getattr(layer, name.replace("_quantized_", "axis_").removesuffix("s"), None)
        quantized = layer._quantize(noise) if axis is None else layer._quantize(noise, axis=axis)
        setattr(layer, name, quantized)


def live_nbytes(cache: Any) -> int:
    """Bytes that the tokens of any cache need."""
    if isinstance(cache, QuantizedCache):
        return cache.live_nbytes()
    slots = ("keys", "values", "_quantized_keys", "_quantized_values")
    return sum(_nbytes(getattr(layer, name, None)) for layer in cache.layers for name in slots)


def _nbytes(held: Any) -> int:
    """Bytes of the tensors in what a stock cache holds: plain, packed, or beside their scales."""
    if isinstance(held, dict):
        held = tuple(held.values())
    if isinstance(held, tuple):
        return sum(map(_nbytes, held))
    if not isinstance(held, torch.Tensor):
        return 0
    if hasattr(held, "__tensor_flatten__"):
        return sum(_nbytes(getattr(held, name)) for name in held.__tensor_flatten__()[0])
    return held.numel() * held.element_size()
