"""G5, huggingface/transformers#48501 with PR#46781: the cache's half.

Each layer is stored in its own width, and layers without keys and values stay of their own class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvquant import QuantizedCache
from kvquant.cache.layer import QuantizedLayer


def ids() -> torch.Tensor:
    return torch.randint(3, 128, (1, 21), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("scheme", "extra"), [("int8", 2), ("fp8", 2), ("bf16", 0)])
def test_heads_of_8_and_16_are_stored_as_such(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], scheme: str, extra: int
) -> None:
    model = tiny_once("gemma4_text", num_kv_shared_layers=0)
    cache = QuantizedCache.from_model(model, scheme)
    forward(model, ids(), cache)
    size = 2 if scheme == "bf16" else 1
    for index, layer in enumerate(cache.layers):
        dim, tokens = ((8, 7), (16, 21))[index % 2]
        stores = layer.stores[0]
        assert [store.codec.dim for store in stores] == [dim, dim]
        assert layer.live_nbytes() == 2 * 2 * tokens * (size * dim + extra)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1"])
@pytest.mark.parametrize("scheme", ["none", "int4"])
def test_recurrent_states_are_left_to_transformers(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], name: str, scheme: str
) -> None:
    """Of the first call, which attends to itself exactly, they are bit for bit the same."""
    model = tiny_once(name)
    exact = DynamicCache(config=model.config)
    cache = QuantizedCache.from_model(model, scheme)
    for one in (exact, cache):
        forward(model, ids(), one)
    states = 0
    for mine, other in zip(cache.layers, exact.layers, strict=True):
        quantized = isinstance(mine, QuantizedLayer)
        assert quantized == hasattr(other, "values"), "a layer with keys is quantized"
        assert quantized or type(mine) is type(other)
        for kind in ("conv_states", "recurrent_states"):
            for place, state in getattr(other, kind, {}).items():
                if state is not None:
                    assert torch.equal(getattr(mine, kind)[place], state)
                    states += state.numel() * state.element_size()
    assert states > 0
    stored = sum(
        QuantizedLayer.live_nbytes(x) for x in cache.layers if isinstance(x, QuantizedLayer)
    )
    assert cache.live_nbytes() == stored + states
