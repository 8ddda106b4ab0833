"""Which tokens of a document are read in which call, and which of them are scored: integers only.

A document of 10 tokens with a prefill of 4 and blocks of 3::

    token    0 1 2 3 | 4 5 6 | 7 8 | 9
    read in  prefill | block | block, a short one
    past           0 |     4 |   7
    scores           | 5 6 7 | 8 9

The prefill scores nothing: with nothing in the cache, any cache reads it exactly. What a block
predicts, it predicts from the `past` tokens in the cache, which are as the cache keeps them, and
from the tokens of the block itself. The last token is only predicted; to read it would tell
nothing. The first one scored is that after the first token of the first block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvquant.errors import InputError

_UNITS = {"k": 1024, "m": 1024**2}


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `stop - 1`, read in one call."""

    start: int
    stop: int

    @property
    def past(self) -> int:
        """Tokens in the cache before the call."""
        return self.start

    @property
    def scored(self) -> range:
        """Positions whose logits are held against the token that follows; none of a prefill."""
        return range(self.start, self.stop) if self.past else range(0)

    @property
    def targets(self) -> range:
        """The tokens that they are held against, position by position."""
        return range(self.start + 1, self.stop + 1) if self.past else range(0)


def spans(tokens: int, prefill: int, block: int) -> list[Span]:
    """Calls that read a document of `tokens` tokens; see the drawing above.

    Raises:
        InputError: No prefill, no block, or a document too short to score one token.
    """
    if prefill < 1:
        raise InputError(f"a prefill of {prefill} tokens: at least 1 has to be in the cache")
    if block < 1:
        raise InputError(f"blocks of {block} tokens: at least 1 is read in a call")
    if tokens < prefill + 2:
        raise InputError(
            f"a document of {tokens} tokens is too short: after a prefill of {prefill} one is read "
            f"and the next one scored; use documents of {prefill + 2} or more, or a shorter prefill"
        )
    starts = range(prefill, tokens - 1, block)
    return [Span(0, prefill), *(Span(start, min(start + block, tokens - 1)) for start in starts)]


def buckets(pasts: Iterable[int]) -> list[tuple[int, int]]:
    """Powers of two that the numbers of past tokens fall between, ascending, empty ones left out.

        >>> buckets([4, 7, 8, 100])
        [(4, 8), (8, 16), (64, 128)]

    Args:
        pasts: Past tokens of whatever is put in buckets, in any order, 1 or more each.
    """
    exponents = sorted({past.bit_length() - 1 for past in pasts})
    assert not exponents or exponents[0] >= 0, "a token without past is not scored"
    return [(1 << exponent, 2 << exponent) for exponent in exponents]


def parse_lengths(text: str) -> tuple[int, ...]:
    """Numbers of tokens with commas between them, ascending and each once.

    As for ``kvquant plan``, k is 1,024 and m 1,048,576.

        >>> parse_lengths("4k, 512,1K")
        (512, 1024, 4096)

    Raises:
        InputError: Something else, or 0.
    """
    return tuple(sorted({_length(part, text) for part in text.split(",")}))


def _length(part: str, text: str) -> int:
    digits = part.strip().lower()
    unit = _UNITS.get(digits[-1:], 1)
    digits = digits[:-1] if unit > 1 else digits
    digits = digits.replace("_", "")
    # Python itself refuses to read numbers of thousands of digits.
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 12:
        raise InputError(
            f"{part.strip()!r} in {text!r} is no length: write whole numbers of tokens such as "
            "1536 or 4k (k = 1,024), with commas between them"
        )
    if int(digits) == 0:
        raise InputError(f"a length of 0 tokens in {text!r}: at least 1 is needed")
    return int(digits) * unit
