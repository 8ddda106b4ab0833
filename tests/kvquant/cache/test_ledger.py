from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from kvquant.cache.ledger import RowGroup, Sources, TokenLedger
from kvquant.errors import InputError

CPU = torch.device("cpu")


def mask(*rows: str) -> torch.Tensor:
    """Real tokens of a call, from ``..ab``: a dot is padding."""
    return torch.tensor([[char != "." for char in row] for row in rows])


def begin(ledger: TokenLedger, *rows: str, positions: list[list[int]] | None = None) -> Any:
    real = mask(*rows)
    where = None if positions is None else torch.tensor(positions)
    return ledger.begin(len(rows), real.shape[1], CPU, real, where)


def made_of(*rows: str, keeps_positions: bool = False) -> TokenLedger:
    ledger = TokenLedger(keeps_positions)
    begin(ledger, *rows)
    return ledger


def plain(sources: Sources | None) -> Any:
    """Sources as lists."""
    return None if sources is None else [(number, index.tolist()) for number, index in sources]


def groups(ledger: TokenLedger) -> list[tuple[tuple[int, ...] | None, list[tuple[int, int]]]]:
    return [(group.rows, group.runs) for group in ledger.groups]


# One group of rows


@pytest.mark.parametrize(
    ("added", "runs", "tokens"),
    [
        ([], [], 0),
        ([(0, 0)], [], 0),
        ([(3, 4)], [(3, 4)], 4),
        ([(3, 4), (7, 1)], [(3, 5)], 5),
        ([(3, 4), (7, 0), (8, 2)], [(3, 4), (8, 2)], 6),
        ([(0, 1), (1, 1), (2, 0), (3, 1), (4, 1)], [(0, 2), (3, 2)], 4),
    ],
)
def test_runs_that_touch_are_one(
    added: list[tuple[int, int]], runs: list[tuple[int, int]], tokens: int
) -> None:
    group = RowGroup()
    for slot, count in added:
        group.add(slot, count)
    assert group.runs == runs
    assert group.tokens == tokens


GROUP = RowGroup(None, [(2, 3), (7, 1), (10, 4)])
"""Slots 2 3 4 . . 7 . . 10 11 12 13, tokens 0 1 2 . . 3 . . 4 5 6 7."""


@pytest.mark.parametrize(
    ("start", "stop", "pieces"),
    [
        (0, 14, [(2, 0, 3), (7, 3, 1), (10, 4, 4)]),
        (0, 2, []),
        (5, 7, []),
        (5, 8, [(7, 3, 1)]),
        (3, 11, [(3, 1, 2), (7, 3, 1), (10, 4, 1)]),
        (12, 14, [(12, 6, 2)]),
        (12, 99, [(12, 6, 2)]),
        (4, 4, []),
    ],
)
def test_real_tokens_of_slots(start: int, stop: int, pieces: list[tuple[int, int, int]]) -> None:
    assert list(GROUP.pieces(start, stop)) == pieces


@pytest.mark.parametrize(
    ("start", "stop", "slots"),
    [
        (0, 8, [(2, 5), (7, 8), (10, 14)]),
        (0, 3, [(2, 5)]),
        (1, 2, [(3, 4)]),
        (2, 5, [(4, 5), (7, 8), (10, 11)]),
        (3, 4, [(7, 8)]),
        (6, 8, [(12, 14)]),
        (4, 4, []),
    ],
)
def test_slots_of_real_tokens(start: int, stop: int, slots: list[tuple[int, int]]) -> None:
    assert GROUP.slots_of(start, stop) == slots


@pytest.mark.parametrize(
    ("slots", "runs"),
    [
        (99, [(2, 3), (7, 1), (10, 4)]),
        (14, [(2, 3), (7, 1), (10, 4)]),
        (11, [(2, 3), (7, 1), (10, 1)]),
        (10, [(2, 3), (7, 1)]),
        (7, [(2, 3)]),
        (3, [(2, 1)]),
        (2, []),
        (0, []),
    ],
)
def test_cropping_a_group(slots: int, runs: list[tuple[int, int]]) -> None:
    group = RowGroup(None, list(GROUP.runs))
    group.crop(slots)
    assert group.runs == runs


