"""Tokens as a cache stores them, made by real codecs of random states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvquant.attention.stored import Run, StoredRows
from kvquant.presets import preset
from kvquant.quantize.codec import Center, Codec
from kvquant.rotary import RotaryLayout

CHUNK = 4096
"""Tokens that are made at once."""


class Angles:
    """Cosines and sines by position."""

    def __init__(self, pairs: int, device: str) -> None:
        """Nothing yet."""
        self._pairs, self._device = pairs, device
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, bound: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the positions below `bound`."""
        if self._held is None or len(self._held[0]) < bound:
            speeds = 500000.0 ** (-torch.arange(self._pairs, device=self._device) / self._pairs)
            turned = torch.arange(bound, device=self._device)[:, None] * speeds
            self._held = turned.cos(), turned.sin()
        return self._held


def codecs(name: str, dim: int, kv_heads: int, dtype: torch.dtype, device: str) -> list[Codec]:
    """Of keys and values; means are small and random."""
    base, _, turning = name.partition(", ")
    generator = torch.Generator().manual_seed(0)
    made = []
    for is_key, scheme in ((True, preset(base).key), (False, preset(base).value)):
        mean = 0.1 * torch.randn(kv_heads, dim, generator=generator)
        center = Center(mean)
        if turning and is_key:
            layout, turns = RotaryLayout(0, dim, False, "half"), torch.zeros(dim, dtype=torch.bool)
            for part in layout.split(turns):
                part[: int(turning.split()[0])] = True
            still, moved = mean.where(~turns, 0.0), mean.where(turns, 0.0)
            center = Center(still, moved, layout, Angles(dim // 2, device))
        made.append(Codec(scheme, dim, dtype, center=center.to(device) if scheme.center else None))
    return made


def stored(
    name: str,
    states: Callable[[int], torch.Tensor],
    tokens: int,
    made: Sequence[Codec],
    new: int = 1,
    window: int | None = None,
) -> StoredRows:
    """As a cache holds them: sinks, codes, the residual, and the tokens of the call.

    Args:
        name: A preset, and perhaps how many pairs turn.
        states: Makes so many tokens ``[batch, kv_heads, tokens, dim]``.
        tokens: Those of the call included.
        made: Codecs of keys and values.
        new: Tokens of the call.
        window: As of `StoredRows`.
    """
    scheme, past = preset(name.partition(",")[0]), tokens - new
    example = states(1)
    where = torch.arange(tokens, device=example.device)[None].expand(len(example), tokens)
    slots = []
    for codec in made:
        first = min(scheme.sink_tokens, past)
        units = max(0, past - first - scheme.residual_length) // codec.unit
        coded = first + units * codec.unit
        runs = [(0, first, None), (first, coded, codec), (coded, past, None), (past, tokens, None)]
        slots.append(
            tuple(
                Run(a, b - a, it, held_of(it, states, where[:, a:b], tokens))
                for a, b, it in runs
                if a < b
            )
        )
    return StoredRows(
        None, *slots, past, new, window, lambda start, stop: where[:, start:stop], tokens
    )


def held_of(
    codec: Codec | None,
    states: Callable[[int], torch.Tensor],
    where: torch.Tensor,
    bound: int,
) -> tuple[torch.Tensor, ...]:
    """Tokens at positions `where`, encoded some at a time."""
    if codec is None:
        return (states(where.shape[1]),)
    parts = []
    for start in range(0, where.shape[1], CHUNK):
        some = where[:, start : start + CHUNK]
        parts.append(codec.encode(states(some.shape[1]), some, bound))
    return tuple(torch.cat(pieces, dim=2) for pieces in zip(*parts, strict=True))


def nbytes(rows: StoredRows) -> int:
    """Bytes that attention has to read."""
    runs = (*rows.keys, *rows.values)
    return sum(tensor.nbytes for run in runs for tensor in run.tensors)


def random(device: str, dtype: torch.dtype, *shape: int) -> Callable[[int], torch.Tensor]:
    """Makes random states of a shape without its tokens, ``[batch, kv_heads, dim]``."""
    batch, kv_heads, dim = shape
    generator = torch.Generator(device).manual_seed(1)

    def states(tokens: int) -> torch.Tensor:
        size = (batch, kv_heads, tokens, dim)
        return torch.randn(size, generator=generator, device=device).to(dtype)

    return states
