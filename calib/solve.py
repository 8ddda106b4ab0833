"""From statistics to scales: how far a range reaches, per tensor, head or channel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvquant.scales import KVScales, LayerScales, TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme

from .error import Bins, squared_error
from .mean_form import choose_turned
from .method import Method, RangeMethod
from .sketch import QuantileSketch
from .stats import CalibrationStats, ChannelStats


@dataclass(frozen=True)
class _Rows:
    """The values that share a scale, one row a scale: what a range is chosen from.

    Attributes:
        minimum: float64 ``[rows]``.
        maximum: float64 ``[rows]``.
        sketch: Their distribution.
    """

    minimum: torch.Tensor
    maximum: torch.Tensor
    sketch: QuantileSketch


def solve(
    stats: CalibrationStats, scheme: QuantScheme, method: RangeMethod | None = None
) -> KVScales:
    """Scales for `scheme` from `stats`.

    Args:
        stats: Statistics that cover every layer the scheme quantizes.
        scheme: Formats, granularities, layers to skip.
        method: How the range is chosen; by default `Method.AMAX`.

    Raises:
        NotObservedError: A layer that the scheme quantizes was never observed.
        SchemeError: A skipped layer that the model does not have, or a scheme without calibrated
            scales.
    """
    method = method or RangeMethod()
    scheme.check(stats.geometry)
    wanted = scheme.quantized_layers(stats.geometry)
    stats.check(wanted)
    layers = {
        index: LayerScales(
            solve_tensor(stats.layers[index].key, scheme.key, method),
            solve_tensor(stats.layers[index].value, scheme.value, method),
        )
        for index in wanted
    }
    return KVScales(stats.geometry, scheme, layers, stats.provenance, str(method))


def solve_tensor(stats: ChannelStats, scheme: TensorScheme, method: RangeMethod) -> TensorScales:
    """Scales of one slot of one layer, with its means and which of them turn."""
    rows = _shared_rows(stats, scheme.granularity)
    low, high = _range(rows, scheme, method)
    shape = scheme.granularity.scale_shape(*stats.shape)
    scales = TensorScales.from_range(low.view(shape), high.view(shape), scheme)
    unrotated = stats.mean_unrotated
    return replace(
        scales,
        mean=stats.mean.float(),
        mean_unrotated=None if unrotated is None else unrotated.float(),
        rotary=stats.rotary,
        turned=choose_turned(stats),
    )


def _shared_rows(stats: ChannelStats, granularity: Granularity) -> _Rows:
    heads, channels = granularity.scale_shape(*stats.shape)
    rows = heads * channels
    return _Rows(
        stats.minimum.double().view(rows, -1).amin(1),
        stats.maximum.double().view(rows, -1).amax(1),
        stats.sketch.pool(rows),
    )


def _range(
    rows: _Rows, scheme: TensorScheme, method: RangeMethod
) -> tuple[torch.Tensor, torch.Tensor]:
    """Range of each row, float64 ``[rows]``; symmetric ones as ``(-amax, amax)``."""
    low, high = rows.minimum, rows.maximum
    if scheme.symmetric:
        high = torch.maximum(low.abs(), high.abs())
        low = -high
    if method.method is Method.PERCENTILE:
        return _percentile_range(rows, low, high, scheme, method.percentile / 100)
    if method.method is Method.MSE:
        return _mse_range(rows, low, high, scheme)
    return low, high


def _percentile_range(
    rows: _Rows, low: torch.Tensor, high: torch.Tensor, scheme: TensorScheme, share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if scheme.symmetric:
        clip = rows.sketch.magnitudes().quantile(share, torch.zeros_like(high), high)
        return -clip, clip
    tail = (1 - share) / 2
    return rows.sketch.quantile(tail, low, high), rows.sketch.quantile(1 - tail, low, high)


_COARSE = torch.exp2(-torch.arange(17, dtype=torch.float64) / 2)
_FINE = torch.exp2(torch.arange(-8, 9, dtype=torch.float64) / 32)


def _mse_range(
    rows: _Rows, low: torch.Tensor, high: torch.Tensor, scheme: TensorScheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """The full range with each end pulled in by the factor of least squared error.

    Both ends of a symmetric range move as one, towards zero; those of an asymmetric range one after
    the other, towards the median, since outliers often lie on one side. A geometric grid from 1
    to 1/256, then a finer one around each row's best.
    """
    anchor = torch.zeros_like(low) if scheme.symmetric else rows.sketch.quantile(0.5, low, high)
    reach = torch.stack((low, high)) - anchor
    bins = Bins.of(rows.sketch, rows.minimum, rows.maximum)
    best = torch.ones_like(reach)
    least = torch.full_like(low, float("inf"))
    # Twice, since the first end is sought while the other still stretches the steps.
    turns = ([0, 1],) if scheme.symmetric else ([0], [1], [0], [1])
    for steps, ends in [(_COARSE, ends) for ends in turns] + [(_FINE, ends) for ends in turns[:2]]:
        around = best[ends] if steps is _FINE else 1.0
        for step in steps:
            factor = best.clone()
            factor[ends] = (around * step).clamp(max=1)
            low, high = anchor + reach * factor
            scales = TensorScales.from_range(low[:, None], high[:, None], scheme)
            error = squared_error(bins, scales, scheme)
            better = error < least
            best = torch.where(better, factor, best)
            least = torch.where(better, error, least)
    low, high = anchor + reach * best
    return low, high
