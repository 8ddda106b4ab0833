"""The only file that knows how Transformers versions differ (5.17 to 5.24)."""

from __future__ import annotations

import inspect
from typing import Any


def cache_argument(decoder: Any) -> str:
    """Name under which a model's forward takes its cache: ``cache``, or the older name."""
    parameters = inspect.signature(decoder.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def cache_of_call(kwargs: dict[str, Any]) -> Any:
    """The cache among the keyword arguments of a forward call, or None."""
    cache = kwargs.get("cache")
    return cache if cache is not None else kwargs.get("past_key_values")
