"""What is scored, by hand: against forward passes of whole texts and float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from packaging.version import Version

from evals.arms import bind, parse_arms, prepare_arms
from evals.perplexity import compare_logits, score_document
from evals.reading import Reader
from evals.statistics import Scores
from evals.windows import Span, spans
from kvquant import QuantizedCache

IDS = torch.randint(3, 128, (50,), generator=torch.Generator().manual_seed(1)).numpy()
SCHEMES = ("none", "fp8", "int8", "int4", "int4-kivi", "int3")
OLD = Version(transformers.__version__) < Version("5.24")
"""Versions that cache DeepSeek V3.2 per head."""
FAMILIES = ("llama", "gemma2", "deepseek", "gpt_oss", "qwen3_next", "gpt2", "falcon_h1")


def score(
    model: Any,
    read: list[Span],
    *schemes: str,
    ids: Any = IDS,
    reference: Any = None,
    **options: Any,
) -> dict[str, Scores]:
    reader = Reader(model)
    arms = {name: made(model, name) for name in schemes}
    return score_document(reader, ids, read, reference or reader.reference(), arms, **options)


def made(model: Any, scheme: str) -> QuantizedCache:
    few = {"group_size": 4, "residual_length": 3} if scheme == "int4-kivi" else {}
    return QuantizedCache.from_model(model, scheme, **few)


def log_probabilities(model: Any, ids: Any) -> np.ndarray[Any, Any]:
    """Of the whole text in one call, without any cache, float64 ``[tokens, vocabulary]``."""
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None], use_cache=False).logits[0]
    return logits.double().log_softmax(-1).numpy()


def same(one: Scores, other: Scores) -> bool:
    """Bit for bit."""
    return all(
        np.array_equal(getattr(one, it.name), getattr(other, it.name)) for it in fields(Scores)
    )


# ------------------------------------------------------------------------- against whole texts


@pytest.mark.parametrize("block", [1, 3, 64])
def test_nll_is_that_of_one_forward_pass(tiny_once: Callable[..., Any], block: int) -> None:
    model, prefill = tiny_once("llama"), 8
    found = score(model, spans(len(IDS), prefill, block), "none")["none"]
    expected = log_probabilities(model, IDS)
    # Positions 8 to 48 predict tokens 9 to 49.
    by_hand = [-expected[place, IDS[place + 1]] for place in range(8, 49)]
    assert len(found.nll) == 41
    np.testing.assert_allclose(found.nll, by_hand, rtol=1e-5)
    np.testing.assert_allclose(found.nll_reference, by_hand, rtol=1e-5)
    np.testing.assert_allclose(found.confidence, np.exp(expected[8:49]).max(1), rtol=1e-5)
    assert found.agrees.all()
    assert float(found.kl.max()) < 1e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_nll_of_other_families(tiny_once: Callable[..., Any], name: str) -> None:
    model = tiny_once(name)
    found = score(model, spans(len(IDS), 8, 5), "none")["none"]
    expected = log_probabilities(model, IDS)
    by_hand = [-expected[place, IDS[place + 1]] for place in range(8, 49)]
    np.testing.assert_allclose(found.nll, by_hand, rtol=2e-5)
    np.testing.assert_allclose(found.nll_reference, by_hand, rtol=2e-5)


@pytest.mark.parametrize("block", [1, 7])
def test_nothing_is_shifted_by_one(tiny_once: Callable[..., Any], block: int) -> None:
    """huggingface/lighteval PR#1252. A model's own loss: mean over tokens 1 to 49."""
    model, ids = tiny_once("llama"), torch.from_numpy(IDS)[None]
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    first = -log_probabilities(model, IDS)[0, IDS[1]]
    found = score(model, spans(len(IDS), 1, block), "none")["none"]
    assert len(found.nll) == 48  # tokens 2 to 49
    assert float(found.nll.sum()) + first == pytest.approx(49 * loss, rel=1e-5)


