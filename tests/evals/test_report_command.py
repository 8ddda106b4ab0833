"""`kvquant report`, as it is called."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from evals.report_command import report
from evals.report_file import read_report, write_report
from evals.results import EvalReport
from kvquant.errors import FileFormatError, InputError


@pytest.fixture
def saved(eval_report: EvalReport, tmp_path: Path) -> Path:
    write_report(eval_report, tmp_path / "eval.json")
    return tmp_path / "eval.json"


@pytest.fixture
def other(eval_report: EvalReport, tmp_path: Path) -> Path:
    """A run with other needles."""
    origin = replace(eval_report.origin, seed=1)
    write_report(replace(eval_report, origin=origin), tmp_path / "other.json")
    return tmp_path / "other.json"


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(report, [*map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_one_is_shown(saved: Path) -> None:
    result = run(saved)

    assert result.exit_code == 0
    assert result.output.startswith("int8 and int4@ft-scales pass")
    assert "written" not in result.output


def test_one_as_json_is_what_was_read(saved: Path) -> None:
    assert json.loads(run(saved, "--json").output) == json.loads(saved.read_text())


def test_a_page_of_one(saved: Path, tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    result = run(saved, "--html", page)

    assert f"written: {page}" in "".join(result.output.split("\n"))
    assert page.read_text().startswith("<!doctype html>")


def test_several_are_compared(saved: Path, other: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run(saved, other, "--force", "--html", page)

    assert result.exit_code == 0
    assert "not paired: seed: 0 in eval, 1 in other" in result.output
    assert "<h1>other against eval</h1>" in page.read_text()
    values = json.loads(run(saved, other, "--force", "--json").output)
    assert [it["name"] for it in values["reports"]] == ["eval", "other"]


def test_not_paired_is_refused(saved: Path, other: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"

    with pytest.raises(InputError, match="seed: 0 in eval, 1 in other"):
        run(saved, other, "--html", page)
    assert not page.exists()


def test_no_file_is_refused(tmp_path: Path) -> None:
    assert run().exit_code == 2
    with pytest.raises(FileFormatError, match=r"missing\.json cannot be read"):
        run(tmp_path / "missing.json")


def test_a_page_that_cannot_be_written_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it is a directory"):
        run(saved, "--html", tmp_path)


def test_a_page_without_jinja_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)

    with pytest.raises(InputError, match=r"pip install 'kvquant-toolkit\[report\]'"):
        run(saved, "--html", "page.html")
    assert run(saved).exit_code == 0


def test_help_is_light() -> None:
    code = (
        "import sys\nfrom evals.report_command import report\n"
        "print(*sorted({'torch', 'jinja2', 'rich', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == ""


def test_what_is_read_is_what_was_written(saved: Path, eval_report: EvalReport) -> None:
    assert read_report(saved) == eval_report


def test_a_page_does_not_replace_the_run_that_it_shows(saved: Path, other: Path) -> None:
    before = saved.read_bytes()
    for arguments in ([saved], [other, saved, "--force"]):
        with pytest.raises(InputError, match="is the evaluation itself: name another file"):
            run(*arguments, "--html", saved)
    assert saved.read_bytes() == before
