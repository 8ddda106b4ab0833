"""G4, huggingface/transformers#40099 with PR#40144, PR#48700: a config that was used up.

A second call lost its backend, a second model got the first one's number of layers, and the
class's own example raised. (The README's code blocks are run by tests/test_readme.py.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvquant import QuantizedCache
from kvquant.errors import InputError
from kvquant.presets import preset


def ids() -> torch.Tensor:
    return torch.randint(3, 128, (1, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("order", [(2, 5), (5, 2)])
def test_one_scheme_serves_two_models_again_and_again(
    tiny_once: Callable[..., Any], generate: Callable[..., Any], order: tuple[int, int]
) -> None:
    scheme = preset("int4-kivi", group_size=4, residual_length=4)
    layers = {0: "none", -1: preset("int8")}
    asked = {"scheme": scheme, "layers": layers}
    before, texts = copy.deepcopy(asked), {}
    for turn in range(3):
        for count in order:
            model = tiny_once("llama", num_hidden_layers=count)
            cache = QuantizedCache.from_model(model, **asked)
            assert len(cache) == count
            formats = [layer.scheme.key.format.name for layer in cache.layers]
            assert formats == ["none", *["int4"] * (count - 2), "int8"]
            text = generate(model, ids(), cache)
            assert turn == 0 or torch.equal(text, texts[count])
            texts[count] = text
            assert asked == before


def test_the_example_of_the_class_runs(
    tiny_once: Callable[..., Any], generate: Callable[..., Any]
) -> None:
    model = tiny_once("llama")
    cache = QuantizedCache.from_model(model, scheme="int4")
    generate(model, ids(), cache)
    assert "all" in cache.summary()


def test_use_cache_false_says_why_not(
    tiny_once: Callable[..., Any], generate: Callable[..., Any]
) -> None:
    model = tiny_once("llama")
    with pytest.raises(InputError, match="use_cache=False and a cache contradict each other"):
        generate(model, ids(), QuantizedCache.from_model(model, "int8"), use_cache=False)


def test_a_cache_is_as_new_after_reset(
    tiny_once: Callable[..., Any], generate: Callable[..., Any]
) -> None:
    model = tiny_once("llama")
    cache = QuantizedCache.from_model(model, "int4-kivi", group_size=4, residual_length=4)
    texts = []
    for beams in (1, 3, 1):
        texts.append(generate(model, ids(), cache, num_beams=beams))
        cache.reset()
    assert torch.equal(texts[0], texts[2])
