"""benchmarks/attention.py: what it measures, not how fast this machine is."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module behind the script, importable as it imports it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from attending import kernel

    return kernel


def test_one_layer_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "attention.py"), "--kernel", "--threads", "1"]
    command += ["--tokens", "70", "--rounds", "1", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "attention-kernel.csv").open()))
    assert [row["attention"] for row in rows[:4]] == [
        "fp32 SDPA",
        "fp32 SDPA, heads expanded",
        "fp32 grouped matmul",
        "bf16 SDPA",
    ]
    assert {row["attention"] for row in rows[4:]} == {
        "int4",
        "int4, mean turned",
        "int8",
        "int4-kivi",
        "fp8",
    }
    assert all(float(row["error"]) < 1e-5 for row in rows[4:])
    groups = list(csv.DictReader((tmp_path / "attention-groups.csv").open()))
    assert [row["query heads of a KV head"] for row in groups] == ["1", "2", "4", "8", "16"]


def test_what_is_timed_computes_the_same(kernel: Any) -> None:
    arms, stored = kernel._arms(90, 2, ("int8",))
    outputs = {name: call().float().flatten() for name, call in arms.items()}
    exact = outputs["fp32 SDPA"]
    assert set(outputs) == {*list(arms)[:4], "int8"}
    for name, output in outputs.items():
        most = {"int8": 1e-2, "bf16 SDPA": 2e-2}.get(name, 1e-5)
        assert float((output - exact).norm() / exact.norm()) < most, name
    assert kernel._error(stored["int8"]) < 1e-6


def test_limits_say_how_many_times_faster(kernel: Any) -> None:
    taken = {"int4": 1.0, "int8": 2.0, "bf16 SDPA": 14.0}
    found = kernel._limits(taken, 8.0)
    assert [limit.is_kept for limit in found] == [True, False, False]
    assert [round(limit.most, 4) for limit in found] == [0.1667, 0.2, 0.0667]


def test_stored_tokens_cover_all_of_the_text(kernel: Any) -> None:
    keys = torch.randn(1, kernel.KV_HEADS, 200, kernel.DIM)
    for name in kernel.OWN:
        stored = kernel._stored(name, keys, keys)
        for runs in (stored.keys, stored.values):
            assert runs[0].first == 0
            assert [one.stop for one in runs[:-1]] == [one.first for one in runs[1:]]
            assert runs[-1].stop == 200
