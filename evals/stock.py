"""Transformers' own quantized cache, with its errors in words."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import QuantizedCache

from kvquant.errors import SchemeError


class StockCache(QuantizedCache):  # type: ignore[misc]
    """What it quantizes at once has to fill groups of 64 numbers; it finds out as it goes."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in Transformers.

        Raises:
            SchemeError: A number of keys that the backend cannot group.
        """
        try:
            found: tuple[torch.Tensor, torch.Tensor] = super().update(
                key_states, value_states, layer_idx, *args, **kwargs
            )
        except (ValueError, AssertionError) as error:
            _, heads, tokens, dim = key_states.shape
            raise SchemeError(
                f"Transformers' quantized cache cannot take {tokens:,} tokens of {heads} KV heads "
                f"of {dim} ({error}): leave this arm out"
            ) from error
        return found
