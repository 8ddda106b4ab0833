"""Bits per value where heads are wider than SmolLM2's, metadata and sinks counted."""

from __future__ import annotations

import torch

from kvquant.cache.layer import QuantizedLayer
from kvquant.cache.ledger import TokenLedger
from kvquant.geometry import LayerGeometry, LayerKind
from kvquant.presets import preset
from kvquant.quantize.codec import Codec

from .report import Limit, Row

TOKENS, KV_HEADS, HEAD_DIM = 4096, 8, 128
PRESETS = ("int8", "int4-kivi", "int4", "int3")
# Positions that means turn with: int32 per token, once for all layers; here for this one layer.
POSITION_BYTES = 4


def run() -> tuple[list[Row], list[Limit]]:
    """Rows and limits of one layer filled with random numbers."""
    values = 2 * TOKENS * KV_HEADS * HEAD_DIM
    sizes = {name: layer_nbytes(name) for name in PRESETS}
    rows = [
        {
            "cache": name,
            "live, MB": f"{live / 1e6:.3f}",
            "bits/value": f"{8 * live / values:.3f}",
            "of bf16": f"{live / (2 * values):.3f}",
        }
        for name, live in sizes.items()
    ]
    limit = Limit(
        f"bits per value at {TOKENS:,} tokens, int4, heads of 128", 8 * sizes["int4"] / values, 4.3
    )
    return rows, [limit]


def layer_nbytes(name: str) -> int:
    """Live bytes of a layer with the preset `name` after `TOKENS` tokens in float32."""
    scheme = preset(name)

    def codec(slot: str, dtype: torch.dtype, device: torch.device) -> Codec:
        return Codec(getattr(scheme, slot), HEAD_DIM, dtype)

    geometry = LayerGeometry(LayerKind.FULL, KV_HEADS, HEAD_DIM, HEAD_DIM)
    layer = QuantizedLayer(geometry, scheme, codec, TokenLedger(False), None)
    states = torch.randn(2, 1, KV_HEADS, TOKENS, HEAD_DIM, generator=torch.manual_seed(0))
    layer.update(states[0], states[1])
    return layer.live_nbytes() + POSITION_BYTES * TOKENS * scheme.key.center
