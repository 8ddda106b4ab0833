"""What a distribution promises: version, commands, quick start, files of reasonable size."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
from click import Command

import kvquant

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "calibrate",
    "check",
    "drift",
    "evaluate",
    "export",
    "inspect",
    "lm-eval",
    "merge",
    "plan",
    "report",
    "solve",
    "verify",
}


def imported_by(statement: str) -> set[str]:
    """Top-level packages in `sys.modules` after `statement` in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def pins(name: str) -> dict[str, str]:
    """Package to version of a constraints file, markers left out."""
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.partition(";")[0].split("==") for line in lines if not line.startswith("#"))


def test_version_is_what_the_metadata_says() -> None:
    assert version("kvquant-toolkit") == kvquant.__version__


def test_commands_all_load() -> None:
    found = {entry.name: entry for entry in entry_points(group="kvquant.commands")}

    assert found.keys() == COMMANDS
    assert all(isinstance(entry.load(), Command) for entry in found.values())


def test_one_script() -> None:
    ours = [
        (entry.name, entry.value)
        for entry in entry_points(group="console_scripts")
        if entry.dist is not None and entry.dist.name == "kvquant-toolkit"
    ]

    assert ours == [("kvquant", "kvquant.cli:main")]


@pytest.mark.parametrize(
    "statement",
    [
        "import kvquant",
        "import kvquant.cli",
        "import kvquant.geometry, kvquant.scheme",
        "from importlib.metadata import entry_points\n"
        "[entry.load() for entry in entry_points(group='kvquant.commands')]",
    ],
)
def test_light_imports_stay_light(statement: str) -> None:
    heavy = {"torch", "transformers", "peft", "datasets", "matplotlib", "numba"}

    assert imported_by(statement) & heavy == set()


def test_imported_by_sees_torch() -> None:
    assert "torch" in imported_by("import torch")


def test_compat_constraints_differ_only_where_they_must() -> None:
    tested, compat = pins("constraints.txt"), pins("constraints-compat.txt")

    different = {name for name in tested if tested[name] != compat.get(name)}
    assert tested.keys() == compat.keys()
    assert different == {"transformers", "huggingface-hub"}
    assert compat["transformers"] == "5.17.0"


def test_assets_are_under_two_megabytes() -> None:
    files = [file for file in (ROOT / "tests" / "assets").rglob("*") if file.is_file()]

    assert files
    assert [file.name for file in files if file.stat().st_size >= 2_000_000] == []
