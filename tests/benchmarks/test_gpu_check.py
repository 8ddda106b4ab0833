"""benchmarks/gpu_check.py without a GPU: what it says, what it computes, that its parts run."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules behind the script, importable as it imports them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pytest.importorskip("triton")
    from gpu import held, layer, model, rows

    return {"held": held, "layer": layer, "model": model, "rows": rows}


class Watch:
    """Times what a CPU does."""

    def calls(self, call: Callable[[], Any], rounds: int, warm: int) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started


@without_gpu
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py")]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert done.returncode == 2
    assert done.stdout.count("\n") == 1 and done.stdout.startswith("no NVIDIA GPU here")


def test_attention_is_judged_on_long_texts(gpu: Any) -> None:
    timed = gpu["layer"].timed

    # 80 MB in 100 us, of 1 TB/s that can be copied; SDPA takes 320 us.
    good = timed("int4", 1, 32768, 1e-4, 3.2e-4, 80_000_000, 1e12)
    slow = timed("int4", 1, 32768, 1.1e-4, 3.2e-4, 80_000_000, 1e12)
    few = timed("int4", 1, 4096, 1e-3, 3.2e-4, 80_000_000, 1e12)
    lone = timed("fp8", 8, 131072, 1e-4, None, 80_000_000, 1e12)

    assert (good.figure, good.times, good.speed, good.share, good.verdict) == (
        *("100.0 us", "3.20", "800 GB/s", "80 %"),
        "ok",
    )
    assert (slow.times, slow.share, slow.verdict) == ("2.91", "73 %", "MISSED")
    assert (few.times, few.verdict) == ("0.32", "")
    assert (lone.times, lone.verdict) == ("", "ok")


def test_steps_are_judged_from_4096_tokens_on(gpu: Any) -> None:
    row = gpu["model"].row

    assert row("int8", 1, 4096, 0.01, 0.02).verdict == "ok"
    assert row("int8", 1, 4096, 0.03, 0.02).verdict == "MISSED"
    assert row("int8", 1, 1024, 0.03, 0.02).verdict == ""
    assert row("stock fp8", 1, 4096, 0.03, 0.02).verdict == ""
    assert row("int8", 1, 4096, 0.03, None).times == ""


def test_nan_is_within_no_limit(gpu: Any) -> None:
    assert gpu["rows"].verdict(float("nan"), 1.0) == "MISSED"


def test_errors_become_reasons(gpu: Any) -> None:
    with gpu["rows"].skipped() as reasons:
        raise ImportError("no module named quanto\nat all")

    assert reasons == ["ImportError: no module named quanto"]


def test_table_and_file(gpu: Any, tmp_path: Path) -> None:
    row, save, table = (gpu["rows"].__dict__[name] for name in ("Row", "save", "table"))
    found = [row("step", "int4", 8, 131072, "1.20 ms", "1.5", verdict="ok"), row("copy", "card")]

    assert table(found).splitlines() == [
        "part  what  batch  tokens   figure  times  speed  share  verdict",
        "step  int4      8  131072  1.20 ms    1.5                ok",
        "copy  card",
    ]
    for _ in range(2):
        save(tmp_path / "new" / "rows.csv", "H100", found)
    with (tmp_path / "new" / "rows.csv").open() as stream:
        read = list(csv.DictReader(stream))
    assert len(read) == 4
    assert (read[0]["gpu"], read[0]["what"], read[0]["tokens"]) == ("H100", "int4", "131072")


def test_bytes_of_codes(gpu: Any) -> None:
    held = gpu["held"]
    states = held.random("cpu", torch.bfloat16, 2, 3, 64)

    rows = held.stored("int4", states, 105, held.codecs("int4", 64, 3, torch.bfloat16, "cpu"))

    # 4 sinks and the token of the call in bfloat16; 100 tokens of 32 bytes, scale and middle.
    assert held.nbytes(rows) == 2 * 2 * 3 * (5 * 64 * 2 + 100 * (32 + 2 + 2))
    assert [run.count for run in rows.keys] == [4, 100, 1]


def test_checks_find_the_kernels_right() -> None:
    script = """
        from gpu.right import check, check_append
        import torch
        print(check("cpu", "int4, 16 pairs turn", torch.float32, 64, 150, window=100, new=2))
        print(check("cpu", "int4-kivi", torch.float32, 64, 400, softcap=5.0, group=2))
        print(check("cpu", "int3", torch.float32, 64, 20))
        print(check_append("cpu", "int4"))
        print(check_append("cpu", "int3"))
    """
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(map(str.strip, script.splitlines()))],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(BENCHMARKS)},
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr
    found = [line.split("verdict=")[1].strip("')") for line in done.stdout.splitlines()]
    assert found == ["ok", "ok", "MISSED", "ok", "MISSED"]


def test_steps_of_a_small_model(gpu: Any) -> None:
    model = gpu["model"]
    small = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    made = model.build_model("cpu", **small, **heads)

    for name in (model.REFERENCE, *model.OWN):
        cache = model.caches(made)[name]()
        taken = model.step(Watch(), made, cache, batch=2, tokens=300)
        assert taken > 0
        assert cache.get_seq_length() == 301
