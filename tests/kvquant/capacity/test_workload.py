from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant.capacity.workload import Workload, read_traffic
from kvquant.errors import DataError, InputError


def test_lengths_repeat() -> None:
    workload = Workload((1000, 3000, 6000))
    assert workload.sequences(1) == {1000: 1}
    assert workload.sequences(5) == {1000: 2, 3000: 2, 6000: 1}
    assert Workload((5, 5, 7)).sequences(4) == {5: 3, 7: 1}
    assert workload.longest == 6000


def test_one_request_of_traffic_is_at_the_95th_percentile() -> None:
    assert Workload(tuple(range(1, 101)), drawn=True).sequences(1) == {95: 1}
    assert Workload((7,), drawn=True).sequences(1) == {7: 1}
    assert Workload(tuple(range(20, 0, -1)), drawn=True).sequences(1) == {19: 1}


def test_many_requests_are_planned_above_their_mean() -> None:
    """Half of 100 tokens, half of 300: the total of 64 is 12,800 + 1.645 x 800 at most times."""
    found = Workload((100, 300), drawn=True).sequences(64)
    total = sum(length * times for length, times in found.items())
    assert sum(found.values()) == 64
    assert total == pytest.approx(12_800 + 1.645 * 100 * 8, abs=400)


def test_thousands_of_requests_are_planned_in_rounds() -> None:
    drawn = Workload((100, 300), drawn=True)
    thousand, more = drawn.sequences(1000), drawn.sequences(3000)
    assert more == {length: 3 * times for length, times in thousand.items()}
    assert sum(drawn.sequences(2500).values()) == 2500


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=30), st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_draws_are_of_the_traffic_and_grow_with_the_number(lengths: list[int], count: int) -> None:
    workload = Workload(tuple(lengths), drawn=True)
    found, more = workload.sequences(count), workload.sequences(count + 1)
    assert set(found) <= set(lengths)
    assert sum(found.values()) == count
    total, larger = (sum(n * times for n, times in s.items()) for s in (found, more))
    assert count * min(lengths) <= total <= count * max(lengths)
    assert count == 1 or larger > total


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"prompt": 10, "output": 5}\n\n{"prompt": 20, "output": 0}\n'),
        ("a.csv", "prompt,output\n10,5\n20,0\n"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,10,5\ny,20,0\n"),
        ("a.csv", "\ufeffRequest tokens,Response tokens\n10,5\n20,0\n"),
        ("a.csv", "prompt,prompt_tokens,output,output_tokens\n7,10,no,5\n,20,,0\n"),
        ("a.JSONL", '{"input_length": 10, "output_length": 5}\n{"input_len": 20, "output": 0}\n'),
    ],
)
def test_traffic_is_read(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert read_traffic(path) == [15, 20]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "prompt,output\n", "has no requests"),
        ("a.csv", "prompt,answer\n10,5\n", "request 1: no whole number of tokens under 'output'"),
        ("a.csv", "prompt,output\n10,5\n10,-5\n", "request 2: no whole number"),
        ("a.csv", "prompt,output\n10,5.5\n", "request 1: no whole number"),
        ("a.csv", "prompt,output\n0,0\n", "request 1: it cannot have 0 tokens"),
        ("a.csv", "prompt,output\n1,1000000000000\n", "it cannot have 1,000,000,000,001 tokens"),
        ("a.jsonl", '{"prompt": "a text", "output": 5}\n', "its columns are prompt, output"),
        ("a.jsonl", '{"prompt": true, "output": 5}\n', "no whole number"),
        ("a.jsonl", "[1, 2]\n", "request 1: not an object"),
        ("a.jsonl", "{\n", "request 1: not an object"),
        ("a.txt", "", r"traffic comes in .jsonl or .csv files"),
    ],
)
def test_traffic_that_cannot_be_used(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_traffic(path)


def test_no_such_traffic(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*No such file"):
        read_traffic(tmp_path / "none.csv")


def test_a_prefix_longer_than_a_sequence() -> None:
    with pytest.raises(InputError, match="a sequence of 100 tokens has no prefix of 101"):
        Workload((200, 100), prefix_tokens=101)
    assert Workload((200, 100), prefix_tokens=100).longest == 200
    # Of traffic, short requests have what they have of it.
    assert Workload((200, 100), prefix_tokens=101, drawn=True).longest == 200


def test_percentile_is_the_nearest_rank() -> None:
    for count in range(1, 50):
        lengths = tuple(range(1, count + 1))
        assert Workload(lengths, drawn=True).sequences(1) == {math.ceil(0.95 * count): 1}
