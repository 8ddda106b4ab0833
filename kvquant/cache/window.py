"""Which tokens are exact and which are quantized, and how much room they take: integers only.

A text of 20 tokens with 4 sinks, a residual of 5 and keys in groups of 4::

    token    0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15 16 17 18 19
    keys     sinks   | group 0 | group 1   | exact: the newest 5, and 3 whose group is not yet full
    values   sinks   | quantized one by one, 4 … 14  | 15 … 19 exact

Nothing here depends on how calls were cut, only on how many tokens there are.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE = 64
"""Tokens by which buffers grow at least."""

ROLLBACK = 128
"""Newest tokens that stay as they were while a decoder wants to take tokens back."""


def capacity(tokens: int, page: int = PAGE) -> int:
    """Tokens that a buffer has room for once it has held `tokens`.

    Rooms are pages at first and grow by an eighth, so that a long text is copied a few times in
    all, not once a page. The room follows from the largest number of tokens alone.

        >>> [capacity(n) for n in (0, 1, 64, 65, 512, 4096)]
        [0, 64, 64, 128, 512, 4160]
    """
    room = 0
    while room < tokens:
        room += page * max(1, -(-room // (8 * page)))
    return room


def rounded_up(tokens: int, page: int) -> int:
    """`tokens`, rounded up to whole pages."""
    return -(-tokens // page) * page


@dataclass(frozen=True)
class Window:
    """Where one slot of one layer keeps which tokens.

    Attributes:
        sinks: First tokens, kept exactly.
        residual: Newest tokens, kept exactly.
        unit: Tokens that are quantized together.
        keep: Past tokens that a sliding layer can still see; None if it sees all.
    """

    sinks: int
    residual: int
    unit: int
    keep: int | None = None

    @property
    def is_append_only(self) -> bool:
        """Whether every token is quantized at once, so that taking tokens back leaves no trace."""
        return self.residual == 0 and self.unit == 1

    @property
    def never_codes(self) -> bool:
        """Whether tokens leave a sliding window before they are old enough to be quantized."""
        return self.keep is not None and self.residual >= self.keep

    def coded_end(self, length: int, start: int | None = None) -> int:
        """Index of the first token that is not quantized.

        Args:
            length: Number of tokens.
            start: Where the quantized ones ended so far; by default at the end of the sinks.
        """
        start = self.sinks if start is None else start
        if self.never_codes:
            return start
        return start + self.unit * (max(0, length - self.residual - start) // self.unit)

    def first_kept(self, length: int) -> int:
        """Index of the oldest token that can still be seen."""
        return 0 if self.keep is None else max(0, length - self.keep)
