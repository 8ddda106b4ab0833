"""Which of a call's tokens are real, read from whatever mask the decoder is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvquant.errors import InputError


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
            f"the attention mask is {list(mask.shape)}, but {batch} rows of {start} cached and "
            f"{count} new tokens need [{batch}, {start + count}]"
        )
    return mask[:, start : start + count].bool()


def _of_made_masks(masks: Mapping[str, Any], batch: int, count: int) -> torch.Tensor | None:
    mask = next((mask for mask in masks.values() if mask is not None), None)
    if mask is None:
        return None  # plain causal attention
    if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4):
        raise _unreadable(mask)
    if mask.dim() == 2:  # of flash attention
        return mask[:, -count:].bool()
    seen = mask[:, 0, :, -count:].diagonal(dim1=1, dim2=2).expand(batch, count)
    return seen if seen.dtype == torch.bool else seen == 0


def _unreadable(mask: Any) -> InputError:
    kind = f"{mask.dim()}-D" if isinstance(mask, torch.Tensor) else type(mask).__name__
    return InputError(
        f"quantizing a cache needs an attention mask [batch, tokens], not {kind}: without it "
        "padding cannot be told from text"
    )
