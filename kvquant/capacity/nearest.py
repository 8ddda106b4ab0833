"""The names that somebody may have meant."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


def nearest(name: str, names: Sequence[str]) -> str:
    """``: did you mean b200 or h200``, to be put into a message, or nothing."""
    by_lower = {other.lower(): other for other in names}
    close = [by_lower[key] for key in get_close_matches(name.lower(), by_lower, 3, 0.5)]
    return f": did you mean {' or '.join(close)}" if close else ""
