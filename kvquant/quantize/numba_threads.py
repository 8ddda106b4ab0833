"""Runs compiled kernels on the threads of torch.

Through `GOMP_parallel` of the OpenMP library that torch has loaded, since a decode step alternates
between kernels and matrix products, after which the threads of torch spin for milliseconds. Numba's
own layer for OpenMP happens to reach the same threads, but which layer a process gets is not ours
to choose; with its other layers, and with Python threads, two pools compete for the cores. Where
there is no such function, and for little work, kernels run on the calling thread.

They are compiled on first use, for which somebody waits about ten seconds, and kept in Numba's
cache: beside the source, or in the user's cache directory where that cannot be written.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from numba import cfunc
from numba.core.caching import FunctionCache

_WORTH_THREADS = 1 << 16
"""Values that take several times as long (30 µs) as waking a thread."""

THREAD_FIELDS = "taken tasks_taken tasks joined threads_joined work scratch"
"""Ints that a job begins with. Threads take numbers of tasks at the address `taken`, and their own
number at `joined`; each has `scratch` bytes from the address `work` on."""


def stamp(*folders: Path) -> str:
    """A digest of the kernels' text: Numba's cache looks at the file of the outermost function."""
    files = sorted(file for folder in folders for file in folder.glob("numba_*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def run(function: Callable[[Any], None], signature: Any, job: Any, values: int) -> None:
    """Runs a kernel, on all threads of torch if that is worth it for so many values.

    Args:
        function: The kernel; it is called with the address of `job`.
        signature: Numba's signature of it.
        job: A ctypes structure that begins with `THREAD_FIELDS`.
        values: How many values it goes through.
    """
    kernel, address = _kernel(function, signature), ctypes.addressof(job)
    parallel = _parallel() if values >= _WORTH_THREADS else None
    # As many as torch takes, even where fewer would do: GNU OpenMP ends the others otherwise.
    threads = 1 if parallel is None else torch.get_num_threads()
    work = torch.empty(job.scratch * threads, dtype=torch.uint8, device="cpu")
    job.taken = address + type(job).tasks_taken.offset
    job.joined = address + type(job).threads_joined.offset
    job.work = work.data_ptr()
    if parallel is None or threads == 1:
        _FUNCTION(kernel.address)(address)
    else:
        parallel(kernel.address, address, threads, 0)


_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """``GOMP_parallel(function, argument, threads, flags)``, as GCC and LLVM OpenMP define it."""
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    found.restype = None
    return found


@functools.cache
def _kernel(function: Callable[[Any], None], signature: Any) -> Any:
    """The compiled function."""
    try:
        return _compiled(function, signature, cache=True)
    except (RuntimeError, OSError):  # no directory where it could be kept
        return _compiled(function, signature, cache=False)
    except Exception:
        # Whatever unpickling gives that was cut short by a full disk: without this index, the
        # files that it names are written anew.
        with suppress(OSError):
            FunctionCache(function).flush()
            return _compiled(function, signature, cache=True)
        return _compiled(function, signature, cache=False)


def _compiled(function: Callable[[Any], None], signature: Any, cache: bool) -> Any:
    return cfunc(signature, cache=cache, error_model="numpy")(function)
