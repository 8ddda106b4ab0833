"""G15, NVIDIA/Model-Optimizer PR#381: the cache's half: what is stored bounds the error.

Scales that are kept in bf16 or fp16 are rounded up, and codes are computed with what is kept, so
that no value is further off than half of the scale that is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvquant import QuantizedCache
from kvquant.cache.slot import SlotStore
from kvquant.presets import preset
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, tensor_format

TOKENS = 32
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def dynamic(name: str, symmetric: bool, scale_format: str, group: int | None = None) -> QuantScheme:
    slot = TensorScheme(
        tensor_format(name),
        Granularity.PER_TOKEN if group is None else Granularity.PER_GROUP,
        symmetric,
        group_size=group,
        scale_format=scale_format,
    )
    return QuantScheme(slot, slot)


SCHEMES = [
    preset("int8"),
    preset("int4-kivi", residual_length=0, group_size=8),
    *(
        dynamic(name, symmetric, scale_format, group)
        for name in ("int8", "int4", "int3")
        for symmetric in (True, False)
        for scale_format in ("bf16", "fp16", "fp32")
        for group in (None, 8)
    ),
]


@pytest.fixture(scope="module")
def filled(tiny: Callable[..., Any], forward: Callable[..., Any]) -> tuple[Any, DynamicCache]:
    """A bf16 model with a key outlier, and what it caches of a text."""
    model = tiny("qwen2").to(torch.bfloat16)
    ids = torch.randint(3, 128, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    cache = DynamicCache(config=model.config)
    forward(model, ids, cache)
    return model, cache


def read(store: SlotStore) -> torch.Tensor:
    """Everything that is stored, in float32."""
    batch, heads = store.coded.tensors[0].shape[:2]
    out = torch.empty(batch, heads, store.length, store.codec.dim)
    store.read(out, lambda start, stop: None)
    return out


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_no_value_is_further_off_than_half_of_its_stored_scale(
    filled: tuple[Any, DynamicCache], scheme: QuantScheme
) -> None:
    model, exact = filled
    cache = QuantizedCache.from_model(model, scheme)
    for index, layer in enumerate(exact.layers):
        cache.update(layer.keys, layer.values, index)
        states = layer.keys, layer.values
        for store, expected in zip(cache.layers[index].stores[0], states, strict=True):
            kept = store.coded.rows()["scale"]
            assert kept.dtype == DTYPES[store.codec.scheme.scale_format]
            unit = store.codec.unit
            scale = kept[..., None] if unit == 1 else kept.repeat_interleave(unit, dim=2)
            scale = scale.float()
            error = (read(store) - expected.float()).abs()
            assert bool((error <= scale / 2 * 1.001).all())
            assert bool((error > scale / 4).any()), "the bound is not idle"
