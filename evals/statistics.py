"""How sure one can be of what was measured.

Tokens of a document have its subject and style in common, so documents are what is drawn anew
in a bootstrap, and tokens are never taken for independent. Needles are independent prompts.

    means, slope      bootstrap over documents                  `divergence`
    shares            Wilson, for as many tokens as count       `wilson`, `effective_trials`
    lost answers      exact binomial bound, exact McNemar       `loss_rate_upper`, `mcnemar_exact`
    many tests        Holm                                      `holm`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
from scipy import stats

from .results import Bucket, Cell, Divergence, Interval, Losses
from .windows import buckets

Array = npt.NDArray[np.float64]

Z = float(stats.norm.ppf(0.975))
"""Standard errors from the middle to an end of a 95 % interval."""

CONFIDENT = 0.5
"""Probability of the likeliest next token beyond which a prediction is called confident."""

_POWER = float(stats.norm.ppf(0.8))
_DRAWS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Scores:
    """What one arm made of the scored tokens; all arrays are `[tokens]`.

    Attributes:
        document: Number of the document that the token is in.
        past: Tokens in the cache when it was predicted, 1 or more.
        nll_reference: Negative log-likelihood with the unquantized cache, nats.
        nll: The same with the arm.
        kl: KL(unquantized || arm), nats.
        agrees: Whether both find the same token likeliest.
        confidence: Probability of the likeliest token with the unquantized cache.
    """

    document: npt.NDArray[np.integer]
    past: npt.NDArray[np.integer]
    nll_reference: npt.NDArray[np.floating]
    nll: npt.NDArray[np.floating]
    kl: npt.NDArray[np.floating]
    agrees: npt.NDArray[np.bool_]
    confidence: npt.NDArray[np.floating]

    def __post_init__(self) -> None:
        """A missing token would shift all that follow."""
        shapes = {getattr(self, field.name).shape for field in fields(self)}
        assert len(shapes) == 1 and len(next(iter(shapes))) == 1, f"shapes differ: {shapes}"

    @classmethod
    def join(cls, parts: Sequence[Scores]) -> Scores:
        """All tokens of several, in order."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def divergence(scores: Scores, *, resamples: int = 10_000, seed: int) -> Divergence:
    """How far an arm takes the model's predictions; docs/evaluation.md defines every number.

    Intervals of a single document are NaN at both ends, as are those of numbers that are not
    finite.

    Args:
        scores: Of at least one token.
        resamples: Draws of the bootstrap.
        seed: Of the bootstrap.
    """
    assert scores.kl.size, "nothing was scored"
    _, document = np.unique(scores.document, return_inverse=True)
    nll, nll_reference, kl = (
        np.asarray(it, np.float64) for it in (scores.nll, scores.nll_reference, scores.kl)
    )
    found = _buckets(scores.past, kl)
    tokens = np.bincount(document).astype(np.float64)
    # An arm that yields NaN or infinity gets intervals of NaN, which is not worth a warning.
    with np.errstate(all="ignore"):
        covariance, variance = _within_documents(document, np.log2(scores.past), kl)
        delta_ln_ppl, kl_mean, slope = _bootstrap(
            np.stack([_sums(document, nll - nll_reference), _sums(document, kl), covariance], 1),
            np.stack([tokens, tokens, variance], 1),
            resamples,
            seed,
        )
        kl_median, kl_p99 = (float(it) for it in np.quantile(kl, (0.5, 0.99)))
        delta_p = np.exp(-nll) - np.exp(-nll_reference)
    confident = scores.confidence > CONFIDENT
    return Divergence(
        nll=float(nll.mean()),
        delta_ln_ppl=delta_ln_ppl,
        kl_mean=_non_negative(kl_mean),
        kl_median=kl_median,
        kl_p99=kl_p99,
        kl_max=float(kl.max()),
        buckets=found,
        kl_slope=slope if len(found) > 1 and variance.any() else None,
        top1=_share(document, scores.agrees),
        top1_confident=(
            _share(document[confident], scores.agrees[confident]) if confident.any() else None
        ),
        confident_tokens=int(confident.sum()),
        delta_p_rms=float(np.sqrt(np.square(delta_p).mean())),
    )


