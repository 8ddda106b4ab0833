"""docs/engines.md names every engine, and launches what exports say is to be launched."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvquant.export.targets import shared, target, target_names
from kvquant.geometry import LayerGeometry, LayerKind

DOC = (Path(__file__).parents[3] / "docs" / "engines.md").read_text(encoding="utf-8")
COMMANDS = re.findall(
    r"^(?:kvquant|vllm|python|trtllm|text-gen|llama-server|lmdeploy).*", DOC, re.M
)
OPTIONS = {
    "--scales",
    "--model",
    "--adapter",
    "--engine",
    "--output",
    "--per-head",
    "--tensor-parallel",
    "--merge-adapter",
}


def test_the_table_has_all_engines_and_what_they_share() -> None:
    rows = [
        line.split("|") for line in DOC.splitlines() if re.match(r"\| `[a-z][a-z.0-9-]*` \|", line)
    ]
    assert [row[1].strip(" `") for row in rows] == target_names()
    together = [row[1].strip(" `") for row in rows if row[6].strip() == "yes"]
    assert together == [each.name for each in shared()]


@pytest.mark.parametrize(
    ("engine", "directory", "form"),
    [
        ("vllm", "ft-model-fp8kv", "fp8"),
        ("sglang", "ft-model-fp8kv", "fp8"),
        ("sglang-modelopt", "ft-model-older-sglang", "fp8"),
        ("sglang-json", "ft-model-json", "fp8"),
        ("tensorrt-llm-nvfp4", "ft-model-nvfp4kv", "fp8"),
        ("lightllm", "ft-model-lightllm", "fp8"),
        ("tgi", "ft-model-tgi", "fp8"),
        ("llama.cpp", "", "int8"),
        ("lmdeploy", "ft-model", "int8"),
    ],
)
def test_launches(make_job: Callable[..., Any], engine: str, directory: str, form: str) -> None:
    layer = LayerGeometry(LayerKind.FULL, 2, 64, 64)
    job = make_job(
        {0: (1.0, 1.0)}, layers=[layer], key_format=form, value_format=form, tensor_parallel=2
    )
    (line,) = target(engine).contribute(job).launch
    assert line.replace("{model}", directory) in COMMANDS


def test_commands_of_ours_have_known_engines_and_options() -> None:
    ours = [line.split() for line in COMMANDS if line.startswith("kvquant export")]
    assert len(ours) > 8
    for words in ours:
        assert {word for word in words if word.startswith("--")} <= OPTIONS
        assert words[words.index("--engine") + 1] in target_names()
