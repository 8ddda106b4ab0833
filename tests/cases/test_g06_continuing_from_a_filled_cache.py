"""G6, huggingface/transformers#36151 and NVIDIA/TensorRT-LLM#2699: a prefix that is in the cache.

Positions were inferred from the input's length; and text differed with prefix re-use. Here what is
stored is the same bit for bit, and docs/schemes.md says that a call attends to its own tokens
exactly and to earlier ones through their codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvquant import QuantizedCache

CUTS = [1, 7, 8, 9, 24]
SCHEMES: dict[str, dict[str, Any]] = {
    "none": {},
    "fp8": {},
    "int8": {},
    "int4": {},
    "int3": {"residual_length": 5},
    "int4-kivi": {"residual_length": 5, "group_size": 4},
}


def ids() -> torch.Tensor:
    return torch.randint(3, 128, (1, 25), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "deepseek", "qwen3_next"])
def test_the_whole_prompt_may_be_given_again(
    tiny_once: Callable[..., Any],
    forward: Callable[..., Any],
    generate: Callable[..., Any],
    name: str,
    cut: int,
) -> None:
    model = tiny_once(name)
    at_once = generate(model, ids(), QuantizedCache.from_model(model, "none"))
    cache = QuantizedCache.from_model(model, "none")
    forward(model, ids()[:, :cut], cache)
    assert torch.equal(generate(model, ids(), cache), at_once)
    assert cache.get_seq_length() == 25 + 7


def stored(cache: QuantizedCache) -> dict[str, torch.Tensor]:
    """Live rows of everything that is held, oldest first."""
    return {
        f"{index}.{name}": rows
        for index, layer in enumerate(cache.layers)
        for name, rows in layer.state()[1].items()
    }


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_stored_does_not_tell_where_calls_were_cut(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], scheme: str, cut: int
) -> None:
    """The same keys and values; those of later layers do depend on what attention read before."""
    model, exact = tiny_once("llama"), DynamicCache(config=tiny_once("llama").config)
    forward(model, ids(), exact)
    caches = [QuantizedCache.from_model(model, scheme, **SCHEMES[scheme]) for _ in range(2)]
    for cache, cuts in zip(caches, ([25], [cut, 25 - cut]), strict=True):
        start = 0
        for count in cuts:
            part = slice(start, start + count)
            cache.begin_call({"input_ids": ids()[:, part], "attention_mask": None})
            for index, layer in enumerate(exact.layers):
                cache.update(layer.keys[:, :, part], layer.values[:, :, part], index)
            start += count
    one, other = map(stored, caches)
    assert one.keys() == other.keys()
    assert len(one) >= 4
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_a_prompt_attends_to_itself_exactly_and_to_what_is_cached_through_codes(
    tiny_once: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    model = tiny_once("llama")
    exact = forward(model, ids(), DynamicCache(config=model.config))
    assert torch.equal(forward(model, ids(), QuantizedCache.from_model(model, "int4")), exact)
    cache = QuantizedCache.from_model(model, "int4")
    forward(model, ids()[:, :9], cache)
    continued = forward(model, ids()[:, 9:], cache)
    error = (continued - exact[:, 9:]).norm() / exact.norm()
    assert 0 < error < 0.1
