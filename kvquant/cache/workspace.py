"""Workspace: the memory that dequantized keys and values are read into, shared by all layers."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch


def outside_inference_mode() -> AbstractContextManager[None]:
    """Where tensors are made that outlive a call.

    What is made under `torch.inference_mode` can never be written to outside of it.
    """
    if not torch.is_inference_mode_enabled():
        return nullcontext()
    outside: AbstractContextManager[None] = torch.inference_mode(False)
    return outside


class Workspace:
    """Two buffers, one for keys and one for values, reused by one layer after the other."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def take(
        self, slot: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A contiguous tensor that holds until the same slot is taken again.

        Args:
            slot: ``key`` or ``value``.
            shape: Its shape.
            dtype: Its dtype.
            device: Its device.
        """
        size, place = math.prod(shape), (slot, dtype, device)
        held = self._buffers.get(place)
        if held is None or held.numel() < size:
            with outside_inference_mode():
                # An eighth more than needed, since the next token needs a little more.
                held = torch.empty(size + size // 8, dtype=dtype, device=device)
            self._buffers[place] = held
        return held[:size].view(shape)

    def release(self) -> None:
        """Gives the memory back."""
        self._buffers.clear()

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(held.numel() * held.element_size() for held in self._buffers.values())
