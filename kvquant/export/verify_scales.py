"""What is wrong with the scales that a loader finds, and with those that it does not find."""

from __future__ import annotations

import math
from collections.abc import Callable

from .loader_rules import layer_number
from .served_files import FLOATS, rounded
from .simulated_loader import Absent, Loaded, Stored
from .verify_report import Finding, examples, ranges, some, spread

_SLOTS = ("keys", "values")
_SMALLEST = 2.0**-126
"""Of numbers below, GPUs make zero."""


def scale_findings(loaded: Loaded) -> list[Finding]:
    """Everything worth saying about scales."""
    return [
        *_refused(loaded),
        *_missing(loaded),
        *_two_values(loaded),
        *_wrong_types(loaded),
        *_wrong_shapes(loaded),
        *_not_positive(loaded),
        *_all_one(loaded),
        *_rounded(loaded),
        *_stray(loaded),
        *_extra(loaded),
    ]


def shown(found: tuple[float, ...] | None) -> str:
    """Numbers for people."""
    if found is None:
        return "no numbers"
    text = ", ".join(f"{number:.6g}" for number in found[:4])
    return text if len(found) <= 4 else f"{text} … ({len(found)} numbers)"


# --- scales that are not found --------------------------------------------------------------------


def _missing(loaded: Loaded) -> list[Finding]:
    lacking: dict[tuple[bool, bool, bool], list[int]] = {}
    for layer in sorted(set(loaded.modules) - loaded.exact):
        key, value = map(bool, loaded.found[layer])
        if not (key and value):
            lacking.setdefault((key, value, _is_fused(loaded, layer)), []).append(layer)
    findings: list[Finding] = []
    for (key, value, fused), layers in lacking.items():
        tell = _tell_fused if fused else _tell_alone if key or value else _tell_neither

        def say(
            layer: int, where: str, tell: Callable[..., tuple[str, str]] = tell
        ) -> tuple[str, str]:
            return tell(loaded, layer, where)

        findings += spread(layers, loaded.modules, say, serious=not fused)
    return findings


def _is_fused(loaded: Loaded, layer: int) -> bool:
    """Whether a single ``kv_scale`` is meant for keys and values, and serves both."""
    key, value = loaded.found[layer]
    copied = loaded.loader.absent is Absent.COPIED and not value
    return copied and bool(key) and key[-1].name.endswith(".kv_scale")


def _tell_fused(loaded: Loaded, layer: int, where: str) -> tuple[str, str]:
    stored = loaded.found[layer][0][-1]
    return (
        f"{where}: {stored.name} gives keys and values one scale, {shown(stored.numbers)}, in a "
        f"form that engines call deprecated",
        "export separate scales for keys and values",
    )


def _tell_neither(loaded: Loaded, layer: int, where: str) -> tuple[str, str]:
    engine, names = loaded.loader.engine, loaded.loader.names(loaded.modules[layer])
    then = (
        "leaves both uninitialised: they are whatever the memory holds"
        if loaded.loader.absent is Absent.GARBAGE
        else "serves keys and values at scale 1.0"
    )
    return (
        f"{where}: {engine} finds no scale and {then}; it looks for {names[0]}"
        f"{_dropped_instead(loaded, layer)}",
        f"call the scales {names[0]} and {names[1]}",
    )


def _tell_alone(loaded: Loaded, layer: int, where: str) -> tuple[str, str]:
    key, value = loaded.found[layer]
    missing, stored = (0, value[-1]) if value else (1, key[-1])
    name = loaded.loader.names(loaded.modules[layer])[missing]
    return (
        f"{where}: {loaded.loader.engine} finds {stored.name}, but no scale of the "
        f"{_SLOTS[missing]}, and {_then(loaded.loader.absent, missing, stored)}"
        f"{_dropped_instead(loaded, layer)}",
        f"add {name}, F32 [1]",
    )


def _then(absent: Absent, missing: int, stored: Stored) -> str:
    """What an engine does where only one of two scales is found."""
    slot = _SLOTS[missing]
    if absent is Absent.ONE:
        return f"serves {slot} at scale 1.0 without a word"
    if absent is Absent.GARBAGE:
        return f"leaves that of the {slot} uninitialised"
    if absent is Absent.BOTH:
        return "uses neither: both are served at 1.0"
    if absent is Absent.COPIED and missing == 1:
        return f"serves values with the keys' scale {shown(stored.numbers)}"
    return "stops with an error"


def _dropped_instead(loaded: Loaded, layer: int) -> str:
    """The names in a layer that lead nowhere: most likely the ones that were meant."""
    dropped = [stored.name for stored in loaded.dropped if loaded.layer(stored.name) == layer]
    return f", and drops {examples(dropped)}" if dropped else ""


# --- scales that are found ------------------------------------------------------------------------


def _two_values(loaded: Loaded) -> list[Finding]:
    clashes = {
        layer: slot
        for layer, slots in loaded.found.items()
        for slot in slots
        if len({stored.numbers for stored in slot}) > 1
    }

    def say(layer: int, where: str) -> tuple[str, str]:
        told = ", ".join(
            f"{stored.name} in {stored.file.path.name} ({shown(stored.numbers)})"
            for stored in clashes[layer]
        )
        return (
            f"{where}: {loaded.loader.engine} loads different scales into one parameter, and the "
            f"last one read wins: {told}",
            "keep one of them",
        )

    return spread(list(clashes), loaded.modules, say)


