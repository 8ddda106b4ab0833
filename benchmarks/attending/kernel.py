"""One layer, one query token: attention over codes beside torch's in full precision.

The arms take turns, and figures are medians. Keys and values in full precision lie as each arm
likes them: no copy is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from caches.report import Limit, Row
from torch.nn.functional import scaled_dot_product_attention

from kvquant.attention.numba_kernels import attend
from kvquant.attention.reference import attend_reference
from kvquant.attention.stored import Run, StoredRows
from kvquant.presets import preset
from kvquant.quantize.codec import Center, Codec
from kvquant.rotary import RotaryLayout

KV_HEADS, GROUP, DIM = 8, 4, 128
TURNED = "int4, mean turned"
OWN = ("int4", TURNED, "int8", "int4-kivi", "fp8")
JUDGED_AT, GROUPS_AT = 16384, 4096
LEAST = {"int4": 6.0, "int8": 5.0}
LEAST_BF16, STRETCH = 15.0, 10.0
MOST_ERROR = 1e-4


def run(
    lengths: Sequence[int], threads: int, rounds: int, notify: Callable[[str], None]
) -> tuple[list[Row], list[Limit]]:
    """Rows of the table, and limits at 16,384 tokens."""
    torch.set_num_threads(threads)
    bandwidth = read_bandwidth()
    notify(f"memory is read at {bandwidth / 1e9:.1f} GB/s")
    rows: list[Row] = []
    limits: list[Limit] = []
    for tokens in lengths:
        notify(f"{tokens:,} tokens")
        arms, stored = _arms(tokens, GROUP)
        taken = _times(arms, rounds)
        baseline = min(taken[name] for name in arms if name.startswith("fp32"))
        for name in arms:
            rows.append(_row(name, tokens, taken, baseline, stored.get(name), bandwidth))
        if tokens == JUDGED_AT:
            limits += _limits(taken, baseline)
            limits += [Limit(f"error of {n}", _error(stored[n]), MOST_ERROR) for n in LEAST]
    return rows, limits


def run_groups(threads: int, rounds: int) -> tuple[list[Row], list[Limit]]:
    """How the time grows with the query heads that share a KV head."""
    torch.set_num_threads(threads)
    rows: list[Row] = []
    for group in (1, 2, 4, 8, 16):
        arms, _ = _arms(GROUPS_AT, group, ("int4",))
        taken = _times(arms, rounds)
        fastest = min(seconds for name, seconds in taken.items() if name.startswith("fp32"))
        rows.append(
            {
                "query heads of a KV head": group,
                "int4, ms": f"{1000 * taken['int4']:.2f}",
                "of one query head": f"{1e6 * taken['int4'] / (group * KV_HEADS):.0f} us",
                "fastest fp32, ms": f"{1000 * fastest:.2f}",
            }
        )
    return rows, []


def read_bandwidth() -> float:
    """Bytes per second that a sum over 256 MB reads."""
    values = torch.ones(64 << 20)
    values.sum()
    return 4 * values.numel() / min(_time(values.sum) for _ in range(5))


def _arms(
    tokens: int, group: int, own: Sequence[str] = OWN
) -> tuple[dict[str, Callable[[], Any]], dict[str, tuple[torch.Tensor, StoredRows]]]:
    """What is timed, and what our own arms read."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, KV_HEADS * group, 1, DIM, generator=generator)
    keys, values = (torch.randn(1, KV_HEADS, tokens, DIM, generator=generator) for _ in range(2))
    grouped = query.view(1, KV_HEADS, group, DIM)
    wide = [states.repeat_interleave(group, 1) for states in (keys, values)]
    half = [states.bfloat16() for states in (query, keys, values)]

    def matmul() -> torch.Tensor:
        weights = torch.matmul(grouped, keys.transpose(2, 3)).mul_(DIM**-0.5).softmax(-1)
        return torch.matmul(weights, values)

    arms: dict[str, Callable[[], Any]] = {
        "fp32 SDPA": lambda: scaled_dot_product_attention(query, keys, values, enable_gqa=True),
        "fp32 SDPA, heads expanded": lambda: scaled_dot_product_attention(query, *wide),
        "fp32 grouped matmul": matmul,
        "bf16 SDPA": lambda: scaled_dot_product_attention(*half, enable_gqa=True),
    }
    stored = {}
    for name in own:
        rows = _stored(name, keys, values)
        stored[name] = query, rows
        arms[name] = lambda rows=rows: attend(query, rows, DIM**-0.5)
    return arms, stored


