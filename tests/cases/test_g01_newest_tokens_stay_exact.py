"""G1, huggingface/transformers#34189: right after a flush no recent token was exact.

docs/schemes.md promises: the newest R tokens are exact at any time, for keys in groups of G up to
R + G - 1 of them; what is older is not, except the sinks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvquant import QuantizedCache

R, G = 8, 4
SCHEMES: dict[str, dict[str, Any]] = {
    "int4-kivi": {"residual_length": R, "group_size": G},
    "int4": {"residual_length": R, "sink_tokens": 2},
    "int8": {"residual_length": R},
}


class PutIn:
    """Everything that a cache is given, in order."""

    def __init__(self, cache: QuantizedCache) -> None:
        self.parts: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._update = cache.update
        cache.update = self._note  # type: ignore[method-assign]

    def _note(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.parts.setdefault(layer_idx, []).append((keys.clone(), values.clone()))
        return self._update(keys, values, layer_idx, *args, **kwargs)

    def __getitem__(self, layer_idx: int) -> list[torch.Tensor]:
        slots = zip(*self.parts[layer_idx], strict=True)
        return [torch.cat(slot, dim=2) for slot in slots]


def read(cache: QuantizedCache, layer_idx: int) -> list[torch.Tensor]:
    """Keys and values that the next call would read."""
    new = torch.zeros(1, 2, 1, 16)
    twin = copy.deepcopy(cache.layers[layer_idx])
    return [part[:, :, :-1] for part in twin.update(new, new)]


def exact_from(scheme: str, slot: int, length: int) -> int:
    """Index of the first token of the exact tail."""
    sinks = SCHEMES[scheme].get("sink_tokens", 0)
    unit = G if scheme == "int4-kivi" and slot == 0 else 1
    return sinks + max(0, length - R - sinks) // unit * unit


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_newest_are_what_was_put_in_after_every_step(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], scheme: str, tokens: int
) -> None:
    model = tiny_once("llama")
    ids = torch.randint(3, 128, (1, tokens + 20), generator=torch.Generator().manual_seed(1))
    cache = QuantizedCache.from_model(model, scheme, **SCHEMES[scheme])
    given = PutIn(cache)
    for start, stop in [(0, tokens), *((n, n + 1) for n in range(tokens, tokens + 20))]:
        forward(model, ids[:, start:stop], cache)
        for layer_idx in range(2):
            for slot, (found, expected) in enumerate(
                zip(read(cache, layer_idx), given[layer_idx], strict=True)
            ):
                same = (found == expected).all(dim=(0, 1, 3))
                assert bool(same[max(0, stop - R) :].all())
                tail = exact_from(scheme, slot, stop)
                sinks = SCHEMES[scheme].get("sink_tokens", 0)
                assert bool(same[tail:].all())
                assert bool(same[:sinks].all())
                assert not bool(same[sinks:tail].any()), "older ones are codes"
