"""One layer, one query token: attention in full precision and over codes, and the append."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvquant.attention import triton_kernels
from kvquant.quantize.codec import Codec

from .held import codecs, nbytes, random, stored
from .rows import MISSED, OK, Row, skipped, verdict

KV_HEADS, GROUP, DIM = 8, 4, 128
FORMATS = ("int4", "int4, 16 pairs turn", "int4-kivi", "int8", "fp8")
LONG = 32768
# What long texts are to reach: share of the copy bandwidth, and times SDPA.
LEAST_SHARE = {"int4": 0.75}
LEAST_TIMES = {"int4": 3.0, "fp8": 1.7}
MOST_APPEND = 0.03
LAYER_BYTES = 2 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
"""Weights of a layer, which a step reads once, too."""


def attention(watch: Any, device: str, batch: int, tokens: int, copied: float) -> Iterator[Row]:
    """Rows for a number of tokens; `copied` bytes per second can be copied."""
    states = random(device, torch.bfloat16, batch, KV_HEADS, DIM)
    query = random(device, torch.bfloat16, batch, KV_HEADS * GROUP, DIM)(1)
    baseline, size = None, 4 * batch * KV_HEADS * tokens * DIM
    with skipped() as reason:
        baseline = watch_sdpa(watch, query, states, tokens)
        yield timed("SDPA, bf16", batch, tokens, baseline, baseline, size, copied)
    if reason:
        yield Row("attention", "SDPA, bf16", batch, tokens, verdict=reason[0])
    for name in FORMATS:
        with skipped() as reason:
            made = codecs(name, DIM, KV_HEADS, torch.bfloat16, device)
            rows = stored(name, states, tokens, made)
            taken = watch.kernels(lambda rows=rows: triton_kernels.attend(query, rows, DIM**-0.5))
            yield timed(name, batch, tokens, taken, baseline, nbytes(rows), copied)
            yield append_row(watch, name, made, states, batch, tokens, LAYER_BYTES / copied + taken)
        if reason:
            yield Row("attention", name, batch, tokens, verdict=reason[0])


def watch_sdpa(
    watch: Any, query: torch.Tensor, states: Callable[[int], torch.Tensor], tokens: int
) -> float:
    """Seconds of the faster of two ways to say that query heads share a KV head."""
    keys, values = states(tokens), states(tokens)
    grouped = query.view(query.shape[0], KV_HEADS, GROUP, DIM)
    return min(
        watch.kernels(lambda: scaled_dot_product_attention(query, keys, values, enable_gqa=True)),
        watch.kernels(lambda: scaled_dot_product_attention(grouped, keys, values)),
    )


def append_row(
    watch: Any,
    name: str,
    made: Sequence[Codec],
    states: Callable[[int], torch.Tensor],
    batch: int,
    tokens: int,
    step: float,
) -> Row:
    """One token of keys and of values is quantized and appended; a layer's `step` takes longer."""
    jobs = []
    for codec in made:
        own = states(codec.unit)
        where = torch.zeros((batch, codec.unit), dtype=torch.int64, device=own.device)
        jobs.append((codec, own, codec.encode(own, where, 1), 0, where, 1))

    def append() -> None:
        for job in jobs:
            triton_kernels.append(*job)

    taken = watch.kernels(append)
    figure = f"{1e6 * taken:.1f} us, {100 * taken / step:.1f} % of a layer"
    return Row("append", name, batch, tokens, figure, verdict=verdict(taken / step, MOST_APPEND))


def timed(
    what: str,
    batch: int,
    tokens: int,
    taken: float,
    baseline: float | None,
    size: int,
    copied: float,
) -> Row:
    """What took `taken` seconds to read `size` bytes, judged where something is promised."""
    share = size / taken / copied
    times = None if baseline is None else baseline / taken
    said = ""
    if tokens >= LONG and (what in LEAST_SHARE or what in LEAST_TIMES):
        fast = share >= LEAST_SHARE.get(what, 0)
        said = OK if fast and (times is None or times >= LEAST_TIMES.get(what, 0)) else MISSED
    return Row(
        "attention",
        what,
        batch,
        tokens,
        f"{1e6 * taken:.1f} us",
        "" if times is None else f"{times:.2f}",
        f"{size / taken / 1e9:.0f} GB/s",
        f"{100 * share:.0f} %",
        said,
    )
