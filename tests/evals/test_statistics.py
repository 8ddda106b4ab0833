"""Statistics against numbers worked out by hand, against SciPy, and against simulated truth."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from evals import statistics
from evals.results import Answer, Bucket, Cell, Divergence, Interval, Losses
from evals.statistics import (
    Scores,
    detectable,
    divergence,
    effective_trials,
    holm,
    loss_rate_upper,
    losses,
    mcnemar_exact,
    trials_needed,
    wilson,
)

NAN = math.nan


def scores(document: list[int], past: list[int], **given: Any) -> Scores:
    """Perfect agreement, but for what is given."""
    tokens = len(document)
    arrays = {
        "nll_reference": np.ones(tokens),
        "nll": np.ones(tokens),
        "kl": np.zeros(tokens),
        "agrees": np.ones(tokens, bool),
        "confidence": np.full(tokens, 0.9),
    }
    arrays |= {name: np.asarray(value) for name, value in given.items()}
    return Scores(np.array(document), np.array(past), **arrays)


def simulated(documents: int, seed: int, tokens: int = 40) -> Scores:
    """Documents that differ in how much they suffer."""
    chance = np.random.default_rng(seed)
    document = np.repeat(np.arange(documents), tokens)
    level = chance.lognormal(0.0, 0.5, documents)[document]
    kl = level * chance.exponential(0.01, documents * tokens)
    nll = chance.exponential(2.0, documents * tokens)
    return Scores(
        document,
        np.tile(np.repeat([64, 128, 256, 512], tokens // 4), documents),
        nll.astype(np.float32),
        (nll + chance.normal(0.002, 0.1, nll.shape) * level).astype(np.float32),
        kl.astype(np.float32),
        chance.random(kl.shape) > 2 * kl,
        chance.random(kl.shape).astype(np.float32),
    )


def close(interval: Interval | None, value: float, low: float, high: float) -> bool:
    assert interval is not None
    found = (interval.value, interval.low, interval.high)
    return found == pytest.approx((value, low, high), abs=5e-5, nan_ok=True)


# Divergence


def by_hand() -> Divergence:
    return divergence(
        scores(
            [0, 0, 1, 1],
            [4, 4, 4, 8],
            nll_reference=[1.0, 2.0, 3.0, 0.0],
            nll=[1.5, 2.0, 3.0, 0.5],
            kl=[0.1, 0.3, 0.2, 0.4],
            agrees=[True, False, True, True],
            confidence=[0.9, 0.4, 0.6, 0.5],
        ),
        seed=0,
    )


def test_numbers_by_hand() -> None:
    found = by_hand()
    assert found.nll == pytest.approx(1.75)
    assert found.kl_median == pytest.approx(0.25)
    assert found.kl_p99 == pytest.approx(0.397)
    assert found.kl_max == pytest.approx(0.4)
    assert found.buckets == (Bucket(4, 8, 3, pytest.approx(0.2)), Bucket(8, 16, 1, 0.4))
    assert found.confident_tokens == 2
    # Of e^-1.5 - e^-1, 0, 0 and e^-0.5 - 1.
    assert found.delta_p_rms == pytest.approx(0.209625, abs=1e-6)


def test_intervals_by_hand() -> None:
    found = by_hand()
    # Both documents lose 0.25 per token.
    assert close(found.delta_ln_ppl, 0.25, 0.25, 0.25)
    # Means of 0.2 and 0.3: two documents drawn have a mean of 0.2, 0.25 or 0.3, and Student's t of
    # one degree of freedom makes 0.05 on either side sqrt(2) x 12.706 / 1.96 = 9.168 times wider.
    assert close(found.kl_mean, 0.25, 0.0, 0.7084)
    # Only the second document spans two numbers of past tokens: 0.2 more after one doubling.
    assert close(found.kl_slope, 0.2, NAN, NAN)
    # 2 of 4 tokens disagree as if of 3 independent ones, see the test of `effective_trials`.
    assert close(found.top1, 0.75, wilson(2.25, 3).low, wilson(2.25, 3).high)
    assert close(found.top1_confident, 1.0, 2 / (2 + 1.959964**2), 1.0)


def test_documents_weigh_as_many_tokens_as_they_have() -> None:
    found = divergence(scores([0, 0, 0, 1], [4] * 4, kl=[0.1, 0.1, 0.1, 0.5]), seed=0)
    assert found.kl_mean.value == pytest.approx(0.2)
    # Both draws of the same document, and nothing of the other: 0.1 and 0.5.
    wider = 12.7062 / 1.959964 * math.sqrt(2)
    assert found.kl_mean.high == pytest.approx(0.2 + wider * 0.3, rel=1e-4)


def test_numbers_of_documents_need_not_count_up() -> None:
    one, other = simulated(4, 0), simulated(4, 0)
    other = dataclasses.replace(other, document=other.document * 1000 + 7)
    assert divergence(one, seed=1) == divergence(other, seed=1)


def test_single_document_has_no_interval() -> None:
    found = divergence(simulated(1, 0), seed=0)
    for interval in (found.delta_ln_ppl, found.kl_mean, found.kl_slope):
        assert interval is not None
        assert math.isfinite(interval.value)
        assert math.isnan(interval.low) and math.isnan(interval.high)
    assert 0.9 < found.top1.low < found.top1.value == found.top1.high == 1


def test_single_token() -> None:
    found = divergence(scores([0], [1], kl=[0.5], confidence=[0.5]), seed=0)
    assert found.kl_mean.value == found.kl_median == found.kl_p99 == found.kl_max == 0.5
    assert found.kl_slope is None
    assert found.top1_confident is None
    assert found.confident_tokens == 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_predictions_are_no_small_numbers(value: float) -> None:
    broken = simulated(4, 0)
    broken.kl[17] = broken.nll[17] = value
    found = divergence(broken, seed=0)
    for number in (found.nll, found.kl_mean.value, found.delta_ln_ppl.value, found.kl_max):
        assert not math.isfinite(number)
    assert math.isnan(found.kl_mean.high) and math.isnan(found.delta_ln_ppl.low)
    assert found.kl_slope is not None and not math.isfinite(found.kl_slope.value)
    assert math.isnan(found.kl_slope.low)


@pytest.mark.filterwarnings("error")
def test_predicting_a_token_as_impossible() -> None:
    found = divergence(scores([0, 1], [4, 4], nll=[math.inf, 1.0]), seed=0)
    assert found.delta_p_rms == pytest.approx(math.exp(-1) / math.sqrt(2))


# Slope


def test_slope_is_the_growth_per_doubling() -> None:
    past = [64, 128, 256, 512, 1024]
    found = divergence(
        scores([0] * 5 + [1] * 5, past * 2, kl=[0.01 + 0.003 * math.log2(it) for it in past] * 2),
        seed=0,
    )
    assert close(found.kl_slope, 0.003, 0.003, 0.003)


def test_documents_that_are_hard_throughout_are_no_growth() -> None:
    # The long documents have ten times the KL at every length.
    found = divergence(
        scores(
            [0, 0, 1, 1, 2, 2, 2, 3, 3, 3],
            [64, 128, 64, 128, 64, 128, 4096, 64, 128, 4096],
            kl=[0.01] * 4 + [0.1] * 6,
        ),
        seed=0,
    )
    assert close(found.kl_slope, 0.0, 0.0, 0.0)


def test_slope_needs_two_buckets() -> None:
    found = divergence(
        scores([0] * 3 + [1] * 3, [64, 100, 127] * 2, kl=[0.1, 0.2, 0.3] * 2), seed=0
    )
    assert found.kl_slope is None


def test_slope_needs_a_document_that_spans_two() -> None:
    # The mean of three times log2(65) is not log2(65).
    found = divergence(scores([0] * 3 + [1] * 3, [65] * 3 + [200] * 3, kl=[0.1, 0.2] * 3), seed=0)
    assert found.kl_slope is None


def test_slope_of_one_spanning_document_has_no_interval() -> None:
    kl = [0.1, 0.2, 0.1, 0.1, 0.1]
    found = divergence(scores([0, 0, 1, 2, 3], [64, 128, 64, 64, 64], kl=kl), seed=0)
    assert close(found.kl_slope, 0.1, NAN, NAN)


@pytest.mark.filterwarnings("error")
def test_draws_without_a_spanning_document_do_not_count() -> None:
    kl = [0.1, 0.2, 0.1, 0.4] + [0.1] * 6
    past = [64, 128, 64, 128] + [64] * 6
    found = divergence(scores([0, 0, 1, 1, *range(2, 8)], past, kl=kl), seed=0)
    # Slopes of 0.1 and 0.3, widened as for two documents.
    assert close(found.kl_slope, 0.2, 0.2 - 9.16807 * 0.1, 0.2 + 9.16807 * 0.1)


# Bootstrap


def test_same_seed_same_interval() -> None:
    assert divergence(simulated(8, 0), seed=3) == divergence(simulated(8, 0), seed=3)


def test_other_seed_other_interval() -> None:
    one, other = (divergence(simulated(8, 0), seed=seed).kl_mean for seed in (3, 4))
    assert one.value == other.value
    assert one.low != other.low
    assert one.low == pytest.approx(other.low, rel=0.05)


def test_memory_does_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = divergence(simulated(6, 0), resamples=500, seed=0)
    monkeypatch.setattr(statistics, "_DRAWS_AT_ONCE", 6 * 7)
    assert divergence(simulated(6, 0), resamples=500, seed=0) == at_once


def test_tokens_of_a_document_are_not_independent() -> None:
    """Each token counted ten times over makes nothing any surer."""
    once = simulated(8, 0)
    names = [field.name for field in dataclasses.fields(Scores)]
    often = Scores(*(np.repeat(getattr(once, name), 10) for name in names))
    one, ten = divergence(once, seed=0), divergence(often, seed=0)
    for name in ("delta_ln_ppl", "kl_mean", "kl_slope"):
        assert close(getattr(ten, name), *dataclasses.astuple(getattr(one, name)))
    assert ten.top1.high - ten.top1.low > 0.5 * (one.top1.high - one.top1.low)


def test_intervals_cover_the_truth() -> None:
    """Of 95 % intervals about 95 % do, at few documents and skewed numbers too."""
    truth = 0.01 * math.exp(0.5**2 / 2)
    for documents, at_least in ((3, 0.88), (8, 0.9), (24, 0.9)):
        covers = [
            interval.low <= truth <= interval.high
            for seed in range(150)
            for interval in [divergence(simulated(documents, seed), resamples=400, seed=0).kl_mean]
        ]
        assert at_least <= np.mean(covers) < 1


def test_kl_is_not_negative() -> None:
    found = divergence(scores([0, 1], [4, 4], kl=[0.0, 0.1]), seed=0)
    assert found.kl_mean.low == 0.0
    # But for rounding, which is shown as it is.
    found = divergence(scores([0, 1], [4, 4], kl=[-1e-9, -1e-9]), seed=0)
    assert found.kl_mean.low == found.kl_mean.value == pytest.approx(-1e-9)


@given(
    st.lists(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=5), min_size=2, max_size=6),
    st.integers(0, 2**32),
)
def test_estimates_lie_in_their_intervals(kl: list[list[float]], seed: int) -> None:
    document = [number for number, values in enumerate(kl) for _ in values]
    past = [64 << i for values in kl for i in range(len(values))]
    flat = [value for values in kl for value in values]
    found = divergence(scores(document, past, kl=flat, nll=flat), resamples=200, seed=seed)
    for interval in (found.kl_mean, found.delta_ln_ppl, found.top1):
        assert interval.low <= interval.value <= interval.high
    assert sum(bucket.tokens for bucket in found.buckets) == len(flat)
    total = math.fsum(bucket.tokens * bucket.kl_mean for bucket in found.buckets)
    assert total / len(flat) == pytest.approx(found.kl_mean.value, abs=1e-9)


# Scores


def test_joined_scores_are_those_of_all_documents() -> None:
    parts = [simulated(3, 0), simulated(2, 1)]
    parts[1] = dataclasses.replace(parts[1], document=parts[1].document + 3)
    joined = Scores.join(parts)
    assert joined.document.tolist() == [*parts[0].document, *parts[1].document]
    assert joined.kl.tolist() == [*parts[0].kl, *parts[1].kl]
    assert joined.agrees.dtype == bool and joined.nll.dtype == np.float32
    assert divergence(joined, seed=0).kl_max == max(part.kl.max() for part in parts)


def test_scores_are_of_the_same_tokens() -> None:
    with pytest.raises(AssertionError, match="shapes differ"):
        scores([0, 0], [4, 4], kl=[0.1])
    with pytest.raises(AssertionError, match="shapes differ"):
        scores([[0]], [[4]], **{name: [[1]] for name in ("nll_reference", "nll", "kl")})


def test_nothing_scored() -> None:
    with pytest.raises(AssertionError, match="nothing was scored"):
        divergence(scores([], []), seed=0)


# Shares


@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (1, 1), (7, 10), (0, 59), (995, 1000)])
def test_wilson_is_that_of_scipy(successes: int, trials: int) -> None:
    theirs = stats.binomtest(successes, trials).proportion_ci(0.95, "wilson")
    ours = wilson(successes, trials)
    assert ours.value == successes / trials
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_wilson_by_hand() -> None:
    # Newcombe, Stat. Med. 17, 1998, table I, method 3: 81 of 263 and 0 of 20.
    assert close(wilson(81, 263), 0.30798, 0.2553, 0.3662)
    assert close(wilson(0, 20), 0.0, 0.0, 0.1611)


def test_wilson_of_nothing() -> None:
    found = wilson(0, 0)
    assert math.isnan(found.value)
    assert (found.low, found.high) == (0.0, 1.0)


@given(st.integers(0, 500), st.integers(1, 500))
def test_wilson_stays_a_share(successes: int, more: int) -> None:
    trials = successes + more
    found = wilson(successes, trials)
    assert 0 <= found.low <= found.value <= found.high <= 1
    mirrored = wilson(more, trials)
    assert mirrored.low == pytest.approx(1 - found.high, abs=1e-12)


def test_documents_alike_count_token_by_token() -> None:
    assert effective_trials(np.array([9.0, 9.0, 9.0]), np.array([10.0, 10.0, 10.0])) == 30
    assert effective_trials(np.array([10.0, 10.0]), np.array([10.0, 10.0])) == 20
    assert effective_trials(np.array([9.0]), np.array([10.0])) == 10


def test_documents_all_right_or_all_wrong_count_as_one_trial_each() -> None:
    # Of 4 documents 3 are free once the share is known.
    found = effective_trials(np.array([10.0, 10.0, 0.0, 0.0]), np.full(4, 10.0))
    assert found == pytest.approx(3.0)


def test_effective_trials_by_hand() -> None:
    # Shares of 1/2 and 1, 0.75 in all: variance 2 x (0.5^2 + 0.5^2) / 4^2 by 0.75 x 0.25 / 4.
    assert effective_trials(np.array([1.0, 2.0]), np.array([2.0, 2.0])) == pytest.approx(3.0)


def test_detectable_is_2_8_standard_errors() -> None:
    assert detectable(Interval(0.0, -1.959964, 1.959964)) == pytest.approx(2.8016, abs=1e-4)
    assert math.isnan(detectable(Interval(0.0, NAN, NAN)))


# Lost answers


@pytest.mark.parametrize(
    ("rate", "lost", "trials"),
    [
        (0.05, 0, 59),
        (0.02, 0, 149),
        (0.01, 0, 299),
        (0.1, 0, 29),
        (0.05, 1, 93),
        (0.05, 2, 124),
        (0.05, 3, 153),
        (0.05, 4, 181),
        (0.5, 0, 5),
        (0.96, 0, 1),
        (0.99, 0, 1),
    ],
)
def test_trials_needed(rate: float, lost: int, trials: int) -> None:
    assert trials_needed(rate, lost) == trials


@given(st.floats(0.001, 0.9), st.integers(0, 20))
def test_trials_needed_are_the_fewest(rate: float, lost: int) -> None:
    trials = trials_needed(rate, lost)
    assert trials > lost
    assert loss_rate_upper(lost, trials) <= rate * (1 + 1e-9)
    assert loss_rate_upper(lost, trials - 1) > rate * (1 - 1e-9)


def test_rule_of_three() -> None:
    assert loss_rate_upper(0, 59) == pytest.approx(0.0495, abs=5e-5)
    assert loss_rate_upper(0, 59) < 0.05 < loss_rate_upper(0, 58)
    assert loss_rate_upper(0, 1000) == pytest.approx(3 / 1000, rel=0.01)
    assert loss_rate_upper(0, 1) == pytest.approx(0.95)


@pytest.mark.parametrize(("lost", "trials"), [(0, 7), (1, 7), (3, 100), (99, 100), (5, 5)])
def test_loss_rate_is_the_exact_bound_of_scipy(lost: int, trials: int) -> None:
    test = stats.binomtest(lost, trials, alternative="less")
    assert loss_rate_upper(lost, trials) == pytest.approx(test.proportion_ci(0.95, "exact").high)


def test_loss_rate_of_nothing() -> None:
    assert loss_rate_upper(0, 0) == 1.0


@pytest.mark.parametrize(
    ("lost", "gained", "p_value"),
    [
        (0, 0, 1.0),
        (0, 5, 1.0),
        (1, 0, 1 / 2),
        (5, 0, 1 / 32),
        (1, 1, 3 / 4),
        (8, 1, 10 / 512),
        (1, 8, 511 / 512),
    ],
)
def test_mcnemar(lost: int, gained: int, p_value: float) -> None:
    assert mcnemar_exact(lost, gained) == pytest.approx(p_value)
    if lost + gained:
        theirs = stats.binomtest(lost, lost + gained, 0.5, alternative="greater").pvalue
        assert mcnemar_exact(lost, gained) == pytest.approx(theirs)


# Many tests


def test_holm_by_hand() -> None:
    assert holm((0.01, 0.04, 0.03, 0.005)) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm((0.6, 0.9)) == (1.0, 1.0)
    assert holm((0.02,)) == (0.02,)
    assert holm((0.01, 0.01)) == (0.02, 0.02)
    assert holm(()) == ()


@given(st.lists(st.floats(0, 1), max_size=20), st.randoms())
def test_holm_is_between_no_correction_and_bonferroni(p_values: list[float], chance: Any) -> None:
    adjusted = holm(p_values)
    for before, after in zip(p_values, adjusted, strict=True):
        assert before <= after <= min(1.0, len(p_values) * before)
    if p_values:
        assert min(adjusted) == min(1.0, len(p_values) * min(p_values))
    # The order of tests is nobody's business.
    order = list(range(len(p_values)))
    chance.shuffle(order)
    assert holm([p_values[i] for i in order]) == tuple(adjusted[i] for i in order)


# Losses


def cell(task: str, length: int, reference: float, **arms: float) -> Cell:
    answers = {name: Answer("", score) for name, score in arms.items()}
    return Cell(task, length, 50, 0, ("7",), Answer("", reference), answers)


def test_losses_by_hand() -> None:
    found = losses(
        [
            cell("single", 1024, 1.0, int8=1.0, int4=0.0),
            cell("single", 1024, 1.0, int8=1.0, int4=0.5),
            cell("single", 1024, 0.0, int8=1.0, int4=0.0),
            cell("single", 512, 1.0, int8=1.0, int4=1.0),
            cell("multikey", 512, 0.75, int8=0.75, int4=0.0),
            cell("multikey", 512, 1.0, int8=0.0),
        ]
    )
    assert found == (
        Losses("int8", "single", 512, 1, 1, 0, 0, pytest.approx(0.95), 1.0),
        Losses("int8", "single", 1024, 3, 2, 0, 1, pytest.approx(1 - 0.05**0.5), 1.0),
        Losses("int8", "multikey", 512, 2, 1, 1, 0, 1.0, 0.5),
        Losses("int4", "single", 512, 1, 1, 0, 0, pytest.approx(0.95), 1.0),
        Losses("int4", "single", 1024, 3, 2, 2, 0, 1.0, 0.25),
        # The reference fails the only cell that int4 has answered: nothing can be lost.
        Losses("int4", "multikey", 512, 1, 0, 0, 0, 1.0, 1.0),
    )


def test_no_cells_no_losses() -> None:
    assert losses([]) == ()
