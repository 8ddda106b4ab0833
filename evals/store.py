"""What a run has found so far, on disk, so that an interrupted one goes on where it stopped.

NAME.partial/
  identity.json     what the numbers depend on: model, text, arms, settings, versions
  document-3.npz    scores of one document
  cells.jsonl       answers, a prompt a line
  checks.json       self-checks
  continuations.json
"""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvquant.errors import InputError
from kvquant.storage import write_atomically

from .results import Cell, build
from .statistics import Scores

Key = tuple[str, int, int, int]
Record = TypeVar("Record")


def key_of(cell: Any) -> Key:
    """What tells a cell, or the prompt that it answers, from all others."""
    return cell.task, cell.length, cell.depth, cell.trial


class Store:
    """The directory, and what an earlier run left in it."""

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, Any],
        *,
        resume: bool,
        notify: Callable[[str], None],
    ) -> None:
        """Takes up an earlier run of the same identity, or begins anew.

        Raises:
            InputError: The place cannot be written.
        """
        self._path = path
        written = json.dumps(identity, sort_keys=True, indent=1)
        if path.is_dir() and not (resume and self._same(written, notify)):
            shutil.rmtree(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot write {path}: {error.strerror}; name another place with --report"
            ) from error
        write_atomically(path / "identity.json", written.encode())
        self.cells: dict[Key, Cell] = {key_of(cell): cell for cell in self._read_cells()}
        documents = len(list(path.glob("document-*.npz")))
        if documents or self.cells:
            notify(
                f"continuing after {documents} documents and {len(self.cells):,} answers, found "
                f"in {path} (--no-resume begins anew)"
            )

    def _same(self, written: str, notify: Callable[[str], None]) -> bool:
        try:
            same = (self._path / "identity.json").read_text() == written
        except (OSError, UnicodeDecodeError):
            same = False
        if not same:
            notify(f"starting anew: {self._path} is of another model, text, arm or setting")
        return same

    def scores(self, document: int) -> dict[str, Scores] | None:
        """What was found of a document, by arm."""
        try:
            with np.load(self._path / f"document-{document}.npz") as held:
                names = json.loads(str(held["arms"]))
                fields = [field.name for field in dataclasses.fields(Scores)]
                return {
                    name: Scores(*(held[f"{field}.{number}"] for field in fields))
                    for number, name in enumerate(names)
                }
        except (OSError, ValueError, KeyError):
            return None  # not there, or cut short: read again

    def keep_scores(self, document: int, scores: Mapping[str, Scores]) -> None:
        """Keeps them."""
        arrays = {
            f"{field.name}.{number}": getattr(it, field.name)
            for number, it in enumerate(scores.values())
            for field in dataclasses.fields(Scores)
        }
        held = io.BytesIO()
        np.savez(held, arms=np.array(json.dumps(list(scores))), **arrays)
        write_atomically(self._path / f"document-{document}.npz", held.getvalue())

    def keep_cells(self, cells: Iterable[Cell]) -> None:
        """Appends answers."""
        found = list(cells)
        self.cells |= {key_of(cell): cell for cell in found}
        lines = "".join(f"{json.dumps(dataclasses.asdict(cell))}\n" for cell in found)
        with (self._path / "cells.jsonl").open("a") as file:
            file.write(lines)

    def _read_cells(self) -> Iterable[Cell]:
        path = self._path / "cells.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        whole = [line for line in lines if line.endswith("\n")]
        if len(whole) < len(lines):  # cut short: what is appended must not join it
            write_atomically(path, "".join(whole).encode())
        return [build(Cell, json.loads(line)) for line in whole]

    def records(self, name: str, kind: Any) -> Any:
        """What `keep_records` kept under `name`, of the type `kind`; None if nothing."""
        try:
            return build(kind, json.loads((self._path / f"{name}.json").read_text()))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def keep_records(self, name: str, records: Iterable[Any]) -> None:
        """Keeps dataclasses of one type."""
        values = [dataclasses.asdict(record) for record in records]
        write_atomically(self._path / f"{name}.json", json.dumps(values).encode())

    def remove(self) -> None:
        """When everything is in the report."""
        shutil.rmtree(self._path, ignore_errors=True)
