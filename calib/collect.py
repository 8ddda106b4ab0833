"""Runs token blocks through a model and records what it caches.

A block of the served length goes through in chunks, each attending to the cache of those before
it, as a server prefills: memory is the model, one batch's cache, and the activations of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from kvquant.cache.transformers_compat import cache_argument
from kvquant.errors import InputError
from kvquant.fingerprint import check_model
from kvquant.geometry import CacheGeometry
from kvquant.models.adapters import base_model
from kvquant.provenance import Provenance

from .recorder import Recorder
from .stats import CalibrationStats

DEFAULT_CHUNK = 2048

Block: TypeAlias = "Sequence[int] | NDArray[np.int64]"
"""Token ids of one context."""


@dataclass
class Watcher:
    """What `collect` tells while it runs; the default keeps quiet.

    Attributes:
        read: Called after each forward pass with the number of tokens it read.
        finished: Called after each batch with the number of blocks finished so far and a function
            that gives the statistics up to there.
    """

    read: Callable[[int], None] = lambda tokens: None
    finished: Callable[[int, Callable[[], CalibrationStats]], None] = lambda blocks, stats: None


def collect(
    model: Any,
    blocks: Sequence[Block],
    geometry: CacheGeometry,
    *,
    chunk: int = DEFAULT_CHUNK,
    skip_layers: Iterable[int] = (),
    watcher: Watcher | None = None,
) -> CalibrationStats:
    """Statistics of everything that `model` caches while it reads `blocks`.

    Args:
        model: A Transformers model, or a PeftModel with the adapters active that are to count.
            Afterwards it is exactly as it was: mode, hooks, weights.
        blocks: Token ids; neighbours of equal length share a batch as far as `chunk` allows.
        geometry: Shape of the model's cache.
        chunk: Tokens per forward pass, over the batch.
        skip_layers: Layers to leave out.
        watcher: Told about the progress.

    Returns:
        Statistics on the CPU; their provenance knows tokens and longest position only.

    Raises:
        NotObservedError: An attention layer never wrote to the cache.
        InputError: A token that the model has no embedding for, or the model produced NaN or
            infinite keys or values.
    """
    check_model(model)
    _check_tokens(model, blocks)
    chunk = min(chunk, sum(map(len, blocks)))
    watcher = watcher or Watcher()
    skipped = frozenset(skip_layers)
    base = base_model(model)
    training = [module for module in base.modules() if module.training]
    base.eval()
    finished = 0
    try:
        with torch.no_grad(), Recorder(model, geometry, skipped) as recorder:
            for batch in batches(blocks, chunk):
                _read(base, recorder, batch, chunk, watcher)
                finished += len(batch)
                watcher.finished(finished, lambda: _checked(recorder, geometry, skipped))
    finally:
        for module in training:
            module.training = True
    return _checked(recorder, geometry, skipped)


def batches(blocks: Iterable[Block], chunk: int) -> Iterator[list[Block]]:
    """Neighbouring blocks of equal length, at most `chunk` tokens (but at least one block) each.

    >>> [len(b) for b in batches([[1, 2]] * 5 + [[3]], chunk=4)]
    [2, 2, 1, 1]
    """
    for length, group in groupby(blocks, key=len):
        while batch := list(islice(group, max(1, chunk // length))):
            yield batch


def _check_tokens(model: Any, blocks: Iterable[Block]) -> None:
    known = base_model(model).get_input_embeddings().weight.shape[0]
    largest = max((int(np.max(block)) for block in blocks), default=0)
    if largest >= known:
        raise InputError(
            f"the text holds token {largest}, the model has embeddings for 0 to {known - 1}: "
            "the tokenizer belongs to another model"
        )


def _read(
    base: Any,
    recorder: Recorder,
    batch: Sequence[Block],
    chunk: int,
    watcher: Watcher,
) -> None:
    """One batch, in chunks, through a cache of its own."""
    decoder = base.get_decoder()
    tokens = torch.as_tensor(np.array(batch), device=base.get_input_embeddings().weight.device)
    step = max(1, chunk // len(batch))
    cache = recorder.watch(DynamicCache(config=base.config))
    for part in torch.split(tokens, step, dim=1):
        decoder(input_ids=part, use_cache=True, **{cache_argument(decoder): cache})
        watcher.read(part.numel())
    recorder.release(cache)


def _checked(
    recorder: Recorder, geometry: CacheGeometry, skipped: frozenset[int]
) -> CalibrationStats:
    """A copy of the statistics so far, all layers seen and finite."""
    layers = {index: layer.to("cpu") for index, layer in sorted(recorder.layers.items())}
    stats = CalibrationStats(geometry, layers)
    stats.check(set(geometry.attention_layers) - skipped)
    counts = Provenance(tokens=stats.tokens, longest_position=recorder.longest_position)
    return replace(stats, provenance=counts)
