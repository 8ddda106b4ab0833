"""Long calibrations that were interrupted go on where they stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvquant.errors import FileFormatError
from kvquant.geometry import CacheGeometry
from kvquant.progress import notify
from kvquant.provenance import Provenance

from .stats import CalibrationStats, merge_all
from .stats_file import load_stats, save_stats

CHECKPOINT_SECONDS = 30.0


class Resume:
    """Keeps statistics of the finished blocks on disk, and takes them up again."""

    def __init__(self, path: Path, origin: Provenance, geometry: CacheGeometry) -> None:
        self._path = path
        self._origin = origin
        self._earlier = self._find(geometry)
        self._saved_at = time.monotonic()
        if self._earlier is not None:
            done = self.finished_blocks
            blocks = "1 block" if done == 1 else f"{done} blocks"
            notify(f"continuing after {blocks}, found in {path}")

    @property
    def finished_blocks(self) -> int:
        """Blocks that an earlier run finished."""
        corpora = self._earlier.provenance.corpora if self._earlier else ()
        return int(corpora[0]["finished"]) if corpora else 0

    def keep(self, blocks: int, snapshot: Callable[[], CalibrationStats]) -> None:
        """Called after each batch; writes at most every `CHECKPOINT_SECONDS`."""
        if time.monotonic() - self._saved_at < CHECKPOINT_SECONDS:
            return
        finished = self.finished_blocks + blocks
        corpora = tuple({**corpus, "finished": finished} for corpus in self._origin.corpora)
        save_stats(self._joined(snapshot(), replace(self._origin, corpora=corpora)), self._path)
        self._saved_at = time.monotonic()

    def result(self, stats: CalibrationStats | None) -> CalibrationStats:
        """What this run and an earlier one measured together."""
        return self._joined(stats, self._origin)

    def _joined(self, stats: CalibrationStats | None, origin: Provenance) -> CalibrationStats:
        parts = [_anonymous(part) for part in (self._earlier, stats) if part is not None]
        joined = merge_all(parts)
        counts = joined.provenance
        return replace(
            joined,
            provenance=replace(
                origin, tokens=counts.tokens, longest_position=counts.longest_position
            ),
        )

    def _find(self, geometry: CacheGeometry) -> CalibrationStats | None:
        """An earlier run's statistics, if they are of the same model, text and settings."""
        if not os.path.lexists(self._path):
            return None
        try:
            earlier = load_stats(self._path)
        except FileFormatError as error:
            notify(f"starting anew: {error}")
            return None
        theirs = replace(earlier.provenance, tokens=0, longest_position=0, command=())
        corpora = tuple({k: v for k, v in c.items() if k != "finished"} for c in theirs.corpora)
        same = replace(theirs, corpora=corpora) == replace(self._origin, command=())
        if same and earlier.geometry == geometry:
            return earlier
        notify(f"starting anew: {self._path} is of another model, text, version or setting")
        return None


def _anonymous(stats: CalibrationStats) -> CalibrationStats:
    """`stats` with the counts of its provenance alone."""
    counts = stats.provenance
    return replace(
        stats,
        provenance=Provenance(tokens=counts.tokens, longest_position=counts.longest_position),
    )
