"""Tables on the terminal, rows in a CSV file, and limits that are kept or missed."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Limit:
    """A figure that may not be larger than another.

    Attributes:
        what: What it is a figure of.
        figure: As measured.
        most: The limit.
    """

    what: str
    figure: float
    most: float

    @property
    def is_kept(self) -> bool:
        """Whether the figure is within the limit."""
        return self.figure <= self.most

    def __str__(self) -> str:
        """``ok      prefill with int8 / DynamicCache: 1.05 (limit 1.1)``."""
        verdict = "ok    " if self.is_kept else "MISSED"
        return f"{verdict}  {self.what}: {self.figure:.4g} (limit {self.most:.4g})"


def show(title: str, rows: Sequence[Row]) -> None:
    """Prints rows of the same columns, names on the left."""
    names = list(rows[0])
    lines = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for line in lines:
        first, *rest = (
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join((first, *rest)).rstrip())


def save(path: Path, rows: Sequence[Row]) -> None:
    """Appends rows to a CSV file, with date and machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ["date", "cpus", *rows[0]]
    fresh = not path.exists()
    with path.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, names)
        if fresh:
            writer.writeheader()
        for row in rows:
            writer.writerow({"date": time.strftime("%F"), "cpus": os.cpu_count(), **row})


def judge(limits: Sequence[Limit]) -> int:
    """Prints all limits, kept or missed; the number of those missed."""
    print()
    for limit in limits:
        print(limit)
    return sum(not limit.is_kept for limit in limits)
