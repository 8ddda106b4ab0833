"""G7, huggingface/transformers#37908: compiled decoding compiled again and again as it went on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from kvquant import QuantizedCache
from kvquant.cache.transformers_compat import cache_argument

STEPS = 24
FLUSHES = {"residual_length": 4, "group_size": 8}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Without a limit, which would hide how often there is something to compile."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        yield
    torch._dynamo.reset()


def test_a_compiled_model_is_compiled_a_few_times_and_then_no_more(
    tiny: Callable[..., Any], generate: Callable[..., Any]
) -> None:
    """24 tokens across three flushes of key groups."""
    model = tiny("llama", num_hidden_layers=1)
    ids = torch.randint(3, 128, (1, 12), generator=torch.Generator().manual_seed(1))
    cache = QuantizedCache.from_model(model, "int4-kivi", **FLUSHES)
    eager = generate(model, ids, QuantizedCache.from_model(model, "int4-kivi", **FLUSHES), STEPS)
    counter = CompileCounter()
    compiled = torch.compile(model.forward, backend=counter)
    given, text, counts = {cache_argument(model.get_decoder()): cache}, ids, []
    with torch.no_grad():
        for _ in range(STEPS):
            new = ids if text is ids else text[:, -1:]
            text = torch.cat([text, compiled(new, **given).logits[:, -1:].argmax(-1)], dim=1)
            counts.append(counter.frame_count)
    assert torch.equal(text, eager)
    assert counts[0] > 0
    assert counts[3] == counts[-1], f"compilations after each token: {counts}"


def test_generate_does_not_compile(tiny_once: Callable[..., Any]) -> None:
    """It asks the cache, which says so for each kind of layer."""
    for name in ("llama", "mistral", "deepseek", "falcon_h1"):
        cache = QuantizedCache.from_model(tiny_once(name), "int8")
        assert not cache.is_compileable
        assert not any(layer.is_compileable for layer in cache.layers)