def test_where_scores_belong(tiny_once: Callable[..., Any]) -> None:
    found = score(tiny_once("llama"), spans(15, 8, 3), "int8", ids=IDS[:15], document=4)["int8"]
    assert found.past.tolist() == [8, 8, 8, 11, 11, 11]
    assert found.document.tolist() == [4] * 6
    one = score(tiny_once("llama"), spans(15, 8, 1), "int8", ids=IDS[:15])["int8"]
    assert one.past.tolist() == [8, 9, 10, 11, 12, 13]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_kl_and_agreement_in_float64(tiny: Callable[..., Any], scheme: str) -> None:
    model, read = tiny("llama"), spans(len(IDS), 8, 41)
    with torch.no_grad():  # so that differences are far above float32's rounding
        model.lm_head.weight.mul_(30)
    reader, tokens = Reader(model), torch.from_numpy(IDS)[None]
    caches = reader.reference(), made(model, scheme)
    logits = []
    for cache in caches:
        reader.read(tokens[:, :8], cache)
        logits.append(reader.read(tokens[:, 8:49], cache)[0].double().log_softmax(-1))
    theirs, ours = logits
    kl = (theirs.exp() * (theirs - ours)).sum(-1).numpy()
    found = score(model, read, scheme)[scheme]
    assert float(kl.mean()) > 1e-5
    np.testing.assert_allclose(found.kl, kl, rtol=1e-3, atol=1e-6)
    assert found.agrees.tolist() == (theirs.argmax(-1) == ours.argmax(-1)).tolist()
    true = ours[range(41), IDS[9:50]]
    np.testing.assert_allclose(found.nll, -true.numpy(), rtol=1e-5, atol=1e-6)


def test_the_cache_is_read(tiny_once: Callable[..., Any]) -> None:
    """Fewer bits, more divergence; a single call over the text would give zero for all."""
    found = score(tiny_once("llama"), spans(len(IDS), 8, 8), *SCHEMES)
    kl = {name: float(it.kl.mean()) for name, it in found.items()}
    assert kl["none"] < kl["int8"] < kl["int4"] < kl["int3"]
    assert kl["int4"] > 5 * kl["int8"]


# -------------------------------------------------------------------------------- shared work


@pytest.mark.parametrize("name", [*FAMILIES, "deepseek_v32", "gemma3n_text", "llama4_text"])
def test_a_shared_prefill_is_that_of_each_arm_alone(
    tiny_once: Callable[..., Any], name: str
) -> None:
    """``chunk`` of the prefill's length: every arm reads it itself, in one call."""
    if name == "deepseek_v32" and OLD:
        pytest.skip("this version of Transformers caches DeepSeek V3.2 per head")
    model, read = tiny_once(name), spans(len(IDS), 30, 6)
    shared = score(model, read, *SCHEMES)
    alone = score(model, read, *SCHEMES, chunk=30)
    for scheme in SCHEMES:
        assert same(shared[scheme], alone[scheme]), scheme


def test_arms_do_not_touch_each_other(tiny_once: Callable[..., Any]) -> None:
    model, read = tiny_once("gemma2"), spans(len(IDS), 20, 6)
    together = score(model, read, *SCHEMES)
    for scheme in SCHEMES:
        assert same(together[scheme], score(model, read, scheme)[scheme])
    backwards = score(model, read, *reversed(SCHEMES))
    assert list(backwards) == list(reversed(SCHEMES))
    assert all(same(together[scheme], backwards[scheme]) for scheme in SCHEMES)


def test_transformers_caches_share_a_prefill_too(tiny_once: Callable[..., Any]) -> None:
    model, reader = tiny_once("llama"), Reader(tiny_once("llama"))
    (arm,) = prepare_arms(parse_arms(["hf:quanto"], []), reader.geometry)
    make = bind(arm, model, None).make
    read = spans(len(IDS), 32, 6)
    shared, alone = (
        score_document(reader, IDS, read, reader.reference(), {"": make()}, chunk=chunk)[""]
        for chunk in (None, 32)
    )
    assert same(shared, alone)
    assert float(shared.kl.mean()) > 1e-7


def test_a_prefill_in_pieces_reads_the_codes_of_earlier_ones(
    tiny_once: Callable[..., Any],
) -> None:
    model, read = tiny_once("llama"), spans(len(IDS), 32, 8)
    whole = score(model, read, "none", "int4")
    pieces = score(model, read, "none", "int4", chunk=8)
    np.testing.assert_allclose(whole["none"].nll, pieces["none"].nll, rtol=1e-5)
    assert float(pieces["none"].kl.max()) < 1e-6
    assert not np.array_equal(whole["int4"].kl, pieces["int4"].kl)
    # By more than rounding, which changes the reference as well.
    assert float(np.abs(whole["int4"].kl - pieces["int4"].kl).max()) > 1e-6
    np.testing.assert_allclose(whole["int4"].nll_reference, pieces["int4"].nll_reference, rtol=1e-5)


def test_who_is_told(tiny_once: Callable[..., Any]) -> None:
    read, told, blocks = spans(15, 8, 3), [], []
    score(
        tiny_once("llama"),
        read,
        "none",
        "int8",
        ids=IDS[:15],
        advance=told.append,
        before=blocks.append,
    )
    assert told == [3 * 8, 3, 3, 3, 3, 3, 3]  # three caches
    assert blocks == read[1:]


