"""Attention of many queries over stored tokens, some at a time, in plain torch.

Tokens are dequantized tile by tile and joined by an online softmax (Milakov and Gimelshein, arXiv
1805.02867), so that neither the cache in full precision nor all scores are ever in memory.
"""

from __future__ import annotations

import torch

from .reference import seen
from .stored import Run, StoredRows

TILE = 1024
"""Tokens that are read at once."""

_SCORES = 1 << 25
"""Scores that are held at once, at most: 128 MB."""

_TINY = 1e-30


def attend(
    query: torch.Tensor,
    stored: StoredRows,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `attend_reference`, in the dtype of `query` with sums in float32.

    Args:
        query: ``[rows, heads, new, key_dim]``.
        stored: What is attended to.
        scaling: Factor of the scores.
        softcap: As for the reference.
        sinks: As for the reference.
        mask: Which tokens each query sees, bool (or float, to add) ``[rows or 1, heads or 1, new,
            tokens]``, for the newest tokens; by default all up to itself, within the window.

    Returns:
        ``[rows, heads, new, value_dim]``; a view of ``[rows, new, heads, value_dim]``.
    """
    rows, heads, new, _ = query.shape
    step = max(1, _SCORES // max(1, rows * heads * TILE))
    parts = [
        _attend_some(query, start, min(start + step, new), stored, scaling, softcap, sinks, mask)
        for start in range(0, new, step)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _attend_some(
    query: torch.Tensor,
    begin: int,
    end: int,
    stored: StoredRows,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Queries `begin` to `end` of the call."""
    query = query[:, :, begin:end]
    rows, heads, count, dim = query.shape
    first, stop = stored.first_seen(begin), stored.past + (end if mask is None else stored.new)
    # What exp(-inf) and no value add up to; sinks are weights without a value.
    shape = (rows, heads, count, 1)
    top = query.new_full(shape, -torch.inf, dtype=torch.float32)
    total, sums = torch.zeros_like(top), torch.zeros_like(top)
    if sinks is not None:
        top, total = _logits(sinks).expand(shape), torch.ones_like(top)
    for start in range(first, stop, TILE):
        after = min(start + TILE, stop)
        keys, values = (
            read_range(runs, start, after, stored, query.dtype)
            for runs in (stored.keys, stored.values)
        )
        keys, values = _without_nan(keys, values)
        kv_heads = keys.shape[1]
        grouped = query.reshape(rows, kv_heads, -1, dim)
        scores = torch.matmul(grouped, keys.transpose(2, 3)).float().mul_(scaling)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        scores = scores.view(rows, heads, count, -1)
        _hide(scores, stored, begin, start, after, mask)
        highest = scores.amax(-1, keepdim=True)
        new_top = torch.maximum(top, highest)
        shrink = (top - new_top).exp()
        total, sums, top = total * shrink, sums * shrink, new_top
        weights = scores.sub_(top).exp_()
        weight = weights.sum(-1, keepdim=True)
        total = total + weight
        # Means of values, since their sums may be beyond float16.
        shares = weights.div_(weight.clamp(min=_TINY)).to(query.dtype)
        means = torch.matmul(shares.reshape(rows, kv_heads, -1, after - start), values)
        sums = sums + means.view(rows, heads, count, -1) * weight
    return (sums / total).to(query.dtype)


def _without_nan(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens whose values are no numbers have values of 0, and keys of NaN.

    So they make NaN of queries that see them, and not, as zero times NaN, of others.
    """
    wrong = values.sum(-1, keepdim=True, dtype=torch.float32).mul_(0)
    # Looking at it would stall other devices.
    if wrong.device.type == "cpu" and not bool(wrong.isnan().any()):
        return keys, values
    return keys + wrong.to(keys.dtype), values.nan_to_num(0.0, 0.0, 0.0)


def _logits(sinks: torch.Tensor) -> torch.Tensor:
    return sinks.float().view(1, -1, 1, 1)


def _hide(
    scores: torch.Tensor,
    stored: StoredRows,
    begin: int,
    start: int,
    stop: int,
    mask: torch.Tensor | None,
) -> None:
    """Makes scores of what is not seen as small as can be."""
    hidden = torch.finfo(scores.dtype).min
    count = scores.shape[2]
    if mask is None:
        is_seen = seen(stored, start, scores.device, stop, slice(begin, begin + count))
        scores.masked_fill_(~is_seen, hidden)
        return
    # Columns of the mask are the newest tokens.
    shift = mask.shape[-1] - (stored.past + stored.new)
    part = mask[:, :, begin : begin + count, start + shift : stop + shift]
    if part.dtype == torch.bool:
        scores.masked_fill_(~part, hidden)
    else:
        is_hidden = part <= torch.finfo(part.dtype).min  # perhaps minus infinity
        scores.add_(part).clamp_(min=hidden).masked_fill_(is_hidden, hidden)


def read_range(
    runs: tuple[Run, ...], start: int, stop: int, stored: StoredRows, dtype: torch.dtype
) -> torch.Tensor:
    """Tokens `start` to `stop` as they read back, ``[rows, kv_heads, tokens, dim]``."""
    parts = []
    for run in runs:
        first, after = max(run.first, start), min(run.stop, stop)
        if first >= after:
            continue
        if run.codec is None:
            parts.append(run.tensors[0][:, :, first - run.first : after - run.first].to(dtype))
            continue
        unit = run.codec.unit
        one, last = (first - run.first) // unit, -(-(after - run.first) // unit)
        coded = tuple(tensor[:, :, one:last] for tensor in run.tensors)
        begin = run.first + one * unit
        shape = (*coded[0].shape[:2], (last - one) * unit, run.codec.dim)
        whole = torch.empty(shape, dtype=dtype, device=coded[0].device)
        positions = stored.positions(begin, begin + shape[2])
        run.codec.decode(coded, whole, positions, stored.bound)
        parts.append(whole[:, :, first - begin : after - begin])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