# Padding


def test_without_padding_slots_are_tokens() -> None:
    ledger = TokenLedger(True)
    assert (ledger.batch, ledger.slots, ledger.bound) == (0, 0, 0)
    assert ledger.begin(3, 4, CPU) is None
    assert begin(ledger, "ab", "cd", "ef") is None
    assert groups(ledger) == [(None, [(0, 6)])]
    assert (ledger.batch, ledger.slots, ledger.bound) == (3, 6, 6)
    where = ledger.positions_of(ledger.groups[0], CPU)
    assert where(0, 6).tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert where(2, 4).tolist() == [[2, 3]] * 3
    assert where(2, 4).dtype == torch.int32


def test_the_drawing_at_the_top_of_the_module() -> None:
    ledger = TokenLedger(False)
    assert plain(begin(ledger, "...abcd", "abcdefg")) == [(0, [0]), (0, [1])]
    assert groups(ledger) == [((0,), [(3, 4)]), ((1,), [(0, 7)])]


@pytest.mark.parametrize(
    ("rows", "expected", "sources"),
    [
        # Left, right and middle padding, in one call.
        (("..ab", "ab..", "a..b"), [((0,), [(2, 2)]), ((1,), [(0, 2)]), ((2,), [(0, 1), (3, 1)])],
         [(0, [0]), (0, [1]), (0, [2])]),
        # Rows with the same padding go together, in the order of the first of them.
        ((".ab", "abc", ".ab", "abc"), [((0, 2), [(1, 2)]), ((1, 3), [(0, 3)])],
         [(0, [0, 2]), (0, [1, 3])]),
        # A row of padding alone.
        (("...", "abc"), [((0,), []), ((1,), [(0, 3)])], [(0, [0]), (0, [1])]),
        # All rows alike: one group, without numbers.
        (("..ab", "..ab"), [(None, [(2, 2)])], [(0, [0, 1])]),
        (("...", "..."), [(None, [])], [(0, [0, 1])]),
    ],
)  # fmt: skip
def test_rows_are_grouped_by_their_padding(
    rows: tuple[str, ...], expected: list[Any], sources: list[Any]
) -> None:
    ledger = TokenLedger(False)
    assert plain(begin(ledger, *rows)) == sources
    assert groups(ledger) == expected
    assert ledger.slots == len(rows[0])


def test_groups_split_again_and_go_on_together() -> None:
    ledger = made_of(".ab", ".cd", "efg")
    # The third row is padded now, as is the second.
    assert plain(begin(ledger, "abc", "a..", "..a")) == [(0, [0]), (0, [1]), (1, [0])]
    assert groups(ledger) == [
        ((0,), [(1, 5)]),
        ((1,), [(1, 3)]),
        ((2,), [(0, 3), (5, 1)]),
    ]
    assert begin(ledger, "x", "y", "z") is None
    assert [group.tokens for group in ledger.groups] == [6, 4, 5]
    assert [group.runs[-1] for group in ledger.groups] == [(1, 6), (6, 1), (5, 2)]


def test_another_number_of_rows_is_refused() -> None:
    ledger = made_of("abc", ".bc")
    with pytest.raises(InputError, match=r"holds 2 rows, the call has 3: reset\(\)"):
        ledger.begin(3, 1, CPU)
    assert (ledger.slots, ledger.batch) == (3, 2)
    with pytest.raises(InputError, match="holds 1 row, the call has 3"):
        made_of("abc").begin(3, 1, CPU)
    ledger.reset()
    assert ledger.begin(3, 1, CPU) is None
    assert groups(ledger) == [(None, [(0, 1)])]


# Positions