def _sums(document: npt.NDArray[np.intp], values: npt.NDArray[np.generic]) -> Array:
    """Sum of each document's values."""
    return np.bincount(document, weights=values).astype(np.float64)


def _buckets(past: npt.NDArray[np.integer], kl: Array) -> tuple[Bucket, ...]:
    found = []
    for start, stop in buckets(np.unique(past).tolist()):
        inside = (past >= start) & (past < stop)
        found.append(Bucket(start, stop, int(inside.sum()), float(kl[inside].mean())))
    return tuple(found)


def _within_documents(document: npt.NDArray[np.intp], x: Array, y: Array) -> tuple[Array, Array]:
    """Numerator and denominator of each document's least squares slope of y on x.

    Their sums' ratio is the common slope of documents that each have a level of their own: long
    documents that are hard throughout are no growth with length.
    """
    tokens = np.bincount(document)
    centered = x - (_sums(document, x) / tokens)[document]
    # A document whose tokens all have the same past says nothing, but for its rounding errors.
    centered[np.abs(centered) < 1e-9] = 0.0
    return _sums(document, centered * y), _sums(document, centered**2)


def _bootstrap(
    numerators: Array, denominators: Array, resamples: int, seed: int
) -> tuple[Interval, ...]:
    """Ratios of sums over documents, with what they would have been of other documents.

    Documents are drawn with replacement, as many as there are; all ratios see the same draws.

    Args:
        numerators: `[documents, ratios]`.
        denominators: The same shape; 0 where a document says nothing.
        resamples: Draws.
        seed: Of the draws.
    """
    documents, ratios = numerators.shape
    generator = np.random.default_rng(seed)
    draws = np.empty((resamples, ratios))
    step = max(1, _DRAWS_AT_ONCE // documents)
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        weights = generator.multinomial(documents, np.full(documents, 1 / documents), rows)
        counts = weights.astype(np.float64)
        draws[start : start + rows] = (counts @ numerators) / (counts @ denominators)
    values = numerators.sum(0) / denominators.sum(0)
    telling = np.count_nonzero(denominators, axis=0)
    return tuple(_interval(float(values[i]), draws[:, i], int(telling[i])) for i in range(ratios))


def _interval(value: float, draws: Array, documents: int) -> Interval:
    """Middle 95 % of the draws, wider where documents are few.

    A bootstrap of n documents is too narrow by sqrt((n-1)/n), and knows nothing of how uncertain
    its own width is, which for means is Student's t instead of the normal distribution (Hesterberg,
    "What Teachers Should Know About the Bootstrap", arXiv 1411.5279).
    """
    if documents < 2 or not math.isfinite(value):
        return Interval(value, math.nan, math.nan)
    low, high = np.nanquantile(draws, (0.025, 0.975))
    student = float(stats.t.ppf(0.975, documents - 1))
    wider = student / Z * math.sqrt(documents / (documents - 1))
    # Draws of equal documents differ from their mean by rounding.
    below, above = max(0.0, value - float(low)), max(0.0, float(high) - value)
    return Interval(value, value - wider * below, value + wider * above)


def _non_negative(interval: Interval) -> Interval:
    """A KL divergence is not negative, so neither is what it may have been, but for rounding."""
    if math.isnan(interval.low):
        return interval
    return Interval(interval.value, min(interval.value, max(0.0, interval.low)), interval.high)


def _share(document: npt.NDArray[np.intp], hits: npt.NDArray[np.bool_]) -> Interval:
    _, document = np.unique(document, return_inverse=True)
    tokens = np.bincount(document).astype(np.float64)
    trials = effective_trials(_sums(document, hits), tokens)
    return wilson(float(hits.mean()) * trials, trials)


def effective_trials(successes: Array, trials: Array) -> float:
    """How many independent trials tell as much of a share as these, which come in documents.

    Their number by the design effect: the variance of the share between documents, by that of
    independent trials; never below 1. (Kish, Survey Sampling, 1965; with Wilson's interval in
    Dean and Pagano, J. Surv. Stat. Methodol. 3, 2015.)

    Args:
        successes: `[documents]`.
        trials: `[documents]`, 1 or more each.
    """
    documents, total = len(trials), float(trials.sum())
    share = float(successes.sum()) / total
    independent = share * (1 - share) / total
    if documents < 2 or independent == 0:
        return total
    apart = np.square(successes - share * trials).sum() / total**2 * documents / (documents - 1)
    return total / max(1.0, float(apart) / independent)


def wilson(successes: float, trials: float) -> Interval:
    """A share with Wilson's score interval; 0 to 1 where nothing was tried."""
    if trials == 0:
        return Interval(math.nan, 0.0, 1.0)
    share = successes / trials
    middle = (share + Z**2 / (2 * trials)) / (1 + Z**2 / trials)
    spread = math.sqrt(share * (1 - share) / trials + (Z / (2 * trials)) ** 2)
    half = Z * spread / (1 + Z**2 / trials)
    return Interval(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def detectable(interval: Interval) -> float:
    """The smallest difference that such documents show four times in five.

    Shown is a difference whose 95 % interval is clear of zero: at (1.96 + 0.84) standard errors
    that has a probability of 80 %. NaN without an interval.
    """
    return (Z + _POWER) / Z * (interval.high - interval.low) / 2


def mcnemar_exact(losses: int, gains: int) -> float:
    """Probability of that many losses or more if each change were as likely a gain as a loss."""
    return float(stats.binom.sf(losses - 1, losses + gains, 0.5))


def loss_rate_upper(losses: int, trials: int) -> float:
    """Upper 95 % bound on a rate of which `losses` in `trials` were seen (Clopper and Pearson).

    With no loss it is close to 3 / trials, the rule of three. 1 where nothing was tried.
    """
    if losses >= trials:
        return 1.0
    return float(stats.beta.ppf(0.95, losses + 1, trials - losses))


def trials_needed(rate: float, losses: int = 0) -> int:
    """Fewest trials after which `losses` losses show that the rate is no higher than `rate`.

        >>> [trials_needed(rate) for rate in (0.05, 0.02, 0.01)], trials_needed(0.05, losses=1)
        ([59, 149, 299], 93)

    Args:
        rate: Above 0 and below 1.
        losses: Seen, or expected.
    """
    # The bound is below the rate exactly if the rate makes so few losses unlikely.
    fails, shows = losses, losses + 1
    while stats.binom.cdf(losses, shows, rate) > 0.05:
        fails, shows = shows, 2 * shows
    while shows - fails > 1:
        middle = (fails + shows) // 2
        if stats.binom.cdf(losses, middle, rate) > 0.05:
            fails = middle
        else:
            shows = middle
    return shows


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Each p-value as it counts among all of them, in the same order (Holm, 1979).

    Calling significant what is then below 5 % raises any false alarm in at most 5 % of runs,
    however the tests depend on each other.
    """
    adjusted = [1.0] * len(p_values)
    least = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = least
    return tuple(adjusted)


def losses(cells: Iterable[Cell]) -> tuple[Losses, ...]:
    """Lost and gained answers of each arm, by task and length; lengths ascend.

    Arms and tasks come as they first appear. A cell counts for the arms that have answered it.
    """
    groups: dict[str, dict[tuple[str, int], list[tuple[bool, bool]]]] = {}
    for cell in cells:
        for arm, answer in cell.arms.items():
            pairs = groups.setdefault(arm, {}).setdefault((cell.task, cell.length), [])
            pairs.append((cell.reference.is_right, answer.is_right))
    return tuple(
        _losses(arm, task, length, pairs)
        for arm, by_cell in groups.items()
        for (task, length), pairs in _ordered(by_cell)
    )


def _ordered(
    by_cell: dict[tuple[str, int], list[tuple[bool, bool]]],
) -> list[tuple[tuple[str, int], list[tuple[bool, bool]]]]:
    tasks = list(dict.fromkeys(task for task, _ in by_cell))
    return sorted(by_cell.items(), key=lambda item: (tasks.index(item[0][0]), item[0][1]))


def _losses(arm: str, task: str, length: int, pairs: list[tuple[bool, bool]]) -> Losses:
    trials = sum(reference for reference, _ in pairs)
    lost = sum(reference and not answer for reference, answer in pairs)
    gained = sum(answer and not reference for reference, answer in pairs)
    return Losses(
        arm=arm,
        task=task,
        length=length,
        cells=len(pairs),
        trials=trials,
        losses=lost,
        gains=gained,
        loss_rate_upper=loss_rate_upper(lost, trials),
        p_value=mcnemar_exact(lost, gained),
    )
