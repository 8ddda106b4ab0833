"""Thresholds of the gate: their defaults, and the TOML file that changes them.

    significance = 0.05         # of the alarms, all together

    ["4-bit"]                   # every arm of this class: exact, 8-bit, 4-bit, 3-bit
    kl_mean = 0.02
    loss_rate = 0.02

    [arms."int4@ft-scales"]     # one arm, on top of its class
    kl_slope = false            # not held against anything

What a file leaves out keeps its default. What it names has to be measured: an arm that has no such
number does not pass.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvquant.errors import FileFormatError, InputError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

DEFAULT_GATE = "defaults"
"""Source of a gate that no file changes."""

Limits = dict[str, float | None]
"""Thresholds by name; None: switched off."""

MEANT_FOR = (
    "Default thresholds are meant for models of 7 billion parameters and more. Small models are "
    "more fragile: calibrated int4 gives SmolLM2-135M a mean KL of 0.0046 and 96.3 % top-1 "
    "agreement, calibrated fp8 0.0038 and 97.5 %, int8 0.0002 and 99.4 %."
)

MEANINGS = {
    "delta_ln_ppl": "growth of the log perplexity, at most; ln 1.01 = 0.00995 is 1 %",
    "kl_mean": "mean KL, at most; nats per token",
    "kl_p99": "99th percentile of the KL of single tokens, at most",
    "kl_slope": "growth of the mean KL per doubling of the context: alarm beyond it",
    "top1": "share of tokens with the same favourite next token, at least",
    "top1_confident": "the same where the unquantized cache gives its favourite more than half",
    "delta_p_rms": "root mean square change of the true token's probability, at most",
    "loss_rate": "answers right with the unquantized cache and lost, at each length, at most",
    "agreement": "share of greedily decoded tokens that are the same, at least",
}
"""Thresholds in the order in which they are held against an arm."""

DEFAULTS: Mapping[str, Mapping[str, float]] = {
    # Nothing but rounding: two attention kernels alone are 0.0002 nats apart (llama.cpp#7412).
    "exact": {
        "delta_ln_ppl": 0.001,
        "kl_mean": 0.0005,
        "kl_p99": 0.005,
        "kl_slope": 0.00005,
        "top1": 0.99,
        "top1_confident": 0.999,
        "delta_p_rms": 0.005,
        "loss_rate": 0.05,
    },
    # Five times what q8_0 costs Llama-3-8B in KL, 1.5 times in probability (llama.cpp#7412), so
    # that FP8, which is coarser, has room.
    "8-bit": {
        "delta_ln_ppl": 0.005,
        "kl_mean": 0.005,
        "kl_p99": 0.05,
        "kl_slope": 0.0005,
        "top1": 0.98,
        "top1_confident": 0.998,
        "delta_p_rms": 0.015,
        "loss_rate": 0.05,
    },
    # A little more than q4_0 costs a 35B model in KL: mean 0.008, 99 % 0.063.
    "4-bit": {
        "delta_ln_ppl": 0.00995,
        "kl_mean": 0.01,
        "kl_p99": 0.1,
        "kl_slope": 0.001,
        "top1": 0.97,
        "top1_confident": 0.995,
        "delta_p_rms": 0.02,
        "loss_rate": 0.05,
    },
    # Three times the damage of 4 bit.
    "3-bit": {
        "delta_ln_ppl": 0.03,
        "kl_mean": 0.03,
        "kl_p99": 0.3,
        "kl_slope": 0.003,
        "top1": 0.94,
        "top1_confident": 0.985,
        "delta_p_rms": 0.04,
        "loss_rate": 0.1,
    },
}
"""By scheme class; `MEANT_FOR` says for which models.

