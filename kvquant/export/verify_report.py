"""What `verify` finds: which scales each layer would be served with, and what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_MOST_LINES = 4
"""Layers that get a line each; more with the same trouble share one."""


@dataclass(frozen=True)
class Finding:
    """One thing that a user should know about an export.

    Attributes:
        what: What was found, one sentence with names and numbers.
        fix: What to do about it; empty where nothing is to be done.
        layer: The layer it is about, None if it is about several or none.
        serious: Whether the engine would not load or not serve the scales as meant.
    """

    what: str
    fix: str = ""
    layer: int | None = None
    serious: bool = True


@dataclass(frozen=True)
class LayerVerdict:
    """The scales that an engine would serve one layer with.

    Attributes:
        layer: The layer, from 0.
        key: What the key scale that the loader takes is called, None if it finds none.
        value: Likewise for values.
        key_scale: The number that keys are served with, or one per KV head; empty if nobody can
            tell (uninitialised memory, an engine that does not start).
        value_scale: Likewise for values.
        source: Where these numbers come from.
    """

    layer: int
    key: str | None
    value: str | None
    key_scale: tuple[float, ...]
    value_scale: tuple[float, ...]
    source: str


@dataclass(frozen=True)
class VerifyReport:
    """What an engine would make of a directory.

    Attributes:
        engine: As asked for.
        directory: The directory looked at.
        layers: One entry per layer that keeps keys and values of its own.
        findings: Everything worth saying, serious ones first.
    """

    engine: str
    directory: str
    layers: tuple[LayerVerdict, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether it would be served as meant: nothing serious was found."""
        return not any(finding.serious for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; numbers that JSON lacks as ``"nan"`` and ``"inf"``."""
        layers = [
            {
                **asdict(layer),
                "key_scale": [_number(scale) for scale in layer.key_scale],
                "value_scale": [_number(scale) for scale in layer.value_scale],
            }
            for layer in self.layers
        ]
        return {
            "engine": self.engine,
            "directory": self.directory,
            "ok": self.ok,
            "layers": layers,
            "findings": [asdict(finding) for finding in self.findings],
        }


def _number(scale: float) -> float | str:
    return scale if math.isfinite(scale) else str(scale)


def spread(
    layers: Sequence[int],
    every: Iterable[int],
    say: Callable[[int, str], tuple[str, str]],
    *,
    serious: bool = True,
) -> list[Finding]:
    """Findings about the same trouble in several layers: a line each, or one for many.

    Args:
        layers: Those in trouble.
        every: All layers that could be.
        say: What is wrong and what to do, given a layer and how to call it: ``layer 3``, or
            ``all 32 layers`` with the first of them as the example.
        serious: As in `Finding`.
    """
    layers, count = sorted(layers), len(set(every))
    together = len(layers) > _MOST_LINES or (len(layers) > 1 and len(layers) == count)
    if not layers:
        return []
    if together:
        where = f"all {count} layers" if len(layers) == count else f"layers {ranges(layers)}"
        return [Finding(*say(layers[0], where), serious=serious)]
    return [
        Finding(*say(layer, f"layer {layer}"), layer=layer, serious=serious) for layer in layers
    ]


def ranges(numbers: Iterable[int]) -> str:
    """``0-4, 7``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def examples(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = len(names) - 2
    return ", ".join(names[:2]) + (f" and {more:,} more" if more > 0 else "")


def some(number: int, thing: str) -> str:
    """``1 tensor``, ``1,000 tensors``."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
