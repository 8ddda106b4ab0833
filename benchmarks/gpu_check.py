"""Are the GPU kernels right, and how fast are they? Some 6 minutes on a machine with an NVIDIA GPU.

    python benchmarks/gpu_check.py              all of it
    python benchmarks/gpu_check.py --kernels    no model, attention of one layer only

Layers have the shape of Llama-3-8B's: 32 query heads on 8 KV heads of 128. Kernels are timed as
CUDA graphs, by events, with the L2 cache flushed before each; figures are medians. What is read is
held against the bandwidth of a copy, measured in the same run. Needs no network and no model. Rows
are appended to benchmarks/results/gpu-check.csv. Exits with 1 if something is wrong or slower than
it should be, and with 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TOKENS, BATCHES = (4096, 32768, 131072), (1, 8)
SECONDS = 420
"""After which nothing new is begun."""


def main() -> None:
    """Checks, prints a table, saves it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kernels", action="store_true", help="no decode steps of a model")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the CSV file goes")
    args = parser.parse_args()
    import torch
    from gpu.rows import MISSED, save, table

    if not torch.cuda.is_available():
        print("no NVIDIA GPU here (torch.cuda.is_available() is False): nothing was checked")
        sys.exit(2)
    rows = list(everything("cuda", args.kernels))
    print(table(rows))
    save(args.results / "gpu-check.csv", torch.cuda.get_device_name(), rows)
    sys.exit(any(row.verdict == MISSED for row in rows))


def everything(device: str, kernels_only: bool) -> Iterator[Any]:
    """All rows, as long as there is time."""
    import torch
    from gpu import layer, model, right
    from gpu.rows import Row
    from gpu.watch import GpuWatch, bandwidth

    deadline = time.monotonic() + SECONDS
    watch = GpuWatch(device)
    notify("comparing with the reference")
    yield from right.checks(device)
    copied = bandwidth(watch, device)
    yield Row("copy", torch.cuda.get_device_name(), speed=f"{copied / 1e9:.0f} GB/s")
    parts = [layer.attention, *([] if kernels_only else [model.steps])]
    for part in parts:
        for tokens in TOKENS:
            for batch in BATCHES:
                if time.monotonic() > deadline:
                    yield Row(part.__name__, "", batch, tokens, verdict="no time left")
                    continue
                notify(f"{part.__name__}: {batch} x {tokens:,} tokens")
                yield from part(watch, device, batch, tokens, copied)
                torch.cuda.empty_cache()


def notify(message: str) -> None:
    """Says what is going on."""
    print(f"{time.strftime('%T')} {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
