"""Starting kernels: on the GPU that holds the tensors, or in Triton's interpreter."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton

from .triton_attend import attend_kernel

IS_INTERPRETED = not isinstance(attend_kernel, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels, on the CPU (``TRITON_INTERPRET=1``)."""


class Launch(NamedTuple):
    """A kernel, and what it is started with.

    Attributes:
        kernel: As `triton.jit` made it.
        grid: Numbers of programs.
        arguments: By name.
        warps: Of a program.
        stages: Tiles that loops have on their way from memory.
        fused: Whether a product and a sum may be rounded together.
        registers: Of a thread, at most; as many as the assembler thinks best, if not given.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int
    stages: int = 1
    fused: bool = True
    registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """For the compiler."""
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": self.fused,
            "maxnreg": self.registers,
        }


def start(launches: list[Launch], device: torch.device) -> None:
    """Starts kernels one after the other, and waits for none."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for launch in launches:
            launch.kernel[launch.grid](**launch.arguments, **launch.options)
