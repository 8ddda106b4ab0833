"""May a fine-tune keep the base's scales? Both are solved, and the difference is weighed.

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
from kvquant.scheme import QuantScheme

from .cost import HeadCost, head_costs
from .method import RangeMethod
from .solve import solve
from .stats import CalibrationStats, ChannelStats
from .wording import model_title, percent


@dataclass(frozen=True)
class DriftThresholds:
    """Where "safe" ends; any single head beyond either limit means "recalibrate".

    Limits hold per head and are never averaged over heads: a ruined head is lost, however well the
    others do. Within a head a few stray values decide nothing (see `calib.cost.RAREST`): what is
    alone of its kind in a text, such as an attention sink, counts from nine texts on.

    3 dB is twice the noise, half a bit, and about twice the KL divergence, which grows with the
    noise while it is small. Measured in the worst head of SmolLM2: scales of the base on prose cost
    a mild LoRA adapter on Python source 0.3 dB with fp8 per tensor, 1.4 dB with int8 per tensor,
    10 dB with int8 per channel (nearly all of it the text's: on one text the adapter costs 0.8 dB);
    the largest rotary pair of keys times 4 costs fp8 26 dB. 1 % of a head's values is a channel in
    64 that saturates two times in three; other text or a mild adapter clip at most 0.6 %.

    Attributes:
        max_clipped: Share of a head's values that the base's range clips and the fine-tune's own
            does not.
        max_loss_db: SQNR that a head loses, in dB.

    Raises:
        InputError: A share outside 0 to 1, or a negative loss.
    """

    max_clipped: float = 0.01
    max_loss_db: float = 3.0

    def __post_init__(self) -> None:
        """Refuses limits without a meaning, NaN among them."""
        if not 0 <= self.max_clipped <= 1:
            raise InputError(f"the clipped share must be from 0 to 1, not {self.max_clipped}")
        if not self.max_loss_db >= 0:
            raise InputError(f"the SQNR loss must be 0 dB or more, not {self.max_loss_db}")


@dataclass(frozen=True)
class HeadDrift(HeadCost):
    """How one KV head moved, and what the base's scales cost it.

    Attributes:
        amax_base: Largest magnitude in the base.
        amax_tuned: Largest magnitude in the fine-tune.
        amax_ratio: Tuned by base; infinite where the base was zero throughout.
        mean_shift: Distance between the two mean vectors by the head's rms, of the larger one
            (before rotation where both know it).
        worst_channel: Channel whose amax grew most.
        worst_channel_ratio: Its ratio, tuned by base.
    """

    amax_base: float
    amax_tuned: float
    amax_ratio: float
    mean_shift: float
    worst_channel: int
    worst_channel_ratio: float

    def severity(self, limits: DriftThresholds) -> float:
        """How close the head is to a limit: above 1 it is beyond one of them."""
        return max(
            _by_limit(self.extra_clipped, limits.max_clipped),
            _by_limit(self.loss_db, limits.max_loss_db),
        )


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
        """One line for each limit that heads are beyond; if safe, how far the worst stays away."""
        limits, count = self.thresholds, len(self.heads)
        loss = max(self.heads, key=lambda head: head.loss_db)
        clipped = max(self.heads, key=lambda head: head.extra_clipped)
        most = f"{loss.loss_db:.1f} dB", percent(clipped.extra_clipped)
        limit = f"{limits.max_loss_db:g} dB", percent(limits.max_clipped)
        if self.safe:
            return (
                f"the worst of {count} heads loses {most[0]} of SQNR (limit {limit[0]}), and at "
                f"most {most[1]} of a head's values are clipped (limit {limit[1]})",
            )
        lossy = sum(head.loss_db > limits.max_loss_db for head in self.heads)
        clipping = sum(head.extra_clipped > limits.max_clipped for head in self.heads)
        lines = (
            f"more than {limit[0]} of SQNR lost in {lossy} of {count} heads; most, {most[0]}, "
            f"in {loss}",
            f"more than {limit[1]} of values clipped in {clipping} of {count} heads; most, "
            f"{most[1]}, in {clipped}",
        )
        return tuple(line for line, many in zip(lines, (lossy, clipping), strict=True) if many)

    def worst_first(self) -> list[HeadDrift]:
        """All heads, the closest to a limit first."""
        return sorted(self.heads, key=lambda head: -head.severity(self.thresholds))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; what is infinite is None."""
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
        InputError: They cover different layers, or the scheme leaves none to compare.
        NotObservedError: A layer that the scheme quantizes was not recorded.
        SchemeError: A skipped layer that the model does not have, or nothing left.
    """
    _check_comparable(base, tuned, scheme)
    base_scales, own_scales = solve(base, scheme, method), solve(tuned, scheme, method)
    costs = head_costs(tuned, base_scales, own_scales)
    return DriftReport(
        heads=tuple(_head_drift(cost, base, tuned) for cost in costs),
        scheme=scheme,
        method=own_scales.method,
        thresholds=thresholds or DriftThresholds(),
        base=model_title(base.provenance),
        tuned=model_title(tuned.provenance),
        notes=tuple(_notes(base.provenance, tuned.provenance)),
    )


def _check_comparable(base: CalibrationStats, tuned: CalibrationStats, scheme: QuantScheme) -> None:
    # How far either may read is no part of what a scale must fit.
    if replace(base.geometry, max_positions=tuned.geometry.max_positions) != tuned.geometry:
        raise FingerprintError(
            f"the base has a {base.geometry.summary()}; the fine-tune a "
            f"{tuned.geometry.summary()}: scales of one cannot serve the other"
        )
    if _is_swapped(base.provenance, tuned.provenance):
        raise InputError(
            f"the base has adapters ({base.provenance.origin}) that the fine-tune "
            f"({tuned.provenance.origin}) lacks: are the two files swapped? It is BASE FINE-TUNE"
        )
    different = (base.layers.keys() ^ tuned.layers.keys()) - scheme.skip_layers
    if different:
        raise InputError(
            f"layers {sorted(different)} were recorded on one side only: skip them "
            "(--skip-layers), or calibrate both models alike"
        )


def _head_drift(cost: HeadCost, base: CalibrationStats, tuned: CalibrationStats) -> HeadDrift:
    before: ChannelStats = getattr(base.layers[cost.layer], cost.slot)
    after: ChannelStats = getattr(tuned.layers[cost.layer], cost.slot)
    amax_base, amax_tuned = before.amax[cost.head], after.amax[cost.head]
    ratios = _ratio(amax_tuned, amax_base)
    return HeadDrift(
        **asdict(cost),
        amax_base=float(amax_base.max()),
        amax_tuned=float(amax_tuned.max()),
        amax_ratio=float(_ratio(amax_tuned.max(), amax_base.max())),
        mean_shift=_mean_shift(before, after, cost.head),
        worst_channel=int(ratios.argmax()),
        worst_channel_ratio=float(ratios.max()),
    )


def _ratio(tuned: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Tuned by base; nothing by nothing is 1, something by nothing infinite."""
    return torch.where(tuned == base, 1.0, tuned / base)


def _mean_shift(base: ChannelStats, tuned: ChannelStats, head: int) -> float:
    """Distance between a head's means by the larger rms; 0 between zeros."""
    before, after = base.mean_unrotated, tuned.mean_unrotated
    if before is None or after is None:
        before, after = base.mean, tuned.mean
    distance = float((after - before)[head].norm())
    energy = max(float(side.mean_square[head].sum()) for side in (base, tuned))
    return distance / math.sqrt(energy) if energy else 0.0


def _is_swapped(base: Provenance, tuned: Provenance) -> bool:
    """Whether what should be the fine-tune is the bare model under the base's adapters."""
    return any(
        own.weights and own.weights == bare.weights and own.adapters and not bare.adapters
        for own in base.fingerprints
        for bare in tuned.fingerprints
    )


def _notes(base: Provenance, tuned: Provenance) -> Iterator[str]:
    """What makes the comparison say less than it seems to."""
    if any(
        one.weights and not one.differences(other)
        for one in base.fingerprints
        for other in tuned.fingerprints
    ):
        yield (
            f"both sides are the same model ({base.fingerprints[0]}): only their text and its "
            "length can differ"
        )
    if [c.get("sha256") for c in base.corpora] != [c.get("sha256") for c in tuned.corpora]:
        yield (
            "the two sides read different text, which moves ranges too: calibrate both on the "
            "fine-tune's text to see what the weights alone do"
        )
    fewer, more = sorted((base.tokens, tuned.tokens))
    if more > 2 * fewer:
        yield (
            f"the base was measured on {base.tokens:,} tokens, the fine-tune on "
            f"{tuned.tokens:,}: extremes grow with the number of tokens"
        )


def _by_limit(value: float, limit: float) -> float:
    if limit > 0:
        return value / limit
    return math.inf if value > 0 else 0.0


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
