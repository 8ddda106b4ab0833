"""What a decode step and a prefill take with each cache, and what the caches weigh.

The arms take turns, a repetition each, and begin with another one every round: whatever else the
machine does hits all of them. Figures are medians of decode steps and the fastest prefills, since
noise only ever adds to those few.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evals.held import live_nbytes

from .arms import REFERENCE, STOCK, speed_arms
from .report import Limit, Row
from .setting import Setting, calibrate, fill, read

CHUNK = 1024
WARM_STEPS = 3
JUDGED_AT = 4096
NO_SLOWER_THAN_STOCK = ("int8", "int4-kivi", "int4")
PREFILL_LIMIT = 1.1
BITS_LIMITS = {"int4": 4.55, "fp8": 8.1}


@dataclass
class Arm:
    """A cache that takes part, and what was measured of it.

    Attributes:
        make: Makes an empty cache.
        cache: The one filled last.
        prefills: Seconds of each prefill.
        steps: Seconds of each decode step that counts.
        live: Bytes that the tokens of a prefill need.
    """

    make: Callable[[], Any]
    cache: Any = None
    prefills: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    live: int = 0

    @property
    def prefill(self) -> float:
        """Seconds of the fastest prefill."""
        return min(self.prefills)

    @property
    def step(self) -> float:
        """Seconds of the median decode step."""
        return statistics.median(self.steps)


Arms = dict[str, Arm]


def run(
    setting: Setting, contexts: list[int], steps: int, prefills: int, notify: Callable[[str], None]
) -> tuple[list[Row], list[Limit]]:
    """Rows of the table and limits, for each number of tokens in `contexts`."""
    notify("calibrating")
    makers = speed_arms(setting.model, calibrate(setting, first=max(contexts) + 1))
    _warm_up(setting, makers, notify)
    rows, limits = [], []
    for tokens in contexts:
        arms = {name: Arm(make) for name, make in makers.items()}
        for turn in range(prefills):
            notify(f"prefill of {tokens:,} tokens, round {turn + 1} of {prefills}")
            _prefill(setting, arms, tokens, turn)
        for turn in range(WARM_STEPS + steps):
            notify(f"decode step {turn + 1} of {WARM_STEPS + steps} after {tokens:,} tokens")
            _decode(setting, arms, tokens, turn)
        rows += [_row(setting, tokens, name, arms) for name in arms]
        if tokens == JUDGED_AT:
            limits = _limits(arms, tokens * setting.values_per_token)
    return rows, limits


def _warm_up(
    setting: Setting, makers: Mapping[str, Callable[[], Any]], notify: Callable[[str], None]
) -> None:
    """Compiles what is compiled on first use, before anything is timed."""
    for name, make in makers.items():
        notify(f"warming up: {name}")
        cache = make()
        fill(setting.model, setting.tokens[:256], cache, chunk=128)
        read(setting.model, setting.tokens[256:257], cache)


def _prefill(setting: Setting, arms: Arms, tokens: int, turn: int) -> None:
    """Fills a new cache of each arm."""
    for arm in _in_turn(arms, turn):
        arm.cache = arm.make()
        started = time.perf_counter()
        fill(setting.model, setting.tokens[:tokens], arm.cache, CHUNK)
        arm.prefills.append(time.perf_counter() - started)
        arm.live = live_nbytes(arm.cache)


def _decode(setting: Setting, arms: Arms, first: int, turn: int) -> None:
    """A decode step of each arm; the first ones only warm up."""
    token = setting.tokens[first + turn : first + turn + 1]
    for arm in _in_turn(arms, turn):
        started = time.perf_counter()
        read(setting.model, token, arm.cache)
        if turn >= WARM_STEPS:
            arm.steps.append(time.perf_counter() - started)


def _in_turn(arms: Arms, turn: int) -> Iterator[Arm]:
    """All arms, beginning with another one each turn."""
    order = list(arms.values())
    shift = turn % len(order)
    yield from order[shift:] + order[:shift]


def _row(setting: Setting, tokens: int, name: str, arms: Arms) -> Row:
    arm, dynamic, values = arms[name], arms[REFERENCE], tokens * setting.values_per_token
    own = hasattr(arm.cache, "workspace_nbytes")
    return {
        "cache": name,
        "tokens": tokens,
        "decode, ms": f"{1000 * arm.step:.1f}",
        "/ Dynamic": f"{arm.step / dynamic.step:.2f}",
        "/ stock": f"{arm.step / _fastest_stock(arms):.2f}",
        "prefill, s": f"{arm.prefill:.2f}",
        "prefill / Dynamic": f"{arm.prefill / dynamic.prefill:.2f}",
        "live, MB": f"{arm.live / 1e6:.2f}",
        "bits/value": f"{8 * arm.live / values:.3f}",
        "of bf16": f"{arm.live / (2 * values):.3f}",
        "of fp32": f"{arm.live / (4 * values):.3f}",
        "workspace, MB": f"{arm.cache.workspace_nbytes() / 1e6:.1f}" if own else "",
        "peak of a step, MB": f"{_peak_of_step(setting, arm.cache):.1f}",
    }


def _limits(arms: Arms, values: int) -> list[Limit]:
    stock, dynamic, at = _fastest_stock(arms), arms[REFERENCE], f"{JUDGED_AT:,} tokens"
    own = [name for name in arms if name != REFERENCE and name not in STOCK]
    return [
        *(
            Limit(f"decode step at {at}, {name} / fastest stock", arms[name].step / stock, 1.0)
            for name in NO_SLOWER_THAN_STOCK
        ),
        *(
            Limit(
                f"prefill of {at}, {name} / DynamicCache",
                arms[name].prefill / dynamic.prefill,
                PREFILL_LIMIT,
            )
            for name in own
        ),
        *(
            Limit(
                f"bits per value at {at}, {name}, heads of 64", 8 * arms[name].live / values, most
            )
            for name, most in BITS_LIMITS.items()
        ),
    ]


def _fastest_stock(arms: Arms) -> float:
    return min(arms[name].step for name in STOCK)


def _peak_of_step(setting: Setting, cache: Any) -> float:
    """Memory that a decode step takes for a while beyond what is held before it, MB (Linux)."""
    length = cache.get_seq_length()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process kept would hide the peak
    Path("/proc/self/clear_refs").write_text("5")  # puts the high-water mark back to now
    before = _status("VmRSS")
    read(setting.model, setting.tokens[length : length + 1], cache)
    return (_status("VmHWM") - before) / 1e6


def _status(name: str) -> int:
    """Bytes that the kernel says this process has."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024
