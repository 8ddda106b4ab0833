"""What attention is told about stored tokens: integers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvquant.attention.reference import seen
from kvquant.attention.stored import Run, StoredRows

CPU = torch.device("cpu")


def rows_of(past: int, new: int, window: int | None) -> StoredRows:
    tokens = Run(0, past + new, None, (torch.zeros(1, 1, past + new, 1),))
    return StoredRows(None, (tokens,), (tokens,), past, new, window, lambda *_: None, past + new)


@pytest.mark.parametrize(
    ("past", "window", "first"),
    [
        (0, None, [0, 0, 0]),
        (10, None, [0, 0, 0]),
        (10, 1, [10, 11, 12]),
        (10, 2, [9, 10, 11]),
        (10, 10, [1, 2, 3]),
        (10, 11, [0, 1, 2]),
        (10, 12, [0, 0, 1]),
        (10, 13, [0, 0, 0]),
        (0, 2, [0, 0, 1]),
    ],
)
def test_the_oldest_token_that_each_query_sees(
    past: int, window: int | None, first: list[int]
) -> None:
    stored = rows_of(past, 3, window)
    assert [stored.first_seen(query) for query in range(3)] == first


@given(st.integers(0, 30), st.integers(1, 8), st.none() | st.integers(1, 40))
def test_a_query_sees_all_from_there_up_to_itself(past: int, new: int, window: int | None) -> None:
    stored = rows_of(past, new, window)
    visible = seen(stored, 0, CPU)
    for query in range(new):
        first, last = stored.first_seen(query), past + query
        expected = [first <= token <= last for token in range(past + new)]
        assert visible[query].tolist() == expected
        assert window is None or sum(expected) == min(window, last + 1)


def test_what_a_query_sees_as_of_a_call_of_its_own() -> None:
    held = torch.zeros(1, 1, 10, 1)
    runs = tuple(Run(first, count, None, (held,)) for first, count in ((0, 7), (7, 2), (9, 3)))
    stored = StoredRows(None, runs, runs[1:], 8, 4, 3, lambda *_: None, 12)
    for query, counts in enumerate(([7, 2], [7, 2, 1], [7, 2, 2], [7, 2, 3])):
        found = stored.seen_by(query)
        assert [run.count for run in found.keys] == counts
        assert found.values == found.keys[1:]
        assert (found.past, found.new, found.window) == (8 + query, 1, 3)
        assert found.first_seen(0) == stored.first_seen(query)


def test_where_a_run_ends() -> None:
    assert Run(5, 7, None, (torch.zeros(1, 1, 7, 1),)).stop == 12
    assert Run(0, 0, None, (torch.zeros(1, 1, 0, 1),)).stop == 0


def test_a_run_is_part_of_what_holds_it(make_codecs: Any, make_case: Any) -> None:
    key, _ = make_codecs(make_case("int4-kivi 4"))
    held = tuple(torch.arange(9).view(1, 1, 9, 1) + 10 * field for field in range(3))
    units = Run(20, 12, key, held, 5)
    assert units.stop == 32
    assert [tensor.flatten().tolist() for tensor in units.tensors] == [
        [5, 6, 7],
        [15, 16, 17],
        [25, 26, 27],
    ]
    tokens = Run(20, 4, None, held[:1], 5)
    assert [tensor.flatten().tolist() for tensor in tokens.tensors] == [[5, 6, 7, 8]]
    assert tokens.tensors[0].data_ptr() == held[0][:, :, 5:].data_ptr()


@pytest.mark.parametrize("name", ["first", "held"])
def test_a_run_does_not_change(name: str) -> None:
    made: Any = Run(0, 1, None, (torch.zeros(1, 1, 1, 1),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, name, None)
