"""RotaryAngles: cosines and sines by position, as the model itself computes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from kvquant.rotary import RotaryLayout

_PAGE = 1024
# Their rotation of a position changes with the length of the text, or has several positions.
_UNSTEADY = {"dynamic", "longrope"}


class RotaryAngles:
    """A table that grows with the longest position, in pages that are always computed whole.

    Whole pages make the numbers of a position the same however calls were cut. Threads that serve
    copies of a cache share a table: a longer one takes its place when it is complete.
    """

    def __init__(
        self, embed: Callable[[torch.Tensor], Any], layout: RotaryLayout, device: torch.device
    ) -> None:
        """An empty table.

        Args:
            embed: The model's position embeddings of positions ``[1, tokens]``.
            layout: Of the slot that the table is for.
            device: Where it is needed.
        """
        self._embed = embed
        self._layout = layout
        self._device = device
        empty = torch.empty(0, layout.width // 2, device=device)
        self._table = empty, empty

    def __call__(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of at least the first `count` positions."""
        cos, sin = table = self._table
        held = len(cos)
        if held < count:
            # Doubling: the table is copied a few times, not once a page.
            pages = [self._page(start) for start in range(held, max(count, 2 * held), _PAGE)]
            table = (
                torch.cat([cos, *(page for page, _ in pages)]),
                torch.cat([sin, *(page for _, page in pages)]),
            )
            self._table = table
        return table

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.numel() * part.element_size() for part in self._table)

    def _page(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            embeddings = self._embed(torch.arange(start, start + _PAGE)[None])
        cos, sin = self._layout.table(embeddings)
        return cos[0].to(self._device), sin[0].to(self._device)


def embedding_of(decoder: Any, layer_idx: int) -> Callable[[torch.Tensor], Any] | None:
    """What computes a layer's position embeddings, or None where a table would not hold.

    That is a decoder without its own rotary module, rotation that depends on the text's length
    (dynamic, longrope), and positions of several dimensions (multimodal models).
    """
    module = getattr(decoder, "rotary_emb", None)
    config = getattr(decoder, "config", None)
    if not isinstance(module, torch.nn.Module) or config is None:
        return None
    types = getattr(config, "layer_types", None)
    settings = getattr(config, "rope_parameters", None) or {}
    own: dict[str, Any] = {}
    if "layer_type" in inspect.signature(module.forward).parameters:
        own["layer_type"] = types[layer_idx] if types else None
        settings = settings.get(own["layer_type"]) or {}
    if settings.get("rope_type") in _UNSTEADY or "mrope_section" in settings:
        return None
    device = next((buffer.device for buffer in module.buffers()), torch.device("cpu"))

    def embed(positions: torch.Tensor) -> Any:
        return module(torch.zeros(1, device=device), positions.to(device), **own)

    return embed
