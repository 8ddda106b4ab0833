"""A fine-tune whose keys have outgrown the base's scales: what the product is about.

An adapter makes one rotary pair of SmolLM2's keys 4 times as large. Static int8 with the scales of
the base clips it; with scales of its own it does not.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from calib.collect import collect
from calib.method import RangeMethod
from calib.solve import solve
from evals.gate import judge
from evals.gate_file import Gate
from evals.perplexity import score_document
from evals.reading import Reader
from evals.results import Arm, EvalReport, Perplexity, Verdict
from evals.statistics import Scores, divergence
from evals.windows import spans
from kvquant import QuantizedCache
from kvquant.geometry import CacheGeometry
from kvquant.models.loading import load, make_local, resolve
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format
from kvquant.text.corpus import read_rows, token_blocks

pytestmark = pytest.mark.real_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "outlier_adapter.py"
TENSOR = TensorScheme(tensor_format("int8"), Granularity.PER_CHANNEL)
CALL = spans(512, prefill=256, block=64)


def quiet(message: str) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def measured() -> dict[str, Scores]:
    """Scores of both sets of scales on two documents that calibration has not seen."""
    loaded = load(make_local(resolve("smollm2"), quiet), device="cpu", notify=quiet)
    rows = read_rows(None, notify=quiet)
    blocks = token_blocks(rows, loaded.tokenizer, context_length=512, samples=5).blocks
    geometry = CacheGeometry.from_config(loaded.model.config)
    base = collect(loaded.model, blocks[:3], geometry)
    adapted = runpy.run_path(str(EXAMPLE))["outlier_adapter"](
        loaded.model, layer=10, pair=23, factor=4.0
    )
    own = collect(adapted, blocks[:3], geometry)
    scheme = QuantScheme(TENSOR, TENSOR)
    scales = {
        name: solve(stats, scheme, RangeMethod()) for name, stats in (("base", base), ("own", own))
    }
    reader = Reader(adapted)
    parts: dict[str, list[Scores]] = {name: [] for name in scales}
    for number, document in enumerate(blocks[3:]):
        caches = {
            name: QuantizedCache.from_model(adapted, scheme, it, force=True)
            for name, it in scales.items()
        }
        found = score_document(reader, document, CALL, reader.reference(), caches, document=number)
        for name, scores in found.items():
            parts[name].append(scores)
    return {name: Scores.join(found) for name, found in parts.items()}


def verdict(measured: dict[str, Scores], origin: Any) -> Verdict:
    arms = {name: divergence(scores, seed=0) for name, scores in measured.items()}
    perplexity = Perplexity(2, 512, 256, 64, len(measured["own"].kl), 2.5, {}, arms)
    named = tuple(Arm(name, str(QuantScheme(TENSOR, TENSOR)), "8-bit") for name in arms)
    # 510 tokens of 2 documents show how far predictions move; shares would need more of them.
    shares = dict.fromkeys(("top1", "top1_confident", "delta_ln_ppl", "kl_slope"))
    gate = Gate(classes={"8-bit": shares})
    return judge(EvalReport(origin, named, perplexity=perplexity), gate)


def test_the_bases_scales_fail_and_its_own_pass(
    measured: dict[str, Scores], eval_report: EvalReport
) -> None:
    found = verdict(measured, eval_report.origin)
    lines = {(line.arm, line.name): line for line in found.lines}
    shown = "\n".join(
        f"{line.arm} {line.name} {line.status}: {line.detail}" for line in found.lines
    )
    assert lines["base", "kl_mean"].status == "failed", shown
    assert lines["own", "kl_mean"].status == "passed", shown
    assert found.passed_by("own"), shown
    assert not found.passed_by("base"), shown


def test_the_difference_is_no_accident(measured: dict[str, Scores]) -> None:
    base, own = (float(measured[name].kl.mean()) for name in ("base", "own"))
    assert base > 50 * own  # 0.115 and 0.0004 when this was written
