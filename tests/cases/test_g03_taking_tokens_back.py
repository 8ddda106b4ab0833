"""G3, huggingface/transformers#47433: crop(0) kept all tokens, crop(-5) of 3 tokens left one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvquant import QuantizedCache

SCHEMES = ["none", "int8", "int4", "int4-kivi"]


def ids(tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (1, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("taken", "left"), [(0, 3), (1, 2), (3, 0), (5, 0)])
@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_so_many_of_three_tokens_leave_so_many(
    tiny_once: Callable[..., Any],
    forward: Callable[..., Any],
    name: str,
    scheme: str,
    taken: int,
    left: int,
) -> None:
    model, more = tiny_once(name), ids(4, seed=2)
    cropped, expected = (QuantizedCache.from_model(model, scheme) for _ in range(2))
    forward(model, ids(3), cropped)
    cropped.crop(-taken)
    assert cropped.get_seq_length() == left
    assert [layer.get_seq_length() for layer in cropped.layers] == [left] * 2
    if left:
        forward(model, ids(3)[:, :left], expected)
    assert cropped.live_nbytes() == expected.live_nbytes()
    # What is added then follows what is left, and nothing else.
    found = [forward(model, more, cache) for cache in (cropped, expected)]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)
    assert cropped.get_seq_length() == left + 4


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_a_positive_number_is_what_transformers_makes_of_it(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], tokens: int
) -> None:
    """An error since it counts what to take back, the length to keep before that."""
    model, outcomes = tiny_once("llama"), []
    for cache in (DynamicCache(config=model.config), QuantizedCache.from_model(model, "int8")):
        forward(model, ids(3), cache)
        try:
            cache.crop(tokens)
        except ValueError as error:
            assert "negative" in str(error)
            outcomes.append("refused")
        else:
            outcomes.append(str(cache.get_seq_length()))
    assert outcomes[0] == outcomes[1]


def test_an_empty_cache_has_nothing_to_take_back(tiny_once: Callable[..., Any]) -> None:
    cache = QuantizedCache.from_model(tiny_once("llama"), "int4")
    for tokens in (0, -1, -5):
        cache.crop(tokens)
        assert cache.get_seq_length() == 0