# --------------------------------------------------------------------------- impossible numbers


def compared(reference: Any, logits: Any, target: Any) -> dict[str, Any]:
    return compare_logits(torch.tensor(reference), torch.tensor(logits), torch.tensor(target))


def test_tokens_that_are_impossible_to_both() -> None:
    low = -float("inf")
    found = compared([[0.0, 1.0, low]], [[1.0, 0.0, low]], [0])
    p = np.exp([0.0, 1.0]) / np.exp([0.0, 1.0]).sum()
    assert found["kl"].tolist() == pytest.approx([float(p[1] - p[0])])
    assert found["nll_reference"].tolist() == pytest.approx([-np.log(p[0])])
    assert found["nll"].tolist() == pytest.approx([-np.log(p[1])])
    assert found["agrees"].tolist() == [False]
    assert found["confidence"].tolist() == pytest.approx([p[1]])


def test_what_only_one_of_them_calls_impossible() -> None:
    low = -float("inf")
    assert compared([[0.0, 0.0]], [[0.0, low]], [1])["kl"].tolist() == [np.inf]
    assert compared([[0.0, 0.0]], [[0.0, low]], [1])["nll"].tolist() == [np.inf]
    found = compared([[0.0, low]], [[0.0, 0.0]], [0])
    assert found["kl"].tolist() == pytest.approx([np.log(2)])


@pytest.mark.parametrize("broken", ["reference", "logits"])
def test_nan_stays_nan(broken: str) -> None:
    """A divergence of 0 from something that is no distribution would pass every gate."""
    values = {"reference": [[0.0, 1.0], [0.0, 1.0]], "logits": [[0.0, 1.0], [0.0, 1.0]]}
    values[broken][1][0] = float("nan")
    found = compared(values["reference"], values["logits"], [0, 1])
    assert np.isnan(found["kl"]).tolist() == [False, True]


def test_an_arm_of_nan_leaves_the_others_alone(tiny_once: Callable[..., Any]) -> None:
    model, read = tiny_once("llama"), spans(len(IDS), 20, 6)
    broken = made(model, "int8")
    update = broken.update

    def not_numbers(keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = update(keys, values, *args, **kwargs)
        return keys, values[:, :, :] * torch.nan

    broken.update = not_numbers  # type: ignore[method-assign]
    reader = Reader(model)
    arms = {"broken": broken, "int8": made(model, "int8")}
    found = score_document(reader, IDS, read, reader.reference(), arms)
    assert np.isnan(found["broken"].kl).all()
    assert np.isnan(found["broken"].nll).all()
    assert np.isfinite(found["broken"].nll_reference).all()
    assert same(found["int8"], score(model, read, "int8")["int8"])


def logits_of(rows: int, dtype: Any = np.float32) -> Any:
    numbers = st.floats(-30, 30, width=32)
    return arrays(dtype, (rows, 7), elements=numbers)


@settings(max_examples=60, deadline=None)
@given(logits_of(5), logits_of(5), st.lists(st.integers(0, 6), min_size=5, max_size=5))
def test_like_float64(reference: Any, logits: Any, target: list[int]) -> None:
    found = compared(reference, logits, target)

    def logs(values: Any) -> Any:
        wide = values.astype(np.float64)
        wide = wide - wide.max(1, keepdims=True)
        return wide - np.log(np.exp(wide).sum(1, keepdims=True))

    theirs, ours = logs(reference), logs(logits)
    np.testing.assert_allclose(found["nll"], -ours[range(5), target], atol=1e-5)
    np.testing.assert_allclose(found["nll_reference"], -theirs[range(5), target], atol=1e-5)
    kl = (np.exp(theirs) * (theirs - ours)).sum(1)
    np.testing.assert_allclose(found["kl"], kl, atol=2e-5, rtol=1e-5)
    assert (found["kl"] >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_logits_of_any_dtype_and_number(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    reference, logits = (torch.randn(rows, 9, generator=generator).to(dtype) for _ in range(2))
    target = torch.arange(rows) % 9
    found = compare_logits(reference, logits, target)
    each = [
        compare_logits(reference[i, None], logits[i, None], target[i, None]) for i in range(rows)
    ]
    for name, values in found.items():
        assert values.shape == (rows,)
        assert values.dtype == (bool if name == "agrees" else np.float32)
        np.testing.assert_array_equal(values, np.concatenate([it[name] for it in each]))
