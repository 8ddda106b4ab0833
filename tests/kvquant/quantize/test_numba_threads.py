"""Kernels find the threads of torch, and are compiled wherever they come from."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvquant.quantize import numba_threads
from kvquant.quantize.numba_panel import SIGNATURE


def test_a_function_that_cannot_be_cached_is_compiled_all_the_same() -> None:
    scope: dict[str, Callable[[object], None]] = {}
    exec("def nothing(pointer):\n    pass\n", scope)  # Numba finds no file of its source
    assert numba_threads._kernel(scope["nothing"], SIGNATURE).address


CUT_SHORT = """
import sys
from pathlib import Path
from numba import types
from kvquant.quantize.numba_threads import _kernel

def answer(pointer):
    return pointer + 1

def load():
    kernel = _kernel.__wrapped__(answer, types.int64(types.int64))
    assert kernel.ctypes(41) == 42
    return "from the file" if kernel.cache_hits else "compiled"

print(load(), load())
for kind in ("nbi", "nbc"):
    (file,) = Path(sys.argv[1]).rglob(f"*.{kind}")
    for part in (0, 40, file.stat().st_size // 2, file.stat().st_size - 1):
        file.write_bytes(file.read_bytes()[:part])
        print(load(), load())
"""


def test_files_of_numbas_cache_that_were_cut_short_are_replaced(tmp_path: Path) -> None:
    """In a process of its own, since Numba reads where its cache is when it is imported."""
    script, place = tmp_path / "cut_short.py", tmp_path / "cache"
    script.write_text(CUT_SHORT)
    done = subprocess.run(
        [sys.executable, script, place],
        env={**os.environ, "NUMBA_CACHE_DIR": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["compiled from the file"] * 9, done.stderr


@pytest.mark.skipif(os.name != "posix", reason="torch brings another OpenMP")
def test_the_threads_of_torch_are_found() -> None:
    assert numba_threads._parallel() is not None
