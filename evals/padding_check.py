"""Does a padded row of a batch say what it says alone?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from kvquant.cache.cache import QuantizedCache
from kvquant.models.adapters import base_model
from kvquant.models.source import first_line

from .perplexity import compare_logits
from .reading import Reader
from .windows import Span

Makers = Mapping[str, Callable[[], Any]]

PADDING = 5
"""Slots of padding before a row whose stored tokens are looked at: shifts groups of any size."""


def padding_divergences(
    reader: Reader, ids: NDArray[Any], spans: Sequence[Span], arms: Makers
) -> dict[str, float | str]:
    """Mean KL(alone || padded) of a text read alone and as the padded row of a batch.

    Args:
        reader: Of the model.
        ids: A document, ``[tokens]``; two thirds of its prefill and a block are the padded text.
        spans: Of it.
        arms: What makes an empty cache of each arm; the unquantized cache is the arm ``""``.

    Returns:
        For each arm, or why there is none.
    """
    try:
        return dict(_divergences(reader, ids, spans, arms))
    except Exception as error:  # whatever a cache that is not ours raises
        if len(arms) == 1:
            return {name: f"{type(error).__name__}: {first_line(error)}" for name in arms}
    return {
        name: found
        for one, make in arms.items()
        for name, found in padding_divergences(reader, ids, spans, {one: make}).items()
    }


def padding_fault(reader: Reader, make: Callable[[], Any]) -> str | None:
    """What a cache of ours reads otherwise of a padded row than of the same row alone, if anything.

    Both are given the same keys and values, so that this is exact where predictions are not: no
    forward pass rounds in between.
    """
    alone, beside = make(), make()
    if not isinstance(alone, QuantizedCache):
        return None
    tokens = _interesting_tokens(alone)
    mask = torch.ones(2, PADDING + tokens, dtype=torch.long, device=reader.decoder.device)
    mask[0, :PADDING] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    generator = torch.Generator().manual_seed(0)
    # What is cached of all but the last token is read with it.
    for start, stop in ((0, PADDING + tokens - 1), (PADDING + tokens - 1, PADDING + tokens)):
        call = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        ids = torch.zeros_like(positions[:, start:stop])
        own = max(PADDING - start, 0)
        beside.begin_call({**call, "input_ids": ids})
        alone.begin_call({"input_ids": ids[:1, own:]})
        for index in reader.geometry.attention_layers:
            keys, values = _random_states(reader, index, stop - start, generator)
            read = beside.update(keys, values, index)
            expected = alone.update(keys[:1, :, own:], values[:1, :, own:], index)
            off = max(map(_worst_token, read, expected)) if start else 0.0
            if off > max(4 * torch.finfo(reader.decoder.dtype).eps, 1e-5):
                return (
                    f"layer {index} reads a token of a padded row {off:.1%} off from that of the "
                    "row alone: padding changes what is stored of the tokens beside it"
                )
    return None


def _interesting_tokens(cache: QuantizedCache) -> int:
    """Tokens enough for sinks, a residual and codes of two groups in every layer."""
    schemes = [cache.scheme.layer(index) for index in cache.geometry.attention_layers]
    return max(
        it.sink_tokens + it.residual_length + 2 * max(it.key.unit, it.value.unit) + 11
        for it in schemes
    )


def _random_states(
    reader: Reader, index: int, tokens: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    layer, decoder = reader.geometry.layers[index], reader.decoder
    keys, values = (
        torch.randn(2, layer.kv_heads, tokens, dim, generator=generator).to(
            decoder.device, decoder.dtype
        )
        for dim in (layer.key_dim, layer.value_dim)
    )
    return keys, values


def _worst_token(read: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative error of a token of the first row, of those that both hold."""
    count = min(read.shape[2], expected.shape[2])
    ours, theirs = (it[0, :, -count:].float() for it in (read, expected))
    off = (ours - theirs).norm(dim=-1)
    return float((off / theirs.norm(dim=-1).clamp(min=1e-9)).max())


def _divergences(
    reader: Reader, ids: NDArray[Any], spans: Sequence[Span], arms: Makers
) -> dict[str, float]:
    tokens = torch.from_numpy(ids)
    prefill, block = spans[0].stop, spans[1].stop - spans[1].start
    padding = prefill // 3
    own = tokens[: prefill - padding + block]
    both = torch.stack((torch.cat((tokens[:1].expand(padding), own)), tokens[: prefill + block]))
    mask = torch.ones_like(both)
    mask[0, :padding] = 0
    alone = _block_logits(reader, own[None], mask[1:, padding:], prefill - padding, arms)
    beside = _block_logits(reader, both, mask, prefill, arms)
    target = torch.zeros(block, dtype=torch.long)  # any: only distributions are compared
    found = {}
    for name in arms:
        scores = compare_logits(alone[name], beside[name], target.to(alone[name].device))
        found[name] = float(scores["kl"].mean())
    return found


def _block_logits(
    reader: Reader, ids: torch.Tensor, mask: torch.Tensor, prefill: int, arms: Makers
) -> dict[str, torch.Tensor]:
    """Logits of the first row after the prefill, ``[tokens, vocabulary]``, of each arm."""
    caches = {name: make() for name, make in arms.items()}
    forward = inspect.signature(base_model(reader.model).forward)
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def extra(start: int, stop: int) -> dict[str, Any]:
        found = {"attention_mask": mask[:, :stop].to(reader.decoder.device)}
        if "position_ids" in forward.parameters:
            found["position_ids"] = positions[:, start:stop].to(reader.decoder.device)
        return found

    reader.fill(ids[:, :prefill], reader.reference(), caches, **extra(0, prefill))
    block = ids[:, prefill:]
    more = extra(prefill, ids.shape[1])
    return {name: reader.read(block, cache, **more)[0] for name, cache in caches.items()}