def test_positions_are_looked_up_by_token_and_row() -> None:
    ledger = TokenLedger(True)
    begin(
        ledger,
        "..abc",
        "a..bc",
        "..xyz",
        positions=[[9, 9, 0, 1, 2], [5, 9, 9, 6, 8], [9, 9, 3, 4, 5]],
    )
    first, second = (ledger.positions_of(group, CPU) for group in ledger.groups)
    assert first(0, 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert first(1, 2).tolist() == [[1], [4]]
    assert second(0, 3).tolist() == [[5, 6, 8]]
    assert second(0, 2).tolist() == [[5, 6]]
    begin(ledger, "p", "q", "r", positions=[[3], [9], [6]])
    assert first(2, 4).tolist() == [[2, 3], [5, 6]]
    assert second(1, 4).tolist() == [[6, 8, 9]]


def test_one_row_of_positions_stands_for_all() -> None:
    ledger = TokenLedger(True)
    begin(ledger, "abc", ".bc", positions=[[4, 5, 6]])
    first, second = (ledger.positions_of(group, CPU) for group in ledger.groups)
    assert first(0, 3).tolist() == [[4, 5, 6]]
    assert second(0, 2).tolist() == [[5, 6]]


def test_nothing_is_kept_where_no_mean_turns() -> None:
    ledger = made_of("..abc", "vwxyz")
    assert ledger.positions_of(ledger.groups[0], CPU)(0, 3) is None
    assert (ledger.nbytes(), ledger.live_nbytes()) == (0, 0)


def test_bytes_of_positions() -> None:
    ledger = made_of("..abc", "vwxyz", keeps_positions=True)
    assert (ledger.nbytes(), ledger.live_nbytes()) == (2 * 64 * 4, 2 * 5 * 4)
    ledger.crop(2)
    assert (ledger.nbytes(), ledger.live_nbytes()) == (2 * 64 * 4, 2 * 3 * 4)
    ledger.reset()
    assert (ledger.nbytes(), ledger.live_nbytes()) == (0, 0)


@pytest.mark.parametrize(
    ("calls", "bounds"),
    [
        ([("abc", None), ("a", None)], [3, 4]),
        ([("abc", [[7, 8, 9]]), ("a", [[10]]), ("b", [[11]])], [10, 11, 12]),
        ([("abc", [[0, 1, 2]]), ("ab", [[20, 21]])], [3, 22]),
        ([("a", [[50]]), ("b", [[51]])], [51, 52]),
        # Left padding: positions are smaller than slots, and the bound may be too large.
        ([("...ab", [[1, 1, 1, 0, 1]]), ("c", [[2]])], [5, 6]),
    ],
)
def test_the_bound_is_above_all_positions(calls: list[Any], bounds: list[int]) -> None:
    ledger = TokenLedger(True)
    for (row, positions), bound in zip(calls, bounds, strict=True):
        begin(ledger, row, positions=positions)
        assert ledger.bound == bound


def test_on_a_device_only_a_prompt_is_looked_at() -> None:
    # Values of a fake tensor cannot be read, so that looking would raise.
    ledger = TokenLedger(False)
    begin(ledger, "abc", "abc", positions=[[0, 1, 2], [7, 8, 9]])
    with FakeTensorMode():
        device = torch.device("cuda")
        for bound in (11, 12):
            step = torch.empty(2, 1, dtype=torch.int64, device=device)
            assert ledger.begin(2, 1, device, None, step) is None
            assert ledger.bound == bound
        # A torch without CUDA complains in other words.
        with pytest.raises((DataDependentOutputException, RuntimeError)):
            ledger.begin(2, 2, device, None, torch.empty(2, 2, dtype=torch.int64, device=device))


# Taking back


def test_a_crop_tells_how_many_real_tokens_it_takes_from_each_group() -> None:
    ledger = made_of("..abc", "abc..", "a.b.c", keeps_positions=True)
    begin(ledger, "x", "x", "x")
    assert ledger.crop(0) == [0, 0, 0]
    assert [ledger.real_tokens(count) for count in (0, 1, 2, 3, 99)] == [
        [0, 0, 0],
        [1, 1, 1],
        [2, 1, 2],
        [3, 1, 2],
        [4, 4, 4],
    ]
    assert ledger.slots == 6
    assert ledger.crop(3) == [3, 1, 2]
    assert groups(ledger) == [((0,), [(2, 1)]), ((1,), [(0, 3)]), ((2,), [(0, 1), (2, 1)])]
    assert ledger.slots == 3
    assert ledger.positions_of(ledger.groups[2], CPU)(0, 2).tolist() == [[0, 2]]
    begin(ledger, "y", "y", ".", positions=[[3], [30], [300]])
    assert ledger.positions_of(ledger.groups[1], CPU)(2, 4).tolist() == [[2, 30]]
    assert [group.tokens for group in ledger.groups] == [2, 4, 2]


def test_more_than_there_is_can_be_taken_back() -> None:
    ledger = made_of("..abc", "abcde")
    assert ledger.crop(9) == [3, 5]
    assert ledger.slots == 0
    assert ledger.crop(1) == [0, 0]
    begin(ledger, "pq", "rs")
    assert groups(ledger) == [((0,), [(0, 2)]), ((1,), [(0, 2)])]


# Rows


def test_without_padding_rows_are_only_renumbered() -> None:
    ledger = TokenLedger(True)
    begin(ledger, "abc", "abc", positions=[[0, 1, 2], [3, 4, 5]])
    assert plain(ledger.select(torch.tensor([1, 1, 0]))) == [(0, [1, 1, 0])]
    assert ledger.batch == 3
    assert groups(ledger) == [(None, [(0, 3)])]
    where = ledger.positions_of(ledger.groups[0], CPU)
    assert where(1, 3).tolist() == [[4, 5], [4, 5], [1, 2]]


@pytest.mark.parametrize(
    ("index", "expected", "sources"),
    [
        # Rows 0 and 2 are the first group, 1 the second, 3 the third.
        ([0, 1, 2, 3], [(0, 2), (1,), (3,)], [(0, [0, 1]), (1, [0]), (2, [0])]),
        ([3, 2, 1, 0], [(1, 3), (2,), (0,)], [(0, [1, 0]), (1, [0]), (2, [0])]),
        ([0, 0, 1, 1, 2, 2, 3, 3], [(0, 1, 4, 5), (2, 3), (6, 7)],
         [(0, [0, 0, 1, 1]), (1, [0, 0]), (2, [0, 0])]),
        ([3, 1], [(1,), (0,)], [(1, [0]), (2, [0])]),
        ([2], [None], [(0, [1])]),
        ([3, 3], [None], [(2, [0, 0])]),
        ([2, 0, 2], [None], [(0, [1, 0, 1])]),
    ],
)  # fmt: skip
def test_rows_of_several_groups_are_selected(
    index: list[int], expected: list[Any], sources: list[Any]
) -> None:
    ledger = made_of(".abc", "abcd", ".abc", "abc.", keeps_positions=True)
    assert plain(ledger.select(torch.tensor(index))) == sources
    assert [group.rows for group in ledger.groups] == expected
    assert ledger.batch == len(index)


def test_one_group_that_is_left_can_be_selected_from_again() -> None:
    ledger = made_of(".abc", "abcd", keeps_positions=True)
    ledger.select(torch.tensor([0]))
    assert plain(ledger.select(torch.tensor([0, 0, 0]))) == [(0, [0, 0, 0])]
    assert groups(ledger) == [(None, [(1, 3)])]
    assert ledger.positions_of(ledger.groups[0], CPU)(0, 3).tolist() == [[1, 2, 3]] * 3
    assert begin(ledger, "x", "y", "z") is None
    assert groups(ledger) == [(None, [(1, 4)])]


@pytest.mark.parametrize("rows", [("abcd", "abcd", "abcd"), (".abc", "abcd", "..ab")])
def test_rows_may_be_counted_from_the_end(rows: tuple[str, ...]) -> None:
    ledger = made_of(*rows)
    assert ledger.row_numbers(torch.tensor([-1, 0, -3, 2])).tolist() == [2, 0, 0, 2]
    assert ledger.row_numbers(torch.tensor([], dtype=torch.int64)).tolist() == []
    for wrong in (3, -4):
        with pytest.raises(InputError, match=f"^there is no row {wrong}: the cache holds 3$"):
            ledger.row_numbers(torch.tensor([0, wrong]))
    with pytest.raises(InputError, match=r"whole numbers, not as torch.float32 \[2\]"):
        ledger.row_numbers(torch.zeros(2))
    with pytest.raises(InputError, match=r"not as torch.int64 \[1, 2\]"):
        ledger.row_numbers(torch.zeros(1, 2, dtype=torch.int64))


def test_rows_on_a_device_are_not_looked_at_without_padding() -> None:
    index = torch.tensor([1, -1], device="meta")
    assert made_of("abcd", "abcd").row_numbers(index).is_meta


@pytest.mark.parametrize("rows", [("abcd", "abcd"), (".abc", "abcd")])
def test_where_no_row_is_left_no_call_fits(rows: tuple[str, ...]) -> None:
    ledger = made_of(*rows)
    ((number, index),) = ledger.select(torch.tensor([], dtype=torch.int64))
    assert (number, index.tolist(), ledger.batch, ledger.slots) == (0, [], 0, 4)
    with pytest.raises(InputError, match="holds 0 rows, the call has 2: reset"):
        ledger.begin(2, 1, CPU)


# Against a table of rows and slots

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.integers(1, 4)),
        st.tuples(st.just("crop"), st.integers(0, 6)),
        st.tuples(st.just("select"), st.integers(1, 4)),
    ),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, data=st.data())
