"""Attention over stored tokens in plain torch: the definition of correct, on any device."""

from __future__ import annotations

import torch

from .stored import Run, StoredRows


def attend_reference(
    query: torch.Tensor,
    stored: StoredRows,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Softmax attention over tokens as they read back.

    Args:
        query: ``[rows, heads, new, key_dim]``, of the rows of `stored`; `heads` a multiple of its
            KV heads, neighbouring heads share one.
        stored: What is attended to.
        scaling: Factor of the scores.
        softcap: Scores become ``softcap * tanh(score / softcap)`` (Gemma 2), if given.
        sinks: Logits ``[heads]`` that take part in the softmax and have no value (GPT-OSS).
        dtype: What is computed in, after reading.

    Returns:
        ``[rows, heads, new, value_dim]``, in `dtype`.
    """
    keys, first = read(stored.keys, stored)
    values, first_value = read(stored.values, stored)
    start = max(first, first_value)
    keys, values = keys[:, :, start - first :], values[:, :, start - first_value :]
    parts = []
    # One by one, so that what a query does not see cannot reach it: zero times NaN is NaN.
    for number in range(query.shape[2]):
        seen_by = slice(stored.first_seen(number) - start, stored.past + number + 1 - start)
        part = _attend_one(
            query[:, :, number].to(dtype),
            keys[:, :, seen_by].to(dtype),
            values[:, :, seen_by].to(dtype),
            scaling,
            softcap,
            None if sinks is None else sinks.to(dtype),
        )
        parts.append(part)
    return torch.stack(parts, dim=2)


def _attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """A query ``[rows, heads, key_dim]`` that sees all of `keys` and `values`."""
    rows, kv_heads, tokens, _ = keys.shape
    grouped = query.reshape(rows, kv_heads, -1, query.shape[-1])
    scores = torch.einsum("rhgd,rhkd->rhgk", grouped, keys) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sinks is not None:
        logits = sinks.view(1, kv_heads, -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, logits), dim=-1)
    weights = scores.softmax(-1)[..., :tokens]
    return torch.einsum("rhgk,rhkd->rhgd", weights, values).flatten(1, 2)


def read(runs: tuple[Run, ...], stored: StoredRows) -> tuple[torch.Tensor, int]:
    """Tokens of `runs` as they read back, float32 ``[rows, kv_heads, tokens, dim]``; the first."""
    parts = []
    for run in runs:
        if run.codec is None:
            parts.append(run.tensors[0].float())
            continue
        rows, kv_heads = run.tensors[0].shape[:2]
        part = torch.empty(rows, kv_heads, run.count, run.codec.dim, device=run.tensors[0].device)
        positions = stored.positions(run.first, run.stop)
        run.codec.decode_reference(run.tensors, part, positions, stored.bound)
        parts.append(part)
    return torch.cat(parts, dim=2), runs[0].first


def seen(
    stored: StoredRows,
    start: int,
    device: torch.device,
    stop: int | None = None,
    some: slice = slice(None),
) -> torch.Tensor:
    """Which tokens from `start` on (to `stop`) each query (of `some`) sees, ``[new, tokens]``."""
    newest = stored.past + stored.new
    tokens = torch.arange(start, newest if stop is None else stop, device=device)
    queries = torch.arange(stored.past, newest, device=device)[some, None]
    is_seen = tokens <= queries
    return is_seen if stored.window is None else is_seen & (tokens > queries - stored.window)
