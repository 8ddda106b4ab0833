"""Runs the tests of kernels in a process of their own, in which Triton interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("module", ["test_triton_kernels.py", "test_triton_append.py"])
def test_in_the_interpreter(module: str) -> None:
    path = Path(__file__).with_name(module)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]

    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )

    # 5: no tests were found.
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr
