"""What attention reads: the tokens of a layer as they are stored, without a copy.

One layer of a batch whose rows have different padding is several `StoredRows`. Each has the keys
and the values of its rows as runs of tokens that are stored alike, oldest first. With 4 sinks, keys
in groups of 4 and one new token::

    token    0 1 2 3 | 4 5 6 7 8 9 10 11 | 12 13 14 | 15
    keys     exact   | codes, 2 groups   | exact    | exact, of the current call
    values   exact   | codes, one by one            | exact, of the current call
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvquant.quantize.codec import Codec

Positions = Callable[[int, int], "torch.Tensor | None"]
"""Positions ``[rows, tokens]`` of a range of tokens, or None where nobody needs them."""


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one slot that are stored alike.

    Attributes:
        first: Index of the first token.
        count: Number of tokens; whole units of `codec`.
        codec: How they are stored; None if exactly.
        held: Tensors ``[rows, kv_heads, units or more, *field.shape]`` that they lie in, as
            `Codec.decode` takes them; exact tokens are one tensor ``[rows, kv_heads, tokens or
            more, dim]``.
        place: Unit of those tensors that the run begins at.
    """

    first: int
    count: int
    codec: Codec | None
    held: tuple[torch.Tensor, ...]
    place: int = 0

    @property
    def stop(self) -> int:
        """Index after the last token."""
        return self.first + self.count

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Views of what the run holds, and no more; kernels go without."""
        units = self.count if self.codec is None else self.count // self.codec.unit
        return tuple(held.narrow(2, self.place, units) for held in self.held)


@dataclass(frozen=True)
class StoredRows:
    """Rows of a batch that hold equally many tokens, those of the current call included.

    A query of the call, number t of `new`, sees the tokens ``first_seen(t) … past + t``.

    Attributes:
        rows: Their numbers in the batch, int64 on the tensors' device; None for all.
        keys: Runs that cover all tokens that can be seen, and perhaps older ones.
        values: Likewise, cut where it pleases.
        past: Tokens before the call's.
        new: Tokens of the call.
        window: Tokens that a query sees, itself included; None for all.
        positions: Of all tokens of the runs.
        bound: Larger than any position.
    """

    rows: torch.Tensor | None
    keys: tuple[Run, ...]
    values: tuple[Run, ...]
    past: int
    new: int
    window: int | None
    positions: Positions
    bound: int

    def seen_by(self, query: int) -> StoredRows:
        """What a query of the call sees, as of a call of its own."""
        stop = self.past + query + 1
        keys, values = (
            tuple(
                replace(run, count=min(run.count, stop - run.first))
                for run in runs
                if run.first < stop
            )
            for runs in (self.keys, self.values)
        )
        return replace(self, keys=keys, values=values, past=stop - 1, new=1)

    def first_seen(self, query: int) -> int:
        """Index of the oldest token that a query of the call sees."""
        return 0 if self.window is None else max(0, self.past + query + 1 - self.window)
