"""What quantizing a sketched distribution costs, computed from its histogram alone.

Values are taken as spread evenly within a histogram bin. For integer codes the squared error then
has a closed form per bin: rounding to a grid of step s integrates to ``s³ F(t)`` with
``F(t) = n/12 + (t - n)³/3`` and ``n = round(t)``, and beyond the last code the distance to it
integrates to a cubic. For FP8, whose grid is not even, four points a bin are quantized.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        clipped: Number of values beyond the representable range, float64 ``[rows]``.
    """

    squared: torch.Tensor
    clipped: torch.Tensor


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
    low_end, high_end = minimum.double()[:, None], maximum.double()[:, None]
    edges = torch.minimum(torch.maximum(sketch.edges(), low_end), high_end)
    below, above = scales.range(scheme)
    width = edges.diff(dim=1)
    beyond = _length_beyond(edges, below, above)
    flat = width <= edges[:, 1:].abs() * 1e-9
    share = torch.where(flat, _is_beyond(edges[:, 1:], below, above), beyond / width.clamp(1e-300))
    at_point = _squared_at(edges[:, 1:], scales, scheme)
    if scheme.format.is_float:
        spread = _mean_of_points(edges, scales, scheme)
    else:
        primitive = _primitive(edges, below, above, scales.scale.double())
        spread = primitive.diff(dim=1) / width.clamp(1e-300)
    counts = sketch.counts.double()
    return QuantError(
        squared=(counts * torch.where(flat, at_point, spread)).sum(1),
        clipped=(counts * share).sum(1),
    )


def _primitive(
    x: torch.Tensor, below: torch.Tensor, above: torch.Tensor, step: torch.Tensor
) -> torch.Tensor:
    """Antiderivative at `x` of the squared error of rounding to `step` within the range."""
    steps = (torch.minimum(torch.maximum(x, below), above) - below) / step
    whole = torch.round(steps)
    rounding = step**3 * (whole / 12 + (steps - whole) ** 3 / 3)
    return rounding + ((x - below).clamp(max=0) ** 3 + (x - above).clamp(min=0) ** 3) / 3


def _length_beyond(edges: torch.Tensor, below: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    """How much of each bin lies outside the range."""
    outside = (edges - above).clamp(min=0) + (edges - below).clamp(max=0)
    return outside.diff(dim=1)


def _is_beyond(x: torch.Tensor, below: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    return ((x > above) | (x < below)).double()


def _squared_at(x: torch.Tensor, scales: TensorScales, scheme: TensorScheme) -> torch.Tensor:
    """Squared error at points `x` ``[rows, points]``, through the reference quantizer."""
    values = x.float()[None, :, None, :]
    codes = quantize(values, scales, scheme)
    restored = dequantize(codes, scales)[0, :, 0, :]
    return (restored.double() - x) ** 2


def _mean_of_points(
    edges: torch.Tensor, scales: TensorScales, scheme: TensorScheme
) -> torch.Tensor:
    low, width = edges[:, :-1], edges.diff(dim=1)
    parts = [
        _squared_at(low + width * ((point + 0.5) / _POINTS), scales, scheme)
        for point in range(_POINTS)
    ]
    return torch.stack(parts).mean(0)
