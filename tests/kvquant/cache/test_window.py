from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvquant.cache.window import PAGE, ROLLBACK, Window, capacity, rounded_up

# Capacity


def test_pages_and_the_tokens_that_may_be_taken_back_are_what_the_docs_say() -> None:
    assert (PAGE, ROLLBACK) == (64, 128)


@pytest.mark.parametrize(
    ("tokens", "room"),
    [
        (0, 0),
        (1, 64),
        (63, 64),
        (64, 64),
        (65, 128),
        (129, 192),
        (512, 512),
        (513, 576),
        (576, 576),
        (577, 704),  # two pages from here on: an eighth of 576, rounded up
        (704, 704),
        (705, 832),
        (4096, 4160),
        (4161, 4736),
    ],
)
def test_room_is_pages_at_first_and_grows_by_an_eighth(tokens: int, room: int) -> None:
    assert capacity(tokens) == room


def test_the_rooms_of_single_rows_are_one_sequence() -> None:
    rooms = list(dict.fromkeys(capacity(tokens, 1) for tokens in range(48)))
    assert rooms == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 17, 20, 23, 26, 30, 34, 39, 44, 50]


@given(tokens=st.integers(0, 1 << 20), page=st.integers(1, 4096))
def test_room_is_whole_pages_and_at_most_an_eighth_and_two_pages_too_much(
    tokens: int, page: int
) -> None:
    room = capacity(tokens, page)
    assert room >= tokens
    assert room % page == 0
    assert room <= tokens + tokens // 8 + 2 * page
    assert capacity(room, page) == room


@given(tokens=st.integers(0, 1 << 16), more=st.integers(0, 1 << 12), page=st.integers(1, 128))
def test_more_tokens_never_have_less_room(tokens: int, more: int, page: int) -> None:
    assert capacity(tokens + more, page) >= capacity(tokens, page)


@pytest.mark.parametrize("page", [1, 4, 64])
@pytest.mark.parametrize("tokens", [1, 100, 1_000, 10_000, 100_000])
def test_a_token_is_written_about_ten_times_however_long_the_text(tokens: int, page: int) -> None:
    written, room = tokens, 0
    while room < tokens:
        written += room  # all that is held moves into the larger room
        room = capacity(room + 1, page)
    assert written <= 10 * tokens + 8 * page
    if tokens >= 10_000:
        assert written > 2 * tokens  # it does grow now and then


@pytest.mark.parametrize(
    ("tokens", "page", "expected"),
    [(0, 64, 0), (1, 64, 64), (64, 64, 64), (65, 64, 128), (7, 3, 9), (9, 3, 9), (-5, 4, -4)],
)
def test_rounding_up_to_pages(tokens: int, page: int, expected: int) -> None:
    assert rounded_up(tokens, page) == expected


# Which tokens are quantized


def test_the_drawing_at_the_top_of_the_module() -> None:
    keys, values = Window(sinks=4, residual=5, unit=4), Window(sinks=4, residual=5, unit=1)
    assert (keys.coded_end(20), values.coded_end(20)) == (12, 15)
    # With one more, all of 12 … 15 are older than the newest 5.
    assert (keys.coded_end(21), values.coded_end(21)) == (16, 16)


@pytest.mark.parametrize(
    ("window", "ends"),
    [
        # length: 0, 1, 2, … 13
        ({}, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]),
        ({"sinks": 4}, [4, 4, 4, 4, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]),
        ({"residual": 3}, [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ({"unit": 4}, [0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12]),
        ({"residual": 3, "unit": 4}, [0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8]),
        ({"sinks": 1, "residual": 3, "unit": 4}, [1, 1, 1, 1, 1, 1, 1, 1, 5, 5, 5, 5, 9, 9]),
        # A sliding window changes what is seen, not what is quantized …
        ({"residual": 3, "keep": 4}, [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        # … unless all that is seen is exact.
        ({"residual": 3, "keep": 3}, [0] * 14),
        ({"sinks": 4, "residual": 9, "keep": 3}, [4] * 14),
    ],
)
def test_quantized_tokens_end_here(window: dict[str, int], ends: list[int]) -> None:
    built = Window(**{"sinks": 0, "residual": 0, "unit": 1, **window})
    assert [built.coded_end(length) for length in range(14)] == ends


@pytest.mark.parametrize(
    ("length", "start", "end"),
    [(9, 6, 6), (12, 6, 6), (13, 6, 10), (16, 6, 10), (17, 6, 14), (3, 6, 6)],
)
def test_groups_go_on_from_where_a_crop_left_them(length: int, start: int, end: int) -> None:
    assert Window(sinks=0, residual=3, unit=4).coded_end(length, start) == end


@pytest.mark.parametrize(
    ("keep", "first"),
    [
        (None, [0, 0, 0, 0, 0, 0, 0]),
        (0, [0, 1, 2, 3, 4, 5, 6]),
        (1, [0, 0, 1, 2, 3, 4, 5]),
        (4, [0, 0, 0, 0, 0, 1, 2]),
    ],
)
def test_the_oldest_token_that_is_seen(keep: int | None, first: list[int]) -> None:
    window = Window(sinks=4, residual=2, unit=4, keep=keep)
    assert [window.first_kept(length) for length in range(7)] == first


@pytest.mark.parametrize(
    ("window", "append_only", "never"),
    [
        ({}, True, False),
        ({"sinks": 4}, True, False),
        ({"residual": 1}, False, False),
        ({"unit": 2}, False, False),
        ({"keep": 7}, True, False),
        ({"keep": 7, "residual": 6}, False, False),
        ({"keep": 7, "residual": 7}, False, True),
        ({"keep": 7, "residual": 8}, False, True),
        ({"keep": 0}, True, True),
        ({"residual": 128}, False, False),
    ],
)
def test_kinds_of_windows(window: dict[str, Any], append_only: bool, never: bool) -> None:
    built = Window(**{"sinks": 0, "residual": 0, "unit": 1, **window})
    assert built.is_append_only is append_only
    assert built.never_codes is never


@given(
    sinks=st.integers(0, 8),
    residual=st.integers(0, 200),
    unit=st.integers(1, 70),
    length=st.integers(0, 2000),
    more=st.integers(0, 200),
)
def test_the_newest_stay_exact_and_codes_only_ever_grow(
    sinks: int, residual: int, unit: int, length: int, more: int
) -> None:
    window = Window(sinks, residual, unit)
    end = window.coded_end(length)
    assert end >= sinks
    assert (end - sinks) % unit == 0
    if end > sinks:  # case G1: what is exact numbers R to R + unit - 1
        assert residual <= length - end < residual + unit
    else:
        assert length - sinks < residual + unit
    assert window.coded_end(length + more) >= end
    # Going on from where it ended, by any steps, ends at the same place.
    assert window.coded_end(length + more, end) == window.coded_end(length + more)


@given(keep=st.integers(0, 100), length=st.integers(0, 300))
def test_a_sliding_window_sees_the_newest(keep: int, length: int) -> None:
    first = Window(0, 0, 1, keep).first_kept(length)
    assert length - first == min(keep, length)
