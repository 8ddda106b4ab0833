from __future__ import annotations

import subprocess
import sys

import pytest

from kvquant.errors import ExportError
from kvquant.export.targets import shared, target, target_names

NAMES = [
    "vllm",
    "sglang",
    "sglang-modelopt",
    "sglang-json",
    "tensorrt-llm",
    "tensorrt-llm-nvfp4",
    "lightllm",
    "tgi",
    "transformers",
    "llama.cpp",
    "lmdeploy",
]


def test_names() -> None:
    assert target_names() == NAMES
    assert [target(name).name for name in NAMES] == NAMES


def test_one_directory_for_several() -> None:
    assert [each.name for each in shared()] == ["vllm", "sglang", "tgi", "transformers"]


def test_all_facts_are_there() -> None:
    for name in NAMES:
        facts = target(name).facts
        assert facts.title and facts.formats and facts.granularity and facts.files
        assert any(character.isdigit() for character in facts.versions)
        assert facts.needs_weights == (name not in ("llama.cpp", "lmdeploy"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("vlm", "did you mean vllm?"),
        ("VLLM", "did you mean vllm or lightllm?"),
        ("llamacpp", "did you mean llama.cpp"),
        ("tensorrt", "did you mean tensorrt-llm"),
    ],
)
def test_unknown_engines_that_may_be_meant(name: str, meant: str) -> None:
    with pytest.raises(ExportError, match=f"unknown engine '{name}': {meant}".replace("?", r"\?")):
        target(name)


def test_unknown_engines() -> None:
    with pytest.raises(ExportError, match="unknown engine 'zzz': There are vllm, sglang, "):
        target("zzz")


def test_a_list_of_engines_needs_no_torch() -> None:
    code = (
        "import sys; from kvquant.export.targets import target_names; target_names(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
