"""May a fine-tune keep the base's scales? Both are solved, and the difference is weighed.

Per layer, slot and KV head the fine-tune's own values (its sketch) are quantized twice on paper:
with the scales solved for the base, and with those solved for itself. What the first loses against
the second is the price of keeping the base's scales; no model has to run for it.

The verdict is about one scheme. FP8 forgives a lot, since its error is relative until values leave
the range; a static integer grid does not: too narrow it clips, too wide it wastes steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from kvquant.errors import FingerprintError, InputError
from kvquant.provenance import Provenance
from kvquant.scales import TensorScales
from kvquant.scheme import QuantScheme, TensorScheme

from .error import QuantError, expected_error
from .solve import RangeMethod, solve
from .stats import CalibrationStats, ChannelStats

SLOTS = ("key", "value")
SQNR_CEILING_DB = 56.0
"""What rounding to bfloat16 leaves: an error of 2^-7 / sqrt(12) of the leading power of two."""


@dataclass(frozen=True)
class DriftThresholds:
    """Where "safe" ends; any single head beyond either limit means "recalibrate".

    Limits hold per head and are never averaged over heads: attention of a ruined head is lost,
    however well the others do. Within a head all values count together, so that a stray value,
    one in 2,048 tokens of 64 channels being a share of 8e-6, decides nothing.

    Attributes:
        max_clipped: Share of a head's values that the base's range clips and the fine-tune's own
            does not.
        max_loss_db: SQNR that a head loses, in dB.

    Raises:
        InputError: A share outside 0 to 1, or a negative loss.
    """

    max_clipped: float = 1e-3
    max_loss_db: float = 3.0

    def __post_init__(self) -> None:
        """Refuses limits without a meaning, NaN among them."""
        if not 0 <= self.max_clipped <= 1:
            raise InputError(f"the clipped share must be from 0 to 1, not {self.max_clipped}")
        if not self.max_loss_db >= 0:
            raise InputError(f"the SQNR loss must be 0 dB or more, not {self.max_loss_db}")


@dataclass(frozen=True)
class HeadDrift:
    """How one KV head moved, and what the base's scales do to it.

    Attributes:
        layer: Layer index.
        slot: ``key`` or ``value`` (of a latent layer: the latent and the rotary part).
        head: KV head.
        amax_base: Largest magnitude in the base.
        amax_tuned: Largest magnitude in the fine-tune.
        amax_ratio: Tuned by base; infinite where the base was zero throughout.
        clipped: Share of the fine-tune's values beyond the range of the base's scales.
        clipped_own: The same for the fine-tune's own scales: 0 with ``amax``, intended with others.
        sqnr_base_db: 10 log10(sum of squares / sum of squared errors) under the base's scales.
        sqnr_own_db: The same under the fine-tune's own scales.
        loss_db: The latter less the former, each counted up to `SQNR_CEILING_DB`: an error below
            that of a bfloat16 cache is none.
        mean_shift: Distance between the two mean vectors by the head's rms, of the larger one
            (before rotation where both know it).
        worst_channel: Channel with the largest ratio of amax.
        worst_channel_ratio: That ratio.
    """

    layer: int
    slot: str
    head: int
    amax_base: float
    amax_tuned: float
    amax_ratio: float
    clipped: float
    clipped_own: float
    sqnr_base_db: float
    sqnr_own_db: float
    loss_db: float
    mean_shift: float
    worst_channel: int
    worst_channel_ratio: float

    @property
    def extra_clipped(self) -> float:
        """Share of values clipped by the base's range beyond what the own range clips."""
        return max(0.0, self.clipped - self.clipped_own)

    def severity(self, limits: DriftThresholds) -> float:
        """How close the head is to a limit: above 1 it is beyond one of them."""
        return max(
            _by_limit(self.extra_clipped, limits.max_clipped),
            _by_limit(self.loss_db, limits.max_loss_db),
        )

    def __str__(self) -> str:
        """For messages: ``layer 10, keys, head 0``."""
        return f"layer {self.layer}, {self.slot}s, head {self.head}"


