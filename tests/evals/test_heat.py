"""Needles counted: what the reference cannot find is nobody's loss."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from evals.heat import (
    Tally,
    arms_of,
    heat_maps,
    lost_cells,
    needles_kept,
    tasks_of,
    unfound_cells,
)
from evals.results import Answer, Cell, EvalReport, Retrieval

RIGHT, WRONG, PART = Answer("1", 1.0), Answer("2", 0.0), Answer("", 0.5)


def asked(*cells: Cell) -> Retrieval:
    return Retrieval("text", "", False, 8, cells, ())


def cell(reference: Answer, arm: Answer, depth: int = 0, length: int = 512) -> Cell:
    return Cell("single", length, depth, 0, ("1",), reference, {"int4": arm})


def test_what_is_counted() -> None:
    retrieval = asked(
        cell(RIGHT, RIGHT),
        cell(RIGHT, WRONG),
        cell(RIGHT, PART),
        cell(WRONG, RIGHT),
        cell(PART, WRONG),
    )

    tally = needles_kept(retrieval, "int4")
    assert tally == Tally(kept=1, lost=2, unfound=2)
    assert (tally.counted, tally.share_lost) == (3, 2 / 3)
    assert Tally(unfound=4).share_lost == 0.0


def test_a_grid() -> None:
    retrieval = asked(
        cell(RIGHT, RIGHT, 50),
        cell(RIGHT, WRONG, 50),
        cell(RIGHT, RIGHT, 0, 2048),
        cell(WRONG, RIGHT),
    )
    (grid,) = heat_maps(retrieval, "single")

    assert (grid.lengths, grid.depths) == ((512, 2048), (0, 50))
    assert grid.tallies == {
        (512, 50): Tally(kept=1, lost=1),
        (2048, 0): Tally(kept=1),
        (512, 0): Tally(unfound=1),
    }
    assert grid.total == Tally(kept=2, lost=1, unfound=1)
    assert list(heat_maps(retrieval, "tracking")) == []


def test_an_arm_that_did_not_answer_has_no_grid() -> None:
    other = replace(cell(RIGHT, RIGHT), task="repeat", arms={"int8": WRONG})
    retrieval = asked(cell(RIGHT, RIGHT), other)

    assert arms_of(retrieval) == ("int4", "int8")
    assert tasks_of(retrieval) == ("single", "repeat")
    assert [grid.arm for grid in heat_maps(retrieval, "single")] == ["int4"]
    assert needles_kept(retrieval, "int8") == Tally(lost=1)
    assert list(lost_cells(retrieval, "int8")) == [other]


def test_lost_and_unfound() -> None:
    lost, unfound = cell(RIGHT, WRONG), cell(WRONG, WRONG)
    retrieval = asked(cell(RIGHT, RIGHT), lost, unfound)

    assert list(lost_cells(retrieval, "int4")) == [lost]
    assert list(unfound_cells(retrieval)) == [unfound]


def test_agrees_with_the_losses_of_the_report(eval_report: EvalReport) -> None:
    assert eval_report.retrieval is not None
    for arm in eval_report.arms:
        tally = needles_kept(eval_report.retrieval, arm.name)
        losses = [it for it in eval_report.retrieval.losses if it.arm == arm.name]
        assert tally.lost == sum(it.losses for it in losses)
        assert tally.counted == sum(it.trials for it in losses)


_ANSWERS = st.sampled_from([RIGHT, WRONG, PART])


@given(st.lists(st.builds(cell, _ANSWERS, _ANSWERS, st.sampled_from([0, 50]))))
def test_every_prompt_is_in_one_place(cells: list[Cell]) -> None:
    retrieval = asked(*cells)
    totals = [grid.total for grid in heat_maps(retrieval, "single")]

    assert sum(it.counted + it.unfound for it in totals) == len(cells)
    assert needles_kept(retrieval, "int4") == (totals[0] if totals else Tally())
