"""Do sliding layers see as many tokens as Transformers' own cache?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvquant.cache.cache import QuantizedCache
from kvquant.geometry import CacheGeometry

from .reading import Reader


def window_faults(reader: Reader, make: Callable[[], Any]) -> list[str] | None:
    """What an arm's sliding layers do otherwise; None if the model has no such layer.

    Both caches are given tokens up to the edge of the window and past it, in pieces; no forward
    pass is needed.
    """
    geometry = reader.geometry
    windows = [layer.window for layer in geometry.layers if layer.window is not None]
    if not windows:
        return None
    cache, reference = make(), reader.reference()
    return list(dict.fromkeys(_faults(reader, geometry, cache, reference, max(windows))))


def _faults(
    reader: Reader, geometry: CacheGeometry, cache: Any, reference: Any, window: int
) -> Iterator[str]:
    for tokens in (window - 1, 1, 1, 3, window, 1):
        if tokens < 1:
            continue
        if isinstance(cache, QuantizedCache):
            cache.begin_call({"input_ids": torch.zeros(1, tokens, dtype=torch.long)})
        for index in geometry.attention_layers:
            states = _states(reader, geometry, index, tokens)
            ours = cache.update(*states, index)[0].shape[2]
            theirs = reference.update(*states, index)[0].shape[2]
            if ours != theirs:
                yield f"layer {index} reads {ours:,} keys where Transformers' cache has {theirs:,}"
            sizes = [it.layers[index].get_mask_sizes(1) for it in (cache, reference)]
            if sizes[0] != sizes[1]:
                yield (
                    f"layer {index} sees {sizes[0][0]:,} tokens from slot {sizes[0][1]:,} on, "
                    f"Transformers' cache {sizes[1][0]:,} from {sizes[1][1]:,}"
                )


def _states(reader: Reader, geometry: CacheGeometry, index: int, tokens: int) -> Any:
    layer = geometry.layers[index]
    return tuple(
        torch.zeros(
            (1, layer.kv_heads, tokens, dim),
            dtype=reader.decoder.dtype,
            device=reader.decoder.device,
        )
        for dim in (layer.key_dim, layer.value_dim)
    )
