from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant.cache.storage import TokenBuffer
from kvquant.cache.window import capacity, rounded_up
from kvquant.quantize.codec import Field

CODES = Field("codes", (3,), torch.uint8)
SCALE = Field("scale", (), torch.bfloat16)
GROUPED = Field("codes", (4, 2), torch.uint8)
VALUES = Field("values", (2,), torch.float32)
FIELDS = (CODES, SCALE, VALUES)


def rows(first: int, count: int, fields: tuple[Field, ...] = FIELDS, batch: int = 2) -> Any:
    """Rows `first`, `first + 1`, …, told apart by row number, batch row, head and place."""
    made = []
    for field in fields:
        shape = (batch, 2, count, *field.shape)
        numbers = torch.arange(batch * 2).view(batch, 2, 1, *[1] * len(field.shape)) * 50
        numbers = numbers + torch.arange(first, first + count).view(-1, *[1] * len(field.shape))
        made.append(numbers.expand(shape).to(field.dtype))
    return tuple(made)


def content(buffer: TokenBuffer) -> list[torch.Tensor]:
    """All rows held, one tensor a field."""
    parts = [views for _, views in buffer.views(buffer.first, buffer.end)]
    return [torch.cat(runs, dim=2) for runs in zip(*parts, strict=True)]


def check(buffer: TokenBuffer, first: int, end: int, batch: int = 2) -> None:
    """`buffer` holds the rows `first` to `end` as `rows` makes them, and nothing else."""
    assert (buffer.first, buffer.end, len(buffer)) == (first, end, end - first)
    if first < end:
        found, wanted = content(buffer), rows(first, end - first, batch=batch)
        assert all(map(torch.equal, found, wanted))
        assert [tensor.dtype for tensor in found] == [field.dtype for field in FIELDS]


# Room and bytes


def test_an_empty_buffer_holds_nothing() -> None:
    buffer = TokenBuffer(FIELDS, 64)
    buffer.append(rows(0, 0))
    assert (len(buffer), buffer.room, buffer.tensors) == (0, 0, ())
    assert (buffer.nbytes(), buffer.live_nbytes()) == (0, 0)
    assert list(buffer.views(0, 0)) == []
    buffer.map(torch.Tensor.double)
    assert buffer.tensors == ()


@pytest.mark.parametrize("page", [1, 4, 64])
def test_it_grows_exactly_as_capacity_says(page: int) -> None:
    one_by_one, at_once = TokenBuffer((SCALE,), page), TokenBuffer((SCALE,), page)
    for count in range(1, 200):
        one_by_one.append(rows(count - 1, 1, (SCALE,)))
        assert one_by_one.room == capacity(count, page)
    at_once.append(rows(0, 199, (SCALE,)))
    assert at_once.room == one_by_one.room
    assert torch.equal(content(at_once)[0], content(one_by_one)[0])