def test_groups_say_what_a_table_of_all_tokens_says(
    steps: list[tuple[str, int]], data: st.DataObject
) -> None:
    ledger = TokenLedger(True)
    table: list[list[tuple[bool, int]]] = [[] for _ in range(3)]  # real, position
    stores: list[list[list[int]]] = [[[] for _ in range(3)]]  # what layers hold: real positions
    bits = st.lists(st.booleans(), min_size=4, max_size=4)
    for step, number in steps:
        if step == "call":
            real = [data.draw(bits)[:number] for _ in table]
            base = data.draw(st.integers(0, 50))
            where = [[base + i + 10 * row for i in range(number)] for row in range(len(table))]
            sources = ledger.begin(len(table), number, CPU, torch.tensor(real), torch.tensor(where))
            if sources is not None:
                stores = [[list(stores[n][i]) for i in index.tolist()] for n, index in sources]
            for row, flags, places in zip(table, real, where, strict=True):
                row.extend(zip(flags, places, strict=True))
            for store, group in zip(stores, ledger.groups, strict=True):
                rows = range(len(table)) if group.rows is None else group.rows
                for held, row in zip(store, rows, strict=True):
                    held += [p for r, p in zip(real[row], where[row], strict=True) if r]
        elif step == "crop":
            counts = ledger.crop(number)
            table = [row[: max(0, len(row) - number)] for row in table]
            for store, count in zip(stores, counts, strict=True):
                for held in store:
                    del held[len(held) - count :]
        elif ledger.batch:
            index = data.draw(
                st.lists(st.integers(0, len(table) - 1), min_size=number, max_size=number)
            )
            sources = ledger.select(torch.tensor(index))
            stores = [[list(stores[n][i]) for i in picks.tolist()] for n, picks in sources]
            table = [list(table[row]) for row in index]
        assert ledger.slots == len(table[0])
        assert ledger.bound > max((p for row in table for _, p in row), default=-1)
        seen = []
        for store, group in zip(stores, ledger.groups, strict=True):
            rows = list(range(len(table)) if group.rows is None else group.rows)
            seen += rows
            for held, row in zip(store, rows, strict=True):
                assert held == [place for real, place in table[row] if real]
            if group.tokens:
                assert ledger.positions_of(group, CPU)(0, group.tokens).tolist() == store
            slots = [slot for a, b in group.slots_of(0, group.tokens) for slot in range(a, b)]
            assert slots == [slot for slot, (real, _) in enumerate(table[rows[0]]) if real]
        assert sorted(seen) == list(range(len(table)))
        if ledger.batch:
            whole = [[real for real, _ in row] for row in table]
            assert ledger.real_slots().tolist() == whole
            assert ledger.is_padded == (not all(map(all, whole)))
