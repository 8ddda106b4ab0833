"""What a run leaves on disk, whole, cut short, or not its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evals.results import Answer, Cell, Check, SelfCheck
from evals.statistics import Scores
from evals.store import Store, claimed, key_of
from kvquant.errors import InputError

IDENTITY = {"model": "a", "lengths": (512, 1024), "seed": 0}


def opened(path: Path, identity: Any = None, resume: bool = True) -> tuple[Store, list[str]]:
    said: list[str] = []
    return Store(path, identity or IDENTITY, resume=resume, notify=said.append), said


def scores(tokens: int, seed: int) -> Scores:
    random = np.random.default_rng(seed)
    return Scores(
        document=np.full(tokens, 3),
        past=np.arange(1, tokens + 1),
        nll_reference=random.random(tokens),
        nll=random.random(tokens).astype(np.float32),
        kl=random.random(tokens),
        agrees=random.random(tokens) > 0.5,
        confidence=random.random(tokens),
    )


def cell(trial: int, text: str = "1234567") -> Cell:
    answer = Answer(text, 1.0)
    return Cell("single", 512, 50, trial, ("1234567",), answer, {"int4": Answer("", 0.0)})


def same(mine: Scores, theirs: Scores) -> bool:
    pairs = zip(dataclasses.astuple(mine), dataclasses.astuple(theirs), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def test_everything_is_found_again_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.partial"
    store, said = opened(path)
    assert said == [] and store.cells == {}
    assert store.scores(0) is None and store.records("checks", tuple[SelfCheck, ...]) is None
    kept = {"int4@a b": scores(5, 1), "hf:quanto": scores(5, 2)}
    store.keep_scores(3, kept)
    hostile = cell(1, "\ud83d\u2028\x1c\x00\n\"'")
    store.keep_cells([cell(0)])
    store.keep_cells([hostile])
    checks = (SelfCheck("int4", (Check("reads", "passed", "all"),), 0.9, None, 0.0, 9.0, 0.1),)
    store.keep_records("checks", checks)

    again, said = opened(path)
    assert said == [
        f"continuing after 1 documents and 2 answers, found in {path} (--no-resume begins anew)"
    ]
    found = again.scores(3)
    assert found is not None and list(found) == list(kept)
    assert all(same(found[name], kept[name]) for name in kept)
    assert again.scores(0) is None
    assert again.cells == {key_of(it): it for it in (cell(0), hostile)}
    assert again.records("checks", tuple[SelfCheck, ...]) == checks


def test_numbers_that_are_none_are_kept(tmp_path: Path) -> None:
    store, _ = opened(tmp_path / "p")
    bad = SelfCheck("int4", (), 0.9, None, 0.0, float("nan"), float("inf"))
    store.keep_records("checks", [bad])
    [found] = opened(tmp_path / "p")[0].records("checks", tuple[SelfCheck, ...])
    assert np.isnan(found.poison) and found.clean == float("inf")


@pytest.mark.parametrize("kept", [0, 1, 40, -1])
def test_scores_that_are_cut_short_are_read_again(tmp_path: Path, kept: int) -> None:
    store, _ = opened(tmp_path / "p")
    store.keep_scores(0, {"int4": scores(50, 1)})
    file = tmp_path / "p" / "document-0.npz"
    file.write_bytes(file.read_bytes()[:kept])
    assert store.scores(0) is None


def test_scores_with_a_flipped_bit_are_read_again(tmp_path: Path) -> None:
    store, _ = opened(tmp_path / "p")
    store.keep_scores(0, {"int4": scores(500, 1)})
    file = tmp_path / "p" / "document-0.npz"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert store.scores(0) is None


def test_a_line_that_is_cut_short_is_dropped_and_nothing_joins_it(tmp_path: Path) -> None:
    store, _ = opened(tmp_path / "p")
    store.keep_cells([cell(0), cell(1)])
    file = tmp_path / "p" / "cells.jsonl"
    file.write_bytes(file.read_bytes()[:-7])
    again, _ = opened(tmp_path / "p")
    assert list(again.cells.values()) == [cell(0)]
    again.keep_cells([cell(2)])
    assert list(opened(tmp_path / "p")[0].cells.values()) == [cell(0), cell(2)]


@pytest.mark.parametrize(
    "broken", [b"{}\n", b"[1]\n", b"\xff\xfe\n", b'{"task": "single"}\n', b"\n"]
)
def test_a_line_that_is_no_answer_is_passed_over(tmp_path: Path, broken: bytes) -> None:
    store, _ = opened(tmp_path / "p")
    store.keep_cells([cell(0), cell(1)])
    file = tmp_path / "p" / "cells.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + broken + second)
    assert list(opened(tmp_path / "p")[0].cells.values()) == [cell(0), cell(1)]


@pytest.mark.parametrize("broken", [b"", b"[", b"{}", b'[{"arm": 1}]', b"\xff", b"[null]"])
def test_records_that_are_damaged_are_nothing(tmp_path: Path, broken: bytes) -> None:
    store, _ = opened(tmp_path / "p")
    (tmp_path / "p" / "checks.json").write_bytes(broken)
    assert store.records("checks", tuple[SelfCheck, ...]) is None


def test_an_answer_given_twice_counts_once(tmp_path: Path) -> None:
    store, _ = opened(tmp_path / "p")
    store.keep_cells([cell(0, "first")])
    store.keep_cells([cell(0, "second")])
    assert list(opened(tmp_path / "p")[0].cells.values()) == [cell(0, "second")]


@pytest.mark.parametrize("name", list(IDENTITY))
def test_another_identity_begins_anew(tmp_path: Path, name: str) -> None:
    store, _ = opened(tmp_path / "p")
    store.keep_scores(0, {"int4": scores(5, 1)})
    store.keep_cells([cell(0)])
    again, said = opened(tmp_path / "p", {**IDENTITY, name: 7})
    assert said == [f"starting anew: {tmp_path / 'p'} is of another model, text, arm or setting"]
    assert again.cells == {} and again.scores(0) is None
    assert json.loads((tmp_path / "p" / "identity.json").read_text())[name] == 7


def test_no_resume_begins_anew(tmp_path: Path) -> None:
    opened(tmp_path / "p")[0].keep_cells([cell(0)])
    again, said = opened(tmp_path / "p", resume=False)
    assert said == [] and again.cells == {}


@pytest.mark.parametrize("broken", [b"", b"{", b"\xff"])
def test_an_identity_that_is_damaged_begins_anew(tmp_path: Path, broken: bytes) -> None:
    opened(tmp_path / "p")[0].keep_cells([cell(0)])
    (tmp_path / "p" / "identity.json").write_bytes(broken)
    again, said = opened(tmp_path / "p")
    assert again.cells == {} and len(said) == 1


def test_a_run_killed_while_it_began_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / ".kvquant-0123456789abcdef").write_text("half")
    (tmp_path / "p" / "cells.jsonl").write_text("")
    assert opened(tmp_path / "p")[0].cells == {}
    assert [it.name for it in (tmp_path / "p").iterdir()] == ["identity.json"]


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "p" / "thesis").mkdir(parents=True)
    (tmp_path / "p" / "identity.json").write_text("{}")
    with pytest.raises(InputError, match="holds something else than an interrupted evaluation"):
        opened(tmp_path / "p", resume=False)
    assert (tmp_path / "p" / "thesis").is_dir()


def test_a_place_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("something")
    with pytest.raises(InputError, match=r"cannot write .*p: .*--report"):
        opened(tmp_path / "p")
    assert (tmp_path / "p").read_text() == "something"


def test_two_runs_do_not_write_the_same_place(tmp_path: Path) -> None:
    with claimed(tmp_path / "p"):
        store, _ = opened(tmp_path / "p", resume=False)
        store.keep_cells([cell(0)])
        with pytest.raises(InputError, match="another evaluation is writing"):
            claimed(tmp_path / "p").__enter__()
        # Beginning anew does not lose the claim.
        opened(tmp_path / "p", {"model": "b"})
        with pytest.raises(InputError, match="another evaluation is writing"):
            claimed(tmp_path / "p").__enter__()
    with claimed(tmp_path / "p"):
        pass


def test_a_place_that_cannot_be_claimed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("something")
    with pytest.raises(InputError, match=r"cannot write .*p: .*--report"):
        claimed(tmp_path / "p").__enter__()


def test_a_directory_of_directories_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "p" / "results.json").mkdir(parents=True)
    with pytest.raises(InputError, match="holds something else"):
        opened(tmp_path / "p", resume=False)


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    store, _ = opened(tmp_path / "p")
    (tmp_path / "p" / "cells.jsonl").symlink_to("/dev/full")
    with pytest.raises(InputError, match=r"cannot write .*cells.jsonl: No space left"):
        store.keep_cells([cell(0)])
