"""Logits that are no numbers agree with nothing."""

from __future__ import annotations

import math

import torch

from evals.perplexity import compare_logits
from evals.selfcheck import _reads


def test_rows_that_are_no_numbers_do_not_agree() -> None:
    fine, broken = [0.0, 1.0], [float("nan"), 1.0]
    reference = torch.tensor([fine, broken, broken, fine])
    logits = torch.tensor([fine, broken, fine, broken])
    found = compare_logits(reference, logits, torch.zeros(4, dtype=torch.long))
    assert found["agrees"].tolist() == [True, False, False, False]


def test_attention_that_is_no_number_is_not_told() -> None:
    assert _reads(0.5, math.nan, False).detail == "50.0% of the keys read are codes"


def test_a_prefill_that_is_too_small_is_told() -> None:
    assert "--prefill may be what is too small" in _reads(0.0, 0.0, False).detail
