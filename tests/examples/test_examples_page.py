"""examples/README.md speaks of the scripts that there are."""

from __future__ import annotations

import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
NUMBERS = {2: "two", 3: "three", 4: "four"}


def test_all_scripts_are_in_the_table_and_take_a_model() -> None:
    page = (EXAMPLES / "README.md").read_text()
    scripts = re.findall(r"^\| `(\w+\.py)` \|", page, flags=re.MULTILINE)
    assert sorted(scripts) == sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert f"All {NUMBERS[len(scripts)]} take `--model DIR`" in page
    for script in scripts:
        assert '"--model"' in (EXAMPLES / script).read_text(), script
