"""docs/architecture.md is true: it names every module, and every module that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = re.search(
    r"## Rooms\n\n```\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL
)


def test_every_module_has_its_line() -> None:
    assert ROOMS is not None
    named = set(re.findall(r"[\w.-]+\.(?:py|sh)\b", ROOMS[1]))
    files = {
        path.name
        for package in ("kvquant", "calib", "evals")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert files - named == set()
    elsewhere = {"__init__.py", "conftest.py", "demo.sh"}
    assert named - files - elsewhere == set()
