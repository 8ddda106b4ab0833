"""docs/capacity.md is true: its worked answer and its table of formats."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvquant.capacity.format_names import Overrides, parse_formats
from kvquant.cli import run
from kvquant.geometry import LayerGeometry, LayerKind

DOC = (Path(__file__).parents[3] / "docs" / "capacity.md").read_text()
HEAD = LayerGeometry(LayerKind.FULL, 1, 128, 128)


def test_worked_answer(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"```sh\n(.*?)\n```\n\n```text\n(.*?)\n```", DOC, re.DOTALL)
    assert found is not None
    assert run(shlex.split(found[1])[1:]) == 0
    assert capsys.readouterr().out.rstrip() == found[2]


def test_table_of_formats() -> None:
    """Rows whose first cell names formats and whose second has as many numbers, or one."""
    rows = re.findall(r"^\| (`[^|]*`) \| ([\d, ]+) \|", DOC, re.MULTILINE)
    checked = {}
    for names, numbers in rows:
        parsed = re.findall(r"`(\w[\w-]*)`", names)
        values = [int(number) for number in numbers.split(", ")]
        for name, value in zip(parsed, values * (len(parsed) // len(values)), strict=True):
            checked[name] = value
    for name in ("bf16", "int4", "q8_0", "int4-static", "nvfp4"):
        assert name in checked
    for name, value in checked.items():
        (form,) = parse_formats([name], Overrides(), 2)
        assert form.token_nbytes(0, HEAD) == value, name
