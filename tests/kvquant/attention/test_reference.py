"""The reference against `scaled_dot_product_attention` in float64, and against sums by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvquant.attention.reference import attend_reference, read, seen
from kvquant.attention.stored import Run, StoredRows

CPU = torch.device("cpu")


def exact(keys: torch.Tensor, values: torch.Tensor, new: int, window: Any = None) -> StoredRows:
    """Tokens ``[rows, kv_heads, tokens, dim]`` that are stored exactly, as one run each."""
    tokens = keys.shape[2]
    runs = [(Run(0, tokens, None, (states,)),) for states in (keys, values)]
    return StoredRows(None, *runs, tokens - new, new, window, lambda *_: None, tokens)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("window", [None, 1, 3, 8, 9, 20])
@pytest.mark.parametrize(
    ("rows", "kv_heads", "group", "past", "new"),
    [(1, 1, 1, 0, 1), (2, 2, 3, 7, 1), (1, 3, 2, 6, 4), (2, 1, 71, 0, 9)],
)
def test_is_attention(
    rows: int, kv_heads: int, group: int, past: int, new: int, window: int | None
) -> None:
    keys, values = random(rows, kv_heads, past + new, 8), random(rows, kv_heads, past + new, 5)
    query, stored = random(rows, kv_heads * group, new, 8), exact(keys, values, new, window)
    expected = scaled_dot_product_attention(
        query.double(),
        keys.double().repeat_interleave(group, 1),
        values.double().repeat_interleave(group, 1),
        attn_mask=seen(stored, 0, CPU),
        scale=0.3,
    )
    found = attend_reference(query, stored, 0.3)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_scores_that_are_capped_and_sinks_by_hand() -> None:
    """Two tokens with scores 6 and -2, capped at 4, a sink of 0.5, values 10 and 20."""
    keys, values = torch.tensor([[[[3.0], [-1.0]]]]), torch.tensor([[[[10.0], [20.0]]]])
    found = attend_reference(
        torch.tensor([[[[4.0]]]]),
        exact(keys, values, 1),
        0.5,
        softcap=4.0,
        sinks=torch.tensor([0.5]),
    )
    one, other = math.exp(4 * math.tanh(6 / 4)), math.exp(4 * math.tanh(-2 / 4))
    expected = (10 * one + 20 * other) / (one + other + math.exp(0.5))
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_neighbouring_heads_share_a_kv_head_and_each_has_its_sink() -> None:
    values = torch.tensor([1.0, 100.0]).view(1, 2, 1, 1)
    sinks = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0])
    stored = exact(torch.zeros(1, 2, 1, 3), values, 1)
    found = attend_reference(random(1, 4, 1, 3), stored, 1.0, sinks=sinks)
    assert found.flatten().tolist() == [1.0, 0.5, 100.0, 50.0]


def test_what_each_query_sees() -> None:
    stored = exact(random(1, 1, 5, 2), random(1, 1, 5, 2), 3, 2)
    assert seen(stored, 0, CPU).int().tolist() == [
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert seen(stored, 2, CPU).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert seen(stored, 1, CPU, 3, slice(1, 3)).int().tolist() == [[0, 1], [0, 0]]
    everything = replace(stored, window=None)
    assert seen(everything, 3, CPU).int().tolist() == [[0, 0], [1, 0], [1, 1]]


@pytest.mark.parametrize("name", ["int4", "int4-kivi 4", "fp8", "int8 per-head"])
def test_tokens_read_back_as_the_codec_says(
    name: str, make_case: Any, make_codecs: Callable[..., Any], make_stored: Callable[..., Any]
) -> None:
    case = make_case(name, rows=2, past=30, sinks=3, tail=4, cuts=((0.5,), ()), positions="holes")
    codecs = make_codecs(case)
    stored = make_stored(case, codecs)
    keys, first = read(stored.keys, stored)
    assert (first, keys.shape, keys.dtype) == (0, (2, 2, 31, 16), torch.float32)
    for run in stored.keys:
        part = keys[:, :, run.first : run.stop]
        if run.codec is None:
            assert torch.equal(part, run.tensors[0])
            continue
        expected = torch.empty_like(part)
        places = stored.positions(run.first, run.stop)
        run.codec.decode_reference(run.tensors, expected, places, stored.bound)
        assert torch.equal(part, expected)


def test_keys_and_values_may_be_cut_and_begin_where_they_please() -> None:
    keys, values = random(1, 2, 9, 4), random(1, 2, 9, 3)
    whole = exact(keys, values, 2, 5)

    def runs(states: torch.Tensor, *cuts: int) -> tuple[Run, ...]:
        return tuple(Run(a, b - a, None, (states[:, :, a:b],)) for a, b in pairwise(cuts))

    # The oldest token seen is 3.
    parts = replace(whole, keys=runs(keys, 1, 2, 7, 9), values=runs(values, 3, 8, 9))
    query = random(1, 4, 2, 4)
    expected = attend_reference(query, whole, 1.0)
    torch.testing.assert_close(attend_reference(query, parts, 1.0), expected)


def test_the_dtype_is_what_is_computed_in(make_case: Any, make_stored: Callable[..., Any]) -> None:
    case = make_case("int4", past=50)
    stored, query = make_stored(case), case.query()
    single = attend_reference(query, stored, 0.25, dtype=torch.float32)
    assert single.dtype == torch.float32
    double = attend_reference(query, stored, 0.25)
    assert not torch.equal(single, double.float())
    torch.testing.assert_close(single, double.float())
