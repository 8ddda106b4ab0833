"""What scales measured on something else cost a model, head by head, computed from its sketch.

The model's own values are quantized twice on paper: with the scales in question, and with those
solved for itself. What the first loses against the second is the cost; no model has to run for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from kvquant.scales import KVScales, TensorScales
from kvquant.scheme import TensorScheme

from .error import QuantError, expected_error
from .sketch import QuantileSketch
from .stats import CalibrationStats, ChannelStats

SLOTS = ("key", "value")

SQNR_CEILING_DB = 56.0
"""What rounding to bfloat16 leaves: an error of 2^-7 / sqrt(12) of the leading power of two."""

RAREST = 8
"""Values at either end of each channel that do not count towards the SQNR.

The largest of n values is no bound for the next n: one in n lies beyond it, however alike the two
texts are, and under int8 per channel a few such values outweigh all rounding. On SmolLM2 the worst
head seems to lose 10 dB from one 2,048 tokens to the next of the same text, with the same weights;
without the 8 rarest values it is 4 dB, at 4,096 tokens 2 dB, and what is real stays as it is.
"""

RAREST_SHARE = 0.01
"""At most this share is left out, of however few tokens."""


@dataclass(frozen=True)
class HeadCost:
    """What one KV head pays for scales that are not its own.

    Attributes:
        layer: Layer index.
        slot: ``key`` or ``value`` (of a latent layer: the latent and the rotary part).
        head: KV head.
        clipped: Share of the head's values beyond the range of the scales in question.
        clipped_own: The same for its own scales: 0 with ``amax``, intended with other methods.
        sqnr_base_db: 10 log10(sum of squares / sum of squared errors) under the scales in
            question, `RAREST` values left out; infinite without errors.
        sqnr_own_db: The same under its own scales.
        loss_db: The latter less the former, each counted up to `SQNR_CEILING_DB`: an error below
            that of a bfloat16 cache is none.
    """

    layer: int
    slot: str
    head: int
    clipped: float
    clipped_own: float
    sqnr_base_db: float
    sqnr_own_db: float
    loss_db: float

    @property
    def extra_clipped(self) -> float:
        """Share of values that are clipped and would not be by the head's own scales."""
        return max(0.0, self.clipped - self.clipped_own)

    def __str__(self) -> str:
        """For messages: ``layer 10, keys, head 0``."""
        return f"layer {self.layer}, {self.slot}s, head {self.head}"


def head_costs(stats: CalibrationStats, scales: KVScales, own: KVScales) -> list[HeadCost]:
    """What each head of each quantized layer pays, by layer, slot and head.

    Args:
        stats: Statistics of the model that is to use `scales`.
        scales: The scales in question, measured on another model or shared with it.
        own: Scales of the same scheme solved from `stats`.
    """
    return [
        cost
        for index in sorted(own.layers)
        for slot in SLOTS
        for cost in _slot_costs(
            (index, slot),
            getattr(stats.layers[index], slot),
            (getattr(scales.layers[index], slot), getattr(own.layers[index], slot)),
            getattr(own.scheme, slot),
        )
    ]


def _slot_costs(
    place: tuple[int, str],
    stats: ChannelStats,
    scales: tuple[TensorScales, TensorScales],
    scheme: TensorScheme,
) -> Iterator[HeadCost]:
    under, under_own = (_head_errors(stats, side, scheme) for side in scales)
    energy = stats.total_squares.sum(1)
    sqnr, sqnr_own = _sqnr_db(energy, under), _sqnr_db(energy, under_own)
    values = stats.tokens * stats.shape[1]
    for head in range(stats.shape[0]):
        yield HeadCost(
            *place,
            head=head,
            clipped=float(under.clipped[head]) / values,
            clipped_own=float(under_own.clipped[head]) / values,
            sqnr_base_db=sqnr[head],
            sqnr_own_db=sqnr_own[head],
            loss_db=min(sqnr_own[head], SQNR_CEILING_DB) - min(sqnr[head], SQNR_CEILING_DB),
        )


def _head_errors(stats: ChannelStats, scales: TensorScales, scheme: TensorScheme) -> QuantError:
    """Errors of each head: squared ones without the rarest values, clipped ones of all."""

    def per_channel(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.expand(stats.shape).reshape(-1, 1)

    rows = TensorScales(
        per_channel(scales.scale),
        None if scales.zero_point is None else per_channel(scales.zero_point),
    )
    low, high = stats.minimum.flatten(), stats.maximum.flatten()
    clipped = expected_error(stats.sketch, low, high, rows, scheme).clipped
    squared = expected_error(*_without_rarest(stats), rows, scheme).squared
    heads = (stats.shape[0], -1)
    return QuantError(squared.view(heads).sum(1), clipped.view(heads).sum(1))


def _without_rarest(stats: ChannelStats) -> tuple[QuantileSketch, torch.Tensor, torch.Tensor]:
    """Sketch, smallest and largest value of each channel, its rarest left out at either end."""
    share = min(RAREST / stats.tokens, RAREST_SHARE)
    sketch = stats.sketch
    ends = stats.minimum.flatten().double(), stats.maximum.flatten().double()
    low, high = (torch.clamp(sketch.quantile(q), *ends) for q in (share, 1 - share))
    total = sketch.counts.sum(1, keepdim=True).double()
    cumulative = pad(sketch.counts.cumsum(1, dtype=torch.int64), (1, 0)).double()
    kept = torch.clamp(cumulative, total * share, total * (1 - share)).diff(dim=1)
    return replace(sketch, counts=kept), low, high


def _sqnr_db(energy: torch.Tensor, error: QuantError) -> list[float]:
    """Signal to quantization noise of each head; without noise infinite, also of nothing."""
    ratio = torch.where(error.squared > 0, energy / error.squared, math.inf)
    numbers: list[float] = (10 * torch.log10(ratio)).tolist()
    return numbers
