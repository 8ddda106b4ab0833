"""G24, flashinfer-ai/flashinfer#877 and ml-explore/mlx-lm PR#1558: the cache's half.

DeepSeek-V3 caches 16 numbers of the latent and 4 of the rotary part, one head each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from calib.collect import collect
from calib.solve import solve
from kvquant import QuantizedCache
from kvquant.cache.layer import QuantizedLayer
from kvquant.cache.ledger import TokenLedger
from kvquant.cache.workspace import Workspace
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.presets import preset
from kvquant.quantize.codec import Codec
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format


def ids(tokens: int = 9) -> torch.Tensor:
    return torch.randint(3, 128, (1, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("scheme", "changes"),
    [
        ("none", {}),
        ("int8", {"rotary_format": "int8"}),
        ("int4", {}),
        ("int4-kivi", {"group_size": 4, "residual_length": 4}),
    ],
)
def test_generating_past_a_flush(
    tiny_once: Callable[..., Any],
    generate: Callable[..., Any],
    scheme: str,
    changes: dict[str, Any],
) -> None:
    model = tiny_once("deepseek")
    cache = QuantizedCache.from_model(model, scheme, **changes)
    text = generate(model, ids(), cache, 12)
    assert text.shape == (1, 21)
    assert cache.get_seq_length() == 20
    if scheme == "none":
        assert cache.live_nbytes() == 20 * 2 * 20 * 4, "20 numbers a token and layer"
        assert torch.equal(text, generate(model, ids(), None, 12))


@pytest.mark.parametrize("granularity", [g for g in Granularity if g.is_static])
@pytest.mark.parametrize("rotary_format", [None, "int8"])
def test_calibrated_scales_of_both_widths(
    tiny_once: Callable[..., Any],
    forward: Callable[..., Any],
    generate: Callable[..., Any],
    granularity: Granularity,
    rotary_format: str | None,
) -> None:
    model = tiny_once("deepseek")
    how = TensorScheme(tensor_format("int8"), granularity)
    stats = collect(model, ids(64).tolist() * 2, CacheGeometry.from_config(model.config))
    scales = solve(stats, QuantScheme(how, how))
    cache = QuantizedCache.from_model(
        model, "int8", scales, rotary_format=rotary_format, force=True
    )
    exact = DynamicCache(config=model.config)
    for one in (cache, exact):
        forward(model, ids(), one)
    row = 16 + (4 if rotary_format else 4 * 4)
    assert cache.live_nbytes() == 9 * 2 * row, "static scales take nothing a token"
    one = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 4)
    latent, rotary = (part[:, :, :-1] for part in cache.update(*one, 0))
    numbers = scales.layers[0]
    for found, given, slot in (
        (latent, exact.layers[0].keys, numbers.key),
        (rotary, exact.layers[0].values, numbers.value),
    ):
        low, high = (end.float()[:, None, :] for end in slot.range(how))
        inside = torch.minimum(torch.maximum(given, low), high)
        assert bool(((found - inside).abs() <= slot.scale[:, None, :] / 2 * 1.001).all())


def test_widths_are_those_of_the_tensors() -> None:
    """Of a model whose values are wider than its keys, and of one that keeps them per head."""
    scheme = preset("int8")
    for heads, key_dim, value_dim in ((1, 16, 4), (4, 12, 10), (2, 3, 7)):
        shape = LayerGeometry(LayerKind.FULL, heads, key_dim, value_dim)

        def make(slot: str, dtype: Any, device: Any, shape: LayerGeometry = shape) -> Codec:
            dim = shape.key_dim if slot == "key" else shape.value_dim
            return Codec(getattr(scheme, slot), dim, dtype)

        layer = QuantizedLayer(shape, scheme, make, TokenLedger(False), Workspace())
        keys, values = torch.randn(2, heads, 5, key_dim), torch.randn(2, heads, 5, value_dim)
        layer.update(keys, values)
        read = layer.update(keys[:, :, :1], values[:, :, :1])
        assert [tuple(part.shape) for part in read] == [
            (2, heads, 6, key_dim),
            (2, heads, 6, value_dim),
        ]
        assert layer.live_nbytes() == 2 * heads * 6 * (key_dim + 2 + value_dim + 2)
