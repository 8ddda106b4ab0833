"""From statistics to scales: how far a range reaches, per tensor, head or channel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch

from kvquant.errors import SchemeError
from kvquant.scales import KVScales, LayerScales, TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme

from .error import expected_error
from .sketch import QuantileSketch
from .stats import CalibrationStats, ChannelStats


class Method(str, Enum):
    """How the range is chosen."""

    AMAX = "amax"
    PERCENTILE = "percentile"
    MSE = "mse"


@dataclass(frozen=True)
class RangeMethod:
    """A method with its parameter.

    Attributes:
        method: ``amax`` covers everything seen; ``percentile`` lets the rarest values saturate;
            ``mse`` searches the clip that minimises the squared error of the sketched values.
        percentile: Share of values in percent that a ``percentile`` range covers.

    Raises:
        SchemeError: A percentile outside (50, 100].
    """

    method: Method = Method.AMAX
    percentile: float = 99.99

    def __post_init__(self) -> None:
        """Refuses percentiles that cover less than half."""
        if not 50 < self.percentile <= 100:
            raise SchemeError(f"--percentile must be in (50, 100], not {self.percentile}")

    def __str__(self) -> str:
        """For headers and tables: ``percentile 99.99``."""
        suffix = f" {self.percentile:g}" if self.method is Method.PERCENTILE else ""
        return f"{self.method.value}{suffix}"


@dataclass(frozen=True)
class _Rows:
    """The values that share a scale, one row a scale: what a range is chosen from.

    Attributes:
        minimum: float64 ``[rows]``.
        maximum: float64 ``[rows]``.
        sketch: Their distribution, or None where the method needs none.
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
        SchemeError: A skipped layer that the model does not have.
    """
    method = method or RangeMethod()
    beyond = [layer for layer in scheme.skip_layers if layer >= len(stats.geometry.layers)]
    if beyond:
        raise SchemeError(
            f"cannot skip layer {max(beyond)}: the model has layers 0 to "
            f"{len(stats.geometry.layers) - 1}"
        )
    wanted = sorted(set(stats.geometry.attention_layers) - scheme.skip_layers)
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
    """Scales of one slot of one layer."""
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
        clip = torch.minimum(rows.sketch.magnitudes().quantile(share), high)
        return -clip, clip
    tail = (1 - share) / 2
    return (
        torch.maximum(rows.sketch.quantile(tail), low),
        torch.minimum(rows.sketch.quantile(1 - tail), high),
    )


def _mse_range(
    rows: _Rows, low: torch.Tensor, high: torch.Tensor, scheme: TensorScheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """The full range shrunk towards its middle by the factor of least squared error.

    A geometric grid from 1 to 1/16, then a finer one around each row's best.
    """
    middle, half = (low + high) / 2, (high - low) / 2
    best = torch.ones_like(half)
    least = torch.full_like(half, float("inf"))
    coarse = torch.exp2(-torch.arange(17, dtype=torch.float64) / 4)
    fine = torch.exp2(torch.arange(-7, 8, dtype=torch.float64) / 32)
    for steps in (coarse, fine):
        around = best.clone()
        for step in steps:
            factor = (around * step).clamp(max=1)
            scales = TensorScales.from_range(
                (middle - half * factor)[:, None], (middle + half * factor)[:, None], scheme
            )
            error = expected_error(rows.sketch, rows.minimum, rows.maximum, scales, scheme).squared
            better = error < least
            best, least = torch.where(better, factor, best), torch.where(better, error, least)
    return middle - half * best, middle + half * best
