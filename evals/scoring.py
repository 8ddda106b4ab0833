"""Whether an answer has what was asked for in it, however it is worded."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_SEPARATORS = "[ ,.'’_]"
"""Between thousands, in one country or another."""


def score(text: str, expected: Sequence[str]) -> float:
    """Share of the `expected` strings that are in `text`: 1.0 is all, more than 0 is part.

    RULER's ``string_match_all``, but for whole numbers and words, and for numbers also as
    ``1,234,567`` (or with blanks, points, apostrophes) and digit by digit. Case does not matter.

    >>> score("It is 1,234,567.", ["1234567"]), score("91234567", ["1234567"])
    (1.0, 0.0)
    >>> score("2222222 and 3333333", ["1111111", "2222222"])
    0.5
    """
    text = unicodedata.normalize("NFKC", text)
    found = [re.search(_pattern(it), text, re.IGNORECASE) is not None for it in expected]
    return sum(found) / len(found)


def _pattern(expected: str) -> str:
    if expected.isascii() and expected.isdigit():
        return "|".join((_plain(expected), _grouped(expected), _spelled(expected)))
    return rf"(?<![^\W_]){re.escape(expected)}(?![^\W_])"


def _plain(digits: str) -> str:
    return rf"(?<!\d){digits}(?!\d)"


def _grouped(digits: str) -> str:
    """With the same separator before every three digits, and not within a longer such number."""
    first = len(digits) % 3 or 3
    groups = [digits[start : start + 3] for start in range(first, len(digits), 3)]
    if not groups:
        return _plain(digits)
    # Only a group of three digits can have another one in front of it.
    front = rf"(?<!\d{_SEPARATORS})" if first == 3 else ""
    rest = "".join(rf"(?P=mark){group}" for group in groups[1:])
    number = rf"{digits[:first]}(?P<mark>{_SEPARATORS}){groups[0]}{rest}"
    return rf"(?<!\d){front}{number}(?!\d)(?!(?P=mark)\d{{3}}(?!\d))"


def _spelled(digits: str) -> str:
    """With a blank between any two digits, as some tokenizers write them."""
    return rf"(?<!\d)(?<!\d ){' '.join(digits)}(?! ?\d)"