@pytest.mark.parametrize(
    ("limit", "page", "rooms"),
    [
        (5, 4, [4, 4, 4, 4, 8, 8, 8, 8, 12, 12]),  # the limit is rounded up to a page
        (8, 4, [4, 4, 4, 4, 8, 8, 8, 8, 12, 12]),  # whoever holds more gets more
        (10, 1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (0, 4, [4, 4, 4, 4, 8, 8, 8, 8, 12, 12]),
    ],
)
def test_a_limit_caps_the_room(limit: int, page: int, rooms: list[int]) -> None:
    buffer = TokenBuffer(FIELDS, page, limit)
    found = []
    for number in range(10):
        buffer.append(rows(number, 1))
        found.append(buffer.room)
    assert found == rooms
    check(buffer, 0, 10)


def test_a_limit_holds_where_growing_by_an_eighth_would_pass_it() -> None:
    assert capacity(600) == 704
    limited, free = TokenBuffer((SCALE,), 64, 601), TokenBuffer((SCALE,), 64)
    for buffer in (limited, free):
        buffer.append(rows(0, 600, (SCALE,)))
    assert (limited.room, free.room) == (640, 704)


def test_a_buffer_at_its_limit_stays_there_however_long_the_text() -> None:
    buffer = TokenBuffer(FIELDS, 4, 6)
    for number in range(50):
        buffer.skip_to(number - 5)  # 6 rows at most
        buffer.append(rows(number, 1))
    assert buffer.room == 8
    check(buffer, 44, 50)


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        ((CODES,), 3),
        ((CODES, SCALE), 3 + 2),
        (FIELDS, 3 + 2 + 2 * 4),
        ((GROUPED, Field("scale", (2,), torch.float16)), 8 + 4),
    ],
)
@pytest.mark.parametrize(("count", "room"), [(1, 8), (8, 8), (9, 16), (64, 64), (65, 72)])
def test_bytes_are_rooms_and_rows_times_what_a_row_takes(
    fields: tuple[Field, ...], row: int, count: int, room: int
) -> None:
    buffer = TokenBuffer(fields, 8)
    buffer.append(rows(0, count, fields, batch=3))
    assert buffer.nbytes() == 3 * 2 * room * row
    assert buffer.live_nbytes() == 3 * 2 * count * row
    buffer.skip_to(1)
    assert buffer.live_nbytes() == 3 * 2 * (count - 1) * row
    assert buffer.nbytes() == 3 * 2 * room * row


def test_only_a_released_buffer_gives_its_memory_back() -> None:
    buffer = TokenBuffer(FIELDS, 4)
    buffer.append(rows(0, 3))
    buffer.skip_to(3)
    assert buffer.nbytes() > 0
    buffer.release()
    assert (buffer.nbytes(), buffer.live_nbytes(), buffer.tensors) == (0, 0, ())
    buffer.append(rows(3, 2))
    check(buffer, 3, 5)


# Rows


def test_rows_that_never_were_count_as_dropped() -> None:
    buffer = TokenBuffer(FIELDS, 4)
    buffer.skip_to(7)
    assert (buffer.first, buffer.end) == (7, 7)
    buffer.append(rows(7, 3))
    check(buffer, 7, 10)
    buffer.skip_to(5)  # those are gone already
    check(buffer, 7, 10)


@pytest.mark.parametrize(
    ("end", "first", "left"), [(12, 3, 9), (9, 3, 9), (5, 3, 5), (3, 3, 3), (1, 3, 3), (-4, 3, 3)]
)
def test_cutting_keeps_what_comes_before(end: int, first: int, left: int) -> None:
    buffer = TokenBuffer(FIELDS, 4)
    buffer.append(rows(0, 9))
    buffer.skip_to(3)
    buffer.cut(end)
    check(buffer, first, left)


def test_rows_go_round_without_being_moved() -> None:
    buffer = TokenBuffer(FIELDS, 4)
    buffer.append(rows(0, 4))
    held = buffer.tensors
    buffer.skip_to(3)
    buffer.append(rows(4, 3))
    assert all(map(lambda a, b: a is b, buffer.tensors, held))
    assert [count for count, _ in buffer.views(3, 7)] == [1, 3]
    assert [count for count, _ in buffer.views(4, 7)] == [3]
    assert buffer.tensors[0][0, 0, :, 0].tolist() == [4, 5, 6, 3]
    check(buffer, 3, 7)


def test_growing_puts_rows_that_went_round_in_order_again() -> None:
    buffer = TokenBuffer(FIELDS, 4)
    buffer.append(rows(0, 4))
    buffer.skip_to(3)
    buffer.append(rows(4, 3))
    buffer.append(rows(7, 2))
    assert buffer.room == 8
    check(buffer, 3, 9)
    assert buffer.tensors[0][0, 0, :, 0].tolist() == [8, 0, 0, 3, 4, 5, 6, 7]


def test_views_write_through() -> None:
    buffer = TokenBuffer((VALUES,), 4)
    buffer.append(rows(0, 4, (VALUES,)))
    for _, (view,) in buffer.views(1, 3):
        view.zero_()
    assert content(buffer)[0][0, 0, :, 0].tolist() == [0, 0, 0, 3]


