"""How much memory a GPU has left for the cache, and how fast it reads."""

from __future__ import annotations

from dataclasses import dataclass

from kvquant.errors import InputError

from .hardware import Gpu, find_gpu
from .wording import GB

_OVERHEAD_SHARE = 0.05
"""Memory that is kept free unless the user says how much: context, activations, graphs."""


@dataclass(frozen=True)
class Memory:
    """The memory of one GPU.

    Attributes:
        name: Of the GPU, for people.
        source: Who says how large and how fast it is.
        nbytes: All of it.
        overhead_nbytes: Kept free of weights and cache.
        bandwidth: Bytes a second; None if it is not known.
    """

    name: str
    source: str
    nbytes: int
    overhead_nbytes: int
    bandwidth: float | None

    def free_nbytes(self, weights_nbytes: int) -> int:
        """Bytes that are left for the cache.

        Raises:
            InputError: None: the weights do not fit.
        """
        free = self.nbytes - self.overhead_nbytes - weights_nbytes
        if free < 0:
            raise InputError(
                f"{weights_nbytes / GB:.2f} GB of weights and {self.overhead_nbytes / GB:.2f} GB "
                f"of overhead do not fit into the {self.nbytes / GB:.2f} GB of {self.name}: use "
                "more GPUs (--tp, --pp), a larger one, or smaller weights (--weights-dtype)"
            )
        return free


def choose_memory(
    gpu: str | None,
    memory_gb: float | None,
    bandwidth_tbs: float | None,
    overhead_gb: float | None,
) -> Memory | None:
    """The GPU that the command line asks for, or None if it asks for none.

    Args:
        gpu: A name of the table.
        memory_gb: In place of the table's, in units of 10^9 bytes.
        bandwidth_tbs: In place of the table's, in units of 10^12 bytes a second.
        overhead_gb: In place of 5 % of the memory, in units of 10^9 bytes.

    Raises:
        InputError: An unknown GPU, a bandwidth without a memory, or more overhead than memory.
    """
    if gpu is None and memory_gb is None:
        if bandwidth_tbs is not None or overhead_gb is not None:
            raise InputError("--bandwidth-tbs and --overhead-gb go with --gpu or --memory-gb")
        return None
    known = Gpu("the GPU", 0, None, "") if gpu is None else find_gpu(gpu)
    size = round((known.memory_gb if memory_gb is None else memory_gb) * GB)
    overhead = round(size * _OVERHEAD_SHARE if overhead_gb is None else overhead_gb * GB)
    if overhead >= size:
        raise InputError(f"--overhead-gb {overhead / GB:g} leaves nothing of {size / GB:g} GB")
    speed = known.bandwidth_tbs if bandwidth_tbs is None else bandwidth_tbs
    own = [memory_gb is not None and "memory", bandwidth_tbs is not None and "bandwidth"]
    told = ", ".join(f"{word} as given" for word in own if word)
    source = "; ".join(part for part in (known.source, told) if part)
    return Memory(known.name, source, size, overhead, None if speed is None else speed * 1e12)
