"""What folding has to know of each layer: a sample of what it caches, and what reads it.

A key is read by queries, q·k; a value by the output projection. How much an error of one hurts is
therefore a quadratic form, and its matrix is all that is kept of the reading side::

    keys      mean of q q^T over the queries of all heads that read this KV head
    values    sum of W^T W, W being the columns of the output projection for those heads
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvquant.errors import ExportError
from kvquant.geometry import CacheGeometry
from kvquant.models.adapters import base_model

from .fold_attention import AttentionCall, evaluating, watched
from .fold_places import FoldPlaces, Place, find_places

_TOKENS = 512
"""Tokens of each layer that are kept, evenly spaced over all that is read."""


@dataclass(frozen=True, eq=False)
class ObservedSlot:
    """Keys or values of one layer, and how they are read; float32 on the CPU.

    Attributes:
        states: As they are cached, ``[kv_heads, tokens, dim]``.
        reading: What an error of one token costs is e^T R e; symmetric, ``[kv_heads, dim, dim]``.
        groups: Channels with the same number have to have the same factor; int64 ``[dim]``.
        is_shared: Whether all heads have to have the same factors.
    """

    states: torch.Tensor
    reading: torch.Tensor
    groups: torch.Tensor
    is_shared: bool


@dataclass(frozen=True, eq=False)
class ObservedLayer:
    """Keys and values of one layer, and where factors of them would go."""

    key: ObservedSlot
    value: ObservedSlot
    places: FoldPlaces


def observe(model: Any, blocks: Sequence[torch.Tensor]) -> dict[int, ObservedLayer]:
    """Runs a model and keeps a sample of what its layers cache.

    Memory is bounded: that of one block's forward pass, and a few hundred tokens of each layer.

    Args:
        model: A Transformers model; merge adapters first.
        blocks: Token ids, each ``[tokens]`` or ``[batch, tokens]``, without padding.

    Raises:
        ExportError: Folding would not be exact for this model, or there is no text.
    """
    blocks = [block[None] if block.dim() == 1 else block for block in blocks]
    tokens = sum(block.numel() for block in blocks)
    if not tokens:
        raise ExportError("folding has to see some text of the kind that is served: give it some")
    places = find_places(model, CacheGeometry.from_config(model.config))
    samples: dict[int, _Sample] = {}
    decoder = base_model(model).get_decoder()
    device = decoder.get_input_embeddings().weight.device
    for block, kept in zip(blocks, _kept(blocks, math.ceil(tokens / _TOKENS)), strict=True):

        def look(call: AttentionCall, kept: torch.Tensor = kept) -> None:
            samples.setdefault(call.layer, _Sample()).add(call, kept)

        with evaluating(decoder), watched(decoder, look):
            decoder(input_ids=block.to(device), use_cache=False)
    return {layer: _observed(sample, places[layer]) for layer, sample in sorted(samples.items())}


def _kept(blocks: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
    """Of each block, which tokens are kept, bool of its shape: every `step`-th one of all."""
    sizes = [block.numel() for block in blocks]
    parts = torch.split(torch.arange(sum(sizes)) % step == 0, sizes)
    return [part.view(block.shape) for part, block in zip(parts, blocks, strict=True)]


class _Sample:
    """What is gathered of one layer."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.reading: torch.Tensor | float = 0.0
        self.queries = 0

    def add(self, call: AttentionCall, kept: torch.Tensor) -> None:
        """Adds one call; `kept` says which tokens to keep, ``[batch, tokens]``."""
        for gathered, states in ((self.keys, call.key), (self.values, call.value)):
            by_token = states.transpose(1, 2)[kept.to(states.device)]
            gathered.append(by_token.transpose(0, 1).float().cpu())
        query, kv_heads = call.query.float(), call.key.shape[1]
        rows = query.transpose(0, 1).reshape(kv_heads, -1, query.shape[-1])
        self.reading = self.reading + (rows.transpose(1, 2) @ rows).cpu().double()
        self.queries += rows.shape[1]


def _observed(sample: _Sample, places: FoldPlaces) -> ObservedLayer:
    assert isinstance(sample.reading, torch.Tensor)
    keys, values = torch.cat(sample.keys, 1), torch.cat(sample.values, 1)
    dims = torch.arange(values.shape[-1])
    shared = places.query.is_shared or places.key.is_shared
    return ObservedLayer(
        ObservedSlot(keys, (sample.reading / sample.queries).float(), places.key_groups, shared),
        ObservedSlot(
            values, _read_by_output(places.output, len(values)), dims, places.value.is_shared
        ),
        places,
    )


def _read_by_output(output: Place, kv_heads: int) -> torch.Tensor:
    """Sum of W^T W over the query heads of each KV head, ``[kv_heads, dim, dim]``."""
    dim = output.entries.shape[1]
    assert output.axis is not None
    entries = output.entries.to(output.weight.device)
    columns = output.weight.detach().movedim(output.axis, 0)[entries].float()
    by_head = columns @ columns.transpose(1, 2)
    return by_head.view(kv_heads, -1, dim, dim).sum(1).cpu()
