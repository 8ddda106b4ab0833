"""Lines of the table, whether they are as promised, and the file they are saved in."""

from __future__ import annotations

import contextlib
import csv
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

OK, MISSED = "ok", "MISSED"


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        part: ``right``, ``copy``, ``attention``, ``append`` or ``step``.
        what: Format or cache.
        batch: Rows of the batch.
        tokens: Tokens that are stored.
        figure: Measured, as people read it.
        times: How many times as fast as full precision.
        speed: Bytes per second that were read of what is stored.
        share: Of the bandwidth of a copy.
        verdict: `OK`, `MISSED`, why it is not there; or nothing, where nothing is promised.
    """

    part: str
    what: str
    batch: int | str = ""
    tokens: int | str = ""
    figure: str = ""
    times: str = ""
    speed: str = ""
    share: str = ""
    verdict: str = ""


def verdict(figure: float, most: float) -> str:
    """Whether a figure is within its limit; NaN is not."""
    return OK if figure <= most else MISSED


@contextlib.contextmanager
def skipped() -> Iterator[list[str]]:
    """Goes on after an error; the list then says which, in a few words."""
    reasons: list[str] = []
    try:
        yield reasons
    except torch.cuda.OutOfMemoryError:
        reasons.append("out of memory")
    except Exception as error:  # a package that is missing, or one that fails on this machine
        reasons.append(f"{type(error).__name__}: {(str(error) or '-').splitlines()[0][:60]}")


def table(rows: Sequence[Row]) -> str:
    """Rows in columns: words on the left, figures on the right."""
    names = [field.name for field in fields(Row)]
    lines = [names, *([str(getattr(row, name)) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = []
    for line in lines:
        cells = [
            cell.ljust(width) if name in ("part", "what", "verdict") else cell.rjust(width)
            for name, cell, width in zip(names, line, widths, strict=True)
        ]
        shown.append("  ".join(cells).rstrip())
    return "\n".join(shown)


def save(path: Path, card: str, rows: Sequence[Row]) -> None:
    """Appends rows to a CSV file, with date and GPU."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, ["date", "gpu", *(field.name for field in fields(Row))])
        if is_new:
            writer.writeheader()
        for row in rows:
            writer.writerow({"date": time.strftime("%F"), "gpu": card, **vars(row)})
