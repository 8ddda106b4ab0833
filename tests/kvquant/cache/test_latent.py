"""Multi-head latent attention: latent and rotary part have formats and widths of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

from kvquant.cache.cache import QuantizedCache
from kvquant.errors import SchemeError
from kvquant.presets import preset
from kvquant.quantize.codec import Codec

RANK, ROTARY, TOKENS = 16, 4, 21


def prompt(tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, 128, (1, tokens), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["deepseek", "deepseek_v32"])
def model(request: pytest.FixtureRequest, tiny_once: Callable[..., Any]) -> Any:
    if request.param == "deepseek_v32" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("this version of Transformers caches DeepSeek V3.2 per head")
    return tiny_once(request.param)


def put_in(forward: Callable[..., Any], model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent and rotary part of the first layer, as the model makes them."""
    cache = DynamicCache(config=model.config)
    forward(model, prompt(), cache)
    return cache.layers[0].keys, cache.layers[0].values


def read_back(cache: QuantizedCache) -> tuple[torch.Tensor, torch.Tensor]:
    new = torch.zeros(1, 1, 1, RANK), torch.zeros(1, 1, 1, ROTARY)
    latent, rotary = copy.deepcopy(cache).update(*new, 0)
    return latent[:, :, :-1], rotary[:, :, :-1]


def through_codes(states: torch.Tensor, name: str) -> torch.Tensor:
    codec = Codec(preset(name).key, states.shape[3], torch.float32)
    out = torch.empty_like(states)
    codec.decode_reference(codec.encode_reference(states), out)
    return out


@pytest.mark.parametrize("scheme", ["int8", "fp8", "bf16"])
def test_the_latent_is_quantized_and_the_rotary_part_exact(
    model: Any, forward: Callable[..., Any], scheme: str
) -> None:
    cache = QuantizedCache.from_model(model, scheme)
    forward(model, prompt(), cache)
    latent, rotary = put_in(forward, model)
    found, exact = read_back(cache)
    assert (tuple(found.shape), tuple(exact.shape)) == ((1, 1, 21, RANK), (1, 1, 21, ROTARY))
    assert torch.equal(exact, rotary)
    torch.testing.assert_close(found, through_codes(latent, scheme), rtol=1e-6, atol=1e-6)
    assert not torch.equal(found, latent)


@pytest.mark.parametrize("rotary_format", ["int8", "fp8", "bf16"])
def test_the_rotary_part_is_quantized_where_that_is_asked_for(
    model: Any, forward: Callable[..., Any], rotary_format: str
) -> None:
    cache = QuantizedCache.from_model(model, "none", rotary_format=rotary_format)
    forward(model, prompt(), cache)
    latent, rotary = put_in(forward, model)
    found, coded = read_back(cache)
    assert torch.equal(found, latent)
    torch.testing.assert_close(coded, through_codes(rotary, rotary_format), rtol=1e-6, atol=1e-6)
    assert not torch.equal(coded, rotary)


def test_an_unknown_rotary_format_is_refused(model: Any) -> None:
    with pytest.raises(SchemeError, match="unknown scheme 'int9'"):
        QuantizedCache.from_model(model, "int8", rotary_format="int9")


@pytest.mark.parametrize(
    ("scheme", "changes", "row"),
    [
        ("none", {}, 4 * 20),
        ("int8", {}, (16 + 2) + 4 * 4),
        ("int8", {"rotary_format": "int8"}, (16 + 2) + (4 + 2)),
        ("int4", {"sink_tokens": 0}, (8 + 4) + 4 * 4),
        ("int4", {"sink_tokens": 0, "rotary_format": "bf16"}, (8 + 4) + 2 * 4),
        ("int3", {"sink_tokens": 0, "rotary_format": "none"}, (6 + 4) + 4 * 4),
        ("fp8", {"rotary_format": "fp8"}, (16 + 2) + (4 + 2)),
    ],
)
def test_bytes_of_a_token(
    tiny_once: Callable[..., Any],
    forward: Callable[..., Any],
    scheme: str,
    changes: dict[str, Any],
    row: int,
) -> None:
    model = tiny_once("deepseek")
    cache = QuantizedCache.from_model(model, scheme, **changes)
    forward(model, prompt(), cache)
    assert cache.live_nbytes() == 2 * TOKENS * row


def test_groups_of_the_latent_beside_single_rotary_parts(
    tiny_once: Callable[..., Any], forward: Callable[..., Any], generate: Callable[..., Any]
) -> None:
    """Four groups of 4 and a residual of 5: 16 quantized tokens, then 32 after 12 more."""
    model = tiny_once("deepseek")
    cache = QuantizedCache.from_model(model, "int4-kivi", group_size=4, residual_length=5)
    forward(model, prompt(), cache)
    latent, rotary = put_in(forward, model)
    found, exact = read_back(cache)
    assert torch.equal(exact, rotary)
    assert torch.equal(found[:, :, 16:], latent[:, :, 16:])
    assert not bool((found[:, :, :16] == latent[:, :, :16]).all(-1).any())
    generate(model, torch.cat([prompt(), prompt(1)], 1), cache, 12)
    assert cache.get_seq_length() == 33
    assert cache.live_nbytes() == 2 * (28 * 8 + 7 * 4 * RANK + 5 * 4 * RANK + 33 * 4 * ROTARY)


def test_what_the_indexer_keeps_is_exact_and_counted(
    tiny_once: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    if Version(transformers.__version__) < Version("5.24"):
        pytest.skip("this version of Transformers caches DeepSeek V3.2 per head")
    model = tiny_once("deepseek_v32")
    cache, exact = QuantizedCache.from_model(model, "int4"), DynamicCache(config=model.config)
    for one in (cache, exact):
        forward(model, prompt(), one)
    assert torch.equal(cache.layers[0].indexer_keys, exact.layers[0].indexer_keys)
    per_layer = 4 * 4 * 20 + 17 * (8 + 4 + 4 * 4)
    assert cache.live_nbytes() == 2 * (per_layer + 21 * 8 * 4)
    for layer in cache.layers:
        layer.crop(-3)
        assert layer.get_seq_length() == layer.indexer_keys.shape[1] == 18
