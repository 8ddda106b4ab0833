"""The command line around the commands: streams that break, and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvquant import cli

KVQUANT = Path(sys.executable).with_name("kvquant")


def help_into(output: int) -> subprocess.CompletedProcess[str]:
    """``kvquant merge --help`` with a file descriptor for stdout."""
    return subprocess.run(
        [KVQUANT, "merge", "--help"], stdout=output, stderr=subprocess.PIPE, text=True, timeout=60
    )


def main_with(run: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The console entry point, with lines of Python in the place of the commands."""
    lines = "".join(f"    {line}\n" for line in run.splitlines())
    code = f"import os, signal, time\nfrom kvquant import cli\ndef run(arguments):\n{lines}"
    return subprocess.run(
        [sys.executable, "-c", f"{code}cli.run = run\ncli.main()\n"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_it_runs_as_a_module_too() -> None:
    command = [sys.executable, "-m", "kvquant", "merge", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    script = subprocess.run(
        [KVQUANT, "merge", "--help"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == script.stdout
    assert done.stdout.startswith("Usage: kvquant merge ")


def test_nobody_reads_the_output() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = help_into(writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_output_that_cannot_be_written() -> None:
    with Path("/dev/full").open("w") as full:
        done = help_into(full.fileno())
    assert done.returncode == 2
    assert done.stderr == "error: cannot read or write the output: No space left on device\n"


def test_characters_that_the_terminal_lacks() -> None:
    done = main_with("print('±0.5')", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "?0.5\n"), done.stderr


def test_termination_unwinds() -> None:
    kill = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
    done = main_with(f"try:\n    {kill}\nfinally:\n    print('cleaned up')")
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "cleaned up\n"), done.stderr


def test_the_home_of_somebody_who_has_none() -> None:
    found = subprocess.run(
        [KVQUANT, "plan", "--model", "~no-such-user/model", "--gpu", "h100"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 2
    assert found.stderr.startswith("error: ") and found.stderr.count("\n") == 1


@pytest.mark.parametrize(("command", "goes_on"), [("check", False), ("calibrate", True)])
def test_an_interruption_says_what_goes_on_later(
    command: str, goes_on: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_invoke", interrupted)
    assert cli.run([command, "model"]) == 130
    said = capsys.readouterr().err
    assert said.startswith("interrupted; existing files are as they were")
    assert ("a long run goes on" in said) == goes_on
