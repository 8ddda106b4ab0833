"""The caches that are compared, by the names that the tables give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import QuantizedCache as StockCache

from kvquant import QuantizedCache
from kvquant.scales import KVScales, TensorScales

Arms = dict[str, Callable[[], Any]]
"""For each name, what makes an empty cache."""

REFERENCE = "DynamicCache"
STOCK_INT4 = ("stock quanto int4", "stock hqq int4")
STOCK_FP8 = "stock fp8"
STOCK = (*STOCK_INT4, STOCK_FP8)


def speed_arms(model: Any, scales: KVScales) -> Arms:
    """What is timed."""

    def own(scheme: str, **changes: Any) -> Callable[[], Any]:
        return lambda: QuantizedCache.from_model(model, scheme, **changes)

    return {
        REFERENCE: lambda: DynamicCache(config=model.config),
        **_stock_arms(model),
        "int8": own("int8"),
        "int4-kivi": own("int4-kivi"),
        "int4": own("int4", scales=scales),
        "int3": own("int3", scales=scales),
        "fp8": own("fp8", scales=scales),
        "none": own("none"),
    }


def quality_arms(model: Any, scales: KVScales) -> Arms:
    """What is compared with the unquantized cache."""

    def own(scheme: str, **changes: Any) -> Callable[[], Any]:
        return lambda: QuantizedCache.from_model(model, scheme, **changes)

    return {
        **_stock_arms(model),
        "int4": own("int4", scales=scales),
        "int4, 64 exact": own("int4", scales=scales, residual_length=64),
        "int4, 128 exact": own("int4", scales=scales, residual_length=128),
        "int4, means fixed": own("int4", scales=with_fixed_means(scales)),
        "int4, uncalibrated": own("int4"),
        "int4-kivi": own("int4-kivi"),
        "int3": own("int3", scales=scales),
        "int3, 128 exact": own("int3", scales=scales, residual_length=128),
        "int8": own("int8"),
        "fp8": own("fp8", scales=scales),
        "fp8, uncalibrated": own("fp8"),
        "none": own("none"),
    }


def with_fixed_means(scales: KVScales) -> KVScales:
    """`scales` with no mean turned: what the form that costs nothing when reading is worth."""

    def fixed(slot: TensorScales) -> TensorScales:
        pairs = slot.turned_pairs
        return slot if pairs is None else replace(slot, turned=torch.zeros_like(pairs))

    layers = {
        index: replace(layer, key=fixed(layer.key), value=fixed(layer.value))
        for index, layer in scales.layers.items()
    }
    return replace(scales, layers=layers)


def _stock_arms(model: Any) -> Arms:
    def stock(backend: str, **options: Any) -> Callable[[], Any]:
        return lambda: StockCache(backend, model.config, **options)

    quanto, hqq = STOCK_INT4
    return {
        quanto: stock("quanto", nbits=4),
        hqq: stock("hqq", nbits=4, axis_key=1, axis_value=1),
        STOCK_FP8: stock("fp8"),
    }
