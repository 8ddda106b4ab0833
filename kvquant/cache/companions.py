"""Quantized layers that keep something else beside keys and values, which stays as it is."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicIndexedLayer, LinearAttentionLayer

from .layer import QuantizedLayer
from .ledger import Sources


class QuantizedIndexedLayer(DynamicIndexedLayer, QuantizedLayer):  # type: ignore[misc]
    """A quantized layer of sparse attention; its indexer's keys stay exact."""

    def __init__(self, *args: Any) -> None:
        """As `QuantizedLayer`."""
        QuantizedLayer.__init__(self, *args)
        self.indexer_keys: torch.Tensor | None = None
        self.indexer_position_ids: torch.Tensor | None = None
        self.is_indexer_initialized = False

    def crop_groups(self, slots: int, counts: list[int]) -> None:
        """As `QuantizedLayer`, the indexer's keys too."""
        super().crop_groups(slots, counts)
        if self.indexer_keys is not None and slots:
            self.indexer_keys = self.indexer_keys[:, :-slots]
        if self.indexer_position_ids is not None and slots:
            self.indexer_position_ids = self.indexer_position_ids[..., :-slots]

    def select_rows(self, index: torch.Tensor, sources: Sources) -> None:
        """As `QuantizedLayer`, the indexer's keys too."""
        super().select_rows(index, sources)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys.index_select(0, index)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids.index_select(1, index)

    def nbytes(self) -> int:
        """Bytes held, those of the indexer's keys included."""
        return super().nbytes() + self._indexer_nbytes()

    def live_nbytes(self) -> int:
        """Bytes of the tokens held, those of the indexer's keys included."""
        return super().live_nbytes() + self._indexer_nbytes()

    def _indexer_nbytes(self) -> int:
        keys = self.indexer_keys
        return 0 if keys is None else keys.numel() * keys.element_size()


class QuantizedHybridLayer(LinearAttentionLayer, QuantizedLayer):  # type: ignore[misc]
    """A quantized layer that has a recurrent state beside its keys and values."""

    is_compileable = False

    def __init__(self, *args: Any, number_of_states: int = 1) -> None:
        """As `QuantizedLayer`.

        Args:
            *args: As `QuantizedLayer`.
            number_of_states: Recurrent states of the layer.
        """
        QuantizedLayer.__init__(self, *args)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of keys and values if there are two positional arguments, else of a state."""
        # As in Transformers' own hybrid layers, whose callers are the same.
        if args:
            QuantizedLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def get_max_length(self) -> int:
        """As `QuantizedLayer`."""
        return QuantizedLayer.get_max_length(self)

    def offload(self) -> None:
        """Moves what is stored to the CPU."""
        QuantizedLayer.offload(self)
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        """Moves what is stored back to where it is needed."""
        QuantizedLayer.prefetch(self)
        LinearAttentionLayer.prefetch(self)

    def reset(self) -> None:
        """Forgets all tokens, and the state."""
        QuantizedLayer.reset(self)
        LinearAttentionLayer.reset(self)

    def crop_groups(self, slots: int, counts: list[int]) -> None:
        """As `QuantizedLayer`, the state too."""
        LinearAttentionLayer.crop(self, -slots)
        QuantizedLayer.crop_groups(self, slots, counts)

    def select_rows(self, index: torch.Tensor, sources: Sources) -> None:
        """As `QuantizedLayer`, the state too."""
        LinearAttentionLayer.reorder_cache(self, index)
        QuantizedLayer.select_rows(self, index, sources)

    def nbytes(self) -> int:
        """Bytes held, those of the state included."""
        return QuantizedLayer.nbytes(self) + state_nbytes(self)

    def live_nbytes(self) -> int:
        """Bytes of the tokens held, those of the state included."""
        return QuantizedLayer.live_nbytes(self) + state_nbytes(self)


def state_nbytes(layer: Any) -> int:
    """Bytes of the recurrent states that a layer of Transformers holds."""
    states = [
        state
        for name in ("conv_states", "recurrent_states")
        for state in getattr(layer, name, {}).values()
        if state is not None
    ]
    return sum(state.numel() * state.element_size() for state in states)
