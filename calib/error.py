"""What quantizing a sketched distribution costs, computed from its histogram alone.

Values are taken as spread evenly within a histogram bin. For integer codes the squared error then
has a closed form per bin: rounding to a grid of step s integrates to ``s³ F(t)`` with
``F(t) = n/12 + (t - n)³/3`` and ``n = round(t)``, and beyond the last code the distance to it
integrates to a cubic. For FP8, whose grid is not even, four points a bin are quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kvquant.quantize.reference import dequantize, quantize
from kvquant.scales import TensorScales
from kvquant.scheme import TensorScheme

from .sketch import QuantileSketch

_POINTS = 4


@dataclass(frozen=True)
class QuantError:
    """Cost of quantizing each row of a sketch.

    Attributes:
        squared: Sum of squared errors, float64 ``[rows]``.
        clipped: Number of values beyond the representable range, float64 ``[rows]``: more than half
            a scale beyond, since scales are rounded to float32 and zero points to whole numbers.
    """

    squared: torch.Tensor
    clipped: torch.Tensor


@dataclass(frozen=True)
class Bins:
    """A sketch made ready for trying many scales on it.

    Attributes:
        edges: Borders of each row's bins, float64 ``[rows, bins + 1]``, which the row's smallest
            and largest value cut short.
        counts: Values per bin, float64 ``[rows, bins]``.
    """

    edges: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, sketch: QuantileSketch, minimum: torch.Tensor, maximum: torch.Tensor) -> Bins:
        """Bins of `sketch`, whose rows have the extremes `minimum` and `maximum`, ``[rows]``."""
        edges = torch.maximum(sketch.edges(), minimum.double()[:, None])
        edges = torch.minimum(edges, maximum.double()[:, None])
        return cls(edges, sketch.counts.double())

    @cached_property
    def width(self) -> torch.Tensor:
        """Width of each bin."""
        return self.edges.diff(dim=1)

    @cached_property
    def points(self) -> torch.Tensor:
        """Bins that hold values and are as good as a point, as that of a constant channel is."""
        return (self.width <= self.edges[:, 1:].abs() * 1e-9) & (self.counts > 0)


def expected_error(
    sketch: QuantileSketch,
    minimum: torch.Tensor,
    maximum: torch.Tensor,
    scales: TensorScales,
    scheme: TensorScheme,
) -> QuantError:
    """Cost of quantizing what `sketch` counted.

    Args:
        sketch: Distribution of each row.
        minimum: Smallest value of each row, ``[rows]``: bins end there.
        maximum: Largest value of each row, ``[rows]``.
        scales: One scale (and zero point) per row, ``[rows, 1]``.
        scheme: Format and symmetry.
    """
    bins = Bins.of(sketch, minimum, maximum)
    return QuantError(squared_error(bins, scales, scheme), _clipped(bins, scales, scheme))


def squared_error(bins: Bins, scales: TensorScales, scheme: TensorScheme) -> torch.Tensor:
    """Sum of squared errors of each row, float64 ``[rows]``; scales as in `expected_error`."""
    if scheme.format.is_float:
        mean = _mean_of_points(bins, scales, scheme)
    else:
        mean = _primitive(bins.edges, scales, scheme).diff(dim=1) / bins.width.clamp(1e-300)
    if bool(bins.points.any()):
        mean = torch.where(bins.points, _squared_at(bins.edges[:, 1:], scales, scheme), mean)
    return (bins.counts * mean).sum(1)


def _clipped(bins: Bins, scales: TensorScales, scheme: TensorScheme) -> torch.Tensor:
    """Number of values beyond the range, by the part of their bin that lies there."""
    below, above = scales.range(scheme)
    tolerance = scales.scale.double() / 2
    below, above = below - tolerance, above + tolerance
    outside = (bins.edges - above).clamp(min=0) + (bins.edges - below).clamp(max=0)
    share = outside.diff(dim=1) / bins.width.clamp(1e-300)
    value = bins.edges[:, 1:]
    is_beyond = ((value > above) | (value < below)).double()
    return (bins.counts * torch.where(bins.points, is_beyond, share)).sum(1)


def _primitive(x: torch.Tensor, scales: TensorScales, scheme: TensorScheme) -> torch.Tensor:
    """Antiderivative at `x` of the squared error of rounding to whole steps within the range."""
    below, above = scales.range(scheme)
    step = scales.scale.double()
    steps = (torch.minimum(torch.maximum(x, below), above) - below) / step
    whole = torch.round(steps)
    rounding = step**3 * (whole / 12 + (steps - whole) ** 3 / 3)
    return rounding + ((x - below).clamp(max=0) ** 3 + (x - above).clamp(min=0) ** 3) / 3


def _squared_at(x: torch.Tensor, scales: TensorScales, scheme: TensorScheme) -> torch.Tensor:
    """Squared error at points `x` ``[rows, points]``, through the reference quantizer."""
    values = x.float()[None, :, None, :]
    codes = quantize(values, scales, scheme)
    restored = dequantize(codes, scales)[0, :, 0, :]
    return (restored.double() - x) ** 2


def _mean_of_points(bins: Bins, scales: TensorScales, scheme: TensorScheme) -> torch.Tensor:
    parts = [
        _squared_at(bins.edges[:, :-1] + bins.width * ((point + 0.5) / _POINTS), scales, scheme)
        for point in range(_POINTS)
    ]
    return torch.stack(parts).mean(0)
