"""Hooks on a model's decoder that tell a quantized cache of each call: padding, positions, its end.

`update` is told none of that by Transformers. The hooks hold no cache: they look for one among the
arguments of the call, so that none outlives its user.
"""

from __future__ import annotations

from typing import Any

import torch

from kvquant.fingerprint import check_model
from kvquant.models.adapters import base_model

from .transformers_compat import by_name, cache_of_call, restore_attention

_HOOKED = "_kvquant_cache_hook"


def install_hook(decoder: torch.nn.Module) -> None:
    """Puts the hooks on a decoder, once."""
    if getattr(decoder, _HOOKED, None) is None:
        begin = decoder.register_forward_pre_hook(_tell_cache, with_kwargs=True)
        end = decoder.register_forward_hook(_tell_cache_of_end, with_kwargs=True)
        object.__setattr__(decoder, _HOOKED, (begin, end))


def remove_hook(model: Any) -> None:
    """Takes off what `QuantizedCache.from_model` put on a model's decoder."""
    check_model(model)
    decoder = base_model(model).get_decoder()
    restore_attention(decoder)
    for handle in getattr(decoder, _HOOKED, None) or ():
        handle.remove()
    object.__setattr__(decoder, _HOOKED, None)


def _tell_cache(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tells the quantized cache of a call, if it has one, what the call is about."""
    call = by_name(module, args, kwargs)
    begin_call = getattr(cache_of_call(call), "begin_call", None)
    if begin_call is not None:
        # Asked here, where a compiler sees it: what it calls does not know.
        begin_call(call, torch.compiler.is_compiling(), True)


def _tell_cache_of_end(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any
) -> None:
    """Tells the quantized cache of a call, if it has one, that all of the call is in it."""
    end_call = getattr(cache_of_call(by_name(module, args, kwargs)), "end_call", None)
    if end_call is not None:
        end_call()
