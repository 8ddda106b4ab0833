"""Out of memory: at which length, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from kvquant.cache.sizes import live_nbytes
from kvquant.errors import InputError
from kvquant.presets import preset

from .arms import BoundArm
from .reading import Reader
from .wording import plural, size

_ROOM = 0.8
"""Share of the free memory that caches may take: activations want some as well."""


@contextmanager
def naming_length(
    reader: Reader, arms: Sequence[BoundArm], length: int, batch: int = 1
) -> Iterator[None]:
    """Turns running out of memory into advice.

    Args:
        reader: Of the model.
        arms: Read side by side.
        length: Tokens of each text.
        batch: Texts read together.

    Raises:
        InputError: Memory ran out.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_memory and "can't allocate memory" not in str(error):
            raise
        message = _message(reader, arms, length, batch, _free(reader.decoder.device))
        raise InputError(message) from error


def _message(
    reader: Reader, arms: Sequence[BoundArm], length: int, batch: int, free: int | None
) -> str:
    needed = batch * caches_nbytes(reader, arms, length)
    texts = f" in a batch of {batch}" if batch > 1 else ""
    message = (
        f"out of memory at {length:,} tokens{texts}: {plural(len(arms), 'arm')} and the "
        f"unquantized cache take {size(needed)} there"
    )
    advice = []
    if free is not None:
        message += f", {size(free)} are free"
        fits = int(length * _ROOM * free / needed) if needed else 0
        if 0 < fits < length:
            advice.append(f"--lengths up to {fits:,}")
    advice += ["--batch-size 1"] if batch > 1 else []
    advice += ["fewer arms at a time"] if len(arms) > 1 else []
    advice.append("--chunk 1024, if it is the prefill's activations")
    return (
        f"{message}. Use {', or '.join(advice)}. What was found so far is kept: the same command "
        "goes on there"
    )


def caches_nbytes(reader: Reader, arms: Sequence[BoundArm], length: int) -> int:
    """Bytes of the unquantized cache and of all arms' for one text.

    A cache of Transformers, of which there is no formula, counts as unquantized.
    """
    dtype = reader.decoder.dtype.itemsize
    exact = preset("none")
    schemes = [exact, *(arm.arm.scheme or exact for arm in arms)]
    return sum(live_nbytes(reader.geometry, it, length, dtype) for it in schemes)


def _free(device: torch.device) -> int | None:
    """Bytes that can be had now, where that is known."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(next(kilobytes, 0)) or None
