from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.scoring import score

NUMBER = "1234567"


@pytest.mark.parametrize(
    "text",
    [
        "1234567",
        " 1234567.",
        "The number you are looking for is 1234567, I think.",
        "It was\n\n1234567\n\n, and not 7654321.",
        "**1234567**",
        "x=1234567;",
        "№1234567th",
        "1,234,567",
        "It is 1,234,567.",
        "it is 1 234 567, I believe",
        "1.234.567",
        "1'234'567",
        "1’234’567",
        "1_234_567",
        "1\N{NO-BREAK SPACE}234\N{NO-BREAK SPACE}567",
        "1\N{NARROW NO-BREAK SPACE}234\N{NARROW NO-BREAK SPACE}567",
        "１２３４５６７",
        "1 2 3 4 5 6 7",
        "9999999, 1234567",
        "9999999,1234567,8888888",
        "9,999,999, 1,234,567, 8,888,888",
        "1. 1234567",
        "1234567 and 890",
    ],
)
def test_an_answer_counts_however_it_is_worded(text):
    assert score(text, [NUMBER]) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   \n",
        "I do not know.",
        "91234567",
        "12345678",
        "123456",
        "7654321",
        "1234568",
        "91,234,567",
        "1,234,567,890",
        "1,234,5678",
        "1,234.567",
        "9 1 2 3 4 5 6 7",
        "1 2 3 4 5 6 7 8",
        "123 4567",
        "1234\n567",
    ],
)
def test_another_number_does_not(text):
    assert score(text, [NUMBER]) == 0.0


@pytest.mark.parametrize(
    ("text", "expected", "right"),
    [
        ("1,234,567", "234567", 0.0),
        ("234,567", "234567", 1.0),
        ("it is 12,345", "12345", 1.0),
        ("112,345", "12345", 0.0),
        ("9,012,345", "12345", 0.0),
        ("42", "42", 1.0),
        ("142", "42", 0.0),
        ("4 2", "42", 1.0),
    ],
)
def test_numbers_of_other_lengths(text, expected, right):
    assert score(text, [expected]) == right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("VAR BCDFG", 1.0),
        ("bcdfg", 1.0),
        ("1. VAR_BCDFG\n2.", 1.0),
        ("(BCDFG)", 1.0),
        ("BCDFGH", 0.0),
        ("XBCDFG", 0.0),
        ("BCDFG7", 0.0),
        ("BCD FG", 0.0),
    ],
)
def test_names_are_whole_words_in_either_case(text, right):
    assert score(text, ["BCDFG"]) == right


def test_the_score_is_the_share_that_was_found():
    expected = ["1111111", "2222222", "3333333", "4444444"]
    assert score("", expected) == 0.0
    assert score("3333333", expected) == 0.25
    assert score("4,444,444 and 1111111", expected) == 0.5
    assert score("4444444, 3333333\n2222222; 1111111.", expected) == 1.0


@given(st.text(), st.integers(1_000_000, 9_999_999))
def test_the_value_is_found_between_any_words_that_are_no_digits(text, value):
    words = "".join(it for it in text if not it.isnumeric() and not it.isdigit())
    assert score(f"{words} the {value} is {words}", [str(value)]) == 1.0
    assert score(words, [str(value)]) == 0.0
    assert 0.0 <= score(text, [str(value)]) <= 1.0


@given(st.integers(1_000_000, 9_999_999), st.integers(1_000_000, 9_999_999), st.sampled_from(" ,."))
def test_only_the_value_itself_is_found(value, other, separator):
    plain = score(str(other), [str(value)])
    grouped = score(f"{other:,}".replace(",", separator), [str(value)])
    assert plain == grouped == float(value == other)
