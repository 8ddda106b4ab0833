"""How numbers and texts of an evaluation are worded, in terminal and HTML alike."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Sequence

from .results import Arm, Interval

NOTHING = "–"
"""Stands for a number that there is none of."""

_SHOWN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_JOINERS = "\u200c\u200d"
"""Formatting characters that scripts and emoji need, and that do no harm."""


def visible(text: str, keep: str = "") -> str:
    r"""`text` without characters that a terminal or browser would obey instead of showing.

    Control characters become their pictures (``␛`` for escape), others that have no look of their
    own, such as direction overrides and halves of surrogate pairs, ``‹U+202E›``.

    Args:
        text: Anything, such as what a model said.
        keep: Characters to leave as they are, such as ``\n``.

    >>> visible("a\x1b[31m"), visible("\u202e"), visible("a\nb", keep="\n") == "a\nb"
    ('a␛[31m', '‹U+202E›', True)
    """
    return "".join(it if it in keep else _visible(it) for it in text)


def _visible(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if unicodedata.category(character) in _SHOWN_CATEGORIES and character not in _JOINERS:
        return f"‹U+{code:04X}›"
    return character


def number(value: float | None) -> str:
    """Three significant digits, without an exponent from 0.0001 to 99,999.

    >>> number(0.012345), number(12.3456), number(12345.6), number(0.0), number(1.5e-7)
    ('0.0123', '12.3', '12,346', '0', '1.5e-07')
    """
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e5:
        return f"{value:.2g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def interval(value: Interval | None, show: Callable[[float], str] | None = None) -> str:
    """Both ends, the unit only once.

    >>> interval(Interval(0.012, 0.01013, 0.0145)), interval(Interval(0.95, 0.94, 0.96), percent)
    ('0.010 – 0.015', '94.0 – 96.0 %')
    """
    if value is None or math.isnan(value.low) or math.isnan(value.high):
        return NOTHING
    show = show or _rounded
    low, high = show(value.low), show(value.high)
    if low.endswith(" %") and high.endswith(" %"):
        low = low[:-2]
    return f"{low} – {high}"


def _rounded(value: float) -> str:
    """Two significant digits: an interval's ends are no more certain than that."""
    if not 1e-4 <= abs(value) < 1e2:
        return number(value)
    return f"{value:.{max(0, 1 - math.floor(math.log10(abs(value))))}f}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share; what is not all never reads 100 %, and what is something never 0 %.

    >>> percent(0.9583), percent(1.0), percent(0.99999), percent(0.00001), percent(0.0)
    ('95.8 %', '100 %', '>99.9 %', '<0.1 %', '0 %')
    """
    if share is None or math.isnan(share):
        return NOTHING
    if share in (0.0, 1.0):
        return f"{share:.0%}".replace("%", " %")
    smallest = 10.0**-digits
    if 0 < share * 100 < smallest / 2:
        return f"<{smallest:.{digits}f} %"
    if 100 - smallest / 2 <= share * 100 < 100:
        return f">{100 - smallest:.{digits}f} %"
    return f"{share * 100:.{digits}f} %"


def growth(delta_ln: float) -> str:
    """How much larger something is, from the difference of its logarithms: ``+1.3 %``, ``x 35``.

    >>> growth(0.01), growth(-0.002), growth(3.0), growth(0.0)
    ('+1.01 %', '-0.20 %', 'x 20.1', '+0.00 %')
    """
    if math.isnan(delta_ln):
        return NOTHING
    if delta_ln > math.log(2):
        return f"x {number(math.exp(min(delta_ln, 700.0)))}"
    return f"{math.expm1(delta_ln) * 100:+.2f} %"


def size(nbytes: int) -> str:
    """Bytes for people: ``1.41 MB``, powers of ten.

    >>> size(999), size(1000), size(1_412_000), size(3_000_000_000)
    ('999 B', '1.00 kB', '1.41 MB', '3.00 GB')
    """
    if nbytes < 1000:
        return f"{nbytes} B"
    power = min(4, int(math.log10(nbytes)) // 3)
    return f"{number(nbytes / 1000**power)} {'kMGT'[power - 1]}B"


def times(ratio: float) -> str:
    """How many times smaller: ``3.46 x``."""
    return NOTHING if math.isnan(ratio) else f"{number(ratio)} x"


def enumeration(names: Sequence[str], most: int = 4) -> str:
    """Names in a sentence; of very many the first, and how many others.

    >>> enumeration(["a"]), enumeration(["a", "b", "c"]), enumeration(list("abcdef"))
    ('a', 'a, b and c', 'a, b, c and 3 others')
    """
    shown = [visible(name) for name in names]
    if len(shown) > most:
        shown = [*shown[: most - 1], f"{len(shown) - most + 1} others"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]])) if shown else "none"


def plural(count: int, noun: str) -> str:
    """A count with its noun: ``1 trial``, ``2,000 trials``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def scales_of(arm: Arm) -> str:
    """Whose scales an arm uses."""
    if arm.scales is None:
        return "computed from what is stored"
    owner = f", measured on {arm.scales_origin}" if arm.scales_origin else ""
    return f"{arm.scales}{owner}"
