"""Needle grids: cells of one arm counted by length and depth, and the answers that were lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .results import Cell, Retrieval


@dataclass(frozen=True)
class Tally:
    """Trials of one arm at one length and depth.

    Attributes:
        kept: The unquantized cache is right and the arm too.
        lost: The unquantized cache is right and the arm wrong.
        unfound: The unquantized cache itself is wrong: nothing to lose.
    """

    kept: int = 0
    lost: int = 0
    unfound: int = 0

    @property
    def counted(self) -> int:
        """Trials that count."""
        return self.kept + self.lost

    @property
    def share_lost(self) -> float:
        """Of those that count; 0 where none does."""
        return self.lost / self.counted if self.counted else 0.0

    def plus(self, cell: Cell, arm: str) -> Tally:
        """With one more trial."""
        if not cell.reference.is_right:
            return replace(self, unfound=self.unfound + 1)
        if cell.arms[arm].is_right:
            return replace(self, kept=self.kept + 1)
        return replace(self, lost=self.lost + 1)


@dataclass(frozen=True)
class HeatMap:
    """One arm's grid of one task.

    Attributes:
        arm: Its name.
        task: The task.
        lengths: Rows, ascending.
        depths: Columns, ascending.
        tallies: By length and depth; what was not asked is missing.
    """

    arm: str
    task: str
    lengths: tuple[int, ...]
    depths: tuple[int, ...]
    tallies: dict[tuple[int, int], Tally]

    @property
    def total(self) -> Tally:
        """All of them together."""
        every = self.tallies.values()
        return Tally(
            kept=sum(it.kept for it in every),
            lost=sum(it.lost for it in every),
            unfound=sum(it.unfound for it in every),
        )


def heat_maps(retrieval: Retrieval, task: str) -> Iterator[HeatMap]:
    """The grids of one task, an arm each, in the order in which cells name them."""
    cells = [cell for cell in retrieval.cells if cell.task == task]
    lengths = tuple(sorted({cell.length for cell in cells}))
    depths = tuple(sorted({cell.depth for cell in cells}))
    for arm in arms_of(retrieval):
        tallies: dict[tuple[int, int], Tally] = {}
        for cell in cells:
            if arm in cell.arms:
                place = (cell.length, cell.depth)
                tallies[place] = tallies.get(place, Tally()).plus(cell, arm)
        if tallies:
            yield HeatMap(arm, task, lengths, depths, tallies)


def tasks_of(retrieval: Retrieval) -> tuple[str, ...]:
    """Tasks in the order in which they were asked."""
    return tuple(dict.fromkeys(cell.task for cell in retrieval.cells))


def arms_of(retrieval: Retrieval) -> tuple[str, ...]:
    """Arms that answered, in their order."""
    return tuple(dict.fromkeys(arm for cell in retrieval.cells for arm in cell.arms))


def lost_cells(retrieval: Retrieval, arm: str) -> Iterator[Cell]:
    """Prompts that the unquantized cache answers and the arm does not."""
    for cell in retrieval.cells:
        if arm in cell.arms and cell.reference.is_right and not cell.arms[arm].is_right:
            yield cell


def unfound_cells(retrieval: Retrieval) -> Iterator[Cell]:
    """Prompts that the unquantized cache itself does not answer."""
    return (cell for cell in retrieval.cells if not cell.reference.is_right)


def needles_kept(retrieval: Retrieval, arm: str) -> Tally:
    """All trials of an arm, whatever task and length."""
    tally = Tally()
    for cell in retrieval.cells:
        if arm in cell.arms:
            tally = tally.plus(cell, arm)
    return tally
