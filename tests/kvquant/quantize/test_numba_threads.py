"""Kernels find the threads of torch, and are compiled wherever they come from."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from kvquant.quantize import numba_threads
from kvquant.quantize.numba_panel import SIGNATURE


def test_a_function_that_cannot_be_cached_is_compiled_all_the_same() -> None:
    scope: dict[str, Callable[[object], None]] = {}
    exec("def nothing(pointer):\n    pass\n", scope)  # Numba finds no file of its source
    assert numba_threads._kernel(scope["nothing"], SIGNATURE).address


@pytest.mark.skipif(os.name != "posix", reason="torch brings another OpenMP")
def test_the_threads_of_torch_are_found() -> None:
    assert numba_threads._parallel() is not None
