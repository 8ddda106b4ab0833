"""docs/evaluation.md says what the code does: thresholds, limits, tasks, trials, options."""

from __future__ import annotations

import math
import re
from pathlib import Path

import click
import numpy as np
import pytest
from scipy import stats

from evals import selfcheck, windows
from evals.command import evaluate
from evals.gate_file import DEFAULTS, MEANINGS, load_gate
from evals.report_command import report
from evals.statistics import CONFIDENT, Z, trials_needed
from evals.tasks import TASKS

DOCUMENT = Path(__file__).parents[2] / "docs" / "evaluation.md"
TEXT = DOCUMENT.read_text()
FLAT = " ".join(TEXT.split())
"""However its lines are broken."""


def section(heading: str) -> str:
    """What stands below a heading, up to the next one of its level."""
    return re.split(r"^## ", re.split(rf"^## {heading}.*$", TEXT, flags=re.M)[1], flags=re.M)[0]


def rows(text: str) -> list[list[str]]:
    """Cells of the tables in a text, without the lines below their heads."""
    lines = [line.strip("|\n ") for line in text.splitlines() if line.startswith("|")]
    return [[it.strip() for it in line.split(" | ")] for line in lines if set(line) - set("-|")]


def test_thresholds_are_those_of_the_gate() -> None:
    head, *table = (row for row in rows(section("Gate")) if len(row) == 5 and row[0])
    limits = {row[0].strip("`"): row[1:] for row in table if row[0].strip("`") in MEANINGS}
    assert head[0] == "threshold"
    found = {
        name: {limit: float(values[place]) for limit, values in limits.items()}
        for place, name in enumerate(head[1:])
    }
    assert found == {name: dict(limits) for name, limits in DEFAULTS.items()}
    assert set(MEANINGS) - set(found["8-bit"]) == {"agreement"}


def test_the_gate_file_is_one(tmp_path: Path) -> None:
    [example] = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "gate.toml").write_text(example)
    gate = load_gate(tmp_path / "gate.toml")
    limits = gate.limits("int4@ft-scales", "4-bit")
    assert limits["kl_mean"] == 0.02 and "kl_slope" not in limits


def test_lines_and_limits_of_the_self_check() -> None:
    text = section("Self-check")
    named = [row[0].strip("`") for row in rows(text)[1:]]
    head = selfcheck.__doc__ or ""
    assert named == re.findall(r"^(\w+)  +\w", head, re.M)
    factor, nats = selfcheck.POISON_FACTOR, selfcheck.POISON_NATS
    for words in (
        f"below {factor:g} × the clean KL, and below {nats:g} nat",
        f"more than {selfcheck.FLOOR_SHARE:g} of the arm's KL (and 1e-7)",
        f"exceeds {selfcheck.PADDING_SHARE:g} × the arm's KL + {selfcheck.PADDING_FACTOR:g} × ",
    ):
        assert words in text
    assert selfcheck._TINY == 1e-7


@pytest.mark.parametrize(("share", "percent"), [(0.1, 10), (0.05, 5), (0.02, 2), (0.01, 1)])
def test_trials_for_a_claim(share: float, percent: int) -> None:
    [row] = [it for it in rows(section("How much")) if it[0].startswith(f"at most {percent} %")]
    numbers = [int(it) for it in re.findall(r"\d+", row[1])]
    assert numbers == [trials_needed(share, losses) for losses in (0, 1, 2)]
    if percent < 10:
        assert re.search(rf"{numbers[0]}( trials show)? at most {percent} %", FLAT)


def test_how_much_wider_few_documents_make_an_interval() -> None:
    [row] = [it for it in rows(section("How much")) if it[0] == "any interval"]
    found = re.findall(r"(\d+)(?: documents, and it is|:) ([\d.]+)", row[1])
    assert [int(documents) for documents, _ in found] == [2, 8, 16, 32]
    for documents, wider in ((int(it), float(times)) for it, times in found):
        student = float(stats.t.ppf(0.975, documents - 1))
        expected = student / Z * math.sqrt(documents / (documents - 1))
        assert wider == pytest.approx(expected, abs=0.05 if expected > 5 else 0.005)


class Words:
    """Draws what the examples name."""

    def keys(self, generator: np.random.Generator, count: int) -> list[str]:
        return ["amber acorn", "blue lamp", "calm river", "dry gate"][:count]

    def values(self, generator: np.random.Generator, count: int) -> list[str]:
        return ["7606898", "1234567", "3141592", "2718281"][:count]

    def names(self, generator: np.random.Generator, count: int) -> list[str]:
        return ["QWRTZ", "BCDFG", "HJKLM", "NPQRS", "TVWXZ", "BDGKM", "CFHLN", "PRTWZ"][:count]


def test_examples_of_tasks_are_what_the_tasks_say() -> None:
    table = {row[0].strip("`"): row for row in rows(section("Needles")) if row[0] != "task"}
    assert list(table) == list(TASKS)
    for name in ("single", "multikey", "multivalue", "tracking"):
        quiz = TASKS[name](Words(), np.random.default_rng(0))  # type: ignore[arg-type]
        assert table[name][2] == quiz.opening
        if name in ("single", "tracking"):
            assert table[name][1].startswith(" ".join(quiz.asked[:2]))
    assert table["single"][3] == "7606898"


def test_the_drawing_is_what_is_read() -> None:
    prefill, first, second = windows.spans(10, 4, 3)
    lines = dict(re.findall(r"^(read in|past|scores) +(.*)$", section("Predictions"), re.M))
    assert re.findall(r"\d+", lines["past"]) == [str(it.past) for it in (prefill, first, second)]
    scored = [[int(it) for it in part.split()] for part in lines["scores"].split("|")[1:]]
    assert scored == [list(first.targets), list(second.targets)]
    assert f"max p > {CONFIDENT}" in TEXT


def test_options_exist() -> None:
    known = {name for it in (evaluate, report) for param in it.params for name in param.opts}
    known |= {name for param in evaluate.params for name in param.secondary_opts}
    own = re.sub(r"`llama-perplexity[^`]*`", "", TEXT)
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", own))
    assert named - known == set()
    assert {"--block", "--chunk", "--gate", "--limit", "--trials"} <= named


def test_commands_parse() -> None:
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.partition("#")[0].partition(">")[0].split()
            assert words[:2] == ["kvquant", "evaluate"]
            if "--print-gate" not in words:
                evaluate.make_context("evaluate", words[2:])


def test_links_inside_the_page_lead_somewhere() -> None:
    heads = re.findall(r"^## (.*)$", TEXT, re.M)
    anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
    assert set(re.findall(r"\]\(#([^)]*)\)", TEXT)) == anchors - {""}


def test_defaults_that_the_page_names() -> None:
    defaults = {param.name: param.get_default(click.Context(evaluate)) for param in evaluate.params}
    assert (defaults["block"], defaults["trials"]) == (64, 1)
    assert "`--block 64` is the default" in FLAT and "The default, 1," in FLAT
