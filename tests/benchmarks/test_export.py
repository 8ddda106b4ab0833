"""benchmarks/export.py on small checkpoints: what it measures, not how fast this machine is."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvquant.export.checkpoint import read_checkpoint

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, with the modules beside it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("export_script", BENCHMARKS / "export.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "export_script", module)  # for its dataclass
    spec.loader.exec_module(module)
    return module


def test_the_large_one_is_a_llama_of_70_billion_parameters(script: Any) -> None:
    """As Meta's Llama 3 70B: 70,553,706,496."""
    count = sum(math.prod(shape) for _, shape in script.LARGE.tensors())
    assert count == 70_553_706_496
    small = sum(math.prod(shape) for _, shape in script.SMALL.tensors())
    assert 900 < count / small < 1100
    large_names = [name for name, _ in script.LARGE.tensors()]
    assert large_names == [name for name, _ in script.SMALL.tensors()]
    assert len(large_names) == 80 * 9 + 3


@pytest.mark.parametrize("count", [1, 4])
def test_a_sparse_checkpoint_is_one(script: Any, tmp_path: Path, count: int) -> None:
    shape = script.Shape(**TINY, **HEADS)

    nbytes = script.write_sparse(tmp_path / "base", shape, count)

    checkpoint = read_checkpoint(tmp_path / "base")
    assert len(set(checkpoint.shards.values())) == count
    assert {name: each.shape for name, each in checkpoint.tensors.items()} == dict(shape.tensors())
    held = sum(each.stop - each.start for each in checkpoint.tensors.values())
    assert held == nbytes == checkpoint.index["metadata"]["total_size"]  # type: ignore[index]
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert set(info["missing_keys"]) == set(info["unexpected_keys"]) == set()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.any() for parameter in model.parameters())


def test_holes_take_no_room(script: Any, tmp_path: Path) -> None:
    script.write_holes(tmp_path / "file", {"a": (1 << 20, 1 << 10)})
    stat = os.stat(tmp_path / "file")
    assert stat.st_size > 1 << 31
    if stat.st_blocks * 512 > 1 << 31:
        pytest.skip("this filesystem has no sparse files")
    assert stat.st_blocks * 512 < 1 << 20


def test_what_is_new(script: Any, tmp_path: Path) -> None:
    for name in ("base", "export"):
        (tmp_path / name).mkdir()
    (tmp_path / "base" / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "base" / "tokenizer.json").write_bytes(bytes(500))
    os.link(tmp_path / "base" / "model.safetensors", tmp_path / "export" / "one.safetensors")
    (tmp_path / "export" / "tokenizer.json").symlink_to(tmp_path / "base" / "tokenizer.json")
    for name, size in (("config.json", 70), (script.INDEX, 60), ("two.safetensors", 5), ("a", 3)):
        (tmp_path / "export" / name).write_bytes(bytes(size))

    assert script.new_nbytes(tmp_path / "export", tmp_path / "base") == 8
    assert script.weights_nbytes(tmp_path / "base") == 1000


def row(name: str, seconds: str, new: str, verify: str) -> dict[str, str]:
    return {"checkpoint": name, "export s": seconds, "new MB": new, "verify s": verify}


def test_limits_are_of_the_right_rows(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from caches.report import judge  # type: ignore[import-not-found]

    rows = [
        row("smollm2", "5.000", "1.0000", "9.0000"),
        row("small", "99.000", "99.0000", "0.0200"),
        row("large", "5.001", "1.0001", "0.0310"),
    ]
    assert judge(script.limits(rows)) == 3
    assert capsys.readouterr().out.split("\n")[1:] == [
        "ok      seconds to export smollm2: 5 (limit 5)",
        "MISSED  seconds to export large: 5.001 (limit 5)",
        "ok      MB of new data in smollm2, besides config and index: 1 (limit 1)",
        "MISSED  MB of new data in large, besides config and index: 1 (limit 1)",
        "MISSED  verify of the large / of the small checkpoint, as many tensors: 1.55 (limit 1.5)",
        "",
    ]


def test_all_of_it(
    script: Any, tiny: Any, save_tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_tiny(tiny("llama"), tmp_path / "model")
    script.MOST_SECONDS = script.MOST_GROWTH = math.inf
    (tmp_path / "place").mkdir()
    args = argparse.Namespace(
        model=str(base),
        place=tmp_path / "place",
        repeats=1,
        quick=True,
        results=tmp_path / "results",
    )
    shape = script.Shape(**TINY, **HEADS)

    assert script.run(args, shape, shape) == 0

    with (tmp_path / "results" / "export.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [each["checkpoint"] for each in rows] == [str(base), "sparse, small", "sparse, large"]
    assert float(rows[0]["weights MB"]) == pytest.approx(0.4)
    assert 0 < float(rows[0]["new MB"]) < 0.02
    assert list((tmp_path / "place").iterdir()) == []
    shown = capsys.readouterr().out
    assert shown.count("ok      ") == 5
    assert json.loads((base / "config.json").read_text())["model_type"] == "llama"


def test_the_whole_command(script: Any, tmp_path: Path) -> None:
    script.write_sparse(tmp_path / "base", script.Shape(**TINY, **HEADS), 2)
    script.write_scales(tmp_path / "base", tmp_path / "scales.safetensors")
    assert script.whole_command(tmp_path / "base", tmp_path / "scales", tmp_path / "out") > 0
    held = read_checkpoint(tmp_path / "out").tensors
    assert len([name for name in held if name.endswith("_scale")]) == 6
