"""A mergeable histogram of many channels at once, fine near zero and at the tails alike.

Each row (a channel, or a head) counts its values in bins that are linear within an octave and
double from octave to octave, like the mantissa and exponent of a float: `BINS_PER_OCTAVE` bins in
each of the `OCTAVES` octaves below the row's ceiling ``2**exponent``, mirrored for negative
values, and one bin around zero for whatever is smaller::

    -2^e ........ -2^(e-10)   [ zero bin ]   2^(e-10) ........ 2^e
    160 bins, finer inwards                  160 bins, coarser outwards

A larger value raises the ceiling by whole octaves; the lowest octaves then fold into the zero bin.
The bins of a row are therefore a function of its largest value alone, so that merging is exact,
associative and independent of the order (HDR histograms and DDSketch, arXiv 1908.10693, share the
idea; a floating ceiling lets 321 counters serve a channel of any magnitude).
A quantile is off by less than its bin is wide: 1/16 of its value, or 1/256 of the row's largest
value where that is more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BINS_PER_OCTAVE = 16
OCTAVES = 10
_HALF = BINS_PER_OCTAVE * OCTAVES
BINS = 2 * _HALF + 1

_MANTISSA_SHIFT = 19  # keeps sign, exponent and the top 4 mantissa bits of a float32
_MAGNITUDE_MASK = 0x7FFFFFFF
_LOWEST_EXPONENT = OCTAVES - 126  # denormal numbers belong to the zero bin of any row


@dataclass
class QuantileSketch:
    """Counts of the values of `rows` channels.

    Attributes:
        exponent: int32 ``[rows]``; every value of a row is below ``2**exponent`` in magnitude.
        counts: int32 ``[rows, BINS]``, bins in ascending order of value.
    """

    exponent: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device | str = "cpu") -> QuantileSketch:
        """A sketch that has seen nothing."""
        return cls(
            torch.full((rows,), _LOWEST_EXPONENT, dtype=torch.int32, device=device),
            torch.zeros((rows, BINS), dtype=torch.int32, device=device),
        )

    def update(self, values: torch.Tensor, amax: torch.Tensor) -> None:
        """Counts `values`.

        Args:
            values: float32 ``[tokens, rows]``, finite.
            amax: float32 ``[rows]``, their largest magnitudes.
        """
        self._raise_ceiling(_exponent_above(amax))
        bits = values.contiguous().view(torch.int32)
        lowest = (self.exponent - OCTAVES + 127) * BINS_PER_OCTAVE - 1
        magnitude = (bits & _MAGNITUDE_MASK) >> _MANTISSA_SHIFT
        magnitude = magnitude.sub_(lowest).clamp_(0, _HALF)
        # Arithmetic shift: -1 for negative values, 0 for others; `| 1` makes it the sign.
        index = magnitude.mul_((bits >> 31) | 1)
        row_offset = torch.arange(self.rows, device=values.device, dtype=torch.int32) * BINS + _HALF
        index = index.add_(row_offset).flatten()
        seen = torch.bincount(index, minlength=self.rows * BINS)
        self.counts += seen.view(self.rows, BINS).to(torch.int32)

    @property
    def rows(self) -> int:
        """Number of channels."""
        return self.exponent.numel()

    def merge(self, other: QuantileSketch) -> QuantileSketch:
        """The sketch of both inputs' values together."""
        joint = QuantileSketch(self.exponent.clone(), self.counts.clone())
        joint._raise_ceiling(other.exponent)
        moved = QuantileSketch(other.exponent.clone(), other.counts.clone())
        moved._raise_ceiling(joint.exponent)
        joint.counts += moved.counts
        return joint

    def pool(self, groups: int) -> QuantileSketch:
        """Joins consecutive rows into `groups` equal groups: a head's channels, or all of them."""
        ceiling = self.exponent.view(groups, -1).amax(1)
        moved = QuantileSketch(self.exponent.clone(), self.counts.clone())
        moved._raise_ceiling(ceiling.repeat_interleave(self.rows // groups))
        counts = moved.counts.view(groups, -1, BINS).sum(1, dtype=torch.int64)
        return QuantileSketch(ceiling, counts)

    def edges(self) -> torch.Tensor:
        """Bin borders, float64 ``[rows, BINS + 1]``, ascending."""
        steps = torch.arange(_HALF + 1, dtype=torch.float64, device=self.counts.device)
        within = 1 + (steps % BINS_PER_OCTAVE) / BINS_PER_OCTAVE
        positive = torch.exp2(steps // BINS_PER_OCTAVE - OCTAVES) * within
        unit = torch.cat((-positive.flip(0), positive))
        return unit * torch.exp2(self.exponent.double())[:, None]

    def quantile(
        self, q: float, minimum: torch.Tensor | None = None, maximum: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The `q`-quantile of each row, float64 ``[rows]``, linear within a bin.

        Rows without values give 0.

        Args:
            q: Share of the values that lie below.
            minimum: Smallest value of each row, ``[rows]``, if known: bins begin there.
            maximum: Largest value of each row, ``[rows]``, if known: bins end there.
        """
        cumulative = self.counts.cumsum(1, dtype=torch.int64).double()
        total = cumulative[:, -1:]
        target = (q * total).clamp(min=1e-9)
        index = torch.searchsorted(cumulative, target).clamp(max=BINS - 1)
        edges = self.edges()
        if minimum is not None:
            edges = torch.maximum(edges, minimum.double()[:, None])
        if maximum is not None:
            edges = torch.minimum(edges, maximum.double()[:, None])
        low, high = edges.gather(1, index), edges.gather(1, index + 1)
        inside = self.counts.gather(1, index).double()
        before = cumulative.gather(1, index) - inside
        share = ((target - before) / inside.clamp(min=1)).clamp(0, 1)
        return torch.where(total > 0, low + (high - low) * share, 0.0).squeeze(1)

    def magnitudes(self) -> QuantileSketch:
        """The sketch of the absolute values."""
        counts = torch.zeros_like(self.counts)
        counts[:, _HALF:] = self.counts[:, _HALF:]
        counts[:, _HALF + 1 :] += self.counts[:, :_HALF].flip(1)
        return QuantileSketch(self.exponent, counts)

    def _raise_ceiling(self, exponent: torch.Tensor) -> None:
        """Moves each row to at least `exponent`, folding its lowest octaves into the zero bin."""
        shift = (exponent - self.exponent).clamp(min=0)
        if not bool(shift.any()):
            return
        offset = torch.arange(BINS, device=self.counts.device) - _HALF
        kept = (offset.abs() - shift[:, None].long() * BINS_PER_OCTAVE).clamp(min=0)
        target = _HALF + offset.sign() * kept
        self.counts = torch.zeros_like(self.counts).scatter_add_(1, target, self.counts)
        self.exponent = self.exponent + shift


def _exponent_above(amax: torch.Tensor) -> torch.Tensor:
    """Smallest e with ``amax < 2**e``, int32, read from the float32 exponent bits."""
    bits = amax.contiguous().view(torch.int32) & _MAGNITUDE_MASK
    return (bits >> 23) - 126
