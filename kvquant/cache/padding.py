"""Which of a call's tokens are real, read from whatever mask the decoder is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvquant.errors import InputError

from .ledger import TokenLedger


def real_tokens(mask: Any, batch: int, start: int, count: int) -> torch.Tensor | None:
    """Which tokens of a call are real, without looking at any value.

    Args:
        mask: ``[batch, slots]``, 1 where a token is real; or what a multimodal model (Gemma 3)
            makes of it for its decoder: masks ``[batch, 1, count, keys]`` by kind of layer. A real
            token sees itself, padding does not.
        batch: Rows of the call.
        start: Slots that are filled.
        count: Tokens of the call.

    Returns:
        Bool ``[batch, count]`` on the mask's device; None if there is no mask, so that all are.

    Raises:
        InputError: A mask that does not say so.
    """
    if isinstance(mask, Mapping):
        return _of_made_masks(mask, batch, count)
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise _unreadable(mask)
    if mask.shape[0] != batch or mask.shape[1] < start + count:
        raise InputError(
            f"the attention mask is {list(mask.shape)}, not [{batch}, {start + count}] ({start} "
            f"cached and {count} new){_BEGINS if start else ''}"
        )
    return mask[:, start : start + count].bool()


def read_mask(
    mask: Any, batch: int, count: int, ledger: TokenLedger, dequantizes: bool
) -> torch.Tensor | None:
    """Which tokens of a call are real, on the CPU, from a mask that speaks of what is cached.

    A mask on a device is looked at when several tokens come: in a decode step that would stall it,
    and neither do kernels look.

    Args:
        mask: As `real_tokens` takes it; or one ``[batch, 1, count, slots]`` (PaliGemma makes such)
            whose last query sees exactly the real tokens.
        batch: Rows of the call.
        count: Tokens of the call.
        ledger: What is cached.
        dequantizes: Whether the model's own attention reads all that is cached, with the mask.

    Returns:
        Bool ``[batch, count]``; None if all are.

    Raises:
        InputError: A mask that does not say so, or contradicts what is cached.
    """
    made = mask if isinstance(mask, torch.Tensor) and mask.dim() == 4 else None
    if made is not None:
        mask = _seen(made)[:, 0, -1].expand(batch, -1)
    real = real_tokens(mask, batch, ledger.slots, count)
    on_device = real is not None and real.device.type != "cpu"
    if on_device and count == 1 and ledger.slots and all(group.tokens for group in ledger.groups):
        return None
    if made is not None and real is not None:
        _check_last_query(made, real)
    # Another number of rows is refused in a moment; masks that a model made tell nothing of what is
    # cached.
    if batch == ledger.batch and isinstance(mask, torch.Tensor):
        told = mask[:, : ledger.slots + count].bool().cpu()
        check_cached(told[:, : ledger.slots], ledger.real_slots(), dequantizes or not on_device)
        return told[:, ledger.slots :]
    if batch == ledger.batch and mask is None and ledger.is_padded:
        held = ledger.real_slots()
        check_cached(torch.ones_like(held), held, may_hide=True)
    return None if real is None else real.cpu()


def check_cached(seen: torch.Tensor, held: torch.Tensor, may_hide: bool) -> None:
    """Makes sure that a mask speaks of the tokens that are cached.

    That of prompts which were padded in front of a cached prefix does not: it is shifted, calls
    tokens of the prefix padding, and gives later ones wrong positions::

        cached    p p p p    mask of row 0   0 0 1 1 | 1 1 1
                  p p p p            row 1   1 1 1 1 | 1 1 1

    Tokens behind a row's first one may be hidden, such as what was generated after its end.

    Args:
        seen: What the mask calls real of what is cached, bool ``[batch, slots]``.
        held: What the cache holds there, likewise.
        may_hide: Whether attention looks at the mask in every call.

    Raises:
        InputError: It does not.
    """
    if torch.equal(seen, held):
        return
    wrong = seen != held
    if may_hide:
        wrong &= seen | (seen.cumsum(1) == 0)
    if not bool(wrong.any()):
        return
    row = int(wrong.any(1).nonzero()[0])
    real, there = int(seen[row].sum()), int(held[row].sum())
    raise InputError(
        f"row {row}: the attention mask calls {real} of the {seen.shape[1]} cached tokens real "
        f"(without one all are), the cache holds {there}{' others' if real == there else ''}. A "
        "mask begins with that of what is cached: a cached prefix comes first in every row, and "
        "padding goes between it and the rest"
        + ("" if may_hide else "; hiding later tokens takes a cache with attention='dequantize'")
    )


def check_goes_on(count: int, cached: int, positions: torch.Tensor | None) -> None:
    """Makes sure that a prompt is longer than what is cached of it.

    Of one that is not, `generate()` takes ``prompt[:, cached - length :]`` for the new tokens: none
    or, since Python counts from the end then, some that are cached already.

    Args:
        count: Tokens of the call.
        cached: Slots that are filled.
        positions: ``[batch or 1, count]`` of a call without a mask; None if there is one, whose
            length tells it.

    Raises:
        InputError: It is not.
    """
    if not count:
        raise InputError(
            f"the call brings nothing new to what is cached (length {cached}){_BEGINS}"
        )
    if positions is None or not cached or (count == 1 and positions.device.type != "cpu"):
        return  # of a decode step on a device: looking would stall it
    length = int(positions[0, -1]) + 1
    if length <= cached and count == length - (cached - length):
        raise InputError(
            f"the prompt (length {length}) is no longer than what is cached (length {cached})"
            f"{_BEGINS}"
        )


_BEGINS = ": a prompt begins with what is cached, and goes on"


def _of_made_masks(masks: Mapping[str, Any], batch: int, count: int) -> torch.Tensor | None:
    mask = next((mask for mask in masks.values() if mask is not None), None)
    if mask is None:
        return None  # plain causal attention
    if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4):
        raise _unreadable(mask)
    if mask.dim() == 2:  # of flash attention
        return mask[:, -count:].bool()
    return _seen(mask[:, 0, :, -count:].diagonal(dim1=1, dim2=2).expand(batch, count))


def _seen(mask: torch.Tensor) -> torch.Tensor:
    """What a mask lets see: it holds booleans, or numbers that are added to scores."""
    return mask if mask.dtype == torch.bool else mask == 0


def _check_last_query(made: torch.Tensor, real: torch.Tensor) -> None:
    """Makes sure that a call's last query sees something, and of the call what sees itself.

    Raises:
        InputError: It does not, as where there is a window, or several texts in a row: that does
            not tell which tokens are real.
    """
    seen, count = _seen(made[:, 0]), real.shape[1]
    if seen.shape[1] == count and bool(seen[:, -1].any(1).all()):
        themselves = seen[:, :, -count:].diagonal(dim1=1, dim2=2)
        if bool((themselves == real).all()):
            return
    raise _unreadable(made)


def _unreadable(mask: Any) -> InputError:
    kind = f"{mask.dim()}-D" if isinstance(mask, torch.Tensor) else type(mask).__name__
    return InputError(
        f"quantizing a cache needs an attention mask [batch, tokens], not {kind}: without it "
        "padding cannot be told from text"
    )