A slope of a tenth of the mean doubles it over ten doublings, from 1k to 1M tokens. What a lost
answer costs does not depend on bits, nor does the number of trials that shows a rate: 59 without a
loss for 5 %, 29 for 10 %.
"""

_AMOUNTS = ("delta_ln_ppl", "kl_mean", "kl_p99", "kl_slope")
_SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Gate:
    """Thresholds as a file gives them, on top of the defaults.

    Attributes:
        source: The file, or ``defaults``.
        significance: Probability that any alarm of a run is a false one, at most.
        classes: What the file says of scheme classes.
        arms: What it says of single arms.
    """

    source: str = DEFAULT_GATE
    significance: float = _SIGNIFICANCE
    classes: Mapping[str, Limits] = field(default_factory=dict)
    arms: Mapping[str, Limits] = field(default_factory=dict)

    def check(self, arms: Mapping[str, str]) -> None:
        """Whether the gate can judge these arms; to be asked before anything is run.

        Args:
            arms: Scheme class by name.

        Raises:
            InputError: The file names an arm that is none of them, or has nothing for one.
        """
        strangers = [name for name in self.arms if name not in arms]
        if strangers:
            raise InputError(
                f"{self.source} has thresholds for {_listed(strangers)}, which would not be "
                f"evaluated: the arms are {_listed(arms)}"
            )
        for name, scheme_class in arms.items():
            if scheme_class not in DEFAULTS and name not in self.arms:
                raise InputError(
                    f"there are no thresholds for {name}, a {scheme_class} scheme: put a section "
                    f"{_arm_section(name)} into the gate file"
                )

    def limits(self, arm: str, scheme_class: str) -> dict[str, float]:
        """What holds for an arm, in the order of `MEANINGS`; without what is switched off."""
        merged = {**DEFAULTS.get(scheme_class, {}), **self._named(arm, scheme_class)}
        values = {name: merged.get(name) for name in MEANINGS}
        return {name: value for name, value in values.items() if value is not None}

    def named(self, arm: str, scheme_class: str) -> frozenset[str]:
        """Thresholds of an arm that the file itself names: these have to be measured."""
        return frozenset(self._named(arm, scheme_class))

    def _named(self, arm: str, scheme_class: str) -> Limits:
        return {**self.classes.get(scheme_class, {}), **self.arms.get(arm, {})}

    def to_toml(self) -> str:
        """The gate as a file, all thresholds written out."""
        return "\n".join(self._toml_lines())

    def _toml_lines(self) -> Iterator[str]:
        yield from (f"# {line}".rstrip() for line in _preface())
        yield f"significance = {self.significance!r}"
        for name, defaults in DEFAULTS.items():
            yield f"\n[{json.dumps(name)}]"
            yield from _section({**defaults, **self.classes.get(name, {})})
        for name, limits in self.arms.items():
            yield f"\n{_arm_section(name)}"
            yield from _section(limits)
        yield ""


_RULES = (
    "What is left out of this file keeps its default, and is held against what was measured. What "
    "stands in it has to be measured: without needles, take loss_rate out. `false` switches a "
    'threshold off. A section such as [arms."int4"] is for a single arm.'
)


def _preface() -> Iterator[str]:
    for paragraph in (MEANT_FOR, _RULES):
        yield from textwrap.wrap(paragraph, 98)
        yield ""
    width = max(map(len, MEANINGS))
    yield from (f"{name:<{width}}  {meaning}" for name, meaning in MEANINGS.items())
    yield f"{'significance':<{width}}  probability of any false alarm in a run, at most: kl_slope"
    yield f"{'':<{width}}  and mcnemar_p (more answers lost than gained), corrected by Holm"


def _section(limits: Mapping[str, float | None]) -> Iterator[str]:
    for name in MEANINGS:
        if name in limits:
            value = limits[name]
            yield f"{name} = {'false' if value is None else repr(value)}"


def _arm_section(name: str) -> str:
    # JSON's strings are TOML's, but for this character.
    return f"[arms.{json.dumps(name, ensure_ascii=False)}]".replace("\x7f", "\\u007f")


def load_gate(path: str | Path | None) -> Gate:
    """The gate of a TOML file, or the defaults.

    Raises:
        InputError: No such file, or a section, threshold or value that there cannot be.
        FileFormatError: No TOML.
    """
    if path is None:
        return Gate()
    return _parse(_read(path), str(path))


def _read(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"cannot read the gate {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        # ValueError: its own, no UTF-8, or a number of more digits than Python reads.
        raise FileFormatError(f"{path} is no TOML file: {error}") from error


def _parse(values: dict[str, Any], path: str) -> Gate:
    sections = ("significance", *DEFAULTS, "arms")
    for name in values:
        if name not in sections:
            raise InputError(
                f"{path}: there is no {name!r} in a gate; there are {_listed(sections)}"
            )
    arms = _table(values.get("arms", {}), f"{path}, [arms]")
    return Gate(
        source=path,
        significance=_significance(values.get("significance", _SIGNIFICANCE), path),
        classes={
            name: _limits(values[name], f'{path}, ["{name}"]')
            for name in DEFAULTS
            if name in values
        },
        arms={
            name: _limits(limits, f"{path}, {_arm_section(name)}") for name, limits in arms.items()
        },
    )


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: {value!r} stands where a section is wanted")
    return value


def _limits(value: Any, where: str) -> Limits:
    section = _table(value, where)
    for name in section:
        if name not in MEANINGS:
            raise InputError(
                f"{where}: no threshold is called {name!r}; there are {_listed(MEANINGS)}"
            )
    return {name: _limit(name, it, f"{where}, {name}") for name, it in section.items()}


def _limit(name: str, value: Any, where: str) -> float | None:
    if value is False:
        return None
    if name in _AMOUNTS:
        if _is_number(value) and 0 < value < 1000:
            return float(value)
        raise InputError(f"{where}: {value!r} is no number above 0 and below 1,000")
    # Any number of trials leaves room for less than all; agreement is no estimate.
    most = 1 if name == "agreement" else math.nextafter(1, 0)
    if _is_number(value) and 0 < value <= most:
        return float(value)
    example = DEFAULTS["4-bit"].get(name, 0.9)
    raise InputError(f"{where}: {value!r} is no share such as {example}, above 0 and below 1")


def _significance(value: Any, path: str) -> float:
    if _is_number(value) and 0 < value <= 0.5:
        return float(value)
    raise InputError(f"{path}, significance: {value!r} is no number above 0, at most 0.5")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
