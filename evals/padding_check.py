"""Does a padded row of a batch say what it says alone?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from kvquant.models.adapters import base_model
from kvquant.models.source import first_line

from .perplexity import compare_logits
from .reading import Reader
from .windows import Span

Makers = Mapping[str, Callable[[], Any]]


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