def test_a_copy_shares_tensors_until_one_of_them_is_mapped() -> None:
    buffer = TokenBuffer(FIELDS, 4)
    buffer.append(rows(0, 3))
    twin = buffer.copy()
    assert all(map(lambda a, b: a is b, buffer.tensors, twin.tensors))
    twin.map(lambda held: held.index_select(0, torch.tensor([1, 1, 0])))
    twin.append(rows(3, 1, batch=3))
    check(buffer, 0, 3)
    assert (twin.end, twin.tensors[0].shape[0]) == (4, 3)
    assert torch.equal(content(twin)[2][2, :, :3], rows(0, 3)[2][0])
    assert torch.equal(content(twin)[2][0, :, :3], rows(0, 3)[2][1])


def test_a_copy_keeps_page_and_limit() -> None:
    buffer = TokenBuffer(FIELDS, 4, 6)
    twin = buffer.copy()
    twin.append(rows(0, 5))
    assert twin.room == 8
    assert buffer.room == 0


@pytest.mark.parametrize("change", [lambda t: t.index_select(0, torch.tensor([1, 0])), torch.clone])
def test_what_was_made_in_inference_mode_can_be_written_outside(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    buffer = TokenBuffer(FIELDS, 4)
    with torch.inference_mode():
        buffer.append(rows(0, 2))
        buffer.map(change)
        buffer.map(change)
    buffer.append(rows(2, 1))
    with torch.inference_mode():
        buffer.append(rows(3, 2))
    assert buffer.room == 8
    buffer.append(rows(5, 1))
    check(buffer, 0, 6)


# Against a list

OPERATIONS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 9)),
    st.tuples(st.just("skip"), st.integers(0, 12)),
    st.tuples(st.just("cut"), st.integers(0, 12)),
    st.tuples(st.just("restart"), st.integers(0, 40)),
    st.tuples(st.just("copy"), st.just(0)),
    st.tuples(st.just("map"), st.just(0)),
    st.tuples(st.just("release"), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(
    page=st.integers(1, 5),
    limit=st.none() | st.integers(0, 9),
    operations=st.lists(OPERATIONS, max_size=25),
)
def test_it_holds_what_a_list_would(
    page: int, limit: int | None, operations: list[tuple[str, int]]
) -> None:
    buffer = TokenBuffer(FIELDS, page, limit)
    model: dict[int, int] = {}  # number of a row -> what it was written as
    first = end = written = most = 0
    for name, number in operations:
        if name == "append":
            buffer.append(rows(written, number))
            model.update({end + i: written + i for i in range(number)})
            end, written = end + number, written + number
        elif name == "skip":
            buffer.skip_to(first + number - 2)
            first = max(first, first + number - 2)
            end = max(end, first)
        elif name == "cut":
            buffer.cut(end - number)
            end = max(first, end - number)
        elif name == "restart":
            buffer.restart(number)
            first = end = number
        elif name == "copy":
            before, buffer = buffer, buffer.copy()
            before.skip_to(before.end)  # the old one's counters are its own
            before.map(torch.zeros_like)  # and what it maps to as well
        elif name == "map":
            buffer.map(torch.clone)
        elif first == end:
            buffer.release()
            most = 0
        model = {row: value for row, value in model.items() if first <= row < end}
        most = max(most, end - first)
        assert (buffer.first, buffer.end) == (first, end)
        assert buffer.room % page == 0
        assert buffer.room >= most
        if limit is None:
            assert buffer.room == capacity(most, page)
        elif most <= limit:
            assert buffer.room == min(capacity(most, page), rounded_up(limit, page))
        row = 2 * 2 * (3 + 2 + 8)
        assert (buffer.nbytes(), buffer.live_nbytes()) == (buffer.room * row, (end - first) * row)
        found = content(buffer)
        if found:
            wanted = [rows(model[i], 1) for i in range(first, end)]
            for held, parts in zip(found, zip(*wanted, strict=True), strict=True):
                assert torch.equal(held, torch.cat(parts, dim=2))
