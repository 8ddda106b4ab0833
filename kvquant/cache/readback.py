"""Compares what a cache is given with what it gives back: any cache of Transformers, or ours."""

from __future__ import annotations

import math
from typing import Any

import torch


class Readback:
    """Watches a cache's `update` inside its ``with`` block.

    Attributes:
        dtype: Of keys and values.
        errors: For each layer, of keys and of values, norm of the difference by norm; of the call
            where that was most.
        compares: Whether calls from now on are to be compared.
    """

    def __init__(self, cache: Any, compares: bool = False) -> None:
        """Nothing seen yet."""
        self.dtype = torch.float32
        self.errors: dict[int, tuple[float, float]] = {}
        self.compares = compares
        self._cache = cache
        self._update = cache.update
        self._given: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def __enter__(self) -> Readback:
        """Looks at the calls of the cache's `update` from now on."""
        self._cache.update = self._look
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves the cache as it was."""
        del self._cache.update
        self._given.clear()

    @property
    def worst(self) -> tuple[float, float]:
        """Errors of keys and of values in the layer where they are largest; NaN is the worst."""
        columns = zip(*self.errors.values(), strict=True) if self.errors else ((0.0,), (0.0,))
        keys, values = (max(column, key=_badness) for column in columns)
        return keys, values

    def _look(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        given = self._given.setdefault(layer_idx, [])
        read = self._update(keys, values, layer_idx, *args, **kwargs)
        if self.compares and given:
            self._compare(layer_idx, given, read, keys.shape[2])
        given.append((keys, values))
        self.dtype = keys.dtype
        return read

    def _compare(self, layer_idx: int, given: Any, read: Any, new: int) -> None:
        found = [
            _error(torch.cat(column, dim=2), states[:, :, : states.shape[2] - new])
            for column, states in zip(zip(*given, strict=True), read, strict=True)
        ]
        before = self.errors.get(layer_idx, (0.0, 0.0))
        worse = [max(pair, key=_badness) for pair in zip(before, found, strict=True)]
        self.errors[layer_idx] = worse[0], worse[1]


def _badness(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _error(given: torch.Tensor, read: torch.Tensor) -> float:
    """Of a sliding layer, of what it still sees."""
    exact = given[:, :, given.shape[2] - read.shape[2] :].float()
    norm, change = float(exact.norm()), float((read.float() - exact).norm())
    return change / norm if norm else change
