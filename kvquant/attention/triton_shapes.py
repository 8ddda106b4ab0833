"""What kernels are compiled for, and what they take and hand on together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

RUNS = 4
"""Exact runs that a slot may have: sinks, a ring in two parts, and the call's tokens."""


@dataclass(frozen=True)
class SlotShape:
    """How keys or values are read.

    Attributes:
        kind: ``int4``, ``int8``, ``e4m3`` or ``e5m2``; ``exact`` if nothing is coded.
        dim: Width of a head.
        pad: `dim`, rounded up to a power of two of at least 16.
        exact_align: Bytes that all exact tokens begin at a multiple of.
        row: Bytes of a token's codes.
        word: Bytes that are unpacked together: 2, or 1 where rows have an odd number.
        block: Words of a row, rounded up like `pad`.
        align: Bytes that all rows begin at a multiple of.
        group: Tokens that share scales by channel; 1 for none.
        scaled: Whether codes have scales of their own.
        middle: Whether they have middles, too.
        gain: What codes are to be multiplied by.
    """

    kind: str
    dim: int
    pad: int
    exact_align: int
    row: int = 0
    word: int = 1
    block: int = 16
    align: int = 1
    group: int = 1
    scaled: bool = False
    middle: bool = False
    gain: float = 1.0


@dataclass(frozen=True)
class Shape:
    """What the attention kernel is compiled for.

    Attributes:
        keys: How keys are read.
        values: How values are read.
        mixed: The slot that is coded in the mixed region: ``key``, ``value``; or ``none``.
        lanes: Queries of a program, a power of two.
        tokens: Tokens of a tile of codes.
        exact_tokens: Tokens of a tile with exact keys or values.
        pairs: Rotary pairs with a mean that turns, rounded up to 16.
        several: Whether there are queries of several tokens, which see different ones.
        windowed: Whether a window hides old tokens.
        softcapped: Whether scores are capped.
        half: Whether products are of float16.
        whole: Whether prepared queries are exact in it, so that one product suffices.
        ptx: Whether codes are unpacked by instructions of the GPU; not in Triton's interpreter.
        stages: Tiles that are on their way from memory.
    """

    keys: SlotShape
    values: SlotShape
    mixed: str
    lanes: int
    tokens: int
    exact_tokens: int
    pairs: int
    several: bool
    windowed: bool
    softcapped: bool
    half: bool
    whole: bool
    ptx: bool
    stages: int

    @property
    def residents(self) -> int:
        """Programs that the registers of a multiprocessor have room for; tests look at them."""
        slots = (self.keys, self.values)
        is_small = self.half and not self.pairs and not self.several and self.keys.group == 1
        is_small = is_small and all(it.dim == it.pad <= 128 for it in slots)
        # 128 threads: a third of the registers is 168 for each, half of them 255.
        return 3 if is_small and (self.tokens <= 64 or self.values.dim <= 64) else 2


# Tensors with their strides, in elements


class Query(NamedTuple):
    """Queries, and what was prepared from them; a group is a row and a KV head.

    Attributes:
        raw: ``[rows, heads, new, dim]``.
        folded: float32 ``[groups, lanes, dim]``: rotated and scaled by channel as the keys are.
        facts: float32 ``[groups, lanes, 2]``: sum of `folded`, and score of the mean; this and what
            follows times the factor of the scores.
        waves: float32 ``[groups, lanes, 2, pairs]``: what a score takes of cosines and sines.
    """

    raw: Any
    row: Any
    head: Any
    token: Any
    folded: Any
    facts: Any
    waves: Any


class Turned(NamedTuple):
    """Tables of the mean that turns with the position, and strides of ``[rows, tokens]`` positions.

    Attributes:
        cos: float32 ``[positions, pairs of the model]``.
        sin: Likewise.
        columns: Columns of the pairs that turn, int32 ``[pairs]``.
    """

    cos: Any
    sin: Any
    columns: Any
    cos_row: Any
    sin_row: Any
    position_row: Any
    position_token: Any


class Coded(NamedTuple):
    """The codes of a slot, with their strides and those of scales and middles."""

    codes: Any
    row: Any
    head: Any
    unit: Any
    scale_row: Any
    scale_head: Any
    scale_unit: Any


class Exact(NamedTuple):
    """Exact runs of a slot, `RUNS` of them."""

    runs: tuple[Any, ...]
    rows: tuple[Any, ...]
    heads: tuple[Any, ...]
    tokens: tuple[Any, ...]


# Inside kernels


class Lanes(NamedTuple):
    """The queries of a program.

    Attributes:
        lane: Their numbers in the group.
        raw: Where each is.
        positions: Where those of the row's tokens would be, counted from token 0 on.
        count: Lanes of the group.
        group: Number of the group.
        newest: Newest token that each sees.
        oldest: Newest token that is too old for each.
        factor: Of exact scores.
        softcap: What scores are capped at.
    """

    lane: Any
    raw: Any
    positions: Any
    count: Any
    group: Any
    newest: Any
    oldest: Any
    factor: Any
    softcap: Any


class Folded(NamedTuple):
    """Prepared queries of a program.

    Attributes:
        parts: In units of `norm`, a tile for each part of the keys' words.
        norm: A power of two that is about their largest number, where products are of float16.
        total: Sum of each query's channels.
        mean: Score of what was subtracted from all coded keys.
    """

    parts: tuple[Any, ...]
    norm: Any
    total: Any
    mean: Any


class Codes(NamedTuple):
    """The codes of one head of one row.

    Attributes:
        first: The token that would begin the tensors.
        cut: From this token on codes lie `jump` elements farther on than they would, and scales
            `scale_jump`.
    """

    codes: Any
    scale: Any
    middle: Any
    unit: Any
    scale_unit: Any
    first: Any
    cut: Any
    jump: Any
    scale_jump: Any


class Rows(NamedTuple):
    """Exact runs of one head of one row.

    Attributes:
        tokens: Strides.
        firsts: Their first tokens.
        froms: The tokens that would begin their tensors.
    """

    first: Any
    second: Any
    third: Any
    fourth: Any
    tokens: tuple[Any, ...]
    firsts: tuple[Any, ...]
    froms: tuple[Any, ...]


class Stored(NamedTuple):
    """All tokens of one head of one row."""

    coded_keys: Codes
    coded_values: Codes
    exact_keys: Rows
    exact_values: Rows


class Split(NamedTuple):
    """Tokens of a program.

    Attributes:
        begin: Where its first tile begins.
        end: Where its last tile ends.
        start: First token of the region.
        stop: Token after the last.
        front: Tokens of the exact region's first piece.
        front_shift: What makes tokens of their numbers in the region.
        back_shift: Likewise, for the second piece.
    """

    begin: Any
    end: Any
    start: Any
    stop: Any
    front: Any
    front_shift: Any
    back_shift: Any


class Found(NamedTuple):
    """Where a program writes what it finds: results of all programs, and its places in them."""

    sums: Any
    tops: Any
    place: Any


class Softmax(NamedTuple):
    """Attention over the tokens so far.

    Attributes:
        top: Largest score of each lane.
        total: Sums of weights, ``[lanes, tokens of a tile]``.
        middle: Sums of weights times middles, likewise.
        unit: Largest scale of a value; `sums` are in units of it.
        sums: Sums of weights times values: a tile for each part.
    """

    top: Any
    total: Any
    middle: Any
    unit: Any
    sums: tuple[Any, ...]
