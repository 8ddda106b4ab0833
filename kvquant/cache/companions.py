"""Quantized layers that keep something else beside keys and values, which stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import DynamicIndexedLayer, LinearAttentionLayer

from .layer import QuantizedLayer
from .ledger import Sources
from .storage import State

_INDEXER = ("indexer_keys", "indexer_position_ids")
_STATES = ("conv_states", "recurrent_states")


class QuantizedIndexedLayer(DynamicIndexedLayer, QuantizedLayer):  # type: ignore[misc]
    """A quantized layer of sparse attention; its indexer's keys stay exact."""

    def __init__(self, *args: Any) -> None:
        """As `QuantizedLayer`."""
        QuantizedLayer.__init__(self, *args)
        self.indexer_keys: torch.Tensor | None = None
        self.indexer_position_ids: torch.Tensor | None = None
        self.is_indexer_initialized = False

    def crop(self, tokens: int) -> None:
        """As `QuantizedLayer`."""
        QuantizedLayer.crop(self, tokens)

    def crop_groups(self, slots: int, counts: list[int]) -> None:
        """As `QuantizedLayer`, the indexer's keys too."""
        QuantizedLayer.crop_groups(self, slots, counts)
        if self.indexer_keys is not None and slots:
            self.indexer_keys = self.indexer_keys[:, :-slots]
        if self.indexer_position_ids is not None and slots:
            self.indexer_position_ids = self.indexer_position_ids[..., :-slots]

    def select_rows(self, index: torch.Tensor, sources: Sources) -> None:
        """As `QuantizedLayer`, the indexer's keys too."""
        super().select_rows(index, sources)
        if self.indexer_keys is not None:
            index = index.to(self.indexer_keys.device)
            self.indexer_keys = self.indexer_keys.index_select(0, index)
        if self.indexer_position_ids is not None:
            index = index.to(self.indexer_position_ids.device)
            self.indexer_position_ids = self.indexer_position_ids.index_select(1, index)

    def state(self) -> State:
        """As `QuantizedLayer`, the indexer's keys too."""
        numbers, tensors = super().state()
        held = {name: getattr(self, name) for name in _INDEXER}
        return numbers, tensors | {name: part for name, part in held.items() if part is not None}

    def restore(
        self,
        numbers: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """As `QuantizedLayer`, the indexer's keys too."""
        super().restore(numbers, tensors, device)
        if "indexer_keys" in tensors:
            self.lazy_initialization_indexer(tensors["indexer_keys"].to(device))
        for name in _INDEXER:
            if name in tensors:
                setattr(self, name, tensors[name].to(device))

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

    @property
    def is_croppable(self) -> bool:
        """As `QuantizedLayer`, and the state must be one that can be taken back."""
        of_state, of_tokens = LinearAttentionLayer.is_croppable, QuantizedLayer.is_croppable
        return bool(of_state.fget(self)) and bool(of_tokens.fget(self))  # type: ignore[attr-defined]

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
        forget_state(self)

    def crop(self, tokens: int) -> None:
        """As `QuantizedLayer`."""
        QuantizedLayer.crop(self, tokens)

    def check_crop(self, slots: int, counts: list[int]) -> None:
        """As `QuantizedLayer`, the state too."""
        QuantizedLayer.check_crop(self, slots, counts)
        check_state_crop(self, slots)

    def crop_groups(self, slots: int, counts: list[int]) -> None:
        """As `QuantizedLayer`, the state too."""
        QuantizedLayer.crop_groups(self, slots, counts)
        crop_state(self, slots)

    def select_rows(self, index: torch.Tensor, sources: Sources) -> None:
        """As `QuantizedLayer`, the state too."""
        LinearAttentionLayer.reorder_cache(self, index)
        QuantizedLayer.select_rows(self, index, sources)

    def state(self) -> State:
        """As `QuantizedLayer`, the recurrent state too."""
        numbers, tensors = QuantizedLayer.state(self)
        own, states = recurrent_state(self)
        return {**numbers, **own}, {**tensors, **states}

    def restore(
        self,
        numbers: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """As `QuantizedLayer`, the recurrent state too."""
        QuantizedLayer.restore(self, numbers, tensors, device)
        restore_recurrent_state(self, numbers, tensors, device)

    def nbytes(self) -> int:
        """Bytes held, those of the state included."""
        return QuantizedLayer.nbytes(self) + state_nbytes(self)

    def live_nbytes(self) -> int:
        """Bytes of the tokens held, those of the state included."""
        return QuantizedLayer.live_nbytes(self) + state_nbytes(self)


def keeps_state(layer: Any) -> bool:
    """Whether a layer holds something beside keys and values, which the model may move first."""
    return isinstance(layer, (LinearAttentionLayer, DynamicIndexedLayer))


def forget_state(layer: Any) -> None:
    """Empties a layer of Transformers; its own `reset` keeps recurrent states, filled with 0."""
    if isinstance(layer, LinearAttentionLayer):
        LinearAttentionLayer.__init__(layer, number_of_states=layer.number_of_states)
    else:
        layer.reset()


def state_nbytes(layer: Any) -> int:
    """Bytes of the recurrent states that a layer of Transformers holds."""
    states = [
        state
        for name in _STATES
        for state in getattr(layer, name, {}).values()
        if state is not None
    ]
    return sum(state.numel() * state.element_size() for state in states)


def check_state_crop(layer: Any, tokens: int) -> None:
    """Makes sure that a layer of Transformers can go `tokens` tokens back.

    Its own `crop` leaves recurrent states as they are, which only a caller that asks `is_croppable`
    notices.

    Raises:
        RuntimeError: It cannot.
    """
    if not tokens or not isinstance(layer, LinearAttentionLayer):
        return
    # Hybrid layers have a property of their own, which asks for more.
    can_go_back = LinearAttentionLayer.is_croppable.fget(layer)
    if not can_go_back:
        raise RuntimeError(f"cannot take {tokens} tokens back: a recurrent state has seen them")
    if not layer.record_past:
        raise RuntimeError(
            f"cannot take {tokens} tokens back: call activate_past_recording() before tokens are "
            "added that may be taken back"
        )


def crop_state(layer: Any, tokens: int) -> None:
    """Takes tokens back where `check_state_crop` found that it can be done."""
    if isinstance(layer, LinearAttentionLayer):
        recorded = layer.record_past and any(layer.is_conv_states_initialized.values())
        if recorded:
            LinearAttentionLayer.crop(layer, -tokens)
    else:
        layer.crop(-tokens)


def recurrent_state(layer: LinearAttentionLayer) -> State:
    """What `restore_recurrent_state` makes the same state from."""
    numbers = {
        "records_past": layer.record_past,
        "recurrent": [
            {"started": layer.has_previous_state[i], "kernel_size": layer.conv_kernel_size[i]}
            for i in range(layer.number_of_states)
        ],
    }
    tensors = {
        f"{name}.{i}": state
        for name in _STATES
        for i, state in getattr(layer, name).items()
        if state is not None
    }
    return numbers, tensors


def restore_recurrent_state(
    layer: LinearAttentionLayer,
    numbers: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    """Makes the state of an empty layer what another was when `recurrent_state` was asked."""
    layer.record_past = numbers["records_past"]
    for i, own in zip(range(layer.number_of_states), numbers["recurrent"], strict=True):
        for name in _STATES:
            if f"{name}.{i}" not in tensors:
                continue
            state = tensors[f"{name}.{i}"].to(device)
            given: dict[str, Any] = {name: state, "state_idx": i}
            if name == "conv_states":
                given["conv_kernel_size"] = own["kernel_size"]
            layer.lazy_initialization(**given)
            getattr(layer, name)[i] = state
        layer.has_previous_state[i] = own["started"]
