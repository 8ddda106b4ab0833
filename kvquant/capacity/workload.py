"""Which sequences are alive at once, and how long they are."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvquant.errors import DataError, InputError

PERCENTILE = 95
"""Of the total of live tokens, at which real traffic is planned."""

_DRAWS = 1000
_DRAWN_AT_ONCE = 1000
"""Sequences; more than these are drawn as several times as many, which is a little too careful."""

_PROMPT = "prompt", "input", "context", "request"
_OUTPUT = "output", "completion", "generated", "response"
_ENDINGS = "tokens", "length", "len", ""
_LONGEST = 10**12


@dataclass(frozen=True)
class Workload:
    """Sequences that are alive at once.

    Attributes:
        lengths: Lengths of the sequences, over and over; of real traffic, those it is drawn from.
        concurrency: How many there are, or None for as many as fit.
        drawn: Whether they are drawn at random.
        added_tokens: Tokens of chat template, tool schemas and reasoning, which the lengths have
            already.
        prefix_tokens: First tokens that all sequences of an adapter share.
        adapters: Adapters, each of which needs a copy of the prefix: its keys and values are its
            own.
    """

    lengths: tuple[int, ...]
    concurrency: int | None = None
    drawn: bool = False
    added_tokens: int = 0
    prefix_tokens: int = 0
    adapters: int = 1

    def __post_init__(self) -> None:
        """Refuses what cannot be.

        Raises:
            InputError: A prefix longer than a sequence.
        """
        if self.prefix_tokens > min(self.lengths) and not self.drawn:
            raise InputError(
                f"a sequence of {min(self.lengths):,} tokens has no prefix of "
                f"{self.prefix_tokens:,}"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    def sequences(self, count: int) -> Mapping[int, int]:
        """Lengths of `count` sequences, each with how often it is there."""
        if not self.drawn:
            rounds, more = divmod(count, len(self.lengths))
            found = Counter({length: 0 for length in self.lengths})
            for index, length in enumerate(self.lengths):
                found[length] += rounds + (index < more)
            return {length: times for length, times in found.items() if times}
        rounds, more = divmod(count, _DRAWN_AT_ONCE)
        found = Counter(_draw(self.lengths, more)) if more else Counter()
        for length, times in Counter(_draw(self.lengths, _DRAWN_AT_ONCE) if rounds else ()).items():
            found[length] += rounds * times
        return found


@lru_cache(maxsize=64)
def _draw(lengths: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Of `_DRAWS` draws of `count` lengths, the one whose total is at the percentile."""
    if count == 1:
        return (_at_percentile(sorted(lengths)),)
    import numpy as np

    rng = np.random.default_rng(0)
    # One row a sequence, so that fewer sequences are the first of more.
    chosen = rng.integers(0, len(lengths), (count, _DRAWS), dtype=np.int32)
    drawn = np.asarray(lengths)[chosen]
    place = _at_percentile(np.argsort(drawn.sum(0), kind="stable").tolist())
    return tuple(drawn[:, place].tolist())


def _at_percentile(ordered: Sequence[int]) -> int:
    """The element that `PERCENTILE` percent are not beyond (nearest rank)."""
    return ordered[math.ceil(PERCENTILE * len(ordered) / 100) - 1]


def read_traffic(path: Path) -> list[int]:
    """Lengths of the requests in a file, prompt and output together.

    Args:
        path: ``.jsonl`` or ``.csv``, a request a row, with a column for the tokens of the prompt
            and one for those of the output.

    Raises:
        DataError: No such file, or a row without two whole numbers.
    """
    if path.suffix.lower() not in (".jsonl", ".csv"):
        raise DataError(f"{path}: traffic comes in .jsonl or .csv files")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file) if path.suffix.lower() == ".csv" else _json_rows(file)
            lengths = [_length(path, number, row) for number, row in enumerate(rows, 1)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not lengths:
        raise DataError(f"{path} has no requests")
    return lengths


def _json_rows(lines: Iterable[str]) -> Iterable[Any]:
    for line in lines:
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError:
                yield None


def _length(path: Path, number: int, row: Any) -> int:
    if not isinstance(row, dict):
        raise DataError(f"{path}, request {number}: not an object of prompt and output tokens")
    plain = {"".join(c for c in str(key).lower() if c.isalnum()): row[key] for key in row}
    counts = [_count(plain, names) for names in (_PROMPT, _OUTPUT)]
    for count, names in zip(counts, (_PROMPT, _OUTPUT), strict=True):
        if count is None:
            raise DataError(
                f"{path}, request {number}: no whole number of tokens under {names[0]!r} (or "
                f"{', '.join(names[1:])}, with or without _tokens); its columns are "
                f"{', '.join(map(str, row))}"
            )
    total = sum(count for count in counts if count is not None)
    if not 0 < total <= _LONGEST:
        raise DataError(f"{path}, request {number}: it cannot have {total:,} tokens")
    return total


def _count(row: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The whole number, not negative, under one of the names: ``prompt_tokens`` before ``prompt``.

    A log may have the text beside the number.
    """
    keys = [name + ending for ending in _ENDINGS for name in names]
    value = next((row[key] for key in keys if row.get(key) not in (None, "")), None)
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
