"""Decode steps of a model: attention over codes beside DynamicCache and dequantizing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from transformers import DynamicCache

from kvquant import QuantizedCache

from .report import Limit, Row
from .setting import Setting, calibrate, fill, read

CHUNK, WARM_STEPS = 1024, 3
REFERENCE = "DynamicCache"
JUDGED_AT, MOST = 4096, 0.8
EVEN_AT = 1024


def run(
    setting: Setting, contexts: list[int], steps: int, notify: Callable[[str], None]
) -> tuple[list[Row], list[Limit]]:
    """Rows of the table, and limits."""
    notify("calibrating")
    model, scales = setting.model, calibrate(setting, first=max(contexts) + 100)
    own: dict[str, dict[str, Any]] = {
        "int4": {"scales": scales},
        "int8": {},
        "fp8": {"scales": scales},
        "int4-kivi": {},
    }
    makers: dict[str, Callable[[], Any]] = {REFERENCE: lambda: DynamicCache(config=model.config)}
    for name, options in own.items():
        makers[name] = lambda name=name, options=options: QuantizedCache.from_model(
            model, name, **options
        )
    makers["int4, dequantized"] = lambda: QuantizedCache.from_model(
        model, "int4", scales=scales, attention="dequantize"
    )
    rows: list[Row] = []
    limits: list[Limit] = []
    for tokens in contexts:
        taken = _times(setting, makers, tokens, steps, notify)
        reference = taken[REFERENCE]
        for name, seconds in taken.items():
            rows.append(
                {
                    "cache": name,
                    "tokens": tokens,
                    "step, ms": f"{1000 * seconds:.1f}",
                    "/ DynamicCache": f"{seconds / reference:.2f}",
                }
            )
        if tokens == JUDGED_AT:
            limits.append(
                Limit(f"step with int4 / {REFERENCE}, {tokens:,}", taken["int4"] / reference, MOST)
            )
        if tokens == EVEN_AT:
            limits.append(
                Limit(f"step with int4 / {REFERENCE}, {tokens:,}", taken["int4"] / reference, 1.0)
            )
    notify(_means(scales))
    return rows, limits


def _times(
    setting: Setting,
    makers: dict[str, Callable[[], Any]],
    tokens: int,
    steps: int,
    notify: Callable[[str], None],
) -> dict[str, float]:
    """Median seconds of a step; the arms take turns."""
    caches = {}
    for name, make in makers.items():
        notify(f"{tokens:,} tokens into {name}")
        caches[name] = make()
        fill(setting.model, setting.tokens[:tokens], caches[name], CHUNK)
    taken: dict[str, list[float]] = {name: [] for name in makers}
    names = list(makers)
    for turn in range(WARM_STEPS + steps):
        token = setting.tokens[tokens + turn : tokens + turn + 1]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            started = time.perf_counter()
            read(setting.model, token, caches[name])
            if turn >= WARM_STEPS:
                taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _means(scales: Any) -> str:
    """In how many layers, and in how many pairs, the mean of the keys turns."""
    pairs = [layer.key.turned_pairs for layer in scales.layers.values()]
    turning = [int(found.sum()) for found in pairs if found is not None and found.any()]
    average = sum(turning) / max(1, len(turning))
    return (
        f"the mean turns in {len(turning)} of {len(pairs)} layers, in {average:.0f} rotary pairs "
        "on average"
    )
