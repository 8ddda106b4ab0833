"""Evaluations on disk: the JSON of an `EvalReport`, written in one step and read with care."""

from __future__ import annotations

import json
from pathlib import Path

from kvquant.errors import FileFormatError
from kvquant.storage import write_atomically

from .results import EvalReport


def write_report(report: EvalReport, path: Path) -> None:
    """Writes `report` as JSON; a file that is there stays until the new one is complete.

    Raises:
        InputError: The place cannot be written, or the disk is full.
    """
    write_atomically(path, report_json(report).encode())


def report_json(report: EvalReport) -> str:
    """One JSON document in ASCII, which holds any answer a tokenizer may have made."""
    return json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n"


def read_report(path: Path) -> EvalReport:
    """The evaluation in a file.

    Raises:
        FileFormatError: There is none, or it is something else, damaged, or of a newer version.
    """
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise FileFormatError(
            f"{path} cannot be read ({error.strerror or error}): name a JSON file that "
            "`kvquant evaluate` wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise FileFormatError(
            f"{path} is no JSON ({error}): cut short, or not from kvquant evaluate"
        ) from error
    return EvalReport.from_dict(values, str(path))
