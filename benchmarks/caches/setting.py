"""What all measurements share: the model, the text, the calibration."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass, replace
from typing import Any

import numba
import torch

from calib.collect import collect
from calib.solve import solve
from kvquant.cache.transformers_compat import cache_argument
from kvquant.fingerprint import fingerprint
from kvquant.geometry import CacheGeometry
from kvquant.models.loading import load, resolve
from kvquant.scales import KVScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

CALIBRATION_BLOCKS, CALIBRATION_LENGTH = 8, 2048
"""16,384 tokens, in contexts as long as what is scored."""


@dataclass(frozen=True)
class Setting:
    """The model and its text.

    Attributes:
        model: SmolLM2 in float32, or another model that was asked for.
        tokens: The standard library's help topics, joined with single spaces, int64 ``[tokens]``.
    """

    model: Any
    tokens: torch.Tensor

    @property
    def values_per_token(self) -> int:
        """Numbers that one token puts into the cache, over all layers."""
        layers = CacheGeometry.from_config(self.model.config).layers
        return sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)


def prepare(name: str, threads: int) -> Setting:
    """Loads the model and reads the text; all arithmetic gets `threads` threads."""
    torch.set_num_threads(threads)
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    loaded = load(resolve(name), dtype="float32", device="cpu", notify=lambda message: None)
    text = " ".join(pydoc_data.topics.topics.values())
    ids = loaded.tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return Setting(loaded.model, torch.tensor(ids))


def calibrate(setting: Setting, first: int) -> KVScales:
    """Static fp8 scales per tensor, and means, of the 16,384 tokens from `first` on."""
    model, stop = setting.model, first + CALIBRATION_BLOCKS * CALIBRATION_LENGTH
    blocks = setting.tokens[first:stop].view(CALIBRATION_BLOCKS, CALIBRATION_LENGTH)
    stats = collect(model, list(blocks.numpy()), CacheGeometry.from_config(model.config))
    origin = replace(stats.provenance, fingerprints=(fingerprint(model),))
    tensor = TensorScheme(tensor_format("fp8"), Granularity.PER_TENSOR)
    return solve(replace(stats, provenance=origin), QuantScheme(tensor, tensor))


def read(model: Any, tokens: torch.Tensor, cache: Any, logits: int = 1) -> torch.Tensor:
    """One forward pass over `tokens` ``[tokens]``; the last `logits` logits, 0 for all."""
    taken = {cache_argument(model): cache}
    with torch.no_grad():
        output = model(input_ids=tokens[None], use_cache=True, logits_to_keep=logits, **taken)
    found: torch.Tensor = output.logits[0]
    return found


def fill(model: Any, tokens: torch.Tensor, cache: Any, chunk: int) -> None:
    """Prefill: `tokens` in chunks, as a server does."""
    for part in tokens.split(chunk):
        read(model, part, cache)
