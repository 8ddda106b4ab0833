"""Attention as Transformers calls it, under the name ``kvquant``.

::

    keys, values are handles ── a kernel for device and formats? ── yes → Triton or Numba
            │ no                         │ no, or many queries → tile by tile in plain torch
            └→ the attention that the model would have without us
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from types import ModuleType
from typing import Any

import torch

from .handle import TensorHandle
from .stored import StoredRows

NAME = "kvquant"

BACKENDS = ("auto", "triton", "numba", "torch")
"""What attends: the kernel for the device, a certain one, or plain torch."""

_KERNELS = {"cpu": "numba", "cuda": "triton"}
_INSTALL = {"numba": "pip install numba", "triton": "pip install triton"}
_logger = logging.getLogger("kvquant")


def register() -> None:
    """Makes ``attn_implementation="kvquant"`` known to Transformers; again and again if need be."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_mask(*args: Any, config: Any = None, **kwargs: Any) -> torch.Tensor | None:
    """The mask of ``sdpa``: bool ``[batch, 1, tokens, all tokens]``, None if it says nothing.

    Gemma 4 cuts queries off a prompt, and thinks of a mask that is missing only under ``sdpa``.
    """
    from transformers.masking_utils import sdpa_mask

    if str(getattr(config, "model_type", "")).startswith("gemma4") and kwargs.get("q_length") != 1:
        kwargs["allow_is_causal_skip"] = False
    made: torch.Tensor | None = sdpa_mask(*args, config=config, **kwargs)
    return made


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer.

    Args:
        module: The model's attention module.
        query: ``[batch, heads, tokens, key_dim]``.
        key: ``[batch, kv_heads, all tokens, key_dim]``, a handle or a tensor.
        value: Likewise.
        attention_mask: As ``sdpa`` takes it.
        scaling: Of the scores; ``1 / sqrt(key_dim)`` by default.
        dropout: Of the weights, while training.
        **kwargs: As Transformers likes; of them `softcap` and `s_aux` (sinks) are understood.

    Returns:
        ``[batch, tokens, heads, value_dim]``, and the weights where the model's own attention
        gives them.
    """
    if isinstance(key, TensorHandle) and isinstance(value, TensorHandle):
        is_ours = key.reading is value.reading and not dropout and _is_plain(kwargs)
        if is_ours:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            own = {"softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux")}
            out = _attend(key, query, attention_mask, scale, own)
            if out is not None:
                return out, None
        key, value = key.materialize(), value.materialize()
    return _model_attention(
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
    )


def kernel_for(device: torch.device, backend: str = "auto") -> tuple[str, str]:
    """What attends on a device, and what to say about it.

    Returns:
        ``numba``, ``triton`` or ``torch``; and why not the kernel of the device, or "".
    """
    wanted = _KERNELS.get(device.type, "torch") if backend == "auto" else backend
    if wanted == "torch":
        return wanted, "" if backend == "torch" else f"no kernel for {device.type}"
    if _kernels(wanted) is None:
        return "torch", f"{wanted} is not installed: {_INSTALL[wanted]}"
    if _KERNELS.get(device.type) != wanted:
        return "torch", f"{wanted} does not run on {device.type}"
    return wanted, ""


def _is_plain(kwargs: dict[str, Any]) -> bool:
    """Whether nothing is asked for that only the model's own attention knows."""
    known = kwargs.get("position_bias") is None and not kwargs.get("output_attentions")
    return known and kwargs.get("is_causal") is not False


def _attend(
    key: TensorHandle,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    options: dict[str, Any],
) -> torch.Tensor | None:
    """``[batch, tokens, heads, value_dim]``, or None where tokens cannot be read as stored."""
    groups = key.reading.rows()
    if groups is None or not _is_usual(mask, groups, key.shape[2]):
        return None
    if mask is None and query.shape[2] != groups[0].new:
        return None  # which tokens' queries these are, nobody said
    if len(groups) == 1 and groups[0].rows is None:
        return _attend_rows(key.reading.backend, query, groups[0], mask, scaling, options)
    out = None
    for stored in groups:
        assert stored.rows is not None
        mine = query.index_select(0, stored.rows)
        part = _attend_rows(key.reading.backend, mine, stored, None, scaling, options)
        if out is None:
            out = part.new_empty((query.shape[0], *part.shape[1:]))
        out.index_copy_(0, stored.rows, part)
    return out


