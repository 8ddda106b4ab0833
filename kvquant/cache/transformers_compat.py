"""The only file that knows how Transformers versions differ (5.17 to 5.24)."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import transformers
from packaging.version import Version

_COUNTS_WHAT_TO_KEEP = Version(transformers.__version__) < Version("5.18")
"""Whether `crop` of a positive number still means the length to keep."""


def cache_argument(decoder: Any) -> str:
    """Name under which a model's forward takes its cache: ``cache``, or the older name."""
    parameters = inspect.signature(decoder.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def cache_of_call(kwargs: dict[str, Any]) -> Any:
    """The cache among the keyword arguments of a forward call, or None."""
    cache = kwargs.get("cache")
    return cache if cache is not None else kwargs.get("past_key_values")


def by_name(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a forward call by their names."""
    if not args:
        return kwargs
    return {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}


def tokens_to_remove(tokens: int, length: int) -> int:
    """How many of `length` tokens ``crop(tokens)`` takes back.

    Raises:
        ValueError: A positive number, where Transformers no longer knows it either.
    """
    tokens = int(tokens)  # assisted decoding of 5.17 hands a tensor over
    if tokens <= 0:
        return min(-tokens, length)
    if _COUNTS_WHAT_TO_KEEP:
        return max(length - tokens, 0)
    raise ValueError(
        f"crop takes the number of tokens to take back as a negative number, not {tokens}"
    )


_ATTENTION_BEFORE = "_kvquant_attention_before"


def use_attention(decoder: Any) -> None:
    """Makes a decoder attend with ``kvquant``, if it would use ``sdpa`` or knows only ``eager``.

    One whose attention is none of Transformers' functions stays as it is.
    """
    from kvquant.attention.interface import NAME, register

    register()
    before = decoder.config._attn_implementation
    is_default = before == "sdpa" or (before == "eager" and not decoder._supports_sdpa)
    if is_default and decoder._can_set_attn_implementation() and not _asks_for_sdpa(decoder):
        decoder.set_attn_implementation(NAME)
        object.__setattr__(decoder, _ATTENTION_BEFORE, before)


def _asks_for_sdpa(decoder: Any) -> bool:
    """Whether a model does under the name ``sdpa`` what it leaves to others under another name.

    DeepSeek V3.2 masks what its indexer did not pick. (Gemma 4: see `attention_mask`.)
    """
    module = sys.modules.get(type(decoder).__module__)
    if module is None or ".gemma4" in module.__name__:
        return False
    return bool(re.search(r'_attn_implementation (?:==|in) .*"sdpa"', inspect.getsource(module)))


def restore_attention(decoder: Any) -> None:
    """Undoes `use_attention`."""
    before = getattr(decoder, _ATTENTION_BEFORE, None)
    if before is not None:
        decoder.set_attn_implementation(before)
        object.__setattr__(decoder, _ATTENTION_BEFORE, None)