@dataclass(frozen=True)
class DriftReport:
    """The answer, and what it rests on.

    Attributes:
        heads: Every head of every quantized layer, by layer, slot and head.
        scheme: What the cache is to be quantized to.
        method: How ranges were chosen, for people.
        thresholds: Where "safe" ends.
        base: Model and adapters that the scales in question were measured on.
        tuned: Model and adapters that are to use them.
        notes: What a reader should know before believing it.
    """

    heads: tuple[HeadDrift, ...]
    scheme: QuantScheme
    method: str
    thresholds: DriftThresholds = field(default_factory=DriftThresholds)
    base: str = ""
    tuned: str = ""
    notes: tuple[str, ...] = ()

    @property
    def failing(self) -> list[HeadDrift]:
        """Heads beyond a limit, worst first."""
        return [head for head in self.worst_first() if head.severity(self.thresholds) > 1]

    @property
    def safe(self) -> bool:
        """Whether the fine-tune may keep the base's scales."""
        return not self.failing

    @property
    def reasons(self) -> tuple[str, ...]:
        """One line for each limit that heads are beyond, or what the worst head does within it."""
        limits = self.thresholds
        loss = max(self.heads, key=lambda head: head.loss_db)
        clipped = max(self.heads, key=lambda head: head.extra_clipped)
        lost, clips = self._beyond(limits.max_loss_db, limits.max_clipped)
        count = len(self.heads)
        lines = []
        if lost or not clips:
            lines.append(
                f"{lost} of {count} heads lose more than {limits.max_loss_db:g} dB of SQNR; most: "
                f"{loss.loss_db:.1f} dB, {loss}"
            )
        if clips or not lost:
            lines.append(
                f"{clips} of {count} heads have more than {limits.max_clipped:.3%} of their "
                f"values clipped; most: {clipped.extra_clipped:.3%}, {clipped}"
            )
        return tuple(lines)

    def worst_first(self) -> list[HeadDrift]:
        """All heads, the closest to a limit first."""
        return sorted(self.heads, key=lambda head: -head.severity(self.thresholds))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; what is infinite or undefined is None."""
        return {
            "safe": self.safe,
            "verdict": "safe" if self.safe else "recalibrate",
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "base": self.base,
            "tuned": self.tuned,
            "scheme": self.scheme.to_dict(),
            "method": self.method,
            "thresholds": asdict(self.thresholds),
            "heads": [_finite(asdict(head)) for head in self.heads],
        }

    def _beyond(self, loss_db: float, share: float) -> tuple[int, int]:
        return (
            sum(head.loss_db > loss_db for head in self.heads),
            sum(head.extra_clipped > share for head in self.heads),
        )


def drift(
    base: CalibrationStats,
    tuned: CalibrationStats,
    scheme: QuantScheme,
    method: RangeMethod | None = None,
    thresholds: DriftThresholds | None = None,
) -> DriftReport:
    """Weighs what `tuned` pays for the scales of `base`.

    Args:
        base: Statistics of the model whose scales there are.
        tuned: Statistics of the fine-tune: an adapter on the base, or other weights altogether.
        scheme: What the cache is quantized to.
        method: How ranges are chosen, by default as `solve` does.
        thresholds: Where "safe" ends.

    Raises:
        FingerprintError: The two have caches of different geometry.
        InputError: They cover different layers, or none.
        NotObservedError: A layer that the scheme quantizes was not recorded.
        SchemeError: A skipped layer that the model does not have.
    """
    _check_comparable(base, tuned, scheme)
    base_scales, own_scales = solve(base, scheme, method), solve(tuned, scheme, method)
    heads = [
        head
        for index in sorted(own_scales.layers)
        for slot in SLOTS
        for head in _head_drifts(
            index,
            slot,
            (getattr(base.layers[index], slot), getattr(tuned.layers[index], slot)),
            (getattr(base_scales.layers[index], slot), getattr(own_scales.layers[index], slot)),
            getattr(scheme, slot),
        )
    ]
    if not heads:
        raise InputError("the scheme skips every layer: there is nothing to compare")
    return DriftReport(
        heads=tuple(heads),
        scheme=scheme,
        method=own_scales.method,
        thresholds=thresholds or DriftThresholds(),
        base=_label(base.provenance),
        tuned=_label(tuned.provenance),
        notes=tuple(_notes(base.provenance, tuned.provenance)),
    )


def _check_comparable(
    base: CalibrationStats, tuned: CalibrationStats, scheme: QuantScheme
) -> None:
    if base.geometry != tuned.geometry:
        raise FingerprintError(
            f"the base's cache is a {base.geometry.summary()}, the fine-tune's a "
            f"{tuned.geometry.summary()}: scales of one cannot serve the other"
        )
    different = (base.layers.keys() ^ tuned.layers.keys()) - scheme.skip_layers
    if different:
        raise InputError(
            f"layers {sorted(different)} were recorded on one side only: skip them "
            "(--skip-layers), or calibrate both models alike"
        )


def _head_drifts(
    layer: int,
    slot: str,
    stats: tuple[ChannelStats, ChannelStats],
    scales: tuple[TensorScales, TensorScales],
    scheme: TensorScheme,
) -> Iterator[HeadDrift]:
    """Drift of each head of one slot; pairs are ``(base, tuned)``."""
    base, tuned = stats
    under_base, under_own = (_head_error(tuned, side, scheme) for side in scales)
    energy = tuned.total_squares.sum(1)
    values = tuned.tokens * tuned.shape[1]
    sqnr_base, sqnr_own = _sqnr_db(energy, under_base), _sqnr_db(energy, under_own)
    amax_base, amax_tuned = base.amax.amax(1), tuned.amax.amax(1)
    ratio, channel_ratio = _ratio(amax_tuned, amax_base), _ratio(tuned.amax, base.amax)
    worst_ratio, worst = channel_ratio.max(1)
    shift = _mean_shift(base, tuned)
    for head in range(tuned.shape[0]):
        yield HeadDrift(
            layer=layer,
            slot=slot,
            head=head,
            amax_base=float(amax_base[head]),
            amax_tuned=float(amax_tuned[head]),
            amax_ratio=float(ratio[head]),
            clipped=float(under_base.clipped[head]) / values,
            clipped_own=float(under_own.clipped[head]) / values,
            sqnr_base_db=float(sqnr_base[head]),
            sqnr_own_db=float(sqnr_own[head]),
            loss_db=min(float(sqnr_own[head]), SQNR_CEILING_DB)
            - min(float(sqnr_base[head]), SQNR_CEILING_DB),
            mean_shift=float(shift[head]),
            worst_channel=int(worst[head]),
            worst_channel_ratio=float(worst_ratio[head]),
        )


def _head_error(stats: ChannelStats, scales: TensorScales, scheme: TensorScheme) -> QuantError:
    """Cost of quantizing each head of `stats` with `scales`, ``[kv_heads]``."""

    def per_channel(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.expand(stats.shape).reshape(-1, 1)

    rows = replace(
        scales,
        scale=per_channel(scales.scale),
        zero_point=None if scales.zero_point is None else per_channel(scales.zero_point),
    )
    share = C * 1.0/ max(1,stats.tokens) if C else 0.0
    sketch, low, high = _usual(stats, share)
    full = expected_error(
        stats.sketch, stats.minimum.flatten(), stats.maximum.flatten(), rows, scheme
    )
    error = replace(full, squared=expected_error(sketch, low, high, rows, scheme).squared)
    heads = (stats.shape[0], -1)
    return QuantError(error.squared.view(heads).sum(1), error.clipped.view(heads).sum(1))


import os
C=float(os.environ.get("CC","0"))
def _usual(stats, share):
    total = stats.sketch.counts.sum(1, keepdim=True).double()
    cumulative = torch.nn.functional.pad(stats.sketch.counts.cumsum(1, dtype=torch.float64), (1, 0))
    kept = torch.minimum(torch.maximum(cumulative, total * share), total * (1 - share)).diff(dim=1)
    low = torch.maximum(stats.sketch.quantile(share), stats.minimum.flatten().double())
    high = torch.minimum(stats.sketch.quantile(1 - share), stats.maximum.flatten().double())
    return replace(stats.sketch, counts=kept), low, high


def _sqnr_db(energy: torch.Tensor, error: QuantError) -> torch.Tensor:
    """Signal to quantization noise, float64 ``[kv_heads]``; without noise infinite."""
    infinite = torch.full_like(energy, math.inf)
    return 10 * torch.log10(torch.where(error.squared > 0, energy / error.squared, infinite))


def _ratio(tuned: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Tuned by base; nothing by nothing is 1, something by nothing infinite."""
    return torch.where(tuned == base, torch.ones_like(tuned), tuned / base)