def _is_usual(mask: torch.Tensor | None, groups: list[StoredRows], tokens: int) -> bool:
    """Whether queries see what their position says; without asking a device.

    A mask that says something else is looked at by `_attend_rows` if there is no padding.
    """
    if mask is None:
        return True
    if len(groups) == 1 and groups[0].rows is None:
        return mask.dim() == 4 and mask.shape[-1] == tokens
    if mask.dtype != torch.bool or groups[0].new > 1:
        return False
    if mask.device.type != "cpu":
        return True
    seen = mask[:, 0, 0].sum(-1)
    return all(
        bool((seen[stored.rows] == stored.past + 1 - stored.first_seen(0)).all())
        for stored in groups
    )


def _attend_rows(
    backend: str,
    query: torch.Tensor,
    stored: StoredRows,
    mask: torch.Tensor | None,
    scaling: float,
    options: dict[str, Any],
) -> torch.Tensor:
    name, reason = kernel_for(query.device, backend)
    if name != "torch" and not _says_the_usual(mask, stored):
        name = "torch"
    kernels = _kernels(name)
    if kernels is not None:
        refusal = kernels.refusal(query, stored)
        if refusal is None:
            out: torch.Tensor = kernels.attend(query, stored, scaling, **options)
            return out.transpose(1, 2)
        if stored.new == 1:
            reason = f"{name}: {refusal}"
    if reason:
        _say_once(reason)
    from . import tiles

    return tiles.attend(query, stored, scaling, mask=mask, **options).transpose(1, 2)


def _says_the_usual(mask: torch.Tensor | None, stored: StoredRows) -> bool:
    """Whether a mask hides what a causal one would, and no more."""
    if mask is None:
        return True
    if mask.device.type != "cpu":
        return stored.new == 1  # looking at it would stall the device
    if mask.dtype != torch.bool or mask.shape[2] != stored.new:
        return False
    from .reference import seen

    first = stored.past + stored.new - mask.shape[-1]
    expected = seen(stored, first, mask.device)
    if first < 0:
        expected[:, :-first] = False  # padding on the left, which is not stored
    return bool((mask == expected).all())


@functools.cache
def _say_once(reason: str) -> None:
    _logger.warning("attention over codes runs in plain torch, which is slow: %s", reason)


@functools.cache
def _kernels(name: str) -> ModuleType | None:
    if name == "torch":
        return None
    try:
        return importlib.import_module(f"{__package__}.{name}_kernels")
    except ImportError:
        return None


def _model_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the model would do under ``sdpa``, or ``eager`` where it does not know that."""
    eager = _eager_of(type(module).__module__)
    if eager is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return found
    made: tuple[torch.Tensor, torch.Tensor | None] = eager(
        module, query, key, value, _to_add(attention_mask, query, key), **kwargs
    )
    return made


@functools.cache
def _eager_of(name: str) -> Any:
    """``eager_attention_forward`` of a modeling file whose models do not support sdpa, or None."""
    code = sys.modules.get(name)
    if code is None:
        return None
    models = [
        it
        for it in vars(code).values()
        if isinstance(it, type) and it.__module__ == name and hasattr(it, "_supports_sdpa")
    ]
    if any(model._supports_sdpa for model in models):
        return None
    return getattr(code, "eager_attention_forward", None)


def _to_add(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """What eager attention adds to the scores, of a mask for sdpa."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        if queries == 1:
            return None
        # Of more keys than queries, those beyond are a static cache's that waits to be filled.
        mask = torch.ones((queries, keys), dtype=torch.bool, device=query.device).tril()
        mask = mask[None, None]
    if mask.dtype != torch.bool:
        return mask
    hidden = torch.finfo(query.dtype).min
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, hidden)
