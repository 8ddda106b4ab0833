"""Sizes and numbers as people read them."""

from __future__ import annotations

from fractions import Fraction

from .hardware import GB, GIB


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
