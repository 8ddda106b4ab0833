"""The arithmetic of windows, literally."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.windows import Span, buckets, parse_lengths, spans
from kvquant.errors import InputError


def test_document_of_the_drawing() -> None:
    read = spans(10, prefill=4, block=3)
    assert read == [Span(0, 4), Span(4, 7), Span(7, 9)]
    assert [span.past for span in read] == [0, 4, 7]
    assert [list(span.scored) for span in read] == [[], [4, 5, 6], [7, 8]]
    assert [list(span.targets) for span in read] == [[], [5, 6, 7], [8, 9]]


def test_last_block_is_whole_where_it_fits() -> None:
    assert spans(11, prefill=4, block=3) == [Span(0, 4), Span(4, 7), Span(7, 10)]


def test_block_of_one_is_decoding() -> None:
    assert spans(6, prefill=2, block=1) == [Span(0, 2), Span(2, 3), Span(3, 4), Span(4, 5)]


def test_block_larger_than_the_document() -> None:
    assert spans(100, prefill=64, block=64) == [Span(0, 64), Span(64, 99)]


def test_shortest_document() -> None:
    read = spans(3, prefill=1, block=64)
    assert read == [Span(0, 1), Span(1, 2)]
    assert list(read[1].targets) == [2]


def test_spans_of_a_usual_document() -> None:
    read = spans(2048, prefill=256, block=64)
    assert len(read) == 1 + 28
    assert read[-1] == Span(1984, 2047)
    assert sum(len(span.scored) for span in read) == 2048 - 257


@pytest.mark.parametrize(
    ("tokens", "prefill", "block", "complaint"),
    [
        (65, 64, 64, "a document of 65 tokens is too short.*prefill of 64.*66 or more"),
        (0, 64, 64, "a document of 0 tokens is too short"),
        (-1, 1, 1, "a document of -1 tokens is too short"),
        (100, 0, 64, "a prefill of 0 tokens: at least 1"),
        (100, -3, 64, "a prefill of -3 tokens"),
        (100, 64, 0, "blocks of 0 tokens: at least 1"),
        (100, 64, -64, "blocks of -64 tokens"),
    ],
)
def test_what_cannot_be_scored(tokens: int, prefill: int, block: int, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        spans(tokens, prefill, block)


@given(
    prefill=st.integers(1, 300),
    scored=st.integers(1, 700),
    block=st.integers(1, 200),
)
def test_everything_is_read_once_and_scored_once(prefill: int, scored: int, block: int) -> None:
    tokens = prefill + 1 + scored
    read = spans(tokens, prefill, block)
    assert [i for span in read for i in range(span.start, span.stop)] == list(range(tokens - 1))
    assert [i for span in read for i in span.targets] == list(range(prefill + 1, tokens))
    assert all(1 <= span.stop - span.start <= block for span in read[1:])
    assert all(len(span.scored) == len(span.targets) for span in read)
    # The prefix of a document is read alike, whatever follows.
    assert spans(tokens + 1, prefill, block)[: len(read) - 1] == read[:-1]


def test_buckets() -> None:
    assert buckets([4, 7, 8, 100]) == [(4, 8), (8, 16), (64, 128)]
    assert buckets([1]) == [(1, 2)]
    assert buckets([2, 1, 3, 2]) == [(1, 2), (2, 4)]
    assert buckets([64, 127, 128]) == [(64, 128), (128, 256)]
    assert buckets(range(256, 2048, 64)) == [(256, 512), (512, 1024), (1024, 2048)]
    assert buckets([2**40 - 1, 2**40]) == [(2**39, 2**40), (2**40, 2**41)]
    assert buckets([]) == []


@given(st.lists(st.integers(1, 10**12), max_size=30))
def test_each_past_is_in_one_bucket_and_no_bucket_is_empty(pasts: list[int]) -> None:
    edges = buckets(pasts)
    for past in pasts:
        assert sum(start <= past < stop for start, stop in edges) == 1
    assert all(any(start <= past < stop for past in pasts) for start, stop in edges)
    assert edges == sorted(edges)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("1k,4k,16k", (1024, 4096, 16384)),
        ("512", (512,)),
        ("1", (1,)),
        (" 4K , 512,1k ", (512, 1024, 4096)),
        ("1024,1k,512", (512, 1024)),
        ("1m", (1048576,)),
        ("1_000", (1000,)),
        ("999999999999", (999999999999,)),
    ],
)
def test_lengths(text: str, lengths: tuple[int, ...]) -> None:
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize(
    "part",
    ["", " ", "k", "_", "x", "1.5k", "1e3", "-1", "+1", "1 k 2", "kk", "1kk", "²", "٣", "1" * 5000],
)
@pytest.mark.parametrize("before", ["", "1k,"])
def test_no_lengths(part: str, before: str) -> None:
    with pytest.raises(InputError, match="is no length: write whole numbers of tokens"):
        parse_lengths(before + part)


@pytest.mark.parametrize("text", ["0", "0k", "1k,00"])
def test_length_of_nothing(text: str) -> None:
    with pytest.raises(InputError, match="a length of 0 tokens"):
        parse_lengths(text)


def test_complaint_names_the_part() -> None:
    with pytest.raises(InputError, match="'4q' in '1k, 4q'"):
        parse_lengths("1k, 4q")
