"""Sizes and numbers as people read them, and the names that they may have meant."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fractions import Fraction

GB = 10**9
GIB = 2**30


def size(nbytes: float) -> str:
    """``4.29 GB (4.00 GiB)``; smaller sizes in MB and MiB, or in bytes."""
    if nbytes < 10_000:
        return f"{nbytes:,.0f} bytes"
    if nbytes < GB / 10:
        return f"{nbytes / 1e6:,.2f} MB ({nbytes / 2**20:,.2f} MiB)"
    return f"{nbytes / GB:,.2f} GB ({nbytes / GIB:,.2f} GiB)"


def count(number: int | None, unknown: str = "") -> str:
    """``32,768``."""
    return unknown if number is None else f"{number:,}"


def some(number: int, thing: str) -> str:
    """``1 sequence``, ``1,000 sequences``."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def exact(number: Fraction | int) -> str:
    """``1,088``, or ``98.5`` where it is no whole number."""
    return f"{float(number):,.4f}".rstrip("0").rstrip(".")


def ranges(numbers: tuple[int, ...]) -> str:
    """``0-4,7`` of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def significant(number: float) -> str:
    """Three digits that count, and all before the point: ``21.5``, ``5.00``, ``1,234``."""
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}"


def nearest(name: str, names: Sequence[str]) -> str:
    """``: did you mean b200 or h200``, to be put into a message, or nothing."""
    by_lower = {other.lower(): other for other in names}
    close = [by_lower[key] for key in get_close_matches(name.lower(), by_lower, 3, 0.5)]
    return f": did you mean {' or '.join(close)}" if close else ""
