"""How long a GPU takes for something."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

_ROUNDS = 15
_FLUSHED = 256 << 20


class GpuWatch:
    """Times what a GPU does."""

    def __init__(self, device: str) -> None:
        """Holds what flushes the L2 cache."""
        self._flushed = torch.empty(_FLUSHED, dtype=torch.uint8, device=device)

    def kernels(self, call: Callable[[], Any]) -> float:
        """Median seconds of what `call` starts, without the CPU that starts it."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            call()
        return self.calls(graph.replay, _ROUNDS, warm=2)

    def calls(self, call: Callable[[], Any], rounds: int, warm: int) -> float:
        """Median seconds from the first to the last thing that `call` has a GPU do."""
        taken = []
        for turn in range(warm + rounds):
            self._flushed.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            if turn >= warm:
                taken.append(start.elapsed_time(end) / 1000)
        return statistics.median(taken)


def bandwidth(watch: Any, device: str, size: int = 1 << 30) -> float:
    """Bytes per second of a copy, read and written."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / watch.kernels(lambda: target.copy_(source))