def _stored(name: str, keys: torch.Tensor, values: torch.Tensor) -> StoredRows:
    """As a cache holds them: 4 sinks where the preset has them, codes, the newest token exact."""
    scheme, tokens = preset(name.split(",")[0]), keys.shape[2]
    positions = torch.arange(tokens, dtype=torch.int32)[None]
    codecs = (
        Codec(scheme.key, DIM, keys.dtype, center=_center(name)),
        Codec(scheme.value, DIM, keys.dtype, center=_center("int4")),
    )
    slots = []
    for codec, states in zip(codecs, (keys, values), strict=True):
        first = min(scheme.sink_tokens, tokens - 1)
        last = first + (tokens - 1 - first) // codec.unit * codec.unit
        coded = codec.encode(states[:, :, first:last], positions[:, first:last], tokens)
        runs = [Run(first, last - first, codec, coded)] if last > first else []
        runs.append(Run(last, tokens - last, None, (states[:, :, last:].contiguous(),)))
        sinks = [Run(0, first, None, (states[:, :, :first].contiguous(),))] if first else []
        slots.append((*sinks, *runs))
    return StoredRows(
        None, *slots, tokens - 1, 1, None, lambda start, stop: positions[:, start:stop], tokens
    )


def _center(name: str) -> Center:
    """Means of zero, of which half of the pairs turn: what they are makes no difference in time."""
    zeros = torch.full((KV_HEADS, DIM), 1e-3)
    if name != TURNED:
        return Center(zeros)
    turned = torch.zeros_like(zeros)
    turned[:, : DIM // 4] = turned[:, DIM // 2 : 3 * DIM // 4] = 1e-3
    return Center(zeros, turned, RotaryLayout(0, DIM, False, "half"), Angles())


class Angles:
    """A table that is made once."""

    def __init__(self) -> None:
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, bound: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the positions below `bound`."""
        if self._table is None or len(self._table[0]) < bound:
            frequencies = 10000.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
            angles = torch.arange(bound)[:, None] * frequencies
            self._table = angles.cos(), angles.sin()
        return self._table


def _times(arms: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each arm; they take turns."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds = _time(arms[name])
            if turn:  # the first round warms up
                taken[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _time(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _row(
    name: str,
    tokens: int,
    taken: dict[str, float],
    baseline: float,
    stored: tuple[torch.Tensor, StoredRows] | None,
    bandwidth: float,
) -> Row:
    row: Row = {
        "attention": name,
        "tokens": tokens,
        "ms": f"{1000 * taken[name]:.2f}",
        "fastest fp32 / it": f"{baseline / taken[name]:.2f}",
        "bf16 / it": f"{taken['bf16 SDPA'] / taken[name]:.1f}",
        "codes, GB/s": "",
        "of read bandwidth": "",
        "error": "",
    }
    if stored is not None:
        size = sum(
            tensor.numel() * tensor.element_size()
            for run in (*stored[1].keys, *stored[1].values)
            for tensor in run.tensors
        )
        speed = size / taken[name]
        row |= {
            "codes, GB/s": f"{speed / 1e9:.2f}",
            "of read bandwidth": f"{100 * speed / bandwidth:.0f} %",
            "error": f"{_error(stored):.1e}",
        }
    return row


def _error(stored: tuple[torch.Tensor, StoredRows]) -> float:
    """Against the reference in float64, on the same codes."""
    query, rows = stored
    expected = attend_reference(query, rows, DIM**-0.5)
    return float((attend(query, rows, DIM**-0.5) - expected).norm() / expected.norm())


def _limits(taken: dict[str, float], baseline: float) -> list[Limit]:
    """Times that may not be exceeded, as shares of what they are held against."""
    found = [
        Limit(f"{name} / fastest fp32, {JUDGED_AT:,} tokens", taken[name] / baseline, 1 / least)
        for name, least in LEAST.items()
    ]
    share = taken["int4"] / taken["bf16 SDPA"]
    return [*found, Limit(f"int4 / bf16 SDPA, {JUDGED_AT:,} tokens", share, 1 / LEAST_BF16)]