def _mean_shift(base: ChannelStats, tuned: ChannelStats) -> torch.Tensor:
    """Distance between the means by the larger rms, float64 ``[kv_heads]``; 0 between zeros."""
    before, after = base.mean_unrotated, tuned.mean_unrotated
    if before is None or after is None:
        before, after = base.mean, tuned.mean
    rms = torch.maximum(base.mean_square.sum(1), tuned.mean_square.sum(1)).sqrt()
    distance = (after - before).square().sum(1).sqrt()
    return torch.where(rms > 0, distance / rms, 0.0)


def _notes(base: Provenance, tuned: Provenance) -> Iterator[str]:
    """What makes the comparison say less than it seems to."""
    if any(
        one.weights and not one.differences(other)
        for one in base.fingerprints
        for other in tuned.fingerprints
    ):
        yield (
            f"both sides are the same model ({base.fingerprints[0]}): "
            "only the text can differ, not the model"
        )
    if base.corpora != tuned.corpora:
        yield (
            "the two sides read different text: part of the drift may be the text's; "
            "calibrate the base on the fine-tune's text too to tell them apart"
        )
    fewer, more = sorted((base.tokens, tuned.tokens))
    if more > 2 * fewer:
        yield (
            f"the base was measured on {base.tokens:,} tokens, the fine-tune on "
            f"{tuned.tokens:,}: extremes grow with the number of tokens"
        )


def _label(provenance: Provenance) -> str:
    return " + ".join((provenance.model, *provenance.adapters))


def _by_limit(value: float, limit: float) -> float:
    if limit > 0:
        return value / limit
    return math.inf if value > 0 else 0.0


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