def _each(
    loaded: Loaded,
    wrong: Callable[[int, Stored], bool],
    tell: Callable[[int, Stored], tuple[str, str]],
) -> list[Finding]:
    """Findings about scales that are used and wrong in some way."""
    bad: dict[int, list[Stored]] = {}
    for layer, slots in loaded.found.items():
        stored = [one for slot in slots for one in slot if wrong(layer, one)]
        if stored:
            bad[layer] = stored

    def say(layer: int, where: str) -> tuple[str, str]:
        what, fix = tell(layer, bad[layer][0])
        others = dict.fromkeys(stored.name for stored in bad[layer][1:])
        also = f" (and {', '.join(others)})" if others else ""
        return f"{where}: {what}{also}", fix

    return spread(list(bad), loaded.modules, say)


def _wrong_types(loaded: Loaded) -> list[Finding]:
    return _each(
        loaded,
        lambda layer, stored: stored.dtype not in FLOATS,
        lambda layer, stored: (
            f"{stored.name} is of type {stored.dtype}, no float of 16 bits or more",
            "store it as F32",
        ),
    )


def _wrong_shapes(loaded: Loaded) -> list[Finding]:
    def wanted(layer: int) -> str:
        heads = loaded.geometry.layers[layer].kv_heads
        return f"[{heads}, 1, 1]" if loaded.loader.per_head else "[1]"

    return _each(
        loaded,
        lambda layer, stored: stored.dtype in FLOATS and not _fits(loaded, layer, stored.shape),
        lambda layer, stored: (
            f"{stored.name} has the shape {list(stored.shape)}, but {loaded.loader.engine} wants "
            f"{wanted(layer)}",
            f"store it as F32 {wanted(layer)}",
        ),
    )


def _fits(loaded: Loaded, layer: int, shape: tuple[int, ...]) -> bool:
    loader = loaded.loader
    if loader.per_head:
        heads = loaded.geometry.layers[layer].kv_heads
        return len(shape) in loader.head_axes and shape[0] == heads == math.prod(shape)
    return math.prod(shape) == 1 if loader.shapes is None else shape in loader.shapes


def _not_positive(loaded: Loaded) -> list[Finding]:
    return _each(
        loaded,
        lambda layer, stored: not all(_SMALLEST <= n < math.inf for n in stored.numbers or ()),
        lambda layer, stored: (
            f"{stored.name} holds {shown(stored.numbers)}: {loaded.loader.engine} "
            f"{loaded.loader.not_positive}",
            "calibrate again; the scale of a layer of zeros is 1.0 or a small positive number",
        ),
    )


def _used(loaded: Loaded) -> list[float]:
    return [
        number
        for slots in loaded.found.values()
        for slot in slots
        for stored in slot
        for number in stored.numbers or ()
    ]


def _all_one(loaded: Loaded) -> list[Finding]:
    used = _used(loaded)
    if set(used) != {1.0}:
        return []
    return [
        Finding(
            f"all {len(used)} scales are exactly 1.0: nothing was calibrated, or a floor at 1.0 "
            f"swallowed it",
            "calibrate, if that is not what was meant",
            serious=False,
        )
    ]


def _rounded(loaded: Loaded) -> list[Finding]:
    held_in = loaded.loader.held_in
    used = [number for number in _used(loaded) if math.isfinite(number) and number > 0]
    changes = [change for number in used if (change := rounded(number, held_in) / number - 1)]
    if not changes:
        return []
    return [
        Finding(
            f"{loaded.loader.engine} holds scales in {held_in}: {len(changes)} of {len(used)} "
            f"change by up to {max(map(abs, changes)):.2%}, and of the "
            f"{sum(change < 0 for change in changes)} that shrink the largest values are cut off",
            f"round scales up to {held_in} before they are stored",
            serious=False,
        )
    ]


# --- names that lead nowhere ----------------------------------------------------------------------


def _refused(loaded: Loaded) -> list[Finding]:
    if not loaded.refused:
        return []
    names = [stored.name for stored in loaded.refused]
    return [
        Finding(
            f"{loaded.loader.engine} stops at {examples(names)}: this model class has no such "
            f"parameter and does not pass over it",
            f"remove {some(len(names), 'such tensor')}",
        )
    ]


def _stray(loaded: Loaded) -> list[Finding]:
    """Scales of layers that keep no keys and values, or of no layer."""
    names = [stored.name for stored in loaded.dropped if loaded.layer(stored.name) is None]
    if not names or loaded.refused:
        return []
    layers = sorted({number for name in names if (number := layer_number(name)) is not None})
    plural = "s" if len(layers) > 1 else ""
    where = (
        f"of layer{plural} {ranges(layers)}, where no attention keeps keys and values of its own"
        if layers
        else "of no layer that is known"
    )
    return [
        Finding(
            f"{some(len(names), 'scale tensor')} {where}: not used ({examples(names)})",
            "nothing, or remove them",
            layer=layers[0] if len(layers) == 1 else None,
            serious=False,
        )
    ]


def _extra(loaded: Loaded) -> list[Finding]:
    """Scales of layers that have what they need."""
    complete = {layer for layer, slots in loaded.found.items() if all(slots)}
    names = [stored.name for stored in loaded.dropped if loaded.layer(stored.name) in complete]
    if not names or loaded.refused:
        return []
    return [
        Finding(
            f"{loaded.loader.engine} drops {some(len(names), 'further scale tensor')} of layers "
            f"that have what they need: {examples(names)}",
            "nothing, if they are for another engine",
            serious=False,
        )
    ]
