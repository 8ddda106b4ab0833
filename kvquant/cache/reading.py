"""What attention reads of one layer in one call: as it is stored, or dequantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvquant.attention.handle import KEY, VALUE, TensorHandle
from kvquant.attention.stored import StoredRows

if TYPE_CHECKING:
    from .layer import QuantizedLayer


@dataclass(frozen=True)
class Call:
    """One call of a layer's `update`, whose tokens are not stored yet.

    Attributes:
        states: Keys and values of its tokens, ``[batch, kv_heads, tokens, dim]`` each.
        start: Slot of the first of them.
        past: Earlier slots that can be seen.
    """

    states: tuple[torch.Tensor, torch.Tensor]
    start: int
    past: int


class LayerReading:
    """Implements `kvquant.attention.handle.Reading`; good until the call's tokens are stored."""

    def __init__(self, layer: QuantizedLayer, call: Call, backend: str) -> None:
        """Of `layer`, for `call`, to be attended to by `backend`."""
        self.backend = backend
        self._layer = layer
        self._call = call

    def handles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What `update` returns."""
        return self._handle(KEY), self._handle(VALUE)

    def read(self, slot: int) -> torch.Tensor:
        """As the protocol says.

        Raises:
            RuntimeError: The cache has gone on.
        """
        self._check()
        return self._layer.read(slot, self._call)

    def rows(self) -> list[StoredRows] | None:
        """As the protocol says; None where some of the call's tokens are padding.

        Raises:
            RuntimeError: The cache has gone on.
        """
        self._check()
        return self._layer.stored_rows(self._call)

    def _handle(self, slot: int) -> TensorHandle:
        states = self._call.states[slot]
        batch, kv_heads, tokens, dim = states.shape
        shape = (batch, kv_heads, self._call.past + tokens, dim)
        return TensorHandle(self, slot, shape, states.dtype, states.device)

    def _check(self) -> None:
        if self._layer.pending is not self._call:
            raise RuntimeError(
                "these keys and values were read too late: the cache has gone on to the next call"
            )
