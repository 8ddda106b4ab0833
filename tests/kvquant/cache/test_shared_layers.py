"""Layers that read the keys and values of others store nothing, and read what those do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvquant.cache.cache import QuantizedCache
from kvquant.cache.layer import QuantizedLayer
from kvquant.cache.transformers_compat import cache_argument

FAMILIES = ["gemma3n_text", "gemma4_text"]
OWN = {"gemma3n_text": 4, "gemma4_text": 2}
"""Layers with keys and values of their own; the last two read those of others."""


def prompt(batch: int = 1, tokens: int = 21) -> torch.Tensor:
    return torch.randint(3, 128, (batch, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FAMILIES)
def test_only_layers_of_their_own_store(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], name: str
) -> None:
    model, own = tiny_once(name), OWN[name]
    cache = QuantizedCache.from_model(model, "int8")
    forward(model, prompt(), cache)
    assert all(isinstance(layer, QuantizedLayer) for layer in cache.layers[:own])
    assert not any(isinstance(layer, QuantizedLayer) for layer in cache.layers[own:])
    dims = [layer.key_dim for layer in cache.geometry.layers[:own]]
    # Sliding layers hold 7 of 21 tokens, the others all.
    expected = [(7, 21)[index % 2] * 2 * 2 * (dim + 2) for index, dim in enumerate(dims)]
    assert [layer.live_nbytes() for layer in cache.layers[:own]] == expected
    assert cache.live_nbytes() == sum(expected)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("scheme", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_they_read_what_the_layer_they_share_with_reads(
    tiny_once: Callable[..., Any],
    forward: Callable[..., Any],
    name: str,
    scheme: str,
    gradients: bool,
) -> None:
    """Though later layers have read into the memory that all share by then."""
    model, ids = tiny_once(name), prompt(tokens=26)
    cache, exact = (
        QuantizedCache.from_model(model, scheme),
        DynamicCache(config=model.get_decoder().config),
    )
    for one in (cache, exact):
        forward(model, ids[:, :21], one)
    for index in cache.geometry.attention_layers:
        layer = cache.geometry.layers[index]
        new = [torch.zeros(1, layer.kv_heads, 1, layer.key_dim) for _ in range(2)]
        keys, values = copy.deepcopy(cache).update(*new, index)
        exact.layers[index].keys = keys[:, :, :-1].clone()
        exact.layers[index].values = values[:, :, :-1].clone()
    found = []
    for one in (cache, exact):
        if gradients:
            given = {cache_argument(model.get_decoder()): one}
            found.append(model(ids[:, 21:], **given).logits.detach())
        else:
            found.append(forward(model, ids[:, 21:], one))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_beams_and_turns(
    tiny_once: Callable[..., Any], generate: Callable[..., Any], name: str
) -> None:
    model, ids = tiny_once(name), prompt(2)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    texts = []
    for make in (
        lambda: DynamicCache(config=model.get_decoder().config),
        lambda: QuantizedCache.from_model(model, "none"),
    ):
        cache = make()
        text = generate(model, ids, cache, 6, attention_mask=mask)
        more = torch.cat([text, prompt(2, 4)], 1)
        wide = torch.cat([mask, torch.ones(2, more.shape[1] - 21, dtype=torch.long)], 1)
        texts.append(generate(model, more, cache, 6, attention_mask=wide))
        texts.append(generate(model, ids, make(), 6, attention_mask=mask, num_beams=3))
    assert torch.equal(texts[0], texts[2])
    assert torch.equal(texts[1], texts[3])
