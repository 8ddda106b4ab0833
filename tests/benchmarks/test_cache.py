"""benchmarks/cache.py on a tiny model: what it measures, not how fast this machine is."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from evals.held import live_nbytes
from kvquant import QuantizedCache

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules behind the script, importable as it imports them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from caches import arms, quality, report, setting

    return {"arms": arms, "quality": quality, "report": report, "setting": setting}


@pytest.fixture
def text(caches: Any, tiny: Any) -> Any:
    """The setting that a tiny model makes with random tokens."""
    tokens = torch.randint(3, 128, (2049 + 16384,), generator=torch.manual_seed(0))
    return caches["setting"].Setting(tiny("llama", max_position_embeddings=4096), tokens)


def test_speed_end_to_end(tiny: Any, save_tiny: Any, tmp_path: Path) -> None:
    model = save_tiny(tiny("llama", max_position_embeddings=4096), tmp_path / "model")
    command = [sys.executable, str(BENCHMARKS / "cache.py"), "--speed", "--threads", "1"]
    command += ["--model", str(model), "--results", str(tmp_path / "results")]
    command += ["--contexts", "300", "--steps", "2", "--prefills", "1"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=600)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok      bits per value at 4,096 tokens, int4, heads of 128" in done.stdout
    with (tmp_path / "results" / "cache-speed.csv").open() as stream:
        bits = {row["cache"]: row["bits/value"] for row in csv.DictReader(stream)}
    assert bits["DynamicCache"] == bits["none"] == "32.000"
    assert bits["fp8"] == "8.000"


def test_scores_are_those_of_a_small_example(caches: Any) -> None:
    reference = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64)
    found = torch.tensor([[0.9, 0.1], [0.25, 0.75]])
    contestant = caches["quality"].Contestant(cache=None)

    contestant.score(found.log(), reference.log(), torch.tensor([0, 1]))

    divergence = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert contestant.divergence == pytest.approx(divergence, abs=1e-6)
    assert contestant.nll == pytest.approx(-math.log(0.9) - math.log(0.75), abs=1e-6)
    assert contestant.agreed == 2


def test_quality_tells_exact_from_coarse(caches: Any, text: Any) -> None:
    made = {name: QuantizedCache.from_model(text.model, name) for name in ("none", "int8", "int3")}

    everyone = caches["quality"].measure(text, made, lambda message: None)

    assert {it.tokens for it in everyone.values()} == {2048 - 256}
    assert everyone["none"].divergence == pytest.approx(0, abs=1e-9)
    assert 1e-9 < everyone["int8"].divergence < everyone["int3"].divergence / 10


def test_stock_caches_weigh_what_their_formats_say(caches: Any, text: Any) -> None:
    made = caches["arms"].quality_arms(text.model, caches["setting"].calibrate(text, first=2049))
    names = ("stock quanto int4", "stock hqq int4", "stock fp8")
    filled = {name: made[name]() for name in names}
    filled["DynamicCache"] = DynamicCache(config=text.model.config)
    for cache in filled.values():
        caches["setting"].fill(text.model, text.tokens[:512], cache, chunk=256)

    values = 512 * text.values_per_token
    assert text.values_per_token == 2 * 2 * 2 * 16  # layers, slots, KV heads, width
    bits = {name: 8 * live_nbytes(it) / values for name, it in filled.items()}
    # float32 scale and zero point for each group of 64; fp8 has one scale a slot.
    assert bits["stock quanto int4"] == bits["stock hqq int4"] == 5.0
    assert bits["stock fp8"] == pytest.approx(8.0, abs=0.01)
    assert bits["DynamicCache"] == 32.0


def test_fixed_means_are_all_that_is_left_of_turned_ones(caches: Any, text: Any) -> None:
    scales = caches["setting"].calibrate(text, first=2049)

    fixed = caches["arms"].with_fixed_means(scales)

    keys = [layer.key for layer in fixed.layers.values()]
    assert not any(bool(key.turned.any()) for key in keys)
    assert all(key.mean.equal(scales.layers[i].key.mean) for i, key in enumerate(keys))


def test_a_missed_limit_is_named(caches: Any, capsys: pytest.CaptureFixture[str]) -> None:
    limit = caches["report"].Limit

    missed = caches["report"].judge([limit("a / b", 1.1, 1.1), limit("c / d", 2.0, 1.5)])

    assert missed == 1
    assert capsys.readouterr().out.split("\n")[1:] == [
        "ok      a / b: 1.1 (limit 1.1)",
        "MISSED  c / d: 2 (limit 1.5)",
        "",
    ]


def test_rows_are_appended_under_one_heading(caches: Any, tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    for figure in (1, 2):
        caches["report"].save(path, [{"cache": "int4, 64 exact", "figure": figure}])

    with path.open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["cache"], row["figure"]) for row in rows] == [
        ("int4, 64 exact", "1"),
        ("int4, 64 exact", "2"),
    ]
