"""What a run has found so far, on disk, so that an interrupted one goes on where it stopped.

NAME.partial/
  identity.json     what the numbers depend on: model, text, arms, settings, versions
  document-3.npz    scores of one document
  cells.jsonl       answers, a prompt a line
  arms.json         what each arm is and holds
  checks.json       self-checks
  continuations.json
"""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock, Timeout

from kvquant.errors import InputError
from kvquant.storage import write_atomically

from .results import Cell, build
from .statistics import Scores

Key = tuple[str, int, int, int]
_OURS = ("*.json", "document-*.npz", "cells.jsonl", ".kvquant-*")
"""What may lie in the directory; the last is what `write_atomically` leaves when it is killed."""
_LOCK = ".kvquant-lock"
Record = TypeVar("Record")


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Keeps the directory from other runs: what they leave in it would be taken for one's own.

    Raises:
        InputError: Another run has it, or it cannot be made.
    """
    _make(path)
    lock = FileLock(path / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            f"another evaluation is writing {path}: wait for it, or name another place with "
            "--report"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror}; name another place with --report"
        ) from error


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
            InputError: The place cannot be written, or holds something else.
        """
        self._path = path
        written = json.dumps(identity, sort_keys=True, indent=1)
        _check_ours(path)
        _make(path)
        held = [it for it in path.iterdir() if it.name != _LOCK]
        if held and not (resume and self._same(written, notify)):
            for it in held:
                it.unlink()
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
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
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
        path = self._path / "cells.jsonl"
        try:
            with path.open("a") as file:
                file.write(lines)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error

    def _read_cells(self) -> Iterable[Cell]:
        path = self._path / "cells.jsonl"
        lines = path.read_text(errors="replace").splitlines(keepends=True) if path.is_file() else []
        whole = [line for line in lines if line.endswith("\n")]
        if len(whole) < len(lines):  # cut short: what is appended must not join it
            write_atomically(path, "".join(whole).encode())
        return [cell for cell in map(_cell, whole) if cell is not None]

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


def _cell(line: str) -> Cell | None:
    """An answer, or None for a line that is none: such a prompt is answered again."""
    try:
        cell: Cell = build(Cell, json.loads(line))
    except (ValueError, TypeError, KeyError):
        return None
    return cell


def _check_ours(path: Path) -> None:
    """Beginning anew empties the directory, which must not be that of anybody else."""
    if path.is_dir() and not all(
        it.is_file() and any(map(it.match, _OURS)) for it in path.iterdir()
    ):
        raise InputError(
            f"{path} holds something else than an interrupted evaluation: name another place with "
            "--report"
        )
