"""Which share of the keys that attention reads is read from codes: by count, and by attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray

from kvquant.geometry import LayerKind

from .held import quantized_reads, visible
from .reading import Reader
from .windows import Span


class ReadCount:
    """Counts keys as blocks are read: each query's, in each layer."""

    def __init__(self, reader: Reader, cache: Any) -> None:
        """Nothing read yet."""
        self._reader = reader
        self._cache = cache
        self._read = 0
        self._coded = 0

    def before(self, span: Span) -> None:
        """Counts what a block is going to read."""
        new = span.stop - span.start
        for index in self._reader.geometry.attention_layers:
            layer = self._reader.geometry.layers[index]
            coded = quantized_reads(self._cache, index, new)
            window = layer.window if layer.kind is LayerKind.SLIDING else None
            seen = visible(new, len(coded), window)
            self._read += int(seen.sum())
            self._coded += int((seen & coded).sum())

    @property
    def share(self) -> float:
        """Codes by keys."""
        return self._coded / self._read if self._read else 0.0


def attention_shares(
    reader: Reader,
    ids: NDArray[Any],
    spans: Sequence[Span],
    arms: Mapping[str, Callable[[], Any]],
) -> dict[str, float | None]:
    """For each arm, the share of attention that keys read from codes get.

    None where the model gives no weights.
    """
    tokens = torch.from_numpy(ids)[None]
    first, *blocks = spans
    caches = {name: make() for name, make in arms.items()}
    with _eager(reader.decoder) as is_eager:
        if not is_eager:
            return dict.fromkeys(arms)
        reader.fill(tokens[:, : first.stop], reader.reference(), caches)
        return {name: _share(reader, tokens, blocks, cache) for name, cache in caches.items()}


def _share(
    reader: Reader, tokens: torch.Tensor, blocks: Sequence[Span], cache: Any
) -> float | None:
    layers = reader.geometry.attention_layers
    found: list[float] = []
    for span in blocks:
        coded = [quantized_reads(cache, index, span.stop - span.start) for index in layers]
        weights = reader.attention(tokens[:, span.start : span.stop], cache)
        if len(weights) != len(layers):
            return None
        found += [_mass(*pair) for pair in zip(weights, coded, strict=True)]
    return sum(found) / len(found) if found else None


def _mass(weights: torch.Tensor, coded: torch.Tensor) -> float:
    """Of weights ``[1, heads, tokens, keys]``, the share on the keys that are codes."""
    on_codes = weights[..., coded.to(weights.device)].float().sum()
    return float(on_codes / weights.float().sum())


@contextmanager
def _eager(decoder: Any) -> Iterator[bool]:
    """Makes a decoder attend eagerly, which gives weights; says whether it does."""
    before = decoder.config._attn_implementation
    try:
        decoder.set_attn_implementation("eager")
    except ValueError:
        yield False
        return
    try:
        yield decoder.config._attn_implementation == "eager"
    finally:
        decoder.set_attn_implementation(before)
