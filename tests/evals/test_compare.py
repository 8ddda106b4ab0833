"""Runs side by side: which may be, and what has changed by how much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from evals.compare import Comparison, columns, compare, short_names
from evals.html import comparison_html
from evals.pairing import differences
from evals.results import Answer, EvalReport, Interval
from evals.table import comparison_table
from kvquant.errors import InputError

Change = Callable[[EvalReport], EvalReport]


def of_perplexity(**values: Any) -> Change:
    def change(report: EvalReport) -> EvalReport:
        assert report.perplexity is not None
        return replace(report, perplexity=replace(report.perplexity, **values))

    return change


def of_retrieval(**values: Any) -> Change:
    def change(report: EvalReport) -> EvalReport:
        assert report.retrieval is not None
        return replace(report, retrieval=replace(report.retrieval, **values))

    return change


def of_origin(**values: Any) -> Change:
    return lambda report: replace(report, origin=replace(report.origin, **values))


def of_first_arm(**values: Any) -> Change:
    return lambda report: replace(
        report, arms=(replace(report.arms[0], **values), *report.arms[1:])
    )


def of_divergence(**values: Any) -> Change:
    def change(report: EvalReport) -> EvalReport:
        assert report.perplexity is not None
        arms = report.perplexity.arms
        return of_perplexity(arms={**arms, "int8": replace(arms["int8"], **values)})(report)

    return change


def without_last_cell(report: EvalReport) -> EvalReport:
    assert report.retrieval is not None
    return of_retrieval(cells=report.retrieval.cells[:-1])(report)


def other_needle(report: EvalReport) -> EvalReport:
    assert report.retrieval is not None
    first, *others = report.retrieval.cells
    return of_retrieval(cells=(replace(first, expected=("1",)), *others))(report)


UNPAIRED: list[tuple[Change, str]] = [
    (of_perplexity(corpus={"sha256": "beef"}), "text, SHA-256 of its tokens"),
    (of_perplexity(documents=9), "documents"),
    (of_perplexity(document_tokens=9), "tokens of a document"),
    (of_perplexity(prefill=9), "prefill"),
    (of_perplexity(block=9), "block"),
    (of_perplexity(scored_tokens=9), "scored tokens"),
    (of_origin(seed=9), "seed"),
    (of_retrieval(sha256="beef"), "haystack, SHA-256"),
    (of_retrieval(chat=True), "chat template"),
    (of_retrieval(answer_tokens=9), "answer tokens"),
    (without_last_cell, "needle prompts"),
    (other_needle, "needle prompts"),
    (of_origin(settings={"chunk": 512}), "setting chunk"),
]
NAMED: list[tuple[Change, str]] = [
    (of_origin(title="other"), "model"),
    (of_origin(fingerprint="other"), "fingerprint"),
    (of_origin(dtype="bfloat16"), "dtype"),
    (of_origin(device="cuda"), "device"),
    (of_origin(versions={"torch": "9"}), "torch"),
    (of_first_arm(scheme="other"), "scheme of int8"),
    (of_first_arm(scales_origin=None, kernel="other"), "kernel of int8"),
]
NEITHER: list[Change] = [
    of_origin(created="later", command="other", model="/elsewhere", settings={"new": 1}),
    of_first_arm(bits_per_value=9.0, live_nbytes=9),
    lambda report: replace(report, perplexity=None),
    lambda report: replace(report, retrieval=None),
    lambda report: replace(report, arms=report.arms[:2], verdict=None, self_checks=()),
    lambda report: of_origin(seed=9)(replace(report, retrieval=None)),
]


@pytest.mark.parametrize(("change", "what"), UNPAIRED)
def test_what_unpairs_is_refused(eval_report: EvalReport, change: Change, what: str) -> None:
    reports = [eval_report, change(eval_report)]

    assert [it.what for it in differences(reports) if it.unpaired] == [what]
    with pytest.raises(InputError, match=rf"not paired: {what}: .+ in a, .+ in b\. .*--force"):
        compare(["a", "b"], reports)
    assert compare(["a", "b"], reports, force=True).differences[0].what == what


@pytest.mark.parametrize(("change", "what"), NAMED)
def test_what_a_comparison_is_about_is_named(
    eval_report: EvalReport, change: Change, what: str
) -> None:
    found = compare(["a", "b"], [eval_report, change(eval_report)]).differences

    assert [(it.what, it.unpaired) for it in found] == [(what, False)]


@pytest.mark.parametrize("change", NEITHER)
def test_what_makes_no_difference(eval_report: EvalReport, change: Change) -> None:
    assert compare(["a", "b"], [eval_report, change(eval_report)]).differences == ()


def test_all_that_differs_is_said_at_once(eval_report: EvalReport) -> None:
    other = of_origin(seed=9)(of_perplexity(block=16)(eval_report))

    with pytest.raises(InputError, match="block: 64 in a, 16 in b; seed: 0 in a, 9 in b"):
        compare(["a", "b"], [eval_report, other])


def test_needles_of_another_hash_but_the_same_number(eval_report: EvalReport) -> None:
    (found,) = differences([eval_report, other_needle(eval_report)])

    assert found.values[0] != found.values[1]
    assert all(value.startswith("120 at 512, 1,024, 2,048 tokens, ") for value in found.values)


def rows(found: Comparison, arm: str = "int8") -> dict[str, list[str]]:
    return {row.metric: list(columns(row)) for row in found.arms[arm]}


def test_changes(eval_report: EvalReport) -> None:
    other = of_divergence(
        kl_mean=Interval(0.00082, 0.0007, 0.0009),
        kl_p99=0.0001,
        top1=Interval(0.9815, 0.98, 0.983),
        kl_slope=None,
    )(of_first_arm(live_nbytes=12_165_120)(eval_report))
    found = rows(compare(["a", "b"], [eval_report, other]))

    assert found["verdict"] == ["passed", "passed", "="]
    assert found["bits per value"] == ["8.25", "8.25", "="]
    assert found["bytes held"] == ["24.3 MB", "12.2 MB", "-50.00 %"]
    assert found["KL mean"][1:] == ["0.000820 (0.00070 – 0.00090)", "+100.00 %"]
    assert found["KL p99"] == ["0.00385", "0.000100", "÷ 38.5"]
    assert found["top-1"] == [
        "99.15 % (98.75 – 99.45 %)",
        "98.15 % (98.00 – 98.30 %)",
        "-1.00 points",
    ]
    assert found["KL per doubling"][1:] == ["–", "–"]
    assert found["lost, single at 2,048"] == ["0 of 20", "0 of 20", "="]


def test_lost_needles_are_counted(eval_report: EvalReport) -> None:
    assert eval_report.retrieval is not None
    losses = tuple(
        replace(it, losses=it.losses + 2) if it.arm == "int8" else it
        for it in eval_report.retrieval.losses
    )
    other = of_retrieval(losses=losses)(eval_report)

    found = rows(compare(["a", "b"], [eval_report, other]))
    assert found["lost, multikey at 512"] == ["0 of 20", "2 of 20", "+2"]


def test_answers_may_differ(eval_report: EvalReport) -> None:
    assert eval_report.retrieval is not None
    cells = tuple(
        replace(it, arms={**it.arms, "int8": Answer("", 0.0)}) for it in eval_report.retrieval.cells
    )

    assert not list(differences([eval_report, of_retrieval(cells=cells)(eval_report)]))


def test_arms_of_one_run_only(eval_report: EvalReport) -> None:
    first = replace(eval_report, arms=eval_report.arms[:1])
    other = replace(eval_report, arms=eval_report.arms[1:2])
    found = compare(["a", "b"], [first, other])

    assert list(found.arms) == ["int8", "int4@ft-scales"]
    assert rows(found)["verdict"] == ["passed", "–", "–"]
    assert rows(found)["bits per value"] == ["8.25", "–", "–"]
    assert rows(found, "int4@ft-scales")["bits per value"] == ["–", "4.62", "–"]


def test_three_runs_are_each_held_against_the_first(eval_report: EvalReport) -> None:
    runs = [of_first_arm(bits_per_value=bits)(eval_report) for bits in (8.0, 4.0, 16.4)]
    found = compare(["a", "b", "c"], runs)

    assert rows(found)["bits per value"] == ["8.00", "4.00", "-50.00 %", "16.4", "x 2.05"]


def test_as_json(eval_report: EvalReport) -> None:
    other = of_divergence(kl_median=0.5)(of_origin(title="other")(eval_report))
    values = compare(["a", "b"], [eval_report, other]).to_dict()

    assert values["reports"][1] == {"name": "b", "title": "other", "status": "failed"}
    assert values["differences"] == [
        {"what": "model", "values": [eval_report.origin.title, "other"], "unpaired": False}
    ]
    assert values["arms"]["int8"]["KL median"] == [0.31 * 0.00041, 0.5]
    assert values["arms"]["int8"]["verdict"] == ["passed", "passed"]


def printed(found: Comparison) -> str:
    console = Console(width=100, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(comparison_table(found))
    return capture.get()


def test_in_the_terminal(eval_report: EvalReport) -> None:
    other = of_origin(title="oth\x1ber", seed=9)(of_divergence(kl_p99=0.5)(eval_report))
    text = printed(compare(["a", "b"], [eval_report, other], force=True))

    assert "b: oth␛er, failed" in text
    assert "not paired: seed: 0 in a, 9 in b" in text
    assert ["KL", "p99", "0.00385", "0.500", "x", "130"] in map(str.split, text.splitlines())
    assert max(map(len, text.splitlines())) <= 100


def test_as_a_page(eval_report: EvalReport) -> None:
    other = of_origin(title="<b>other", seed=9)(eval_report)
    page = comparison_html(compare(["a", "<i>b"], [eval_report, other], force=True))

    assert "<h1>&lt;i&gt;b against a</h1>" in page
    assert "&lt;b&gt;other" in page
    assert "<b>other" not in page
    assert page.count("✕ not paired") == 1


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a.json", "b"], ("a", "b")),
        (["x/a.json", "y/a.json", "b.json"], ("x/a.json", "y/a.json", "b")),
        (["\x1b.json", "b.json"], ("␛", "b")),
    ],
)
def test_short_names(paths: list[str], names: tuple[str, ...]) -> None:
    assert short_names(paths) == names
