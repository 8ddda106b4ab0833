"""What the documentation shows can be typed: every command parses, the Python runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from transformers import AutoTokenizer

from kvquant.cli import kvquant, run

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "examples/README.md",
    "docs/capacity.md",
    "docs/files.md",
    "docs/glossary.md",
    "docs/schemes.md",
)


def blocks(page: str, language: str) -> list[str]:
    """Code blocks of a page."""
    text = (ROOT / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands() -> list[str]:
    """Every line of documentation and help that calls kvquant."""
    texts = [block for page in PAGES for block in blocks(page, "sh")]
    context = click.Context(kvquant)
    for name in kvquant.list_commands(context):
        command = kvquant.get_command(context, name)
        assert command is not None
        texts.append(command.help or "")
    texts.append(kvquant.help or "")
    # A line that ends in a backslash goes on in the next.
    joined = (re.sub(r"\\\\?\n\s*", "", text) for text in texts)
    lines = (line.strip() for text in joined for line in text.splitlines())
    return sorted({line for line in lines if line.startswith("kvquant ")})


def test_there_are_commands_to_check() -> None:
    assert len(commands()) > 12


@pytest.mark.parametrize("line", commands())
def test_command_parses(line: str) -> None:
    _, name, *arguments = shlex.split(line, comments=True)
    command = kvquant.get_command(click.Context(kvquant), name)
    assert command is not None, name
    command.make_context(name, arguments)


def test_nothing_is_left_to_fill_in() -> None:
    for page in PAGES:
        assert "@@" not in (ROOT / page).read_text(), page


def test_python_of_the_readme_runs(
    tiny: Any, save_tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny("llama")
    save_tiny(model, tmp_path / "model")
    (tmp_path / "text.txt").write_text("words and more words " * 20)
    calibrate = "calibrate --model model --data text.txt -c 32 -n 2 --output ft-scales"
    assert run(calibrate.split()) == 0
    snippets = blocks("README.md", "python")
    assert snippets
    ids = torch.arange(3, 40)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    tokenizer = AutoTokenizer.from_pretrained("model")
    given = {"model": model, "inputs": inputs, "tokenizer": tokenizer}
    for snippet in snippets:
        exec(snippet, dict(given))


def test_every_command_and_option_says_what_it_does() -> None:
    context = click.Context(kvquant)
    for name in kvquant.list_commands(context):
        command = kvquant.get_command(context, name)
        assert command is not None
        assert command.help
        assert "kvquant" in command.help, f"{name} shows no example"
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{name} {parameter.name}"
